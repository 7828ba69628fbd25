//! The calls of a message: in parallel, gated, and each carried out as often as its effect allows,
//! whenever a worker dies.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use threadgate_shared::domain::{CallStatus, Effect, Guard, Message, QuestionKind, Role, RunStatus, ToolSpec};
use threadgate_shared::graph::{Graph, Interrupt, NodeContext, ToolContext, ToolError, ToolSet};
use threadgate_shared::store::memory::{Failure, Operation};

use crate::testing::{Stack, Working, config};

/// What tools were called with: arguments and idempotency keys.
type Called = Arc<Mutex<Vec<(Value, String)>>>;

fn call(id: &str, tool: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": tool, "arguments": arguments}})
}

fn spec(name: &str, effect: Effect) -> ToolSpec {
    ToolSpec { effect, ..ToolSpec::named(name) }
}

/// A tool that notes its calls.
fn noted(called: &Called) -> impl threadgate_shared::graph::Tool + 'static {
    let called = Arc::clone(called);
    Noted(called)
}

struct Noted(Called);

#[async_trait::async_trait]
impl threadgate_shared::graph::Tool for Noted {
    async fn call(&self, ctx: ToolContext, arguments: Value) -> Result<Value, ToolError> {
        self.0.lock().unwrap().push((arguments.clone(), ctx.idempotency_key.clone()));
        match arguments["do"].as_str() {
            Some("fail") => Err(ToolError::Failed("no money".to_owned())),
            Some("panic") => panic!("on purpose"),
            Some("hang") => std::future::pending().await,
            Some("ask") => {
                let answer = ctx.interrupt(Interrupt { message: Some("Sure?".to_owned()), ..Interrupt::default() })?;
                Ok(json!({"answer": answer}))
            }
            Some("much") => Ok(Value::String("x".repeat(2 << 20))),
            _ => Ok(json!({"did": arguments})),
        }
    }
}

/// A model that calls `calls`, a node that runs them, and the model's last word.
fn graph(calls: Vec<Value>, tools: ToolSet) -> Graph {
    let model = move |_: NodeContext| {
        let calls = calls.clone();
        async move { Message { tools_calls: Some(calls), message_id: "m1".into(), ..Message::text(Role::Assistant, "") } }
    };
    let graph = Graph::builder("agent")
        .node("model", model)
        .tools("tools", tools)
        .node("last", async |_: NodeContext| "done")
        .entry("model")
        .edge("model", "tools")
        .edge("tools", "last")
        .edge("last", "__end__");
    graph.version("1").build().unwrap()
}

/// The results in the context, in order: call id and output, or the error.
async fn results(stack: &Stack) -> Vec<(String, String)> {
    let context = stack.state("t").await.context;
    let blocks = context.iter().filter(|message| message.role == Role::Tool).flat_map(|message| &message.content);
    let results = blocks.filter(|block| block["type"] == "tool_result");
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    results.map(|block| (text(&block["call_id"]), text(&block["output"]))).collect()
}

fn guard(names: &[&str]) -> Guard {
    Guard { enabled: true, require_approval: names.iter().map(ToString::to_string).collect(), ..Guard::default() }
}

fn approve() -> Value {
    json!({"outcome": "approved"})
}

