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

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use serde_json::{Value, json};
    use threadgate_shared::domain::{GraphVersion, PoolName, RunId, StepId, Tenant, ThreadKey, UserId, WorkerId};
    use threadgate_shared::graph::engine::RunError;
    use threadgate_shared::store::RunRecord;

    use super::*;

    fn facts(status: RunStatus, step: Option<StepStatus>) -> WhyFacts {
        let now = DateTime::from_timestamp(1_800_000_000, 0).unwrap();
        let id = RunId::new();
        let run = RunRecord {
            id,
            client_run_id: None,
            root: id,
            resumes: None,
            thread_id: "t".into(),
            thread_key: ThreadKey(1),
            tenant: Tenant::default_tenant(),
            user: UserId("anonymous".to_owned()),
            graph: "g".to_owned(),
            graph_version: GraphVersion("c-1".to_owned()),
            class: 0,
            status,
            input: Value::Null,
            config: json!({}).as_object().unwrap().clone(),
            step_limit: 25,
            node_timeout: None,
            error: None,
            trace: None,
            observability: true,
            version: 1,
            created_at: now,
            started_at: None,
            finished_at: status.is_final().then_some(now),
        };
        let step = step.map(|status| StepRecord {
            id: StepId { run_id: id, seq: 1 },
            node: "plan".to_owned(),
            pool: PoolName("gpu".to_owned()),
            status,
            attempt: 1,
            attempts_max: 3,
            worker: Some(WorkerId::new()),
            version: None,
            started_at: Some(now),
            finished_at: None,
            run_at: now + TimeDelta::milliseconds(2_500),
            attempts: Vec::new(),
        });
        WhyFacts {
            run,
            step,
            in_backlog: false,
            stop_requested: false,
            due_at: Some(now + TimeDelta::seconds(3)),
            pool_workers: 2,
            able_workers: 1,
            ready_in_pool: 5,
            now,
        }
    }

    fn why(facts: &WhyFacts) -> String {
        sentence(facts, false)
    }

    #[test]
    fn a_step_that_waits_says_for_whom() {
        let ready = facts(RunStatus::Queued, Some(StepStatus::Ready));
        assert!(
            why(&ready).contains("was sent to pool 'gpu' and is sent again in 3.0 s; 1 worker(s)"),
            "{}",
            why(&ready)
        );

        let line = WhyFacts { in_backlog: true, ..ready.clone() };
        assert!(why(&line).contains("waits in line in pool 'gpu' with 4 other step(s)"), "{}", why(&line));

        let unable = WhyFacts { able_workers: 0, ..ready.clone() };
        assert!(why(&unable).contains("graph version c-1") && why(&unable).contains("none has it"), "{}", why(&unable));

        let nobody = WhyFacts { pool_workers: 0, able_workers: 0, ..ready };
        assert!(why(&nobody).contains("`threadgate worker --pools gpu`"), "{}", why(&nobody));
    }

    #[test]
    fn a_step_that_runs_says_where_and_one_that_was_lost_says_since_when() {
        let running = facts(RunStatus::Running, Some(StepStatus::Leased));
        assert!(why(&running).contains("Node 'plan' is running on worker"), "{}", why(&running));

        let lost = WhyFacts { due_at: Some(running.now - TimeDelta::seconds(1)), ..running.clone() };
        assert!(why(&lost).contains("has not been heard of since"), "{}", why(&lost));

        let stopping = WhyFacts { stop_requested: true, ..running };
        assert!(
            why(&stopping).ends_with("A stop is recorded and takes effect when this step ends."),
            "{}",
            why(&stopping)
        );

        let delayed = facts(RunStatus::Running, Some(StepStatus::Delayed));
        assert!(why(&delayed).contains("failed in attempt 1 of 3 and starts again in 2.5 s"), "{}", why(&delayed));
    }

    #[test]
    fn an_ended_run_says_how_and_production_says_no_texts() {
        let mut failed = facts(RunStatus::Failed, Some(StepStatus::Done));
        failed.run.error = Some(RunError {
            code: "NODE_001".to_owned(),
            message: "kaboom".to_owned(),
            node: Some("plan".to_owned()),
            transient: false,
        });

        assert!(
            why(&failed).contains("in node 'plan'") && why(&failed).ends_with("NODE_001: kaboom"),
            "{}",
            why(&failed)
        );
        assert!(sentence(&failed, true).ends_with("with NODE_001"), "{}", sentence(&failed, true));
        for status in [RunStatus::Completed, RunStatus::Stopped, RunStatus::Interrupted, RunStatus::Waiting] {
            assert!(!why(&facts(status, None)).is_empty());
        }
        assert!(why(&facts(RunStatus::Running, None)).contains("no open step"));
    }
}
