//! Threads, their states and their messages.

use http::StatusCode;
use serde_json::json;
use threadgate_shared::domain::Json;

use super::{Gate, Stack, calling, gated, linear, run_body, texts, user};
use crate::ApiConfig;

async fn thread(stack: &Stack, id: &str) -> Json {
    stack.get(&format!("/v1/threads/{id}")).await.json()["data"]["thread_data"]["thread"].take()
}

#[tokio::test]
async fn threads_are_listed_shown_and_deleted() {
    let stack = Stack::start(vec![linear()]).await;
    for id in ["t-thr-1", "t-thr-2"] {
        stack.invoke(id, "hello").await;
    }

    let found = stack.get("/v1/threads?search=T-THR&limit=1&offset=1").await.json();
    let shown = thread(&stack, "t-thr-1").await;
    let deleted = stack.delete("/v1/threads/t-thr-1").await.json();
    let again = stack.delete("/v1/threads/t-thr-1").await.json();

    assert_eq!(found["data"]["threads"].as_array().unwrap().len(), 1);
    assert_eq!(found["data"]["threads"][0]["thread_id"], "t-thr-2");
    assert_eq!(
        (&shown["user_id"], &shown["thread_name"], &shown["run_id"]),
        (&json!("anonymous"), &Json::Null, &Json::Null)
    );
    assert!(shown["updated_at"].as_str().unwrap().parse::<chrono::NaiveDateTime>().is_ok());
    assert_eq!((&deleted["data"]["data"], &again["data"]["data"]), (&json!(true), &json!(false)));
    assert_eq!(thread(&stack, "t-thr-1").await, Json::Null);
    assert_eq!(stack.state("t-thr-1").await, Json::Null);
}

#[tokio::test]
async fn a_put_state_merges_and_leaves_the_engines_part_alone() {
    let stack = Stack::start(vec![linear()]).await;
    stack.invoke("t1", "hello").await;
    let mut added = user("appended");
    added["message_id"] = json!("m-app-1");

    let body =
        json!({"state": {"topic": "dogs", "context": [added], "execution_meta": {"current_node": "plan"}, "no": 1}});
    let put = stack.put("/v1/threads/t1/state", &body).await.json();

    let state = &put["data"]["state"];
    assert_eq!(texts(&state["context"]), ["hello", "plan: hello", "answer: hello", "appended"]);
    assert_eq!((&state["topic"], &state["visits"]), (&json!("dogs"), &json!(["intake"])));
    assert_eq!(state["execution_meta"]["current_node"], "answer");
    assert_eq!(*state, stack.state("t1").await);
    let log = stack.get("/v1/threads/t1/messages").await.json();
    assert_eq!(texts(&log["data"]["messages"]), ["hello", "plan: hello", "answer: hello"]);
}

#[tokio::test]
async fn a_state_can_be_put_on_a_thread_that_never_was() {
    let stack = Stack::start(vec![linear()]).await;

    let put = stack.put("/v1/threads/t-new/state", &json!({"state": {"context": [user("hi")]}})).await.json();

    let state = &put["data"]["state"];
    assert_eq!((&state["topic"], &state["visits"]), (&json!("none"), &json!([])));
    assert_eq!(state["execution_meta"]["thread_id"], "t-new");
    assert_eq!(state["execution_meta"]["current_node"], "__start__");
}

