//! Which runs a thread takes, branch by branch.

use serde_json::json;

use super::*;
use crate::graph::rehearsal::{Ended, Rehearsal, says};
use crate::graph::{Graph, GraphBuilder, Interrupt, NodeContext};

fn builder() -> GraphBuilder {
    Graph::builder("g")
        .field("topic", "none")
        .node("a", says(&["a"]))
        .node("b", says(&["b"]))
        .entry("a")
        .edge("a", "b")
        .edge("b", END)
}

fn thread(builder: GraphBuilder) -> Rehearsal {
    Rehearsal::of(builder.build().unwrap())
}

fn text(text: &str) -> RunInput {
    RunInput { messages: vec![Message::text(Role::User, text)], ..RunInput::default() }
}

fn asking(schema: Option<Json>) -> Rehearsal {
    let ask = move |ctx: NodeContext| {
        let question = Interrupt { response_schema: schema.clone(), ..Interrupt::default() };
        async move { ctx.interrupt(question).map(|answer| answer.to_string()) }
    };
    let graph = Graph::builder("g").node("ask", ask).entry("ask").edge("ask", END).build().unwrap();
    let mut thread = Rehearsal::of(graph);
    assert_eq!(thread.say("hi"), Ended::Interrupted);
    thread
}

#[test]
fn a_new_thread_starts_at_its_entry() {
    let admission = thread(builder()).admit(&text("hi")).unwrap();

    assert_eq!(admission.start, Start::Node("a".into()));
    assert_eq!((admission.meta.current_node.as_str(), admission.meta.step), ("a", 1));
    assert_eq!(admission.meta.status, ExecutionStatus::Running);
    assert!(!admission.continues);
}

#[test]
fn a_conditional_entry_is_a_step_of_its_own() {
    let graph = Graph::builder("g").node("a", says(&["a"])).conditional(START, |_: &crate::domain::ThreadState| "a");
    let mut thread = thread(graph.edge("a", END));

    let admission = thread.admit(&text("hi")).unwrap();
    assert_eq!((admission.start, admission.meta.step), (Start::Node(START.into()), 0));
    assert_eq!(thread.say("hi"), Ended::Completed);
    assert_eq!(thread.meta().step, 2);
}

#[test]
fn a_completed_thread_starts_over_and_keeps_its_context() {
    let mut thread = thread(builder());
    thread.say("1");

    assert_eq!(thread.say("2"), Ended::Completed);
    assert_eq!(thread.texts(), ["user:1", "assistant:a", "assistant:b", "user:2", "assistant:a", "assistant:b"]);
    assert_eq!(thread.meta().step, 3);
}

/// C15: a busy thread takes nothing, whatever is asked of it.
#[test]
fn a_busy_thread_takes_nothing() {
    let mut thread = thread(builder());
    thread.say("1");
    let run = RunId::new();
    thread.active_run = Some(run);

    let refusal = thread.admit(&text("2"));

    assert_eq!(refusal, Err(Refusal::Busy { thread: ThreadId::from("t"), run }));
}

#[test]
fn a_thread_stays_with_its_graph() {
    let mut other = thread(builder());
    other.say("1");
    let view = ThreadView { graph: "other".into(), ..other.view().unwrap() };
    let versions = [(other.graph.version.clone(), Arc::clone(&other.graph.manifest))];

    let refusal = admit(&versions, &ThreadId::from("t"), Some(&view), &text("2"));

    assert_eq!(refusal, Err(Refusal::OtherGraph("other".into())));
}

/// C38: a paused thread goes on with the version it paused on; a completed one takes the newest.
#[test]
fn a_run_that_goes_on_keeps_its_version() {
    let mut paused = thread(builder().interrupt_before(["b"]));
    paused.say("1");
    let old = (paused.graph.version.clone(), Arc::clone(&paused.graph.manifest));
    let new = builder().version("new").build().unwrap();
    let new = (new.version, new.manifest);
    let admit = |versions: &Versions, view: ThreadView| {
        admit(versions, &ThreadId::from("t"), Some(&view), &text("2")).map(|admission| admission.graph_version)
    };
    let view = || paused.view().unwrap();

    assert_eq!(admit(&[new.clone(), old.clone()], view()), Ok(old.0.clone()));
    assert_eq!(admit(std::slice::from_ref(&new), view()), Err(Refusal::VersionNeeded(old.0.clone())));
    let mut completed = view();
    completed.meta.status = ExecutionStatus::Completed;
    assert_eq!(admit(&[new.clone(), old], completed), Ok(new.0));
}

