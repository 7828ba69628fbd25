//! The steps of workers: every write carries the lease's token.

use std::time::Duration;

use async_trait::async_trait;

use super::clock::span;
use super::create::{new_step, step_row};
use super::tables::{StepRow, Tables};
use super::{MemoryStore, Operation, RESEND_AFTER};
use crate::domain::{GraphVersion, LeaseToken, RunId, RunStatus, StepId, WorkerId};
use crate::store::{
    AttemptEnd, Claimed, CommitOutcome, FirstStep, LeaseState, LoadRequest, Loaded, StepCommit, StepStatus, Steps,
    StoreError, Then, Time,
};

#[async_trait]
impl Steps for MemoryStore {
    async fn claim(
        &self,
        claims: &[(StepId, LeaseToken)],
        worker: WorkerId,
        versions: &[GraphVersion],
        ttl: Duration,
    ) -> Result<Vec<Claimed>, StoreError> {
        self.transact(Operation::Claim, |tables, now| {
            let claim = |(step, token): &(StepId, LeaseToken)| {
                tables.claim(*step, (*token, worker), versions, (now, now + span(ttl)))
            };
            Ok(claims.iter().filter_map(claim).collect())
        })
        .await
    }

    async fn mark_running(&self, runs: &[RunId]) -> Result<(), StoreError> {
        self.transact(Operation::Other, |tables, now| {
            for id in runs {
                let Some(run) = tables.runs.get_mut(id).filter(|run| run.status == RunStatus::Queued) else { continue };
                run.status = RunStatus::Running;
                run.started_at = run.started_at.or(Some(now));
            }
            Ok(())
        })
        .await
    }

    async fn load(&self, wanted: &[LoadRequest]) -> Result<Vec<Loaded>, StoreError> {
        self.transact(Operation::Load, |tables, _| {
            Ok(wanted.iter().filter_map(|request| tables.load(request)).collect())
        })
        .await
    }

    async fn commit(&self, steps: &[StepCommit]) -> Vec<Result<CommitOutcome, StoreError>> {
        let done = self
            .transact(Operation::Commit, |tables, now| {
                Ok(steps.iter().map(|step| tables.commit(step, now)).collect::<Vec<_>>())
            })
            .await;
        match done {
            Ok(outcomes) => outcomes.into_iter().map(Ok).collect(),
            Err(_) => steps.iter().map(|_| Err(Operation::Commit.unavailable())).collect(),
        }
    }

    async fn heartbeat(&self, leases: &[(StepId, LeaseToken)], ttl: Duration) -> Result<Vec<LeaseState>, StoreError> {
        self.transact(Operation::Heartbeat, |tables, now| {
            let renew = |(id, token): &(StepId, LeaseToken)| {
                let Some(step) = tables.held(*id, *token) else {
                    return LeaseState { held: false, renewed: false, stop_requested: false };
                };
                step.due_at = Some(now + span(ttl));
                let key = step.thread;
                LeaseState { held: true, renewed: true, stop_requested: tables.is_stop_requested(key, id.run_id) }
            };
            Ok(leases.iter().map(renew).collect())
        })
        .await
    }

    async fn give_back(&self, leases: &[(StepId, LeaseToken)]) -> Result<u64, StoreError> {
        self.transact(Operation::GiveBack, |tables, now| {
            let held = leases.iter().filter(|(id, token)| tables.give_back(*id, *token, now));
            Ok(held.count() as u64)
        })
        .await
    }

    async fn retry_step(
        &self,
        step: StepId,
        token: LeaseToken,
        end: &AttemptEnd,
        delay: Duration,
    ) -> Result<bool, StoreError> {
        self.transact(Operation::GiveBack, |tables, now| {
            let Some(row) = tables.held(step, token) else { return Ok(false) };
            row.attempt_ended(end.clone(), now);
            row.record.status = StepStatus::Delayed;
            row.record.run_at = now + span(delay);
            row.due_at = Some(row.record.run_at);
            row.token = None;
            tables.stop_if_asked(step, now);
            Ok(true)
        })
        .await
    }
}

impl Tables {
    fn claim(
        &mut self,
        id: StepId,
        (token, worker): (LeaseToken, WorkerId),
        versions: &[GraphVersion],
        (now, until): (Time, Time),
    ) -> Option<Claimed> {
        let step = self.steps.get_mut(&id)?;
        let is_ready = step.record.status == StepStatus::Ready && step.record.run_at <= now;
        if !is_ready || (step.graph_version.is_code() && !versions.contains(&step.graph_version)) {
            return None;
        }
        step.record.status = StepStatus::Leased;
        step.record.attempt += 1;
        step.record.worker = Some(worker);
        step.record.started_at = Some(now);
        step.token = Some(token);
        step.due_at = Some(until);
        Some(Claimed {
            step: id,
            thread_key: step.thread,
            node: step.record.node.clone(),
            graph_version: step.graph_version.clone(),
            attempt: step.record.attempt,
            attempts_max: step.record.attempts_max,
            token,
            version: self.threads[&step.thread].version,
        })
    }

