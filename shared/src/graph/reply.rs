//! What a node says as data: the answer of a node in another language, and of a scripted one.
//!
//! `{"messages"?: [text or message], "remove"?: [id], "fields"?: {…}, "goto"?: node}`, or
//! `{"interrupt": {"value"?, "message"?, "reason"?, "response_schema"?, "metadata"?, "expires_in"?, "on_expiry"?}}`
//! (`expires_in` in milliseconds), or `{"error": {"message", "code"?, "retryable"?}}`.

use std::time::Duration;

use super::ids::unix_seconds;
use super::{Command, IdKind, Interrupt, NodeContext, NodeError, Outcome, Patch};
use crate::domain::parse::{Fill, message};
use crate::domain::{FieldError, Json, JsonMap, Limits, Message, MessageId};

/// What a node said.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// It is done.
    Done(Outcome),
    /// It asks somebody.
    Ask(Interrupt),
    /// It failed.
    Failed {
        /// `NODE_001` unless it says otherwise.
        code: String,
        /// What went wrong.
        message: String,
        /// Whether another attempt could succeed.
        retryable: bool,
    },
}

impl Reply {
    /// Reads a reply; messages without an id get one of `ids`.
    ///
    /// # Errors
    /// A sentence about what is wrong with it.
    pub fn parse(value: &Json, ids: IdKind) -> Result<Self, String> {
        let map = object("the reply", value)?;
        if let Some(question) = map.get("interrupt") {
            only(map, "a reply that asks", &["interrupt"])?;
            return question_of(question).map(Self::Ask);
        }
        if let Some(error) = map.get("error") {
            only(map, "a reply that failed", &["error"])?;
            return failure_of(error);
        }
        only(map, "a reply", &["messages", "remove", "fields", "goto", "interrupt", "error"])?;
        let messages = list(map, "messages")?.iter().enumerate();
        let messages = messages.map(|(index, value)| message_of(index, value, ids)).collect::<Result<_, _>>()?;
        let remove = list(map, "remove")?.iter().map(id_of).collect::<Result<_, _>>()?;
        let fields = match map.get("fields") {
            None | Some(Json::Null) => JsonMap::new(),
            Some(fields) => object("'fields'", fields)?.clone(),
        };
        let goto = text(map, "goto")?;
        let command = Command { update: Patch { messages, remove, fields }, goto };
        Ok(Self::Done(Outcome { command, ..Outcome::default() }))
    }

    /// What the node returns; a question follows the answers the node was given.
    ///
    /// # Errors
    /// The question or the failure.
    pub fn into_result(self, ctx: &NodeContext) -> Result<Outcome, NodeError> {
        match self {
            Self::Done(outcome) => Ok(outcome),
            Self::Ask(question) => {
                Err(NodeError::Interrupt { position: ctx.answers.len(), question: Box::new(question) })
            }
            Self::Failed { code, message, retryable } => Err(NodeError::Failed { code, message, retryable }),
        }
    }
}

/// A message as a node writes it: text, or a message whose role may be missing (assistant) and whose
/// content may be text.
///
/// # Errors
/// A sentence about the message at `index`.
pub fn message_of(index: usize, value: &Json, ids: IdKind) -> Result<Message, String> {
    let mut wire = match value {
        Json::String(text) => serde_json::json!({"role": "assistant", "content": text}),
        Json::Object(_) => value.clone(),
        _ => return Err(format!("messages[{index}] is neither text nor a message")),
    };
    if wire.get("role").is_none() {
        wire["role"] = "assistant".into();
    }
    if let Some(text) = wire.get("content").and_then(Json::as_str) {
        wire["content"] = Json::Array(vec![crate::domain::message::text_block(text)]);
    }
    let fill = Fill { new_id: &|| ids.message_id(), now: unix_seconds() };
    let loc = ["messages".into(), index.into()];
    message(&wire, &loc, &Limits::default(), &fill).map_err(|errors| sentence(&errors))
}

fn sentence(errors: &[FieldError]) -> String {
    let place = |loc: &[Json]| {
        let steps = loc.iter().map(|step| step.as_str().map_or_else(|| step.to_string(), str::to_owned));
        steps.collect::<Vec<_>>().join(".")
    };
    errors.first().map_or_else(String::new, |error| format!("{}: {}", place(&error.loc), error.msg))
}

fn question_of(value: &Json) -> Result<Interrupt, String> {
    let map = object("'interrupt'", value)?;
    only(
        map,
        "'interrupt'",
        &["value", "message", "reason", "response_schema", "metadata", "expires_in", "on_expiry"],
    )?;
    let response_schema = map.get("response_schema").filter(|schema| !schema.is_null()).cloned();
    if let Some(Err(error)) = response_schema.as_ref().map(jsonschema::validator_for) {
        return Err(format!("'response_schema' is no JSON Schema: {error}"));
    }
    Ok(Interrupt {
        value: map.get("value").cloned().unwrap_or(Json::Null),
        message: text(map, "message")?,
        reason: text(map, "reason")?.unwrap_or(Interrupt::default().reason),
        response_schema,
        metadata: match map.get("metadata") {
            None | Some(Json::Null) => JsonMap::new(),
            Some(metadata) => object("'metadata'", metadata)?.clone(),
        },
        expires_in: span(map, "expires_in")?,
        on_expiry: map.get("on_expiry").filter(|answer| !answer.is_null()).cloned(),
    })
}

