//! What admission is told of the locked thread, and how a run begins.

use std::sync::{Arc, Mutex};

use serde_json::json;

use super::fixture::{World, hello, manifest, named, says, step_of, user};
use crate::domain::meta::START;
use crate::domain::{ExecutionStatus, MessageId, Role, RunStatus};
use crate::graph::admission::{RunInput, ThreadView, admit};
use crate::graph::node::NodeError;
use crate::store::{StepStatus, Store, StoreError};

/// The view is the thread's: its place, its run, which of the input's ids it knows.
pub async fn admission_sees_the_thread_as_it_is(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let input = RunInput { messages: vec![named("known", "hi")], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;

    let busy = view(&world, "t", &["known", "new"]).await.unwrap();
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Err(NodeError::permanent("no"))).await;
    world.commit(&commit).await.unwrap();
    let failed = view(&world, "t", &[]).await.unwrap();

    assert_eq!((busy.graph.as_str(), &busy.graph_version), ("story", &world.graph.version));
    assert_eq!((busy.active_run, busy.last_role, busy.last_error), (Some(run), Some(Role::User), None));
    assert_eq!(busy.known_ids.into_iter().collect::<Vec<_>>(), [MessageId::from("known")]);
    assert_eq!((busy.meta.current_node.as_str(), busy.meta.status), ("first", ExecutionStatus::Running));
    assert_eq!((failed.active_run, failed.last_error.as_deref()), (None, Some("NODE_001")));
    assert_eq!(failed.meta.status, ExecutionStatus::Error);
    assert!(failed.known_ids.is_empty());
}

/// A thread nobody has made is nothing to look at.
pub async fn admission_of_a_new_thread_sees_nothing(store: Arc<dyn Store>) {
    let world = World::new(store).await;

    assert!(view(&world, "t", &[]).await.is_none());
}

/// A run that pauses before its first node has no step, and its thread is free.
pub async fn a_run_that_pauses_at_once_is_closed_at_once(store: Arc<dyn Store>) {
    let mut manifest = manifest();
    manifest.interrupt_before = vec!["first".to_owned()];
    let world = World::with(store, manifest).await;

    let created = world.create("t").await;

    assert_eq!((created.run.status, created.lane), (RunStatus::Interrupted, None));
    assert!(created.run.finished_at.is_some());
    assert!(world.steps(created.run.id).await.is_empty());
    assert_eq!(world.state("t").await.meta.status, ExecutionStatus::InterruptedBefore);
    let resumed = world.create("t").await;
    assert_eq!((resumed.run.status, resumed.run.resumes), (RunStatus::Queued, Some(created.run.id)));
}

/// A client may start at the end: nothing is left to run.
pub async fn a_run_that_starts_at_the_end_completes_at_once(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut input = hello();
    input.state.insert("current_node".to_owned(), json!("end"));

    let created = world.try_create(world.new_run("t"), input).await.unwrap();

    assert_eq!((created.run.status, created.lane, created.version), (RunStatus::Completed, None, 1));
    assert_eq!(world.store.finished(&[created.run.id]).await.unwrap(), [(created.run.id, RunStatus::Completed)]);
    assert_eq!(world.context("t").await, ["hello"]);
}

/// A place before the entry is a step of its own, seq 0.
pub async fn a_run_that_begins_before_the_entry_has_a_step_zero(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut input = hello();
    input.state.insert("current_node".to_owned(), json!("start"));

    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    world.step(run, 0, "zero").await;

    let steps = world.steps(run).await;
    let seen: Vec<_> = steps.iter().map(|s| (s.id.seq, s.node.as_str(), s.status, s.version)).collect();
    assert_eq!(seen, [(0, START, StepStatus::Done, Some(2)), (1, "first", StepStatus::Ready, None)]);
}

/// Values for fields come with the input.
pub async fn the_input_may_set_fields(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut input = hello();
    input.state.insert("topic".to_owned(), json!({"deep": [1, 2]}));

    world.try_create(world.new_run("t"), input).await.unwrap();

    let state = world.state("t").await;
    assert_eq!(state.fields.get("topic"), Some(&json!({"deep": [1, 2]})));
    assert_eq!(state.fields.get("count"), None);
}

/// An id that only the log has joins the context with the log's body; the other way too.
pub async fn a_message_of_the_log_may_join_the_context(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let put = super::threads::put(&world, "t", vec![named("m", "logged")]);
    world.store.put_messages(&world.scope(), put).await.unwrap();
    assert!(view(&world, "t", &["m"]).await.unwrap().known_ids.is_empty());

    let input = RunInput { messages: vec![named("m", "sent"), user("more")], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Ok(says("ok"))).await;
    world.commit(&commit).await.unwrap();

    assert_eq!(world.context("t").await, ["logged", "more", "ok"]);
    assert_eq!(super::threads::log(&world, "t").await, ["logged", "more", "ok"]);
}

/// What `admit` is shown when a run with these message ids is created; the run itself is refused.
async fn view(world: &World, thread: &str, ids: &[&str]) -> Option<ThreadView> {
    let seen = Mutex::new(None);
    let mut new = world.new_run(thread);
    new.message_ids = ids.iter().map(|id| MessageId::from(*id)).collect();
    let (versions, id) = (new.versions.clone(), new.thread_id.clone());
    let nothing = RunInput { interrupt_id: Some("none".to_owned()), ..RunInput::default() };
    let refused = world
        .store
        .create_run(new, &|view| {
            *seen.lock().unwrap() = view.cloned();
            admit(&versions, &id, view, &nothing)
        })
        .await;
    assert!(matches!(refused, Err(StoreError::Refused(_))), "{refused:?}");
    seen.into_inner().unwrap()
}
