//! The recordings, replayed over HTTP: on the embedded default, and on Postgres and Redis.

use futures::StreamExt;
use threadgate_shared::graph::{Graph, IdKind};
use threadgate_tests::golden::{self, Case, Target};
use threadgate_tests::graphs;
use threadgate_tests::stack::{Settings, Stack};

/// Cases at once; each has a server of its own.
const AT_ONCE: usize = 4;

#[tokio::test(flavor = "multi_thread")]
async fn the_recordings_hold_on_the_embedded_default() {
    replay_all(async |graphs, settings| Stack::embedded_with_faults(graphs, settings).await).await;
}

/// Replays every case of the profiles we can start and fails with the list of differences.
async fn replay_all(start: impl AsyncFn(Vec<Graph>, Settings<'static>) -> Stack) {
    let cases = golden::load(&golden::folder()).expect("recordings");
    let ours: Vec<&Case> = cases.values().filter(|case| golden::PROFILES.contains(&case.profile.as_str())).collect();
    let (sockets, ours): (Vec<&Case>, Vec<&Case>) = ours.into_iter().partition(|case| case.is_websocket());
    assert!(!ours.is_empty(), "no recording of {:?} in {}", golden::PROFILES, golden::folder().display());

    let replays = ours.iter().map(|case| async {
        let (graph, api) = profile(&case.profile);
        let stack = start(vec![graph], Settings { api, ..Settings::default() }).await;
        let target =
            Target { base: stack.base.clone(), checkpointer_type: CHECKPOINTER.to_owned(), http: stack.http.clone() };
        let difference = golden::replay(&cases, case, &target).await.unwrap_or_else(|error| Some(format!("{error:#}")));
        stack.end().await;
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
