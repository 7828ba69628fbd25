//! The one reader of a process: waits for the events of all runs that somebody follows, in one
//! command on a connection of its own, and hands them to the followers. Without followers it waits
//! for one and asks Redis nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisResult};
use tokio::sync::Notify;
use tokio::sync::broadcast::{self, Receiver, Sender};
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::super::follow::Live;
use super::super::limits::{CHANNEL, ENDS_MAX};
use super::super::{End, EventId};
use super::RedisLog;
use super::wire::{self, Entry};
use crate::domain::RunId;
use crate::link::{ANSWER_TIMEOUT, Ask, millis};

/// How long one read waits for the next event.
const BLOCK: Duration = Duration::from_secs(5);

/// Events of one run in one answer; no more than a follower's channel holds.
const COUNT: usize = CHANNEL / 2;

/// The longest pause between two tries to connect; each failed one is a gap to the followers.
const RECONNECT_MAX: Duration = Duration::from_secs(2);

/// Streams as keys with their entries; nothing after a wait in vain.
type Streams = Option<Vec<(String, Vec<Entry>)>>;

/// The runs that somebody in this process follows.
pub(super) struct Topics {
    topics: Mutex<HashMap<RunId, Topic>>,
    ends: Sender<End>,
    opened: Notify,
    /// Whether the reader may be waiting for Redis with an older list of runs.
    is_waiting: AtomicBool,
    must_ring: Notify,
}

struct Topic {
    live: Sender<Live>,
    /// The newest event handed on.
    last: EventId,
    /// Its stream was there and is gone, and the followers know.
    is_lost: bool,
}

impl Default for Topics {
    fn default() -> Self {
        Self {
            topics: Mutex::default(),
            ends: Sender::new(ENDS_MAX),
            opened: Notify::new(),
            is_waiting: AtomicBool::new(false),
            must_ring: Notify::new(),
        }
    }
}

impl Topics {
    /// A reader that reads anything reads the ends too, from where it was: none is missed.
    pub(super) fn ends(&self) -> Receiver<End> {
        let receiver = self.ends.subscribe();
        self.opened.notify_one();
        receiver
    }

    pub(super) fn join(&self, run: RunId) -> Option<Receiver<Live>> {
        self.topics().get(&run).map(|topic| topic.live.subscribe())
    }

    pub(super) fn open(&self, run: RunId, after: EventId) -> Option<Receiver<Live>> {
        let mut topics = self.topics();
        if topics.contains_key(&run) {
            return None;
        }
        let (live, receiver) = broadcast::channel(CHANNEL);
        topics.insert(run, Topic { live, last: after, is_lost: false });
        drop(topics);
        self.opened.notify_one();
        if self.is_waiting.load(Ordering::SeqCst) {
            self.must_ring.notify_one();
        }
        Some(receiver)
    }

    /// The runs that somebody still follows, with where each is; forgets the others.
    fn followed(&self) -> Vec<(RunId, EventId)> {
        let mut topics = self.topics();
        topics.retain(|_, topic| topic.live.receiver_count() > 0);
        topics.iter().map(|(run, topic)| (*run, topic.last)).collect()
    }

    fn hand_on(&self, run: RunId, entries: &[Entry]) {
        let mut topics = self.topics();
        let Some(topic) = topics.get_mut(&run) else { return };
        // Also behind what cannot be decoded, or it would be read for ever.
        topic.last = entries.last().and_then(|(id, _)| id.parse().ok()).unwrap_or(topic.last);
        topic.is_lost = false;
        for event in entries.iter().filter_map(wire::decode).map(Arc::new) {
            // Fails when the last follower has just left.
            let _ = topic.live.send(Live::Event(event));
        }
    }

    fn tell_ends(&self, entries: &[Entry]) {
        for end in entries.iter().filter_map(wire::decode_end) {
            // Fails when nobody waits.
            let _ = self.ends.send(end);
        }
    }

    /// Something may have been missed.
    fn tell_all(&self) {
        for topic in self.topics().values() {
            let _ = topic.live.send(Live::Broken);
        }
    }

    /// The streams of these runs are gone.
    fn tell_lost(&self, runs: impl Iterator<Item = RunId>) {
        let mut topics = self.topics();
        for run in runs {
            if let Some(topic) = topics.get_mut(&run).filter(|topic| !topic.is_lost) {
                topic.is_lost = true;
                let _ = topic.live.send(Live::Broken);
            }
        }
    }

