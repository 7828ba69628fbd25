//! Threads and their states.

use axum::extract::State;
use chrono::{DateTime, Local};
use serde::Serialize;
use threadgate_shared::domain::client::{self, StateChange};
use threadgate_shared::domain::parse::Fill;
use threadgate_shared::domain::{Caller, ExecutionMeta, Json, JsonMap, Limits, ThreadId, ThreadState};
use threadgate_shared::graph::ids::unix_seconds;
use threadgate_shared::store::{Page, StateEdit, StoredState, ThreadRecord, full_state};
use utoipa::ToSchema;
use utoipa_axum::routes;

use crate::app::App;
use crate::auth::{Access, Authenticated};
use crate::error::ApiError;
use crate::extract::{ApiJson, ApiQuery, Fields, FromFields, ThreadPath};
use crate::middleware::Enveloped;
use crate::routing::Routes;
use crate::wire::envelope::{Envelope, StoreErrors, WriteErrors};
use crate::wire::state;

/// `/v1/threads`, `/v1/threads/{thread_id}` and its `/state`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .at(Access::Scope("checkpointer:read"), routes!(list))
        .at(Access::Scope("checkpointer:read"), routes!(read))
        .at(Access::Scope("checkpointer:delete"), routes!(delete))
        .at(Access::Scope("checkpointer:read"), routes!(read_state))
        .at(Access::Scope("checkpointer:write"), routes!(put_state))
        .at(Access::Scope("checkpointer:delete"), routes!(clear_state))
}

/// A list of threads.
#[derive(Debug, Serialize, ToSchema)]
struct ThreadList {
    /// In order of creation.
    threads: Vec<ThreadView>,
}

/// A thread.
#[derive(Debug, Serialize, ToSchema)]
struct ThreadView {
    /// Its id.
    thread_id: String,
    /// Its name.
    thread_name: Option<String>,
    /// Its owner.
    user_id: Option<String>,
    /// What the run that created it sent as `config.thread_meta`.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Json>,
    /// When it changed last, in the server's local time.
    updated_at: Option<String>,
    /// Its last run, where threads have owners.
    run_id: Option<String>,
}

impl ThreadView {
    fn new(thread: ThreadRecord, caller: &Caller) -> Self {
        let updated_at: DateTime<Local> = thread.updated_at.into();
        Self {
            thread_id: thread.id.0,
            thread_name: thread.name,
            user_id: Some(thread.user.0),
            metadata: thread.meta,
            updated_at: Some(updated_at.format("%Y-%m-%dT%H:%M:%S%.6f").to_string()),
            run_id: thread.run_id.filter(|_| caller.verified),
        }
    }
}

/// Lists the caller's threads.
#[utoipa::path(get, path = "/v1/threads", tag = "threads",
    params(
        ("search" = Option<String>, Query, description = "A part of any value, in any case"),
        ("offset" = Option<i64>, Query, minimum = 0),
        ("limit" = Option<i64>, Query, minimum = 1, maximum = 1000, description = "Default 100"),
    ),
    responses((status = 200, body = Envelope<ThreadList>), StoreErrors))]
async fn list(
    State(app): State<App>,
    caller: Authenticated,
    query: ApiQuery,
) -> Result<Enveloped<ThreadList>, ApiError> {
    let page = Page { offset: query.offset()?, limit: query.limit(100)? };
    let threads = app.parts.store.threads(&caller.scope(), query.text("search"), page).await?;
    let threads = threads.into_iter().map(|thread| ThreadView::new(thread, &caller.0)).collect();
    Ok(Enveloped(ThreadList { threads }))
}

/// A thread, or null.
#[derive(Debug, Serialize, ToSchema)]
struct ThreadData {
    /// Around it, as the peer has it.
    thread_data: ThreadOrNull,
}

/// A thread, or null.
#[derive(Debug, Serialize, ToSchema)]
struct ThreadOrNull {
    /// The thread.
    thread: Option<ThreadView>,
}

/// Shows one thread; null for an unknown one.
#[utoipa::path(get, path = "/v1/threads/{thread_id}", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, body = Envelope<ThreadData>), StoreErrors))]
async fn read(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(id): ThreadPath,
) -> Result<Enveloped<ThreadData>, ApiError> {
    let thread = app.parts.store.thread(&caller.scope(), &id).await?;
    let thread = thread.map(|thread| ThreadView::new(thread, &caller.0));
    Ok(Enveloped(ThreadData { thread_data: ThreadOrNull { thread } }))
}

/// A body that is only checked: an object, in which `config` is one too.
#[derive(Debug, ToSchema)]
pub struct Unread {
    /// Not read: the path says which thread.
    #[schema(value_type = Option<Object>)]
    #[expect(dead_code, reason = "documented, checked, and without effect")]
    config: (),
}

impl FromFields for Unread {
    const KNOWN: &'static [&'static str] = &["config"];

    fn from_fields(mut fields: Fields, _: &Limits) -> Result<Self, ApiError> {
        fields.object("config")?;
        Ok(Self { config: () })
    }
}

