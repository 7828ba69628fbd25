//! Taking work without the queue: while that is away, a worker asks the store about once a second
//! for what its free slots could run, and goes on by itself with the steps it has just made.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use threadgate_shared::domain::{GraphVersion, PoolName, StepId, Tenant};
use threadgate_shared::queue::{Job, JobHandler};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::execute::Executor;
use crate::health::WorkerHealth;

/// How often the store is asked while the queue is away.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Questions to the backlog of one pool and class at a time; each asks for more steps of a tenant.
const ROUNDS_MAX: u32 = 8;

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
    own.close();
    let left: Vec<Job> = std::iter::from_fn(|| own.try_recv().ok()).collect();
    executor.dispatcher.send(&left).await;
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
            let mut each = 1;
            for _ in 0..ROUNDS_MAX {
                if free == 0 {
                    return;
                }
                let tenants = (u32::try_from(free).unwrap_or(u32::MAX) / each).max(1);
                let after = turns.after(pool, class);
                let picked = executor.store.dispatch(pool, class, &after, tenants, each, &turns.foreign).await;
                let picked = match picked {
                    Ok(picked) => picked,
                    Err(failure) => {
                        warn!(error = %failure, "Could not take work from the store; trying again");
                        return;
                    }
                };
                health.polled();
                let served: BTreeSet<&Tenant> = picked.iter().map(|(_, tenant)| tenant).collect();
                let count = u32::try_from(served.len()).unwrap_or(u32::MAX);
                turns.served(pool, class, served.last().copied(), count < tenants);
                if picked.is_empty() && after.as_str().is_empty() {
                    break;
                }
                let (ours, mut others): (Vec<Job>, Vec<Job>) =
                    picked.into_iter().map(|(job, _)| job).partition(|job| has_code_for(executor, job));
                let mut ours = ours.into_iter();
                for job in ours.by_ref().take(free) {
                    free -= 1;
                    start(executor, tracker, job);
                }
                others.extend(ours);
                put_back(executor, turns, &others).await;
                each = (u32::try_from(free).unwrap_or(u32::MAX) / count.max(1)).max(1);
            }
        }
    }
}

fn has_code_for(executor: &Executor, job: &Job) -> bool {
    job.lane.graph.as_ref().is_none_or(|version| executor.graphs.code_versions().contains(version))
}

/// Puts back steps for which there is no slot or no code here, and leaves the versions without code
/// out from now on: other workers find the steps at once.
async fn put_back(executor: &Executor, turns: &mut Turns, others: &[Job]) {
    if others.is_empty() {
        return;
    }
    let lacking = others.iter().filter(|job| !has_code_for(executor, job));
    turns.foreign.extend(lacking.filter_map(|job| job.lane.graph.clone()));
    turns.foreign.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
    turns.foreign.dedup();
    let steps: Vec<StepId> = others.iter().map(|job| job.step).collect();
    if let Err(failure) = executor.store.unsend(&steps).await {
        warn!(error = %failure, "Left {} steps for other workers to the scheduler", steps.len());
    }
}

/// Whose turn it is, by pool and class, and what this worker cannot run.
#[derive(Debug, Default)]
struct Turns {
    last: HashMap<(PoolName, i16), Tenant>,
    /// Code versions this worker lacks, as far as it has met them.
    foreign: Vec<GraphVersion>,
}

impl Turns {
    fn after(&self, pool: &PoolName, class: i16) -> Tenant {
        self.last.get(&(pool.clone(), class)).cloned().unwrap_or_else(|| Tenant(String::new()))
    }

    /// Notes the last tenant served; after the last of all it is the first one's turn again.
    fn served(&mut self, pool: &PoolName, class: i16, last: Option<&Tenant>, was_last_of_all: bool) {
        let key = (pool.clone(), class);
        match last {
            Some(tenant) if !was_last_of_all => self.last.insert(key, tenant.clone()),
            _ => self.last.remove(&key),
        };
    }
}
