//! The ledger of tool calls: no call is forgotten, none is silently repeated.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::asking::{gate, paused};
use super::fixture::{LONG, World, step_of};
use crate::domain::{
    CallRef, CallResult, CallStatus, Effect, LeaseToken, Question, QuestionKind, RunId, StepId, ThreadId, ThreadKey,
};
use crate::graph::admission::{Answer, Given, RunInput};
use crate::store::{Begun, CallKey, Claimed, Finished, Intent, Store, ToolExecution, Wish};

fn intent(call: &str, effect: Effect) -> Intent {
    Intent {
        call: CallRef::new("m1".into(), call, "refund", json!({"amount": 42})),
        effect,
        is_gated: false,
        timeout: Duration::from_secs(60),
        wish: Wish::Run,
    }
}

/// A call that has certainly ended as soon as it is started.
fn over(call: &str) -> Intent {
    Intent { timeout: Duration::ZERO, ..intent(call, Effect::Once) }
}

fn done(text: &str) -> CallResult {
    CallResult { status: CallStatus::Done, output: json!(text) }
}

fn key(thread: ThreadKey, call: &str) -> CallKey {
    CallKey { thread, message_id: "m1".into(), call_id: call.to_owned() }
}

async fn begin(world: &World, lease: &Claimed, intent: Intent) -> Begun {
    let mut begun = world.store.begin_calls(lease.step, lease.token, &[intent]).await.unwrap();
    begun.pop().expect("one answer per intent")
}

fn token(begun: &Begun) -> LeaseToken {
    match begun {
        Begun::Started { token, .. } => *token,
        other => panic!("the call was to start: {other:?}"),
    }
}

async fn calls(world: &World) -> Vec<ToolExecution> {
    world.store.calls(&world.scope(), &ThreadId::from("t")).await.unwrap()
}

/// A thread `t` whose first step is taken.
async fn leased(world: &World) -> Claimed {
    let run = world.create("t").await.run.id;
    world.claim(step_of(run, 1)).await
}

/// The same step, taken anew by another worker.
async fn taken_over(world: &World, lease: &Claimed) -> Claimed {
    world.store.give_back(&[(lease.step, lease.token)]).await.unwrap();
    world.claim(lease.step).await
}

/// With its order, its arguments and the time by which it will have ended.
pub async fn a_call_is_written_down_before_it_starts(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    let intents = [intent("c1", Effect::Once), intent("c2", Effect::None)];

    let begun = world.store.begin_calls(lease.step, lease.token, &intents).await.unwrap();
    let again = world.store.begin_calls(lease.step, lease.token, &intents).await.unwrap();

    assert!(begun.iter().all(|begun| matches!(begun, Begun::Started { attempt: 1, approval: None, .. })));
    assert_eq!(again, begun, "the answer may have been lost");
    assert_ne!(token(&begun[0]), token(&begun[1]));
    let rows = calls(&world).await;
    assert_eq!(rows.iter().map(|row| row.call_id.as_str()).collect::<Vec<_>>(), ["c1", "c2"]);
    let row = &rows[0];
    assert_eq!((row.status, row.effect, row.attempt, &row.result), (CallStatus::Intended, Effect::Once, 1, &None));
    assert_eq!((&row.arguments_hash, row.step), (&intents[0].call.arguments_hash, lease.step));
    assert_eq!(row.deadline.unwrap() - row.started_at.unwrap(), chrono::TimeDelta::seconds(60));
}

/// C40: a stored result is answered, and the tool is not called.
pub async fn a_result_is_kept_and_answered_again(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    let begun = begin(&world, &lease, intent("c1", Effect::None)).await;
    let result = CallResult { status: CallStatus::Failed, output: json!({"why": "é", "n": 1.0}) };

    let key = key(lease.thread_key, "c1");
    let stored = world.store.finish_call(&key, token(&begun), &result).await.unwrap();
    let lease = taken_over(&world, &lease).await;

    assert_eq!(stored, Finished::Stored);
    assert_eq!(begin(&world, &lease, intent("c1", Effect::None)).await, Begun::Done(result));
}

/// The one write that does not carry the lease: a tool's result is a fact.
pub async fn a_result_is_a_fact_after_the_lease_is_lost(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    let begun = begin(&world, &lease, intent("c1", Effect::Once)).await;
    let other = taken_over(&world, &lease).await;

    let stored = world.store.finish_call(&key(lease.thread_key, "c1"), token(&begun), &done("late")).await.unwrap();

    assert_eq!(stored, Finished::Stored);
    assert_eq!(begin(&world, &other, intent("c1", Effect::Once)).await, Begun::Done(done("late")));
}

/// By the intent's own token.
pub async fn only_the_first_result_counts(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    let token = token(&begin(&world, &lease, intent("c1", Effect::None)).await);
    let finish = async |call: &str, token, text: &str| {
        world.store.finish_call(&key(lease.thread_key, call), token, &done(text)).await.unwrap()
    };

    assert_eq!(finish("c1", LeaseToken::new(), "forged").await, Finished::Unknown);
    assert_eq!(finish("c9", token, "no such call").await, Finished::Unknown);
    assert_eq!(finish("c1", token, "first").await, Finished::Stored);
    assert_eq!(finish("c1", token, "second").await, Finished::Kept(done("first")));
}