    fn load(&self, request: &LoadRequest) -> Option<Loaded> {
        let run = self.run_view(request.run_id)?;
        let thread = self.threads.get(&request.thread_key)?;
        let since = request.since.unwrap_or(-1);
        let rows = || (0i64..).zip(&thread.messages);
        let added = rows().filter(|(_, row)| row.is_in_context() && row.added_in > since);
        let removed = rows().filter(|(_, row)| {
            row.in_context && row.added_in <= since && row.removed_in.is_some_and(|version| version > since)
        });
        let latest = |values: &Vec<(i64, crate::domain::Json)>| {
            values.last().filter(|(version, _)| *version > since.max(thread.floor)).map(|(_, value)| value.clone())
        };
        Some(Loaded {
            run,
            version: thread.version,
            meta: thread.meta.clone(),
            added: added.map(|(position, row)| (position, row.message.clone())).collect(),
            removed: removed.map(|(position, _)| position).collect(),
            fields: thread.fields.iter().filter_map(|(name, values)| Some((name.clone(), latest(values)?))).collect(),
        })
    }

    /// The step, if this lease still holds it; an expired one that nobody took does.
    pub(super) fn held(&mut self, id: StepId, token: LeaseToken) -> Option<&mut StepRow> {
        let step = self.steps.get_mut(&id)?;
        (step.record.status == StepStatus::Leased && step.token == Some(token)).then_some(step)
    }

    fn give_back(&mut self, id: StepId, token: LeaseToken, now: Time) -> bool {
        let Some(step) = self.held(id, token) else { return false };
        step.record.status = StepStatus::Ready;
        step.record.attempt -= 1;
        step.token = None;
        step.due_at = Some(now);
        self.queue_again(id.run_id);
        self.stop_if_asked(id, now);
        true
    }

    /// A running run whose step nobody holds waits in the queue.
    pub(super) fn queue_again(&mut self, id: RunId) {
        if let Some(run) = self.runs.get_mut(&id).filter(|run| run.status == RunStatus::Running) {
            run.status = RunStatus::Queued;
        }
    }

    /// Closes the run of a step nobody holds any more, if a stop is recorded for it.
    pub(super) fn stop_if_asked(&mut self, id: StepId, now: Time) -> bool {
        let asked = self.steps.get(&id).is_some_and(|step| self.is_stop_requested(step.thread, id.run_id));
        if asked {
            self.stop_at(id, now);
        }
        asked
    }

    fn commit(&mut self, commit: &StepCommit, now: Time) -> CommitOutcome {
        let Some(step) = self.steps.get(&commit.step).filter(|step| step.token == Some(commit.token)) else {
            return CommitOutcome::LeaseLost;
        };
        if step.record.status != StepStatus::Leased {
            return step.outcome.unwrap_or(CommitOutcome::LeaseLost);
        }
        let (run, thread) = (commit.step.run_id, &self.threads[&step.thread]);
        if thread.active_run != Some(run) || thread.version != commit.base_version {
            return CommitOutcome::Conflict;
        }
        let outcome = self.write(commit, now);
        let step = self.steps.get_mut(&commit.step).expect("it was just found");
        step.outcome = Some(outcome);
        outcome
    }

    /// Makes everything of a step visible together; the caller has checked the fence.
    fn write(&mut self, commit: &StepCommit, now: Time) -> CommitOutcome {
        let step = self.steps.get_mut(&commit.step).expect("the caller has found it");
        step.record.status = StepStatus::Done;
        step.record.finished_at = Some(now);
        step.due_at = None;
        let (key, node) = (step.thread, step.record.node.clone());
        let ends_anyway = matches!(
            commit.then,
            Then::End { status: RunStatus::Completed | RunStatus::Failed | RunStatus::Stopped, .. }
        );
        let is_stopped = self.is_stop_requested(key, commit.step.run_id) && !ends_anyway;

        let thread = self.thread_of(key);
        let meta = if is_stopped { &commit.stopped_meta } else { &commit.meta };
        let version = thread.checkpoint(Some(commit.step), &node, meta.clone(), now);
        for position in &commit.removed {
            let row = usize::try_from(*position).ok().and_then(|position| thread.messages.get_mut(position));
            if let Some(row) = row.filter(|row| row.is_in_context()) {
                row.removed_in = Some(version);
                row.in_log = false;
            }
        }
        thread.add_to_context(&commit.messages, true, version);
        thread.write_fields(&commit.fields, version);
        self.steps.get_mut(&commit.step).expect("the caller has found it").record.version = Some(version);
        match &commit.then {
            _ if is_stopped => self.close_run(commit.step.run_id, RunStatus::Stopped, None, now),
            Then::Next { node, at } => self.insert_next(commit.step, node, at, now),
            Then::End { status, error } => {
                self.close_run(commit.step.run_id, *status, error.clone(), now);
                self.ask(key, commit.step, &commit.questions, now);
            }
        }
        if is_stopped { CommitOutcome::Stopped { version } } else { CommitOutcome::Committed { version } }
    }

    /// The next step is being sent by the worker that made it: not backlog.
    fn insert_next(&mut self, after: StepId, node: &str, at: &FirstStep, now: Time) {
        let id = StepId { run_id: after.run_id, seq: after.seq + 1 };
        let before = &self.steps[&after];
        let (key, tenant) = (before.thread, before.tenant.clone());
        let due_at = Some(now + span(RESEND_AFTER));
        let step =
            new_step(step_row(id, node, at, now), key, tenant, before.class, before.graph_version.clone(), due_at);
        self.steps.insert(id, step);
    }
}
