//! Tools as data: what a `tools` node says of them, and what became of a call.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::interrupt::milliseconds;
use super::{Json, JsonMap};

/// How long a call may take where its tool does not say.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(300);

/// How many calls of one message run at once where the node does not say.
pub const CONCURRENCY: u16 = 8;

/// What a `tools` node is made of: the content of its `spec` in the manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolsSpec {
    /// Its tools, in the order a model is shown them; names are unique.
    #[serde(default)]
    pub tools: Vec<ToolSpec>,
    /// Which of them need an approval.
    #[serde(default)]
    pub guard: Guard,
    /// How many calls of one message run at once. Default 8.
    #[serde(default = "concurrency")]
    pub concurrency: u16,
}

/// One tool as data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolSpec {
    /// Its name: what a model calls it by.
    pub name: String,
    /// What it does, for the model.
    #[serde(default)]
    pub description: String,
    /// JSON Schema of its arguments, an object. `x-destructive` and `x-confirm` at its root count.
    #[serde(default = "any_object")]
    pub parameters: Json,
    /// What happens if it is called twice. Default `none`.
    #[serde(default)]
    pub effect: Effect,
    /// Whether it destroys or spends something, so that the guard asks first.
    #[serde(default)]
    pub destructive: bool,
    /// The question a person is asked before it runs.
    #[serde(default)]
    pub confirm: Option<String>,
    /// What it is about; an agent may be shown only tools of some tags.
    #[serde(default)]
    pub tags: Vec<String>,
    /// What its source said of it, such as `annotations.readOnlyHint`.
    #[serde(default)]
    pub metadata: JsonMap,
    /// How long a call may take, in milliseconds. Default 300,000.
    #[serde(default, with = "milliseconds")]
    pub timeout: Option<Duration>,
    /// Whether the client runs it.
    #[serde(default)]
    pub remote: bool,
    /// The node a call of it jumps to; such a tool does not run.
    #[serde(default)]
    pub handoff: Option<String>,
    /// Whether whoever approves a call may change its arguments.
    #[serde(default)]
    pub may_edit: bool,
    /// User ids that may approve; empty = everybody who may answer questions on the thread.
    #[serde(default)]
    pub approvers: Vec<String>,
    /// How long an approval may be given, in milliseconds. `None` = for ever.
    #[serde(default, with = "milliseconds")]
    pub expires_in: Option<Duration>,
    /// The canonical answer when that time is over, usually `{"outcome": "denied"}`; `None` = none.
    #[serde(default)]
    pub on_expiry: Option<Json>,
    /// How it runs, where a document declares it; null for code.
    #[serde(default, skip_serializing_if = "Json::is_null")]
    pub run: Json,
}

/// What happens if a tool is called twice with the same arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Nothing that matters: it reads.
    #[default]
    None,
    /// It refuses or repeats harmlessly, by the idempotency key it is given.
    Idempotent,
    /// Its effect happens again: it is never called a second time unless a person says so.
    Once,
}

/// Which tools need an approval. Source: AG-UI, "Tool guard".
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guard {
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
    pub approval_prompts: JsonMap,
}

/// What became of a call: a fact that is never written twice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallResult {
    /// How it ended.
    pub status: CallStatus,
    /// What the model reads: the tool's output, or why there is none.
    pub output: Json,
}

/// How a call ended, or that it did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallStatus {
    /// Started, as far as anybody knows; no result yet.
    Intended,
    /// It returned.
    Done,
    /// It failed; the model reads why.
    Failed,
    /// Nobody approved it.
    Denied,
    /// A `once` call without a result whose deadline has passed: a person decides.
    Unknown,
}

impl ToolsSpec {
    /// The tool of that name.
    #[must_use]
    pub fn tool(&self, name: &str) -> Option<&ToolSpec> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}

impl Default for ToolsSpec {
    fn default() -> Self {
        Self { tools: Vec::new(), guard: Guard::default(), concurrency: CONCURRENCY }
    }
}

impl ToolSpec {
    /// A tool that takes any object and says nothing of itself.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            description: String::new(),
            parameters: any_object(),
            effect: Effect::default(),
            destructive: false,
            confirm: None,
            tags: Vec::new(),
            metadata: JsonMap::new(),
            timeout: None,
            remote: false,
            handoff: None,
            may_edit: false,
            approvers: Vec::new(),
            expires_in: None,
            on_expiry: None,
            run: Json::Null,
        }
    }

    /// How long a call may take.
    #[must_use]
    pub fn call_timeout(&self) -> Duration {
        self.timeout.unwrap_or(CALL_TIMEOUT)
    }
}

impl Effect {
    /// The word on the wire and in the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Idempotent => "idempotent",
            Self::Once => "once",
        }
    }

    /// The effect named by `text`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::None, Self::Idempotent, Self::Once].into_iter().find(|effect| effect.as_str() == text)
    }
}

impl CallStatus {
    const ALL: [Self; 5] = [Self::Intended, Self::Done, Self::Failed, Self::Denied, Self::Unknown];

    /// Whether the call has a result.
    #[must_use]
    pub fn has_result(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Denied)
    }

    /// The word in the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Intended => "intended",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Denied => "denied",
            Self::Unknown => "unknown",
        }
    }

    /// The status named by `text`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }
}

fn concurrency() -> u16 {
    CONCURRENCY
}

fn any_object() -> Json {
    serde_json::json!({"type": "object", "properties": {}})
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_tools_node_says_little_and_means_the_defaults() {
        let spec: ToolsSpec = serde_json::from_value(json!({"tools": [
            {"name": "refund", "effect": "once", "timeout": 1500, "parameters": {"maximum": 1.0}},
        ]}))
        .unwrap();

        let refund = spec.tool("refund").unwrap();
        assert_eq!((refund.effect, refund.call_timeout()), (Effect::Once, Duration::from_millis(1500)));
        assert_eq!(refund.parameters.to_string(), r#"{"maximum":1.0}"#);
        assert_eq!((spec.concurrency, spec.guard.enabled, spec.tool("other")), (CONCURRENCY, false, None));
        let again: ToolsSpec = serde_json::from_value(serde_json::to_value(&spec).unwrap()).unwrap();
        assert_eq!(again, spec);
    }

    #[test]
    fn what_a_tools_node_cannot_say_is_refused() {
        for wrong in [json!({"tool": []}), json!({"tools": [{}]}), json!({"tools": [{"name": "a", "effekt": "once"}]})]
        {
            assert!(serde_json::from_value::<ToolsSpec>(wrong).is_err());
        }
    }
}
