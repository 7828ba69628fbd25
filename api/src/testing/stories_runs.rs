//! Runs as background work, and invoke, which waits for one.

use std::sync::Arc;

use axum::body::Body;
use futures::StreamExt;
use http::{Method, Request, StatusCode};
use serde_json::json;
use threadgate_shared::domain::{Json, RunId, RunStatus, Scope, Tenant};
use threadgate_shared::store::memory::{Failure, Operation};
use threadgate_shared::store::{RunFilter, Runs};

use super::{Gate, Stack, approval, ask, gated, get, linear, new_run, run_body, texts, with_json};
use crate::{ApiConfig, Mode};

fn everybody() -> Scope {
    Scope { tenant: Tenant::default_tenant(), owner: None }
}

#[tokio::test]
async fn a_run_is_accepted_found_and_waited_for() {
    let stack = Stack::start(vec![linear()]).await;
    let mut body = new_run("linear", "t1", "hello");
    body["input"]["state"] = json!({"topic": "cats"});

    let created = stack.post("/v1/runs", &body).await;

    let id = created.json()["run_id"].as_str().unwrap().to_owned();
    assert_eq!(created.status, StatusCode::ACCEPTED);
    assert_eq!(created.header("location"), format!("/v1/runs/{id}"));
    let waited = stack.get(&format!("/v1/runs/{id}/wait")).await;
    assert_eq!((waited.status, &waited.json()["status"]), (StatusCode::OK, &json!("completed")));
    let read = stack.get(&format!("/v1/runs/{id}")).await.json();
    assert_eq!((&read["state"]["topic"], &read["state"]["visits"]), (&json!("cats"), &json!(["intake"])));
    assert_eq!(read["input"]["state"], json!({"topic": "cats"}));
    assert_eq!(read["error"], Json::Null);
}

#[tokio::test]
async fn invoke_answers_with_what_the_run_said() {
    let stack = Stack::start(vec![linear()]).await;

    let first = stack.invoke("t1", "hello").await.json();
    let mut body = run_body("t1", "again");
    body["response_granularity"] = json!("full");
    let second = stack.post("/v1/graph/invoke", &body).await.json();

    assert_eq!(texts(&first["data"]["messages"]), ["hello", "plan: hello", "answer: hello"]);
    assert_eq!(first["data"]["meta"], json!({"is_new_thread": true, "thread_id": "t1"}));
    assert_eq!(first["data"]["state"], Json::Null);
    assert_eq!(texts(&second["data"]["messages"]), ["again", "plan: again", "answer: again"]);
    assert_eq!(second["data"]["meta"]["is_new_thread"], false);
    assert_eq!(second["data"]["context"].as_array().unwrap().len(), 6);
    assert_eq!(second["data"]["state"], stack.state("t1").await);
}

#[tokio::test]
async fn invoke_answers_a_failure_with_its_code() {
    let stack = Stack::start(vec![linear()]).await;

    let failed = stack.invoke("t1", "boom").await;
    let next = stack.invoke("t1", "hello").await;

    assert_eq!(failed.error(), (500, "NODE_001".to_owned()));
    assert_eq!(failed.json()["error"]["message"], "Error in node 'intake': kaboom in intake");
    assert_eq!(next.status, StatusCode::OK);
}

