//! The lines of `POST /v1/graph/stream`: a pure function of how a run began and what happened.
//!
//! The order is the peer's, its repeated `state` line included; clients read it that way.

use serde::Serialize;
use threadgate_shared::domain::meta::{END, START};
use threadgate_shared::domain::{ExecutionMeta, ExecutionStatus, Json, JsonMap, Message, RunStatus, ThreadState};
use threadgate_shared::events::{Event, EventBody};
use threadgate_shared::graph::engine::RunError;
use threadgate_shared::graph::ids::thread_name;

use super::run_request::Granularity;
use super::state;
use crate::follow::Ended;

const INTERRUPTED: &str = "Graph execution interrupted before node execution";
const SANITISED: &str = "An error occurred executing the graph.";

/// What all chunks of a stream have in common.
#[derive(Debug, Clone)]
pub struct Common {
    /// Which chunks are sent.
    pub granularity: Granularity,
    /// The thread.
    pub thread_id: String,
    /// The client's name for the run, or ours.
    pub run_id: String,
    /// Whether this run created the thread.
    pub is_new_thread: bool,
    /// The run's step limit.
    pub max_steps: i32,
    /// Whether texts of failures stay inside.
    pub production: bool,
    /// How a new thread is named.
    pub thread_name: Option<String>,
    /// When the stream began, in UNIX seconds.
    pub started_at: f64,
}

/// How the run begins.
#[derive(Debug, Clone, PartialEq)]
pub enum Beginning {
    /// At `__start__`, which the admission went through.
    AtStart,
    /// At the thread's current node: it goes on there, or the client chose it.
    AtNode,
    /// There is nothing to run.
    Nowhere,
}

/// Writes the lines.
pub struct ChunkWriter {
    common: Common,
    /// The thread's state as the client has seen it.
    state: ThreadState,
    lines: Vec<u8>,
    now: f64,
    /// The node and step that were told to have started.
    announced: Option<(String, i64)>,
    /// The last node that finished.
    finished: Option<String>,
    /// Usages of the run's own messages: input, output, reasoning.
    tokens: [i64; 3],
}

#[derive(Serialize)]
struct Chunk<'a> {
    event: &'static str,
    message: Option<&'a Message>,
    state: Option<Json>,
    data: Option<Json>,
    thread_id: Option<&'a str>,
    run_id: Option<&'a str>,
    metadata: Json,
    timestamp: f64,
}

impl ChunkWriter {
    /// A writer for a run that begins on `state`: the thread's after the input was accepted.
    #[must_use]
    pub fn new(common: Common, state: ThreadState) -> Self {
        let now = common.started_at;
        Self { common, state, lines: Vec::new(), now, announced: None, finished: None, tokens: [0; 3] }
    }

