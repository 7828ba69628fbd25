//! Threads as a client sees them: state, log, edits.

use std::sync::Arc;

use serde_json::json;

use super::fixture::{World, hello, named, step_of, user};
use crate::domain::{JsonMap, Message, RunId, ThreadId};
use crate::graph::admission::RunInput;
use crate::store::{Page, PutMessages, StateEdit, Store, StoreError};

/// An edit is a version of its own; it touches the context, not the log, and no place.
pub async fn an_edit_is_a_version_of_its_own(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.finish(run).await;
    let before = world.state("t").await;

    let after = world.store.edit_state(&world.scope(), edit(&world, "t", "edited")).await.unwrap();

    assert_eq!((before.version, after.version), (4, 5));
    assert_eq!(after.meta, before.meta);
    assert_eq!(after.fields.get("topic"), Some(&json!("edited")));
    assert_eq!(after.context.last().unwrap().plain_text(), "edited");
    assert_eq!(world.state("t").await, after);
    assert_eq!(log(&world, "t").await, ["hello", "one", "two", "three"]);
    assert_eq!(world.store.state(&world.scope(), &"t".into(), Some(4)).await.unwrap().unwrap(), before);
}

/// An edit may make the thread; a run goes on from it.
pub async fn an_edit_may_create_the_thread(store: Arc<dyn Store>) {
    let world = World::new(store).await;

    let state = world.store.edit_state(&world.scope(), edit(&world, "t", "edited")).await.unwrap();

    assert_eq!((state.version, state.meta.current_node.as_str()), (1, "__start__"));
    let thread = world.store.thread(&world.scope(), &"t".into()).await.unwrap().unwrap();
    assert_eq!((thread.has_state, thread.run_id, thread.graph.as_str()), (true, None, "story"));
    assert_eq!(world.create("t").await.version, 2);
    assert_eq!(world.context("t").await, ["edited", "hello"]);
}

/// A message id that the context has is left out of an edit.
pub async fn an_edit_does_not_repeat_messages(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut first = edit(&world, "t", "first");
    first.messages = vec![named("m", "first")];
    let mut second = first.clone();
    second.messages = vec![named("m", "again"), named("n", "second")];

    world.store.edit_state(&world.scope(), first).await.unwrap();
    let state = world.store.edit_state(&world.scope(), second).await.unwrap();

    assert_eq!(state.context.iter().map(Message::plain_text).collect::<Vec<_>>(), ["first", "second"]);
}

/// D3, R17: while a run is active its thread is not edited, and nothing is written.
pub async fn a_busy_thread_is_not_edited(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    world.create("t").await;
    let (scope, id) = (world.scope(), ThreadId::from("t"));
    let message = world.state("t").await.context[0].message_id.text.clone();

    let refused = [
        world.store.edit_state(&scope, edit(&world, "t", "x")).await.map(drop),
        world.store.put_messages(&scope, put(&world, "t", vec![user("x")])).await,
        world.store.clear_state(&scope, &id).await,
        world.store.delete_message(&scope, &id, &message).await.map(drop),
        world.store.delete_thread(&scope, &id).await.map(drop),
        world.store.fix(&scope, &id, "ann", &all_ids).await.map(drop),
    ];

    for refused in refused {
        assert!(matches!(&refused, Err(StoreError::Busy(thread)) if *thread == id), "{refused:?}");
    }
    assert_eq!(world.state("t").await.version, 1);
    assert_eq!(log(&world, "t").await, ["hello"]);
}

/// C52: another user's thread is not there to be edited.
pub async fn a_foreign_thread_is_not_edited(store: Arc<dyn Store>) {
    let world = World::new(store).await.as_caller("acme", "ann");
    let run = world.create("t").await.run.id;
    world.finish(run).await;
    let bob = world.as_caller("acme", "bob");
    let id = ThreadId::from("t");

    let edited = bob.store.edit_state(&bob.scope(), edit(&bob, "t", "x")).await.map(drop);
    let logged = bob.store.put_messages(&bob.scope(), put(&bob, "t", vec![user("x")])).await;

    for refused in [edited, logged] {
        assert!(matches!(refused, Err(StoreError::NoSuchThread(_))), "{refused:?}");
    }
    bob.store.clear_state(&bob.scope(), &id).await.unwrap();
    assert!(!bob.store.delete_thread(&bob.scope(), &id).await.unwrap());
    assert_eq!(bob.store.fix(&bob.scope(), &id, "bob", &all_ids).await.unwrap(), None);
    assert_eq!(world.state("t").await.version, 4);
}

