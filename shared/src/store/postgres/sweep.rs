//! What is due: steps to send again, steps whose time came, leases that ran out.

use std::collections::HashSet;

use sqlx::{FromRow, PgExecutor, Postgres, Transaction};
use uuid::Uuid;

use super::PgStore;
use super::close::{OpenStep, close_failed, close_stopped};
use super::error::Doing;
use super::rows::JobRow;
use super::thread_lock;
use crate::domain::{RunId, StepId};
use crate::graph::engine::RunError;
use crate::store::{StoreError, Swept, Time};

const DOING: &str = "look at what is due";

/// How a run ended that the sweep had to close.
enum Closed {
    Failed,
    Stopped,
}

impl PgStore {
    pub(super) async fn sweep_once(&self, limit: u32, expire: bool) -> Result<Swept, StoreError> {
        // Most passes find nothing: they cost one statement.
        let (next_due, now) = next_due(&self.pool).await?;
        if next_due.is_none_or(|due| due > now) {
            return Ok(Swept { next_due, now, ..Swept::default() });
        }
        let mut tx = self.begin(DOING).await?;
        let due = due_steps(&mut tx, limit, expire).await?;
        let (to_close, to_send): (Vec<&DueRow>, Vec<&DueRow>) = due.iter().partition(|row| row.closes());
        let jobs = send_again(&mut tx, &to_send).await?;
        let (next_due, now) = self::next_due(&mut *tx).await?;
        tx.commit().await.doing(DOING)?;
        let released = to_send.iter().filter(|row| row.is_leased).count();
        let mut swept = Swept {
            send: jobs.into_iter().map(|row| row.job().0).collect(),
            released: u32::try_from(released).unwrap_or(u32::MAX),
            failed: Vec::new(),
            stopped: Vec::new(),
            next_due,
            now,
        };
        for row in to_close {
            let step = StepId { run_id: RunId(row.run_id), seq: row.seq };
            match self.close_due(step).await {
                Ok(Some(Closed::Failed)) => swept.failed.push(step.run_id),
                Ok(Some(Closed::Stopped)) => swept.stopped.push(step.run_id),
                Ok(None) => {}
                Err(error) => self.put_off(step, &error).await,
            }
        }
        Ok(swept)
    }

    /// Leaves a step that could not be closed to a later pass, behind the others: one thread that
    /// somebody holds, or that cannot be read, must not keep them waiting.
    async fn put_off(&self, step: StepId, error: &StoreError) {
        tracing::warn!(run.id = %step.run_id, "Left the closing of step {step} to a later pass: {error}");
        let put_off = sqlx::query(PUT_OFF).bind(step.run_id.0).bind(step.seq).execute(&self.pool).await;
        if let Err(error) = put_off {
            tracing::debug!(run.id = %step.run_id, "Could not put step {step} off either: {error}");
        }
    }

    /// Closes the run of a step that must not start again, in a transaction of its own: the thread's
    /// lock comes before the step's. `None` if somebody else was faster.
    async fn close_due(&self, step: StepId) -> Result<Option<Closed>, StoreError> {
        let mut tx = self.begin(DOING).await?;
        sqlx::query("set local lock_timeout = '50ms'").execute(&mut *tx).await.doing(DOING)?;
        let Some(thread) = thread_lock::lock_of_step(&mut tx, step).await? else { return Ok(None) };
        let stop = thread.run_to_stop() == Some(step.run_id);
        let row: Option<ExpiredRow> = sqlx::query_as(END_ATTEMPT)
            .bind(step.run_id.0)
            .bind(step.seq)
            .bind(stop)
            .fetch_optional(&mut *tx)
            .await
            .doing(DOING)?;
        let Some(row) = row else { return Ok(None) };
        let open = OpenStep { seq: step.seq, node: row.node };
        let closed = if stop {
            close_stopped(&mut tx, &thread, step.run_id, Some(&open)).await?;
            Closed::Stopped
        } else {
            let error = RunError::worker_crash(&open.node, row.attempt);
            close_failed(&mut tx, &thread, step.run_id, Some(&open), &error).await?;
            Closed::Failed
        };
        tx.commit().await.doing(DOING)?;
        Ok(Some(closed))
    }
}

/// $1 run, $2 seq. A row somebody holds is being decided already.
const PUT_OFF: &str = "
update step set due_at = clock_timestamp() + interval '1 s'
 where run_id = $1 and seq = $2
   and exists (select from step where run_id = $1 and seq = $2 and due_at is not null for no key update skip locked)";

struct DueRow {
    run_id: Uuid,
    seq: i32,
    is_leased: bool,
    is_used_up: bool,
    is_stopped: bool,
}

