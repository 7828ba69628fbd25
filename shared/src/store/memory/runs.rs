//! Runs as a client sees them: reading, stopping, explaining.

use async_trait::async_trait;

use super::tables::{Checkpoint, MessageRow, Tables, ThreadRow};
use super::upkeep::WORKER_SEEN;
use super::{MemoryStore, Operation, create};
use crate::domain::{RunId, RunStatus, Scope, StepId, ThreadId, ThreadKey};
use crate::graph::engine;
use crate::store::{
    Admit, Change, Created, NewRun, RunFilter, RunRecord, Runs, StepRecord, StepStatus, StopAnswer, StoreError, Time,
    WhyFacts,
};

#[async_trait]
impl Runs for MemoryStore {
    async fn create_run(&self, new: NewRun, admit: Admit<'_>) -> Result<Created, StoreError> {
        self.transact(Operation::CreateRun, |tables, now| create::create_run(tables, new, admit, now)).await
    }

    async fn run(&self, scope: &Scope, id: RunId) -> Result<Option<RunRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| Ok(tables.visible_run(scope, id))).await
    }

    async fn last_of_chain(&self, root: RunId) -> Result<Option<RunRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| Ok(tables.last_of_chain(root))).await
    }

    async fn runs(&self, scope: &Scope, filter: &RunFilter) -> Result<Vec<RunRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let newest_first = tables.runs.keys().rev().filter(|id| filter.before.is_none_or(|before| **id < before));
            let visible = newest_first.filter_map(|id| tables.visible_run(scope, *id));
            Ok(visible.filter(|run| matches(filter, run)).take(filter.limit as usize).collect())
        })
        .await
    }

    async fn finished(&self, ids: &[RunId]) -> Result<Vec<(RunId, RunStatus)>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let known = ids.iter().filter_map(|id| tables.runs.get(id));
            Ok(known.filter(|run| run.status.is_final()).map(|run| (run.id, run.status)).collect())
        })
        .await
    }

    async fn steps(&self, run: RunId) -> Result<Vec<StepRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| Ok(tables.steps_of(run).map(|step| step.record.clone()).collect()))
            .await
    }

    async fn changes(&self, run: RunId, after: i64) -> Result<Vec<Change>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let thread = tables.runs.get(&run).map(|run| &tables.threads[&run.thread_key]);
            Ok(thread.map(|thread| thread.changes(run, after)).unwrap_or_default())
        })
        .await
    }

    async fn stop_thread(&self, scope: &Scope, thread: &ThreadId) -> Result<StopAnswer, StoreError> {
        self.transact(Operation::Stop, |tables, now| {
            let Some(row) = tables.visible_thread(scope, thread).filter(|row| row.has_state) else {
                return Ok(StopAnswer::NoState);
            };
            let Some(run) = row.active_run.or(row.last_run) else { return Ok(StopAnswer::NotRunning) };
            Ok(if tables.stop(run, &who(scope), now) { StopAnswer::Running(run) } else { StopAnswer::NotRunning })
        })
        .await
    }

    async fn stop_run(&self, scope: &Scope, run: RunId) -> Result<Option<RunRecord>, StoreError> {
        self.transact(Operation::Stop, |tables, now| {
            let Some(run) = tables.visible_run(scope, run) else { return Ok(None) };
            let Some(last) = tables.last_of_chain(run.root) else { return Ok(None) };
            tables.stop(last.id, &who(scope), now);
            Ok(tables.run_view(last.id))
        })
        .await
    }

    async fn why(&self, run: RunId) -> Result<Option<WhyFacts>, StoreError> {
        self.transact(Operation::Other, |tables, now| Ok(tables.why(run, now))).await
    }
}

fn matches(filter: &RunFilter, run: &RunRecord) -> bool {
    (filter.statuses.is_empty() || filter.statuses.contains(&run.status))
        && filter.graph.as_ref().is_none_or(|graph| *graph == run.graph)
        && filter.thread.as_ref().is_none_or(|thread| *thread == run.thread_id)
}

fn who(scope: &Scope) -> String {
    scope.owner.as_ref().map_or_else(|| "anonymous".to_owned(), |owner| owner.0.clone())
}

