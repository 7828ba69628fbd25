//! How work is announced: a job is a wake-up, the store decides. Redis Streams through apalis, or
//! in process. Only this module names apalis or Redis Streams.

#[cfg(feature = "testing")]
pub mod contract;
mod memory;
mod redis;
mod runtime;
mod turns;

use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

pub use memory::MemoryQueue;
pub use redis::{RedisQueue, Settings as RedisQueueSettings};

use crate::domain::{GraphVersion, PoolName, StepId};

/// Which stream a job is in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Lane {
    /// The pool.
    pub pool: PoolName,
    /// 0 = interactive, 1 = batch.
    pub class: i16,
    /// For code graphs the version, so that only workers which have it read the stream.
    pub graph: Option<GraphVersion>,
}

/// A wake-up for one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The step.
    pub step: StepId,
    /// Where it goes.
    pub lane: Lane,
    /// The attempts it had when it was sent, so that a re-send passes every de-duplication.
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

/// Does the work a job announces.
#[async_trait]
pub trait JobHandler: Send + Sync + 'static {
    /// Claims the step, runs its node and commits, or leaves it; never fails: whatever goes wrong is
    /// in the store, and the job is acknowledged when this returns.
    async fn handle(&self, job: Job);
}

/// Announces work. Every call is best effort.
#[async_trait]
pub trait JobQueue: Send + Sync + 'static {
    /// Adds jobs to their lanes; one that waits there already (same step and attempt) is left out, one
    /// that a handler has is not: it may just be giving it back.
    async fn push(&self, jobs: &[Job]) -> Result<(), QueueError>;

    /// How many unread jobs each lane of `lanes` holds.
    async fn unread(&self, lanes: &[Lane]) -> Result<Vec<usize>, QueueError>;

    /// The unread jobs of `lanes` and of any other lane of the pool and class that has some, with the
    /// right to add to them; `None` while somebody else has it. It ends by itself after a second,
    /// should its holder die.
    async fn begin_filling(
        &self,
        _pool: &PoolName,
        _class: i16,
        lanes: &[Lane],
    ) -> Result<Option<Vec<(Lane, usize)>>, QueueError> {
        let unread = self.unread(lanes).await?;
        Ok(Some(lanes.iter().cloned().zip(unread).collect()))
    }

    /// Gives that right back.
    async fn end_filling(&self, _pool: &PoolName, _class: i16) {}

    /// Reads jobs from `lanes`, the first before the others (with a share for the last), and hands
    /// them to `handler`, at most `slots` at once, each on a task of its own; holds no more jobs than
    /// it has free slots. Returns when `shutdown` is cancelled and the last handler has returned.
    async fn work(
        &self,
        lanes: &[Lane],
        slots: usize,
        handler: Arc<dyn JobHandler>,
        shutdown: CancellationToken,
    ) -> Result<(), QueueError>;

    /// Whether the last exchange with the queue worked; false switches workers to the store.
    fn is_healthy(&self) -> bool;

    /// One cheap round trip.
    async fn ping(&self) -> Result<(), QueueError>;
}
