//! A worker goes from checkpoint to checkpoint: take the lease or leave, run the node, commit, let go.

use std::sync::Arc;
use std::time::Duration;

use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::domain::{LeaseToken, PoolName, RunStatus};
use threadgate_shared::events::EventBody;
use threadgate_shared::graph::engine::{self, Advance, Next, RunError};
use threadgate_shared::graph::{Graph, GraphError, NodeError};
use threadgate_shared::queue::{Job, JobHandler, JobQueue, Lane};
use threadgate_shared::store::{
    AttemptEnd, Claimed, CommitOutcome, FirstStep, LoadRequest, Loaded, StepCommit, Store, Then,
};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, error, info, info_span, warn};

use crate::announce::Attempt;
use crate::calls::{Asked, Calls, KeyedCommit};
use crate::graphs::{GraphMissing, Graphs};
use crate::heartbeat;
use crate::lease::{HeldLease, Lease};
use crate::run_node::{Failure, Left, NodeEnd, NodeRunner, OUTPUT_TOO_LARGE};
use crate::state::{Place, Places, positions_in};
use crate::telemetry;

/// How often a claim whose answer was lost is sent.
const CLAIM_TRIES: u32 = 4;

/// A hop between two steps that takes longer may have led through another worker.
const HOP_MAX: Duration = Duration::from_secs(1);

/// Executes the steps that jobs announce.
pub(crate) struct Executor {
    pub store: Arc<dyn Store>,
    pub queue: Arc<dyn JobQueue>,
    pub dispatcher: Arc<Dispatcher>,
    pub graphs: Graphs,
    pub calls: Calls,
    pub runner: NodeRunner,
    pub places: Places,
    /// What this worker may run at once, from the queue and beside it.
    pub slots: Arc<Semaphore>,
    /// The pools this worker serves.
    pub pools: Vec<PoolName>,
    /// Cancelled when nothing new is to be started.
    pub taking: CancellationToken,
    /// Where the next steps go while the queue is away.
    pub beside_queue: mpsc::UnboundedSender<Job>,
}

#[async_trait::async_trait]
impl JobHandler for Executor {
    async fn handle(&self, job: Job) {
        let Ok(_slot) = self.slots.acquire().await else { return };
        let _in_use = InUse::count();
        let Some((lease, claimed)) = self.claim(&job).await else {
            metrics::counter!(telemetry::STALE_JOBS).increment(1);
            return; // Another worker has it, or it is done; this job is a duplicate.
        };
        let span = info_span!("step", run.id = %job.step.run_id, step.seq = job.step.seq, node = claimed.node);
        self.carry_out(&lease, &claimed).instrument(span).await;
    }
}

impl Executor {
    /// Takes the lease, or leaves the step. A claim whose answer is lost is sent again; what became
    /// of it in the end is given back, so that the step does not wait for its lease to run out.
    async fn claim(&self, job: &Job) -> Option<(HeldLease, Claimed)> {
        let token = LeaseToken::new();
        let mut is_uncertain = false;
        for attempt in 1..=CLAIM_TRIES {
            match self.calls.claim(job.step, token).await {
                Asked::Answer(Some((claimed, sent))) => {
                    return Some((self.runner.leases.hold(job.step, token, sent), claimed));
                }
                Asked::Answer(None) => break,
                Asked::Again | Asked::Never(_) => {
                    is_uncertain = true;
                    tokio::time::sleep(backoff(attempt)).await;
                }
            }
        }
        if is_uncertain {
            self.calls.give_back(job.step, token).await;
        }
        None
    }

    /// Executes a step and lets its lease go, whatever happens.
    async fn carry_out(&self, lease: &HeldLease, claimed: &Claimed) {
        let left = if self.taking.is_cancelled() {
            Err(Left::Evicted) // The signal to end came while the lease was taken.
        } else {
            self.execute(lease, claimed).await
        };
        match left {
            Ok(()) => {}
            Err(Left::Lost) => debug!("Somebody else has step {}; nothing was written", claimed.step),
            Err(Left::Evicted) => self.give_back(lease).await,
            Err(Left::Unusable(reason)) => self.give_up(lease, claimed, reason).await,
        }
    }

