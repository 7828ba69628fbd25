//! The manifest: a graph as data. The API serves introspection and admits runs from it alone.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::domain::meta::{END, START};
use crate::domain::{GraphVersion, Json, JsonMap, PoolName, ToolsSpec};

/// A graph as data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The graph's name; unique per installation.
    pub name: String,
    /// Whether the nodes are code of one program (`true`) or all said here.
    pub code: bool,
    /// The nodes in the order they were added, without `__start__` and `__end__`.
    pub nodes: Vec<NodeSpec>,
    /// The edges in the order they were added, from `__start__` too.
    pub edges: Vec<EdgeSpec>,
    /// Nodes before which every run pauses.
    pub interrupt_before: Vec<String>,
    /// Nodes after which every run pauses.
    pub interrupt_after: Vec<String>,
    /// The graph's own state fields, in order.
    pub fields: Vec<FieldSpec>,
    /// The name of the state type, for introspection.
    pub state_type: String,
    /// How generated message and thread ids look.
    pub ids: IdKind,
    /// How a new thread is named: text in which `{messages}` stands for the number of its messages.
    #[serde(default)]
    pub thread_name: Option<String>,
}

/// One node as data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeSpec {
    /// The node's name.
    pub name: String,
    /// `code`, or the kind of a declarative node: `http`, `set`, `scripted`, `tools`, `approval`.
    pub kind: String,
    /// What a declarative node is made of, as its author wrote it; null for code.
    #[serde(default)]
    pub spec: Json,
    /// Deadline, retries and pool.
    pub policy: NodePolicy,
}

/// Where and how often a node runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodePolicy {
    /// Which workers run it.
    pub pool: PoolName,
    /// Its deadline in milliseconds; `None` = the run's `node_timeout`.
    pub timeout_ms: Option<u64>,
    /// What happens when it fails.
    pub retry: RetryPolicy,
}

impl Default for NodePolicy {
    fn default() -> Self {
        Self { pool: PoolName::default_pool(), timeout_ms: None, retry: RetryPolicy::default() }
    }
}

/// Retries of a node that returned a retryable error or ran past its deadline.
///
/// A lost worker is not an error of the node: such a step starts again until [`CRASH_ATTEMPTS`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RetryPolicy {
    /// How many starts in all, crashes included; 1 = no retry, at most [`RETRY_ATTEMPTS_MAX`].
    pub attempts: u16,
    /// The longest wait after the first failed attempt, in milliseconds.
    pub delay_min_ms: u64,
    /// No wait is longer, in milliseconds.
    pub delay_max_ms: u64,
    /// Error codes that are retried; empty = every error that says it is retryable.
    pub retry_on: Vec<String>,
}

/// How many starts a node may ask for at most.
pub const RETRY_ATTEMPTS_MAX: u16 = 100;

/// How often a step starts at most when its workers die; after that it is quarantined.
pub const CRASH_ATTEMPTS: u16 = 3;

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { attempts: 1, delay_min_ms: 1_000, delay_max_ms: 60_000, retry_on: Vec::new() }
    }
}

impl RetryPolicy {
    /// The wait after failed attempt `attempt` (from 1): a random part, `jitter` in 0..1, of
    /// `delay_min × 2^(attempt-1)`, at most `delay_max` (full jitter).
    #[must_use]
    pub fn delay(&self, attempt: u16, jitter: f64) -> Duration {
        let doublings = u32::from(attempt.saturating_sub(1)).min(32);
        let ceiling = self.delay_min_ms.saturating_mul(1 << doublings).min(self.delay_max_ms);
        Duration::from_millis(ceiling).mul_f64(jitter.clamp(0.0, 1.0))
    }

    /// How often the step may start in all, crashes included.
    #[must_use]
    pub fn attempts_max(&self) -> u16 {
        self.attempts.max(CRASH_ATTEMPTS)
    }
}

/// One edge as data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EdgeSpec {
    /// Where it starts.
    pub source: String,
    /// Where it leads; for a conditional edge `None`.
    #[serde(default)]
    pub target: Option<String>,
    /// The condition as text (CEL), or `code`; `None` for a static edge.
    #[serde(default)]
    pub condition: Option<String>,
    /// Condition value → target, in order; `None`: the value names the target.
    #[serde(default)]
    pub mapping: Option<Vec<(Json, String)>>,
}

/// One state field of the graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FieldSpec {
    /// Its name at the top level of the state.
    pub name: String,
    /// Its value on a thread that never set it.
    pub default: Json,
    /// How parallel branches are joined.
    #[serde(default)]
    pub reducer: Reducer,
    /// JSON Schema of the value, for introspection.
    #[serde(default)]
    pub schema: Json,
}

/// How two values of one field become one when branches join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reducer {
    /// The newer wins.
    #[default]
    ReplaceValue,
    /// Objects whose `id` is not there yet are appended.
    AppendItems,
    /// Messages whose `message_id` is not there yet are appended.
    AddMessages,
}

/// How generated ids look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IdKind {
    /// uuid v4.
    #[default]
    String,
    /// 32 random bits.
    Integer,
    /// The nanosecond clock.
    Bigint,
}

impl Manifest {
    /// The node of that name.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&NodeSpec> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// Whether a run may go to `name`: a node, `__start__` or `__end__`.
    #[must_use]
    pub fn is_place(&self, name: &str) -> bool {
        name == START || name == END || self.node(name).is_some()
    }

    /// The first node, where one static edge from `__start__` names it; `None` where a condition
    /// must be asked first, which is then a step of its own.
    #[must_use]
    pub fn entry(&self) -> Option<&str> {
        let mut from_start = self.edges.iter().filter(|edge| edge.source == START);
        match (from_start.next(), self.edges.iter().any(|e| e.source == START && e.condition.is_some())) {
            (Some(edge), false) => edge.target.as_deref(),
            _ => None,
        }
    }

    /// The tools of a `tools` node; null as its spec means none.
    ///
    /// # Errors
    /// A sentence if `node` is no tools node or its spec is not one. Whoever cannot read the guard
    /// must not run the tools.
    pub fn tools_of(&self, node: &str) -> Result<ToolsSpec, String> {
        let Some(spec) = self.node(node).filter(|spec| spec.kind == "tools") else {
            return Err(format!("'{node}' is not a tools node of graph '{}'", self.name));
        };
        if spec.spec.is_null() {
            return Ok(ToolsSpec::default());
        }
        ToolsSpec::deserialize(&spec.spec).map_err(|error| format!("the spec of tools node '{node}': {error}"))
    }

    /// The policy of a place; `__start__` has the default.
    #[must_use]
    pub fn policy(&self, name: &str) -> NodePolicy {
        self.node(name).map(|node| node.policy.clone()).unwrap_or_default()
    }

    /// The fields with `stored` over the defaults, in the manifest's order; names the manifest does
    /// not know are left out.
    #[must_use]
    pub fn fields_with(&self, stored: &JsonMap) -> JsonMap {
        self.fields
            .iter()
            .map(|field| (field.name.clone(), stored.get(&field.name).unwrap_or(&field.default).clone()))
            .collect()
    }

    /// The content hash: equal manifests have equal versions.
    #[must_use]
    pub fn version(&self, code_fingerprint: Option<&str>) -> GraphVersion {
        use sha2::Digest;
        let mut hash = sha2::Sha256::new();
        hash.update(serde_json::to_vec(self).expect("a manifest has string keys"));
        hash.update(code_fingerprint.unwrap_or_default());
        let digest = hex::encode(&hash.finalize()[..12]);
        GraphVersion(format!("{}-{digest}", if self.code { 'c' } else { 'd' }))
    }
}
