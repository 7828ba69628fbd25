//! What events are called and look like in Redis.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::super::{End, Event, EventBody};
use crate::domain::{RunId, RunStatus};

/// The field that holds an event.
pub(super) const FIELD: &str = "event";

/// An entry: its id, then names and values in turn.
pub(super) type Entry = (String, Vec<Vec<u8>>);

/// Key names of one installation, under the hash tag of its queue.
pub(super) struct Names {
    start: String,
    bell: String,
    ends: String,
}

impl Names {
    pub(super) fn new(prefix: &str) -> Self {
        let bell = format!("{{{prefix}}}:follow:{}", Uuid::new_v4().simple());
        Self { start: format!("{{{prefix}}}:events:"), bell, ends: format!("{{{prefix}}}:ends") }
    }

    /// The stream of a run.
    pub(super) fn run(&self, run: RunId) -> String {
        format!("{}{run}", self.start)
    }

    /// The run of a stream.
    pub(super) fn run_of(&self, key: &str) -> Option<RunId> {
        key.strip_prefix(&self.start)?.parse().ok()
    }

    /// The stream by which this process wakes its own reader.
    pub(super) fn bell(&self) -> &str {
        &self.bell
    }

    /// The stream that names the runs that end.
    pub(super) fn ends(&self) -> &str {
        &self.ends
    }
}

#[derive(Serialize)]
struct Written<'a> {
    at: f64,
    body: &'a EventBody,
}

#[derive(Deserialize)]
struct Read {
    at: f64,
    body: EventBody,
}

/// The event without its id, which is the entry's.
pub(super) fn encode(event: &Event) -> Vec<u8> {
    serde_json::to_vec(&Written { at: event.at, body: &event.body }).expect("plain data in string-keyed maps is JSON")
}

/// The event of an entry; `None` if it holds none, as an entry of another version of us might.
pub(super) fn decode((id, fields): &Entry) -> Option<Event> {
    let [name, body] = fields.as_slice() else { return None };
    if name != FIELD.as_bytes() {
        return None;
    }
    let Read { at, body } = serde_json::from_slice(body).ok()?;
    Some(Event { id: id.parse().ok()?, at, body })
}

/// A run's end as it is told to those who wait for nothing else.
pub(super) fn encode_end(run: RunId, status: RunStatus) -> String {
    format!("{run} {}", status.as_str())
}

/// The end in an entry.
pub(super) fn decode_end((_, fields): &Entry) -> Option<End> {
    let (run, status) = std::str::from_utf8(fields.get(1)?).ok()?.split_once(' ')?;
    Some((run.parse().ok()?, RunStatus::parse(status)?))
}
