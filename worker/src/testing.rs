//! A worker on parts in memory, for the tests beside the code. With tokio's clock paused the store's
//! clock, leases, deadlines and waits all move together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::domain::{
    CallStatus, Caller, InterruptStatus, Message, PoolName, Question, Role, RunId, RunStatus, StepId, Tenant, ThreadId,
};
use threadgate_shared::events::MemoryEvents;
use threadgate_shared::events::{EventBody, EventId, EventLog, Followed};
use threadgate_shared::graph::admission::{Answer, Given, RunInput, admit};
use threadgate_shared::graph::registry::Registry;
use threadgate_shared::graph::{Graph, GraphBuilder, Manifest, NodePolicy, RetryPolicy};
use threadgate_shared::parts::Parts;
use threadgate_shared::queue::MemoryQueue;
use threadgate_shared::queue::{Job, JobHandler, JobQueue, Lane, QueueError};
use threadgate_shared::store::memory::{Failure, MemoryStore, Operation};
use threadgate_shared::store::{
    Created, Graphs, InterruptFilter, Interrupts, Ledger, NewRun, Runs, StepRecord, StepStatus, StoredState, Threads,
    Upkeep,
};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::WorkerConfig;
use crate::health::WorkerHealth;
use crate::{Worker, WorkerError};

/// A store, a queue and an event log that workers share.
pub(crate) struct Stack {
    pub store: Arc<MemoryStore>,
    pub queue: Arc<SwitchedQueue>,
    pub events: Arc<MemoryEvents>,
    pub registry: Registry,
}

/// A worker that takes work.
pub(crate) struct Working {
    pub health: WorkerHealth,
    pub worker: JoinHandle<Result<(), WorkerError>>,
    pub shutdown: CancellationToken,
    /// Ends the heartbeat alone.
    pub heartbeat: tokio::task::AbortHandle,
    connection: Arc<MemoryStore>,
}

/// The configuration of tests: nodes run on the test's own runtime, under its clock.
pub(crate) fn config() -> WorkerConfig {
    WorkerConfig { node_threads: 0, slots: 8, ..WorkerConfig::default() }
}

impl Stack {
    pub(crate) fn new(graph: GraphBuilder) -> Self {
        Self::with(graph.version("1").build().unwrap())
    }

    pub(crate) fn with(graph: Graph) -> Self {
        Self {
            store: Arc::new(MemoryStore::new()),
            queue: Arc::default(),
            events: Arc::new(MemoryEvents::new()),
            registry: Registry::new().graph(graph),
        }
    }

    pub(crate) fn parts(&self) -> Parts {
        self.parts_on(Arc::clone(&self.store))
    }

    fn parts_on(&self, store: Arc<MemoryStore>) -> Parts {
        let queue = Arc::clone(&self.queue);
        Parts {
            store: store.clone(),
            queue: queue.clone(),
            dispatcher: Dispatcher::new(store, queue),
            events: Arc::clone(&self.events) as Arc<dyn EventLog>,
        }
    }

    /// A worker that takes work in the background.
    pub(crate) async fn work(&self, config: WorkerConfig) -> Working {
        let connection = Arc::new(self.store.connect());
        let worker = Worker::start(config, self.parts_on(Arc::clone(&connection)), &self.registry).await.unwrap();
        let shutdown = CancellationToken::new();
        Working {
            health: worker.health(),
            heartbeat: worker.heartbeat.abort_handle(),
            worker: tokio::spawn(worker.run(shutdown.clone())),
            shutdown,
            connection,
        }
    }

    /// A run of the registry's first graph on a thread, sent to the queue.
    pub(crate) async fn create(&self, thread: &str) -> RunId {
        let run = self.create_backlog(thread).await;
        self.send().await;
        run
    }

    /// A run of the registry's first graph on a thread, which waits in the store.
    pub(crate) async fn create_backlog(&self, thread: &str) -> RunId {
        let graph = &self.registry.graphs()[0];
        let input = RunInput { messages: vec![Message::text(Role::User, "hi")], ..RunInput::default() };
        self.create_with(thread, graph.version.clone(), Arc::clone(&graph.manifest), input).await
    }

    pub(crate) async fn create_with(
        &self,
        thread: &str,
        version: threadgate_shared::domain::GraphVersion,
        manifest: Arc<Manifest>,
        input: RunInput,
    ) -> RunId {
        let thread_id = ThreadId::from(thread);
        let versions = vec![(version, manifest)];
        let new = NewRun {
            id: RunId::new(),
            client_run_id: None,
            caller: Caller::anonymous(),
            thread_id: thread_id.clone(),
            thread_name: None,
            thread_meta: None,
            graph: versions[0].1.name.clone(),
            class: 0,
            message_ids: input.messages.iter().map(|message| message.message_id.clone()).collect(),
            input: serde_json::json!({}),
            config: serde_json::Map::new(),
            step_limit: 25,
            node_timeout: None,
            versions: versions.clone(),
            idempotency: None,
            trace: None,
            observability: true,
        };
        let id = new.id;
        let created = self.store.create_run(new, &|view| admit(&versions, &thread_id, view, &input)).await.unwrap();
        assert!(matches!(created, Created::New(_)));
        id
    }

