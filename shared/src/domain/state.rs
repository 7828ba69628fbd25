//! The state of a thread: its context, its fields and its place in the graph.

use super::{ExecutionMeta, Json, JsonMap, Message};

/// Names that belong to the engine; a client's or a node's fields may not use them.
pub const ENGINE_FIELDS: [&str; 3] = ["context", "context_summary", "execution_meta"];

/// A thread's state at one version.
#[derive(Debug, Clone, PartialEq)]
pub struct ThreadState {
    /// The messages a model would see.
    pub context: Vec<Message>,
    /// A summary of messages that were dropped from the context.
    pub context_summary: Option<Json>,
    /// The place in the graph.
    pub execution_meta: ExecutionMeta,
    /// The graph's own fields, defaults filled in, in the manifest's order.
    pub fields: JsonMap,
}

impl ThreadState {
    /// The wire form: the engine's fields first, then the graph's.
    #[must_use]
    pub fn to_wire(&self) -> Json {
        let mut wire = JsonMap::new();
        wire.insert("context".to_owned(), to_json(&self.context));
        wire.insert("context_summary".to_owned(), self.context_summary.clone().unwrap_or(Json::Null));
        wire.insert("execution_meta".to_owned(), to_json(&self.execution_meta));
        for (name, value) in &self.fields {
            wire.insert(name.clone(), value.clone());
        }
        Json::Object(wire)
    }

    /// The newest message.
    #[must_use]
    pub fn last_message(&self) -> Option<&Message> {
        self.context.last()
    }
}

/// The JSON form of a value of ours, which always has one.
pub(crate) fn to_json<T: serde::Serialize>(value: &T) -> Json {
    serde_json::to_value(value).expect("our own types have string keys and finite numbers")
}
