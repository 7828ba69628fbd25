//! What the scheduler and the operators ask.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use chrono::TimeDelta;

use super::runs::count;
use super::tables::{StepRow, Tables};
use super::{MemoryStore, Operation, sweep};
use crate::domain::{GraphVersion, PoolName, RunId, RunStatus, Scope, StepId, Tenant, ThreadId, WorkerId};
use crate::graph::engine::RunError;
use crate::queue::Job;
use crate::store::{AuditRecord, PoolRecord, StepStatus, StoreClock, StoreError, Swept, Time, Upkeep, WorkerRecord};

/// A worker that was seen so recently counts as alive.
pub(super) const WORKER_SEEN: TimeDelta = TimeDelta::seconds(30);

#[async_trait]
impl Upkeep for MemoryStore {
    async fn dispatch(
        &self,
        pool: &PoolName,
        class: i16,
        after: &Tenant,
        tenants: u32,
        each: u32,
        except: &[GraphVersion],
    ) -> Result<Vec<(Job, Tenant)>, StoreError> {
        self.transact(Operation::Sweep, |tables, now| {
            let waits = |step: &&StepRow| {
                step.is_backlog()
                    && step.record.pool == *pool
                    && step.class == class
                    && !except.contains(&step.graph_version)
            };
            let mut backlog: BTreeMap<Tenant, Vec<(Time, StepId)>> = BTreeMap::new();
            for step in tables.steps.values().filter(waits).filter(|step| step.tenant > *after) {
                backlog.entry(step.tenant.clone()).or_default().push((step.record.run_at, step.record.id));
            }
            let mut picked = Vec::new();
            for (tenant, mut steps) in backlog.into_iter().take(tenants as usize) {
                steps.sort_unstable();
                let chosen = steps.into_iter().take(each as usize);
                picked.extend(chosen.map(|(_, id)| (tables.send(id, now), tenant.clone())));
            }
            Ok(picked)
        })
        .await
    }

    async fn backlog_lanes(&self) -> Result<Vec<(PoolName, i16)>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let backlog = tables.steps.values().filter(|step| step.is_backlog());
            let lanes: BTreeSet<_> = backlog.map(|step| (step.record.pool.clone(), step.class)).collect();
            Ok(lanes.into_iter().collect())
        })
        .await
    }

    async fn sweep(&self, limit: u32, expire: bool) -> Result<Swept, StoreError> {
        self.transact(Operation::Sweep, |tables, now| Ok(sweep::sweep(tables, limit, expire, now))).await
    }

    async fn clock(&self) -> Result<StoreClock, StoreError> {
        let started = self.database.clock.started();
        self.transact(Operation::Other, |_, now| Ok(StoreClock { now, started })).await
    }

    async fn repair(&self, limit: u32) -> Result<u32, StoreError> {
        self.transact(Operation::Other, |tables, now| Ok(tables.repair(limit, now))).await
    }

    async fn worker_seen(&self, worker: &WorkerRecord) -> Result<(), StoreError> {
        self.transact(Operation::Other, |tables, now| {
            tables.workers.insert(worker.id, (worker.clone(), now));
            Ok(())
        })
        .await
    }

    async fn unsend(&self, steps: &[StepId]) -> Result<(), StoreError> {
        self.transact(Operation::Sweep, |tables, _| {
            for id in steps {
                if let Some(step) = tables.steps.get_mut(id).filter(|step| step.record.status == StepStatus::Ready) {
                    step.due_at = None;
                }
            }
            Ok(())
        })
        .await
    }

    async fn worker_gone(&self, worker: WorkerId) -> Result<(), StoreError> {
        self.transact(Operation::Other, |tables, _| {
            tables.workers.remove(&worker);
            Ok(())
        })
        .await
    }

    async fn pools(&self) -> Result<Vec<PoolRecord>, StoreError> {
        self.transact(Operation::Other, |tables, now| Ok(tables.pools(now))).await
    }

    async fn run_counts(&self) -> Result<Vec<(RunStatus, i64)>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let of = |status| count(tables.runs.values().filter(|run| run.status == status));
            Ok(RunStatus::ALL.into_iter().map(|status| (status, of(status))).filter(|(_, n)| *n > 0).collect())
        })
        .await
    }

    async fn audit(&self, scope: &Scope, id: &ThreadId) -> Result<Vec<AuditRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let Some(key) = tables.visible_thread(scope, id).map(|thread| thread.key) else { return Ok(Vec::new()) };
            Ok(tables.audit.iter().filter(|(thread, _)| *thread == key).map(|(_, entry)| entry.clone()).collect())
        })
        .await
    }
}

