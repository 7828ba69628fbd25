//! The graphs of the recordings, and those that the stories need.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use threadgate_shared::domain::{Effect, Guard, Json, Message, Role, RunId, ThreadState, ToolSpec};
use threadgate_shared::graph::{
    FieldSpec, Graph, GraphError, IdKind, NodeContext, NodeError, NodePolicy, Patch, Reducer, RetryPolicy, ToolContext,
    ToolError, ToolSet,
};

/// The text of the newest user message of the context; empty if there is none.
#[must_use]
pub fn last_text(state: &ThreadState) -> String {
    let newest = state.context.iter().rev().find(|message| message.role == Role::User);
    newest.map(Message::plain_text).unwrap_or_default()
}

/// The recordings' graph `linear` with the given kind of ids: intake → (short: answer | plan → answer);
/// `thread_name` names its new threads.
///
/// # Errors
/// Never, unless the builder's rules change.
pub fn linear(ids: IdKind, thread_name: Option<&str>) -> Result<Graph, GraphError> {
    let mut builder = Graph::builder("linear");
    if let Some(template) = thread_name {
        builder = builder.thread_name(template);
    }
    builder
        .state_type("DemoState")
        .ids(ids)
        .field_spec(field_of("topic", json!("none"), json!({"title": "Topic", "type": "string"})))
        .field_spec(field_of(
            "visits",
            json!([]),
            json!({"items": {"type": "string"}, "title": "Visits", "type": "array"}),
        ))
        .node("intake", intake)
        .node("plan", plan)
        .node("answer", answer)
        .entry("intake")
        .conditional_map("intake", is_short, [(json!("plan"), "plan"), (json!("answer"), "answer")])
        .edge("plan", "answer")
        .edge("answer", "__end__")
        .build()
}

/// The recordings' graph `loop`: two nodes that lead to each other for ever.
///
/// # Errors
/// Never, unless the builder's rules change.
pub fn endless() -> Result<Graph, GraphError> {
    Graph::builder("loop")
        .state_type("AgentState")
        .node("ping_node", async |_: NodeContext| "ping")
        .node("pong_node", async |_: NodeContext| "pong")
        .entry("ping_node")
        .edge("ping_node", "pong_node")
        .edge("pong_node", "ping_node")
        .build()
}

fn field_of(name: &str, default: Json, schema: Json) -> FieldSpec {
    FieldSpec { name: name.to_owned(), default, reducer: Reducer::ReplaceValue, schema }
}

fn is_short(state: &ThreadState) -> Result<Json, String> {
    Ok(json!(if last_text(state).contains("short") { "answer" } else { "plan" }))
}

async fn intake(ctx: NodeContext) -> Result<Patch, NodeError> {
    let text = last_text(&ctx.state);
    if let Some(seconds) = text.strip_prefix("sleep:").and_then(|seconds| seconds.parse().ok()) {
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    }
    match text.as_str() {
        "boom" => return Err(NodeError::permanent("kaboom in intake")),
        "badvalue" => return Err(NodeError::permanent("bad value in intake")),
        _ => {}
    }
    let mut visits = ctx.state.fields["visits"].as_array().cloned().unwrap_or_default();
    visits.push(json!("intake"));
    Ok(Patch { fields: [("visits".to_owned(), Value::Array(visits))].into_iter().collect(), ..Patch::default() })
}

async fn plan(ctx: NodeContext) -> String {
    format!("plan: {}", last_text(&ctx.state))
}

async fn answer(ctx: NodeContext) -> Message {
    let text = last_text(&ctx.state);
    if ["conflict", "transient"].contains(&text.as_str()) {
        FAULTS.lock().expect("nobody panics while holding it").insert(ctx.run_id(), text);
    }
    let hint = ctx
        .config
        .get("hint")
        .map(|hint| format!(" [{}]", hint.as_str().map_or_else(|| hint.to_string(), str::to_owned)));
    let mut message =
        Message::text(Role::Assistant, format!("answer: {}{}", last_text(&ctx.state), hint.unwrap_or_default()));
    message.usages = Some(json!({
        "completion_tokens": 7, "prompt_tokens": 11, "total_tokens": 18, "reasoning_tokens": 0,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "image_tokens": 0, "audio_tokens": 0,
    }));
    message
}

