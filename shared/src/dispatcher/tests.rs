//! The dispatcher between a store and a queue, both in memory.

#![expect(clippy::unwrap_used, reason = "a test that unwraps says where it broke")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::domain::WorkerId;
use crate::queue::contract::Working;
use crate::queue::{JobHandler, MemoryQueue};
use crate::store::WorkerRecord;
use crate::store::contract::fixture::{World, hello, manifest};
use crate::store::memory::MemoryStore;

const SOON: Duration = Duration::from_secs(20);

/// A store with its queue and one dispatcher.
struct Scene {
    world: World,
    queue: Arc<dyn JobQueue>,
    dispatcher: Arc<Dispatcher>,
    pool: PoolName,
}

impl Scene {
    async fn new() -> Self {
        Self::on(Arc::new(MemoryQueue::new())).await
    }

    async fn on(queue: Arc<dyn JobQueue>) -> Self {
        let world = World::new(Arc::new(MemoryStore::new())).await;
        let dispatcher = Dispatcher::new(Arc::clone(&world.store), Arc::clone(&queue));
        Self { world, queue, dispatcher, pool: PoolName::default_pool() }
    }

    async fn create(&self, tenant: &str, count: usize) {
        let world = self.world.as_caller(tenant, "u");
        for n in 0..count {
            world.create(&format!("t{n}")).await;
        }
    }

    /// The lane of the scene's graph, which is code.
    fn lane(&self) -> Lane {
        Lane { pool: self.pool.clone(), class: 0, graph: Some(self.world.graph.version.clone()) }
    }

    async fn unread(&self) -> usize {
        self.queue.unread(&[self.lane()]).await.unwrap()[0]
    }

    async fn top_up(&self) -> usize {
        self.dispatcher.top_up(&self.pool, 0).await.unwrap()
    }

    /// The jobs that come next, at most `count`.
    async fn take(&self, count: usize) -> Vec<Job> {
        let mut working = Working::on(&self.queue, &[self.lane()], count);
        let jobs = working.started_many(count).await;
        working.shut_down(); // First, or a freed slot takes one more that nobody lets go.
        working.let_go(count);
        working.ended().await;
        jobs
    }
}

/// C24: the queue stays as small as the work.
#[tokio::test]
async fn no_more_enters_than_the_window_holds() {
    let scene = Scene::new().await;
    scene.create("a", 50).await;

    let rounds = [scene.top_up().await, scene.top_up().await];

    assert_eq!((rounds, scene.unread().await), ([16, 0], 16));
    scene.take(10).await;
    assert_eq!((scene.top_up().await, scene.unread().await), (10, 16));
}

#[tokio::test]
async fn the_window_is_as_wide_as_the_pool_has_slots() {
    let scene = Scene::new().await;
    scene.create("a", 50).await;
    let worker = WorkerRecord {
        id: WorkerId::new(),
        name: "w".to_owned(),
        pools: vec![scene.pool.clone()],
        slots: 40,
        versions: Vec::new(),
    };
    scene.world.store.worker_seen(&worker).await.unwrap();

    assert_eq!(scene.top_up().await, 40);
}

/// C24: three processes dispatch at once, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dispatchers_at_once_share_one_window() {
    let scene = Scene::new().await;
    scene.create("a", 60).await;
    let others = [(); 3].map(|()| Dispatcher::new(Arc::clone(&scene.world.store), Arc::clone(&scene.queue)));

    let mut seen = Vec::new();
    while seen.len() < 60 {
        for _ in 0..5 {
            let rounds = others.iter().map(|other| {
                let (other, pool) = (Arc::clone(other), scene.pool.clone());
                tokio::spawn(async move { other.top_up(&pool, 0).await.unwrap() })
            });
            futures::future::join_all(rounds).await;
            assert!(scene.unread().await <= 16);
        }
        let next = scene.unread().await.min(9);
        seen.extend(scene.take(next).await.into_iter().map(|job| job.step));
    }

    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 60);
}

#[tokio::test]
async fn a_long_backlog_does_not_keep_another_tenant_waiting() {
    let scene = Scene::new().await;
    scene.create("a", 100).await;
    assert_eq!(scene.top_up().await, 16);
    scene.create("b", 1).await;

    scene.take(8).await;
    scene.top_up().await;
    // Behind what was in the window already, b is among the next.
    let next = scene.take(16).await;

    let b = scene.world.as_caller("b", "u");
    let mut of_b = 0;
    for job in next {
        of_b += usize::from(b.store.run(&b.caller.scope(), job.step.run_id).await.unwrap().is_some());
    }
    assert_eq!(of_b, 1);
}

