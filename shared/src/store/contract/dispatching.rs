//! Dispatch: the backlog goes out fairly, each step once.

use std::collections::HashSet;
use std::sync::Arc;

use super::fixture::{World, manifest_in_pool, step_of};
use crate::domain::{PoolName, StepId, Tenant};
use crate::store::Store;

/// Tenants take turns; a long backlog of one does not delay the other.
pub async fn tenants_take_turns(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (a, b) = (world.as_caller("a", "u"), world.as_caller("b", "u"));
    let mut of_a = Vec::new();
    for n in 0..3 {
        of_a.push(step_of(a.create(&format!("t{n}")).await.run.id, 1));
    }
    let of_b = step_of(b.create("t").await.run.id, 1);

    let first = dispatch(&world, "", 2, 1).await;
    let second = dispatch(&world, "", 2, 1).await;
    let rest = dispatch(&world, "", 2, 10).await;

    assert_eq!(first, [("a".to_owned(), of_a[0]), ("b".to_owned(), of_b)]);
    assert_eq!(second, [("a".to_owned(), of_a[1])]);
    assert_eq!(rest, [("a".to_owned(), of_a[2])]);
    assert!(dispatch(&world, "", 2, 10).await.is_empty());
}

/// The round goes on behind the tenant it ended with.
pub async fn a_round_goes_on_after_its_last_tenant(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for tenant in ["a", "b", "c"] {
        world.as_caller(tenant, "u").create("t").await;
    }

    let tenants = async |after: &str| {
        let picked = dispatch(&world, after, 1, 1).await;
        picked.into_iter().map(|(tenant, _)| tenant).collect::<Vec<_>>()
    };

    assert_eq!(tenants("a").await, ["b"]);
    assert_eq!(tenants("b").await, ["c"]);
    assert!(tenants("c").await.is_empty());
    assert_eq!(tenants("").await, ["a"]);
}

/// A job says where it goes.
pub async fn a_job_carries_its_lane(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;

    let picked = world.store.dispatch(&PoolName::default_pool(), 0, &"".into(), 1, 1, &[]).await.unwrap();

    let (job, tenant) = &picked[0];
    assert_eq!((job.step, job.attempt), (step_of(run, 1), 0));
    assert_eq!((job.lane.pool.as_str(), job.lane.class), ("default", 0));
    assert_eq!((job.lane.graph.as_ref(), tenant), (Some(&world.graph.version), &world.caller.tenant));
    assert!(!world.store.why(run).await.unwrap().unwrap().in_backlog);
    assert_eq!(world.claim(job.step).await.attempt, 1);
}

/// Pools and classes are apart, and say what waits in them.
pub async fn each_pool_and_class_has_its_own_backlog(store: Arc<dyn Store>) {
    let world = World::with(store, manifest_in_pool("first", "gpu")).await;
    let mut batch = world.new_run("b");
    batch.class = 1;
    let batch = world.try_create(batch, super::fixture::hello()).await.unwrap();
    let interactive = world.create("i").await;
    let gpu = PoolName::from("gpu");

    assert_eq!((batch.lane, interactive.lane), (Some((gpu.clone(), 1)), Some((gpu.clone(), 0))));
    let mut lanes = world.store.backlog_lanes().await.unwrap();
    lanes.sort();
    assert_eq!(lanes, [(gpu.clone(), 0), (gpu.clone(), 1)]);
    assert!(dispatch(&world, "", 9, 9).await.is_empty());
    let picked = world.store.dispatch(&gpu, 1, &"".into(), 9, 9, &[]).await.unwrap();
    assert_eq!(picked.iter().map(|(job, _)| job.step).collect::<Vec<_>>(), [step_of(batch.run.id, 1)]);
    assert_eq!(picked[0].0.lane.class, 1);
    assert_eq!(world.store.backlog_lanes().await.unwrap(), [(gpu, 0)]);
}

/// Steps of a version whose stream is full stay where they are.
pub async fn a_full_version_does_not_take_the_places_of_others(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut renamed = super::fixture::manifest();
    renamed.name = "other".to_owned();
    let other = World::with(Arc::clone(&world.store), renamed).await;
    world.create("a").await;
    let free = step_of(other.create("b").await.run.id, 1);

    let full = world.versions();
    let pool = PoolName::default_pool();
    let picked = world.store.dispatch(&pool, 0, &"".into(), 9, 1, &full).await.unwrap();

    assert_eq!(picked.iter().map(|(job, _)| job.step).collect::<Vec<_>>(), [free]);
}

/// C13, C24: however many dispatch at once, a step is picked once.
pub async fn dispatchers_at_once_pick_a_step_once(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for n in 0..20 {
        world.create(&format!("t{n}")).await;
    }

    let mut picked = Vec::new();
    while picked.len() < 20 {
        let rounds = (0..4).map(|_| {
            let world = world.clone();
            tokio::spawn(async move { dispatch(&world, "", 4, 5).await })
        });
        let rounds = futures::future::join_all(rounds).await;
        picked.extend(rounds.into_iter().flat_map(Result::unwrap).map(|(_, step)| step));
    }

    assert_eq!(picked.iter().collect::<HashSet<_>>().len(), picked.len());
}

async fn dispatch(world: &World, after: &str, tenants: u32, each: u32) -> Vec<(String, StepId)> {
    let pool = PoolName::default_pool();
    let picked = world.store.dispatch(&pool, 0, &Tenant::from(after), tenants, each, &[]).await.unwrap();
    picked.into_iter().map(|(job, tenant)| (tenant.0, job.step)).collect()
}

/// C23: what could not be sent is backlog again, unless somebody took it meanwhile.
pub async fn an_unsent_step_is_backlog_again(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let waits = step_of(world.create("t").await.run.id, 1);
    let taken = step_of(world.create("u").await.run.id, 1);
    world.store.dispatch(&PoolName::default_pool(), 0, &"".into(), 1, 2, &[]).await.unwrap();
    world.claim(taken).await;

    world.store.unsend(&[waits, taken]).await.unwrap();

    let picked = world.store.dispatch(&PoolName::default_pool(), 0, &"".into(), 1, 2, &[]).await.unwrap();
    assert_eq!(picked.into_iter().map(|(job, _)| job.step).collect::<Vec<_>>(), [waits]);
}
