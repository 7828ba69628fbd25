//! Leases that are held: renewed, given back, or ended by an attempt that failed.

use std::time::Duration;

use sqlx::FromRow;
use uuid::Uuid;

use super::PgStore;
use super::claim::lease_columns;
use super::close::{OpenStep, close_stopped};
use super::error::Doing;
use super::rows::{seconds, text_of};
use super::thread_lock;
use crate::domain::{LeaseToken, RunId, StepId};
use crate::store::{AttemptEnd, LeaseState, StoreError};

impl PgStore {
    pub(super) async fn heartbeat_once(
        &self,
        leases: &[(StepId, LeaseToken)],
        ttl: Duration,
    ) -> Result<Vec<LeaseState>, StoreError> {
        let (run_ids, seqs, tokens) = lease_columns(leases);
        let rows: Vec<(i32, bool, bool, bool)> = sqlx::query_as(HEARTBEAT)
            .bind(run_ids)
            .bind(seqs)
            .bind(tokens)
            .bind(seconds(ttl))
            .fetch_all(&self.pool)
            .await
            .doing("renew leases")?;
        let mut states = vec![LeaseState { held: false, renewed: false, stop_requested: false }; leases.len()];
        for (i, held, renewed, stop_requested) in rows {
            let index = usize::try_from(i - 1).expect("ordinality counts from 1");
            states[index] = LeaseState { held, renewed, stop_requested };
        }
        Ok(states)
    }

    /// Under the locks of the threads, so that no stop is missed: a step that waits again under a
    /// stop would start once more.
    pub(super) async fn give_back_once(&self, leases: &[(StepId, LeaseToken)]) -> Result<u64, StoreError> {
        let doing = "give leases back";
        let mut tx = self.begin(doing).await?;
        let threads = thread_lock::lock_of_leases(&mut tx, leases).await?;
        let (run_ids, seqs, tokens) = lease_columns(leases);
        let given: Vec<GivenRow> =
            sqlx::query_as(GIVE_BACK).bind(run_ids).bind(seqs).bind(tokens).fetch_all(&mut *tx).await.doing(doing)?;
        for row in &given {
            let run = RunId(row.run_id);
            let thread = threads.iter().find(|thread| thread.key == row.thread_key);
            if let Some(thread) = thread.filter(|thread| thread.run_to_stop() == Some(run)) {
                let step = OpenStep { seq: row.seq, node: row.node.clone() };
                close_stopped(&mut tx, thread, run, Some(&step)).await?;
            }
        }
        tx.commit().await.doing(doing)?;
        Ok(given.len() as u64)
    }

    pub(super) async fn retry_step_once(
        &self,
        step: StepId,
        token: LeaseToken,
        end: &AttemptEnd,
        delay: Duration,
    ) -> Result<bool, StoreError> {
        let doing = "put a step off";
        let mut tx = self.begin(doing).await?;
        let Some(thread) = thread_lock::lock_of_step(&mut tx, step).await? else { return Ok(false) };
        let node: Option<String> = sqlx::query_scalar(PUT_OFF)
            .bind(step.run_id.0)
            .bind(step.seq)
            .bind(token.0)
            .bind(seconds(delay))
            .bind(&end.end)
            .bind(end.error.as_ref().map(text_of))
            .fetch_optional(&mut *tx)
            .await
            .doing(doing)?;
        let Some(node) = node else { return Ok(false) };
        if thread.run_to_stop() == Some(step.run_id) {
            close_stopped(&mut tx, &thread, step.run_id, Some(&OpenStep { seq: step.seq, node })).await?;
        }
        tx.commit().await.doing(doing)?;
        Ok(true)
    }
}

#[derive(FromRow)]
struct GivenRow {
    run_id: Uuid,
    seq: i32,
    thread_key: i64,
    node: String,
}

/// $1 run ids, $2 seqs, $3 tokens, $4 seconds. A row somebody holds (most likely its own commit) is
/// not renewed this time and counts as held.
const HEARTBEAT: &str = "
with j as (
  select * from unnest($1::uuid[], $2::int[], $3::uuid[]) with ordinality as j (run_id, seq, token, i)
), h as (
  select s.run_id, s.seq from j join step s on s.run_id = j.run_id and s.seq = j.seq
   where s.token = j.token and s.status = 'leased'
   order by s.run_id, s.seq for no key update of s skip locked
), u as (
  update step s set due_at = clock_timestamp() + make_interval(secs => $4)
    from h where s.run_id = h.run_id and s.seq = h.seq
)
select j.i::int, (s.token = j.token and s.status = 'leased') is true, h.run_id is not null, (t.stop_run = j.run_id) is true
  from j join step s on s.run_id = j.run_id and s.seq = j.seq
  join thread t on t.key = s.thread_key
  left join h on h.run_id = j.run_id and h.seq = j.seq";

/// $1 run ids, $2 seqs, $3 tokens. Not charged; without the token a late commit is refused.
const GIVE_BACK: &str = "
with s as (
  update step s
     set status = 'ready', token = null, attempt = greatest(s.attempt - 1, 0), due_at = clock_timestamp(), requeued = true
    from unnest($1::uuid[], $2::int[], $3::uuid[]) as j (run_id, seq, token)
   where s.run_id = j.run_id and s.seq = j.seq and s.token = j.token and s.status = 'leased'
  returning s.run_id, s.seq, s.thread_key, s.node
), r as (
  update run r set status = 'queued' from s where r.id = s.run_id and r.status = 'running'
)
select * from s";

/// $1 run, $2 seq, $3 token, $4 seconds, $5 how the attempt ended, $6 its error.
const PUT_OFF: &str = "
with s as (
  update step
     set status = 'delayed', token = null, run_at = clock_timestamp() + make_interval(secs => $4),
         due_at = clock_timestamp() + make_interval(secs => $4)
   where run_id = $1 and seq = $2 and token = $3 and status = 'leased'
  returning run_id, seq, attempt, worker, started_at, node
), a as (
  insert into step_attempt (run_id, seq, attempt, worker, started_at, \"end\", error)
  select run_id, seq, attempt, worker, started_at, $5, $6::json from s
  on conflict (run_id, seq, attempt) do nothing
)
select node from s";
