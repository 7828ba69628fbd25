//! Closing a run otherwise than by its step's commit: a stop nobody works on, a worker that died
//! once too often, a pause that is stopped.

use sqlx::{Postgres, Transaction};

use super::error::Doing;
use super::rows::text_of;
use super::thread_lock::LockedThread;
use crate::domain::{ExecutionMeta, RunId, RunStatus};
use crate::graph::engine::{RunError, errored, stopped};
use crate::store::StoreError;

/// A step of a run that is being closed.
#[derive(Debug, Clone)]
pub(super) struct OpenStep {
    pub(super) seq: i32,
    pub(super) node: String,
}

/// Closes `run` as stopped: its open step is cancelled, and the next run starts at that node. A pause
/// has no open step; its stop belongs to no step, and the next run starts where it would have.
pub(super) async fn close_stopped(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    run: RunId,
    step: Option<&OpenStep>,
) -> Result<(), StoreError> {
    let meta = thread.meta()?;
    let node = step.map_or_else(|| meta.current_node.clone(), |step| step.node.clone());
    let at = meta.step;
    let closing = Closing {
        run,
        seq: step.map(|step| step.seq),
        meta: stopped(meta, &node, at),
        node,
        status: RunStatus::Stopped,
        thread_status: "idle",
        step_status: "cancelled",
        error: None,
    };
    closing.write(tx, thread).await
}

/// Closes `run` as failed, at `step` if it has an open one; the thread can be used again, and goes on
/// at that node.
pub(super) async fn close_failed(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    run: RunId,
    step: Option<&OpenStep>,
    error: &RunError,
) -> Result<(), StoreError> {
    let mut meta = thread.meta()?;
    if let Some(step) = step {
        meta.current_node.clone_from(&step.node);
    }
    let closing = Closing {
        run,
        seq: step.map(|step| step.seq),
        node: meta.current_node.clone(),
        meta: errored(meta, error),
        status: RunStatus::Failed,
        thread_status: "error",
        step_status: "failed",
        error: Some(error),
    };
    closing.write(tx, thread).await
}

struct Closing<'a> {
    run: RunId,
    /// The open step; `None` = the version belongs to no step.
    seq: Option<i32>,
    node: String,
    meta: ExecutionMeta,
    status: RunStatus,
    thread_status: &'static str,
    step_status: &'static str,
    error: Option<&'a RunError>,
}

impl Closing<'_> {
    /// Tokens go, so that a late commit is refused.
    async fn write(&self, tx: &mut Transaction<'_, Postgres>, thread: &LockedThread) -> Result<(), StoreError> {
        sqlx::query(CLOSE)
            .bind(thread.key)
            .bind(self.run.0)
            .bind(self.seq)
            .bind(&self.node)
            .bind(text_of(&self.meta))
            .bind(self.status.as_str())
            .bind(self.thread_status)
            .bind(self.step_status)
            .bind(self.error.map(text_of))
            .execute(&mut **tx)
            .await
            .doing("close a run")?;
        Ok(())
    }
}

/// $1 thread, $2 run, $3 seq, $4 node, $5 place, $6 run status, $7 thread status, $8 step status,
/// $9 error.
const CLOSE: &str = "
with t as (
  update thread t
     set version = version + 1, execution_meta = $5::json, status = $7::thread_status, active_run = null,
         stop_run = null, updated_at = clock_timestamp(),
         name = case when t.name like '%{messages}%'
                     then replace(t.name, '{messages}', (select count(*) from message m
                            where m.thread_key = t.key and m.removed_in is null)::text)
                     else t.name end
   where key = $1
  returning key, version, next_position
), s as (
  update step set status = $8::step_status, due_at = null, token = null, finished_at = clock_timestamp(), error = $9::json
   where run_id = $2 and status in ('delayed', 'ready', 'leased')
), c as (
  insert into checkpoint (thread_key, version, run_id, seq, node, execution_meta, next_position)
  select key, version, case when $3::int is not null then $2 end, $3, $4, $5::json, next_position from t
)
update run r set status = $6::run_status, finished_at = clock_timestamp(), error = $9::json, version = t.version
  from t where r.id = $2";
