//! Services that reply in every way.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use serde_json::json;
use threadgate_shared::domain::{
    Caller, ExecutionMeta, Json, JsonMap, Message, Role, RunId, StepId, Tenant, ThreadId, ThreadState, UserId,
};
use tokio_util::sync::CancellationToken;
use wiremock::matchers::{header, method, path};
use wiremock::{Mock, MockServer, Request, ResponseTemplate};

use super::request::{DEADLINE_HEADER, SIGNATURE_HEADER, signature};
use super::*;
use crate::run_node::OUTPUT_TOO_LARGE;

fn spec(server: &MockServer, more: Json) -> HttpSpec {
    let mut spec = json!({"url": format!("{}/node", server.uri())});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(spec).unwrap()
}

fn node(server: &MockServer, more: Json) -> Arc<dyn Node> {
    let config = HttpConfig { secret: Some(Secret::from("hush")), ..HttpConfig::default() };
    HttpNodes::new(&config, 1_000).unwrap().http("ask", IdKind::String, spec(server, more)).unwrap()
}

fn context() -> NodeContext {
    let said = |text: &str| Message::text(Role::User, text);
    NodeContext {
        state: Arc::new(ThreadState {
            context: vec![said("one"), said("two")],
            context_summary: None,
            execution_meta: ExecutionMeta::fresh("t"),
            fields: JsonMap::from_iter([("total".to_owned(), serde_json::from_str("1e400").unwrap())]),
        }),
        config: Arc::new(JsonMap::from_iter([("lang".to_owned(), json!("en"))])),
        thread_id: ThreadId::from("t"),
        step: StepId { run_id: RunId::new(), seq: 3 },
        node: "ask".to_owned(),
        attempt: 2,
        caller: Caller { tenant: Tenant::from("acme"), user: UserId::from("ann"), verified: true },
        trace: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned()),
        deadline: Some(Duration::from_secs(9)),
        cancelled: CancellationToken::new(),
        events: threadgate_shared::graph::NodeEvents::channel().0,
        answers: Arc::new(vec![json!("yes")]),
        asked: Arc::new(AtomicUsize::new(0)),
    }
}

async fn replying(response: ResponseTemplate) -> MockServer {
    let server = MockServer::start().await;
    Mock::given(method("POST")).and(path("/node")).respond_with(response).mount(&server).await;
    server
}

async fn reply(response: ResponseTemplate, more: Json) -> Result<Outcome, NodeError> {
    let server = replying(response).await;
    node(&server, more).run(context()).await
}

