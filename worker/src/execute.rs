//! A worker goes from checkpoint to checkpoint: take the lease or leave, run the node, commit, let go.

use std::sync::Arc;
use std::time::Duration;

use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::domain::{LeaseToken, PoolName, RunStatus};
use threadgate_shared::events::EventBody;
use threadgate_shared::graph::engine::{self, Advance, RunError};
use threadgate_shared::graph::{Graph, GraphError, NodeError};
use threadgate_shared::queue::{Job, JobHandler, JobQueue};
use threadgate_shared::store::{AttemptEnd, Claimed, LoadRequest, Loaded, Store};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, error, info, info_span, warn};

use crate::announce::Attempt;
use crate::calls::{Asked, Calls};
use crate::commit::Work;
use crate::graphs::{GraphMissing, Graphs};
use crate::lease::{HeldLease, Lease};
use crate::run_node::{Failure, Left, NodeEnd, NodeRunner, OUTPUT_TOO_LARGE};
use crate::state::{Place, Places};
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
                let advance = cannot_run(claimed, &place, broken);
                return self.commit(Work { lease, claimed, graph: None, place, attempt, marked }, advance).await;
            }
        };
        self.confirm(lease).await?; // What the node does is an effect.
        let end = self.runner.run(lease, claimed, &graph, &place, &mut attempt).await?;
        let work = Work { lease, claimed, graph: Some(&graph), place, attempt, marked };
        match end {
            NodeEnd::Advanced(advance) => self.commit(work, *advance).await,
            NodeEnd::Failed(failure) => match self.repeats(lease, claimed, &graph, &failure) {
                Some(delay) => self.retry(work, failure, delay).await,
                None => {
                    let advance = failed(claimed, &graph, &work.place, failure);
                    self.commit(work, advance).await
                }
            },
        }
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
            if lease.is_stopping() {
                return Err(Left::Evicted); // The store closes a run that is given back under a stop.
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

    pub(crate) async fn load(&self, lease: &Lease, claimed: &Claimed, since: Option<i64>) -> Result<Loaded, Left> {
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

    /// Ends the attempt and leaves the step for a later one, or to the stop that was asked for.
    async fn retry(&self, work: Work<'_>, failure: Failure, delay: Duration) -> Result<(), Left> {
        let Work { lease, claimed, place, attempt, .. } = work;
        self.confirm(lease).await?;
        info!(
            attempt = claimed.attempt,
            delay_ms = delay.as_millis(),
            "Node '{}' failed and is repeated, unless its run is stopped: {}",
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
        self.end_attempt(lease, &AttemptEnd { end: failure.end.to_owned(), error: Some(error) }, delay).await?;
        let stopped = lease.is_stopping().then(|| {
            let meta = place.state.execution_meta.clone();
            let step = meta.step;
            let meta = Box::new(engine::stopped(meta, &claimed.node, step));
            EventBody::RunEnded { status: RunStatus::Stopped, meta, error: None }
        });
        if stopped.is_none() {
            self.places.keep(claimed.thread_key, place);
        }
        attempt.ends(&self.runner.announcer, None, stopped).await;
        Ok(())
    }

    async fn end_attempt(&self, lease: &Lease, end: &AttemptEnd, delay: Duration) -> Result<(), Left> {
        lease.settle();
        let mut tries = 0;
        loop {
            match self.calls.end_attempt(lease.step, lease.token, end, delay).await {
                Asked::Answer(true) => return Ok(()),
                Asked::Answer(false) if tries > 0 => return Ok(()), // An earlier try arrived, or the lease is lost.
                Asked::Answer(false) => return Err(lost()),
                Asked::Never(reason) => return Err(Left::Unusable(reason)),
                Asked::Again => {}
            }
            self.wait_evicted(&mut tries).await?;
        }
    }

    /// Waits before a question is asked again, unless the work has become pointless.
    pub(crate) async fn wait(&self, lease: &Lease, tries: &mut u32) -> Result<(), Left> {
        *tries += 1;
        tokio::select! {
            () = tokio::time::sleep(backoff(*tries)) => Ok(()),
            () = self.runner.leases.lost(lease) => Err(Left::Lost),
            () = self.runner.evict.cancelled() => Err(Left::Evicted),
        }
    }

    /// The same for a last write, whose own answer alone says whether the lease is lost.
    pub(crate) async fn wait_evicted(&self, tries: &mut u32) -> Result<(), Left> {
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

/// What a step commits whose graph cannot be built.
fn cannot_run(claimed: &Claimed, place: &Place, broken: GraphError) -> Advance {
    let node = Some(claimed.node.clone());
    let error = RunError { code: broken.code.to_owned(), message: broken.message, node, transient: false };
    engine::failed(&place.state, &claimed.node, error)
}

/// What a step commits whose node failed for good.
fn failed(claimed: &Claimed, graph: &Graph, place: &Place, failure: Failure) -> Advance {
    let here = engine::Place { node: &claimed.node, seq: claimed.step.seq, step_limit: place.run.step_limit };
    let error = NodeError::Failed { code: failure.code, message: failure.message, retryable: failure.retryable };
    engine::advance(graph, here, &place.state, Err(error))
}

/// Counts a lease that turned out to be somebody else's.
pub(crate) fn lost() -> Left {
    metrics::counter!(telemetry::LEASE_LOSSES).increment(1);
    Left::Lost
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