    async fn execute(&self, lease: &HeldLease, claimed: &Claimed) -> Result<(), Left> {
        let graph = self.graph(lease, claimed).await?;
        let mut place = self.place(lease, claimed, graph.as_ref().ok()).await?;
        let marked = self.mark_running(claimed, &mut place);
        let mut attempt = Attempt::starts(claimed, place.state.execution_meta.step);
        let graph = match graph {
            Ok(graph) => graph,
            Err(broken) => {
                let error = RunError {
                    code: broken.code.to_owned(),
                    message: broken.message,
                    node: Some(claimed.node.clone()),
                    transient: false,
                };
                let advance = engine::failed(&place.state, &claimed.node, error);
                return self.commit(lease, claimed, None, place, advance, attempt, marked).await;
            }
        };
        self.confirm(lease).await?; // What the node does is an effect.
        let advance = match self.runner.run(lease, claimed, &graph, &place, &mut attempt).await? {
            NodeEnd::Advanced(advance) => *advance,
            NodeEnd::Failed(failure) => {
                if let Some(delay) = self.repeats(lease, claimed, &graph, &failure) {
                    attempt.ends(&self.runner.announcer, None, None).await;
                    self.retry(lease, claimed, failure, delay).await?;
                    self.places.keep(claimed.thread_key, place);
                    return Ok(());
                }
                fail(claimed, &graph, &place, failure)
            }
        };
        self.commit(lease, claimed, Some(&graph), place, advance, attempt, marked).await
    }

    /// The step's graph; a broken one fails the run.
    async fn graph(&self, lease: &Lease, claimed: &Claimed) -> Result<Result<Arc<Graph>, GraphError>, Left> {
        let mut tries = 0;
        loop {
            match self.graphs.get(&claimed.graph_version).await {
                Ok(graph) => return Ok(Ok(graph)),
                Err(GraphMissing::Broken(broken)) => return Ok(Err(broken)),
                Err(GraphMissing::Store(failure)) => warn!(error = %failure, "Could not load a graph; trying again"),
            }
            self.wait(lease, &mut tries).await?;
        }
    }

    /// The thread's place: what this worker still has, brought up to date, or all of it.
    async fn place(&self, lease: &Lease, claimed: &Claimed, graph: Option<&Arc<Graph>>) -> Result<Place, Left> {
        let manifest = graph.map(|graph| &*graph.manifest);
        let kept = self.places.take(claimed.thread_key, claimed.step.run_id);
        if let Some(place) = kept {
            if place.version == claimed.version {
                return Ok(place);
            }
            let since = self.load(lease, claimed, Some(place.version)).await?;
            if let Some(place) = place.updated(since) {
                return Ok(place);
            }
        }
        Ok(Place::from_full(manifest, self.load(lease, claimed, None).await?))
    }

    async fn load(&self, lease: &Lease, claimed: &Claimed, since: Option<i64>) -> Result<Loaded, Left> {
        let wanted = LoadRequest { run_id: claimed.step.run_id, thread_key: claimed.thread_key, since };
        let mut tries = 0;
        loop {
            match self.calls.load(wanted).await {
                Asked::Answer(Some(loaded)) => return Ok(loaded),
                Asked::Answer(None) => return Err(Left::Unusable("the run or its thread is gone".to_owned())),
                Asked::Never(reason) => return Err(Left::Unusable(reason)),
                Asked::Again => self.wait(lease, &mut tries).await?,
            }
        }
    }

    /// Marks a run that has just started, or that may have gone back to the queue since this worker
    /// saw it; off the critical path.
    fn mark_running(&self, claimed: &Claimed, place: &mut Place) -> Option<JoinHandle<()>> {
        let was_away = place.kept_at.elapsed() > HOP_MAX || claimed.attempt > 1;
        if place.run.status != RunStatus::Queued && !was_away {
            return None;
        }
        if claimed.step.seq <= 1 && claimed.attempt == 1 {
            let waited = chrono::Utc::now().signed_duration_since(place.run.created_at).to_std().unwrap_or_default();
            metrics::histogram!(telemetry::QUEUE_WAIT_SECONDS).record(waited.as_secs_f64());
        }
        Arc::make_mut(&mut place.run).status = RunStatus::Running;
        Some(self.calls.mark_running(claimed.step.run_id))
    }

