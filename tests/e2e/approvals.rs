//! Questions and tools on real processes: what waits outlives every one of them, and a call is carried
//! out as often as its effect allows.

use serde_json::{Value, json};
use threadgate_tests::cluster::{Cluster, Shape};
use threadgate_tests::{Postgres, Redis, eventually};

fn two_workers() -> Shape {
    Shape { workers: 2, schedulers: 2, ..Shape::default() }
}

/// The open questions, oldest first.
async fn inbox(cluster: &Cluster) -> Vec<Value> {
    let answer = cluster.http.get(format!("{}/v1/interrupts", cluster.base)).send().await.expect("the api answers");
    let body: Value = answer.json().await.expect("JSON");
    body["interrupts"].as_array().expect("a list").clone()
}

async fn answer(cluster: &Cluster, question: &Value, body: &Value) -> (u16, Value) {
    let id = question["id"].as_str().expect("an id");
    let sent = cluster.http.post(format!("{}/v1/interrupts/{id}/answer", cluster.base)).json(body).send();
    let answer = sent.await.expect("the api answers");
    (answer.status().as_u16(), answer.json().await.expect("JSON"))
}

/// Waits for the last run of a chain.
async fn wait_for_chain(cluster: &Cluster, root: &str, status: &str) {
    let sql = format!("select status::text from run where root_id = '{root}' order by place desc limit 1");
    eventually(&format!("the chain of {root} to be {status}"), async || {
        let found = cluster.text(&sql).await;
        if found == status { Ok(()) } else { Err(found) }
    })
    .await;
}

/// C30, C35: open approvals outlive every process and an emptied Redis; an accepted answer is safe when api,
/// workers and Redis die right after it, and the gated tool runs once.
#[tokio::test]
async fn open_approvals_and_accepted_answers_outlive_every_process() {
    let (postgres, redis) = (Postgres::shared().await, Redis::private().await);
    let mut cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let mut runs = Vec::new();
    for _ in 0..10 {
        runs.push(cluster.create_run("desk", "pay", json!({})).await);
    }
    cluster.wait_for_all(&runs, "interrupted").await;

    cluster.workers.iter_mut().for_each(|worker| worker.kill_9());
    cluster.schedulers.iter_mut().for_each(|scheduler| scheduler.kill_9());
    redis.flush_all().await;
    cluster.restart_api();
    eventually("the api", async || {
        let answer = cluster.http.get(format!("{}/ping", cluster.base)).send().await;
        answer.map(drop).map_err(|error| error.to_string())
    })
    .await;
    let open = inbox(&cluster).await;
    assert_eq!(open.len(), 10);
    assert!(open.windows(2).all(|pair| pair[0]["created_at"].as_str() <= pair[1]["created_at"].as_str()));
    for (number, question) in open.iter().enumerate() {
        let outcome = if number == 0 { "denied" } else { "approved" };
        let (status, body) = answer(&cluster, question, &json!({"outcome": outcome})).await;
        assert_eq!(status, 202, "{body}");
    }
    cluster.restart_api();
    redis.flush_all().await;
    cluster.workers.clear();
    cluster.schedulers.clear();
    for _ in 0..2 {
        cluster.add_worker(&[]);
        cluster.add_scheduler();
    }

    for run in &runs {
        wait_for_chain(&cluster, run, "completed").await;
    }
    assert_eq!(cluster.number("select count(*) from interrupt where status = 'answered'").await, 10);
    assert_eq!(cluster.number("select count(*) from run where resumes is not null").await, 10);
    let ran = "select count(*) from tool_execution where status = 'done' and attempt = 1 and approval is not null";
    assert_eq!(cluster.number(ran).await, 9, "each approved call ran once");
    assert_eq!(cluster.number("select count(*) from tool_execution where status = 'denied'").await, 1);
    let started: usize =
        open.iter().map(|question| cluster.starts(question["thread_id"].as_str().unwrap()).len()).sum();
    assert_eq!(started, 9);
    cluster.assert_invariants().await;
}

/// C40: the process dies inside a tool. What may be repeated is called again with the same key.
#[tokio::test]
async fn a_tool_that_takes_its_process_along_is_called_again_with_the_same_key() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let run = cluster.create_run("desk", "repeat", json!({})).await;

    cluster.wait_for_all(std::slice::from_ref(&run), "completed").await;

    let sql = format!("select t.id from thread t join run r on r.thread_key = t.key where r.id = '{run}'");
    let started = cluster.starts(&cluster.text(&sql).await);
    assert_eq!(started.iter().map(|(_, attempt)| *attempt).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(started[0].0, started[1].0, "one effect, one key");
    let attempts = format!(
        "select count(*) from step_attempt where run_id = '{run}' and \"end\" = 'crash' and worker is not null"
    );
    assert_eq!(cluster.number(&attempts).await, 1, "both attempts are visible");
    cluster.assert_invariants().await;
}

/// C40: what may run only once is not called again: the run pauses and asks.
#[tokio::test]
async fn a_once_tool_that_takes_its_process_along_pauses_and_asks() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let run = cluster.create_run("desk", "once", json!({})).await;
    cluster.wait_for_all(std::slice::from_ref(&run), "interrupted").await;

    let question = inbox(&cluster).await.remove(0);
    assert_eq!(
        (&question["kind"], &question["reason"]),
        (&json!("outcome"), &json!("threadgate:tool_outcome_unknown"))
    );
    let (status, _) = answer(&cluster, &question, &json!({"value": "done"})).await;
    assert_eq!(status, 422, "the answer is typed");
    let done = json!({"value": {"action": "done", "result": "seen in the books"}});
    assert_eq!(answer(&cluster, &question, &done).await.0, 202);

    wait_for_chain(&cluster, &run, "completed").await;
    assert_eq!(cluster.starts(question["thread_id"].as_str().unwrap()).len(), 1, "it ran once");
    assert_eq!(cluster.number("select count(*) from tool_execution where status = 'done' and attempt = 1").await, 1);
    assert_eq!(cluster.number("select count(*) from message where body::text like '%seen in the books%'").await, 1);
    cluster.assert_invariants().await;
}
