//! Executes one graph node per job: claims a step, runs its node under a deadline while a heartbeat
//! keeps the lease, and commits the result together with what follows.

mod announce;
mod batch;
mod beside;
mod calls;
mod commit;
pub mod config;
mod execute;
mod follow_up;
mod graphs;
pub mod health;
mod heartbeat;
mod lease;
mod nodes;
mod run_node;
mod state;
mod telemetry;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod threads;

use std::sync::Arc;
use std::time::Duration;

use threadgate_shared::domain::{PoolName, WorkerId};
use threadgate_shared::graph::registry::Registry;
use threadgate_shared::graph::{GraphError, declarative};
use threadgate_shared::parts::Parts;
use threadgate_shared::queue::{JobHandler, Lane};
use threadgate_shared::store::{GraphRecord, StoreError, WorkerRecord};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::announce::Announcer;
use crate::calls::Calls;
use crate::config::{ConfigError, WorkerConfig};
use crate::execute::Executor;
use crate::graphs::{Build, Graphs};
use crate::health::WorkerHealth;
use crate::heartbeat::Heartbeat;
use crate::lease::Leases;
use crate::nodes::http::HttpNodes;
use crate::run_node::NodeRunner;
use crate::state::Places;
use crate::threads::NodeThreads;

/// How often a worker says that it lives.
const SEEN_EVERY: Duration = Duration::from_secs(5);

/// What of the grace is kept for giving leases back and saying goodbye.
const GOODBYE_MAX: Duration = Duration::from_secs(2);