fn failure_of(value: &Json) -> Result<Reply, String> {
    let map = object("'error'", value)?;
    only(map, "'error'", &["message", "code", "retryable"])?;
    Ok(Reply::Failed {
        code: text(map, "code")?.unwrap_or_else(|| "NODE_001".to_owned()),
        message: text(map, "message")?.ok_or("'error' has no 'message'")?,
        retryable: match map.get("retryable") {
            None | Some(Json::Null) => false,
            Some(Json::Bool(retryable)) => *retryable,
            Some(_) => return Err("'retryable' is neither true nor false".to_owned()),
        },
    })
}

fn id_of(value: &Json) -> Result<MessageId, String> {
    serde_json::from_value(value.clone()).map_err(|error| format!("'remove': {error}"))
}

fn object<'a>(what: &str, value: &'a Json) -> Result<&'a JsonMap, String> {
    value.as_object().ok_or_else(|| format!("{what} is not a JSON object"))
}

fn only(map: &JsonMap, what: &str, known: &[&str]) -> Result<(), String> {
    match map.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(format!("{what} does not have '{key}'; it may have {}", known.join(", "))),
        None => Ok(()),
    }
}

fn list<'a>(map: &'a JsonMap, name: &str) -> Result<&'a [Json], String> {
    match map.get(name) {
        None | Some(Json::Null) => Ok(&[]),
        Some(Json::Array(items)) => Ok(items),
        Some(_) => Err(format!("'{name}' is not a list")),
    }
}

fn span(map: &JsonMap, name: &str) -> Result<Option<Duration>, String> {
    match map.get(name) {
        None | Some(Json::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(milliseconds) => Ok(Some(Duration::from_millis(milliseconds))),
            None => Err(format!("'{name}' is not a whole number of milliseconds")),
        },
    }
}

fn text(map: &JsonMap, name: &str) -> Result<Option<String>, String> {
    match map.get(name) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(format!("'{name}' is not text")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::Role;

    fn parse(value: Json) -> Result<Reply, String> {
        Reply::parse(&value, IdKind::Integer)
    }

    #[test]
    fn a_reply_patches_and_jumps() {
        let Ok(Reply::Done(outcome)) = parse(json!({
            "messages": ["hi", {"content": "there"}, {"role": "user", "message_id": "u", "content": []}],
            "remove": ["a", 41], "fields": {"topic": null}, "goto": "next",
        })) else {
            panic!("refused")
        };

        let Patch { messages, remove, fields } = outcome.command.update;
        let said: Vec<(Role, String)> = messages.iter().map(|message| (message.role, message.plain_text())).collect();
        assert_eq!(
            said,
            [(Role::Assistant, "hi".into()), (Role::Assistant, "there".into()), (Role::User, String::new())]
        );
        assert!(messages[0].message_id.is_int && messages[0].timestamp.is_some());
        assert_eq!(remove, [MessageId::from("a"), MessageId { text: "41".into(), is_int: true }]);
        assert_eq!((Json::Object(fields), outcome.command.goto), (json!({"topic": null}), Some("next".into())));
    }

    #[test]
    fn an_empty_reply_follows_the_edges() {
        assert_eq!(parse(json!({})), Ok(Reply::Done(Outcome::default())));
    }

    #[test]
    fn a_reply_asks_or_fails() {
        let asked = parse(json!({"interrupt": {
            "value": {"amount": 42}, "message": "Refund 42?", "expires_in": 1500, "on_expiry": false,
        }}));
        let question = Interrupt {
            value: json!({"amount": 42}),
            message: Some("Refund 42?".into()),
            expires_in: Some(Duration::from_millis(1500)),
            on_expiry: Some(json!(false)),
            ..Interrupt::default()
        };
        assert_eq!(asked, Ok(Reply::Ask(question)));

        let failed = parse(json!({"error": {"message": "down", "retryable": true}}));
        assert_eq!(failed, Ok(Reply::Failed { code: "NODE_001".into(), message: "down".into(), retryable: true }));
    }

    #[test]
    fn what_a_reply_cannot_say_is_refused() {
        for (reply, part) in [
            (json!(null), "not a JSON object"),
            (json!({"mesages": []}), "'mesages'"),
            (json!({"messages": "hi"}), "not a list"),
            (json!({"messages": [1]}), "messages[0]"),
            (json!({"messages": [{"role": "robot", "content": []}]}), "messages.0.role"),
            (json!({"remove": [1.5]}), "'remove'"),
            (json!({"goto": 1}), "'goto' is not text"),
            (json!({"interrupt": {}, "fields": {}}), "'fields'"),
            (json!({"interrupt": {"response_schema": {"type": "nonsense"}}}), "no JSON Schema"),
            (json!({"interrupt": {"expires_in": -1}}), "'expires_in'"),
            (json!({"error": {}}), "no 'message'"),
            (json!({"error": {"message": "x", "retryable": 1}}), "'retryable'"),
        ] {
            let error = parse(reply).unwrap_err();

            assert!(error.contains(part), "{error}");
        }
    }
}
