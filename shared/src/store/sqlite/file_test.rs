//! What is SQLite's own: the file, the lock, the bytes. What all stores share is in the contract.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::{OpenError, Promise, SqliteStore};
use crate::domain::{
    Caller, ExecutionMeta, Json, JsonMap, Message, Role, RunId, RunStatus, StepId, ThreadId, WorkerId,
};
use crate::graph::admission::{RunInput, admit};
use crate::graph::{EdgeSpec, FieldSpec, IdKind, Manifest, NodePolicy, NodeSpec, Reducer};
use crate::store::{
    Claimed, CommitOutcome, Created, FirstStep, GraphRecord, Graphs, LoadRequest, NewRun, NewlyCreated, RunFilter,
    Runs, Schema, StateEdit, StepCommit, Steps, StoreError, Then, Threads, Upkeep,
};

const TTL: Duration = Duration::from_secs(60);

fn manifest() -> Manifest {
    let node = |name: &str| NodeSpec {
        name: name.to_owned(),
        kind: "set".to_owned(),
        spec: Json::Null,
        policy: NodePolicy::default(),
    };
    let edge = |source: &str, target: &str| EdgeSpec {
        source: source.to_owned(),
        target: Some(target.to_owned()),
        condition: None,
        mapping: None,
    };
    Manifest {
        name: "demo".to_owned(),
        code: false,
        nodes: vec![node("a"), node("b")],
        edges: vec![edge("__start__", "a"), edge("a", "b")],
        interrupt_before: Vec::new(),
        interrupt_after: Vec::new(),
        fields: vec![FieldSpec {
            name: "value".to_owned(),
            default: Json::Null,
            reducer: Reducer::ReplaceValue,
            schema: Json::Null,
        }],
        state_type: "Demo".to_owned(),
        ids: IdKind::String,
        thread_name: None,
    }
}

async fn create(store: &SqliteStore, thread: &str, state: JsonMap) -> NewlyCreated {
    let manifest = Arc::new(manifest());
    let input = RunInput { messages: vec![Message::text(Role::User, "hello")], state, ..RunInput::default() };
    let versions = vec![(manifest.version(None), manifest)];
    let thread_id = ThreadId::from(thread);
    let new = NewRun {
        id: RunId::new(),
        client_run_id: None,
        caller: Caller::anonymous(),
        thread_id: thread_id.clone(),
        thread_name: None,
        thread_meta: None,
        graph: "demo".to_owned(),
        class: 0,
        message_ids: input.messages.iter().map(|message| message.message_id.clone()).collect(),
        input: json!({}),
        config: JsonMap::new(),
        step_limit: 25,
        node_timeout: None,
        versions: versions.clone(),
        idempotency: None,
        trace: None,
        observability: true,
    };
    let decide = |view: Option<&crate::graph::admission::ThreadView>| admit(&versions, &thread_id, view, &input);
    match store.create_run(new, &decide).await.expect("the thread takes a run") {
        Created::New(created) => *created,
        other => panic!("{other:?}"),
    }
}

async fn claim(store: &SqliteStore, step: StepId) -> Claimed {
    let token = crate::domain::LeaseToken::new();
    let mut claimed = store.claim(&[(step, token)], WorkerId::new(), &[], TTL).await.expect("a claim");
    claimed.pop().expect("the step is ready")
}

fn commit_of(claimed: &Claimed, fields: JsonMap, then: Then) -> StepCommit {
    let meta = ExecutionMeta::fresh("t").running_at("b", 2);
    StepCommit {
        step: claimed.step,
        token: claimed.token,
        base_version: claimed.version,
        stopped_meta: meta.clone(),
        meta,
        messages: vec![Message::text(Role::Assistant, "world")],
        removed: Vec::new(),
        fields,
        questions: Vec::new(),
        then,
    }
}

fn next(node: &str) -> Then {
    Then::Next { node: node.to_owned(), at: FirstStep::of(&manifest(), node) }
}

fn first_of(created: &NewlyCreated) -> StepId {
    StepId { run_id: created.run.id, seq: 1 }
}

