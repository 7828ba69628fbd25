//! Who works, what waits, and why a run does not move.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::SqliteConnection;

use super::row::{Answer, Columns, json_text, micros, now, span};
use super::run::{self, Step};
use super::thread::Thread;
use super::{Promise, SqliteStore};
use crate::domain::{GraphVersion, PoolName, RunId};
use crate::store::{PoolRecord, StepStatus, Time, WhyFacts, WorkerRecord};

/// A worker not seen for so long counts as dead.
const LIVE: Duration = Duration::from_secs(30);

/// Dead workers are forgotten after so long.
const FORGOTTEN: Duration = Duration::from_secs(3_600);

/// See [`crate::store::Upkeep::worker_seen`].
pub(super) async fn worker_seen(store: &SqliteStore, worker: &WorkerRecord) -> Answer<()> {
    let mut tx = store.writer.begin_with(Promise::Soft.begin()).await?;
    sqlx::query("delete from worker where seen_at < ?1")
        .bind(micros(now()) - span(FORGOTTEN))
        .execute(&mut *tx)
        .await?;
    sqlx::query(
        "insert into worker (id, name, pools, slots, versions, seen_at) values (?1, ?2, ?3, ?4, ?5, ?6)
             on conflict (id) do update
            set name = excluded.name, pools = excluded.pools, slots = excluded.slots, versions = excluded.versions,
                seen_at = excluded.seen_at",
    )
    .bind(worker.id.to_string())
    .bind(&worker.name)
    .bind(json_text(&worker.pools))
    .bind(worker.slots)
    .bind(json_text(&worker.versions))
    .bind(micros(now()))
    .execute(&mut *tx)
    .await?;
    tx.commit().await
}

/// What a live worker serves.
struct Live {
    pools: Vec<PoolName>,
    slots: i64,
    versions: Vec<GraphVersion>,
}

async fn live_workers(db: &mut SqliteConnection, now: Time) -> Answer<Vec<Live>> {
    let rows = sqlx::query("select pools, slots, versions from worker where seen_at >= ?1")
        .bind(micros(now) - span(LIVE))
        .fetch_all(db)
        .await?;
    rows.iter()
        .map(|row| Ok(Live { pools: row.json("pools")?, slots: row.int("slots")?, versions: row.json("versions")? }))
        .collect()
}

/// See [`crate::store::Upkeep::pools`]; both halves read an index of what is open only.
pub(super) async fn pools(db: &mut SqliteConnection, now: Time) -> Answer<Vec<PoolRecord>> {
    let rows = sqlx::query(
        "select pool, status, count(*) as steps, min(run_at) as oldest from (
            select pool, status, run_at from step where status = 'ready' and due_at is null
             union all
            select pool, status, run_at from step where due_at is not null
         ) where status = 'leased' or (status = 'ready' and run_at <= ?1) group by pool, status",
    )
    .bind(micros(now))
    .fetch_all(&mut *db)
    .await?;
    let mut pools = BTreeMap::new();
    for row in &rows {
        let pool = entry(&mut pools, &PoolName(row.text("pool")?));
        let steps = row.int("steps")?;
        if row.word("status", StepStatus::parse)? == StepStatus::Leased {
            pool.running = steps;
        } else {
            pool.runnable = steps;
            let waited = (now - row.time("oldest")?).to_std().unwrap_or_default();
            pool.oldest_wait_s = waited.as_secs_f64();
        }
    }
    for worker in live_workers(db, now).await? {
        for name in &worker.pools {
            let pool = entry(&mut pools, name);
            pool.workers += 1;
            pool.slots += worker.slots;
        }
    }
    Ok(pools.into_values().collect())
}

fn entry<'a>(pools: &'a mut BTreeMap<PoolName, PoolRecord>, name: &PoolName) -> &'a mut PoolRecord {
    pools.entry(name.clone()).or_insert_with(|| PoolRecord {
        pool: name.clone(),
        runnable: 0,
        running: 0,
        oldest_wait_s: 0.0,
        workers: 0,
        slots: 0,
    })
}

/// See [`crate::store::Runs::why`].
pub(super) async fn why(db: &mut SqliteConnection, id: RunId, now: Time) -> Answer<Option<WhyFacts>> {
    let Some(run) = run::find(db, id).await? else {
        return Ok(None);
    };
    let stop = Thread::by_key(db, run.thread_key).await?.is_some_and(|thread| thread.stop_run == Some(id));
    let step = Step::last_of(db, id).await?;
    let mut facts = WhyFacts {
        step: None,
        in_backlog: false,
        stop_requested: stop,
        due_at: None,
        pool_workers: 0,
        able_workers: 0,
        ready_in_pool: 0,
        now,
        run,
    };
    let Some(step) = step else {
        return Ok(Some(facts));
    };
    facts.in_backlog = step.status == StepStatus::Ready && step.due_at.is_none();
    facts.due_at = step.due_at;
    let serving = live_workers(db, now).await?.into_iter().filter(|worker| worker.pools.contains(&step.pool));
    for worker in serving {
        facts.pool_workers += 1;
        let is_able = !step.graph_version.is_code() || worker.versions.contains(&step.graph_version);
        facts.able_workers += i64::from(is_able);
    }
    let pools = pools(db, now).await?;
    facts.ready_in_pool = pools.iter().find(|pool| pool.pool == step.pool).map_or(0, |pool| pool.runnable);
    let attempts = run::attempts(db, id).await?;
    let own = attempts.into_iter().filter(|(seq, _)| *seq == step.id.seq).map(|(_, attempt)| attempt).collect();
    facts.step = Some(step.record(own));
    Ok(Some(facts))
}
