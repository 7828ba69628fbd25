//! The vectors about answers, client messages and the results of client tools, on the pure rules. Cases
//! about processes, two requests at once or faces of later versions are named in [`ELSEWHERE`].

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;

use super::admission::{OpenQuestion, Refusal, RunInput, Start, ThreadView, admit};
use super::tools::plan::{Planned, plan};
use super::{END, Graph, IdKind, NodeContext, ToolSet};
use crate::domain::client::{InputLocs, run_input};
use crate::domain::limits::Limits;
use crate::domain::parse::Fill;
use crate::domain::{
    ExecutionMeta, ExecutionStatus, Json, Message, Question, QuestionKind, RunId, ThreadId, ThreadState, ToolSpec,
};

/// Cases that are not about the pure rules, and where they are checked.
const ELSEWHERE: [(&str, &str); 14] = [
    ("res-25", "two at once: the stores' contract, `of_two_answers_at_once_one_counts`"),
    ("res-27", "several runs: the stores' contract, `an_answer_makes_a_run_that_resumes_the_paused_one`"),
    ("res-29", "tools that ask: the worker's `a_tool_may_ask_and_is_called_again_with_the_answer`"),
    ("res-30", "the same on a stream; there is one engine"),
    ("res-31", "a killed worker: `an_answer_is_kept_and_reaches_the_node`"),
    ("rtr-14", "tools of one run: AG-UI"),
    ("rtr-15", "tools of one run: AG-UI"),
    ("rtr-16", "tools of one run: AG-UI"),
    ("rtr-20", "two at once: the stores' contract, `of_two_results_at_once_one_counts`"),
    ("msg-16", "a body of the API: its stories of bad input"),
    ("msg-20", "a body of the API: its stories of bad input"),
    ("msg-21", "a body of the API: its stories of bad input"),
    ("msg-22", "a body of the API: its stories of bad input"),
    ("msg-24", "the WebSocket: the wire"),
];

fn cases(file: &str) -> Vec<Json> {
    let own = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let path = std::env::var_os("VECTORS_DIR").map_or_else(own, PathBuf::from).join(file);
    let vectors: Json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    vectors["cases"].as_array().unwrap().clone()
}

fn here(file: &str) -> impl Iterator<Item = Json> {
    cases(file).into_iter().filter(|case| ELSEWHERE.iter().all(|(id, _)| case["id"] != *id))
}

/// A → B, with a node G that asks and a node for tools.
fn graph() -> Graph {
    let node = async |_: NodeContext| "x";
    let tools = ToolSet::new()
        .remote(ToolSpec::named("geo"))
        .function(ToolSpec::named("local_tool"), async |_: super::ToolContext, _: Json| Ok("x"));
    let graph = Graph::builder("g").node("A", node).node("B", node).node("G", node).tools("tools", tools);
    let graph = graph.entry("A").edge("A", "B").edge("B", "G").edge("G", "tools").edge("tools", END);
    graph.build().unwrap()
}

fn view(graph: &Graph, meta: ExecutionMeta, open: Vec<Question>) -> ThreadView {
    ThreadView {
        graph: "g".to_owned(),
        graph_version: graph.version.clone(),
        meta,
        active_run: None,
        known_ids: Default::default(),
        last_role: Some(crate::domain::Role::User),
        last_error: None,
        open: open.into_iter().map(|question| OpenQuestion { question, is_expired: false }).collect(),
        answered: Vec::new(),
    }
}

/// The thread of a case of `interrupt_resume`.
fn thread(graph: &Graph, case: &Json) -> Option<ThreadView> {
    let thread = &case["input"]["thread"];
    if thread.is_null() {
        return None;
    }
    let mut meta = ExecutionMeta::fresh("t");
    meta.status = serde_json::from_value::<ExecutionStatus>(thread["status"].clone()).unwrap();
    meta.interrupt_reason = thread["interrupt_reason"].as_str().map(str::to_owned);
    meta.current_node = thread["current_node"].as_str().unwrap_or("B").to_owned();
    let pending = &thread["pending"];
    let mut open = Vec::new();
    if !pending.is_null() {
        let mut question =
            Question::new(QuestionKind::Input, "G", pending["key"].as_str().unwrap().to_owned(), "input_required");
        question.id = pending["id"].as_str().unwrap().to_owned();
        question.response_schema = Some(pending["response_schema"].clone()).filter(|schema| !schema.is_null());
        open.push(question);
        "G".clone_into(&mut meta.current_node);
    }
    let mut view = view(graph, meta, open);
    view.active_run = (thread["status"] == "running").then(RunId::new);
    Some(view)
}