    /// The open questions of a thread, in the order they were asked.
    pub(crate) async fn questions(&self, thread: &str) -> Vec<Question> {
        let filter = InterruptFilter {
            statuses: vec![InterruptStatus::Open],
            thread: Some(thread.into()),
            limit: 100,
            ..InterruptFilter::default()
        };
        let found = self.store.interrupts(&Caller::anonymous().scope(), &filter).await.unwrap();
        found.into_iter().map(|record| record.question).collect()
    }

    /// Answers all open questions of a thread, in order; the run that goes on.
    pub(crate) async fn answer(&self, thread: &str, answers: &[serde_json::Value]) -> RunId {
        let questions = self.questions(thread).await;
        assert_eq!(questions.len(), answers.len(), "{questions:?}");
        let answers = questions.into_iter().zip(answers).map(|(question, value)| Answer {
            interrupt_id: question.id,
            value: Given::Canonical(value.clone()),
            comment: None,
        });
        let input = RunInput { answers: answers.collect(), ..RunInput::default() };
        let graph = &self.registry.graphs()[0];
        let run = self.create_with(thread, graph.version.clone(), Arc::clone(&graph.manifest), input).await;
        self.send().await;
        run
    }

    /// The ledger of a thread: tool, status and how often it was started.
    pub(crate) async fn calls(&self, thread: &str) -> Vec<(String, CallStatus, i16)> {
        let calls = self.store.calls(&Caller::anonymous().scope(), &thread.into()).await.unwrap();
        calls.into_iter().map(|call| (call.tool, call.status, call.attempt)).collect()
    }

    /// Sends what waits in the backlog.
    pub(crate) async fn send(&self) {
        self.parts().dispatcher.top_up(&PoolName::default_pool(), 0).await.unwrap();
    }

    /// One pass of the scheduler; how many leases it released.
    pub(crate) async fn sweep(&self) -> u32 {
        let swept = self.store.sweep(100, true).await.unwrap();
        self.queue.push(&swept.send).await.unwrap();
        swept.released
    }

    /// A scheduler that sweeps every half second; ends with the test.
    pub(crate) fn schedule(&self) -> JoinHandle<()> {
        let (store, queue) = (Arc::clone(&self.store), Arc::clone(&self.queue));
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_millis(500));
            loop {
                ticks.tick().await;
                let Ok(swept) = store.sweep(100, true).await else { continue };
                let _ = queue.push(&swept.send).await;
            }
        })
    }

    pub(crate) async fn status(&self, run: RunId) -> RunStatus {
        self.store.run(&Caller::anonymous().scope(), run).await.unwrap().unwrap().status
    }

    /// Waits for the run's end.
    pub(crate) async fn ends(&self, run: RunId) -> RunStatus {
        self.waits_until(|| async { self.status(run).await.is_final() }).await;
        self.status(run).await
    }

    /// Waits until `holds`, at most ten minutes of the test's clock.
    pub(crate) async fn waits_until<F, Fut>(&self, holds: F)
    where
        F: Fn() -> Fut,
        Fut: Future<Output = bool>,
    {
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        let limit = tokio::time::Instant::now() + Duration::from_secs(600);
        while !holds().await {
            assert!(ticks.tick().await < limit, "it did not happen in time");
        }
    }

    pub(crate) async fn error(&self, run: RunId) -> threadgate_shared::graph::engine::RunError {
        self.store.run(&Caller::anonymous().scope(), run).await.unwrap().unwrap().error.unwrap()
    }

    pub(crate) async fn steps(&self, run: RunId) -> Vec<StepRecord> {
        self.store.steps(run).await.unwrap()
    }

    /// Node, status and attempts of each step.
    pub(crate) async fn told_steps(&self, run: RunId) -> Vec<(String, StepStatus, i16)> {
        self.steps(run).await.into_iter().map(|step| (step.node, step.status, step.attempt)).collect()
    }

    pub(crate) async fn state(&self, thread: &str) -> StoredState {
        self.store.state(&Caller::anonymous().scope(), &thread.into(), None).await.unwrap().unwrap()
    }

    /// The texts of the thread's context.
    pub(crate) async fn texts(&self, thread: &str) -> Vec<String> {
        self.state(thread).await.context.iter().map(Message::plain_text).collect()
    }

    /// How many versions the thread has had.
    pub(crate) fn checkpoints(&self, thread: &str) -> usize {
        self.store.checkpoints(&Tenant::default_tenant(), &thread.into()).len()
    }

    /// The run's events from its first to its last, in words.
    pub(crate) async fn told_events(&self, run: RunId) -> Vec<String> {
        let mut followed = self.events.follow(run, EventId::ZERO);
        let mut told = Vec::new();
        while let Some(next) = followed.next().await {
            let Followed::Event(event) = next else { continue };
            told.push(match &event.body {
                EventBody::NodeStarted { node, attempt, .. } => format!("{node} starts ({attempt})"),
                EventBody::Delta { message, .. } => format!("piece {}", message.plain_text()),
                EventBody::Custom { value, .. } => format!("custom {value}"),
                EventBody::NodeFinished { node, version, .. } => format!("{node} finished ({version})"),
                EventBody::RunEnded { status, .. } => format!("run {}", status.as_str()),
            });
        }
        told
    }

    pub(crate) async fn stop(&self, thread: &str) {
        self.store.stop_thread(&Caller::anonymous().scope(), &thread.into()).await.unwrap();
    }

    pub(crate) async fn register(&self, manifest: Manifest) -> threadgate_shared::domain::GraphVersion {
        let version = manifest.version(None);
        let record = threadgate_shared::store::GraphRecord {
            name: manifest.name.clone(),
            version: version.clone(),
            manifest,
            registered_at: chrono::Utc::now(),
        };
        self.store.register_graphs(&[record]).await.unwrap();
        version
    }

    /// A job for a step, as a dispatcher makes it.
    pub(crate) fn job(&self, run: RunId, seq: i32) -> Job {
        let graph = Some(self.registry.graphs()[0].version.clone());
        let lane = Lane { pool: PoolName::default_pool(), class: 0, graph };
        Job { step: StepId { run_id: run, seq }, lane, attempt: 0, trace: None }
    }
}

