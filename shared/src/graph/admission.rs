//! Whether a thread takes a new run, and where that run starts. Called inside the transaction that
//! creates the run, on the locked thread.

mod answers;

use std::collections::HashSet;
use std::sync::Arc;

use self::answers::Taken;
use super::engine::{completed, paused, waiting};
use super::{IdKind, Manifest};
use crate::domain::interrupt::EXPIRY;
use crate::domain::meta::{END, ExecutionMeta, ExecutionStatus, START};
use crate::domain::{
    Caller, GraphVersion, InterruptStatus, Json, JsonMap, Message, MessageId, Question, Role, RunId, ThreadId, UserId,
};

/// What a client sends to a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunInput {
    /// New messages, already checked.
    pub messages: Vec<Message>,
    /// Values for state fields; `current_node` picks the start node.
    pub state: JsonMap,
    /// The answer to the pending question; `Some(null)` is an answer too.
    pub resume: Option<Json>,
    /// Which question `resume` answers; `None` = the one that the thread's state shows.
    pub interrupt_id: Option<String>,
    /// Answers to questions by their ids, beside or instead of `resume`.
    pub answers: Vec<Answer>,
    /// Who answers; of a resume, of `answers` and of tool results alike.
    pub answered_by: Answerer,
}

/// An answer that names its question.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Which question.
    pub interrupt_id: String,
    /// The answer.
    pub value: Given,
    /// What whoever answers says about it.
    pub comment: Option<String>,
}

/// An answer in the form it came in.
#[derive(Debug, Clone, PartialEq)]
pub enum Given {
    /// As `resume` has it: for a gate `{"approved": bool, "editedArgs"?, "reason"?}` or null, which
    /// denies; for any other question the value itself.
    Resume(Json),
    /// Canonical: for a gate a [`crate::domain::GateAnswer`]; for any other question the value itself.
    Canonical(Json),
    /// It is not answered and never will be; a gate is denied.
    Cancelled,
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answerer {
    /// A person or a client, by its verified user id.
    User(UserId),
    /// Nobody: the time is over and the question's default counts. Only such an answer is taken from
    /// an expired question, and only the default.
    Expiry,
}

impl Answerer {
    /// The name in rows and audit entries.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::User(user) => user.as_str(),
            Self::Expiry => EXPIRY,
        }
    }
}

impl Default for Answerer {
    fn default() -> Self {
        Self::User(Caller::anonymous().user)
    }
}

/// What admission needs to know of the locked thread.
#[derive(Debug, Clone)]
pub struct ThreadView {
    /// The graph the thread belongs to.
    pub graph: String,
    /// The version of its last run.
    pub graph_version: GraphVersion,
    /// Its place.
    pub meta: ExecutionMeta,
    /// The run that occupies it.
    pub active_run: Option<RunId>,
    /// Which of the input's message ids are in its context.
    pub known_ids: HashSet<MessageId>,
    /// The role of the newest message of its context.
    pub last_role: Option<Role>,
    /// The error code of its last run.
    pub last_error: Option<String>,
    /// The open questions of its pause, in the order they were asked: that of the calls.
    pub open: Vec<OpenQuestion>,
    /// The questions of the same pause that were answered before, in the same order.
    pub answered: Vec<AnsweredQuestion>,
}

/// A question that waits for its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenQuestion {
    /// The question.
    pub question: Question,
    /// Whether its time is over, by the store's clock and judged after the thread was locked.
    pub is_expired: bool,
}

/// A question of a pause that goes on, answered already.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredQuestion {
    /// The question.
    pub question: Question,
    /// Answered, cancelled or expired.
    pub status: InterruptStatus,
    /// The canonical answer, which the run that resumes is given.
    pub answer: Json,
}

/// The graph versions a run could start on: the newest first.
pub type Versions = [(GraphVersion, Arc<Manifest>)];

/// What the transaction writes.
#[derive(Debug, Clone, PartialEq)]
pub struct Admission {
    /// The version the run is pinned to.
    pub graph_version: GraphVersion,
    /// Appended to the context.
    pub messages: Vec<Message>,
    /// Field values to write.
    pub fields: JsonMap,
    /// The thread's place.
    pub meta: ExecutionMeta,
    /// How the run begins.
    pub start: Start,
    /// The questions that this input answers; each must be open.
    pub answers: Vec<Answered>,
    /// Whether it goes on where the thread's last run paused, stopped or failed; after a pause the
    /// new run resumes the paused one.
    pub continues: bool,
}

/// How an admitted run begins.
#[derive(Debug, Clone, PartialEq)]
pub enum Start {
    /// With a step at this node; seq 0 where the node is `__start__`, else 1.
    Node(String),
    /// It is complete at once: nothing is left to run.
    Completed,
    /// It pauses at once, before its first node.
    Interrupted,
    /// There is no run: the answers are recorded, and other questions of the pause stay open. The
    /// messages and the place are written as a version of their own.
    StillPaused,
}

