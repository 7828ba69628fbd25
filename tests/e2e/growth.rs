//! What a thread costs as it grows old.

use serde_json::{Value, json};
use sqlx::PgPool;
use threadgate_shared::domain::{Caller, ThreadId};
use threadgate_shared::graph::IdKind;
use threadgate_tests::stack::{Settings, Stack};
use threadgate_tests::{Postgres, Redis, graphs};

/// How many turns the thread takes; `GROWTH_TURNS` makes it more (the case speaks of 500).
fn turns() -> usize {
    std::env::var("GROWTH_TURNS").ok().and_then(|turns| turns.parse().ok()).unwrap_or(60)
}

/// C28, invariant 11 (cost per step does not grow with the thread's age): a late turn adds no more
/// bytes than an early one, and the state of every version can still be read.
#[tokio::test(flavor = "multi_thread")]
async fn a_turn_of_an_old_thread_adds_no_more_than_one_of_a_young_thread() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    let database = postgres.database().await;
    let graph = graphs::linear(IdKind::String, None).expect("a graph");
    let stack = Stack::services(&database, &redis, vec![graph], Settings::default()).await;
    let tables = PgPool::connect(&database.url).await.expect("the database answers");
    let turn = json!({
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x".repeat(2048)}]}],
        "config": {"thread_id": "old"},
    });

    let mut added = Vec::new();
    for _ in 0..turns() {
        let before = bytes(&tables).await;
        let answer =
            stack.http.post(format!("{}/v1/graph/invoke", stack.base)).json(&turn).send().await.expect("an answer");
        assert_eq!(answer.status(), 200, "{:?}", answer.json::<Value>().await);
        added.push(bytes(&tables).await - before);
    }

    // The field `visits` is the graph's own growing list; everything else is constant.
    let (early, late) = (added[turns() / 10], added[turns() - 1]);
    assert!(late <= early * 2, "turn {} added {late} bytes, an early one {early}: {added:?}", turns());
    let scope = Caller::anonymous().scope();
    let thread = ThreadId::from("old");
    let newest = stack.parts.store.state(&scope, &thread, None).await.expect("the store").expect("a state");
    for version in 1..=newest.version {
        let state = stack.parts.store.state(&scope, &thread, Some(version)).await.expect("the store").expect("a state");
        assert_eq!(state.version, version);
        assert!(state.context.len() <= newest.context.len());
    }
    stack.end().await;
}

/// Bytes of all rows that a thread has.
async fn bytes(tables: &PgPool) -> i64 {
    let sql = "select (select coalesce(sum(pg_column_size(t)), 0) from message t)
                    + (select coalesce(sum(pg_column_size(t)), 0) from field t)
                    + (select coalesce(sum(pg_column_size(t)), 0) from checkpoint t)
                    + (select coalesce(sum(pg_column_size(t)), 0) from step t)
                    + (select coalesce(sum(pg_column_size(t)), 0) from run t)";
    let (bytes,): (i64,) = sqlx::query_as(sql).fetch_one(tables).await.expect("sizes");
    bytes
}