/// C41: results in the order of the calls, whatever became of each; the run goes on.
#[tokio::test(start_paused = true)]
async fn one_bad_call_does_not_take_the_others_along() {
    let called = Called::default();
    let calls = vec![
        call("1", "act", "{\"n\":1}"),
        call("2", "act", "{bad"),
        call("3", "ghost", "{}"),
        call("4", "act", "{\"do\":\"fail\"}"),
        call("5", "act", "{\"do\":\"panic\"}"),
        call("6", "act", "{\"do\":\"hang\"}"),
        call("7", "act", "{\"do\":\"much\"}"),
    ];
    let act = ToolSpec { timeout: Some(Duration::from_secs(3)), ..spec("act", Effect::None) };
    let stack = Stack::with(graph(calls, ToolSet::new().tool(act, noted(&called)).concurrency(3)));
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    let results = results(&stack).await;
    assert_eq!(results.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["1", "2", "3", "4", "5", "6", "7"]);
    assert_eq!(results[0].1, r#"{"did":{"n":1}}"#);
    for (index, part) in [
        (1, "not a JSON object"),
        (2, "Tool 'ghost' not found."),
        (3, "no money"),
        (4, "panicked"),
        (5, "NODE_TIMEOUT_002"),
        (6, "bytes"),
    ] {
        assert!(results[index].1.contains(part), "{results:?}");
    }
    let statuses: Vec<_> = stack.calls("t").await.into_iter().map(|(_, status, _)| status).collect();
    let (done, failed) = (CallStatus::Done, CallStatus::Failed);
    assert_eq!(statuses, [done, failed, failed, failed, failed]);
    assert_eq!(stack.texts("t").await.last().map(String::as_str), Some("done"));
}

/// Invariant 7: all gates of one turn are asked together; each approved call runs exactly once with what was
/// shown, denied ones reach the model, and ungated ones ran before.
#[tokio::test(start_paused = true)]
async fn gates_are_asked_together_and_approved_calls_run_once() {
    let (called, looked) = (Called::default(), Called::default());
    let calls = vec![
        call("1", "pay", "{\"n\":1}"),
        call("2", "look", "{}"),
        call("3", "pay", "{\"n\":3}"),
        call("4", "pay", "{\"n\":4}"),
    ];
    let tools =
        ToolSet::new().tool(spec("pay", Effect::Once), noted(&called)).tool(spec("look", Effect::None), noted(&looked));
    let stack = Stack::with(graph(calls, tools.guard(guard(&["pay"]))));
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;
    assert_eq!(stack.ends(run).await, RunStatus::Interrupted);
    assert_eq!((called.lock().unwrap().len(), looked.lock().unwrap().len()), (0, 1));
    assert_eq!(results(&stack).await.len(), 1, "the ungated call has run");
    let denied = json!({"outcome": "denied", "comment": "not that one"});
    let run = stack.answer("t", &[approve(), denied, approve()]).await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    let ran: Vec<_> = called.lock().unwrap().iter().map(|(arguments, _)| arguments.clone()).collect();
    assert_eq!(ran, [json!({"n": 1}), json!({"n": 4})]);
    assert_eq!(looked.lock().unwrap().len(), 1);
    let results = results(&stack).await;
    assert_eq!(results.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["2", "1", "3", "4"]);
    assert_eq!(results[2].1, "not that one");
    let denied = stack.state("t").await.context.into_iter().find(|message| message.metadata.get("outcome").is_some());
    assert_eq!(denied.unwrap().metadata["outcome"], "denied");
}

#[tokio::test(start_paused = true)]
async fn a_tool_may_ask_and_is_called_again_with_the_answer() {
    let called = Called::default();
    let calls =
        vec![call("1", "act", "{\"do\":\"ask\"}"), call("2", "act", "{}"), call("3", "pay", "{\"do\":\"ask\"}")];
    let tools =
        ToolSet::new().tool(spec("act", Effect::None), noted(&called)).tool(spec("pay", Effect::Once), noted(&called));
    let stack = Stack::with(graph(calls, tools));
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;
    assert_eq!(stack.ends(run).await, RunStatus::Interrupted);
    let question = stack.questions("t").await.remove(0);
    assert_eq!((question.key.as_str(), question.message.as_deref()), ("tool:1:0", Some("Sure?")));
    let run = stack.answer("t", &[json!("yes")]).await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    let results = results(&stack).await;
    assert!(results.contains(&("1".to_owned(), r#"{"answer":"yes"}"#.to_owned())), "{results:?}");
    assert!(results.iter().any(|(id, output)| id == "3" && output.contains("gate it instead")), "{results:?}");
    assert_eq!(called.lock().unwrap().len(), 4, "the sibling ran once");
}

/// A worker that dies at a point of a call, and one that carries on.
struct Crash {
    stack: Stack,
    called: Called,
    _workers: Vec<Working>,
}

impl Crash {
    async fn at(effect: Effect, operation: Operation, moment: Failure) -> (Self, threadgate_shared::domain::RunId) {
        let called = Called::default();
        let act = ToolSpec { timeout: Some(Duration::from_secs(30)), ..spec("act", effect) };
        let stack = Stack::with(graph(vec![call("1", "act", "{\"n\":1}")], ToolSet::new().tool(act, noted(&called))));
        let first = stack.work(config()).await;
        first.dies_at(operation, moment);
        let run = stack.create("t").await;
        first.is_dead().await;
        let second = stack.work(config()).await;
        let _scheduler = stack.schedule();
        stack.ends(run).await;
        (Self { stack, called, _workers: vec![first, second] }, run)
    }

    fn keys(&self) -> Vec<String> {
        self.called.lock().unwrap().iter().map(|(_, key)| key.clone()).collect()
    }
}

/// C40, "kill -9 before the intent": nothing was written, the call starts once.
#[tokio::test(start_paused = true)]
async fn a_worker_that_dies_before_the_intent_costs_no_call() {
    for effect in [Effect::None, Effect::Idempotent, Effect::Once] {
        let (crash, run) = Crash::at(effect, Operation::BeginCalls, Failure::Before).await;

        assert_eq!(crash.stack.status(run).await, RunStatus::Completed);
        assert_eq!(crash.keys(), ["t:m1:1"]);
        assert_eq!(crash.stack.calls("t").await, [("act".to_owned(), CallStatus::Done, 1)]);
    }
}

/// C40, "between intent and effect" and "between effect and result": called again with the same key where
/// that does no harm; a call that may run only once pauses and asks.
#[tokio::test(start_paused = true)]
async fn a_worker_that_dies_with_an_open_intent_repeats_what_may_be_repeated() {
    let between = [(Operation::BeginCalls, Failure::After, 0), (Operation::FinishCall, Failure::Before, 1)];
    for (operation, moment, before) in between {
        for effect in [Effect::None, Effect::Idempotent] {
            let (crash, run) = Crash::at(effect, operation, moment).await;

            assert_eq!(crash.stack.status(run).await, RunStatus::Completed);
            assert_eq!(crash.keys(), vec!["t:m1:1"; before + 1]);
            assert_eq!(crash.stack.calls("t").await, [("act".to_owned(), CallStatus::Done, 2)]);
        }
        let (crash, run) = Crash::at(Effect::Once, operation, moment).await;

        assert_eq!(crash.stack.status(run).await, RunStatus::Interrupted);
        assert_eq!(crash.keys().len(), before, "it is not called again");
        let question = crash.stack.questions("t").await.remove(0);
        assert_eq!(
            (question.kind, question.reason.as_str()),
            (QuestionKind::Outcome, "threadgate:tool_outcome_unknown")
        );
        assert_eq!(crash.stack.calls("t").await, [("act".to_owned(), CallStatus::Unknown, 1)]);
    }
}

/// C40, "after the result": it is a fact, and the tool is not called.
#[tokio::test(start_paused = true)]
async fn a_worker_that_dies_after_the_result_costs_no_call() {
    for effect in [Effect::None, Effect::Idempotent, Effect::Once] {
        let (crash, run) = Crash::at(effect, Operation::FinishCall, Failure::After).await;

        assert_eq!(crash.stack.status(run).await, RunStatus::Completed);
        assert_eq!(crash.keys(), ["t:m1:1"]);
        assert_eq!(results(&crash.stack).await, [("1".to_owned(), r#"{"did":{"n":1}}"#.to_owned())]);
    }
}

/// Invariant 8: a person decides about a call whose outcome is unknown, and each decision is carried out once.
#[tokio::test(start_paused = true)]
async fn a_person_decides_about_a_call_whose_outcome_is_unknown() {
    for (answer, calls, result) in [
        (json!({"action": "retry"}), 2, r#"{"did":{"n":1}}"#),
        (json!({"action": "done", "result": "paid"}), 1, "paid"),
        (json!({"action": "failed", "result": "refused"}), 1, "refused"),
    ] {
        let (crash, _) = Crash::at(Effect::Once, Operation::FinishCall, Failure::Before).await;

        let run = crash.stack.answer("t", std::slice::from_ref(&answer)).await;

        assert_eq!(crash.stack.ends(run).await, RunStatus::Completed, "{answer}");
        assert_eq!(crash.keys().len(), calls, "{answer}");
        assert_eq!(results(&crash.stack).await, [("1".to_owned(), result.to_owned())]);
    }
}

/// The one write without a lease: a result that comes late is a fact for whoever took the step over.
#[tokio::test(start_paused = true)]
async fn a_result_that_comes_after_the_lease_was_lost_is_kept() {
    let gate = crate::testing::Gate::new();
    let (held, calls) = (gate.clone(), Arc::new(Mutex::new(0)));
    let counted = Arc::clone(&calls);
    let slow = move |_: ToolContext, _: Value| {
        let (gate, counted) = (held.clone(), Arc::clone(&counted));
        async move {
            *counted.lock().unwrap() += 1;
            gate.pass().await;
            Ok("late")
        }
    };
    let spec = ToolSpec { timeout: Some(Duration::from_secs(300)), ..spec("act", Effect::Once) };
    let stack = Stack::with(graph(vec![call("1", "act", "{}")], ToolSet::new().function(spec, slow)));
    let first = stack.work(config()).await;
    let run = stack.create("t").await;
    gate.entered().await;

    first.heartbeat.abort(); // Its leases run out while the tool works.
    let _second = stack.work(config()).await;
    let _scheduler = stack.schedule();
    stack.waits_until(|| async { stack.told_steps(run).await[1].2 == 2 }).await;
    gate.open();

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(results(&stack).await, [("1".to_owned(), "late".to_owned())]);
    assert_eq!(*calls.lock().unwrap(), 1);
}

/// Only a declared handoff leads to another node, and no tool runs beside it.
#[tokio::test(start_paused = true)]
async fn a_handoff_jumps_and_runs_nothing() {
    let called = Called::default();
    let calls = vec![call("1", "act", "{}"), call("2", "transfer_to_last", "")];
    let tools = ToolSet::new().tool(spec("act", Effect::None), noted(&called)).handoff("last");
    let stack = Stack::with(graph(calls, tools));
    let _worker = stack.work(config()).await;

    let run = stack.create("t").await;

    assert_eq!(stack.ends(run).await, RunStatus::Completed);
    assert_eq!(called.lock().unwrap().len(), 0);
    let results = results(&stack).await;
    assert_eq!(results.len(), 1, "{results:?}");
    assert!(results[0].1.contains("handed"), "{results:?}");
}
