//! The passes on the store in memory, with the clock in the test's hand.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::domain::{Caller, JsonMap, LeaseToken, Message, Role, RunId, RunStatus, StepId, WorkerId};
use threadgate_shared::events::{EventBody, EventId, EventLog, Followed, MemoryEvents};
use threadgate_shared::graph::admission::{RunInput, admit};
use threadgate_shared::graph::{Graph, NodeContext, Patch};
use threadgate_shared::parts::Parts;
use threadgate_shared::queue::{JobQueue, Lane, MemoryQueue};
use threadgate_shared::store::memory::MemoryStore;
use threadgate_shared::store::{NewRun, Runs, StepStatus, Steps};
use tokio::time::advance;

use crate::dispatch::Dispatch;
use crate::leases::Leases;
use crate::{Pass, SchedulerConfig, SchedulerHealth};

const TTL: Duration = Duration::from_secs(4);

struct Place {
    store: Arc<MemoryStore>,
    queue: Arc<MemoryQueue>,
    events: Arc<MemoryEvents>,
    parts: Parts,
    config: SchedulerConfig,
}

impl Place {
    fn new() -> Self {
        let (store, queue, events) =
            (Arc::new(MemoryStore::new()), Arc::new(MemoryQueue::new()), Arc::new(MemoryEvents::new()));
        let dispatcher = Dispatcher::new(store.clone(), queue.clone());
        let parts = Parts { store: store.clone(), queue: queue.clone(), dispatcher, events: events.clone() };
        Self { store, queue, events, parts, config: SchedulerConfig::default() }
    }

    fn leases(&self) -> Leases {
        Leases::new(self.parts.clone(), &self.config, SchedulerHealth::default())
    }

    /// A pass that has looked for so long that leases may expire.
    async fn trusted_leases(&self) -> Leases {
        let mut pass = self.leases();
        for _ in 0..9 {
            pass.once().await.unwrap();
            advance(TTL / 8).await;
        }
        pass
    }

    async fn run(&self) -> StepId {
        let graph = Graph::builder("one").node("only", nothing).entry("only").build().unwrap();
        let versions = vec![(graph.version.clone(), Arc::clone(&graph.manifest))];
        let messages = vec![Message::text(Role::User, "hello")];
        let id = RunId::new();
        let new = NewRun {
            id,
            client_run_id: None,
            caller: Caller::anonymous(),
            thread_id: id.to_string().as_str().into(),
            thread_name: None,
            thread_meta: None,
            graph: "one".to_owned(),
            class: 0,
            message_ids: messages.iter().map(|message| message.message_id.clone()).collect(),
            input: serde_json::json!({}),
            config: JsonMap::new(),
            step_limit: 25,
            node_timeout: None,
            versions: versions.clone(),
            idempotency: None,
            trace: None,
            observability: true,
        };
        let input = RunInput { messages, ..RunInput::default() };
        let thread = new.thread_id.clone();
        self.store.create_run(new, &|view| admit(&versions, &thread, view, &input)).await.unwrap();
        StepId { run_id: id, seq: 1 }
    }

    /// A worker takes the step and is never heard of again.
    async fn lose_a_worker_on(&self, step: StepId) {
        let graph = Graph::builder("one").node("only", nothing).entry("only").build().unwrap();
        let claims = [(step, LeaseToken::new())];
        let claimed = self.store.claim(&claims, WorkerId::new(), &[graph.version], TTL).await.unwrap();
        assert_eq!(claimed.len(), 1, "the step is there to be taken");
    }

    async fn step(&self, step: StepId) -> threadgate_shared::store::StepRecord {
        self.store.steps(step.run_id).await.unwrap().pop().unwrap()
    }

    async fn unread(&self, step: StepId) -> usize {
        let facts = self.store.why(step.run_id).await.unwrap().unwrap();
        let pool = facts.step.unwrap().pool;
        let lane = Lane { pool, class: 0, graph: Some(facts.run.graph_version) };
        self.queue.unread(&[lane]).await.unwrap()[0]
    }
}

async fn nothing(_: NodeContext) -> Patch {
    Patch::default()
}

#[tokio::test(start_paused = true)]
async fn a_lost_workers_step_is_ready_within_the_lease_and_one_sweep() {
    let place = Place::new();
    let mut pass = place.trusted_leases().await;
    let step = place.run().await;
    place.lose_a_worker_on(step).await;

    let mut waited = Duration::ZERO;
    loop {
        let wait = pass.once().await.unwrap();
        if place.step(step).await.status != StepStatus::Leased {
            break;
        }
        advance(wait).await;
        waited += wait;
    }

    assert!(waited <= TTL + place.config.sweep_interval, "{waited:?}");
    assert_eq!(place.step(step).await.status, StepStatus::Ready);
    assert_eq!(place.unread(step).await, 1, "and it is sent");
}

