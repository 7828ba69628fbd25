//! What a client may follow: numbered events per run, replayed by cursor. Best effort: what is gone
//! is rebuilt from the store by whoever follows, after a `gap`.

#[cfg(feature = "testing")]
pub mod contract;
mod follow;
mod limits;
mod memory;
mod order;
mod redis;

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::Receiver;

use crate::domain::{ExecutionMeta, Json, JsonMap, Message, MessageId, RunId, RunStatus};
use crate::graph::engine::RunError;

pub use memory::MemoryEvents;
pub use redis::{EventsError, RedisEvents};

/// An event's number within its run: strictly rising, assigned once.
///
/// `major` is the step's seq × 256 + its attempt (at most 255), `minor` the place inside the
/// attempt: 0 = started, then pieces one by one, [`EventId::FINISHED`] = finished. So a late sender of an
/// older attempt is always behind, and the numbers can be rebuilt from the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId {
    /// Step and attempt.
    pub major: u64,
    /// Place inside the attempt.
    pub minor: u64,
}

impl EventId {
    /// Before everything.
    pub const ZERO: Self = Self { major: 0, minor: 0 };

    /// The minor number of a step's last event.
    pub const FINISHED: u64 = 1 << 32;

    /// The minor number of the run's last event, after its last step's.
    pub const ENDED: u64 = Self::FINISHED + 1;

    /// The event `minor` of an attempt at a step.
    #[must_use]
    pub fn of_step(seq: i32, attempt: i16, minor: u64) -> Self {
        let seq = u64::try_from(seq).unwrap_or_default();
        let attempt = u64::try_from(attempt).unwrap_or_default().min(255);
        Self { major: seq * 256 + attempt, minor }
    }
}

impl std::fmt::Display for EventId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.major, self.minor)
    }
}

impl std::str::FromStr for EventId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (major, minor) = text.split_once('-')?;
            Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
        };
        parse().ok_or_else(|| format!("'{text}' is not an event id; send back one that the stream gave"))
    }
}

/// One event of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its number.
    pub id: EventId,
    /// UNIX seconds.
    pub at: f64,
    /// What happened.
    pub body: EventBody,
}

/// What happened. Externally tagged: a buffered enum would lose the digits of big numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventBody {
    /// A node starts.
    NodeStarted {
        /// The node.
        node: String,
        /// The wire's step counter.
        step: i64,
        /// From 1.
        attempt: i16,
    },
    /// A piece of a growing message.
    Delta {
        /// The node.
        node: String,
        /// The piece; `delta` is true.
        message: Box<Message>,
    },
    /// Anything the graph's author sent.
    Custom {
        /// The node.
        node: String,
        /// What was sent.
        value: Json,
    },
    /// A node's step was committed.
    NodeFinished {
        /// The node.
        node: String,
        /// The thread's version after it.
        version: i64,
        /// New to the context.
        messages: Vec<Message>,
        /// Gone from the context.
        removed: Vec<MessageId>,
        /// Changed fields.
        fields: JsonMap,
        /// The place after it.
        meta: Box<ExecutionMeta>,
    },
    /// The run is closed; always the last event.
    RunEnded {
        /// How.
        status: RunStatus,
        /// The place after it.
        meta: Box<ExecutionMeta>,
        /// Why, if it failed.
        error: Option<RunError>,
    },
}

impl EventBody {
    /// Whether nothing follows.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.end().is_some()
    }

    /// How the run ended, if this says so.
    #[must_use]
    pub fn end(&self) -> Option<RunStatus> {
        match self {
            Self::RunEnded { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// What a follower gets.
#[derive(Debug, Clone, PartialEq)]
pub enum Followed {
    /// The next event.
    Event(std::sync::Arc<Event>),
    /// Events may be missing here: rebuild from the store.
    Gap,
}

/// Numbered events per run.
#[async_trait]
pub trait EventLog: Send + Sync + 'static {
    /// Adds events of one run; an id that is not above the newest is refused in silence (a retry).
    /// Best effort: an unreachable log loses them.
    async fn publish(&self, run: RunId, events: Vec<Event>);

    /// Follows a run from behind `after`: what is still there first, then live. A [`Followed::Gap`]
    /// stands wherever something may be missing; what the store tells then may come once more as
    /// events, with the same ids. While the log cannot be reached a gap comes every few seconds, so
    /// that whoever rebuilds on each keeps moving. The stream ends after the run's last event or when
    /// it is dropped. One reader serves all followers of the process.
    fn follow(&self, run: RunId, after: EventId) -> BoxStream<'static, Followed>;

    /// Says which runs end, and how, from now on: for whoever waits for an end alone, at a cost that
    /// does not grow with what the runs do. Best effort, as publishing is.
    fn ends(&self) -> Receiver<End>;

    /// Whether the last exchange worked.
    fn is_healthy(&self) -> bool;
}

/// A run that has ended, and how.
pub type End = (RunId, RunStatus);
