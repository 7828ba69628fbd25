//! Connects a role to what it works with: Postgres and Redis, or everything inside this process.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use threadgate_shared::config::StorageConfig;
use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::events::{EventLog, MemoryEvents, RedisEvents};
use threadgate_shared::parts::Parts;
use threadgate_shared::queue::{JobQueue, MemoryQueue, RedisQueue};
use threadgate_shared::store::Store;
use threadgate_shared::store::postgres::{PgOptions, PgStore};
use threadgate_shared::store::sqlite::SqliteStore;

/// The database file of the embedded default, in the data folder.
const DATABASE_FILE: &str = "dev.db";

/// Postgres and Redis, for roles in processes of their own; the schema must be this program's.
///
/// # Errors
/// If an address is missing or wrong, or the database cannot be used; the sentence says what to run.
pub async fn connect(config: &StorageConfig) -> Result<Parts> {
    config.validate().map_err(anyhow::Error::msg)?;
    let store = database(config).await?;
    store.check_schema().await?;
    with_redis(config, store)
}

/// The store alone, for commands that need nothing else.
///
/// # Errors
/// If the address is missing or wrong, or the database cannot be reached.
pub async fn database(config: &StorageConfig) -> Result<Arc<dyn Store>> {
    let Some(url) = &config.database_url else {
        bail!("say where the database is: --database-url postgres://… or THREADGATE_DATABASE_URL");
    };
    let options = PgOptions { max_connections: config.database_connections, ..PgOptions::default() };
    Ok(Arc::new(PgStore::connect(url.expose(), &options).await?))
}

/// Adds Redis to a store. A Redis that is not there makes everything slower and nothing impossible,
/// so nobody waits for it.
///
/// # Errors
/// If its address is missing or wrong.
pub fn with_redis(config: &StorageConfig, store: Arc<dyn Store>) -> Result<Parts> {
    let Some(url) = &config.redis_url else {
        bail!("say where Redis is: --redis-url redis://… or THREADGATE_REDIS_URL");
    };
    let queue = RedisQueue::open(url.expose(), &config.redis_prefix)?;
    let events = RedisEvents::open(url.expose(), &config.redis_prefix)?;
    Ok(parts(store, Arc::new(queue), Arc::new(events)))
}

/// Everything inside this process, kept in `folder`, which is created.
///
/// # Errors
/// If the folder or the database in it cannot be used.
pub async fn embedded(folder: &Path) -> Result<Parts> {
    std::fs::create_dir_all(folder).with_context(|| format!("could not create the folder {}", folder.display()))?;
    let store = SqliteStore::open(folder.join(DATABASE_FILE)).await?;
    let store: Arc<dyn Store> = Arc::new(store);
    store.migrate().await?;
    Ok(parts(store, Arc::new(MemoryQueue::new()), Arc::new(MemoryEvents::new())))
}

fn parts(store: Arc<dyn Store>, queue: Arc<dyn JobQueue>, events: Arc<dyn EventLog>) -> Parts {
    let dispatcher = Dispatcher::new(Arc::clone(&store), Arc::clone(&queue));
    Parts { store, queue, dispatcher, events }
}
