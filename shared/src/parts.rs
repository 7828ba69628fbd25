//! The parts every role is given: built once by the program, or by a test.

use std::sync::Arc;

use crate::dispatcher::Dispatcher;
use crate::events::EventLog;
use crate::queue::JobQueue;
use crate::store::Store;

/// What a role works with.
#[derive(Clone)]
pub struct Parts {
    /// The truth.
    pub store: Arc<dyn Store>,
    /// The wake-ups.
    pub queue: Arc<dyn JobQueue>,
    /// The only path into the queue.
    pub dispatcher: Arc<Dispatcher>,
    /// What clients follow.
    pub events: Arc<dyn EventLog>,
}