    fn topics(&self) -> MutexGuard<'_, HashMap<RunId, Topic>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads for as long as the process follows anything.
pub(super) async fn read(log: Arc<RedisLog>) {
    let mut connection = None;
    let mut pause = Duration::from_millis(50);
    let mut read = Read { bell: "0-0".to_owned(), ends: "0-0".to_owned() };
    loop {
        // Until here is told that it may be waiting, whoever opens a run must ring.
        log.topics.is_waiting.store(true, Ordering::SeqCst);
        let runs = log.topics.followed();
        if runs.is_empty() && log.topics.ends.receiver_count() == 0 {
            log.topics.is_waiting.store(false, Ordering::SeqCst);
            log.topics.opened.notified().await;
            continue;
        }
        let answer = turn(&log, &mut connection, &runs, &mut read).await;
        log.topics.is_waiting.store(false, Ordering::SeqCst);
        let was_healthy = log.reads.swap(answer.is_ok(), Ordering::Relaxed);
        match answer {
            Ok(()) => {
                if !was_healthy {
                    info!("The event log is back");
                    log.topics.tell_all();
                }
                pause = Duration::from_millis(50);
            }
            Err(error) => {
                if was_healthy {
                    warn!("Lost the event log, will try again: {error}");
                }
                connection = None;
                log.topics.tell_all();
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RECONNECT_MAX);
            }
        }
    }
}

/// The last entries that were read of the streams that are not a run's.
struct Read {
    bell: String,
    ends: String,
}

/// One read of all followed runs; rings for whoever opens one meanwhile.
async fn turn(
    log: &RedisLog,
    connection: &mut Option<MultiplexedConnection>,
    runs: &[(RunId, EventId)],
    last: &mut Read,
) -> RedisResult<()> {
    let redis = match connection {
        Some(redis) => redis,
        None => connection.insert(log.link.blocking().await?),
    };
    let mut command = redis::cmd("XREAD");
    command
        .arg("COUNT")
        .arg(COUNT)
        .arg("BLOCK")
        .arg(millis(BLOCK))
        .arg("STREAMS")
        .arg(log.names.bell())
        .arg(log.names.ends());
    runs.iter().for_each(|(run, _)| {
        command.arg(log.names.run(*run));
    });
    command.arg(&last.bell).arg(&last.ends);
    runs.iter().for_each(|(_, newest)| {
        command.arg(newest.to_string());
    });
    let read = timeout(BLOCK + ANSWER_TIMEOUT, command.query_async(redis));
    tokio::pin!(read);
    let answer: RedisResult<Streams> = loop {
        tokio::select! {
            answer = &mut read => break answer.unwrap_or_else(|_| Err((ErrorKind::Io, "Redis did not answer in time").into())),
            () = log.topics.must_ring.notified() => ring(log).await,
        }
    };
    let Some(streams) = answer? else { return look_for_lost(log, runs).await };
    let mut ends = Vec::new();
    for (key, entries) in streams {
        if key == log.names.bell() {
            entries.into_iter().last().into_iter().for_each(|(id, _)| last.bell = id);
        } else if key == log.names.ends() {
            entries.last().into_iter().for_each(|(id, _)| last.ends.clone_from(id));
            ends = entries;
        } else if let Some(run) = log.names.run_of(&key) {
            log.topics.hand_on(run, &entries);
        }
    }
    log.topics.tell_ends(&ends); // Last, so that an end comes behind the events before it.
    Ok(())
}

/// Makes the waiting read return, so that it takes the new run along.
async fn ring(log: &RedisLog) {
    let mut pipeline = redis::pipe();
    pipeline.cmd("XADD").arg(log.names.bell()).arg("MAXLEN").arg(1).arg("*").arg("ring").arg(1).ignore();
    pipeline.cmd("EXPIRE").arg(log.names.bell()).arg(60).ignore();
    if let Err(error) = log.link.ask::<()>(Ask::Pipeline(&pipeline)).await {
        debug!("Could not wake the event log's reader: {error}");
    }
}

/// After a silence: a stream that had events and has vanished was flushed or has run out of time,
/// and nobody would ever hear its end.
async fn look_for_lost(log: &RedisLog, runs: &[(RunId, EventId)]) -> RedisResult<()> {
    let begun: Vec<RunId> = runs.iter().filter(|(_, last)| *last != EventId::ZERO).map(|(run, _)| *run).collect();
    if begun.is_empty() {
        return Ok(());
    }
    let mut pipeline = redis::pipe();
    for run in &begun {
        pipeline.cmd("EXISTS").arg(log.names.run(*run));
    }
    let there: Vec<bool> = log.link.ask(Ask::Pipeline(&pipeline)).await?;
    log.topics.tell_lost(begun.into_iter().zip(there).filter(|(_, there)| !there).map(|(run, _)| run));
    Ok(())
}
