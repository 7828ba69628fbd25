//! `GET /v1/runs/{id}/events`: what happens in a run, as server-sent events that can be rejoined.

use std::convert::Infallible;

use axum::extract::State;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::Stream;
use http::{HeaderMap, StatusCode};
use threadgate_shared::domain::Scope;
use threadgate_shared::events::EventId;
use threadgate_shared::graph::ids::unix_seconds;
use threadgate_shared::store::{RunRecord, StepRecord, StepStatus};
use utoipa_axum::routes;

use super::run_graph::Followed;
use super::runs::{known_run, state_at};
use crate::app::App;
use crate::auth::{Access, Authenticated};
use crate::error::ApiError;
use crate::extract::RunPath;
use crate::follow::{Follower, Item, newest_id};
use crate::routing::Routes;
use crate::wire::envelope::{NotFound, StoreErrors};
use crate::wire::run_events::EventWriter;

/// `/v1/runs/{run_id}/events`.
pub fn routes(routes: Routes) -> Routes {
    routes.at(Access::Scope("runs:read"), routes!(events))
}

/// Follows a run to its end.
///
/// Events are numbered; who comes back with `Last-Event-ID` goes on behind that one. Where events
/// are lost, a `gap` says so; the nodes that were committed meanwhile and a `snapshot` follow it.
#[utoipa::path(get, path = "/v1/runs/{run_id}/events", tag = "runs",
    params(("run_id" = Uuid, Path), ("Last-Event-ID" = Option<String>, Header, description = "The last `id` seen")),
    responses(
        (status = 200, description = "`node_started`, `delta`, `custom`, `node_finished`, `gap`, `snapshot`, and \
            `run_ended` last", body = String, content_type = "text/event-stream"),
        (status = 204, description = "The run's last event was seen already"),
        NotFound, StoreErrors,
    ))]
async fn events(
    State(app): State<App>,
    caller: Authenticated,
    headers: HeaderMap,
    RunPath(id): RunPath,
) -> Result<Response, ApiError> {
    let after = last_event_id(&headers)?;
    let scope = caller.scope();
    let run = known_run(&app, &scope, id).await?;
    let steps = app.parts.store.steps(id).await?;
    let end = EventId { minor: EventId::ENDED, ..newest_id(&steps) };
    if run.status.is_final() && after == end {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let follower = Follower::after(&app, scope.clone(), &run, after, version_at(&run, &steps, after));
    let keep_alive = KeepAlive::new().interval(app.config.keep_alive);
    let stream = follow_events(app, scope, run, follower);
    let mut response = Sse::new(stream).keep_alive(keep_alive).into_response();
    let no_buffer = http::HeaderName::from_static("x-accel-buffering");
    response.headers_mut().insert(no_buffer, http::HeaderValue::from_static("no"));
    Ok(response)
}

fn last_event_id(headers: &HeaderMap) -> Result<EventId, ApiError> {
    let Some(header) = headers.get("last-event-id") else { return Ok(EventId::ZERO) };
    let text = String::from_utf8_lossy(header.as_bytes());
    if text.is_empty() {
        return Ok(EventId::ZERO);
    }
    text.parse().map_err(|message| {
        let loc = vec!["header".into(), "Last-Event-ID".into()];
        ApiError::field(loc, "value_error", format!("Value error, {message}"))
    })
}

/// The thread's version once everything up to `after` was seen.
fn version_at(run: &RunRecord, steps: &[StepRecord], after: EventId) -> i64 {
    let done = || steps.iter().filter(|step| step.status == StepStatus::Done && step.version.is_some());
    let seen = done().filter(|step| EventId::of_step(step.id.seq, step.attempt, EventId::FINISHED) <= after);
    let before_first = || done().filter_map(|step| step.version).min().map(|version| version - 1);
    seen.filter_map(|step| step.version).max().or_else(before_first).unwrap_or(run.version)
}

fn follow_events(
    app: App,
    scope: Scope,
    run: RunRecord,
    follower: Follower,
) -> impl Stream<Item = Result<sse::Event, Infallible>> {
    let writer = EventWriter { run: run.id, thread: run.thread_id.clone(), production: app.config.is_production() };
    let going = Going { app, scope, run, follower, writer, is_over: false, _counted: Followed::count("events") };
    futures::stream::unfold(going, |mut going| async move {
        let event = going.next().await?;
        Some((Ok(event), going))
    })
}

struct Going {
    app: App,
    scope: Scope,
    run: RunRecord,
    follower: Follower,
    writer: EventWriter,
    is_over: bool,
    _counted: Followed,
}

impl Going {
    /// The next event; `None` ends the stream: behind the run's last event, or because this server
    /// stops, or cannot read what it must. Whoever comes back goes on where it ended.
    async fn next(&mut self) -> Option<sse::Event> {
        if self.is_over {
            return None;
        }
        let item = tokio::select! {
            item = self.follower.next() => item,
            () = self.app.draining.cancelled() => return None,
        };
        let written = match item {
            Ok(None) => return None,
            Ok(Some(Item::Gap(after))) => Ok(self.writer.gap(after, unix_seconds())),
            Ok(Some(Item::Event(event))) => {
                self.is_over = event.body.is_last();
                Ok(self.writer.event(&event))
            }
            Ok(Some(Item::Rebuilt { id, status, version })) => {
                let state = state_at(&self.app, &self.scope, &self.run, version).await;
                state.map(|state| self.writer.snapshot(id, status, version, state, unix_seconds()))
            }
            Err(error) => Err(error.into()),
        };
        written.map_err(|error| tracing::warn!(run.id = %self.run.id, "Could not follow a run: {}", error.message)).ok()
    }
}
