//! The world of one life: what is real in it, and what its clients know.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use threadgate_scheduler::{SchedulerConfig, SchedulerHealth};
use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::domain::{Caller, Message, Role, RunId, RunStatus, Scope, ThreadId};
use threadgate_shared::events::MemoryEvents;
use threadgate_shared::graph::Graph;
use threadgate_shared::graph::admission::{RunInput, admit};
use threadgate_shared::graph::registry::Registry;
use threadgate_shared::parts::Parts;
use threadgate_shared::store::memory::{Failure, MemoryStore, Operation};
use threadgate_shared::store::{Created, Idempotency, NewRun, RunRecord, Runs, StepStatus, StoreError, Threads};
use threadgate_worker::Worker;
use threadgate_worker::config::WorkerConfig;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::model::{Model, Move, THREADS};
use super::nodes::{GRAPHS, Memory, graphs};
use super::queue::FickleQueue;

/// Longer no run may take once the faults have ended: leases run out, steps are sent again, retries
/// come due.
const RECOVERY_MAX: Duration = Duration::from_secs(180);

/// How long an idempotency key lives; longer than a life.
const KEY_TTL: Duration = Duration::from_secs(1_000_000);

/// One life.
pub struct World {
    /// Sees every moment as it is.
    pub observer: MemoryStore,
    pub memory: Memory,
    /// What stops were promised: the run, and the last step it may come to.
    pub stopped: BTreeMap<RunId, i32>,
    /// Runs a client asked for: accepted, or without an answer.
    pub asked: Vec<Asked>,
    queue: Arc<FickleQueue>,
    events: Arc<MemoryEvents>,
    registry: Registry,
    client: Arc<MemoryStore>,
    workers: Vec<Process>,
    schedulers: Vec<Process>,
    draining: Vec<Process>,
}

/// A run a client asked for.
#[derive(Clone)]
pub struct Asked {
    /// The client's own id of it, and its idempotency key.
    pub name: String,
    pub thread: usize,
    /// What was heard: the run, or nothing yet.
    pub run: Option<RunId>,
    new: NewRun,
    input: RunInput,
}

/// A process as the others see it: a connection, and a way to end it.
struct Process {
    store: Arc<MemoryStore>,
    shutdown: CancellationToken,
    task: AbortHandle,
}

impl World {
    pub async fn new(model: &Model) -> Self {
        let database = MemoryStore::new();
        database.skew(model.clock_ahead);
        database.set_weather(Some(model.weather.clone()));
        let seed = model.weather.seed;
        let memory = Memory::default();
        let registry = graphs(seed, &memory).into_iter().fold(Registry::new(), Registry::graph);
        let mut world = Self {
            observer: database.observer(),
            memory,
            stopped: BTreeMap::new(),
            asked: Vec::new(),
            queue: Arc::new(FickleQueue::new(seed)),
            events: Arc::new(MemoryEvents::new()),
            registry,
            client: Arc::new(database),
            workers: Vec::new(),
            schedulers: Vec::new(),
            draining: Vec::new(),
        };
        world.start_worker();
        world.start_scheduler();
        world
    }

    pub async fn apply(&mut self, next: Move) {
        match next {
            Move::Send { thread } => self.send(thread).await,
            Move::Stop { thread, is_calm } => self.stop(thread, is_calm).await,
            Move::Wait(time) => tokio::time::sleep(time).await,
            Move::StartWorker => self.start_worker(),
            Move::KillWorker { worker, at } => kill(self.workers.remove(worker), at),
            Move::DrainWorker { worker } => self.drain(worker),
            Move::StartScheduler => self.start_scheduler(),
            Move::KillScheduler { at } => kill(self.schedulers.remove(0), at),
            Move::Flush => self.queue.flush(),
            Move::Redeliver => self.queue.redeliver(),
            Move::SetQueueAway(away) => self.queue.set_away(away),
            Move::SetStoreDown(down) => self.client.set_down(down),
            Move::Fail(operation, failure) => self.client.fail_next(operation, failure),
            Move::Skew(ahead) => self.client.skew(ahead),
        }
    }

