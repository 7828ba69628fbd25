//! Questions: written by the commit that pauses, answered by the run that goes on.

use async_trait::async_trait;

use super::clock::span;
use super::tables::{Tables, ThreadRow};
use super::{MemoryStore, Operation};
use crate::domain::results::denied_by_stop;
use crate::domain::{InterruptRecord, InterruptStatus, Json, Question, RunId, RunStatus, Scope, StepId, ThreadKey};
use crate::graph::admission::{Answered, AnsweredQuestion, OpenQuestion, ThreadView};
use crate::store::{InterruptFilter, Interrupts, StoreError, Time, answer_entry};

#[async_trait]
impl Interrupts for MemoryStore {
    async fn interrupts(&self, scope: &Scope, filter: &InterruptFilter) -> Result<Vec<InterruptRecord>, StoreError> {
        self.transact(Operation::Other, |tables, now| {
            let seen = tables.interrupts.iter().map(|row| row.as_of(now));
            let mut found: Vec<_> =
                seen.filter(|record| is_visible(record, scope) && matches(filter, record)).collect();
            found.sort_by_key(|record| (record.created_at, record.question.id.clone()));
            found.truncate(filter.limit as usize);
            Ok(found)
        })
        .await
    }

    async fn interrupt(&self, scope: &Scope, id: &str) -> Result<Option<InterruptRecord>, StoreError> {
        self.transact(Operation::Other, |tables, now| {
            let mut seen = tables.interrupts.iter().map(|row| row.as_of(now));
            Ok(seen.find(|record| record.question.id == id && is_visible(record, scope)))
        })
        .await
    }

    async fn due_for_expiry(&self, limit: u32) -> Result<Vec<InterruptRecord>, StoreError> {
        self.transact(Operation::Other, |tables, now| {
            let open = tables.interrupts.iter().filter(|row| row.record.status == InterruptStatus::Open);
            let due = open.filter(|row| row.is_over(now) && row.record.question.on_expiry.is_some());
            let mut due: Vec<_> = due.map(|row| row.as_of(now)).collect();
            due.sort_by_key(|record| (record.expires_at, record.question.id.clone()));
            due.truncate(limit as usize);
            Ok(due)
        })
        .await
    }
}

fn is_visible(record: &InterruptRecord, scope: &Scope) -> bool {
    record.tenant == scope.tenant && scope.owner.as_ref().is_none_or(|owner| *owner == record.user)
}

fn matches(filter: &InterruptFilter, record: &InterruptRecord) -> bool {
    let tool = record.question.call.as_ref().map(|call| call.tool.as_str());
    (filter.statuses.is_empty() || filter.statuses.contains(&record.status))
        && filter.thread.as_ref().is_none_or(|thread| *thread == record.thread_id)
        && filter.run.is_none_or(|run| run == record.run_id())
        && filter.graph.as_ref().is_none_or(|graph| *graph == record.graph)
        && filter.tool.as_deref().is_none_or(|wanted| tool == Some(wanted))
        && filter
            .after
            .as_ref()
            .is_none_or(|after| (record.created_at, &record.question.id) > (after.created_at, &after.id))
}

/// A question as a row.
pub(super) struct InterruptRow {
    pub thread: ThreadKey,
    /// Its status is the stored one.
    pub record: InterruptRecord,
}

impl InterruptRow {
    fn is_over(&self, now: Time) -> bool {
        self.record.expires_at.is_some_and(|expires_at| expires_at <= now)
    }

    /// What a reader sees now.
    fn as_of(&self, now: Time) -> InterruptRecord {
        let mut record = self.record.clone();
        if record.status == InterruptStatus::Open && self.is_over(now) {
            record.status = InterruptStatus::Expired;
        }
        record
    }
}

