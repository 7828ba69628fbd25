//! Generated message and thread ids, as a graph wants them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::IdKind;
use crate::domain::{Message, MessageId, ThreadId};

impl IdKind {
    /// A new message id.
    #[must_use]
    pub fn message_id(self) -> MessageId {
        match self {
            Self::String => MessageId::random(),
            Self::Integer => MessageId { text: rand::random::<u32>().to_string(), is_int: true },
            Self::Bigint => MessageId { text: nanoseconds().to_string(), is_int: true },
        }
    }

    /// A new thread id: of the same kind, as text.
    #[must_use]
    pub fn thread_id(self) -> ThreadId {
        ThreadId(self.message_id().text)
    }

    /// The word of `GET /v1/graph`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::String => "string",
            Self::Integer => "integer",
            Self::Bigint => "bigint",
        }
    }

    /// Completes a message that a node made: the time where it has none, and an id of this kind
    /// where integers are due and the message has a text.
    pub fn complete(self, message: &mut Message) {
        if self != Self::String && !message.message_id.is_int {
            message.message_id = self.message_id();
        }
        if message.timestamp.is_none() {
            message.timestamp = serde_json::Number::from_f64(unix_seconds());
        }
    }
}

/// The wall clock in UNIX seconds: what a message's `timestamp` says. Orders nothing.
#[must_use]
pub fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The nanosecond clock, strictly rising within the process.
fn nanoseconds() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX - 1);
    let rise = |last: u64| Some(now.max(last + 1));
    let before = LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rise).unwrap_or_else(|last| last);
    now.max(before + 1)
}

/// The name of a new thread: `template` with the number of its messages for `{messages}`.
#[must_use]
pub fn thread_name(template: &str, messages: usize) -> String {
    template.replace("{messages}", &messages.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Role;

    #[test]
    fn ids_are_of_their_kind() {
        let text = IdKind::String.message_id();
        assert!(!text.is_int && text.text.len() == 36);

        let int = IdKind::Integer.message_id();
        assert!(int.is_int && int.text.parse::<u32>().is_ok());

        let big = IdKind::Bigint.message_id();
        assert!(big.is_int && (19..=20).contains(&big.text.len()), "{big}");
        assert!(IdKind::Bigint.thread_id().0.parse::<u64>().is_ok());
    }

    #[test]
    fn the_clock_never_repeats_itself() {
        let ids: Vec<u64> = (0..1_000).map(|_| nanoseconds()).collect();

        assert!(ids.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn a_nodes_message_gets_an_id_of_the_graphs_kind_and_a_time() {
        let mut message = Message::text(Role::Assistant, "x");
        let uuid = message.message_id.clone();

        IdKind::String.complete(&mut message);
        assert_eq!(message.message_id, uuid);
        assert!(message.timestamp.is_some());

        IdKind::Integer.complete(&mut message);
        let given = message.message_id.clone();
        assert!(given.is_int);

        IdKind::Integer.complete(&mut message);
        assert_eq!(message.message_id, given);
    }
}
