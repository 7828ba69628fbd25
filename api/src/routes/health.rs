//! Whether the process lives and can do its work.

use axum::Json as AxumJson;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::routes;

use crate::app::App;
use crate::auth::Access;
use crate::middleware::Enveloped;
use crate::routing::Routes;
use crate::wire::envelope::Envelope;

/// `/ping` and `/health/ready`.
pub fn routes(routes: Routes) -> Routes {
    routes.at(Access::Public, routes!(ping)).at(Access::Public, routes!(ready))
}

/// Answers while the process lives.
#[utoipa::path(get, path = "/ping", tag = "health", responses((status = 200, body = Envelope<String>)))]
async fn ping() -> Enveloped<&'static str> {
    Enveloped("pong")
}

/// Whether the process can take requests.
#[derive(Debug, Serialize, ToSchema)]
struct Ready {
    /// `ready` or `not_ready`.
    status: &'static str,
    /// The parts, one by one.
    checks: ReadyChecks,
}

/// The parts of the readiness check.
#[derive(Debug, Serialize, ToSchema)]
struct ReadyChecks {
    /// The database answers and its schema is this program's: `ok` or `fail`.
    checkpointer: &'static str,
    /// `down` while Redis cannot be reached: everything goes on, slower.
    #[serde(skip_serializing_if = "Option::is_none")]
    redis: Option<&'static str>,
    /// There while the process was asked to stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    draining: Option<bool>,
}

/// Says whether this process can take requests; what it found is used again for three seconds.
#[utoipa::path(get, path = "/health/ready", tag = "health", responses(
    (status = 200, description = "It can; a missing Redis only makes it slower", body = Ready),
    (status = 503, description = "No database, another schema, or asked to stop", body = Ready),
))]
async fn ready(State(app): State<App>) -> Response {
    let checks = app.readiness.look(&app.parts).await;
    let draining = app.draining.is_cancelled();
    let is_ready = checks.store && !draining;
    let body = Ready {
        status: if is_ready { "ready" } else { "not_ready" },
        checks: ReadyChecks {
            checkpointer: if checks.store { "ok" } else { "fail" },
            redis: (!checks.queue).then_some("down"),
            draining: draining.then_some(true),
        },
    };
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, AxumJson(body)).into_response()
}
