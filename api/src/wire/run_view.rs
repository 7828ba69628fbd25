//! A run as the Runs API shows it.

use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;
use threadgate_shared::domain::{Json, JsonMap, RunId, RunStatus};
use threadgate_shared::graph::engine::RunError;
use threadgate_shared::store::RunRecord;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::error::general_message;

/// A run, whole.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Run)]
pub struct RunView {
    /// Its id.
    run_id: Uuid,
    /// The first run of its chain; its own id, unless it resumes another.
    root_run_id: Uuid,
    /// The paused run it resumes.
    resumes: Option<Uuid>,
    /// What the client called it (`config.run_id`).
    client_run_id: Option<String>,
    /// Its thread.
    thread_id: String,
    /// Its graph.
    graph: String,
    /// The version it is pinned to.
    graph_version: String,
    /// Where it is.
    #[schema(value_type = RunStatusSchema)]
    status: RunStatus,
    /// `interactive` or `batch`.
    priority: &'static str,
    /// Steps it may take.
    recursion_limit: i32,
    /// What was sent.
    #[schema(value_type = Object)]
    input: Json,
    /// What nodes see as their configuration.
    #[schema(value_type = Object)]
    config: JsonMap,
    /// Why it failed.
    error: Option<RunErrorView>,
    /// When it was accepted (RFC 3339).
    created_at: String,
    /// When a worker started it.
    started_at: Option<String>,
    /// When it ended.
    finished_at: Option<String>,
    /// The thread's state at its end; null before.
    #[schema(value_type = Option<Object>)]
    state: Option<Json>,
}

/// A run in a list.
#[derive(Debug, Serialize, ToSchema)]
pub struct RunSummary {
    /// Its id.
    run_id: Uuid,
    /// The first run of its chain.
    root_run_id: Uuid,
    /// The paused run it resumes.
    resumes: Option<Uuid>,
    /// What the client called it.
    client_run_id: Option<String>,
    /// Its thread.
    thread_id: String,
    /// Its graph.
    graph: String,
    /// The version it is pinned to.
    graph_version: String,
    /// Where it is.
    #[schema(value_type = RunStatusSchema)]
    status: RunStatus,
    /// `interactive` or `batch`.
    priority: &'static str,
    /// Why it failed.
    error: Option<RunErrorView>,
    /// When it was accepted (RFC 3339).
    created_at: String,
    /// When a worker started it.
    started_at: Option<String>,
    /// When it ended.
    finished_at: Option<String>,
}

/// Why a run failed.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = RunError)]
pub struct RunErrorView {
    /// A stable code.
    pub code: String,
    /// A sentence.
    pub message: String,
    /// The node it happened in.
    pub node: Option<String>,
    /// Whether the same input could succeed another time.
    pub transient: bool,
}

/// Where a run is.
#[derive(ToSchema)]
#[schema(as = RunStatus, rename_all = "snake_case")]
pub enum RunStatusSchema {
    /// Behind another run, or not due yet.
    Waiting,
    /// A worker may take it.
    Queued,
    /// A worker has it.
    Running,
    /// Ended at the graph's end.
    Completed,
    /// Ended by an error.
    Failed,
    /// Ended by a stop.
    Stopped,
    /// Paused; an answer creates the run that resumes it.
    Interrupted,
}

impl RunView {
    /// A run with the state it ended with.
    #[must_use]
    pub fn new(run: RunRecord, state: Option<Json>, production: bool) -> Self {
        Self {
            run_id: run.id.0,
            root_run_id: run.root.0,
            resumes: run.resumes.map(|id| id.0),
            thread_id: run.thread_id.0,
            graph: run.graph,
            graph_version: run.graph_version.0,
            status: run.status,
            priority: priority(run.class),
            recursion_limit: run.step_limit,
            input: run.input,
            config: run.config,
            error: run.error.map(|error| RunErrorView::new(error, production)),
            created_at: time(run.created_at),
            started_at: run.started_at.map(time),
            finished_at: run.finished_at.map(time),
            client_run_id: run.client_run_id,
            state,
        }
    }
}

impl RunSummary {
    /// A run without what was sent and what it became.
    #[must_use]
    pub fn new(run: RunRecord, production: bool) -> Self {
        Self {
            run_id: run.id.0,
            root_run_id: run.root.0,
            resumes: run.resumes.map(|id| id.0),
            client_run_id: run.client_run_id,
            thread_id: run.thread_id.0,
            graph: run.graph,
            graph_version: run.graph_version.0,
            status: run.status,
            priority: priority(run.class),
            error: run.error.map(|error| RunErrorView::new(error, production)),
            created_at: time(run.created_at),
            started_at: run.started_at.map(time),
            finished_at: run.finished_at.map(time),
        }
    }
}

impl RunErrorView {
    /// The error; in production with a general text.
    #[must_use]
    pub fn new(error: RunError, production: bool) -> Self {
        let message = if production { general_message(&error.code).to_owned() } else { error.message };
        Self { code: error.code, message, node: error.node, transient: error.transient }
    }
}

/// The word for a class.
fn priority(class: i16) -> &'static str {
    if class == 0 { "interactive" } else { "batch" }
}

/// A time of the store on the wire.
#[must_use]
pub fn time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// Where a client finds a run.
#[must_use]
pub fn location(run: RunId) -> String {
    format!("/v1/runs/{run}")
}
