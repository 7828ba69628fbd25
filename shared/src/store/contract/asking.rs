//! Questions: written by the commit that pauses, listed, and cancelled by a stop.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::fixture::{World, step_of};
use crate::domain::{CallRef, InterruptStatus, Question, QuestionKind, RunId, ThreadId};
use crate::graph::node::Outcome;
use crate::store::{InterruptCursor, InterruptFilter, InterruptRecord, StopAnswer, Store, StoreError};

/// A question of `node` about a call of its own.
pub(super) fn gate(node: &str, call: &str) -> Question {
    Question {
        call: Some(CallRef::new("m1".into(), call, "refund", json!({"amount": 42}))),
        ..Question::new(QuestionKind::Gate, node, format!("gate:{call}"), "tool_call")
    }
}

/// A question of `node` to a person.
pub(super) fn input(node: &str, place: usize) -> Question {
    Question::new(QuestionKind::Input, node, format!("node:{node}:{place}"), "input_required")
}

pub(super) fn all() -> InterruptFilter {
    InterruptFilter { limit: 100, ..InterruptFilter::default() }
}

pub(super) async fn listed(world: &World, filter: &InterruptFilter) -> Vec<InterruptRecord> {
    world.store.interrupts(&world.scope(), filter).await.unwrap()
}

/// A new thread whose first node asks `questions`.
pub(super) async fn paused(world: &World, thread: &str, questions: Vec<Question>) -> RunId {
    let run = world.create(thread).await.run.id;
    world.pause(run, 1, questions).await;
    run
}

fn ids(records: &[InterruptRecord]) -> Vec<&str> {
    records.iter().map(|record| record.question.id.as_str()).collect()
}

/// With everything they were asked with, in the order of the calls.
pub async fn questions_are_written_by_the_commit_that_pauses(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut first = gate("first", "c1");
    first.expires_in = Some(Duration::from_secs(3600));
    first.on_expiry = Some(json!({"outcome": "denied"}));
    first.metadata.insert("x-confirm".to_owned(), json!("Really?"));
    let second = gate("first", "c2");

    let run = paused(&world, "t", vec![first.clone(), second.clone()]).await;

    let found = listed(&world, &all()).await;
    assert_eq!(ids(&found), [&first.id, &second.id].map(String::as_str));
    let record = &found[0];
    assert_eq!((&record.question, record.status, record.run_id()), (&first, InterruptStatus::Open, run));
    assert_eq!((record.thread_id.as_str(), record.graph.as_str()), ("t", world.graph.manifest.name.as_str()));
    let time = record.expires_at.unwrap() - record.created_at - chrono::TimeDelta::seconds(3600);
    assert!(time.abs() < chrono::TimeDelta::seconds(1), "{time}");
    assert_eq!((&record.answer, &record.answered_at), (&None, &None));
    let one = world.store.interrupt(&world.scope(), &second.id).await.unwrap().unwrap();
    assert_eq!((one.question, one.expires_at), (second, None));
    assert_eq!(world.store.interrupt(&world.scope(), "int_none").await.unwrap(), None);
}

/// A stop beats a pause.
pub async fn a_stop_that_the_commit_sees_asks_nothing(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let outcome = Outcome { questions: vec![input("first", 0)], ..Outcome::default() };
    let commit = world.after_outcome(&claimed, Ok(outcome)).await;

    world.store.stop_thread(&world.scope(), &ThreadId::from("t")).await.unwrap();
    world.commit(&commit).await.unwrap();

    assert_eq!(listed(&world, &all()).await, []);
}

/// Each thread of a shared commit gets its own questions.
pub async fn a_batch_asks_for_many_threads(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut commits = Vec::new();
    for thread in ["a", "b", "c"] {
        let run = world.create(thread).await.run.id;
        let claimed = world.claim(step_of(run, 1)).await;
        let questions = if thread == "b" { Vec::new() } else { vec![gate("first", "c1"), gate("first", "c2")] };
        let outcome = Outcome { questions, ..Outcome::default() };
        commits.push(world.after_outcome(&claimed, Ok(outcome)).await);
    }

    let outcomes = world.store.commit(&commits).await;

    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    for (thread, calls) in [("a", vec!["c1", "c2"]), ("b", vec![]), ("c", vec!["c1", "c2"])] {
        let filter = InterruptFilter { thread: Some(ThreadId::from(thread)), ..all() };
        let found = listed(&world, &filter).await;
        let found: Vec<_> =
            found.iter().map(|record| record.question.call.as_ref().unwrap().call_id.as_str()).collect();
        assert_eq!(found, calls);
    }
}

/// By keyset: no question is seen twice or left out.
pub async fn the_inbox_is_paged_oldest_first(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for thread in ["a", "b", "c", "d", "e"] {
        paused(&world, thread, vec![input("first", 0)]).await;
    }
    let whole = listed(&world, &all()).await;

    let mut filter = InterruptFilter { limit: 2, ..InterruptFilter::default() };
    let mut pages = Vec::new();
    loop {
        let page = listed(&world, &filter).await;
        let Some(last) = page.last() else { break };
        filter.after = Some(InterruptCursor::behind(last));
        pages.push(page);
    }

    assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 1]);
    assert_eq!(pages.concat(), whole);
    let threads: Vec<_> = whole.iter().map(|record| record.thread_id.as_str()).collect();
    assert_eq!(threads, ["a", "b", "c", "d", "e"]);
}

