//! The only path into the queue: sends the steps that follow committed ones at once, and lets new
//! runs in while the window has room. The backlog stays in the store, where it is fair and exact; a
//! lane holds no more unread jobs than its pool has slots.

#[cfg(all(test, feature = "testing"))]
mod tests;
mod window;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use self::window::{Picked, Share, Window};
use crate::domain::{GraphVersion, PoolName, StepId, Tenant};
use crate::queue::{Job, JobQueue, Lane, QueueError};
use crate::store::{Store, StoreError};

/// Unread jobs a lane may hold where fewer slots are known.
const WINDOW_MIN: usize = 16;

/// How long the slots of pools are believed.
const SLOTS_TTL: Duration = Duration::from_secs(5);

/// Questions to the backlog in one round at most; the next nudge goes on.
const PICKS_MAX: usize = 16;

/// How long lanes that are known to be full keep a round from looking for others.
const FULL_TTL: Duration = Duration::from_millis(500);

/// How long a round waits for another process's round to end, and how often it looks.
const FILLING_PATIENCE: Duration = Duration::from_secs(1);
const FILLING_LOOK: Duration = Duration::from_millis(2);

/// Sends steps to the queue.
pub struct Dispatcher {
    store: Arc<dyn Store>,
    queue: Arc<dyn JobQueue>,
    backlogs: Mutex<HashMap<(PoolName, i16), Arc<Backlog>>>,
    slots: tokio::sync::Mutex<Slots>,
}

/// The backlog of a pool and class, as far as this process knows it.
struct Backlog {
    pool: PoolName,
    class: i16,
    /// One round at a time: two would count the same room twice.
    turn: tokio::sync::Mutex<Turn>,
    nudges: Mutex<Nudges>,
}

/// Where the next round goes on.
#[derive(Default)]
struct Turn {
    /// The tenant served last; empty to begin again.
    after: String,
    /// Lanes whose steps were seen here: of all declarative graphs (none), or of one code version.
    lanes: BTreeSet<Option<GraphVersion>>,
    /// When the backlog was last asked.
    asked_at: Option<Instant>,
}

/// Whether somebody asked for a round, and whether a task is at it.
#[derive(Default)]
struct Nudges {
    wanted: bool,
    running: bool,
}

#[derive(Default)]
struct Slots {
    by_pool: HashMap<PoolName, usize>,
    read_at: Option<Instant>,
}

