//! How work is announced: a job is a wake-up, the store decides. Redis Streams through apalis, or
//! in process. Only this module names apalis or Redis Streams.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::domain::{GraphVersion, PoolName, StepId};

/// Which stream a job is in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Lane {
    /// The pool.
    pub pool: PoolName,
    /// 0 = interactive, 1 = batch.
    pub class: i16,
    /// For code graphs the version, so that only workers which have it read the stream (R11).
    pub graph: Option<GraphVersion>,
}

/// A wake-up for one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The step.
    pub step: StepId,
    /// Where it goes.
    pub lane: Lane,
    /// The attempts it had when it was sent, so that a re-send passes every de-duplication (R19).
    pub attempt: i16,
    /// W3C `traceparent`.
    pub trace: Option<String>,
}

/// What the queue could not do; never fatal, for the store has the step.
#[derive(Debug, thiserror::Error)]
#[error("could not {doing}: {message}")]
pub struct QueueError {
    /// What was being done.
    pub doing: &'static str,
    /// Why.
    pub message: String,
}

/// A job that a worker holds; dropping it unacknowledged leaves it to the reclaimer.
#[derive(Debug)]
pub struct Delivery {
    /// The wake-up.
    pub job: Job,
    /// Acknowledges it; call after the claim was decided and the step committed or left.
    pub ack: Ack,
}

/// Acknowledges one delivery.
#[derive(Debug)]
pub struct Ack(pub(crate) Option<(mpsc::UnboundedSender<AckId>, AckId)>);

/// Names a delivery to its queue.
pub type AckId = (Lane, String);

impl Ack {
    /// Tells the queue that this job needs nobody any more.
    pub fn done(mut self) {
        if let Some((sender, id)) = self.0.take() {
            let _ = sender.send(id);
        }
    }
}

/// Announces work. Every call is best effort.
#[async_trait]
pub trait JobQueue: Send + Sync + 'static {
    /// Adds jobs to their lanes; a job that is there already (same step and attempt) is left out.
    async fn push(&self, jobs: &[Job]) -> Result<(), QueueError>;

    /// How many unread jobs each lane of `lanes` holds.
    async fn unread(&self, lanes: &[Lane]) -> Result<Vec<usize>, QueueError>;

    /// Whether the last exchange with the queue worked; false switches workers to the store.
    fn is_healthy(&self) -> bool;

    /// One cheap round trip.
    async fn ping(&self) -> Result<(), QueueError>;
}
