//! A queue that keeps no promise: it loses jobs, hands them out twice, is flushed and goes away. What
//! a dead consumer held is forgotten, as it is for a stream that nobody claims from.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use threadgate_shared::queue::{Job, JobHandler, JobQueue, Lane, QueueError};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Of a hundred jobs so many get lost, and as many come twice.
const MISHAPS_PERCENT: u32 = 3;

/// The queue all processes share.
pub struct FickleQueue {
    held: Mutex<Held>,
    added: Notify,
}

struct Held {
    unread: VecDeque<Job>,
    /// Every job there ever was.
    sent: Vec<Job>,
    drawn: StdRng,
    is_away: bool,
    is_calm: bool,
}

impl FickleQueue {
    pub fn new(seed: u64) -> Self {
        let drawn = StdRng::seed_from_u64(seed);
        let held = Held { unread: VecDeque::new(), sent: Vec::new(), drawn, is_away: false, is_calm: false };
        Self { held: Mutex::new(held), added: Notify::new() }
    }

    /// FLUSHALL.
    pub fn flush(&self) {
        self.held().unread.clear();
    }

    /// Every job there ever was comes again.
    pub fn redeliver(&self) {
        let mut held = self.held();
        let sent = held.sent.clone();
        held.unread.extend(sent);
        drop(held);
        self.added.notify_waiters();
    }

    pub fn set_away(&self, away: bool) {
        self.held().is_away = away;
        self.added.notify_waiters();
    }

    /// No mishaps any more.
    pub fn calm(&self) {
        self.held().is_calm = true;
        self.set_away(false);
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap()
    }

    async fn next(&self, lanes: &[Lane]) -> Job {
        loop {
            let added = self.added.notified();
            tokio::pin!(added);
            added.as_mut().enable();
            {
                let mut held = self.held();
                let position = held.unread.iter().position(|job| lanes.contains(&job.lane));
                if let Some(job) = position.filter(|_| !held.is_away).and_then(|position| held.unread.remove(position))
                {
                    return job;
                }
            }
            added.await;
        }
    }
}

#[async_trait]
impl JobQueue for FickleQueue {
    async fn push(&self, jobs: &[Job]) -> Result<(), QueueError> {
        let mut held = self.held();
        if held.is_away {
            return Err(QueueError { doing: "add jobs to the queue", message: "it is away".to_owned() });
        }
        for job in jobs.iter().filter(|job| !job.lane.pool.as_str().is_empty()) {
            held.sent.push(job.clone());
            let luck = if held.is_calm { 100 } else { held.drawn.random_range(0..100) };
            if luck >= MISHAPS_PERCENT {
                held.unread.push_back(job.clone());
            }
            if (MISHAPS_PERCENT..2 * MISHAPS_PERCENT).contains(&luck) {
                held.unread.push_back(job.clone());
            }
        }
        drop(held);
        self.added.notify_waiters();
        Ok(())
    }

    async fn unread(&self, lanes: &[Lane]) -> Result<Vec<usize>, QueueError> {
        let held = self.held();
        Ok(lanes.iter().map(|lane| held.unread.iter().filter(|job| job.lane == *lane).count()).collect())
    }

    async fn work(
        &self,
        lanes: &[Lane],
        slots: usize,
        handler: Arc<dyn JobHandler>,
        shutdown: CancellationToken,
    ) -> Result<(), QueueError> {
        // Dropping this future ends the handlers where they are, as the death of their process does.
        let mut handlers = JoinSet::new();
        let free = Arc::new(Semaphore::new(slots));
        let taking = async {
            loop {
                let slot = Arc::clone(&free).acquire_owned().await.unwrap();
                let job = self.next(lanes).await;
                let handler = Arc::clone(&handler);
                handlers.spawn(async move {
                    handler.handle(job).await;
                    drop(slot);
                });
            }
        };
        shutdown.run_until_cancelled(taking).await;
        handlers.join_all().await;
        Ok(())
    }

    fn is_healthy(&self) -> bool {
        !self.held().is_away
    }

    async fn ping(&self) -> Result<(), QueueError> {
        Ok(())
    }
}