/// Messages for the log are no state.
pub async fn logged_messages_are_not_in_the_context(store: Arc<dyn Store>) {
    let world = World::new(store).await;

    world.store.put_messages(&world.scope(), put(&world, "t", vec![named("m", "hi")])).await.unwrap();
    world.store.put_messages(&world.scope(), put(&world, "t", vec![named("m", "again"), user("ho")])).await.unwrap();

    assert_eq!(log(&world, "t").await, ["hi", "ho"]);
    assert_eq!(world.store.state(&world.scope(), &"t".into(), None).await.unwrap(), None);
    let thread = world.store.thread(&world.scope(), &"t".into()).await.unwrap().unwrap();
    assert!(!thread.has_state);
    world.create("t").await;
    assert_eq!(world.context("t").await, ["hello"]);
    assert_eq!(log(&world, "t").await, ["hi", "ho", "hello"]);
}

/// The log is paged and searched, oldest first.
pub async fn the_log_is_paged_and_searched(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let messages = ["Alpha", "beta", "ALPHABET", "50% off_x"].map(user).to_vec();
    world.store.put_messages(&world.scope(), put(&world, "t", messages)).await.unwrap();
    let find = async |search: Option<&str>, offset: i64, limit: i64| {
        let page = Page { offset, limit };
        let found = world.store.messages(&world.scope(), &"t".into(), search, page).await.unwrap();
        found.iter().map(Message::plain_text).collect::<Vec<_>>()
    };

    assert_eq!(find(None, 0, 2).await, ["Alpha", "beta"]);
    assert_eq!(find(None, 2, 9).await, ["ALPHABET", "50% off_x"]);
    assert_eq!(find(None, 9, 9).await, Vec::<String>::new());
    assert_eq!(find(Some("alpha"), 0, 9).await, ["Alpha", "ALPHABET"]);
    assert_eq!(find(Some("alpha"), 1, 9).await, ["ALPHABET"]);
    assert_eq!(find(Some("50% off_"), 0, 9).await, ["50% off_x"]);
    assert_eq!(find(Some("a%t"), 0, 9).await, Vec::<String>::new(), "a pattern is plain text");
}

