//! The lines of a stream, in the peer's order.

use http::Method;
use serde_json::json;
use threadgate_shared::domain::Json;

use super::{Gate, Stack, approval, ask, endless, gated, linear, named, run_body, texts, user, with_json};

/// A chunk in short: its event, the text or the data that tell what it is, and the state it shows.
fn short(chunk: &Json) -> String {
    let data = &chunk["data"];
    let what = match chunk["event"].as_str().unwrap() {
        "message" => chunk["message"]["content"][0]["text"].as_str().unwrap().to_owned(),
        "state" => format!("{} {}", chunk["metadata"]["node"].as_str().unwrap(), chunk["metadata"]["step"]),
        _ => ["status", "tool_name", "node", "step", "reason"]
            .iter()
            .filter(|key| !data[**key].is_null())
            .map(|key| data[*key].as_str().map_or_else(|| data[*key].to_string(), str::to_owned))
            .collect::<Vec<_>>()
            .join(" "),
    };
    let meta = &chunk["state"]["execution_meta"];
    let state = match meta.is_null() {
        true => String::new(),
        false => format!(" [{} {} {}]", meta["current_node"], meta["step"], meta["status"]).replace('"', ""),
    };
    format!("{} {what}{state}", chunk["event"].as_str().unwrap())
}

async fn stream(stack: &Stack, thread: &str, text: &str, granularity: &str) -> Vec<Json> {
    let mut body = run_body(thread, text);
    body["response_granularity"] = json!(granularity);
    let answer = stack.post("/v1/graph/stream", &body).await;
    assert_eq!(answer.header("content-type"), "text/event-stream; charset=utf-8");
    assert_eq!(answer.header("content-encoding"), "identity");
    answer.chunks()
}

async fn shorts(stack: &Stack, thread: &str, text: &str, granularity: &str) -> Vec<String> {
    stream(stack, thread, text, granularity).await.iter().map(short).collect()
}

#[tokio::test]
async fn a_full_stream_tells_every_step() {
    let stack = Stack::start(vec![linear()]).await;

    let told = shorts(&stack, "t1", "hello", "full").await;

    let expected = [
        "message hello",
        "updates invoking_graph __start__ 0",
        "updates node_invoked __start__ 0",
        "updates invoking_node __start__ __start__",
        "updates node_invoked __start__ __start__",
        "state __start__ 0 [__start__ 0 running]",
        "state __start__ 0 [__start__ 0 running]",
        "updates node_invoked intake 1 [__start__ 1 running]",
        "updates node_invoked intake 1",
        "updates invoking_node intake intake",
        "updates node_invoked intake intake",
        "state intake 1 [intake 1 running]",
        "state intake 1 [intake 1 running]",
        "updates node_invoked plan 2 [intake 2 running]",
        "updates node_invoked plan 2",
        "updates invoking_node plan plan",
        "updates node_invoked plan plan",
        "message plan: hello",
        "state plan 2 [plan 2 running]",
        "state plan 2 [plan 2 running]",
        "updates node_invoked answer 3 [plan 3 running]",
        "updates node_invoked answer 3",
        "updates invoking_node answer answer",
        "updates node_invoked answer answer",
        "message answer: hello",
        "state answer 3 [answer 3 running]",
        "state answer 3 [answer 3 running]",
        "updates node_invoked __end__ 4 [answer 4 running]",
        "updates graph_invoked __end__ 4 Graph execution completed successfully [answer 4 completed]",
        "updates graph_invoked Graph execution finished [answer 4 completed]",
    ];
    assert_eq!(told, expected);
}

#[tokio::test]
async fn every_chunk_has_all_keys_and_the_last_one_counts() {
    let stack = Stack::start(vec![linear()]).await;

    let chunks = stream(&stack, "t1", "hello", "full").await;

    for chunk in &chunks {
        let keys: Vec<&String> = chunk.as_object().unwrap().keys().collect();
        let all = ["event", "message", "state", "data", "thread_id", "run_id", "metadata", "timestamp"];
        assert_eq!(keys, all);
        assert_eq!(chunk["metadata"]["thread_id"], "t1");
        assert_eq!(chunk["metadata"]["is_new_thread"], true);
    }
    let last = &chunks.last().unwrap()["data"];
    assert_eq!((&last["total_messages"], &last["total_tokens"]), (&json!(3), &json!(18)));
    assert_eq!(last["is_interrupted"], false);
}