fn failure(result: Result<Outcome, NodeError>) -> (String, bool) {
    match result {
        Err(NodeError::Failed { message, retryable, .. }) => (message, retryable),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_request_carries_state_key_deadline_trace_and_signature() {
    let server = replying(ResponseTemplate::new(200).set_body_json(json!({}))).await;
    let ctx = context();
    let (run, key) = (ctx.step.run_id, ctx.idempotency_key());

    node(&server, json!({"headers": {"X-Team": "refunds"}})).run(ctx).await.unwrap();

    let sent = server.received_requests().await.unwrap().remove(0);
    let of = |name: &str| sent.headers[name].to_str().unwrap().to_owned();
    assert_eq!(of("idempotency-key"), key);
    assert_eq!(of(DEADLINE_HEADER), "9000");
    assert_eq!(of("traceparent"), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    assert_eq!(of("x-team"), "refunds");
    let signed = of(SIGNATURE_HEADER);
    let at = signed.strip_prefix("t=").unwrap().split(',').next().unwrap().parse().unwrap();
    assert_eq!(signed, signature(&Secret::from("hush"), at, &sent.body));
    let body: Json = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!(body["run_id"], run.to_string());
    assert_eq!(
        (&body["thread_id"], &body["step"], &body["node"], &body["attempt"]),
        (&json!("t"), &json!(3), &json!("ask"), &json!(2))
    );
    assert_eq!((&body["answers"], &body["config"]), (&json!(["yes"]), &json!({"lang": "en"})));
    assert_eq!(body["caller"], json!({"tenant": "acme", "user": "ann"}));
    assert_eq!(body["state"]["context"].as_array().unwrap().len(), 2);
    assert!(String::from_utf8(sent.body).unwrap().contains(r#""total":1e+400"#), "numbers keep their digits");
}

#[test]
fn the_signature_is_an_hmac_over_time_and_body() {
    // Checked with: printf '1700000000.{"a":1}' | openssl dgst -sha256 -hmac secret
    assert_eq!(
        signature(&Secret::from("secret"), 1_700_000_000, br#"{"a":1}"#),
        "t=1700000000,v1=49f24e537407743fa4a0242bb63b94b9a47ee99cbbe071ccd8a22550ae411686"
    );
}

#[tokio::test]
async fn a_node_may_ask_for_the_last_message_or_none() {
    for (messages, count) in [("all", 2), ("last", 1), ("none", 0)] {
        let server = replying(ResponseTemplate::new(204)).await;

        node(&server, json!({"messages": messages})).run(context()).await.unwrap();

        let sent = server.received_requests().await.unwrap().remove(0);
        let body: Json = serde_json::from_slice(&sent.body).unwrap();
        assert_eq!(body["state"]["context"].as_array().unwrap().len(), count);
    }
}

#[tokio::test]
async fn a_reply_patches_and_jumps() {
    let said = json!({"messages": ["hello"], "fields": {"total": 3}, "remove": ["m"], "goto": "next"});

    let outcome = reply(ResponseTemplate::new(200).set_body_json(said), json!({})).await.unwrap();

    let update = outcome.command.update;
    assert_eq!(update.messages[0].plain_text(), "hello");
    assert_eq!((update.fields["total"].clone(), update.remove.len()), (json!(3), 1));
    assert_eq!(outcome.command.goto.as_deref(), Some("next"));
}

#[tokio::test]
async fn a_reply_asks_the_question_after_those_that_were_answered() {
    let said = json!({"interrupt": {"message": "Sure?"}});

    let asked = reply(ResponseTemplate::new(200).set_body_json(said), json!({})).await;

    assert!(matches!(asked, Err(NodeError::Interrupt { position: 1, .. })), "{asked:?}");
}

#[tokio::test]
async fn a_reply_says_whether_its_error_is_worth_another_attempt() {
    for retryable in [true, false] {
        let said = json!({"error": {"message": "no stock", "code": "STOCK_1", "retryable": retryable}});

        let failed = reply(ResponseTemplate::new(200).set_body_json(said), json!({})).await;

        let expected = NodeError::Failed { code: "STOCK_1".into(), message: "no stock".into(), retryable };
        assert_eq!(failed, Err(expected));
    }
}

#[tokio::test]
async fn a_status_says_whether_another_attempt_could_succeed() {
    for (status, retryable) in
        [(500, true), (503, true), (429, true), (408, true), (400, false), (404, false), (302, false)]
    {
        let response = ResponseTemplate::new(status).set_body_string("see the log").insert_header("location", "/else");

        let (message, may_pass) = failure(reply(response, json!({})).await);

        assert_eq!(may_pass, retryable, "{status}");
        assert!(message.contains(&status.to_string()) && message.contains("see the log"), "{message}");
    }
}

#[tokio::test]
async fn a_service_that_is_not_there_is_worth_another_attempt() {
    let server = MockServer::start().await;
    let gone = spec(&server, json!({}));
    drop(server);
    let node = HttpNodes::new(&HttpConfig::default(), 1_000).unwrap();

    let mut gone = gone;
    gone.url = "http://127.0.0.1:1/node?token=hush".to_owned();
    let (message, retryable) = failure(node.http("ask", IdKind::String, gone).unwrap().run(context()).await);

    assert!(retryable);
    assert!(message.contains("127.0.0.1") && !message.contains("hush"), "{message}");
}

#[tokio::test]
async fn what_cannot_be_used_is_refused_with_a_sentence() {
    let deep = "[".repeat(500);
    for (body, part) in [
        ("nope".as_bytes(), "not JSON"),
        (b"{\"goto\": \"\xff\"}", "not UTF-8 from byte 10"),
        (b"[]", "not a JSON object"),
        (b"{\"mesages\": []}", "'mesages'"),
        (b"{\"messages\": [{\"role\": \"robot\", \"content\": []}]}", "role"),
        (deep.as_bytes(), "not JSON: recursion limit"),
    ] {
        let (message, retryable) = failure(reply(ResponseTemplate::new(200).set_body_bytes(body), json!({})).await);

        assert!(message.contains(part) && !retryable, "{message}");
    }
}

/// C89: 1, 10 and 100 times the limit, declared.
#[tokio::test]
async fn a_reply_over_its_limit_is_refused_for_good() {
    for times in [1, 10, 100] {
        let body = json!({"messages": ["x".repeat(times * 1_000)]});

        let failed = reply(ResponseTemplate::new(200).set_body_json(body), json!({})).await;

        let Err(NodeError::Failed { code, message, retryable: false }) = failed else { panic!("{failed:?}") };
        assert_eq!(code, OUTPUT_TOO_LARGE);
        assert!(message.contains("1000 allowed"), "{message}");
    }
    let own = json!({"response_bytes_max": 10});
    let failed = reply(ResponseTemplate::new(200).set_body_json(json!({"goto": "somewhere"})), own).await;
    assert!(failure(failed).0.contains("10 allowed"));
}

#[tokio::test]
async fn a_reply_must_satisfy_the_nodes_schema() {
    let schema = json!({"response_schema": {"properties": {"fields": {"required": ["total"]}}}});
    let right = json!({"fields": {"total": 1}});
    let outcome = reply(ResponseTemplate::new(200).set_body_json(right), schema.clone()).await.unwrap();
    assert_eq!(outcome.command.update.fields["total"], 1);

    let wrong = json!({"fields": {"sum": 1}});
    let (message, retryable) = failure(reply(ResponseTemplate::new(200).set_body_json(wrong), schema).await);

    assert!(!retryable);
    assert!(message.contains("/fields") && message.contains("total"), "{message}");
}

/// C85, C86, C87
#[tokio::test]
async fn odd_characters_and_numbers_come_through() {
    let body = r#"{"messages": ["a\u0000b", "\ud83d", "\ud83d\ude00"], "fields": {"n": 123456789012345678901234567890, "z": -0.0}}"#;

    let outcome = reply(ResponseTemplate::new(200).set_body_string(body), json!({})).await.unwrap();

    let update = outcome.command.update;
    let texts: Vec<_> = update.messages.iter().map(Message::plain_text).collect();
    assert_eq!(texts, ["a\0b", "\u{FFFD}D83D", "😀"]);
    assert_eq!(update.fields["n"].to_string(), "123456789012345678901234567890");
    assert_eq!(update.fields["z"].to_string(), "-0.0");
}

#[tokio::test]
async fn cancelling_drops_the_request() {
    let server = replying(ResponseTemplate::new(200).set_delay(Duration::from_secs(600))).await;
    let ctx = context();
    let cancel = ctx.cancelled.clone();
    let running = tokio::spawn({
        let node = node(&server, json!({}));
        async move { node.run(ctx).await }
    });
    while server.received_requests().await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }

    cancel.cancel();

    let (message, retryable) = failure(running.await.unwrap());
    assert!(message.contains("cancelled") && retryable);
}

#[tokio::test]
async fn secrets_come_from_variables_that_are_meant_for_nodes() {
    let server = MockServer::start().await;
    let make = |more: Json| {
        HttpNodes::new(&HttpConfig::default(), 1_000).unwrap().http("ask", IdKind::String, spec(&server, more)).err()
    };

    let own = make(json!({"header_env": {"X-Database": "THREADGATE_DATABASE_URL"}})).unwrap();
    assert!(own.message.contains("setting of the worker itself"), "{own}");
    let missing = make(json!({"secret_env": "THREADGATE_NODE_THAT_IS_NOT_SET"})).unwrap();
    assert!(missing.message.contains("'ask'") && missing.message.contains("THREADGATE_NODE_THAT_IS_NOT_SET"));
    // PATH is set wherever tests run; its value goes where the author said.
    let server = MockServer::start().await;
    Mock::given(header("x-path", std::env::var("PATH").unwrap()))
        .respond_with(|_: &Request| ResponseTemplate::new(204))
        .mount(&server)
        .await;
    node(&server, json!({"header_env": {"X-Path": "PATH"}})).run(context()).await.unwrap();
}
