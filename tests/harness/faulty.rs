//! A store and an event log whose last write of a run fails where the recordings' server had such a
//! fault: the run's nodes have run and said what they say, and the durable write of its end is refused.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use threadgate_shared::domain::{
    CallResult, GraphVersion, InterruptRecord, LeaseToken, Message, MessageId, PoolName, RunId, RunStatus, Scope,
    StepId, Tenant, ThreadId, WorkerId,
};
use threadgate_shared::events::{End, Event, EventBody, EventId, EventLog, Followed};
use threadgate_shared::graph::engine::{RunError, errored};
use threadgate_shared::queue::Job;
use threadgate_shared::store::*;
use tokio::sync::broadcast::Receiver;

use crate::graphs;

/// The store underneath, with the fault.
pub struct FaultyStore(pub Arc<dyn Store>);

/// The log underneath, with the fault.
pub struct FaultyEvents(pub Arc<dyn EventLog>);

/// What the recordings' server said when it could not write.
fn fault(run: RunId) -> Option<RunError> {
    let (code, message, transient) = match graphs::fault_of(run)?.as_str() {
        "conflict" => ("STORAGE_CONFLICT_001", "stale", false),
        _ => ("STORAGE_TRANSIENT_001", "storage is down", true),
    };
    Some(RunError { code: code.to_owned(), message: message.to_owned(), node: None, transient })
}

fn refuse_the_end(mut step: StepCommit) -> StepCommit {
    if let (Then::End { status: RunStatus::Completed, .. }, Some(error)) = (&step.then, fault(step.step.run_id)) {
        step.meta = errored(step.meta, &error);
        step.then = Then::End { status: RunStatus::Failed, error: Some(error) };
    }
    step
}

#[async_trait]
impl EventLog for FaultyEvents {
    async fn publish(&self, run: RunId, mut events: Vec<Event>) {
        if let Some(fault) = fault(run) {
            for event in &mut events {
                if let EventBody::RunEnded { status, meta, error } = &mut event.body {
                    **meta = errored((**meta).clone(), &fault);
                    (*status, *error) = (RunStatus::Failed, Some(fault.clone()));
                }
            }
        }
        self.0.publish(run, events).await;
    }

    fn follow(&self, run: RunId, after: EventId) -> BoxStream<'static, Followed> {
        self.0.follow(run, after)
    }

    fn ends(&self) -> Receiver<End> {
        self.0.ends()
    }

    fn is_healthy(&self) -> bool {
        self.0.is_healthy()
    }
}

/// Hands every named method to the store underneath.
macro_rules! hand_on {
    ($part:ident { $($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)* } $($more:tt)*) => {
        #[async_trait]
        impl $part for FaultyStore {
            $(async fn $name(&self $(, $argument: $type)*) -> $answer {
                self.0.$name($($argument),*).await
            })*
            $($more)*
        }
    };
}

type Answer<T> = Result<T, StoreError>;

hand_on!(Schema {
    migrate() -> Answer<()>;
    check_schema() -> Answer<()>;
    ping() -> Answer<()>;
});

hand_on!(Graphs {
    register_graphs(graphs: &[GraphRecord]) -> Answer<()>;
    graphs() -> Answer<Vec<GraphRecord>>;
    graph_version(version: &GraphVersion) -> Answer<Option<GraphRecord>>;
});

