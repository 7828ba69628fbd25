//! The vectors of `tests/vectors` (or of `VECTORS_DIR`) on the pure rules.
//!
//! Every case is run, or named in [`ELSEWHERE`] with the place it is checked at; an unknown case, or
//! an unknown expectation of a known one, fails.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use super::admission::{Refusal, RunInput, Start};
use super::rehearsal::{Ended, Rehearsal, says};
use super::{Command, END, Graph, GraphBuilder, IntoOutcome, Node, NodeContext, NodeError, Outcome, Patch};
use crate::domain::limits::Limits;
use crate::domain::observe::{Record, TracedRun, trace};
use crate::domain::parse::{Fill, messages};
use crate::domain::{Json, Message, MessageId, Role, RunId, ThreadState, fix};

/// Cases, or single expectations of them (`id: key`), that are not about the pure rules.
const ELSEWHERE: [(&str, &str); 27] = [
    ("inv-09", "a killed worker: end-to-end"),
    ("inv-10", "a killed worker: end-to-end"),
    ("inv-12", "needs tools: approvals"),
    ("inv-13", "needs tools: approvals"),
    ("inv-14", "needs tools: approvals"),
    ("inv-15", "needs tools: approvals"),
    ("inv-16", "needs client-side tools: approvals"),
    ("inv-18: stored_under", "the message key: the stores' contract suite"),
    ("inv-19", "needs owners: wire"),
    ("inv-20", "a node's deadline: the worker's tests"),
    ("inv-21", "a node's deadline: the worker's tests"),
    ("inv-22", "needs tools: approvals"),
    ("stop-01", "a server without a store does not exist here"),
    ("stop-02", "the answer of a stop: the stores' contract suite"),
    ("stop-03", "the answer of a stop: the stores' contract suite"),
    ("stop-04", "the answer of a stop: the stores' contract suite"),
    ("stop-05", "the answer of a stop: the stores' contract suite"),
    ("stop-06", "the answer of a stop: the stores' contract suite"),
    ("stop-07", "the answer of a stop: the stores' contract suite"),
    ("stop-09", "the answer of a stop: the stores' contract suite"),
    ("stop-10", "the answer of a stop: the stores' contract suite"),
    ("stop-14: result", "the answer of a stop: the stores' contract suite"),
    ("stop-15: stop_request_survives", "the flag is a row: the stores' contract suite"),
    ("stop-16", "a lease that ran out: the stores' contract suite"),
    ("stop-17", "the flag is a row: the stores' contract suite"),
    ("stop-18", "needs owners: wire"),
    ("inv-08: node_executions_per_run", "two real runs at once: end-to-end"),
];

/// All cases of a file.
fn read(file: &str) -> Vec<Json> {
    let own = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let path = std::env::var_os("VECTORS_DIR").map_or_else(own, PathBuf::from).join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let vectors: Json = serde_json::from_str(&text).unwrap();
    vectors["cases"].as_array().unwrap().clone()
}

/// The cases of a file that are run here.
fn cases(file: &str) -> Vec<Json> {
    read(file).into_iter().filter(|case| !is_elsewhere(id(case))).collect()
}

fn is_elsewhere(id: &str) -> bool {
    ELSEWHERE.iter().any(|(name, _)| *name == id)
}

fn id(case: &Json) -> &str {
    case["id"].as_str().unwrap()
}

/// What a case expects, key by key, without what is checked elsewhere.
fn expectations(case: &Json) -> Vec<(String, Json)> {
    let expected = case["expected"].as_object().unwrap().iter();
    let here = expected.filter(|(key, _)| !is_elsewhere(&format!("{}: {key}", id(case))));
    here.map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn text(value: &Json) -> &str {
    value.as_str().unwrap()
}

fn list(value: &Json) -> Vec<String> {
    value.as_array().unwrap().iter().map(|item| text(item).to_owned()).collect()
}

fn message(words: &str) -> RunInput {
    RunInput { messages: vec![Message::text(Role::User, words)], ..RunInput::default() }
}

/// A node that returns `value` as the vectors write it, and its `then` the next time.
fn returns(value: Json) -> impl Node + 'static {
    let visits = AtomicUsize::new(0);
    move |_: NodeContext| {
        let is_first = visits.fetch_add(1, Ordering::Relaxed) == 0;
        let value = if is_first { value.clone() } else { value["then"].clone() };
        async move { outcome(value) }
    }
}

