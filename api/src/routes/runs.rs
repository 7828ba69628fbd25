//! The Runs API: runs as background work that is created, looked at, waited for and stopped.

use std::time::Duration;

use axum::Json as AxumJson;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::LOCATION;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::Serialize;
use sha2::Digest;
use threadgate_shared::domain::{Json, RunId, RunStatus, Scope};
use threadgate_shared::store::{Idempotency, RunFilter, RunRecord, full_state};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::run_graph::traceparent;
use crate::app::App;
use crate::auth::{Access, Authenticated};
use crate::error::ApiError;
use crate::extract::{ApiJson, ApiQuery, RunPath, unknown_run};
use crate::routing::Routes;
use crate::start::{Begun, Start, start};
use crate::waiters::Ticket;
use crate::wire::envelope::{NotFound, StoreErrors, WriteErrors};
use crate::wire::new_run::NewRunBody;
use crate::wire::run_view::{RunSummary, RunView, location};
use crate::wire::{state, why};

/// Seconds that `wait` and `stop?wait` wait where no number is given.
const WAIT_S: f64 = 30.0;

/// How often a chain that is paused is looked at: what resumes it is another run.
const LOOK_AT_CHAIN_EVERY: Duration = Duration::from_secs(1);

/// Runs of one page where nobody says.
const PAGE: i64 = 50;

/// `/v1/runs` and what lies below, but for events.
pub fn routes(routes: Routes) -> Routes {
    routes
        .at(Access::Scope("runs:create"), routes!(create))
        .at(Access::Scope("runs:read"), routes!(list))
        .at(Access::Scope("runs:read"), routes!(read))
        .at(Access::Scope("runs:read"), routes!(wait))
        .at(Access::Scope("runs:stop"), routes!(stop))
        .at(Access::Scope("runs:read"), routes!(why_not))
}

/// Creates a run and answers at once; a worker picks it up.
#[utoipa::path(post, path = "/v1/runs", tag = "runs", request_body = NewRunBody,
    params(("Idempotency-Key" = Option<String>, Header,
        description = "The same key with the same body gives the same run, for a day unless configured otherwise")),
    responses(
        (status = 202, description = "Accepted; `Location` is where to look. `Idempotent-Replayed: true` says that \
            the key was used before", body = RunView),
        WriteErrors,
    ))]
async fn create(
    State(app): State<App>,
    caller: Authenticated,
    headers: HeaderMap,
    ApiJson(body): ApiJson<NewRunBody>,
) -> Result<Response, ApiError> {
    let idempotency = idempotency(&app, &headers, &body.text)?;
    let graph = app.graphs.named(&body.graph).await?;
    let (class, shown_input) = (body.class, body.input.clone());
    let request = body.into_request(graph.manifest.ids, &app.limits, app.config.node_timeout)?;
    let trace = traceparent(&headers);
    let start_of = Start { caller: &caller.0, graph, request, class, shown_input, idempotency, trace };
    let (run, is_replayed) = match start(&app, start_of).await.map_err(ApiError::from)? {
        Begun::New(started) => (started.created.run, false),
        Begun::Replayed(run) => (*run, true),
        Begun::StillPaused(paused) => (paused.run, true),
    };
    let place = location(run.id);
    let view = view(&app, &caller.scope(), run).await?;
    let mut response = (StatusCode::ACCEPTED, AxumJson(view)).into_response();
    if let Ok(place) = HeaderValue::from_str(&place) {
        response.headers_mut().insert(LOCATION, place);
    }
    if is_replayed {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response)
}

/// Says that a key was used before, and that this is its first answer.
pub(super) const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The client's key, if it sent one with `body`.
pub(super) fn idempotency(app: &App, headers: &HeaderMap, body: &str) -> Result<Option<Idempotency>, ApiError> {
    let Some(header) = headers.get("idempotency-key") else { return Ok(None) };
    let loc = ["header".into(), "Idempotency-Key".into()];
    let Ok(key) = header.to_str() else {
        return Err(ApiError::field(loc.to_vec(), "value_error", "Value error, a key is plain ASCII text"));
    };
    app.limits.check_id(key, &loc)?;
    let body_hash = hex::encode(sha2::Sha256::digest(body.as_bytes()));
    Ok(Some(Idempotency { key: key.to_owned(), body_hash, ttl: app.config.idempotency_ttl }))
}

/// One page of runs.
#[derive(Debug, Serialize, ToSchema)]
struct RunList {
    /// Newest first.
    runs: Vec<RunSummary>,
    /// Send it back as `cursor` for the next page; null on the last one.
    next_cursor: Option<String>,
}

