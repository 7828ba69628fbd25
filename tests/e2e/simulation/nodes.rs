//! The graphs of the simulation: each node takes its time, says which effect it is, and counts.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use threadgate_shared::domain::meta::END;
use threadgate_shared::domain::{Message, Role, StepId};
use threadgate_shared::graph::{
    Graph, Interrupt, NodeContext, NodeError, NodePolicy, Outcome, Patch, RetryPolicy, node::IntoOutcome,
};

/// The graphs, by number.
pub const GRAPHS: usize = 3;

/// What the nodes themselves remember.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    starts: Arc<Mutex<Vec<(StepId, u16)>>>,
    asking: Arc<Mutex<HashSet<StepId>>>,
}

impl Memory {
    /// Every start of a node: its step and attempt.
    pub fn starts(&self) -> Vec<(StepId, u16)> {
        self.starts.lock().unwrap().clone()
    }

    /// Whether the step's node asks instead of coming to its end; each attempt does the same.
    pub fn asks(&self, step: StepId) -> bool {
        self.asking.lock().unwrap().contains(&step)
    }
}

/// A line of four nodes; one of three whose second asks; one of three whose second fails at first.
pub fn graphs(seed: u64, memory: &Memory) -> [Graph; GRAPHS] {
    let plain = |name: &'static str| {
        let work = work(seed, memory);
        move |ctx: NodeContext| work(name, ctx, None)
    };
    let asking = {
        let work = work(seed, memory);
        move |ctx: NodeContext| work("asks", ctx, Some(Trouble::Asks))
    };
    let failing = {
        let work = work(seed, memory);
        move |ctx: NodeContext| work("fails", ctx, Some(Trouble::FailsOnce))
    };
    let retry = RetryPolicy { attempts: 5, ..RetryPolicy::default() };
    let line = Graph::builder("line").field("count", 0).entry("a").node("a", plain("a")).node("b", plain("b"));
    let line = line.node("c", plain("c")).node("d", plain("d")).edge("a", "b").edge("b", "c").edge("c", "d");
    let ask = Graph::builder("ask").field("count", 0).entry("a").node("a", plain("a")).node("asks", asking);
    let ask = ask.node("c", plain("c")).edge("a", "asks").edge("asks", "c");
    let retried = NodePolicy { retry, timeout_ms: Some(60_000), ..NodePolicy::default() };
    let fail = Graph::builder("fail").field("count", 0).entry("a").node("a", plain("a"));
    let fail = fail.node_with("fails", failing, retried).node("c", plain("c")).edge("a", "fails").edge("fails", "c");
    [line.edge("d", END), ask.edge("c", END), fail.edge("c", END)].map(|graph| graph.version("1").build().unwrap())
}

/// What a node does besides its work.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    Asks,
    FailsOnce,
}

type Work = Arc<
    dyn Fn(
            &'static str,
            NodeContext,
            Option<Trouble>,
        ) -> futures::future::BoxFuture<'static, Result<Outcome, NodeError>>
        + Send
        + Sync,
>;

fn work(seed: u64, memory: &Memory) -> Work {
    let memory = memory.clone();
    Arc::new(move |name, ctx, trouble| {
        memory.starts.lock().unwrap().push((ctx.step, ctx.attempt));
        let memory = memory.clone();
        Box::pin(async move {
            tokio::time::sleep(duration(seed, &ctx)).await;
            match trouble {
                Some(Trouble::Asks) => {
                    if ctx.answers.is_empty() {
                        memory.asking.lock().unwrap().insert(ctx.step);
                    }
                    ctx.interrupt(Interrupt::default())?;
                }
                Some(Trouble::FailsOnce) if ctx.attempt == 1 => return Err(NodeError::transient("not yet")),
                _ => {}
            }
            let mut message = Message::text(Role::Assistant, name);
            message.message_id = ctx.idempotency_key().as_str().into();
            let count = ctx.state.fields["count"].as_i64().unwrap_or_default();
            let fields = [("count".to_owned(), json!(count + 1))].into_iter().collect();
            Patch { messages: vec![message], fields, remove: Vec::new() }.into_outcome()
        })
    })
}

/// How long an attempt takes: mostly moments, now and then longer than a lease.
fn duration(seed: u64, ctx: &NodeContext) -> Duration {
    let mut hasher = DefaultHasher::new();
    let run = ctx.config.get("number").and_then(serde_json::Value::as_u64);
    (seed, run, ctx.step.seq, ctx.attempt).hash(&mut hasher);
    let drawn = hasher.finish();
    Duration::from_millis(match drawn % 10 {
        0..=5 => drawn / 10 % 30,
        6..=8 => drawn / 10 % 1_500,
        _ => drawn / 10 % 12_000,
    })
}