/// A deleted message is in neither list; its id may come back.
pub async fn a_deleted_message_is_gone(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let input = RunInput { messages: vec![named("m", "secret"), named("n", "hello")], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    world.finish(run).await;
    let delete = async |id| world.store.delete_message(&world.scope(), &"t".into(), id).await.unwrap();

    assert!(delete("m").await);
    assert!(!delete("m").await);
    assert!(!delete("unknown").await);

    assert_eq!(world.context("t").await, ["hello", "one", "two", "three"]);
    assert_eq!(log(&world, "t").await, ["hello", "one", "two", "three"]);
    assert_eq!(world.store.message(&world.scope(), &"t".into(), "m").await.unwrap(), None);
    let again = RunInput { messages: vec![named("m", "back")], ..RunInput::default() };
    world.try_create(world.new_run("t"), again).await.unwrap();
    assert_eq!(world.context("t").await.last().unwrap(), "back");
}

/// A cleared thread starts over; its log stays, and a client may send the same ids again.
pub async fn a_cleared_thread_keeps_its_log(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let input = RunInput { messages: vec![named("m", "hello")], ..RunInput::default() };
    let mut with_field = input.clone();
    with_field.state.insert("topic".to_owned(), json!("rain"));
    let run = world.try_create(world.new_run("t"), with_field).await.unwrap().run.id;
    world.finish(run).await;
    let id = ThreadId::from("t");

    world.store.clear_state(&world.scope(), &id).await.unwrap();
    world.store.clear_state(&world.scope(), &"none".into()).await.unwrap();

    assert_eq!(world.store.state(&world.scope(), &id, None).await.unwrap(), None);
    assert_eq!(world.store.state(&world.scope(), &id, Some(4)).await.unwrap(), None);
    assert_eq!(log(&world, "t").await, ["hello", "one", "two", "three"]);
    let again = world.try_create(world.new_run("t"), input).await.unwrap();
    assert_eq!(again.meta.current_node, "first");
    let state = world.state("t").await;
    assert_eq!(state.context.iter().map(Message::plain_text).collect::<Vec<_>>(), ["hello"]);
    assert_eq!((state.fields.get("topic"), state.version), (None, 6));
    let claimed = world.claim(step_of(again.run.id, 1)).await;
    assert_eq!(world.load(&claimed, None).await.added.len(), 1);
    let texts = log(&world, "t").await;
    assert_eq!(texts.iter().filter(|text| *text == "hello").count(), 1, "{texts:?}");
}

/// A deleted thread takes everything along; the next one of its name is new.
pub async fn a_deleted_thread_is_gone(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.finish(run).await;
    let id = ThreadId::from("t");

    assert!(world.store.delete_thread(&world.scope(), &id).await.unwrap());
    assert!(!world.store.delete_thread(&world.scope(), &id).await.unwrap());

    assert_eq!(world.store.thread(&world.scope(), &id).await.unwrap(), None);
    assert_eq!(world.store.run(&world.scope(), run).await.unwrap(), None);
    assert!(world.steps(run).await.is_empty());
    assert!(world.store.changes(run, 0).await.unwrap().is_empty());
    assert!(log(&world, "t").await.is_empty());
    let again = world.create("t").await;
    assert!(again.is_new_thread);
    assert_eq!(again.version, 1);
}

/// Threads are listed as they were created, by page and by a part of any value.
pub async fn threads_are_listed_and_searched(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for (id, name, meta) in
        [("t1", "Rain", json!(null)), ("t2", "Sun_shine", json!({"k": "Moon"})), ("t3", "x", json!(null))]
    {
        let mut new = world.new_run(id);
        new.thread_name = Some(name.to_owned());
        new.thread_meta = Some(meta).filter(|meta| !meta.is_null());
        world.try_create(new, hello()).await.unwrap();
    }
    let list = async |search: Option<&str>, offset: i64, limit: i64| {
        let threads = world.store.threads(&world.scope(), search, Page { offset, limit }).await.unwrap();
        threads.into_iter().map(|thread| thread.id.0).collect::<Vec<_>>()
    };

    assert_eq!(list(None, 0, 9).await, ["t1", "t2", "t3"]);
    assert_eq!(list(None, 1, 1).await, ["t2"]);
    assert_eq!(list(Some("RAIN"), 0, 9).await, ["t1"]);
    assert_eq!(list(Some("moon"), 0, 9).await, ["t2"]);
    assert_eq!(list(Some("n_s"), 0, 9).await, ["t2"]);
    assert_eq!(list(Some("T3"), 0, 9).await, ["t3"]);
    assert!(list(Some("nowhere"), 0, 9).await.is_empty());
}

/// C45: a fix drops what is chosen from the context, once, and leaves an audit entry.
pub async fn a_fix_drops_chosen_messages_from_the_context(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let input = RunInput { messages: vec![named("bad", "broken"), named("n", "hello")], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    world.finish(run).await;
    let id = ThreadId::from("t");
    let choose = |context: &[Message]| {
        let broken = context.iter().filter(|message| message.plain_text() == "broken");
        broken.map(|message| message.message_id.clone()).collect()
    };

    let (before, count) = world.store.fix(&world.scope(), &id, "ann", &choose).await.unwrap().unwrap();
    let (again, nothing) = world.store.fix(&world.scope(), &id, "ann", &choose).await.unwrap().unwrap();

    assert_eq!((before.version, before.context.len(), count), (4, 5, 1));
    assert_eq!((again.version, again.context.len(), nothing), (5, 4, 0));
    assert_eq!(world.state("t").await, again);
    assert_eq!(log(&world, "t").await.len(), 5, "the log is another list");
    let audit = world.store.audit(&world.scope(), &id).await.unwrap();
    assert_eq!(audit.iter().map(|e| (e.who.as_str(), e.action.as_str())).collect::<Vec<_>>(), [("ann", "fix")]);
    assert_eq!(world.store.fix(&world.scope(), &"none".into(), "ann", &choose).await.unwrap(), None);
}

/// C28: a long thread stays readable at every version, and a step loads only what is new.
pub async fn a_long_thread_is_readable_at_every_version(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut runs: Vec<RunId> = Vec::new();
    for turn in 0..12 {
        let mut input = RunInput { messages: vec![named(&format!("m{turn}"), "question")], ..RunInput::default() };
        input.state.insert("count".to_owned(), json!(turn));
        let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
        world.finish(run).await;
        runs.push(run);
    }

    for turn in 0..12_i64 {
        let state = world.store.state(&world.scope(), &"t".into(), Some(turn * 4 + 1)).await.unwrap().unwrap();
        assert_eq!(state.context.len() as i64, turn * 4 + 1);
        assert_eq!(state.fields.get("count"), Some(&json!(turn)));
    }
    let versions: Vec<_> = world
        .store
        .changes(runs[11], 0)
        .await
        .unwrap()
        .iter()
        .map(|change| (change.version, change.messages.len()))
        .collect();
    assert_eq!(versions, [(45, 1), (46, 1), (47, 1), (48, 1)]);
}

/// Messages for the log of a thread.
pub(super) fn put(world: &World, thread: &str, messages: Vec<Message>) -> PutMessages {
    PutMessages {
        thread_id: thread.into(),
        caller: world.caller.clone(),
        graph: world.graph.manifest.name.clone(),
        graph_version: world.graph.version.clone(),
        messages,
    }
}

/// The texts of the log.
pub(super) async fn log(world: &World, thread: &str) -> Vec<String> {
    let page = Page { offset: 0, limit: 1000 };
    let messages = world.store.messages(&world.scope(), &thread.into(), None, page).await.unwrap();
    messages.iter().map(Message::plain_text).collect()
}

fn edit(world: &World, thread: &str, text: &str) -> StateEdit {
    StateEdit {
        thread_id: thread.into(),
        caller: world.caller.clone(),
        graph: world.graph.manifest.name.clone(),
        graph_version: world.graph.version.clone(),
        messages: vec![user(text)],
        fields: JsonMap::from_iter([("topic".to_owned(), json!(text))]),
    }
}

fn all_ids(context: &[Message]) -> Vec<crate::domain::MessageId> {
    context.iter().map(|message| message.message_id.clone()).collect()
}