#[tokio::test]
async fn a_second_opener_is_told_who_has_the_database() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("threadgate.db");
    let first = SqliteStore::open(&path).await.unwrap();

    let refused = SqliteStore::open(&path).await.err().expect("the first has it");
    assert!(matches!(refused, OpenError::InUse { .. }));
    let sentence = refused.to_string();
    assert!(sentence.contains("threadgate.db") && sentence.contains(&std::process::id().to_string()), "{sentence}");

    first.close().await;
    drop(first);
    SqliteStore::open(&path).await.expect("nobody has it any more");
}

#[tokio::test]
async fn a_database_without_tables_says_what_to_run() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("threadgate.db")).await.unwrap();

    let error = store.check_schema().await.expect_err("nothing is there");
    assert!(matches!(&error, StoreError::Schema(text) if text.contains("threadgate migrate")), "{error}");

    store.migrate().await.unwrap();
    store.migrate().await.expect("twice is once");
    store.check_schema().await.unwrap();
}

#[tokio::test]
async fn a_database_of_a_newer_program_is_refused() {
    let store = SqliteStore::open_temporary().await.unwrap();
    sqlx::query("insert into _sqlx_migrations values (9999, 'later', current_timestamp, 1, x'00', 0)")
        .execute(&store.writer)
        .await
        .unwrap();

    let error = store.check_schema().await.expect_err("it knows more than we do");

    assert!(matches!(&error, StoreError::Schema(text) if text.contains("9999")), "{error}");
}

/// C85, C87: what JSON can say comes back byte for byte, key order too.
#[tokio::test]
async fn values_come_back_byte_for_byte() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let texts = [
        r#"{"z":"\u0000","a":-0.0,"m":1e400,"b":18446744073709551616}"#,
        "1606938044258990275541962092341162602522202993782792835301376",
        "-9223372036854775809",
        "0.1000000000000000055511151231257827",
        r#""\\u0000 \u0000 \ud83d\ude00""#,
        "1E2",
    ];

    for (index, text) in texts.into_iter().enumerate() {
        let value: Json = serde_json::from_str(text).unwrap();
        let fields = JsonMap::from_iter([("value".to_owned(), value.clone())]);
        let created = create(&store, &format!("t{index}"), fields.clone()).await;
        let claimed = claim(&store, first_of(&created)).await;
        let mut commit = commit_of(&claimed, fields, next("b"));
        commit.messages[0].metadata = JsonMap::from_iter([("value".to_owned(), value.clone())]);
        store.commit(&[commit]).await.pop().unwrap().unwrap();

        let request = LoadRequest { run_id: created.run.id, thread_key: created.run.thread_key, since: None };
        let loaded = store.load(&[request]).await.unwrap().pop().unwrap();

        assert_eq!(loaded.fields["value"].to_string(), value.to_string());
        let (_, message) = loaded.added.last().unwrap();
        assert_eq!(message.metadata["value"].to_string(), value.to_string());
    }
    let stored: String = sqlx::query_scalar("select value from field where thread_key = 1 and version = 1")
        .fetch_one(&store.readers)
        .await
        .unwrap();
    assert_eq!(stored, r#"{"z":"\u0000","a":-0.0,"m":1e+400,"b":18446744073709551616}"#);
}

/// C09: what was committed is there after the process is gone, and what it had in flight is due at
/// once: nobody else can hold it.
#[tokio::test]
async fn a_restart_goes_on_behind_the_last_commit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("threadgate.db");
    let store = SqliteStore::open(&path).await.unwrap();
    store.migrate().await.unwrap();
    let created = create(&store, "t", JsonMap::new()).await;
    let claimed = claim(&store, first_of(&created)).await;
    store.commit(&[commit_of(&claimed, JsonMap::new(), next("b"))]).await.pop().unwrap().unwrap();
    let second = StepId { run_id: created.run.id, seq: 2 };
    claim(&store, second).await;
    drop(store);

    let store = SqliteStore::open(&path).await.unwrap();
    let swept = store.sweep(100, true).await.unwrap();

    assert_eq!(swept.released, 1);
    assert_eq!(swept.send.iter().map(|job| job.step).collect::<Vec<_>>(), [second]);
    assert_eq!(claim(&store, second).await.attempt, 2);
    let steps = store.steps(created.run.id).await.unwrap();
    assert_eq!(steps[0].attempts.len() + steps[1].attempts.len(), 1);
}

