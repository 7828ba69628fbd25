//! Stops: durable, tied to one run, seen by the commit.

use std::sync::Arc;
use std::time::Duration;

use super::fixture::{LONG, OVER, World, says, step_of};
use super::resuming::ask_at;
use crate::domain::{ExecutionStatus, RunId, RunStatus};
use crate::graph::admission::Refusal;
use crate::store::{AttemptEnd, CommitOutcome, StepStatus, StopAnswer, Store, StoreError};

/// C19: the output of the running node is kept, and no further node starts.
pub async fn a_stop_during_a_node_keeps_its_output(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Ok(says("one"))).await;

    let answer = stop(&world, "t").await;
    let outcome = world.commit(&commit).await.unwrap();

    assert_eq!(answer, StopAnswer::Running(run));
    assert_eq!(outcome, CommitOutcome::Stopped { version: 2 });
    assert_eq!(world.run(run).await.status, RunStatus::Stopped);
    assert_eq!(world.steps(run).await.len(), 1);
    let state = world.state("t").await;
    assert_eq!(state.meta, commit.stopped_meta);
    assert_eq!(state.meta.interrupted_node.as_deref(), Some("second"));
    assert_eq!(world.context("t").await, ["hello", "one"]);
    assert_eq!(world.commit(&commit).await.unwrap(), outcome, "a repetition hears the same");
    let next = world.create("t").await.run;
    assert_eq!((world.steps(next.id).await[0].node.as_str(), next.resumes), ("second", None));
}

/// C19: between two nodes the next one is cancelled at once.
pub async fn a_stop_between_nodes_cancels_the_next(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.step(run, 1, "one").await;

    let answer = stop(&world, "t").await;

    assert_eq!(answer, StopAnswer::Running(run));
    assert!(world.try_claim(step_of(run, 2), LONG).await.is_none());
    let record = world.run(run).await;
    assert_eq!((record.status, record.version), (RunStatus::Stopped, 3));
    assert_eq!(world.steps(run).await[1].status, StepStatus::Cancelled);
    let state = world.state("t").await;
    assert_eq!((state.version, state.meta.status), (3, ExecutionStatus::InterruptedAfter));
    assert_eq!(state.meta.interrupted_node.as_deref(), Some("second"));
    assert_eq!(state.meta.interrupt_reason.as_deref(), Some("stop_requested"));
    let next = world.create("t").await.run.id;
    assert_eq!(world.steps(next).await[0].node, "second");
}

/// C20: a run nobody has started is closed by the answer itself.
pub async fn a_stop_in_the_queue_closes_the_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;

    assert_eq!(stop(&world, "t").await, StopAnswer::Running(run));

    assert_eq!(world.run(run).await.status, RunStatus::Stopped);
    assert!(world.try_claim(step_of(run, 1), LONG).await.is_none());
    assert_eq!(world.store.backlog_lanes().await.unwrap(), []);
    assert_eq!(world.context("t").await, ["hello"]);
}

/// Invariant 5: a run whose last node has just ended completes, and the stop is gone with it.
pub async fn a_run_at_its_end_completes_despite_a_stop(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.step(run, 1, "one").await;
    world.step(run, 2, "two").await;
    let claimed = world.claim(step_of(run, 3)).await;
    let commit = world.after(&claimed, Ok(says("three"))).await;

    stop(&world, "t").await;
    let outcome = world.commit(&commit).await.unwrap();
    let next = world.create("t").await.run.id;
    world.finish(next).await;

    assert_eq!(outcome, CommitOutcome::Committed { version: 4 });
    assert_eq!(world.run(run).await.status, RunStatus::Completed);
    assert_eq!(world.run(next).await.status, RunStatus::Completed);
}

/// D2: a stop beats a pause.
pub async fn a_stop_beats_a_pause(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.step(run, 1, "one").await;
    let claimed = world.claim(step_of(run, 2)).await;
    stop(&world, "t").await;
    let question = Box::new(crate::graph::node::Interrupt::default());
    let asks = Err(crate::graph::node::NodeError::Interrupt { position: 0, question });
    let commit = world.after(&claimed, asks).await;

    let outcome = world.commit(&commit).await.unwrap();

    assert_eq!(outcome, CommitOutcome::Stopped { version: 3 });
    assert_eq!(world.run(run).await.status, RunStatus::Stopped);
    assert_eq!(world.state("t").await.meta.interrupt_reason.as_deref(), Some("stop_requested"));
}

