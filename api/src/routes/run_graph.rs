//! Running the served graph: `invoke` creates a run and waits, `stream` creates one and follows.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::Stream;
use http::header::{CACHE_CONTROL, CONNECTION, CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;
use threadgate_shared::domain::{Json, Message, Role, RunId, RunStatus, Scope, ThreadState};
use threadgate_shared::events::{Event, EventBody, EventId};
use threadgate_shared::graph::Manifest;
use threadgate_shared::graph::admission::{Refusal, Start as StartAt};
use threadgate_shared::graph::ids::unix_seconds;
use threadgate_shared::store::{StillPaused, full_state};
use utoipa::ToSchema;
use utoipa_axum::routes;

use crate::app::App;
use crate::auth::{Access, Authenticated};
use crate::error::ApiError;
use crate::extract::ApiJson;
use crate::follow::{Ended, Follower, Item};
use crate::middleware::Enveloped;
use crate::routing::Routes;
use crate::start::{Begun, NotBegun, Start, Started, start};
use crate::telemetry;
use crate::wire::chunks::{self, Beginning, ChunkWriter, Common};
use crate::wire::envelope::{Envelope, WriteErrors};
use crate::wire::run_request::{Granularity, GraphRunBody};
use crate::wire::schema::MessageSchema;
use crate::wire::state;

/// `/v1/graph/invoke` and `/v1/graph/stream`.
pub fn routes(routes: Routes) -> Routes {
    routes.at(Access::Scope("graph:invoke"), routes!(invoke)).at(Access::Scope("graph:stream"), routes!(stream))
}

/// What a run became.
#[derive(Debug, Serialize, ToSchema)]
struct Invoked {
    /// The last user message, then what the run said.
    #[schema(value_type = Vec<MessageSchema>)]
    messages: Vec<Message>,
    /// The state, with `full`.
    #[schema(value_type = Option<Object>)]
    state: Option<Json>,
    /// The context, with `partial` and `full`.
    #[schema(value_type = Option<Vec<MessageSchema>>)]
    context: Option<Vec<Message>>,
    /// The context's summary, with `partial` and `full`.
    #[schema(value_type = Option<String>)]
    summary: Option<Json>,
    /// About the thread.
    meta: InvokedMeta,
}

/// About the thread of a run.
#[derive(Debug, Serialize, ToSchema)]
struct InvokedMeta {
    /// Whether this request created it.
    is_new_thread: bool,
    /// Its id.
    thread_id: String,
}

/// Runs the served graph and answers with what it became: completed, paused or stopped.
#[utoipa::path(post, path = "/v1/graph/invoke", tag = "graph", request_body = GraphRunBody, responses(
    (status = 200, body = Envelope<Invoked>), WriteErrors,
))]
async fn invoke(
    State(app): State<App>,
    caller: Authenticated,
    headers: HeaderMap,
    ApiJson(body): ApiJson<GraphRunBody>,
) -> Result<Enveloped<Invoked>, ApiError> {
    let granularity = body.response_granularity;
    let accepted = match accept(&app, &caller, &headers, body).await?.map_err(ApiError::from)? {
        Accepted::Run(accepted) => accepted,
        Accepted::StillPaused(still, manifest) => {
            return still_paused(&app, &caller, granularity, *still, &manifest).await;
        }
    };
    let run = accepted.started.created.run.id;
    let thread_id = accepted.started.created.run.thread_id.clone();
    let leave = OnDisconnect::new(&app, &caller, run, accepted.stops_on_disconnect);
    let mut follower = Follower::of_new(&app, caller.scope(), &accepted.started.created);
    let mut said = accepted.started.created.messages.clone();
    let input_count = said.len();
    let ended = tokio::select! {
        ended = collect(&mut follower, &mut said) => ended,
        () = app.closing.cancelled() => Err(ApiError::closing(&run.to_string())),
    };
    leave.disarm();
    let ended = ended?;
    if ended.status == RunStatus::Failed {
        let error = ended.error.as_ref();
        return Err(error.map_or_else(ApiError::internal, |error| ApiError::of_run(error, thread_id.as_str())));
    }
    let produced = said.split_off(input_count);
    let question = said.into_iter().rev().find(|message| message.role == Role::User);
    let wants_state = granularity != Granularity::Low || question.is_none();
    let state = if wants_state {
        final_state(&app, &caller.scope(), &accepted.started, follower.version(), ended)
            .await
            .map_err(|error| error.after_run(&run.to_string()))?
    } else {
        None
    };
    let question = question.or_else(|| last_question(state.as_ref()?));
    let messages = question.into_iter().chain(produced).collect();
    let meta = InvokedMeta { is_new_thread: accepted.started.created.is_new_thread, thread_id: thread_id.0 };
    Ok(Enveloped(shown(&app, granularity, messages, state, meta)))
}

