//! The queue inside one process, for the embedded default and the simulation. It forgets everything
//! when the process ends: the scheduler sends again what the store still has.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::runtime::{self, Reader};
use super::turns::Turns;
use super::{Job, JobHandler, JobQueue, Lane, QueueError};
use crate::domain::{PoolName, StepId};

/// Jobs a queue holds at most; the store has the rest.
const CAPACITY: usize = 10_000;

/// How long a dispatcher may fill lanes before others do not wait for it any more.
const FILLING_TTL: Duration = Duration::from_secs(1);

/// Lanes of jobs in memory.
pub struct MemoryQueue {
    shared: Arc<Shared>,
    capacity: usize,
}

impl Default for MemoryQueue {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryQueue {
    /// An empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self::with_capacity(CAPACITY)
    }

    /// An empty queue that holds at most `capacity` jobs.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self { shared: Arc::default(), capacity }
    }
}

#[async_trait]
impl JobQueue for MemoryQueue {
    async fn push(&self, jobs: &[Job]) -> Result<(), QueueError> {
        let mut lanes = self.shared.lanes();
        for job in jobs {
            if lanes.present.contains(&(job.step, job.attempt)) {
                continue;
            }
            if lanes.present.len() >= self.capacity {
                let message = format!("the queue holds {} jobs already; they wait in the store", self.capacity);
                return Err(QueueError { doing: "add jobs to the queue", message });
            }
            lanes.present.insert((job.step, job.attempt));
            lanes.unread.entry(job.lane.clone()).or_default().push_back(job.clone());
        }
        drop(lanes);
        self.shared.added.notify_waiters();
        Ok(())
    }

    async fn unread(&self, lanes: &[Lane]) -> Result<Vec<usize>, QueueError> {
        let held = self.shared.lanes();
        Ok(lanes.iter().map(|lane| held.count(lane)).collect())
    }

    async fn begin_filling(
        &self,
        pool: &PoolName,
        class: i16,
        lanes: &[Lane],
    ) -> Result<Option<Vec<(Lane, usize)>>, QueueError> {
        let now = Instant::now();
        let mut held = self.shared.lanes();
        let right = held.filling.entry((pool.clone(), class)).or_insert(now);
        if *right > now {
            return Ok(None);
        }
        *right = now + FILLING_TTL;
        let others = held.unread.keys().filter(|lane| lane.pool == *pool && lane.class == class);
        let lanes: BTreeSet<Lane> = lanes.iter().chain(others).cloned().collect();
        Ok(Some(lanes.into_iter().map(|lane| (lane.clone(), held.count(&lane))).collect()))
    }

    async fn end_filling(&self, pool: &PoolName, class: i16) {
        self.shared.lanes().filling.remove(&(pool.clone(), class));
    }

    async fn work(
        &self,
        lanes: &[Lane],
        slots: usize,
        handler: Arc<dyn JobHandler>,
        shutdown: CancellationToken,
    ) -> Result<(), QueueError> {
        let shared = Arc::clone(&self.shared);
        let reader = MemoryReader { shared, lanes: lanes.to_vec(), turns: Turns::new(lanes) };
        runtime::run("in-process", reader, Arc::new(|()| {}), slots, handler, shutdown).await
    }

    fn is_healthy(&self) -> bool {
        true
    }

    async fn ping(&self) -> Result<(), QueueError> {
        Ok(())
    }
}

#[derive(Default)]
struct Shared {
    lanes: Mutex<Lanes>,
    added: Notify,
}

#[derive(Default)]
struct Lanes {
    unread: HashMap<Lane, VecDeque<Job>>,
    /// Those of `unread`.
    present: HashSet<(StepId, i16)>,
    /// Until when somebody has the right to fill the lanes of a pool and class.
    filling: HashMap<(PoolName, i16), Instant>,
}

impl Lanes {
    fn count(&self, lane: &Lane) -> usize {
        self.unread.get(lane).map_or(0, VecDeque::len)
    }
}

impl Shared {
    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        // Nothing panics while it holds the lock, and plain collections stay usable anyway.
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct MemoryReader {
    shared: Arc<Shared>,
    lanes: Vec<Lane>,
    turns: Turns,
}

impl MemoryReader {
    fn take(&mut self, max: usize) -> Vec<Job> {
        let mut held = self.shared.lanes();
        let mut taken = Vec::new();
        for (index, limit) in self.turns.plan(max) {
            let Some(unread) = held.unread.get_mut(&self.lanes[index]) else { continue };
            let count = limit.min(max - taken.len()).min(unread.len());
            let jobs: Vec<Job> = unread.drain(..count).collect();
            if unread.is_empty() {
                held.unread.remove(&self.lanes[index]);
            }
            jobs.iter().for_each(|job| {
                held.present.remove(&(job.step, job.attempt));
            });
            taken.extend(jobs);
            (0..count).for_each(|_| self.turns.took(index));
        }
        taken
    }
}

#[async_trait]
impl Reader for MemoryReader {
    type Receipt = ();

    async fn read(&mut self, max: usize, shutdown: &CancellationToken) -> Vec<(Job, ())> {
        let shared = Arc::clone(&self.shared);
        let added = shared.added.notified();
        tokio::pin!(added);
        // Listening begins before the look, so that no push falls in between.
        added.as_mut().enable();
        let taken = self.take(max);
        if taken.is_empty() {
            shutdown.run_until_cancelled(added).await;
        }
        taken.into_iter().map(|job| (job, ())).collect()
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;
    use crate::queue::contract::{jobs, lane};

    async fn fresh() -> (Arc<dyn JobQueue>, ()) {
        (Arc::new(MemoryQueue::new()), ())
    }

    crate::queue_contract!(fresh);

    #[tokio::test]
    async fn a_full_queue_refuses_and_says_where_the_jobs_are() {
        let queue = MemoryQueue::with_capacity(2);

        let refused = queue.push(&jobs(&lane(0), 3)).await.expect_err("full");

        assert_eq!(
            refused.to_string(),
            "could not add jobs to the queue: the queue holds 2 jobs already; they wait in the store"
        );
        assert_eq!(queue.unread(&[lane(0)]).await.expect("counted"), [2]);
    }
}
