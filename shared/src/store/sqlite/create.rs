//! Accepting a run: key, thread, decision and all rows in one transaction.

use std::collections::HashSet;

use sqlx::SqliteConnection;

use super::row::{Answer, Columns, Doing, json_text, micros, span};
use super::thread::{NewThread, Thread, ThreadStatus, role};
use super::{interrupts, run};
use crate::domain::meta::START;
use crate::domain::{Message, Role, RunId, RunStatus, StepId, ThreadKey};
use crate::graph::admission::{Admission, Start, ThreadView};
use crate::store::{Admit, Created, FirstStep, NewRun, NewlyCreated, RunRecord, StillPaused, StoreError, Time};

const DOING: &str = "create a run";

/// See [`crate::store::Runs::create_run`].
pub(super) async fn create(
    db: &mut SqliteConnection,
    new: NewRun,
    admit: Admit<'_>,
    now: Time,
) -> Result<Created, StoreError> {
    if let Some(run) = take_key(db, &new, now).await? {
        return Ok(Created::Replayed(Box::new(run)));
    }
    let known = Thread::find(db, &new.caller.tenant, &new.thread_id).await.doing(DOING)?;
    if known.as_ref().is_some_and(|thread| !thread.is_visible(&new.caller.scope())) {
        return Err(StoreError::NoSuchThread(new.thread_id));
    }
    let last = match known.as_ref().and_then(|thread| thread.last_run) {
        Some(last) => run::find(db, last).await.doing(DOING)?,
        None => None,
    };
    let view = match &known {
        Some(thread) => Some(view(db, thread, &new, last.as_ref(), now).await?),
        None => None,
    };
    let admission = admit(view.as_ref())?;
    if let (Some(thread), Some(view)) = (&known, &view) {
        interrupts::answer(db, thread, &view.open, &admission.answers, now).await?;
    }
    let is_new_thread = known.is_none();
    let thread = match known {
        Some(thread) => thread,
        None => insert_thread(db, &new, &admission, now).await?,
    };
    if admission.start == Start::StillPaused
        && let Some(paused) = &last
    {
        let still = still_paused(db, &new, thread, admission, paused.id, now).await?;
        return Ok(Created::StillPaused(Box::new(still)));
    }
    let paused = last.filter(|last| admission.continues && last.status == RunStatus::Interrupted);
    write(db, &new, thread, admission, paused.as_ref(), is_new_thread, now).await
}

/// Answers were recorded and others are awaited: messages and place are a version of their own, and
/// the client's key stands for the paused run.
async fn still_paused(
    db: &mut SqliteConnection,
    new: &NewRun,
    mut thread: Thread,
    admission: Admission,
    paused: RunId,
    now: Time,
) -> Result<StillPaused, StoreError> {
    thread.version += 1;
    thread.meta = admission.meta.clone();
    thread.append_context(db, &admission.messages, true).await.doing(DOING)?;
    thread.checkpoint(db, None, &thread.meta.current_node, now).await.doing(DOING)?;
    thread.save(db, now).await.doing(DOING)?;
    if let Some(idempotency) = &new.idempotency {
        sqlx::query("update idempotency set run_id = ?4 where tenant = ?1 and user_id = ?2 and key = ?3")
            .bind(new.caller.tenant.as_str())
            .bind(new.caller.user.as_str())
            .bind(&idempotency.key)
            .bind(paused.to_string())
            .execute(&mut *db)
            .await
            .doing(DOING)?;
    }
    let run = run::find(db, paused).await.doing(DOING)?.expect("it was read by this transaction");
    Ok(StillPaused { run, messages: admission.messages, version: thread.version, meta: admission.meta })
}

/// Takes the client's key, or finds the run that has it.
async fn take_key(db: &mut SqliteConnection, new: &NewRun, now: Time) -> Result<Option<RunRecord>, StoreError> {
    let Some(idempotency) = &new.idempotency else {
        return Ok(None);
    };
    let key = [new.caller.tenant.as_str(), new.caller.user.as_str(), &idempotency.key];
    let row = sqlx::query(
        "select body_hash, run_id from idempotency where tenant = ?1 and user_id = ?2 and key = ?3 and expires_at > ?4",
    )
    .bind(key[0])
    .bind(key[1])
    .bind(key[2])
    .bind(micros(now))
    .fetch_optional(&mut *db)
    .await
    .doing(DOING)?;
    if let Some(row) = row {
        if row.text("body_hash").doing(DOING)? != idempotency.body_hash {
            return Err(StoreError::IdempotencyMismatch);
        }
        let id: RunId = row.id("run_id").doing(DOING)?;
        let run = run::find(db, id).await.doing(DOING)?;
        let gone = || StoreError::Corrupt { doing: DOING, message: format!("the run {id} of this key is gone") };
        return run.ok_or_else(gone).map(Some);
    }
    sqlx::query(
        "insert into idempotency (tenant, user_id, key, body_hash, run_id, expires_at) values (?1, ?2, ?3, ?4, ?5, ?6)
             on conflict (tenant, user_id, key) do update
            set body_hash = excluded.body_hash, run_id = excluded.run_id, expires_at = excluded.expires_at",
    )
    .bind(key[0])
    .bind(key[1])
    .bind(key[2])
    .bind(&idempotency.body_hash)
    .bind(new.id.to_string())
    .bind(micros(now) + span(idempotency.ttl))
    .execute(db)
    .await
    .doing(DOING)?;
    Ok(None)
}