impl Tables {
    /// Asks the questions of a pause.
    pub(super) fn ask(&mut self, key: ThreadKey, step: StepId, questions: &[Question], now: Time) {
        let thread = &self.threads[&key];
        let (tenant, thread_id) = (thread.tenant.clone(), thread.id.clone());
        let (user, graph) = (thread.user.clone(), thread.graph.clone());
        self.interrupts.extend((1..).zip(questions).map(|(place, question)| InterruptRow {
            thread: key,
            record: InterruptRecord {
                question: question.clone(),
                tenant: tenant.clone(),
                thread_id: thread_id.clone(),
                user: user.clone(),
                graph: graph.clone(),
                step,
                status: InterruptStatus::Open,
                answer: None,
                approved_hash: None,
                answered_by: None,
                comment: None,
                created_at: now + chrono::TimeDelta::microseconds(place),
                expires_at: question.expires_in.map(|time| now + span(time)),
                answered_at: None,
            },
        }));
    }

    /// The questions of the pause that a thread shows, in the order they were asked.
    pub(super) fn add_questions(&self, view: &mut ThreadView, thread: &ThreadRow, now: Time) {
        let paused =
            thread.last_run.filter(|run| self.runs.get(run).is_some_and(|run| run.status == RunStatus::Interrupted));
        let Some(run) = paused.filter(|_| thread.meta.is_interrupted()) else { return };
        for row in self.interrupts.iter().filter(|row| row.record.run_id() == run) {
            let question = row.record.question.clone();
            match row.record.status {
                InterruptStatus::Open => view.open.push(OpenQuestion { question, is_expired: row.is_over(now) }),
                status => {
                    let answer = row.record.answer.clone().unwrap_or(Json::Null);
                    view.answered.push(AnsweredQuestion { question, status, answer });
                }
            }
        }
    }

    /// Whether the pause of a thread has open questions.
    pub(super) fn is_asking(&self, key: ThreadKey) -> bool {
        self.interrupts.iter().any(|row| row.thread == key && row.record.status == InterruptStatus::Open)
    }

    /// Records answers, each with an audit entry.
    pub(super) fn answer(&mut self, key: ThreadKey, answers: &[Answered], now: Time) -> Result<(), StoreError> {
        for answered in answers {
            let row = self.interrupts.iter_mut().find(|row| row.thread == key && row.record.question.id == answered.id);
            let Some(row) = row.filter(|row| row.record.status == InterruptStatus::Open) else {
                let message = format!("question {} is not open", answered.id);
                return Err(StoreError::Corrupt { doing: "answer a question", message });
            };
            row.record.status = answered.status;
            row.record.answer = Some(answered.answer.clone());
            row.record.approved_hash.clone_from(&answered.approved_hash);
            row.record.answered_by = Some(answered.by.clone());
            row.record.comment.clone_from(&answered.comment);
            row.record.answered_at = Some(now);
            let detail = answer_entry(&row.record.question, answered);
            self.write_audit(key, &answered.by, answered.action, detail, now);
        }
        Ok(())
    }

    /// Questions and calls go with the state they are about.
    pub(super) fn forget_questions(&mut self, key: ThreadKey) {
        self.interrupts.retain(|row| row.thread != key);
        self.calls.retain(|(call, _)| call.thread != key);
    }

    /// Cancels what a pause still asks; the results its calls get.
    pub(super) fn cancel_questions(
        &mut self,
        key: ThreadKey,
        run: RunId,
        who: &str,
        now: Time,
    ) -> Vec<crate::domain::Message> {
        let mut open = Vec::new();
        for row in self.interrupts.iter_mut().filter(|row| row.record.run_id() == run) {
            if row.record.status == InterruptStatus::Open {
                row.record.status = InterruptStatus::Cancelled;
                row.record.answered_by = Some(who.to_owned());
                row.record.answered_at = Some(now);
                open.push(row.record.question.clone());
            }
        }
        for question in &open {
            self.write_audit(key, who, "cancel", crate::store::cancel_entry(question), now);
        }
        denied_by_stop(&open)
    }
}
