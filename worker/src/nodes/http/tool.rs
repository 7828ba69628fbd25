//! A tool behind HTTP: asked by POST, its JSON answer is the result.

use std::sync::Arc;

use async_trait::async_trait;
use reqwest::header::HeaderMap;
use serde::Serialize;
use threadgate_shared::config::Secret;
use threadgate_shared::domain::Json;
use threadgate_shared::graph::declarative::HttpToolSpec;
use threadgate_shared::graph::{NodeError, Tool, ToolContext, ToolError};

use super::request::{Caller, DEADLINE_HEADER, SIGNATURE_HEADER, signature};
use super::{HttpNodes, environment, headers, reply};
use crate::nodes::surrogates;

/// The header that carries the idempotency key, the same for every attempt at one call.
const IDEMPOTENCY_HEADER: &str = "idempotency-key";

/// The body.
#[derive(Serialize)]
struct Body<'a> {
    thread_id: &'a str,
    tool: &'a str,
    call_id: &'a str,
    arguments: &'a Json,
    attempt: i16,
    caller: Caller<'a>,
}

struct HttpTool {
    client: reqwest::Client,
    url: reqwest::Url,
    headers: HeaderMap,
    secret: Option<Secret>,
    bytes_max: usize,
}

impl HttpNodes {
    /// The tool `name`.
    ///
    /// # Errors
    /// A sentence: no URL, a header that cannot be, or a variable that is not set.
    pub(super) fn make_tool(&self, spec: &HttpToolSpec) -> Result<Arc<dyn Tool>, String> {
        let secret = match &spec.secret_env {
            Some(variable) => Some(Secret::from(environment(variable)?)),
            None => self.secret.clone(),
        };
        Ok(Arc::new(HttpTool {
            client: self.client.clone(),
            url: spec.url.parse().map_err(|error| format!("'{}' is no URL: {error}", spec.url))?,
            headers: headers(&spec.headers, &spec.header_env)?,
            secret,
            bytes_max: self.output_bytes_max,
        }))
    }
}

#[async_trait]
impl Tool for HttpTool {
    async fn call(&self, ctx: ToolContext, arguments: Json) -> Result<Json, ToolError> {
        tokio::select! {
            // Dropping the exchange closes its connection.
            () = ctx.cancelled.cancelled() => Err(ToolError::Failed("The call was cancelled before the service replied.".to_owned())),
            result = self.exchange(&ctx, &arguments) => result.map_err(ToolError::Failed),
        }
    }
}

impl HttpTool {
    async fn exchange(&self, ctx: &ToolContext, arguments: &Json) -> Result<Json, String> {
        let body = Body {
            thread_id: ctx.thread_id.as_str(),
            tool: &ctx.call.tool,
            call_id: &ctx.call.call_id,
            arguments,
            attempt: ctx.attempt,
            caller: Caller { tenant: &ctx.caller.tenant.0, user: &ctx.caller.user.0 },
        };
        let body = serde_json::to_vec(&body).expect("our own types have string keys and finite numbers");
        let mut request = self
            .client
            .post(self.url.clone())
            .headers(self.headers.clone())
            .header("content-type", "application/json")
            .header(IDEMPOTENCY_HEADER, key(&ctx.idempotency_key))
            .header(DEADLINE_HEADER, ctx.timeout.as_millis().to_string());
        if let Some(secret) = &self.secret {
            request = request.header(SIGNATURE_HEADER, signature(secret, chrono::Utc::now().timestamp(), &body));
        }
        let response = request.body(body).send().await.map_err(|error| super::unreachable(&self.url, &error))?;
        let status = response.status();
        let body = reply::read(response, self.bytes_max).await.map_err(|error| why(&error))?;
        if !status.is_success() {
            return Err(why(&reply::refused(status, &body)));
        }
        let text = std::str::from_utf8(&body).map_err(|_| "the service's reply is not UTF-8".to_owned())?;
        if text.trim().is_empty() {
            return Ok(Json::Null);
        }
        serde_json::from_str(&surrogates::escaped(text))
            .map_err(|error| format!("the service's reply is not JSON: {error}"))
    }
}

