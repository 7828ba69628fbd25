//! Leases: taken, kept, given back, and ended for another try.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::row::{Answer, Columns, Doing, json_text, micros, now, span};
use super::run::Step;
use super::thread::Thread;
use super::{Promise, SqliteStore, close, commit, load};
use crate::domain::{GraphVersion, LeaseToken, RunId, StepId, ThreadKey, WorkerId};
use crate::store::{
    AttemptEnd, Claimed, CommitOutcome, LeaseState, LoadRequest, Loaded, StepCommit, Steps, StoreError, Time,
};

#[async_trait]
impl Steps for SqliteStore {
    async fn claim(
        &self,
        claims: &[(StepId, LeaseToken)],
        worker: WorkerId,
        versions: &[GraphVersion],
        ttl: Duration,
    ) -> Result<Vec<Claimed>, StoreError> {
        const DOING: &str = "claim steps";
        let versions = json_text(versions);
        let mut tx = self.begin(Promise::Soft, DOING).await?;
        let mut taken = Vec::with_capacity(claims.len());
        for (step, token) in claims {
            let lease = Lease { step: *step, token: *token, worker, due_at: micros(now()) + span(ttl) };
            taken.extend(claim_one(&mut tx, &lease, &versions).await.doing(DOING)?);
        }
        tx.commit().await.doing(DOING)?;
        Ok(taken)
    }

    async fn mark_running(&self, runs: &[RunId]) -> Result<(), StoreError> {
        const DOING: &str = "mark runs as running";
        let mut tx = self.begin(Promise::Soft, DOING).await?;
        for run in runs {
            mark_one(&mut tx, *run).await.doing(DOING)?;
        }
        tx.commit().await.doing(DOING)
    }

    async fn load(&self, wanted: &[LoadRequest]) -> Result<Vec<Loaded>, StoreError> {
        load::load(self, wanted).await
    }

    async fn commit(&self, steps: &[StepCommit]) -> Vec<Result<CommitOutcome, StoreError>> {
        commit::commit(self, steps).await
    }

    async fn heartbeat(&self, leases: &[(StepId, LeaseToken)], ttl: Duration) -> Result<Vec<LeaseState>, StoreError> {
        const DOING: &str = "renew leases";
        let mut tx = self.begin(Promise::Soft, DOING).await?;
        let mut states = Vec::with_capacity(leases.len());
        for (step, token) in leases {
            let due_at = micros(now()) + span(ttl);
            states.push(renew(&mut tx, *step, *token, due_at).await.doing(DOING)?);
        }
        tx.commit().await.doing(DOING)?;
        Ok(states)
    }

    async fn give_back(&self, leases: &[(StepId, LeaseToken)]) -> Result<u64, StoreError> {
        const DOING: &str = "give leases back";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let mut held = 0;
        for (id, token) in leases {
            let Some((step, mut thread)) = held_step(&mut tx, *id, *token).await.doing(DOING)? else {
                continue;
            };
            held += 1;
            if thread.stop_run == Some(id.run_id) {
                close::stop_now(&mut tx, &mut thread, id.run_id, Some(&step), now()).await?;
            } else {
                // Its run has a place: it is sent again by the next sweep, not by its turn.
                ready_again(&mut tx, step.id, step.attempt - 1, micros(now())).await.doing(DOING)?;
            }
        }
        tx.commit().await.doing(DOING)?;
        Ok(held)
    }

    async fn retry_step(
        &self,
        step: StepId,
        token: LeaseToken,
        end: &AttemptEnd,
        delay: Duration,
    ) -> Result<bool, StoreError> {
        const DOING: &str = "put a step off";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let Some((step, mut thread)) = held_step(&mut tx, step, token).await.doing(DOING)? else {
            return Ok(false);
        };
        let now = now();
        close::record_attempt(&mut tx, &step, end, now).await?;
        if thread.stop_run == Some(step.id.run_id) {
            close::stop_now(&mut tx, &mut thread, step.id.run_id, Some(&step), now).await?;
        } else {
            delay_step(&mut tx, step.id, micros(now) + span(delay)).await.doing(DOING)?;
        }
        tx.commit().await.doing(DOING)?;
        Ok(true)
    }
}

/// A lease to take.
struct Lease {
    step: StepId,
    token: LeaseToken,
    worker: WorkerId,
    due_at: i64,
}

