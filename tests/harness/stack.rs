//! All roles in the test's own process, on the embedded default or on Postgres and Redis.

use std::sync::Arc;

use clap::Parser;
use threadgate_api::ApiConfig;
use threadgate_scheduler::{SchedulerConfig, SchedulerHealth};
use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::events::{EventLog, MemoryEvents, RedisEvents};
use threadgate_shared::graph::Graph;
use threadgate_shared::graph::registry::Registry;
use threadgate_shared::parts::Parts;
use threadgate_shared::queue::{JobQueue, MemoryQueue, RedisQueue};
use threadgate_shared::store::Store;
use threadgate_shared::store::postgres::{PgOptions, PgStore};
use threadgate_shared::store::sqlite::SqliteStore;
use threadgate_worker::config::WorkerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::faulty::{FaultyEvents, FaultyStore};
use crate::{Database, Redis};

/// Running roles; dropping it ends them.
pub struct Stack {
    /// Where the api listens.
    pub base: String,
    /// What the roles work with.
    pub parts: Parts,
    /// The client.
    pub http: reqwest::Client,
    shutdown: CancellationToken,
    tasks: TaskTracker,
}

/// Settings as a program would be given them; empty = the defaults.
#[derive(Debug, Clone, Default)]
pub struct Settings<'a> {
    /// Flags of the api.
    pub api: Vec<&'a str>,
    /// Flags of the worker.
    pub worker: Vec<&'a str>,
    /// How many workers; `None` = one.
    pub workers: Option<usize>,
}

#[derive(Parser)]
struct Flags<T: clap::Args> {
    #[command(flatten)]
    config: T,
}

/// The configuration that `flags` give.
///
/// # Panics
/// If they are not flags of that role.
#[must_use]
pub fn configured<T: clap::Args>(flags: &[&str]) -> T {
    Flags::<T>::parse_from(std::iter::once(&"test").chain(flags)).config
}

impl Stack {
    /// On SQLite and in-process queue and events.
    ///
    /// # Panics
    /// If something does not start.
    pub async fn embedded(graphs: Vec<Graph>, settings: Settings<'_>) -> Self {
        Self::start(embedded_parts().await, graphs, settings).await
    }

    /// On Postgres and Redis.
    ///
    /// # Panics
    /// If something does not start.
    pub async fn services(database: &Database, redis: &Redis, graphs: Vec<Graph>, settings: Settings<'_>) -> Self {
        Self::start(service_parts(&database.url, &redis.url, &redis.prefix).await, graphs, settings).await
    }

    /// On these parts, whose schema is current.
    ///
    /// # Panics
    /// If something does not start.
    pub async fn start(parts: Parts, graphs: Vec<Graph>, settings: Settings<'_>) -> Self {
        let shutdown = CancellationToken::new();
        let tasks = TaskTracker::new();
        let registry = graphs.into_iter().fold(Registry::new(), Registry::graph);
        for _ in 0..settings.workers.unwrap_or(1) {
            let config: WorkerConfig = configured(&settings.worker);
            let worker = threadgate_worker::Worker::start(config, parts.clone(), &registry).await.expect("a worker");
            let shutdown = shutdown.clone();
            tasks.spawn(async move { worker.run(shutdown).await });
        }
        let scheduler: SchedulerConfig = configured(&[]);
        tasks.spawn(threadgate_scheduler::run(scheduler, parts.clone(), SchedulerHealth::default(), shutdown.clone()));
        let mut api: ApiConfig = configured(&settings.api);
        api.listen.set_port(0);
        let listener = threadgate_api::bind(&api).await.expect("a port");
        let base = format!("http://{}", listener.local_addr().expect("an address"));
        tasks.spawn(threadgate_api::serve(listener, api, parts.clone(), shutdown.clone()));
        let http = crate::client::http();
        Self { base, parts, http, shutdown, tasks }
    }

    /// Ends all roles politely and waits for them.
    pub async fn end(&self) {
        self.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// Postgres with the current schema, and Redis, which need not be there.
///
/// # Panics
/// If Postgres does not answer.
pub async fn service_parts(database_url: &str, redis_url: &str, prefix: &str) -> Parts {
    let store = PgStore::connect(database_url, &PgOptions::default()).await.expect("Postgres answers");
    let queue = RedisQueue::open(redis_url, prefix).expect("an address of Redis");
    let events = RedisEvents::open(redis_url, prefix).expect("an address of Redis");
    parts(Arc::new(store), Arc::new(queue), Arc::new(events))
}

/// SQLite with the current schema, and a queue and a log in process.
///
/// # Panics
/// If the database cannot be made.
pub async fn embedded_parts() -> Parts {
    let store = SqliteStore::open_temporary().await.expect("a temporary database");
    let parts = parts(Arc::new(store), Arc::new(MemoryQueue::new()), Arc::new(MemoryEvents::new()));
    parts.store.migrate().await.expect("the schema");
    parts
}

/// The parts over a store, a queue and a log.
#[must_use]
pub fn parts(store: Arc<dyn Store>, queue: Arc<dyn JobQueue>, events: Arc<dyn EventLog>) -> Parts {
    let dispatcher = Dispatcher::new(Arc::clone(&store), Arc::clone(&queue));
    Parts { store, queue, dispatcher, events }
}

/// The same parts, whose last write of a run fails where its text asks for it.
#[must_use]
pub fn with_faults(given: Parts) -> Parts {
    parts(Arc::new(FaultyStore(given.store)), given.queue, Arc::new(FaultyEvents(given.events)))
}
