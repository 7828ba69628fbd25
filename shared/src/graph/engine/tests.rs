//! What follows a node, branch by branch.

use serde_json::json;

use super::*;
use crate::domain::{CallRef, ExecutionMeta, Role};
use crate::graph::admission::RunInput;
use crate::graph::rehearsal::{Ended, Rehearsal, says};
use crate::graph::{Command, GraphBuilder, Interrupt, NodeContext, START};

fn builder() -> GraphBuilder {
    Graph::builder("g")
        .field("topic", "none")
        .node("a", says(&["a"]))
        .node("b", says(&["b"]))
        .entry("a")
        .edge("a", "b")
        .edge("b", END)
}

fn graph() -> Graph {
    builder().build().unwrap()
}

fn state() -> ThreadState {
    let meta = ExecutionMeta::fresh("t").running_at("a", 1);
    ThreadState {
        context: Vec::new(),
        context_summary: None,
        execution_meta: meta,
        fields: json!({"topic": "none"}).as_object().unwrap().clone(),
    }
}

const A: Place<'static> = Place { node: "a", seq: 1, step_limit: 25 };

fn patch(patch: Patch) -> Result<Outcome, NodeError> {
    Ok(Outcome { command: Command { update: patch, goto: None }, ..Outcome::default() })
}

fn goto(target: &str) -> Result<Outcome, NodeError> {
    let command = Command { update: Patch::default(), goto: Some(target.to_owned()) };
    Ok(Outcome { command, ..Outcome::default() })
}

