//! The envelope and the refusals, for the documentation; [`crate::middleware`] and [`crate::error`]
//! write them.
#![expect(dead_code, reason = "these types are only their schemas")]

use utoipa::{IntoResponses, ToSchema};

/// A success.
#[derive(ToSchema)]
pub struct Envelope<T: ToSchema> {
    /// The answer.
    data: T,
    /// About the answer.
    metadata: Metadata,
}

/// About an answer.
#[derive(ToSchema)]
pub struct Metadata {
    /// The same as the header `X-Request-ID`.
    request_id: uuid::Uuid,
    /// The server's local time, the same as the header `X-Timestamp`.
    timestamp: String,
    /// `OK`, or the error's message.
    message: String,
}

/// A failure.
#[derive(ToSchema)]
pub struct ErrorBody {
    /// What is wrong.
    error: ErrorView,
    /// About the answer.
    metadata: Metadata,
}

/// What is wrong.
#[derive(ToSchema)]
pub struct ErrorView {
    /// A stable code.
    code: String,
    /// A sentence a person can act on.
    message: String,
    /// Field by field, for `VALIDATION_ERROR`.
    details: Vec<FieldErrorView>,
}

/// What is wrong with one field.
#[derive(ToSchema)]
pub struct FieldErrorView {
    /// `body`, `query` or `path`, then names and indexes.
    #[schema(value_type = Vec<Object>)]
    loc: Vec<String>,
    /// A sentence.
    msg: String,
    /// A stable kind.
    r#type: String,
}

/// What any route that reads the store may answer.
#[derive(IntoResponses)]
pub enum StoreErrors {
    /// The request does not have the right shape, or is not to be done.
    #[response(status = 422)]
    Unprocessable(ErrorBody),
    /// A fault of ours.
    #[response(status = 500)]
    Internal(ErrorBody),
    /// The database cannot be reached; try again.
    #[response(status = 503)]
    Unavailable(ErrorBody),
}

/// What any route that takes a body and writes may answer.
#[derive(IntoResponses)]
pub enum WriteErrors {
    /// A run is active on the thread, or a question is open: nothing was written.
    #[response(status = 409)]
    Conflict(ErrorBody),
    /// The body is too long.
    #[response(status = 413)]
    TooLarge(ErrorBody),
    /// The request does not have the right shape, or is not to be done: nothing was written.
    #[response(status = 422)]
    Unprocessable(ErrorBody),
    /// The run failed (`NODE_…`, `GRAPH_…`, `RECURSION_001`), or a fault of ours.
    #[response(status = 500)]
    Internal(ErrorBody),
    /// The database cannot be reached, or the server is stopping; try again.
    #[response(status = 503)]
    Unavailable(ErrorBody),
}

/// What a path names does not exist, or belongs to somebody else.
#[derive(IntoResponses)]
#[response(status = 404)]
pub struct NotFound(ErrorBody);