/// Lists the caller's runs, newest first.
#[utoipa::path(get, path = "/v1/runs", tag = "runs",
    params(
        ("status" = Option<String>, Query, description = "One or several, separated by commas"),
        ("graph" = Option<String>, Query),
        ("thread_id" = Option<String>, Query),
        ("limit" = Option<i64>, Query, minimum = 1, maximum = 1000, description = "Default 50"),
        ("cursor" = Option<String>, Query, description = "The `next_cursor` of the page before"),
    ),
    responses((status = 200, body = RunList), StoreErrors))]
async fn list(State(app): State<App>, caller: Authenticated, query: ApiQuery) -> Result<AxumJson<RunList>, ApiError> {
    let limit = query.limit(PAGE)?;
    let filter = RunFilter {
        statuses: statuses(&query)?,
        graph: query.text("graph").filter(|text| !text.is_empty()).map(str::to_owned),
        thread: query.text("thread_id").filter(|text| !text.is_empty()).map(Into::into),
        before: cursor(&query)?,
        limit: u32::try_from(limit + 1).unwrap_or(u32::MAX),
    };
    let mut runs = app.parts.store.runs(&caller.scope(), &filter).await?;
    let page = usize::try_from(limit).unwrap_or(usize::MAX);
    let has_more = runs.len() > page;
    runs.truncate(page);
    let next_cursor = runs.last().filter(|_| has_more).map(|run| run.id.to_string());
    let production = app.config.is_production();
    let runs = runs.into_iter().map(|run| RunSummary::new(run, production)).collect();
    Ok(AxumJson(RunList { runs, next_cursor }))
}

fn statuses(query: &ApiQuery) -> Result<Vec<RunStatus>, ApiError> {
    let words = query.all("status").flat_map(|text| text.split(',')).map(str::trim).filter(|word| !word.is_empty());
    let status = |word: &str| {
        RunStatus::parse(word).ok_or_else(|| {
            let known: Vec<&str> = RunStatus::ALL.into_iter().map(RunStatus::as_str).collect();
            let msg = format!("Input should be one of {}", known.join(", "));
            ApiError::field(vec!["query".into(), "status".into()], "enum", msg)
        })
    };
    words.map(status).collect()
}

fn cursor(query: &ApiQuery) -> Result<Option<RunId>, ApiError> {
    let Some(text) = query.text("cursor").filter(|text| !text.is_empty()) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| {
        let msg = "Value error, send back the next_cursor of the page before";
        ApiError::field(vec!["query".into(), "cursor".into()], "value_error", msg)
    })
}

/// Shows one run; with its thread's state once it has ended.
#[utoipa::path(get, path = "/v1/runs/{run_id}", tag = "runs", params(("run_id" = Uuid, Path)),
    responses((status = 200, body = RunView), NotFound, StoreErrors))]
async fn read(
    State(app): State<App>,
    caller: Authenticated,
    RunPath(id): RunPath,
) -> Result<AxumJson<RunView>, ApiError> {
    let run = known_run(&app, &caller.scope(), id).await?;
    Ok(AxumJson(view(&app, &caller.scope(), run).await?))
}

/// Waits for the outcome of the run, or of the runs that resume it.
#[utoipa::path(get, path = "/v1/runs/{run_id}/wait", tag = "runs",
    params(("run_id" = Uuid, Path), ("timeout" = Option<f64>, Query, description = "Seconds, default 30, at most 300")),
    responses(
        (status = 200, description = "The last run of the chain: completed, failed or stopped", body = RunView),
        (status = 202, description = "Not ended yet; a paused run waits for its answer", body = RunView),
        NotFound, StoreErrors,
    ))]
async fn wait(
    State(app): State<App>,
    caller: Authenticated,
    RunPath(id): RunPath,
    query: ApiQuery,
) -> Result<Response, ApiError> {
    let timeout = query.seconds("timeout", WAIT_S, WAIT_S)?;
    // Whoever waits before looking misses no end.
    let ticket = app.waiters.wait_for(id);
    let run = known_run(&app, &caller.scope(), id).await?;
    outcome(&app, &caller.scope(), run, ticket, timeout).await
}

/// The outcome of the run's chain, if there is one in time: 200 with it, else 202.
async fn outcome(
    app: &App,
    scope: &Scope,
    run: RunRecord,
    ticket: Ticket,
    timeout: Duration,
) -> Result<Response, ApiError> {
    let root = run.root;
    let waited = tokio::select! {
        last = last_outcome(app, run.clone(), ticket) => Some(last?),
        () = tokio::time::sleep(timeout) => None,
        () = app.draining.cancelled() => None,
    };
    let last = match waited {
        Some(last) => last,
        None => app.parts.store.last_of_chain(root).await?.unwrap_or(run),
    };
    let status = if is_outcome(last.status) { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, AxumJson(view(app, scope, last).await?)).into_response())
}

