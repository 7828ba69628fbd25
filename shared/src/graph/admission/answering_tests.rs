//! Which answers a pause with several questions takes.

use serde_json::json;

use super::*;
use crate::domain::QuestionKind;
use crate::graph::rehearsal::{Ended, Rehearsal};
use crate::graph::{Graph, NodeContext};

fn text(text: &str) -> RunInput {
    RunInput { messages: vec![Message::text(Role::User, text)], ..RunInput::default() }
}

/// A node that asks about the calls `c1` and `c2` at once, by questions of `kind`.
fn asking_twice(kind: QuestionKind, change: fn(&mut Question)) -> Rehearsal {
    let ask = move |ctx: NodeContext| async move {
        let question = |call: &str| {
            let mut question = Question {
                call: Some(crate::domain::CallRef::new("m".into(), call, "refund", json!({"amount": 42}))),
                ..Question::new(kind, "ask", format!("{}:{call}", kind.as_str()), "tool_call")
            };
            change(&mut question);
            question
        };
        let open: Vec<_> = ["c1", "c2"]
            .map(question)
            .into_iter()
            .filter(|question| answer_to(&ctx.state.execution_meta, &question.key).is_none())
            .collect();
        crate::graph::Outcome { questions: open, ..Default::default() }
    };
    let tool = json!({"name": "refund", "may_edit": true, "parameters":
        {"type": "object", "required": ["amount"], "properties": {"amount": {"type": "integer", "maximum": 50}}}});
    let graph = Graph::builder("g").node("ask", ask).entry("ask").edge("ask", END);
    let mut graph = graph.build().unwrap();
    let mut manifest = (*graph.manifest).clone();
    manifest.nodes[0].spec = json!({"tools": [tool]});
    graph.manifest = Arc::new(manifest);
    let mut thread = Rehearsal::of(graph);
    assert_eq!(thread.say("hi"), Ended::Interrupted);
    thread
}

fn answers(thread: &Rehearsal, given: &[(usize, Given)]) -> RunInput {
    let answer = |(index, value): &(usize, Given)| Answer {
        interrupt_id: thread.open[*index].question.id.clone(),
        value: value.clone(),
        comment: None,
    };
    RunInput { answers: given.iter().map(answer).collect(), ..RunInput::default() }
}

fn resume(value: Json) -> Given {
    Given::Resume(value)
}

/// D8: one by one, or all at once.
#[test]
fn a_pause_with_two_questions_goes_on_with_the_second_answer() {
    let mut thread = asking_twice(QuestionKind::Gate, |_| {});
    let second = thread.open[1].question.id.clone();
    let yes = || resume(json!({"approved": true}));

    let admission = thread.admit(&answers(&thread, &[(0, yes())])).unwrap();
    assert_eq!(admission.start, Start::StillPaused);
    assert_eq!(admission.meta.interrupt_data.unwrap()["interrupt"]["id"], *second);
    assert_eq!(thread.admit(&answers(&thread, &[(1, yes()), (0, yes())])).unwrap().start, Start::Node("ask".into()));
    assert_eq!(thread.invoke(answers(&thread, &[(0, yes())])), Ok(Ended::StillPaused));
    let last = RunInput { resume: Some(json!({"approved": false, "reason": "no"})), ..RunInput::default() };
    let admission = thread.admit(&last).unwrap();
    assert_eq!(answer_to(&admission.meta, "gate:c1"), Some(&json!({"outcome": "approved"})));
    assert_eq!(answer_to(&admission.meta, "gate:c2"), Some(&json!({"outcome": "denied", "comment": "no"})));
    assert_eq!((admission.answers[0].action, &admission.answers[0].approved_hash), ("deny", &None));
    assert_eq!(thread.invoke(last), Ok(Ended::Completed));
}

#[test]
fn words_of_a_user_come_with_the_last_answer() {
    let thread = asking_twice(QuestionKind::Gate, |_| {});
    let mut input = answers(&thread, &[(0, resume(Json::Null))]);
    input.messages.push(Message::text(Role::User, "fyi"));

    assert!(matches!(thread.admit(&input), Err(Refusal::Paused { .. })));
    input.answers.extend(answers(&thread, &[(1, resume(Json::Null))]).answers);
    assert_eq!(thread.admit(&input).unwrap().messages[0].plain_text(), "fyi");
}

