//! Where the truth lives. One trait in parts, kept by Postgres, SQLite and (for the
//! simulation) memory; one contract suite runs on all of them. The only home of SQL.

pub mod ask;
#[cfg(feature = "testing")]
pub mod contract;
mod ledger;
#[cfg(feature = "testing")]
pub mod memory;
pub mod postgres;
pub mod record;
pub mod sqlite;

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

pub use ask::*;
pub use postgres::{PgOptions, PgStore};
pub use record::*;
pub use sqlite::SqliteStore;

use crate::domain::{
    CallResult, GraphVersion, InterruptRecord, JsonMap, LeaseToken, Message, MessageId, PoolName, RunId, Scope, StepId,
    Tenant, ThreadId, ThreadState, WorkerId,
};
use crate::graph::admission::{Admission, Refusal, ThreadView};
use crate::queue::Job;

/// What the store could not do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The thread does not take the run; nothing was written.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The thread has an active run (409); nothing was written.
    #[error("thread '{0}' is busy; wait for its run or stop it")]
    Busy(ThreadId),
    /// The thread waits for answers (409); nothing was written.
    #[error("thread '{0}' waits for answers; answer its questions or stop it first")]
    Asked(ThreadId),
    /// The thread belongs to somebody else, who is not told apart from nobody (404).
    #[error("thread '{0}' does not exist")]
    NoSuchThread(ThreadId),
    /// The key was used with another body (409); nothing was written.
    #[error("this Idempotency-Key was used with another body; use a new key")]
    IdempotencyMismatch,
    /// The database could not be reached, or asks to try again later (503).
    #[error("could not {doing}: the database is not available")]
    Unavailable {
        /// What was being done.
        doing: &'static str,
        /// Why.
        source: sqlx::Error,
    },
    /// The database refused; `source` says why.
    #[error("could not {doing}")]
    Database {
        /// What was being done.
        doing: &'static str,
        /// Why.
        source: sqlx::Error,
    },
    /// The database's schema is not this program's.
    #[error("{0}")]
    Schema(String),
    /// A row holds what it cannot hold.
    #[error("could not {doing}: {message}")]
    Corrupt {
        /// What was being done.
        doing: &'static str,
        /// What was found.
        message: String,
    },
}

/// Decides on the locked thread whether it takes the run; see [`crate::graph::admission::admit`].
pub type Admit<'a> = &'a (dyn Fn(Option<&ThreadView>) -> Result<Admission, Refusal> + Send + Sync);

/// The parts that every role needs.
pub trait Store: Schema + Graphs + Runs + Steps + Interrupts + Ledger + Threads + Upkeep {}

impl<T: Schema + Graphs + Runs + Steps + Interrupts + Ledger + Threads + Upkeep> Store for T {}

/// The database itself.
#[async_trait]
pub trait Schema: Send + Sync + 'static {
    /// Brings the schema up to date; safe to call from several processes at once.
    async fn migrate(&self) -> Result<(), StoreError>;

    /// Whether the schema is this program's.
    ///
    /// # Errors
    /// [`StoreError::Schema`] with a sentence that says what to run.
    async fn check_schema(&self) -> Result<(), StoreError>;

    /// One cheap round trip.
    async fn ping(&self) -> Result<(), StoreError>;
}

/// Graph versions.
#[async_trait]
pub trait Graphs: Send + Sync + 'static {
    /// Stores versions that are new; the last registered of a name is its newest.
    async fn register_graphs(&self, graphs: &[GraphRecord]) -> Result<(), StoreError>;

    /// The newest version of each name, by name.
    async fn graphs(&self) -> Result<Vec<GraphRecord>, StoreError>;

    /// One version, old ones too.
    async fn graph_version(&self, version: &GraphVersion) -> Result<Option<GraphRecord>, StoreError>;
}