#[test]
fn pauses_and_failures_are_gone_on_from() {
    let mut paused = thread(builder().interrupt_before(["b"]));
    assert_eq!(paused.say("1"), Ended::Interrupted);
    let admission = paused.admit(&text("2")).unwrap();
    assert!(admission.continues);
    assert_eq!((admission.start, admission.meta.step), (Start::Node("b".into()), 2));
    assert_eq!(admission.meta.interrupt_reason, None);

    let fails = |_: NodeContext| async { Err::<&str, _>(crate::graph::NodeError::permanent("no")) };
    let graph = Graph::builder("g").node("a", says(&["a"])).node("b", fails).entry("a").edge("a", "b").edge("b", END);
    let mut failed = thread(graph);
    assert!(matches!(failed.say("1"), Ended::Failed(_)));
    let admission = failed.admit(&text("2")).unwrap();
    assert_eq!((admission.start, admission.meta.step), (Start::Node("b".into()), 2));
}

/// C17: after the step limit the next run counts from its own start and executes nodes.
#[test]
fn after_the_step_limit_the_next_run_starts_over() {
    let graph = Graph::builder("g").node("a", says(&["a"])).entry("a").edge("a", "a").build().unwrap();
    let mut thread = Rehearsal::of(graph);
    thread.step_limit = 4;

    for runs in 1..=2 {
        assert!(matches!(thread.say("go"), Ended::Failed(error) if error.code == "RECURSION_001"));
        assert_eq!(thread.ran.len(), runs * 3);
    }
}

#[test]
fn a_gate_is_asked_whenever_a_run_comes_to_its_node() {
    // Behind a pause after the node before.
    let mut both = thread(builder().interrupt_after(["a"]).interrupt_before(["b"]));
    assert_eq!(both.say("1"), Ended::Interrupted);
    assert_eq!(both.meta().interrupt_reason.as_deref(), Some("interrupt_after: a"));
    assert_eq!(both.say("2"), Ended::Interrupted);
    assert_eq!(both.meta().interrupt_reason.as_deref(), Some("interrupt_before: b"));
    assert_eq!(both.say("3"), Ended::Completed);
    assert_eq!(both.ran, ["a", "b"]);

    // Behind a stop: stopping is no way around it.
    let mut stopped = thread(builder().interrupt_before(["b"]));
    stopped.stop_in = Some("a");
    assert_eq!(stopped.say("1"), Ended::Stopped);
    assert_eq!(stopped.say("2"), Ended::Interrupted);
    assert_eq!(stopped.say("3"), Ended::Completed);
    assert_eq!(stopped.ran, ["a", "b"]);

    // At the entry.
    let mut entry = thread(builder().interrupt_before(["a"]));
    assert_eq!(entry.say("1"), Ended::Interrupted);
    assert_eq!(entry.ran, Vec::<String>::new());
    assert_eq!(entry.meta().current_node, "a");
    assert_eq!(entry.say("2"), Ended::Completed);
}

/// C19: the next run goes on with the node the stop kept from running.
#[test]
fn a_stopped_thread_goes_on_with_the_next_node() {
    let mut thread = thread(builder());
    thread.stop_in = Some("a");

    assert_eq!(thread.say("1"), Ended::Stopped);
    assert_eq!(thread.say("2"), Ended::Completed);
    assert_eq!(thread.ran, ["a", "b"]);
    assert_eq!(thread.texts(), ["user:1", "assistant:a", "user:2", "assistant:b"]);
}

#[test]
fn a_client_may_choose_the_start() {
    let choose = |node: &str| RunInput {
        state: json!({"current_node": node, "topic": "x", "unknown": 1}).as_object().unwrap().clone(),
        ..text("hi")
    };
    let mut thread = thread(builder().interrupt_before(["b"]));

    let admission = thread.admit(&choose("start")).unwrap();
    assert_eq!(admission.start, Start::Node(START.into()));
    assert_eq!(Json::Object(admission.fields), json!({"topic": "x"}));
    assert_eq!(thread.admit(&choose("end")).unwrap().start, Start::Completed);
    assert_eq!(thread.admit(&choose("")).unwrap().start, Start::Node("a".into()));
    assert_eq!(thread.admit(&choose("nope")), Err(Refusal::UnknownStart("nope".into())));
    // Also on a thread that is paused elsewhere, and not around a gate.
    assert_eq!(thread.say("1"), Ended::Interrupted);
    assert_eq!(thread.admit(&choose("a")).unwrap().start, Start::Node("a".into()));
    assert_eq!(thread.admit(&choose("b")).unwrap().start, Start::Interrupted);
}

