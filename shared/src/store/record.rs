//! What goes into the store and comes out: domain types, no rows.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Fields, Time};
use crate::domain::{
    Caller, ExecutionMeta, GraphVersion, Json, JsonMap, LeaseToken, Message, PoolName, Question, RunId, RunStatus,
    StepId, Tenant, ThreadId, ThreadKey, UserId, WorkerId,
};
use crate::graph::Manifest;
use crate::graph::engine::RunError;
use crate::queue::Job;

/// A registered graph version.
#[derive(Debug, Clone, PartialEq)]
pub struct GraphRecord {
    /// The graph's name.
    pub name: String,
    /// The content hash.
    pub version: GraphVersion,
    /// The manifest.
    pub manifest: Manifest,
    /// When it was registered last.
    pub registered_at: Time,
}

/// A run to create.
#[derive(Debug, Clone)]
pub struct NewRun {
    /// Chosen by the caller.
    pub id: RunId,
    /// `config.run_id` or AG-UI's `runId`: echoed on the wire.
    pub client_run_id: Option<String>,
    /// Whose run it is; owner of the thread if that is new.
    pub caller: Caller,
    /// The thread; created if it is new.
    pub thread_id: ThreadId,
    /// The name a new thread gets. Where it holds `{messages}`, the commit that closes the thread's
    /// first run puts the number of the thread's messages there.
    pub thread_name: Option<String>,
    /// `config.thread_meta` for a new thread.
    pub thread_meta: Option<Json>,
    /// The graph's name.
    pub graph: String,
    /// 0 = interactive, 1 = batch.
    pub class: i16,
    /// Message ids of the input, so that the view says which are known.
    pub message_ids: Vec<crate::domain::MessageId>,
    /// The input as it is shown by the Runs API.
    pub input: Json,
    /// What nodes see as `config`.
    pub config: JsonMap,
    /// How many steps the run may take, `__start__` included.
    pub step_limit: i32,
    /// The deadline of a node without one of its own; `None` = the server's cap.
    pub node_timeout: Option<Duration>,
    /// The manifests `admit` may choose from; the start node's [`FirstStep`] is read from the chosen one.
    pub versions: Vec<(GraphVersion, std::sync::Arc<Manifest>)>,
    /// A client's key, the hash of its body, and how long it is kept.
    pub idempotency: Option<Idempotency>,
    /// W3C `traceparent`.
    pub trace: Option<String>,
    /// Whether the observability route shows this run.
    pub observability: bool,
}

impl NewRun {
    /// The run that answers to the pause of `paused` make, by whoever is `caller`: it inherits what a
    /// resume inherits. Source: storage rule R13.
    #[must_use]
    pub fn resuming(paused: &RunRecord, caller: Caller) -> Self {
        Self {
            id: RunId::new(),
            client_run_id: None,
            caller,
            thread_id: paused.thread_id.clone(),
            thread_name: None,
            thread_meta: None,
            graph: paused.graph.clone(),
            class: paused.class,
            message_ids: Vec::new(),
            input: Json::Object(JsonMap::new()),
            config: paused.config.clone(),
            step_limit: paused.step_limit,
            node_timeout: paused.node_timeout,
            versions: Vec::new(),
            idempotency: None,
            trace: paused.trace.clone(),
            observability: paused.observability,
        }
    }
}

/// A client's idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idempotency {
    /// The key, unique per tenant and user.
    pub key: String,
    /// SHA-256 of the request that used it first, in hex.
    pub body_hash: String,
    /// How long the key is kept.
    pub ttl: Duration,
}

/// Where a step runs and how often it may start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstStep {
    /// The node's pool.
    pub pool: PoolName,
    /// Starts in all, crashes included.
    pub attempts_max: i16,
}

impl FirstStep {
    /// From the manifest's policy of `node`.
    #[must_use]
    pub fn of(manifest: &Manifest, node: &str) -> Self {
        let policy = manifest.policy(node);
        let attempts_max = i16::try_from(policy.retry.attempts_max()).unwrap_or(i16::MAX);
        Self { pool: policy.pool, attempts_max }
    }
}

/// What [`super::Runs::create_run`] did.
#[derive(Debug, Clone, PartialEq)]
pub enum Created {
    /// A new run.
    New(Box<NewlyCreated>),
    /// The key was used before: its run, or the paused run if it answered a question of a pause that
    /// went on.
    Replayed(Box<RunRecord>),
    /// Answers were recorded; other questions of the pause are open still.
    StillPaused(Box<super::StillPaused>),
}

