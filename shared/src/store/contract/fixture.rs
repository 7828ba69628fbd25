//! What the stories share: a graph of three nodes, and short words for what a worker does.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::meta::{END, START};
use crate::domain::{
    Caller, GraphVersion, Json, JsonMap, LeaseToken, Message, PoolName, Question, Role, RunId, Scope, StepId, Tenant,
    ThreadId, UserId, WorkerId,
};
use crate::graph::admission::{RunInput, admit};
use crate::graph::engine::{self, Next, Place};
use crate::graph::node::{Command, NodeError, Outcome, Patch};
use crate::graph::{EdgeSpec, FieldSpec, Graph, IdKind, Manifest, NodePolicy, NodeSpec, Reducer};
use crate::store::{
    Claimed, CommitOutcome, Created, FirstStep, GraphRecord, LoadRequest, Loaded, NewRun, NewlyCreated, StepCommit,
    StepRecord, Store, StoreError, StoredState, Swept, Then, full_state,
};

/// A lease that nobody sees expire.
pub(super) const LONG: Duration = Duration::from_secs(600);

/// A lease that has run out as soon as it is taken.
pub(super) const OVER: Duration = Duration::ZERO;

/// How often a story looks again for what must become true, each time behind a round trip.
const LOOKS_MAX: usize = 10_000;

/// A store with the graph `first` → `second` → `third`, and a worker that runs it.
#[derive(Clone)]
pub(crate) struct World {
    pub store: Arc<dyn Store>,
    pub graph: Graph,
    pub caller: Caller,
    pub worker: WorkerId,
}

impl World {
    pub(crate) async fn new(store: Arc<dyn Store>) -> Self {
        Self::with(store, manifest()).await
    }

    /// The same with another graph.
    pub(crate) async fn with(store: Arc<dyn Store>, manifest: Manifest) -> Self {
        let graph = graph(manifest);
        store.register_graphs(&[record(&graph)]).await.unwrap();
        Self { store, graph, caller: Caller::anonymous(), worker: WorkerId::new() }
    }

    /// The same store as seen by another caller.
    pub(crate) fn as_caller(&self, tenant: &str, user: &str) -> Self {
        let caller = Caller { tenant: Tenant::from(tenant), user: UserId::from(user), verified: true };
        Self { caller, ..self.clone() }
    }

    pub(super) fn scope(&self) -> Scope {
        self.caller.scope()
    }

    pub(super) fn versions(&self) -> Vec<GraphVersion> {
        vec![self.graph.version.clone()]
    }

    /// A run with one message.
    pub(crate) fn new_run(&self, thread: &str) -> NewRun {
        NewRun {
            id: RunId::new(),
            client_run_id: None,
            caller: self.caller.clone(),
            thread_id: ThreadId::from(thread),
            thread_name: None,
            thread_meta: None,
            graph: self.graph.manifest.name.clone(),
            class: 0,
            message_ids: Vec::new(),
            input: Json::Object(JsonMap::new()),
            config: JsonMap::new(),
            step_limit: 25,
            node_timeout: None,
            versions: vec![(self.graph.version.clone(), Arc::clone(&self.graph.manifest))],
            idempotency: None,
            trace: None,
            observability: true,
        }
    }

    pub(crate) async fn create(&self, thread: &str) -> NewlyCreated {
        self.try_create(self.new_run(thread), hello()).await.expect("the thread takes a run")
    }

    pub(crate) async fn try_create(&self, new: NewRun, input: RunInput) -> Result<NewlyCreated, StoreError> {
        match self.submit(new, input).await? {
            Created::New(created) => Ok(*created),
            other => panic!("a run was to be created: {other:?}"),
        }
    }

    /// Creates by the real rules of admission.
    pub(super) async fn submit(&self, mut new: NewRun, input: RunInput) -> Result<Created, StoreError> {
        new.message_ids = input.messages.iter().map(|message| message.message_id.clone()).collect();
        let (versions, thread) = (new.versions.clone(), new.thread_id.clone());
        self.store.create_run(new, &|view| admit(&versions, &thread, view, &input)).await
    }

