//! Stops.

use std::time::Duration;

use threadgate_shared::domain::RunStatus;
use threadgate_shared::graph::{Graph, GraphBuilder, NodeContext, NodeError};
use threadgate_shared::store::StepStatus;
use tokio::time::Instant;

use crate::testing::{Gate, Stack, config, one_node};

/// Three nodes, the first of which waits at `gate`.
fn three_nodes(gate: &Gate) -> GraphBuilder {
    let gate = gate.clone();
    let held = move |_: NodeContext| {
        let gate = gate.clone();
        async move {
            gate.pass().await;
            "first"
        }
    };
    let say = |ctx: NodeContext| async move { ctx.node };
    Graph::builder("three")
        .node("first", held)
        .node("second", say)
        .node("third", say)
        .entry("first")
        .edge("first", "second")
        .edge("second", "third")
}

/// C19, C21
#[tokio::test(start_paused = true)]
async fn a_stop_during_a_node_keeps_its_output_and_starts_no_further_node() {
    let gate = Gate::new();
    let stack = Stack::new(three_nodes(&gate));
    let _worker = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;

    stack.stop("t").await;
    gate.open();

    assert_eq!(stack.ends(run).await, RunStatus::Stopped);
    assert_eq!(stack.texts("t").await, ["hi", "first"]);
    assert_eq!(stack.told_steps(run).await, [("first".to_owned(), StepStatus::Done, 1)]);
    let meta = stack.state("t").await.meta;
    assert_eq!(meta.interrupted_node.as_deref(), Some("second"));
    assert_eq!(stack.told_events(run).await.last().unwrap(), "run stopped");

    let next = stack.create("t").await;
    assert_eq!(stack.ends(next).await, RunStatus::Completed, "the stop belonged to the first run");
    assert_eq!(stack.told_steps(next).await[0].0, "second");
}

/// C20: the queue is away; the stop is seen all the same, within a second by a node that watches.
#[tokio::test(start_paused = true)]
async fn a_node_that_watches_its_token_ends_within_a_second_of_a_stop() {
    let stack = Stack::new(
        one_node(|ctx: NodeContext| async move {
            ctx.cancelled.cancelled().await;
            "what I have so far"
        })
        .node("next", |_: NodeContext| async { "never" })
        .edge("only", "next"),
    );
    let _worker = stack.work(config()).await;
    let run = stack.create("t").await;
    stack.waits_until(|| async { stack.status(run).await == RunStatus::Running }).await;
    stack.queue.set_away(true);
    let asked = Instant::now();

    stack.stop("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Stopped);
    assert!(asked.elapsed() <= Duration::from_millis(1_100), "{:?}", asked.elapsed());
    assert_eq!(stack.texts("t").await, ["hi", "what I have so far"]);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_fails_because_of_a_stop_stops_its_run() {
    let stack = Stack::new(one_node(|ctx: NodeContext| async move {
        ctx.cancelled.cancelled().await;
        Err::<String, _>(NodeError::permanent("interrupted"))
    }));
    let _worker = stack.work(config()).await;
    let run = stack.create("t").await;
    stack.waits_until(|| async { stack.status(run).await == RunStatus::Running }).await;

    stack.stop("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Stopped);
    assert_eq!(stack.state("t").await.meta.interrupted_node.as_deref(), Some("only"));
    assert_eq!(stack.told_events(run).await, ["only starts (1)", "run stopped"]);
}

/// A run whose last node has just ended completes, stop or not.
#[tokio::test(start_paused = true)]
async fn a_stop_during_the_last_node_lets_the_run_complete() {
    let gate = Gate::new();
    let held = gate.clone();
    let stack = Stack::new(one_node(move |_: NodeContext| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            "last words"
        }
    }));
    let _worker = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;

    stack.stop("t").await;
    gate.open();

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["hi", "last words"]);
}
