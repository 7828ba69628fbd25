//! Mending what no rule allows, a bounded piece at a time, and sweeping out what nobody needs.

use std::sync::atomic::Ordering;

use serde_json::json;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::PgStore;
use super::audit::Entry;
use super::close::close_failed;
use super::error::{Doing, repeated};
use super::thread_lock::{self, LockedThread};
use crate::domain::RunId;
use crate::graph::engine::RunError;
use crate::store::StoreError;

const DOING: &str = "repair threads";

impl PgStore {
    pub(super) async fn repair_all(&self, limit: u32) -> Result<u32, StoreError> {
        let stuck = repeated!(self.stuck_threads(limit))?;
        let mut mended = 0;
        for key in stuck {
            match repeated!(self.mend(key)) {
                Ok(is_mended) => mended += u32::from(is_mended),
                // The others, and what is to be forgotten, do not wait for it.
                Err(error) => tracing::warn!("Left thread {key} unmended: {error}"),
            }
        }
        for _ in 0..FORGET_ROUNDS {
            if repeated!(self.forget_old())? < FORGET_BATCH {
                break;
            }
        }
        Ok(mended)
    }

    /// Threads that look wrong: those of active runs without an open step, and busy ones without an
    /// active run. Nothing indexes the second, so each pass looks at the next few threads.
    async fn stuck_threads(&self, limit: u32) -> Result<Vec<i64>, StoreError> {
        let mut keys: Vec<i64> = sqlx::query_scalar(
            "select r.thread_key from run r
              where r.status in ('queued', 'running')
                and not exists (select from step s where s.run_id = r.id and s.status in ('delayed', 'ready', 'leased'))
              limit $1",
        )
        .bind(i64::from(limit))
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        let from = self.repaired_to.load(Ordering::Relaxed);
        let looked_at: Vec<(i64, bool)> = sqlx::query_as(
            "select t.key, (t.status = 'busy' or t.active_run is not null)
                    and not exists (select from run r where r.id = t.active_run and r.status in ('queued', 'running'))
               from (select key, status, active_run from thread where key > $1 order by key limit $2) t order by t.key",
        )
        .bind(from)
        .bind(THREADS_PER_PASS)
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        let at_end = looked_at.len() < usize::try_from(THREADS_PER_PASS).unwrap_or(usize::MAX);
        let to = if at_end { 0 } else { looked_at.last().map_or(0, |(key, _)| *key) };
        self.repaired_to.store(to, Ordering::Relaxed);
        keys.extend(looked_at.into_iter().filter(|(_, wrong)| *wrong).map(|(key, _)| key));
        keys.truncate(limit as usize);
        Ok(keys)
    }

    /// Looks again under the lock, and mends what is wrong still.
    async fn mend(&self, key: i64) -> Result<bool, StoreError> {
        let mut tx = self.begin(DOING).await?;
        let Some(thread) = thread_lock::lock_key(&mut tx, key).await? else { return Ok(false) };
        let run: Option<Uuid> =
            sqlx::query_scalar("select id from run where thread_key = $1 and status in ('queued', 'running')")
                .bind(key)
                .fetch_optional(&mut *tx)
                .await
                .doing(DOING)?;
        let mended = match run {
            Some(run) => !has_open_step(&mut tx, run).await? && close_lost(&mut tx, &thread, RunId(run)).await?,
            None if thread.active_run.is_some() || thread.status == "busy" => free(&mut tx, &thread).await?,
            None => false,
        };
        tx.commit().await.doing(DOING)?;
        Ok(mended)
    }

    /// Idempotency keys past their time, and workers that died long ago; how many keys.
    async fn forget_old(&self) -> Result<u64, StoreError> {
        let doing = "forget what is over";
        let gone = "delete from worker where seen_at < statement_timestamp() - interval '1 hour'";
        sqlx::query(gone).execute(&self.pool).await.doing(doing)?;
        let keys = "delete from idempotency where ctid = any (array(
               select ctid from idempotency where expires_at < statement_timestamp() limit 1000))";
        Ok(sqlx::query(keys).execute(&self.pool).await.doing(doing)?.rows_affected())
    }
}

/// Idempotency keys that one statement forgets; the statement has the number too.
const FORGET_BATCH: u64 = 1_000;

/// Such statements in one pass at most.
const FORGET_ROUNDS: u32 = 50;

const THREADS_PER_PASS: i64 = 1_000;

async fn has_open_step(tx: &mut Transaction<'_, Postgres>, run: Uuid) -> Result<bool, StoreError> {
    sqlx::query_scalar(
        "select exists (select from step where run_id = $1 and status in ('delayed', 'ready', 'leased'))",
    )
    .bind(run)
    .fetch_one(&mut **tx)
    .await
    .doing(DOING)
}

async fn close_lost(tx: &mut Transaction<'_, Postgres>, thread: &LockedThread, run: RunId) -> Result<bool, StoreError> {
    close_failed(tx, thread, run, None, &RunError::lost_step()).await?;
    record(tx, thread, Some(run)).await
}

async fn free(tx: &mut Transaction<'_, Postgres>, thread: &LockedThread) -> Result<bool, StoreError> {
    let status = if thread.meta()?.is_interrupted() { "interrupted" } else { "idle" };
    sqlx::query("update thread set status = $2::thread_status, active_run = null, stop_run = null where key = $1")
        .bind(thread.key)
        .bind(status)
        .execute(&mut **tx)
        .await
        .doing(DOING)?;
    record(tx, thread, thread.active_run.map(RunId)).await
}

async fn record(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    run: Option<RunId>,
) -> Result<bool, StoreError> {
    let entry = Entry { thread, run, who: "scheduler", action: "repair", detail: json!({ "run_id": run }) };
    entry.write(tx).await?;
    Ok(true)
}
