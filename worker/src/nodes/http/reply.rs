//! What comes back from a service, and what it means.

use reqwest::{Response, StatusCode};
use threadgate_shared::domain::Json;
use threadgate_shared::graph::reply::Reply;
use threadgate_shared::graph::{IdKind, NodeError};

use crate::nodes::surrogates;
use crate::run_node::OUTPUT_TOO_LARGE;

/// Characters of a refusal's body that are kept.
const EXCERPT_CHARS: usize = 200;

/// Reads the body, at most `bytes_max`.
///
/// # Errors
/// Permanent if it is larger, transient if the connection broke.
pub(super) async fn read(mut response: Response, bytes_max: usize) -> Result<Vec<u8>, NodeError> {
    let declared = response.content_length().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or_default();
    if declared > bytes_max {
        return Err(too_large(&format!("{declared} bytes"), bytes_max));
    }
    let mut body = Vec::with_capacity(declared);
    let broken = |error: reqwest::Error| NodeError::transient(format!("the service's reply broke off: {error}"));
    while let Some(piece) = response.chunk().await.map_err(broken)? {
        if body.len() + piece.len() > bytes_max {
            return Err(too_large(&format!("more than {} bytes", body.len() + piece.len() - 1), bytes_max));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// What a status other than 2xx means: whether another attempt could succeed.
pub(super) fn refused(status: StatusCode, body: &[u8]) -> NodeError {
    let may_pass = status.is_server_error()
        || [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS].contains(&status);
    let excerpt: String = String::from_utf8_lossy(body).chars().take(EXCERPT_CHARS).collect();
    let message = match excerpt.trim() {
        "" => format!("the service answered {status}"),
        excerpt => format!("the service answered {status}: {excerpt}"),
    };
    if may_pass { NodeError::transient(message) } else { NodeError::permanent(message) }
}

/// The reply that `body` is; nothing at all follows the edges.
///
/// # Errors
/// Permanent, with what is wrong with it.
pub(super) fn parse(body: &[u8], schema: Option<&jsonschema::Validator>, ids: IdKind) -> Result<Reply, NodeError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| wrong(&format!("it is not UTF-8 from byte {}", error.valid_up_to())))?;
    let text = if text.trim().is_empty() { "{}" } else { text };
    let value: Json =
        serde_json::from_str(&surrogates::escaped(text)).map_err(|error| wrong(&format!("it is not JSON: {error}")))?;
    if let Some(Err(error)) = schema.map(|schema| schema.validate(&value)) {
        let place = error.instance_path().to_string();
        let place = if place.is_empty() { "it".to_owned() } else { place };
        return Err(wrong(&format!("it does not satisfy the node's response_schema: {place}: {error}")));
    }
    Reply::parse(&value, ids).map_err(|why| wrong(&why))
}

fn wrong(why: &str) -> NodeError {
    NodeError::permanent(format!("the service's reply cannot be used: {why}"))
}

fn too_large(size: &str, bytes_max: usize) -> NodeError {
    NodeError::Failed {
        code: OUTPUT_TOO_LARGE.to_owned(),
        message: format!(
            "the service replied with {size}, more than the {bytes_max} allowed; reply with less, or store it elsewhere and reply with where"
        ),
        retryable: false,
    }
}
