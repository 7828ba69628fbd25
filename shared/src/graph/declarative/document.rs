//! The document a declarative graph is written as. These types are the published JSON Schema and
//! what `graph check` holds a document against.

use std::borrow::Cow;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::domain::{Json, JsonMap};
use crate::graph::{IdKind, Reducer};

/// A pattern of text that names a span of time.
pub(super) const SPAN_PATTERN: &str = r"^\s*(\d+\s*(ms|s|sec|m|min|h)\s*)+$";

/// A graph.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Document {
    /// Where an editor finds this schema; ignored.
    #[serde(default, rename = "$schema")]
    #[schemars(rename = "$schema")]
    pub schema: Option<String>,
    /// The graph's name; unique per installation.
    #[schemars(length(min = 1, max = 255))]
    pub name: String,
    /// What the graph is for; ignored.
    #[serde(default)]
    pub description: Option<String>,
    /// The name of the state type that introspection shows. Default `AgentState`.
    #[serde(default)]
    pub state_type: Option<String>,
    /// How generated message and thread ids look: `string` (uuid v4, the default), `integer` or
    /// `bigint`.
    #[serde(default)]
    pub ids: IdKind,
    /// How new threads are named: text in which `{messages}` stands for the number of messages.
    #[serde(default)]
    pub thread_name: Option<String>,
    /// The graph's own state fields, by name.
    #[serde(default)]
    pub fields: Ordered<FieldDoc>,
    /// The first node. Leave it out where edges from `__start__` say more.
    #[serde(default)]
    pub entry: Option<String>,
    /// The nodes, by name.
    pub nodes: Ordered<NodeDoc>,
    /// The edges; those of one node are asked in this order.
    #[serde(default)]
    pub edges: Vec<EdgeDoc>,
    /// Nodes before which every run pauses.
    #[serde(default)]
    pub interrupt_before: Vec<String>,
    /// Nodes after which every run pauses.
    #[serde(default)]
    pub interrupt_after: Vec<String>,
}

/// A state field.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FieldDoc {
    /// Its value on a thread that never set it. Default null.
    #[serde(default)]
    pub default: Json,
    /// How parallel branches are joined. Default `replace_value`.
    #[serde(default)]
    pub reducer: Reducer,
    /// JSON Schema of its values.
    #[serde(default)]
    #[schemars(schema_with = "any_schema")]
    pub schema: Json,
}

/// A node: its kind, what every kind has, and what its kind alone has.
#[derive(Debug)]
pub struct NodeDoc(pub JsonMap);

/// What every kind of node has.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeCommon {
    /// What the node is made of.
    pub kind: String,
    /// What the node is for; ignored.
    #[serde(default)]
    pub description: Option<String>,
    /// Which workers run it. Default `default`.
    #[serde(default)]
    pub pool: Option<String>,
    /// Its deadline, such as `30s`. Default: the run's `node_timeout`.
    #[serde(default)]
    pub timeout: Option<Span>,
    /// What happens when it fails in a way that another attempt could mend.
    #[serde(default)]
    pub retry: RetryDoc,
}

/// Retries of a node.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RetryDoc {
    /// How many starts in all. Default 1: no retry.
    #[serde(default)]
    #[schemars(range(min = 1, max = 100))]
    pub attempts: Option<u16>,
    /// The longest wait after the first failed attempt; it doubles each time. Default `1s`.
    #[serde(default)]
    pub delay_min: Option<Span>,
    /// No wait is longer. Default `1m`.
    #[serde(default)]
    pub delay_max: Option<Span>,
    /// Error codes that are retried. Default: every error that says it is retryable.
    #[serde(default)]
    pub retry_on: Vec<String>,
}

/// An edge: `to` alone, `when` with `to`, `switch` with `cases`, or `route`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EdgeDoc {
    /// Where it starts: a node, or `__start__`.
    pub from: String,
    /// Where it leads: a node, or `__end__`.
    #[serde(default)]
    pub to: Option<String>,
    /// Follow `to` only if this CEL expression is true. Conditions see the state after the node:
    /// `state` (its fields), `messages`, `last` (the newest message or null), `user_text` (what the
    /// user said last), `meta` (`current_node`, `step`) and `thread_id`; a message has its plain
    /// `text` beside the wire's keys.
    #[serde(default)]
    pub when: Option<String>,
    /// A CEL expression whose value, as text, picks one of `cases`.
    #[serde(default)]
    pub switch: Option<String>,
    /// Value of `switch` → target.
    #[serde(default)]
    pub cases: Ordered<String>,
    /// A CEL expression whose value names the target.
    #[serde(default)]
    pub route: Option<String>,
    /// Where it leads otherwise; the same as one more edge with `to` alone.
    #[serde(default, rename = "else")]
    pub otherwise: Option<String>,
}

/// A span of time, written as `500ms`, `30s` or `1m 30s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl Span {
    /// In whole milliseconds.
    #[must_use]
    pub fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Span {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Span".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": SPAN_PATTERN, "examples": ["500ms", "30s", "1m 30s"]})
    }
}

/// An object whose keys are free and whose order counts.
#[derive(Debug)]
pub struct Ordered<T>(pub Vec<(String, T)>);

impl<T> Default for Ordered<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(std::marker::PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Ordered(entries))
            }
        }

        deserializer.deserialize_map(Entries(std::marker::PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for Ordered<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("Map_of_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "object", "additionalProperties": generator.subschema_for::<T>()})
    }
}

impl<'de> Deserialize<'de> for NodeDoc {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        JsonMap::deserialize(deserializer).map(Self)
    }
}

impl JsonSchema for NodeDoc {
    fn schema_name() -> Cow<'static, str> {
        "Node".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "object"})
    }
}

/// The schema of a value that is a JSON Schema itself.
pub(super) fn any_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": ["object", "boolean", "null"]})
}
