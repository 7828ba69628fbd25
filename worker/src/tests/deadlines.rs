//! Nodes that run past their deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use threadgate_shared::domain::RunStatus;
use threadgate_shared::graph::{NodeContext, NodePolicy};
use threadgate_shared::store::StepStatus;

use crate::config::WorkerConfig;
use crate::testing::{Gate, Stack, attempts, config, one_node, one_node_with};

fn two_seconds(policy: NodePolicy) -> NodePolicy {
    NodePolicy { timeout_ms: Some(2_000), ..policy }
}

/// C05: the first attempt ignores its token and returns late; the second is quick.
#[tokio::test(start_paused = true)]
async fn an_attempt_past_its_deadline_ends_and_its_late_result_writes_nothing() {
    let (gate, starts) = (Gate::new(), Arc::new(AtomicU32::new(0)));
    let (late, counted) = (gate.clone(), Arc::clone(&starts));
    let stack = Stack::new(one_node_with(two_seconds(attempts(2)), move |ctx: NodeContext| {
        let (late, starts) = (late.clone(), Arc::clone(&counted));
        async move {
            starts.fetch_add(1, Ordering::Relaxed);
            if ctx.attempt == 1 {
                late.pass().await;
            }
            format!("attempt {}", ctx.attempt)
        }
    }));
    let _worker = stack.work(config()).await;
    let _scheduler = stack.schedule();
    let run = stack.create("t").await;
    gate.entered().await;

    stack.waits_until(|| async { stack.steps(run).await[0].attempts.len() == 1 }).await;
    gate.open();

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    let step = stack.steps(run).await.remove(0);
    assert_eq!((step.status, step.attempt), (StepStatus::Done, 2));
    assert_eq!(step.attempts[0].end.end, "timeout");
    assert_eq!(step.attempts[0].end.error.as_ref().unwrap().code, "NODE_TIMEOUT_001");
    assert_eq!(stack.texts("t").await, ["hi", "attempt 2"]);
    assert_eq!(starts.load(Ordering::Relaxed), 2);
}

/// C05
#[tokio::test(start_paused = true)]
async fn without_attempts_left_a_passed_deadline_fails_the_run_and_other_runs_go_on() {
    let stack = Stack::new(one_node_with(two_seconds(attempts(1)), |ctx: NodeContext| async move {
        if ctx.thread_id.as_str() == "stuck" {
            futures::future::pending::<()>().await;
        }
        "done"
    }));
    let _worker = stack.work(WorkerConfig { slots: 1, ..config() }).await;

    let (stuck, other) = (stack.create("stuck").await, stack.create("other").await);

    assert_eq!(stack.ends(stuck).await, RunStatus::Failed);
    let error = stack.error(stuck).await;
    assert_eq!(error.code, "NODE_TIMEOUT_001");
    assert!(error.transient);
    assert_eq!(error.message, "Error in node 'only': it ran past its deadline of 2 s");
    assert_eq!(stack.ends(other).await, RunStatus::Completed);
}

/// C05: on real threads, a node that never gives its thread back.
#[tokio::test]
async fn a_node_that_blocks_its_thread_for_ever_does_not_hold_its_slot() {
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = Arc::new(std::sync::Mutex::new(blocked));
    let policy = NodePolicy { timeout_ms: Some(50), ..attempts(1) };
    let stack = Stack::new(one_node_with(policy, move |ctx: NodeContext| {
        let blocked = Arc::clone(&blocked);
        async move {
            if ctx.thread_id.as_str() == "stuck" {
                let _ = blocked.lock().unwrap().recv();
            }
            "done"
        }
    }));
    let _worker = stack.work(WorkerConfig { slots: 1, node_threads: 2, ..config() }).await;

    let stuck = stack.create("stuck").await;
    assert_eq!(stack.ends(stuck).await, RunStatus::Failed);

    let other = stack.create("other").await;
    assert_eq!(stack.ends(other).await, RunStatus::Completed);
    drop(release);
}

#[tokio::test(start_paused = true)]
async fn the_deadline_is_the_nodes_own_and_never_above_the_servers() {
    let told = |ctx: NodeContext| async move { format!("{:?}", ctx.deadline.unwrap()) };
    let texts = async |policy: NodePolicy| {
        let stack = Stack::new(one_node_with(policy, told));
        let _worker = stack.work(config()).await;
        let run = stack.create("t").await;
        assert_eq!(stack.ends(run).await, RunStatus::Completed);
        stack.texts("t").await.remove(1)
    };

    assert_eq!(texts(two_seconds(attempts(1))).await, "2s");
    assert_eq!(texts(NodePolicy { timeout_ms: Some(5_000_000), ..attempts(1) }).await, "900s");
    assert_eq!(texts(attempts(1)).await, "900s");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_watches_its_token_hears_of_its_deadline() {
    let heard = Arc::new(AtomicU32::new(0));
    let hears = Arc::clone(&heard);
    let stack = Stack::new(one_node(move |ctx: NodeContext| {
        let heard = Arc::clone(&hears);
        async move {
            ctx.cancelled.cancelled().await;
            heard.fetch_add(1, Ordering::Relaxed);
            "too late"
        }
    }));
    let _worker = stack.work(WorkerConfig { node_timeout_max: Duration::from_secs(3), ..config() }).await;
    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Failed);
    stack.waits_until(|| async { heard.load(Ordering::Relaxed) == 1 }).await;
    assert_eq!(stack.texts("t").await, ["hi"]);
}