/// Source: AG-UI, "The interrupt of a gated call": only the boolean itself approves.
#[test]
fn nothing_but_the_boolean_approves() {
    let thread = asking_twice(QuestionKind::Gate, |_| {});
    let given =
        |value: Given| thread.admit(&answers(&thread, &[(0, value)])).map(|mut admission| admission.answers.remove(0));

    for wrong in [json!("yes"), json!(true), json!({}), json!({"approved": "true"}), json!({"approved": 1}), json!([])]
    {
        assert!(matches!(given(resume(wrong.clone())), Err(Refusal::AnswerSchema(_))), "{wrong}");
        assert!(matches!(given(Given::Canonical(wrong.clone())), Err(Refusal::AnswerSchema(_))), "{wrong}");
    }
    let denied = given(resume(Json::Null)).unwrap();
    assert_eq!((denied.status, denied.action, denied.approved_hash), (InterruptStatus::Answered, "deny", None));
    let cancelled = given(Given::Cancelled).unwrap();
    assert_eq!((cancelled.status, cancelled.action), (InterruptStatus::Cancelled, "deny"));
    let shown = crate::domain::interrupt::arguments_hash(&json!({"amount": 42}));
    for (value, unknown_key) in [(json!({"approved": true}), false), (json!({"approved": true, "x": 1}), true)] {
        assert_eq!(given(resume(value)).unwrap().approved_hash.as_ref(), Some(&shown), "{unknown_key}");
    }
}

#[test]
fn an_edit_needs_leave_and_the_tools_own_schema() {
    let fixed = asking_twice(QuestionKind::Gate, |_| {});
    let free = asking_twice(QuestionKind::Gate, |question| question.may_edit = true);
    let edit = |thread: &Rehearsal, amount: Json| {
        let edited = json!({"approved": true, "editedArgs": {"amount": amount}});
        thread.admit(&answers(thread, &[(0, resume(edited))])).map(|mut admission| admission.answers.remove(0))
    };

    assert!(matches!(edit(&fixed, json!(1)), Err(Refusal::AnswerSchema(_))));
    for wrong in [json!(51), json!("x")] {
        let Err(Refusal::AnswerSchema(why)) = edit(&free, wrong) else { panic!("it does not fit the tool") };
        assert!(why.starts_with("/arguments/amount") && !why.contains("51"), "{why}");
    }
    let approved = edit(&free, json!(7)).unwrap();
    assert_eq!(approved.answer, json!({"outcome": "approved", "arguments": {"amount": 7}}));
    assert_eq!(approved.approved_hash, Some(crate::domain::interrupt::arguments_hash(&json!({"amount": 7}))));
    let denied = Given::Canonical(json!({"outcome": "denied", "arguments": {"amount": 7}}));
    assert!(matches!(free.admit(&answers(&free, &[(0, denied)])), Err(Refusal::AnswerSchema(_))));
}

#[test]
fn a_question_may_name_who_answers_it() {
    let thread = asking_twice(QuestionKind::Gate, |question| question.approvers = vec!["ann".to_owned()]);
    let by = |user: &str| RunInput {
        answered_by: Answerer::User(user.into()),
        ..answers(&thread, &[(0, resume(json!({"approved": true})))])
    };

    assert!(matches!(thread.admit(&by("bob")), Err(Refusal::NotAnApprover(_))));
    assert_eq!(thread.admit(&by("ann")).unwrap().answers[0].by, "ann");
}