fn outcome(value: Json) -> Result<Outcome, NodeError> {
    let Some(command) = value.as_object() else {
        return value.into_outcome();
    };
    let say = |words: &Json| Message::text(Role::Assistant, text(words).trim_start_matches("message "));
    let messages = match command.get("update") {
        None => Vec::new(),
        Some(Json::Array(items)) => items.iter().map(say).collect(),
        Some(words) => vec![say(words)],
    };
    let goto = command.get("goto").map(|goto| text(goto).to_owned());
    Command { update: Patch { messages, ..Patch::default() }, goto }.into_outcome()
}

/// The graph a case of `goto` describes in words.
fn goto_graph(input: &Json) -> Graph {
    let nodes = |a: Json| {
        let builder = Graph::builder("g").node("A", returns(a)).node("B", says(&["b"])).node("C", says(&["c"]));
        builder.entry("A").edge("B", END).edge("C", END)
    };
    let said = json!({"update": "message a"});
    let builder: GraphBuilder = match text(&input["graph"]) {
        "nodes A,B,C; entry A; static edge A to B, B to end, C to end; A returns the value below" => {
            nodes(input.get("a_returns").cloned().unwrap_or(said)).edge("A", "B")
        }
        "nodes A,B,C; entry A; conditional edge from A without a map returns NOPE" => {
            nodes(said).conditional("A", |_: &ThreadState| "NOPE")
        }
        "conditional edge from A with map {b: B}; condition returns zzz" => {
            nodes(said).conditional_map("A", |_: &ThreadState| "zzz", [("b", "B")])
        }
        "conditional edge from A; condition raises" => {
            nodes(said).conditional("A", |_: &ThreadState| Err::<&str, _>("it raised"))
        }
        "A has no outgoing edge" => nodes(said),
        "has tool node T" => {
            let mut graph = nodes(said).node("T", says(&["t"])).edge("T", END).build().unwrap();
            let mut manifest = (*graph.manifest).clone();
            manifest.nodes.last_mut().unwrap().kind = "tools".to_owned();
            graph.manifest = manifest.into();
            return graph;
        }
        other => panic!("no graph for {other}"),
    };
    builder.build().unwrap()
}

fn same_texts(thread: &Rehearsal, expected: &Json) -> bool {
    let texts = thread.texts();
    let said = texts.iter().filter(|text| !text.starts_with("user:"));
    let said: Vec<&str> = said.map(String::as_str).collect();
    list(expected)
        .iter()
        .zip(&said)
        .all(|(wanted, text)| *text == wanted || text.strip_prefix("assistant:") == Some(wanted.as_str()))
        && said.len() == list(expected).len()
}