/// As much as was asked for.
fn shown(
    app: &App,
    granularity: Granularity,
    messages: Vec<Message>,
    state: Option<ThreadState>,
    meta: InvokedMeta,
) -> Invoked {
    let production = app.config.is_production();
    let (shown, state) = match granularity {
        Granularity::Low => (None, None),
        Granularity::Partial => (None, state),
        Granularity::Full => (state.as_ref().map(|state| state::of(state, production)), state),
    };
    let (context, summary) = state.map_or((None, None), |state| (Some(state.context), state.context_summary));
    Invoked { messages, state: shown, context, summary, meta }
}

/// Answers were recorded and others are awaited: what an invoke says that ended paused.
async fn still_paused(
    app: &App,
    caller: &Authenticated,
    granularity: Granularity,
    still: StillPaused,
    manifest: &Manifest,
) -> Result<Enveloped<Invoked>, ApiError> {
    let state = state_of(app, &caller.scope(), &still, manifest).await?;
    let messages = last_question(&state).into_iter().chain(still.messages).collect();
    let meta = InvokedMeta { is_new_thread: false, thread_id: still.run.thread_id.0 };
    Ok(Enveloped(shown(app, granularity, messages, Some(state), meta)))
}

async fn state_of(app: &App, scope: &Scope, still: &StillPaused, manifest: &Manifest) -> Result<ThreadState, ApiError> {
    let stored = app.parts.store.state(scope, &still.run.thread_id, Some(still.version)).await?;
    stored.map(|stored| full_state(manifest, &stored)).ok_or_else(ApiError::internal)
}

/// Follows to the end; `said` becomes the context's new messages that are still there.
async fn collect(follower: &mut Follower, said: &mut Vec<Message>) -> Result<Ended, ApiError> {
    while let Some(item) = follower.next().await? {
        if let Some(ended) = item.ended() {
            return Ok(ended);
        }
        let Item::Event(event) = item else { continue };
        if let EventBody::NodeFinished { messages, removed, .. } = &event.body {
            said.extend(messages.iter().cloned());
            if !removed.is_empty() {
                said.retain(|message| message.role == Role::User || !removed.contains(&message.message_id));
            }
        }
    }
    Err(ApiError::internal()) // The run was deleted with its thread.
}

async fn final_state(
    app: &App,
    scope: &Scope,
    started: &Started,
    version: i64,
    ended: Ended,
) -> Result<Option<ThreadState>, ApiError> {
    let thread = &started.created.run.thread_id;
    let Some(mut stored) = app.parts.store.state(scope, thread, Some(version)).await? else { return Ok(None) };
    // A stop may have moved the place on after the last node.
    stored.meta = ended.meta;
    Ok(Some(full_state(&started.manifest, &stored)))
}

fn last_question(state: &ThreadState) -> Option<Message> {
    state.context.iter().rev().find(|message| message.role == Role::User).cloned()
}

/// Runs the served graph and tells what happens, one JSON object per line.
#[utoipa::path(post, path = "/v1/graph/stream", tag = "graph", request_body = GraphRunBody, responses(
    (status = 200, description = "One chunk per line: `event`, `message`, `state`, `data`, `thread_id`, `run_id`, \
        `metadata`, `timestamp`", body = String, content_type = "text/event-stream"),
    WriteErrors,
))]
async fn stream(
    State(app): State<App>,
    caller: Authenticated,
    headers: HeaderMap,
    ApiJson(body): ApiJson<GraphRunBody>,
) -> Result<Response, ApiError> {
    let granularity = body.response_granularity;
    let accepted = match accept(&app, &caller, &headers, body).await? {
        Ok(Accepted::Run(accepted)) => accepted,
        Ok(Accepted::StillPaused(still, manifest)) => {
            return still_paused_lines(&app, &caller, granularity, *still, &manifest).await;
        }
        Err(not) => return refused(&app, &caller, not).await,
    };
    let created = &accepted.started.created;
    let scope = caller.scope();
    let follower = Follower::of_new(&app, scope.clone(), created);
    let leave = OnDisconnect::new(&app, &caller, created.run.id, accepted.stops_on_disconnect);
    let state = match state_after_input(&app, &scope, &accepted.started).await {
        Ok(state) => state,
        Err(error) => {
            leave.disarm(); // The client is here, and learns where its run is.
            return Err(error.after_run(&created.run.id.to_string()));
        }
    };
    let common = Common {
        granularity,
        thread_id: created.run.thread_id.0.clone(),
        run_id: created.run.client_run_id.clone().unwrap_or_else(|| created.run.id.to_string()),
        is_new_thread: created.is_new_thread,
        max_steps: created.run.step_limit,
        production: app.config.is_production(),
        thread_name: accepted.started.manifest.thread_name.clone().filter(|_| !accepted.has_own_name),
        started_at: unix_seconds(),
    };
    let mut writer = ChunkWriter::new(common, state);
    writer.begin(&created.messages, &beginning(&accepted.started));
    Ok(lines(Body::from_stream(follow_lines(app.clone(), follower, writer, leave))))
}