fn failure(advance: &Advance) -> &RunError {
    match &advance.next {
        Next::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_node_is_followed_by_the_next_one() {
    let advance = advance(&graph(), A, &state(), Ok(Outcome::default()));

    assert_eq!(advance.next, Next::Node("b".into()));
    assert_eq!((advance.meta.current_node.as_str(), advance.meta.step), ("b", 2));
    assert_eq!(advance.meta.status, ExecutionStatus::Running);
}

#[test]
fn the_last_node_stays_the_current_one() {
    let place = Place { node: "b", ..A };

    let advance = advance(&graph(), place, &state(), Ok(Outcome::default()));

    assert_eq!(advance.next, Next::Completed);
    assert_eq!((advance.meta.current_node.as_str(), advance.meta.status), ("b", ExecutionStatus::Completed));
    assert_eq!(advance.meta.step, 2);
}

#[test]
fn a_stop_keeps_the_output_and_names_the_node_that_did_not_run() {
    let said = patch(Patch { messages: vec![Message::text(Role::Assistant, "a")], ..Patch::default() });

    let advance = advance(&graph(), A, &state(), said);

    assert_eq!(advance.messages.len(), 1);
    let meta = &advance.stopped_meta;
    assert_eq!((meta.current_node.as_str(), meta.interrupted_node.as_deref()), ("b", Some("b")));
    assert_eq!(
        (meta.status, meta.interrupt_reason.as_deref()),
        (ExecutionStatus::InterruptedAfter, Some("stop_requested"))
    );
    assert_eq!(meta.interrupt_data, Some(json!({"source": "stop", "info": "requested via is_stopped_requested"})));
    assert_eq!(meta.stop_current_execution, "none");
}

#[test]
fn a_failure_keeps_the_node_and_changes_nothing_else() {
    let mut before = state();
    before.execution_meta.step = 3;
    let error = NodeError::Failed { code: "NODE_001".into(), message: "kaboom in a".into(), retryable: true };

    let advance = advance(&graph(), A, &before, Err(error));

    let failed = failure(&advance);
    assert_eq!((failed.code.as_str(), failed.message.as_str()), ("NODE_001", "Error in node 'a': kaboom in a"));
    assert_eq!((failed.node.as_deref(), failed.transient), (Some("a"), true));
    assert_eq!((advance.meta.current_node.as_str(), advance.meta.step), ("a", 3));
    assert_eq!(advance.meta.status, ExecutionStatus::Error);
    assert_eq!(advance.meta.internal_data["error"], "[NODE_001] Error in node 'a': kaboom in a");
    assert!(advance.messages.is_empty() && advance.fields.is_empty());
}

/// C16: a jump to nowhere fails where it was said, and nothing of the target is stored.
#[test]
fn a_jump_to_nowhere_fails_the_node_that_said_it() {
    for (graph, result) in [
        (graph(), goto("NOPE")),
        (builder().conditional("a", |_: &ThreadState| "NOPE").build().unwrap(), Ok(Outcome::default())),
    ] {
        let advance = advance(&graph, A, &state(), result);

        let error = failure(&advance);
        assert_eq!(error.code, "GRAPH_007");
        assert!(error.message.contains("'a'") && error.message.contains("'NOPE'"), "{}", error.message);
        assert_eq!(advance.meta.current_node, "a");
    }
}

#[test]
fn a_condition_that_fails_fails_the_run() {
    let route = |_: &ThreadState| Err::<&str, _>("no idea");
    let graph = builder().conditional("a", route).build().unwrap();

    let advance = advance(&graph, A, &state(), Ok(Outcome::default()));

    let error = failure(&advance);
    assert_eq!(error.code, "GRAPH_ROUTING_001");
    assert!(error.message.contains("no idea"), "{}", error.message);
}

#[test]
fn goto_wins_over_edges_and_conditions() {
    let graph = builder().conditional("a", |_: &ThreadState| "b").build().unwrap();

    for (target, next) in [("a", Next::Node("a".into())), (START, Next::Node(START.into())), (END, Next::Completed)] {
        assert_eq!(advance(&graph, A, &state(), goto(target)).next, next);
    }
}

#[test]
fn edges_are_asked_in_order_and_conditions_before_static_ones() {
    let next = |builder: GraphBuilder| advance(&builder.build().unwrap(), A, &state(), Ok(Outcome::default())).next;
    let two =
        |route: &'static str| builder().conditional_map("a", move |_: &ThreadState| route, [("x", "a"), ("y", END)]);

    assert_eq!(next(two("x")), Next::Node("a".into()));
    assert_eq!(next(two("y")), Next::Completed);
    // No entry equals it: the static edge.
    assert_eq!(next(two("z")), Next::Node("b".into()));
    // The next condition, then.
    assert_eq!(next(two("z").conditional("a", |_: &ThreadState| END)), Next::Completed);
    // A value that names nothing, and no static edge: the end.
    let bare = Graph::builder("g").node("a", says(&["a"])).entry("a");
    assert_eq!(next(bare.conditional("a", |_: &ThreadState| true)), Next::Completed);
    assert_eq!(next(builder().edge("a", END)), Next::Node("b".into()));
}

#[test]
fn a_condition_sees_the_state_after_its_node() {
    let route = |state: &ThreadState| state.fields["topic"].clone();
    let graph = builder().conditional_map("a", route, [("dogs", END)]).build().unwrap();
    let fields = json!({"topic": "dogs"}).as_object().unwrap().clone();

    let advance = advance(&graph, A, &state(), patch(Patch { fields, ..Patch::default() }));

    assert_eq!(advance.next, Next::Completed);
    assert_eq!(advance.fields["topic"], "dogs");
}

/// C17: N steps are N − 1 nodes, and the output of the last one is kept.
#[test]
fn the_step_limit_counts_the_start() {
    let at = |seq| {
        let place = Place { seq, step_limit: 4, ..A };
        advance(&graph(), place, &state(), Ok(Outcome::default()))
    };

    assert_eq!(at(2).next, Next::Node("b".into()));
    let over = at(3);
    let error = failure(&over);
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("RECURSION_001", "Graph execution exceeded recursion limit: 4")
    );
    assert_eq!(over.meta.status, ExecutionStatus::Error);
    // The last node may end at the limit.
    let place = Place { node: "b", seq: 3, step_limit: 4 };
    assert_eq!(advance(&graph(), place, &state(), Ok(Outcome::default())).next, Next::Completed);
}

#[test]
fn pauses_are_written_as_the_wire_shows_them() {
    let before = builder().interrupt_before(["b"]).build().unwrap();
    let after = builder().interrupt_after(["a"]).interrupt_before(["b"]).build().unwrap();

    for (graph, status, node, reason) in [
        (before, ExecutionStatus::InterruptedBefore, "b", "interrupt_before: b"),
        (after, ExecutionStatus::InterruptedAfter, "a", "interrupt_after: a"),
    ] {
        let advance = advance(&graph, A, &state(), Ok(Outcome::default()));

        assert_eq!(advance.next, Next::Interrupted(Vec::new()));
        let meta = &advance.meta;
        assert_eq!((meta.status, meta.current_node.as_str(), meta.step), (status, "b", 2));
        assert_eq!((meta.interrupted_node.as_deref(), meta.interrupt_reason.as_deref()), (Some(node), Some(reason)));
        assert_eq!(meta.interrupt_data, None);
    }
}

#[test]
fn a_question_pauses_inside_its_node() {
    let question =
        Interrupt { value: json!({"amount": 42}), message: Some("Refund 42?".into()), ..Interrupt::default() };
    let asks = Err(NodeError::Interrupt { position: 1, question: Box::new(question) });

    let advance = advance(&graph(), A, &state(), asks);

    let Next::Interrupted(questions) = &advance.next else { panic!("{:?}", advance.next) };
    let [pending] = questions.as_slice() else { panic!("{questions:?}") };
    assert_eq!(pending.key, "node:a:1");
    assert!(pending.id.len() == 36 && pending.id.starts_with("int_"), "{}", pending.id);
    let meta = &advance.meta;
    assert_eq!((meta.status, meta.current_node.as_str(), meta.step), (ExecutionStatus::InterruptedBefore, "a", 1));
    assert_eq!(meta.interrupt_reason.as_deref(), Some("interrupt"));
    assert_eq!(meta.interrupt_data.as_ref().unwrap()["interrupt"]["message"], "Refund 42?");
    assert_eq!(advance.stopped_meta.interrupted_node.as_deref(), Some("a"));
}

/// Results of calls that needed no answer are kept with the pause; answers given before stay.
#[test]
fn several_questions_pause_with_what_is_done() {
    let mut before = state();
    before.execution_meta.internal_data.insert("interrupt_resume".into(), json!({"gate:c0": {"outcome": "approved"}}));
    let ask = |kind, call: &str, key: String| Question {
        call: Some(CallRef::new("m".into(), call, "refund", json!({}))),
        ..Question::new(kind, "a", key, "tool_call")
    };
    let remote = ask(QuestionKind::Remote, "c1", "remote:c1".into());
    let gate = ask(QuestionKind::Gate, "c2", "gate:c2".into());
    let update = Patch { messages: vec![Message::text(Role::Tool, "done")], ..Patch::default() };
    let command = Command { update, goto: Some("nowhere".into()) };
    let mixed = Outcome { command, questions: vec![remote.clone(), gate.clone()] };
    let only_remote = Outcome { questions: vec![remote.clone()], ..Outcome::default() };

    let mixed = advance(&graph(), A, &before, Ok(mixed));
    let only_remote = advance(&graph(), A, &before, Ok(only_remote));

    assert_eq!(mixed.next, Next::Interrupted(vec![remote.clone(), gate.clone()]));
    assert_eq!(mixed.messages.len(), 1);
    assert!(mixed.meta.internal_data.contains_key("interrupt_resume"));
    assert_eq!(mixed.meta.interrupt_data, Some(json!({"interrupt": gate.wire()})));
    assert_eq!((mixed.meta.current_node.as_str(), mixed.meta.step), ("a", 1));
    assert_eq!(only_remote.meta.status, ExecutionStatus::InterruptedAfter);
    assert_eq!(only_remote.meta.interrupt_reason.as_deref(), Some("remote_tool_call"));
    assert_eq!((only_remote.meta.current_node.as_str(), only_remote.meta.interrupt_data), ("a", None));
}

#[test]
fn a_question_nobody_could_answer_fails_its_node() {
    let question = Interrupt { response_schema: Some(json!({"type": "nonsense"})), ..Interrupt::default() };

    let advance =
        advance(&graph(), A, &state(), Err(NodeError::Interrupt { position: 0, question: Box::new(question) }));

    assert!(failure(&advance).message.contains("response_schema is no JSON Schema"));
}

#[test]
fn messages_are_added_once_and_pieces_never() {
    let mut before = state();
    let old = Message::text(Role::User, "old");
    before.context.push(old.clone());
    let mut piece = Message::text(Role::Assistant, "pie");
    piece.delta = true;
    let new = Message::text(Role::Assistant, "new");
    let mut again = Message::text(Role::Assistant, "again");
    again.message_id = new.message_id.clone();

    let advance = advance(
        &graph(),
        A,
        &before,
        patch(Patch { messages: vec![old, piece, new.clone(), again], ..Patch::default() }),
    );

    assert_eq!(advance.messages.len(), 1);
    assert_eq!(advance.messages[0].message_id, new.message_id);
    assert!(advance.messages[0].timestamp.is_some());
}

#[test]
fn a_message_can_be_replaced_and_unknown_ones_are_not_removed() {
    let mut before = state();
    before.context = vec![Message::text(Role::User, "one"), Message::text(Role::User, "two")];
    let mut replacement = Message::text(Role::User, "three");
    replacement.message_id = before.context[0].message_id.clone();
    let remove = vec![before.context[0].message_id.clone(), MessageId::from("unknown")];

    let advance =
        advance(&graph(), A, &before, patch(Patch { messages: vec![replacement], remove, ..Patch::default() }));

    assert_eq!(advance.removed, [before.context[0].message_id.clone()]);
    let mut after = before;
    apply(&mut after, &advance);
    let texts: Vec<String> = after.context.iter().map(Message::plain_text).collect();
    assert_eq!(texts, ["two", "three"]);
}

#[test]
fn generated_ids_are_of_the_graphs_kind() {
    let graph = builder().ids(IdKind::Integer).build().unwrap();
    let mut before = state();
    let known = Message::text(Role::User, "sent by a client");
    before.context.push(known.clone());

    let advance = advance(
        &graph,
        A,
        &before,
        patch(Patch { messages: vec![known, Message::text(Role::Assistant, "x")], ..Patch::default() }),
    );

    assert_eq!(advance.messages.len(), 1);
    assert!(advance.messages[0].message_id.is_int);
}

#[test]
fn only_changed_and_declared_fields_are_written() {
    let fields = |value: Json| patch(Patch { fields: value.as_object().unwrap().clone(), ..Patch::default() });

    let same = advance(&graph(), A, &state(), fields(json!({"topic": "none", "context_summary": null})));
    assert!(same.fields.is_empty());
    let changed = advance(&graph(), A, &state(), fields(json!({"topic": null, "context_summary": "short"})));
    assert_eq!(Json::Object(changed.fields.clone()), json!({"topic": null, "context_summary": "short"}));
    let mut after = state();
    apply(&mut after, &changed);
    assert_eq!((after.context_summary, &after.fields["topic"]), (Some(json!("short")), &Json::Null));

    let unknown = advance(&graph(), A, &state(), fields(json!({"topik": 1})));
    assert!(failure(&unknown).message.contains("'topik'"));
    assert!(unknown.fields.is_empty());
}

#[test]
fn answers_are_given_in_the_order_of_the_calls_and_dropped_with_the_node() {
    async fn asks_twice(ctx: NodeContext) -> Result<String, NodeError> {
        let first = ctx.interrupt(Interrupt::default())?;
        let second = ctx.interrupt(Interrupt::default())?;
        Ok(format!("{first} {second}"))
    }
    let graph = Graph::builder("g").node("ask", asks_twice).entry("ask").edge("ask", END).build().unwrap();
    let mut thread = Rehearsal::of(graph);
    let resume = |value: Json| RunInput { resume: Some(value), ..RunInput::default() };

    assert_eq!(thread.say("hi"), Ended::Interrupted);
    let first = thread.meta().interrupt_data.clone().unwrap();
    assert_eq!(thread.invoke(resume(json!(1))), Ok(Ended::Interrupted));
    let second = thread.meta().interrupt_data.clone().unwrap();
    assert_eq!(thread.invoke(resume(json!(null))), Ok(Ended::Completed));

    assert_eq!((&first["interrupt"]["key"], &second["interrupt"]["key"]), (&json!("node:ask:0"), &json!("node:ask:1")));
    assert_ne!(first["interrupt"]["id"], second["interrupt"]["id"]);
    assert_eq!(thread.ran.len(), 3);
    assert_eq!(thread.texts(), ["user:hi", "assistant:1 null"]);
    assert!(!thread.meta().internal_data.contains_key("interrupt_resume"));
}

/// C37: a pause after the last node completes on resume; both lists pause twice around one start.
#[test]
fn pauses_around_the_last_node_run_it_once() {
    let graph = builder().interrupt_before(["b"]).interrupt_after(["b"]).build().unwrap();
    let mut thread = Rehearsal::of(graph);

    assert_eq!(thread.say("1"), Ended::Interrupted);
    assert_eq!(thread.ran, ["a"]);
    assert_eq!(thread.say("2"), Ended::Interrupted);
    assert_eq!(thread.ran, ["a", "b"]);
    assert_eq!(thread.say("3"), Ended::Completed);
    assert_eq!(thread.ran, ["a", "b"]);
    assert_eq!((thread.meta().current_node.as_str(), thread.meta().status), ("b", ExecutionStatus::Completed));
}