/// Runs as a client sees them.
#[async_trait]
pub trait Runs: Send + Sync + 'static {
    /// Creates the run, its messages, fields, checkpoint and first step in one transaction, on the
    /// thread `admit` agreed to (created if it is new); the idempotency key is taken first.
    /// An admission that continues after a pause makes the run resume the paused one: same root.
    /// Its answers are recorded in the same transaction, each with an audit entry; where others of
    /// the pause stay open there is no run ([`Created::StillPaused`]), and a key stands for the
    /// paused one.
    async fn create_run(&self, new: NewRun, admit: Admit<'_>) -> Result<Created, StoreError>;

    /// One run, with the status of the chain it is the root of left to [`Runs::last_of_chain`].
    async fn run(&self, scope: &Scope, id: RunId) -> Result<Option<RunRecord>, StoreError>;

    /// The last run of the chain that starts at `root`.
    async fn last_of_chain(&self, root: RunId) -> Result<Option<RunRecord>, StoreError>;

    /// Runs, newest first.
    async fn runs(&self, scope: &Scope, filter: &RunFilter) -> Result<Vec<RunRecord>, StoreError>;

    /// Those of `ids` that are final; one statement for all that somebody waits for.
    async fn finished(&self, ids: &[RunId]) -> Result<Vec<(RunId, crate::domain::RunStatus)>, StoreError>;

    /// The steps of a run in order, with attempts that did not end in a commit.
    async fn steps(&self, run: RunId) -> Result<Vec<StepRecord>, StoreError>;

    /// What the run's checkpoints above thread version `after` changed, oldest first: the accepted
    /// input (seq 0) too. What a follower missed and what a trace shows, at a cost that follows what
    /// changed and not the thread's age. Empty for an unknown run.
    async fn changes(&self, run: RunId, after: i64) -> Result<Vec<Change>, StoreError>;

    /// Stops the thread's active run, or closes a paused one; durable on return. A run whose step
    /// nobody holds is closed at once (step cancelled); a held one by the commit that sees the flag.
    /// Each closing writes [`crate::graph::engine::stopped`] as a version of its own. Open questions of a
    /// pause are cancelled, and their calls get the result that they were denied
    /// ([`crate::domain::results::denied_by_stop`]).
    async fn stop_thread(&self, scope: &Scope, thread: &ThreadId) -> Result<StopAnswer, StoreError>;

    /// Stops one run of a chain: its last one. `None` if it does not exist.
    async fn stop_run(&self, scope: &Scope, run: RunId) -> Result<Option<RunRecord>, StoreError>;

    /// What `GET /v1/runs/{id}/why` needs.
    async fn why(&self, run: RunId) -> Result<Option<WhyFacts>, StoreError>;
}

/// The steps of workers: every write carries the lease's token.
#[async_trait]
pub trait Steps: Send + Sync + 'static {
    /// Takes the leases of those steps that are ready, due and of a version in `versions` (every
    /// declarative version counts as one). One round trip; may commit asynchronously.
    async fn claim(
        &self,
        claims: &[(StepId, LeaseToken)],
        worker: WorkerId,
        versions: &[GraphVersion],
        ttl: Duration,
    ) -> Result<Vec<Claimed>, StoreError>;

    /// `queued` → `running` of runs whose first step was just claimed; locked rows are skipped.
    async fn mark_running(&self, runs: &[RunId]) -> Result<(), StoreError>;

    /// What workers need beside the claim: the run and the thread's state, or what changed in it
    /// since a version the worker still has.
    async fn load(&self, wanted: &[LoadRequest]) -> Result<Vec<Loaded>, StoreError>;

    /// Commits steps of different threads together; one outcome per step, in order. A batch that
    /// fails is repeated step by step; a repeat with the same token answers `Committed`.
    async fn commit(&self, steps: &[StepCommit]) -> Vec<Result<CommitOutcome, StoreError>>;

    /// Extends leases by `ttl` from now; answers per lease whether it is held, was extended, and a stop
    /// is set. A row that somebody has locked is waited for by nobody: it is not extended this time.
    async fn heartbeat(&self, leases: &[(StepId, LeaseToken)], ttl: Duration) -> Result<Vec<LeaseState>, StoreError>;

    /// Gives leases back uncharged, `ready` at once, their runs `queued` (drain). Returns how many
    /// were still held. Under a stop the step never starts again: the run is closed as stopped, at
    /// the latest by the next sweep; the same goes for [`Steps::retry_step`] and an expired lease.
    async fn give_back(&self, leases: &[(StepId, LeaseToken)]) -> Result<u64, StoreError>;

    /// Ends an attempt that failed and will be repeated after `delay`; records it. The step is
    /// `delayed` until a sweep finds it due. Returns whether the lease was held.
    async fn retry_step(
        &self,
        step: StepId,
        token: LeaseToken,
        end: &AttemptEnd,
        delay: Duration,
    ) -> Result<bool, StoreError>;
}

