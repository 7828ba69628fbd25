//! Questions on the wire: the inbox, and the one way an answer takes.

use http::{Method, StatusCode};
use serde_json::json;
use threadgate_shared::domain::Json;
use threadgate_shared::graph::{Graph, Interrupt, NodeContext};

use super::{Stack, ask, new_run, run_body, user, with_json};

/// A thread whose run waits for an answer; the question's id.
async fn paused(stack: &Stack, thread: &str) -> String {
    let answer = stack.invoke(thread, "refund").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let list = stack.get(&format!("/v1/interrupts?thread_id={thread}")).await.json();
    list["interrupts"][0]["id"].as_str().unwrap_or_else(|| panic!("{list}")).to_owned()
}

async fn answer(stack: &Stack, id: &str, body: &Json) -> super::Answer {
    stack.post(&format!("/v1/interrupts/{id}/answer"), body).await
}

fn approved() -> Json {
    json!({"value": {"approved": true}})
}

#[tokio::test]
async fn a_question_is_listed_with_all_that_an_answer_needs() {
    let stack = Stack::start(vec![ask()]).await;
    let id = paused(&stack, "t1").await;

    let list = stack.get("/v1/interrupts").await.json();
    let one = stack.get(&format!("/v1/interrupts/{id}")).await.json();

    assert_eq!((&list["interrupts"][0], &list["next_cursor"]), (&one, &json!(null)));
    assert_eq!((&one["status"], &one["kind"], &one["node"]), (&json!("open"), &json!("input"), &json!("ask")));
    assert_eq!((&one["message"], &one["value"]), (&json!("Refund 42?"), &json!({"amount": 42})));
    assert_eq!((&one["thread_id"], &one["graph"]), (&json!("t1"), &json!("ask_graph")));
    assert_eq!(one["response_schema"]["required"], json!(["approved"]));
    assert_eq!(one["id"], stack.state("t1").await["execution_meta"]["interrupt_data"]["interrupt"]["id"]);
    assert!(one["created_at"].as_str().unwrap().ends_with('Z'));
}

#[tokio::test]
async fn an_answer_makes_the_run_that_goes_on() {
    let stack = Stack::start(vec![ask()]).await;
    let id = paused(&stack, "t1").await;

    let answered = answer(&stack, &id, &json!({"value": {"approved": true}, "comment": "fine"})).await;
    let body = answered.json();

    assert_eq!(answered.status, StatusCode::ACCEPTED, "{body}");
    let run = body["run_id"].as_str().unwrap();
    assert_eq!(answered.header("location"), format!("/v1/runs/{run}"));
    assert_eq!(body["still_open"], json!([]));
    let question = &body["interrupt"];
    assert_eq!((&question["status"], &question["comment"]), (&json!("answered"), &json!("fine")));
    assert_eq!((&question["answer"], &question["answered_by"]), (&json!({"approved": true}), &json!("anonymous")));
    let waited = stack.get(&format!("/v1/runs/{run}/wait?timeout=20")).await;
    assert_eq!((waited.status, &waited.json()["status"]), (StatusCode::OK, &json!("completed")));
    let texts = super::texts(&stack.state("t1").await["context"]);
    assert_eq!(texts.last().map(String::as_str), Some("finished"));
    assert_eq!(stack.get("/v1/interrupts").await.json()["interrupts"], json!([]));
    let past = stack.get("/v1/interrupts?status=answered").await.json();
    assert_eq!(past["interrupts"][0]["id"], *id);
}

/// A resume goes on as its run began.
#[tokio::test]
async fn an_answer_inherits_what_its_run_was_given() {
    let stack = Stack::start(vec![ask()]).await;
    let body = json!({"graph": "ask_graph", "thread_id": "t1", "priority": "batch", "recursion_limit": 50,
        "input": {"messages": [user("refund")]}, "config": {"lang": "en"}});
    let first = stack.post("/v1/runs", &body).await.json();
    stack.get(&format!("/v1/runs/{}/wait?timeout=1", first["run_id"].as_str().unwrap())).await;
    let id = stack.get("/v1/interrupts").await.json()["interrupts"][0]["id"].as_str().unwrap().to_owned();

    let answered = answer(&stack, &id, &approved()).await.json();

    let run = stack.get(&format!("/v1/runs/{}", answered["run_id"].as_str().unwrap())).await.json();
    assert_eq!((&run["resumes"], &run["root_run_id"]), (&first["run_id"], &first["run_id"]));
    assert_eq!((&run["priority"], &run["recursion_limit"]), (&json!("batch"), &json!(50)));
    assert_eq!(run["config"]["lang"], "en");
}

/// C32, C36: refused with what to do, and nothing is written.
#[tokio::test]
async fn what_does_not_fit_is_refused_and_nothing_is_written() {
    let stack = Stack::start(vec![ask()]).await;
    let id = paused(&stack, "t1").await;
    let before = (stack.state("t1").await, stack.get("/v1/interrupts").await.json());

    for (body, code) in [
        (json!({}), "VALIDATION_ERROR"),
        (json!({"value": null}), "INTERRUPT_002"),
        (json!({"value": "yes"}), "INTERRUPT_002"),
        (json!({"value": {}}), "INTERRUPT_002"),
        (json!({"outcome": "approved"}), "VALIDATION_ERROR"),
        (json!({"value": {"approved": true}, "comment": 5}), "VALIDATION_ERROR"),
    ] {
        let refused = answer(&stack, &id, &body).await;
        assert_eq!(refused.error(), (422, code.to_owned()), "{body}: {}", refused.text());
    }
    for unknown in ["int_0", "int_zz", "nonsense", "int_"] {
        let refused = answer(&stack, unknown, &approved()).await;
        assert_eq!(refused.error(), (404, "RESOURCE_NOT_FOUND".to_owned()), "{unknown}");
    }

    assert_eq!((stack.state("t1").await, stack.get("/v1/interrupts").await.json()), before);
    assert_eq!(answer(&stack, &id, &approved()).await.status, StatusCode::ACCEPTED);
}

