//! Creating a run: all of it, once, or nothing.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::fixture::{World, hello, named, step_of};
use crate::domain::{MessageId, PoolName, RunStatus, Tenant, ThreadId};
use crate::graph::admission::{Refusal, RunInput};
use crate::store::{Created, Idempotency, Page, RunFilter, StepStatus, Store, StoreError};

/// Thread, message, checkpoint, run and the first step appear together.
pub async fn a_new_run_creates_its_thread_and_a_backlog_step(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut new = world.new_run("t");
    new.client_run_id = Some("mine".to_owned());
    new.thread_name = Some("About nothing".to_owned());
    new.thread_meta = Some(json!({"colour": "blue"}));
    new.trace = Some("00-trace".to_owned());
    new.input = json!({"messages": ["hello"]});
    new.config.insert("depth".to_owned(), json!(3));
    let id = new.id;

    let created = world.try_create(new, hello()).await.unwrap();

    assert!(created.is_new_thread);
    assert_eq!(created.version, 1);
    assert_eq!(created.messages.len(), 1);
    assert_eq!(created.lane, Some((PoolName::default_pool(), 0)));
    let run = world.run(id).await;
    assert_eq!(run, created.run);
    assert_eq!((run.status, run.root, run.resumes), (RunStatus::Queued, id, None));
    assert_eq!((run.client_run_id.as_deref(), run.trace.as_deref()), (Some("mine"), Some("00-trace")));
    assert_eq!((run.input, run.config["depth"].clone()), (json!({"messages": ["hello"]}), json!(3)));
    assert_eq!((run.step_limit, run.started_at, run.finished_at), (25, None, None));
    let steps = world.steps(id).await;
    let [step] = steps.as_slice() else { panic!("one step, not {steps:?}") };
    assert_eq!((step.id, step.node.as_str(), step.status), (step_of(id, 1), "first", StepStatus::Ready));
    assert_eq!((step.attempt, step.attempts_max, step.version), (0, 3, None));
    assert_eq!(world.context("t").await, ["hello"]);
    let thread = world.store.thread(&world.scope(), &"t".into()).await.unwrap().unwrap();
    assert_eq!((thread.name.as_deref(), thread.meta), (Some("About nothing"), Some(json!({"colour": "blue"}))));
    assert_eq!((thread.version, thread.has_state, thread.run_id.as_deref()), (1, true, Some("mine")));
    assert_eq!(thread.user, world.caller.user);
}

/// C55: a refusal leaves no row, and the key is free for the next try.
pub async fn a_refused_run_writes_nothing(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut new = world.new_run("t");
    let id = new.id;
    new.idempotency = Some(key("k", "body"));

    let refused = world.submit(new.clone(), RunInput::default()).await;

    assert!(matches!(refused, Err(StoreError::Refused(Refusal::NoMessages))), "{refused:?}");
    assert_eq!(world.store.run(&world.scope(), id).await.unwrap(), None);
    assert_eq!(world.store.thread(&world.scope(), &"t".into()).await.unwrap(), None);
    assert!(world.store.messages(&world.scope(), &"t".into(), None, everything()).await.unwrap().is_empty());
    assert!(matches!(world.submit(new, hello()).await.unwrap(), Created::New(_)));
}

/// A run that follows a finished one starts over on the same thread.
pub async fn a_second_run_goes_on_with_the_same_thread(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let first = world.create("t").await.run.id;
    world.finish(first).await;

    let second = world.create("t").await;

    assert!(!second.is_new_thread);
    assert_eq!((second.version, second.run.root), (5, second.run.id));
    assert_eq!(world.context("t").await, ["hello", "one", "two", "three", "hello"]);
    assert_eq!(world.run(first).await.version, 4);
    assert_eq!(world.run(second.run.id).await.version, 5);
}

