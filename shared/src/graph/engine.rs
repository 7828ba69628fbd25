//! What follows a node: the one place that decides how a run goes on. Streaming and invoking are
//! views of it.

use std::collections::HashSet;

use super::node::{NodeError, Outcome, Patch};
use super::{Graph, GraphError, IdKind};
use crate::domain::meta::{END, ExecutionMeta, ExecutionStatus};
use crate::domain::{GateAnswer, Json, JsonMap, Message, MessageId, Question, QuestionKind, ThreadState};

/// Where the run is.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The node that ran.
    pub node: &'a str,
    /// Its place in the run, from 1 (0 = `__start__`).
    pub seq: i32,
    /// How many steps the run may take, `__start__` included: N allows N − 1 nodes.
    pub step_limit: i32,
}

/// How the run goes on.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// Another node, a step of its own.
    Node(String),
    /// The graph's end.
    Completed,
    /// It pauses: these questions, in the order of the calls they are about, must be answered first;
    /// none where the graph's own lists ask for the pause.
    Interrupted(Vec<Question>),
    /// For good; the thread stays usable.
    Failed(RunError),
}

impl Next {
    /// The questions of a pause.
    #[must_use]
    pub fn questions(&self) -> &[Question] {
        match self {
            Self::Interrupted(questions) => questions,
            _ => &[],
        }
    }
}

/// Why a run failed.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RunError {
    /// The wire's code: `NODE_001`, `RECURSION_001`, `GRAPH_007`, `worker_crash`, …
    pub code: String,
    /// A sentence for the graph's author.
    pub message: String,
    /// The node it happened in.
    pub node: Option<String>,
    /// Whether the same input could succeed another time.
    pub transient: bool,
}

impl RunError {
    /// The step at `node` started `attempts` times and lost its worker each time.
    #[must_use]
    pub fn worker_crash(node: &str, attempts: i16) -> Self {
        let message = format!(
            "Error in node '{node}': its worker was lost {attempts} times in a row; look into what the node does to its process, then start a new run"
        );
        Self { code: "worker_crash".to_owned(), message, node: Some(node.to_owned()), transient: false }
    }

    /// An active run without a step that could go on, which no rule allows.
    #[must_use]
    pub fn lost_step() -> Self {
        let message = "the run had no step left to go on with and was closed; start a new run".to_owned();
        Self { code: "lost_step".to_owned(), message, node: None, transient: false }
    }
}

/// What one step commits.
#[derive(Debug, Clone, PartialEq)]
pub struct Advance {
    /// Messages that are new to the context, in order.
    pub messages: Vec<Message>,
    /// Ids of messages that leave the context.
    pub removed: Vec<MessageId>,
    /// Fields whose value changed.
    pub fields: JsonMap,
    /// The place, unless a stop is seen.
    pub meta: ExecutionMeta,
    /// The place if the commit sees a stop.
    pub stopped_meta: ExecutionMeta,
    /// How the run goes on, unless a stop is seen.
    pub next: Next,
}

/// Brings `state` to what it is after `advance`, at a cost that follows what changes.
pub fn apply(state: &mut ThreadState, advance: &Advance) {
    merge(state, &advance.messages, &advance.removed, &advance.fields);
    state.execution_meta = advance.meta.clone();
}

/// Decides what follows from `result`, which `place.node` returned on `state`.
#[must_use]
pub fn advance(graph: &Graph, place: Place<'_>, state: &ThreadState, result: Result<Outcome, NodeError>) -> Advance {
    match result {
        Ok(outcome) => settle(graph, place, state, outcome).unwrap_or_else(|error| failed(state, place.node, error)),
        Err(NodeError::Interrupt { position, question }) => {
            let question = question.asked_at(place.node, format!("node:{}:{position}", place.node));
            let outcome = Outcome { questions: vec![question], ..Outcome::default() };
            settle(graph, place, state, outcome).unwrap_or_else(|error| failed(state, place.node, error))
        }
        Err(NodeError::Failed { code, message, retryable }) => {
            let message = format!("Error in node '{}': {message}", place.node);
            failed(
                state,
                place.node,
                RunError { code, message, node: Some(place.node.to_owned()), transient: retryable },
            )
        }
    }
}