impl Working {
    /// Ends the worker politely.
    pub(crate) async fn end(self) -> Result<(), WorkerError> {
        self.shutdown.cancel();
        self.worker.await.unwrap()
    }

    /// Ends it as kill -9 does at its next call of `operation`, before or after that is done.
    pub(crate) fn dies_at(&self, operation: Operation, moment: Failure) {
        self.connection.cut_at(operation, moment);
    }

    /// Returns when it has died.
    pub(crate) async fn is_dead(&self) {
        self.connection.is_gone().await;
        self.shutdown.cancel();
    }

    /// Ends it as kill -9 does: nothing it asks or answers arrives any more.
    pub(crate) fn kill(&self) {
        self.connection.cut();
        self.shutdown.cancel();
    }
}

/// A place in a node where a test can see and hold it.
#[derive(Debug, Clone)]
pub(crate) struct Gate {
    entered: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self { entered: Arc::new(Semaphore::new(0)), open: Arc::new(Semaphore::new(0)) }
    }

    /// Called by the node: waits until it is let through.
    pub(crate) async fn pass(&self) {
        self.entered.add_permits(1);
        self.open.acquire().await.unwrap().forget();
    }

    /// Returns when a node has come this far.
    pub(crate) async fn entered(&self) {
        self.entered.acquire().await.unwrap().forget();
    }

    /// Lets one node through.
    pub(crate) fn open(&self) {
        self.open.add_permits(1);
    }
}

/// A graph of one node.
pub(crate) fn one_node(node: impl threadgate_shared::graph::Node + 'static) -> GraphBuilder {
    Graph::builder("one").node("only", node).entry("only")
}

/// A graph of one node with a policy.
pub(crate) fn one_node_with(policy: NodePolicy, node: impl threadgate_shared::graph::Node + 'static) -> GraphBuilder {
    Graph::builder("one").node_with("only", node, policy).entry("only")
}

/// A policy of so many attempts, without delay.
pub(crate) fn attempts(attempts: u16) -> NodePolicy {
    let retry = RetryPolicy { attempts, delay_min_ms: 0, delay_max_ms: 0, retry_on: Vec::new() };
    NodePolicy { retry, ..NodePolicy::default() }
}

/// A queue in memory that can be away.
#[derive(Default)]
pub(crate) struct SwitchedQueue {
    queue: MemoryQueue,
    away: AtomicBool,
}

impl SwitchedQueue {
    pub(crate) fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Relaxed);
    }
}

#[async_trait]
impl JobQueue for SwitchedQueue {
    async fn push(&self, jobs: &[Job]) -> Result<(), QueueError> {
        if self.is_healthy() {
            return self.queue.push(jobs).await;
        }
        Err(QueueError { doing: "add jobs to the queue", message: "it is away".to_owned() })
    }

    async fn unread(&self, lanes: &[Lane]) -> Result<Vec<usize>, QueueError> {
        self.queue.unread(lanes).await
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
        !self.away.load(Ordering::Relaxed)
    }

    async fn ping(&self) -> Result<(), QueueError> {
        Ok(())
    }
}
