//! Real processes that die, freeze, lose Redis or Postgres, and come back: no run is lost, every
//! step is committed once, versions are consecutive. Asserted on the tables.

use std::time::Duration;

use serde_json::json;
use sqlx::PgPool;
use threadgate_shared::graph::IdKind;
use threadgate_shared::store::GraphRecord;
use threadgate_tests::cluster::{Cluster, Shape};
use threadgate_tests::graphs;
use threadgate_tests::stack::{Settings, Stack};
use threadgate_tests::{Postgres, Redis, eventually};

/// How many runs a story sends; `CHAOS_RUNS` makes it more.
fn load() -> usize {
    std::env::var("CHAOS_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(60)
}

fn two_workers() -> Shape {
    Shape { workers: 2, schedulers: 2, ..Shape::default() }
}

/// C08, C10, and invariant 9 (losing a worker costs at most `lease_ttl` plus one sweep): SIGKILL in a
/// node, nobody asks, another worker goes on; finished nodes are not started again.
#[tokio::test]
async fn a_worker_killed_inside_a_node_is_replaced_without_anybody_asking() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let mut cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let run = cluster.create_run("line20", "go", json!({"sleep_ms": 150})).await;

    let holder = cluster.wait_for_lease(&run, 4).await;
    cluster.workers[holder].kill_9();

    cluster.wait_for_all(std::slice::from_ref(&run), "completed").await;
    let starts = cluster.starts(&run);
    let repeated: Vec<_> = starts.iter().filter(|(_, attempt)| *attempt > 1).collect();
    assert_eq!(repeated.len(), 1, "only the interrupted node starts again: {starts:?}");
    let first: Vec<_> = starts.iter().filter(|(node, attempt)| *attempt == 1 && *node != repeated[0].0).collect();
    assert_eq!(first.len(), 19, "every other node starts once: {starts:?}");
    let stood_still = format!(
        "select max(extract(epoch from at - before))::float8::text from (select at, lag(at) over (order by version) as before from checkpoint where run_id = '{run}') t"
    );
    let seconds: f64 = cluster.text(&stood_still).await.parse().expect("seconds");
    assert!(seconds < 30.0, "the run stood still for {seconds} s");
    assert_eq!(
        cluster
            .number(&format!("select count(*) from step_attempt where run_id = '{run}' and \"end\" = 'crash'"))
            .await,
        1
    );
    cluster.assert_invariants().await;
}

/// C09: SIGKILL right after a commit, again and again under load; a finished step never runs again.
#[tokio::test]
async fn workers_killed_at_any_moment_lose_and_repeat_nothing() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let mut cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let runs = cluster.create_runs(load(), "line20", &json!({"sleep_ms": 5})).await;

    for round in 0..4 {
        let before = cluster.number("select count(*) from checkpoint").await;
        eventually("more commits", async || {
            let now = cluster.number("select count(*) from checkpoint").await;
            if now > before + 40 || cluster.number("select count(*) from run where status <> 'completed'").await == 0 {
                Ok(())
            } else {
                Err(now)
            }
        })
        .await;
        cluster.workers[round % 2].kill_9();
        cluster.add_worker(&[]);
        cluster.workers.swap_remove(round % 2);
    }

    cluster.wait_for_all(&runs, "completed").await;
    cluster.assert_invariants().await;
    let steps = cluster.number("select count(*) from step where status = 'done'").await;
    assert_eq!(steps, 20 * i64::try_from(runs.len()).expect("few runs"));
}

/// C04: a worker frozen beyond its lease wakes up late; its commit changes nothing, and it goes on.
#[tokio::test]
async fn a_frozen_worker_that_wakes_up_late_changes_nothing() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let mut cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let run = cluster.create_run("line3", "go", json!({"sleep_ms": 800})).await;
    let holder = cluster.wait_for_lease(&run, 2).await;

    cluster.workers[holder].freeze();
    cluster.wait_for_all(std::slice::from_ref(&run), "completed").await;
    let before = cluster.text("select string_agg(t::text, '|' order by version) from checkpoint t").await;
    cluster.workers[holder].thaw();
    let other = 1 - holder;
    cluster.workers[other].kill_9();
    let next = cluster.create_run("line3", "go", json!({})).await;

    cluster.wait_for_all(std::slice::from_ref(&next), "completed").await;
    let sql = format!(
        "select string_agg(t::text, '|' order by version) from checkpoint t where run_id = '{run}' or run_id is null"
    );
    assert_eq!(cluster.text(&sql).await, before, "the late commit wrote something");
    cluster.assert_invariants().await;
}

/// C22, invariant 1 (Redis is a hint): FLUSHALL, then a restart with nothing in it, under load.
#[tokio::test]
async fn redis_emptied_and_restarted_under_load_loses_nothing() {
    let (postgres, mut redis) = (Postgres::shared().await, Redis::private().await);
    let cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let mut runs = cluster.create_runs(load(), "line20", &json!({"sleep_ms": 5})).await;

    redis.flush_all().await;
    runs.extend(cluster.create_runs(10, "line3", &json!({})).await);
    redis.kill();
    redis.start_again().await;
    runs.extend(cluster.create_runs(10, "line3", &json!({})).await);

    cluster.wait_for_all(&runs, "completed").await;
    cluster.assert_invariants().await;
    let charged = cluster.number("select count(*) from step where attempt > 1").await;
    assert_eq!(charged, 0, "losing Redis charges nobody");
}

