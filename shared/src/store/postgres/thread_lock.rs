//! The lock that comes first: the `thread` row.

use sqlx::{FromRow, Postgres, Transaction};
use uuid::Uuid;

use super::claim::lease_columns;
use super::error::Doing;
use super::rows::parsed;
use crate::domain::{ExecutionMeta, LeaseToken, RunId, Scope, StepId, ThreadId};
use crate::store::StoreError;

/// A thread whose row this transaction holds.
#[derive(FromRow)]
pub(super) struct LockedThread {
    pub(super) key: i64,
    pub(super) tenant: String,
    pub(super) user_id: String,
    pub(super) graph: String,
    pub(super) graph_version: String,
    pub(super) status: String,
    pub(super) next_position: i64,
    pub(super) has_state: bool,
    pub(super) active_run: Option<Uuid>,
    pub(super) stop_run: Option<Uuid>,
    pub(super) last_run: Option<Uuid>,
    execution_meta: String,
}

impl LockedThread {
    /// Its place.
    pub(super) fn meta(&self) -> Result<ExecutionMeta, StoreError> {
        parsed(&self.execution_meta, "read a thread's place")
    }

    /// The run that occupies it, if a stop is recorded for that one.
    pub(super) fn run_to_stop(&self) -> Option<RunId> {
        self.stop_run.filter(|stop| Some(*stop) == self.active_run).map(RunId)
    }

    /// The thread itself, if `scope` may see it.
    pub(super) fn seen_by(self, scope: &Scope) -> Option<Self> {
        let hidden = scope.owner.as_ref().is_some_and(|owner| owner.as_str() != self.user_id);
        (!hidden).then_some(self)
    }
}

macro_rules! lock_thread {
    ($condition:literal) => {
        concat!(
            "select key, tenant, user_id, graph, graph_version, status::text as status, next_position, has_state,
                    active_run, stop_run, last_run, execution_meta::text as execution_meta
               from thread where ",
            $condition,
            " order by key for no key update"
        )
    };
}

/// Locks a thread by its wire id, whoever owns it.
pub(super) async fn lock(
    tx: &mut Transaction<'_, Postgres>,
    scope: &Scope,
    id: &ThreadId,
) -> Result<Option<LockedThread>, StoreError> {
    sqlx::query_as(lock_thread!("tenant = $1 and id = $2"))
        .bind(scope.tenant.as_str())
        .bind(id.as_str())
        .fetch_optional(&mut **tx)
        .await
        .doing("lock a thread")
}

/// Locks a thread by its key.
pub(super) async fn lock_key(tx: &mut Transaction<'_, Postgres>, key: i64) -> Result<Option<LockedThread>, StoreError> {
    sqlx::query_as(lock_thread!("key = $1")).bind(key).fetch_optional(&mut **tx).await.doing("lock a thread")
}

/// Locks the thread of a step.
pub(super) async fn lock_of_step(
    tx: &mut Transaction<'_, Postgres>,
    step: StepId,
) -> Result<Option<LockedThread>, StoreError> {
    sqlx::query_as(lock_thread!("key = (select s.thread_key from step s where s.run_id = $1 and s.seq = $2)"))
        .bind(step.run_id.0)
        .bind(step.seq)
        .fetch_optional(&mut **tx)
        .await
        .doing("lock a thread")
}

/// Locks the threads of those leases that are held, in the order of their keys.
pub(super) async fn lock_of_leases(
    tx: &mut Transaction<'_, Postgres>,
    leases: &[(StepId, LeaseToken)],
) -> Result<Vec<LockedThread>, StoreError> {
    let (run_ids, seqs, tokens) = lease_columns(leases);
    sqlx::query_as(lock_thread!(
        "key in (select s.thread_key from unnest($1::uuid[], $2::int[], $3::uuid[]) as j (run_id, seq, token)
                   join step s on s.run_id = j.run_id and s.seq = j.seq
                  where s.token = j.token and s.status = 'leased')"
    ))
    .bind(run_ids)
    .bind(seqs)
    .bind(tokens)
    .fetch_all(&mut **tx)
    .await
    .doing("lock threads")
}
