//! What a node says while it runs, on its way to whoever follows the run: best effort, and bounded, for
//! a node that says more than can be told must not fill the worker's memory.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc;

use crate::domain::{Json, Message, json_bytes};

/// Events of one attempt that wait to be told at most; more are dropped.
pub const NODE_EVENTS_MAX: usize = 1_024;

/// Bytes of one event as JSON at most; a bigger one is dropped.
pub const NODE_EVENT_BYTES_MAX: usize = 256 * 1_024;

/// What a node sends while it runs.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "an event is moved once and never kept")]
pub enum NodeEvent {
    /// A piece of a message that is still growing; `delta` is true.
    Delta(Message),
    /// Anything the graph's author wants a client to see.
    Custom(Json),
}

/// The node's end of the way. What is dropped leaves a hole in the numbers, so that whoever follows
/// learns that something is missing.
#[derive(Debug, Clone)]
pub struct NodeEvents {
    way: mpsc::Sender<(u64, NodeEvent)>,
    /// The number of the last event, dropped ones included.
    last: Arc<Mutex<u64>>,
}

/// The other end: events with their numbers, from 1.
pub type NodeEventsReceiver = mpsc::Receiver<(u64, NodeEvent)>;

impl NodeEvents {
    /// A way for the events of one attempt.
    #[must_use]
    pub fn channel() -> (Self, NodeEventsReceiver) {
        let (way, receiver) = mpsc::channel(NODE_EVENTS_MAX);
        (Self { way, last: Arc::default() }, receiver)
    }

    /// Sends `event`, unless too many wait, it is too big, or nobody listens any more.
    pub(crate) fn send(&self, event: NodeEvent) {
        let bytes = match &event {
            NodeEvent::Delta(message) => json_bytes(message),
            NodeEvent::Custom(value) => json_bytes(value),
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        if bytes <= NODE_EVENT_BYTES_MAX {
            let _ = self.way.try_send((*last, event)); // Full or closed: dropped, as promised.
        }
    }

    /// How many were sent so far, dropped ones included.
    #[must_use]
    pub fn sent(&self) -> u64 {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn numbers(receiver: &mut NodeEventsReceiver) -> Vec<u64> {
        std::iter::from_fn(|| receiver.try_recv().ok()).map(|(number, _)| number).collect()
    }

    /// A text whose JSON has `bytes` bytes.
    fn text(bytes: usize) -> Json {
        json!("x".repeat(bytes - 2))
    }

    #[test]
    fn an_event_above_the_limit_leaves_a_hole_in_the_numbers() {
        let (events, mut receiver) = NodeEvents::channel();

        for value in [text(NODE_EVENT_BYTES_MAX), text(NODE_EVENT_BYTES_MAX + 1), json!("small")] {
            events.send(NodeEvent::Custom(value));
        }

        assert_eq!(numbers(&mut receiver), [1, 3]);
        assert_eq!(events.sent(), 3);
    }

    #[test]
    fn no_more_wait_than_the_limit() {
        let (events, mut receiver) = NodeEvents::channel();

        for number in 0..NODE_EVENTS_MAX + 5 {
            events.send(NodeEvent::Custom(json!(number)));
        }
        let first = numbers(&mut receiver);
        events.send(NodeEvent::Custom(json!("later")));

        assert_eq!(first.len(), NODE_EVENTS_MAX);
        assert_eq!(numbers(&mut receiver), [NODE_EVENTS_MAX as u64 + 6]);
    }
}
