//! Chains: a run that goes on where one paused.

use std::sync::Arc;

use serde_json::json;

use super::fixture::{World, hello, says, step_of, user};
use crate::domain::{ExecutionStatus, RunId, RunStatus};
use crate::graph::admission::{RunInput, answers_of};
use crate::graph::node::{Interrupt, NodeError};
use crate::store::{CommitOutcome, Store};

/// The pause is committed like any step, and the thread is free for the answer.
pub async fn a_question_pauses_the_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;

    let outcome = ask(&world, run, 1).await;

    assert_eq!(outcome, CommitOutcome::Committed { version: 2 });
    let record = world.run(run).await;
    assert_eq!((record.status, record.version), (RunStatus::Interrupted, 2));
    assert!(record.finished_at.is_some());
    let state = world.state("t").await;
    assert_eq!(state.meta.status, ExecutionStatus::InterruptedBefore);
    assert_eq!(state.meta.interrupt_data.unwrap()["interrupt"]["node"], json!("first"));
    assert_eq!(world.steps(run).await.len(), 1);
}

/// A chain keeps its root; its last run says how it went.
pub async fn an_answer_makes_a_run_that_resumes_the_paused_one(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let first = world.create("t").await.run.id;
    ask(&world, first, 1).await;

    let second = answer(&world, "t", json!("yes")).await;
    ask_again(&world, second, 1).await;
    let third = answer(&world, "t", json!("really")).await;
    let claimed = world.claim(step_of(third, 1)).await;
    let answers = answers_of(&world.load(&claimed, None).await.meta, "first");
    let commit = world.after(&claimed, Ok(says("done"))).await;
    world.commit(&commit).await.unwrap();

    assert_eq!(answers, [json!("yes"), json!("really")]);
    for (run, resumes) in [(first, None), (second, Some(first)), (third, Some(second))] {
        let run = world.run(run).await;
        assert_eq!((run.root, run.resumes), (first, resumes));
    }
    let last = world.store.last_of_chain(first).await.unwrap().unwrap();
    assert_eq!((last.id, last.status), (third, RunStatus::Queued));
    assert_eq!(world.run(second).await.status, RunStatus::Interrupted);
}

/// A create that was repeated may bring an id that is older than the paused run's.
pub async fn a_chain_follows_its_links_and_not_its_ids(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let early = world.new_run("t");
    let root = world.create("t").await.run.id;
    ask(&world, root, 1).await;
    let input = RunInput { resume: Some(json!("yes")), ..RunInput::default() };

    let last = world.try_create(early, input).await.unwrap().run;

    assert!(last.id < root);
    assert_eq!((last.root, world.store.last_of_chain(root).await.unwrap().unwrap().id), (root, last.id));
    let stopped = world.store.stop_run(&world.scope(), root).await.unwrap().unwrap();
    assert_eq!((stopped.id, stopped.status), (last.id, RunStatus::Stopped));
}

/// A run after a finished one is a root of its own, and so is one that starts elsewhere.
pub async fn a_run_that_starts_anew_resumes_nobody(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let finished = world.create("a").await.run.id;
    world.finish(finished).await;
    let paused = world.create("b").await.run.id;
    ask(&world, paused, 1).await;
    let mut elsewhere = RunInput { resume: Some(json!("yes")), ..hello() };
    elsewhere.state.insert("current_node".to_owned(), json!("third"));

    let after = world.create("a").await.run;
    let chosen = world.try_create(world.new_run("b"), elsewhere).await.unwrap().run;

    assert_eq!((after.root, after.resumes), (after.id, None));
    assert_eq!((chosen.root, chosen.resumes), (chosen.id, None));
    assert_eq!(world.store.last_of_chain(paused).await.unwrap().unwrap().id, paused);
    assert_eq!(world.store.last_of_chain(RunId::new()).await.unwrap(), None);
}

/// Invariant 6: of two answers at once one is accepted.
pub async fn a_paused_run_is_resumed_once(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    ask(&world, run, 1).await;

    let answers = (0..10).map(|n| {
        let (world, input) = (world.clone(), RunInput { resume: Some(json!(n)), ..RunInput::default() });
        tokio::spawn(async move { world.try_create(world.new_run("t"), input).await })
    });
    let answers = futures::future::join_all(answers).await;

    let accepted = answers.into_iter().filter(|answer| answer.as_ref().unwrap().is_ok()).count();
    assert_eq!(accepted, 1);
}

async fn ask(world: &World, run: RunId, seq: i32) -> CommitOutcome {
    ask_at(world, run, seq, 0).await
}

async fn ask_again(world: &World, run: RunId, seq: i32) {
    ask_at(world, run, seq, 1).await;
}

/// Runs a step whose node asks its question number `position`.
pub(super) async fn ask_at(world: &World, run: RunId, seq: i32, position: usize) -> CommitOutcome {
    let claimed = world.claim(step_of(run, seq)).await;
    let question = Box::new(Interrupt::default());
    let commit = world.after(&claimed, Err(NodeError::Interrupt { position, question })).await;
    world.commit(&commit).await.unwrap()
}

async fn answer(world: &World, thread: &str, value: crate::domain::Json) -> RunId {
    let input = RunInput { resume: Some(value), messages: vec![user("answer")], ..RunInput::default() };
    world.try_create(world.new_run(thread), input).await.unwrap().run.id
}
