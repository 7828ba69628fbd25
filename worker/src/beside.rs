//! Taking work without the queue: while that is away, a worker asks the store about once a second
//! for what its free slots could run, and goes on by itself with the steps it has just made.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use threadgate_shared::domain::{PoolName, Tenant};
use threadgate_shared::queue::{Job, JobHandler};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::execute::Executor;
use crate::health::WorkerHealth;

/// How often the store is asked while the queue is away.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// The classes, in the order they are served.
const CLASSES: [i16; 2] = [0, 1];

/// Takes work beside the queue until the worker takes nothing more; then waits for what it took.
pub(crate) async fn take(executor: Arc<Executor>, mut own: mpsc::UnboundedReceiver<Job>, health: WorkerHealth) {
    let tracker = TaskTracker::new();
    let mut turns = Turns::default();
    let mut ticks = tokio::time::interval(ASK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut was_away = false;
    loop {
        tokio::select! {
            () = executor.taking.cancelled() => break,
            Some(job) = own.recv() => start(&executor, &tracker, job),
            _ = ticks.tick() => {
                let is_away = !executor.queue.is_healthy();
                if is_away != was_away {
                    info!("The queue is {}", if is_away { "away: taking work from the store" } else { "back" });
                    was_away = is_away;
                }
                if is_away {
                    ask(&executor, &tracker, &mut turns, &health).await;
                } else {
                    health.polled();
                }
            }
        }
    }
    tracker.close();
    tracker.wait().await;
}

fn start(executor: &Arc<Executor>, tracker: &TaskTracker, job: Job) {
    let executor = Arc::clone(executor);
    tracker.spawn(async move { executor.handle(job).await });
}

/// Fills the free slots from the store: interactive before batch, tenants in turn.
async fn ask(executor: &Arc<Executor>, tracker: &TaskTracker, turns: &mut Turns, health: &WorkerHealth) {
    let mut free = executor.slots.available_permits();
    for class in CLASSES {
        for pool in &executor.pools {
            if free == 0 {
                return;
            }
            let wanted = u32::try_from(free).unwrap_or(u32::MAX);
            let after = turns.after(pool, class);
            let picked = match executor.store.dispatch(pool, class, &after, wanted, 1, &[]).await {
                Ok(picked) => picked,
                Err(failure) => {
                    warn!(error = %failure, "Could not take work from the store; trying again");
                    return;
                }
            };
            health.polled();
            turns.served(pool, class, picked.last().map(|(_, tenant)| tenant), picked.len() < free);
            free -= picked.len().min(free);
            for (job, _) in picked {
                start(executor, tracker, job);
            }
        }
    }
}

/// Whose turn it is, by pool and class.
#[derive(Debug, Default)]
struct Turns(HashMap<(PoolName, i16), Tenant>);

impl Turns {
    fn after(&self, pool: &PoolName, class: i16) -> Tenant {
        self.0.get(&(pool.clone(), class)).cloned().unwrap_or_else(|| Tenant(String::new()))
    }

    /// Notes the last tenant served; after the last of all it is the first one's turn again.
    fn served(&mut self, pool: &PoolName, class: i16, last: Option<&Tenant>, was_last_of_all: bool) {
        let key = (pool.clone(), class);
        match last {
            Some(tenant) if !was_last_of_all => self.0.insert(key, tenant.clone()),
            _ => self.0.remove(&key),
        };
    }
}