/// C40: called again with the same key, under a token of its own.
pub async fn a_call_that_may_be_repeated_is_started_again(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    let first = begin(&world, &lease, intent("c1", Effect::Idempotent)).await;
    let lease = taken_over(&world, &lease).await;

    let second = begin(&world, &lease, intent("c1", Effect::Idempotent)).await;

    assert!(matches!(second, Begun::Started { attempt: 2, .. }), "{second:?}");
    let key = key(lease.thread_key, "c1");
    let old = world.store.finish_call(&key, token(&first), &done("old")).await.unwrap();
    let new = world.store.finish_call(&key, token(&second), &done("new")).await.unwrap();
    assert_eq!((old, new), (Finished::Unknown, Finished::Stored));
    assert_eq!(calls(&world).await.len(), 1);
}

/// Invariant 8: a tool call whose outcome is unknown is never silently repeated.
pub async fn a_once_call_is_in_doubt(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    begin(&world, &lease, intent("slow", Effect::Once)).await;
    begin(&world, &lease, over("over")).await;
    let lease = taken_over(&world, &lease).await;

    let slow = begin(&world, &lease, intent("slow", Effect::Once)).await;
    let ended = begin(&world, &lease, over("over")).await;

    assert!(matches!(slow, Begun::InDoubt { wait, .. } if wait > Duration::ZERO), "{slow:?}");
    assert!(matches!(ended, Begun::InDoubt { wait: Duration::ZERO, .. }), "{ended:?}");
    let statuses: Vec<_> = calls(&world).await.iter().map(|row| row.status).collect();
    assert_eq!(statuses, [CallStatus::Intended, CallStatus::Unknown]);
}

/// Only an answered question about this call, asked after its last start, decides.
pub async fn a_decision_ends_the_doubt(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    begin(&world, &lease, over("c1")).await;
    let lease = taken_over(&world, &lease).await;
    let question = Question {
        call: Some(over("c1").call),
        ..Question::new(QuestionKind::Outcome, "first", "outcome:c1:1".to_owned(), "threadgate:tool_outcome_unknown")
    };
    let decided = |result: Option<CallResult>| Intent { wish: Wish::Decided(result), ..over("c1") };
    let early = begin(&world, &lease, decided(None)).await;
    assert!(matches!(early, Begun::InDoubt { .. }), "nobody was asked yet: {early:?}");
    let outcome = crate::graph::node::Outcome { questions: vec![question.clone()], ..Default::default() };
    let commit = world.after_outcome(&lease, Ok(outcome)).await;
    world.commit(&commit).await.unwrap();
    let retry = Answer {
        interrupt_id: question.id.clone(),
        value: Given::Canonical(json!({"action": "retry"})),
        comment: None,
    };
    let answer = RunInput { answers: vec![retry], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), answer).await.unwrap().run.id;
    let lease = world.claim(step_of(run, 1)).await;

    let retried = begin(&world, &lease, decided(None)).await;
    assert!(matches!(retried, Begun::Started { attempt: 2, .. }), "{retried:?}");
    let lease = taken_over(&world, &lease).await;
    let again = begin(&world, &lease, decided(None)).await;
    assert!(matches!(again, Begun::InDoubt { .. }), "one answer is one retry: {again:?}");
}

/// Invariant 7: no gated tool runs without an approval row for that very call with those very arguments.
pub async fn a_gated_call_needs_its_approval(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (one, two) = (gate("first", "c1"), gate("first", "c2"));
    paused(&world, "t", vec![one.clone(), two.clone()]).await;
    let answer = |question: &Question, outcome: &str| Answer {
        interrupt_id: question.id.clone(),
        value: Given::Canonical(json!({"outcome": outcome})),
        comment: None,
    };
    let answers = vec![answer(&one, "approved"), answer(&two, "denied")];
    let input = RunInput { answers, ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    let lease = world.claim(step_of(run, 1)).await;
    let gated = |call: &str, arguments: crate::domain::Json| Intent {
        call: CallRef::new("m1".into(), call, "refund", arguments),
        is_gated: true,
        ..intent(call, Effect::Once)
    };
    let shown = || json!({"amount": 42});

    assert_eq!(begin(&world, &lease, gated("c1", json!({"amount": 43}))).await, Begun::NotApproved);
    assert_eq!(begin(&world, &lease, gated("c2", shown())).await, Begun::NotApproved);
    assert_eq!(begin(&world, &lease, gated("c3", shown())).await, Begun::NotApproved);
    assert_eq!(calls(&world).await, [], "nothing was written");
    let begun = begin(&world, &lease, gated("c1", shown())).await;
    assert!(matches!(&begun, Begun::Started { approval: Some(id), .. } if *id == one.id), "{begun:?}");
}

/// Nor does a step that nobody knows.
pub async fn a_lost_lease_starts_no_call(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    let other = taken_over(&world, &lease).await;

    let late = begin(&world, &lease, intent("c1", Effect::None)).await;
    let nowhere = StepId { run_id: RunId::new(), seq: 1 };
    let unknown = world.store.begin_calls(nowhere, other.token, &[intent("c1", Effect::None)]).await.unwrap();

    assert_eq!((late, unknown), (Begun::LeaseLost, vec![Begun::LeaseLost]));
    assert_eq!(calls(&world).await, []);
}

/// A model may use `call_1` again in a later message.
pub async fn a_call_belongs_to_its_message(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let lease = leased(&world).await;
    let begun = begin(&world, &lease, intent("call_1", Effect::None)).await;
    world.store.finish_call(&key(lease.thread_key, "call_1"), token(&begun), &done("first")).await.unwrap();
    let later = Intent {
        call: CallRef::new("m2".into(), "call_1", "refund", json!({"amount": 42})),
        ..intent("call_1", Effect::None)
    };

    let begun = begin(&world, &lease, later).await;

    assert!(matches!(begun, Begun::Started { attempt: 1, .. }), "{begun:?}");
    assert!(world.try_claim(lease.step, LONG).await.is_none());
}