fn request(body: &Json) -> RunInput {
    let words = body["messages"].as_array().into_iter().flatten();
    RunInput {
        messages: words
            .map(|words| Message::text(crate::domain::Role::User, words.as_str().unwrap().trim_start_matches("user:")))
            .collect(),
        resume: body.get("resume").cloned(),
        interrupt_id: body["interrupt_id"].as_str().map(str::to_owned),
        ..RunInput::default()
    }
}

/// The wire's status of a refusal.
fn status(refusal: &Refusal) -> (u16, &'static str) {
    match refusal {
        Refusal::NotThisInterrupt(_) | Refusal::Paused { .. } => (409, "INTERRUPT_001"),
        Refusal::AnswerSchema(_) => (422, "INTERRUPT_002"),
        Refusal::NothingToResume | Refusal::NoSuchCall(_) | Refusal::ResultTwice => (422, ""),
        other => panic!("no case is refused so: {other:?}"),
    }
}

#[test]
fn interrupt_resume() {
    let graph = graph();
    let versions = [(graph.version.clone(), Arc::clone(&graph.manifest))];
    for case in here("interrupt_resume.json") {
        let (id, expected) = (case["id"].as_str().unwrap(), &case["expected"]);
        let view = thread(&graph, &case);
        let admit =
            |view: Option<&ThreadView>, body: &Json| admit(&versions, &ThreadId::from("t"), view, &request(body));

        if let Some(sequence) = case["input"]["request"]["sequence"].as_array() {
            let first = admit(view.as_ref(), &sequence[0]).unwrap();
            let mut busy = view.unwrap();
            busy.open.clear();
            busy.meta = first.meta;
            let second = admit(Some(&busy), &sequence[1]).unwrap_err();
            assert_eq!(status(&second), (409, "INTERRUPT_001"), "{id}");
            continue;
        }
        let admitted = admit(view.as_ref(), &case["input"]["request"]);

        match expected["outcome"].as_str().unwrap() {
            "accept" => {
                let admission = admitted.unwrap_or_else(|refusal| panic!("{id}: {refusal}"));
                if let Some(nodes) = expected["nodes_run"].as_array() {
                    assert_eq!(admission.start, Start::Node(nodes[0].as_str().unwrap().to_owned()), "{id}");
                } else {
                    assert_eq!(admission.start, Start::Node("G".to_owned()), "{id}");
                    let answer = super::admission::answer_to(&admission.meta, "node:G:0").unwrap();
                    assert_eq!(answer, &case["input"]["request"]["resume"], "{id}");
                }
                let gains = expected["context_gains"].as_array().into_iter().flatten().count();
                let sent = case["input"]["request"]["messages"].as_array().into_iter().flatten().count();
                assert_eq!(admission.messages.len(), gains.max(sent), "{id}");
            }
            _ => {
                let (http, code) = status(&admitted.unwrap_err());
                assert_eq!(u64::from(http), expected["http"].as_u64().unwrap(), "{id}");
                if let Some(core) = expected["core_code"].as_str().or(expected["code"].as_str()) {
                    assert_eq!(code, core, "{id}");
                }
            }
        }
    }
}

