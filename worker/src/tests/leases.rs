//! Keeping a lease, and losing it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use threadgate_shared::domain::{RunId, RunStatus};
use threadgate_shared::graph::{Graph, GraphBuilder, NodeContext};
use threadgate_shared::store::memory::{Failure, Operation};
use threadgate_shared::store::{Runs, StepStatus, Upkeep};
use tokio::time::Instant;

use crate::WorkerError;
use crate::config::WorkerConfig;
use crate::testing::{Gate, Stack, config, one_node};

/// A graph whose node counts its starts and waits at `gate`.
fn gated(gate: &Gate, starts: &Arc<AtomicU32>) -> GraphBuilder {
    let (gate, starts) = (gate.clone(), Arc::clone(starts));
    one_node(move |_: NodeContext| {
        let (gate, starts) = (gate.clone(), Arc::clone(&starts));
        async move {
            let start = starts.fetch_add(1, Ordering::Relaxed) + 1;
            gate.pass().await;
            format!("start {start}")
        }
    })
}

/// C01
#[tokio::test(start_paused = true)]
async fn a_step_longer_than_its_lease_starts_once() {
    let stack = Stack::new(one_node(|_: NodeContext| async {
        tokio::time::sleep(Duration::from_secs(40)).await;
        "slow and steady"
    }));
    let _worker = stack.work(config()).await;
    let run = stack.create("t").await;

    let mut passes = tokio::time::interval(Duration::from_secs(3));
    while !stack.status(run).await.is_final() {
        passes.tick().await;
        assert_eq!(stack.sweep().await, 0);
    }

    assert_eq!(stack.status(run).await, RunStatus::Completed);
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Done, 1)]);
    assert_eq!(stack.checkpoints("t"), 2, "the input's and the step's");
}

/// C01: nobody sweeps and nothing else is asked for three times the lease.
#[tokio::test(start_paused = true)]
async fn a_long_step_outlasts_an_outage_of_scheduler_and_queue() {
    let (gate, starts) = (Gate::new(), Arc::default());
    let stack = Stack::new(gated(&gate, &starts));
    let _worker = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;

    stack.queue.set_away(true);
    tokio::time::sleep(Duration::from_secs(12)).await; // The clock is paused: this takes no time.
    stack.queue.set_away(false);
    assert_eq!(stack.sweep().await, 0);
    gate.open();

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(starts.load(Ordering::Relaxed), 1);
}

/// C02: one node computes on its thread without awaiting, another waits there for a child process;
/// on real threads and a real clock.
#[tokio::test]
async fn busy_nodes_do_not_starve_the_heartbeat() {
    let release = Arc::new(AtomicBool::new(false));
    let child = Arc::new(std::sync::Mutex::new(
        std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap(),
    ));
    let input = child.lock().unwrap().stdin.take();
    let busy = Arc::clone(&release);
    let stack = Stack::new(one_node(move |ctx: NodeContext| {
        let (busy, child) = (Arc::clone(&busy), Arc::clone(&child));
        async move {
            if ctx.thread_id.as_str() == "child" {
                child.lock().unwrap().wait().unwrap();
            }
            while !busy.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            "computed"
        }
    }));
    let short = WorkerConfig {
        node_threads: 2,
        lease_ttl: Duration::from_millis(300),
        heartbeat_interval: Duration::from_millis(50),
        ..config()
    };
    let _worker = stack.work(short).await;
    let (run, other) = (stack.create("t").await, stack.create("child").await);

    let first = leased_until(&stack, run).await;
    let others_first = leased_until(&stack, other).await;
    let two_ttls = chrono::Duration::milliseconds(600);
    stack
        .waits_until(|| async {
            leased_until(&stack, run).await - first > two_ttls
                && leased_until(&stack, other).await - others_first > two_ttls
        })
        .await;
    assert_eq!(stack.sweep().await, 0);
    release.store(true, Ordering::Relaxed);
    drop(input); // The child ends.

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.ends(other).await, RunStatus::Completed);
    assert_eq!(stack.steps(run).await[0].attempt, 1);
}