    /// Whether the failed attempt is repeated, and after how long. Under a stop the store closes the
    /// run instead of repeating it.
    fn repeats(&self, lease: &Lease, claimed: &Claimed, graph: &Graph, failure: &Failure) -> Option<Duration> {
        if failure.end == OUTPUT_TOO_LARGE {
            return None;
        }
        if lease.is_stopping() {
            return Some(Duration::ZERO);
        }
        let policy = graph.manifest.policy(&claimed.node).retry;
        let attempt = u16::try_from(claimed.attempt).unwrap_or(u16::MAX);
        let may = if policy.retry_on.is_empty() { failure.retryable } else { policy.retry_on.contains(&failure.code) };
        (may && attempt < policy.attempts).then(|| policy.delay(attempt, rand::random()))
    }

    /// Ends the attempt and leaves the step for a later one.
    async fn retry(&self, lease: &Lease, claimed: &Claimed, failure: Failure, delay: Duration) -> Result<(), Left> {
        self.confirm(lease).await?;
        info!(
            attempt = claimed.attempt,
            delay_ms = delay.as_millis(),
            "Node '{}' failed and is repeated: {}",
            claimed.node,
            failure.message
        );
        metrics::counter!(telemetry::RETRIES, "end" => failure.end).increment(1);
        let error = RunError {
            code: failure.code,
            message: failure.message,
            node: Some(claimed.node.clone()),
            transient: failure.retryable,
        };
        self.end_attempt(lease, &AttemptEnd { end: failure.end.to_owned(), error: Some(error) }, delay).await
    }

    async fn end_attempt(&self, lease: &Lease, end: &AttemptEnd, delay: Duration) -> Result<(), Left> {
        lease.settle();
        let mut tries = 0;
        loop {
            match self.calls.end_attempt(lease.step, lease.token, end, delay).await {
                Asked::Answer(true) => return Ok(()),
                Asked::Answer(false) if tries > 0 => return Ok(()), // An earlier try arrived, or the lease is lost.
                Asked::Answer(false) => return Err(lost()),
                Asked::Again | Asked::Never(_) => {}
            }
            self.wait_evicted(&mut tries).await?;
        }
    }

    /// Commits the step and says so: the events first, then the next step or the free place.
    #[expect(clippy::too_many_arguments, reason = "all that is known of the step ends here")]
    async fn commit(
        &self,
        lease: &Lease,
        claimed: &Claimed,
        graph: Option<&Graph>,
        place: Place,
        mut advance: Advance,
        attempt: Attempt,
        marked: Option<JoinHandle<()>>,
    ) -> Result<(), Left> {
        if !matches!(advance.next, Next::Node(_))
            && let Some(marked) = marked
        {
            let _ = marked.await; // Otherwise a run could end before its start is stored.
        }
        let (outcome, committed) = match self.commit_once(lease, claimed, graph, &place, &advance).await? {
            Ok(outcome) => (outcome, advance),
            Err(reason) => {
                advance = unstorable(claimed, &place, &reason);
                let again = self.commit_once(lease, claimed, graph, &place, &advance).await?;
                (again.map_err(Left::Unusable)?, advance)
            }
        };
        self.announce(claimed, graph, place, committed, outcome, attempt).await;
        Ok(())
    }

    /// Commits until there is an answer; the inner error is the store's refusal of this content.
    async fn commit_once(
        &self,
        lease: &Lease,
        claimed: &Claimed,
        graph: Option<&Graph>,
        place: &Place,
        advance: &Advance,
    ) -> Result<Result<CommitOutcome, String>, Left> {
        let removed = self.removed(lease, claimed, place, advance).await?;
        self.confirm(lease).await?;
        lease.settle();
        let mut tries = 0;
        loop {
            let commit = step_commit(lease, graph, place, advance, removed.clone());
            match self.calls.commit(KeyedCommit { thread: claimed.thread_key.0, commit }).await {
                Asked::Answer(CommitOutcome::LeaseLost) => return Err(lost()),
                Asked::Answer(CommitOutcome::Conflict) => {
                    error!("Step {} conflicts with its thread's version {}", claimed.step, place.version);
                    return Err(Left::Unusable("its thread changed under the lease".to_owned()));
                }
                Asked::Answer(outcome) => return Ok(Ok(outcome)),
                Asked::Never(reason) => return Ok(Err(reason)),
                Asked::Again => self.wait_evicted(&mut tries).await?,
            }
        }
    }

    /// Where the removed messages are stored.
    async fn removed(
        &self,
        lease: &Lease,
        claimed: &Claimed,
        place: &Place,
        advance: &Advance,
    ) -> Result<Vec<i64>, Left> {
        if advance.removed.is_empty() {
            return Ok(Vec::new());
        }
        match place.positions_of(&advance.removed) {
            Some(positions) => Ok(positions),
            None => Ok(positions_in(&self.load(lease, claimed, None).await?.added, &advance.removed)),
        }
    }

