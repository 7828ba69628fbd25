//! From checkpoint to checkpoint.

use threadgate_shared::domain::RunStatus;
use threadgate_shared::graph::{Graph, GraphBuilder, NodeContext};
use threadgate_shared::store::StepStatus;

use crate::testing::{Stack, config};

fn two_nodes() -> GraphBuilder {
    let say = |ctx: NodeContext| async move { format!("{} says hello", ctx.node) };
    Graph::builder("two").node("first", say).node("second", say).entry("first").edge("first", "second")
}

#[tokio::test(start_paused = true)]
async fn a_run_goes_from_checkpoint_to_checkpoint() {
    let stack = Stack::new(two_nodes());
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(stack.texts("t").await, ["hi", "first says hello", "second says hello"]);
    assert_eq!(
        stack.told_steps(run).await,
        [("first".to_owned(), StepStatus::Done, 1), ("second".to_owned(), StepStatus::Done, 1)]
    );
    assert_eq!(
        stack.told_events(run).await,
        ["first starts (1)", "first finished (2)", "second starts (1)", "second finished (3)", "run completed"]
    );
}
