//! What an `http` node is: a service in any language, asked by POST. Only the document's side; the
//! worker has the code.

use schemars::JsonSchema;
use serde::Deserialize;

use super::document::{Ordered, any_schema};
use crate::domain::Json;

/// An `http` node. The service gets the state as JSON and answers with a patch, a jump, a question
/// or an error (`threadgate_shared::graph::reply`).
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HttpSpec {
    /// Where the service listens: `http://…` or `https://…`.
    #[schemars(regex(pattern = URL_PATTERN))]
    pub url: String,
    /// How it is asked. Only `POST`, the default.
    #[serde(default)]
    pub method: HttpMethod,
    /// Headers to send.
    #[serde(default)]
    pub headers: Ordered<String>,
    /// Headers whose values come from environment variables of the worker: header → variable.
    #[serde(default)]
    pub header_env: Ordered<String>,
    /// The worker's environment variable with the secret that signs the body (HMAC-SHA256). Default:
    /// not signed.
    #[serde(default)]
    pub secret_env: Option<String>,
    /// The header that carries the idempotency key, the same for every attempt at one step. Default
    /// `Idempotency-Key`.
    #[serde(default = "idempotency_key")]
    pub idempotency_header: String,
    /// Which messages are sent. Default `all`.
    #[serde(default)]
    pub messages: HttpMessages,
    /// JSON Schema that the answer must satisfy, beside being an answer at all.
    #[serde(default)]
    #[schemars(schema_with = "any_schema")]
    pub response_schema: Json,
    /// Bytes of an answer at most. Default: the worker's limit on what a node returns.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub response_bytes_max: Option<u64>,
}

/// The pattern of [`HttpSpec::url`].
pub(super) const URL_PATTERN: &str = r"^https?://[^\s/?#]+\S*$";

/// How a service is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, JsonSchema)]
pub enum HttpMethod {
    /// The body carries the state.
    #[default]
    #[serde(rename = "POST")]
    Post,
}

/// Which messages a service gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HttpMessages {
    /// The whole context.
    #[default]
    All,
    /// The newest one.
    Last,
    /// None: the service needs only the fields.
    None,
}

fn idempotency_key() -> String {
    "Idempotency-Key".to_owned()
}

impl HttpSpec {
    /// What the schema cannot say is wrong: place inside the spec, and a sentence with what to do.
    #[must_use]
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let groups = [("headers", &self.headers), ("header_env", &self.header_env)];
        for (group, (name, value)) in groups.into_iter().flat_map(|(group, map)| map.0.iter().map(move |e| (group, e)))
        {
            if !is_header_name(name) {
                found.push((format!("/{group}"), format!("'{name}' is no header name; use letters, digits and '-'")));
            } else if is_ours(name) {
                found.push((format!("/{group}"), format!("the header '{name}' is set by the worker; remove it")));
            } else if value.contains(char::is_control) {
                found.push((format!("/{group}"), format!("the value of '{name}' has control characters; remove them")));
            }
        }
        if !is_header_name(&self.idempotency_header) {
            let message = format!("'{}' is no header name; use letters, digits and '-'", self.idempotency_header);
            found.push(("/idempotency_header".to_owned(), message));
        }
        if let Some(Err(error)) =
            (!self.response_schema.is_null()).then(|| jsonschema::validator_for(&self.response_schema))
        {
            found.push(("/response_schema".to_owned(), format!("this is no JSON Schema: {error}; correct it")));
        }
        found
    }
}

fn is_header_name(name: &str) -> bool {
    let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    !name.is_empty() && name.len() <= 255 && name.chars().all(is_token)
}

fn is_ours(name: &str) -> bool {
    ["content-type", "content-length", "host", "transfer-encoding", "connection"]
        .contains(&name.to_lowercase().as_str())
}
