//! What a node is, what it sees and what it may return.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::said::{NodeEvent, NodeEvents};
use crate::domain::interrupt::milliseconds;
use crate::domain::{
    Caller, Json, JsonMap, Message, MessageId, Question, QuestionKind, Role, RunId, StepId, ThreadId, ThreadState,
};

/// One node's code.
#[async_trait]
pub trait Node: Send + Sync {
    /// Runs the node once; under a deadline, and again from the start after a crash.
    ///
    /// # Errors
    /// [`NodeError`] says whether the node failed and may be retried, or asks somebody.
    async fn run(&self, ctx: NodeContext) -> Result<Outcome, NodeError>;
}

/// What a node sees.
#[derive(Debug, Clone)]
pub struct NodeContext {
    /// The thread's state as it was committed before this step.
    pub state: Arc<ThreadState>,
    /// The run's configuration: what the client sent, without the engine's keys.
    pub config: Arc<JsonMap>,
    /// The thread.
    pub thread_id: ThreadId,
    /// Which step of which run.
    pub step: StepId,
    /// The node's own name.
    pub node: String,
    /// From 1; more after a crash or a retry.
    pub attempt: u16,
    /// Who started the run; verified, never from text.
    pub caller: Caller,
    /// W3C `traceparent` of the run.
    pub trace: Option<String>,
    /// The node's deadline, as seen when it started.
    pub deadline: Option<Duration>,
    /// Cancelled on a stop, a lost lease, a passed deadline or the end of the worker's grace.
    pub cancelled: CancellationToken,
    /// Where streamed pieces and custom events go.
    pub events: NodeEvents,
    /// Answers given so far to this execution's questions, in the order of the calls.
    pub answers: Arc<Vec<Json>>,
    /// How many times `interrupt` was called in this execution.
    pub asked: Arc<std::sync::atomic::AtomicUsize>,
}

impl NodeContext {
    /// The run.
    #[must_use]
    pub fn run_id(&self) -> RunId {
        self.step.run_id
    }

    /// The same for every attempt at this effect, so that a receiver can refuse a repetition.
    #[must_use]
    pub fn idempotency_key(&self) -> String {
        format!("{}:{}", self.step.run_id, self.step.seq)
    }

    /// Whether the node should end early.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.is_cancelled()
    }

    /// Sends a custom event to whoever follows the run; best effort: what comes too fast to be told, or
    /// is above [`NODE_EVENT_BYTES_MAX`](super::said::NODE_EVENT_BYTES_MAX), is dropped, and followers see a gap.
    pub fn emit(&self, value: Json) {
        self.events.send(NodeEvent::Custom(value));
    }

    /// Sends a piece of a growing message; best effort, as [`NodeContext::emit`].
    pub fn delta(&self, mut message: Message) {
        message.delta = true;
        self.events.send(NodeEvent::Delta(message));
    }

    /// Asks a question: returns the answer, or pauses the run until there is one.
    ///
    /// The node runs again from its beginning on resume; answers are found by the order of calls.
    ///
    /// # Errors
    /// [`NodeError::Interrupt`], which the node passes on with `?`.
    pub fn interrupt(&self, question: Interrupt) -> Result<Json, NodeError> {
        let position = self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        match self.answers.get(position) {
            Some(answer) => Ok(answer.clone()),
            None => Err(NodeError::Interrupt { position, question: Box::new(question) }),
        }
    }
}

/// A question to a person.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Interrupt {
    /// What the question is about, for the one who answers.
    #[serde(default)]
    pub value: Json,
    /// The question in words.
    #[serde(default)]
    pub message: Option<String>,
    /// A word for the kind of question.
    #[serde(default = "input_required")]
    pub reason: String,
    /// JSON Schema of the answer.
    #[serde(default)]
    pub response_schema: Option<Json>,
    /// Free data for whoever shows the question.
    #[serde(default)]
    pub metadata: JsonMap,
    /// How long it may be answered, in milliseconds. `None` = for ever.
    #[serde(default, with = "milliseconds")]
    pub expires_in: Option<Duration>,
    /// The answer it gets when that time is over; `None` = none, it stays and is listed as expired.
    #[serde(default)]
    pub on_expiry: Option<Json>,
}

