//! Ending a run: what every end has in common.

use sqlx::SqliteConnection;

use super::row::{Doing, json_text, micros};
use super::run::Step;
use super::thread::Thread;
use crate::domain::{Message, RunId, RunStatus, StepId};
use crate::graph::engine::{RunError, errored, stopped};
use crate::store::{AttemptEnd, StepStatus, StoreError, Time};

const DOING: &str = "close a run";

/// Writes a run's end; the first end of a run is the time it finished.
pub(super) async fn end_run(
    db: &mut SqliteConnection,
    run: RunId,
    status: RunStatus,
    error: Option<&RunError>,
    version: i64,
    now: Time,
) -> Result<(), StoreError> {
    sqlx::query(
        "update run set status = ?2, error = ?3, version = ?4, finished_at = coalesce(finished_at, ?5) where id = ?1",
    )
    .bind(run.to_string())
    .bind(status.as_str())
    .bind(error.map(json_text))
    .bind(version)
    .bind(micros(now))
    .execute(db)
    .await
    .map(drop)
    .doing(DOING)
}

/// Closes a run under a stop, outside of a commit: its open step (none if it is paused) is
/// cancelled, the place it was at is kept as a version of its own.
pub(super) async fn stop_now(
    db: &mut SqliteConnection,
    thread: &mut Thread,
    run: RunId,
    open: Option<&Step>,
    now: Time,
) -> Result<(), StoreError> {
    let (node, step) = (thread.meta.current_node.clone(), thread.meta.step);
    thread.meta = stopped(thread.meta.clone(), &node, step);
    cancel_steps(db, run, StepStatus::Cancelled, now).await?;
    close(db, thread, (run, open.map(|step| step.id)), RunStatus::Stopped, None, now).await
}

/// Closes a paused run under a stop; the calls of its questions get the results `denied`.
pub(super) async fn stop_paused(
    db: &mut SqliteConnection,
    thread: &mut Thread,
    run: RunId,
    denied: &[Message],
    now: Time,
) -> Result<(), StoreError> {
    let (node, step) = (thread.meta.current_node.clone(), thread.meta.step);
    thread.meta = stopped(thread.meta.clone(), &node, step);
    thread.version += 1;
    thread.append_context(db, denied, true).await.doing(DOING)?;
    finish(db, thread, (run, None), RunStatus::Stopped, None, now).await
}

/// Closes a run that cannot go on: the thread is usable, at the place where it failed.
pub(super) async fn fail_now(
    db: &mut SqliteConnection,
    thread: &mut Thread,
    run: RunId,
    open: Option<&Step>,
    error: &RunError,
    now: Time,
) -> Result<(), StoreError> {
    thread.meta = errored(thread.meta.clone(), error);
    cancel_steps(db, run, StepStatus::Failed, now).await?;
    close(db, thread, (run, open.map(|step| step.id)), RunStatus::Failed, Some(error), now).await
}

async fn close(
    db: &mut SqliteConnection,
    thread: &mut Thread,
    (run, step): (RunId, Option<StepId>),
    status: RunStatus,
    error: Option<&RunError>,
    now: Time,
) -> Result<(), StoreError> {
    thread.version += 1;
    finish(db, thread, (run, step), status, error, now).await
}

/// Everything of a close but the new version.
async fn finish(
    db: &mut SqliteConnection,
    thread: &mut Thread,
    (run, step): (RunId, Option<StepId>),
    status: RunStatus,
    error: Option<&RunError>,
    now: Time,
) -> Result<(), StoreError> {
    thread.release(status);
    thread.checkpoint(db, step, &thread.meta.current_node, now).await.doing(DOING)?;
    thread.save(db, now).await.doing(DOING)?;
    end_run(db, run, status, error, thread.version, now).await
}

/// Ends a run's open steps without a commit; their leases are worth nothing from now on.
pub(super) async fn cancel_steps(
    db: &mut SqliteConnection,
    run: RunId,
    status: StepStatus,
    now: Time,
) -> Result<(), StoreError> {
    sqlx::query(
        "update step set status = ?2, due_at = null, token = null, finished_at = ?3
          where run_id = ?1 and status in ('ready', 'leased', 'delayed')",
    )
    .bind(run.to_string())
    .bind(status.as_str())
    .bind(micros(now))
    .execute(db)
    .await
    .map(drop)
    .doing(DOING)
}

/// Records an attempt that ended otherwise than by a commit.
pub(super) async fn record_attempt(
    db: &mut SqliteConnection,
    step: &Step,
    end: &AttemptEnd,
    now: Time,
) -> Result<(), StoreError> {
    sqlx::query(
        "insert into step_attempt (run_id, seq, attempt, worker, started_at, ended_at, outcome, error)
         values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )
    .bind(step.id.run_id.to_string())
    .bind(step.id.seq)
    .bind(step.attempt)
    .bind(step.worker.map(|worker| worker.to_string()))
    .bind(step.started_at.map(micros))
    .bind(micros(now))
    .bind(&end.end)
    .bind(end.error.as_ref().map(json_text))
    .execute(db)
    .await
    .map(drop)
    .doing("record an attempt")
}

/// Says in the audit who did what to a thread.
pub(super) async fn audit(
    db: &mut SqliteConnection,
    thread: &Thread,
    who: &str,
    action: &str,
    detail: &crate::domain::Json,
    now: Time,
) -> Result<(), StoreError> {
    sqlx::query(
        "insert into audit (at, tenant, thread_key, thread_id, who, action, detail) values (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )
    .bind(micros(now))
    .bind(thread.tenant.as_str())
    .bind(thread.key.0)
    .bind(thread.id.as_str())
    .bind(who)
    .bind(action)
    .bind(json_text(detail))
    .execute(db)
    .await
    .map(drop)
    .doing("write an audit entry")
}
