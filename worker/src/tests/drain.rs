//! Ending politely.

use std::time::Duration;

use threadgate_shared::domain::RunStatus;
use threadgate_shared::graph::NodeContext;
use threadgate_shared::store::{StepStatus, Upkeep};
use tokio::time::Instant;

use crate::config::WorkerConfig;
use crate::testing::{Gate, Stack, config, one_node};

fn five_seconds() -> WorkerConfig {
    WorkerConfig { shutdown_grace: Duration::from_secs(5), ..config() }
}

/// C14: a node of 60 s, a grace of 5 s.
#[tokio::test(start_paused = true)]
async fn what_does_not_end_within_the_grace_is_given_back_uncharged() {
    let stack = Stack::new(one_node(|_: NodeContext| async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        "long"
    }));
    let worker = stack.work(five_seconds()).await;
    let run = stack.create("t").await;
    stack.waits_until(|| async { stack.status(run).await == RunStatus::Running }).await;
    let signal = Instant::now();

    worker.end().await.unwrap();

    assert!(signal.elapsed() <= Duration::from_secs(5), "{:?}", signal.elapsed());
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Ready, 0)]);
    assert_eq!(stack.status(run).await, RunStatus::Queued);
    assert_eq!(stack.checkpoints("t"), 1);

    let _next = stack.work(config()).await;
    stack.sweep().await;
    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Done, 1)], "nothing was charged");
}

/// C14: a node that blocks its thread does not keep the process.
#[tokio::test]
async fn a_node_that_blocks_does_not_hold_up_the_end() {
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = std::sync::Arc::new(std::sync::Mutex::new(blocked));
    let stack = Stack::new(one_node(move |_: NodeContext| {
        let blocked = blocked.clone();
        async move {
            let _ = blocked.lock().unwrap().recv();
            "never"
        }
    }));
    let grace = Duration::from_millis(400);
    let worker = stack.work(WorkerConfig { shutdown_grace: grace, node_threads: 1, ..config() }).await;
    let run = stack.create("t").await;
    stack.waits_until(|| async { stack.status(run).await == RunStatus::Running }).await;
    let signal = Instant::now();

    worker.end().await.unwrap();

    assert!(signal.elapsed() < grace, "{:?}", signal.elapsed());
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Ready, 0)]);
    drop(release);
}

#[tokio::test(start_paused = true)]
async fn what_ends_within_the_grace_is_committed_and_nothing_new_is_taken() {
    let gate = Gate::new();
    let held = gate.clone();
    let stack = Stack::new(
        one_node(move |_: NodeContext| {
            let gate = held.clone();
            async move {
                gate.pass().await;
                "in time"
            }
        })
        .node("next", |_: NodeContext| async { "not here" })
        .edge("only", "next"),
    );
    let worker = stack.work(five_seconds()).await;
    let health = worker.health.clone();
    let run = stack.create("t").await;
    gate.entered().await;

    worker.shutdown.cancel();
    stack.waits_until(|| async { health.check().is_err() }).await;
    gate.open();
    worker.end().await.unwrap();

    assert_eq!(stack.texts("t").await, ["hi", "in time"]);
    assert_eq!(
        stack.told_steps(run).await,
        [("only".to_owned(), StepStatus::Done, 1), ("next".to_owned(), StepStatus::Ready, 0)]
    );
    assert!(stack.store.pools().await.unwrap().iter().all(|pool| pool.workers == 0), "the worker said goodbye");
}

/// C13 (b): the signal comes while a step is claimed.
#[tokio::test(start_paused = true)]
async fn a_step_claimed_as_the_signal_comes_is_given_back() {
    let stack = Stack::new(one_node(|_: NodeContext| async { "not now" }));
    let run = stack.create("t").await;
    let worker = crate::Worker::start(config(), stack.parts(), &stack.registry).await.unwrap();

    worker.executor.taking.cancel();
    threadgate_shared::queue::JobHandler::handle(&*worker.executor, stack.job(run, 1)).await;

    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Ready, 0)]);
}
