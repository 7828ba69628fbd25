//! The store on SQLite: the embedded default, for one process.
//!
//! One connection writes (`begin immediate`, write-ahead log, synchronous), others read snapshots.
//! The writer is the lock: inside its transactions nothing moves, so they are plain read, decide,
//! write; what the Postgres store does with `skip locked` and fences is done here by that order.

mod calls;
mod claim;
mod close;
mod commit;
mod create;
mod edit;
mod graphs;
mod interrupts;
mod load;
mod lock;
mod pools;
mod repair;
mod row;
mod run;
mod search;
mod stop;
mod thread;
mod upkeep;

#[cfg(test)]
mod file_test;

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use sqlx::migrate::Migrator;
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{Sqlite, SqlitePool, Transaction};

use self::lock::{Lock, Temporary};
use self::row::{Doing, micros};
use super::{Schema, StoreError, Time};

static MIGRATIONS: Migrator = sqlx::migrate!("../migrations/sqlite");

/// Snapshots that may be open at once.
const READERS_MAX: u32 = 4;

/// What the write-ahead log shrinks to after a big transaction, in bytes.
const JOURNAL_BYTES_MAX: &str = "16777216";

/// Every statement of this module fits, so that none is prepared twice.
const STATEMENTS_MAX: usize = 512;

/// Why a database file could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it.
    #[error(
        "the database '{path}' is in use by another process{}; SQLite serves one process: stop that one, \
         choose another file, or use Postgres for several processes",
        holder.as_ref().map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    InUse {
        /// The database file.
        path: PathBuf,
        /// The process that has it, as it wrote down itself.
        holder: Option<String>,
    },
    /// The file beside the database that keeps other processes away could not be made.
    #[error("could not lock the database '{path}'; its folder must exist and be writable")]
    Lock {
        /// The database file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// SQLite refused.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// How much a transaction promises when it has committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Promise {
    /// It survives a power cut.
    Durable,
    /// It survives the process; after a power cut it may never have happened, which its caller can
    /// bear. The next durable commit makes it durable too.
    Soft,
}

impl Promise {
    /// How a transaction that promises this begins.
    fn begin(self) -> &'static str {
        match self {
            Self::Durable => "pragma synchronous = full; begin immediate",
            Self::Soft => "pragma synchronous = normal; begin immediate",
        }
    }
}

/// The store on SQLite.
pub struct SqliteStore {
    writer: SqlitePool,
    readers: SqlitePool,
    opened: Time,
    /// Keeps other processes away; let go when the store is dropped.
    _lock: Lock,
    /// Removed with the store.
    _temporary: Option<Temporary>,
}

impl SqliteStore {
    /// Opens the database in `path`, created if it is new, for this process alone. The schema is
    /// left as it is: see [`Schema::migrate`].
    ///
    /// # Errors
    /// [`OpenError::InUse`] if another process has it.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        Self::open_with(path.as_ref(), None).await
    }

    /// A new database with its schema in a folder of its own, which is removed with the store.
    ///
    /// # Errors
    /// [`OpenError`] if the system's folder for temporary files cannot be used.
    pub async fn open_temporary() -> Result<Self, OpenError> {
        let folder = Temporary::create().map_err(|source| OpenError::Lock { path: std::env::temp_dir(), source })?;
        let path = folder.path().join("threadgate.db");
        let store = Self::open_with(&path, Some(folder)).await?;
        store.migrate().await?;
        Ok(store)
    }

    async fn open_with(path: &Path, temporary: Option<Temporary>) -> Result<Self, OpenError> {
        let lock = Lock::take(path)?;
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .pragma("journal_size_limit", JOURNAL_BYTES_MAX)
            .statement_cache_capacity(STATEMENTS_MAX);
        let pool = SqlitePoolOptions::new().test_before_acquire(false).idle_timeout(None).max_lifetime(None);
        let writer = pool.clone().max_connections(1).connect_with(options.clone()).await.doing("open the database")?;
        let readers = pool
            .max_connections(READERS_MAX)
            .connect_with(options.pragma("query_only", "on"))
            .await
            .doing("open the database for reading")?;
        let store = Self { writer, readers, opened: row::now(), _lock: lock, _temporary: temporary };
        store.recover().await?;
        Ok(store)
    }

    /// Lets go of the database; calls after it fail.
    pub async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }

    /// What an earlier process had sent or leased is nobody's now: due at once.
    async fn recover(&self) -> Result<(), StoreError> {
        const DOING: &str = "look after the steps of an earlier process";
        let tables: i64 =
            sqlx::query_scalar("select count(*) from sqlite_master where type = 'table' and name = 'step'")
                .fetch_one(&self.readers)
                .await
                .doing(DOING)?;
        if tables == 0 {
            return Ok(());
        }
        let mut tx = self.begin(Promise::Soft, DOING).await?;
        sqlx::query("update step set due_at = ?1 where due_at > ?1 and status in ('ready', 'leased')")
            .bind(micros(self.opened))
            .execute(&mut *tx)
            .await
            .doing(DOING)?;
        tx.commit().await.doing(DOING)
    }

    /// A transaction of the writer; dropped without a commit it changes nothing.
    async fn begin(&self, promise: Promise, doing: &'static str) -> Result<Transaction<'static, Sqlite>, StoreError> {
        self.writer.begin_with(promise.begin()).await.doing(doing)
    }

    /// A connection for one statement that reads.
    async fn reader(&self, doing: &'static str) -> Result<PoolConnection<Sqlite>, StoreError> {
        self.readers.acquire().await.doing(doing)
    }

    /// A snapshot: all its statements see the same moment.
    async fn snapshot(&self, doing: &'static str) -> Result<Transaction<'static, Sqlite>, StoreError> {
        self.readers.begin().await.doing(doing)
    }
}

#[async_trait]
impl Schema for SqliteStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        MIGRATIONS
            .run(&self.writer)
            .await
            .map_err(|error| StoreError::Schema(format!("could not bring the database's schema up to date: {error}")))
    }

    async fn check_schema(&self) -> Result<(), StoreError> {
        const OLDER: &str = "the database's schema is older than this program; run `threadgate migrate`";
        let applied: Result<Vec<(i64, Vec<u8>)>, _> =
            sqlx::query_as("select version, checksum from _sqlx_migrations where success order by version")
                .fetch_all(&self.readers)
                .await;
        let applied = match applied {
            Err(sqlx::Error::Database(error)) if error.message().contains("no such table") => Vec::new(),
            applied => applied.doing("read the schema's version")?,
        };
        for (version, checksum) in &applied {
            let known = MIGRATIONS.iter().find(|migration| migration.version == *version);
            if known.is_none_or(|migration| *migration.checksum != **checksum) {
                return Err(StoreError::Schema(format!(
                    "the database's schema has a step ({version}) this program does not know; run the program that made it, or a newer one"
                )));
            }
        }
        if applied.len() < MIGRATIONS.iter().count() {
            return Err(StoreError::Schema(OLDER.to_owned()));
        }
        Ok(())
    }

    async fn ping(&self) -> Result<(), StoreError> {
        sqlx::query("select 1").execute(&self.readers).await.map(drop).doing("ask the database for a sign of life")
    }
}
