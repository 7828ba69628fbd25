//! What follows a commit: whoever follows the run is told, the next step is sent, or the place that
//! became free is offered.

use threadgate_shared::domain::RunStatus;
use threadgate_shared::events::EventBody;
use threadgate_shared::graph::Graph;
use threadgate_shared::graph::engine::{Advance, Next, RunError};
use threadgate_shared::queue::{Job, Lane};
use threadgate_shared::store::{Claimed, CommitOutcome};
use tracing::{info, warn};

use crate::commit::{Work, end_of};
use crate::execute::Executor;
use crate::state::Place;

impl Executor {
    /// Says what was committed. Events and next job leave at the same time: should another worker
    /// overtake, whoever follows sees that something is missing and asks the store.
    pub(crate) async fn follow_up(&self, work: Work<'_>, mut advance: Advance, outcome: CommitOutcome) {
        let Work { claimed, graph, place, attempt, .. } = work;
        let (version, is_stopped) = match outcome {
            CommitOutcome::Stopped { version } => (version, true),
            CommitOutcome::Committed { version } => (version, false),
            CommitOutcome::LeaseLost | CommitOutcome::Conflict => return,
        };
        if is_stopped {
            advance.meta = advance.stopped_meta.clone();
        }
        let finished = has_output(&advance).then(|| finished(claimed, &advance, version));
        let ended = ended(&advance, is_stopped);
        let last = ended.map(|(status, error)| {
            log_end(claimed, status, error.as_ref());
            EventBody::RunEnded { status, meta: Box::new(advance.meta.clone()), error }
        });
        let next = match (&advance.next, graph) {
            (Next::Node(node), Some(graph)) if last.is_none() => Some(next_job(claimed, graph, &place, node)),
            _ => None,
        };

        let class = place.run.class;
        if next.as_ref().is_some_and(|job| self.serves(job)) {
            self.places.keep(claimed.thread_key, place.committed(&advance, version));
        }
        let told = attempt.ends(&self.runner.announcer, finished, last);
        match (next, graph) {
            (Some(job), _) => {
                tokio::join!(told, self.send(job));
            }
            (None, graph) => {
                told.await;
                self.offer_place(graph, &claimed.node, class);
            }
        }
    }

    /// Sends the next step to the queue; while that is away, this worker takes it itself if it can.
    async fn send(&self, job: Job) {
        // A worker that is about to end takes nothing more: the step goes back where others find it.
        let is_ours = self.serves(&job) && !self.taking.is_cancelled();
        if self.queue.is_healthy() || !is_ours {
            self.dispatcher.send(std::slice::from_ref(&job)).await;
        }
        if is_ours && !self.queue.is_healthy() {
            let _ = self.beside_queue.send(job); // Nobody listens when the worker ends; a sweep finds it.
        }
    }

    /// Tops the window up: whoever finishes a run makes room for another.
    fn offer_place(&self, graph: Option<&Graph>, node: &str, class: i16) {
        if let Some(graph) = graph.filter(|_| self.queue.is_healthy()) {
            self.dispatcher.nudge(&graph.manifest.policy(node).pool, class);
        }
    }

    fn serves(&self, job: &Job) -> bool {
        self.pools.contains(&job.lane.pool)
    }
}

fn next_job(claimed: &Claimed, graph: &Graph, place: &Place, node: &str) -> Job {
    let mut step = claimed.step;
    step.seq += 1;
    let lane = Lane {
        pool: graph.manifest.policy(node).pool,
        class: place.run.class,
        graph: graph.version.is_code().then(|| graph.version.clone()),
    };
    Job { step, lane, attempt: 0, trace: place.run.trace.clone() }
}

fn finished(claimed: &Claimed, advance: &Advance, version: i64) -> EventBody {
    EventBody::NodeFinished {
        node: claimed.node.clone(),
        version,
        messages: advance.messages.clone(),
        removed: advance.removed.clone(),
        fields: advance.fields.clone(),
        meta: Box::new(advance.meta.clone()),
    }
}

/// How the run ended, if it did.
fn ended(advance: &Advance, is_stopped: bool) -> Option<(RunStatus, Option<RunError>)> {
    match &advance.next {
        _ if is_stopped => Some((RunStatus::Stopped, None)),
        Next::Node(_) => None,
        next => Some(end_of(next)),
    }
}

/// Whether the node has something to show: it did not fail, and where it asks somebody, part of its
/// work is done.
fn has_output(advance: &Advance) -> bool {
    match &advance.next {
        Next::Node(_) | Next::Completed => true,
        Next::Interrupted(questions) => {
            questions.is_empty() || !advance.messages.is_empty() || !advance.fields.is_empty()
        }
        Next::Failed(error) => error.code == "RECURSION_001",
    }
}

fn log_end(claimed: &Claimed, status: RunStatus, failure: Option<&RunError>) {
    let run = claimed.step.run_id;
    match failure {
        Some(failure) => warn!("Run {run} {}: [{}] {}", status.as_str(), failure.code, failure.message),
        None => info!("Run {run} {} after step {}", status.as_str(), claimed.step.seq),
    }
}
