//! Commands that talk to a server over HTTP.

mod follow;
pub mod interrupts;
pub mod run;
pub mod runs;
pub mod threads;

use std::time::Duration;

use clap::Args;
use reqwest::{Method, RequestBuilder, StatusCode, Url};
use serde_json::Value;

use crate::exit::{Exit, Failure};

/// How long a connection may take to open.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Where the server is, and how its answers are shown.
#[derive(Debug, Clone, Args)]
pub struct ServerArgs {
    /// The server's address.
    #[arg(long, env = "THREADGATE_SERVER", default_value = "http://127.0.0.1:8000", value_name = "URL")]
    server: String,

    /// Prints what the server said, as JSON.
    #[arg(long)]
    pub json: bool,
}

/// A server that answers JSON.
pub struct Server {
    base: Url,
    http: reqwest::Client,
}

impl ServerArgs {
    /// The server.
    ///
    /// # Errors
    /// If the address is none.
    pub fn connect(&self) -> Result<Server, Failure> {
        let mut base: Url = self.server.parse().map_err(|error| {
            let message = format!("--server {} is no address ({error}); try http://127.0.0.1:8000", self.server);
            Failure::new(Exit::Usage, message)
        })?;
        if !base.path().ends_with('/') {
            base.set_path(&format!("{}/", base.path()));
        }
        let http = reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).build()?;
        Ok(Server { base, http })
    }
}

impl Server {
    /// A request to a path below the server's address; each segment is one name, whatever it holds.
    fn request(&self, method: Method, path: &[&str], query: &[(&str, String)]) -> RequestBuilder {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        self.http.request(method, url)
    }

    /// A `GET` with a query.
    ///
    /// # Errors
    /// As [`Server::answer`].
    pub async fn get(&self, path: &[&str], query: &[(&str, String)]) -> Result<Value, Failure> {
        self.answer(self.request(Method::GET, path, query)).await
    }

    /// A `POST` of a JSON body.
    ///
    /// # Errors
    /// As [`Server::answer`].
    pub async fn post(&self, path: &[&str], body: &Value) -> Result<Value, Failure> {
        self.answer(self.request(Method::POST, path, &[]).json(body)).await
    }

    /// A `DELETE`.
    ///
    /// # Errors
    /// As [`Server::answer`].
    pub async fn delete(&self, path: &[&str]) -> Result<Value, Failure> {
        self.answer(self.request(Method::DELETE, path, &[]).json(&serde_json::json!({}))).await
    }

    /// What the server says to a request.
    ///
    /// # Errors
    /// [`Exit::Refused`] with the server's own sentence, [`Exit::Unreachable`] if there is no answer
    /// or the server says that it cannot.
    async fn answer(&self, request: RequestBuilder) -> Result<Value, Failure> {
        let response = self.send(request).await?;
        let text = response.text().await.map_err(|error| self.unreachable(&error))?;
        serde_json::from_str(&text).map_err(|_| {
            let message = format!("{} did not answer JSON; is it a Threadgate server?", self.base);
            Failure::new(Exit::Unreachable, message)
        })
    }

    /// The response to a request, if it is a success.
    async fn send(&self, request: RequestBuilder) -> Result<reqwest::Response, Failure> {
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body: Value = response.json().await.unwrap_or_default();
        Err(refusal(status, &body))
    }

    fn unreachable(&self, error: &reqwest::Error) -> Failure {
        let mut cause: &dyn std::error::Error = error;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        let message = format!(
            "no server answers at {} ({cause}); start one with `threadgate dev`, or name yours with --server",
            self.base
        );
        Failure::new(Exit::Unreachable, message)
    }
}

/// What the server's error says, field by field.
fn refusal(status: StatusCode, body: &Value) -> Failure {
    let error = &body["error"];
    let message = error["message"].as_str().unwrap_or("the server gave no reason");
    let code = error["code"].as_str().unwrap_or_default();
    let mut text = format!("{message} ({} {code})", status.as_u16()).replace(" )", ")");
    for detail in error["details"].as_array().into_iter().flatten() {
        let place: Vec<String> = detail["loc"].as_array().into_iter().flatten().map(shown).collect();
        text.push_str(&format!("\n  {}: {}", place.join("."), shown(&detail["msg"])));
    }
    let exit = if status.is_server_error() { Exit::Unreachable } else { Exit::Refused };
    Failure::new(exit, text)
}

/// A value for a person: text without quotes, nothing for null.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A value as indented JSON.
pub(crate) fn pretty(value: &Value) -> String {
    format!("{value:#}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn server(address: &str) -> Server {
        crate::use_ring();
        ServerArgs { server: address.to_owned(), json: false }.connect().unwrap_or_else(|_| panic!("an address"))
    }

    #[test]
    fn a_name_with_a_slash_stays_one_segment() {
        let request =
            server("http://host:1/base").request(Method::GET, &["v1", "threads", "a/b ü"], &[]).build().unwrap();

        assert_eq!(request.url().as_str(), "http://host:1/base/v1/threads/a%2Fb%20%C3%BC");
    }

    #[test]
    fn a_refusal_names_each_field() {
        let body = json!({"error": {"code": "VALIDATION_ERROR", "message": "Validation error", "details": [
            {"loc": ["body", "messages", 0], "msg": "Field required"}]}});

        let failure = refusal(StatusCode::UNPROCESSABLE_ENTITY, &body);

        assert_eq!(failure.exit, Exit::Refused);
        let text = failure.error.unwrap().to_string();
        assert_eq!(text, "Validation error (422 VALIDATION_ERROR)\n  body.messages.0: Field required");
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_said_with_what_to_do() {
        let failure = server("http://127.0.0.1:9").get(&["v1", "runs"], &[]).await.unwrap_err();

        assert_eq!(failure.exit, Exit::Unreachable);
        assert!(failure.error.unwrap().to_string().contains("threadgate dev"));
    }
}
