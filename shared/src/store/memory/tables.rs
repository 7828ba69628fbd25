//! The rows, and what several operations do with them.

use std::collections::{BTreeMap, HashMap};

use super::RESEND_AFTER;
use super::clock::span;
use super::interrupts::InterruptRow;
use crate::domain::{
    ExecutionMeta, GraphVersion, Json, JsonMap, LeaseToken, Message, MessageId, RunId, RunStatus, Scope, StepId,
    Tenant, ThreadId, ThreadKey, UserId, WorkerId,
};
use crate::graph::engine::{self, RunError};
use crate::queue::{Job, Lane};
use crate::store::ledger::Entry;
use crate::store::{
    AttemptEnd, AttemptRecord, AuditRecord, CallKey, CommitOutcome, GraphRecord, RunRecord, StepRecord, StepStatus,
    StoreError, StoredState, Time, WorkerRecord,
};

/// What a thread's name holds until its first run is closed.
const MESSAGE_COUNT: &str = "{messages}";

/// Everything the database holds.
#[derive(Default)]
pub(super) struct Tables {
    /// In order of registration, the newest last.
    pub graphs: Vec<GraphRecord>,
    pub threads: BTreeMap<ThreadKey, ThreadRow>,
    pub thread_ids: HashMap<(Tenant, ThreadId), ThreadKey>,
    /// The key of the newest thread.
    pub last_key: i64,
    pub runs: BTreeMap<RunId, RunRecord>,
    pub steps: BTreeMap<StepId, StepRow>,
    pub idempotency: HashMap<(Tenant, UserId, String), IdempotencyRow>,
    pub workers: HashMap<WorkerId, (WorkerRecord, Time)>,
    pub audit: Vec<(ThreadKey, AuditRecord)>,
    /// In the order they were asked.
    pub interrupts: Vec<InterruptRow>,
    /// In the order of their first start.
    pub calls: Vec<(CallKey, Entry)>,
}

pub(super) struct ThreadRow {
    pub key: ThreadKey,
    pub tenant: Tenant,
    pub id: ThreadId,
    pub user: UserId,
    pub name: Option<String>,
    pub graph: String,
    pub graph_version: GraphVersion,
    pub meta_of_client: Option<Json>,
    pub version: i64,
    pub active_run: Option<RunId>,
    pub stop_run: Option<RunId>,
    pub last_run: Option<RunId>,
    pub meta: ExecutionMeta,
    pub has_state: bool,
    /// The version that cleared the state; nothing up to it is part of the state.
    pub floor: i64,
    pub updated_at: Time,
    /// By position.
    pub messages: Vec<MessageRow>,
    /// The versions of each field, oldest first.
    pub fields: HashMap<String, Vec<(i64, Json)>>,
    pub checkpoints: Vec<Checkpoint>,
}

pub(super) struct MessageRow {
    pub message: Message,
    pub in_context: bool,
    pub in_log: bool,
    pub added_in: i64,
    pub removed_in: Option<i64>,
}

/// One version of a thread.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// The version.
    pub version: i64,
    /// The step whose commit made it; `None` = an edit by a client.
    pub step: Option<StepId>,
    /// The node.
    pub node: String,
    /// When.
    pub at: Time,
    /// The place.
    pub meta: ExecutionMeta,
}

pub(super) struct StepRow {
    pub record: StepRecord,
    pub thread: ThreadKey,
    pub tenant: Tenant,
    pub class: i16,
    pub graph_version: GraphVersion,
    pub token: Option<LeaseToken>,
    pub due_at: Option<Time>,
    /// What its commit answered, for a repetition.
    pub outcome: Option<CommitOutcome>,
}

pub(super) struct IdempotencyRow {
    pub run: RunId,
    pub body_hash: String,
    pub expires_at: Time,
}

impl MessageRow {
    /// Whether the context shows it now.
    pub(super) fn is_in_context(&self) -> bool {
        self.in_context && self.removed_in.is_none()
    }

    /// Whether the context of `version` shows it.
    pub(super) fn is_in_context_at(&self, version: i64) -> bool {
        self.in_context && self.added_in <= version && self.removed_in.is_none_or(|removed| removed > version)
    }

    pub(super) fn id(&self) -> &MessageId {
        &self.message.message_id
    }
}