fn why(error: &NodeError) -> String {
    match error {
        NodeError::Failed { message, .. } => message.clone(),
        NodeError::Interrupt { .. } => error.to_string(),
    }
}

/// Ids come from clients and models; what no header may carry is written as `%XX`.
fn key(text: &str) -> String {
    let mut key = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'%' => key.push_str("%25"),
            0x20..0x7f => key.push(char::from(byte)),
            byte => key.push_str(&format!("%{byte:02X}")),
        }
    }
    key
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use threadgate_shared::domain::{CallRef, Caller, ExecutionMeta, ThreadState};
    use wiremock::matchers::method;
    use wiremock::{Mock, MockServer, ResponseTemplate};

    use super::*;
    use crate::config::HttpConfig;

    async fn called(response: ResponseTemplate) -> (Result<Json, ToolError>, MockServer) {
        let server = MockServer::start().await;
        Mock::given(method("POST")).respond_with(response).mount(&server).await;
        let nodes = HttpNodes::new(&HttpConfig::default(), 1_000).unwrap();
        let spec: HttpToolSpec =
            serde_json::from_value(json!({"url": server.uri(), "headers": {"x-team": "desk"}})).unwrap();
        let arguments = json!({"amount": 42});
        let ctx = ToolContext {
            call: CallRef::new("m1".into(), "c1", "refund", arguments.clone()),
            thread_id: "t".into(),
            state: Arc::new(ThreadState {
                context: Vec::new(),
                context_summary: None,
                execution_meta: ExecutionMeta::fresh("t"),
                fields: serde_json::Map::new(),
            }),
            config: Arc::default(),
            caller: Caller::anonymous(),
            idempotency_key: "t:m1:c1\u{e9}".to_owned(),
            attempt: 2,
            timeout: Duration::from_secs(9),
            cancelled: tokio_util::sync::CancellationToken::new(),
            answers: Arc::default(),
            asked: Arc::default(),
        };
        let result = nodes.make_tool(&spec).unwrap().call(ctx, arguments).await;
        (result, server)
    }

    #[tokio::test]
    async fn the_service_gets_the_call_with_its_key_and_its_answer_is_the_result() {
        let (result, server) = called(ResponseTemplate::new(200).set_body_json(json!({"id": 7}))).await;

        assert_eq!(result, Ok(json!({"id": 7})));
        let request = &server.received_requests().await.unwrap()[0];
        let sent: Json = serde_json::from_slice(&request.body).unwrap();
        assert_eq!(
            sent,
            json!({"thread_id": "t", "tool": "refund", "call_id": "c1", "arguments": {"amount": 42}, "attempt": 2,
                "caller": {"tenant": "default", "user": "anonymous"}})
        );
        let header = |name: &str| request.headers.get(name).unwrap().to_str().unwrap().to_owned();
        assert_eq!((header("idempotency-key"), header("x-team")), ("t:m1:c1%C3%A9".to_owned(), "desk".to_owned()));
        assert_eq!(header(DEADLINE_HEADER), "9000");
    }

    #[tokio::test]
    async fn what_is_no_answer_fails_the_call_with_a_reason() {
        for (response, part) in [
            (ResponseTemplate::new(500).set_body_string("closed"), "500"),
            (ResponseTemplate::new(404), "404"),
            (ResponseTemplate::new(200).set_body_string("{bad"), "not JSON"),
            (ResponseTemplate::new(200).set_body_string("x".repeat(2_000)), "bytes"),
        ] {
            let (result, _) = called(response).await;
            let Err(ToolError::Failed(why)) = result else { panic!("{result:?}") };
            assert!(why.contains(part), "{why}");
        }
        assert_eq!(called(ResponseTemplate::new(204)).await.0, Ok(Json::Null));
    }

    #[test]
    fn a_tool_without_an_address_is_refused() {
        let nodes = HttpNodes::new(&HttpConfig::default(), 1_000).unwrap();
        let bad: HttpToolSpec = serde_json::from_value(json!({"url": "nowhere"})).unwrap();

        assert!(nodes.make_tool(&bad).err().unwrap().contains("no URL"));
    }
}