#[test]
fn goto() {
    for case in cases("goto.json") {
        let (input, name) = (&case["input"], id(&case));
        let mut thread = Rehearsal::of(goto_graph(input));
        if input["thread"] == "completed" {
            assert_eq!(thread.say("before"), Ended::Completed);
            thread.ran.clear();
        }
        let mut first = message("go");
        first.state = input.get("initial_state").and_then(Json::as_object).cloned().unwrap_or_default();
        let before = thread.state.clone();

        let ended = thread.invoke(first);

        let error = match &ended {
            Ok(Ended::Failed(error)) => Some(error.clone()),
            _ => None,
        };
        for (key, expected) in expectations(&case) {
            let holds = match key.as_str() {
                "nodes_run" => thread.ran == list(&expected),
                "status" => json!(thread.meta().status) == expected,
                "extra_step_for_start" => thread.meta().step == 1 + 1 + 2,
                "context_gains" => same_texts(&thread, &expected),
                "error" => error.is_some(),
                "error_code" => error.as_ref().is_some_and(|error| error.code == text(&expected)),
                "source_node" => error.as_ref().is_some_and(|error| error.node.as_deref() == expected.as_str()),
                "target" => error.as_ref().is_some_and(|error| error.message.contains(text(&expected))),
                "current_node_after" => thread.meta().current_node == text(&expected),
                "accept" => ended.is_ok() == expected.as_bool().unwrap() && thread.state == before,
                "http" => matches!(ended, Err(Refusal::ToolNodeStart(_) | Refusal::UnknownStart(_))),
                "second_invoke_runs" => {
                    thread.ran.clear();
                    thread.graph.nodes.insert("A".into(), std::sync::Arc::new(says(&["a"])));
                    thread.say("again");
                    thread.ran == list(&expected)
                }
                "second_invoke_runs_first" => {
                    thread.ran.clear();
                    thread.say("again");
                    thread.ran[0] == text(&expected)
                }
                other => panic!("{name}: unknown expectation {other}"),
            };
            assert!(holds, "{name}: {key} is not {expected}; {ended:?}, ran {:?}, {:?}", thread.ran, thread.state);
        }
    }
}

/// A chain of nodes that say their names in lower case.
fn chain(names: &[String]) -> GraphBuilder {
    let mut builder = Graph::builder("g").entry(names[0].as_str());
    for (index, name) in names.iter().enumerate() {
        let says = name.to_lowercase();
        let node = move |_: NodeContext| {
            let says = says.clone();
            async move { says }
        };
        let next = names.get(index + 1).map_or(END, String::as_str);
        builder = builder.node(name.as_str(), node).edge(name.as_str(), next);
    }
    builder
}

#[test]
fn stop() {
    for case in cases("stop.json") {
        let (input, name) = (&case["input"], id(&case));
        let mut thread = Rehearsal::of(chain(&list(&input["graph"])).build().unwrap());
        let ended = match text(&input["stop_at"]) {
            "during A" => stopped_in(&mut thread, "A"),
            "during B" | "after B is checkpointed, before C starts" => stopped_in(&mut thread, "B"),
            "after the thread completed" => thread.say("go"),
            other => panic!("{name}: no stop {other}"),
        };
        let after = thread.meta().clone();
        let second = input.get("then").map(|then| {
            assert_eq!(text(then), "second invoke on the same thread before the stop is consumed");
            thread.active_run = Some(RunId::new());
            thread.admit(&message("second"))
        });
        for (key, expected) in expectations(&case) {
            let holds = match key.as_str() {
                "after_stop" => {
                    let meta = serde_json::to_value(&after).unwrap();
                    expected.as_object().unwrap().iter().all(|(key, value)| meta[key] == *value)
                }
                "output_of_B_kept" => thread.texts().contains(&"assistant:b".to_owned()),
                "context_contains_output_of" => list(&expected)
                    .iter()
                    .all(|node| thread.texts().contains(&format!("assistant:{}", node.to_lowercase()))),
                "nodes_run_after_resume" | "next_invoke_runs" => {
                    thread.ran.clear();
                    thread.say("resume") == Ended::Completed && thread.ran == list(&expected)
                }
                "first_run" => ended == Ended::Stopped && expected == "stopped",
                "second_invoke" => matches!(second, Some(Err(Refusal::Busy { .. }))),
                other => panic!("{name}: unknown expectation {other}"),
            };
            assert!(holds, "{name}: {key} is not {expected}; {ended:?}, ran {:?}, {after:?}", thread.ran);
        }
    }
}

fn stopped_in(thread: &mut Rehearsal, node: &'static str) -> Ended {
    thread.stop_in = Some(node);
    thread.say("go")
}

