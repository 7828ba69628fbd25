//! What goes wrong on its way to the client: the only place that knows status codes and codes.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde_json::json;
use threadgate_shared::domain::client::ClientError;
use threadgate_shared::domain::{FieldError, Json, JsonMap};
use threadgate_shared::graph::admission::Refusal;
use threadgate_shared::graph::engine::RunError;
use threadgate_shared::store::StoreError;

use crate::middleware::Unframed;

/// The code of every error raised with an explicit status.
const PLAIN: &str = "HTTPException";

/// A failure as the client sees it, framed as an envelope by [`crate::middleware`].
#[derive(Debug, Clone)]
pub struct ApiError(Box<Failure>);

/// What an [`ApiError`] is made of.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The HTTP status.
    pub status: StatusCode,
    /// The stable code.
    pub code: String,
    /// A sentence a person can act on.
    pub message: String,
    /// What is wrong with which field.
    pub details: Vec<FieldError>,
    /// More keys beside `error` and `metadata`.
    pub beside: JsonMap,
    /// More headers.
    pub headers: HeaderMap,
    /// What happened inside; logged, never sent.
    pub source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    /// The body has this limit, in bytes: the answer has a shape of its own.
    pub body_limit: Option<usize>,
}

impl ApiError {
    /// An error with a code of its own.
    #[must_use]
    pub fn new(status: StatusCode, code: impl Into<String>, message: impl Into<String>) -> Self {
        Self(Box::new(Failure {
            status,
            code: code.into(),
            message: message.into(),
            details: Vec::new(),
            beside: JsonMap::new(),
            headers: HeaderMap::new(),
            source: None,
            body_limit: None,
        }))
    }

