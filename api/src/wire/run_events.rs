//! The events of `GET /v1/runs/{id}/events`, one server-sent event each.

use axum::response::sse;
use serde_json::json;
use threadgate_shared::domain::{ExecutionMeta, Json, RunId, RunStatus, ThreadId};
use threadgate_shared::events::{Event, EventBody, EventId};

use super::run_view::RunErrorView;

/// Writes events of one run.
#[derive(Debug, Clone)]
pub struct EventWriter {
    /// The run.
    pub run: RunId,
    /// Its thread.
    pub thread: ThreadId,
    /// Whether texts of failures stay inside.
    pub production: bool,
}

impl EventWriter {
    /// An event with its number, name and data.
    pub fn event(&self, event: &Event) -> sse::Event {
        let (name, data) = match &event.body {
            EventBody::NodeStarted { node, step, attempt } => {
                ("node_started", json!({"node": node, "step": step, "attempt": attempt}))
            }
            EventBody::Delta { node, message } => ("delta", json!({"node": node, "message": message})),
            EventBody::Custom { node, value } => ("custom", json!({"node": node, "value": value})),
            EventBody::NodeFinished { node, version, messages, removed, fields, meta } => (
                "node_finished",
                json!({
                    "node": node, "version": version, "messages": messages, "removed": removed, "fields": fields,
                    "execution_meta": self.meta(meta),
                }),
            ),
            EventBody::RunEnded { status, meta, error } => {
                let error = error.clone().map(|error| RunErrorView::new(error, self.production));
                ("run_ended", json!({"status": status, "execution_meta": self.meta(meta), "error": error}))
            }
        };
        self.write(name, Some(event.id), data, event.at)
    }

    /// Events are missing behind `after`.
    pub fn gap(&self, after: EventId, now: f64) -> sse::Event {
        let reason = "events behind this one are gone; the nodes that were committed since, \
                      and the state of now, follow from the store";
        self.write("gap", None, json!({"after": after.to_string(), "reason": reason}), now)
    }

    /// Where the run and its thread are now.
    pub fn snapshot(&self, id: EventId, status: RunStatus, version: i64, state: Option<Json>, now: f64) -> sse::Event {
        self.write("snapshot", Some(id), json!({"status": status, "version": version, "state": state}), now)
    }

    fn write(&self, name: &str, id: Option<EventId>, mut data: Json, at: f64) -> sse::Event {
        data["run_id"] = self.run.to_string().into();
        data["thread_id"] = self.thread.as_str().into();
        data["at"] = json!(at);
        // JSON text has no line breaks, so it is one `data` line.
        let event = sse::Event::default().event(name).data(data.to_string());
        match id {
            Some(id) => event.id(id.to_string()),
            None => event,
        }
    }

    fn meta(&self, meta: &ExecutionMeta) -> Json {
        let mut meta = meta.clone();
        if self.production {
            meta.internal_data.remove("error");
        }
        json!(meta)
    }
}
