//! The passes on the store in memory, with the clock in the test's hand.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use threadgate_shared::dispatcher::Dispatcher;
use threadgate_shared::domain::{
    Caller, InterruptRecord, InterruptStatus, JsonMap, LeaseToken, Message, Question, QuestionKind, Role, RunId,
    RunStatus, StepId, ThreadState, WorkerId,
};
use threadgate_shared::events::{EventBody, EventId, EventLog, Followed, MemoryEvents};
use threadgate_shared::graph::admission::{RunInput, admit};
use threadgate_shared::graph::{Graph, NodeContext, Outcome, Patch, engine};
use threadgate_shared::parts::Parts;
use threadgate_shared::queue::{JobQueue, Lane, MemoryQueue};
use threadgate_shared::store::memory::MemoryStore;
use threadgate_shared::store::{
    GraphRecord, Graphs, InterruptFilter, Interrupts as _, LoadRequest, NewRun, Runs, StepCommit, StepStatus, Steps,
    Then,
};
use tokio::time::advance;

use crate::dispatch::Dispatch;
use crate::interrupts::Interrupts;
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

    /// A worker runs the step, whose node asks.
    async fn ask(&self, step: StepId, questions: Vec<Question>) {
        let graph = Graph::builder("one").node("only", nothing).entry("only").build().unwrap();
        let record = GraphRecord {
            name: "one".to_owned(),
            version: graph.version.clone(),
            manifest: (*graph.manifest).clone(),
            registered_at: chrono::DateTime::UNIX_EPOCH,
        };
        self.store.register_graphs(&[record]).await.unwrap();
        let claims = [(step, LeaseToken::new())];
        let versions = [graph.version.clone()];
        let claimed = self.store.claim(&claims, WorkerId::new(), &versions, TTL).await.unwrap().remove(0);
        let request = LoadRequest { run_id: step.run_id, thread_key: claimed.thread_key, since: None };
        let loaded = self.store.load(&[request]).await.unwrap().remove(0);
        let state = ThreadState {
            context: Vec::new(),
            context_summary: None,
            execution_meta: loaded.meta.clone(),
            fields: JsonMap::new(),
        };
        let place = engine::Place { node: "only", seq: step.seq, step_limit: 25 };
        let outcome = Outcome { questions, ..Outcome::default() };
        let advance = engine::advance(&graph, place, &state, Ok(outcome));
        let commit = StepCommit {
            step,
            token: claimed.token,
            base_version: loaded.version,
            questions: advance.next.questions().to_vec(),
            meta: advance.meta,
            stopped_meta: advance.stopped_meta,
            messages: Vec::new(),
            removed: Vec::new(),
            fields: JsonMap::new(),
            then: Then::End { status: RunStatus::Interrupted, error: None },
        };
        self.store.commit(&[commit]).await.remove(0).unwrap();
    }

    async fn questions(&self) -> Vec<InterruptRecord> {
        let filter = InterruptFilter { limit: 100, ..InterruptFilter::default() };
        self.store.interrupts(&Caller::anonymous().scope(), &filter).await.unwrap()
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

fn question(seconds: u64, default: Option<serde_json::Value>) -> Question {
    Question {
        expires_in: Some(Duration::from_secs(seconds)),
        on_expiry: default,
        ..Question::new(QuestionKind::Input, "only", "node:only:0".to_owned(), "input_required")
    }
}

/// C34: with a default exactly that counts, once; before its time and without a default nothing does.
#[tokio::test(start_paused = true)]
async fn a_question_whose_time_is_over_gets_its_default_once() {
    let place = Place::new();
    let (with, without) = (place.run().await, place.run().await);
    place.ask(with, vec![question(60, Some(serde_json::json!("none")))]).await;
    place.ask(without, vec![question(60, None)]).await;
    let (mut first, mut second) =
        (Interrupts::new(place.parts.clone(), &place.config), Interrupts::new(place.parts.clone(), &place.config));

    advance(Duration::from_secs(59)).await;
    first.once().await.unwrap();
    let early = place.questions().await;
    advance(Duration::from_secs(1)).await;
    let (one, other) = tokio::join!(first.once(), second.once());
    one.unwrap();
    other.unwrap();
    first.once().await.unwrap();

    assert!(early.iter().all(|record| record.status == InterruptStatus::Open));
    let over = place.questions().await;
    let of = |step: StepId| over.iter().find(|record| record.run_id() == step.run_id).unwrap();
    assert_eq!((of(with).status, &of(with).answer), (InterruptStatus::Expired, &Some(serde_json::json!("none"))));
    assert_eq!((of(without).status, &of(without).answer), (InterruptStatus::Expired, &None));
    let resumed = place.store.last_of_chain(with.run_id).await.unwrap().unwrap();
    assert_eq!((resumed.resumes, resumed.status), (Some(with.run_id), RunStatus::Queued));
    assert_eq!(place.store.last_of_chain(without.run_id).await.unwrap().unwrap().id, without.run_id);
}

/// A default that cannot be taken keeps no other from its turn.
#[tokio::test(start_paused = true)]
async fn a_default_that_is_refused_blocks_nobody() {
    let place = Place::new();
    let step = place.run().await;
    let approvers = vec!["ann".to_owned()];
    let mut gate = question(1, Some(serde_json::json!({"outcome": "denied"})));
    gate.kind = QuestionKind::Gate; // About no call: nobody can answer it.
    gate.approvers = approvers;
    place.ask(step, vec![gate]).await;
    let other = place.run().await;
    place.ask(other, vec![question(2, Some(serde_json::json!(1)))]).await;
    let mut pass = Interrupts::new(place.parts.clone(), &place.config);
    advance(Duration::from_secs(5)).await;

    pass.once().await.unwrap();
    pass.once().await.unwrap();

    let answered: Vec<_> = place.questions().await.into_iter().filter(|record| record.answer.is_some()).collect();
    assert_eq!(answered.iter().map(InterruptRecord::run_id).collect::<Vec<_>>(), [other.run_id]);
}