fn settle(graph: &Graph, place: Place<'_>, state: &ThreadState, outcome: Outcome) -> Result<Advance, RunError> {
    let manifest = &graph.manifest;
    let node = place.node;
    let update = outcome.command.update;
    let fields = changed_fields(graph, node, state, update.fields)?;
    let removed = in_context(state, update.remove);
    let messages = new_messages(manifest.ids, state, &removed, update.messages);
    if !outcome.questions.is_empty() {
        return asked(node, state, Patch { messages, remove: removed, fields }, outcome.questions);
    }
    let target = match outcome.command.goto {
        Some(target) => graph.checked_target(node, target),
        // The state after the node is made only for a condition that looks at it.
        None if graph.is_asked_after(node) => {
            let mut after = state.clone();
            merge(&mut after, &messages, &removed, &fields);
            graph.route(node, &after)
        }
        None => graph.route(node, state),
    }
    .map_err(|error| graph_failure(node, &error))?;

    let step = state.execution_meta.step + 1;
    let mut meta = state.execution_meta.clone();
    meta.internal_data.remove("interrupt_resume");
    let stopped_meta = stopped(meta.clone(), &target, step);
    let pauses_after = manifest.interrupt_after.iter().any(|name| name == node);
    let pauses_before = manifest.interrupt_before.contains(&target);
    let (meta, next) = if pauses_after {
        let pause = paused(meta, ExecutionStatus::InterruptedAfter, node, &target, step);
        (pause, Next::Interrupted(Vec::new()))
    } else if target == END {
        (completed(meta, node, step), Next::Completed)
    } else if place.seq + 1 >= place.step_limit {
        let message = format!("Graph execution exceeded recursion limit: {}", place.step_limit);
        let error = RunError { code: "RECURSION_001".to_owned(), message, node: Some(target), transient: false };
        // The output is kept; the error names the node that did not run, and the next run starts over.
        (errored(meta.running_at(node, step), &error), Next::Failed(error))
    } else if pauses_before {
        let pause = paused(meta, ExecutionStatus::InterruptedBefore, &target, &target, step);
        (pause, Next::Interrupted(Vec::new()))
    } else {
        (meta.running_at(&target, step), Next::Node(target))
    };
    Ok(Advance { messages, removed, fields, meta, stopped_meta, next })
}

/// What a step commits when its run fails: nothing but the failure.
#[must_use]
pub fn failed(state: &ThreadState, node: &str, error: RunError) -> Advance {
    let mut meta = state.execution_meta.clone();
    node.clone_into(&mut meta.current_node);
    let meta = errored(meta, &error);
    Advance {
        messages: Vec::new(),
        removed: Vec::new(),
        fields: JsonMap::new(),
        stopped_meta: meta.clone(),
        meta,
        next: Next::Failed(error),
    }
}

/// A pause inside `node`, which is not done: its answers stay, and it runs again with all of them.
fn asked(node: &str, state: &ThreadState, update: Patch, questions: Vec<Question>) -> Result<Advance, RunError> {
    let too_many = (questions.len() > QUESTIONS_MAX)
        .then(|| format!("it asked {} questions at once; at most {QUESTIONS_MAX} are taken", questions.len()));
    if let Some(why) = too_many.or_else(|| questions.iter().find_map(question_error)) {
        let message = format!("Error in node '{node}': {why}");
        return Err(RunError { code: "NODE_001".to_owned(), message, node: Some(node.to_owned()), transient: false });
    }
    let meta = state.execution_meta.clone();
    let step = meta.step;
    Ok(Advance {
        messages: update.messages,
        removed: update.remove,
        fields: update.fields,
        stopped_meta: stopped(meta.clone(), node, step),
        meta: waiting(meta, node, questions.iter()),
        next: Next::Interrupted(questions),
    })
}

/// Questions of one pause at most.
pub const QUESTIONS_MAX: usize = 256;

