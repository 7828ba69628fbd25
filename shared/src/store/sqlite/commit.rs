//! The end of a step: everything it changed and what follows it, visible together.

use sqlx::SqliteConnection;

use super::claim::resend_at;
use super::close::end_run;
use super::create::insert_step;
use super::row::{Answer, Columns, Doing, micros, now};
use super::run::{self, Step};
use super::thread::Thread;
use super::{Promise, SqliteStore, interrupts};
use crate::domain::{RunStatus, StepId};
use crate::store::{CommitOutcome, StepCommit, StepStatus, StoreError, Then, Time};

const DOING: &str = "commit steps";

/// See [`crate::store::Steps::commit`]: all in one transaction, or, if that fails, each in its own.
pub(super) async fn commit(store: &SqliteStore, steps: &[StepCommit]) -> Vec<Result<CommitOutcome, StoreError>> {
    match together(store, steps).await {
        Ok(outcomes) => return outcomes.into_iter().map(Ok).collect(),
        Err(error) if steps.len() == 1 => return vec![Err(error)],
        Err(_) => {} // One step's payload must not take the others along.
    }
    let mut outcomes = Vec::with_capacity(steps.len());
    for step in steps {
        let alone = together(store, std::slice::from_ref(step)).await;
        outcomes.push(alone.map(|outcomes| outcomes[0]));
    }
    outcomes
}

async fn together(store: &SqliteStore, steps: &[StepCommit]) -> Result<Vec<CommitOutcome>, StoreError> {
    let mut tx = store.begin(Promise::Durable, DOING).await?;
    let mut outcomes = Vec::with_capacity(steps.len());
    for step in steps {
        outcomes.push(commit_one(&mut tx, step, now()).await?);
    }
    tx.commit().await.doing(DOING)?;
    Ok(outcomes)
}

async fn commit_one(db: &mut SqliteConnection, commit: &StepCommit, now: Time) -> Result<CommitOutcome, StoreError> {
    let run_id = commit.step.run_id;
    let Some(step) = Step::find(db, commit.step).await.doing(DOING)? else {
        return Ok(CommitOutcome::LeaseLost);
    };
    if step.status == StepStatus::Done && step.token == Some(commit.token) {
        return repeated(db, &step, &commit.then).await;
    }
    if !step.is_held_by(commit.token) {
        return Ok(CommitOutcome::LeaseLost);
    }
    let thread = Thread::by_key(db, step.thread_key).await.doing(DOING)?;
    let unchanged = |thread: &Thread| thread.active_run == Some(run_id) && thread.version == commit.base_version;
    let Some(mut thread) = thread.filter(unchanged) else {
        return Ok(CommitOutcome::Conflict);
    };

    let goes_on = !matches!(&commit.then, Then::End { status, .. } if *status != RunStatus::Interrupted);
    let stop = goes_on && thread.stop_run == Some(run_id);
    thread.version += 1;
    thread.meta = if stop { commit.stopped_meta.clone() } else { commit.meta.clone() };
    remove(db, &thread, &commit.removed).await.doing(DOING)?;
    thread.append_context(db, &commit.messages, true).await.doing(DOING)?;
    thread.write_fields(db, &commit.fields).await.doing(DOING)?;
    thread.checkpoint(db, Some(commit.step), &step.node, now).await.doing(DOING)?;
    finish_step(db, commit.step, thread.version, now).await.doing(DOING)?;
    match &commit.then {
        _ if stop => end(db, &mut thread, commit.step, RunStatus::Stopped, None, now).await?,
        Then::End { status, error } => {
            end(db, &mut thread, commit.step, *status, error.as_ref(), now).await?;
            interrupts::ask(db, &thread, commit.step, &step.node, &commit.questions, now).await.doing(DOING)?;
        }
        Then::Next { node, at } => {
            let next = StepId { run_id, seq: commit.step.seq + 1 };
            insert_step(db, &thread, next, step.class, node, at, now, Some(resend_at(now))).await?;
        }
    }
    thread.save(db, now).await.doing(DOING)?;
    let version = thread.version;
    Ok(if stop { CommitOutcome::Stopped { version } } else { CommitOutcome::Committed { version } })
}

/// The answer to a commit that was made before: its own answer was lost.
async fn repeated(db: &mut SqliteConnection, step: &Step, then: &Then) -> Result<CommitOutcome, StoreError> {
    let version = step.version.unwrap_or_default();
    let run = run::find(db, step.id.run_id).await.doing(DOING)?;
    let stopped = run.is_some_and(|run| run.status == RunStatus::Stopped && run.version == version);
    Ok(match then {
        Then::Next { .. } | Then::End { status: RunStatus::Interrupted, .. } if stopped => {
            CommitOutcome::Stopped { version }
        }
        _ => CommitOutcome::Committed { version },
    })
}

async fn end(
    db: &mut SqliteConnection,
    thread: &mut Thread,
    step: StepId,
    status: RunStatus,
    error: Option<&crate::graph::engine::RunError>,
    now: Time,
) -> Result<(), StoreError> {
    thread.release(status);
    end_run(db, step.run_id, status, error, thread.version, now).await
}

/// A done step keeps its token, so that a repeat is known.
async fn finish_step(db: &mut SqliteConnection, id: StepId, version: i64, now: Time) -> Answer<()> {
    sqlx::query(
        "update step set status = 'done', due_at = null, version = ?3, finished_at = ?4 where run_id = ?1 and seq = ?2",
    )
    .bind(id.run_id.to_string())
    .bind(id.seq)
    .bind(version)
    .bind(micros(now))
    .execute(db)
    .await
    .map(drop)
}

/// Takes messages out of context and log, in the thread's current version.
pub(super) async fn remove(db: &mut SqliteConnection, thread: &Thread, positions: &[i64]) -> Answer<()> {
    for position in positions {
        let row = sqlx::query(
            "update message set removed_in = ?3, in_log = 0
              where thread_key = ?1 and position = ?2 and in_context = 1 and removed_in is null
          returning message_id",
        )
        .bind(thread.key.0)
        .bind(position)
        .bind(thread.version)
        .fetch_optional(&mut *db)
        .await?;
        if let Some(row) = row {
            unlog(db, thread, &row.text("message_id")?).await?;
        }
    }
    Ok(())
}

/// Takes a message out of the log; a row that is in neither list and never was in the context goes.
pub(super) async fn unlog(db: &mut SqliteConnection, thread: &Thread, message_id: &str) -> Answer<u64> {
    let only_logged =
        sqlx::query("delete from message where thread_key = ?1 and message_id = ?2 and in_log = 1 and in_context = 0")
            .bind(thread.key.0)
            .bind(message_id)
            .execute(&mut *db)
            .await?;
    let logged = sqlx::query("update message set in_log = 0 where thread_key = ?1 and message_id = ?2 and in_log = 1")
        .bind(thread.key.0)
        .bind(message_id)
        .execute(db)
        .await?;
    Ok(only_logged.rows_affected() + logged.rows_affected())
}
