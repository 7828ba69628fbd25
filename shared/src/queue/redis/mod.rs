//! The queue over Redis Streams. A lane is a stream with one consumer group; a job is an entry until
//! its handler has returned. Everything in it is a hint: what Redis loses, the store sends again.

mod held;
mod names;
mod reader;
mod scripts;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use redis::{FromRedisValue, RedisResult, ScriptInvocation};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use self::held::{Entry, Held};
use self::names::{BEFORE_VERSION, GROUP, Names, encode};
use self::reader::RedisReader;
use super::{Job, JobHandler, JobQueue, Lane, QueueError, runtime};
use crate::domain::{GraphVersion, PoolName};
use crate::link::{Ask, Link, millis};

/// Jobs in one call of the push script at most.
const PUSH_BATCH: usize = 100;

/// How long a job is noted at most; only jobs that nobody reads for so long may come twice.
const NOTE_TTL_S: u64 = 60 * 60;

/// How long a dispatcher may fill lanes before others do not wait for it any more.
const FILLING_TTL: Duration = Duration::from_secs(1);

/// How a queue treats workers that fall silent.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// A job in the hands of a worker that has been silent for so long goes to another one. Taken
    /// from a worker that lives, it costs one refused claim; with the look for such jobs it stays
    /// below a lease and a sweep.
    pub silence_max: Duration,
    /// A job is delivered so often before it goes to the dead stream.
    pub deliveries_max: u64,
    /// A worker that has been silent for so long and holds nothing is forgotten.
    pub gone_after: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { silence_max: Duration::from_secs(2), deliveries_max: 5, gone_after: Duration::from_secs(10 * 60) }
    }
}

/// Lanes of jobs in Redis.
pub struct RedisQueue {
    shared: Arc<Shared>,
    settings: Settings,
}

impl RedisQueue {
    /// The queue at `url` whose keys start with `prefix`. Redis is not asked yet, so that a program
    /// starts without it.
    ///
    /// # Errors
    /// If the URL is none.
    pub fn open(url: &str, prefix: &str) -> Result<Self, QueueError> {
        Self::with_settings(url, prefix, Settings::default())
    }

    /// [`RedisQueue::open`] with other limits.
    ///
    /// # Errors
    /// If the URL is none.
    pub fn with_settings(url: &str, prefix: &str, settings: Settings) -> Result<Self, QueueError> {
        let link = Link::open(url).map_err(failed("open the queue"))?;
        let shared = Shared {
            link,
            names: Names::new(prefix),
            name: Uuid::new_v4().simple().to_string(),
            reads: AtomicBool::new(true),
            writes: AtomicBool::new(true),
        };
        Ok(Self { shared: Arc::new(shared), settings })
    }
}

#[async_trait]
impl JobQueue for RedisQueue {
    async fn push(&self, jobs: &[Job]) -> Result<(), QueueError> {
        for batch in jobs.chunks(PUSH_BATCH) {
            let mut script = scripts::PUSH.arg(GROUP);
            script.arg(NOTE_TTL_S);
            for job in batch {
                let Lane { pool, class, graph } = &job.lane;
                let names = &self.shared.names;
                script.key(names.lane(&job.lane)).key(names.job(job)).key(names.versions(pool, *class));
                script.arg(encode(job)).arg(graph.as_ref().map_or("", GraphVersion::as_str));
            }
            let added: u64 = self.shared.write(&script).await.map_err(failed("add jobs to the queue"))?;
            metrics::counter!("threadgate_queue_pushed_total").increment(added);
        }
        Ok(())
    }

    async fn unread(&self, lanes: &[Lane]) -> Result<Vec<usize>, QueueError> {
        if lanes.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<String> = lanes.iter().map(|lane| self.shared.names.lane(lane)).collect();
        let mut script = scripts::UNREAD.key(keys);
        script.arg(GROUP);
        self.shared.link.ask(Ask::Script(&script)).await.map_err(failed("count the queue's jobs"))
    }

