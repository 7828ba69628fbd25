//! Bodies that nobody would write: whatever comes, the door answers and never breaks.

use http::{Method, StatusCode};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;
use threadgate_shared::domain::Json;

use super::{Stack, linear, raw, with_json};
use crate::ApiConfig;

/// Words that mean something somewhere.
const WORDS: [&str; 32] = [
    "graph",
    "linear",
    "thread_id",
    "input",
    "messages",
    "state",
    "config",
    "recursion_limit",
    "priority",
    "multitask",
    "role",
    "user",
    "tool",
    "content",
    "type",
    "text",
    "annotations",
    "tool_result",
    "tool_call",
    "call_id",
    "output",
    "message_id",
    "metadata",
    "timestamp",
    "usages",
    "delta",
    "run_id",
    "node_timeout",
    "on_disconnect",
    "current_node",
    "resume",
    "context",
];

/// How many bodies of each kind; `THREADGATE_FUZZ_BODIES` says otherwise.
fn count() -> usize {
    std::env::var("THREADGATE_FUZZ_BODIES").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

fn word() -> impl Strategy<Value = String> {
    prop_oneof![4 => proptest::sample::select(&WORDS[..]).prop_map(str::to_owned), 1 => any::<String>()]
}

fn value() -> impl Strategy<Value = Json> {
    let number = prop_oneof![
        any::<i64>().prop_map(Json::from),
        any::<f64>().prop_map(Json::from),
        "-?[1-9][0-9]{0,40}(\\.[0-9]{1,20})?(e[+-]?[0-9]{1,4})?"
            .prop_map(|digits| serde_json::from_str(&digits).unwrap()),
    ];
    let leaf = prop_oneof![Just(Json::Null), any::<bool>().prop_map(Json::from), number, word().prop_map(Json::from)];
    leaf.prop_recursive(5, 48, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Json::from),
            proptest::collection::vec((word(), inner), 0..8)
                .prop_map(|pairs| Json::Object(pairs.into_iter().collect())),
        ]
    })
}

/// A body that is right but for one place.
fn almost() -> impl Strategy<Value = Json> {
    let places = [
        "/graph",
        "/thread_id",
        "/input",
        "/input/messages",
        "/input/messages/0",
        "/input/messages/0/role",
        "/input/messages/0/content",
        "/input/messages/0/content/0",
        "/input/messages/0/content/0/text",
        "/input/messages/0/message_id",
        "/input/state",
        "/config",
        "/config/run_id",
        "/config/node_timeout",
        "/config/on_disconnect",
        "/recursion_limit",
        "/priority",
        "/multitask",
    ];
    (proptest::sample::select(places.to_vec()), value()).prop_map(|(place, value)| {
        let mut body = json!({
            "graph": "linear", "thread_id": null, "recursion_limit": 3, "priority": "batch", "multitask": "reject",
            "input": {"state": {}, "messages": [{
                "role": "user", "message_id": "m", "content": [{"type": "text", "text": "hi"}],
            }]},
            "config": {"run_id": "r", "node_timeout": 1, "on_disconnect": "stop"},
        });
        *body.pointer_mut(place).unwrap() = value;
        body
    })
}

fn examples<T>(strategy: impl Strategy<Value = T>) -> Vec<T> {
    let mut runner = TestRunner::new(Config::default());
    (0..count()).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

#[tokio::test]
async fn whatever_body_comes_the_door_answers() {
    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let expected = [StatusCode::ACCEPTED, StatusCode::UNPROCESSABLE_ENTITY, StatusCode::CONFLICT];

    for body in examples(value()).into_iter().chain(examples(almost())) {
        let answer = stack.post("/v1/runs", &body).await;

        assert!(expected.contains(&answer.status), "{} to {body}: {}", answer.status, answer.text());
        if answer.status != StatusCode::ACCEPTED {
            assert!(answer.json()["error"]["message"].is_string(), "{body}");
        }
    }
    for body in examples(value()) {
        for (method, path) in [
            (Method::PUT, "/v1/threads/t/state"),
            (Method::POST, "/v1/threads/t/messages"),
            (Method::DELETE, "/v1/threads/t"),
            (Method::POST, "/v1/graph/stop"),
            (Method::POST, "/v1/graph/fix"),
        ] {
            let answer = stack.send(with_json(method, path, &body)).await;
            assert!(!answer.status.is_server_error(), "{path}: {} to {body}: {}", answer.status, answer.text());
        }
    }
}

#[tokio::test]
async fn whatever_bytes_come_the_door_answers() {
    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let body = br#"{"graph": "linear", "input": {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83e\udd80"}]}]}}"#;
    let cuts = (any::<proptest::sample::Index>(), any::<u8>(), any::<bool>()).prop_map(|(at, byte, replace)| {
        let mut bytes = body.to_vec();
        let at = at.index(bytes.len());
        if replace {
            bytes[at] = byte
        } else {
            bytes.truncate(at)
        }
        bytes
    });

    for bytes in examples(cuts).into_iter().chain(examples(proptest::collection::vec(any::<u8>(), 0..64))) {
        let answer = stack.send(raw("/v1/runs", bytes.clone())).await;
        let expected = [StatusCode::ACCEPTED, StatusCode::UNPROCESSABLE_ENTITY];
        assert!(expected.contains(&answer.status), "{} to {}", answer.status, String::from_utf8_lossy(&bytes));
    }
}
