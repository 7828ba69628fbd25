//! Nodes in any language: the state goes out as JSON over POST, and a patch, a jump, a question or
//! an error comes back.
//!
//! The request's body is `{"thread_id", "run_id", "step", "node", "attempt", "state", "config",
//! "answers", "caller": {"tenant", "user"}}`, where `answers` are those given so far to this step's
//! questions. Its headers:
//!
//! | header | value |
//! |---|---|
//! | `Idempotency-Key` | the same for every attempt at this step: a receiver may refuse a repetition |
//! | `X-Threadgate-Deadline-Ms` | how long the service has; then the connection is closed |
//! | `X-Threadgate-Signature` | `t=<UNIX seconds>,v1=<hex HMAC-SHA256 of "<t>.<body>">`, if there is a secret |
//! | `traceparent` | the run's W3C trace context, if it has one |
//!
//! The reply is what [`threadgate_shared::graph::reply`] says; an empty one follows the edges. Any
//! status but 2xx is a failure: 408, 425, 429 and 5xx may be repeated as the node's policy says, all
//! others not, redirects included. Lone surrogates in a reply are kept by the escape of
//! [`super::surrogates`]; NUL is kept as it is.

mod reply;
mod request;
mod tool;

use std::sync::Arc;

use async_trait::async_trait;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use threadgate_shared::config::Secret;
use threadgate_shared::graph::declarative::{HttpMessages, HttpSpec, HttpToolSpec, NodeFactory, Ordered};
use threadgate_shared::graph::{GraphError, IdKind, Node, NodeContext, NodeError, Outcome, Tool};

use crate::config::HttpConfig;

/// Variables that begin so are a program's own settings, its secrets among them, unless they go on
/// with [`NODE_ENV`].
const OWN_ENV: &str = "THREADGATE_";

/// Variables that begin so are meant for nodes.
const NODE_ENV: &str = "THREADGATE_NODE_";

/// Makes nodes over HTTP; they share their connections.
#[derive(Debug, Clone)]
pub(crate) struct HttpNodes {
    client: reqwest::Client,
    secret: Option<Secret>,
    output_bytes_max: usize,
}

impl HttpNodes {
    /// `output_bytes_max` limits every reply.
    ///
    /// # Errors
    /// If the system's certificates cannot be read.
    pub(crate) fn new(config: &HttpConfig, output_bytes_max: usize) -> Result<Self, reqwest::Error> {
        // Err: the program has installed one already, and that one is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .connect_timeout(config.connect_timeout)
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("threadgate/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { client, secret: config.secret.clone(), output_bytes_max })
    }
}

impl NodeFactory for HttpNodes {
    fn http(&self, name: &str, ids: IdKind, spec: HttpSpec) -> Result<Arc<dyn Node>, GraphError> {
        let wrong = |why: String| GraphError { code: "GRAPH_000", message: format!("http node '{name}': {why}") };
        let secret = match &spec.secret_env {
            Some(variable) => Some(Secret::from(environment(variable).map_err(wrong)?)),
            None => self.secret.clone(),
        };
        let schema = (!spec.response_schema.is_null()).then(|| jsonschema::validator_for(&spec.response_schema));
        let schema = schema.transpose().map_err(|error| wrong(format!("its response_schema is no schema: {error}")))?;
        let own_max = spec.response_bytes_max.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        Ok(Arc::new(HttpNode {
            client: self.client.clone(),
            url: spec.url.parse().map_err(|error| wrong(format!("'{}' is no URL: {error}", spec.url)))?,
            headers: headers(pairs(&spec.headers), pairs(&spec.header_env)).map_err(wrong)?,
            idempotency_header: header_name(&spec.idempotency_header).map_err(wrong)?,
            secret,
            messages: spec.messages,
            schema,
            bytes_max: self.output_bytes_max.min(own_max),
            ids,
        }))
    }

    fn tool(&self, name: &str, spec: HttpToolSpec) -> Result<Arc<dyn Tool>, GraphError> {
        let wrong = |why| GraphError { code: "GRAPH_000", message: format!("http tool '{name}': {why}") };
        self.make_tool(&spec).map_err(wrong)
    }
}

/// A service that is asked by POST.
struct HttpNode {
    client: reqwest::Client,
    url: reqwest::Url,
    headers: HeaderMap,
    idempotency_header: HeaderName,
    secret: Option<Secret>,
    messages: HttpMessages,
    schema: Option<jsonschema::Validator>,
    bytes_max: usize,
    ids: IdKind,
}

#[async_trait]
impl Node for HttpNode {
    async fn run(&self, ctx: NodeContext) -> Result<Outcome, NodeError> {
        let cancelled = ctx.cancelled.clone();
        tokio::select! {
            // Dropping the exchange closes its connection.
            () = cancelled.cancelled() => Err(NodeError::transient("it was cancelled before the service replied")),
            result = self.exchange(&ctx) => result,
        }
    }
}

impl HttpNode {
    async fn exchange(&self, ctx: &NodeContext) -> Result<Outcome, NodeError> {
        let request = request::build(self, ctx, chrono::Utc::now().timestamp());
        let response = request.send().await.map_err(|error| NodeError::transient(unreachable(&self.url, &error)))?;
        let status = response.status();
        let body = reply::read(response, self.bytes_max).await?;
        if !status.is_success() {
            return Err(reply::refused(status, &body));
        }
        reply::parse(&body, self.schema.as_ref(), self.ids)?.into_result(ctx)
    }
}

/// Why a service was not reached, without what a URL may carry in secret.
fn unreachable(url: &reqwest::Url, error: &reqwest::Error) -> String {
    let host = url.host_str().unwrap_or_default();
    let what = if error.is_connect() { "could not be reached" } else { "did not reply" };
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    format!("the service at {host} {what}: {cause}")
}

fn pairs(ordered: &Ordered<String>) -> impl Iterator<Item = (&String, &String)> {
    ordered.0.iter().map(|(name, value)| (name, value))
}

/// The headers as they are, and those whose values the worker's environment has.
fn headers<'a>(
    plain: impl IntoIterator<Item = (&'a String, &'a String)>,
    from_environment: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in plain {
        headers.insert(header_name(name)?, header_value(name, value)?);
    }
    for (name, variable) in from_environment {
        let mut value = header_value(name, &environment(variable)?)?;
        value.set_sensitive(true);
        headers.insert(header_name(name)?, value);
    }
    Ok(headers)
}

fn header_name(name: &str) -> Result<HeaderName, String> {
    name.parse().map_err(|_| format!("'{name}' is no header name"))
}

fn header_value(name: &str, value: &str) -> Result<HeaderValue, String> {
    value.parse().map_err(|_| format!("the value of the header '{name}' has characters that no header may have"))
}

/// A variable of the worker's environment. A graph's author does not get at the program's own
/// settings this way.
fn environment(variable: &str) -> Result<String, String> {
    if variable.starts_with(OWN_ENV) && !variable.starts_with(NODE_ENV) {
        return Err(format!("{variable} is a setting of the worker itself; name one that begins with {NODE_ENV}"));
    }
    std::env::var(variable).map_err(|_| format!("the worker's environment has no {variable}; set it and restart"))
}

#[cfg(test)]
mod tests;
