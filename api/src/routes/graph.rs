//! What the served graph is, and what can be done to its threads besides running them.

use axum::extract::State;
use serde::Serialize;
use threadgate_shared::domain::{Json, Limits, ThreadId};
use threadgate_shared::store::StopAnswer;
use utoipa::ToSchema;
use utoipa_axum::routes;

use crate::app::App;
use crate::auth::{Access, Authenticated};
use crate::error::ApiError;
use crate::extract::{ApiJson, Fields, FromFields};
use crate::middleware::Enveloped;
use crate::routing::Routes;
use crate::wire::envelope::{Envelope, StoreErrors, WriteErrors};
use crate::wire::graph_info::GraphDetails;
use crate::wire::schema;

/// `/v1/graph`, `/v1/graph/tools`, `/v1/graph:StateSchema`, `/v1/graph/stop` and `/v1/graph/fix`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .at(Access::Scope("graph:read"), routes!(details))
        .at(Access::Scope("graph:read"), routes!(tools))
        .at(Access::Scope("graph:read"), routes!(state_schema))
        .at(Access::Scope("graph:stop"), routes!(stop))
}

/// Shows the served graph's nodes and edges.
#[utoipa::path(get, path = "/v1/graph", tag = "graph", responses(
    (status = 200, body = Envelope<GraphDetails>), StoreErrors,
))]
async fn details(State(app): State<App>) -> Result<Enveloped<GraphDetails>, ApiError> {
    let graph = app.graphs.served().await?;
    Ok(Enveloped(GraphDetails::of(&graph.manifest, &app.config.checkpointer_name)))
}

/// The tools of a graph.
#[derive(Debug, Default, Serialize, ToSchema)]
struct Tools {
    /// Nodes that have tools.
    node_count: usize,
    /// Tools of all of them.
    tool_count: usize,
    /// Per node; no kind of node has tools yet, so the list is empty.
    #[schema(value_type = Vec<Object>)]
    nodes: Vec<Json>,
}

/// Shows the served graph's tools.
#[utoipa::path(get, path = "/v1/graph/tools", tag = "graph", responses(
    (status = 200, body = Envelope<Tools>), StoreErrors,
))]
async fn tools(State(app): State<App>) -> Result<Enveloped<Tools>, ApiError> {
    app.graphs.served().await?;
    Ok(Enveloped(Tools::default()))
}

/// Shows the JSON Schema of the served graph's state.
#[utoipa::path(get, path = "/v1/graph:StateSchema", tag = "graph", responses(
    (status = 200, body = Envelope<Object>), StoreErrors,
))]
async fn state_schema(State(app): State<App>) -> Result<Enveloped<Json>, ApiError> {
    Ok(Enveloped(schema::of_state(&app.graphs.served().await?.manifest)))
}

/// The body of stop and fix.
#[derive(Debug, ToSchema)]
pub struct OfThread {
    /// The thread.
    #[schema(value_type = String)]
    thread_id: ThreadId,
    /// Not read.
    #[schema(value_type = Option<Object>)]
    #[expect(dead_code, reason = "documented, checked, and without effect")]
    config: (),
}

impl FromFields for OfThread {
    const KNOWN: &'static [&'static str] = &["thread_id", "config"];

    fn from_fields(mut fields: Fields, limits: &Limits) -> Result<Self, ApiError> {
        let thread_id = fields.thread_id(limits)?;
        fields.object("config")?;
        Ok(Self { thread_id, config: () })
    }
}

/// What a stop did.
#[derive(Debug, Serialize, ToSchema)]
struct Stopped {
    /// Whether there was a thread to stop.
    ok: bool,
    /// Whether a run is active, which ends after the node that runs now.
    running: bool,
    /// `not-running` or `no-state`.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

/// Stops the thread's run after the node that runs now; a paused run is closed.
#[utoipa::path(post, path = "/v1/graph/stop", tag = "graph", request_body = OfThread, responses(
    (status = 200, body = Envelope<Stopped>), WriteErrors,
))]
async fn stop(
    State(app): State<App>,
    caller: Authenticated,
    ApiJson(body): ApiJson<OfThread>,
) -> Result<Enveloped<Stopped>, ApiError> {
    let answer = app.parts.store.stop_thread(&caller.scope(), &body.thread_id).await?;
    app.waiters.ask_now(); // A run that waited in the queue is closed already, and no event says so.
    let (ok, running, reason) = match answer {
        StopAnswer::Running(run) => {
            tracing::info!(run.id = %run, "Stop requested for run {run}");
            (true, true, None)
        }
        StopAnswer::NotRunning => (true, false, Some("not-running")),
        StopAnswer::NoState => (false, false, Some("no-state")),
    };
    Ok(Enveloped(Stopped { ok, running, reason }))
}
