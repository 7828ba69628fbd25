//! Work without the queue.

use std::time::Duration;

use threadgate_shared::domain::RunStatus;
use threadgate_shared::graph::{Graph, GraphBuilder, NodeContext};
use tokio::time::Instant;

use crate::config::WorkerConfig;
use crate::testing::{Stack, config};

fn two_nodes() -> GraphBuilder {
    let say = |ctx: NodeContext| async move { ctx.node };
    Graph::builder("two").node("first", say).node("second", say).entry("first").edge("first", "second")
}

/// C20, C23: work is taken from the store, and the next step does not wait to be sent again.
#[tokio::test(start_paused = true)]
async fn without_the_queue_runs_complete_soon() {
    let stack = Stack::new(two_nodes());
    stack.queue.set_away(true);
    let worker = stack.work(config()).await;
    let before = Instant::now();

    let run = stack.create_backlog("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert!(before.elapsed() <= Duration::from_secs(5), "{:?}", before.elapsed());
    assert_eq!(worker.health.check(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn without_the_queue_a_worker_takes_no_more_than_its_slots_and_every_run_in_the_end() {
    let stack = Stack::new(two_nodes());
    stack.queue.set_away(true);
    let _worker = stack.work(WorkerConfig { slots: 2, ..config() }).await;

    let mut runs = Vec::new();
    for number in 0..7 {
        runs.push(stack.create_backlog(&format!("t{number}")).await);
    }

    for run in runs {
        assert_eq!(stack.ends(run).await, RunStatus::Completed);
    }
}

/// One tenant alone gets all the free slots at once, not one a second.
#[tokio::test(start_paused = true)]
async fn without_the_queue_one_tenants_runs_fill_the_slots() {
    let stack = Stack::new(two_nodes());
    stack.queue.set_away(true);
    let mut runs = Vec::new();
    for number in 0..60 {
        runs.push(stack.create_backlog(&format!("t{number}")).await);
    }
    let before = Instant::now();

    let _worker = stack.work(WorkerConfig { slots: 64, ..config() }).await;

    for run in runs {
        assert_eq!(stack.ends(run).await, RunStatus::Completed);
    }
    assert!(before.elapsed() <= Duration::from_secs(5), "{:?}", before.elapsed());
}

/// C23
#[tokio::test(start_paused = true)]
async fn a_worker_returns_to_the_queue_when_it_is_back() {
    let stack = Stack::new(two_nodes());
    stack.queue.set_away(true);
    let _worker = stack.work(config()).await;
    let without = stack.create_backlog("t").await;
    assert_eq!(stack.ends(without).await, RunStatus::Completed);

    stack.queue.set_away(false);
    let with = stack.create("u").await;

    let before = Instant::now();
    assert_eq!(stack.ends(with).await, RunStatus::Completed);
    assert!(before.elapsed() < Duration::from_millis(500), "it came through the queue");
}