    /// An error without a code of its own.
    #[must_use]
    pub fn plain(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, PLAIN, message)
    }

    /// The request is well formed but not to be done (422).
    #[must_use]
    pub fn unprocessable(message: impl Into<String>) -> Self {
        Self::plain(StatusCode::UNPROCESSABLE_ENTITY, message)
    }

    /// Fields of the request are wrong (422).
    #[must_use]
    pub fn fields(details: Vec<FieldError>) -> Self {
        let mut error = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "VALIDATION_ERROR", "Validation error");
        error.details = details;
        error
    }

    /// One field of the request is wrong (422).
    #[must_use]
    pub fn field(loc: Vec<Json>, kind: &'static str, msg: impl Into<String>) -> Self {
        Self::fields(vec![FieldError { loc, msg: msg.into(), kind }])
    }

    /// What the path names does not exist, or belongs to somebody else (404).
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "RESOURCE_NOT_FOUND", message)
    }

    /// The path itself does not exist (404).
    #[must_use]
    pub fn no_route() -> Self {
        Self::plain(StatusCode::NOT_FOUND, "Not Found")
    }

    /// The path exists, the method does not (405).
    #[must_use]
    pub fn no_method() -> Self {
        Self::plain(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
    }

    /// A fault of ours (500).
    #[must_use]
    pub fn internal() -> Self {
        Self::plain(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error")
    }

    /// The body is longer than `limit` bytes (413); `declared`: its header said so.
    #[must_use]
    pub fn too_large(limit: usize, declared: bool) -> Self {
        let message = format!("Request body too large. Maximum size is {}", size_text(limit));
        let mut error = Self::new(StatusCode::PAYLOAD_TOO_LARGE, "REQUEST_TOO_LARGE", message);
        error.body_limit = declared.then_some(limit);
        error
    }

    /// Another run has the thread (409).
    #[must_use]
    pub fn conflict(thread: &str, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::CONFLICT, "STATE_CONFLICT", message);
        // Older clients read these two beside the envelope.
        let detail = error.message.clone();
        error.beside.insert("detail".to_owned(), detail.into());
        error.beside.insert("thread_id".to_owned(), thread.into());
        error
    }

    /// The server stops; the run goes on elsewhere (503).
    #[must_use]
    pub fn closing(run: &str) -> Self {
        let message = format!("this server is stopping; the run goes on, read it at /v1/runs/{run}");
        Self::plain(StatusCode::SERVICE_UNAVAILABLE, message).with_header(http::header::RETRY_AFTER, "1")
    }

    /// What kept the outcome of an accepted run from being read: says where the run is, for the same
    /// request once more would be another run.
    #[must_use]
    pub fn after_run(mut self, run: &str) -> Self {
        self.message = format!("{}; the run was accepted all the same, read it at /v1/runs/{run}", self.message);
        self
    }

    /// The same with a header.
    #[must_use]
    pub fn with_header(mut self, name: HeaderName, value: &'static str) -> Self {
        self.headers.insert(name, HeaderValue::from_static(value));
        self
    }

    fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// What a run's own failure is to the request that waited for it.
    #[must_use]
    pub fn of_run(error: &RunError, thread: &str) -> Self {
        let status = match error.code.as_str() {
            code if code.starts_with("STORAGE_CONFLICT") => return Self::conflict(thread, &error.message),
            code if code.starts_with("STORAGE_TRANSIENT") => StatusCode::SERVICE_UNAVAILABLE,
            code if code.starts_with("STORAGE_SCHEMA") => StatusCode::UNPROCESSABLE_ENTITY,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, &error.code, &error.message)
    }

    /// The message that may leave the server: in production what happened inside stays inside.
    #[must_use]
    pub fn public_message(&self, production: bool) -> &str {
        if !production {
            return &self.message;
        }
        if self.code == "VALIDATION_ERROR" {
            return "The request data is invalid. Please check your input.";
        }
        // What is refused on purpose says nothing of the inside.
        let is_refusal = self.status == StatusCode::SERVICE_UNAVAILABLE && self.code == PLAIN;
        if !self.status.is_server_error() || is_refusal {
            return &self.message;
        }
        general_message(&self.code)
    }

    /// The body of the answer, as it may leave the server.
    #[must_use]
    pub fn body(&self, request_id: &str, timestamp: &str, production: bool) -> Json {
        if let Some(limit) = self.body_limit {
            #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
            let mib = limit as f64 / (1024.0 * 1024.0);
            return json!({
                "error": {"code": self.code, "message": self.message, "max_size_bytes": limit, "max_size_mb": mib},
                "metadata": {"request_id": request_id, "status": "error"},
            });
        }
        let message = self.public_message(production);
        let details: &[FieldError] = if production { &[] } else { &self.details };
        let mut body = json!({
            "error": {"code": self.code, "message": message, "details": details},
            "metadata": {"request_id": request_id, "timestamp": timestamp, "message": message},
        });
        if let Json::Object(map) = &mut body {
            map.extend(self.beside.clone());
        }
        body
    }
}

/// The text that stands for a failure inside, by its code's family.
#[must_use]
pub fn general_message(code: &str) -> &'static str {
    match code {
        code if code.starts_with("NODE_") => "An error occurred in a graph node.",
        code if code.starts_with("STORAGE_") => "An error occurred accessing storage.",
        PLAIN => "An error occurred processing your request.",
        _ => "An error occurred executing the graph.",
    }
}

impl std::ops::Deref for ApiError {
    type Target = Failure;

    fn deref(&self) -> &Failure {
        &self.0
    }
}

impl std::ops::DerefMut for ApiError {
    fn deref_mut(&mut self) -> &mut Failure {
        &mut self.0
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.headers_mut().extend(self.headers.clone());
        response.extensions_mut().insert(Unframed::Error(Arc::new(self)));
        response
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        Self::fields(vec![error])
    }
}

