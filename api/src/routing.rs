//! The table of routes: a route enters it only together with who may call it.

use axum::extract::Request;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use http::Method;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use crate::app::App;
use crate::auth::{self, Access};
use crate::error::ApiError;

/// Routes with their documentation. There is no way to add one without an [`Access`].
pub struct Routes {
    app: App,
    router: OpenApiRouter<App>,
}

impl Routes {
    /// An empty table.
    #[must_use]
    pub fn new(app: &App, openapi: utoipa::openapi::OpenApi) -> Self {
        Self { app: app.clone(), router: OpenApiRouter::with_openapi(openapi) }
    }

    /// Adds the handlers of one path, which callers with `access` reach.
    #[must_use]
    pub fn at(mut self, access: Access, (schemas, paths, handlers): UtoipaMethodRouter<App>) -> Self {
        let guard = from_fn_with_state((self.app.clone(), access), auth::guard);
        let handlers = handlers.route_layer(guard).route_layer(axum::middleware::from_fn(refuse_head));
        self.router = self.router.routes((schemas, paths, handlers));
        self
    }

    /// The router and its documentation.
    pub fn split(self) -> (axum::Router<App>, utoipa::openapi::OpenApi) {
        self.router.split_for_parts()
    }
}

/// `HEAD` is a method like another here: no route has it.
async fn refuse_head(request: Request, next: Next) -> Response {
    if request.method() == Method::HEAD {
        return ApiError::no_method().into_response();
    }
    next.run(request).await
}