/// Why a worker ended otherwise than by its signal.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The configuration does not fit together.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The registry does not fit together.
    #[error("the program's graphs cannot be served: {0}")]
    Registry(#[from] GraphError),
    /// The graphs could not be registered.
    #[error("could not register the program's graphs")]
    Register(#[from] StoreError),
    /// The system's certificates cannot be read, which nodes over https need.
    #[error("could not prepare calls to nodes over HTTP")]
    Http(#[source] reqwest::Error),
    /// The system gives no threads for nodes.
    #[error("could not start the threads that run nodes")]
    Threads(#[source] std::io::Error),
    /// Leases cannot be renewed any more; everything that ran was left to other workers.
    #[error("the heartbeat ended, so no lease can be held; start the worker anew")]
    HeartbeatDied,
}

/// Runs one worker until `shutdown`; `cli` calls it, and so does a test.
///
/// # Errors
/// [`WorkerError`] says why it did not start, or ended by itself.
pub async fn run(
    config: WorkerConfig,
    parts: Parts,
    registry: Registry,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    Worker::start(config, parts, &registry).await?.run(shutdown).await
}

/// One worker, ready to take work.
pub struct Worker {
    executor: Arc<Executor>,
    beside: mpsc::UnboundedReceiver<threadgate_shared::queue::Job>,
    heartbeat: Heartbeat,
    health: WorkerHealth,
    record: WorkerRecord,
    lanes: Vec<Lane>,
    shutdown_grace: Duration,
}

impl Worker {
    /// Registers the program's graphs and starts everything but the taking of work.
    ///
    /// # Errors
    /// [`WorkerError`] says what is wrong.
    pub async fn start(config: WorkerConfig, parts: Parts, registry: &Registry) -> Result<Self, WorkerError> {
        config.validate()?;
        registry.check()?;
        telemetry::describe();
        register(&parts, registry).await?;

        let health = WorkerHealth::default();
        let leases = Leases::new(config.lease_ttl);
        let http = HttpNodes::new(&config.http, config.output_bytes_max).map_err(WorkerError::Http)?;
        let graphs = Graphs::new(registry.graphs().iter().cloned(), Arc::clone(&parts.store), build(http));
        let record = WorkerRecord {
            id: WorkerId::new(),
            name: config.name.clone(),
            pools: config.pools.clone(),
            slots: i32::try_from(config.slots).unwrap_or(i32::MAX),
            versions: graphs.code_versions(),
        };
        let lanes = lanes(&record);
        let (beside_queue, beside) = mpsc::unbounded_channel();
        let executor = Arc::new(Executor {
            calls: Calls::spawn(&parts.store, &config, record.id, record.versions.clone(), &health),
            runner: NodeRunner {
                store: Arc::clone(&parts.store),
                threads: NodeThreads::new(config.node_threads).map_err(WorkerError::Threads)?,
                leases: leases.clone(),
                announcer: Announcer::spawn(Arc::clone(&parts.events)),
                evict: CancellationToken::new(),
                output_bytes_max: config.output_bytes_max,
                timeout_max: config.node_timeout_max,
            },
            store: Arc::clone(&parts.store),
            queue: parts.queue,
            dispatcher: parts.dispatcher,
            graphs,
            places: Places::new(config.state_cache_bytes_max),
            slots: Arc::new(Semaphore::new(config.slots)),
            pools: config.pools,
            taking: CancellationToken::new(),
            beside_queue,
        });
        let heartbeat = Heartbeat::spawn(parts.store, leases, config.heartbeat_interval, health.clone());
        Ok(Self { executor, beside, heartbeat, health, record, lanes, shutdown_grace: config.shutdown_grace })
    }

    /// Whether it can do its work, for whoever shows readiness.
    #[must_use]
    pub fn health(&self) -> WorkerHealth {
        self.health.clone()
    }

    /// Takes and does work until `shutdown`: then takes nothing new, lets what runs go on for the
    /// grace, gives the rest back and returns.
    ///
    /// # Errors
    /// [`WorkerError::HeartbeatDied`] if it ended by itself.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), WorkerError> {
        let Self { executor, beside, heartbeat, health, record, lanes, shutdown_grace } = self;
        let slots = usize::try_from(record.slots).unwrap_or(1);
        #[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
        metrics::gauge!(telemetry::SLOTS).set(slots as f64);
        let pools = record.pools.iter().map(PoolName::as_str).collect::<Vec<_>>().join(", ");
        info!(worker = %record.id, slots, "Worker '{}' takes work of the pools {pools}", record.name);

        let seen = tokio::spawn(say_alive(Arc::clone(&executor), record.clone(), health.clone()));
        let ending = tokio::spawn(end(Arc::clone(&executor), shutdown.clone(), health.clone(), shutdown_grace));
        let beside = tokio::spawn(beside::take(Arc::clone(&executor), beside, health.clone()));
        tokio::select! {
            _ = async { tokio::join!(consume(&executor, &lanes, slots), beside) } => {}
            () = overdue(&executor) => warn!("Some work does not let go; its leases run out"),
        }

        ending.abort();
        seen.abort();
        let _ = seen.await; // Its last word must not come after the goodbye.
        heartbeat.stop().await; // The last renewal covers the last commit.
        let goodbye = tokio::time::timeout(GOODBYE_MAX / 2, executor.store.worker_gone(record.id));
        if !matches!(goodbye.await, Ok(Ok(()))) {
            warn!("Could not say goodbye; the worker is forgotten after a while");
        }
        if shutdown.is_cancelled() { Ok(()) } else { Err(WorkerError::HeartbeatDied) }
    }
}

async fn register(parts: &Parts, registry: &Registry) -> Result<(), StoreError> {
    let records: Vec<GraphRecord> = registry
        .graphs()
        .iter()
        .map(|graph| GraphRecord {
            name: graph.manifest.name.clone(),
            version: graph.version.clone(),
            manifest: (*graph.manifest).clone(),
            registered_at: chrono::Utc::now(), // The store sets its own.
        })
        .collect();
    if records.is_empty() { Ok(()) } else { parts.store.register_graphs(&records).await }
}

fn build(nodes: HttpNodes) -> Build {
    Arc::new(move |manifest| declarative::build(manifest, &nodes))
}

/// The streams a worker reads: interactive before batch, and of each the declarative graphs' and
/// those of its own code.
fn lanes(record: &WorkerRecord) -> Vec<Lane> {
    let graphs: Vec<_> = std::iter::once(None).chain(record.versions.iter().cloned().map(Some)).collect();
    let mut lanes = Vec::new();
    for class in [0, 1] {
        for pool in &record.pools {
            lanes.extend(graphs.iter().map(|graph| Lane { pool: pool.clone(), class, graph: graph.clone() }));
        }
    }
    lanes
}

/// Reads the queue until nothing more is taken; a queue that ends early is asked again.
async fn consume(executor: &Arc<Executor>, lanes: &[Lane], slots: usize) {
    let taking = &executor.taking;
    while !taking.is_cancelled() {
        let handler = Arc::clone(executor) as Arc<dyn JobHandler>;
        if let Err(failure) = executor.queue.work(lanes, slots, handler, taking.clone()).await {
            warn!(error = %failure, "The queue gives no work; asking again");
        }
        tokio::select! {
            () = taking.cancelled() => {}
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    }
}

/// Returns when even what was given back should have ended.
async fn overdue(executor: &Executor) {
    executor.runner.evict.cancelled().await;
    tokio::time::sleep(GOODBYE_MAX / 4).await;
}

/// Says every few seconds that this worker lives.
async fn say_alive(executor: Arc<Executor>, record: WorkerRecord, health: WorkerHealth) {
    let mut ticks = tokio::time::interval(SEEN_EVERY);
    loop {
        ticks.tick().await;
        match executor.store.worker_seen(&record).await {
            Ok(()) => health.store_answered(),
            Err(failure) => warn!(error = %failure, "Could not tell the store that this worker lives"),
        }
    }
}

/// The two degrees of the end: nothing new at the signal, or when leases cannot be kept; and after
/// the grace nothing at all.
async fn end(executor: Arc<Executor>, shutdown: CancellationToken, health: WorkerHealth, grace: Duration) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = executor.runner.leases.unrenewed() => {}
    }
    health.draining();
    executor.taking.cancel();
    tokio::time::sleep(grace.saturating_sub(GOODBYE_MAX.min(grace / 4))).await;
    info!("The grace is over; giving back what still runs");
    executor.runner.evict.cancel();
}