/// A run that was just created.
#[derive(Debug, Clone, PartialEq)]
pub struct NewlyCreated {
    /// The run; final at once if nothing is left to run or it pauses before its first node.
    pub run: RunRecord,
    /// Whether the thread is new.
    pub is_new_thread: bool,
    /// What was appended to the context.
    pub messages: Vec<Message>,
    /// The thread's version after it.
    pub version: i64,
    /// The thread's place after it.
    pub meta: ExecutionMeta,
    /// Where its first step waits; the step itself is backlog.
    pub lane: Option<(PoolName, i16)>,
}

/// A run as stored.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRecord {
    /// Its id.
    pub id: RunId,
    /// See [`NewRun::client_run_id`].
    pub client_run_id: Option<String>,
    /// The first run of its chain.
    pub root: RunId,
    /// The paused run it resumes.
    pub resumes: Option<RunId>,
    /// Its thread.
    pub thread_id: ThreadId,
    /// The thread's row.
    pub thread_key: ThreadKey,
    /// Its tenant.
    pub tenant: Tenant,
    /// The thread's owner.
    pub user: UserId,
    /// The graph's name.
    pub graph: String,
    /// The version it is pinned to.
    pub graph_version: GraphVersion,
    /// 0 = interactive, 1 = batch.
    pub class: i16,
    /// Where it is.
    pub status: RunStatus,
    /// What the client sent.
    pub input: Json,
    /// What nodes see as `config`.
    pub config: JsonMap,
    /// Steps it may take.
    pub step_limit: i32,
    /// Deadline of a node without one of its own.
    pub node_timeout: Option<Duration>,
    /// Why it failed.
    pub error: Option<RunError>,
    /// W3C `traceparent`.
    pub trace: Option<String>,
    /// Whether the observability route shows it.
    pub observability: bool,
    /// The thread's version at its end, or now.
    pub version: i64,
    /// When it was created.
    pub created_at: Time,
    /// When a worker started it first.
    pub started_at: Option<Time>,
    /// When it was closed.
    pub finished_at: Option<Time>,
}

/// Which runs to list.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    /// Only these statuses; empty = all.
    pub statuses: Vec<RunStatus>,
    /// Only this graph's.
    pub graph: Option<String>,
    /// Only this thread's.
    pub thread: Option<ThreadId>,
    /// Only runs created before this one (ids sort by creation): the cursor.
    pub before: Option<RunId>,
    /// At most so many.
    pub limit: u32,
}

/// One page of a list.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// Rows to leave out.
    pub offset: i64,
    /// Rows at most.
    pub limit: i64,
}

/// A step as stored.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// Which.
    pub id: StepId,
    /// Its node.
    pub node: String,
    /// Its pool.
    pub pool: PoolName,
    /// Where it is.
    pub status: StepStatus,
    /// Starts so far that count.
    pub attempt: i16,
    /// Starts it may have.
    pub attempts_max: i16,
    /// Who has or had it.
    pub worker: Option<WorkerId>,
    /// The thread's version its commit made.
    pub version: Option<i64>,
    /// The last start.
    pub started_at: Option<Time>,
    /// The commit.
    pub finished_at: Option<Time>,
    /// When it may start next.
    pub run_at: Time,
    /// Attempts that ended otherwise than by a commit, oldest first.
    pub attempts: Vec<AttemptRecord>,
}

/// What one checkpoint of a run changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The step that made it; 0 = the accepted input.
    pub seq: i32,
    /// The step's node.
    pub node: String,
    /// The thread's version after it.
    pub version: i64,
    /// When it was committed.
    pub at: Time,
    /// New to the context, in order; with the body they had then, also if they are gone since.
    pub messages: Vec<Message>,
    /// Gone from the context.
    pub removed: Vec<crate::domain::MessageId>,
    /// Changed fields; `context_summary` too.
    pub fields: Fields,
    /// The place after it.
    pub meta: ExecutionMeta,
}

/// Where a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "step_status", rename_all = "snake_case")]
pub enum StepStatus {
    /// Waits for its time.
    Delayed,
    /// May be taken.
    Ready,
    /// A worker has it.
    Leased,
    /// Committed.
    Done,
    /// Ended without a commit of its node, its run failed.
    Failed,
    /// Its run was stopped before it started.
    Cancelled,
}

