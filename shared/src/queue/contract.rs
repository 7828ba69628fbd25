//! What every queue promises, as stories. Each takes a fresh one; [`queue_contract!`] makes a test of each.
//!
//! [`queue_contract!`]: crate::queue_contract

#![expect(missing_docs, reason = "a story's name says what it promises")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::domain::RunId;

/// Makes a test of every story. `$fresh` is an async function without arguments that returns a pair:
/// an `Arc<dyn JobQueue>` without any content, and whatever must live as long as the story.
#[macro_export]
macro_rules! queue_contract {
    ($fresh:path) => {
        $crate::queue_contract! { $fresh;
            jobs_reach_a_handler_whole
            one_at_a_time_may_fill_a_pool
            a_job_that_waits_is_not_added_again
            a_job_in_a_handlers_hands_may_be_sent_again
            a_job_that_was_handled_may_come_again
            a_worker_takes_no_more_than_its_free_slots
            interactive_jobs_go_first_and_batch_keeps_a_share
            a_worker_that_drains_takes_nothing_new_and_ends_with_its_last_job
            an_idle_worker_ends_at_once
            a_handler_that_panics_takes_nobody_along
            every_job_reaches_exactly_one_of_many_workers
        }
    };
    ($fresh:path; $($story:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                let (fresh, _alive) = $fresh().await;
                $crate::queue::contract::$story(fresh).await;
            }
        )*
    };
}

/// How long a test waits for what must happen soon.
const SOON: Duration = Duration::from_secs(10);

pub fn lane(class: i16) -> Lane {
    Lane { pool: PoolName::default_pool(), class, graph: None }
}

pub fn job(lane: &Lane) -> Job {
    let step = StepId { run_id: RunId::new(), seq: 1 };
    Job { step, lane: lane.clone(), attempt: 0, trace: None }
}

pub fn jobs(lane: &Lane, count: usize) -> Vec<Job> {
    (0..count).map(|_| job(lane)).collect()
}

/// A handler that reports what it was given and waits for leave to return.
struct Hands {
    started: mpsc::UnboundedSender<Job>,
    leave: Arc<Semaphore>,
}

#[async_trait]
impl JobHandler for Hands {
    async fn handle(&self, job: Job) {
        let panics = job.trace.as_deref() == Some("panic");
        self.started.send(job).expect("the test listens");
        assert!(!panics, "a handler's own fault");
        self.leave.acquire().await.expect("never closed").forget();
    }
}

/// A worker of a queue, driven by a test.
pub struct Working {
    started: mpsc::UnboundedReceiver<Job>,
    leave: Arc<Semaphore>,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), QueueError>>,
}

impl Working {
    pub fn on(queue: &Arc<dyn JobQueue>, lanes: &[Lane], slots: usize) -> Self {
        let (started, receiver) = mpsc::unbounded_channel();
        let leave = Arc::new(Semaphore::new(0));
        let hands = Arc::new(Hands { started, leave: Arc::clone(&leave) });
        let (queue, lanes, shutdown) = (Arc::clone(queue), lanes.to_vec(), CancellationToken::new());
        let stop = shutdown.clone();
        let task = tokio::spawn(async move { queue.work(&lanes, slots, hands, stop).await });
        Self { started: receiver, leave, shutdown, task }
    }

    /// A worker whose handlers return at once.
    pub fn quick(queue: &Arc<dyn JobQueue>, lanes: &[Lane], slots: usize) -> Self {
        let working = Self::on(queue, lanes, slots);
        working.let_go(Semaphore::MAX_PERMITS / 2);
        working
    }

    pub async fn started(&mut self) -> Job {
        timeout(SOON, self.started.recv()).await.expect("a job starts soon").expect("the worker lives")
    }

    pub async fn started_many(&mut self, count: usize) -> Vec<Job> {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(self.started().await);
        }
        all
    }

    /// Whether `job` has started; jobs before it are forgotten.
    pub fn has_started(&mut self, job: &Job) -> bool {
        std::iter::from_fn(|| self.started.try_recv().ok()).any(|started| started == *job)
    }

    /// Whether no further job has started.
    pub fn is_quiet(&mut self) -> bool {
        self.started.try_recv().is_err()
    }

    pub fn let_go(&self, count: usize) {
        self.leave.add_permits(count);
    }

    pub fn shut_down(&self) {
        self.shutdown.cancel();
    }

    pub async fn ended(self) {
        self.shutdown.cancel();
        timeout(SOON, self.task).await.expect("the worker ends soon").expect("no panic").expect("no error");
    }

    /// Ends it as kill -9 would: nothing is handed back.
    pub fn kill(self) {
        self.task.abort();
    }
}