    /// Takes the lines written so far.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.lines)
    }

    /// The input and the place where the run begins.
    pub fn begin(&mut self, input: &[Message], beginning: &Beginning) {
        for message in input {
            self.message(message, serde_json::json!({"status": "invoking_graph", "reason": "initial human message"}));
        }
        let meta = self.state.execution_meta.clone();
        let (node, step) = match beginning {
            Beginning::AtStart => (START, 0),
            Beginning::AtNode | Beginning::Nowhere => (meta.current_node.as_str(), meta.step),
        };
        self.update(serde_json::json!({"status": "invoking_graph", "node": node, "step": step, "max_steps": self.common.max_steps}));
        if *beginning == Beginning::AtStart {
            self.start_node(START, 0);
            self.node_returned(START, &[]);
            self.states_at(START, 0);
            self.moved_on(START, &meta.current_node, meta.step);
            self.finished = None;
        }
        if meta.status == ExecutionStatus::InterruptedBefore {
            self.pausing(&meta, INTERRUPTED);
        }
    }

    /// What happened.
    pub fn event(&mut self, event: &Event) {
        self.now = event.at;
        match &event.body {
            EventBody::NodeStarted { node, step, .. } => self.start_node(node, *step),
            EventBody::Delta { node, message } => self.message(message, produced_by(node)),
            EventBody::Custom { node, value } => {
                self.update(serde_json::json!({"status": "custom", "node": node, "value": value}));
            }
            EventBody::NodeFinished { node, messages, removed, fields, meta, .. } => {
                self.state.context.retain(|message| !removed.contains(&message.message_id));
                self.state.context.extend(messages.iter().cloned());
                put_fields(&mut self.state, fields);
                self.finish_node(node, messages, meta);
            }
            EventBody::RunEnded { status, meta, error } => {
                self.end(&Ended { status: *status, meta: (**meta).clone(), error: error.clone() });
            }
        }
    }

    /// The run cannot be followed to its end: the failure's short form.
    pub fn fail(&mut self, reason: &str) {
        let reason = if self.common.production { SANITISED } else { reason };
        self.push("error", None, None, Some(serde_json::json!({"reason": reason})), false, JsonMap::new());
    }

    fn start_node(&mut self, node: &str, step: i64) {
        let at = (node.to_owned(), step);
        if self.announced.as_ref() == Some(&at) {
            return; // Another attempt at the same step.
        }
        self.announced = Some(at);
        self.update(self.at_node("node_invoked", node, step));
        self.update(serde_json::json!({"status": "invoking_node", "tool_name": node, "node": node}));
    }

    fn finish_node(&mut self, node: &str, messages: &[Message], meta: &ExecutionMeta) {
        let step = self.state.execution_meta.step;
        self.start_node(node, step); // Where the start was not heard of.
        if keeps_nothing(meta) {
            self.state.execution_meta = meta.clone();
            return;
        }
        let reason = meta.interrupt_reason.as_deref().unwrap_or_default();
        if reason == STOP {
            // The request stands in every state from here on; stored is only where to go on.
            STOP.clone_into(&mut self.state.execution_meta.stop_current_execution);
        }
        self.node_returned(node, messages);
        self.states_at(node, step);
        match meta.status {
            ExecutionStatus::Running => self.moved_on(node, &meta.current_node, meta.step),
            ExecutionStatus::Completed => self.moved_on(node, END, meta.step),
            ExecutionStatus::Error => {}
            ExecutionStatus::InterruptedAfter if reason != STOP => {
                let mut data = self.at_node("node_invoked", node, step);
                data["reason"] = INTERRUPTED.into();
                self.update(data);
                let data = self.at_node("node_invoked", &meta.current_node, meta.step);
                self.update_with_state(data, meta.clone());
            }
            ExecutionStatus::InterruptedBefore | ExecutionStatus::InterruptedAfter => {
                let next = meta.interrupted_node.clone().unwrap_or_default();
                self.moved_on(node, &next, meta.step);
                let why = if reason == STOP { STOPPED } else { INTERRUPTED };
                self.pausing(meta, why);
            }
        }
        self.state.execution_meta = meta.clone();
    }

    /// The node's function returned, with its messages.
    fn node_returned(&mut self, node: &str, messages: &[Message]) {
        self.update(serde_json::json!({"status": "node_invoked", "tool_name": node, "node": node}));
        for message in messages {
            self.count(message);
            self.message(message, produced_by(node));
        }
        self.finished = Some(node.to_owned());
    }

    /// The state after a node, while it is still the current one; twice, as the peer does.
    fn states_at(&mut self, node: &str, step: i64) {
        let meta = self.state.execution_meta.clone().running_at(node, step);
        let mut metadata = JsonMap::new();
        metadata.insert("node".to_owned(), node.into());
        metadata.insert("step".to_owned(), step.into());
        for _ in 0..2 {
            let shown = self.shows("state").then(|| self.state_with(meta.clone()));
            self.push("state", None, shown, None, true, metadata.clone());
        }
    }

    /// Another node is next.
    fn moved_on(&mut self, node: &str, next: &str, step: i64) {
        let data = self.at_node("node_invoked", next, step);
        let meta = self.state.execution_meta.clone().running_at(node, step);
        self.update_with_state(data, meta);
    }

    /// The run does not go on into the node it is at.
    fn pausing(&mut self, meta: &ExecutionMeta, reason: &str) {
        let node = meta.interrupted_node.as_deref().unwrap_or(&meta.current_node);
        let mut data = self.at_node("invoking_node", node, meta.step);
        data["reason"] = reason.into();
        self.update(data);
    }

    fn end(&mut self, ended: &Ended) {
        let before = std::mem::replace(&mut self.state.execution_meta, ended.meta.clone());
        let meta = &ended.meta;
        match ended.status {
            RunStatus::Failed => return self.failed(ended.error.as_ref()),
            RunStatus::Completed => {
                let mut data = self.at_node("graph_invoked", END, meta.step);
                data["is_context_trimmed"] = false.into();
                data["reason"] = "Graph execution completed successfully".into();
                self.update_with_state(data, meta.clone());
            }
            RunStatus::Stopped if before.interrupt_reason.as_deref() != Some(STOP) => {
                self.pausing(meta, STOPPED);
            }
            _ => {}
        }
        if let Some(interrupt) = open_question(ended) {
            let mut data = self.at_node("interrupted", &meta.current_node, meta.step);
            data["reason"] = "Graph execution paused by interrupt()".into();
            data["interrupt"] = interrupt;
            self.update(data);
        }
        self.summary(ended.status);
        self.name_thread();
    }

    fn failed(&mut self, error: Option<&RunError>) {
        let (code, text) = error.map_or(("GRAPH_000", "the run failed"), |error| (&error.code, &error.message));
        let reason = match code {
            "RECURSION_001" => text.to_owned(),
            _ => format!("[{code}] {text}"),
        };
        let reason = if self.common.production { SANITISED.to_owned() } else { reason };
        if !code.starts_with("STORAGE_") {
            let meta = self.state.execution_meta.clone();
            let node = error.and_then(|error| error.node.clone()).unwrap_or_else(|| meta.current_node.clone());
            if code == "RECURSION_001" {
                self.moved_on(&meta.current_node, &node, meta.step);
            }
            let mut data = self.at_node("invoked_graph", &node, meta.step);
            data["reason"] = reason.clone().into();
            let state = self.state_with(meta);
            self.push("error", None, Some(state), Some(data), true, JsonMap::new());
        }
        self.push("error", None, None, Some(serde_json::json!({"reason": reason})), false, JsonMap::new());
    }

    /// The closing summary.
    fn summary(&mut self, status: RunStatus) {
        let is_interrupted = status != RunStatus::Completed;
        let [input, output, reasoning] = if is_interrupted { [0; 3] } else { self.tokens };
        let data = serde_json::json!({
            "status": "graph_invoked",
            "reason": "Graph execution finished",
            "time_taken": (self.now - self.common.started_at).max(0.0),
            "is_interrupted": is_interrupted,
            "total_messages": self.state.context.len(),
            "total_input_tokens": input,
            "total_output_tokens": output,
            "total_reasoning_tokens": reasoning,
            "total_tokens": input + output,
        });
        let mut meta = self.state.execution_meta.clone();
        if status == RunStatus::Stopped {
            // Here the peer shows the node that finished and the request; stored is where to go on.
            if let Some(node) = &self.finished {
                meta.current_node.clone_from(node);
            }
            STOP.clone_into(&mut meta.stop_current_execution);
        }
        self.update_with_state(data, meta);
    }

    /// The name a new thread got, whatever else is shown.
    fn name_thread(&mut self) {
        let Some(template) = self.common.thread_name.clone().filter(|_| self.common.is_new_thread) else { return };
        let mut metadata = JsonMap::new();
        metadata.insert("thread_name".to_owned(), thread_name(&template, self.state.context.len()).into());
        let data = Some(serde_json::json!({"status": "completed"}));
        self.write("updates", None, None, data, false, metadata);
    }

    fn at_node(&self, status: &str, node: &str, step: i64) -> Json {
        serde_json::json!({"status": status, "node": node, "step": step, "max_steps": self.common.max_steps})
    }

    fn message(&mut self, message: &Message, metadata: Json) {
        let Json::Object(metadata) = metadata else { return };
        self.push("message", Some(message), None, None, true, metadata);
    }

    fn update(&mut self, data: Json) {
        self.push("updates", None, None, Some(data), true, JsonMap::new());
    }

    fn update_with_state(&mut self, data: Json, meta: ExecutionMeta) {
        let shown = self.shows("updates").then(|| self.state_with(meta));
        self.push("updates", None, shown, Some(data), true, JsonMap::new());
    }

    fn state_with(&self, meta: ExecutionMeta) -> Json {
        state::with_meta(&self.state, &meta, self.common.production)
    }

    /// Whether the client asked for chunks of this kind.
    fn shows(&self, event: &str) -> bool {
        match self.common.granularity {
            Granularity::Full => true,
            Granularity::Partial => event != "updates",
            Granularity::Low => event == "message" || event == "error",
        }
    }

    fn push(
        &mut self,
        event: &'static str,
        message: Option<&Message>,
        state: Option<Json>,
        data: Option<Json>,
        names_run: bool,
        metadata: JsonMap,
    ) {
        if self.shows(event) {
            self.write(event, message, state, data, names_run, metadata);
        }
    }

    fn write(
        &mut self,
        event: &'static str,
        message: Option<&Message>,
        state: Option<Json>,
        data: Option<Json>,
        names_run: bool,
        mut metadata: JsonMap,
    ) {
        metadata.insert("is_new_thread".to_owned(), self.common.is_new_thread.into());
        metadata.insert("thread_id".to_owned(), self.common.thread_id.as_str().into());
        let chunk = Chunk {
            event,
            message,
            state,
            data,
            thread_id: names_run.then_some(&*self.common.thread_id),
            run_id: names_run.then_some(&*self.common.run_id),
            metadata: Json::Object(metadata),
            timestamp: self.now,
        };
        serde_json::to_writer(&mut self.lines, &chunk).expect("our own types have string keys and finite numbers");
        self.lines.push(b'\n');
    }

    fn count(&mut self, message: &Message) {
        let Some(usages) = &message.usages else { return };
        for (total, name) in self.tokens.iter_mut().zip(["prompt_tokens", "completion_tokens", "reasoning_tokens"]) {
            *total += usages[name].as_i64().unwrap_or_default();
        }
    }
}

