//! Creating a run: the key, the thread, the decision, then all rows at once.

use std::collections::HashSet;

use super::clock::span;
use super::tables::{IdempotencyRow, StepRow, Tables, ThreadRow};
use crate::domain::meta::START;
use crate::domain::{Caller, ExecutionMeta, GraphVersion, MessageId, RunId, RunStatus, StepId, ThreadId, ThreadKey};
use crate::graph::admission::{Admission, Start, ThreadView};
use crate::store::{
    Admit, Created, FirstStep, NewRun, NewlyCreated, RunRecord, StepRecord, StepStatus, StillPaused, StoreError, Time,
};

/// Creates the run `new`, or answers with the one its key made before.
pub(super) fn create_run(tables: &mut Tables, new: NewRun, admit: Admit<'_>, now: Time) -> Result<Created, StoreError> {
    if let Some(run) = replayed(tables, &new, now)? {
        return Ok(Created::Replayed(Box::new(run)));
    }
    let key = tables.thread_ids.get(&(new.caller.tenant.clone(), new.thread_id.clone())).copied();
    if let Some(thread) = key.map(|key| &tables.threads[&key]).filter(|thread| !is_owner(thread, &new.caller)) {
        return Err(StoreError::NoSuchThread(thread.id.clone()));
    }
    let view = key.map(|key| view(tables, &tables.threads[&key], &new.message_ids, now));
    let admission = admit(view.as_ref())?;
    let still_paused = key.filter(|_| admission.start == Start::StillPaused);
    let still_paused = still_paused.and_then(|key| Some((key, tables.threads[&key].last_run?)));
    if let Some(key) = key {
        tables.answer(key, &admission.answers, now)?;
    }

    if let Some(key) = &new.idempotency {
        let run = still_paused.map_or(new.id, |(_, paused)| paused);
        let row = IdempotencyRow { run, body_hash: key.body_hash.clone(), expires_at: now + span(key.ttl) };
        tables.idempotency.insert((new.caller.tenant.clone(), new.caller.user.clone(), key.key.clone()), row);
    }
    if let Some((key, paused)) = still_paused {
        return Ok(Created::StillPaused(Box::new(stay_paused(tables, key, paused, admission, now))));
    }
    let key = key.unwrap_or_else(|| {
        let named = (new.thread_name.clone(), new.thread_meta.clone());
        insert_thread(tables, &new.thread_id, &new.caller, (&new.graph, &admission.graph_version), named, now)
    });
    Ok(Created::New(Box::new(write(tables, new, key, view.is_none(), admission, now))))
}

/// Answers were recorded and others are awaited: messages and place are a version of their own.
fn stay_paused(tables: &mut Tables, key: ThreadKey, paused: RunId, admission: Admission, now: Time) -> StillPaused {
    let thread = tables.thread_of(key);
    let version = thread.edited(admission.meta.clone(), now);
    thread.add_to_context(&admission.messages, true, version);
    let run = tables.run_view(paused).expect("the thread's last run is there");
    StillPaused { run, messages: admission.messages, version, meta: admission.meta }
}

/// The run an unexpired key made, if its body was the same.
fn replayed(tables: &Tables, new: &NewRun, now: Time) -> Result<Option<RunRecord>, StoreError> {
    let Some(key) = &new.idempotency else { return Ok(None) };
    let id = (new.caller.tenant.clone(), new.caller.user.clone(), key.key.clone());
    match tables.idempotency.get(&id).filter(|row| row.expires_at > now) {
        Some(row) if row.body_hash != key.body_hash => Err(StoreError::IdempotencyMismatch),
        Some(row) => Ok(tables.run_view(row.run)),
        None => Ok(None),
    }
}

fn view(tables: &Tables, thread: &ThreadRow, asked: &[MessageId], now: Time) -> ThreadView {
    let asked: HashSet<&MessageId> = asked.iter().collect();
    let known = thread.context().map(|(_, message)| &message.message_id).filter(|id| asked.contains(id));
    let last_run = thread.last_run.and_then(|run| tables.runs.get(&run));
    let mut view = ThreadView {
        graph: thread.graph.clone(),
        graph_version: thread.graph_version.clone(),
        meta: thread.meta.clone(),
        active_run: thread.active_run,
        known_ids: known.cloned().collect(),
        last_role: thread.context().next_back().map(|(_, message)| message.role),
        last_error: last_run.and_then(|run| run.error.as_ref()).map(|error| error.code.clone()),
        open: Vec::new(),
        answered: Vec::new(),
    };
    tables.add_questions(&mut view, thread, now);
    view
}

pub(super) fn is_owner(thread: &ThreadRow, caller: &Caller) -> bool {
    thread.is_visible_to(&caller.scope())
}