    async fn begin_filling(
        &self,
        pool: &PoolName,
        class: i16,
        _lanes: &[Lane],
    ) -> Result<Option<Vec<(Lane, usize)>>, QueueError> {
        let lane = |graph| Lane { pool: pool.clone(), class, graph };
        let names = &self.shared.names;
        let mut script = scripts::BEGIN_FILLING.key(names.filling(pool, class));
        script.key(names.versions(pool, class)).key(names.lane(&lane(None)));
        script.arg(GROUP).arg(&self.shared.name).arg(millis(FILLING_TTL)).arg(BEFORE_VERSION);
        let found: Option<Vec<(String, usize)>> =
            self.shared.write(&script).await.map_err(failed("count the queue's jobs"))?;
        let version = |version: String| (!version.is_empty()).then_some(GraphVersion(version));
        Ok(found.map(|found| found.into_iter().map(|(name, count)| (lane(version(name)), count)).collect()))
    }

    async fn end_filling(&self, pool: &PoolName, class: i16) {
        let mut script = scripts::END_FILLING.key(self.shared.names.filling(pool, class));
        script.arg(&self.shared.name);
        // If this fails, the right ends by itself.
        let _ = self.shared.link.ask::<i64>(Ask::Script(&script)).await;
    }

    async fn work(
        &self,
        lanes: &[Lane],
        slots: usize,
        handler: Arc<dyn JobHandler>,
        shutdown: CancellationToken,
    ) -> Result<(), QueueError> {
        let keys = lanes.iter().map(|lane| self.shared.names.lane(lane)).collect();
        let held = Arc::new(Held::new(keys, Uuid::new_v4().simple().to_string()));
        let (finished, receipts) = mpsc::unbounded_channel();
        let acknowledging = tokio::spawn(held::acknowledge(Arc::clone(&self.shared), Arc::clone(&held), receipts));
        let touching = held::touch(Arc::clone(&self.shared), Arc::clone(&held), self.settings.silence_max);
        let _touching = AbortOnDropHandle::new(tokio::spawn(touching));
        let reader = RedisReader::new(Arc::clone(&self.shared), Arc::clone(&held), lanes.to_vec(), self.settings);
        let done = Arc::new(move |entry: Arc<Entry>| {
            // Fails only when the worker is gone, and the job goes to another one.
            let _ = finished.send(entry);
        });
        let worked = runtime::run(&held.consumer, reader, done, slots, handler, shutdown).await;
        let _ = acknowledging.await;
        self.forget(&held).await;
        worked
    }

    fn is_healthy(&self) -> bool {
        self.shared.is_healthy()
    }

    async fn ping(&self) -> Result<(), QueueError> {
        self.shared.link.ask(Ask::Command(&redis::cmd("PING"))).await.map_err(failed("reach the queue"))
    }
}

impl RedisQueue {
    /// A worker that leaves takes its name along; if this fails, others forget it in time.
    async fn forget(&self, held: &Held) {
        if held.lanes.is_empty() {
            return;
        }
        let mut script = scripts::FORGET.key(&held.lanes);
        script.arg(GROUP).arg(&held.consumer).arg(millis(self.settings.gone_after));
        let _ = self.shared.link.ask::<i64>(Ask::Script(&script)).await;
    }
}

/// What the parts of a queue share.
struct Shared {
    link: Link,
    names: Names,
    /// Tells this queue's right to fill lanes from another one's.
    name: String,
    reads: AtomicBool,
    /// False while Redis answers but refuses to write, because its memory is full for one.
    writes: AtomicBool,
}

impl Shared {
    fn is_healthy(&self) -> bool {
        self.link.answers() && self.reads.load(Ordering::Relaxed) && self.writes.load(Ordering::Relaxed)
    }

    /// Notes how the last read went; whether that is new.
    fn reading(&self, worked: bool) -> bool {
        self.reads.swap(worked, Ordering::Relaxed) != worked
    }

    fn writing(&self, worked: bool) {
        self.writes.store(worked, Ordering::Relaxed);
    }

    async fn write<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> RedisResult<T> {
        let written = self.link.ask(Ask::Script(script)).await;
        self.writing(written.is_ok());
        written
    }
}

fn failed(doing: &'static str) -> impl Fn(redis::RedisError) -> QueueError {
    move |error| QueueError { doing, message: error.to_string() }
}
