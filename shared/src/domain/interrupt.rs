//! Questions that pause a run, and their answers.
//!
//! A question belongs to one pause of one thread and is answered once. The answer is stored in its
//! canonical form: what the asking node or tool is given when it runs again.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::{Json, JsonMap, MessageId, RunId, StepId, Tenant, ThreadId, UserId};

/// Who answers a question whose time is over, by the default it was asked with.
pub const EXPIRY: &str = "threadgate:expiry";

/// The reason of a question about a `once` tool whose outcome nobody knows.
pub const OUTCOME_UNKNOWN: &str = "threadgate:tool_outcome_unknown";

/// A question to a person, or to a client that runs a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Question {
    /// `int_` + 32 hex digits, new for every pause: what clients answer by.
    pub id: String,
    /// The position inside the node: what the answer is found by when the node runs again.
    /// `node:<node>:<n>`, `tool:<call_id>:<n>`, `gate:<call_id>`, `remote:<call_id>`,
    /// `outcome:<call_id>:<n>`; unique within one pause.
    pub key: String,
    /// The node that asks.
    pub node: String,
    /// Who asks, and what an answer looks like.
    pub kind: QuestionKind,
    /// The tool call it is about.
    #[serde(default)]
    pub call: Option<CallRef>,
    /// The question in words.
    #[serde(default)]
    pub message: Option<String>,
    /// A word for the kind of question: `input_required`, `tool_call`, `remote_tool_call`, …
    pub reason: String,
    /// What the question is about, for the one who answers.
    #[serde(default)]
    pub value: Json,
    /// JSON Schema of the answer as clients send it.
    #[serde(default)]
    pub response_schema: Option<Json>,
    /// Free data for whoever shows the question, such as `x-confirm`.
    #[serde(default)]
    pub metadata: JsonMap,
    /// How long it may be answered, from the commit of the pause; in milliseconds. `None` = for ever.
    #[serde(default, with = "milliseconds")]
    pub expires_in: Option<Duration>,
    /// The canonical answer it gets when its time is over; `None` = it stays, listed as expired.
    #[serde(default)]
    pub on_expiry: Option<Json>,
    /// Whether whoever approves may change the arguments.
    #[serde(default)]
    pub may_edit: bool,
    /// User ids that may answer; empty = everybody who may answer questions on this thread.
    #[serde(default)]
    pub approvers: Vec<String>,
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuestionKind {
    /// `interrupt()` in a node or a tool; the answer is any value that satisfies the schema.
    Input,
    /// A tool that needs an approval; the answer is a [`GateAnswer`].
    Gate,
    /// A tool that the client runs; the answer is the call's `tool_result` block.
    Remote,
    /// A `once` tool whose outcome is unknown; the answer is an [`OutcomeAnswer`].
    Outcome,
}

/// One call of one assistant message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallRef {
    /// The message that holds the call.
    pub message_id: MessageId,
    /// The call's own id, unique within its message.
    pub call_id: String,
    /// The tool's name.
    pub tool: String,
    /// The arguments as the model produced them, parsed.
    pub arguments: Json,
    /// [`arguments_hash`] of them.
    pub arguments_hash: String,
}

/// Where a question is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InterruptStatus {
    /// It may be answered.
    Open,
    /// It was answered.
    Answered,
    /// Nobody will answer it: the run was stopped, or the client cancelled it.
    Cancelled,
    /// Its time is over: its default counted, or without one it waits for a stop.
    Expired,
}

/// A question as stored, with what became of it.
#[derive(Debug, Clone, PartialEq)]
pub struct InterruptRecord {
    /// The question.
    pub question: Question,
    /// Its tenant.
    pub tenant: Tenant,
    /// Its thread.
    pub thread_id: ThreadId,
    /// The thread's owner.
    pub user: UserId,
    /// The thread's graph.
    pub graph: String,
    /// The step that asked; its run is the paused one.
    pub step: StepId,
    /// Where it is by the store's clock: an open question whose time is over is expired.
    pub status: InterruptStatus,
    /// The canonical answer.
    pub answer: Option<Json>,
    /// Of an approval: [`arguments_hash`] of exactly the arguments that were approved.
    pub approved_hash: Option<String>,
    /// Who answered or cancelled: a user id or [`EXPIRY`].
    pub answered_by: Option<String>,
    /// What they said about it.
    pub comment: Option<String>,
    /// When it was asked; those of one pause a microsecond apart, in the order of the calls.
    pub created_at: DateTime<Utc>,
    /// From when on no answer counts.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it was answered or cancelled.
    pub answered_at: Option<DateTime<Utc>>,
}

