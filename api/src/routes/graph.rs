//! What the served graph is, and what can be done to its threads besides running them.

use axum::extract::State;
use serde::Serialize;
use threadgate_shared::domain::{Json, Limits, ThreadId, fix};
use threadgate_shared::store::{StopAnswer, full_state};
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
use crate::wire::{schema, state};

/// `/v1/graph`, `/v1/graph/tools`, `/v1/graph:StateSchema`, `/v1/graph/stop` and `/v1/graph/fix`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .at(Access::Scope("graph:read"), routes!(details))
        .at(Access::Scope("graph:read"), routes!(tools))
        .at(Access::Scope("graph:read"), routes!(state_schema))
        .at(Access::Scope("graph:stop"), routes!(stop))
        .at(Access::Scope("graph:fix"), routes!(fix))
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

/// What a repair did.
#[derive(Debug, Serialize, ToSchema)]
struct Fixed {
    /// Whether there is a state.
    success: bool,
    /// A sentence.
    message: String,
    /// Messages that held an unanswered call.
    removed_count: usize,
    /// The state after it.
    #[schema(value_type = Option<Object>)]
    state: Option<Json>,
}

/// Drops messages whose tool calls nobody answered, so that the thread can be run again.
#[utoipa::path(post, path = "/v1/graph/fix", tag = "graph", request_body = OfThread, responses(
    (status = 200, body = Envelope<Fixed>), WriteErrors,
))]
async fn fix(
    State(app): State<App>,
    caller: Authenticated,
    ApiJson(body): ApiJson<OfThread>,
) -> Result<Enveloped<Fixed>, ApiError> {
    let (thread, who) = (body.thread_id, caller.0.user.as_str());
    let fixed = app.parts.store.fix(&caller.scope(), &thread, who, &|context| fix::repair(context).remove).await?;
    let before = fixed.map(|(before, _)| before);
    let report = fix::report(thread.as_str(), before.as_ref().map(|state| state.context.as_slice()));
    let state = match before {
        None => None,
        Some(mut stored) => {
            let removed = fix::repair(&stored.context).remove;
            stored.context.retain(|message| !removed.contains(&message.message_id));
            let manifest = app.graphs.version(&stored.graph_version).await?;
            Some(state::of(&full_state(&manifest, &stored), app.config.is_production()))
        }
    };
    let fix::FixReport { success, message, removed_count } = report;
    Ok(Enveloped(Fixed { success, message, removed_count, state }))
}