impl DueRow {
    /// Whether its run ends instead of starting the step again.
    fn closes(&self) -> bool {
        self.is_stopped || (self.is_leased && self.is_used_up)
    }
}

/// Locks the due steps nobody holds. The stops are read by a second statement, which sees every stop
/// whose transaction looked at one of these steps before we had it.
async fn due_steps(tx: &mut Transaction<'_, Postgres>, limit: u32, expire: bool) -> Result<Vec<DueRow>, StoreError> {
    let rows: Vec<(Uuid, i32, i64, bool, bool)> = sqlx::query_as(
        "select run_id, seq, thread_key, status = 'leased', attempt >= attempts_max from step
          where due_at <= statement_timestamp() and ($2 or status <> 'leased')
          order by due_at limit $1 for no key update skip locked",
    )
    .bind(i64::from(limit))
    .bind(expire)
    .fetch_all(&mut **tx)
    .await
    .doing(DOING)?;
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let keys: Vec<i64> = rows.iter().map(|(_, _, key, ..)| *key).collect();
    let stops: Vec<Uuid> =
        sqlx::query_scalar("select stop_run from thread where key = any ($1::bigint[]) and stop_run is not null")
            .bind(keys)
            .fetch_all(&mut **tx)
            .await
            .doing(DOING)?;
    let stops: HashSet<Uuid> = stops.into_iter().collect();
    let due = rows.into_iter().map(|(run_id, seq, _, is_leased, is_used_up)| DueRow {
        run_id,
        seq,
        is_leased,
        is_used_up,
        is_stopped: stops.contains(&run_id),
    });
    Ok(due.collect())
}

/// Makes the steps ready, says that they are being sent, and records the attempts whose lease ran out.
async fn send_again(tx: &mut Transaction<'_, Postgres>, steps: &[&DueRow]) -> Result<Vec<JobRow>, StoreError> {
    if steps.is_empty() {
        return Ok(Vec::new());
    }
    let run_ids: Vec<Uuid> = steps.iter().map(|row| row.run_id).collect();
    let seqs: Vec<i32> = steps.iter().map(|row| row.seq).collect();
    sqlx::query_as(SEND_AGAIN).bind(run_ids).bind(seqs).fetch_all(&mut **tx).await.doing(DOING)
}

async fn next_due(db: impl PgExecutor<'_>) -> Result<(Option<Time>, Time), StoreError> {
    sqlx::query_as("select (select min(due_at) from step where due_at is not null), clock_timestamp()")
        .fetch_one(db)
        .await
        .doing(DOING)
}

/// $1 run ids, $2 seqs; the rows are locked, so what they hold is what the first part sees.
const SEND_AGAIN: &str = "
with d as (
  select s.run_id, s.seq, s.status, s.attempt, s.worker, s.started_at
    from unnest($1::uuid[], $2::int[]) as j (run_id, seq) join step s on s.run_id = j.run_id and s.seq = j.seq
), a as (
  insert into step_attempt (run_id, seq, attempt, worker, started_at, \"end\")
  select run_id, seq, attempt, worker, started_at, 'crash' from d where status = 'leased'
  on conflict (run_id, seq, attempt) do nothing
), q as (
  update run r set status = 'queued' from d where d.status = 'leased' and r.id = d.run_id and r.status = 'running'
), s as (
  update step s
     set status = 'ready', token = null, due_at = clock_timestamp() + interval '4 s',
         requeued = s.requeued or d.status = 'leased'
    from d where s.run_id = d.run_id and s.seq = d.seq
  returning s.run_id, s.seq, s.tenant, s.pool, s.class, s.graph_version, s.attempt
)
select s.*, r.trace from s join run r on r.id = s.run_id";

/// $1 run, $2 seq, $3 whether a stop ends it. Ends the attempt of a lease that has run out, if the
/// step is still to be closed, and returns what it was.
const END_ATTEMPT: &str = "
with s as (
  select run_id, seq, node, status, attempt, worker, started_at from step
   where run_id = $1 and seq = $2 and status in ('delayed', 'ready', 'leased') and due_at <= clock_timestamp()
     and ($3 or (status = 'leased' and attempt >= attempts_max))
     for no key update
), a as (
  insert into step_attempt (run_id, seq, attempt, worker, started_at, \"end\")
  select run_id, seq, attempt, worker, started_at, 'crash' from s where status = 'leased'
  on conflict (run_id, seq, attempt) do nothing
)
select node, attempt from s";

#[derive(FromRow)]
struct ExpiredRow {
    node: String,
    attempt: i16,
}