impl Interrupt {
    /// The question as `node` asks it at the position `key`.
    #[must_use]
    pub fn asked_at(self, node: &str, key: String) -> Question {
        Question {
            message: self.message,
            value: self.value,
            response_schema: self.response_schema.filter(|schema| !schema.is_null()),
            metadata: self.metadata,
            expires_in: self.expires_in,
            on_expiry: self.on_expiry,
            ..Question::new(QuestionKind::Input, node, key, &self.reason)
        }
    }
}

fn input_required() -> String {
    "input_required".to_owned()
}

impl Default for Interrupt {
    fn default() -> Self {
        Self {
            value: Json::Null,
            message: None,
            reason: input_required(),
            response_schema: None,
            metadata: JsonMap::new(),
            expires_in: None,
            on_expiry: None,
        }
    }
}

/// What a node changes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Patch {
    /// Appended to the context; ids that are there already are dropped.
    pub messages: Vec<Message>,
    /// Removed from the context.
    pub remove: Vec<MessageId>,
    /// Replaced fields; only names of the manifest.
    pub fields: JsonMap,
}

/// A patch, and where to go.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Command {
    /// What changes.
    pub update: Patch,
    /// Where to go instead of following the edges.
    pub goto: Option<String>,
}

/// What a node returned.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// What changes, and where to go.
    pub command: Command,
    /// Questions that must be answered before the node is done, in the order of the calls they are
    /// about. With any, the run pauses: `command.update` is committed together with the pause,
    /// `command.goto` is ignored, and the node runs again with all answers.
    pub questions: Vec<Question>,
}

/// Why a node did not return an outcome.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NodeError {
    /// The node failed.
    #[error("{message}")]
    Failed {
        /// `NODE_001` unless the node says otherwise.
        code: String,
        /// What went wrong.
        message: String,
        /// Whether another attempt could succeed.
        retryable: bool,
    },
    /// The node asks somebody; not a failure.
    #[error("the node waits for an answer")]
    Interrupt {
        /// Which call of this execution, from 0.
        position: usize,
        /// What it asks.
        question: Box<Interrupt>,
    },
}

impl NodeError {
    /// A failure that another attempt will not mend.
    pub fn permanent(message: impl Into<String>) -> Self {
        Self::Failed { code: "NODE_001".to_owned(), message: message.into(), retryable: false }
    }

    /// A failure that another attempt may mend, as far as the node's retry policy allows one.
    pub fn transient(message: impl Into<String>) -> Self {
        Self::Failed { code: "NODE_001".to_owned(), message: message.into(), retryable: true }
    }
}

/// What an async function that is a node may return.
pub trait IntoOutcome {
    /// The outcome.
    ///
    /// # Errors
    /// Whatever the function failed with.
    fn into_outcome(self) -> Result<Outcome, NodeError>;
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        Ok(self)
    }
}

impl IntoOutcome for Command {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        Ok(Outcome { command: self, questions: Vec::new() })
    }
}

impl IntoOutcome for Patch {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        Command { update: self, goto: None }.into_outcome()
    }
}

impl IntoOutcome for Vec<Message> {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        Patch { messages: self, ..Patch::default() }.into_outcome()
    }
}

impl IntoOutcome for Message {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        vec![self].into_outcome()
    }
}

impl IntoOutcome for String {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        Message::text(Role::Assistant, self).into_outcome()
    }
}

impl IntoOutcome for &str {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        self.to_owned().into_outcome()
    }
}

/// A JSON value says nothing about what it means, null included: it is refused with `NODE_001`. What
/// nodes in other languages answer is read by [`super::reply`].
impl IntoOutcome for Json {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        Err(NodeError::permanent(format!(
            "a node must return a message, a list of messages, text, a patch or a command, not {self}"
        )))
    }
}

impl<T: IntoOutcome> IntoOutcome for Result<T, NodeError> {
    fn into_outcome(self) -> Result<Outcome, NodeError> {
        self?.into_outcome()
    }
}

#[async_trait]
impl<F, Fut, T> Node for F
where
    F: Fn(NodeContext) -> Fut + Send + Sync,
    Fut: Future<Output = T> + Send,
    T: IntoOutcome,
{
    async fn run(&self, ctx: NodeContext) -> Result<Outcome, NodeError> {
        self(ctx).await.into_outcome()
    }
}
