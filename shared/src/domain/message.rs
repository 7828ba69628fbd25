//! Messages and their content blocks, as they are on the wire.
//!
//! Blocks are kept as JSON and checked by hand: a typed enum would buffer them and lose the digits
//! of big numbers.

use serde::{Deserialize, Serialize};

use super::id::MessageId;
use super::{Json, JsonMap};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The graph's author.
    System,
    /// A tool's result.
    Tool,
}

impl Role {
    /// The word on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::System => "system",
            Self::Tool => "tool",
        }
    }
}

/// One message of a conversation. All fields are on the wire, null ones too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Unique among the thread's living messages.
    pub message_id: MessageId,
    /// Who speaks.
    pub role: Role,
    /// Content blocks, each an object with a `type`.
    pub content: Vec<Json>,
    /// A piece of a message that is still streaming; never stored.
    #[serde(default)]
    pub delta: bool,
    /// The calls a model asks for: `{"id","type":"function","function":{"name","arguments"}}`.
    #[serde(default)]
    pub tools_calls: Option<Vec<Json>>,
    /// The model's reasoning text.
    #[serde(default)]
    pub reasoning: Option<String>,
    /// UNIX seconds; says when, orders nothing.
    #[serde(default)]
    pub timestamp: Option<serde_json::Number>,
    /// Free data.
    #[serde(default)]
    pub metadata: JsonMap,
    /// Token counts.
    #[serde(default)]
    pub usages: Option<Json>,
    /// The provider's own answer.
    #[serde(default)]
    pub raw: Option<Json>,
    /// Structured output.
    #[serde(default)]
    pub parsed_content: Option<Json>,
}

impl Message {
    /// A message of one text block with a random id, without a time.
    #[must_use]
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Self {
            message_id: MessageId::random(),
            role,
            content: vec![text_block(text)],
            delta: false,
            tools_calls: None,
            reasoning: None,
            timestamp: None,
            metadata: JsonMap::new(),
            usages: None,
            raw: None,
            parsed_content: None,
        }
    }

    /// The plain text: text blocks and tool outputs, in order; other blocks add nothing.
    #[must_use]
    pub fn plain_text(&self) -> String {
        let mut text = String::new();
        for block in &self.content {
            match block["type"].as_str() {
                Some("text") => text.push_str(block["text"].as_str().unwrap_or_default()),
                Some("tool_result") => match &block["output"] {
                    Json::String(output) => text.push_str(output),
                    output => text.push_str(&output.to_string()),
                },
                _ => {}
            }
        }
        text
    }
}

/// A `text` block as the wire shows it.
#[must_use]
pub fn text_block(text: impl Into<String>) -> Json {
    serde_json::json!({"type": "text", "text": text.into(), "annotations": []})
}

/// What is wrong with one field of a request, and where.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FieldError {
    /// `body`, `query` or `path`, then field names and array indexes.
    pub loc: Vec<Json>,
    /// A sentence for a person.
    pub msg: String,
    /// The stable kind, such as `missing` or `value_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
}
