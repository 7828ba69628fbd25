//! Graphs for the stories.

use std::sync::Arc;

use serde_json::json;
use threadgate_shared::domain::{Json, JsonMap, Message, Role, ThreadState};
use threadgate_shared::graph::{Graph, Interrupt, NodeContext, NodeError, Patch};
use tokio::sync::Semaphore;

/// The text of the newest user message.
fn last_text(state: &ThreadState) -> String {
    let newest = state.context.iter().rev().find(|message| message.role == Role::User);
    newest.map(Message::plain_text).unwrap_or_default()
}

/// intake → (short: answer | plan → answer); `boom` fails in intake.
pub fn linear() -> Graph {
    build_linear("linear", None)
}

fn build_linear(name: &str, thread_name: Option<&str>) -> Graph {
    let mut builder = Graph::builder(name).state_type("DemoState").field("topic", "none").field("visits", json!([]));
    if let Some(template) = thread_name {
        builder = builder.thread_name(template);
    }
    builder
        .node("intake", intake)
        .node("plan", async |ctx: NodeContext| format!("plan: {}", last_text(&ctx.state)))
        .node("answer", answer)
        .entry("intake")
        .conditional_map("intake", is_short, [(json!("plan"), "plan"), (json!("answer"), "answer")])
        .edge("plan", "answer")
        .edge("answer", "__end__")
        .build()
        .unwrap()
}

fn is_short(state: &ThreadState) -> Result<Json, String> {
    Ok(json!(if last_text(state).contains("short") { "answer" } else { "plan" }))
}

async fn intake(ctx: NodeContext) -> Result<Patch, NodeError> {
    if last_text(&ctx.state) == "boom" {
        return Err(NodeError::permanent("kaboom in intake"));
    }
    let mut visits = ctx.state.fields["visits"].as_array().cloned().unwrap_or_default();
    visits.push(json!("intake"));
    let fields: JsonMap = [("visits".to_owned(), Json::Array(visits))].into_iter().collect();
    Ok(Patch { fields, ..Patch::default() })
}

async fn answer(ctx: NodeContext) -> Message {
    let mut message = Message::text(Role::Assistant, format!("answer: {}", last_text(&ctx.state)));
    message.usages = Some(json!({"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}));
    message
}

/// Two nodes that lead to each other for ever.
pub fn endless() -> Graph {
    Graph::builder("loop")
        .node("ping_node", async |_: NodeContext| "ping")
        .node("pong_node", async |_: NodeContext| "pong")
        .entry("ping_node")
        .edge("ping_node", "pong_node")
        .edge("pong_node", "ping_node")
        .build()
        .unwrap()
}

/// draft → review → publish → archive; pauses before review and after publish.
pub fn approval() -> Graph {
    Graph::builder("approval")
        .node("draft", async |_: NodeContext| "draft ready")
        .node("review", async |ctx: NodeContext| format!("reviewed: {}", last_text(&ctx.state)))
        .node("publish", async |_: NodeContext| "published")
        .node("archive", async |_: NodeContext| "archived")
        .entry("draft")
        .edge("draft", "review")
        .edge("review", "publish")
        .edge("publish", "archive")
        .edge("archive", "__end__")
        .interrupt_before(["review"])
        .interrupt_after(["publish"])
        .build()
        .unwrap()
}

/// prepare → ask (a question with a schema) → finish.
pub fn ask() -> Graph {
    let ask = async |ctx: NodeContext| -> Result<String, NodeError> {
        let schema = json!({"type": "object", "required": ["approved"]});
        let answer = ctx.interrupt(Interrupt {
            value: json!({"amount": 42}),
            message: Some("Refund 42?".to_owned()),
            response_schema: Some(schema),
            ..Interrupt::default()
        })?;
        Ok(format!("decision={answer}"))
    };
    Graph::builder("ask_graph")
        .node("prepare", async |_: NodeContext| "prepared")
        .node("ask", ask)
        .node("finish", async |_: NodeContext| "finished")
        .entry("prepare")
        .edge("prepare", "ask")
        .edge("ask", "finish")
        .edge("finish", "__end__")
        .build()
        .unwrap()
}

/// Holds nodes until it is opened.
#[derive(Clone)]
pub struct Gate {
    open: Arc<Semaphore>,
    entered: Arc<Semaphore>,
}

impl Gate {
    pub fn closed() -> Self {
        Self { open: Arc::new(Semaphore::new(0)), entered: Arc::new(Semaphore::new(0)) }
    }

    /// Lets everybody through.
    pub fn open(&self) {
        self.open.add_permits(1_000);
    }

    /// Returns once a node stands before it.
    pub async fn entered(&self) {
        let limit = std::time::Duration::from_secs(20);
        let permit = tokio::time::timeout(limit, self.entered.acquire()).await.expect("a node comes to the gate");
        permit.unwrap().forget();
    }

    async fn pass(&self) {
        self.entered.add_permits(1);
        self.open.acquire().await.unwrap().forget();
    }
}

/// first (waits at the gate, sends two pieces and an event before it) → second.
pub fn gated(gate: &Gate) -> Graph {
    let gate = gate.clone();
    let first = move |ctx: NodeContext| {
        let gate = gate.clone();
        async move {
            let mut piece = Message::text(Role::Assistant, "fir");
            piece.message_id = "growing".into();
            ctx.delta(piece.clone());
            ctx.emit(json!({"progress": 0.5}));
            gate.pass().await;
            "first"
        }
    };
    Graph::builder("gated")
        .node("first", first)
        .node("second", async |_: NodeContext| "second")
        .entry("first")
        .edge("first", "second")
        .edge("second", "__end__")
        .build()
        .unwrap()
}

/// The same as [`linear`], with names for new threads.
pub fn named() -> Graph {
    build_linear("named", Some("named after {messages} messages"))
}

/// A node that asks for a tool and gets no answer.
pub fn calling() -> Graph {
    let call = async |_: NodeContext| {
        let mut message = Message::text(Role::Assistant, "calling");
        let function = json!({"name": "add", "arguments": "{}"});
        message.tools_calls = Some(vec![json!({"id": "c1", "type": "function", "function": function})]);
        message
    };
    Graph::builder("calling").node("call", call).entry("call").edge("call", "__end__").build().unwrap()
}