/// Waits until `lanes` hold exactly `counts` unread jobs.
pub async fn until_unread(queue: &Arc<dyn JobQueue>, lanes: &[Lane], counts: &[usize]) {
    let arrived = async {
        while queue.unread(lanes).await.ok().as_deref() != Some(counts) {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, arrived).await.expect("the queue fills or empties soon");
}

pub async fn jobs_reach_a_handler_whole(queue: Arc<dyn JobQueue>) {
    let mut pushed = job(&lane(0));
    pushed.trace = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned());
    let versioned = Lane { graph: Some(GraphVersion::from("c-1")), ..lane(1) };
    let other = job(&versioned);
    let mut working = Working::quick(&queue, &[lane(0), versioned.clone()], 4);

    queue.push(std::slice::from_ref(&pushed)).await.expect("pushed");
    assert_eq!(working.started().await, pushed);
    queue.push(std::slice::from_ref(&other)).await.expect("pushed");
    assert_eq!(working.started().await, other);

    working.ended().await;
    until_unread(&queue, &[lane(0), versioned], &[0, 0]).await;
}

/// Whoever fills lanes sees all of them, also those he has never heard of.
pub async fn one_at_a_time_may_fill_a_pool(queue: Arc<dyn JobQueue>) {
    let (pool, base) = (PoolName::default_pool(), lane(0));
    let version = |name: &str| Lane { graph: Some(GraphVersion::from(name)), ..lane(0) };
    queue.push(&jobs(&base, 3)).await.expect("pushed");
    queue.push(&jobs(&version("c-1"), 2)).await.expect("pushed");
    queue.push(&jobs(&version("c-2"), 1)).await.expect("pushed");
    queue.push(&jobs(&lane(1), 7)).await.expect("pushed");
    let begin = async |class: i16| {
        let base = Lane { class, ..lane(0) };
        let found = queue.begin_filling(&pool, class, &[base]).await.expect("asked");
        found.map(std::collections::BTreeMap::from_iter)
    };

    let all = Some([(base.clone(), 3), (version("c-1"), 2), (version("c-2"), 1)].into());
    assert_eq!(begin(0).await, all);

    assert_eq!(begin(0).await, None);
    assert_eq!(begin(1).await, Some([(lane(1), 7)].into()));
    queue.end_filling(&pool, 0).await;
    assert_eq!(begin(0).await, all);
    // A holder that dies is not waited for.
    let freed = async {
        while begin(1).await.is_none() {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, freed).await.expect("the right ends by itself");
}

pub async fn a_job_that_waits_is_not_added_again(queue: Arc<dyn JobQueue>) {
    let first = job(&lane(0));
    let later = Job { attempt: 1, ..first.clone() };

    queue.push(&[first.clone(), first.clone(), later.clone()]).await.expect("pushed");
    queue.push(std::slice::from_ref(&first)).await.expect("pushed");

    assert_eq!(queue.unread(&[lane(0)]).await.expect("counted"), [2]);
    let mut working = Working::quick(&queue, &[lane(0)], 1);
    assert_eq!(working.started_many(2).await, [first, later]);
    working.ended().await;
}

/// A worker that gives a step back is told of it again, though its handler has not returned.
pub async fn a_job_in_a_handlers_hands_may_be_sent_again(queue: Arc<dyn JobQueue>) {
    let again = job(&lane(0));
    let mut working = Working::on(&queue, &[lane(0)], 1);
    queue.push(std::slice::from_ref(&again)).await.expect("pushed");
    working.started().await;

    queue.push(&[again.clone(), again.clone()]).await.expect("pushed");

    assert_eq!(queue.unread(&[lane(0)]).await.expect("counted"), [1]);
    working.let_go(2);
    assert_eq!(working.started().await, again);
    working.ended().await;
}

pub async fn a_job_that_was_handled_may_come_again(queue: Arc<dyn JobQueue>) {
    let again = job(&lane(0));
    let mut working = Working::quick(&queue, &[lane(0)], 1);
    queue.push(std::slice::from_ref(&again)).await.expect("pushed");
    working.started().await;

    let returned = async {
        while working.is_quiet() {
            queue.push(std::slice::from_ref(&again)).await.expect("pushed");
            tokio::task::yield_now().await;
        }
    };

    timeout(SOON, returned).await.expect("the scheduler's second send gets through");
    working.ended().await;
}

pub async fn a_worker_takes_no_more_than_its_free_slots(queue: Arc<dyn JobQueue>) {
    queue.push(&jobs(&lane(0), 10)).await.expect("pushed");
    queue.push(&jobs(&lane(1), 10)).await.expect("pushed");
    let lanes = [lane(0), lane(1)];

    let mut busy = Working::on(&queue, &lanes, 3);
    busy.started_many(3).await;

    // The others are still there for anybody else.
    until_unread(&queue, &lanes, &[7, 10]).await;
    let mut idle = Working::on(&queue, &lanes, 17);
    idle.started_many(17).await;
    assert!(busy.is_quiet());
    busy.let_go(3);
    idle.let_go(17);
    busy.ended().await;
    idle.ended().await;
    until_unread(&queue, &lanes, &[0, 0]).await;
}

pub async fn interactive_jobs_go_first_and_batch_keeps_a_share(queue: Arc<dyn JobQueue>) {
    queue.push(&jobs(&lane(0), 24)).await.expect("pushed");
    queue.push(&jobs(&lane(1), 24)).await.expect("pushed");

    let mut working = Working::quick(&queue, &[lane(0), lane(1)], 1);
    let order: Vec<i16> = working.started_many(24).await.iter().map(|job| job.lane.class).collect();

    let batch = order.iter().filter(|class| **class == 1).count();
    assert_eq!(order[..7], [0; 7]);
    assert_eq!(batch, 3, "{order:?}");
    working.started_many(24).await;
    working.ended().await;
}

pub async fn a_worker_that_drains_takes_nothing_new_and_ends_with_its_last_job(queue: Arc<dyn JobQueue>) {
    queue.push(&jobs(&lane(0), 5)).await.expect("pushed");
    let mut working = Working::on(&queue, &[lane(0)], 2);
    working.started_many(2).await;

    working.shut_down();
    working.let_go(2);
    let (quiet, leftover) = (working.is_quiet(), Arc::clone(&queue));
    working.ended().await;

    assert!(quiet);
    assert_eq!(leftover.unread(&[lane(0)]).await.expect("counted"), [3]);
}

pub async fn an_idle_worker_ends_at_once(queue: Arc<dyn JobQueue>) {
    let mut working = Working::quick(&queue, &[lane(0), lane(1)], 2);
    queue.push(&[job(&lane(0))]).await.expect("pushed");
    working.started().await;

    let asked = std::time::Instant::now();
    working.ended().await;

    assert!(asked.elapsed() < Duration::from_secs(2), "took {:?}", asked.elapsed());
}

pub async fn a_handler_that_panics_takes_nobody_along(queue: Arc<dyn JobQueue>) {
    let mut working = Working::quick(&queue, &[lane(0)], 1);
    let broken = Job { trace: Some("panic".to_owned()), ..job(&lane(0)) };
    let sound = job(&lane(0));

    queue.push(&[broken.clone(), sound.clone()]).await.expect("pushed");

    assert_eq!(working.started_many(2).await, [broken, sound]);
    working.ended().await;
    until_unread(&queue, &[lane(0)], &[0]).await;
}

pub async fn every_job_reaches_exactly_one_of_many_workers(queue: Arc<dyn JobQueue>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let lanes = [lane(0), lane(1)];
    let mut workers: Vec<Working> = (0..3).map(|_| Working::quick(&queue, &lanes, 4)).collect();

    let mut expected = Vec::new();
    for round in 0..60 {
        let batch = jobs(&lanes[round % 2], 10);
        queue.push(&batch).await.expect("pushed");
        expected.extend(batch.into_iter().map(|job| job.step));
    }

    let all = async {
        while seen.lock().expect("not poisoned").len() < expected.len() {
            for worker in &mut workers {
                if let Ok(job) = worker.started.try_recv() {
                    seen.lock().expect("not poisoned").push(job.step);
                }
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, all).await.expect("all jobs start soon");
    for worker in workers {
        worker.ended().await;
    }
    let mut steps = seen.lock().expect("not poisoned").clone();
    steps.sort_unstable();
    expected.sort_unstable();
    assert_eq!(steps, expected);
}
