//! Following a run by server-sent events, and coming back to it.

use std::time::Duration;

use futures::StreamExt;
use http::{Request, StatusCode};
use serde_json::json;
use threadgate_shared::domain::Json;

use super::{Answer, DeafEvents, Gate, Stack, gated, get, linear, new_run, texts};
use crate::ApiConfig;

/// One server-sent event.
#[derive(Debug, Clone, PartialEq)]
struct Told {
    id: Option<String>,
    name: String,
    data: Json,
}

fn parse(text: &str) -> Vec<Told> {
    let event = |block: &str| {
        let field =
            |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim().to_owned());
        let data = serde_json::from_str(&field("data:")?).ok()?;
        Some(Told { id: field("id:"), name: field("event:")?, data })
    };
    text.split("\n\n").filter_map(event).collect()
}

async fn events_after(stack: &Stack, run: &str, id: &str) -> Answer {
    let request = Request::get(format!("/v1/runs/{run}/events")).header("last-event-id", id);
    stack.send(request.body(axum::body::Body::empty()).unwrap()).await
}

async fn all_events(stack: &Stack, run: &str) -> Vec<Told> {
    parse(&stack.get(&format!("/v1/runs/{run}/events")).await.text())
}

fn names(told: &[Told]) -> Vec<&str> {
    told.iter().map(|told| told.name.as_str()).collect()
}

async fn finished_run(stack: &Stack, thread: &str) -> String {
    let id = stack.create_run("linear", thread, "hello").await;
    assert_eq!(stack.get(&format!("/v1/runs/{id}/wait")).await.status, StatusCode::OK);
    id
}

#[tokio::test]
async fn a_run_is_followed_while_it_goes_on() {
    let gate = Gate::closed();
    let stack = Stack::start(vec![gated(&gate)]).await;
    let id = stack.create_run("gated", "t1", "hello").await;

    let response = stack.open(get(&format!("/v1/runs/{id}/events"))).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut body = response.into_body().into_data_stream();
    let mut text = String::new();
    while !text.contains("event: custom") {
        text.push_str(std::str::from_utf8(&body.next().await.unwrap().unwrap()).unwrap());
    }
    gate.open();
    while let Some(piece) = body.next().await {
        text.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
    }

    let told = parse(&text);
    let expected = ["node_started", "delta", "custom", "node_finished", "node_started", "node_finished", "run_ended"];
    assert_eq!(names(&told), expected);
    assert_eq!(told[1].data["message"]["delta"], true);
    assert_eq!(told[2].data["value"], json!({"progress": 0.5}));
    assert_eq!(texts(&told[3].data["messages"]), ["first"]);
    assert_eq!((&told[6].data["status"], &told[6].data["run_id"]), (&json!("completed"), &json!(id)));
}

/// C50: cut behind every event and rejoined, the halves are the whole; one last event, also later.
#[tokio::test]
async fn a_stream_is_rejoined_behind_any_event() {
    let stack = Stack::start(vec![linear()]).await;
    let id = finished_run(&stack, "t1").await;

    let whole = all_events(&stack, &id).await;

    assert_eq!(whole.iter().filter(|told| told.name == "run_ended").count(), 1);
    let ids: Vec<&String> = whole.iter().map(|told| told.id.as_ref().unwrap()).collect();
    for (at, cut) in ids.iter().enumerate() {
        let rest = events_after(&stack, &id, cut).await;
        if at + 1 == ids.len() {
            assert_eq!(rest.status, StatusCode::NO_CONTENT);
            continue;
        }
        assert_eq!(parse(&rest.text()), whole[at + 1..], "cut behind {cut}");
    }
    let numbers: Vec<threadgate_shared::events::EventId> = ids.iter().map(|id| id.parse().unwrap()).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b));
}