/// C31: the second answer is late, whatever it says; the same key replays the first.
#[tokio::test]
async fn a_second_answer_is_refused_and_a_repeated_one_replayed() {
    let stack = Stack::start(vec![ask()]).await;
    let id = paused(&stack, "t1").await;
    let path = format!("/v1/interrupts/{id}/answer");
    let keyed = |body: &Json| {
        let mut request = with_json(Method::POST, &path, body);
        request.headers_mut().insert("idempotency-key", "k1".parse().unwrap());
        request
    };

    let first = stack.send(keyed(&approved())).await;
    let again = stack.send(keyed(&approved())).await;
    let other_body = stack.send(keyed(&json!({"value": {"approved": false}}))).await;
    let late = answer(&stack, &id, &json!({"value": {"approved": false}})).await;

    assert_eq!((first.status, again.status), (StatusCode::ACCEPTED, StatusCode::ACCEPTED));
    assert_eq!(first.json()["run_id"], again.json()["run_id"]);
    assert_eq!((first.header("idempotent-replayed"), again.header("idempotent-replayed")), ("", "true"));
    assert_eq!(other_body.error(), (409, "IDEMPOTENCY_MISMATCH".to_owned()));
    assert_eq!(late.error(), (409, "INTERRUPT_001".to_owned()));
}

#[tokio::test]
async fn the_inbox_is_paged_and_bad_queries_are_refused() {
    let stack = Stack::start(vec![ask()]).await;
    for thread in ["a", "b", "c"] {
        paused(&stack, thread).await;
    }

    let first = stack.get("/v1/interrupts?limit=2").await.json();
    let cursor = first["next_cursor"].as_str().unwrap();
    let second = stack.get(&format!("/v1/interrupts?limit=2&cursor={cursor}")).await.json();

    let threads = |page: &Json| -> Vec<String> {
        let list = page["interrupts"].as_array().unwrap().iter();
        list.map(|question| question["thread_id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!((threads(&first), threads(&second)), (vec!["a".to_owned(), "b".to_owned()], vec!["c".to_owned()]));
    assert_eq!(second["next_cursor"], json!(null));
    for bad in ["status=opened", "cursor=x", "limit=0", "run_id=5"] {
        assert_eq!(stack.get(&format!("/v1/interrupts?{bad}")).await.status, StatusCode::UNPROCESSABLE_ENTITY, "{bad}");
    }
    assert_eq!(threads(&stack.get("/v1/interrupts?graph=other").await.json()), [""; 0]);
    assert_eq!(threads(&stack.get("/v1/interrupts?status=all&thread_id=b").await.json()), ["b"]);
}

/// Source: decision D4; AG-UI, "Stop while a card is open".
#[tokio::test]
async fn a_stop_cancels_the_question_and_the_thread_goes_on_with_any_message() {
    let stack = Stack::start(vec![ask()]).await;
    let id = paused(&stack, "t1").await;
    let plain = stack.post("/v1/graph/invoke", &run_body("t1", "hello?")).await;
    assert_eq!(plain.error(), (409, "INTERRUPT_001".to_owned()));

    stack.post("/v1/graph/stop", &json!({"thread_id": "t1"})).await;

    let late = answer(&stack, &id, &approved()).await;
    assert_eq!(late.error(), (409, "INTERRUPT_001".to_owned()), "{}", late.text());
    assert_eq!(stack.get(&format!("/v1/interrupts/{id}")).await.json()["status"], "cancelled");
    let next = stack.post("/v1/runs", &new_run("ask_graph", "t1", "again")).await;
    assert_eq!(next.status, StatusCode::ACCEPTED, "{}", next.text());
}

/// An `approval` node is answered like a gate, or by its value.
#[tokio::test]
async fn a_decision_may_be_said_in_one_word() {
    let decide = async |ctx: NodeContext| {
        let schema =
            json!({"type": "object", "required": ["approved"], "properties": {"approved": {"type": "boolean"}}});
        let reason = "approval".to_owned();
        let question = Interrupt { reason, response_schema: Some(schema), ..Interrupt::default() };
        ctx.interrupt(question).map(|answer| format!("decided {answer}"))
    };
    let graph = Graph::builder("decide").node("ask", decide).entry("ask").edge("ask", "__end__").build().unwrap();
    let stack = Stack::start(vec![graph]).await;
    for (thread, body, said) in [
        ("a", json!({"outcome": "approved"}), r#"decided {"approved":true}"#),
        ("b", json!({"outcome": "denied", "comment": "no"}), r#"decided {"approved":false,"reason":"no"}"#),
        ("c", json!({"value": {"approved": true}}), r#"decided {"approved":true}"#),
    ] {
        let id = paused(&stack, thread).await;
        for wrong in [
            json!({"outcome": "yes"}),
            json!({"value": {"approved": true}, "outcome": "denied"}),
            json!({"outcome": "approved", "arguments": {"n": 1}}),
        ] {
            let refused = answer(&stack, &id, &wrong).await;
            assert_eq!(refused.error(), (422, "VALIDATION_ERROR".to_owned()), "{wrong}");
        }

        let run = answer(&stack, &id, &body).await.json()["run_id"].as_str().unwrap().to_owned();

        stack.get(&format!("/v1/runs/{run}/wait?timeout=20")).await;
        let texts = super::texts(&stack.state(thread).await["context"]);
        assert_eq!(texts.last().map(String::as_str), Some(said));
    }
}
