//! Paths: what they name.

use axum::extract::{FromRequestParts, RawPathParams};
use http::request::Parts;
use threadgate_shared::domain::{RunId, ThreadId};

use crate::app::App;
use crate::error::ApiError;

/// The thread a path names.
#[derive(Debug)]
pub struct ThreadPath(pub ThreadId);

impl FromRequestParts<App> for ThreadPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let text = path_text(parts, app, "thread_id").await?;
        if text.trim().is_empty() {
            return Err(ApiError::unprocessable("thread_id cannot be empty or whitespace"));
        }
        app.limits.check_id(&text, &["path".into(), "thread_id".into()])?;
        Ok(Self(ThreadId(text)))
    }
}

/// The message a path names, beside its thread.
#[derive(Debug)]
pub struct MessagePath(pub String);

impl FromRequestParts<App> for MessagePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let text = path_text(parts, app, "message_id").await?;
        app.limits.check_id(&text, &["path".into(), "message_id".into()])?;
        Ok(Self(text))
    }
}

/// The run a path names; what cannot be an id of ours is a run that does not exist.
#[derive(Debug)]
pub struct RunPath(pub RunId);

impl FromRequestParts<App> for RunPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        path_text(parts, app, "run_id").await?.parse().map(Self).map_err(|_| unknown_run())
    }
}

/// The question a path names. An id that no store could hold is a question that does not exist.
#[derive(Debug)]
pub struct InterruptPath(pub String);

impl FromRequestParts<App> for InterruptPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let id = path_text(parts, app, "interrupt_id").await?;
        let is_one = id.strip_prefix("int_").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()));
        if is_one { Ok(Self(id)) } else { Err(unknown_interrupt()) }
    }
}

/// No question that the caller sees has this id.
#[must_use]
pub fn unknown_interrupt() -> ApiError {
    ApiError::not_found("no such interrupt; GET /v1/interrupts lists those that wait")
}

/// No run of the caller's has this id.
#[must_use]
pub fn unknown_run() -> ApiError {
    ApiError::not_found("no such run; GET /v1/runs lists yours")
}

async fn path_text(parts: &mut Parts, app: &App, name: &str) -> Result<String, ApiError> {
    let bad = |_| ApiError::field(vec!["path".into(), name.into()], "string_type", "Input should be valid UTF-8");
    let params = RawPathParams::from_request_parts(parts, app).await.map_err(bad)?;
    let value = params.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned());
    value.ok_or_else(ApiError::no_route)
}