/// Why nobody could ever answer `question`, or why its default would never count.
fn question_error(question: &Question) -> Option<String> {
    let schema = question.response_schema.as_ref().filter(|schema| !schema.is_null());
    let schema = match schema.map(jsonschema::validator_for) {
        None => None,
        Some(Ok(schema)) => Some(schema),
        Some(Err(error)) => return Some(format!("its question's response_schema is no JSON Schema: {error}")),
    };
    let default = question.on_expiry.as_ref()?;
    match question.kind {
        QuestionKind::Input => {
            let refused = schema.and_then(|schema| schema.validate(default).err().map(|error| error.to_string()))?;
            Some(format!("its question's on_expiry does not satisfy response_schema: {refused}"))
        }
        QuestionKind::Gate => {
            GateAnswer::parse(default).err().map(|error| format!("its gate's on_expiry is no decision: {error}"))
        }
        QuestionKind::Remote | QuestionKind::Outcome => None,
    }
}

/// The place while the questions `open` of `node`, in the order of the calls, wait for answers. It
/// shows the first one that a person must answer; where only clients' tools are awaited, it says so.
#[must_use]
pub fn waiting<'a>(mut meta: ExecutionMeta, node: &str, open: impl IntoIterator<Item = &'a Question>) -> ExecutionMeta {
    let shown = open.into_iter().find(|question| question.kind != QuestionKind::Remote);
    let (status, reason) = match shown {
        Some(_) => (ExecutionStatus::InterruptedBefore, "interrupt"),
        None => (ExecutionStatus::InterruptedAfter, "remote_tool_call"),
    };
    meta.status = status;
    node.clone_into(&mut meta.current_node);
    meta.interrupted_node = Some(node.to_owned());
    meta.interrupt_reason = Some(reason.to_owned());
    meta.interrupt_data = shown.map(|question| serde_json::json!({ "interrupt": question.wire() }));
    meta
}

/// A completed thread keeps the last node as its current one.
#[must_use]
pub fn completed(mut meta: ExecutionMeta, node: &str, step: i64) -> ExecutionMeta {
    meta = meta.running_at(node, step);
    meta.status = ExecutionStatus::Completed;
    meta
}

/// The place after a pause by the graph's lists: `about` is the node the pause is about, `target`
/// the one the next run starts at.
#[must_use]
pub fn paused(meta: ExecutionMeta, status: ExecutionStatus, about: &str, target: &str, step: i64) -> ExecutionMeta {
    let word = if status == ExecutionStatus::InterruptedBefore { "before" } else { "after" };
    let mut meta = meta.running_at(target, step);
    meta.status = status;
    meta.interrupted_node = Some(about.to_owned());
    meta.interrupt_reason = Some(format!("interrupt_{word}: {about}"));
    meta
}

/// The place after a stop: `target` is the node that did not run.
#[must_use]
pub fn stopped(meta: ExecutionMeta, target: &str, step: i64) -> ExecutionMeta {
    let mut meta = meta.running_at(target, step);
    meta.status = ExecutionStatus::InterruptedAfter;
    meta.interrupted_node = Some(target.to_owned());
    meta.interrupt_reason = Some("stop_requested".to_owned());
    meta.interrupt_data = Some(serde_json::json!({"source": "stop", "info": "requested via is_stopped_requested"}));
    meta
}

/// The place after a failure.
#[must_use]
pub fn errored(mut meta: ExecutionMeta, error: &RunError) -> ExecutionMeta {
    meta.status = ExecutionStatus::Error;
    meta.internal_data.insert("error".to_owned(), Json::String(format!("[{}] {}", error.code, error.message)));
    meta
}

fn graph_failure(node: &str, error: &GraphError) -> RunError {
    RunError {
        code: error.code.to_owned(),
        message: error.message.clone(),
        node: Some(node.to_owned()),
        transient: false,
    }
}

fn changed_fields(graph: &Graph, node: &str, state: &ThreadState, fields: JsonMap) -> Result<JsonMap, RunError> {
    let declared =
        |name: &str| name == "context_summary" || graph.manifest.fields.iter().any(|field| field.name == name);
    if let Some(name) = fields.keys().find(|name| !declared(name)) {
        let message = format!(
            "Error in node '{node}': it wrote the field '{name}', which the graph's state does not have; declare it, or return another"
        );
        return Err(RunError { code: "NODE_001".to_owned(), message, node: Some(node.to_owned()), transient: false });
    }
    let old = |name: &str| match name {
        "context_summary" => Some(state.context_summary.as_ref().unwrap_or(&Json::Null)),
        name => state.fields.get(name),
    };
    Ok(fields.into_iter().filter(|(name, value)| old(name) != Some(value)).collect())
}