/// What becomes of a question; the store writes it as it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Answered {
    /// The question's id.
    pub id: String,
    /// `Answered`, `Cancelled`, or `Expired` where the default counts.
    pub status: InterruptStatus,
    /// The canonical answer.
    pub answer: Json,
    /// Of an approval: [`crate::domain::interrupt::arguments_hash`] of exactly the arguments that
    /// were approved. Without it the ledger starts no gated tool.
    pub approved_hash: Option<String>,
    /// Who answers.
    pub by: String,
    /// What they say about it.
    pub comment: Option<String>,
    /// What the audit calls it: `answer`, `approve`, `deny`, `cancel`, `expire`.
    pub action: &'static str,
}

/// Why a thread does not take a run; nothing is written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// Another run is active (409).
    #[error("thread '{thread}' is busy with run {run}; wait for it, stop it, or use another thread")]
    Busy {
        /// The thread.
        thread: ThreadId,
        /// The run that occupies it.
        run: RunId,
    },
    /// A plain message, or an answer to another question, while a question is open (409).
    #[error("Thread is paused at interrupt '{id}' in node '{node}'. Resume it with {{'resume': value}}.")]
    Paused {
        /// The open question.
        id: String,
        /// The node that asks.
        node: String,
    },
    /// An answer that names a question which is not open (409).
    #[error("interrupt '{0}' is not open on this thread; read the thread's state for the open one")]
    NotThisInterrupt(String),
    /// An answer to a question whose time is over (409).
    #[error("interrupt '{0}' has expired; it takes no answer any more. Stop the run to go on")]
    Expired(String),
    /// An answer where nothing is asked (422).
    #[error("Nothing to resume: this thread is not paused at an interrupt()")]
    NothingToResume,
    /// An answer that does not satisfy the question's schema (422).
    #[error("the answer does not satisfy the question's response_schema: {0}")]
    AnswerSchema(String),
    /// No message and an empty context (422).
    #[error("a run needs at least one message")]
    NoMessages,
    /// Two answers to one question in one request (422).
    #[error("interrupt '{0}' is answered twice in one request; answer it once")]
    AnsweredTwice(String),
    /// Two results for one call in one request (422).
    #[error("Each tool call can be answered only once")]
    ResultTwice,
    /// An answer by somebody whom the tool does not let approve (403).
    #[error("interrupt '{0}' can be answered by its approvers only; ask one of them")]
    NotAnApprover(String),
    /// A tool result nobody waits for (422).
    #[error("No remote tool call '{0}' is waiting for a result")]
    NoSuchCall(String),
    /// The start node does not exist (422).
    #[error("[GRAPH_007] current_node '{0}' is not a node of this graph; choose one that GET /v1/graph lists")]
    UnknownStart(String),
    /// The start node is a tool node (422).
    #[error("current_node '{0}' is a tool node; runs cannot start there")]
    ToolNodeStart(String),
    /// The thread belongs to another graph (422).
    #[error("this thread belongs to graph '{0}'; use that graph or a new thread")]
    OtherGraph(String),
    /// The version the thread is pinned to is not at hand; read it and try again.
    #[error("the thread continues on graph version {0}, which is not loaded")]
    VersionNeeded(GraphVersion),
}