/// C15: of twenty creates at once one wins, and the thread holds that one's messages.
pub async fn of_many_runs_at_once_a_thread_takes_one(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let creates = (0..20).map(|n| {
        let (world, input) =
            (world.clone(), RunInput { messages: vec![named(&n.to_string(), "hi")], ..RunInput::default() });
        tokio::spawn(async move { world.try_create(world.new_run("t"), input).await })
    });

    let answers = futures::future::join_all(creates).await;

    let mut created = Vec::new();
    for answer in answers {
        match answer.unwrap() {
            Ok(run) => created.push(run),
            Err(StoreError::Refused(Refusal::Busy { thread, .. })) => assert_eq!(thread.as_str(), "t"),
            Err(error) => panic!("a loser hears that the thread is busy, not {error:?}"),
        }
    }
    let [winner] = created.as_slice() else { panic!("one winner, not {}", created.len()) };
    assert_eq!(world.state("t").await.context, winner.messages);
    let all = RunFilter { limit: 100, ..RunFilter::default() };
    assert_eq!(world.store.runs(&world.scope(), &all).await.unwrap().len(), 1);
}

/// Twenty threads at once are twenty runs.
pub async fn runs_on_many_threads_do_not_hinder_each_other(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let creates = (0..20).map(|n| {
        let world = world.clone();
        tokio::spawn(async move { world.try_create(world.new_run(&format!("t{n}")), hello()).await })
    });

    for created in futures::future::join_all(creates).await {
        assert!(created.unwrap().unwrap().is_new_thread);
    }
}

/// C83: fifty creates with one key are one run; the others are told which.
pub async fn one_key_makes_one_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let creates = (0..50).map(|_| {
        let world = world.clone();
        let mut new = world.new_run("t");
        new.idempotency = Some(key("k", "body"));
        tokio::spawn(async move { world.submit(new, hello()).await })
    });

    let answers = futures::future::join_all(creates).await;

    let (mut new, mut replayed) = (Vec::new(), Vec::new());
    for answer in answers {
        match answer.unwrap().unwrap() {
            Created::New(created) => new.push(created.run.id),
            Created::Replayed(run) => replayed.push(run.id),
            Created::StillPaused(paused) => panic!("nothing was paused: {paused:?}"),
        }
    }
    assert_eq!((new.len(), replayed.len()), (1, 49));
    assert!(replayed.iter().all(|id| *id == new[0]));
    assert_eq!(world.context("t").await, ["hello"]);
}

/// C83: another body is refused, another tenant or user has keys of its own.
pub async fn a_key_belongs_to_one_body_of_one_user(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let submit = async |world: &World, thread: &str, body: &str| {
        let mut new = world.new_run(thread);
        new.idempotency = Some(key("k", body));
        world.submit(new, hello()).await
    };
    let first = submit(&world, "t", "body").await.unwrap();
    assert!(matches!(first, Created::New(_)));

    let other_body = submit(&world, "u", "other").await;
    let other_user = submit(&world.as_caller("default", "ann"), "v", "other").await;
    let other_tenant = submit(&world.as_caller("acme", "ann"), "w", "other").await;

    assert!(matches!(other_body, Err(StoreError::IdempotencyMismatch)), "{other_body:?}");
    assert_eq!(world.store.thread(&world.scope(), &"u".into()).await.unwrap(), None);
    assert!(matches!(other_user.unwrap(), Created::New(_)));
    assert!(matches!(other_tenant.unwrap(), Created::New(_)));
}

/// C83: a key ends with its lifetime.
pub async fn a_key_that_ran_out_is_free(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut new = world.new_run("t");
    new.idempotency = Some(Idempotency { ttl: Duration::ZERO, ..key("k", "body") });
    world.try_create(new, hello()).await.unwrap();

    let mut again = world.new_run("u");
    again.idempotency = Some(key("k", "other"));

    assert!(matches!(world.submit(again, hello()).await.unwrap(), Created::New(_)));
}

/// C53: the same message id on two threads is two messages; twice on one, the first counts.
pub async fn message_ids_belong_to_their_thread(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let with = |text: &str| RunInput { messages: vec![named("m", text), named("m", "again")], ..RunInput::default() };

    world.try_create(world.new_run("a"), with("to a")).await.unwrap();
    world.try_create(world.new_run("b"), with("to b")).await.unwrap();

    assert_eq!(world.context("a").await, ["to a"]);
    assert_eq!(world.context("b").await, ["to b"]);
}

/// C53: an integer id keeps its type, and both spellings find it.
pub async fn an_integer_id_is_found_by_both_spellings(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut message = named("41", "hi");
    message.message_id = MessageId { text: "41".to_owned(), is_int: true };
    let twice = RunInput { messages: vec![message, named("41", "string spelling")], ..RunInput::default() };

    world.try_create(world.new_run("t"), twice).await.unwrap();

    let found = world.store.message(&world.scope(), &"t".into(), "41").await.unwrap().unwrap();
    assert!(found.message_id.is_int);
    assert_eq!(world.context("t").await, ["hi"]);
}