/// The canonical answer to a gate: `{"outcome", "arguments"?, "comment"?}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateAnswer {
    /// The decision.
    pub outcome: GateOutcome,
    /// The arguments to run the tool with, where they were edited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<Json>,
    /// What the person said; of a denial the model reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comment: Option<String>,
}

/// Whether a gated tool runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateOutcome {
    /// It runs once, with exactly the arguments that were shown or edited.
    Approved,
    /// It does not run; the model reads so.
    Denied,
}

/// The canonical answer to an unknown outcome: `{"action", "result"?}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutcomeAnswer {
    /// What to take the call for.
    pub action: OutcomeAction,
    /// What the model reads as the tool's result; for `done` and `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Json>,
}

/// What to do about a call whose outcome is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutcomeAction {
    /// Call the tool again.
    Retry,
    /// It took effect, with this result.
    Done,
    /// It did not.
    Failed,
}

impl Question {
    /// A question with a new id and nothing but its position.
    #[must_use]
    pub fn new(kind: QuestionKind, node: &str, key: String, reason: &str) -> Self {
        Self {
            id: new_id(),
            key,
            node: node.to_owned(),
            kind,
            call: None,
            message: None,
            reason: reason.to_owned(),
            value: Json::Null,
            response_schema: None,
            metadata: JsonMap::new(),
            expires_in: None,
            on_expiry: None,
            may_edit: false,
            approvers: Vec::new(),
        }
    }

    /// The object of the wire: `{id, key, node, value, message, reason, response_schema, tool_call_id}`.
    /// Source: graph semantics, "interrupt() and resume".
    #[must_use]
    pub fn wire(&self) -> Json {
        serde_json::json!({
            "id": self.id,
            "key": self.key,
            "node": self.node,
            "value": self.value,
            "message": self.message,
            "reason": self.reason,
            "response_schema": self.response_schema,
            "tool_call_id": self.call.as_ref().map(|call| &call.call_id),
        })
    }
}

/// A new interrupt id: `int_` + 32 random hex digits.
#[must_use]
pub fn new_id() -> String {
    format!("int_{}", uuid::Uuid::new_v4().simple())
}

impl CallRef {
    /// The call `call_id` of `tool` in message `message_id`.
    #[must_use]
    pub fn new(message_id: MessageId, call_id: &str, tool: &str, arguments: Json) -> Self {
        let arguments_hash = arguments_hash(&arguments);
        Self { message_id, call_id: call_id.to_owned(), tool: tool.to_owned(), arguments, arguments_hash }
    }
}

impl QuestionKind {
    const ALL: [Self; 4] = [Self::Input, Self::Gate, Self::Remote, Self::Outcome];

    /// The word on the wire and in the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Gate => "gate",
            Self::Remote => "remote",
            Self::Outcome => "outcome",
        }
    }

    /// The kind named by `text`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }
}

impl InterruptStatus {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Open, Self::Answered, Self::Cancelled, Self::Expired];

    /// The word on the wire and in the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Answered => "answered",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
        }
    }

    /// The status named by `text`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }
}

impl InterruptRecord {
    /// The paused run.
    #[must_use]
    pub fn run_id(&self) -> RunId {
        self.step.run_id
    }
}

impl GateAnswer {
    /// An approval of the arguments as shown.
    #[must_use]
    pub fn approved() -> Self {
        Self { outcome: GateOutcome::Approved, arguments: None, comment: None }
    }

    /// A denial.
    #[must_use]
    pub fn denied(comment: Option<String>) -> Self {
        Self { outcome: GateOutcome::Denied, arguments: None, comment }
    }

    /// Reads a canonical answer.
    ///
    /// # Errors
    /// A sentence about what is wrong with it.
    pub fn parse(answer: &Json) -> Result<Self, String> {
        Self::deserialize(answer).map_err(|error| error.to_string())
    }

    /// The canonical form.
    #[must_use]
    pub fn to_json(&self) -> Json {
        serde_json::to_value(self).expect("an answer has string keys")
    }