    /// Faults end, processes live, clients ask again for what they heard nothing of: every run ends.
    pub async fn end_of_faults(&mut self) {
        self.client.set_weather(None);
        self.client.set_down(false);
        self.client.forget_faults();
        self.queue.calm();
        if self.workers.is_empty() {
            self.start_worker();
        }
        if self.schedulers.is_empty() {
            self.start_scheduler();
        }
        let limit = Instant::now() + RECOVERY_MAX;
        while !self.open_runs().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert!(Instant::now() < limit, "lost after {RECOVERY_MAX:?}: {:#?}", self.open_runs().await);
        }
        for index in 0..self.asked.len() {
            self.ask_again(index).await;
        }
        for thread in 0..THREADS {
            self.send(thread).await;
        }
        while !self.open_runs().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert!(Instant::now() < limit + RECOVERY_MAX, "lost: {:#?}", self.open_runs().await);
        }
    }

    /// All runs, oldest first.
    pub async fn runs(&self) -> Vec<RunRecord> {
        let filter = threadgate_shared::store::RunFilter { limit: u32::MAX, ..Default::default() };
        let mut runs = self.observer.runs(&scope(), &filter).await.unwrap();
        runs.reverse();
        runs
    }

    /// The graph a thread belongs to.
    pub fn graph(&self, thread: usize) -> &Arc<Graph> {
        &self.registry.graphs()[thread % GRAPHS]
    }

    async fn open_runs(&self) -> Vec<RunRecord> {
        self.runs().await.into_iter().filter(|run| !run.status.is_final()).collect()
    }

    async fn send(&mut self, thread: usize) {
        let name = format!("client-{}", self.asked.len());
        let mut input = RunInput { messages: vec![Message::text(Role::User, name.clone())], ..RunInput::default() };
        let state = self.observer.state(&scope(), &thread_id(thread), None).await.unwrap();
        if state.is_some_and(|state| state.meta.interrupt_reason.as_deref() == Some("interrupt")) {
            input.resume = Some(json!("yes"));
        }
        let new = self.new_run(thread, &name, &input);
        self.asked.push(Asked { name, thread, run: None, new, input });
        self.ask_again(self.asked.len() - 1).await;
    }

    /// Asks for a run that was not heard of, as the client's library does with its key.
    async fn ask_again(&mut self, index: usize) {
        let asked = &self.asked[index];
        if asked.run.is_some() {
            return;
        }
        let (versions, id, input) = (asked.new.versions.clone(), asked.new.thread_id.clone(), asked.input.clone());
        let answer = self.client.create_run(asked.new.clone(), &|view| admit(&versions, &id, view, &input)).await;
        match answer {
            Ok(Created::New(created)) => {
                self.asked[index].run = Some(created.run.id);
                if let Some((pool, class)) = created.lane {
                    self.dispatcher(&self.client).nudge(&pool, class);
                }
            }
            Ok(Created::Replayed(run)) => self.asked[index].run = Some(run.id),
            Ok(Created::StillPaused(paused)) => panic!("its graphs ask one question at a time: {paused:?}"),
            Err(StoreError::Refused(_) | StoreError::Unavailable { .. }) => {}
            Err(error) => panic!("a client hears of a refusal or of an outage, not of {error:?}"),
        }
    }

    fn new_run(&self, thread: usize, name: &str, input: &RunInput) -> NewRun {
        let graph = self.graph(thread);
        NewRun {
            id: RunId::new(),
            client_run_id: Some(name.to_owned()),
            caller: Caller::anonymous(),
            thread_id: thread_id(thread),
            thread_name: None,
            thread_meta: None,
            graph: graph.manifest.name.clone(),
            class: 0,
            message_ids: input.messages.iter().map(|message| message.message_id.clone()).collect(),
            input: json!({}),
            config: [("number".to_owned(), json!(self.asked.len()))].into_iter().collect(),
            step_limit: 25,
            node_timeout: None,
            versions: vec![(graph.version.clone(), Arc::clone(&graph.manifest))],
            idempotency: Some(Idempotency { key: name.to_owned(), body_hash: name.to_owned(), ttl: KEY_TTL }),
            trace: None,
            observability: true,
        }
    }

    async fn stop(&mut self, thread: usize, is_calm: bool) {
        let filter = threadgate_shared::store::RunFilter {
            statuses: vec![RunStatus::Queued, RunStatus::Running],
            thread: Some(thread_id(thread)),
            limit: 1,
            ..Default::default()
        };
        let active = self.observer.runs(&scope(), &filter).await.unwrap().pop();
        let store = if is_calm { &self.observer } else { &*self.client };
        if store.stop_thread(&scope(), &thread_id(thread)).await.is_err() {
            return; // Nothing was promised.
        }
        let Some(run) = active else { return };
        let steps = self.observer.steps(run.id).await.unwrap();
        if let Some(last) = steps.last() {
            self.stopped.entry(run.id).or_insert(last.id.seq);
            let settled = self.observer.run(&scope(), run.id).await.unwrap().unwrap();
            let is_held = last.status == StepStatus::Leased;
            assert!(settled.status.is_final() || is_held, "a stop closes what nobody holds: {last:?}");
        }
    }

    fn start_worker(&mut self) {
        let store = Arc::new(self.client.connect());
        let (parts, registry) = (self.parts(&store), self.registry.clone());
        let shutdown = CancellationToken::new();
        let ending = shutdown.clone();
        let task = tokio::spawn(async move {
            // A process that cannot start is started again by whoever runs it.
            loop {
                match Worker::start(config(), parts.clone(), &registry).await {
                    Ok(worker) => return worker.run(ending).await.map_err(|error| error.to_string()),
                    Err(_) if ending.is_cancelled() => return Ok(()),
                    Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
                }
            }
        });
        self.workers.push(Process::new(store, shutdown, task.abort_handle()));
    }

    fn start_scheduler(&mut self) {
        let store = Arc::new(self.client.connect());
        let shutdown = CancellationToken::new();
        let scheduler = threadgate_scheduler::run(
            SchedulerConfig::for_leases(config().lease_ttl),
            self.parts(&store),
            SchedulerHealth::default(),
            shutdown.clone(),
        );
        let task = tokio::spawn(scheduler);
        self.schedulers.push(Process::new(store, shutdown, task.abort_handle()));
    }

    fn drain(&mut self, worker: usize) {
        let process = self.workers.remove(worker);
        process.shutdown.cancel();
        self.draining.push(process);
    }

    fn parts(&self, store: &Arc<MemoryStore>) -> Parts {
        Parts {
            store: store.clone(),
            queue: self.queue.clone(),
            dispatcher: self.dispatcher(store),
            events: self.events.clone(),
        }
    }

    fn dispatcher(&self, store: &Arc<MemoryStore>) -> Arc<Dispatcher> {
        Dispatcher::new(store.clone(), self.queue.clone())
    }
}

impl Process {
    /// A process whose task ends with its connection.
    fn new(store: Arc<MemoryStore>, shutdown: CancellationToken, task: AbortHandle) -> Self {
        let (connection, ended) = (Arc::clone(&store), task.clone());
        tokio::spawn(async move {
            connection.is_gone().await;
            ended.abort();
        });
        Self { store, shutdown, task }
    }
}

/// kill -9, now or at the process's next call of that kind.
fn kill(process: Process, at: Option<(Operation, Failure)>) {
    match at {
        Some((operation, moment)) if !process.task.is_finished() => process.store.cut_at(operation, moment),
        _ => process.store.cut(),
    }
}

fn config() -> WorkerConfig {
    WorkerConfig { node_threads: 0, slots: 3, shutdown_grace: Duration::from_secs(5), ..WorkerConfig::default() }
}

pub fn scope() -> Scope {
    Caller::anonymous().scope()
}

pub fn thread_id(thread: usize) -> ThreadId {
    ThreadId(format!("thread-{thread}"))
}