impl Dispatcher {
    /// A dispatcher over `store` and `queue`.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, queue: Arc<dyn JobQueue>) -> Arc<Self> {
        Arc::new(Self { store, queue, backlogs: Mutex::default(), slots: tokio::sync::Mutex::default() })
    }

    /// Sends jobs whose steps are marked as being sent; those of a queue that cannot be reached go
    /// back into the backlog, where workers find them. Best effort: the scheduler finds a miss.
    pub async fn send(&self, jobs: &[Job]) {
        if jobs.is_empty() {
            return;
        }
        let was_healthy = self.queue.is_healthy();
        let sent = self.queue.push(jobs).await;
        let outcome = if sent.is_ok() { "sent" } else { "lost" };
        metrics::counter!("threadgate_jobs_total", "outcome" => outcome).increment(jobs.len() as u64);
        match sent {
            Ok(()) => return,
            Err(error) if was_healthy => warn!("Left {} jobs in the backlog: {error}", jobs.len()),
            Err(error) => debug!("Left {} jobs in the backlog: {error}", jobs.len()),
        }
        let steps: Vec<StepId> = jobs.iter().map(|job| job.step).collect();
        if let Err(error) = self.store.unsend(&steps).await {
            debug!("Left {} jobs to the scheduler: {error}", jobs.len());
        }
    }

    /// Says that a pool has new backlog or a free place: tops the window up soon, in the background;
    /// many nudges become one round, and one during a round causes another.
    pub fn nudge(self: &Arc<Self>, pool: &PoolName, class: i16) {
        let backlog = self.backlog(pool, class);
        if !backlog.want_round() {
            return;
        }
        let dispatcher = Arc::clone(self);
        tokio::spawn(async move {
            let _recovery = Recovery(&backlog);
            while backlog.take_nudge() {
                if let Err(error) = dispatcher.round(&backlog).await {
                    warn!("Left the backlog of pool {} to the scheduler: {error}", backlog.pool);
                }
            }
        });
    }

    /// Fills the window of a pool and class from the backlog, tenants in turn; how many were sent.
    ///
    /// # Errors
    /// [`StoreError`] if the store cannot be asked; a queue that cannot be reached sends nothing.
    pub async fn top_up(&self, pool: &PoolName, class: i16) -> Result<usize, StoreError> {
        self.round(&self.backlog(pool, class)).await
    }

    async fn round(&self, backlog: &Backlog) -> Result<usize, StoreError> {
        let mut turn = backlog.turn.lock().await;
        let size = self.slots(&backlog.pool).await?.max(WINDOW_MIN);
        let lanes = turn.lanes_of(backlog);
        let unread = match self.begin_filling(backlog, &lanes).await {
            Ok(Some(unread)) => unread,
            Ok(None) => return Ok(0),
            Err(error) => {
                debug!("Left the backlog of pool {} where it is: {error}", backlog.pool);
                return Ok(0);
            }
        };
        let window = Window::new(size, unread.into_iter().map(|(lane, count)| (lane.graph, count)));
        let sent = self.fill(backlog, &mut turn, window).await;
        self.queue.end_filling(&backlog.pool, backlog.class).await;
        sent
    }

    /// The unread jobs of all lanes, with the right to add some; waits for others who have it.
    async fn begin_filling(&self, backlog: &Backlog, lanes: &[Lane]) -> Result<Option<Vec<(Lane, usize)>>, QueueError> {
        let begin = Instant::now();
        loop {
            let unread = self.queue.begin_filling(&backlog.pool, backlog.class, lanes).await?;
            if unread.is_some() || begin.elapsed() >= FILLING_PATIENCE {
                return Ok(unread);
            }
            tokio::time::sleep(FILLING_LOOK).await;
        }
    }

    async fn fill(&self, backlog: &Backlog, turn: &mut Turn, mut window: Window) -> Result<usize, StoreError> {
        let knows_all = turn.asked_at.is_some_and(|asked_at| asked_at.elapsed() < FULL_TTL);
        if !window.is_low(knows_all.then_some(&turn.lanes)) {
            return Ok(0);
        }
        turn.asked_at = Some(Instant::now());
        let mut sent = 0;
        let mut share = Share::first(window.room());
        for _ in 0..PICKS_MAX {
            let from_start = turn.after.is_empty();
            let (jobs, picked) = self.pick(backlog, turn, share, &window.full()).await?;
            turn.after = picked.next_after(share);
            turn.lanes.extend(jobs.iter().map(|job| job.lane.graph.clone()));
            window.add(&jobs);
            sent += jobs.len();
            self.send(&jobs).await;
            if window.room() == 0 || (from_start && picked.is_all(share)) {
                break;
            }
            share = share.next(window.room(), &picked, from_start);
        }
        Ok(sent)
    }

    async fn pick(
        &self,
        backlog: &Backlog,
        turn: &Turn,
        share: Share,
        full: &[GraphVersion],
    ) -> Result<(Vec<Job>, Picked), StoreError> {
        let (pool, class, after) = (&backlog.pool, backlog.class, Tenant(turn.after.clone()));
        let rows = self.store.dispatch(pool, class, &after, share.tenants(), share.each(), full).await?;
        let picked = Picked::new(rows.iter().map(|(_, tenant)| tenant.as_str()));
        Ok((rows.into_iter().map(|(job, _)| job).collect(), picked))
    }

    /// The slots of a pool's live workers, at most [`SLOTS_TTL`] old.
    async fn slots(&self, pool: &PoolName) -> Result<usize, StoreError> {
        let mut slots = self.slots.lock().await;
        if slots.read_at.is_none_or(|read_at| read_at.elapsed() >= SLOTS_TTL) {
            let pools = self.store.pools().await?;
            let number = |slots: i64| usize::try_from(slots).unwrap_or_default();
            slots.by_pool = pools.into_iter().map(|record| (record.pool, number(record.slots))).collect();
            slots.read_at = Some(Instant::now());
        }
        Ok(slots.by_pool.get(pool).copied().unwrap_or_default())
    }

    fn backlog(&self, pool: &PoolName, class: i16) -> Arc<Backlog> {
        let mut backlogs = lock(&self.backlogs);
        let new = || {
            let (turn, nudges) = (tokio::sync::Mutex::default(), Mutex::default());
            Arc::new(Backlog { pool: pool.clone(), class, turn, nudges })
        };
        Arc::clone(backlogs.entry((pool.clone(), class)).or_insert_with(new))
    }
}

impl Backlog {
    /// Notes a nudge; whether somebody must be found to follow it.
    fn want_round(&self) -> bool {
        let mut nudges = lock(&self.nudges);
        nudges.wanted = true;
        !std::mem::replace(&mut nudges.running, true)
    }

    /// Whether there is a nudge to follow; if not, the task is at rest.
    fn take_nudge(&self) -> bool {
        let mut nudges = lock(&self.nudges);
        nudges.running = nudges.wanted;
        std::mem::take(&mut nudges.wanted)
    }
}

impl Turn {
    fn lanes_of(&self, backlog: &Backlog) -> Vec<Lane> {
        let mut versions = self.lanes.clone();
        versions.insert(None);
        let lane = |graph| Lane { pool: backlog.pool.clone(), class: backlog.class, graph };
        versions.into_iter().map(lane).collect()
    }
}

/// After a panic in a round the next nudge must find somebody again.
struct Recovery<'a>(&'a Backlog);

impl Drop for Recovery<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lock(&self.0.nudges).running = false;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
