//! Answers that are lost and stores that are away.

use std::time::Duration;

use threadgate_shared::domain::{PoolName, RunStatus};
use threadgate_shared::graph::{Graph, GraphBuilder, NodeContext};
use threadgate_shared::store::memory::{Failure, Operation};
use threadgate_shared::store::{Runs, StepStatus};

use crate::testing::{Gate, Stack, config, one_node};

fn two_nodes() -> GraphBuilder {
    let say = |ctx: NodeContext| async move { format!("{} {}", ctx.node, ctx.attempt) };
    Graph::builder("two").node("first", say).node("second", say).entry("first").edge("first", "second")
}

/// C11
#[tokio::test(start_paused = true)]
async fn a_commit_whose_answer_is_lost_is_found_and_the_run_goes_on() {
    let stack = Stack::new(two_nodes());
    stack.store.fail_next(Operation::Commit, Failure::After);
    stack.store.fail_next(Operation::Commit, Failure::After);
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["hi", "first 1", "second 1"]);
    assert_eq!(stack.checkpoints("t"), 3, "one checkpoint a step");
    assert!(
        stack.told_steps(run).await.iter().all(|(_, status, attempt)| (*status, *attempt) == (StepStatus::Done, 1))
    );
}

/// C26: the store is away for longer than a lease while a node runs; what it did is kept.
#[tokio::test(start_paused = true)]
async fn an_outage_of_the_store_drops_no_work_and_charges_nothing() {
    let gate = Gate::new();
    let held = gate.clone();
    let stack = Stack::new(one_node(move |_: NodeContext| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            "kept"
        }
    }));
    let worker = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;

    stack.store.set_down(true);
    gate.open();
    tokio::time::sleep(Duration::from_secs(30)).await; // The clock is paused: this takes no time.
    assert!(worker.health.check().unwrap_err().contains("database"));
    stack.store.set_down(false);

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["hi", "kept"]);
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Done, 1)]);
    stack.waits_until(|| async { worker.health.check().is_ok() }).await;
}

/// C13: the claim was stored and its answer lost; the step does not wait for the lease to run out.
#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_is_lost_charges_nothing() {
    let stack = Stack::new(two_nodes());
    stack.store.fail_next(Operation::Claim, Failure::After);
    let _worker = stack.work(config()).await;
    let _scheduler = stack.schedule();

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert!(
        stack.told_steps(run).await.iter().all(|(_, status, attempt)| (*status, *attempt) == (StepStatus::Done, 1))
    );
}

#[tokio::test(start_paused = true)]
async fn a_load_that_fails_is_asked_again() {
    let stack = Stack::new(two_nodes());
    for _ in 0..3 {
        stack.store.fail_next(Operation::Load, Failure::Before);
    }
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.steps(run).await[0].attempt, 1);
}

/// C24: jobs whose step is done, unknown or somebody else's start nothing.
#[tokio::test(start_paused = true)]
async fn jobs_without_a_step_to_take_are_dropped() {
    let stack = Stack::new(two_nodes());
    let worker = stack.work(config()).await;
    let run = stack.create("t").await;
    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    let before = (stack.checkpoints("t"), stack.store.steps(run).await.unwrap());

    let mut stale: Vec<_> = (1..=2).map(|seq| stack.job(run, seq)).collect();
    stale.extend((0..100).map(|seq| stack.job(threadgate_shared::domain::RunId::new(), seq)));
    threadgate_shared::queue::JobQueue::push(&*stack.queue, &stale).await.unwrap();
    let next = stack.create("u").await;
    assert_eq!(stack.ends(next).await, RunStatus::Completed);
    worker.end().await.unwrap();

    assert_eq!((stack.checkpoints("t"), stack.store.steps(run).await.unwrap()), before);
}

/// C09: the worker is killed right after the commit of a step, before anybody hears of it.
#[tokio::test(start_paused = true)]
async fn a_finished_step_never_runs_again() {
    for killed_after in 1..=2 {
        let stack = Stack::new(two_nodes());
        let first = crate::Worker::start(config(), stack.parts(), &stack.registry).await.unwrap();
        let run = stack.create_backlog("t").await;
        stack.send().await;
        for seq in 1..=killed_after {
            threadgate_shared::queue::JobHandler::handle(&*first.executor, stack.job(run, seq)).await;
        }

        // What the first worker and the queue knew is gone; the store has the rest.
        let (store, registry) = (stack.store.clone(), stack.registry.clone());
        let stack = Stack { store, registry, queue: Default::default(), events: stack.events.clone() };
        let _second = stack.work(config()).await;
        let _scheduler = stack.schedule();

        assert_eq!(stack.ends(run).await, RunStatus::Completed);
        assert_eq!(stack.texts("t").await, ["hi", "first 1", "second 1"]);
        assert_eq!(stack.checkpoints("t"), 3);
    }
}

/// A connection that gives no sign of life holds nothing up for ever.
#[tokio::test(start_paused = true)]
async fn a_statement_without_an_answer_is_given_up() {
    let stack = Stack::new(two_nodes());
    let worker = stack.work(config()).await;

    worker.kill();

    assert!(worker.end().await.is_ok(), "it ends although the store never answers");
}

/// C13 (a): jobs are read and lost before their steps are claimed.
#[tokio::test(start_paused = true)]
async fn steps_whose_jobs_are_lost_are_sent_again() {
    let stack = Stack::new(two_nodes());
    let mut runs = Vec::new();
    for number in 0..20 {
        runs.push(stack.create_backlog(&format!("t{number}")).await);
    }
    let lost = stack.parts().dispatcher.top_up(&PoolName::default_pool(), 0).await.unwrap();
    assert!(lost > 0);
    let stack = Stack { queue: Default::default(), ..stack };

    let _worker = stack.work(config()).await;
    let _scheduler = stack.schedule();
    while stack.parts().dispatcher.top_up(&PoolName::default_pool(), 0).await.unwrap() > 0 {}

    for run in runs {
        assert_eq!(stack.ends(run).await, RunStatus::Completed);
        assert!(stack.told_steps(run).await.iter().all(|(_, _, attempt)| *attempt == 1), "nothing was charged");
    }
}
