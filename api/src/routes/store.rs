//! The long-term memory of the peer's API: this server has none, and says so.

use utoipa_axum::routes;

use crate::auth::Access;
use crate::error::ApiError;
use crate::routing::Routes;
use crate::wire::envelope::ErrorBody;

/// `/v1/store/*`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .at(Access::Scope("store:write"), routes!(create))
        .at(Access::Scope("store:read"), routes!(list))
        .at(Access::Scope("store:delete"), routes!(forget))
        .at(Access::Scope("store:read"), routes!(read))
        .at(Access::Scope("store:write"), routes!(update))
        .at(Access::Scope("store:delete"), routes!(delete))
        .at(Access::Scope("store:read"), routes!(search))
}

/// Refuses to store a memory.
#[utoipa::path(post, path = "/v1/store/memories", tag = "store", responses((status = 503, body = ErrorBody)))]
async fn create() -> ApiError {
    not_configured()
}

/// Refuses to list memories.
#[utoipa::path(post, path = "/v1/store/memories/list", tag = "store", responses((status = 503, body = ErrorBody)))]
async fn list() -> ApiError {
    not_configured()
}

/// Refuses to forget memories.
#[utoipa::path(post, path = "/v1/store/memories/forget", tag = "store", responses((status = 503, body = ErrorBody)))]
async fn forget() -> ApiError {
    not_configured()
}

/// Refuses to read a memory.
#[utoipa::path(post, path = "/v1/store/memories/{memory_id}", tag = "store", params(("memory_id" = String, Path)),
    responses((status = 503, body = ErrorBody)))]
async fn read() -> ApiError {
    not_configured()
}

/// Refuses to change a memory.
#[utoipa::path(put, path = "/v1/store/memories/{memory_id}", tag = "store", params(("memory_id" = String, Path)),
    responses((status = 503, body = ErrorBody)))]
async fn update() -> ApiError {
    not_configured()
}

/// Refuses to delete a memory.
#[utoipa::path(delete, path = "/v1/store/memories/{memory_id}", tag = "store", params(("memory_id" = String, Path)),
    responses((status = 503, body = ErrorBody)))]
async fn delete() -> ApiError {
    not_configured()
}

/// Refuses to search memories.
#[utoipa::path(post, path = "/v1/store/search", tag = "store", responses((status = 503, body = ErrorBody)))]
async fn search() -> ApiError {
    not_configured()
}

fn not_configured() -> ApiError {
    ApiError::plain(http::StatusCode::SERVICE_UNAVAILABLE, "Store is not configured")
}