/// A line of `nodes` nodes (`n1` …); each sleeps `sleep_ms` of the state and says its name.
///
/// # Errors
/// If `nodes` is 0.
pub fn line(nodes: usize) -> Result<Graph, GraphError> {
    let mut builder = Graph::builder(format!("line{nodes}")).field("sleep_ms", 0).entry("n1");
    for number in 1..=nodes {
        builder = builder.node(format!("n{number}"), say_name);
        let target = if number == nodes { "__end__".to_owned() } else { format!("n{}", number + 1) };
        builder = builder.edge(format!("n{number}"), target);
    }
    builder.build()
}

async fn say_name(ctx: NodeContext) -> String {
    record_start(&ctx);
    let sleep = ctx.state.fields.get("sleep_ms").and_then(Value::as_u64).unwrap_or_default();
    tokio::time::sleep(Duration::from_millis(sleep)).await;
    ctx.node
}

/// One node, `work`, that does what the newest user message says: `abort` ends the process,
/// `panic`, `hang` (ignores its deadline), `block` (never awaits, `block:<ms>`), `fail`, `retry`
/// (fails retryably twice), `null` (returns nothing), `big:<bytes>`, `goto:<node>`, `watch` (ends
/// when its token is cancelled), anything else: says it.
///
/// # Errors
/// Never, unless the builder's rules change.
pub fn trouble() -> Result<Graph, GraphError> {
    let policy = NodePolicy {
        retry: RetryPolicy { attempts: 3, delay_min_ms: 10, delay_max_ms: 50, retry_on: Vec::new() },
        ..NodePolicy::default()
    };
    Graph::builder("trouble")
        .field("value", Json::Null)
        .node_with("work", work, policy)
        .node("after", say_name)
        .entry("work")
        .edge("work", "after")
        .edge("after", "__end__")
        .build()
}

async fn work(ctx: NodeContext) -> Result<threadgate_shared::graph::Outcome, NodeError> {
    use threadgate_shared::graph::{Command, IntoOutcome};
    record_start(&ctx);
    let text = last_text(&ctx.state);
    let (word, rest) = text.split_once(':').unwrap_or((&text, ""));
    let number = || rest.parse::<u64>().unwrap_or_default();
    match word {
        "abort" => std::process::abort(),
        "panic" => panic!("the node panics"),
        "hang" => futures::future::pending().await,
        "sleep" => tokio::time::sleep(Duration::from_millis(number())).await,
        "block" => {
            let end = std::time::Instant::now() + Duration::from_millis(number());
            while std::time::Instant::now() < end {
                std::hint::spin_loop();
            }
        }
        "watch" => {
            ctx.cancelled.cancelled().await;
            return "saw the cancellation".into_outcome();
        }
        "fail" => return Err(NodeError::permanent("the node fails")),
        "retry" if ctx.attempt < 3 => return Err(NodeError::transient("the node fails for a while")),
        "null" => return Json::Null.into_outcome(),
        "big" => return "x".repeat(usize::try_from(number()).unwrap_or_default()).into_outcome(),
        "goto" => return Command { goto: Some(rest.to_owned()), ..Command::default() }.into_outcome(),
        "bytes" => {
            let odd = json!({"nul": "a\u{0}b", "zero": serde_json::from_str::<Value>("-0.0").expect("a number"), "big": serde_json::from_str::<Value>("1e400").expect("a number")});
            return Patch { fields: [("value".to_owned(), odd)].into_iter().collect(), ..Patch::default() }
                .into_outcome();
        }
        _ => {}
    }
    text.into_outcome()
}