/// What a change did.
#[derive(Debug, Serialize, ToSchema)]
pub struct Done {
    /// Whether it was done.
    pub success: bool,
    /// A sentence.
    pub message: &'static str,
    /// Whether there was anything to change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<bool>,
}

/// Deletes a thread with its state, messages, runs and traces.
#[utoipa::path(delete, path = "/v1/threads/{thread_id}", tag = "threads", params(("thread_id" = String, Path)),
    request_body = Unread, responses((status = 200, body = Envelope<Done>), WriteErrors))]
async fn delete(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(id): ThreadPath,
    ApiJson(Unread { .. }): ApiJson<Unread>,
) -> Result<Enveloped<Done>, ApiError> {
    let existed = app.parts.store.delete_thread(&caller.scope(), &id).await?;
    Ok(Enveloped(Done { success: true, message: "Thread deleted successfully", data: Some(existed) }))
}

/// A thread's state, or null.
#[derive(Debug, Serialize, ToSchema)]
struct StateData {
    /// `context`, `context_summary`, `execution_meta` and the graph's own fields.
    #[schema(value_type = Option<Object>)]
    state: Option<Json>,
}

/// Shows a thread's state; null where it has none.
#[utoipa::path(get, path = "/v1/threads/{thread_id}/state", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, body = Envelope<StateData>), StoreErrors))]
async fn read_state(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(id): ThreadPath,
) -> Result<Enveloped<StateData>, ApiError> {
    let Some(stored) = app.parts.store.state(&caller.scope(), &id, None).await? else {
        return Ok(Enveloped(StateData { state: None }));
    };
    show(&app, &stored).await
}

async fn show(app: &App, stored: &StoredState) -> Result<Enveloped<StateData>, ApiError> {
    let manifest = app.graphs.version(&stored.graph_version).await?;
    let state = state::of(&full_state(&manifest, stored), app.config.is_production());
    Ok(Enveloped(StateData { state: Some(state) }))
}

/// A state to merge into a thread's.
#[derive(Debug, ToSchema)]
pub struct PutState {
    /// Messages in `context` that are new must be the user's; objects merge, null changes nothing;
    /// `execution_meta` and unknown names are ignored.
    #[schema(value_type = Object)]
    state: Option<Json>,
    /// Not read: the path says which thread.
    #[schema(value_type = Option<Object>)]
    #[expect(dead_code, reason = "documented, checked, and without effect")]
    config: (),
}

impl FromFields for PutState {
    const KNOWN: &'static [&'static str] = &["state", "config"];

    fn from_fields(mut fields: Fields, _: &Limits) -> Result<Self, ApiError> {
        fields.object("config")?;
        Ok(Self { state: fields.take("state"), config: () })
    }
}

/// Merges values into a thread's state, as a version of its own.
#[utoipa::path(put, path = "/v1/threads/{thread_id}/state", tag = "threads", params(("thread_id" = String, Path)),
    request_body = PutState, responses((status = 200, body = Envelope<StateData>), WriteErrors))]
async fn put_state(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(id): ThreadPath,
    ApiJson(body): ApiJson<PutState>,
) -> Result<Enveloped<StateData>, ApiError> {
    let graph = app.graphs.served().await?;
    let (current, manifest) = match app.parts.store.state(&caller.scope(), &id, None).await? {
        Some(stored) => {
            let manifest = app.graphs.version(&stored.graph_version).await?;
            (full_state(&manifest, &stored), manifest)
        }
        None => (empty_state(&graph.manifest, &id), graph.manifest.clone()),
    };
    let StateChange { messages, fields } = {
        let fill = Fill { new_id: &|| manifest.ids.message_id(), now: unix_seconds() };
        client::put_state(body.state.as_ref(), &current, &app.limits, &fill)?
    };
    let edit = StateEdit {
        thread_id: id,
        caller: caller.0.clone(),
        graph: graph.manifest.name.clone(),
        graph_version: graph.version,
        messages,
        fields,
    };
    let edited = app.parts.store.edit_state(&caller.scope(), edit).await?;
    show(&app, &edited).await
}

fn empty_state(manifest: &threadgate_shared::graph::Manifest, id: &ThreadId) -> ThreadState {
    ThreadState {
        context: Vec::new(),
        context_summary: None,
        execution_meta: ExecutionMeta::fresh(id.as_str()),
        fields: manifest.fields_with(&JsonMap::new()),
    }
}

/// Clears a thread's state; its message log stays.
#[utoipa::path(delete, path = "/v1/threads/{thread_id}/state", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, body = Envelope<Done>), WriteErrors))]
async fn clear_state(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(id): ThreadPath,
) -> Result<Enveloped<Done>, ApiError> {
    app.parts.store.clear_state(&caller.scope(), &id).await?;
    Ok(Enveloped(Done { success: true, message: "State cleared successfully", data: Some(true) }))
}