/// C52: a foreign thread does not exist; another tenant has a thread of its own under that id.
pub async fn a_thread_belongs_to_its_user(store: Arc<dyn Store>) {
    let world = World::new(store).await.as_caller("acme", "ann");
    let run = world.create("t").await.run.id;
    let (bob, other) = (world.as_caller("acme", "bob"), world.as_caller("other", "ann"));

    let refused = bob.try_create(bob.new_run("t"), hello()).await;
    let own = other.try_create(other.new_run("t"), hello()).await.unwrap();

    assert!(matches!(refused, Err(StoreError::NoSuchThread(_))), "{refused:?}");
    assert!(own.is_new_thread);
    for stranger in [&bob, &other] {
        assert_eq!(stranger.store.run(&stranger.scope(), run).await.unwrap(), None);
    }
    let threads = bob.store.threads(&bob.scope(), None, everything()).await.unwrap();
    assert!(threads.is_empty(), "{threads:?}");
}

/// Newest first, by status, graph, thread and cursor.
pub async fn runs_are_listed_newest_first(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut ids = Vec::new();
    for thread in ["a", "b", "c"] {
        ids.push(world.create(thread).await.run.id);
    }
    world.finish(ids[0]).await;
    let list = async |filter: RunFilter| {
        let runs = world.store.runs(&world.scope(), &filter).await.unwrap();
        runs.into_iter().map(|run| run.id).collect::<Vec<_>>()
    };
    let all = RunFilter { limit: 10, ..RunFilter::default() };

    assert_eq!(list(all.clone()).await, [ids[2], ids[1], ids[0]]);
    assert_eq!(list(RunFilter { limit: 1, ..all.clone() }).await, [ids[2]]);
    assert_eq!(list(RunFilter { before: Some(ids[2]), ..all.clone() }).await, [ids[1], ids[0]]);
    assert_eq!(list(RunFilter { thread: Some("b".into()), ..all.clone() }).await, [ids[1]]);
    assert_eq!(list(RunFilter { graph: Some("other".to_owned()), ..all.clone() }).await, []);
    assert_eq!(list(RunFilter { statuses: vec![RunStatus::Completed], ..all.clone() }).await, [ids[0]]);
    let open = RunFilter { statuses: vec![RunStatus::Queued, RunStatus::Running], ..all };
    assert_eq!(list(open).await, [ids[2], ids[1]]);
}

/// A name may count the messages there are when the first run is closed.
pub async fn a_thread_is_named_when_its_first_run_is_closed(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut new = world.new_run("t");
    new.thread_name = Some("A talk of {messages} messages".to_owned());
    let run = world.try_create(new, hello()).await.unwrap().run.id;

    world.finish(run).await;
    let again = world.create("t").await.run.id;
    world.finish(again).await;

    let thread = world.store.thread(&world.scope(), &"t".into()).await.unwrap().unwrap();
    assert_eq!(thread.name.as_deref(), Some("A talk of 4 messages"));
}

/// Every list of a tenant is empty for another one.
pub async fn tenants_do_not_see_each_other(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    world.create("t").await;
    let mut scope = world.scope();
    scope.tenant = Tenant::from("other");
    let id = ThreadId::from("t");

    assert_eq!(world.store.thread(&scope, &id).await.unwrap(), None);
    assert_eq!(world.store.state(&scope, &id, None).await.unwrap(), None);
    assert_eq!(world.store.message(&scope, &id, "m").await.unwrap(), None);
    assert!(world.store.messages(&scope, &id, None, everything()).await.unwrap().is_empty());
    assert!(world.store.runs(&scope, &RunFilter { limit: 9, ..RunFilter::default() }).await.unwrap().is_empty());
    assert!(!world.store.delete_thread(&scope, &id).await.unwrap());
}

fn key(key: &str, body: &str) -> Idempotency {
    Idempotency { key: key.to_owned(), body_hash: body.to_owned(), ttl: Duration::from_secs(3600) }
}

fn everything() -> Page {
    Page { offset: 0, limit: 1000 }
}