#[tokio::test]
async fn one_bad_step_does_not_take_its_batch_along() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let (good, bad) = (create(&store, "good", JsonMap::new()).await, create(&store, "bad", JsonMap::new()).await);
    let good = claim(&store, first_of(&good)).await;
    let bad = claim(&store, first_of(&bad)).await;
    // The row of the bad step's successor is there already: the insert fails.
    sqlx::query("insert into step select run_id, 2, thread_key, tenant, pool, class, graph_version, node, 'done', 0, 3, run_at, null, null, null, null, null, null from step where run_id = ?1")
        .bind(bad.step.run_id.to_string())
        .execute(&store.writer)
        .await
        .unwrap();

    let outcomes =
        store.commit(&[commit_of(&bad, JsonMap::new(), next("b")), commit_of(&good, JsonMap::new(), next("b"))]).await;

    assert!(matches!(&outcomes[0], Err(StoreError::Database { .. })), "{outcomes:?}");
    assert!(matches!(&outcomes[1], Ok(CommitOutcome::Committed { version: 2 })), "{outcomes:?}");
    let untouched = store.thread(&Caller::anonymous().scope(), &"bad".into()).await.unwrap().unwrap();
    assert_eq!(untouched.version, 1);
}

/// Claims may be lost with the power, what commits after them may not.
#[tokio::test]
async fn each_transaction_says_what_it_promises() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let promised = async |promise| {
        let mut tx = store.begin(promise, "look").await.unwrap();
        let level: i64 = sqlx::query_scalar("pragma synchronous").fetch_one(&mut *tx).await.unwrap();
        level // Dropped without a commit, as a cancelled call drops it.
    };

    assert_eq!(promised(Promise::Soft).await, 1);
    assert_eq!(promised(Promise::Durable).await, 2);
}

/// C13: a call that is cut off anywhere has happened whole or not at all, and blocks nobody.
#[tokio::test]
async fn a_call_that_is_cut_off_leaves_nothing_half_done() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let scope = Caller::anonymous().scope();

    for polls in 0..60 {
        let thread = format!("t{polls}");
        let mut call = Box::pin(create(&store, &thread, JsonMap::new()));
        for _ in 0..polls {
            if futures::poll!(&mut call).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(call);
        create(&store, &format!("after-{polls}"), JsonMap::new()).await;

        let found = store.thread(&scope, &thread.as_str().into()).await.unwrap();
        let filter = RunFilter { thread: Some(thread.as_str().into()), limit: 9, ..RunFilter::default() };
        let runs = store.runs(&scope, &filter).await.unwrap();
        assert_eq!(runs.len(), usize::from(found.is_some()));
        for run in runs {
            assert_eq!(store.steps(run.id).await.unwrap().len(), 1);
        }
    }
}

#[tokio::test]
async fn a_folder_that_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();

    let error = SqliteStore::open(folder.path().join("missing/threadgate.db")).await.err().expect("no folder");

    assert!(error.to_string().contains("missing/threadgate.db") && error.to_string().contains("folder"), "{error}");
}

/// C13: repaired, with an audit entry.
#[tokio::test]
async fn a_run_without_a_step_is_closed_and_its_thread_usable() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let created = create(&store, "t", JsonMap::new()).await;
    sqlx::query("delete from step").execute(&store.writer).await.unwrap();

    assert_eq!(store.repair(10).await.unwrap(), 1);
    assert_eq!(store.repair(10).await.unwrap(), 0);

    let scope = Caller::anonymous().scope();
    let run = store.run(&scope, created.run.id).await.unwrap().unwrap();
    assert_eq!((run.status, run.error.unwrap().code.as_str()), (RunStatus::Failed, "lost_step"));
    let audit = store.audit(&scope, &"t".into()).await.unwrap();
    assert_eq!(audit.iter().map(|entry| entry.action.as_str()).collect::<Vec<_>>(), ["repair"]);
    create(&store, "t", JsonMap::new()).await;
}

/// C13: refused by a named constraint.
#[tokio::test]
async fn a_leased_step_without_a_token_is_refused() {
    let store = SqliteStore::open_temporary().await.unwrap();
    create(&store, "t", JsonMap::new()).await;

    let error = sqlx::query("update step set status = 'leased'").execute(&store.writer).await.expect_err("no lease");

    assert!(error.to_string().contains("step_leased_has_lease"), "{error}");
}