/// C56: in production the text of what happened inside is in no answer, stream or shown state.
#[tokio::test]
async fn production_keeps_what_happened_inside() {
    let config = ApiConfig { mode: Mode::Production, ..ApiConfig::default() };
    let stack = Stack::with_config(vec![linear()], config).await;

    let invoked = stack.invoke("t1", "boom").await;
    let mut body = run_body("t2", "boom");
    body["response_granularity"] = json!("full");
    let streamed = stack.post("/v1/graph/stream", &body).await;
    let id = stack.create_run("linear", "t3", "boom").await;
    let waited = stack.get(&format!("/v1/runs/{id}/wait")).await;
    let events = stack.get(&format!("/v1/runs/{id}/events")).await;
    let why = stack.get(&format!("/v1/runs/{id}/why")).await;
    let listed = stack.get("/v1/runs").await;

    assert_eq!(invoked.error(), (500, "NODE_001".to_owned()));
    assert_eq!(invoked.json()["error"]["message"], "An error occurred in a graph node.");
    for answer in [&invoked, &streamed, &waited, &events, &why, &listed] {
        assert!(!answer.text().contains("kaboom"), "{}", answer.text());
    }
    assert!(!stack.state("t1").await.to_string().contains("kaboom"));
    assert_eq!(stack.get("/docs/").await.status, StatusCode::NOT_FOUND);
    let invalid = stack.post("/v1/graph/invoke", &json!({"messages": []})).await.json();
    assert_eq!(invalid["error"]["details"], json!([]));
}

/// C15: of many runs on one thread one is accepted, the others change nothing.
#[tokio::test]
async fn a_busy_thread_takes_no_second_run() {
    let gate = Gate::closed();
    let stack = Stack::start(vec![gated(&gate)]).await;
    let bodies: Vec<Json> = (0..20).map(|number| new_run("gated", "t1", &format!("hello {number}"))).collect();

    let answers = futures::future::join_all(bodies.iter().map(|body| stack.post("/v1/runs", body))).await;
    gate.entered().await;
    let streamed = stack.post("/v1/graph/stream", &run_body("t1", "me too")).await;
    gate.open();

    let (accepted, refused): (Vec<_>, Vec<_>) =
        answers.iter().partition(|answer| answer.status == StatusCode::ACCEPTED);
    assert_eq!((accepted.len(), refused.len()), (1, 19));
    for answer in refused.into_iter().chain([&streamed]) {
        assert_eq!(answer.error(), (409, "STATE_CONFLICT".to_owned()));
        assert_eq!(answer.json()["thread_id"], "t1");
    }
    let id = accepted[0].json()["run_id"].as_str().unwrap().to_owned();
    let state = stack.get(&format!("/v1/runs/{id}/wait")).await.json()["state"].take();
    let said = texts(&state["context"]);
    assert_eq!((said.len(), &said[1..]), (3, ["first".to_owned(), "second".to_owned()].as_slice()));
    assert_eq!(stack.get("/v1/runs?thread_id=t1").await.json()["runs"].as_array().unwrap().len(), 1);
}