/// C21: while a stop is open the thread is busy; the next run is not touched by it.
pub async fn a_stop_belongs_to_one_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Ok(says("one"))).await;
    stop(&world, "t").await;

    let refused = world.try_create(world.new_run("t"), super::fixture::hello()).await;
    let outcome = world.commit(&commit).await.unwrap();
    let next = world.create("t").await.run.id;
    world.step(next, 1, "two").await;
    world.step(next, 2, "three").await;

    assert!(matches!(refused, Err(StoreError::Refused(Refusal::Busy { .. }))), "{refused:?}");
    assert_eq!(outcome, CommitOutcome::Stopped { version: 2 });
    assert_eq!(world.run(next).await.status, RunStatus::Completed);
    assert_eq!(world.context("t").await, ["hello", "one", "hello", "two", "three"]);
}

/// C21: two stops are one; a stop of what has ended is none.
pub async fn a_second_stop_changes_nothing(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Ok(says("one"))).await;

    assert_eq!(stop(&world, "t").await, StopAnswer::Running(run));
    assert_eq!(stop(&world, "t").await, StopAnswer::Running(run));
    world.commit(&commit).await.unwrap();
    assert_eq!(stop(&world, "t").await, StopAnswer::NotRunning);

    assert_eq!(world.state("t").await.version, 2);
    let audit = world.store.audit(&world.scope(), &"t".into()).await.unwrap();
    assert_eq!(audit.iter().map(|entry| entry.action.as_str()).collect::<Vec<_>>(), ["stop"]);
}

/// A thread without state, a foreign one, one that never was.
pub async fn a_stop_of_nothing_says_so(store: Arc<dyn Store>) {
    let world = World::new(store).await.as_caller("acme", "ann");
    let run = world.create("t").await.run.id;
    let bob = world.as_caller("acme", "bob");
    let log_only = super::threads::put(&world, "log", vec![super::fixture::user("hi")]);
    world.store.put_messages(&world.scope(), log_only).await.unwrap();

    assert_eq!(stop(&world, "none").await, StopAnswer::NoState);
    assert_eq!(stop(&world, "log").await, StopAnswer::NoState);
    assert_eq!(stop(&bob, "t").await, StopAnswer::NoState);
    assert_eq!(bob.store.stop_run(&bob.scope(), run).await.unwrap(), None);
    assert_eq!(world.store.stop_run(&world.scope(), RunId::new()).await.unwrap(), None);
    assert_eq!(world.run(run).await.status, RunStatus::Queued);
}

/// A stop of one run answers with the run as it is then.
pub async fn a_run_may_be_stopped_by_its_id(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (queued, held, done) =
        (world.create("a").await.run.id, world.create("b").await.run.id, world.create("c").await.run.id);
    world.finish(done).await;
    world.claim(step_of(held, 1)).await;
    let stop = async |run| world.store.stop_run(&world.scope(), run).await.unwrap().unwrap();

    assert_eq!(stop(queued).await.status, RunStatus::Stopped);
    assert!(stop(held).await.status.is_active());
    assert!(world.store.why(held).await.unwrap().unwrap().stop_requested);
    assert_eq!(stop(done).await.status, RunStatus::Completed);
}

/// R14: a paused run that nobody resumed is closed; its question is gone.
pub async fn a_stop_closes_a_paused_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    ask_at(&world, run, 1, 0).await;

    let answer = stop(&world, "t").await;

    assert_eq!(answer, StopAnswer::NotRunning);
    assert_eq!(world.run(run).await.status, RunStatus::Stopped);
    assert_eq!(world.state("t").await.meta.interrupt_reason.as_deref(), Some("stop_requested"));
    let next = world.create("t").await.run;
    assert_eq!((world.steps(next.id).await[0].node.as_str(), next.resumes), ("first", None));
}