/// Questions as people see them. They are written by the commit that pauses ([`StepCommit::questions`])
/// and answered by [`Runs::create_run`] ([`Admission::answers`]), both under the thread's lock.
#[async_trait]
pub trait Interrupts: Send + Sync + 'static {
    /// Questions, oldest first; a page costs the same however many there are.
    async fn interrupts(&self, scope: &Scope, filter: &InterruptFilter) -> Result<Vec<InterruptRecord>, StoreError>;

    /// One question.
    async fn interrupt(&self, scope: &Scope, id: &str) -> Result<Option<InterruptRecord>, StoreError>;

    /// Open questions of all tenants whose time is over and that have a default answer, the oldest
    /// first, at most `limit`. Nothing is written: whoever applies the default goes through
    /// [`Runs::create_run`], as every answer does.
    async fn due_for_expiry(&self, limit: u32) -> Result<Vec<InterruptRecord>, StoreError>;
}

/// The ledger of tool calls: no call is forgotten, none is silently repeated.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Says, before any of them starts, what a step is about to do: one transaction under its lease for
    /// all its calls, durable on return; one answer per intent, in order. Each call may be named
    /// once. The same intents under the same lease are answered the same again, so a lost answer
    /// may be asked for once more. What is decided is the same in every store: `ledger.rs`.
    async fn begin_calls(&self, step: StepId, lease: LeaseToken, intents: &[Intent]) -> Result<Vec<Begun>, StoreError>;

    /// Stores a call's result by its intent's own token, also after the lease is lost: it is a fact.
    /// The first result counts.
    async fn finish_call(&self, key: &CallKey, token: LeaseToken, result: &CallResult) -> Result<Finished, StoreError>;

    /// The calls of a thread, in the order of their first start.
    async fn calls(&self, scope: &Scope, thread: &ThreadId) -> Result<Vec<ToolExecution>, StoreError>;
}

/// Threads as a client sees them.
#[async_trait]
pub trait Threads: Send + Sync + 'static {
    /// One thread.
    async fn thread(&self, scope: &Scope, id: &ThreadId) -> Result<Option<ThreadRecord>, StoreError>;

    /// Threads, in order of creation; `search` is a case-insensitive part of any value.
    async fn threads(&self, scope: &Scope, search: Option<&str>, page: Page) -> Result<Vec<ThreadRecord>, StoreError>;

    /// Deletes a thread with all that belongs to it; whether it existed.
    ///
    /// # Errors
    /// [`StoreError::Busy`] while a run is active.
    async fn delete_thread(&self, scope: &Scope, id: &ThreadId) -> Result<bool, StoreError>;

    /// The stored state at `version` (`None` = now): fields without defaults. `None` for a thread
    /// without state.
    async fn state(
        &self,
        scope: &Scope,
        id: &ThreadId,
        version: Option<i64>,
    ) -> Result<Option<StoredState>, StoreError>;

    /// Edits the state as a version of its own, creating the thread if it is new.
    ///
    /// # Errors
    /// [`StoreError::Busy`] while a run is active.
    async fn edit_state(&self, scope: &Scope, edit: StateEdit) -> Result<StoredState, StoreError>;

    /// Clears the state, its history too; the message log stays, and ids may come back.
    ///
    /// # Errors
    /// [`StoreError::Busy`] while a run is active.
    async fn clear_state(&self, scope: &Scope, id: &ThreadId) -> Result<(), StoreError>;

    /// The message log, oldest first; `search` is a case-insensitive part of the text.
    async fn messages(
        &self,
        scope: &Scope,
        id: &ThreadId,
        search: Option<&str>,
        page: Page,
    ) -> Result<Vec<Message>, StoreError>;

    /// One message of the log, by either spelling of its id.
    async fn message(&self, scope: &Scope, id: &ThreadId, message: &str) -> Result<Option<Message>, StoreError>;

    /// Appends to the log only, creating the thread if it is new; gives no state to a thread
    /// without one. An id that lives on the thread keeps its first body: whoever writes it again
    /// only adds it to the list (context or log) it was missing in.
    ///
    /// # Errors
    /// [`StoreError::Busy`] while a run is active.
    async fn put_messages(&self, scope: &Scope, put: PutMessages) -> Result<(), StoreError>;

    /// Removes a message from log and context; whether it existed.
    ///
    /// # Errors
    /// [`StoreError::Busy`] while a run is active.
    async fn delete_message(&self, scope: &Scope, id: &ThreadId, message: &str) -> Result<bool, StoreError>;

    /// Drops the messages `choose` names from the context (not the log) as a version of their own,
    /// with an audit entry by `who`; the state before, and how many left. Nothing to drop: nothing
    /// is written. `None` for a thread without state.
    ///
    /// # Errors
    /// [`StoreError::Busy`] while a run is active, [`StoreError::Asked`] while questions of its pause are
    /// open: their calls are not answered yet, and will be.
    async fn fix(
        &self,
        scope: &Scope,
        id: &ThreadId,
        who: &str,
        choose: &(dyn for<'a> Fn(&'a [Message]) -> Vec<MessageId> + Send + Sync),
    ) -> Result<Option<(StoredState, usize)>, StoreError>;
}

