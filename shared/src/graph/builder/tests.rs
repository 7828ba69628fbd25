//! What the builder takes and what it refuses.

use serde_json::json;

use super::*;
use crate::domain::PoolName;
use crate::graph::{NodeContext, RetryPolicy};

fn noop() -> impl Node + 'static {
    |_: NodeContext| async { "done" }
}

fn linear() -> GraphBuilder {
    Graph::builder("linear").node("a", noop()).node("b", noop()).entry("a").edge("a", "b").edge("b", END)
}

fn error(builder: GraphBuilder) -> (&'static str, String) {
    let error = builder.build().unwrap_err();
    (error.code, error.message)
}

#[test]
fn a_graph_is_built_with_its_manifest() {
    let graph = linear()
        .field("topic", "none")
        .conditional_map("a", |state: &ThreadState| state.context.is_empty(), [(true, END), (false, "b")])
        .interrupt_before(["b"])
        .interrupt_after(["a"])
        .ids(IdKind::Bigint)
        .state_type("DemoState")
        .thread_name("named after {messages} messages")
        .build()
        .unwrap();

    let manifest = &graph.manifest;
    assert_eq!(manifest.entry(), Some("a"));
    assert_eq!(manifest.edges[3].mapping, Some(vec![(json!(true), END.to_owned()), (json!(false), "b".to_owned())]));
    assert_eq!(
        (manifest.interrupt_before.as_slice(), manifest.interrupt_after.as_slice()),
        (&["b".to_owned()][..], &["a".to_owned()][..])
    );
    assert!(graph.version.is_code());
    assert_eq!(graph.nodes.len(), 2);
    assert_eq!(graph.conditions.keys().collect::<Vec<_>>(), [&3]);
}

#[test]
fn the_version_follows_the_manifest_and_the_code() {
    let version = |builder: GraphBuilder| builder.build().unwrap().version;

    assert_eq!(version(linear()), version(linear()));
    assert_ne!(version(linear()), version(linear().field("topic", "none")));
    assert_ne!(version(linear().version("1")), version(linear().version("2")));
}

#[test]
fn a_graph_without_an_entry_is_refused() {
    let (code, message) = error(Graph::builder("g").node("a", noop()).edge("a", END));

    assert_eq!(code, "GRAPH_002");
    assert!(message.contains("no entry point"), "{message}");
}

#[test]
fn a_node_without_an_edge_is_refused() {
    let (code, message) = error(linear().node("lonely", noop()));

    assert_eq!(code, "GRAPH_003");
    assert!(message.contains("'lonely'"), "{message}");
}

#[test]
fn names_that_are_no_node_are_refused() {
    let route = |_: &ThreadState| "x";
    for (builder, name) in [
        (linear().edge("b", "x"), "'x'"),
        (linear().edge("x", "b"), "begins at 'x'"),
        (linear().entry("x"), "'x'"),
        (linear().edge(END, "a"), END),
        (linear().conditional_map("a", route, [("k", "x")]), "'x'"),
        (linear().conditional("x", route), "begins at 'x'"),
        (linear().interrupt_before(["x"]), "interrupt_before names 'x'"),
        (linear().interrupt_after([END]), "interrupt_after names '__end__'"),
    ] {
        let (code, message) = error(builder);

        assert_eq!(code, "GRAPH_004");
        assert!(message.contains(name), "{message}");
    }
}

#[test]
fn names_that_cannot_be_used_are_refused() {
    let schema = |schema: Json| FieldSpec { name: "f".into(), default: json!(1), reducer: Reducer::default(), schema };
    for (builder, part) in [
        (Graph::builder(" ").node("a", noop()).entry("a"), "graph's name"),
        (linear().node("a", noop()), "'a' is there twice"),
        (linear().node(START, noop()), "name of the engine"),
        (linear().node("", noop()), "node's name"),
        (linear().field("context", 1), "'context' belongs to the engine"),
        (linear().field("execution_meta", 1), "belongs to the engine"),
        (linear().field("current_node", 1), "belongs to the engine"),
        (linear().field("f", 1).field("f", 2), "'f' is there twice"),
        (linear().field_spec(schema(json!({"type": "nonsense"}))), "no JSON Schema"),
        (linear().field_spec(schema(json!({"type": "string"}))), "does not satisfy"),
    ] {
        let (code, message) = error(builder);

        assert_eq!(code, "GRAPH_000");
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn policies_that_cannot_be_kept_are_refused() {
    let retry = |attempts, delay_min_ms| RetryPolicy { attempts, delay_min_ms, delay_max_ms: 5, retry_on: Vec::new() };
    let policy = NodePolicy::default;
    for (policy, part) in [
        (NodePolicy { pool: PoolName::from("a b"), ..policy() }, "cannot name a pool"),
        (NodePolicy { timeout_ms: Some(0), ..policy() }, "timeout is 0"),
        (NodePolicy { retry: retry(0, 1), ..policy() }, "0 attempts"),
        (NodePolicy { retry: retry(101, 1), ..policy() }, "more than 100 attempts"),
        (NodePolicy { retry: retry(2, 6), ..policy() }, "longer than delay_max"),
    ] {
        let (_, message) = error(linear().node_with("c", noop(), policy).edge("b", "c"));

        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn nodes_that_no_edge_reaches_are_found() {
    let unreachable = |builder: GraphBuilder| unreachable_nodes(&builder.build().unwrap().manifest);

    assert_eq!(unreachable(linear()), Vec::<usize>::new());
    assert_eq!(unreachable(linear().node("c", noop()).edge("c", END)), [2]);
    let named = linear().node("c", noop()).edge("c", END).conditional("b", |_: &ThreadState| "c");
    assert_eq!(unreachable(named), Vec::<usize>::new());
}