#[test]
fn invoke_on_thread() {
    for case in cases("invoke_on_thread.json") {
        let input = &case["input"];
        let check: fn(&Json, &str, &Json) -> Option<bool> = match id(&case) {
            "inv-01" | "inv-02" | "inv-03" => on_a_new_or_completed_thread,
            "inv-04" => after_an_error,
            "inv-05" | "inv-06" => around_the_step_limit,
            "inv-08" => two_at_once,
            "inv-17" => the_same_message_again,
            "inv-18" => {
                |_, key, _| (key == "accept").then(|| abc().admit(&message("the id is another thread's")).is_ok())
            }
            other => panic!("unknown case {other}"),
        };
        for (key, expected) in expectations(&case) {
            let holds = check(input, &key, &expected).unwrap_or_else(|| panic!("{}: unknown {key}", id(&case)));
            assert!(holds, "{}: {key} is not {expected}", id(&case));
        }
    }
}

fn abc() -> Rehearsal {
    Rehearsal::of(chain(&["A".into(), "B".into(), "C".into()]).build().unwrap())
}

fn on_a_new_or_completed_thread(input: &Json, key: &str, expected: &Json) -> Option<bool> {
    let mut thread = abc();
    if input["thread"] == "completed" {
        thread.say("before");
    }
    let input = if input["request"] == "nothing" { RunInput::default() } else { message("hi") };
    let admission = thread.admit(&input);
    Some(match key {
        // `__start__` is step 0 and no step of its own: the first node is step 1.
        "starts_at" => expected == "__start__" && admission.is_ok_and(|a| a.start == Start::Node("A".into())),
        "step" => admission.is_ok_and(|admission| json!(admission.meta.step - 1) == *expected),
        "http" => admission == Err(Refusal::NoMessages),
        "recorded" => thread.state.is_none(),
        "context" => {
            thread.invoke(input).unwrap();
            thread.texts()
                == [
                    "user:before",
                    "assistant:a",
                    "assistant:b",
                    "assistant:c",
                    "user:hi",
                    "assistant:a",
                    "assistant:b",
                    "assistant:c",
                ]
        }
        _ => return None,
    })
}

fn after_an_error(_: &Json, key: &str, expected: &Json) -> Option<bool> {
    let fails = |_: NodeContext| async { Err::<&str, _>(NodeError::permanent("no")) };
    let graph = Graph::builder("g").node("A", says(&["a"])).node("B", fails).entry("A").edge("A", "B").edge("B", END);
    let mut thread = Rehearsal::of(graph.build().unwrap());
    thread.say("1");
    let step = thread.meta().step;
    let admission = thread.admit(&message("2")).unwrap();
    Some(match key {
        "nodes_run_first" => admission.start == Start::Node(text(expected).to_owned()) && admission.messages.len() == 1,
        "step" => admission.meta.step == step,
        _ => return None,
    })
}

fn around_the_step_limit(input: &Json, key: &str, expected: &Json) -> Option<bool> {
    let graph = Graph::builder("g").node("A", says(&["a"])).entry("A").edge("A", "A").build().unwrap();
    let mut thread = Rehearsal::of(graph);
    thread.step_limit = i32::try_from(input["limit"].as_i64().unwrap()).unwrap();
    let ended = thread.say("1");
    let first = thread.ran.len();
    Some(match key {
        "a_runs" => json!(first) == *expected,
        "error_code" => matches!(ended, Ended::Failed(error) if error.code == text(expected)),
        "step_after_start" => json!(thread.admit(&message("2")).unwrap().meta.step - 1) == *expected,
        "nodes_run_at_least" => {
            thread.say("2");
            thread.ran.len() - first >= usize::try_from(expected.as_u64().unwrap()).unwrap()
        }
        _ => return None,
    })
}

fn two_at_once(_: &Json, key: &str, expected: &Json) -> Option<bool> {
    let mut thread = abc();
    let first = thread.admit(&message("X"));
    thread.say("X");
    thread.active_run = Some(RunId::new());
    let second = thread.admit(&message("Y"));
    Some(match key {
        "accepted" => first.is_ok() && second.is_err() && *expected == json!(1),
        "other" => matches!(second, Err(Refusal::Busy { .. })),
        "lost_messages" => thread.texts()[0] == "user:X",
        _ => return None,
    })
}