/// When the run's open step's lease ends; waits until it has one.
async fn leased_until(stack: &Stack, run: RunId) -> DateTime<Utc> {
    let leased = || async {
        let facts = stack.store.why(run).await.unwrap().unwrap();
        facts.due_at.filter(|_| facts.step.is_some_and(|step| step.status == StepStatus::Leased))
    };
    stack.waits_until(|| async { leased().await.is_some() }).await;
    leased().await.unwrap()
}

/// C03 (a): only the heartbeat ends.
#[tokio::test(start_paused = true)]
async fn without_a_heartbeat_the_work_is_dropped_when_the_lease_is_over() {
    let (gate, starts) = (Gate::new(), Arc::default());
    let stack = Stack::new(gated(&gate, &starts));
    let first = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;
    let before = Instant::now();

    first.heartbeat.abort();
    let ended = first.worker.await.unwrap();

    assert!(matches!(ended, Err(WorkerError::HeartbeatDied)), "{ended:?}");
    assert!(before.elapsed() <= config().lease_ttl, "it waited for more than the rest of the lease");
    assert!(first.health.check().unwrap_err().contains("heartbeat"));
    assert_eq!(stack.checkpoints("t"), 1, "nothing was written");

    let _second = stack.work(config()).await;
    let _scheduler = stack.schedule();
    gate.open();
    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Done, 2)]);
}

/// C03 (b), C04: another worker took the step over while this one could not reach the store; its
/// node is cancelled as soon as that is known, and nothing is written under the old token.
#[tokio::test(start_paused = true)]
async fn a_step_that_was_taken_over_is_dropped_by_its_first_worker() {
    let (gate, starts) = (Gate::new(), Arc::default());
    let stack = Stack::new(gated(&gate, &starts));
    let first = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;

    // The first worker's renewals do not arrive until the lease has run out.
    for _ in 0..5 {
        stack.store.fail_next(Operation::Heartbeat, Failure::Before);
    }
    stack.waits_until(|| async { stack.sweep().await == 1 }).await;
    let second = stack.work(config()).await;
    gate.entered().await;
    tokio::time::sleep(Duration::from_millis(2_500)).await; // The clock is paused: this takes no time.
    gate.open();

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Done, 2)]);
    assert_eq!(stack.texts("t").await, ["hi", "start 2"]);
    assert_eq!(stack.checkpoints("t"), 2);
    // Both workers go on with other runs.
    let next = stack.create("u").await;
    gate.entered().await;
    gate.open();
    assert_eq!(stack.ends(next).await, RunStatus::Completed);
    first.end().await.unwrap();
    second.end().await.unwrap();
}

/// C04: the result comes before the loss is known; the lease is checked first, and nothing is written.
#[tokio::test(start_paused = true)]
async fn a_late_result_is_not_committed() {
    let (gate, starts) = (Gate::new(), Arc::default());
    let stack = Stack::new(gated(&gate, &starts));
    let first = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;

    for _ in 0..5 {
        stack.store.fail_next(Operation::Heartbeat, Failure::Before);
    }
    stack.waits_until(|| async { stack.store.sweep(100, true).await.unwrap().released == 1 }).await;
    gate.open();
    first.end().await.unwrap();

    assert_eq!(stack.checkpoints("t"), 1, "the run's step is ready and waits for its next start");
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Ready, 1)]);
}

/// C27: five minutes between the clocks change nothing.
#[tokio::test(start_paused = true)]
async fn a_worker_whose_clock_is_wrong_holds_its_leases() {
    let (gate, starts) = (Gate::new(), Arc::default());
    let stack = Stack::new(gated(&gate, &starts));
    stack.store.skew(Duration::from_secs(300));
    let _worker = stack.work(config()).await;
    let _scheduler = stack.schedule();
    let run = stack.create("t").await;
    gate.entered().await;

    tokio::time::sleep(Duration::from_secs(20)).await; // The clock is paused: this takes no time.
    gate.open();

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(starts.load(Ordering::Relaxed), 1);
}

