//! Mends what no rule should allow, and says so in the audit.

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::close::{audit, end_run, fail_now};
use super::create::forget_keys;
use super::row::{Answer, Columns, Doing, now};
use super::thread::Thread;
use super::{Promise, SqliteStore, run};
use crate::domain::meta::ExecutionStatus;
use crate::domain::{Json, RunId, RunStatus, ThreadKey};
use crate::graph::engine::RunError;
use crate::store::{StoreError, Time};

const DOING: &str = "repair threads and runs";

/// See [`crate::store::Upkeep::repair`].
pub(super) async fn repair(store: &SqliteStore, limit: u32) -> Result<u32, StoreError> {
    let mut db = store.reader(DOING).await?;
    if busy_without_run(&mut db, 1).await.doing(DOING)?.is_empty()
        && runs_without_step(&mut db, 1).await.doing(DOING)?.is_empty()
        && !has_old_keys(&mut db).await.doing(DOING)?
    {
        return Ok(0);
    }
    drop(db);

    let now = now();
    let mut mended = 0;
    let mut tx = store.begin(Promise::Durable, DOING).await?;
    for key in busy_without_run(&mut tx, limit).await.doing(DOING)? {
        mended += u32::from(free(&mut tx, key, now).await?);
    }
    for id in runs_without_step(&mut tx, limit).await.doing(DOING)? {
        mended += u32::from(close_run(&mut tx, id, now).await?);
    }
    forget_keys(&mut tx, now).await?;
    tx.commit().await.doing(DOING)?;
    Ok(mended)
}

/// Threads that say they are busy, but not with a run that is active.
async fn busy_without_run(db: &mut SqliteConnection, limit: u32) -> Answer<Vec<ThreadKey>> {
    let rows = sqlx::query(
        "select key from thread t
          where status = 'busy'
            and not exists (select 1 from run r where r.id = t.active_run and r.status in ('queued', 'running'))
          limit ?1",
    )
    .bind(limit)
    .fetch_all(db)
    .await?;
    rows.iter().map(|row| row.int("key").map(ThreadKey)).collect()
}

/// Active runs that nothing will ever move.
async fn runs_without_step(db: &mut SqliteConnection, limit: u32) -> Answer<Vec<RunId>> {
    let rows = sqlx::query(
        "select id from run r
          where status in ('queued', 'running')
            and not exists (select 1 from step s where s.run_id = r.id and s.status in ('ready', 'leased', 'delayed'))
          limit ?1",
    )
    .bind(limit)
    .fetch_all(db)
    .await?;
    rows.iter().map(|row: &SqliteRow| row.id("id")).collect()
}

async fn has_old_keys(db: &mut SqliteConnection) -> Answer<bool> {
    let row = sqlx::query("select exists (select 1 from idempotency where expires_at <= ?1) as found")
        .bind(super::row::micros(now()))
        .fetch_one(db)
        .await?;
    row.flag("found")
}

/// Frees a thread for its next run, as its last one left it.
async fn free(db: &mut SqliteConnection, key: ThreadKey, now: Time) -> Result<bool, StoreError> {
    let Some(mut thread) = Thread::by_key(db, key).await.doing(DOING)? else {
        return Ok(false);
    };
    let lost = thread.active_run;
    thread.release(match thread.meta.status {
        ExecutionStatus::InterruptedBefore | ExecutionStatus::InterruptedAfter => RunStatus::Interrupted,
        ExecutionStatus::Error => RunStatus::Failed,
        ExecutionStatus::Running | ExecutionStatus::Completed => RunStatus::Completed,
    });
    thread.save(db, now).await.doing(DOING)?;
    let detail = serde_json::json!({"found": "a busy thread without an active run", "run": lost});
    audit_repair(db, &thread, &detail, now).await?;
    Ok(true)
}

/// Closes a run that nothing will ever move.
async fn close_run(db: &mut SqliteConnection, id: RunId, now: Time) -> Result<bool, StoreError> {
    let Some(run) = run::find(db, id).await.doing(DOING)? else {
        return Ok(false);
    };
    let Some(mut thread) = Thread::by_key(db, run.thread_key).await.doing(DOING)? else {
        return Ok(false);
    };
    let error = RunError::lost_step();
    if thread.active_run == Some(id) {
        fail_now(db, &mut thread, id, None, &error, now).await?;
    } else {
        // The thread went on without it: its place is none of this run's business.
        end_run(db, id, RunStatus::Failed, Some(&error), run.version, now).await?;
    }
    let detail = serde_json::json!({"found": "an active run without an open step", "run": id});
    audit_repair(db, &thread, &detail, now).await?;
    Ok(true)
}

async fn audit_repair(db: &mut SqliteConnection, thread: &Thread, detail: &Json, now: Time) -> Result<(), StoreError> {
    audit(db, thread, "scheduler", "repair", detail, now).await
}