impl From<ClientError> for ApiError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Fields(details) => Self::fields(details),
            ClientError::Refused(message) => Self::unprocessable(message),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::Busy { thread, .. } => Self::conflict(thread.as_str(), message),
            Refusal::Paused { .. } | Refusal::NotThisInterrupt(_) => {
                Self::new(StatusCode::CONFLICT, "INTERRUPT_001", message)
            }
            Refusal::NotAnApprover(_) => Self::new(StatusCode::FORBIDDEN, "PERMISSION_ERROR", message),
            Refusal::Expired(_) => Self::new(StatusCode::CONFLICT, "INTERRUPT_003", message),
            Refusal::AnswerSchema(_) => Self::new(StatusCode::UNPROCESSABLE_ENTITY, "INTERRUPT_002", message),
            Refusal::NoMessages => Self::field(vec!["body".into()], "value_error", format!("Value error, {message}")),
            Refusal::UnknownStart(_) => {
                let loc = vec!["body".into(), "initial_state".into(), "current_node".into()];
                Self::field(loc, "value_error", format!("Value error, {message}"))
            }
            Refusal::NothingToResume
            | Refusal::AnsweredTwice(_)
            | Refusal::ResultTwice
            | Refusal::NoSuchCall(_)
            | Refusal::ToolNodeStart(_)
            | Refusal::OtherGraph(_) => Self::unprocessable(message),
            Refusal::VersionNeeded(_) => {
                let message = format!("{message}; register that version again, or use a new thread");
                Self::plain(StatusCode::SERVICE_UNAVAILABLE, message)
            }
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        match error {
            StoreError::Refused(refusal) => refusal.into(),
            StoreError::Asked(thread) | StoreError::Busy(thread) => Self::conflict(thread.as_str(), message),
            StoreError::NoSuchThread(_) => Self::not_found(message),
            StoreError::IdempotencyMismatch => Self::new(StatusCode::CONFLICT, "IDEMPOTENCY_MISMATCH", message),
            StoreError::Unavailable { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "STORAGE_TRANSIENT_001", message)
                    .with_header(http::header::RETRY_AFTER, "1")
                    .caused_by(error)
            }
            StoreError::Schema(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "STORAGE_TRANSIENT_002", message),
            StoreError::Database { .. } | StoreError::Corrupt { .. } => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "STORAGE_001", message).caused_by(error)
            }
        }
    }
}

/// `limit` for a person: bytes where the figure in MB would read as nothing.
fn size_text(limit: usize) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let mib = limit as f64 / (1024.0 * 1024.0);
    if mib < 0.1 { format!("{limit} bytes") } else { format!("{mib:.1}MB") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_error(code: &str) -> RunError {
        RunError { code: code.to_owned(), message: "secret".to_owned(), node: None, transient: false }
    }

    /// C56: the code stays, the text of what happened inside does not leave a production server.
    #[test]
    fn production_answers_failures_inside_with_general_texts() {
        for (code, status, text) in [
            ("NODE_001", 500, "An error occurred in a graph node."),
            ("GRAPH_ROUTING_001", 500, "An error occurred executing the graph."),
            ("RECURSION_001", 500, "An error occurred executing the graph."),
            ("STORAGE_TRANSIENT_001", 503, "An error occurred accessing storage."),
        ] {
            let error = ApiError::of_run(&run_error(code), "t");

            assert_eq!((error.status.as_u16(), error.code.as_str()), (status, code));
            assert_eq!(error.public_message(true), text);
            assert!(!error.body("r", "t", true).to_string().contains("secret"));
            assert_eq!(error.public_message(false), "secret");
        }
    }

    #[test]
    fn a_conflict_keeps_the_keys_older_clients_read() {
        let body = ApiError::of_run(&run_error("STORAGE_CONFLICT_001"), "t1").body("r", "t", false);

        assert_eq!(body["error"]["code"], "STATE_CONFLICT");
        assert_eq!((&body["thread_id"], &body["detail"]), (&json!("t1"), &json!("secret")));
    }

    #[test]
    fn small_body_limits_are_named_in_bytes() {
        let body = ApiError::too_large(4096, true).body("r", "t", false);

        assert_eq!(body["error"]["message"], "Request body too large. Maximum size is 4096 bytes");
        assert_eq!(body["error"]["max_size_mb"], json!(0.00390625));
        assert_eq!(body["metadata"], json!({"request_id": "r", "status": "error"}));
        assert!(ApiError::too_large(10 << 20, false).message.ends_with("10.0MB"));
    }
}
