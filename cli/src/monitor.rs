//! The small listener of each role for the machines that watch it: `/metrics` for Prometheus,
//! `/health/live` and `/health/ready` for whoever restarts it and routes to it.

use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use threadgate_shared::telemetry::Metrics;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Says whether a part can do its work, and if not, why.
pub type Check = Arc<dyn Fn() -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// A check that knows its answer.
pub fn known(check: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Check {
    Arc::new(move || std::future::ready(check()).boxed())
}

/// What the listener shows.
#[derive(Clone)]
pub struct Monitor {
    metrics: Metrics,
    checks: Arc<Vec<(&'static str, Check)>>,
    shutdown: CancellationToken,
}

/// Serves at `address` until `shutdown` and a little longer: not ready, but alive.
///
/// # Errors
/// If the address cannot be had.
pub async fn serve(
    address: SocketAddr,
    metrics: Metrics,
    checks: Vec<(&'static str, Check)>,
    shutdown: CancellationToken,
) -> Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("could not listen on {address}; choose another with --metrics-listen"))?;
    let monitor = Monitor { metrics, checks: Arc::new(checks), shutdown };
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router(monitor)).await {
            tracing::error!(%error, "The listener for metrics and health has ended");
        }
    });
    tracing::info!(%address, "Metrics and health are at {address}");
    Ok(())
}

fn router(monitor: Monitor) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/health/live", get(|| async { "alive" }))
        .route("/health/ready", get(ready))
        .with_state(monitor)
}

async fn metrics(State(monitor): State<Monitor>) -> impl IntoResponse {
    let mut text = monitor.metrics.render();
    let _ = writeln!(text, "# TYPE threadgate_build_info gauge");
    let _ = writeln!(text, "threadgate_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}

async fn ready(State(monitor): State<Monitor>) -> (StatusCode, Json<Value>) {
    let mut checks = serde_json::Map::new();
    let mut is_ready = true;
    for (name, check) in monitor.checks.iter() {
        let found = check().await;
        is_ready &= found.is_ok();
        checks.insert((*name).to_owned(), found.map_or_else(Value::String, |()| "ok".into()));
    }
    if monitor.shutdown.is_cancelled() {
        is_ready = false;
        checks.insert("draining".to_owned(), true.into());
    }
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let word = if is_ready { "ready" } else { "not_ready" };
    (status, Json(json!({"status": word, "checks": checks})))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn monitor(check: Check) -> Monitor {
        static METRICS: std::sync::OnceLock<Metrics> = std::sync::OnceLock::new();
        let metrics = METRICS.get_or_init(|| Metrics::install().unwrap()).clone();
        Monitor { metrics, checks: Arc::new(vec![("worker", check)]), shutdown: CancellationToken::new() }
    }

    #[tokio::test]
    async fn a_role_is_ready_while_every_check_says_so_and_nobody_asked_it_to_end() {
        let good = monitor(known(|| Ok(())));
        assert_eq!(ready(State(good.clone())).await.0, StatusCode::OK);

        let bad = monitor(known(|| Err("the database has not answered for 20 s".to_owned())));
        let (status, Json(body)) = ready(State(bad)).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(body["checks"]["worker"], "the database has not answered for 20 s");

        good.shutdown.cancel();
        assert_eq!(ready(State(good)).await.0, StatusCode::SERVICE_UNAVAILABLE);
    }
}