/// The lines of an answer that left others of its pause open: the pause, told once more.
async fn still_paused_lines(
    app: &App,
    caller: &Authenticated,
    granularity: Granularity,
    still: StillPaused,
    manifest: &Manifest,
) -> Result<Response, ApiError> {
    let state = state_of(app, &caller.scope(), &still, manifest).await?;
    let run = &still.run;
    let common = Common {
        granularity,
        thread_id: run.thread_id.0.clone(),
        run_id: run.client_run_id.clone().unwrap_or_else(|| run.id.to_string()),
        is_new_thread: false,
        max_steps: run.step_limit,
        production: app.config.is_production(),
        thread_name: None,
        started_at: unix_seconds(),
    };
    let mut writer = ChunkWriter::new(common, state);
    writer.begin(&still.messages, &Beginning::Nowhere);
    let meta = Box::new(still.meta.clone());
    let body = EventBody::RunEnded { status: RunStatus::Interrupted, meta, error: None };
    writer.event(&Event { id: EventId::ZERO, at: unix_seconds(), body });
    let lines = futures::stream::iter([Ok::<_, std::convert::Infallible>(Bytes::from(writer.take()))]);
    Ok(self::lines(Body::from_stream(lines)))
}

/// Before the first node: what the thread's state is once the input is in it.
async fn state_after_input(app: &App, scope: &Scope, started: &Started) -> Result<ThreadState, ApiError> {
    let created = &started.created;
    if created.is_new_thread {
        return Ok(ThreadState {
            context: created.messages.clone(),
            context_summary: None,
            execution_meta: created.meta.clone(),
            fields: started.manifest.fields_with(&started.admission.fields),
        });
    }
    let stored = app.parts.store.state(scope, &created.run.thread_id, Some(created.version)).await?;
    stored.map(|stored| full_state(&started.manifest, &stored)).ok_or_else(ApiError::internal)
}

fn beginning(started: &Started) -> Beginning {
    match &started.admission.start {
        StartAt::Completed | StartAt::StillPaused => Beginning::Nowhere,
        // The admission went through `__start__`, which is step 0.
        StartAt::Node(_) | StartAt::Interrupted if !started.admission.continues && started.admission.meta.step == 1 => {
            Beginning::AtStart
        }
        StartAt::Node(_) | StartAt::Interrupted => Beginning::AtNode,
    }
}

/// The lines of a run from its beginning to its end.
fn follow_lines(
    app: App,
    follower: Follower,
    writer: ChunkWriter,
    leave: OnDisconnect,
) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> {
    struct Going {
        app: App,
        follower: Follower,
        writer: ChunkWriter,
        leave: OnDisconnect,
        _counted: Followed,
        is_over: bool,
    }
    let going = Going { app, follower, writer, leave, _counted: Followed::count("lines"), is_over: false };
    futures::stream::unfold(going, |mut going| async move {
        loop {
            let lines = going.writer.take();
            if !lines.is_empty() {
                return Some((Ok(Bytes::from(lines)), going));
            }
            if going.is_over {
                going.leave.disarm();
                return None;
            }
            let item = tokio::select! {
                item = going.follower.next() => item,
                () = going.app.closing.cancelled() => {
                    going.writer.fail("this server is stopping; the run goes on, read the thread's state for its end");
                    going.is_over = true;
                    continue;
                }
            };
            match item {
                Ok(Some(Item::Event(event))) => {
                    going.writer.event(&event);
                    going.is_over = event.body.is_last();
                }
                Ok(Some(Item::Gap(_) | Item::Rebuilt { .. })) => {}
                Ok(None) => going.is_over = true,
                Err(error) => {
                    tracing::warn!(%error, "Could not follow a run to its end");
                    going.writer.fail(&error.to_string());
                    going.is_over = true;
                }
            }
        }
    })
}