impl StepStatus {
    /// The word in the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Delayed => "delayed",
            Self::Ready => "ready",
            Self::Leased => "leased",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// The status named by `text`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Delayed, Self::Ready, Self::Leased, Self::Done, Self::Failed, Self::Cancelled]
            .into_iter()
            .find(|status| status.as_str() == text)
    }
}

/// How an attempt ended that did not commit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttemptEnd {
    /// `error`, `timeout`, `panic`, `crash` (the lease ran out) or `output_too_large`.
    pub end: String,
    /// Code and text.
    pub error: Option<RunError>,
}

/// An attempt that did not commit.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptRecord {
    /// Its number, from 1.
    pub attempt: i16,
    /// Who had it.
    pub worker: Option<WorkerId>,
    /// Its start.
    pub started_at: Option<Time>,
    /// Its end.
    pub ended_at: Time,
    /// How it ended.
    pub end: AttemptEnd,
}

/// What a stop did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopAnswer {
    /// The thread has no state.
    NoState,
    /// The stop is recorded for the active run, which waits in the queue or holds a live lease.
    Running(RunId),
    /// Nothing runs now (a run whose lease ran out included: its stop is recorded).
    NotRunning,
}

/// The facts behind "why is my run not moving?".
#[derive(Debug, Clone, PartialEq)]
pub struct WhyFacts {
    /// The run.
    pub run: RunRecord,
    /// Its open or last step.
    pub step: Option<StepRecord>,
    /// Whether the step is backlog, not sent yet.
    pub in_backlog: bool,
    /// Whether a stop is recorded for it.
    pub stop_requested: bool,
    /// When the step's lease ends, it is sent again or becomes ready.
    pub due_at: Option<Time>,
    /// Live workers that serve the step's pool.
    pub pool_workers: i64,
    /// Live workers that serve the pool and have the version.
    pub able_workers: i64,
    /// Ready steps of the same pool.
    pub ready_in_pool: i64,
    /// The database's clock.
    pub now: Time,
}

/// A lease that was just taken.
#[derive(Debug, Clone, PartialEq)]
pub struct Claimed {
    /// Which step.
    pub step: StepId,
    /// Its thread's row.
    pub thread_key: ThreadKey,
    /// Its node.
    pub node: String,
    /// Its graph version.
    pub graph_version: GraphVersion,
    /// From 1.
    pub attempt: i16,
    /// Starts it may have in all, crashes included.
    pub attempts_max: i16,
    /// The lease.
    pub token: LeaseToken,
    /// The thread's version.
    pub version: i64,
}

/// Which state a worker needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadRequest {
    /// The run.
    pub run_id: RunId,
    /// The thread.
    pub thread_key: ThreadKey,
    /// The version the worker still has from this run (edits come between runs); `None` =
    /// everything.
    pub since: Option<i64>,
}

/// A run and its thread's state, or what changed in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The run.
    pub run: RunRecord,
    /// The thread's version.
    pub version: i64,
    /// The thread's place.
    pub meta: ExecutionMeta,
    /// The context's messages by position, or those added since.
    pub added: Vec<(i64, Message)>,
    /// Positions removed since.
    pub removed: Vec<i64>,
    /// The latest value of each field, or of those written since; `context_summary` too.
    pub fields: Fields,
}

/// What one step commits.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCommit {
    /// Which step.
    pub step: StepId,
    /// Its lease.
    pub token: LeaseToken,
    /// The thread's version it started from.
    pub base_version: i64,
    /// The thread's place after it.
    pub meta: ExecutionMeta,
    /// The place if a stop is seen.
    pub stopped_meta: ExecutionMeta,
    /// Appended to context and log.
    pub messages: Vec<Message>,
    /// Positions that leave context and log.
    pub removed: Vec<i64>,
    /// Changed fields.
    pub fields: Fields,
    /// Questions of a pause, in order; only with [`Then::End`] as interrupted. Not written if a stop
    /// is seen.
    pub questions: Vec<Question>,
    /// The next step, or how the run ends.
    pub then: Then,
}

/// What follows a committed step.
#[derive(Debug, Clone, PartialEq)]
pub enum Then {
    /// Another step.
    Next {
        /// Its node.
        node: String,
        /// Its pool and attempts.
        at: FirstStep,
    },
    /// The run ends: completed, failed (with the error) or interrupted.
    End {
        /// How.
        status: RunStatus,
        /// Why, if it failed.
        error: Option<RunError>,
    },
}