    /// Takes a step that must be free.
    pub(super) async fn claim(&self, step: StepId) -> Claimed {
        self.claim_for(step, LONG).await
    }

    pub(super) async fn claim_for(&self, step: StepId, ttl: Duration) -> Claimed {
        self.try_claim(step, ttl).await.unwrap_or_else(|| panic!("step {step} is not free"))
    }

    pub(super) async fn try_claim(&self, step: StepId, ttl: Duration) -> Option<Claimed> {
        let claims = [(step, LeaseToken::new())];
        let claimed = self.store.claim(&claims, self.worker, &self.versions(), ttl).await.unwrap();
        claimed.into_iter().next()
    }

    pub(super) async fn load(&self, claimed: &Claimed, since: Option<i64>) -> Loaded {
        let wanted = [LoadRequest { run_id: claimed.step.run_id, thread_key: claimed.thread_key, since }];
        self.store.load(&wanted).await.unwrap().pop().expect("the run exists")
    }

    /// What the step commits if its node returns `result`, by the engine's real rules.
    pub(super) async fn after(&self, claimed: &Claimed, result: Result<Patch, NodeError>) -> StepCommit {
        let outcome = result.map(|update| Outcome { command: Command { update, goto: None }, questions: Vec::new() });
        self.after_outcome(claimed, outcome).await
    }

    /// The same for a node that may ask.
    pub(super) async fn after_outcome(&self, claimed: &Claimed, outcome: Result<Outcome, NodeError>) -> StepCommit {
        let loaded = self.load(claimed, None).await;
        let stored = StoredState {
            graph_version: claimed.graph_version.clone(),
            version: loaded.version,
            meta: loaded.meta.clone(),
            context: loaded.added.iter().map(|(_, message)| message.clone()).collect(),
            fields: loaded.fields.clone(),
        };
        let state = full_state(&self.graph.manifest, &stored);
        let place = Place { node: &claimed.node, seq: claimed.step.seq, step_limit: loaded.run.step_limit };
        let advance = engine::advance(&self.graph, place, &state, outcome);
        let leaves = |(_, message): &&(i64, Message)| advance.removed.contains(&message.message_id);
        StepCommit {
            step: claimed.step,
            token: claimed.token,
            base_version: loaded.version,
            removed: loaded.added.iter().filter(leaves).map(|(position, _)| *position).collect(),
            messages: advance.messages,
            fields: advance.fields,
            meta: advance.meta,
            stopped_meta: advance.stopped_meta,
            questions: advance.next.questions().to_vec(),
            then: self.then(advance.next),
        }
    }

    fn then(&self, next: Next) -> Then {
        use crate::domain::RunStatus as S;
        match next {
            Next::Node(node) => Then::Next { at: FirstStep::of(&self.graph.manifest, &node), node },
            Next::Completed => Then::End { status: S::Completed, error: None },
            Next::Interrupted(_) => Then::End { status: S::Interrupted, error: None },
            Next::Failed(error) => Then::End { status: S::Failed, error: Some(error) },
        }
    }

    pub(super) async fn commit(&self, commit: &StepCommit) -> Result<CommitOutcome, StoreError> {
        self.store.commit(std::slice::from_ref(commit)).await.pop().expect("one outcome per step")
    }

    /// Runs one step: its node says `text`.
    pub(super) async fn step(&self, run: RunId, seq: i32, text: &str) -> CommitOutcome {
        let claimed = self.claim(StepId { run_id: run, seq }).await;
        self.store.mark_running(&[run]).await.unwrap();
        let commit = self.after(&claimed, Ok(says(text))).await;
        self.commit(&commit).await.unwrap()
    }

    /// Runs all three steps.
    pub(super) async fn finish(&self, run: RunId) {
        for (seq, text) in [(1, "one"), (2, "two"), (3, "three")] {
            self.step(run, seq, text).await;
        }
    }

    /// Runs one step whose node asks.
    pub(super) async fn pause(&self, run: RunId, seq: i32, questions: Vec<Question>) -> CommitOutcome {
        let claimed = self.claim(StepId { run_id: run, seq }).await;
        let outcome = Outcome { questions, ..Outcome::default() };
        let commit = self.after_outcome(&claimed, Ok(outcome)).await;
        self.commit(&commit).await.unwrap()
    }

