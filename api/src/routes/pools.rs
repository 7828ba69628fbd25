//! How the pools of workers do.

use axum::Json as AxumJson;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::routes;

use crate::app::App;
use crate::auth::Access;
use crate::error::ApiError;
use crate::routing::Routes;
use crate::wire::envelope::StoreErrors;

/// `/v1/pools`.
pub fn routes(routes: Routes) -> Routes {
    routes.at(Access::Scope("pools:read"), routes!(pools))
}

/// All pools that have steps or workers.
#[derive(Debug, Serialize, ToSchema)]
struct Pools {
    /// By name.
    pools: Vec<PoolView>,
}

/// How one pool does.
#[derive(Debug, Serialize, ToSchema)]
struct PoolView {
    /// Its name.
    pool: String,
    /// Steps that could run now.
    runnable: i64,
    /// Steps that run.
    running: i64,
    /// Seconds the oldest runnable step has waited.
    oldest_wait_seconds: f64,
    /// Workers that live and serve it.
    workers: i64,
    /// Their slots.
    slots: i64,
}

/// Shows per pool what waits, what runs and who serves it.
#[utoipa::path(get, path = "/v1/pools", tag = "runs", responses((status = 200, body = Pools), StoreErrors))]
async fn pools(State(app): State<App>) -> Result<AxumJson<Pools>, ApiError> {
    let pools = app.parts.store.pools().await?.into_iter().map(|pool| PoolView {
        pool: pool.pool.0,
        runnable: pool.runnable,
        running: pool.running,
        oldest_wait_seconds: pool.oldest_wait_s,
        workers: pool.workers,
        slots: pool.slots,
    });
    Ok(AxumJson(Pools { pools: pools.collect() }))
}
