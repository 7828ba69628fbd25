//! The roles in processes of their own: `api`, `worker`, `scheduler` and `migrate`, on Postgres and
//! Redis.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use futures::FutureExt;
use threadgate_api::ApiConfig;
use threadgate_api::readiness::Readiness;
use threadgate_scheduler::{SchedulerConfig, SchedulerHealth};
use threadgate_shared::config::StorageConfig;
use threadgate_shared::graph::registry::Registry;
use threadgate_shared::parts::Parts;
use threadgate_shared::shutdown;
use threadgate_shared::store::Schema;
use threadgate_shared::telemetry::{LogConfig, Metrics, init_logs};
use threadgate_worker::Worker;
use threadgate_worker::config::WorkerConfig;
use tokio_util::sync::CancellationToken;

use crate::monitor::{self, Check, known};
use crate::{bench, print, storage};

/// What every role takes.
#[derive(Debug, Clone, Args)]
pub struct RoleArgs {
    /// Where runs are kept and announced.
    #[command(flatten, next_help_heading = "Storage")]
    pub storage: StorageConfig,

    /// What is logged.
    #[command(flatten, next_help_heading = "Logs and metrics")]
    pub log: LogConfig,

    /// Address and port of /metrics, /health/live and /health/ready; without it there are none.
    #[arg(long, env = "THREADGATE_METRICS_LISTEN", value_name = "ADDRESS", help_heading = "Logs and metrics")]
    pub metrics_listen: Option<SocketAddr>,
}

/// `threadgate api`.
#[derive(Debug, Args)]
pub struct ApiArgs {
    #[command(flatten)]
    api: ApiConfig,
    #[command(flatten)]
    role: RoleArgs,
}

/// `threadgate worker`.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    #[command(flatten)]
    worker: WorkerConfig,
    #[command(flatten)]
    role: RoleArgs,
    /// Adds the benchmark's graph.
    #[arg(long, env = "THREADGATE_BENCH_GRAPH", hide = true)]
    bench_graph: bool,
}

/// `threadgate scheduler`.
#[derive(Debug, Args)]
pub struct SchedulerArgs {
    /// How long the workers' leases last; the same as theirs.
    #[arg(long, env = "THREADGATE_LEASE_TTL", default_value = "4s", value_parser = humantime::parse_duration)]
    lease_ttl: Duration,
    #[command(flatten)]
    scheduler: SchedulerConfig,
    #[command(flatten)]
    role: RoleArgs,
}

/// `threadgate migrate`.
#[derive(Debug, Args)]
pub struct MigrateArgs {
    #[command(flatten)]
    storage: StorageConfig,
}

impl RoleArgs {
    /// Sets up logs, signals and metrics.
    pub(crate) fn begin(&self) -> Result<(CancellationToken, Option<Metrics>)> {
        init_logs(&self.log)?;
        let metrics = self.metrics_listen.map(|_| Metrics::install()).transpose()?;
        Ok((shutdown::on_signal()?, metrics))
    }

    /// Shows metrics and health, where somebody asked for them.
    pub(crate) async fn watch(
        &self,
        metrics: Option<Metrics>,
        checks: Vec<(&'static str, Check)>,
        shutdown: &CancellationToken,
    ) -> Result<()> {
        match (self.metrics_listen, metrics) {
            (Some(address), Some(metrics)) => monitor::serve(address, metrics, checks, shutdown.clone()).await,
            _ => Ok(()),
        }
    }
}

/// Serves HTTP until a signal.
///
/// # Errors
/// Why it did not start, or ended by itself.
pub async fn api(args: ApiArgs) -> Result<()> {
    let (shutdown, metrics) = args.role.begin()?;
    let parts = storage::connect(&args.role.storage).await?;
    args.role.watch(metrics, vec![("store", store_answers(&parts))], &shutdown).await?;
    let listener = threadgate_api::bind(&args.api).await?;
    if let Some(name) = &args.api.graph
        && !parts.store.graphs().await?.iter().any(|graph| graph.name == *name)
    {
        tracing::warn!(
            "Graph '{name}' is not registered; /v1/graph/* answers 503 until a worker has it or it is pushed"
        );
    }
    tracing::info!(address = %listener.local_addr()?, "The api listens on {}", listener.local_addr()?);
    Ok(threadgate_api::serve(listener, args.api, parts, shutdown).await?)
}

/// Whether the database is there with this program's schema; asked only when somebody looks.
fn store_answers(parts: &Parts) -> Check {
    let (parts, readiness) = (parts.clone(), Arc::new(Readiness::default()));
    Arc::new(move || {
        let (parts, readiness) = (parts.clone(), Arc::clone(&readiness));
        async move {
            match readiness.look(&parts).await.store {
                true => Ok(()),
                false => Err("the database does not answer, or its schema is not this program's".to_owned()),
            }
        }
        .boxed()
    })
}

/// Takes and runs steps until a signal.
///
/// # Errors
/// Why it did not start, or ended by itself.
pub async fn worker(args: WorkerArgs, mut registry: Registry) -> Result<()> {
    let (shutdown, metrics) = args.role.begin()?;
    if args.bench_graph {
        registry = registry.graph(bench::graph::graph()?);
    }
    let parts = storage::connect(&args.role.storage).await?;
    let worker = Worker::start(args.worker, parts, &registry).await?;
    let health = worker.health();
    args.role.watch(metrics, vec![("worker", known(move || health.check()))], &shutdown).await?;
    Ok(worker.run(shutdown).await?)
}

/// Looks for due work until a signal.
///
/// # Errors
/// Why it did not start.
pub async fn scheduler(args: SchedulerArgs) -> Result<()> {
    let (shutdown, metrics) = args.role.begin()?;
    let config =
        SchedulerConfig { lease_ttl: args.lease_ttl, observes: args.role.metrics_listen.is_some(), ..args.scheduler };
    config.validate()?;
    let parts = storage::connect(&args.role.storage).await?;
    let health = SchedulerHealth::default();
    let shown = health.clone();
    args.role.watch(metrics, vec![("scheduler", known(move || shown.check()))], &shutdown).await?;
    Ok(threadgate_scheduler::run(config, parts, health, shutdown).await?)
}

/// Brings the database's schema up to date; safe to run from several places at once.
///
/// # Errors
/// If the database cannot be reached or refuses.
pub async fn migrate(args: MigrateArgs) -> Result<()> {
    args.storage.validate().map_err(anyhow::Error::msg)?;
    let store = storage::database(&args.storage).await?;
    Schema::migrate(&*store).await?;
    print::line("The database's schema is up to date.");
    Ok(())
}
