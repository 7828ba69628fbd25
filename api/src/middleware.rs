//! What every answer has: a request id, a time, security headers and the envelope; and what every
//! request leaves behind: a span, a count and, where something is wrong here, a log line.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::Serialize;
use tracing::Instrument;

use crate::app::App;
use crate::error::ApiError;
use crate::telemetry;

/// The id of one request: sent back in a header and in the envelope, and in every log line.
#[derive(Debug, Clone)]
pub struct RequestId(pub Arc<str>);

/// A body that waits for its envelope.
#[derive(Debug, Clone)]
pub enum Unframed {
    /// The `data` of a success, as JSON text.
    Data(Bytes),
    /// A failure.
    Error(Arc<ApiError>),
}

/// A success inside the envelope: `{"data": …, "metadata": …}`.
#[derive(Debug)]
pub struct Enveloped<T>(pub T);

impl<T: Serialize> IntoResponse for Enveloped<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(data) => {
                let mut response = StatusCode::OK.into_response();
                response.extensions_mut().insert(Unframed::Data(data.into()));
                response
            }
            Err(error) => {
                tracing::error!(%error, "Could not write an answer as JSON");
                ApiError::internal().into_response()
            }
        }
    }
}

/// The outermost layer but for CORS and compression.
pub async fn frame(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let id: Arc<str> = uuid::Uuid::new_v4().to_string().into();
    let started = Instant::now();
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().map_or("unmatched", MatchedPath::as_str).to_owned();
    let span = tracing::info_span!("request", request.id = %id, http.method = %method, http.route = route);
    request.extensions_mut().insert(RequestId(Arc::clone(&id)));

    let mut response = match declared_too_large(&app, &request) {
        Some(limit) => ApiError::too_large(limit, true).into_response(),
        None => next.run(request).instrument(span.clone()).await,
    };
    let _entered = span.enter();
    let timestamp = chrono::Local::now().format("%Y-%m-%dT%H:%M:%S%.6f").to_string();
    put_envelope(&mut response, &id, &timestamp, app.config.is_production());
    put_headers(response.headers_mut(), &id, &timestamp, app.config.security_headers);
    record(&method, &route, response.status(), started);
    response
}

/// The limit, where the request says that its body is longer.
fn declared_too_large(app: &App, request: &Request) -> Option<usize> {
    let declared: u64 = request.headers().get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()?;
    let limit = app.limits.body_bytes_max;
    (declared > limit as u64).then_some(limit)
}

fn put_envelope(response: &mut Response, id: &str, timestamp: &str, production: bool) {
    let body: Bytes = match response.extensions_mut().remove::<Unframed>() {
        None => return,
        Some(Unframed::Data(data)) => enveloped(&data, id, timestamp),
        Some(Unframed::Error(error)) => {
            log_failure(&error);
            error.body(id, timestamp, production).to_string().into()
        }
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.remove(CONTENT_LENGTH);
    *response.body_mut() = Body::from(body);
}

fn enveloped(data: &[u8], id: &str, timestamp: &str) -> Bytes {
    let mut body = BytesMut::with_capacity(data.len() + 160);
    body.put_slice(b"{\"data\":");
    body.put_slice(data);
    let metadata = serde_json::json!({"request_id": id, "timestamp": timestamp, "message": "OK"});
    body.put_slice(format!(",\"metadata\":{metadata}}}").as_bytes());
    body.freeze()
}

fn log_failure(error: &ApiError) {
    if !error.status.is_server_error() {
        return;
    }
    let mut chain = String::new();
    let mut source = error.source.as_deref().map(|source| source as &dyn std::error::Error);
    while let Some(cause) = source {
        chain.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    let (code, message) = (&error.code, &error.message);
    tracing::warn!(error.code = %code, "Answered {} with {code}: {message}{chain}", error.status.as_u16());
}

fn put_headers(headers: &mut HeaderMap, id: &str, timestamp: &str, security: bool) {
    for (name, value) in [("x-request-id", id), ("x-timestamp", timestamp)] {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
    if !security {
        return;
    }
    for (name, value) in SECURITY_HEADERS {
        headers.entry(HeaderName::from_static(name)).or_insert(HeaderValue::from_static(value));
    }
}

/// A header that the route set wins.
const SECURITY_HEADERS: [(&str, &str); 6] = [
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("x-xss-protection", "1; mode=block"),
    ("referrer-policy", "strict-origin-when-cross-origin"),
    (
        "permissions-policy",
        "geolocation=(), microphone=(), camera=(), payment=(), usb=(), magnetometer=(), gyroscope=(), accelerometer=()",
    ),
    ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
];

fn record(method: &http::Method, route: &str, status: StatusCode, started: Instant) {
    let status = status.as_u16().to_string();
    let labels = [("method", method.to_string()), ("route", route.to_owned()), ("status", status)];
    metrics::counter!(telemetry::REQUESTS, &labels).increment(1);
    metrics::histogram!(telemetry::REQUEST_DURATION, "route" => route.to_owned()).record(started.elapsed());
}

/// What a handler that panicked answers.
#[must_use]
pub fn panicked(panic: Box<dyn std::any::Any + Send + 'static>) -> Response {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    tracing::error!("A request handler panicked: {text}");
    ApiError::internal().into_response()
}
