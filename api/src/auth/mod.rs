//! Who calls, and whether they may: the one layer through which every route is reached.

use axum::extract::{FromRequestParts, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::request::Parts;
use threadgate_shared::domain::{Caller, Scope};

use crate::app::App;
use crate::config::AuthMode;
use crate::error::ApiError;

/// Who may call a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Everybody, known or not.
    Public,
    /// Callers who hold this scope.
    Scope(&'static str),
}

/// Finds out who calls before the handler reads anything of the request.
pub async fn guard(State((app, access)): State<(App, Access)>, mut request: Request, next: Next) -> Response {
    if let Access::Scope(_) = access {
        let caller = match app.config.auth {
            AuthMode::None => Caller::anonymous(),
        };
        request.extensions_mut().insert(caller);
    }
    next.run(request).await
}

/// The verified caller of a route that is not public.
#[derive(Debug, Clone)]
pub struct Authenticated(pub Caller);

impl Authenticated {
    /// What the caller may see.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.0.scope()
    }
}

impl<S: Sync> FromRequestParts<S> for Authenticated {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        match parts.extensions.get::<Caller>() {
            Some(caller) => Ok(Self(caller.clone())),
            None => {
                tracing::error!("A public route asks who calls; give it a scope");
                Err(ApiError::internal())
            }
        }
    }
}