    /// Says what was committed.
    async fn announce(
        &self,
        claimed: &Claimed,
        graph: Option<&Graph>,
        place: Place,
        mut advance: Advance,
        outcome: CommitOutcome,
        attempt: Attempt,
    ) {
        let (version, is_stopped) = match outcome {
            CommitOutcome::Stopped { version } => (version, true),
            CommitOutcome::Committed { version } => (version, false),
            CommitOutcome::LeaseLost | CommitOutcome::Conflict => return,
        };
        if is_stopped {
            advance.meta = advance.stopped_meta.clone();
        }
        let ended = ended(&advance, is_stopped);
        let next = match (&advance.next, graph) {
            (Next::Node(node), Some(graph)) if ended.is_none() => Some(self.next_job(claimed, graph, &place, node)),
            _ => None,
        };
        if let Some((status, error)) = &ended {
            log_end(claimed, *status, error.as_ref());
        }
        let last =
            ended.map(|(status, error)| EventBody::RunEnded { status, meta: Box::new(advance.meta.clone()), error });
        let finished = has_output(&advance).then(|| EventBody::NodeFinished {
            node: claimed.node.clone(),
            version,
            messages: advance.messages.clone(),
            removed: advance.removed.clone(),
            fields: advance.fields.clone(),
            meta: Box::new(advance.meta.clone()),
        });
        let (class, pool) = (place.run.class, graph.map(|graph| graph.manifest.policy(&claimed.node).pool));
        if let Some(job) = &next
            && self.pools.contains(&job.lane.pool)
        {
            self.places.keep(claimed.thread_key, place.committed(&advance, version));
        }
        attempt.ends(&self.runner.announcer, finished, last).await;
        match (next, pool) {
            (Some(job), _) => self.send(job).await,
            (None, Some(pool)) if self.queue.is_healthy() => self.dispatcher.nudge(&pool, class),
            (None, _) => {}
        }
    }

    fn next_job(&self, claimed: &Claimed, graph: &Graph, place: &Place, node: &str) -> Job {
        let mut step = claimed.step;
        step.seq += 1;
        let lane = Lane {
            pool: graph.manifest.policy(node).pool,
            class: place.run.class,
            graph: graph.version.is_code().then(|| graph.version.clone()),
        };
        Job { step, lane, attempt: 0, trace: place.run.trace.clone() }
    }

    /// Sends the next step to the queue; while that is away, this worker takes it itself if it can.
    async fn send(&self, job: Job) {
        let is_ours = self.pools.contains(&job.lane.pool);
        if self.queue.is_healthy() || !is_ours {
            self.dispatcher.send(std::slice::from_ref(&job)).await;
        }
        if is_ours && !self.queue.is_healthy() {
            let _ = self.beside_queue.send(job); // Nobody listens when the worker ends; a sweep finds it.
        }
    }

    /// Returns when the lease is certainly ours (R9).
    async fn confirm(&self, lease: &Lease) -> Result<(), Left> {
        let mut tries = 0;
        while lease.is_doubtful() {
            if lease.lost.is_cancelled() || !self.runner.leases.are_renewed() {
                lease.lose();
                return Err(Left::Lost);
            }
            let held = self.runner.leases.snapshot();
            let this: Vec<_> = held.into_iter().filter(|held| held.token == lease.token).collect();
            let ttl = self.runner.leases.ttl();
            heartbeat::renew(&*self.store, &self.runner.leases, &this, ttl).await;
            if lease.is_doubtful() {
                self.wait(lease, &mut tries).await?;
            }
        }
        if lease.lost.is_cancelled() { Err(Left::Lost) } else { Ok(()) }
    }

    /// Waits before a question is asked again, unless the work has become pointless.
    async fn wait(&self, lease: &Lease, tries: &mut u32) -> Result<(), Left> {
        *tries += 1;
        tokio::select! {
            () = tokio::time::sleep(backoff(*tries)) => Ok(()),
            () = self.runner.leases.lost(lease) => Err(Left::Lost),
            () = self.runner.evict.cancelled() => Err(Left::Evicted),
        }
    }

    /// The same for a last write, whose own answer alone says whether the lease is lost.
    async fn wait_evicted(&self, tries: &mut u32) -> Result<(), Left> {
        *tries += 1;
        tokio::select! {
            () = tokio::time::sleep(backoff(*tries)) => Ok(()),
            () = self.runner.evict.cancelled() => Err(Left::Evicted),
        }
    }