/// Most refusals are a status; those the peer tells inside the stream stay there.
async fn refused(app: &App, caller: &Authenticated, not: NotBegun) -> Result<Response, ApiError> {
    match &not.refusal {
        Some(Refusal::NothingToResume | Refusal::NoSuchCall(_) | Refusal::ToolNodeStart(_)) => {
            let is_new = app.parts.store.thread(&caller.scope(), &not.thread_id).await?.is_none();
            let line = chunks::refusal(not.thread_id.as_str(), is_new, &not.error.message, unix_seconds());
            let line = futures::stream::iter([Ok::<_, std::convert::Infallible>(Bytes::from(line))]);
            Ok(lines(Body::from_stream(line)))
        }
        _ => Err(not.error),
    }
}

fn lines(body: Body) -> Response {
    let mut response = body.into_response();
    let headers = response.headers_mut();
    let set = [
        (CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (CACHE_CONTROL, "no-cache, no-transform"),
        (CONNECTION, "keep-alive"),
        (CONTENT_ENCODING, "identity"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    for (name, value) in set {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

enum Accepted {
    /// A run.
    Run(Box<AcceptedRun>),
    /// Answers were recorded; the graph is the one the thread is paused on.
    StillPaused(Box<StillPaused>, Arc<Manifest>),
}

struct AcceptedRun {
    started: Started,
    stops_on_disconnect: bool,
    has_own_name: bool,
}

/// Creates the run that the body asks for.
async fn accept(
    app: &App,
    caller: &Authenticated,
    headers: &HeaderMap,
    body: GraphRunBody,
) -> Result<Result<Accepted, NotBegun>, ApiError> {
    let graph = app.graphs.served().await?;
    let request = body.into_request(graph.manifest.ids, &app.limits, app.config.node_timeout)?;
    let stops_on_disconnect = request.config.stops_on_disconnect;
    let has_own_name = request.config.thread_name.is_some();
    let shown_input = serde_json::json!({"messages": request.input.messages, "state": request.input.state});
    let start_of = Start {
        caller: &caller.0,
        graph,
        request,
        class: 0,
        shown_input,
        idempotency: None,
        trace: traceparent(headers),
    };
    match start(app, start_of).await {
        Ok(Begun::New(started)) => {
            let run = AcceptedRun { started: *started, stops_on_disconnect, has_own_name };
            Ok(Ok(Accepted::Run(Box::new(run))))
        }
        Ok(Begun::StillPaused(still)) => {
            let manifest = app.graphs.version(&still.run.graph_version).await?;
            Ok(Ok(Accepted::StillPaused(still, manifest)))
        }
        Ok(Begun::Replayed(_)) => Err(ApiError::internal()), // Only a key replays, and none was sent.
        Err(not) => Ok(Err(not)),
    }
}

/// The caller's trace, so that the run joins it.
#[must_use]
pub fn traceparent(headers: &HeaderMap) -> Option<String> {
    let text = headers.get("traceparent")?.to_str().ok()?;
    let is_hex = |part: &str, digits| part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parts: Vec<&str> = text.split('-').collect();
    match parts.as_slice() {
        [version, trace, span, flags]
            if is_hex(version, 2) && is_hex(trace, 32) && is_hex(span, 16) && is_hex(flags, 2) =>
        {
            Some(text.to_owned())
        }
        _ => None,
    }
}

/// Stops the run if its client goes away before the end, where that was asked for.
struct OnDisconnect {
    armed: Option<(App, Scope, RunId)>,
}

impl OnDisconnect {
    fn new(app: &App, caller: &Authenticated, run: RunId, stops: bool) -> Self {
        Self { armed: stops.then(|| (app.clone(), caller.scope(), run)) }
    }

    fn disarm(mut self) {
        self.armed = None;
    }
}

impl Drop for OnDisconnect {
    fn drop(&mut self) {
        let Some((app, scope, run)) = self.armed.take() else { return };
        if app.draining.is_cancelled() {
            return; // This server leaves, not the client.
        }
        tracing::info!(run.id = %run, "The client of run {run} went away; stopping it as asked");
        tokio::spawn(async move {
            if let Err(error) = app.parts.store.stop_run(&scope, run).await {
                tracing::warn!(run.id = %run, %error, "Could not stop run {run} after its client went away");
            }
        });
    }
}

/// Counts who follows.
pub struct Followed(&'static str);

impl Followed {
    /// One more follower of this kind.
    #[must_use]
    pub fn count(kind: &'static str) -> Self {
        metrics::gauge!(telemetry::FOLLOWERS, "kind" => kind).increment(1.0);
        Self(kind)
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        metrics::gauge!(telemetry::FOLLOWERS, "kind" => self.0).decrement(1.0);
    }
}
