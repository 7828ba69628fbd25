//! What is due: steps to send again, steps whose time came, leases that ran out.

use super::tables::Tables;
use crate::domain::{RunStatus, StepId};
use crate::graph::engine::{self, RunError};
use crate::store::{AttemptEnd, StepStatus, Swept, Time};

/// Looks at what is due, at most `limit` rows.
pub(super) fn sweep(tables: &mut Tables, limit: u32, expire: bool, now: Time) -> Swept {
    let due = |status: StepStatus, due_at: Option<Time>| {
        due_at.filter(|due| *due <= now && (expire || status != StepStatus::Leased))
    };
    let rows = tables.steps.values();
    let mut ids: Vec<(Time, StepId)> =
        rows.filter_map(|step| Some((due(step.record.status, step.due_at)?, step.record.id))).collect();
    ids.sort_unstable();
    let mut swept = Swept { now, ..Swept::default() };
    for (_, id) in ids.into_iter().take(limit as usize) {
        look_at(tables, id, &mut swept);
    }
    swept.next_due = tables.steps.values().filter_map(|step| step.due_at).min();
    swept
}

fn look_at(tables: &mut Tables, id: StepId, swept: &mut Swept) {
    let now = swept.now;
    let step = tables.steps.get_mut(&id).expect("it was just found");
    let held = step.record.status == StepStatus::Leased;
    if held {
        step.attempt_ended(AttemptEnd { end: "crash".to_owned(), error: None }, now);
        step.token = None;
        if step.record.attempt >= step.record.attempts_max && !tables.is_stop_requested_at(id) {
            fail(tables, id, now);
            swept.failed.push(id.run_id);
            return;
        }
        tables.queue_again(id.run_id);
    }
    if tables.stop_if_asked(id, now) {
        swept.stopped.push(id.run_id);
        return;
    }
    swept.released += u32::from(held);
    let trace = tables.trace_of(id.run_id);
    let step = tables.steps.get_mut(&id).expect("it was just found");
    step.sending(now);
    swept.send.push(step.job(trace));
}

/// The step killed its last worker: the run fails, the thread is usable.
fn fail(tables: &mut Tables, id: StepId, now: Time) {
    let step = tables.steps.get_mut(&id).expect("the caller has found it");
    step.close(StepStatus::Failed, now);
    let (key, node, attempts) = (step.thread, step.record.node.clone(), step.record.attempt);
    let error = RunError::worker_crash(&node, attempts);
    let thread = tables.thread_of(key);
    let meta = engine::errored(thread.meta.clone(), &error);
    thread.checkpoint(Some(id), &node, meta, now);
    tables.close_run(id.run_id, RunStatus::Failed, Some(error), now);
}

impl Tables {
    fn is_stop_requested_at(&self, id: StepId) -> bool {
        self.steps.get(&id).is_some_and(|step| self.is_stop_requested(step.thread, id.run_id))
    }
}