impl StepRow {
    fn is_backlog(&self) -> bool {
        self.record.status == StepStatus::Ready && self.due_at.is_none()
    }
}

impl Tables {
    fn send(&mut self, id: StepId, now: Time) -> Job {
        let trace = self.trace_of(id.run_id);
        let step = self.steps.get_mut(&id).expect("it was just found");
        step.sending(now);
        step.job(trace)
    }

    fn pools(&self, now: Time) -> Vec<PoolRecord> {
        let live = || self.workers.values().filter(|(_, seen)| *seen + WORKER_SEEN > now).map(|(worker, _)| worker);
        let of_steps = self.steps.values().filter(|step| step.token.is_some() || step.is_runnable(now));
        let of_steps = of_steps.filter(|step| step.record.finished_at.is_none()).map(|step| step.record.pool.clone());
        let names: BTreeSet<PoolName> = of_steps.chain(live().flat_map(|worker| worker.pools.clone())).collect();
        let pool = |pool: PoolName| {
            let steps = || self.steps.values().filter(|step| step.record.pool == pool);
            let serving = || live().filter(|worker| worker.pools.contains(&pool));
            let oldest = steps().filter(|step| step.is_runnable(now)).map(|step| step.record.run_at).min();
            let wait = oldest.and_then(|oldest| (now - oldest).to_std().ok()).unwrap_or_default();
            PoolRecord {
                runnable: count(steps().filter(|step| step.is_runnable(now))),
                running: count(steps().filter(|step| step.record.status == StepStatus::Leased)),
                oldest_wait_s: wait.as_secs_f64(),
                workers: count(serving()),
                slots: serving().map(|worker| i64::from(worker.slots)).sum(),
                pool: pool.clone(),
            }
        };
        names.into_iter().map(pool).collect()
    }

    /// Closes runs without an open step and frees threads without a run.
    fn repair(&mut self, limit: u32, now: Time) -> u32 {
        let active = self.runs.values().filter(|run| run.status.is_active());
        let stuck: Vec<RunId> = active.map(|run| run.id).filter(|id| self.open_step(*id).is_none()).collect();
        let mut mended = 0;
        for id in stuck.into_iter().take(limit as usize) {
            let key = self.runs[&id].thread_key;
            let error = RunError::lost_step();
            let thread = self.thread_of(key);
            let node = thread.meta.current_node.clone();
            let meta = crate::graph::engine::errored(thread.meta.clone(), &error);
            thread.checkpoint(None, &node, meta, now);
            self.close_run(id, RunStatus::Failed, Some(error), now);
            self.write_audit(key, "scheduler", "repair", serde_json::json!({"run_id": id}), now);
            mended += 1;
        }
        mended + self.free_threads(limit - mended, now)
    }

    fn free_threads(&mut self, limit: u32, now: Time) -> u32 {
        let is_active = |run: RunId| self.runs.get(&run).is_some_and(|run| run.status.is_active());
        let busy = self.threads.values().filter(|thread| thread.active_run.is_some_and(|run| !is_active(run)));
        let keys: Vec<_> = busy.map(|thread| thread.key).take(limit as usize).collect();
        for key in &keys {
            let run = self.thread_of(*key).active_run.take();
            self.write_audit(*key, "scheduler", "repair", serde_json::json!({"run_id": run}), now);
        }
        u32::try_from(keys.len()).unwrap_or(u32::MAX)
    }
}

impl StepRow {
    fn is_runnable(&self, now: Time) -> bool {
        self.record.status == StepStatus::Ready && self.record.run_at <= now
    }
}