async fn view(
    db: &mut SqliteConnection,
    thread: &Thread,
    new: &NewRun,
    last: Option<&RunRecord>,
    now: Time,
) -> Result<ThreadView, StoreError> {
    let mut known_ids = HashSet::new();
    for id in &new.message_ids {
        let found = sqlx::query(
            "select 1 from message where thread_key = ?1 and message_id = ?2 and in_context = 1 and removed_in is null",
        )
        .bind(thread.key.0)
        .bind(&id.text)
        .fetch_optional(&mut *db)
        .await
        .doing(DOING)?;
        if found.is_some() {
            known_ids.insert(id.clone());
        }
    }
    let mut view = ThreadView {
        graph: thread.graph.clone(),
        graph_version: thread.graph_version.clone(),
        meta: thread.meta.clone(),
        active_run: thread.active_run,
        known_ids,
        last_role: last_role(db, thread.key).await?,
        last_error: last.and_then(|run| run.error.as_ref()).map(|error| error.code.clone()),
        open: Vec::new(),
        answered: Vec::new(),
    };
    let paused =
        last.filter(|last| last.status == RunStatus::Interrupted && thread.status == ThreadStatus::Interrupted);
    if let Some(paused) = paused {
        interrupts::add_to_view(db, paused.id, &mut view, now).await.doing(DOING)?;
    }
    Ok(view)
}

async fn last_role(db: &mut SqliteConnection, key: ThreadKey) -> Result<Option<Role>, StoreError> {
    let row = sqlx::query(
        "select role from message where thread_key = ?1 and in_context = 1 and removed_in is null
          order by position desc limit 1",
    )
    .bind(key.0)
    .fetch_optional(db)
    .await
    .doing(DOING)?;
    row.map(|row| row.word("role", role)).transpose().doing(DOING)
}

async fn insert_thread(
    db: &mut SqliteConnection,
    new: &NewRun,
    admission: &Admission,
    now: Time,
) -> Result<Thread, StoreError> {
    let thread = NewThread {
        tenant: &new.caller.tenant,
        id: &new.thread_id,
        user: &new.caller.user,
        name: new.thread_name.as_deref(),
        meta: new.thread_meta.as_ref(),
        graph: &new.graph,
        graph_version: &admission.graph_version,
    };
    Thread::insert(db, &thread, now).await.doing(DOING)
}

/// Writes what was admitted; `paused` is the run it resumes.
async fn write(
    db: &mut SqliteConnection,
    new: &NewRun,
    mut thread: Thread,
    admission: Admission,
    paused: Option<&RunRecord>,
    is_new_thread: bool,
    now: Time,
) -> Result<Created, StoreError> {
    let status = match admission.start {
        Start::Node(_) => RunStatus::Queued,
        Start::Completed => RunStatus::Completed,
        Start::Interrupted | Start::StillPaused => RunStatus::Interrupted,
    };
    let first = match &admission.start {
        Start::Node(node) => Some((node.as_str(), first_step(new, &admission, node)?)),
        Start::Completed | Start::Interrupted | Start::StillPaused => None,
    };
    // A resume stays in the class and the trace of its chain.
    let class = paused.map_or(new.class, |paused| paused.class);

    thread.version += 1;
    thread.meta = admission.meta;
    thread.graph_version = admission.graph_version;
    thread.status = ThreadStatus::after(status);
    thread.active_run = status.is_active().then_some(new.id);
    thread.last_run = Some(new.id);
    thread.has_state = true;
    let first_position = thread.next_position;
    thread.append_context(db, &admission.messages, true).await.doing(DOING)?;
    thread.write_fields(db, &admission.fields).await.doing(DOING)?;
    thread.checkpoint(db, Some(StepId { run_id: new.id, seq: 0 }), START, now).await.doing(DOING)?;
    thread.save(db, now).await.doing(DOING)?;
    insert_run(db, new, &thread, status, class, paused, now).await?;
    if let Some((node, at)) = &first {
        // The accepted input is the place before the entry, unless that must ask a condition first.
        let step = StepId { run_id: new.id, seq: i32::from(*node != START) };
        insert_step(db, &thread, step, class, node, at, now, None).await?;
    }
    let record = run::find(db, new.id).await.doing(DOING)?.expect("it was inserted by this transaction");
    Ok(Created::New(Box::new(NewlyCreated {
        run: record,
        is_new_thread,
        messages: context_from(db, thread.key, first_position).await?,
        version: thread.version,
        meta: thread.meta,
        lane: first.map(|(_, at)| (at.pool, class)),
    })))
}

