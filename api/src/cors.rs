//! Which browsers may call, and what caches must tell apart.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode};

use crate::app::App;
use crate::config::ApiConfig;

const METHODS: &str = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY";
const VARY_PREFLIGHT: &str =
    "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, Access-Control-Request-Private-Network";

/// The outermost layer: answers preflights itself and tells browsers who may read an answer.
pub async fn cors(State(app): State<App>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(ORIGIN).cloned();
    let is_preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    if let Some(origin) = origin.as_ref().filter(|_| is_preflight) {
        return preflight(&app.config, origin, request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS));
    }
    let mut response = next.run(request).await;
    put_vary(response.headers_mut());
    if let Some(origin) = origin {
        put_origin(response.headers_mut(), &app.config, &origin);
        let exposed = HeaderValue::from_static("X-Request-ID, X-Timestamp, Location, Idempotent-Replayed");
        response.headers_mut().insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
    response
}

fn preflight(config: &ApiConfig, origin: &HeaderValue, wanted: Option<&HeaderValue>) -> Response {
    let (status, text) = if is_allowed(config, origin) {
        (StatusCode::OK, "OK")
    } else {
        (StatusCode::BAD_REQUEST, "Disallowed CORS origin")
    };
    let mut response = (status, text).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(VARY, HeaderValue::from_static(VARY_PREFLIGHT));
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    if let Some(wanted) = wanted {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    put_origin(headers, config, origin);
    response
}

fn put_origin(headers: &mut HeaderMap, config: &ApiConfig, origin: &HeaderValue) {
    if config.cors_credentials {
        headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    }
    if is_allowed(config, origin) {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    }
}

fn is_allowed(config: &ApiConfig, origin: &HeaderValue) -> bool {
    config.origins.iter().any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes())
}

/// One `Vary` line: the origin decides always, the encoding where an answer may be compressed.
fn put_vary(headers: &mut HeaderMap) {
    let compressible = headers
        .get_all(VARY)
        .iter()
        .any(|value| value.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains("accept-encoding")));
    let vary = if compressible { "Accept-Encoding, Origin" } else { "Origin" };
    headers.insert(VARY, HeaderValue::from_static(vary));
}