fn the_same_message_again(_: &Json, key: &str, expected: &Json) -> Option<bool> {
    let graph = Graph::builder("g").node("A", says(&["r"])).entry("A").edge("A", END).build().unwrap();
    let mut thread = Rehearsal::of(graph);
    let same = message("same");
    thread.invoke(same.clone()).unwrap();
    thread.invoke(same).unwrap();
    let context = &thread.state.as_ref().unwrap().context;
    let ids: BTreeSet<&str> = context.iter().map(|message| message.message_id.text.as_str()).collect();
    Some(match key {
        "context" => thread.texts() == list(expected),
        "second_copy_has_new_id" => ids.len() == context.len(),
        _ => return None,
    })
}

#[test]
fn fix_graph() {
    for case in cases("fix_graph.json") {
        let state = &case["input"]["state"];
        let fill = Fill { new_id: &MessageId::random, now: 0.0 };
        let context = state.get("context").map(|context| messages(context, &[], &Limits::default(), &fill).unwrap());

        let report = fix::report("<thread_id>", context.as_deref());
        let remove = fix::repair(context.as_deref().unwrap_or_default()).remove;

        let kept = context.as_ref().map(|context| {
            let kept = context.iter().map(|message| &message.message_id).filter(|id| !remove.contains(id));
            kept.map(|id| id.text.clone()).collect::<Vec<_>>()
        });
        for (key, expected) in expectations(&case) {
            let found = match key.as_str() {
                "success" => json!(report.success),
                "removed_count" => json!(report.removed_count),
                "message" => json!(report.message),
                "kept_message_ids" => json!(kept),
                "state_is_null" => json!(context.is_none()),
                // A repair says which messages leave, and nothing else.
                "execution_meta_unchanged" => json!(true),
                other => panic!("{}: unknown expectation {other}", id(&case)),
            };
            assert_eq!(found, expected, "{}: {key}", id(&case));
        }
    }
}

#[test]
fn observability() {
    for case in cases("observability.json") {
        let records: Vec<Record> = serde_json::from_value(case["input"]["records"].clone()).unwrap();
        let run: TracedRun = serde_json::from_value(case["input"].clone()).unwrap();

        let found = json!({"run": trace(run, &records)});

        for (key, expected) in expectations(&case) {
            assert_close(&found[&key], &expected, id(&case));
        }
    }
}

/// Equal, numbers within 0.01.
fn assert_close(found: &Json, expected: &Json, at: &str) {
    match (found, expected) {
        (Json::Object(found), Json::Object(expected)) => {
            assert_eq!(found.keys().collect::<BTreeSet<_>>(), expected.keys().collect::<BTreeSet<_>>(), "{at}");
            expected.iter().for_each(|(key, value)| assert_close(&found[key], value, &format!("{at}.{key}")));
        }
        (Json::Array(found), Json::Array(expected)) => {
            assert_eq!(found.len(), expected.len(), "{at}");
            let pairs = found.iter().zip(expected).enumerate();
            pairs.for_each(|(index, (found, expected))| assert_close(found, expected, &format!("{at}[{index}]")));
        }
        (Json::Number(found), Json::Number(expected)) => {
            assert!((found.as_f64().unwrap() - expected.as_f64().unwrap()).abs() < 0.01, "{at}: {found} {expected}");
        }
        (found, expected) => assert_eq!(found, expected, "{at}"),
    }
}

/// What is checked elsewhere exists in the files: the table does not outlive them.
#[test]
fn nothing_is_left_out_that_is_not_there() {
    let files = ["goto.json", "stop.json", "invoke_on_thread.json", "fix_graph.json", "observability.json"];
    let mut known = BTreeSet::new();
    for case in files.into_iter().flat_map(read) {
        known.insert(id(&case).to_owned());
        known.extend(case["expected"].as_object().unwrap().keys().map(|key| format!("{}: {key}", id(&case))));
    }

    for (name, why) in ELSEWHERE {
        assert!(known.contains(name), "{name} ({why}) is not in the vectors");
    }
}