/// The context's messages from `position` on, as they are stored.
async fn context_from(db: &mut SqliteConnection, key: ThreadKey, position: i64) -> Result<Vec<Message>, StoreError> {
    let rows = sqlx::query(
        "select body from message where thread_key = ?1 and position >= ?2 and in_context = 1 order by position",
    )
    .bind(key.0)
    .bind(position)
    .fetch_all(db)
    .await
    .doing(DOING)?;
    rows.iter().map(|row| row.json("body")).collect::<Answer<_>>().doing(DOING)
}

fn first_step(new: &NewRun, admission: &Admission, node: &str) -> Result<FirstStep, StoreError> {
    let manifest = new.versions.iter().find(|(version, _)| *version == admission.graph_version);
    let missing = || StoreError::Corrupt {
        doing: DOING,
        message: format!("the admission chose graph version {}, which was not offered", admission.graph_version),
    };
    manifest.map(|(_, manifest)| FirstStep::of(manifest, node)).ok_or_else(missing)
}

async fn insert_run(
    db: &mut SqliteConnection,
    new: &NewRun,
    thread: &Thread,
    status: RunStatus,
    class: i16,
    paused: Option<&RunRecord>,
    now: Time,
) -> Result<(), StoreError> {
    sqlx::query(
        "insert into run (id, client_run_id, root_id, resumes, thread_key, tenant, graph, graph_version, class, status,
                          run_at, input, config, step_limit, node_timeout, trace, observability, accepted_in, version,
                          created_at, finished_at)
         values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?11, ?20)",
    )
    .bind(new.id.to_string())
    .bind(new.client_run_id.as_deref())
    .bind(paused.map_or(new.id, |paused| paused.root).to_string())
    .bind(paused.map(|paused| paused.id.to_string()))
    .bind(thread.key.0)
    .bind(thread.tenant.as_str())
    .bind(&thread.graph)
    .bind(thread.graph_version.as_str())
    .bind(class)
    .bind(status.as_str())
    .bind(micros(now))
    .bind(json_text(&new.input))
    .bind(json_text(&new.config))
    .bind(new.step_limit)
    .bind(new.node_timeout.map(span))
    .bind(paused.and_then(|paused| paused.trace.as_deref()).or(new.trace.as_deref()))
    .bind(new.observability)
    .bind(thread.version)
    .bind(status.is_final().then_some(thread.version))
    .bind(status.is_final().then_some(micros(now)))
    .execute(db)
    .await
    .map(drop)
    .doing(DOING)
}

/// Adds a ready step; `due_at` null makes it backlog.
#[expect(clippy::too_many_arguments, reason = "one row, written in three places; a struct would be named once each")]
pub(super) async fn insert_step(
    db: &mut SqliteConnection,
    thread: &Thread,
    id: StepId,
    class: i16,
    node: &str,
    at: &FirstStep,
    now: Time,
    due_at: Option<i64>,
) -> Result<(), StoreError> {
    sqlx::query(
        "insert into step (run_id, seq, thread_key, tenant, pool, class, graph_version, node, attempts_max, run_at,
                           due_at)
         values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
    )
    .bind(id.run_id.to_string())
    .bind(id.seq)
    .bind(thread.key.0)
    .bind(thread.tenant.as_str())
    .bind(at.pool.as_str())
    .bind(class)
    .bind(thread.graph_version.as_str())
    .bind(node)
    .bind(at.attempts_max)
    .bind(micros(now))
    .bind(due_at)
    .execute(db)
    .await
    .map(drop)
    .doing("add a step")
}

/// Expired keys, so that the table stays as small as what it protects.
pub(super) async fn forget_keys(db: &mut SqliteConnection, now: Time) -> Result<(), StoreError> {
    let limit =
        "delete from idempotency where rowid in (select rowid from idempotency where expires_at <= ?1 limit 100)";
    sqlx::query(limit).bind(micros(now)).execute(db).await.map(drop).doing("forget old idempotency keys")
}