/// What the scheduler and the operators ask.
#[async_trait]
pub trait Upkeep: Send + Sync + 'static {
    /// Takes backlog steps of a pool and class for sending: at most `tenants` tenants after
    /// `after`, in turn, `each` steps each. Fewer tenants than asked: begin again at "". Steps of a
    /// version in `except` stay where they are: their streams are full, for few or no workers have
    /// the code, and they must not use up the places of steps that could run.
    async fn dispatch(
        &self,
        pool: &PoolName,
        class: i16,
        after: &Tenant,
        tenants: u32,
        each: u32,
        except: &[GraphVersion],
    ) -> Result<Vec<(Job, Tenant)>, StoreError>;

    /// Puts steps that could not be sent back into the backlog, so that whoever takes work from the
    /// store finds them at once; steps that are not ready any more are left alone.
    async fn unsend(&self, steps: &[StepId]) -> Result<(), StoreError>;

    /// Pools and classes that have backlog steps.
    async fn backlog_lanes(&self) -> Result<Vec<(PoolName, i16)>, StoreError>;

    /// Looks at what is due, at most `limit` rows: ready → to be sent again, delayed → ready,
    /// leased → ready, its run `queued`, to be sent, or (no attempt left) its run failed with
    /// `worker_crash`, the thread usable. Expired leases are left alone unless `expire`.
    async fn sweep(&self, limit: u32, expire: bool) -> Result<Swept, StoreError>;

    /// When Postgres started, by its own clock, and what that clock says now.
    async fn clock(&self) -> Result<StoreClock, StoreError>;

    /// Mends what no rule should allow (a busy thread without a run, a running run without an open
    /// step), each with an audit entry; how many.
    async fn repair(&self, limit: u32) -> Result<u32, StoreError>;

    /// Says that this worker lives, and what it serves.
    async fn worker_seen(&self, worker: &WorkerRecord) -> Result<(), StoreError>;

    /// Forgets a worker that ended politely.
    async fn worker_gone(&self, worker: WorkerId) -> Result<(), StoreError>;

    /// Per pool: what waits, what runs, who serves.
    async fn pools(&self) -> Result<Vec<PoolRecord>, StoreError>;

    /// Runs by status, for the metrics.
    async fn run_counts(&self) -> Result<Vec<(crate::domain::RunStatus, i64)>, StoreError>;

    /// The audit entries of a thread, oldest first.
    async fn audit(&self, scope: &Scope, id: &ThreadId) -> Result<Vec<AuditRecord>, StoreError>;
}

/// The state a step starts from: stored values over the manifest's defaults.
#[must_use]
pub fn full_state(manifest: &crate::graph::Manifest, stored: &StoredState) -> ThreadState {
    ThreadState {
        context: stored.context.clone(),
        context_summary: stored.fields.get("context_summary").cloned(),
        execution_meta: stored.meta.clone(),
        fields: manifest.fields_with(&stored.fields),
    }
}

/// Used by [`StoreClock`].
pub(crate) type Time = DateTime<Utc>;

/// A map of field values.
pub(crate) type Fields = JsonMap;
