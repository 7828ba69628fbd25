//! What operators ask: pools, counts, reasons.

use std::sync::Arc;

use super::fixture::{World, manifest_in_pool, step_of};
use crate::domain::{PoolName, RunId, RunStatus, WorkerId};
use crate::store::{Store, WorkerRecord};

/// Pools say what waits, what runs and who serves.
pub async fn pools_say_what_waits_and_who_serves(store: Arc<dyn Store>) {
    let world = World::with(store, manifest_in_pool("second", "gpu")).await;
    world.create("waiting").await;
    let held = world.create("held").await.run.id;
    world.claim(step_of(held, 1)).await;
    let second = world.create("second").await.run.id;
    world.step(second, 1, "one").await;
    let worker = worker(&world, &["default", "idle"]);
    world.store.worker_seen(&worker).await.unwrap();
    world.store.worker_seen(&worker).await.unwrap();

    let mut pools = world.store.pools().await.unwrap();
    pools.sort_by(|a, b| a.pool.cmp(&b.pool));

    let seen: Vec<_> = pools.iter().map(|p| (p.pool.as_str(), p.runnable, p.running, p.workers, p.slots)).collect();
    assert_eq!(seen, [("default", 1, 1, 1, 8), ("gpu", 1, 0, 0, 0), ("idle", 0, 0, 1, 8)]);
    assert!(pools[0].oldest_wait_s >= 0.0);
    world.store.worker_gone(worker.id).await.unwrap();
    assert!(world.store.pools().await.unwrap().iter().all(|pool| pool.workers == 0));
}

/// C75: why a run does not move.
pub async fn a_run_says_why_it_waits(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let mut other = worker(&world, &["default"]);
    other.versions = vec!["c-other".into()];
    world.store.worker_seen(&other).await.unwrap();
    world.store.worker_seen(&worker(&world, &["elsewhere"])).await.unwrap();

    let waiting = world.store.why(run).await.unwrap().unwrap();
    world.store.worker_seen(&worker(&world, &["default"])).await.unwrap();
    world.claim(step_of(run, 1)).await;
    let held = world.store.why(run).await.unwrap().unwrap();

    assert_eq!((waiting.run.id, waiting.in_backlog, waiting.stop_requested), (run, true, false));
    assert_eq!((waiting.pool_workers, waiting.able_workers, waiting.ready_in_pool), (1, 0, 1));
    assert_eq!((waiting.step.unwrap().node.as_str(), waiting.due_at), ("first", None));
    assert_eq!((held.pool_workers, held.able_workers, held.in_backlog), (2, 1, false));
    assert!(held.due_at.unwrap() > held.now);
    assert_eq!(world.store.why(RunId::new()).await.unwrap(), None);
}

/// Runs are counted by status.
pub async fn runs_are_counted_by_status(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let done = world.create("a").await.run.id;
    world.finish(done).await;
    world.create("b").await;
    world.create("c").await;

    let mut counts = world.store.run_counts().await.unwrap();
    counts.retain(|(_, count)| *count > 0);
    counts.sort_by_key(|(status, _)| status.as_str());

    assert_eq!(counts, [(RunStatus::Completed, 1), (RunStatus::Queued, 2)]);
}

/// What is healthy is not mended, at any point of a run.
pub async fn a_repair_leaves_healthy_runs_alone(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let repair = async || world.store.repair(100).await.unwrap();
    assert_eq!(repair().await, 0);

    let claimed = world.claim(step_of(run, 1)).await;
    assert_eq!(repair().await, 0);
    world.store.give_back(&[(claimed.step, claimed.token)]).await.unwrap();
    assert_eq!(repair().await, 0);
    world.finish(run).await;

    assert_eq!(repair().await, 0);
    assert!(world.store.audit(&world.scope(), &"t".into()).await.unwrap().is_empty());
}

fn worker(world: &World, pools: &[&str]) -> WorkerRecord {
    WorkerRecord {
        id: WorkerId::new(),
        name: "w".to_owned(),
        pools: pools.iter().map(|pool| PoolName::from(*pool)).collect(),
        slots: 8,
        versions: world.versions(),
    }
}
