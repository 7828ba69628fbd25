//! What goes into and comes out of the store about questions and tool calls.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{RunRecord, Time};
use crate::domain::{
    CallRef, CallResult, CallStatus, Effect, ExecutionMeta, InterruptRecord, InterruptStatus, Json, LeaseToken,
    Message, MessageId, Question, RunId, StepId, ThreadId, ThreadKey,
};
use crate::graph::admission::Answered;

/// Which questions to list, oldest first.
#[derive(Debug, Clone, Default)]
pub struct InterruptFilter {
    /// Only these; empty = all. An open question whose time is over counts as expired.
    pub statuses: Vec<InterruptStatus>,
    /// Only this thread's.
    pub thread: Option<ThreadId>,
    /// Only this run's pause.
    pub run: Option<RunId>,
    /// Only this graph's.
    pub graph: Option<String>,
    /// Only about calls of this tool.
    pub tool: Option<String>,
    /// Only questions behind this one: the cursor.
    pub after: Option<InterruptCursor>,
    /// At most so many.
    pub limit: u32,
}

/// Where a page of questions ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterruptCursor {
    /// [`InterruptRecord::created_at`] of the last one.
    pub created_at: Time,
    /// Its id.
    pub id: String,
}

impl InterruptCursor {
    /// The place behind `record`.
    #[must_use]
    pub fn behind(record: &InterruptRecord) -> Self {
        Self { created_at: record.created_at, id: record.question.id.clone() }
    }
}

/// What an answer did that left other questions of its pause open.
#[derive(Debug, Clone, PartialEq)]
pub struct StillPaused {
    /// The paused run.
    pub run: RunRecord,
    /// What was appended to the context: results of client tools.
    pub messages: Vec<Message>,
    /// The thread's version after it.
    pub version: i64,
    /// The thread's place after it.
    pub meta: ExecutionMeta,
}

/// What the audit says of an answer.
pub(crate) fn answer_entry(question: &Question, answered: &Answered) -> Json {
    let mut entry = cancel_entry(question);
    entry["status"] = answered.status.as_str().into();
    entry["comment"] = answered.comment.clone().into();
    entry["approved_hash"] = answered.approved_hash.clone().into();
    entry
}

/// What the audit says of a question that a stop cancelled.
pub(crate) fn cancel_entry(question: &Question) -> Json {
    serde_json::json!({
        "interrupt_id": question.id,
        "tool": question.call.as_ref().map(|call| &call.tool),
        "call_id": question.call.as_ref().map(|call| &call.call_id),
    })
}

/// One call of one thread; the ledger's key, and the effect's idempotency key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallKey {
    /// The thread.
    pub thread: ThreadKey,
    /// The message that holds the call.
    pub message_id: MessageId,
    /// The call's id.
    pub call_id: String,
}

/// What a step wants to do about one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Intent {
    /// The call, with the arguments and their hash it will run with: of an edited approval the
    /// edited ones.
    pub call: CallRef,
    /// What happens if the tool is called twice.
    pub effect: Effect,
    /// Whether it starts only under an approval of this very call with these very arguments.
    pub is_gated: bool,
    /// How long the call may take: until then a missing result means that it still runs.
    pub timeout: Duration,
    /// What to do.
    pub wish: Wish,
}

/// What to do about a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Wish {
    /// Run it.
    Run,
    /// Do not run it: this is its result, such as a denial.
    Record(CallResult),
    /// Do what a person decided about its unknown outcome: run it again (`None`), or take this
    /// result. Counts only if a question about that was asked after the call's last start and was
    /// answered; otherwise it is as good as [`Wish::Run`].
    Decided(Option<CallResult>),
}

/// What the ledger says to an intent.
#[derive(Debug, Clone, PartialEq)]
pub enum Begun {
    /// The intent is stored: call the tool now, and finish with this token.
    Started {
        /// The intent's own; it outlives the lease.
        token: LeaseToken,
        /// From 1; more where the tool was started before.
        attempt: i16,
        /// The approval it runs under.
        approval: Option<String>,
    },
    /// It has a result; the tool is not called.
    Done(CallResult),
    /// A `once` call was started before and has no result. Until `wait` is over it may still end;
    /// then (`wait` is zero) a person must decide.
    InDoubt {
        /// When it will certainly have ended, by the store's clock.
        deadline: Time,
        /// How long that is from now.
        wait: Duration,
    },
    /// Nobody approved this call with these arguments; nothing was written.
    NotApproved,
    /// The step is somebody else's now; nothing was written.
    LeaseLost,
}

/// What became of a result.
#[derive(Debug, Clone, PartialEq)]
pub enum Finished {
    /// It is stored.
    Stored,
    /// The call had a result already, which counts.
    Kept(CallResult),
    /// No such intent: the call was started anew under another token, or its thread was cleared.
    Unknown,
}

/// One row of the ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolExecution {
    /// The call's message.
    pub message_id: MessageId,
    /// The call's id.
    pub call_id: String,
    /// The tool.
    pub tool: String,
    /// Hash of the arguments it was started with.
    pub arguments_hash: String,
    /// What happens if it is called twice.
    pub effect: Effect,
    /// Where it is.
    pub status: CallStatus,
    /// Its result.
    pub result: Option<CallResult>,
    /// The step that started it last.
    pub step: StepId,
    /// How often it was started; 0 if it never was.
    pub attempt: i16,
    /// The approval it ran under.
    pub approval: Option<String>,
    /// When its last start will certainly have ended.
    pub deadline: Option<Time>,
    /// Its last start.
    pub started_at: Option<Time>,
    /// When its result was stored.
    pub finished_at: Option<Time>,
}