#[tokio::test]
async fn granularity_filters_chunks() {
    let stack = Stack::start(vec![linear()]).await;

    let low = shorts(&stack, "t1", "hello", "low").await;
    let partial = shorts(&stack, "t2", "hello", "partial").await;

    assert_eq!(low, ["message hello", "message plan: hello", "message answer: hello"]);
    assert_eq!(partial.len(), 11);
    assert!(partial.iter().all(|chunk| chunk.starts_with("message") || chunk.starts_with("state")));
}

#[tokio::test]
async fn a_pause_before_a_node_and_one_after_it() {
    let stack = Stack::start(vec![approval()]).await;

    let first = shorts(&stack, "t1", "ship it", "full").await;
    let second = shorts(&stack, "t1", "approved", "full").await;

    let paused = "Graph execution interrupted before node execution";
    assert_eq!(
        first[first.len() - 3..],
        [
            "updates node_invoked review 2 [draft 2 running]".to_owned(),
            format!("updates invoking_node review 2 {paused}"),
            "updates graph_invoked Graph execution finished [review 2 interrupted_before]".to_owned(),
        ]
    );
    assert_eq!(second[..2], ["message approved".to_owned(), "updates invoking_graph review 2".to_owned()]);
    assert_eq!(
        second[second.len() - 3..],
        [
            format!("updates node_invoked publish 3 {paused}"),
            "updates node_invoked archive 4 [archive 4 interrupted_after]".to_owned(),
            "updates graph_invoked Graph execution finished [archive 4 interrupted_after]".to_owned(),
        ]
    );
}

