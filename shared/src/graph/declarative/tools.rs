//! A `tools` node as a document: what its tools are, which of them need an approval, and how each runs.

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::document::{Ordered, Span, any_schema};
use crate::domain::{Effect, Guard, Json, JsonMap, ToolSpec, ToolsSpec};
use crate::graph::{Tool, ToolContext, ToolError};

/// A `tools` node. It runs the calls of the last assistant message.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolsDoc {
    /// Its tools, in the order a model is shown them.
    #[schemars(length(min = 1))]
    pub tools: Vec<ToolDoc>,
    /// Which of them need an approval.
    #[serde(default)]
    pub guard: GuardDoc,
    /// How many calls of one message run at once. Default 8.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub concurrency: Option<u16>,
}

/// One tool; it says in one way how it runs: `returns`, `http`, `remote` or `handoff`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolDoc {
    /// What a model calls it by.
    pub name: String,
    /// What it does, for the model.
    #[serde(default)]
    pub description: String,
    /// JSON Schema of its arguments, an object. Default: any.
    #[serde(default)]
    #[schemars(schema_with = "any_schema")]
    pub parameters: Option<Json>,
    /// What happens if it is called twice: `none` (it reads; the default), `idempotent` (it refuses or
    /// repeats harmlessly, by the idempotency key) or `once` (never again, unless a person says so).
    #[serde(default)]
    pub effect: Effect,
    /// Whether it destroys or spends something, so that the guard asks first.
    #[serde(default)]
    pub destructive: bool,
    /// The question a person is asked before it runs.
    #[serde(default)]
    pub confirm: Option<String>,
    /// What it is about.
    #[serde(default)]
    pub tags: Vec<String>,
    /// How long a call may take. Default `5m`.
    #[serde(default)]
    pub timeout: Option<Span>,
    /// Whether whoever approves a call may change its arguments.
    #[serde(default)]
    pub may_edit: bool,
    /// User ids that may approve. Default: everybody who may answer questions on the thread.
    #[serde(default)]
    pub approvers: Vec<String>,
    /// How long an approval may be given. Default: for ever.
    #[serde(default)]
    pub expires_in: Option<Span>,
    /// What counts when that time is over. Default: nothing, the question stays, listed as expired.
    #[serde(default)]
    pub on_expiry: Option<OnExpiry>,
    /// What every call returns, for demos and tests.
    #[serde(default)]
    pub returns: Option<Json>,
    /// A service that is asked by POST; its JSON answer is the result.
    #[serde(default)]
    pub http: Option<HttpToolSpec>,
    /// The client runs it.
    #[serde(default)]
    pub remote: bool,
    /// A call of it jumps to this node; nothing runs.
    #[serde(default)]
    pub handoff: Option<String>,
}

/// What counts when the time of an approval is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnExpiry {
    /// The call is denied.
    Denied,
    /// The call is approved as it is.
    Approved,
}

/// Which tools need an approval.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GuardDoc {
    /// Default false: then a destructive tool just runs.
    #[serde(default)]
    pub enabled: bool,
    /// Names that are always gated.
    #[serde(default)]
    pub require_approval: Vec<String>,
    /// Names that are never gated, whatever else holds.
    #[serde(default)]
    pub exempt: Vec<String>,
    /// Tool name → the question a person is asked; before the tool's own `confirm`.
    #[serde(default)]
    pub approval_prompts: Ordered<String>,
}

/// A tool behind HTTP. The service gets `{"thread_id", "run_id", "tool", "call_id", "arguments",
/// "attempt", "caller"}`.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HttpToolSpec {
    /// Where the service listens: `http://…` or `https://…`.
    #[schemars(regex(pattern = super::http::URL_PATTERN))]
    pub url: String,
    /// Headers to send.
    #[serde(default)]
    pub headers: std::collections::BTreeMap<String, String>,
    /// Headers whose values come from environment variables of the worker: header → variable.
    #[serde(default)]
    pub header_env: std::collections::BTreeMap<String, String>,
    /// The worker's environment variable with the secret that signs the body (HMAC-SHA256). Default:
    /// the worker's own, else not signed.
    #[serde(default)]
    pub secret_env: Option<String>,
}

/// How a tool runs that a document declares; kept in the manifest as [`ToolSpec::run`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToolRun {
    /// The same output for every call.
    Returns(Json),
    /// A service.
    Http(HttpToolSpec),
}

impl ToolsDoc {
    /// The tools as the manifest has them, and what is wrong with the document: a tool's place in the list
    /// and why.
    pub(super) fn into_spec(self) -> (ToolsSpec, Vec<(usize, String)>) {
        let mut wrong = Vec::new();
        let mut spec = ToolsSpec {
            concurrency: self.concurrency.unwrap_or(ToolsSpec::default().concurrency),
            ..ToolsSpec::default()
        };
        for (index, tool) in self.tools.into_iter().enumerate() {
            let ways = [tool.returns.is_some(), tool.http.is_some(), tool.remote, tool.handoff.is_some()];
            let ways = ways.into_iter().filter(|way| *way).count();
            if ways != 1 {
                let name = &tool.name;
                wrong.push((index, format!("tool '{name}' says in {ways} ways how it runs; give it one of returns, http, remote and handoff")));
            }
            spec.tools.push(tool.into_spec());
        }
        spec.guard = Guard {
            enabled: self.guard.enabled,
            require_approval: self.guard.require_approval,
            exempt: self.guard.exempt,
            approval_prompts: self
                .guard
                .approval_prompts
                .0
                .into_iter()
                .map(|(name, text)| (name, text.into()))
                .collect(),
        };
        (spec, wrong)
    }
}

impl ToolDoc {
    fn into_spec(self) -> ToolSpec {
        let run = self.returns.map(ToolRun::Returns).or(self.http.map(ToolRun::Http));
        let run = run.map_or(Json::Null, |run| serde_json::to_value(run).expect("it has string keys"));
        let named = ToolSpec::named(&self.name);
        ToolSpec {
            description: self.description,
            parameters: self.parameters.unwrap_or(named.parameters.clone()),
            effect: self.effect,
            destructive: self.destructive,
            confirm: self.confirm,
            tags: self.tags,
            timeout: self.timeout.map(|span| span.0),
            remote: self.remote,
            handoff: self.handoff,
            may_edit: self.may_edit,
            approvers: self.approvers,
            expires_in: self.expires_in.map(|span| span.0),
            on_expiry: self.on_expiry.map(|end| match end {
                OnExpiry::Denied => serde_json::json!({"outcome": "denied"}),
                OnExpiry::Approved => serde_json::json!({"outcome": "approved"}),
            }),
            run,
            metadata: JsonMap::new(),
            ..named
        }
    }
}

/// A tool that says the same to every call.
pub(super) struct CannedTool(pub(super) Json);

#[async_trait]
impl Tool for CannedTool {
    async fn call(&self, _: ToolContext, _: Json) -> Result<Json, ToolError> {
        Ok(self.0.clone())
    }
}