/// C83: one key gives one run, however often and at once it is sent; another body is refused.
#[tokio::test]
async fn a_retried_create_is_one_run() {
    let stack = Stack::start(vec![linear()]).await;
    let create = |key: &str, text: &str| {
        let mut request = with_json(
            Method::POST,
            "/v1/runs",
            &json!({
                "graph": "linear", "input": {"messages": [super::user(text)]},
            }),
        );
        request.headers_mut().insert("idempotency-key", key.parse().unwrap());
        stack.send(request)
    };

    let answers = futures::future::join_all((0..50).map(|_| create("k1", "hello"))).await;
    let other_body = create("k1", "bye").await;
    let other_key = create("k2", "hello").await;

    let ids: std::collections::HashSet<String> =
        answers.iter().map(|answer| answer.json()["run_id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids.len(), 1);
    let replayed = answers.iter().filter(|answer| answer.header("idempotent-replayed") == "true").count();
    assert_eq!(replayed, 49);
    assert!(answers.iter().all(|answer| answer.status == StatusCode::ACCEPTED));
    assert_eq!(other_body.error(), (409, "IDEMPOTENCY_MISMATCH".to_owned()));
    assert!(!ids.contains(other_key.json()["run_id"].as_str().unwrap()));
    assert_eq!(stack.get("/v1/runs").await.json()["runs"].as_array().unwrap().len(), 2);
}

/// C83: the answer to a create was lost; the retry finds its run.
#[tokio::test]
async fn a_create_whose_answer_was_lost_is_found_again() {
    let stack = Stack::start(vec![linear()]).await;
    let mut body = new_run("linear", "t1", "hello");
    body["config"] = json!({});
    let create = || {
        let mut request = with_json(Method::POST, "/v1/runs", &body);
        request.headers_mut().insert("idempotency-key", "k1".parse().unwrap());
        stack.send(request)
    };
    stack.store.fail_next(Operation::CreateRun, Failure::After);

    let lost = create().await;
    let again = create().await;

    assert_eq!(lost.error(), (503, "STORAGE_TRANSIENT_001".to_owned()));
    assert_eq!((again.status, again.header("idempotent-replayed")), (StatusCode::ACCEPTED, "true"));
    assert_eq!(stack.get("/v1/runs").await.json()["runs"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn an_unknown_graph_is_refused_with_those_there_are() {
    let stack = Stack::start(vec![linear(), approval()]).await;

    let answer = stack.post("/v1/runs", &new_run("nope", "t1", "hello")).await;

    assert_eq!(answer.error(), (422, "VALIDATION_ERROR".to_owned()));
    let message = answer.json()["error"]["details"][0]["msg"].as_str().unwrap().to_owned();
    assert!(message.contains("approval, linear"), "{message}");
}

#[tokio::test]
async fn runs_are_listed_page_by_page() {
    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let mut ids = Vec::new();
    for number in 0..5 {
        ids.push(stack.create_run("linear", &format!("t{number}"), "hello").await);
    }
    ids.reverse();

    let mut seen = Vec::new();
    let mut path = "/v1/runs?limit=2".to_owned();
    loop {
        let page = stack.get(&path).await.json();
        let runs = page["runs"].as_array().unwrap().iter();
        seen.extend(runs.map(|run| run["run_id"].as_str().unwrap().to_owned()));
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        path = format!("/v1/runs?limit=2&cursor={cursor}");
    }

    assert_eq!(seen, ids);
    let count = |query: &'static str| {
        let page = stack.get(query);
        async move { page.await.json()["runs"].as_array().unwrap().len() }
    };
    assert_eq!(count("/v1/runs?status=queued,running").await, 5);
    assert_eq!(count("/v1/runs?status=completed").await, 0);
    assert_eq!(count("/v1/runs?thread_id=t3").await, 1);
    assert_eq!(count("/v1/runs?graph=other").await, 0);
    assert_eq!(count("/v1/runs?limit=5000&graph=&status=").await, 5);
    for refused in ["status=done", "cursor=x", "limit=0", "limit=-1", "limit=x"] {
        assert_eq!(
            stack.get(&format!("/v1/runs?{refused}")).await.status,
            StatusCode::UNPROCESSABLE_ENTITY,
            "{refused}"
        );
    }
}

#[tokio::test]
async fn a_run_that_never_was_is_not_found_on_any_route() {
    let stack = Stack::start(vec![linear()]).await;
    let unknown = RunId::new();

    for id in [unknown.to_string(), "not-a-uuid".to_owned()] {
        for path in ["", "/wait", "/events", "/why"] {
            let answer = stack.get(&format!("/v1/runs/{id}{path}")).await;
            assert_eq!(answer.error(), (404, "RESOURCE_NOT_FOUND".to_owned()), "{path}");
        }
        assert_eq!(stack.post(&format!("/v1/runs/{id}/stop"), &json!({})).await.status, StatusCode::NOT_FOUND);
    }
}

#[tokio::test]
async fn a_stop_answers_with_the_real_status() {
    let gate = Gate::closed();
    let stack = Stack::start(vec![gated(&gate)]).await;
    let id = stack.create_run("gated", "t1", "hello").await;
    gate.entered().await;
    until_running(&stack, &id).await;
    let stop = format!("/v1/runs/{id}/stop");

    let recorded = stack.post(&stop, &json!({})).await;
    let waits = format!("{stop}?wait=0.05");
    let in_time = stack.post(&waits, &json!({})).await;
    let why = stack.get(&format!("/v1/runs/{id}/why")).await.json()["why"].as_str().unwrap().to_owned();
    let waits = format!("{stop}?wait=true");
    let nothing = json!({});
    let (ended, ()) = tokio::join!(stack.post(&waits, &nothing), async { gate.open() });
    let again = stack.post(&stop, &json!({})).await;

    assert_eq!((recorded.status, &recorded.json()["status"]), (StatusCode::ACCEPTED, &json!("running")));
    assert_eq!((in_time.status, &in_time.json()["status"]), (StatusCode::ACCEPTED, &json!("running")));
    assert!(why.contains("Node 'first' is running") && why.contains("A stop is recorded"), "{why}");
    assert_eq!((ended.status, &ended.json()["status"]), (StatusCode::OK, &json!("stopped")));
    assert_eq!((again.status, &again.json()["status"]), (StatusCode::OK, &json!("stopped")));
    assert_eq!(texts(&ended.json()["state"]["context"]), ["hello", "first"]);
}

#[tokio::test]
async fn a_run_that_waits_in_the_queue_is_stopped_at_once() {
    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let id = stack.create_run("linear", "t1", "hello").await;
    let events = stack.open(get(&format!("/v1/runs/{id}/events"))).await;

    let stopped = stack.post(&format!("/v1/runs/{id}/stop"), &json!({})).await;

    assert_eq!((stopped.status, &stopped.json()["status"]), (StatusCode::OK, &json!("stopped")));
    let told = axum::body::to_bytes(events.into_body(), usize::MAX).await.unwrap();
    let told = String::from_utf8_lossy(&told).into_owned();
    assert!(told.contains("event: run_ended") && !told.contains("event: gap"), "{told}");
}

#[tokio::test]
async fn waiting_follows_the_chain_over_a_pause() {
    let stack = Stack::start(vec![ask()]).await;
    let id = stack.create_run("ask_graph", "t1", "refund").await;

    let paused = stack.get(&format!("/v1/runs/{id}/wait?timeout=0.2")).await;
    let answer = json!({"resume": {"approved": true}, "config": {"thread_id": "t1"}});
    let wait = format!("/v1/runs/{id}/wait");
    let (waited, resumed) = tokio::join!(stack.get(&wait), stack.post("/v1/graph/invoke", &answer));

    assert_eq!((paused.status, &paused.json()["status"]), (StatusCode::ACCEPTED, &json!("interrupted")));
    assert_eq!(texts(&resumed.json()["data"]["messages"])[0], "refund");
    let waited = waited.json();
    assert_eq!(
        (&waited["status"], &waited["root_run_id"], &waited["resumes"]),
        (&json!("completed"), &json!(id), &json!(id))
    );
}

#[tokio::test]
async fn why_names_what_is_missing() {
    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let id = stack.create_run("linear", "t1", "hello").await;

    let why = stack.get(&format!("/v1/runs/{id}/why")).await.json();

    let text = why["why"].as_str().unwrap();
    assert!(text.contains("no live worker serves") && text.contains("threadgate worker --pools default"), "{text}");
    assert_eq!((&why["node"], &why["pool"], &why["attempt"]), (&json!("intake"), &json!("default"), &json!(0)));
    let pools = stack.get("/v1/pools").await.json();
    assert_eq!(pools["pools"][0]["runnable"], 1);
}

/// C49: a client that goes away stops its run only where it asked for that.
#[tokio::test]
async fn a_client_that_goes_away_stops_its_run_only_if_it_asked() {
    for (word, ends_as) in [("continue", RunStatus::Completed), ("stop", RunStatus::Stopped)] {
        let gate = Gate::closed();
        let stack = Stack::start(vec![gated(&gate)]).await;
        let mut body = run_body("t1", "hello");
        body["config"]["on_disconnect"] = json!(word);
        let response = stack.open(with_json(Method::POST, "/v1/graph/stream", &body)).await;
        let mut lines = response.into_body().into_data_stream();
        lines.next().await.unwrap().unwrap();
        gate.entered().await;

        drop(lines);
        let newest = RunFilter { limit: 1, ..RunFilter::default() };
        let run = stack.store.runs(&everybody(), &newest).await.unwrap().pop().unwrap();
        if word == "stop" {
            stop_recorded(&stack, run.id).await;
        }
        gate.open();

        let waited = stack.get(&format!("/v1/runs/{}/wait", run.id)).await.json();
        assert_eq!(waited["status"], ends_as.as_str(), "{word}");
    }
}

/// A run is shown as running a moment after its first node started.
async fn until_running(stack: &Stack, id: &str) {
    let path = format!("/v1/runs/{id}");
    let running = async { while stack.get(&path).await.json()["status"] != "running" {} };
    tokio::time::timeout(std::time::Duration::from_secs(20), running).await.expect("the run is running");
}

async fn stop_recorded(stack: &Stack, run: RunId) {
    let limit = std::time::Duration::from_secs(20);
    let recorded = async {
        while !stack.store.why(run).await.unwrap().unwrap().stop_requested {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(limit, recorded).await.expect("the stop is recorded");
}

/// The safety net: nobody tells of the end, and it is found in the store.
#[tokio::test]
async fn an_end_that_no_event_told_of_is_found() {
    let config = ApiConfig::default();
    let stack = Stack::with_events(vec![linear()], config, Arc::new(super::DeafEvents)).await;

    let invoked = stack.invoke("t1", "hello").await.json();
    let streamed = stack.post("/v1/graph/stream", &run_body("t2", "hello")).await.chunks();

    assert_eq!(texts(&invoked["data"]["messages"]), ["hello", "plan: hello", "answer: hello"]);
    assert_eq!(streamed.len(), 3);
}

#[tokio::test]
async fn a_stopping_server_is_not_ready_and_keeps_nobody_waiting() {
    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let id = stack.create_run("linear", "t1", "hello").await;
    let ready = stack.get("/health/ready").await;

    let wait = format!("/v1/runs/{id}/wait");
    let body = run_body("t2", "hello");
    let ((waited, invoked), ()) =
        tokio::join!(async { tokio::join!(stack.get(&wait), stack.post("/v1/graph/invoke", &body)) }, async {
            stack.app.draining.cancel();
            stack.app.closing.cancel();
        });

    assert_eq!((ready.status, ready.json()["status"].as_str()), (StatusCode::OK, Some("ready")));
    let ready = stack.get("/health/ready").await;
    assert_eq!((ready.status, ready.json()["status"].as_str()), (StatusCode::SERVICE_UNAVAILABLE, Some("not_ready")));
    assert_eq!(waited.status, StatusCode::ACCEPTED);
    assert_eq!(invoked.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(invoked.text().contains("the run goes on"));
}

#[tokio::test]
async fn a_database_that_is_away_is_an_answer() {
    let stack = Stack::start(vec![linear()]).await;
    stack.store.set_down(true);

    let invoked = stack.invoke("t1", "hello").await;
    let ready = stack.get("/health/ready").await;
    stack.store.set_down(false);
    let again = stack.invoke("t1", "hello").await;

    assert_eq!(invoked.error(), (503, "STORAGE_TRANSIENT_001".to_owned()));
    assert_eq!(invoked.header("retry-after"), "1");
    assert_eq!(
        (ready.status, ready.json()["checks"]["checkpointer"].as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, Some("fail"))
    );
    assert_eq!(again.status, StatusCode::OK);
}

#[tokio::test]
async fn a_trace_goes_into_the_run() {
    let stack = Stack::without_worker(vec![linear()], ApiConfig::default()).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for (sent, kept) in [(trace, Some(trace)), ("garbage", None)] {
        let body = json!({"graph": "linear", "input": {"messages": [super::user("hi")]}});
        let request = Request::post("/v1/runs").header("content-type", "application/json").header("traceparent", sent);
        let answer = stack.send(request.body(Body::from(body.to_string())).unwrap()).await;

        let id = answer.json()["run_id"].as_str().unwrap().parse().unwrap();
        let run = stack.store.run(&everybody(), id).await.unwrap().unwrap();
        assert_eq!(run.trace.as_deref(), kept);
    }
}