    /// Gives the lease back uncharged.
    async fn give_back(&self, lease: &Lease) {
        lease.settle();
        match self.calls.give_back(lease.step, lease.token).await {
            Asked::Answer(()) => info!("Gave step {} back", lease.step),
            _ => warn!("Could not give step {} back; its lease runs out", lease.step),
        }
    }

    /// Ends an attempt that can commit nothing: repeated while it has attempts, else left to the
    /// sweep, which fails the run.
    async fn give_up(&self, lease: &Lease, claimed: &Claimed, reason: String) {
        error!("Step {} cannot be executed: {reason}", claimed.step);
        if claimed.attempt >= claimed.attempts_max {
            return;
        }
        let error = RunError {
            code: "STORAGE_001".to_owned(),
            message: reason,
            node: Some(claimed.node.clone()),
            transient: true,
        };
        let end = AttemptEnd { end: "error".to_owned(), error: Some(error) };
        let _ = self.end_attempt(lease, &end, Duration::from_secs(1)).await; // A lost lease needs no end.
    }
}

fn step_commit(
    lease: &Lease,
    graph: Option<&Graph>,
    place: &Place,
    advance: &Advance,
    removed: Vec<i64>,
) -> StepCommit {
    let then = match (&advance.next, graph) {
        (Next::Node(node), Some(graph)) => Then::Next { node: node.clone(), at: FirstStep::of(&graph.manifest, node) },
        (next, _) => {
            let (status, error) = end_of(next);
            Then::End { status, error }
        }
    };
    StepCommit {
        step: lease.step,
        token: lease.token,
        base_version: place.version,
        meta: advance.meta.clone(),
        stopped_meta: advance.stopped_meta.clone(),
        messages: advance.messages.clone(),
        removed,
        fields: advance.fields.clone(),
        then,
    }
}

/// How a run ends by `next`.
fn end_of(next: &Next) -> (RunStatus, Option<RunError>) {
    match next {
        Next::Node(_) | Next::Completed => (RunStatus::Completed, None),
        Next::Interrupted(_) => (RunStatus::Interrupted, None),
        Next::Failed(error) => (RunStatus::Failed, Some(error.clone())),
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

/// Whether the node itself came to its end: it did not fail and asks nobody.
fn has_output(advance: &Advance) -> bool {
    match &advance.next {
        Next::Node(_) | Next::Completed | Next::Interrupted(None) => true,
        Next::Interrupted(Some(_)) => false,
        Next::Failed(error) => error.code == "RECURSION_001",
    }
}

fn fail(claimed: &Claimed, graph: &Graph, place: &Place, failure: Failure) -> Advance {
    let here = engine::Place { node: &claimed.node, seq: claimed.step.seq, step_limit: place.run.step_limit };
    let error = NodeError::Failed { code: failure.code, message: failure.message, retryable: failure.retryable };
    engine::advance(graph, here, &place.state, Err(error))
}

fn unstorable(claimed: &Claimed, place: &Place, reason: &str) -> Advance {
    let error = RunError {
        code: "STORAGE_001".to_owned(),
        message: format!("the output of node '{}' could not be stored: {reason}", claimed.node),
        node: Some(claimed.node.clone()),
        transient: false,
    };
    engine::failed(&place.state, &claimed.node, error)
}

fn lost() -> Left {
    metrics::counter!(telemetry::LEASE_LOSSES).increment(1);
    Left::Lost
}

fn log_end(claimed: &Claimed, status: RunStatus, failure: Option<&RunError>) {
    let run = claimed.step.run_id;
    match failure {
        Some(failure) => warn!("Run {run} {}: [{}] {}", status.as_str(), failure.code, failure.message),
        None => info!("Run {run} {} after step {}", status.as_str(), claimed.step.seq),
    }
}

fn backoff(attempt: u32) -> Duration {
    Duration::from_millis(50 << attempt.min(5)).mul_f64(0.5 + rand::random::<f64>() / 2.0)
}

/// Counts a slot in use.
struct InUse;

impl InUse {
    fn count() -> Self {
        metrics::gauge!(telemetry::SLOTS_IN_USE).increment(1.0);
        Self
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        metrics::gauge!(telemetry::SLOTS_IN_USE).decrement(1.0);
    }
}
