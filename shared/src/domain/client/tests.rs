//! What a client may write, case by case.

use serde_json::json;

use super::*;
use crate::domain::ExecutionMeta;

const FILL: Fill<'static> = Fill { new_id: &MessageId::random, now: 1.0 };

fn text(role: &str) -> Json {
    json!({"role": role, "content": [{"type": "text", "text": "hi"}]})
}

fn result() -> Json {
    json!({"type": "tool_result", "call_id": "c1", "output": 1})
}

fn run(messages: Json, is_resume: bool) -> Result<ClientInput, ClientError> {
    let locs = InputLocs { messages: &["body".into(), "messages".into()], state: &["body".into(), "state".into()] };
    run_input(Some(&messages), None, is_resume, &locs, &Limits::default(), &FILL)
}

fn run_error(messages: Json) -> FieldError {
    match run(messages, false) {
        Err(ClientError::Fields(mut errors)) => errors.remove(0),
        other => panic!("{other:?}"),
    }
}

fn log(messages: Json) -> Result<Vec<Message>, ClientError> {
    log_messages(Some(&messages), &Limits::default(), &FILL)
}

fn state() -> ThreadState {
    let mut known: Message = Message::text(Role::Assistant, "said");
    known.message_id = MessageId::from("known");
    ThreadState {
        context: vec![known],
        context_summary: None,
        execution_meta: ExecutionMeta::fresh("t"),
        fields: json!({"topic": "none", "nested": {"a": 1, "b": {"c": 2}}}).as_object().unwrap().clone(),
    }
}

fn put(patch: Json) -> Result<StateChange, ClientError> {
    put_state(Some(&patch), &state(), &Limits::default(), &FILL)
}