/// C51: events that are gone are told of by one gap, the nodes since, and a snapshot.
#[tokio::test]
async fn lost_events_are_a_gap_and_a_snapshot() {
    let stack = Stack::start(vec![linear()]).await;
    let id = finished_run(&stack, "t1").await;
    let before = all_events(&stack, &id).await;
    let forgetful = stack.with_new_events();

    let told = all_events(&forgetful, &id).await;

    assert_eq!(names(&told), ["gap", "node_finished", "node_finished", "node_finished", "snapshot", "run_ended"]);
    assert_eq!(told[0].data["after"], "0-0");
    assert_eq!(texts(&told[4].data["state"]["context"]), ["hello", "plan: hello", "answer: hello"]);
    assert_eq!((&told[4].data["status"], &told[4].data["version"]), (&json!("completed"), &json!(4)));
    let rebuilt: Vec<&Told> = told.iter().filter(|told| told.name == "node_finished").collect();
    let original: Vec<&Told> = before.iter().filter(|told| told.name == "node_finished").collect();
    for (rebuilt, original) in rebuilt.iter().zip(original) {
        let (mut rebuilt, mut original) = ((*rebuilt).clone(), original.clone());
        (rebuilt.data["at"], original.data["at"]) = (Json::Null, Json::Null);
        assert_eq!(rebuilt, original);
    }
    assert_eq!(told.last().unwrap().id, before.last().unwrap().id);
}

/// C51: an old cursor gets what came behind it; an unknown one all there is to say; garbage a 422.
#[tokio::test]
async fn cursors_that_are_gone_never_lead_into_silence() {
    let stack = Stack::start(vec![linear()]).await;
    let id = finished_run(&stack, "t1").await;
    let whole = all_events(&stack, &id).await;
    let first_finished = whole.iter().find(|told| told.name == "node_finished").unwrap().id.clone().unwrap();
    let forgetful = stack.with_new_events();

    let old = parse(&events_after(&forgetful, &id, &first_finished).await.text());
    let unknown = parse(&events_after(&stack, &id, "999999-7").await.text());

    assert_eq!(names(&old), ["gap", "node_finished", "node_finished", "snapshot", "run_ended"]);
    assert_eq!(names(&unknown), ["gap", "snapshot", "run_ended"]);
    for garbage in ["-1-0", "x", "1", "1-", "1-2-3", "\u{e9}"] {
        let answer = events_after(&stack, &id, garbage).await;
        assert_eq!(answer.error(), (422, "VALIDATION_ERROR".to_owned()), "{garbage}");
    }
    assert_eq!(names(&parse(&events_after(&stack, &id, "").await.text())), names(&whole));
}

/// C51: a gap while the run goes on is followed by what happens from then on.
#[tokio::test]
async fn after_a_gap_the_live_events_go_on() {
    let gate = Gate::closed();
    let stack = Stack::start(vec![gated(&gate)]).await;
    let id = stack.create_run("gated", "t1", "hello").await;
    gate.entered().await;

    let request = Request::get(format!("/v1/runs/{id}/events")).header("last-event-id", "999999-7");
    let response = stack.open(request.body(axum::body::Body::empty()).unwrap()).await;
    let mut body = response.into_body().into_data_stream();
    let mut text = String::new();
    while !text.contains("event: snapshot") {
        text.push_str(std::str::from_utf8(&body.next().await.unwrap().unwrap()).unwrap());
    }
    gate.open();
    while let Some(piece) = body.next().await {
        text.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
    }

    assert_eq!(
        names(&parse(&text)),
        ["gap", "snapshot", "delta", "custom", "node_finished", "node_started", "node_finished", "run_ended",]
    );
}

/// C49: somebody who follows and goes away changes nothing, and a silent stream shows that it lives.
#[tokio::test]
async fn followers_come_and_go() {
    let gate = Gate::closed();
    let config = ApiConfig { keep_alive: Duration::from_millis(5), ..ApiConfig::default() };
    let stack = Stack::with_events(vec![gated(&gate)], config, std::sync::Arc::new(DeafEvents)).await;
    let id = stack.create_run("gated", "t1", "hello").await;
    gate.entered().await;

    let response = stack.open(get(&format!("/v1/runs/{id}/events"))).await;
    let mut body = response.into_body().into_data_stream();
    let alive = body.next().await.unwrap().unwrap();
    drop(body);
    gate.open();

    assert!(alive.starts_with(b":"), "{alive:?}");
    let waited = stack.get(&format!("/v1/runs/{id}/wait")).await.json();
    assert_eq!(waited["status"], "completed");
}

#[tokio::test]
async fn a_stopping_server_ends_event_streams_so_that_clients_come_back() {
    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let id =
        stack.post("/v1/runs", &new_run("linear", "t1", "hello")).await.json()["run_id"].as_str().unwrap().to_owned();
    let response = stack.open(get(&format!("/v1/runs/{id}/events"))).await;

    stack.app.draining.cancel();
    let told = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();

    assert!(!String::from_utf8_lossy(&told).contains("run_ended"));
}