/// C20, C23, invariant 1: with Redis gone runs keep completing, stops work; only time is lost.
#[tokio::test]
async fn with_redis_gone_runs_complete_and_stops_work() {
    let (postgres, mut redis) = (Postgres::shared().await, Redis::private().await);
    let cluster = Cluster::start(&postgres, &redis, &two_workers()).await;

    redis.kill();
    let run = cluster.create_run("line3", "go", json!({})).await;
    cluster.wait_for_all(std::slice::from_ref(&run), "completed").await;
    let long = cluster.create_run("line20", "go", json!({"sleep_ms": 300})).await;
    cluster.wait_for_lease(&long, 2).await;
    let answer =
        cluster.http.post(format!("{}/v1/runs/{long}/stop", cluster.base)).send().await.expect("the api answers");
    assert!(answer.status().is_success(), "{}", answer.status());
    cluster.wait_for_all(std::slice::from_ref(&long), "stopped").await;

    redis.start_again().await;
    let after = cluster.create_run("line3", "go", json!({})).await;
    cluster.wait_for_all(&[after], "completed").await;
    cluster.assert_invariants().await;
}

/// Postgres restarts under load: nobody is charged an attempt for it, nothing is lost.
#[tokio::test]
async fn a_restart_of_postgres_under_load_loses_and_charges_nothing() {
    let (mut postgres, redis) = (Postgres::private().await, Redis::shared().await);
    let cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let runs = cluster.create_runs(load(), "line20", &json!({"sleep_ms": 20})).await;

    postgres.stop();
    postgres.start_again().await;

    cluster.wait_for_all(&runs, "completed").await;
    cluster.assert_invariants().await;
    assert_eq!(cluster.number("select count(*) from step where attempt > 1").await, 0);
}

/// C14, invariant 9: SIGTERM under load; no node is repeated, no attempt is charged.
#[tokio::test]
async fn a_deploy_repeats_no_node_and_charges_no_attempt() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let mut cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let runs = cluster.create_runs(load(), "line20", &json!({"sleep_ms": 10})).await;

    for _ in 0..2 {
        let mut old = cluster.workers.remove(0);
        cluster.add_worker(&[]);
        old.terminate();
        assert!(old.wait().await.success(), "a polite end is a success: {}", old.log());
    }

    cluster.wait_for_all(&runs, "completed").await;
    cluster.assert_invariants().await;
    assert_eq!(cluster.number("select count(*) from step where attempt > 1").await, 0);
    assert_eq!(cluster.number("select count(*) from step_attempt").await, 0);
    for run in &runs {
        assert_eq!(cluster.starts(run).len(), 20, "a node was started twice in {run}");
    }
}

/// C14: a node longer than the grace is given back uncharged, and starts again elsewhere.
#[tokio::test]
async fn a_node_longer_than_the_grace_is_given_back_uncharged() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let mut cluster = Cluster::start(&postgres, &redis, &Shape { workers: 0, schedulers: 1, ..Shape::default() }).await;
    cluster.add_worker(&["--shutdown-grace", "200ms"]);
    cluster.wait_for_workers(1).await;
    let run = cluster.create_run("line3", "go", json!({"sleep_ms": 3000})).await;
    cluster.wait_for_lease(&run, 1).await;

    let mut old = cluster.workers.remove(0);
    old.terminate();
    assert!(old.wait_within(Duration::from_secs(20)).await.success(), "{}", old.log());
    let given_back = format!("select status || ' ' || attempt from step where run_id = '{run}'");
    assert_eq!(cluster.text(&given_back).await, "ready 0");
    assert_eq!(cluster.status(&run).await, "queued");

    cluster.add_worker(&[]);
    cluster.wait_for_all(std::slice::from_ref(&run), "completed").await;
    assert_eq!(cluster.number(&format!("select count(*) from step_attempt where run_id = '{run}'")).await, 0);
    cluster.assert_invariants().await;
}

/// C12: a node that ends its process starts three times and no more; its run fails, its thread is
/// usable, and no bystander fails.
#[tokio::test]
async fn a_node_that_kills_its_process_is_quarantined() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let mut cluster = Cluster::start(&postgres, &redis, &Shape { workers: 1, schedulers: 2, ..Shape::default() }).await;
    let poison = cluster.create_run("trouble", "abort", json!({})).await;

    for _ in 0..3 {
        cluster.workers[0].wait().await;
        cluster.workers.clear();
        cluster.add_worker(&[]);
    }
    cluster.wait_for_all(std::slice::from_ref(&poison), "failed").await;

    assert_eq!(cluster.starts(&poison).len(), 3);
    let error = cluster.text(&format!("select error::text from run where id = '{poison}'")).await;
    assert!(error.contains("worker_crash"), "{error}");
    let bystander = cluster.create_run("line3", "go", json!({})).await;
    cluster.wait_for_all(&[bystander], "completed").await;
    let why = cluster
        .http
        .get(format!("{}/v1/runs/{poison}/why", cluster.base))
        .send()
        .await
        .expect("an answer")
        .text()
        .await
        .expect("text");
    assert!(why.contains("worker"), "{why}");
    cluster.assert_invariants().await;
}

