//! Nodes that fail.

use threadgate_shared::domain::RunStatus;
use threadgate_shared::graph::{Graph, Manifest, NodeContext, NodeError, NodePolicy, RetryPolicy};
use threadgate_shared::store::StepStatus;
use tokio::time::Instant;

use crate::testing::{Stack, attempts, config, one_node, one_node_with};

fn retried_on(code: &str) -> NodePolicy {
    let mut policy = attempts(3);
    policy.retry.retry_on = vec![code.to_owned()];
    policy
}

async fn fails_until(attempt: u16, ctx: NodeContext) -> Result<String, NodeError> {
    if ctx.attempt < attempt {
        return Err(NodeError::transient("the other side is busy"));
    }
    Ok(format!("attempt {}", ctx.attempt))
}

#[tokio::test(start_paused = true)]
async fn a_retryable_failure_is_repeated_as_often_as_the_policy_says() {
    let stack = Stack::new(one_node_with(attempts(3), |ctx| fails_until(3, ctx)));
    let _worker = stack.work(config()).await;
    let _scheduler = stack.schedule();

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["hi", "attempt 3"]);
    let step = stack.steps(run).await.remove(0);
    assert_eq!((step.status, step.attempt), (StepStatus::Done, 3));
    let ends: Vec<_> = step.attempts.iter().map(|attempt| (attempt.attempt, attempt.end.end.as_str())).collect();
    assert_eq!(ends, [(1, "error"), (2, "error")]);
    assert_eq!(
        stack.told_events(run).await,
        ["only starts (1)", "only starts (2)", "only starts (3)", "only finished (2)", "run completed"]
    );
}

#[tokio::test(start_paused = true)]
async fn the_last_failed_attempt_fails_the_run() {
    let stack = Stack::new(one_node_with(attempts(2), |ctx| fails_until(3, ctx)));
    let _worker = stack.work(config()).await;
    let _scheduler = stack.schedule();

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Failed);
    let error = stack.error(run).await;
    assert_eq!(error.message, "Error in node 'only': the other side is busy");
    assert!(error.transient, "another run could succeed");
    assert_eq!(stack.steps(run).await[0].attempt, 2);
    let again = stack.create("t").await;
    assert_eq!(stack.ends(again).await, RunStatus::Failed, "the thread took another run");
}

#[tokio::test(start_paused = true)]
async fn attempts_wait_longer_each_time() {
    let policy = NodePolicy {
        retry: RetryPolicy { attempts: 2, delay_min_ms: 60_000, delay_max_ms: 60_000, retry_on: Vec::new() },
        ..NodePolicy::default()
    };
    let stack = Stack::new(one_node_with(policy, |ctx| fails_until(2, ctx)));
    let _worker = stack.work(config()).await;
    let _scheduler = stack.schedule();
    let before = Instant::now();

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    let step = stack.steps(run).await.remove(0);
    let waited = (step.run_at - step.attempts[0].ended_at).to_std().unwrap();
    assert!(waited.as_secs() <= 60, "{waited:?}");
    assert!(before.elapsed() >= waited, "it started before its time");
}

/// C18: what cannot succeed is not retried, and the class of the error is visible.
#[tokio::test(start_paused = true)]
async fn a_permanent_failure_is_not_repeated() {
    let stack = Stack::new(one_node_with(attempts(5), |_: NodeContext| async {
        Err::<String, _>(NodeError::permanent("the order does not exist"))
    }));
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Failed);
    assert_eq!(stack.steps(run).await[0].attempt, 1);
    assert!(!stack.error(run).await.transient);
}

/// C18: a graph that cannot be built.
#[tokio::test(start_paused = true)]
async fn a_graph_that_cannot_be_built_fails_its_run_at_the_first_attempt() {
    let stack = Stack::new(one_node(|_: NodeContext| async { "code" }));
    let mut manifest: Manifest = (*stack.registry.graphs()[0].manifest).clone();
    manifest.code = false;
    manifest.nodes[0].kind = "unheard_of".to_owned();
    let version = stack.register(manifest.clone()).await;
    let _worker = stack.work(config()).await;

    let input = threadgate_shared::graph::admission::RunInput {
        messages: vec![threadgate_shared::domain::Message::text(threadgate_shared::domain::Role::User, "hi")],
        ..Default::default()
    };
    let run = stack.create_with("t", version, std::sync::Arc::new(manifest), input).await;
    stack.send().await;

    assert_eq!(stack.ends(run).await, RunStatus::Failed);
    assert_eq!(stack.told_steps(run).await[0].2, 1);
    let error = stack.error(run).await;
    assert!(!error.transient);
    assert!(error.code.starts_with("GRAPH_"), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_panic_fails_the_run_with_its_text_and_the_worker_goes_on() {
    let stack = Stack::new(one_node_with(attempts(3), |ctx: NodeContext| async move {
        assert!(ctx.thread_id.as_str() != "bad", "division by zero");
        "fine"
    }));
    let _worker = stack.work(config()).await;

    let (bad, good) = (stack.create("bad").await, stack.create("good").await);

    assert_eq!(stack.ends(bad).await, RunStatus::Failed);
    let error = stack.error(bad).await;
    assert_eq!(error.code, "NODE_001");
    assert_eq!(error.message, "Error in node 'only': it panicked: division by zero");
    assert_eq!(stack.steps(bad).await[0].attempt, 1, "a panic is not repeated unless the policy says so");
    assert_eq!(stack.ends(good).await, RunStatus::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_policy_may_name_the_codes_it_repeats() {
    let panics_once = |ctx: NodeContext| async move {
        assert!(ctx.attempt > 1, "first");
        "second"
    };
    let stack = Stack::new(one_node_with(retried_on("NODE_001"), panics_once));
    let _worker = stack.work(config()).await;
    let _scheduler = stack.schedule();
    let run = stack.create("t").await;
    assert_eq!(stack.ends(run).await, RunStatus::Completed);

    let stack = Stack::new(one_node_with(retried_on("NODE_TIMEOUT_001"), |ctx| fails_until(2, ctx)));
    let _worker = stack.work(config()).await;
    let run = stack.create("t").await;
    assert_eq!(stack.ends(run).await, RunStatus::Failed, "a code that is not named is not repeated");
}

/// A condition is the graph author's code too.
#[tokio::test(start_paused = true)]
async fn a_condition_that_panics_fails_its_run_only() {
    let graph = Graph::builder("asks")
        .node("a", |_: NodeContext| async { "said" })
        .node("b", |_: NodeContext| async { "said" })
        .entry("a")
        .conditional("a", |_| -> &str { panic!("no idea") })
        .edge("a", "b");
    let stack = Stack::new(graph);
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Failed);
    assert!(stack.error(run).await.message.contains("no idea"));
}
