//! The documentation: one `OpenAPI` document and a page that shows it, assets included.

use std::sync::LazyLock;

use axum::Router;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use bytes::Bytes;
use http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};
use threadgate_shared::domain::Json;
use utoipa::OpenApi;

use crate::app::App;
use crate::error::ApiError;
use crate::wire::schema;

/// What the document says of itself.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Threadgate",
        description = "Durable runs of AI-agent graphs. Routes below `/v1/graph` and `/v1/threads` answer in an \
            envelope, those below `/v1/runs` plainly; every failure has the error envelope.",
    ),
    tags(
        (name = "runs", description = "Runs as background work"),
        (name = "graph", description = "The served graph"),
        (name = "threads", description = "Conversations and their states"),
        (name = "observability", description = "Traces of runs"),
        (name = "store", description = "Long-term memory, which this server does not have"),
        (name = "health", description = "For those who look after the server"),
    )
)]
pub struct About;

/// Scripts and styles of the page come from this server; the page itself has a small script inside.
const PAGE_POLICY: &str =
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:";

static CONFIG: LazyLock<std::sync::Arc<utoipa_swagger_ui::Config<'static>>> =
    LazyLock::new(|| std::sync::Arc::new(utoipa_swagger_ui::Config::new(["/openapi.json"])));

/// The document with the messages' and blocks' schemas in it.
#[must_use]
pub fn document(openapi: &utoipa::openapi::OpenApi) -> Json {
    let mut document = serde_json::to_value(openapi).expect("the document has string keys");
    if let Some(Json::Object(schemas)) = document.pointer_mut("/components/schemas") {
        for (name, schema) in schema::components() {
            schemas.entry(name).or_insert(schema);
        }
    }
    document
}

/// `/openapi.json`, `/docs` and `/redocs`; public, and off in production unless configured.
pub fn router(document: &Json) -> Router<App> {
    let text = Bytes::from(document.to_string());
    let json = move || async move { ([(CONTENT_TYPE, "application/json")], text) };
    Router::new()
        .route("/openapi.json", get(json))
        .route("/docs", get(|| async { Redirect::temporary("/docs/") }))
        .route("/docs/", get(|| async { page("") }))
        .route(
            "/docs/{*file}",
            get(|axum::extract::Path(file): axum::extract::Path<String>| async move { page(&file) }),
        )
        .route("/redocs", get(|| async { Redirect::temporary("/docs/") }))
}

fn page(file: &str) -> Response {
    match utoipa_swagger_ui::serve(file, CONFIG.clone()) {
        Ok(Some(file)) => {
            let mut response = file.bytes.into_owned().into_response();
            if let Ok(kind) = HeaderValue::from_str(&file.content_type) {
                response.headers_mut().insert(CONTENT_TYPE, kind);
            }
            response.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
            response
        }
        Ok(None) => ApiError::no_route().into_response(),
        Err(error) => {
            tracing::error!(%error, "Could not read a page of the documentation");
            ApiError::plain(StatusCode::INTERNAL_SERVER_ERROR, "the documentation cannot be read").into_response()
        }
    }
}
