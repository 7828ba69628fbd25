//! The event log over Redis: a capped stream per run, whose entries' ids are the events' numbers, so
//! that Redis itself refuses repeats. Publishing never waits for Redis; what does not fit on the way
//! is dropped, and whoever follows notices the hole.

mod reader;
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use futures::stream::BoxStream;
use redis::RedisResult;
use tokio::sync::broadcast::Receiver;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use self::reader::Topics;
use self::wire::{Entry, Names};
use super::follow::{self, Live, Log};
use super::limits::{BYTES_MAX, ENDED_TTL, ENDS_MAX, EVENTS_MAX, TTL};
use super::{End, Event, EventId, EventLog, Followed};
use crate::domain::RunId;
use crate::link::{Ask, Link, millis};

/// Publications that may wait for Redis.
const BUFFER: usize = 1_024;

/// Publications in one round trip at most.
const BATCH: usize = 64;

/// What could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("could not open the event log: {0}")]
pub struct EventsError(#[from] redis::RedisError);

/// Events of runs in Redis.
pub struct RedisEvents {
    log: Arc<RedisLog>,
    publications: mpsc::Sender<Publication>,
    _reading: AbortOnDropHandle<()>,
}

type Publication = (RunId, Vec<Event>);

impl RedisEvents {
    /// The log at `url` whose keys start with `prefix`; needs a tokio runtime. Redis is not asked
    /// yet, so that a program starts without it.
    ///
    /// # Errors
    /// If the URL is none.
    pub fn open(url: &str, prefix: &str) -> Result<Self, EventsError> {
        let log = Arc::new(RedisLog {
            link: Link::open(url)?,
            names: Names::new(prefix),
            topics: Topics::default(),
            reads: AtomicBool::new(true),
        });
        let (publications, received) = mpsc::channel(BUFFER);
        // Ends by itself, with everything written, when the last sender is gone.
        tokio::spawn(publish(Arc::clone(&log), received));
        let reading = AbortOnDropHandle::new(tokio::spawn(reader::read(Arc::clone(&log))));
        Ok(Self { log, publications, _reading: reading })
    }
}

#[async_trait]
impl EventLog for RedisEvents {
    async fn publish(&self, run: RunId, events: Vec<Event>) {
        let count = events.len() as u64;
        if self.publications.try_send((run, events)).is_err() {
            metrics::counter!("threadgate_events_lost_total").increment(count);
        }
    }

    fn follow(&self, run: RunId, after: EventId) -> BoxStream<'static, Followed> {
        follow::follow(Arc::clone(&self.log), run, after)
    }

    fn ends(&self) -> Receiver<End> {
        self.log.topics.ends()
    }

    fn is_healthy(&self) -> bool {
        self.log.link.answers() && self.log.reads.load(Ordering::Relaxed)
    }
}

/// What the parts of a log share.
struct RedisLog {
    link: Link,
    names: Names,
    topics: Topics,
    /// Whether the last read worked.
    reads: AtomicBool,
}

#[async_trait]
impl Log for RedisLog {
    fn join(&self, run: RunId) -> Option<Receiver<Live>> {
        self.topics.join(run)
    }

    fn open(&self, run: RunId, after: EventId) -> Option<Receiver<Live>> {
        self.topics.open(run, after)
    }

    async fn replay(&self, run: RunId, from: EventId) -> Option<Vec<Arc<Event>>> {
        let mut command = redis::cmd("XRANGE");
        command.arg(self.names.run(run)).arg(from.to_string()).arg("+");
        let entries: RedisResult<Vec<Entry>> = self.link.ask(Ask::Command(&command)).await;
        let entries = entries.inspect_err(|error| debug!("Could not replay run {run}: {error}")).ok()?;
        Some(entries.iter().filter_map(wire::decode).map(Arc::new).collect())
    }
}

/// Writes what comes, many publications in one round trip.
async fn publish(log: Arc<RedisLog>, mut received: mpsc::Receiver<Publication>) {
    let mut batch = Vec::with_capacity(BATCH);
    while received.recv_many(&mut batch, BATCH).await > 0 {
        let events: usize = batch.iter().map(|(_, events)| events.len()).sum();
        let was_healthy = log.link.answers();
        let written: RedisResult<Vec<RedisResult<()>>> = log.link.ask(Ask::Pipeline(&writing(&log, &batch))).await;
        let lost = match written {
            Ok(answers) => answers.into_iter().filter_map(Result::err).filter(|error| !is_repeat(error)).count(),
            Err(error) => {
                if was_healthy {
                    warn!("Lost events of runs, will go on without them: {error}");
                }
                events
            }
        };
        metrics::counter!("threadgate_events_lost_total").increment(lost as u64);
        batch.clear();
    }
}

fn writing(log: &RedisLog, batch: &[Publication]) -> redis::Pipeline {
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors();
    for (run, events) in batch {
        let key = log.names.run(*run);
        for event in events {
            let body = wire::encode(event);
            // So few of the biggest that they stay under the limit of bytes together.
            let keep = EVENTS_MAX.min(BYTES_MAX / body.len().max(1)).max(1);
            pipeline.cmd("XADD").arg(&key).arg("MAXLEN").arg(keep).arg(event.id.to_string());
            pipeline.arg(wire::FIELD).arg(body);
        }
        let end = events.iter().find_map(|event| event.body.end());
        let ttl = if end.is_some() { ENDED_TTL } else { TTL };
        pipeline.cmd("PEXPIRE").arg(&key).arg(millis(ttl)).ignore();
        if let Some(status) = end {
            // Behind the run's own events: whoever follows those has heard all of them by then.
            pipeline.cmd("XADD").arg(log.names.ends()).arg("MAXLEN").arg("~").arg(ENDS_MAX).arg("*");
            pipeline.arg("end").arg(wire::encode_end(*run, status)).ignore();
            pipeline.cmd("PEXPIRE").arg(log.names.ends()).arg(millis(TTL)).ignore();
        }
    }
    pipeline
}

/// Redis says so of an id that is not above the newest.
fn is_repeat(error: &redis::RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("equal or smaller"))
}
