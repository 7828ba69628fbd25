//! Threadgate's stateless HTTP API: two faces over one core. It creates runs, follows and stops
//! them, and shows threads; it never runs a node, and any number of replicas may serve.

pub mod app;
pub mod auth;
pub mod config;
mod connections;
mod cors;
pub mod error;
pub mod extract;
pub mod follow;
pub mod graphs;
pub mod json;
pub mod middleware;
pub mod readiness;
pub mod routes;
pub mod routing;
pub mod start;
mod telemetry;
#[cfg(test)]
mod testing;
pub mod waiters;
pub mod wire;

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn_with_state;
use threadgate_shared::parts::Parts;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{NotForContentType, Predicate, SizeAbove};
use utoipa::OpenApi;

pub use app::App;
pub use config::{ApiConfig, AuthMode, Mode};

use crate::error::ApiError;
use crate::routes::docs;
use crate::routing::Routes;

/// Answers at least this long are compressed for clients that ask for it, in bytes.
const COMPRESSED_FROM: u64 = 1_000;

/// Why the API does not start or ends.
#[derive(Debug, thiserror::Error)]
pub enum ApiServeError {
    /// Settings do not fit together.
    #[error("{0}")]
    Config(String),
    /// The address cannot be had.
    #[error("could not listen on {address}; is another server there? Choose another with THREADGATE_LISTEN")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The database cannot be used.
    #[error(transparent)]
    Store(#[from] threadgate_shared::store::StoreError),
}

/// Takes the address, so that a caller can print it before anybody serves there.
///
/// # Errors
/// [`ApiServeError::Config`] and [`ApiServeError::Listen`].
pub async fn bind(config: &ApiConfig) -> Result<TcpListener, ApiServeError> {
    config.validate().map_err(ApiServeError::Config)?;
    let address = config.listen;
    TcpListener::bind(address).await.map_err(|source| ApiServeError::Listen { address, source })
}

/// Serves on `listener` until `shutdown`: then nothing new is accepted, event streams end, and after
/// the grace those who still wait are answered.
///
/// # Errors
/// [`ApiServeError`] says what to change.
pub async fn serve(
    listener: TcpListener,
    config: ApiConfig,
    parts: Parts,
    shutdown: CancellationToken,
) -> Result<(), ApiServeError> {
    config.validate().map_err(ApiServeError::Config)?;
    parts.store.check_schema().await?;
    telemetry::describe();
    let grace = config.request_grace;
    let app = App::new(config, parts, shutdown.clone());
    let closing = app.closing.clone();
    let connections = connections::serve(listener, router(&app), &app.config, &shutdown);
    let over = async {
        shutdown.cancelled().await;
        tokio::time::sleep(grace).await;
        closing.cancel();
        // Time to write the last answers.
        tokio::time::sleep(LAST_WORDS).await;
    };
    tokio::select! {
        () = connections => {}
        () = over => {}
    }
    Ok(())
}

/// How long answers may take to be written once nobody may wait any more.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// All routes with all layers.
pub fn router(app: &App) -> Router {
    let (routes, openapi) = routes(app).split();
    let routes = if app.config.serves_docs() { routes.merge(docs::router(&docs::document(&openapi))) } else { routes };
    let compressible = SizeAbove::new(COMPRESSED_FROM).and(NotForContentType::const_new("text/event-stream"));
    routes
        .fallback(|| async { ApiError::no_route() })
        .method_not_allowed_fallback(|| async { ApiError::no_method() })
        .layer(CatchPanicLayer::custom(middleware::panicked))
        .layer(from_fn_with_state(app.clone(), middleware::frame))
        .layer(CompressionLayer::new().compress_when(compressible))
        .layer(from_fn_with_state(app.clone(), cors::cors))
        .with_state(app.clone())
}

/// The table of routes.
fn routes(app: &App) -> Routes {
    let tables = [
        routes::health::routes,
        routes::graph::routes,
        routes::run_graph::routes,
        routes::threads::routes,
        routes::thread_messages::routes,
        routes::observability::routes,
        routes::runs::routes,
        routes::runs_follow::routes,
        routes::pools::routes,
        routes::interrupts::routes,
        routes::store::routes,
    ];
    tables.into_iter().fold(Routes::new(app, docs::About::openapi()), |routes, table| table(routes))
}