hand_on!(Runs {
    create_run(new: NewRun, admit: Admit<'_>) -> Answer<Created>;
    run(scope: &Scope, id: RunId) -> Answer<Option<RunRecord>>;
    last_of_chain(root: RunId) -> Answer<Option<RunRecord>>;
    runs(scope: &Scope, filter: &RunFilter) -> Answer<Vec<RunRecord>>;
    finished(ids: &[RunId]) -> Answer<Vec<(RunId, RunStatus)>>;
    steps(run: RunId) -> Answer<Vec<StepRecord>>;
    changes(run: RunId, after: i64) -> Answer<Vec<Change>>;
    stop_thread(scope: &Scope, thread: &ThreadId) -> Answer<StopAnswer>;
    stop_run(scope: &Scope, run: RunId) -> Answer<Option<RunRecord>>;
    why(run: RunId) -> Answer<Option<WhyFacts>>;
});

hand_on!(Steps {
    claim(claims: &[(StepId, LeaseToken)], worker: WorkerId, versions: &[GraphVersion], ttl: Duration) -> Answer<Vec<Claimed>>;
    mark_running(runs: &[RunId]) -> Answer<()>;
    load(wanted: &[LoadRequest]) -> Answer<Vec<Loaded>>;
    heartbeat(leases: &[(StepId, LeaseToken)], ttl: Duration) -> Answer<Vec<LeaseState>>;
    give_back(leases: &[(StepId, LeaseToken)]) -> Answer<u64>;
    retry_step(step: StepId, token: LeaseToken, end: &AttemptEnd, delay: Duration) -> Answer<bool>;
}
    async fn commit(&self, steps: &[StepCommit]) -> Vec<Answer<CommitOutcome>> {
        let steps: Vec<StepCommit> = steps.iter().cloned().map(refuse_the_end).collect();
        self.0.commit(&steps).await
    }
);

hand_on!(Interrupts {
    interrupts(scope: &Scope, filter: &InterruptFilter) -> Answer<Vec<InterruptRecord>>;
    interrupt(scope: &Scope, id: &str) -> Answer<Option<InterruptRecord>>;
    due_for_expiry(limit: u32) -> Answer<Vec<InterruptRecord>>;
});

hand_on!(Ledger {
    begin_calls(step: StepId, lease: LeaseToken, intents: &[Intent]) -> Answer<Vec<Begun>>;
    finish_call(key: &CallKey, token: LeaseToken, result: &CallResult) -> Answer<Finished>;
    calls(scope: &Scope, thread: &ThreadId) -> Answer<Vec<ToolExecution>>;
});

hand_on!(Threads {
    thread(scope: &Scope, id: &ThreadId) -> Answer<Option<ThreadRecord>>;
    threads(scope: &Scope, search: Option<&str>, page: Page) -> Answer<Vec<ThreadRecord>>;
    delete_thread(scope: &Scope, id: &ThreadId) -> Answer<bool>;
    state(scope: &Scope, id: &ThreadId, version: Option<i64>) -> Answer<Option<StoredState>>;
    edit_state(scope: &Scope, edit: StateEdit) -> Answer<StoredState>;
    clear_state(scope: &Scope, id: &ThreadId) -> Answer<()>;
    messages(scope: &Scope, id: &ThreadId, search: Option<&str>, page: Page) -> Answer<Vec<Message>>;
    message(scope: &Scope, id: &ThreadId, message: &str) -> Answer<Option<Message>>;
    put_messages(scope: &Scope, put: PutMessages) -> Answer<()>;
    delete_message(scope: &Scope, id: &ThreadId, message: &str) -> Answer<bool>;
    fix(scope: &Scope, id: &ThreadId, who: &str, choose: &(dyn for<'a> Fn(&'a [Message]) -> Vec<MessageId> + Send + Sync)) -> Answer<Option<(StoredState, usize)>>;
});

hand_on!(Upkeep {
    dispatch(pool: &PoolName, class: i16, after: &Tenant, tenants: u32, each: u32, without: &[GraphVersion]) -> Answer<Vec<(Job, Tenant)>>;
    unsend(steps: &[StepId]) -> Answer<()>;
    backlog_lanes() -> Answer<Vec<(PoolName, i16)>>;
    sweep(limit: u32, expire: bool) -> Answer<Swept>;
    clock() -> Answer<StoreClock>;
    repair(limit: u32) -> Answer<u32>;
    worker_seen(worker: &WorkerRecord) -> Answer<()>;
    worker_gone(worker: WorkerId) -> Answer<()>;
    pools() -> Answer<Vec<PoolRecord>>;
    run_counts() -> Answer<Vec<(RunStatus, i64)>>;
    audit(scope: &Scope, id: &ThreadId) -> Answer<Vec<AuditRecord>>;
});
