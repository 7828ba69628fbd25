//! What the scheduler asks: what to send, what is due, what must be mended.

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::claim::{ready_again, resend_at};
use super::row::{Answer, Columns, Doing, json_text, micros, now};
use super::run::{self, Step};
use super::thread::Thread;
use super::{Promise, SqliteStore, close, pools, repair};
use crate::domain::{GraphVersion, PoolName, RunStatus, Scope, StepId, Tenant, ThreadId, WorkerId};
use crate::graph::engine::RunError;
use crate::queue::Job;
use crate::store::{
    AttemptEnd, AuditRecord, PoolRecord, StepStatus, StoreClock, StoreError, Swept, Upkeep, WorkerRecord,
};

#[async_trait]
impl Upkeep for SqliteStore {
    async fn dispatch(
        &self,
        pool: &PoolName,
        class: i16,
        after: &Tenant,
        tenants: u32,
        each: u32,
        except: &[GraphVersion],
    ) -> Result<Vec<(Job, Tenant)>, StoreError> {
        const DOING: &str = "take steps from the backlog";
        let lane = BacklogLane { pool, class, except: &json_text(except) };
        // Most rounds find nothing; those write nothing.
        if lane.tenant_after(&mut *self.reader(DOING).await?, after).await.doing(DOING)?.is_none() {
            return Ok(Vec::new());
        }
        let mut tx = self.begin(Promise::Soft, DOING).await?;
        let (mut sent, mut last) = (Vec::new(), after.clone());
        for _ in 0..tenants {
            let Some(tenant) = lane.tenant_after(&mut tx, &last).await.doing(DOING)? else {
                break;
            };
            let jobs = lane.take(&mut tx, &tenant, each).await.doing(DOING)?;
            sent.extend(jobs.into_iter().map(|job| (job, tenant.clone())));
            last = tenant;
        }
        tx.commit().await.doing(DOING)?;
        Ok(sent)
    }

    async fn backlog_lanes(&self) -> Result<Vec<(PoolName, i16)>, StoreError> {
        const DOING: &str = "list backlogs";
        let mut db = self.reader(DOING).await?;
        let (mut lanes, mut last) = (Vec::new(), (PoolName(String::new()), i16::MIN));
        while let Some(lane) = next_lane(&mut db, &last).await.doing(DOING)? {
            lanes.push(lane.clone());
            last = lane;
        }
        Ok(lanes)
    }

    async fn sweep(&self, limit: u32, expire: bool) -> Result<Swept, StoreError> {
        const DOING: &str = "look for due steps";
        let mut swept = Swept { now: now(), ..Swept::default() };
        let due = Step::due(&mut *self.reader(DOING).await?, micros(swept.now), 1, expire).await.doing(DOING)?;
        if !due.is_empty() {
            let mut tx = self.begin(Promise::Durable, DOING).await?;
            for step in Step::due(&mut tx, micros(swept.now), limit, expire).await.doing(DOING)? {
                sweep_one(&mut tx, step, &mut swept).await?;
            }
            tx.commit().await.doing(DOING)?;
        }
        let next = sqlx::query("select min(due_at) as next from step where due_at is not null");
        let next = next.fetch_one(&self.readers).await.doing(DOING)?;
        swept.next_due = next.opt("next", Columns::time).doing(DOING)?;
        Ok(swept)
    }

    async fn clock(&self) -> Result<StoreClock, StoreError> {
        Ok(StoreClock { now: now(), started: self.opened })
    }

    async fn repair(&self, limit: u32) -> Result<u32, StoreError> {
        repair::repair(self, limit).await
    }

    async fn worker_seen(&self, worker: &WorkerRecord) -> Result<(), StoreError> {
        pools::worker_seen(self, worker).await.doing("note that a worker lives")
    }

    async fn unsend(&self, steps: &[StepId]) -> Result<(), StoreError> {
        const DOING: &str = "put steps back into the backlog";
        let mut tx = self.begin(Promise::Soft, DOING).await?;
        for step in steps {
            sqlx::query("update step set due_at = null where run_id = ?1 and seq = ?2 and status = 'ready'")
                .bind(step.run_id.to_string())
                .bind(step.seq)
                .execute(&mut *tx)
                .await
                .doing(DOING)?;
        }
        tx.commit().await.doing(DOING)
    }

    async fn worker_gone(&self, worker: WorkerId) -> Result<(), StoreError> {
        const DOING: &str = "forget a worker";
        let mut tx = self.begin(Promise::Soft, DOING).await?;
        sqlx::query("delete from worker where id = ?1")
            .bind(worker.to_string())
            .execute(&mut *tx)
            .await
            .doing(DOING)?;
        tx.commit().await.doing(DOING)
    }

    async fn pools(&self) -> Result<Vec<PoolRecord>, StoreError> {
        const DOING: &str = "count what waits and runs";
        pools::pools(&mut *self.snapshot(DOING).await?, now()).await.doing(DOING)
    }

    async fn run_counts(&self) -> Result<Vec<(RunStatus, i64)>, StoreError> {
        const DOING: &str = "count runs";
        let rows = sqlx::query("select status, count(*) as runs from run group by status order by status")
            .fetch_all(&self.readers)
            .await
            .doing(DOING)?;
        let read = |row| Ok((Columns::word(row, "status", RunStatus::parse)?, Columns::int(row, "runs")?));
        rows.iter().map(read).collect::<Answer<_>>().doing(DOING)
    }