#[test]
fn a_run_needs_something_to_run_on() {
    let mut thread = thread(builder());

    assert_eq!(thread.admit(&RunInput::default()), Err(Refusal::NoMessages));
    thread.say("1");
    assert_eq!(thread.admit(&RunInput::default()).unwrap().start, Start::Node("a".into()));
}

#[test]
fn a_message_sent_again_gets_a_new_id() {
    for ids in [IdKind::String, IdKind::Integer] {
        let mut thread = thread(builder().ids(ids));
        let input = text("same");
        thread.invoke(input.clone()).unwrap();

        let admission = thread.admit(&input).unwrap();

        assert_eq!(admission.messages.len(), 1);
        assert_ne!(admission.messages[0].message_id, input.messages[0].message_id);
        assert_eq!(admission.messages[0].message_id.is_int, ids == IdKind::Integer);
    }
}

#[test]
fn known_messages_and_pieces_are_left_out() {
    let mut thread = thread(builder());
    let known = text("known");
    thread.invoke(known.clone()).unwrap();
    let mut piece = Message::text(Role::User, "piece");
    piece.delta = true;
    let new = Message::text(Role::User, "new");
    let mut input = known;
    input.messages.extend([piece, new.clone(), new.clone()]);

    let admission = thread.admit(&input).unwrap();

    assert_eq!(admission.messages, [new]);
}

#[test]
fn results_nobody_waits_for_are_refused() {
    let mut input = text("x");
    input.messages[0].role = Role::Tool;
    input.messages[0].content = vec![json!({"type": "tool_result", "call_id": "c1", "output": "x"})];

    let refusal = thread(builder()).admit(&input).unwrap_err();

    assert_eq!(refusal.to_string(), "No remote tool call 'c1' is waiting for a result");
}

/// C32, C33: an answer belongs to one question; everything else is refused and nothing is written.
#[test]
fn only_an_answer_goes_on_from_a_question() {
    let thread = asking(None);
    let id = thread.meta().interrupt_data.as_ref().unwrap()["interrupt"]["id"].as_str().unwrap().to_owned();
    let answer = |interrupt_id: Option<&str>| RunInput {
        resume: Some(Json::Null),
        interrupt_id: interrupt_id.map(str::to_owned),
        ..RunInput::default()
    };

    let paused = thread.admit(&text("a plain message"));
    assert_eq!(paused, Err(Refusal::Paused { id: id.clone(), node: "ask".into() }));
    assert_eq!(thread.admit(&RunInput::default()), Err(Refusal::Paused { id: id.clone(), node: "ask".into() }));
    assert_eq!(thread.admit(&answer(Some("int_other"))), Err(Refusal::NotThisInterrupt("int_other".into())));
    for right in [answer(None), answer(Some(&id))] {
        let admission = thread.admit(&right).unwrap();
        assert_eq!(admission.start, Start::Node("ask".into()));
        assert_eq!(answers_of(&admission.meta, "ask"), [Json::Null]);
    }
}

#[test]
fn an_answer_where_nothing_is_asked_is_refused() {
    let thread = thread(builder());
    let answer = |interrupt_id: Option<&str>| RunInput {
        resume: Some(json!(1)),
        interrupt_id: interrupt_id.map(str::to_owned),
        ..RunInput::default()
    };

    assert_eq!(thread.admit(&answer(None)), Err(Refusal::NothingToResume));
    assert_eq!(thread.admit(&answer(Some("int_1"))), Err(Refusal::NotThisInterrupt("int_1".into())));
}

/// C36: null is an answer only where the schema allows it.
#[test]
fn an_answer_must_satisfy_the_schema() {
    let thread = asking(Some(json!({"type": "object", "required": ["approved"]})));
    let answer = |value: Json| thread.admit(&RunInput { resume: Some(value), ..RunInput::default() });

    for refused in [json!(null), json!(""), json!({}), json!("yes")] {
        assert!(matches!(answer(refused), Err(Refusal::AnswerSchema(_))));
    }
    assert!(answer(json!({"approved": true})).is_ok());
}