impl StepRow {
    /// A wake-up for this step as it is now.
    pub(super) fn job(&self, trace: Option<String>) -> Job {
        let graph = self.graph_version.is_code().then(|| self.graph_version.clone());
        let lane = Lane { pool: self.record.pool.clone(), class: self.class, graph };
        Job { step: self.record.id, lane, attempt: self.record.attempt, trace }
    }

    /// Says that the step is being sent.
    pub(super) fn sending(&mut self, now: Time) {
        self.record.status = StepStatus::Ready;
        self.due_at = Some(now + span(RESEND_AFTER));
    }

    /// Records that the current attempt ended without a commit.
    pub(super) fn attempt_ended(&mut self, end: AttemptEnd, now: Time) {
        self.record.attempts.push(AttemptRecord {
            attempt: self.record.attempt,
            worker: self.record.worker,
            started_at: self.record.started_at,
            ended_at: now,
            end,
        });
    }

    /// Nobody holds it, and it will not start again.
    pub(super) fn close(&mut self, status: StepStatus, now: Time) {
        self.record.status = status;
        self.record.finished_at = Some(now);
        self.due_at = None;
        self.token = None;
    }
}

impl ThreadRow {
    /// Whether `scope` may see it.
    pub(super) fn is_visible_to(&self, scope: &Scope) -> bool {
        self.tenant == scope.tenant && scope.owner.as_ref().is_none_or(|owner| *owner == self.user)
    }

    /// Makes the next version: `meta` is the place after it.
    pub(super) fn checkpoint(&mut self, step: Option<StepId>, node: &str, meta: ExecutionMeta, now: Time) -> i64 {
        self.version += 1;
        self.meta = meta.clone();
        self.updated_at = now;
        self.checkpoints.push(Checkpoint { version: self.version, step, node: node.to_owned(), at: now, meta });
        self.version
    }

    /// Adds messages to the context under `version`, and to the log; an id that lives in one of
    /// them keeps its body in the other.
    pub(super) fn add_to_context(&mut self, messages: &[Message], in_log: bool, version: i64) {
        for message in messages {
            let known = |row: &&MessageRow| row.id() == &message.message_id;
            if self.messages.iter().filter(known).any(MessageRow::is_in_context) {
                self.add_to_log(std::slice::from_ref(message), in_log, version);
                continue;
            }
            let logged = self.messages.iter().filter(known).find(|row| row.in_log);
            let (message, in_log) = logged.map_or((message, in_log), |row| (&row.message, false));
            let message = message.clone();
            self.messages.push(MessageRow { message, in_context: true, in_log, added_in: version, removed_in: None });
        }
    }

    /// Adds messages to the log, if it is `wanted`.
    pub(super) fn add_to_log(&mut self, messages: &[Message], wanted: bool, version: i64) {
        for message in messages.iter().filter(|_| wanted) {
            let known = |row: &&mut MessageRow| row.id() == &message.message_id;
            if self.messages.iter_mut().filter(known).any(|row| row.in_log) {
                continue;
            }
            if let Some(row) = self.messages.iter_mut().filter(known).find(|row| row.is_in_context()) {
                row.in_log = true;
                continue;
            }
            let message = message.clone();
            self.messages.push(MessageRow {
                message,
                in_context: false,
                in_log: true,
                added_in: version,
                removed_in: None,
            });
        }
    }

    /// Writes field values under `version`.
    pub(super) fn write_fields(&mut self, fields: &JsonMap, version: i64) {
        for (name, value) in fields {
            self.fields.entry(name.clone()).or_default().push((version, value.clone()));
        }
    }

    /// The living messages of the context with their positions.
    pub(super) fn context(&self) -> impl DoubleEndedIterator<Item = (usize, &Message)> {
        let rows = self.messages.iter().enumerate();
        rows.filter(|(_, row)| row.is_in_context()).map(|(position, row)| (position, &row.message))
    }

    /// The state as of `version`, if there was one.
    pub(super) fn state_at(&self, version: i64) -> Option<StoredState> {
        let checkpoint = self.checkpoints.iter().find(|checkpoint| checkpoint.version == version)?;
        if !self.has_state || version <= self.floor {
            return None;
        }
        let context = self.messages.iter().filter(|row| row.is_in_context_at(version));
        let latest = |values: &Vec<(i64, Json)>| {
            values
                .iter()
                .rev()
                .find(|(written, _)| (self.floor + 1..=version).contains(written))
                .map(|(_, value)| value.clone())
        };
        Some(StoredState {
            graph_version: self.graph_version.clone(),
            version,
            meta: checkpoint.meta.clone(),
            context: context.map(|row| row.message.clone()).collect(),
            fields: self.fields.iter().filter_map(|(name, values)| Some((name.clone(), latest(values)?))).collect(),
        })
    }
}

