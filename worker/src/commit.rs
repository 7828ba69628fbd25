//! The one write of a step: the lease is certain, and the answer, once there is one, is final.

use threadgate_shared::domain::RunStatus;
use threadgate_shared::graph::Graph;
use threadgate_shared::graph::engine::{self, Advance, Next, RunError};
use threadgate_shared::store::{Claimed, CommitOutcome, FirstStep, StepCommit, Then};
use tokio::task::JoinHandle;
use tracing::error;

use crate::announce::Attempt;
use crate::calls::{Asked, KeyedCommit};
use crate::execute::{Executor, lost};
use crate::heartbeat;
use crate::lease::Lease;
use crate::run_node::Left;
use crate::state::{Place, positions_in};

/// A step whose node has ended.
pub(crate) struct Work<'a> {
    pub lease: &'a Lease,
    pub claimed: &'a Claimed,
    /// `None` where the graph cannot be built, so that the run fails.
    pub graph: Option<&'a Graph>,
    pub place: Place,
    pub attempt: Attempt,
    /// Ends when the start of the run is stored.
    pub marked: Option<JoinHandle<()>>,
}

impl Executor {
    /// Commits the step and says so. Content that the store refuses fails the run.
    pub(crate) async fn commit(&self, mut work: Work<'_>, mut advance: Advance) -> Result<(), Left> {
        if !matches!(advance.next, Next::Node(_))
            && let Some(marked) = work.marked.take()
        {
            let _ = marked.await; // Otherwise a run could end before its start is stored.
        }
        let outcome = match self.commit_content(&work, &advance).await? {
            Ok(outcome) => outcome,
            Err(reason) => {
                advance = unstorable(&work, &reason);
                self.commit_content(&work, &advance).await?.map_err(Left::Unusable)?
            }
        };
        self.follow_up(work, advance, outcome).await;
        Ok(())
    }

    /// Commits until there is an answer; the inner error is the store's refusal of this content.
    async fn commit_content(&self, work: &Work<'_>, advance: &Advance) -> Result<Result<CommitOutcome, String>, Left> {
        let removed = self.removed(work, advance).await?;
        self.confirm(work.lease).await?;
        work.lease.settle();
        let mut tries = 0;
        loop {
            let commit = step_commit(work, advance, removed.clone());
            match self.calls.commit(KeyedCommit { thread: work.claimed.thread_key.0, commit }).await {
                Asked::Answer(CommitOutcome::LeaseLost) => return Err(lost()),
                Asked::Answer(CommitOutcome::Conflict) => {
                    error!("Step {} conflicts with its thread's version {}", work.claimed.step, work.place.version);
                    return Err(Left::Unusable("its thread changed under the lease".to_owned()));
                }
                Asked::Answer(outcome) => return Ok(Ok(outcome)),
                Asked::Never(reason) => return Ok(Err(reason)),
                Asked::Again => self.wait_evicted(&mut tries).await?,
            }
        }
    }

    /// Where the removed messages are stored.
    async fn removed(&self, work: &Work<'_>, advance: &Advance) -> Result<Vec<i64>, Left> {
        if advance.removed.is_empty() {
            return Ok(Vec::new());
        }
        match work.place.positions_of(&advance.removed) {
            Some(positions) => Ok(positions),
            None => Ok(positions_in(&self.load(work.lease, work.claimed, None).await?.added, &advance.removed)),
        }
    }

    /// Returns when the lease is certainly ours.
    pub(crate) async fn confirm(&self, lease: &Lease) -> Result<(), Left> {
        let leases = &self.runner.leases;
        let mut tries = 0;
        while lease.is_doubtful() && !lease.lost.is_cancelled() {
            if !leases.are_renewed() {
                lease.lose();
                break;
            }
            let mut this = leases.snapshot();
            this.retain(|held| held.token == lease.token);
            heartbeat::renew(&*self.store, leases, &this, leases.ttl()).await;
            if lease.is_doubtful() {
                self.wait(lease, &mut tries).await?;
            }
        }
        if lease.lost.is_cancelled() { Err(Left::Lost) } else { Ok(()) }
    }
}

fn step_commit(work: &Work<'_>, advance: &Advance, removed: Vec<i64>) -> StepCommit {
    let then = match (&advance.next, work.graph) {
        (Next::Node(node), Some(graph)) => Then::Next { node: node.clone(), at: FirstStep::of(&graph.manifest, node) },
        (next, _) => {
            let (status, error) = end_of(next);
            Then::End { status, error }
        }
    };
    StepCommit {
        step: work.lease.step,
        token: work.lease.token,
        base_version: work.place.version,
        meta: advance.meta.clone(),
        stopped_meta: advance.stopped_meta.clone(),
        messages: advance.messages.clone(),
        removed,
        fields: advance.fields.clone(),
        questions: advance.next.questions().to_vec(),
        then,
    }
}

/// How a run ends by `next`.
pub(crate) fn end_of(next: &Next) -> (RunStatus, Option<RunError>) {
    match next {
        Next::Node(_) | Next::Completed => (RunStatus::Completed, None),
        Next::Interrupted(_) => (RunStatus::Interrupted, None),
        Next::Failed(error) => (RunStatus::Failed, Some(error.clone())),
    }
}

fn unstorable(work: &Work<'_>, reason: &str) -> Advance {
    let node = &work.claimed.node;
    let error = RunError {
        code: "STORAGE_001".to_owned(),
        message: format!("the output of node '{node}' could not be stored: {reason}"),
        node: Some(node.clone()),
        transient: false,
    };
    engine::failed(&work.place.state, node, error)
}
