//! C85, C86, C87: what goes in comes out, byte for byte.

use std::sync::Arc;

use super::fixture::{World, hello, named, step_of};
use crate::domain::{Json, JsonMap};
use crate::graph::admission::RunInput;
use crate::graph::node::Patch;
use crate::store::Store;

/// Values that databases like to change.
const AWKWARD: [&str; 16] = [
    r#""nul \u0000 in text""#,
    r#""six characters: \\u0000""#,
    r#"{"nul \u0000 key":1}"#,
    r#""🦀 é é \u202e 名""#,
    r#"{"z":1,"a":{"y":2,"b":3},"m":[]}"#,
    "-0.0",
    "1e400",
    "0.1",
    "1.10",
    "9007199254740993",
    "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551616",
    "1606938044258990275541962092341162602522202993782792835301376",
    "[1.0,1,1e0,1E2,-0]",
    r#""' \" \\ / \n \t \r""#,
];

/// A node's messages and fields.
pub async fn what_a_node_returns_is_kept_exactly(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for (n, text) in AWKWARD.into_iter().enumerate() {
        let thread = format!("t{n}");
        let run = world.create(&thread).await.run.id;
        let claimed = world.claim(step_of(run, 1)).await;
        let mut patch = Patch { messages: vec![carrying(text)], ..Patch::default() };
        patch.fields.insert("topic".to_owned(), parse(text));
        patch.fields.insert("context_summary".to_owned(), parse(text));
        let commit = world.after(&claimed, Ok(patch)).await;
        world.commit(&commit).await.unwrap();

        let state = world.state(&thread).await;
        assert_eq!(state.fields["topic"].to_string(), exact(text));
        assert_eq!(state.fields["context_summary"].to_string(), exact(text));
        assert_eq!(written(&state.context[1]), written(&commit.messages[0]));
        let claimed = world.claim(step_of(run, 2)).await;
        let loaded = world.load(&claimed, Some(1)).await;
        assert_eq!(loaded.fields["topic"].to_string(), exact(text));
        assert_eq!(loaded.added[0].1.metadata["value"].to_string(), exact(text));
        let changes = world.store.changes(run, 1).await.unwrap();
        assert_eq!(changes[0].fields["topic"].to_string(), exact(text));
    }
}

/// A client's input, config and meta.
pub async fn what_a_client_sends_is_kept_exactly(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for (n, text) in AWKWARD.into_iter().enumerate() {
        let thread = format!("t{n}");
        let mut new = world.new_run(&thread);
        new.input = parse(text);
        new.config = JsonMap::from_iter([("value".to_owned(), parse(text))]);
        new.thread_meta = Some(parse(text));
        let mut input = RunInput { messages: vec![carrying(text)], ..RunInput::default() };
        input.state.insert("topic".to_owned(), parse(text));

        let run = world.try_create(new, input).await.unwrap().run.id;

        let run = world.run(run).await;
        assert_eq!((run.input.to_string(), run.config["value"].to_string()), (exact(text), exact(text)));
        let record = world.store.thread(&world.scope(), &thread.as_str().into()).await.unwrap().unwrap();
        assert_eq!(record.meta.unwrap().to_string(), exact(text));
        assert_eq!(world.state(&thread).await.fields["topic"].to_string(), exact(text));
        let logged = world.store.message(&world.scope(), &thread.as_str().into(), "m").await.unwrap().unwrap();
        assert_eq!(logged.metadata["value"].to_string(), exact(text));
    }
}

/// The place, with the answers it holds.
pub async fn the_place_is_kept_exactly(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for (n, text) in AWKWARD.into_iter().enumerate() {
        let thread = format!("t{n}");
        let run = world.create(&thread).await.run.id;
        let claimed = world.claim(step_of(run, 1)).await;
        let mut commit = world.after(&claimed, Ok(Patch::default())).await;
        commit.meta.internal_data.insert("value".to_owned(), parse(text));
        world.commit(&commit).await.unwrap();

        assert_eq!(world.state(&thread).await.meta.internal_data["value"].to_string(), exact(text));
        let claimed = world.claim(step_of(run, 2)).await;
        assert_eq!(world.load(&claimed, Some(2)).await.meta.internal_data["value"].to_string(), exact(text));
    }
}

/// C87: an integer message id beyond every machine type keeps its digits.
pub async fn a_huge_message_id_keeps_its_digits(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let digits = "1606938044258990275541962092341162602522202993782792835301376";
    let mut message = named("m", "hi");
    message.message_id = serde_json::from_str(digits).unwrap();

    let input = RunInput { messages: vec![message], ..RunInput::default() };
    world.try_create(world.new_run("t"), input).await.unwrap();

    let found = world.store.message(&world.scope(), &"t".into(), digits).await.unwrap().unwrap();
    assert_eq!(serde_json::to_string(&found.message_id).unwrap(), digits);
}

/// C88: what the door lets in nested is read back.
pub async fn deep_values_are_read_back(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let deep = format!("{}1{}", "[".repeat(100), "]".repeat(100));
    let mut input = hello();
    input.state.insert("topic".to_owned(), parse(&deep));
    input.messages = vec![carrying(&deep)];

    world.try_create(world.new_run("t"), input).await.unwrap();

    let state = world.state("t").await;
    assert_eq!(state.fields["topic"].to_string(), deep);
    assert_eq!(state.context[0].metadata["value"].to_string(), deep);
}

/// C90: ids are exact: no folding of case, width or composition.
pub async fn ids_are_exact(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let ids = ["é", "e\u{301}", "É", "a b", "a  b", "a/../b", "'; drop table thread; --", "\u{202e}x", "🧵"];

    for id in ids {
        assert!(world.create(id).await.is_new_thread, "{id}");
    }

    let long = "x".repeat(255);
    world.create(&long).await;
    for id in ids.into_iter().chain([long.as_str()]) {
        let thread = world.store.thread(&world.scope(), &id.into()).await.unwrap().unwrap();
        assert_eq!(thread.id.as_str(), id);
    }
}

/// A message that carries a value in its free data.
fn carrying(text: &str) -> crate::domain::Message {
    let mut message = named("m", "hello");
    message.metadata.insert("value".to_owned(), parse(text));
    message.content.push(serde_json::json!({"type": "data", "value": parse(text)}));
    message
}

fn written(message: &crate::domain::Message) -> String {
    serde_json::to_string(message).unwrap()
}

fn parse(text: &str) -> Json {
    serde_json::from_str(text).unwrap()
}

/// The form in which our own serializer writes it.
fn exact(text: &str) -> String {
    parse(text).to_string()
}
