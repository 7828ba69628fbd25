//! Why a run does not move, in one sentence that says what to do if somebody must.

use chrono::{DateTime, Utc};
use threadgate_shared::domain::RunStatus;
use threadgate_shared::store::{StepRecord, StepStatus, WhyFacts};

use super::run_view::time;

/// The sentence.
#[must_use]
pub fn sentence(facts: &WhyFacts, production: bool) -> String {
    match facts.run.status {
        RunStatus::Completed => format!("It completed{}.", at(facts.run.finished_at)),
        RunStatus::Stopped => format!("It was stopped{}.", at(facts.run.finished_at)),
        RunStatus::Failed => failed(facts, production),
        RunStatus::Interrupted => {
            "It is paused: somebody must answer or send a message to its thread, or stop it.".to_owned()
        }
        RunStatus::Waiting => "It waits behind another run of its thread, or for its time.".to_owned(),
        RunStatus::Queued | RunStatus::Running => match &facts.step {
            Some(step) => active(facts, step),
            None => "It has no open step, which the scheduler mends within seconds; is one running?".to_owned(),
        },
    }
}

fn failed(facts: &WhyFacts, production: bool) -> String {
    let when = at(facts.run.finished_at);
    match &facts.run.error {
        None => format!("It failed{when}."),
        Some(error) => {
            let node = error.node.as_ref().map(|node| format!(" in node '{node}'")).unwrap_or_default();
            let text = if production { String::new() } else { format!(": {}", error.message) };
            format!("It failed{node}{when} with {}{text}", error.code)
        }
    }
}

fn active(facts: &WhyFacts, step: &StepRecord) -> String {
    let node = &step.node;
    let stop = if facts.stop_requested { " A stop is recorded and takes effect when this step ends." } else { "" };
    match step.status {
        StepStatus::Leased => format!("{}{stop}", leased(facts, step)),
        StepStatus::Delayed => format!(
            "Node '{node}' failed in attempt {} of {} and starts again {}.{stop}",
            step.attempt,
            step.attempts_max,
            due(step.run_at, facts.now)
        ),
        StepStatus::Ready => format!("{}{stop}", ready(facts, step)),
        StepStatus::Done | StepStatus::Failed | StepStatus::Cancelled => {
            format!("Node '{node}' has ended and what follows it is being written; ask again in a second.{stop}")
        }
    }
}

fn leased(facts: &WhyFacts, step: &StepRecord) -> String {
    let worker = step.worker.map(|worker| format!(" on worker {}", worker.0)).unwrap_or_default();
    let attempt = format!("attempt {} of {}", step.attempt, step.attempts_max);
    match facts.due_at.filter(|due| *due < facts.now) {
        None => format!("Node '{}' is running{worker}{} ({attempt}).", step.node, since(step.started_at)),
        Some(due) => format!(
            "Node '{}' ran{worker} ({attempt}), which has not been heard of since {}; \
             the scheduler hands it to another worker, so one must be running.",
            step.node,
            time(due)
        ),
    }
}

fn ready(facts: &WhyFacts, step: &StepRecord) -> String {
    let (node, pool) = (&step.node, &step.pool);
    if facts.pool_workers == 0 {
        return format!(
            "Node '{node}' waits for pool '{pool}', which no live worker serves; start one with \
             `threadgate worker --pools {pool}`."
        );
    }
    if facts.able_workers == 0 {
        return format!(
            "Node '{node}' waits for a worker that has graph version {}; {} live worker(s) serve pool '{pool}', \
             none has it: start the program the run began with.",
            facts.run.graph_version, facts.pool_workers
        );
    }
    let others = facts.ready_in_pool.saturating_sub(1);
    if facts.in_backlog {
        return format!(
            "Node '{node}' waits in line in pool '{pool}' with {others} other step(s); \
             {} worker(s) can run it.",
            facts.able_workers
        );
    }
    let again = facts.due_at.map(|moment| format!(" and is sent again {}", due(moment, facts.now))).unwrap_or_default();
    format!("Node '{node}' was sent to pool '{pool}'{again}; {} worker(s) can run it.", facts.able_workers)
}

fn due(at: DateTime<Utc>, now: DateTime<Utc>) -> String {
    match (at - now).num_milliseconds() {
        ms if ms <= 0 => "now".to_owned(),
        ms => format!("in {}.{} s", ms / 1_000, ms % 1_000 / 100),
    }
}

fn since(at: Option<DateTime<Utc>>) -> String {
    at.map(|at| format!(" since {}", time(at))).unwrap_or_default()
}

fn at(at: Option<DateTime<Utc>>) -> String {
    at.map(|at| format!(" at {}", time(at))).unwrap_or_default()
}