impl ThreadRow {
    fn changes(&self, run: RunId, after: i64) -> Vec<Change> {
        let of_run = self.checkpoints.iter().filter(|checkpoint| checkpoint.version > after);
        let steps =
            of_run.filter_map(|checkpoint| Some((checkpoint, checkpoint.step.filter(|step| step.run_id == run)?)));
        let change = |(checkpoint, step): (&Checkpoint, StepId)| {
            let version = checkpoint.version;
            let rows = |in_it: fn(&MessageRow, i64) -> bool| {
                self.messages.iter().filter(move |row| row.in_context && in_it(row, version))
            };
            let written = |values: &Vec<(i64, crate::domain::Json)>| {
                values.iter().find(|(at, _)| *at == version).map(|(_, value)| value.clone())
            };
            Change {
                seq: step.seq,
                node: checkpoint.node.clone(),
                version,
                at: checkpoint.at,
                messages: rows(|row, version| row.added_in == version).map(|row| row.message.clone()).collect(),
                removed: rows(|row, version| row.removed_in == Some(version)).map(|row| row.id().clone()).collect(),
                fields: self
                    .fields
                    .iter()
                    .filter_map(|(name, values)| Some((name.clone(), written(values)?)))
                    .collect(),
                meta: checkpoint.meta.clone(),
            }
        };
        steps.map(change).collect()
    }
}

impl Tables {
    fn visible_run(&self, scope: &Scope, id: RunId) -> Option<RunRecord> {
        let run = self.run_view(id)?;
        self.threads[&run.thread_key].is_visible_to(scope).then_some(run)
    }

    fn last_of_chain(&self, root: RunId) -> Option<RunRecord> {
        let mut last = root;
        while let Some(next) = self.runs.values().find(|run| run.resumes == Some(last)) {
            last = next.id;
        }
        self.run_view(last)
    }

    /// Stops a run; whether it waited in the queue or was held.
    fn stop(&mut self, id: RunId, who: &str, now: Time) -> bool {
        let run = &self.runs[&id];
        let (key, status) = (run.thread_key, run.status);
        if status == RunStatus::Interrupted {
            self.close_paused(key, id, who, now);
            return false;
        }
        if !status.is_active() {
            return false;
        }
        let thread = self.thread_of(key);
        let first_time = thread.stop_run.replace(id).is_none();
        if first_time {
            self.write_audit(key, who, "stop", serde_json::json!({"run_id": id}), now);
        }
        let Some(step) = self.open_step(id) else { return false };
        let (step_id, held, due_at) = (step.record.id, step.record.status == StepStatus::Leased, step.due_at);
        if held {
            return due_at.is_some_and(|due| due > now);
        }
        self.stop_at(step_id, now);
        true
    }

    /// A paused run that nobody resumed is closed; its question is gone.
    fn close_paused(&mut self, key: ThreadKey, id: RunId, who: &str, now: Time) {
        if self.runs.values().any(|run| run.resumes == Some(id)) {
            return;
        }
        let denied = self.cancel_questions(key, id, who, now);
        let thread = self.thread_of(key);
        if thread.last_run == Some(id) && thread.meta.is_interrupted() {
            let node = thread.meta.current_node.clone();
            let meta = engine::stopped(thread.meta.clone(), &node, thread.meta.step);
            let version = thread.checkpoint(None, &node, meta, now);
            thread.add_to_context(&denied, true, version);
        }
        self.close_run(id, RunStatus::Stopped, None, now);
        self.write_audit(key, who, "stop", serde_json::json!({"run_id": id}), now);
    }

    fn why(&self, id: RunId, now: Time) -> Option<WhyFacts> {
        let run = self.run_view(id)?;
        let step = self.open_step(id).or_else(|| self.steps_of(id).next_back());
        let live = || self.workers.values().filter(|(_, seen)| *seen + WORKER_SEEN > now).map(|(worker, _)| worker);
        let pool = step.map(|step| step.record.pool.clone());
        let serves = |pools: &[crate::domain::PoolName]| pool.as_ref().is_some_and(|pool| pools.contains(pool));
        let able = |versions: &[crate::domain::GraphVersion]| {
            !run.graph_version.is_code() || versions.contains(&run.graph_version)
        };
        let ready = self
            .steps
            .values()
            .filter(|other| other.record.status == StepStatus::Ready && Some(&other.record.pool) == pool.as_ref());
        Some(WhyFacts {
            step: step.map(|step| step.record.clone()),
            in_backlog: step.is_some_and(|step| step.record.status == StepStatus::Ready && step.due_at.is_none()),
            stop_requested: self.is_stop_requested(run.thread_key, id),
            due_at: step.and_then(|step| step.due_at),
            pool_workers: count(live().filter(|worker| serves(&worker.pools))),
            able_workers: count(live().filter(|worker| serves(&worker.pools) && able(&worker.versions))),
            ready_in_pool: count(ready),
            now,
            run,
        })
    }
}

/// How many, as the store counts.
pub(super) fn count(rows: impl Iterator) -> i64 {
    i64::try_from(rows.count()).unwrap_or(i64::MAX)
}