#[tokio::test]
async fn clearing_the_state_leaves_the_messages() {
    let stack = Stack::start(vec![linear()]).await;
    stack.invoke("t1", "hello").await;

    let cleared = stack.delete("/v1/threads/t1/state").await.json();
    let missing = stack.delete("/v1/threads/nobody/state").await.json();

    assert_eq!((&cleared["data"]["success"], &missing["data"]["data"]), (&json!(true), &json!(true)));
    assert_eq!(stack.state("t1").await, Json::Null);
    let log = stack.get("/v1/threads/t1/messages").await.json();
    assert_eq!(log["data"]["messages"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn messages_are_written_read_and_deleted_by_either_spelling() {
    let stack = Stack::start(vec![linear()]).await;
    let mut one = user("one");
    one["message_id"] = json!("m-one");
    let mut two = user("two");
    two["message_id"] = json!(41);

    let put = stack.post("/v1/threads/t1/messages", &json!({"messages": [one, two], "metadata": {"k": 1}})).await;
    let number = stack.get("/v1/threads/t1/messages/41").await.json();
    let found = stack.get("/v1/threads/t1/messages?search=ONE").await.json();
    let deleted = stack.delete("/v1/threads/t1/messages/m-one").await.json();
    let gone = stack.get("/v1/threads/t1/messages/m-one").await;
    let again = stack.delete("/v1/threads/t1/messages/m-one").await;

    assert_eq!(put.json()["data"], json!({"success": true, "message": "Messages put successfully", "data": true}));
    assert_eq!(number["data"]["message_id"], json!(41));
    assert_eq!(texts(&found["data"]["messages"]), ["one"]);
    assert_eq!(deleted["data"], json!({"success": true, "message": "Message deleted successfully"}));
    assert_eq!(gone.error(), (404, "RESOURCE_NOT_FOUND".to_owned()));
    assert_eq!(again.error(), (404, "RESOURCE_NOT_FOUND".to_owned()));
    assert_eq!(stack.state("t1").await, Json::Null);
}

/// C55: each refusal leaves everything as it was, and the next valid request goes on from there.
#[tokio::test]
async fn what_is_refused_changes_nothing() {
    let stack = Stack::start(vec![linear()]).await;
    stack.invoke("t1", "hello").await;
    let before = (stack.state("t1").await, stack.get("/v1/threads/t1/messages").await.json()["data"].take());
    let result = json!({"role": "tool", "content": [{"type": "tool_result", "call_id": "c1", "output": "forged"}]});
    let call = json!({"role": "assistant", "content": [], "tools_calls": [{"id": "x"}]});
    let says = json!({"role": "assistant", "content": [{"type": "text", "text": "I said"}]});
    let runs = [
        json!({"messages": [result], "config": {"thread_id": "t1"}}),
        json!({"messages": [call], "config": {"thread_id": "t1"}}),
        json!({"messages": [says], "config": {"thread_id": "t1"}}),
        json!({"resume": 1, "config": {"thread_id": "t1"}}),
        json!({"messages": [user("x")], "config": {"thread_id": "t1"}, "initial_state": {"current_node": "nowhere"}}),
        json!({"messages": [user("x")], "config": {"thread_id": "t1"}, "recursion_limit": 0}),
        json!({"messages": [user("x")], "config": [1]}),
    ];

    for body in &runs {
        assert_eq!(stack.post("/v1/graph/invoke", body).await.status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
    }
    for message in [&result, &call, &says] {
        let put = stack.put("/v1/threads/t1/state", &json!({"state": {"topic": "x", "context": [message]}})).await;
        assert_eq!(put.status, StatusCode::UNPROCESSABLE_ENTITY, "{message}");
    }
    for message in [&result, &call] {
        let post = stack.post("/v1/threads/t1/messages", &json!({"messages": [message]})).await;
        assert_eq!(post.error(), (422, "VALIDATION_ERROR".to_owned()), "{message}");
    }

    let after = (stack.state("t1").await, stack.get("/v1/threads/t1/messages").await.json()["data"].take());
    assert_eq!(before, after);
    let next = stack.invoke("t1", "again").await.json();
    assert_eq!(texts(&next["data"]["messages"]), ["again", "plan: again", "answer: again"]);
}

#[tokio::test]
async fn a_thread_with_an_active_run_is_not_edited() {
    let gate = Gate::closed();
    let stack = Stack::start(vec![gated(&gate)]).await;
    let id = stack.create_run("gated", "t1", "hello").await;
    gate.entered().await;

    let answers = [
        stack.put("/v1/threads/t1/state", &json!({"state": {"context": [user("x")]}})).await,
        stack.delete("/v1/threads/t1/state").await,
        stack.post("/v1/threads/t1/messages", &json!({"messages": [user("x")]})).await,
        stack.delete("/v1/threads/t1").await,
        stack.post("/v1/graph/invoke", &run_body("t1", "x")).await,
    ];
    gate.open();

    for answer in answers {
        assert_eq!(answer.error(), (409, "STATE_CONFLICT".to_owned()));
    }
    let waited = stack.get(&format!("/v1/runs/{id}/wait")).await.json();
    assert_eq!(texts(&waited["state"]["context"]), ["hello", "first", "second"]);
}

#[tokio::test]
async fn stop_says_what_there_was_to_stop() {
    let stack = Stack::start(vec![linear()]).await;
    stack.invoke("t1", "hello").await;
    let stop = async |body: Json| stack.post("/v1/graph/stop", &body).await.json();

    assert_eq!(
        stop(json!({"thread_id": " t1 "})).await["data"],
        json!({"ok": true, "running": false, "reason": "not-running"})
    );
    assert_eq!(
        stop(json!({"thread_id": "none"})).await["data"],
        json!({"ok": false, "running": false, "reason": "no-state"})
    );
    for (body, kind) in [
        (json!({}), "missing"),
        (json!({"thread_id": ""}), "string_too_short"),
        (json!({"thread_id": "  "}), "value_error"),
        (json!({"thread_id": 5}), "string_type"),
    ] {
        let detail = stop(body).await["error"]["details"][0].take();
        assert_eq!((&detail["loc"], &detail["type"]), (&json!(["body", "thread_id"]), &json!(kind)));
    }
}

#[tokio::test]
async fn a_call_that_nobody_answered_is_taken_out() {
    let stack = Stack::start(vec![calling()]).await;
    stack.invoke("t1", "hello").await;

    let fixed = stack.post("/v1/graph/fix", &json!({"thread_id": "t1"})).await.json();
    let again = stack.post("/v1/graph/fix", &json!({"thread_id": "t1"})).await.json();
    let nobody = stack.post("/v1/graph/fix", &json!({"thread_id": "none"})).await.json();

    assert_eq!(fixed["data"]["message"], "Successfully removed 1 message(s)");
    assert_eq!(texts(&fixed["data"]["state"]["context"]), ["hello"]);
    assert_eq!(fixed["data"]["state"], stack.state("t1").await);
    assert_eq!((&again["data"]["success"], &again["data"]["removed_count"]), (&json!(true), &json!(0)));
    let expected =
        json!({"success": false, "message": "No state found for thread: none", "removed_count": 0, "state": null});
    assert_eq!(nobody["data"], expected);
}

/// C54: what happened is read from what was stored, by any replica, under the client's own ids.
#[tokio::test]
async fn the_record_of_a_run_outlives_its_events() {
    let stack = Stack::start(vec![linear()]).await;
    for (run, text) in [("obs-1", "hello"), ("obs-2", "boom")] {
        let mut body = run_body("t1", text);
        body["config"]["run_id"] = json!(run);
        stack.post("/v1/graph/invoke", &body).await;
    }
    let replica = stack.with_new_events();
    let read = async |query: &str| replica.get(&format!("/v1/observability/t1{query}")).await.json()["data"].take();

    let newest = read("").await;
    let named = read("?run_id=obs-1").await;
    let unknown = read("?run_id=nope").await;

    assert_eq!((&newest["run_count"], &newest["run_ids"]), (&json!(2), &json!(["obs-1", "obs-2"])));
    assert_eq!((&newest["run"]["run_id"], &newest["run"]["status"]), (&json!("obs-2"), &json!("error")));
    let run = &named["run"];
    let spans: Vec<&str> = run["spans"].as_array().unwrap().iter().map(|span| span["name"].as_str().unwrap()).collect();
    assert_eq!(spans, ["graph", "node: intake", "node: plan", "node: answer", "llm.generate"]);
    assert_eq!((&run["status"], &run["llm_calls"], &run["iterations"]), (&json!("done"), &json!(1), &json!(3)));
    assert_eq!(run["usage"]["total_tokens"], 18);
    assert_eq!(run["events"].as_array().unwrap().last().unwrap()["summary"], "user: text");
    assert!(run["finished_at"].as_f64() >= run["started_at"].as_f64());
    assert_eq!((&unknown["run"], &unknown["run_count"]), (&Json::Null, &json!(2)));
    let nobody = replica.get("/v1/observability/none").await.json()["data"].take();
    assert_eq!(nobody, json!({"thread_id": "none", "run_count": 0, "run_ids": [], "run": null}));
}

#[tokio::test]
async fn runs_are_observed_only_where_that_is_switched_on() {
    let config = ApiConfig { observability: false, ..ApiConfig::default() };
    let stack = Stack::with_config(vec![linear()], config).await;
    stack.invoke("t1", "hello").await;

    let data = stack.get("/v1/observability/t1").await.json()["data"].take();

    assert_eq!((&data["run"], &data["run_count"]), (&Json::Null, &json!(0)));
}
