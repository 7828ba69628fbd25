//! Connections for the statements of steps. One that was just used is used next, so its caches are
//! warm, and giving it back asks the server nothing: with one statement per call, the question that
//! a general pool asks then would double the round trips.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use deadpool::managed::{Manager, Metrics, Object, Pool, PoolError, QueueMode, RecycleError, RecycleResult};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};

/// One that lay idle for so long is asked whether it still lives.
const TRUSTED_FOR: Duration = Duration::from_secs(5);

/// One that lay idle for so long is closed when the next is taken.
const IDLE_MAX: Duration = Duration::from_secs(10 * 60);

/// A few connections, opened when they are needed.
#[derive(Debug, Clone)]
pub(super) struct Warm(Pool<Opener>);

impl Warm {
    /// At most `size` connections; a call waits `patience` for a free one.
    pub(super) fn new(connect: PgConnectOptions, size: usize, patience: Duration) -> Self {
        let pool = Pool::builder(Opener(connect))
            .max_size(size)
            .queue_mode(QueueMode::Lifo)
            .runtime(deadpool::Runtime::Tokio1)
            .wait_timeout(Some(patience))
            .create_timeout(Some(patience))
            .recycle_timeout(Some(patience))
            .build()
            .expect("the pool's timeouts have a runtime");
        Self(pool)
    }

    /// A connection for one call.
    ///
    /// # Errors
    /// [`sqlx::Error::PoolTimedOut`] if none became free, else why none could be opened.
    pub(super) async fn take(&self) -> Result<WarmConnection, sqlx::Error> {
        match self.0.get().await {
            Ok(connection) => Ok(WarmConnection(Some(connection))),
            Err(PoolError::Backend(error)) => Err(error),
            Err(PoolError::Closed) => Err(sqlx::Error::PoolClosed),
            Err(_) => Err(sqlx::Error::PoolTimedOut),
        }
    }

    /// Closes what is not in use, and lets nobody take another.
    pub(super) fn close(&self) {
        self.0.close();
    }
}

/// A connection in use. Only one whose call has come to a good end is used again; what is dropped
/// before that is closed.
#[derive(Debug)]
pub(super) struct WarmConnection(Option<Object<Opener>>);

impl WarmConnection {
    /// The call is over.
    pub(super) fn keep(mut self) {
        if let Some(mut connection) = self.0.take() {
            connection.used_at = Instant::now();
        }
    }
}

impl Drop for WarmConnection {
    fn drop(&mut self) {
        if let Some(unfinished) = self.0.take() {
            drop(Object::take(unfinished));
        }
    }
}

impl Deref for WarmConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0.as_ref().expect("it is there until it is kept").connection
    }
}

impl DerefMut for WarmConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0.as_mut().expect("it is there until it is kept").connection
    }
}

#[derive(Debug)]
struct Opener(PgConnectOptions);

#[derive(Debug)]
struct Opened {
    connection: PgConnection,
    used_at: Instant,
}

impl Manager for Opener {
    type Type = Opened;
    type Error = sqlx::Error;

    async fn create(&self) -> Result<Opened, sqlx::Error> {
        let connection = PgConnection::connect_with(&self.0).await?;
        Ok(Opened { connection, used_at: Instant::now() })
    }

    async fn recycle(&self, opened: &mut Opened, _: &Metrics) -> RecycleResult<sqlx::Error> {
        match opened.used_at.elapsed() {
            idle if idle < TRUSTED_FOR => Ok(()),
            idle if idle < IDLE_MAX => opened.connection.ping().await.map_err(RecycleError::Backend),
            _ => Err(RecycleError::message("it lay idle for too long")),
        }
    }
}