/// The word for a stop, as a reason and as a request.
const STOP: &str = "stop_requested";
const STOPPED: &str = "Graph execution stopped by request";

/// A step whose commit kept nothing of its node: it failed, or asks.
fn keeps_nothing(meta: &ExecutionMeta) -> bool {
    let limit_reached = || {
        let error = meta.internal_data.get("error").and_then(Json::as_str);
        error.is_some_and(|text| text.starts_with("[RECURSION_001]"))
    };
    match meta.status {
        ExecutionStatus::Error => !limit_reached(),
        _ => meta.interrupt_reason.as_deref() == Some("interrupt"),
    }
}

fn open_question(ended: &Ended) -> Option<Json> {
    let asks = ended.status == RunStatus::Interrupted && ended.meta.interrupt_reason.as_deref() == Some("interrupt");
    let data = ended.meta.interrupt_data.as_ref().filter(|_| asks)?;
    data.get("interrupt").cloned()
}

fn produced_by(node: &str) -> Json {
    serde_json::json!({"node": node, "function_name": node})
}

fn put_fields(state: &mut ThreadState, fields: &JsonMap) {
    for (name, value) in fields {
        if name == "context_summary" {
            state.context_summary = Some(value.clone());
        } else {
            state.fields.insert(name.clone(), value.clone());
        }
    }
}

/// The one line of a stream whose run was not accepted.
#[must_use]
pub fn refusal(thread_id: &str, is_new_thread: bool, reason: &str, now: f64) -> Vec<u8> {
    let chunk = Chunk {
        event: "error",
        message: None,
        state: None,
        data: Some(serde_json::json!({"reason": reason})),
        thread_id: None,
        run_id: None,
        metadata: serde_json::json!({"is_new_thread": is_new_thread, "thread_id": thread_id}),
        timestamp: now,
    };
    let mut line = serde_json::to_vec(&chunk).expect("our own types have string keys and finite numbers");
    line.push(b'\n');
    line
}
