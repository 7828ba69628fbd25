//! Stopping: durable, tied to one run, under the lock that every commit takes.

use serde_json::json;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::PgStore;
use super::audit::{self, Entry};
use super::close::{OpenStep, close_stopped};
use super::error::Doing;
use super::interrupts;
use super::rows::{MessageColumns, count};
use super::thread_lock::{self, LockedThread};
use crate::domain::{Message, RunId, Scope, ThreadId};
use crate::store::{StopAnswer, StoreError};

const DOING: &str = "stop a run";

impl PgStore {
    pub(super) async fn stop_thread_once(&self, scope: &Scope, id: &ThreadId) -> Result<StopAnswer, StoreError> {
        let mut tx = self.begin(DOING).await?;
        let thread = thread_lock::lock(&mut tx, scope, id).await?.and_then(|thread| thread.seen_by(scope));
        let Some(thread) = thread.filter(|thread| thread.has_state) else { return Ok(StopAnswer::NoState) };
        let answer = match (thread.active_run, thread.last_run) {
            (Some(run), _) => stop_active(&mut tx, &thread, RunId(run), audit::who(scope)).await?,
            (None, Some(run)) => stop_paused(&mut tx, &thread, RunId(run), audit::who(scope)).await?,
            (None, None) => StopAnswer::NotRunning,
        };
        tx.commit().await.doing(DOING)?;
        Ok(answer)
    }

    /// Stops the last run of the chain, whichever that is once its thread is locked.
    pub(super) async fn stop_chain_once(&self, scope: &Scope, root: RunId) -> Result<(), StoreError> {
        let mut tx = self.begin(DOING).await?;
        let key: Option<i64> = sqlx::query_scalar("select thread_key from run where id = $1")
            .bind(root.0)
            .fetch_optional(&mut *tx)
            .await
            .doing(DOING)?;
        let Some(key) = key else { return Ok(()) };
        let Some(thread) = thread_lock::lock_key(&mut tx, key).await? else { return Ok(()) };
        let last: Uuid = sqlx::query_scalar(
            "select coalesce((select id from run where root_id = $1 and root_id <> id order by place desc limit 1), $1)",
        )
        .bind(root.0)
        .fetch_one(&mut *tx)
        .await
        .doing(DOING)?;
        if thread.active_run == Some(last) {
            stop_active(&mut tx, &thread, RunId(last), audit::who(scope)).await?;
        } else {
            stop_paused(&mut tx, &thread, RunId(last), audit::who(scope)).await?;
        }
        tx.commit().await.doing(DOING)
    }
}

/// A step somebody holds gets the flag, which its commit reads; one that nobody holds never starts.
/// The step's row is locked too, so that no sweep frees a step whose stop it cannot see yet.
async fn stop_active(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    run: RunId,
    who: &str,
) -> Result<StopAnswer, StoreError> {
    let open: Option<(i32, String, bool, bool)> = sqlx::query_as(
        "select seq, node, status = 'leased', coalesce(due_at > clock_timestamp(), false) from step
          where run_id = $1 and status in ('delayed', 'ready', 'leased') order by seq desc limit 1 for no key update",
    )
    .bind(run.0)
    .fetch_optional(&mut **tx)
    .await
    .doing(DOING)?;
    let is_live = match open {
        Some((_, _, true, is_live)) => is_live,
        waiting => {
            let step = waiting.map(|(seq, node, ..)| OpenStep { seq, node });
            close_stopped(tx, thread, run, step.as_ref()).await?;
            record(tx, thread, run, who).await?;
            return Ok(StopAnswer::Running(run));
        }
    };
    if thread.run_to_stop() != Some(run) {
        sqlx::query("update thread set stop_run = $2 where key = $1")
            .bind(thread.key)
            .bind(run.0)
            .execute(&mut **tx)
            .await
            .doing(DOING)?;
        record(tx, thread, run, who).await?;
    }
    Ok(if is_live { StopAnswer::Running(run) } else { StopAnswer::NotRunning })
}

/// The only change after closing: a paused run that nobody resumed becomes a stopped one. The
/// thread's place changes only where it is still that pause.
async fn stop_paused(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    run: RunId,
    who: &str,
) -> Result<StopAnswer, StoreError> {
    let paused: bool = sqlx::query_scalar(
        "select exists (select from run r where r.id = $1 and r.status = 'interrupted'
                           and not exists (select from run n where n.resumes = r.id))",
    )
    .bind(run.0)
    .fetch_one(&mut **tx)
    .await
    .doing(DOING)?;
    if !paused {
        return Ok(StopAnswer::NotRunning);
    }
    let denied = interrupts::cancel(tx, thread, run, who).await?;
    if thread.active_run.is_none() && thread.last_run == Some(run.0) {
        close_stopped(tx, thread, run, None).await?;
        append(tx, thread, &denied).await?;
    } else {
        sqlx::query("update run set status = 'stopped', finished_at = clock_timestamp() where id = $1")
            .bind(run.0)
            .execute(&mut **tx)
            .await
            .doing(DOING)?;
    }
    record(tx, thread, run, who).await?;
    Ok(StopAnswer::NotRunning)
}

/// Adds messages to the version that the stop has just made.
async fn append(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    messages: &[Message],
) -> Result<(), StoreError> {
    if messages.is_empty() {
        return Ok(());
    }
    let columns = MessageColumns::of(messages);
    sqlx::query(
        "with t as (
           update thread set next_position = next_position + $2 where key = $1
           returning key, version, next_position - $2 as position
         ), c as (
           update checkpoint c set next_position = t.position + $2 from t
            where c.thread_key = t.key and c.version = t.version
         )
         insert into message (thread_key, position, message_id, role, body, added_in)
         select t.key, t.position + u.place - 1, u.id, u.role, u.body::json, t.version
           from t, unnest($3::text[], $4::text[], $5::text[]) with ordinality as u (id, role, body, place)",
    )
    .bind(thread.key)
    .bind(i64::from(count(messages.len())))
    .bind(columns.ids)
    .bind(columns.roles)
    .bind(columns.bodies)
    .execute(&mut **tx)
    .await
    .doing(DOING)?;
    Ok(())
}

async fn record(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    run: RunId,
    who: &str,
) -> Result<(), StoreError> {
    let entry = Entry { thread, run: Some(run), who, action: "stop", detail: json!({ "run_id": run }) };
    entry.write(tx).await
}