    async fn audit(&self, scope: &Scope, id: &ThreadId) -> Result<Vec<AuditRecord>, StoreError> {
        const DOING: &str = "read the audit";
        let mut tx = self.snapshot(DOING).await?;
        let Some(thread) = Thread::in_scope(&mut tx, scope, id).await.doing(DOING)? else {
            return Ok(Vec::new());
        };
        let rows = sqlx::query("select at, who, action, detail from audit where thread_key = ?1 order by id")
            .bind(thread.key.0)
            .fetch_all(&mut *tx)
            .await
            .doing(DOING)?;
        let read = |row: &sqlx::sqlite::SqliteRow| {
            let (who, action) = (row.text("who")?, row.text("action")?);
            Ok(AuditRecord { at: row.time("at")?, who, action, detail: row.json("detail")? })
        };
        rows.iter().map(read).collect::<Answer<_>>().doing(DOING)
    }
}

/// The backlog of a pool and class, without some versions (a json list).
struct BacklogLane<'a> {
    pool: &'a PoolName,
    class: i16,
    except: &'a str,
}

impl BacklogLane<'_> {
    /// The first tenant behind `last` that has something here: one look into the index.
    async fn tenant_after(&self, db: &mut SqliteConnection, last: &Tenant) -> Answer<Option<Tenant>> {
        let row = sqlx::query(
            "select tenant from step
              where pool = ?1 and class = ?2 and status = 'ready' and due_at is null and tenant > ?3
                and graph_version not in (select value from json_each(?4))
              order by tenant limit 1",
        )
        .bind(self.pool.as_str())
        .bind(self.class)
        .bind(last.as_str())
        .bind(self.except)
        .fetch_optional(db)
        .await?;
        row.map(|row| row.text("tenant").map(Tenant)).transpose()
    }

    /// Marks a tenant's oldest steps as being sent.
    async fn take(&self, db: &mut SqliteConnection, tenant: &Tenant, each: u32) -> Answer<Vec<Job>> {
        let rows = sqlx::query(
            "select run_id, seq from step
              where pool = ?1 and class = ?2 and tenant = ?3 and status = 'ready' and due_at is null
                and graph_version not in (select value from json_each(?4))
              order by run_at, run_id limit ?5",
        )
        .bind(self.pool.as_str())
        .bind(self.class)
        .bind(tenant.as_str())
        .bind(self.except)
        .bind(each)
        .fetch_all(&mut *db)
        .await?;
        let mut jobs = Vec::with_capacity(rows.len());
        for row in &rows {
            let id = crate::domain::StepId { run_id: row.id("run_id")?, seq: row.int("seq")? };
            if let Some(step) = Step::find(db, id).await? {
                jobs.push(send(db, &step).await?);
            }
        }
        Ok(jobs)
    }
}

async fn next_lane(db: &mut SqliteConnection, last: &(PoolName, i16)) -> Answer<Option<(PoolName, i16)>> {
    let row = sqlx::query(
        "select pool, class from step where status = 'ready' and due_at is null and (pool, class) > (?1, ?2)
          order by pool, class limit 1",
    )
    .bind(last.0.as_str())
    .bind(last.1)
    .fetch_optional(db)
    .await?;
    row.map(|row| Ok((PoolName(row.text("pool")?), row.int("class")?))).transpose()
}

/// Marks a ready step as being sent now.
async fn send(db: &mut SqliteConnection, step: &Step) -> Answer<Job> {
    sqlx::query("update step set status = 'ready', due_at = ?3 where run_id = ?1 and seq = ?2")
        .bind(step.id.run_id.to_string())
        .bind(step.id.seq)
        .bind(resend_at(now()))
        .execute(&mut *db)
        .await?;
    Ok(step.job(run::trace_of(db, step.id.run_id).await?))
}

/// Decides about one due step.
async fn sweep_one(db: &mut SqliteConnection, step: Step, swept: &mut Swept) -> Result<(), StoreError> {
    const DOING: &str = "sweep a due step";
    if step.status != StepStatus::Leased {
        swept.send.push(send(db, &step).await.doing(DOING)?);
        return Ok(());
    }
    let crash = AttemptEnd { end: "crash".to_owned(), error: None };
    close::record_attempt(db, &step, &crash, swept.now).await?;
    let run_id = step.id.run_id;
    let Some(mut thread) = Thread::by_key(db, step.thread_key).await.doing(DOING)? else {
        return close::cancel_steps(db, run_id, StepStatus::Cancelled, swept.now).await;
    };
    if thread.stop_run == Some(run_id) {
        swept.stopped.push(run_id);
        return close::stop_now(db, &mut thread, run_id, Some(&step), swept.now).await;
    }
    if step.attempt >= step.attempts_max {
        swept.failed.push(run_id);
        let error = RunError::worker_crash(&step.node, step.attempt);
        return close::fail_now(db, &mut thread, run_id, Some(&step), &error, swept.now).await;
    }
    ready_again(db, step.id, step.attempt, resend_at(swept.now)).await.doing(DOING)?;
    swept.released += 1;
    swept.send.push(step.job(run::trace_of(db, run_id).await.doing(DOING)?));
    Ok(())
}
