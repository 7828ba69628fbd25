//! What the door must survive.

use axum::body::Body;
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use serde_json::json;
use threadgate_shared::domain::Json;

use super::{Answer, Stack, get, linear, raw, run_body, texts, user, with_json};
use crate::ApiConfig;

const INVOKE: &str = "/v1/graph/invoke";

async fn stack() -> Stack {
    Stack::start(vec![linear()]).await
}

async fn threads(stack: &Stack) -> usize {
    stack.get("/v1/threads").await.json()["data"]["threads"].as_array().unwrap().len()
}

/// The place and kind of the first field error of a 422.
fn field(answer: &Answer) -> (Json, String) {
    let mut json = answer.json();
    assert_eq!(answer.error(), (422, "VALIDATION_ERROR".to_owned()), "{json}");
    let detail = json["error"]["details"][0].take();
    (detail["loc"].clone(), detail["type"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn every_answer_has_its_id_time_and_headers() {
    let stack = stack().await;

    for request in
        [get("/ping"), get("/v1/nope"), raw(INVOKE, "{"), with_json(Method::POST, INVOKE, &run_body("t", "x"))]
    {
        let answer = stack.send(request).await;
        let metadata = &answer.json()["metadata"];

        assert_eq!(metadata["request_id"], answer.header("x-request-id"));
        assert_eq!(metadata["timestamp"], answer.header("x-timestamp"));
        assert!(answer.header("x-timestamp").parse::<chrono::NaiveDateTime>().is_ok());
        assert_eq!(answer.header("x-content-type-options"), "nosniff");
        assert_eq!(answer.header("content-type"), "application/json");
        assert!(answer.header("vary").ends_with("Origin"));
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_have_the_envelope() {
    let stack = stack().await;
    let send = |method: Method, path: &str| stack.send(with_json(method, path, &json!({})));

    for path in ["/v1/nope", "/v1/graph/setup", "/v1/ag-ui", "/"] {
        let answer = send(Method::POST, path).await;
        assert_eq!(answer.error(), (404, "HTTPException".to_owned()), "{path}");
        assert_eq!(answer.json()["error"]["message"], "Not Found");
    }
    for (method, path) in [(Method::GET, INVOKE), (Method::GET, "/v1/store/memories/x"), (Method::PATCH, "/v1/runs")] {
        let answer = send(method, path).await;
        assert_eq!(answer.error(), (405, "HTTPException".to_owned()), "{path}");
        assert_eq!(answer.json()["error"]["message"], "Method Not Allowed");
    }
    assert_eq!(send(Method::HEAD, "/ping").await.status, StatusCode::METHOD_NOT_ALLOWED);
    let store = send(Method::POST, "/v1/store/memories").await;
    assert_eq!(
        (store.status, store.json()["error"]["message"].as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, Some("Store is not configured"))
    );
}

#[tokio::test]
async fn browsers_are_told_who_may_call() {
    let stack = stack().await;
    let preflight = Request::builder()
        .method(Method::OPTIONS)
        .uri(INVOKE)
        .header("origin", "https://any.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type");

    let preflight = stack.send(preflight.body(Body::empty()).unwrap()).await;
    let simple = Request::get("/ping").header("origin", "https://any.example").body(Body::empty()).unwrap();
    let simple = stack.send(simple).await;

    assert_eq!((preflight.status, preflight.text().as_str()), (StatusCode::OK, "OK"));
    assert_eq!(preflight.header("access-control-allow-headers"), "authorization,content-type");
    assert_eq!(preflight.header("access-control-max-age"), "600");
    for answer in [preflight, simple] {
        assert_eq!(answer.header("access-control-allow-origin"), "https://any.example");
        assert_eq!(answer.header("access-control-allow-credentials"), "true");
    }

    let config = ApiConfig { origins: vec!["https://app.example".to_owned()], ..ApiConfig::default() };
    let strict = Stack::without_worker(vec![linear()], config).await;
    let evil = Request::builder()
        .method(Method::OPTIONS)
        .uri(INVOKE)
        .header("origin", "https://evil.example")
        .header("access-control-request-method", "POST");
    let evil = strict.send(evil.body(Body::empty()).unwrap()).await;
    assert_eq!((evil.status, evil.text().as_str()), (StatusCode::BAD_REQUEST, "Disallowed CORS origin"));
    assert!(!evil.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn long_answers_are_compressed_on_request() {
    let stack = stack().await;
    let request =
        |path: &str| stack.send(Request::get(path).header("accept-encoding", "gzip").body(Body::empty()).unwrap());

    let long = request("/v1/graph:StateSchema").await;
    let short = request("/ping").await;

    assert_eq!((long.header("content-encoding"), long.header("vary")), ("gzip", "Accept-Encoding, Origin"));
    assert_eq!((short.header("content-encoding"), short.header("vary")), ("", "Origin"));
}

#[tokio::test]
async fn only_json_is_read() {
    let stack = stack().await;
    let body = run_body("t1", "hello").to_string();
    let send = |content_type: Option<&str>, body: String| {
        let request = Request::post(INVOKE);
        let request = content_type.into_iter().fold(request, |request, kind| request.header("content-type", kind));
        stack.send(request.body(Body::from(body)).unwrap())
    };

    for refused in [None, Some("text/plain")] {
        assert_eq!(field(&send(refused, body.clone()).await), (json!(["body"]), "model_attributes_type".to_owned()));
    }
    assert_eq!(field(&send(None, String::new()).await), (json!(["body"]), "missing".to_owned()));
    let json = Some("application/json");
    assert_eq!(field(&send(json, "{nope".to_owned()).await), (json!(["body", 1]), "json_invalid".to_owned()));
    assert_eq!(field(&send(json, "[]".to_owned()).await).1, "model_attributes_type");
    assert_eq!(field(&send(json, "null".to_owned()).await).1, "missing");
    assert_eq!(threads(&stack).await, 0);
    assert_eq!(send(Some("application/merge-patch+json"), body).await.status, StatusCode::OK);
}

/// C84: parameters at their edges are a default or a 422, never a 500.
#[tokio::test]
async fn parameters_at_their_edges() {
    let stack = stack().await;
    let huge: Json = serde_json::from_str("1180591620717411303424").unwrap();
    let with = |key: &str, value: Json| {
        let mut body = json!({"messages": [user("x")]});
        body[key] = value;
        body
    };
    let config = |key: &str, value: Json| with("config", json!({key: value}));

    for refused in [
        with("recursion_limit", json!(0)),
        with("recursion_limit", json!(101)),
        with("recursion_limit", huge.clone()),
        with("recursion_limit", json!([])),
        with("response_granularity", json!("")),
        with("response_granularity", json!(null)),
        with("initial_state", json!([])),
        with("config", json!("x")),
        with("interrupt_id", json!(5)),
        with("messages", json!({})),
        with("messages", json!(null)),
        config("thread_id", json!({})),
        config("thread_id", json!("x".repeat(256))),
        config("run_id", json!([])),
        config("node_timeout", json!("soon")),
        config("on_disconnect", json!("explode")),
        config("thread_name", json!(1)),
    ] {
        assert_eq!(stack.post(INVOKE, &refused).await.status, StatusCode::UNPROCESSABLE_ENTITY, "{refused}");
    }
    assert_eq!(threads(&stack).await, 0);
    for taken in [
        with("recursion_limit", json!("30")),
        with("initial_state", json!(null)),
        with("config", json!(null)),
        with("interrupt_id", json!(null)),
        with("nonsense", huge),
        config("thread_id", json!(null)),
        config("thread_id", json!(false)),
        config("thread_id", json!("  ")),
        config("thread_id", json!(12345)),
        config("node_timeout", json!(0)),
        config("node_timeout", json!(-1)),
        config("node_timeout", json!(null)),
        config("run_id", json!("")),
    ] {
        assert_eq!(stack.post(INVOKE, &taken).await.status, StatusCode::OK, "{taken}");
    }
    for refused in ["limit=0", "limit=-1", "limit=x", "limit=", "offset=-1", "offset=9223372036854775808", "search=%00"]
    {
        for path in ["/v1/threads", "/v1/threads/t/messages"] {
            let answer = stack.get(&format!("{path}?{refused}")).await;
            assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{path}?{refused}");
        }
    }
    for taken in
        ["limit=5000", "limit=1&limit=2", "search=", "offset=9223372036854775807", "other=1", "limit=+5", "%ff=1"]
    {
        assert_eq!(stack.get(&format!("/v1/threads?{taken}")).await.status, StatusCode::OK, "{taken}");
    }
}

/// C85: NUL is refused at the door, whichever way it comes; its spelling is plain text.
#[tokio::test]
async fn nul_is_refused_at_the_door() {
    let stack = stack().await;
    let mut with_id = user("x");
    with_id["message_id"] = json!("a\0");
    let bodies = [
        json!({"messages": [user("a\0b")]}),
        json!({"messages": [with_id]}),
        json!({"messages": [{"role": "user", "content": [], "metadata": {"k\0": 1}}]}),
        json!({"messages": [user("x")], "config": {"thread_id": "a\0"}}),
        json!({"messages": [user("x")], "config": {"hint": "a\0"}}),
        json!({"messages": [user("x")], "initial_state": {"topic": "\0"}}),
    ];

    for body in &bodies {
        for path in [INVOKE, "/v1/graph/stream"] {
            assert_eq!(stack.post(path, body).await.error(), (422, "VALIDATION_ERROR".to_owned()), "{body}");
        }
    }
    for path in ["/v1/threads/a%00/state", "/v1/threads/a/messages/b%00", "/v1/observability/a%00"] {
        assert_eq!(stack.get(path).await.status, StatusCode::UNPROCESSABLE_ENTITY, "{path}");
    }
    let put = stack.put("/v1/threads/t/state", &json!({"state": {"topic": "\0"}})).await;
    assert_eq!(put.status, StatusCode::UNPROCESSABLE_ENTITY);
    let spelled = stack.invoke("t1", "\\u0000").await;

    assert_eq!(threads(&stack).await, 1);
    assert_eq!(texts(&spelled.json()["data"]["messages"])[0], "\\u0000");
}

/// C86: bytes that are no text are refused; whatever is text comes back.
#[tokio::test]
async fn text_comes_back_and_what_is_no_text_does_not_come_in() {
    let stack = stack().await;
    let body = |text: &[u8]| {
        let mut body =
            br#"{"config": {"thread_id": "t1"}, "messages": [{"role": "user", "content": [{"type": "text", "text": ""#
                .to_vec();
        body.extend_from_slice(text);
        body.extend_from_slice(br#""}]}]}"#);
        raw(INVOKE, body)
    };

    for refused in [br"\ud83d".as_slice(), br"\udc00", b"\xff\xfe", b"\xed\xa0\x80", br"\ud83d x"] {
        assert_eq!(field(&stack.send(body(refused)).await).1, "json_invalid");
    }
    let key = stack.send(raw(INVOKE, br#"{"\ud83d": 1}"#.to_vec())).await;
    assert_eq!(field(&key).1, "json_invalid");
    assert_eq!(threads(&stack).await, 0);
    let pair = stack.send(body(br"\ud83e\udd80")).await;
    assert_eq!(texts(&pair.json()["data"]["messages"])[0], "🦀");
}

/// C87: numbers come back with every digit, or do not come in.
#[tokio::test]
async fn numbers_come_back_exactly() {
    let stack = stack().await;
    let big = "1606938044258990275541962092341162602522202993782792835301376";
    let numbers = [
        "9007199254740993",
        "9223372036854775807",
        "-9223372036854775808",
        "9223372036854775808",
        "-9223372036854775809",
        "18446744073709551615",
        "18446744073709551616",
        big,
        "-0.0",
        "0.30000000000000004",
        "1e+400",
    ];
    for (at, digits) in numbers.iter().enumerate() {
        let thread = format!("t{at}");
        let body = format!(
            r#"{{"messages": [{{"role": "user", "content": [], "metadata": {{"n": {digits}}}, "message_id": "m"}}],
                "config": {{"thread_id": "{thread}"}}, "initial_state": {{"topic": [{digits}]}},
                "response_granularity": "full"}}"#
        );

        let invoked = stack.send(raw(INVOKE, body.clone())).await;
        let streamed = stack.send(raw("/v1/graph/stream", body.replace(&thread, &format!("s{at}")))).await;

        let expected = format!("\"n\":{digits}");
        assert_eq!(invoked.status, StatusCode::OK, "{digits}");
        for text in [invoked.text(), streamed.text(), stack.get(&format!("/v1/threads/{thread}/state")).await.text()] {
            assert!(text.contains(&expected), "{digits}: {text}");
            assert!(text.contains(&format!("\"topic\":[{digits}]")), "{digits}: {text}");
        }
    }
    let id = format!(r#"{{"messages": [{{"role": "user", "content": [], "message_id": {big}}}]}}"#);
    assert!(stack.send(raw(INVOKE, id)).await.text().contains(&format!("\"message_id\":{big}")));
}

/// C88: what is too deep or stands twice is refused; in free JSON the last one counts, everywhere.
#[tokio::test]
async fn depth_and_duplicates() {
    let stack = stack().await;
    let deep = |open: &str, close: &str, depth: usize| format!("{}1{}", open.repeat(depth), close.repeat(depth));
    let with = |value: &str| {
        raw(
            INVOKE,
            format!(
                r#"{{"messages": [{}], "config": {{"thread_id": "t1"}}, "initial_state": {{"topic": {value}}}}}"#,
                user("x")
            ),
        )
    };

    for refused in [deep("[", "]", 10_000), deep(r#"{"a":"#, "}", 10_000), deep("[", "]", 110)] {
        assert_eq!(stack.send(with(&refused)).await.error(), (422, "VALIDATION_ERROR".to_owned()));
    }
    let twice = format!(r#"{{"messages": [{}], "messages": [{}]}}"#, user("x"), user("y"));
    assert_eq!(field(&stack.send(raw(INVOKE, twice)).await).0, json!(["body", "messages"]));
    assert_eq!(threads(&stack).await, 0);
    assert_eq!(stack.send(with(&deep("[", "]", 50))).await.status, StatusCode::OK);
    let free = format!(
        r#"{{"messages": [{}], "config": {{"thread_id": "t2"}}, "initial_state": {{"topic": 1, "topic": {{"a": 1, "a": 2}}}},
            "response_granularity": "full"}}"#,
        user("x")
    );
    let answer = stack.send(raw(INVOKE, free)).await.json();
    assert_eq!(answer["data"]["state"]["topic"], json!({"a": 2}));
    assert_eq!(stack.state("t2").await["topic"], json!({"a": 2}));
}

/// C89, invariant 10: what is too large is refused before anything is written.
#[tokio::test]
async fn size_is_limited() {
    let config = ApiConfig { body_bytes_max: 4_096, ..ApiConfig::default() };
    let stack = Stack::without_worker(vec![linear()], config).await;
    let long = json!({"messages": [user(&"y".repeat(5_000))]}).to_string();

    let declared = stack
        .send(
            Request::post(INVOKE)
                .header("content-length", long.len())
                .header("content-type", "application/json")
                .body(Body::from(long.clone()))
                .unwrap(),
        )
        .await;
    let pieces =
        long.into_bytes().chunks(100).map(Bytes::copy_from_slice).map(Ok::<_, std::io::Error>).collect::<Vec<_>>();
    let chunked = stack.send(raw(INVOKE, Body::from_stream(futures::stream::iter(pieces)))).await;

    assert_eq!(declared.error(), (413, "REQUEST_TOO_LARGE".to_owned()));
    assert_eq!(declared.json()["error"]["max_size_bytes"], 4_096);
    assert_eq!(chunked.error(), (413, "REQUEST_TOO_LARGE".to_owned()));
    assert_eq!(chunked.json()["error"]["details"], json!([]));

    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let string = stack.post(INVOKE, &json!({"messages": [user(&"y".repeat(9 << 20))]})).await;
    let many = stack.post(INVOKE, &json!({"messages": vec![json!({"role": "user", "content": []}); 100_000]})).await;
    let packed = Request::post(INVOKE).header("content-type", "application/json").header("content-encoding", "gzip");
    let packed = stack.send(packed.body(Body::from(b"\x1f\x8b\x08\0\0\0\0\0\0\x03".to_vec())).unwrap()).await;

    assert_eq!(field(&string).1, "string_too_long");
    assert_eq!(field(&many).1, "too_long");
    assert_eq!(field(&packed).1, "json_invalid");
    assert_eq!(threads(&stack).await, 0);
}

/// C90: ids are taken exactly or refused, never cut.
#[tokio::test]
async fn ids_are_taken_exactly_or_refused() {
    let stack = stack().await;
    let path = |id: &str| {
        let bytes = id.bytes().map(|byte| format!("%{byte:02X}"));
        format!("/v1/threads/{}", bytes.collect::<String>())
    };
    let taken = ["a/b", "..", "\"quoted\"", "🦀", "\u{5d0}\u{202e}x", "e\u{301}", "\u{e9}", "a b", &"x".repeat(255)];

    for id in taken {
        assert_eq!(stack.invoke(id, "hello").await.json()["data"]["meta"]["thread_id"], id);
        let shown = stack.get(&path(id)).await.json();
        assert_eq!(shown["data"]["thread_data"]["thread"]["thread_id"], id);
        let state = stack.get(&format!("{}/state", path(id))).await.json();
        assert_eq!(state["data"]["state"]["execution_meta"]["thread_id"], id);
    }
    assert_eq!(threads(&stack).await, taken.len());
    for id in ["a\nb", "a\u{7f}", &"x".repeat(256), &"x".repeat(1 << 20)] {
        assert_eq!(stack.invoke(id, "hello").await.status, StatusCode::UNPROCESSABLE_ENTITY);
        if id.len() < 1_000 {
            assert_eq!(stack.get(&path(id)).await.status, StatusCode::UNPROCESSABLE_ENTITY);
        }
    }
    let blank = stack.get("/v1/threads/%20").await;
    assert_eq!(blank.error(), (422, "HTTPException".to_owned()));
    assert_eq!(stack.get("/v1/threads/%ff").await.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(threads(&stack).await, taken.len());
}

/// C90: a client's clock says when, and orders nothing.
#[tokio::test]
async fn client_times_are_kept_and_order_nothing() {
    let stack = stack().await;
    let at = |text: &str, timestamp: Json| {
        let mut message = user(text);
        message["timestamp"] = timestamp;
        message
    };
    let messages = json!([at("a", json!(253402300800.5)), at("b", json!(-1)), at("c", json!(0))]);

    stack.post(INVOKE, &json!({"messages": messages, "config": {"thread_id": "t1"}})).await;

    let context = stack.state("t1").await["context"].take();
    assert_eq!(texts(&context)[..3], ["a", "b", "c"]);
    assert_eq!(context[0]["timestamp"], json!(253402300800.5));
    assert_eq!(context[1]["timestamp"], json!(-1));
}

#[tokio::test]
async fn the_documentation_knows_every_route_and_every_reference() {
    let stack = stack().await;

    let document = stack.get("/openapi.json").await.json();
    let page = stack.get("/docs/").await;

    for path in [
        "/ping",
        "/v1/graph/invoke",
        "/v1/graph:StateSchema",
        "/v1/runs/{run_id}/events",
        "/v1/threads/{thread_id}/messages/{message_id}",
    ] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for reference in document.to_string().split("\"#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap();
        assert!(schemas.contains_key(name), "{name}");
    }
    assert!(page.text().contains("swagger"), "{}", page.text());
}
