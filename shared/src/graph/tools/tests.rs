//! What becomes of the calls of one message, branch by branch.

use serde_json::json;

use super::plan::{CALLS_MAX, Planned, decided_result, plan};
use super::*;
use crate::domain::interrupt::{OutcomeAction, OutcomeAnswer};
use crate::domain::{CallStatus, ExecutionMeta, Message, QuestionKind, Role};
use crate::graph::Graph;

fn spec() -> ToolsSpec {
    let mut wipe = ToolSpec::named("wipe");
    wipe.destructive = true;
    let tools = ToolSet::new().remote(ToolSpec::named("locate")).handoff("b");
    let mut spec = tools.spec().clone();
    spec.tools.extend([ToolSpec::named("look"), wipe]);
    spec.guard.enabled = true;
    spec
}

fn call(id: &str, name: &str, arguments: &str) -> Json {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn said(calls: Vec<Json>) -> Message {
    Message { tools_calls: Some(calls), message_id: "m1".into(), ..Message::text(Role::Assistant, "") }
}

fn state(messages: Vec<Message>) -> ThreadState {
    ThreadState {
        context: messages,
        context_summary: None,
        execution_meta: ExecutionMeta::fresh("t"),
        fields: JsonMap::new(),
    }
}

fn answered(state: &mut ThreadState, key: &str, answer: Json) {
    let answers = state.execution_meta.internal_data.entry("interrupt_resume").or_insert_with(|| json!({}));
    answers[key] = answer;
}

/// What is planned for calls of `names`, in short.
fn planned(state: &ThreadState) -> Vec<String> {
    let short = |planned: &Planned| match planned {
        Planned::Start { call, is_gated, .. } => {
            format!("start {} {}{}", call.tool, call.arguments, if *is_gated { " gated" } else { "" })
        }
        Planned::Deny(call, result) => format!("deny {} {}", call.tool, result.output),
        Planned::Answer(message) => message.plain_text(),
        Planned::Ask(question) => format!("ask {}", question.key),
    };
    plan(&spec(), "tools", state).calls.iter().map(short).collect()
}

fn of(calls: Vec<Json>) -> Vec<String> {
    planned(&state(vec![said(calls)]))
}

#[test]
fn ungated_calls_start_and_gated_ones_ask() {
    let calls =
        vec![call("1", "look", "{\"at\": 1}"), call("2", "wipe", "{}"), call("3", "locate", ""), call("4", "look", "")];

    assert_eq!(of(calls), ["start look {\"at\":1}", "ask gate:2", "ask remote:3", "start look {}"]);
}

/// C41, vectors gate-01 and gate-21.
#[test]
fn calls_that_cannot_run_get_an_error_and_the_others_go_on() {
    let calls =
        vec![call("1", "ghost", "{}"), call("2", "look", "{bad"), call("3", "look", "[1]"), call("4", "look", "{}")];

    let planned = of(calls.clone());

    assert_eq!(planned[0], "Tool 'ghost' not found.");
    assert!(planned[1].contains("not a JSON object") && planned[2].contains("not a JSON object"));
    assert_eq!(planned[3], "start look {}");
    let Planned::Answer(message) = &plan(&spec(), "tools", &state(vec![said(calls)])).calls[0] else { panic!() };
    let kinds: Vec<_> = message.content.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(
        (kinds.as_slice(), &message.content[1]["status"]),
        (["error", "tool_result"].as_slice(), &json!("failed"))
    );
}

/// C42; vectors gate-02 to gate-06.
#[test]
fn only_tools_that_were_offered_run() {
    for (allowed, expected) in [
        (json!(["look"]), vec!["start look {}", "Tool 'wipe' not found.", "ask remote:3"]),
        (json!([]), vec!["Tool 'look' not found.", "Tool 'wipe' not found.", "ask remote:3"]),
        (json!(null), vec!["start look {}", "ask gate:2", "ask remote:3"]),
    ] {
        let mut message = said(vec![call("1", "look", ""), call("2", "wipe", ""), call("3", "locate", "")]);
        message.metadata.insert("allowed_tools".to_owned(), allowed);
        assert_eq!(planned(&state(vec![message])), expected);
    }
}

/// C42; vectors gate-08, gate-09, gate-13, gate-14.
#[test]
fn only_a_declared_handoff_hands_over() {
    let hand = plan(&spec(), "tools", &state(vec![said(vec![call("1", "look", ""), call("2", "transfer_to_b", "")])]));

    assert_eq!(hand.handoff.as_deref(), Some("b"));
    let [Planned::Answer(message)] = hand.calls.as_slice() else { panic!("{hand:?}") };
    assert_eq!(message.content[0]["call_id"], "1");
    for name in ["transfer_to_wipe", "transfer_to_", "transfer_to_B", "transfer_to_b "] {
        assert_eq!(of(vec![call("1", name, "")]), [format!("Tool '{name}' not found.")]);
    }
}

/// Unicode look-alikes are other names.
#[test]
fn a_name_is_compared_byte_by_byte() {
    for name in ["wіpe", "WIPE", " wipe", "wipe\u{200b}", "look\0"] {
        assert_eq!(of(vec![call("1", name, "")]), [format!("Tool '{name}' not found.")]);
    }
}

/// Invariant 7: an approval runs exactly what was shown, or what the person made of it.
#[test]
fn an_answer_decides_about_its_own_call() {
    let mut state = state(vec![said(vec![
        call("1", "wipe", "{\"n\":1}"),
        call("2", "wipe", "{\"n\":2}"),
        call("3", "wipe", "{\"n\":3}"),
        call("4", "wipe", "{\"n\":4}"),
        call("5", "wipe", "{\"n\":5}"),
    ])]);
    answered(&mut state, "gate:1", json!({"outcome": "approved"}));
    answered(&mut state, "gate:2", json!({"outcome": "approved", "arguments": {"n": 20}}));
    answered(&mut state, "gate:3", json!({"outcome": "denied", "comment": "not today"}));
    answered(&mut state, "gate:4", json!("approved"));

    let planned = planned(&state);

    assert_eq!(planned[..2], ["start wipe {\"n\":1} gated", "start wipe {\"n\":20} gated"]);
    assert_eq!(planned[2], "deny wipe \"not today\"");
    assert!(planned[3].starts_with("deny wipe"), "what is no approval is none: {}", planned[3]);
    assert_eq!(planned[4], "ask gate:5");
}

#[test]
fn calls_with_a_result_are_left_alone() {
    let calls = vec![call("1", "look", ""), call("2", "look", "")];
    let result = Message {
        content: vec![json!({"type": "tool_result", "call_id": "1", "output": "x"})],
        ..Message::text(Role::Tool, "")
    };
    assert_eq!(planned(&state(vec![said(calls.clone()), result.clone()])), ["start look {}"]);
    // Of an earlier turn: the same id is another call.
    assert_eq!(planned(&state(vec![result, said(calls)])).len(), 2);
    assert_eq!(planned(&state(vec![Message::text(Role::User, "hi")])), [""; 0]);
}

/// D19: the second of two equal ids gets an error, and the first keeps its own way.
#[test]
fn the_second_of_two_equal_ids_gets_an_error() {
    let calls = vec![call("1", "wipe", "{}"), call("1", "look", "{}")];
    let mut state = state(vec![said(calls)]);

    let first = plan(&spec(), "tools", &state).calls;

    let [Planned::Ask(question), Planned::Answer(error)] = first.as_slice() else { panic!("{first:?}") };
    assert_eq!((question.key.as_str(), error.content[0]["is_error"].as_bool()), ("gate:1", Some(true)));
    state.context.push(error.clone());
    assert_eq!(planned(&state), ["ask gate:1"], "the error does not answer the first one");
}

#[test]
fn calls_above_the_limit_get_an_error() {
    let calls = (0..=CALLS_MAX).map(|number| call(&number.to_string(), "look", "")).collect();

    let planned = of(calls);

    assert_eq!(planned.len(), CALLS_MAX + 1);
    assert!(planned[CALLS_MAX - 1].starts_with("start") && planned[CALLS_MAX].starts_with("More than"));
}

/// Source: AG-UI, "The interrupt of a gated call".
#[test]
fn a_gate_shows_what_will_run() {
    let mut spec = spec();
    let wipe = spec.tools.iter_mut().find(|tool| tool.name == "wipe").unwrap();
    wipe.confirm = Some("Wipe it?".into());
    wipe.may_edit = true;
    let calls = plan(&spec, "tools", &state(vec![said(vec![call("1", "wipe", "{\"n\": 1}")])])).calls;

    let [Planned::Ask(question)] = calls.as_slice() else { panic!("{calls:?}") };

    assert_eq!((question.kind, question.reason.as_str()), (QuestionKind::Gate, "tool_call"));
    assert_eq!(question.message.as_deref(), Some("Approve wipe({\"n\":1})?"));
    assert_eq!(question.metadata["x-confirm"], "Wipe it?");
    let schema = question.response_schema.as_ref().unwrap();
    assert_eq!(
        (&schema["required"], &schema["properties"]["editedArgs"]["type"]),
        (&json!(["approved"]), &json!("object"))
    );
    assert_eq!(question.call.as_ref().unwrap().arguments, json!({"n": 1}));
}

#[test]
fn the_newest_decision_about_an_unknown_outcome_counts() {
    let mut state = state(vec![said(vec![call("1", "look", "")])]);
    answered(&mut state, "outcome:1:1", json!({"action": "retry"}));
    answered(&mut state, "outcome:1:10", json!({"action": "done", "result": 7}));
    answered(&mut state, "outcome:1:9", json!({"action": "failed"}));

    let calls = plan(&spec(), "tools", &state).calls;

    let [Planned::Start { decided: Some(decided), .. }] = calls.as_slice() else { panic!("{calls:?}") };
    let result = decided_result(decided).unwrap();
    assert_eq!((result.status, result.output), (CallStatus::Done, json!(7)));
    assert_eq!(decided_result(&OutcomeAnswer { action: OutcomeAction::Retry, result: None }), None);
}

#[derive(serde::Deserialize, JsonSchema)]
struct Look {
    #[expect(dead_code, reason = "only its schema matters here")]
    at: u32,
}

/// C42; vectors gate-11, gate-15, gate-16, gate-20: mistakes are found when the graph is built.
#[test]
fn tools_that_cannot_work_are_refused_with_the_graph() {
    let build = |tools: ToolSet| {
        let graph = Graph::builder("g").tools("tools", tools).entry("tools").edge("tools", "__end__").build();
        graph.map_err(|error| (error.code, error.message))
    };
    let look = || ToolSet::new().function(ToolSpec::named("look"), async |_: ToolContext, _: Look| Ok("seen"));

    let graph = build(look()).unwrap();
    assert_eq!(graph.manifest.nodes[0].kind, "tools");
    assert_eq!(graph.manifest.nodes[0].spec["tools"][0]["parameters"]["required"], json!(["at"]));
    assert!(graph.tools["tools"].code("look").is_some());
    for (tools, code, part) in [
        (look().remote(ToolSpec::named("look")), "GRAPH_000", "rename one"),
        (ToolSet::new().handoff("ghost"), "GRAPH_007", "'ghost'"),
        (ToolSet::new().remote(ToolSpec::named("a b")), "GRAPH_000", "cannot name a tool"),
        (look().guard(Guard { exempt: vec!["lok".into()], ..Guard::default() }), "GRAPH_000", "'lok'"),
        (look().concurrency(0), "GRAPH_000", "at least 1"),
        (
            ToolSet::new().remote(ToolSpec { parameters: json!({"type": 5}), ..ToolSpec::named("x") }),
            "GRAPH_000",
            "JSON Schema",
        ),
        (
            ToolSet::new().remote(ToolSpec { on_expiry: Some(json!("no")), ..ToolSpec::named("x") }),
            "GRAPH_000",
            "no decision",
        ),
    ] {
        let (found, message) = build(tools).unwrap_err();
        assert!(found == code && message.contains(part), "{found} {message}");
    }
}