/// Decides whether `view` takes `input`. `thread` names the thread, `None` as view is a new one.
///
/// # Errors
/// [`Refusal`]; the caller writes nothing.
pub fn admit(
    versions: &Versions,
    thread: &ThreadId,
    view: Option<&ThreadView>,
    input: &RunInput,
) -> Result<Admission, Refusal> {
    let (newest, manifest) = versions.first().expect("a run names a registered graph");
    if let Some(view) = view {
        let is_open = |id: &&String| view.open.iter().any(|open| open.question.id == **id);
        let mut named = input.answers.iter().map(|answer| &answer.interrupt_id).chain(&input.interrupt_id);
        if let Some(id) = named.find(|id| !is_open(id)) {
            return Err(Refusal::NotThisInterrupt(id.clone()));
        }
        if let Some(run) = view.active_run {
            return Err(Refusal::Busy { thread: thread.clone(), run });
        }
        if view.graph != manifest.name {
            return Err(Refusal::OtherGraph(view.graph.clone()));
        }
    }
    let mut taken = taken(versions, view, input)?;
    if let Some(view) = view.filter(|_| !taken.still_open.is_empty()) {
        return still_paused(view, input, taken, manifest.ids);
    }
    let mut meta = view.map_or_else(|| ExecutionMeta::fresh(thread.as_str()), |view| view.meta.clone());
    remember(&mut meta, &taken);
    let messages = match view {
        Some(view) if !taken.answered.is_empty() => {
            let mut messages = results(manifest.ids, view, &input.messages, std::mem::take(&mut taken.results));
            let said: Vec<Message> = input.messages.iter().filter(|m| m.role != Role::Tool).cloned().collect();
            messages.extend(new_messages(manifest.ids, Some(view), &said));
            messages
        }
        view => new_messages(manifest.ids, view, &input.messages),
    };
    if messages.is_empty() && taken.answered.is_empty() && view.is_none_or(|view| view.last_role.is_none()) {
        return Err(Refusal::NoMessages);
    }

    let chosen = chosen_start(manifest, &input.state)?;
    let hit_limit = view.is_some_and(|view| view.last_error.as_deref() == Some("RECURSION_001"));
    let starts_over = meta.status == ExecutionStatus::Completed || (meta.status == ExecutionStatus::Error && hit_limit);
    let continues = view.is_some() && !starts_over && meta.current_node != START && chosen.is_none();
    let (version, manifest) = match view {
        Some(view) if continues => versions
            .iter()
            .find(|(version, _)| *version == view.graph_version)
            .map(|(version, manifest)| (version, manifest))
            .ok_or_else(|| Refusal::VersionNeeded(view.graph_version.clone()))?,
        _ => (newest, manifest),
    };
    let (meta, start) = if continues { continued(manifest, meta) } else { started(manifest, meta, chosen) };
    let fields = known_fields(manifest, &input.state);
    Ok(Admission { graph_version: version.clone(), messages, fields, meta, start, answers: taken.answered, continues })
}

/// The place of a run that goes on where the last one paused, stopped or failed.
fn continued(manifest: &Manifest, meta: ExecutionMeta) -> (ExecutionMeta, Start) {
    let (node, step) = (meta.current_node.clone(), meta.step);
    if node == END {
        // A pause after the last node: nothing is left to run.
        let last = meta.interrupted_node.clone().unwrap_or(node);
        return (completed(meta, &last, step), Start::Completed);
    }
    if manifest.interrupt_before.contains(&node) && reaches_anew(&meta) {
        return (paused(meta, ExecutionStatus::InterruptedBefore, &node, &node, step), Start::Interrupted);
    }
    (meta.running_at(&node, step), Start::Node(node))
}

/// Whether the run comes to its node for the first time: behind a stop, or a pause after the node
/// before. Whoever comes from the pause before this very node, from its question or from its failure
/// has passed the gate already.
fn reaches_anew(meta: &ExecutionMeta) -> bool {
    let reason = meta.interrupt_reason.as_deref().unwrap_or_default();
    meta.status == ExecutionStatus::InterruptedAfter
        && (reason == "stop_requested" || reason.starts_with("interrupt_after: "))
}

/// The place of a run that starts at the entry, or at the node the client chose.
fn started(manifest: &Manifest, mut meta: ExecutionMeta, chosen: Option<&str>) -> (ExecutionMeta, Start) {
    meta.internal_data.remove("interrupt_resume");
    let (node, step) = match (chosen, manifest.entry()) {
        (Some(END), _) => return (completed(meta, END, 0), Start::Completed),
        (Some(node), _) => (node, 0),
        (None, Some(entry)) => (entry, 1),
        (None, None) => (START, 0),
    };
    if manifest.interrupt_before.iter().any(|name| name == node) {
        let pause = paused(meta, ExecutionStatus::InterruptedBefore, node, node, step);
        return (pause, Start::Interrupted);
    }
    (meta.running_at(node, step), Start::Node(node.to_owned()))
}

fn chosen_start<'a>(manifest: &Manifest, state: &'a JsonMap) -> Result<Option<&'a str>, Refusal> {
    let Some(node) = state.get("current_node").and_then(Json::as_str).filter(|node| !node.is_empty()) else {
        return Ok(None);
    };
    let node = match node {
        "start" => START,
        "end" => END,
        node => node,
    };
    if !manifest.is_place(node) {
        return Err(Refusal::UnknownStart(node.to_owned()));
    }
    if manifest.node(node).is_some_and(|spec| spec.kind == "tools") {
        return Err(Refusal::ToolNodeStart(node.to_owned()));
    }
    Ok(Some(node))
}

/// The answers that reach the node when it runs again, by the positions they were asked at.
fn remember(meta: &mut ExecutionMeta, taken: &Taken) {
    if taken.answered.is_empty() {
        return;
    }
    let answers = meta.internal_data.entry("interrupt_resume").or_insert_with(|| Json::Object(JsonMap::new()));
    if let Json::Object(answers) = answers {
        let given = taken.keys.iter().zip(&taken.answered);
        answers.extend(given.map(|(key, answered)| (key.clone(), answered.answer.clone())));
    }
}

