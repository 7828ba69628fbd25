//! The store on Postgres: the truth of every deployment with more than one process.
//!
//! Rules that hold for all files here:
//! - Whatever creates, ends, stops, pauses or edits a thread's things locks the `thread` row first,
//!   several in the order of their keys, an `idempotency` row before it, steps and runs behind it.
//!   Claim, heartbeat, sweep, dispatch and a batched commit lock with `skip locked`: who never waits
//!   never deadlocks.
//! - A statement that waited for a lock sees fresh only the rows it locked, so what depends on other
//!   rows is read by the next statement.
//! - Conditions on an indexed time compare with `statement_timestamp()`, which the index can use;
//!   times are set, and judged after a lock, with `clock_timestamp()`.
//! - A call that may be repeated after a lost connection carries its own ids and tokens.

mod audit;
mod calls;
mod claim;
mod close;
mod commit;
mod create;
mod edits;
mod error;
mod graphs;
mod interrupts;
mod lease;
mod load;
mod repair;
mod rows;
mod runs;
mod schema;
mod steps;
mod stop;
mod sweep;
mod thread_lock;
mod threads;
mod upkeep;
mod warm;

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgPool, Postgres, Transaction};

use self::error::Doing;
use self::warm::Warm;
use crate::store::StoreError;

/// How the pool of one process is made.
#[derive(Debug, Clone)]
pub struct PgOptions {
    /// Connections at most, beside those that a worker opens for the statements of its steps, as many
    /// as are under way at once and 18 at most; default 10. Two to four per core of the database, over all processes, is where Postgres is
    /// fastest.
    pub max_connections: u32,
    /// How long a call waits for a free connection; default 5 s.
    pub acquire_timeout: Duration,
    /// What the database's own views call this process; default `threadgate`.
    pub application_name: String,
}

impl Default for PgOptions {
    fn default() -> Self {
        Self { max_connections: 10, acquire_timeout: Duration::from_secs(5), application_name: "threadgate".to_owned() }
    }
}

/// The store on Postgres; cheap to clone.
#[derive(Debug, Clone)]
pub struct PgStore {
    pool: PgPool,
    /// For commits, and for what else steps wait for.
    steps: Warm,
    /// For what may be lost with the last moment before a crash of the database, and is made again.
    hints: Warm,
    connect: PgConnectOptions,
    /// The key up to which the repair has looked at threads.
    repaired_to: Arc<AtomicI64>,
}

impl PgStore {
    /// Connects to `url` (`postgres://user:password@host:port/database`).
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if no connection is to be had within the acquire timeout.
    pub async fn connect(url: &str, options: &PgOptions) -> Result<Self, StoreError> {
        let doing = "connect to Postgres";
        let connect: PgConnectOptions =
            url.parse::<PgConnectOptions>().doing(doing)?.application_name(&options.application_name);
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout)
            .max_lifetime(Duration::from_secs(30 * 60))
            // A check before every use would double the round trips; only one that lay idle is
            // checked, and a call on a broken one is repeated.
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move { Ok(meta.idle_for < Duration::from_secs(5) || connection.ping().await.is_ok()) })
            })
            .connect_with(connect.clone().options(SESSION))
            .await
            .doing(doing)?;
        let patience = options.acquire_timeout;
        Ok(Self {
            pool,
            steps: Warm::new(connect.clone().options(SESSION), STEP_CONNECTIONS, patience),
            hints: Warm::new(connect.clone().options(SESSION).options(HINTS), HINT_CONNECTIONS, patience),
            connect,
            repaired_to: Arc::default(),
        })
    }

    /// Closes the connections once nobody uses them.
    pub async fn close(&self) {
        self.steps.close();
        self.hints.close();
        self.pool.close().await;
    }

    async fn begin(&self, doing: &'static str) -> Result<Transaction<'static, Postgres>, StoreError> {
        self.pool.begin().await.doing(doing)
    }
}

/// Connections for the statements of steps: with one step per statement their commits wait for the
/// disk together.
const STEP_CONNECTIONS: usize = 16;

/// Connections for what may be lost.
const HINT_CONNECTIONS: usize = 2;

/// Without the first, these statements are planned on every call, at half the speed. A plan made
/// while a table is small is kept while it grows, so it must not read it through: that made a step
/// 2.4 times as expensive. The timeouts free the locks of a process that hangs inside a transaction,
/// and bound every wait for one.
const SESSION: [(&str, &str); 8] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
    ("statement_timeout", "30s"),
    ("lock_timeout", "1s"),
    ("idle_in_transaction_session_timeout", "5s"),
];

/// Claims, marks and the sending of steps: a lost one is made again.
const HINTS: [(&str, &str); 1] = [("synchronous_commit", "off")];
