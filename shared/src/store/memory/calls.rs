//! The ledger of tool calls.

use async_trait::async_trait;

use super::tables::Tables;
use super::{MemoryStore, Operation};
use crate::domain::{
    CallRef, CallResult, InterruptStatus, LeaseToken, QuestionKind, Scope, StepId, ThreadId, ThreadKey,
};
use crate::store::ledger::{self, Entry, Facts};
use crate::store::{Begun, CallKey, Finished, Intent, Ledger, StoreError, Time, ToolExecution, Wish};

#[async_trait]
impl Ledger for MemoryStore {
    async fn begin_calls(&self, step: StepId, lease: LeaseToken, intents: &[Intent]) -> Result<Vec<Begun>, StoreError> {
        self.transact(Operation::BeginCalls, |tables, now| {
            let Some(key) = tables.held(step, lease).map(|row| row.thread) else {
                return Ok(vec![Begun::LeaseLost; intents.len()]);
            };
            Ok(intents.iter().map(|intent| tables.begin(key, (step, lease), intent, now)).collect())
        })
        .await
    }

    async fn finish_call(&self, key: &CallKey, token: LeaseToken, result: &CallResult) -> Result<Finished, StoreError> {
        self.transact(Operation::FinishCall, |tables, now| {
            let found = tables.calls.iter_mut().find(|(call, _)| call == key);
            let (finished, entry) = ledger::finish(found.as_ref().map(|(_, entry)| entry), token, result, now);
            if let (Some((_, row)), Some(entry)) = (found, entry) {
                *row = entry;
            }
            Ok(finished)
        })
        .await
    }

    async fn calls(&self, scope: &Scope, thread: &ThreadId) -> Result<Vec<ToolExecution>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let Some(key) = tables.visible_thread(scope, thread).map(|thread| thread.key) else {
                return Ok(Vec::new());
            };
            let own = tables.calls.iter().filter(|(call, _)| call.thread == key);
            Ok(own.map(|(_, entry)| entry.row.clone()).collect())
        })
        .await
    }
}

impl Tables {
    fn begin(&mut self, key: ThreadKey, (step, lease): (StepId, LeaseToken), intent: &Intent, now: Time) -> Begun {
        let call = &intent.call;
        let id = CallKey { thread: key, message_id: call.message_id.clone(), call_id: call.call_id.clone() };
        let found = self.calls.iter().position(|(known, _)| *known == id);
        let entry = found.map(|index| &self.calls[index].1);
        let is_decided = self.is_decided(key, intent, entry);
        let facts = Facts { step, lease, approval: self.approval(key, call), is_decided, now };
        let (begun, entry) = ledger::decide(entry, intent, &facts);
        match (found, entry) {
            (Some(index), Some(entry)) => self.calls[index].1 = entry,
            (None, Some(entry)) => self.calls.push((id, entry)),
            (_, None) => {}
        }
        begun
    }

    /// The question that approved this very call with these very arguments.
    fn approval(&self, key: ThreadKey, call: &CallRef) -> Option<String> {
        let rows = self.interrupts.iter().rev().map(|row| (row.thread, &row.record));
        let mut approvals = rows.filter(|(thread, record)| {
            *thread == key
                && record.question.kind == QuestionKind::Gate
                && record.question.call.as_ref().is_some_and(|asked| is_same(asked, call))
                && record.approved_hash.as_ref() == Some(&call.arguments_hash)
        });
        approvals.next().map(|(_, record)| record.question.id.clone())
    }

    fn is_decided(&self, key: ThreadKey, intent: &Intent, entry: Option<&Entry>) -> bool {
        let Wish::Decided(_) = &intent.wish else { return false };
        let mut rows = self.interrupts.iter().filter(|row| row.thread == key).map(|row| &row.record);
        rows.any(|record| {
            record.question.kind == QuestionKind::Outcome
                && record.question.call.as_ref().is_some_and(|asked| is_same(asked, &intent.call))
                && matches!(record.status, InterruptStatus::Answered | InterruptStatus::Expired)
                && entry.and_then(|entry| entry.row.started_at).is_none_or(|started| record.created_at >= started)
        })
    }
}

fn is_same(asked: &CallRef, call: &CallRef) -> bool {
    asked.message_id == call.message_id && asked.call_id == call.call_id
}