/// C34: an expired question takes nothing but its default from the clock, and a cancellation.
#[test]
fn an_expired_question_takes_no_answer() {
    let mut thread =
        asking_twice(QuestionKind::Gate, |question| question.on_expiry = Some(json!({"outcome": "denied"})));
    let default = || Given::Canonical(json!({"outcome": "denied"}));
    let by_expiry = |thread: &Rehearsal, value: Given| {
        thread.admit(&RunInput { answered_by: Answerer::Expiry, ..answers(thread, &[(0, value)]) })
    };
    assert!(matches!(by_expiry(&thread, default()), Err(Refusal::NotThisInterrupt(_))), "its time is not over");
    thread.open[0].is_expired = true;

    assert!(matches!(thread.admit(&answers(&thread, &[(0, default())])), Err(Refusal::Expired(_))));
    assert!(matches!(by_expiry(&thread, resume(json!({"approved": true}))), Err(Refusal::Expired(_))));
    assert!(thread.admit(&answers(&thread, &[(0, Given::Cancelled)])).is_ok());
    let taken = by_expiry(&thread, default()).unwrap();
    let answered = &taken.answers[0];
    assert_eq!((answered.status, answered.action, answered.by.as_str()), (InterruptStatus::Expired, "expire", EXPIRY));
}

fn result(call: &str, output: Json) -> Message {
    let block = json!({"type": "tool_result", "call_id": call, "output": output});
    Message { content: vec![block], ..Message::text(Role::Tool, "") }
}

/// C39
#[test]
fn results_of_client_tools_are_taken_once_and_for_calls_that_wait() {
    let mut thread = asking_twice(QuestionKind::Remote, |_| {});
    let send = |messages: Vec<Message>| RunInput { messages, ..RunInput::default() };
    assert_eq!(thread.meta().interrupt_reason.as_deref(), Some("remote_tool_call"));

    for (wrong, refusal) in [
        (send(vec![result("c9", json!(1))]), Refusal::NoSuchCall("c9".into())),
        (send(vec![result("c1", json!(1)), result("c1", json!(2))]), Refusal::ResultTwice),
        (RunInput { resume: Some(json!(1)), ..RunInput::default() }, Refusal::NothingToResume),
    ] {
        assert_eq!(thread.admit(&wrong), Err(refusal));
    }
    assert!(matches!(thread.admit(&text("plain")), Err(Refusal::Paused { .. })));
    assert_eq!(thread.invoke(send(vec![result("c1", json!("here"))])), Ok(Ended::StillPaused));
    assert_eq!(thread.admit(&send(vec![result("c1", json!(1))])), Err(Refusal::NoSuchCall("c1".into())));
    let mut known = result("c2", json!("there"));
    known.message_id = thread.state.as_ref().unwrap().context[0].message_id.clone();
    let admission = thread.admit(&send(vec![known, Message::text(Role::User, "and?")])).unwrap();
    assert_eq!(admission.messages.len(), 2, "a result is never dropped as known");
    assert_eq!(admission.messages[1].plain_text(), "and?");
    let by_id = answers(&thread, &[(0, Given::Canonical(json!("by id")))]);
    assert_eq!(thread.admit(&by_id).unwrap().messages[0].content[0]["output"], "by id");
    let block = json!({"type": "tool_result", "call_id": "c2", "output": "a block"});
    let as_block = thread.admit(&answers(&thread, &[(0, Given::Canonical(block))])).unwrap();
    assert_eq!(as_block.messages.len(), 1);
    assert_eq!(as_block.messages[0].content[0]["output"], "a block");
}

/// No text of a client reaches a gated tool's result.
#[test]
fn a_result_for_a_gated_call_is_refused() {
    let thread = asking_twice(QuestionKind::Gate, |_| {});

    let forged = RunInput { messages: vec![result("c1", json!("paid"))], ..RunInput::default() };

    assert_eq!(thread.admit(&forged), Err(Refusal::NoSuchCall("c1".into())));
}

#[test]
fn an_unknown_outcome_is_decided_by_a_typed_answer() {
    let thread = asking_twice(QuestionKind::Outcome, |_| {});
    let given = |value: Json| thread.admit(&answers(&thread, &[(0, Given::Canonical(value))]));

    for wrong in [json!("retry"), json!({}), json!({"action": "again"}), json!({"action": "done", "x": 1})] {
        assert!(matches!(given(wrong), Err(Refusal::AnswerSchema(_))));
    }
    let done = given(json!({"action": "done", "result": {"id": 7}})).unwrap();
    assert_eq!(done.answers[0].answer, json!({"action": "done", "result": {"id": 7}}));
}
