//! The jobs in a worker's hands: acknowledged in groups when they are done, and kept from others
//! while they are not.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::Pipeline;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tracing::{debug, warn};

use super::Shared;
use super::names::GROUP;
use crate::link::Ask;

/// Acknowledgements in one round trip at most.
const ACK_BATCH: usize = 64;

/// How often an acknowledgement is tried; what stays is found by the reclaimer.
const ACK_TRIES: u32 = 5;

/// A job as Redis knows it.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    /// The lane's place among the worker's.
    pub(super) lane: usize,
    /// The stream's entry.
    pub(super) id: String,
    /// The key that notes that the job is there.
    pub(super) note: String,
}

/// What one worker holds.
pub(super) struct Held {
    /// The worker's lanes, as keys.
    pub(super) lanes: Vec<String>,
    /// The worker's name in the groups.
    pub(super) consumer: String,
    entries: Mutex<HashMap<Arc<Entry>, Instant>>,
}

impl Held {
    pub(super) fn new(lanes: Vec<String>, consumer: String) -> Self {
        Self { lanes, consumer, entries: Mutex::default() }
    }

    /// Notes a job that was read; false if the worker has it already.
    pub(super) fn add(&self, entry: &Arc<Entry>) -> bool {
        self.entries().insert(Arc::clone(entry), Instant::now()).is_none()
    }

    pub(super) fn remove<'a>(&self, done: impl IntoIterator<Item = &'a Arc<Entry>>) {
        let mut entries = self.entries();
        for entry in done {
            entries.remove(entry);
        }
    }

    fn older_than(&self, age: Duration) -> Vec<Arc<Entry>> {
        let entries = self.entries();
        entries.iter().filter(|(_, since)| since.elapsed() >= age).map(|(entry, _)| Arc::clone(entry)).collect()
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Arc<Entry>, Instant>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long a finished job waits for others to be acknowledged with it: nobody waits for that.
const ACK_LINGER: Duration = Duration::from_millis(20);

/// Acknowledges what `done` says, in groups, until it is closed.
pub(super) async fn acknowledge(shared: Arc<Shared>, held: Arc<Held>, mut done: mpsc::UnboundedReceiver<Arc<Entry>>) {
    let mut batch = Vec::with_capacity(ACK_BATCH);
    while done.recv_many(&mut batch, ACK_BATCH).await > 0 {
        let until = Instant::now() + ACK_LINGER;
        while batch.len() < ACK_BATCH
            && let Ok(1..) = timeout_at(until, done.recv_many(&mut batch, ACK_BATCH)).await
        {}
        if let Err(error) = acknowledge_batch(&shared, &held, &batch).await {
            // They stay pending until somebody finds them; the store refuses to run them again.
            warn!("Could not acknowledge {} finished jobs: {error}", batch.len());
        }
        held.remove(&batch);
        batch.clear();
    }
}

async fn acknowledge_batch(shared: &Shared, held: &Held, batch: &[Arc<Entry>]) -> redis::RedisResult<()> {
    let pipeline = removal(held, batch);
    let mut pause = Duration::from_millis(50);
    for _ in 1..ACK_TRIES {
        match shared.link.ask::<()>(Ask::Pipeline(&pipeline)).await {
            Ok(()) => return Ok(()),
            Err(error) => debug!("Will acknowledge {} finished jobs again: {error}", batch.len()),
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
    shared.link.ask(Ask::Pipeline(&pipeline)).await
}

/// Takes entries out of their lanes, with the notes that they are there.
pub(super) fn removal(held: &Held, batch: &[Arc<Entry>]) -> Pipeline {
    let mut pipeline = redis::pipe();
    for (lane, key) in held.lanes.iter().enumerate() {
        let ids = ids_in(lane, batch);
        if !ids.is_empty() {
            pipeline.cmd("XACK").arg(key).arg(GROUP).arg(&ids).ignore();
            pipeline.cmd("XDEL").arg(key).arg(&ids).ignore();
        }
    }
    pipeline.cmd("UNLINK");
    batch.iter().for_each(|entry| {
        pipeline.arg(&entry.note);
    });
    pipeline.ignore();
    pipeline
}

/// Tells Redis every third of `silence_max` that jobs in hand are not abandoned. A task of its own,
/// for it must not wait for anything the worker does.
pub(super) async fn touch(shared: Arc<Shared>, held: Arc<Held>, silence_max: Duration) {
    let every = silence_max / 3;
    loop {
        tokio::time::sleep(every).await;
        let entries = held.older_than(every / 2);
        if entries.is_empty() {
            continue;
        }
        let mut pipeline = redis::pipe();
        for (lane, key) in held.lanes.iter().enumerate() {
            let ids = ids_in(lane, &entries);
            if !ids.is_empty() {
                pipeline.cmd("XCLAIM").arg(key).arg(GROUP).arg(&held.consumer).arg(0).arg(ids).arg("JUSTID").ignore();
            }
        }
        // A group that is gone (NOGROUP) has nothing to take away from us either.
        if let Err(error) = shared.link.ask::<()>(Ask::Pipeline(&pipeline)).await {
            debug!("Could not keep {} jobs in hand from others: {error}", entries.len());
        }
    }
}

fn ids_in(lane: usize, entries: &[Arc<Entry>]) -> Vec<&str> {
    entries.iter().filter(|entry| entry.lane == lane).map(|entry| entry.id.as_str()).collect()
}