/// An open question whose time is over is an expired one.
pub async fn the_inbox_is_filtered(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = paused(&world, "a", vec![gate("first", "c1")]).await;
    let mut over = input("first", 0);
    over.expires_in = Some(Duration::ZERO);
    paused(&world, "b", vec![over]).await;
    let stopped = paused(&world, "c", vec![input("first", 0)]).await;
    world.store.stop_run(&world.scope(), stopped).await.unwrap();
    let threads = async |filter: InterruptFilter| {
        let found = listed(&world, &filter).await;
        found.into_iter().map(|record| record.thread_id.0).collect::<Vec<_>>()
    };
    let status = |status| InterruptFilter { statuses: vec![status], ..all() };

    assert_eq!(threads(all()).await, ["a", "b", "c"]);
    assert_eq!(threads(status(InterruptStatus::Open)).await, ["a"]);
    assert_eq!(threads(status(InterruptStatus::Expired)).await, ["b"]);
    assert_eq!(threads(status(InterruptStatus::Cancelled)).await, ["c"]);
    assert_eq!(threads(status(InterruptStatus::Answered)).await, [""; 0]);
    assert_eq!(threads(InterruptFilter { run: Some(run), ..all() }).await, ["a"]);
    assert_eq!(threads(InterruptFilter { tool: Some("refund".to_owned()), ..all() }).await, ["a"]);
    assert_eq!(threads(InterruptFilter { graph: Some("other".to_owned()), ..all() }).await, [""; 0]);
    let both = vec![InterruptStatus::Open, InterruptStatus::Expired];
    assert_eq!(threads(InterruptFilter { statuses: both, ..all() }).await, ["a", "b"]);
}

/// C35: by tenant and age, never another tenant's.
pub async fn questions_belong_to_their_owner(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let ann = world.as_caller("acme", "ann");
    paused(&ann, "t", vec![input("first", 0)]).await;
    let id = listed(&ann, &all()).await[0].question.id.clone();

    for (tenant, user, sees) in [("acme", "ann", true), ("acme", "bob", false), ("other", "ann", false)] {
        let other = world.as_caller(tenant, user);
        assert_eq!(listed(&other, &all()).await.len(), usize::from(sees), "{tenant} {user}");
        let one = world.store.interrupt(&other.scope(), &id).await.unwrap();
        assert_eq!(one.is_some(), sees);
    }
}

/// Open ones whose time is over and that have a default; nothing is changed by looking.
pub async fn questions_that_are_due_are_found(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let over = |default: Option<crate::domain::Json>| Question {
        expires_in: Some(Duration::ZERO),
        on_expiry: default,
        ..input("first", 0)
    };
    let due = over(Some(json!("none")));
    paused(&world, "due", vec![due.clone()]).await;
    paused(&world, "no-default", vec![over(None)]).await;
    let later = Question { expires_in: Some(Duration::from_secs(60)), ..over(Some(json!(1))) };
    paused(&world, "later", vec![later]).await;

    for _ in 0..2 {
        let found = world.store.due_for_expiry(10).await.unwrap();
        assert_eq!(ids(&found), [due.id.as_str()]);
    }
    assert_eq!(world.store.due_for_expiry(0).await.unwrap(), []);
}

/// Source: AG-UI, "Stop while a card is open". Twice is as once.
pub async fn a_stop_cancels_questions_and_denies_their_calls(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = paused(&world, "t", vec![gate("first", "c1"), gate("first", "c2")]).await;
    let stop = async || world.store.stop_thread(&world.scope(), &ThreadId::from("t")).await.unwrap();

    assert_eq!(stop().await, StopAnswer::NotRunning);
    let after = world.state("t").await;
    assert_eq!(stop().await, StopAnswer::NotRunning);

    assert_eq!(world.state("t").await, after);
    let results: Vec<_> = after.context.iter().skip(1).collect();
    assert_eq!(results.iter().map(|message| &message.content[0]["call_id"]).collect::<Vec<_>>(), ["c1", "c2"]);
    assert!(results.iter().all(|message| message.metadata["outcome"] == "denied"));
    let found = listed(&world, &all()).await;
    assert!(found.iter().all(|record| record.status == InterruptStatus::Cancelled && record.answered_at.is_some()));
    assert_eq!(found[0].answered_by.as_deref(), Some("anonymous"));
    let audit = world.store.audit(&world.scope(), &ThreadId::from("t")).await.unwrap();
    assert_eq!(audit.iter().filter(|entry| entry.action == "cancel").count(), 2);
    let next = world.create("t").await.run;
    assert_eq!((next.resumes, world.run(run).await.status), (None, crate::domain::RunStatus::Stopped));
    assert_eq!(world.context("t").await.last().map(String::as_str), Some("hello"));
}

/// Its calls are not answered yet, and will be.
pub async fn a_thread_that_asks_is_not_fixed(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    paused(&world, "t", vec![gate("first", "c1")]).await;
    let before = world.state("t").await;

    let every = |context: &[crate::domain::Message]| context.iter().map(|message| message.message_id.clone()).collect();
    let fixed = world.store.fix(&world.scope(), &ThreadId::from("t"), "ann", &every).await;

    assert!(matches!(fixed, Err(StoreError::Asked(_))), "{fixed:?}");
    assert_eq!(world.state("t").await, before);
}

/// Questions go with the state they are about.
pub async fn a_cleared_thread_asks_nothing(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    paused(&world, "t", vec![gate("first", "c1")]).await;
    paused(&world, "deleted", vec![gate("first", "c1")]).await;

    world.store.clear_state(&world.scope(), &ThreadId::from("t")).await.unwrap();
    world.store.delete_thread(&world.scope(), &ThreadId::from("deleted")).await.unwrap();

    assert_eq!(listed(&world, &all()).await, []);
    world.create("t").await;
}