    /// [`arguments_hash`] of the arguments that `call` may run with; `None` for a denial.
    #[must_use]
    pub fn approved_hash(&self, call: &CallRef) -> Option<String> {
        let edited = || self.arguments.as_ref().map(arguments_hash);
        (self.outcome == GateOutcome::Approved).then(|| edited().unwrap_or_else(|| call.arguments_hash.clone()))
    }
}

impl OutcomeAnswer {
    /// Reads a canonical answer.
    ///
    /// # Errors
    /// A sentence about what is wrong with it.
    pub fn parse(answer: &Json) -> Result<Self, String> {
        Self::deserialize(answer).map_err(|error| error.to_string())
    }

    /// The canonical form.
    #[must_use]
    pub fn to_json(&self) -> Json {
        serde_json::to_value(self).expect("an answer has string keys")
    }
}

/// SHA-256, in hex, over the canonical text of `arguments`: compact JSON, the keys of every object
/// sorted by bytes, numbers with the digits they were written with.
#[must_use]
pub fn arguments_hash(arguments: &Json) -> String {
    use sha2::Digest;
    let text = serde_json::to_vec(&sorted(arguments)).expect("JSON has string keys");
    hex::encode(sha2::Sha256::digest(text))
}

fn sorted(value: &Json) -> Json {
    match value {
        Json::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by_key(|(key, _)| *key);
            Json::Object(entries.into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect())
        }
        Json::Array(items) => Json::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

/// A span as a whole number of milliseconds.
pub(crate) mod milliseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(span: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        span.map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX)).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map(Duration::from_millis))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(text: &str) -> Json {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_hash_is_of_the_arguments_and_not_of_their_order() {
        let one = arguments_hash(&parsed(r#"{"b": [{"y": 1, "x": 2}], "a": "é"}"#));
        let same = arguments_hash(&parsed(r#"{ "a":"\u00e9","b":[{"x":2,"y":1}]}"#));

        assert_eq!(one, same);
        assert_eq!(one.len(), 64);
        assert_eq!(arguments_hash(&json!({})), "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a");
        for other in [r#"{"a":"é","b":[{"x":2,"y":1.0}]}"#, r#"{"a":"e","b":[{"x":2,"y":1}]}"#, r#"{"a":"é"}"#] {
            assert_ne!(arguments_hash(&parsed(other)), one);
        }
    }

    #[test]
    fn an_approval_is_of_the_arguments_shown_or_edited() {
        let call = CallRef::new("m".into(), "c", "refund", json!({"amount": 42}));
        let edited = GateAnswer { arguments: Some(json!({"amount": 1})), ..GateAnswer::approved() };

        assert_eq!(GateAnswer::approved().approved_hash(&call), Some(call.arguments_hash.clone()));
        assert_eq!(edited.approved_hash(&call), Some(arguments_hash(&json!({"amount": 1}))));
        assert_eq!(GateAnswer::denied(None).approved_hash(&call), None);
    }

    #[test]
    fn canonical_answers_are_strict() {
        assert_eq!(GateAnswer::parse(&json!({"outcome": "approved"})), Ok(GateAnswer::approved()));
        assert_eq!(GateAnswer::denied(Some("no".into())).to_json(), json!({"outcome": "denied", "comment": "no"}));
        for wrong in [json!(true), json!({}), json!({"outcome": "yes"}), json!({"outcome": "approved", "by": "me"})] {
            assert!(GateAnswer::parse(&wrong).is_err(), "{wrong}");
        }
        let retry = OutcomeAnswer { action: OutcomeAction::Retry, result: None };
        assert_eq!(OutcomeAnswer::parse(&json!({"action": "retry"})), Ok(retry));
    }

    #[test]
    fn the_wire_shows_eight_keys() {
        let mut question = Question::new(QuestionKind::Gate, "tools", "gate:c".into(), "tool_call");
        question.call = Some(CallRef::new("m".into(), "c", "refund", json!({})));
        question.expires_in = Some(Duration::from_millis(1500));

        let wire = question.wire();
        let again: Question = serde_json::from_value(serde_json::to_value(&question).unwrap()).unwrap();

        assert_eq!(wire.as_object().unwrap().len(), 8);
        assert_eq!((&wire["tool_call_id"], &wire["key"]), (&json!("c"), &json!("gate:c")));
        assert_eq!(again, question);
        assert!(question.id.len() == 36 && question.id.starts_with("int_"), "{}", question.id);
    }
}