/// Waits until the chain of `run` has an outcome; a pause is none. `ticket` is one for `run`.
async fn last_outcome(app: &App, run: RunRecord, mut ticket: Ticket) -> Result<RunRecord, ApiError> {
    if is_outcome(run.status) {
        return Ok(run);
    }
    if !run.status.is_final() {
        ticket.ended().await;
    }
    loop {
        let last = app.parts.store.last_of_chain(run.root).await?.ok_or_else(unknown_run)?;
        if is_outcome(last.status) {
            return Ok(last);
        }
        if last.status.is_final() {
            tokio::time::sleep(LOOK_AT_CHAIN_EVERY).await;
        } else if last.id == ticket.run() {
            ticket.ended().await;
        } else {
            ticket = app.waiters.wait_for(last.id); // And looks again: it may have ended meanwhile.
        }
    }
}

fn is_outcome(status: RunStatus) -> bool {
    status.is_final() && status != RunStatus::Interrupted
}

/// Stops the run, or the run that resumes it, after the node that runs now.
#[utoipa::path(post, path = "/v1/runs/{run_id}/stop", tag = "runs",
    params(("run_id" = Uuid, Path),
        ("wait" = Option<String>, Query, description = "Seconds to wait for the end; `true` means 30. Default 0")),
    responses(
        (status = 200, description = "It has ended", body = RunView),
        (status = 202, description = "The stop is recorded; the node that runs now goes on to its end", body = RunView),
        NotFound, StoreErrors,
    ))]
async fn stop(
    State(app): State<App>,
    caller: Authenticated,
    RunPath(id): RunPath,
    query: ApiQuery,
) -> Result<Response, ApiError> {
    let timeout = query.seconds("wait", 0.0, WAIT_S)?;
    let run = app.parts.store.stop_run(&caller.scope(), id).await?.ok_or_else(unknown_run)?;
    tracing::info!(run.id = %run.id, "Stop requested for run {}", run.id);
    let ticket = app.waiters.wait_for(run.id);
    app.waiters.ask_now(); // A run that waited in the queue is closed already, and no event says so.
    if is_outcome(run.status) || timeout.is_zero() {
        let status = if is_outcome(run.status) { StatusCode::OK } else { StatusCode::ACCEPTED };
        return Ok((status, AxumJson(view(&app, &caller.scope(), run).await?)).into_response());
    }
    outcome(&app, &caller.scope(), run, ticket, timeout).await
}

/// Why a run does not move.
#[derive(Debug, Serialize, ToSchema)]
struct Why {
    /// The run.
    run_id: uuid::Uuid,
    /// Where it is.
    #[schema(value_type = crate::wire::run_view::RunStatusSchema)]
    status: RunStatus,
    /// One sentence.
    why: String,
    /// The open or last step's node.
    node: Option<String>,
    /// Its pool.
    pool: Option<String>,
    /// Its starts so far.
    attempt: Option<i16>,
}

/// Explains in one sentence why the run does not move, and what to do about it.
#[utoipa::path(get, path = "/v1/runs/{run_id}/why", tag = "runs", params(("run_id" = Uuid, Path)),
    responses((status = 200, body = Why), NotFound, StoreErrors))]
async fn why_not(
    State(app): State<App>,
    caller: Authenticated,
    RunPath(id): RunPath,
) -> Result<AxumJson<Why>, ApiError> {
    known_run(&app, &caller.scope(), id).await?;
    let facts = app.parts.store.why(id).await?.ok_or_else(unknown_run)?;
    let step = facts.step.as_ref();
    Ok(AxumJson(Why {
        run_id: id.0,
        status: facts.run.status,
        why: why::sentence(&facts, app.config.is_production()),
        node: step.map(|step| step.node.clone()),
        pool: step.map(|step| step.pool.0.clone()),
        attempt: step.map(|step| step.attempt),
    }))
}

/// The caller's run of that id.
///
/// # Errors
/// 404, the same for a run of somebody else and for one that never was.
pub async fn known_run(app: &App, scope: &Scope, id: RunId) -> Result<RunRecord, ApiError> {
    app.parts.store.run(scope, id).await?.ok_or_else(unknown_run)
}

/// A run with the state it ended with.
async fn view(app: &App, scope: &Scope, run: RunRecord) -> Result<RunView, ApiError> {
    let production = app.config.is_production();
    let state = match run.status.is_final() {
        true => state_at(app, scope, &run, run.version).await?,
        false => None,
    };
    Ok(RunView::new(run, state, production))
}

/// The state of a run's thread at a version.
///
/// # Errors
/// What the store says.
pub async fn state_at(app: &App, scope: &Scope, run: &RunRecord, version: i64) -> Result<Option<Json>, ApiError> {
    let manifest = app.graphs.version(&run.graph_version).await?;
    let stored = app.parts.store.state(scope, &run.thread_id, Some(version)).await?;
    Ok(stored.map(|stored| state::of(&full_state(&manifest, &stored), app.config.is_production())))
}