/// C06: a worker's name is only a label.
#[tokio::test(start_paused = true)]
async fn a_worker_does_not_renew_the_leases_of_a_dead_one_of_the_same_name() {
    let (gate, starts) = (Gate::new(), Arc::default());
    let stack = Stack::new(gated(&gate, &starts));
    let dead = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;
    let _survivor = stack.work(config()).await;

    dead.kill();
    let _scheduler = stack.schedule();
    gate.entered().await;
    (0..2).for_each(|_| gate.open()); // The dead worker's node is at the gate too.

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.told_steps(run).await, [("only".to_owned(), StepStatus::Done, 2)]);
}

/// C03 (b): the same while the first worker drains; it does not wait for the rest of its grace.
#[tokio::test(start_paused = true)]
async fn a_draining_worker_whose_step_was_taken_over_ends_at_once() {
    let (gate, starts) = (Gate::new(), Arc::default());
    let stack = Stack::new(gated(&gate, &starts));
    let first = stack.work(WorkerConfig { shutdown_grace: Duration::from_secs(300), ..config() }).await;
    let run = stack.create("t").await;
    gate.entered().await;

    first.shutdown.cancel();
    for _ in 0..5 {
        stack.store.fail_next(Operation::Heartbeat, Failure::Before);
    }
    stack.waits_until(|| async { stack.sweep().await == 1 }).await;
    let taken_over = Instant::now();
    let _second = stack.work(config()).await;
    gate.entered().await;
    first.end().await.unwrap();

    assert!(taken_over.elapsed() < Duration::from_secs(5), "{:?}", taken_over.elapsed());
    gate.open();
    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["hi", "start 2"]);
}

/// C07: the lease runs out three times while its holders still work.
#[tokio::test(start_paused = true)]
async fn attempts_used_up_while_the_holders_live_fail_the_run_once() {
    let (gate, starts) = (Gate::new(), Arc::default());
    let stack = Stack::new(gated(&gate, &starts));
    let worker = stack.work(config()).await;
    for _ in 0..60 {
        stack.store.fail_next(Operation::Heartbeat, Failure::Before);
    }
    let run = stack.create("t").await;
    let _scheduler = stack.schedule();
    for _ in 0..3 {
        gate.entered().await;
    }

    assert_eq!(stack.ends(run).await, RunStatus::Failed);
    let before = (stack.checkpoints("t"), stack.steps(run).await);
    (0..3).for_each(|_| gate.open());
    let next = stack.create("t").await;
    gate.entered().await;
    gate.open();

    assert_eq!(stack.ends(next).await, RunStatus::Completed);
    assert_eq!(stack.error(run).await.code, "worker_crash");
    assert_eq!(stack.steps(run).await, before.1, "the holders' writes are refused");
    assert_eq!(stack.checkpoints("t"), before.0 + 2, "the next run's input and its step");
    assert_eq!(starts.load(Ordering::Relaxed), 4, "no fourth start of the first step");
    worker.end().await.unwrap();
}

/// C08, C10: the worker is killed inside the second of three nodes; nobody asks again.
#[tokio::test(start_paused = true)]
async fn a_worker_killed_inside_a_node_costs_its_lease_and_one_sweep() {
    let (gate, starts) = (Gate::new(), Arc::new(AtomicU32::new(0)));
    let (held, count) = (gate.clone(), Arc::clone(&starts));
    let say = move |ctx: NodeContext| {
        let (gate, starts) = (held.clone(), Arc::clone(&count));
        async move {
            starts.fetch_add(1, Ordering::Relaxed);
            if ctx.node == "b" {
                gate.pass().await;
            }
            format!("{} {}", ctx.node, ctx.attempt)
        }
    };
    let graph = Graph::builder("three").node("a", say.clone()).node("b", say.clone()).node("c", say);
    let stack = Stack::new(graph.entry("a").edge("a", "b").edge("b", "c"));
    let killed = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;
    let _survivor = stack.work(config()).await;
    let _scheduler = stack.schedule();

    let kill = Instant::now();
    killed.kill();
    gate.entered().await;
    let resumed = kill.elapsed();
    (0..2).for_each(|_| gate.open()); // The dead worker's node is at the gate too.

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert!(resumed <= Duration::from_millis(4_600), "{resumed:?}");
    let texts = stack.texts("t").await;
    assert_eq!(texts, ["hi", "a 1", "b 2", "c 1"]);
    assert_eq!(starts.load(Ordering::Relaxed), 4);
}