#[tokio::test]
async fn a_thread_busy_with_no_active_run_is_freed() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let created = create(&store, "t", JsonMap::new()).await;
    let claimed = claim(&store, first_of(&created)).await;
    let done = Then::End { status: RunStatus::Completed, error: None };
    store.commit(&[commit_of(&claimed, JsonMap::new(), done)]).await.pop().unwrap().unwrap();
    sqlx::query("update thread set status = 'busy', active_run = last_run").execute(&store.writer).await.unwrap();

    assert_eq!(store.repair(10).await.unwrap(), 1);

    create(&store, "t", JsonMap::new()).await;
}

#[tokio::test]
async fn a_message_that_left_the_context_stays_in_the_log_and_in_history() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let scope = Caller::anonymous().scope();
    let created = create(&store, "t", JsonMap::new()).await;
    let claimed = claim(&store, first_of(&created)).await;
    let done = Then::End { status: RunStatus::Completed, error: None };
    store.commit(&[commit_of(&claimed, JsonMap::new(), done)]).await.pop().unwrap().unwrap();
    let id = ThreadId::from("t");
    let first = |context: &[Message]| vec![context[0].message_id.clone()];

    let (before, left) = store.fix(&scope, &id, "tester", &first).await.unwrap().unwrap();

    assert_eq!((before.context.len(), left), (2, 1));
    let texts = |messages: &[Message]| messages.iter().map(Message::plain_text).collect::<Vec<_>>();
    let now = store.state(&scope, &id, None).await.unwrap().unwrap();
    assert_eq!(texts(&now.context), ["world"]);
    let then = store.state(&scope, &id, Some(before.version)).await.unwrap().unwrap();
    assert_eq!(texts(&then.context), ["hello", "world"]);
    let log = store.messages(&scope, &id, None, crate::store::Page { offset: 0, limit: 10 }).await.unwrap();
    assert_eq!(texts(&log), ["hello", "world"]);
    let edit = StateEdit {
        thread_id: id.clone(),
        caller: Caller::anonymous(),
        graph: "demo".to_owned(),
        graph_version: now.graph_version,
        messages: vec![before.context[0].clone()],
        fields: JsonMap::new(),
    };

    let again = store.edit_state(&scope, edit).await.unwrap();

    assert_eq!(texts(&again.context), ["world", "hello"]);
}

#[tokio::test]
async fn the_graph_registered_last_is_the_newest_of_its_name() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let record = |fingerprint: &str| GraphRecord {
        name: "demo".to_owned(),
        version: manifest().version(Some(fingerprint)),
        manifest: manifest(),
        registered_at: super::row::now(),
    };
    let (one, two) = (record("one"), record("two"));

    store.register_graphs(&[one.clone(), two.clone()]).await.unwrap();
    assert_eq!(store.graphs().await.unwrap()[0].version, two.version);

    store.register_graphs(std::slice::from_ref(&one)).await.unwrap();
    assert_eq!(store.graphs().await.unwrap()[0].version, one.version);
    assert_eq!(store.graph_version(&two.version).await.unwrap().unwrap().manifest, manifest());
}

#[tokio::test]
async fn a_search_knows_no_case_in_any_script() {
    let store = SqliteStore::open_temporary().await.unwrap();
    let scope = Caller::anonymous().scope();
    for thread in ["Ärger-1", "plain", "ÄRGER-2"] {
        create(&store, thread, JsonMap::new()).await;
    }
    let page = |offset, limit| crate::store::Page { offset, limit };

    let ids = |found: Vec<crate::store::ThreadRecord>| found.into_iter().map(|t| t.id.0).collect::<Vec<_>>();

    assert_eq!(ids(store.threads(&scope, Some("äRGER"), page(0, 10)).await.unwrap()), ["Ärger-1", "ÄRGER-2"]);
    assert_eq!(ids(store.threads(&scope, Some("ärger"), page(1, 1)).await.unwrap()), ["ÄRGER-2"]);
    assert_eq!(ids(store.threads(&scope, None, page(1, 1)).await.unwrap()), ["plain"]);
}