#[tokio::test]
async fn a_question_is_told_and_its_answer_goes_on() {
    let stack = Stack::start(vec![ask()]).await;

    let chunks = stream(&stack, "t1", "refund please", "full").await;
    let answer = json!({"resume": {"approved": true}, "config": {"thread_id": "t1"}});
    let resumed = stack.post("/v1/graph/stream", &answer).await.chunks();

    let told: Vec<String> = chunks.iter().map(short).collect();
    assert_eq!(
        told[told.len() - 4..],
        [
            "updates node_invoked ask 2",
            "updates invoking_node ask ask",
            "updates interrupted ask 2 Graph execution paused by interrupt()",
            "updates graph_invoked Graph execution finished [ask 2 interrupted_before]",
        ]
    );
    assert_eq!(chunks[told.len() - 2]["data"]["interrupt"]["message"], "Refund 42?");
    let told: Vec<String> = resumed.iter().map(short).collect();
    assert_eq!(told, [r#"message decision={"approved":true}"#, "message finished"]);
}

#[tokio::test]
async fn a_failed_node_is_told_twice_and_nothing_follows() {
    let stack = Stack::start(vec![linear()]).await;

    let chunks = stream(&stack, "t1", "boom", "full").await;

    let reason = "[NODE_001] Error in node 'intake': kaboom in intake";
    let told: Vec<String> = chunks.iter().map(short).collect();
    assert_eq!(
        told[told.len() - 3..],
        [
            "updates invoking_node intake intake".to_owned(),
            format!("error invoked_graph intake 1 {reason} [intake 1 error]"),
            format!("error {reason}"),
        ]
    );
    let last = chunks.last().unwrap();
    assert_eq!((&last["thread_id"], &last["run_id"]), (&Json::Null, &Json::Null));
}

#[tokio::test]
async fn the_step_limit_keeps_what_the_last_node_said() {
    let stack = Stack::start(vec![endless()]).await;
    let mut body = run_body("t1", "go");
    body["recursion_limit"] = json!(2);

    let chunks = stack.post("/v1/graph/stream", &body).await.chunks();

    let reason = "Graph execution exceeded recursion limit: 2";
    let told: Vec<String> = chunks.iter().map(short).collect();
    let expected = [
        "message go".to_owned(),
        "message ping".to_owned(),
        format!("error invoked_graph pong_node 2 {reason} [ping_node 2 error]"),
        format!("error {reason}"),
    ];
    assert_eq!(told, expected);
}

#[tokio::test]
async fn a_stop_lets_the_node_finish_and_is_told() {
    let gate = Gate::closed();
    let stack = Stack::start(vec![gated(&gate)]).await;
    let mut body = run_body("t1", "hello");
    body["response_granularity"] = json!("full");
    let response = stack.open(with_json(Method::POST, "/v1/graph/stream", &body)).await;
    gate.entered().await;

    let answer = stack.post("/v1/graph/stop", &json!({"thread_id": "t1"})).await.json();
    gate.open();
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();

    assert_eq!(answer["data"], json!({"ok": true, "running": true}));
    let chunks: Vec<Json> = bytes
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect();
    let told: Vec<String> = chunks.iter().map(short).collect();
    assert_eq!(
        told[told.len() - 3..],
        [
            "updates node_invoked second 2 [first 2 running]",
            "updates invoking_node second 2 Graph execution stopped by request",
            "updates graph_invoked Graph execution finished [first 2 interrupted_after]",
        ]
    );
    assert_eq!(stack.state("t1").await["execution_meta"]["current_node"], "second");
}

#[tokio::test]
async fn a_new_thread_of_a_naming_graph_gets_its_name_once() {
    let stack = Stack::start(vec![named()]).await;

    let first = stream(&stack, "t1", "hello", "low").await;
    let second = stream(&stack, "t1", "again", "low").await;

    let last = first.last().unwrap();
    assert_eq!(last["metadata"]["thread_name"], "named after 3 messages");
    assert_eq!((&last["data"], &last["run_id"]), (&json!({"status": "completed"}), &Json::Null));
    assert_eq!(second.len(), 3);
    let thread = stack.get("/v1/threads/t1").await.json();
    assert_eq!(thread["data"]["thread_data"]["thread"]["thread_name"], "named after 3 messages");
}

#[tokio::test]
async fn some_refusals_are_told_inside_the_stream_and_the_rest_by_a_status() {
    let stack = Stack::start(vec![ask()]).await;
    let result = json!({"role": "tool", "content": [{"type": "tool_result", "call_id": "c1", "output": "x"}]});

    let forged = stack.post("/v1/graph/stream", &json!({"messages": [result], "config": {"thread_id": "t9"}})).await;
    let resume = stack.post("/v1/graph/stream", &json!({"resume": 1, "config": {"thread_id": "t9"}})).await;
    stack.post("/v1/graph/stream", &run_body("t1", "refund")).await;
    let plain = stack.post("/v1/graph/stream", &run_body("t1", "hello?")).await;
    let other = json!({"resume": {"approved": true}, "interrupt_id": "int_0", "config": {"thread_id": "t1"}});
    let other = stack.post("/v1/graph/stream", &other).await;
    let schema = stack.post("/v1/graph/stream", &json!({"resume": 1, "config": {"thread_id": "t1"}})).await;
    let unknown = json!({"messages": [user("x")], "initial_state": {"current_node": "nowhere"}});
    let unknown = stack.post("/v1/graph/stream", &unknown).await;

    let line = &forged.chunks()[0];
    assert_eq!(line["data"]["reason"], "No remote tool call 'c1' is waiting for a result");
    assert_eq!(line["metadata"], json!({"is_new_thread": true, "thread_id": "t9"}));
    assert_eq!(resume.chunks().len(), 1);
    assert_eq!(plain.error(), (409, "INTERRUPT_001".to_owned()));
    assert_eq!(other.error(), (409, "INTERRUPT_001".to_owned()));
    assert_eq!(schema.error(), (422, "INTERRUPT_002".to_owned()));
    assert_eq!(unknown.error(), (422, "VALIDATION_ERROR".to_owned()));
    assert_eq!(texts(&stack.state("t1").await["context"]), ["refund", "prepared"]);
}