/// A thread without state.
pub(super) fn insert_thread(
    tables: &mut Tables,
    id: &ThreadId,
    caller: &Caller,
    (graph, version): (&str, &GraphVersion),
    (name, meta_of_client): (Option<String>, Option<crate::domain::Json>),
    now: Time,
) -> ThreadKey {
    tables.last_key += 1;
    let key = ThreadKey(tables.last_key);
    tables.thread_ids.insert((caller.tenant.clone(), id.clone()), key);
    let thread = ThreadRow {
        key,
        tenant: caller.tenant.clone(),
        id: id.clone(),
        user: caller.user.clone(),
        name,
        graph: graph.to_owned(),
        graph_version: version.clone(),
        meta_of_client,
        version: 0,
        active_run: None,
        stop_run: None,
        last_run: None,
        meta: ExecutionMeta::fresh(id.as_str()),
        has_state: false,
        floor: 0,
        updated_at: now,
        messages: Vec::new(),
        fields: std::collections::HashMap::new(),
        checkpoints: Vec::new(),
    };
    tables.threads.insert(key, thread);
    key
}

fn write(
    tables: &mut Tables,
    new: NewRun,
    key: ThreadKey,
    is_new_thread: bool,
    admission: Admission,
    now: Time,
) -> NewlyCreated {
    let run = run_record(tables, &new, key, &admission, now);
    let (id, class, tenant) = (run.id, run.class, run.tenant.clone());
    tables.runs.insert(id, run);
    let thread = tables.thread_of(key);
    let step = StepId { run_id: id, seq: 0 };
    let version = thread.checkpoint(Some(step), START, admission.meta.clone(), now);
    thread.graph_version = admission.graph_version.clone();
    thread.has_state = true;
    thread.last_run = Some(id);
    thread.add_to_context(&admission.messages, true, version);
    thread.write_fields(&admission.fields, version);

    let lane = match &admission.start {
        Start::Node(node) => {
            thread.active_run = Some(id);
            let at = first_step(&new, &admission, node);
            let seq = i32::from(node != START);
            let row = step_row(StepId { run_id: id, seq }, node, &at, now);
            let lane = (at.pool, class);
            let version = admission.graph_version.clone();
            tables.steps.insert(row.id, new_step(row, key, tenant, class, version, None));
            Some(lane)
        }
        Start::Completed => close(tables, id, RunStatus::Completed, now),
        Start::Interrupted | Start::StillPaused => close(tables, id, RunStatus::Interrupted, now),
    };
    let run = tables.run_view(id).expect("it was just inserted");
    NewlyCreated { run, is_new_thread, messages: admission.messages, version, meta: admission.meta, lane }
}

fn close<T>(tables: &mut Tables, id: RunId, status: RunStatus, now: Time) -> Option<T> {
    tables.close_run(id, status, None, now);
    None
}

fn first_step(new: &NewRun, admission: &Admission, node: &str) -> FirstStep {
    let chosen = new.versions.iter().find(|(version, _)| *version == admission.graph_version);
    let (_, manifest) = chosen.expect("the admission chose one of these versions");
    FirstStep::of(manifest, node)
}

fn run_record(tables: &Tables, new: &NewRun, key: ThreadKey, admission: &Admission, now: Time) -> RunRecord {
    let thread = &tables.threads[&key];
    let last = thread.last_run.and_then(|run| tables.runs.get(&run));
    let paused = last.filter(|run| admission.continues && run.status == RunStatus::Interrupted);
    RunRecord {
        id: new.id,
        client_run_id: new.client_run_id.clone(),
        root: paused.map_or(new.id, |run| run.root),
        resumes: paused.map(|run| run.id),
        thread_id: thread.id.clone(),
        thread_key: key,
        tenant: thread.tenant.clone(),
        user: thread.user.clone(),
        graph: new.graph.clone(),
        graph_version: admission.graph_version.clone(),
        class: new.class,
        status: RunStatus::Queued,
        input: new.input.clone(),
        config: new.config.clone(),
        step_limit: new.step_limit,
        node_timeout: new.node_timeout,
        error: None,
        trace: new.trace.clone(),
        observability: new.observability,
        version: 0,
        created_at: now,
        started_at: None,
        finished_at: None,
    }
}

/// A step that is ready now.
pub(super) fn step_row(id: StepId, node: &str, at: &FirstStep, now: Time) -> StepRecord {
    StepRecord {
        id,
        node: node.to_owned(),
        pool: at.pool.clone(),
        status: StepStatus::Ready,
        attempt: 0,
        attempts_max: at.attempts_max,
        worker: None,
        version: None,
        started_at: None,
        finished_at: None,
        run_at: now,
        attempts: Vec::new(),
    }
}

pub(super) fn new_step(
    record: StepRecord,
    thread: ThreadKey,
    tenant: crate::domain::Tenant,
    class: i16,
    graph_version: GraphVersion,
    due_at: Option<Time>,
) -> StepRow {
    StepRow { record, thread, tenant, class, graph_version, token: None, due_at, outcome: None }
}