#[tokio::test(start_paused = true)]
async fn nothing_expires_until_a_scheduler_has_looked_for_one_lease() {
    let place = Place::new();
    let step = place.run().await;
    place.lose_a_worker_on(step).await;
    advance(TTL * 2).await;

    let mut pass = place.leases();
    pass.once().await.unwrap();
    advance(TTL / 2).await;
    pass.once().await.unwrap();
    assert_eq!(place.step(step).await.status, StepStatus::Leased);

    advance(TTL / 2).await;
    pass.once().await.unwrap();
    assert_eq!(place.step(step).await.status, StepStatus::Ready);
}

#[tokio::test(start_paused = true)]
async fn an_outage_charges_no_attempt_to_a_worker_that_renews_after_it() {
    let place = Place::new();
    let mut pass = place.trusted_leases().await;
    let step = place.run().await;
    place.lose_a_worker_on(step).await;

    place.store.set_down(true);
    for _ in 0..10 {
        pass.once().await.unwrap_err();
        advance(Duration::from_secs(1)).await;
    }
    place.store.set_down(false);

    pass.once().await.unwrap();
    assert_eq!(place.step(step).await.status, StepStatus::Leased, "the worker has one lease_ttl to renew");
    for _ in 0..9 {
        advance(TTL / 8).await;
        pass.once().await.unwrap();
    }
    assert_eq!(place.step(step).await.status, StepStatus::Ready);
}

#[tokio::test(start_paused = true)]
async fn looks_are_rare_while_nothing_runs_and_frequent_while_anything_does() {
    let place = Place::new();
    let mut pass = place.leases();
    assert_eq!(pass.once().await.unwrap(), place.config.sweep_idle_interval);

    let step = place.run().await;
    place.lose_a_worker_on(step).await;

    advance(place.config.sweep_idle_interval).await;
    assert_eq!(pass.once().await.unwrap(), place.config.sweep_interval);
}

/// C12
#[tokio::test(start_paused = true)]
async fn a_step_that_ends_its_workers_fails_its_run_and_followers_hear_of_it() {
    let place = Place::new();
    let mut pass = place.trusted_leases().await;
    let step = place.run().await;
    let mut followed = place.events.follow(step.run_id, EventId::ZERO);

    for _ in 0..3 {
        place.lose_a_worker_on(step).await;
        for _ in 0..9 {
            advance(TTL / 8).await;
            pass.once().await.unwrap();
        }
    }

    let Some(Followed::Event(event)) = followed.next().await else { panic!("the run's last event") };
    assert_eq!(event.id, EventId::of_step(1, 3, EventId::ENDED));
    let EventBody::RunEnded { status, error, .. } = &event.body else { panic!("{event:?}") };
    assert_eq!((*status, error.as_ref().unwrap().code.as_str()), (RunStatus::Failed, "worker_crash"));
    assert!(followed.next().await.is_none(), "nothing follows");
}

/// C13
#[tokio::test(start_paused = true)]
async fn a_step_that_nobody_sent_is_sent_by_the_next_dispatch_pass() {
    let place = Place::new();
    let step = place.run().await;
    assert_eq!(place.unread(step).await, 0);

    let mut pass = Dispatch::new(place.parts.clone(), &place.config);
    assert_eq!(pass.once().await.unwrap(), place.config.dispatch_interval);

    assert_eq!(place.unread(step).await, 1);
    assert_eq!(pass.once().await.unwrap(), place.config.dispatch_idle_interval);
}

#[tokio::test(start_paused = true)]
async fn two_schedulers_release_a_lost_lease_once() {
    let place = Place::new();
    let (mut first, mut second) = (place.trusted_leases().await, place.trusted_leases().await);
    let step = place.run().await;
    place.lose_a_worker_on(step).await;

    for _ in 0..10 {
        advance(TTL / 8).await;
        let (one, other) = tokio::join!(first.once(), second.once());
        one.unwrap();
        other.unwrap();
    }

    let record = place.step(step).await;
    assert_eq!((record.status, record.attempt, record.attempts.len()), (StepStatus::Ready, 1, 1));
    assert_eq!(place.unread(step).await, 1);
}