/// The thread of a case about messages: what its context waits for, as the tools node would ask.
fn waiting(graph: &Graph, context: &Json) -> ThreadView {
    let messages: Vec<Message> = context.as_array().into_iter().flatten().map(message).collect();
    let mut meta = ExecutionMeta::fresh("t");
    let state = ThreadState {
        context: messages,
        context_summary: None,
        execution_meta: meta.clone(),
        fields: Default::default(),
    };
    let planned = plan(graph.tools["tools"].spec(), "tools", &state).calls;
    let open: Vec<Question> = planned
        .into_iter()
        .filter_map(|planned| match planned {
            Planned::Ask(question) => Some(*question),
            _ => None,
        })
        .collect();
    if !open.is_empty() {
        meta = super::engine::waiting(meta, "tools", &open);
    }
    view(graph, meta, open)
}

fn message(value: &Json) -> Message {
    let mut value = value.clone();
    for (name, default) in [("content", json!([])), ("metadata", json!({}))] {
        if value.get(name).is_none() {
            value[name] = default;
        }
    }
    serde_json::from_value(value).unwrap()
}

/// Whether the rules of the door and of the thread take `body`.
fn takes(graph: &Graph, context: &Json, body: &Json) -> Result<Start, u16> {
    let limits = Limits::default();
    let fill = Fill { new_id: &|| IdKind::String.message_id(), now: 0.0 };
    let locs = InputLocs { messages: &["body".into(), "messages".into()], state: &["body".into(), "state".into()] };
    let resume = body.get("resume").cloned();
    let input = run_input(body.get("messages"), None, resume.is_some(), &locs, &limits, &fill).map_err(|_| 422u16)?;
    if resume.is_some() {
        return Ok(Start::Node("G".to_owned())); // Whether anything is asked is another file's question.
    }
    let versions = [(graph.version.clone(), Arc::clone(&graph.manifest))];
    let view = (!context.is_null()).then(|| waiting(graph, context));
    let input = RunInput { messages: input.messages, ..RunInput::default() };
    let admission = admit(&versions, &ThreadId::from("t"), view.as_ref(), &input);
    admission.map(|admission| admission.start).map_err(|refusal| status(&refusal).0)
}

#[test]
fn client_messages_and_results_of_client_tools() {
    let graph = graph();
    for case in here("client_messages.json").chain(here("remote_tool_results.json")) {
        let (id, input) = (case["id"].as_str().unwrap(), &case["input"]);
        let (context, body) = match (input["thread_context"].as_str(), &input["body"]) {
            (None, body) => (input["thread_context"].clone(), body.clone()),
            (Some(_), words) => described(words.as_str().unwrap()),
        };

        let taken = takes(&graph, &context, &body);

        let expected = &case["expected"];
        assert_eq!(taken.is_ok(), expected["accept"].as_bool().unwrap(), "{id}: {taken:?}");
        if let (Err(found), Some(http)) = (&taken, expected["http"].as_u64()) {
            assert_eq!(u64::from(*found), http, "{id}");
        }
        if expected["run_continues"] == false {
            assert_eq!(taken, Ok(Start::StillPaused), "{id}");
        }
    }
}

/// Cases that say in words what is sent to a thread that waits for results.
fn described(body: &str) -> (Json, Json) {
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "geo", "arguments": "{}"}});
    let asked = |calls: Vec<Json>| json!([{"message_id": "a1", "role": "assistant", "content": [{"type": "text", "text": ""}], "tools_calls": calls}]);
    match body {
        "user text only" => (
            asked(vec![call("c1")]),
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello?"}]}]}),
        ),
        "c1 only" => (
            asked(vec![call("c1"), call("c2")]),
            json!({"messages": [{"role": "tool", "content": [{"type": "tool_result", "call_id": "c1", "output": "v"}]}]}),
        ),
        other => panic!("nobody knows the case '{other}'"),
    }
}

/// What is checked elsewhere exists in the files: the table does not outlive them.
#[test]
fn nothing_is_left_out_that_is_not_there() {
    let known: Vec<Json> = ["interrupt_resume.json", "client_messages.json", "remote_tool_results.json"]
        .into_iter()
        .flat_map(cases)
        .map(|case| case["id"].clone())
        .collect();

    for (id, why) in ELSEWHERE {
        assert!(known.contains(&json!(id)), "{id} ({why}) is not in the vectors");
    }
}