/// What a commit did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitOutcome {
    /// Everything is visible, under this version.
    Committed {
        /// The thread's version.
        version: i64,
    },
    /// The same, and a stop was seen: the run is stopped, its next step was not made.
    Stopped {
        /// The thread's version.
        version: i64,
    },
    /// The lease is somebody else's; nothing was written.
    LeaseLost,
    /// The lease is ours, but version or active run changed: a bug; nothing was written.
    Conflict,
}

/// What a heartbeat found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseState {
    /// Whether the lease is ours still.
    pub held: bool,
    /// Whether it was extended; a row that somebody had locked at that moment was not.
    pub renewed: bool,
    /// Whether a stop is recorded for the run.
    pub stop_requested: bool,
}

/// A thread as stored.
#[derive(Debug, Clone, PartialEq)]
pub struct ThreadRecord {
    /// Its id.
    pub id: ThreadId,
    /// Its name.
    pub name: Option<String>,
    /// Its owner.
    pub user: UserId,
    /// Its graph.
    pub graph: String,
    /// The version of its last run.
    pub graph_version: GraphVersion,
    /// `config.thread_meta`.
    pub meta: Option<Json>,
    /// The client's id of its last run, or ours.
    pub run_id: Option<String>,
    /// Whether a run or an edit ever gave it a state.
    pub has_state: bool,
    /// Its version.
    pub version: i64,
    /// When it changed last.
    pub updated_at: Time,
}

/// A thread's state as stored: no defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredState {
    /// The thread's graph version, whose manifest has the defaults.
    pub graph_version: GraphVersion,
    /// The version it was read at.
    pub version: i64,
    /// The place.
    pub meta: ExecutionMeta,
    /// The context.
    pub context: Vec<Message>,
    /// The latest values; `context_summary` too.
    pub fields: Fields,
}

/// An edit of a thread's state by a client.
#[derive(Debug, Clone, PartialEq)]
pub struct StateEdit {
    /// The thread; created if it is new.
    pub thread_id: ThreadId,
    /// Its owner if it is new.
    pub caller: Caller,
    /// Its graph if it is new.
    pub graph: String,
    /// Its graph version if it is new.
    pub graph_version: GraphVersion,
    /// Appended to the context only; ids that are there are dropped.
    pub messages: Vec<Message>,
    /// Field values; already merged.
    pub fields: Fields,
}

/// Messages for the log.
#[derive(Debug, Clone, PartialEq)]
pub struct PutMessages {
    /// The thread; created if it is new.
    pub thread_id: ThreadId,
    /// Its owner if it is new.
    pub caller: Caller,
    /// Its graph if it is new.
    pub graph: String,
    /// Its graph version if it is new.
    pub graph_version: GraphVersion,
    /// The messages; ids that are there are dropped.
    pub messages: Vec<Message>,
}

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Swept {
    /// Steps to send (again).
    pub send: Vec<Job>,
    /// Leases that ran out and whose steps became ready.
    pub released: u32,
    /// Runs that failed because their step had no attempt left.
    pub failed: Vec<RunId>,
    /// Runs that a recorded stop closed, for nobody held their step any more.
    pub stopped: Vec<RunId>,
    /// When something is due next; `None` = nothing is watched.
    pub next_due: Option<Time>,
    /// The database's clock.
    pub now: Time,
}

/// The database's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreClock {
    /// Now.
    pub now: Time,
    /// When the database started.
    pub started: Time,
}

/// A worker that says it lives.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerRecord {
    /// Its id.
    pub id: WorkerId,
    /// Its configured name; a label.
    pub name: String,
    /// The pools it serves.
    pub pools: Vec<PoolName>,
    /// How many steps it runs at once.
    pub slots: i32,
    /// The code versions it has.
    pub versions: Vec<GraphVersion>,
}

/// How a pool does.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolRecord {
    /// Its name.
    pub pool: PoolName,
    /// Steps that could run now.
    pub runnable: i64,
    /// Steps that run.
    pub running: i64,
    /// Seconds the oldest runnable step has waited.
    pub oldest_wait_s: f64,
    /// Workers seen in the last 30 s that serve it.
    pub workers: i64,
    /// Their slots.
    pub slots: i64,
}

/// An audit entry.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRecord {
    /// When.
    pub at: Time,
    /// Who.
    pub who: String,
    /// What: `stop`, `fix`, `repair`, …
    pub action: String,
    /// More about it.
    pub detail: Json,
}
