//! The way to Redis: one pooled connection that many tasks share, made anew when it breaks, and
//! fresh ones for commands that block. While Redis does not answer, callers are refused at once
//! instead of waiting for it one by one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deadpool_redis::{Manager, Pool, PoolError, Runtime};
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, FromRedisValue, Pipeline, RedisError, RedisResult, ScriptInvocation,
};

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long an answer may take.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// How long nobody else tries after a failure.
const PAUSE: Duration = Duration::from_millis(250);

/// A shared connection to one Redis.
pub(crate) struct Link {
    client: Client,
    pool: Pool,
    held: Mutex<Held>,
    opened: Instant,
    /// Milliseconds since `opened` before which nobody tries.
    pause_until: AtomicU64,
    answers: AtomicBool,
}

#[derive(Default)]
struct Held {
    connection: Option<deadpool_redis::Connection>,
    /// Which connection it is, so that a late failure does not drop its successor.
    number: u64,
}

/// What is asked of Redis.
#[derive(Clone, Copy)]
pub(crate) enum Ask<'a> {
    /// One command.
    Command(&'a Cmd),
    /// Several in one round trip.
    Pipeline(&'a Pipeline),
    /// A script, loaded when Redis does not know it.
    Script(&'a ScriptInvocation<'a>),
}

impl Link {
    /// A link to `url` (`redis://` or `rediss://`), which is not used before the first question.
    ///
    /// # Errors
    /// If the URL is none.
    pub(crate) fn open(url: &str) -> RedisResult<Self> {
        let config = connection_config(Some(ANSWER_TIMEOUT));
        let pool = Pool::builder(Manager::new_with_config(url, config)?)
            .max_size(2)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(ANSWER_TIMEOUT))
            .create_timeout(Some(ANSWER_TIMEOUT))
            .recycle_timeout(Some(ANSWER_TIMEOUT))
            .build()
            .map_err(|_| RedisError::from((ErrorKind::InvalidClientConfig, "the pool has no runtime")))?;
        Ok(Self {
            client: Client::open(url)?,
            pool,
            held: Mutex::default(),
            opened: Instant::now(),
            pause_until: AtomicU64::new(0),
            answers: AtomicBool::new(true),
        })
    }

    /// Whether the last question was answered.
    pub(crate) fn answers(&self) -> bool {
        self.answers.load(Ordering::Relaxed)
    }

    /// Asks on the shared connection; once more on a new one if it turns out to be broken, so only
    /// for questions that may be asked twice.
    pub(crate) async fn ask<T: FromRedisValue>(&self, ask: Ask<'_>) -> RedisResult<T> {
        self.wait_for_nobody()?;
        let answer = match self.try_ask(ask).await {
            Err(error) if error.is_connection_dropped() => self.try_ask(ask).await,
            answer => answer,
        };
        let reached = !answer.as_ref().is_err_and(is_lost);
        if !reached {
            self.pause();
        }
        self.answers.store(reached, Ordering::Relaxed);
        answer
    }

    /// A connection of the caller's own, for commands that block: its answers have no time limit.
    pub(crate) async fn blocking(&self) -> RedisResult<MultiplexedConnection> {
        self.client.get_multiplexed_async_connection_with_config(&connection_config(None)).await
    }

    async fn try_ask<T: FromRedisValue>(&self, ask: Ask<'_>) -> RedisResult<T> {
        let (mut connection, number) = self.connection().await?;
        let answer = match ask {
            Ask::Command(command) => command.query_async(&mut connection).await,
            Ask::Pipeline(pipeline) => pipeline.query_async(&mut connection).await,
            Ask::Script(script) => script.invoke_async(&mut connection).await,
        };
        if answer.as_ref().is_err_and(is_lost) {
            self.forget(number);
        }
        answer
    }

    async fn connection(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        {
            let held = self.held();
            if let Some(connection) = &held.connection {
                return Ok((MultiplexedConnection::clone(connection), held.number));
            }
        }
        let pooled = self.pool.get().await.map_err(|error| match error {
            PoolError::Backend(error) => error,
            other => (ErrorKind::Io, "no connection to Redis", other.to_string()).into(),
        })?;
        let shared = MultiplexedConnection::clone(&pooled);
        let mut held = self.held();
        held.number += 1;
        held.connection = Some(pooled);
        Ok((shared, held.number))
    }

    fn forget(&self, number: u64) {
        let mut held = self.held();
        if held.number != number {
            return;
        }
        if let Some(broken) = held.connection.take() {
            // Taken out of the pool, not given back to it.
            drop(deadpool_redis::Connection::take(broken));
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// During a pause only the first to come after it may try; the next pause begins with it.
    fn wait_for_nobody(&self) -> RedisResult<()> {
        if self.answers() {
            return Ok(());
        }
        let (until, now) = (self.pause_until.load(Ordering::Relaxed), self.now());
        let next = now + millis(ANSWER_TIMEOUT);
        let is_first = now >= until
            && self.pause_until.compare_exchange(until, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if is_first {
            return Ok(());
        }
        Err((ErrorKind::Io, "Redis did not answer a moment ago").into())
    }

    fn pause(&self) {
        self.pause_until.store(self.now() + millis(PAUSE), Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        millis(self.opened.elapsed())
    }
}

/// Whether the connection is of no more use.
pub(crate) fn is_lost(error: &RedisError) -> bool {
    error.is_io_error() || error.is_unrecoverable_error()
}

/// Whole milliseconds.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn connection_config(response_timeout: Option<Duration>) -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(response_timeout)
}
