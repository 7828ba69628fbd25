//! What nodes return and send.

use serde_json::json;
use threadgate_shared::domain::{Message, Role, RunStatus};
use threadgate_shared::graph::{Graph, GraphBuilder, Interrupt, NodeContext, NodeError, Patch};

use crate::config::WorkerConfig;
use crate::testing::{Stack, attempts, config, one_node, one_node_with};

/// C89
#[tokio::test(start_paused = true)]
async fn an_output_over_the_limit_fails_the_run_for_good_and_names_node_and_size() {
    let mut policy = attempts(3);
    policy.retry.retry_on = vec!["NODE_001".to_owned()];
    let stack = Stack::new(one_node_with(policy, |_: NodeContext| async { "x".repeat(5_000) }));
    let _worker = stack.work(WorkerConfig { output_bytes_max: 4_000, ..config() }).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Failed);
    let error = stack.error(run).await;
    assert!(!error.transient);
    assert!(error.message.contains("'only'") && error.message.contains("4000"), "{}", error.message);
    assert_eq!(stack.steps(run).await[0].attempt, 1, "no retry");
    assert_eq!(stack.texts("t").await, ["hi"], "the earlier checkpoint is readable");
}

#[tokio::test(start_paused = true)]
async fn pieces_and_custom_events_are_told_in_order_between_start_and_end() {
    let stack = Stack::new(one_node(|ctx: NodeContext| async move {
        ctx.delta(Message::text(Role::Assistant, "he"));
        ctx.emit(json!({"percent": 50}));
        ctx.delta(Message::text(Role::Assistant, "llo"));
        "hello"
    }));
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(
        stack.told_events(run).await,
        ["only starts (1)", "piece he", "custom {\"percent\":50}", "piece llo", "only finished (2)", "run completed"]
    );
}

/// Adds one message and removes the one before it, three times, by way of two nodes.
fn forgetful() -> GraphBuilder {
    let step = |ctx: NodeContext| async move {
        let last = ctx.state.last_message().unwrap().message_id.clone();
        let count = ctx.state.fields["count"].as_i64().unwrap_or_default() + 1;
        let mut patch =
            Patch { messages: vec![Message::text(Role::Assistant, format!("{count}"))], ..Patch::default() };
        patch.remove.push(last);
        patch.fields.insert("count".to_owned(), json!(count));
        patch
    };
    Graph::builder("forgetful")
        .field("count", 0)
        .node("a", step)
        .node("b", step)
        .node("c", step)
        .entry("a")
        .edge("a", "b")
        .edge("b", "c")
}

#[tokio::test(start_paused = true)]
async fn a_message_this_worker_has_just_added_can_be_removed() {
    let stack = Stack::new(forgetful());
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["3"]);
    assert_eq!(stack.state("t").await.fields["count"], json!(3));
}

/// Each worker has one step of the run in turn, so each brings an older state up to date.
#[tokio::test(start_paused = true)]
async fn two_workers_that_take_turns_see_the_same_state() {
    let step = |ctx: NodeContext| async move {
        let texts: Vec<_> = ctx.state.context.iter().map(Message::plain_text).collect();
        texts.len().to_string()
    };
    let mut graph = Graph::builder("turns").node("n0", step).entry("n0");
    for number in 1..10 {
        graph = graph.node(format!("n{number}"), step).edge(format!("n{}", number - 1), format!("n{number}"));
    }
    let stack = Stack::new(graph);
    let first = crate::Worker::start(config(), stack.parts(), &stack.registry).await.unwrap();
    let second = crate::Worker::start(config(), stack.parts(), &stack.registry).await.unwrap();
    let run = stack.create("t").await;

    for seq in 1..=10 {
        let worker = if seq % 3 == 0 { &first } else { &second };
        threadgate_shared::queue::JobHandler::handle(&*worker.executor, stack.job(run, seq)).await;
    }

    assert_eq!(stack.status(run).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["hi", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]);
}

#[tokio::test(start_paused = true)]
async fn a_question_pauses_the_run_and_its_answer_reaches_the_node() {
    let stack = Stack::new(one_node(|ctx: NodeContext| async move {
        let answer = ctx.interrupt(Interrupt { message: Some("Sure?".to_owned()), ..Interrupt::default() })?;
        Ok::<_, NodeError>(format!("you said {answer}"))
    }));
    let _worker = stack.work(config()).await;
    let run = stack.create("t").await;
    assert_eq!(stack.ends(run).await, RunStatus::Interrupted);
    assert_eq!(stack.told_events(run).await, ["only starts (1)", "run interrupted"]);

    let graph = stack.registry.graphs()[0].clone();
    let input = threadgate_shared::graph::admission::RunInput { resume: Some(json!("yes")), ..Default::default() };
    let resumed = stack.create_with("t", graph.version.clone(), graph.manifest.clone(), input).await;
    stack.send().await;

    assert_eq!(stack.ends(resumed).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["hi", "you said \"yes\""]);
}

/// C85: NUL in what a node returns, and in its error.
#[tokio::test(start_paused = true)]
async fn nul_from_a_node_is_kept() {
    let stack = Stack::new(one_node(|ctx: NodeContext| async move {
        if ctx.thread_id.as_str() == "bad" {
            return Err(NodeError::permanent("a\0b"));
        }
        Ok("a\0b, and \\u0000 as text")
    }));
    let _worker = stack.work(config()).await;

    let (good, bad) = (stack.create("good").await, stack.create("bad").await);

    assert_eq!(stack.ends(good).await, RunStatus::Completed);
    assert_eq!(stack.texts("good").await[1], "a\0b, and \\u0000 as text");
    assert_eq!(stack.ends(bad).await, RunStatus::Failed);
    assert!(stack.error(bad).await.message.ends_with("a\0b"));
}