fn refusal<T: std::fmt::Debug>(result: Result<T, ClientError>) -> String {
    match result {
        Err(ClientError::Refused(text)) => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_run_takes_user_messages_and_bare_tool_results() {
    let input = run(json!([text("user"), {"role": "tool", "content": [result()]}]), false).unwrap();

    assert_eq!(input.messages.iter().map(|message| message.role).collect::<Vec<_>>(), [Role::User, Role::Tool]);
    assert!(run(json!([{"role": "user", "content": [], "tools_calls": []}]), false).is_ok());
}

#[test]
fn a_run_refuses_other_roles_and_mixed_results() {
    for refused in [
        text("assistant"),
        text("system"),
        text("tool"),
        json!({"role": "tool", "content": []}),
        json!({"role": "tool", "content": [{"type": "text", "text": "hi"}, result()]}),
        json!({"role": "user", "content": [result()]}),
    ] {
        let error = run_error(json!([text("user"), refused]));

        assert_eq!(error.loc, ["body".into(), "messages".into(), Json::from(1), "role".into()]);
        assert!(error.msg.starts_with("Value error, messages[1] "), "{}", error.msg);
    }
}

#[test]
fn a_tool_call_of_a_client_is_refused_before_its_role() {
    let call = json!({"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}});
    for refused in [
        json!({"role": "assistant", "content": [], "tools_calls": [call]}),
        json!({"role": "user", "content": [{"type": "tool_call", "id": "c", "name": "add", "args": {}}]}),
        json!({"role": "user", "content": [{"type": "remote_tool_call", "id": "c", "name": "add"}]}),
    ] {
        let error = run_error(json!([text("user"), refused]));

        assert_eq!(error.loc, ["body", "messages"]);
        assert_eq!(error.msg, "Value error, messages[1] carries a tool call; only the model may request tools");
        assert_eq!(error.kind, "value_error");
    }
}

#[test]
fn a_run_needs_a_message_or_a_resume() {
    let error = run_error(json!([]));

    assert_eq!((error.loc, error.kind), (vec!["body".into()], "value_error"));
    assert_eq!(error.msg, "Value error, messages must contain at least one message");
    assert!(run(json!([]), true).is_ok());
}

#[test]
fn initial_state_leaves_the_engines_fields_out() {
    let locs = InputLocs { messages: &[], state: &["body".into(), "initial_state".into()] };
    let given = json!({"context": [], "execution_meta": {}, "context_summary": "x", "current_node": "b", "topic": 1});
    let take = |state: &Json| run_input(None, Some(state), true, &locs, &Limits::default(), &FILL);

    assert_eq!(Json::Object(take(&given).unwrap().state), json!({"current_node": "b", "topic": 1}));
    assert!(matches!(take(&json!([])), Err(ClientError::Fields(errors)) if errors[0].kind == "dict_type"));
}

/// C89: the whole input has a limit of its own, and so has the number of its keys.
#[test]
fn a_run_input_over_its_size_is_refused() {
    let limits = Limits { run_input_bytes_max: 400, state_key_count_max: 2, ..Limits::default() };
    let locs = InputLocs { messages: &[], state: &[] };
    let take = |state: Json| run_input(Some(&json!([text("user")])), Some(&state), false, &locs, &limits, &FILL);

    assert!(take(json!({"a": 1, "b": 2})).is_ok());
    assert!(matches!(take(json!({"a": "x".repeat(300)})), Err(ClientError::Fields(e)) if e[0].msg.contains("400")));
    assert!(matches!(take(json!({"a": 1, "b": 2, "c": 3})), Err(ClientError::Fields(e)) if e[0].kind == "too_long"));
}

#[test]
fn the_log_takes_three_roles_and_no_results() {
    assert_eq!(log(json!([text("user"), text("assistant"), text("system")])).unwrap().len(), 3);
    assert_eq!(refusal(log(json!([]))), "messages must not be empty");
    assert!(
        matches!(log_messages(None, &Limits::default(), &FILL), Err(ClientError::Fields(e)) if e[0].kind == "missing")
    );
    for refused in [text("tool"), json!({"role": "user", "content": [result()]})] {
        let Err(ClientError::Fields(errors)) = log(json!([refused])) else { panic!("taken") };
        assert!(errors[0].msg.contains("carries a tool result"), "{}", errors[0].msg);
    }
    let Err(ClientError::Fields(errors)) =
        log(json!([{"role": "user", "content": [{"type": "tool_call", "id": "a", "name": "b"}]}]))
    else {
        panic!("taken")
    };
    assert_eq!(errors[0].msg, "Value error, messages[0] carries a tool call; only the model may request tools");
    assert_eq!(errors[0].loc, ["body", "messages"]);
}

#[test]
fn pieces_never_enter_the_log() {
    let mut piece = text("user");
    piece["delta"] = json!(true);

    assert_eq!(log(json!([piece])), Ok(Vec::new()));
}

#[test]
fn an_edited_state_keeps_what_it_knows_and_adds_user_messages() {
    let change = put(json!({"context": [{"message_id": "known", "role": "robot"}, text("user")]})).unwrap();

    assert_eq!(change.messages.len(), 1);
    assert_eq!(change.messages[0].role, Role::User);
    for refused in [text("assistant"), text("system"), json!({"role": "tool", "content": [result()]})] {
        assert!(refusal(put(json!({"context": [refused]}))).contains("messages[0] is new"));
    }
    assert_eq!(
        refusal(put(json!({"context": [{"role": "assistant", "content": [], "tools_calls": [{"id": "x"}]}]}))),
        "messages[0] carries a tool call; only the model may request tools"
    );
}

#[test]
fn an_edited_state_merges_objects_and_skips_nulls() {
    let change = put(json!({
        "topic": "dogs", "nested": {"a": null, "b": {"d": 3}}, "execution_meta": {"step": 9}, "unknown": 1,
        "context_summary": "short",
    }));

    let expected = json!({"context_summary": "short", "topic": "dogs", "nested": {"a": 1, "b": {"c": 2, "d": 3}}});
    assert_eq!(Json::Object(change.unwrap().fields), expected);
    assert_eq!(put(json!({"topic": "none", "nested": null})), Ok(StateChange::default()));
}

#[test]
fn an_edited_state_of_the_wrong_shape_says_where() {
    let loc = |patch: Json| match put(patch) {
        Err(ClientError::Fields(errors)) => Json::Array(errors[0].loc.clone()),
        other => panic!("{other:?}"),
    };

    assert_eq!(loc(json!([])), json!(["body", "state"]));
    assert_eq!(loc(json!({"context": "str"})), json!(["body", "state", "context"]));
    assert_eq!(loc(json!({"context": [{"role": "user"}]})), json!(["body", "state", "context", 0, "content"]));
    assert_eq!(loc(json!({"context_summary": 1})), json!(["body", "state", "context_summary"]));
    assert!(matches!(
        put_state(None, &state(), &Limits::default(), &FILL),
        Err(ClientError::Fields(errors)) if errors[0].kind == "missing"
    ));
}

fn any_json() -> impl proptest::strategy::Strategy<Value = Json> {
    use proptest::prelude::*;
    const WORDS: [&str; 9] = ["user", "tool", "robot", "text", "tool_result", "tool_call", "image", "x", ""];
    const KEYS: [&str; 11] =
        ["role", "content", "type", "text", "media", "call_id", "usages", "metadata", "message_id", "delta", "url"];
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        any::<f64>().prop_map(|number| serde_json::Number::from_f64(number).map_or(Json::Null, Json::Number)),
        proptest::sample::select(&WORDS[..]).prop_map(Json::from),
    ];
    leaf.prop_recursive(4, 32, 4, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Json::from),
            proptest::collection::vec((proptest::sample::select(&KEYS[..]), inner), 0..6).prop_map(|entries| {
                Json::Object(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
            }),
        ]
    })
}

proptest::proptest! {
    /// Whatever a client sends is taken or refused; what is taken reads the same a second time.
    #[test]
    fn any_json_is_taken_or_refused(value in any_json()) {
        if let Ok(messages) = log(value.clone()) {
            let wire = crate::domain::state::to_json(&messages);
            proptest::prop_assert!(messages.is_empty() || log(wire) == Ok(messages));
        }
        let _ = run(value.clone(), true);
        let _ = put(serde_json::json!({"context": value.clone(), "topic": value}));
    }
}