/// Runs whose last write must fail, and with which of the recordings' faults.
static FAULTS: LazyLock<Mutex<HashMap<RunId, String>>> = LazyLock::new(Mutex::default);

/// The fault that the last write of `run` must have.
pub(crate) fn fault_of(run: RunId) -> Option<String> {
    FAULTS.lock().expect("nobody panics while holding it").get(&run).cloned()
}

/// How often each node of each run was started in this process.
static STARTS: LazyLock<Mutex<HashMap<(RunId, String), u32>>> = LazyLock::new(Mutex::default);

fn record_start(ctx: &NodeContext) {
    let mut starts = STARTS.lock().expect("nobody panics while holding it");
    *starts.entry((ctx.run_id(), ctx.node.clone())).or_default() += 1;
    drop(starts);
    record(&ctx.step.run_id.to_string(), &ctx.node, ctx.attempt);
}

/// Writes what was started into a file that several processes append to, where a story watches real
/// processes.
fn record(whose: &str, what: &str, attempt: impl std::fmt::Display) {
    if let Some(path) = std::env::var_os("THREADGATE_FIXTURE_STARTS") {
        use std::io::Write;
        // One write per line: several processes append, and pieces of lines must not mix.
        let line = format!("{whose} {what} {attempt} {}\n", std::process::id());
        if let Ok(mut file) = std::fs::File::options().create(true).append(true).open(path) {
            let _ = file.write_all(line.as_bytes());
        }
    }
}

/// How often `node` of `run` was started in this process.
///
/// # Panics
/// If a node panicked while it was counted.
#[must_use]
pub fn starts(run: RunId, node: &str) -> u32 {
    STARTS.lock().expect("nobody panics while holding it").get(&(run, node.to_owned())).copied().unwrap_or_default()
}

/// A desk whose model calls the tool that the user names: `pay` (gated, once), `once` or `repeat`
/// (idempotent); the process dies inside the first call of the last two.
///
/// # Errors
/// Never, unless the builder's rules change.
pub fn desk() -> Result<Graph, GraphError> {
    let model = async |ctx: NodeContext| {
        let call = json!({"id": "call_1", "type": "function",
            "function": {"name": last_text(&ctx.state), "arguments": r#"{"amount": 42}"#}});
        Message { tools_calls: Some(vec![call]), ..Message::text(Role::Assistant, "") }
    };
    let spec = |name: &str, effect| ToolSpec { effect, timeout: Some(Duration::from_secs(2)), ..ToolSpec::named(name) };
    let guard = Guard { enabled: true, require_approval: vec!["pay".to_owned()], ..Guard::default() };
    let tools = ToolSet::new()
        .function(spec("pay", Effect::Once), pay)
        .function(spec("once", Effect::Once), die_first)
        .function(spec("repeat", Effect::Idempotent), die_first)
        .guard(guard);
    Graph::builder("desk")
        .node("model", model)
        .tools("tools", tools)
        .node("after", say_name)
        .entry("model")
        .edge("model", "tools")
        .edge("tools", "after")
        .edge("after", "__end__")
        .build()
}

async fn pay(ctx: ToolContext, arguments: Value) -> Result<Value, ToolError> {
    record(ctx.thread_id.as_str(), &ctx.idempotency_key, ctx.attempt);
    Ok(json!({"paid": arguments["amount"]}))
}

async fn die_first(ctx: ToolContext, _: Value) -> Result<&'static str, ToolError> {
    record(ctx.thread_id.as_str(), &ctx.idempotency_key, ctx.attempt);
    if ctx.attempt == 1 {
        std::process::abort();
    }
    Ok("done")
}

/// Every graph of the fixture program.
///
/// # Errors
/// Never, unless the builder's rules change.
pub fn all() -> Result<Vec<Graph>, GraphError> {
    Ok(vec![linear(IdKind::String, None)?, endless()?, line(3)?, line(20)?, trouble()?, desk()?])
}
