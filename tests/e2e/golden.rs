//! The recordings, replayed over HTTP: on the embedded default, and on Postgres and Redis.

use std::sync::Arc;

use futures::StreamExt;
use threadgate_shared::graph::{Graph, IdKind};
use threadgate_shared::parts::Parts;
use threadgate_shared::queue::RedisQueue;
use threadgate_tests::golden::{self, Case, Target};
use threadgate_tests::stack::{self, Settings, Stack};
use threadgate_tests::{Database, Postgres, Redis, graphs};

/// Cases at once; each has a server of its own.
const AT_ONCE: usize = 4;

/// Where no Redis is.
const NO_REDIS: &str = "redis://127.0.0.1:1";

#[tokio::test(flavor = "multi_thread")]
async fn the_recordings_hold_on_the_embedded_default() {
    replay_all(async |profile| {
        let mut parts = stack::embedded_parts().await;
        if profile == "named-linear" {
            parts = stack::parts(
                parts.store,
                Arc::new(RedisQueue::open(NO_REDIS, "golden").expect("an address")),
                parts.events,
            );
        }
        (parts, None)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_recordings_hold_on_postgres_and_redis() {
    let (postgres, redis) = (Postgres::shared().await, Redis::shared().await);
    replay_all(async |profile| {
        let database = postgres.database().await;
        let redis_url = if profile == "named-linear" { NO_REDIS } else { &redis.url };
        let prefix = uuid::Uuid::new_v4().simple().to_string();
        (stack::service_parts(&database.url, redis_url, &prefix).await, Some(database))
    })
    .await;
}

/// Replays every case of the profiles we can start and fails with the list of differences.
async fn replay_all(parts_for: impl AsyncFn(&str) -> (Parts, Option<Database>)) {
    let cases = golden::load(&golden::folder()).expect("recordings");
    let ours: Vec<&Case> = cases.values().filter(|case| golden::PROFILES.contains(&case.profile.as_str())).collect();
    let (sockets, ours): (Vec<&Case>, Vec<&Case>) = ours.into_iter().partition(|case| case.is_websocket());
    assert!(!ours.is_empty(), "no recording of {:?} in {}", golden::PROFILES, golden::folder().display());

    let replays = ours.iter().map(|case| async {
        let (graph, api) = profile(&case.profile);
        let (parts, database) = parts_for(&case.profile).await;
        let settings = Settings { api, ..Settings::default() };
        let stack = Stack::start(stack::with_faults(parts), vec![graph], settings).await;
        let target =
            Target { base: stack.base.clone(), checkpointer_type: CHECKPOINTER.to_owned(), http: stack.http.clone() };
        let difference = golden::replay(&cases, case, &target).await.unwrap_or_else(|error| Some(format!("{error:#}")));
        stack.end().await;
        drop(database);
        difference.map(|difference| format!("{}: {difference}", case.name))
    });
    let failed: Vec<String> = futures::stream::iter(replays)
        .buffer_unordered(AT_ONCE)
        .filter_map(async |difference| difference)
        .collect()
        .await;

    println!("{} passed, {} failed", ours.len() - failed.len(), failed.len());
    println!("({} conversations over WebSocket are not served yet)", sockets.len());
    assert!(failed.is_empty(), "{} of {} differ:\n{}", failed.len(), ours.len(), failed.join("\n"));
}

/// What our server is told to call its store; the recordings' name is replaced by it.
const CHECKPOINTER: &str = "RecordedCheckpointer";

/// The graph and the api's flags of a profile.
fn profile(name: &str) -> (Graph, Vec<&'static str>) {
    let mut api = vec!["--checkpointer-name", CHECKPOINTER];
    let graph = match name {
        "open-loop" => graphs::endless(),
        "intid-linear" => graphs::linear(IdKind::Integer, None),
        "bigint-linear" => graphs::linear(IdKind::Bigint, None),
        "named-linear" => {
            api.extend(["--security-headers", "false"]);
            graphs::linear(IdKind::String, Some("named after {messages} messages"))
        }
        _ => graphs::linear(IdKind::String, None),
    };
    (graph.expect("a graph of the recordings"), api)
}