/// Those of `ids` that are in the context.
fn in_context(state: &ThreadState, mut ids: Vec<MessageId>) -> Vec<MessageId> {
    if !ids.is_empty() {
        let known: HashSet<&MessageId> = state.context.iter().map(|message| &message.message_id).collect();
        ids.retain(|id| known.contains(id));
    }
    ids
}

/// Messages whose id is not in the context yet (or leaves it in this step), pieces left out; of two
/// with one id the first counts. New ones get an id of the graph's kind and a time.
fn new_messages(ids: IdKind, state: &ThreadState, removed: &[MessageId], messages: Vec<Message>) -> Vec<Message> {
    if messages.is_empty() {
        return messages;
    }
    let said: HashSet<&MessageId> = messages.iter().map(|message| &message.message_id).collect();
    let known = state.context.iter().map(|message| &message.message_id);
    let mut seen: HashSet<MessageId> = known.filter(|id| said.contains(id) && !removed.contains(id)).cloned().collect();
    let mut new: Vec<Message> =
        messages.into_iter().filter(|message| !message.delta && seen.insert(message.message_id.clone())).collect();
    new.iter_mut().for_each(|message| ids.complete(message));
    new
}

fn merge(state: &mut ThreadState, messages: &[Message], removed: &[MessageId], fields: &JsonMap) {
    if !removed.is_empty() {
        state.context.retain(|message| !removed.contains(&message.message_id));
    }
    state.context.extend(messages.iter().cloned());
    for (name, value) in fields {
        if name == "context_summary" {
            state.context_summary = Some(value.clone());
        } else {
            state.fields.insert(name.clone(), value.clone());
        }
    }
}

impl Graph {
    /// Whether a condition is asked after `source`.
    fn is_asked_after(&self, source: &str) -> bool {
        self.conditions.keys().any(|index| self.manifest.edges.get(*index).is_some_and(|edge| edge.source == source))
    }

    /// `target`, if a run may go there from `source`.
    ///
    /// # Errors
    /// `GRAPH_007` names both ends.
    pub fn checked_target(&self, source: &str, target: String) -> Result<String, GraphError> {
        if self.manifest.is_place(&target) {
            return Ok(target);
        }
        Err(GraphError {
            code: "GRAPH_007",
            message: format!(
                "node '{source}' leads to '{target}', which is neither a node nor {END}; add the node or correct the name"
            ),
        })
    }

    /// Where the edges lead from `source`: the first conditional edge that matches, else the first
    /// static one, else the end. Each condition is asked once.
    ///
    /// # Errors
    /// `GRAPH_ROUTING_001` if a condition failed, `GRAPH_007` if the target does not exist.
    pub fn route(&self, source: &str, state: &ThreadState) -> Result<String, GraphError> {
        let edges = self.manifest.edges.iter().enumerate().filter(|(_, edge)| edge.source == source);
        let mut first_static = None;
        for (index, edge) in edges {
            let Some(condition) = self.conditions.get(&index) else {
                first_static = first_static.or(edge.target.clone());
                continue;
            };
            let value = condition(state).map_err(|error| GraphError {
                code: "GRAPH_ROUTING_001",
                message: format!("the condition on the edge from '{source}' failed: {error}"),
            })?;
            let target = match (&edge.mapping, value) {
                (Some(mapping), value) => {
                    mapping.iter().find(|(key, _)| *key == value).map(|(_, target)| target.clone())
                }
                (None, Json::String(target)) => Some(target),
                (None, _) => None,
            };
            if let Some(target) = target {
                return self.checked_target(source, target);
            }
        }
        self.checked_target(source, first_static.unwrap_or_else(|| END.to_owned()))
    }
}

#[cfg(test)]
mod tests;
