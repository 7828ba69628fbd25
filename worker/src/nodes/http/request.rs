//! What a service is sent.

use hmac::{Hmac, Mac};
use reqwest::RequestBuilder;
use serde::Serialize;
use sha2::Sha256;
use threadgate_shared::config::Secret;
use threadgate_shared::domain::{Json, JsonMap, ThreadState};
use threadgate_shared::graph::NodeContext;
use threadgate_shared::graph::declarative::HttpMessages;

use super::HttpNode;

/// `t=<UNIX seconds>,v1=<hex HMAC-SHA256 of "<t>.<body>">`.
pub(super) const SIGNATURE_HEADER: &str = "x-threadgate-signature";

/// How many milliseconds the service has.
pub(super) const DEADLINE_HEADER: &str = "x-threadgate-deadline-ms";

/// The body.
#[derive(Serialize)]
struct Body<'a> {
    thread_id: &'a str,
    run_id: String,
    step: i32,
    node: &'a str,
    attempt: u16,
    state: Json,
    config: &'a JsonMap,
    answers: &'a [Json],
    caller: Caller<'a>,
}

#[derive(Serialize)]
pub(super) struct Caller<'a> {
    pub tenant: &'a str,
    pub user: &'a str,
}

/// The request for one attempt, signed at `now`, in UNIX seconds.
pub(super) fn build(node: &HttpNode, ctx: &NodeContext, now: i64) -> RequestBuilder {
    let body = Body {
        thread_id: ctx.thread_id.as_str(),
        run_id: ctx.step.run_id.to_string(),
        step: ctx.step.seq,
        node: &ctx.node,
        attempt: ctx.attempt,
        state: state(&ctx.state, node.messages),
        config: &ctx.config,
        answers: &ctx.answers,
        caller: Caller { tenant: &ctx.caller.tenant.0, user: &ctx.caller.user.0 },
    };
    let body = serde_json::to_vec(&body).expect("our own types have string keys and finite numbers");
    let mut request = node
        .client
        .post(node.url.clone())
        .headers(node.headers.clone())
        .header("content-type", "application/json")
        .header(node.idempotency_header.clone(), ctx.idempotency_key());
    if let Some(deadline) = ctx.deadline {
        request = request.header(DEADLINE_HEADER, deadline.as_millis().to_string());
    }
    if let Some(trace) = &ctx.trace {
        request = request.header("traceparent", trace);
    }
    if let Some(secret) = &node.secret {
        request = request.header(SIGNATURE_HEADER, signature(secret, now, &body));
    }
    request.body(body)
}

fn state(state: &ThreadState, messages: HttpMessages) -> Json {
    let context = match messages {
        HttpMessages::All => return state.to_wire(),
        HttpMessages::Last => state.last_message().cloned().into_iter().collect(),
        HttpMessages::None => Vec::new(),
    };
    let reduced = ThreadState {
        context,
        context_summary: state.context_summary.clone(),
        execution_meta: state.execution_meta.clone(),
        fields: state.fields.clone(),
    };
    reduced.to_wire()
}

/// The signature of `body` at `now`.
pub(super) fn signature(secret: &Secret, now: i64, body: &[u8]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes()).expect("HMAC takes a key of any length");
    mac.update(format!("{now}.").as_bytes());
    mac.update(body);
    format!("t={now},v1={}", hex::encode(mac.finalize().into_bytes()))
}
