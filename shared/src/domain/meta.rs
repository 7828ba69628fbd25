//! `execution_meta`: where a thread is in its graph, as the wire shows it. Owned by the engine.

use serde::{Deserialize, Serialize};

use super::{Json, JsonMap};

/// The name of the place before the entry; a no-op.
pub const START: &str = "__start__";

/// The name of the place after the last node.
pub const END: &str = "__end__";

/// The status on the wire. `running` on a fresh thread is no proof of a live run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutionStatus {
    /// Going on, or never started.
    Running,
    /// Paused before a node, or inside one by `interrupt()`.
    InterruptedBefore,
    /// Paused after a node, or stopped.
    InterruptedAfter,
    /// The last run ended well.
    Completed,
    /// The last run failed.
    Error,
}

/// Where the thread is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExecutionMeta {
    /// `__start__`, `__end__` or a node.
    pub current_node: String,
    /// The wire's own counter: restarts with a completed thread, goes on after a pause or an error.
    pub step: i64,
    /// See [`ExecutionStatus`].
    pub status: ExecutionStatus,
    /// The node a pause is about.
    pub interrupted_node: Option<String>,
    /// `interrupt_before: n`, `interrupt_after: n`, `interrupt`, `remote_tool_call`, `stop_requested`.
    pub interrupt_reason: Option<String>,
    /// `{"interrupt": {...}}` or `{"source": "stop", ...}`.
    pub interrupt_data: Option<Json>,
    /// The thread's id.
    pub thread_id: Option<String>,
    /// `none` always: the stop is a row, not a part of the state.
    pub stop_current_execution: String,
    /// `error` after a failure; counters of prebuilt agents.
    pub internal_data: JsonMap,
}

impl ExecutionMeta {
    /// The state of a thread that never ran.
    #[must_use]
    pub fn fresh(thread_id: &str) -> Self {
        Self {
            current_node: START.to_owned(),
            step: 0,
            status: ExecutionStatus::Running,
            interrupted_node: None,
            interrupt_reason: None,
            interrupt_data: None,
            thread_id: Some(thread_id.to_owned()),
            stop_current_execution: "none".to_owned(),
            internal_data: JsonMap::new(),
        }
    }

    /// Whether the thread waits for somebody.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        matches!(self.status, ExecutionStatus::InterruptedBefore | ExecutionStatus::InterruptedAfter)
    }

    /// Going on: no pause, no error status; `internal_data` stays.
    #[must_use]
    pub fn running_at(mut self, node: &str, step: i64) -> Self {
        node.clone_into(&mut self.current_node);
        self.step = step;
        self.status = ExecutionStatus::Running;
        self.interrupted_node = None;
        self.interrupt_reason = None;
        self.interrupt_data = None;
        self
    }
}