/// What the input answers. Where nothing is asked, nothing can be.
fn taken(versions: &Versions, view: Option<&ThreadView>, input: &RunInput) -> Result<Taken, Refusal> {
    let open = view.map(|view| view.open.as_slice()).unwrap_or_default();
    if let (Some(view), false) = (view, open.is_empty()) {
        let pinned = versions.iter().find(|(version, _)| *version == view.graph_version);
        let (_, manifest) = pinned.ok_or_else(|| Refusal::VersionNeeded(view.graph_version.clone()))?;
        return answers::take(open, manifest, input);
    }
    let named = input.answers.first().map(|answer| &answer.interrupt_id).or(input.interrupt_id.as_ref());
    match (named, &input.resume, result_in(&input.messages)) {
        (Some(id), ..) => Err(Refusal::NotThisInterrupt(id.clone())),
        (None, Some(_), _) => Err(Refusal::NothingToResume),
        (None, None, Some(call)) => Err(Refusal::NoSuchCall(call)),
        (None, None, None) => Ok(Taken::default()),
    }
}

/// Answers are recorded and others are awaited: no run. A user's words would stand before the results
/// that are missing, so they come with the last answer.
fn still_paused(view: &ThreadView, input: &RunInput, mut taken: Taken, ids: IdKind) -> Result<Admission, Refusal> {
    let is_open = |open: &&OpenQuestion| taken.still_open.contains(&open.question.id);
    let open: Vec<&Question> = view.open.iter().filter(is_open).map(|open| &open.question).collect();
    let first = open[0];
    if input.messages.iter().any(|message| message.role != Role::Tool) {
        return Err(Refusal::Paused { id: first.id.clone(), node: first.node.clone() });
    }
    let mut meta = view.meta.clone();
    remember(&mut meta, &taken);
    let node = first.node.clone();
    let meta = waiting(meta, &node, open);
    let messages = results(ids, view, &input.messages, std::mem::take(&mut taken.results));
    Ok(Admission {
        graph_version: view.graph_version.clone(),
        messages,
        fields: JsonMap::new(),
        meta,
        start: Start::StillPaused,
        answers: taken.answered,
        continues: true,
    })
}

/// Results as messages, each under an id that is free: none may be dropped as known.
fn results(ids: IdKind, view: &ThreadView, messages: &[Message], made: Vec<Message>) -> Vec<Message> {
    let sent = messages.iter().filter(|message| message.role == Role::Tool).cloned();
    let mut seen = view.known_ids.clone();
    sent.chain(made)
        .map(|mut message| {
            message.delta = false;
            if !seen.insert(message.message_id.clone()) {
                message.message_id = ids.message_id();
            }
            message
        })
        .collect()
}

/// The answers given so far to the questions of `node`, in the order of its calls.
#[must_use]
pub fn answers_of(meta: &ExecutionMeta, node: &str) -> Vec<Json> {
    (0..).map_while(|position| answer_to(meta, &format!("node:{node}:{position}")).cloned()).collect()
}

/// The canonical answer to the question at the position `key` of the node that runs again.
#[must_use]
pub fn answer_to<'a>(meta: &'a ExecutionMeta, key: &str) -> Option<&'a Json> {
    meta.internal_data.get("interrupt_resume")?.get(key)
}

/// New to the context; where nothing is, a last user message the context does not end with is added
/// again under a fresh id.
fn new_messages(ids: IdKind, view: Option<&ThreadView>, messages: &[Message]) -> Vec<Message> {
    let mut seen = view.map(|view| view.known_ids.clone()).unwrap_or_default();
    let fresh: Vec<Message> =
        messages.iter().filter(|message| !message.delta && seen.insert(message.message_id.clone())).cloned().collect();
    match messages.last() {
        Some(last)
            if fresh.is_empty()
                && last.role == Role::User
                && view.and_then(|view| view.last_role) != Some(Role::User) =>
        {
            let mut again = last.clone();
            again.message_id = ids.message_id();
            again.delta = false;
            vec![again]
        }
        _ => fresh,
    }
}

/// The call of the first result among `messages`.
fn result_in(messages: &[Message]) -> Option<String> {
    let block = messages.iter().flat_map(|message| &message.content).find(|block| block["type"] == "tool_result")?;
    Some(block["call_id"].as_str().unwrap_or_default().to_owned())
}

fn known_fields(manifest: &Manifest, state: &JsonMap) -> JsonMap {
    let known = |name: &str| manifest.fields.iter().any(|field| field.name == name);
    state.iter().filter(|(name, _)| known(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

#[cfg(test)]
mod answering_tests;
#[cfg(test)]
mod tests;