/// R13: a stop of a chain's root reaches its last run.
pub async fn a_stop_of_a_chain_reaches_its_last_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let root = world.create("t").await.run.id;
    ask_at(&world, root, 1, 0).await;
    let answer = crate::graph::admission::RunInput { resume: Some("yes".into()), ..Default::default() };
    let last = world.try_create(world.new_run("t"), answer).await.unwrap().run.id;

    let stopped = world.store.stop_run(&world.scope(), root).await.unwrap().unwrap();

    assert_eq!((stopped.id, stopped.status), (last, RunStatus::Stopped));
    assert_eq!(world.run(root).await.status, RunStatus::Interrupted);
}

/// D9: a run whose lease ran out does not run, yet its stop is recorded and honoured.
pub async fn a_stop_of_a_run_whose_worker_is_gone_is_honoured(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim_for(step_of(run, 1), OVER).await;
    let late = world.after(&claimed, Ok(says("late"))).await;
    let due = world.store.why(run).await.unwrap().unwrap().due_at.unwrap();
    while world.store.clock().await.unwrap().now <= due {}

    let answer = stop(&world, "t").await;
    settle(&world, run).await;

    assert_eq!(answer, StopAnswer::NotRunning);
    assert_eq!(world.run(run).await.status, RunStatus::Stopped);
    assert_eq!(world.commit(&late).await.unwrap(), CommitOutcome::LeaseLost);
    assert_eq!(world.context("t").await, ["hello"]);
}

/// A drain under a stop: the step never starts again.
pub async fn a_step_given_back_under_a_stop_never_starts_again(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    stop(&world, "t").await;

    world.store.give_back(&[(claimed.step, claimed.token)]).await.unwrap();

    assert!(world.try_claim(claimed.step, LONG).await.is_none());
    settle(&world, run).await;
    assert_eq!(world.state("t").await.meta.interrupted_node.as_deref(), Some("first"));
}

/// A retry under a stop does not take place.
pub async fn a_step_to_retry_under_a_stop_never_starts_again(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    stop(&world, "t").await;
    let end = AttemptEnd { end: "error".to_owned(), error: None };

    world.store.retry_step(claimed.step, claimed.token, &end, Duration::ZERO).await.unwrap();

    settle(&world, run).await;
    assert_eq!(world.steps(run).await.len(), 1);
}

/// A step that waits for its retry is closed by the stop.
pub async fn a_stop_ends_the_wait_for_a_retry(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let end = AttemptEnd { end: "error".to_owned(), error: None };
    world.store.retry_step(claimed.step, claimed.token, &end, LONG).await.unwrap();

    stop(&world, "t").await;

    assert_eq!(world.run(run).await.status, RunStatus::Stopped);
}

/// C19: a stop and a commit at once: whoever is second sees the first, and the run is stopped.
pub async fn a_stop_and_a_commit_at_once_agree(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for n in 0..20 {
        let thread = format!("t{n}");
        let run = world.create(&thread).await.run.id;
        let claimed = world.claim(step_of(run, 1)).await;
        let commit = world.after(&claimed, Ok(says("one"))).await;
        let (stopper, committer) = (world.clone(), world.clone());
        let id = thread.clone();

        let stopping = tokio::spawn(async move { stop(&stopper, &id).await });
        let committing = tokio::spawn(async move { committer.commit(&commit).await.unwrap() });
        let (answer, outcome) = (stopping.await.unwrap(), committing.await.unwrap());

        assert_eq!(answer, StopAnswer::Running(run));
        assert!(matches!(outcome, CommitOutcome::Stopped { version: 2 } | CommitOutcome::Committed { version: 2 }));
        assert_eq!(world.run(run).await.status, RunStatus::Stopped);
        assert!(world.try_claim(step_of(run, 2), LONG).await.is_none());
        assert_eq!(world.context(&thread).await, ["hello", "one"]);
    }
}

async fn stop(world: &World, thread: &str) -> StopAnswer {
    world.store.stop_thread(&world.scope(), &thread.into()).await.unwrap()
}

/// Sweeps until the run is closed as stopped; no sweep may offer its step.
async fn settle(world: &World, run: RunId) {
    loop {
        if world.run(run).await.status.is_final() {
            break;
        }
        let swept = world.store.sweep(100, true).await.unwrap();
        assert!(swept.send.is_empty(), "{swept:?}");
    }
    assert_eq!(world.run(run).await.status, RunStatus::Stopped);
}