    pub(super) async fn run(&self, run: RunId) -> crate::store::RunRecord {
        self.store.run(&self.scope(), run).await.unwrap().expect("the run exists")
    }

    pub(super) async fn steps(&self, run: RunId) -> Vec<StepRecord> {
        self.store.steps(run).await.unwrap()
    }

    pub(super) async fn state(&self, thread: &str) -> StoredState {
        self.store.state(&self.scope(), &ThreadId::from(thread), None).await.unwrap().expect("the thread has a state")
    }

    /// The texts of the context.
    pub(super) async fn context(&self, thread: &str) -> Vec<String> {
        self.state(thread).await.context.iter().map(Message::plain_text).collect()
    }

    /// Sweeps until `is_enough`; a lease that just ran out needs a tick of the store's clock.
    pub(super) async fn sweep_until(&self, is_enough: impl Fn(&Swept) -> bool) -> Swept {
        for _ in 0..LOOKS_MAX {
            let swept = self.store.sweep(100, true).await.unwrap();
            if is_enough(&swept) {
                return swept;
            }
        }
        panic!("nothing was due after {LOOKS_MAX} sweeps");
    }
}

/// The input of most runs.
pub(crate) fn hello() -> RunInput {
    RunInput { messages: vec![user("hello")], ..RunInput::default() }
}

pub(super) fn user(text: &str) -> Message {
    Message::text(Role::User, text)
}

pub(super) fn named(id: &str, text: &str) -> Message {
    Message { message_id: id.into(), ..user(text) }
}

/// A node that says something.
pub(super) fn says(text: &str) -> Patch {
    Patch { messages: vec![Message::text(Role::Assistant, text)], ..Patch::default() }
}

/// A node that writes fields.
pub(super) fn writes<const N: usize>(fields: [(&str, Json); N]) -> Patch {
    Patch { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(), ..Patch::default() }
}

/// `first` → `second` → `third`, with the fields `topic` and `count`.
pub(crate) fn manifest() -> Manifest {
    let node = |name: &str| NodeSpec {
        name: name.to_owned(),
        kind: "code".to_owned(),
        spec: Json::Null,
        policy: NodePolicy::default(),
    };
    let edge = |source: &str, target: &str| EdgeSpec {
        source: source.to_owned(),
        target: Some(target.to_owned()),
        condition: None,
        mapping: None,
    };
    let field = |name: &str, default: Json| FieldSpec {
        name: name.to_owned(),
        default,
        reducer: Reducer::default(),
        schema: Json::Null,
    };
    Manifest {
        name: "story".to_owned(),
        code: true,
        nodes: vec![node("first"), node("second"), node("third")],
        edges: vec![edge(START, "first"), edge("first", "second"), edge("second", "third"), edge("third", END)],
        interrupt_before: Vec::new(),
        interrupt_after: Vec::new(),
        fields: vec![field("topic", Json::Null), field("count", Json::from(0))],
        state_type: "StoryState".to_owned(),
        ids: IdKind::default(),
        thread_name: None,
    }
}

/// The same where node `name` runs in `pool`.
pub(super) fn manifest_in_pool(name: &str, pool: &str) -> Manifest {
    let mut manifest = manifest();
    manifest.nodes.iter_mut().filter(|node| node.name == name).for_each(|node| node.policy.pool = PoolName::from(pool));
    manifest
}

pub(super) fn graph(manifest: Manifest) -> Graph {
    let version = manifest.version(None);
    Graph {
        tools: std::collections::HashMap::new(),
        manifest: Arc::new(manifest),
        version,
        nodes: std::collections::HashMap::new(),
        conditions: std::collections::HashMap::new(),
    }
}

pub(super) fn record(graph: &Graph) -> GraphRecord {
    GraphRecord {
        name: graph.manifest.name.clone(),
        version: graph.version.clone(),
        manifest: (*graph.manifest).clone(),
        registered_at: chrono::DateTime::UNIX_EPOCH,
    }
}

/// The step `seq` of a run.
pub(super) fn step_of(run: RunId, seq: i32) -> StepId {
    StepId { run_id: run, seq }
}