impl Tables {
    pub(super) fn find_thread(&self, tenant: &Tenant, id: &ThreadId) -> Option<&ThreadRow> {
        let key = self.thread_ids.get(&(tenant.clone(), id.clone()))?;
        self.threads.get(key)
    }

    /// The thread, if `scope` may see it.
    pub(super) fn visible_thread(&mut self, scope: &Scope, id: &ThreadId) -> Option<&mut ThreadRow> {
        let key = self.thread_ids.get(&(scope.tenant.clone(), id.clone()))?;
        self.threads.get_mut(key).filter(|thread| thread.is_visible_to(scope))
    }

    /// The same for an edit, which an active run forbids.
    pub(super) fn idle_thread(&mut self, scope: &Scope, id: &ThreadId) -> Result<Option<&mut ThreadRow>, StoreError> {
        match self.visible_thread(scope, id) {
            Some(thread) if thread.active_run.is_some() => Err(StoreError::Busy(id.clone())),
            thread => Ok(thread),
        }
    }

    pub(super) fn thread_of(&mut self, key: ThreadKey) -> &mut ThreadRow {
        self.threads.get_mut(&key).expect("steps and runs are deleted with their thread")
    }

    /// The step of a run that is not over.
    pub(super) fn open_step(&self, run: RunId) -> Option<&StepRow> {
        self.steps_of(run).find(|step| step.record.is_open())
    }

    pub(super) fn steps_of(&self, run: RunId) -> impl DoubleEndedIterator<Item = &StepRow> {
        let (first, last) = (StepId { run_id: run, seq: i32::MIN }, StepId { run_id: run, seq: i32::MAX });
        self.steps.range(first..=last).map(|(_, step)| step)
    }

    pub(super) fn trace_of(&self, run: RunId) -> Option<String> {
        self.runs.get(&run)?.trace.clone()
    }

    /// A run as a client sees it: its version is the thread's while it is not closed.
    pub(super) fn run_view(&self, id: RunId) -> Option<RunRecord> {
        let mut run = self.runs.get(&id)?.clone();
        if !run.status.is_final() {
            run.version = self.threads[&run.thread_key].version;
        }
        Some(run)
    }

    /// Closes a run and frees its thread.
    pub(super) fn close_run(&mut self, id: RunId, status: RunStatus, error: Option<RunError>, now: Time) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        let thread = self.threads.get_mut(&run.thread_key).expect("runs are deleted with their thread");
        run.status = status;
        run.error = error;
        run.finished_at = Some(now);
        run.version = thread.version;
        if let Some(name) = thread.name.as_mut().filter(|name| name.contains(MESSAGE_COUNT)) {
            let messages = thread.messages.iter().filter(|row| row.is_in_context()).count();
            *name = name.replace(MESSAGE_COUNT, &messages.to_string());
        }
        if thread.active_run == Some(id) {
            thread.active_run = None;
        }
        if thread.stop_run == Some(id) {
            thread.stop_run = None;
        }
    }

    /// Closes the run of a step that nobody holds, because of a stop.
    pub(super) fn stop_at(&mut self, id: StepId, now: Time) {
        let step = self.steps.get_mut(&id).expect("the caller has just seen it");
        step.close(StepStatus::Cancelled, now);
        let (key, node) = (step.thread, step.record.node.clone());
        let thread = self.thread_of(key);
        let meta = engine::stopped(thread.meta.clone(), &node, thread.meta.step);
        thread.checkpoint(Some(id), &node, meta, now);
        self.close_run(id.run_id, RunStatus::Stopped, None, now);
    }

    /// Whether a stop is recorded for the run.
    pub(super) fn is_stop_requested(&self, key: ThreadKey, run: RunId) -> bool {
        self.threads.get(&key).is_some_and(|thread| thread.stop_run == Some(run))
    }

    pub(super) fn write_audit(&mut self, key: ThreadKey, who: &str, action: &str, detail: Json, at: Time) {
        let entry = AuditRecord { at, who: who.to_owned(), action: action.to_owned(), detail };
        self.audit.push((key, entry));
    }
}

impl StepRecord {
    /// Whether it may still start or commit.
    fn is_open(&self) -> bool {
        matches!(self.status, StepStatus::Delayed | StepStatus::Ready | StepStatus::Leased)
    }
}
