//! `threadgate dev`: all roles in one process, on files of its own or on the real parts.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use threadgate_api::ApiConfig;
use threadgate_scheduler::{SchedulerConfig, SchedulerHealth};
use threadgate_shared::graph::registry::Registry;
use threadgate_shared::parts::Parts;
use threadgate_shared::store::Schema;
use threadgate_worker::Worker;
use threadgate_worker::config::WorkerConfig;
use tokio::task::JoinSet;

use crate::exit::{Exit, Failure};
use crate::monitor::{Check, known};
use crate::print::{self, Paint};
use crate::roles::RoleArgs;
use crate::{graphs, storage};

/// Options of `threadgate dev`.
#[derive(Debug, Args)]
pub struct DevArgs {
    /// Graphs to serve: files of YAML or JSON, or folders of them. The first is the one behind
    /// /v1/graph/*. Default: a graph that says hello.
    #[arg(long, value_name = "PATH", num_args = 1.., env = "THREADGATE_GRAPHS", value_delimiter = ',')]
    graphs: Vec<PathBuf>,

    /// Where the embedded database is kept; not used with --database-url.
    #[arg(long, value_name = "FOLDER", env = "THREADGATE_DATA_DIR", default_value = ".threadgate")]
    data_dir: PathBuf,

    #[command(flatten, next_help_heading = "API")]
    api: ApiConfig,
    #[command(flatten, next_help_heading = "Worker")]
    worker: WorkerConfig,
    #[command(flatten, next_help_heading = "Scheduler")]
    scheduler: SchedulerConfig,
    #[command(flatten)]
    role: RoleArgs,
}

/// Serves until a signal.
///
/// # Errors
/// Why it did not start, or which role ended by itself.
pub async fn run(args: DevArgs, registry: Registry) -> Result<(), Failure> {
    let (shutdown, metrics) = args.role.begin()?;
    let scheduler = SchedulerConfig {
        lease_ttl: args.worker.lease_ttl,
        observes: args.role.metrics_listen.is_some(),
        ..args.scheduler.clone()
    };
    scheduler.validate()?;
    let declared = if args.graphs.is_empty() && registry.graphs().is_empty() {
        vec![graphs::hello()]
    } else {
        graphs::load(&args.graphs)?
    };
    let (parts, place) = open(&args).await?;
    let listener = threadgate_api::bind(&args.api).await?;
    let address = listener.local_addr()?;

    let coded = registry.graphs().iter().map(|graph| graph.manifest.name.clone());
    let names: Vec<String> = coded.chain(declared.iter().map(|graph| graph.name.clone())).collect();
    let worker = Worker::start(args.worker, parts.clone(), &registry).await?;
    parts.store.register_graphs(&declared).await.context("could not register the graphs")?;
    known_graph(&parts, args.api.graph.as_deref()).await?;
    let api = ApiConfig { graph: args.api.graph.clone().or_else(|| names.first().cloned()), ..args.api };
    let (worker_health, scheduler_health) = (worker.health(), SchedulerHealth::default());
    let (shown_worker, shown_scheduler) = (worker_health, scheduler_health.clone());
    let checks: Vec<(&'static str, Check)> =
        vec![("worker", known(move || shown_worker.check())), ("scheduler", known(move || shown_scheduler.check()))];
    args.role.watch(metrics, checks, &shutdown).await?;

    let mut roles: JoinSet<Result<&'static str>> = JoinSet::new();
    let (ending, api_parts) = (shutdown.clone(), parts.clone());
    roles.spawn(async move { Ok(threadgate_api::serve(listener, api, api_parts, ending).await.map(|()| "api")?) });
    let ending = shutdown.clone();
    roles.spawn(async move { Ok(worker.run(ending).await.map(|()| "worker")?) });
    let ending = shutdown.clone();
    roles.spawn(async move {
        Ok(threadgate_scheduler::run(scheduler, parts, scheduler_health, ending).await.map(|()| "scheduler")?)
    });
    greet(&address.to_string(), &place, &names);

    let mut outcome = Ok(());
    while let Some(ended) = roles.join_next().await {
        let by_itself = !shutdown.is_cancelled();
        shutdown.cancel(); // The others end as they do after a signal.
        match ended.context("a role ended by a panic").and_then(|ended| ended) {
            Ok(role) if by_itself => {
                outcome = Err(Failure::new(Exit::Program, format!("the {role} ended by itself; the log says why")));
            }
            Err(error) if outcome.is_ok() => outcome = Err(error.into()),
            _ => {}
        }
    }
    outcome
}

/// Refuses a name that no graph has, when all that will be there are registered.
async fn known_graph(parts: &Parts, name: Option<&str>) -> Result<(), Failure> {
    let Some(name) = name else { return Ok(()) };
    let graphs = parts.store.graphs().await.context("could not read the graphs")?;
    if graphs.iter().any(|graph| graph.name == name) {
        return Ok(());
    }
    let names: Vec<&str> = graphs.iter().map(|graph| graph.name.as_str()).collect();
    let message = format!("--graph names '{name}', which is not registered; choose one of: {}", names.join(", "));
    Err(Failure::new(Exit::Refused, message))
}

/// The parts, and where they are in words.
async fn open(args: &DevArgs) -> Result<(Parts, String)> {
    let storage = &args.role.storage;
    storage.validate().map_err(anyhow::Error::msg)?;
    match (&storage.database_url, &storage.redis_url) {
        (None, None) => {
            let parts = storage::embedded(&args.data_dir).await?;
            Ok((parts, format!("embedded, kept in {}", args.data_dir.display())))
        }
        (Some(database), Some(redis)) => {
            let store = storage::database(storage).await?;
            Schema::migrate(&*store).await?;
            Ok((storage::with_redis(storage, store)?, format!("on {database} and {redis}")))
        }
        _ => bail!("give both --database-url and --redis-url, or neither for the embedded default"),
    }
}

fn greet(address: &str, place: &str, graphs: &[String]) {
    let paint = Paint::for_stdout();
    let version = env!("CARGO_PKG_VERSION");
    print::line(format!("\nThreadgate {version} at {} ({place})", paint.bold(format!("http://{address}"))));
    print::line(format!("Graphs: {}", graphs.join(", ")));
    print::line(format!(
        "\nTry it:\n  curl -s http://{address}/v1/graph/invoke -H 'content-type: application/json' \\\n    -d '{}'",
        r#"{"messages":[{"role":"user","content":[{"type":"text","text":"Hello"}]}]}"#
    ));
    print::line(paint.dim(format!("\nAll routes: http://{address}/docs    End: Ctrl-C\n")));
}