/// Every nudge counts, however many come while a round is under way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_nudge_is_lost() {
    let scene = Scene::new().await;
    let mut working = Working::quick(&scene.queue, &[scene.lane()], 8);

    let creating = (0..8).map(|tenant| {
        let (world, dispatcher) =
            (scene.world.as_caller(&format!("tenant-{tenant}"), "u"), Arc::clone(&scene.dispatcher));
        let pool = scene.pool.clone();
        tokio::spawn(async move {
            for n in 0..40 {
                world.create(&format!("t{n}")).await;
                dispatcher.nudge(&pool, 0);
            }
        })
    });
    futures::future::join_all(creating).await;

    let mut seen = Vec::new();
    while seen.len() < 320 {
        seen.push(working.started().await.step);
        // A place is free.
        scene.dispatcher.nudge(&scene.pool, 0);
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 320);
    working.ended().await;
}

/// C23: what cannot be sent stays in the backlog, where workers find it.
#[tokio::test]
async fn nothing_leaves_the_backlog_while_the_queue_is_away() {
    let away = Arc::new(Away { queue: MemoryQueue::new(), is_away: AtomicBool::new(true) });
    let scene = Scene::on(Arc::clone(&away) as _).await;
    scene.create("a", 3).await;

    assert_eq!(scene.top_up().await, 0);
    assert_eq!(scene.world.store.backlog_lanes().await.unwrap(), [(scene.pool.clone(), 0)]);

    away.is_away.store(false, Ordering::Relaxed);
    assert_eq!(scene.top_up().await, 3);
    assert_eq!(scene.world.store.backlog_lanes().await.unwrap(), []);
}

#[tokio::test]
async fn runs_of_a_version_that_nobody_has_do_not_hold_up_the_others() {
    let scene = Scene::new().await;
    scene.create("a", 100).await;
    scene.top_up().await;
    let mut newer = manifest();
    newer.name = "newer".to_owned();
    let newer = World::with(Arc::clone(&scene.world.store), newer).await.as_caller("b", "u");
    let lane = Lane { graph: Some(newer.graph.version.clone()), ..scene.lane() };
    for n in 0..5 {
        newer.create(&format!("t{n}")).await;
    }

    // The full lane is known; others are looked for from time to time.
    let found = async {
        while scene.queue.unread(std::slice::from_ref(&lane)).await.unwrap() != [5] {
            scene.top_up().await;
            tokio::task::yield_now().await;
        }
    };

    timeout(SOON, found).await.expect("the other version's runs enter");
    assert_eq!(scene.unread().await, 16);
}

#[tokio::test]
async fn classes_have_windows_of_their_own() {
    let scene = Scene::new().await;
    scene.create("a", 20).await;
    let mut batch = scene.world.new_run("batch");
    batch.class = 1;
    scene.world.try_create(batch, hello()).await.unwrap();

    assert_eq!(scene.top_up().await, 16);
    assert_eq!(scene.dispatcher.top_up(&scene.pool, 1).await.unwrap(), 1);
}

/// A queue that can be out of reach.
struct Away {
    queue: MemoryQueue,
    is_away: AtomicBool,
}

impl Away {
    fn reach(&self) -> Result<&MemoryQueue, QueueError> {
        if self.is_away.load(Ordering::Relaxed) {
            return Err(QueueError { doing: "reach the queue", message: "away".to_owned() });
        }
        Ok(&self.queue)
    }
}

#[async_trait]
impl JobQueue for Away {
    async fn push(&self, jobs: &[Job]) -> Result<(), QueueError> {
        self.reach()?.push(jobs).await
    }

    async fn unread(&self, lanes: &[Lane]) -> Result<Vec<usize>, QueueError> {
        self.reach()?.unread(lanes).await
    }

    async fn work(
        &self,
        lanes: &[Lane],
        slots: usize,
        handler: Arc<dyn JobHandler>,
        shutdown: CancellationToken,
    ) -> Result<(), QueueError> {
        self.queue.work(lanes, slots, handler, shutdown).await
    }

    fn is_healthy(&self) -> bool {
        self.reach().is_ok()
    }

    async fn ping(&self) -> Result<(), QueueError> {
        self.reach()?.ping().await
    }
}