/// C15, invariant 4: many creates on one thread at once: one run.
#[tokio::test]
async fn of_many_creates_on_one_thread_one_wins() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let body = json!({
        "graph": "line3",
        "thread_id": "contended",
        "input": {"messages": [{"role": "user", "content": []}], "state": {"sleep_ms": 300}},
    });

    let creates = (0..20).map(|_| cluster.http.post(format!("{}/v1/runs", cluster.base)).json(&body).send());
    let answers = futures::future::join_all(creates).await;

    let mut statuses: Vec<u16> =
        answers.into_iter().map(|answer| answer.expect("an answer").status().as_u16()).collect();
    statuses.sort_unstable();
    assert_eq!(statuses[0], 202);
    assert!(statuses[1..].iter().all(|status| *status == 409), "{statuses:?}");
    assert_eq!(cluster.number("select count(*) from run").await, 1);
    assert_eq!(cluster.number("select count(*) from message").await, 1);
    cluster.assert_invariants().await;
}

/// C83: one idempotency key many times at once, across a kill of the api: one run.
#[tokio::test]
async fn one_idempotency_key_makes_one_run() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let mut cluster = Cluster::start(&postgres, &redis, &two_workers()).await;
    let body = json!({"graph": "line3", "input": {"messages": [{"role": "user", "message_id": "m1", "content": []}]}});
    let create = |cluster: &Cluster, body: &serde_json::Value| {
        cluster.http.post(format!("{}/v1/runs", cluster.base)).header("idempotency-key", "k1").json(body).send()
    };

    let answers = futures::future::join_all((0..50).map(|_| create(&cluster, &body))).await;
    let mut ids = std::collections::HashSet::new();
    for answer in answers {
        let answer = answer.expect("an answer");
        assert!(answer.status().is_success(), "{}", answer.status());
        let body: serde_json::Value = answer.json().await.expect("JSON");
        ids.insert(body["run_id"].as_str().expect("a run id").to_owned());
    }
    assert_eq!(ids.len(), 1);
    cluster.restart_api();
    cluster.wait_for_workers(2).await;
    let again = create(&cluster, &body).await.expect("an answer");
    assert_eq!(again.headers()["idempotent-replayed"], "true");
    let other = create(&cluster, &json!({"graph": "line3", "input": {"messages": [{"role": "user", "content": [{"type": "text", "text": "else"}]}]}})).await;
    assert_eq!(other.expect("an answer").status(), 409);
    assert_eq!(cluster.number("select count(*) from run").await, 1);
}

/// Invariant 9 for everybody else: a thread that somebody holds keeps the closing of its own run
/// waiting, and no other one's.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_cannot_be_closed_keeps_no_other_waiting() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let database = postgres.database().await;
    let nobody = Settings { workers: Some(0), ..Settings::default() };
    let stack = Stack::services(&database, &redis, Vec::new(), nobody).await;
    let graph = graphs::linear(IdKind::String, None).expect("a graph");
    let name = graph.manifest.name.clone();
    let record = GraphRecord {
        name: name.clone(),
        version: graph.version.clone(),
        manifest: (*graph.manifest).clone(),
        registered_at: chrono::Utc::now(),
    };
    stack.parts.store.register_graphs(&[record]).await.expect("the store");
    let tables = PgPool::connect(&database.url).await.expect("the database answers");
    for thread in ["held", "free"] {
        let run = json!({"graph": name, "thread_id": thread, "input": {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "go"}]}]}});
        let answer = stack.http.post(format!("{}/v1/runs", stack.base)).json(&run).send().await.expect("an answer");
        assert_eq!(answer.status(), 202);
    }
    let mut hold = tables.begin().await.expect("a transaction");
    sqlx::query("select from thread where id = 'held' for update").execute(&mut *hold).await.expect("the lock");

    let lost = "update step set status = 'leased', token = gen_random_uuid(), attempt = attempts_max,
                       due_at = now() - interval '1 minute'";
    sqlx::query(lost).execute(&tables).await.expect("two lost workers");

    let failed = async |thread: &str| {
        let sql =
            "select count(*) from run r join thread t on t.key = r.thread_key where t.id = $1 and r.status = 'failed'";
        let count: i64 = sqlx::query_scalar(sql).bind(thread).fetch_one(&tables).await.expect("the database answers");
        if count == 1 { Ok(()) } else { Err(count) }
    };
    eventually("the free thread's run to be closed", async || failed("free").await).await;
    assert_eq!(failed("held").await, Err(0));
    hold.rollback().await.expect("the lock is given back");
    eventually("the held thread's run to be closed", async || failed("held").await).await;
    stack.end().await;
}
