//! Taking leases: one statement, one round trip, never waiting for a lock.

use std::time::Duration;

use sqlx::FromRow;
use uuid::Uuid;

use super::PgStore;
use super::error::Doing;
use super::rows::seconds;
use crate::domain::{GraphVersion, LeaseToken, RunId, StepId, ThreadKey, WorkerId};
use crate::store::{Claimed, StoreError};

impl PgStore {
    /// Takes the leases; the runs that went back to `queued` when an earlier lease of the step ended
    /// are marked as running again.
    pub(super) async fn claim_once(
        &self,
        claims: &[(StepId, LeaseToken)],
        worker: WorkerId,
        versions: &[GraphVersion],
        ttl: Duration,
    ) -> Result<Vec<Claimed>, StoreError> {
        let (run_ids, seqs, tokens) = lease_columns(claims);
        let versions: Vec<&str> = versions.iter().map(GraphVersion::as_str).collect();
        let doing = "claim steps";
        let mut connection = self.hints.take().await.doing(doing)?;
        let rows: Vec<ClaimedRow> = sqlx::query_as(CLAIM)
            .bind(run_ids)
            .bind(seqs)
            .bind(tokens)
            .bind(worker.0)
            .bind(versions)
            .bind(seconds(ttl))
            .fetch_all(&mut *connection)
            .await
            .doing(doing)?;
        connection.keep();
        let requeued: Vec<RunId> = rows.iter().filter(|row| row.requeued).map(|row| RunId(row.run_id)).collect();
        if !requeued.is_empty() {
            // The leases are ours whatever happens here; the status is only what people see.
            if let Err(error) = self.mark_running_once(&requeued).await {
                tracing::warn!("Runs that were taken again are shown as queued: {error}");
            }
        }
        Ok(rows.into_iter().map(ClaimedRow::claimed).collect())
    }

    /// `queued` → `running`, by id; a row somebody holds is left as it is. It belongs to the claim
    /// and is apart from it only so that no claim touches a run's row; so it too may be lost with
    /// the last moment before a crash of the database.
    pub(super) async fn mark_running_once(&self, runs: &[RunId]) -> Result<(), StoreError> {
        let runs: Vec<Uuid> = runs.iter().map(|run| run.0).collect();
        let doing = "mark runs as running";
        let mut connection = self.hints.take().await.doing(doing)?;
        sqlx::query(MARK_RUNNING).bind(runs).execute(&mut *connection).await.doing(doing)?;
        connection.keep();
        Ok(())
    }
}

/// Run ids, seqs and tokens as arrays.
pub(super) fn lease_columns(leases: &[(StepId, LeaseToken)]) -> (Vec<Uuid>, Vec<i32>, Vec<Uuid>) {
    let run_ids = leases.iter().map(|(step, _)| step.run_id.0).collect();
    let seqs = leases.iter().map(|(step, _)| step.seq).collect();
    let tokens = leases.iter().map(|(_, token)| token.0).collect();
    (run_ids, seqs, tokens)
}

/// $1 run ids, $2 seqs, $3 tokens, $4 worker, $5 code versions this worker has, $6 seconds.
///
/// Asynchronous commit: a claim that is lost is made again under another token. An expired lease is
/// not claimed: the sweep alone decides whether the step may start once more. A lease under the very
/// token is answered again, uncharged: the first answer was lost.
const CLAIM: &str = "
with wanted as (
  select s.run_id, s.seq, j.token, s.requeued
    from unnest($1::uuid[], $2::int[], $3::uuid[]) as j (run_id, seq, token)
    join step s on s.run_id = j.run_id and s.seq = j.seq
   where (s.status = 'ready' and s.run_at <= clock_timestamp() or s.status = 'leased' and s.token = j.token)
     and (s.graph_version like 'd-%' or s.graph_version = any ($5::text[]))
   order by s.run_id, s.seq for no key update of s skip locked
), taken as (
  update step s
     set status = 'leased', token = w.token, worker = $4, requeued = false,
         attempt = case when s.status = 'leased' then s.attempt else s.attempt + 1 end,
         due_at = clock_timestamp() + make_interval(secs => $6), started_at = clock_timestamp()
    from wanted w where s.run_id = w.run_id and s.seq = w.seq
  returning s.run_id, s.seq, s.thread_key, s.node, s.graph_version, s.attempt, s.attempts_max, s.token, w.requeued
)
select k.*, t.version from taken k join thread t on t.key = k.thread_key";

/// $1 run ids. The text of the status is compared, for otherwise the index of all active runs could
/// be read through to find these few.
const MARK_RUNNING: &str = "
with queued as (
  select r.id from unnest($1::uuid[]) as j (id) join run r on r.id = j.id
   where r.status::text = 'queued'
   for no key update of r skip locked
)
update run r set status = 'running', started_at = coalesce(r.started_at, clock_timestamp())
  from queued q where r.id = q.id";

#[derive(FromRow)]
struct ClaimedRow {
    run_id: Uuid,
    seq: i32,
    thread_key: i64,
    node: String,
    graph_version: String,
    attempt: i16,
    attempts_max: i16,
    token: Uuid,
    requeued: bool,
    version: i64,
}

impl ClaimedRow {
    fn claimed(self) -> Claimed {
        Claimed {
            step: StepId { run_id: RunId(self.run_id), seq: self.seq },
            thread_key: ThreadKey(self.thread_key),
            node: self.node,
            graph_version: GraphVersion(self.graph_version),
            attempt: self.attempt,
            attempts_max: self.attempts_max,
            token: LeaseToken(self.token),
            version: self.version,
        }
    }
}
