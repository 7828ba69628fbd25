//! The graph `bench`: a line of ten nodes that do nothing but move a counter in about 2 KB of state.

use std::time::Duration;

use serde_json::{Value, json};
use threadgate_shared::graph::{Graph, GraphError, NodeContext, NodeError, Patch};

/// How many nodes the graph has.
pub const NODES: usize = 10;

/// The graph.
///
/// # Errors
/// Never, unless the builder's rules change.
pub fn graph() -> Result<Graph, GraphError> {
    let mut builder = Graph::builder("bench").state_type("BenchState").version("bench-1");
    builder = builder.field("run", "").field("n", 0).field("pad", "").field("out", "").field("sleep_ms", 0);
    for number in 1..=NODES {
        builder = builder.node(format!("n{number}"), no_op);
    }
    builder = builder.entry("n1");
    for number in 1..NODES {
        builder = builder.edge(format!("n{number}"), format!("n{}", number + 1));
    }
    builder.edge(format!("n{NODES}"), "__end__").build()
}

async fn no_op(ctx: NodeContext) -> Result<Patch, NodeError> {
    let number = |name: &str| ctx.state.fields.get(name).and_then(Value::as_u64).unwrap_or_default();
    let sleep = number("sleep_ms");
    if sleep > 0 {
        tokio::time::sleep(Duration::from_millis(sleep)).await;
    }
    let mut patch = Patch::default();
    patch.fields.insert("n".to_owned(), json!(number("n") + 1));
    patch.fields.insert("out".to_owned(), json!("x".repeat(180)));
    Ok(patch)
}