/// Takes one lease; `versions` is the json list of those the worker has.
async fn claim_one(db: &mut SqliteConnection, lease: &Lease, versions: &str) -> Answer<Option<Claimed>> {
    let row = sqlx::query(
        "update step set status = 'leased', token = ?3, worker = ?4, due_at = ?5, attempt = attempt + 1, started_at = ?6
          where run_id = ?1 and seq = ?2 and status = 'ready' and run_at <= ?6
            and (substr(graph_version, 1, 2) = 'd-' or graph_version in (select value from json_each(?7)))
      returning thread_key, node, graph_version, attempt, attempts_max,
                (select version from thread where key = step.thread_key) as version",
    )
    .bind(lease.step.run_id.to_string())
    .bind(lease.step.seq)
    .bind(lease.token.to_string())
    .bind(lease.worker.to_string())
    .bind(lease.due_at)
    .bind(micros(now()))
    .bind(versions)
    .fetch_optional(&mut *db)
    .await?;
    let Some(row) = row else {
        return Ok(None);
    };
    let attempt: i16 = row.int("attempt")?;
    if attempt > 1 || lease.step.seq > 1 {
        // A run that lost its worker waits as queued; its first start is marked by whoever claims.
        mark_one(db, lease.step.run_id).await?;
    }
    Ok(Some(Claimed {
        step: lease.step,
        thread_key: ThreadKey(row.int("thread_key")?),
        node: row.text("node")?,
        graph_version: GraphVersion(row.text("graph_version")?),
        attempt,
        attempts_max: row.int("attempts_max")?,
        token: lease.token,
        version: row.int("version")?,
    }))
}

async fn mark_one(db: &mut SqliteConnection, run: RunId) -> Answer<()> {
    sqlx::query(
        "update run set status = 'running', started_at = coalesce(started_at, ?2) where id = ?1 and status = 'queued'",
    )
    .bind(run.to_string())
    .bind(micros(now()))
    .execute(db)
    .await
    .map(drop)
}

async fn renew(db: &mut SqliteConnection, step: StepId, token: LeaseToken, due_at: i64) -> Answer<LeaseState> {
    let row = sqlx::query(
        "update step set due_at = ?4 where run_id = ?1 and seq = ?2 and token = ?3 and status = 'leased'
      returning (select stop_run is not null and stop_run = step.run_id from thread where key = step.thread_key) as stop",
    )
    .bind(step.run_id.to_string())
    .bind(step.seq)
    .bind(token.to_string())
    .bind(due_at)
    .fetch_optional(db)
    .await?;
    let stop = row.as_ref().map(|row| row.opt("stop", Columns::flag)).transpose()?.flatten();
    Ok(LeaseState { held: row.is_some(), renewed: row.is_some(), stop_requested: stop.unwrap_or_default() })
}

async fn held_step(db: &mut SqliteConnection, id: StepId, token: LeaseToken) -> Answer<Option<(Step, Thread)>> {
    let Some(step) = Step::find(db, id).await?.filter(|step| step.is_held_by(token)) else {
        return Ok(None);
    };
    let thread = Thread::by_key(db, step.thread_key).await?;
    Ok(thread.map(|thread| (step, thread)))
}

/// The step may be taken again from now on, its run waits in the queue; looked at when it is due.
pub(super) async fn ready_again(db: &mut SqliteConnection, id: StepId, attempt: i16, due_at: i64) -> Answer<()> {
    sqlx::query(
        "update step set status = 'ready', token = null, attempt = ?3, run_at = ?4, due_at = ?5
          where run_id = ?1 and seq = ?2",
    )
    .bind(id.run_id.to_string())
    .bind(id.seq)
    .bind(attempt)
    .bind(micros(now()))
    .bind(due_at)
    .execute(&mut *db)
    .await?;
    sqlx::query("update run set status = 'queued' where id = ?1 and status = 'running'")
        .bind(id.run_id.to_string())
        .execute(db)
        .await
        .map(drop)
}

async fn delay_step(db: &mut SqliteConnection, id: StepId, until: i64) -> Answer<()> {
    sqlx::query(
        "update step set status = 'delayed', token = null, run_at = ?3, due_at = ?3 where run_id = ?1 and seq = ?2",
    )
    .bind(id.run_id.to_string())
    .bind(id.seq)
    .bind(until)
    .execute(db)
    .await
    .map(drop)
}

/// How long a step that was sent may wait for a worker before it is sent again.
pub(super) fn resend_at(now: Time) -> i64 {
    micros(now) + span(Duration::from_secs(4))
}
