//! Limits with names: what the door refuses before anything is written.

use serde::{Deserialize, Serialize};

use super::message::FieldError;
use super::{Json, ThreadId};

/// The limits on what a client sends and a node returns. Over one of them: 413 for the body, 422
/// for the rest, and nothing is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Bytes of a request's body as sent. Default 10 MiB.
    pub body_bytes_max: usize,
    /// Bytes of a run's messages and state together, as JSON. Default 8 MiB.
    pub run_input_bytes_max: usize,
    /// Messages in one request. Default 1000.
    pub message_count_max: usize,
    /// Keys of `initial_state` or of an edited state. Default 256.
    pub state_key_count_max: usize,
    /// Bytes of one string or key. Default 4 MiB.
    pub string_bytes_max: usize,
    /// How deep arrays and objects may nest in a body. Default 100; the JSON reader itself refuses
    /// more than 127.
    pub json_depth_max: usize,
    /// Bytes of a thread, message, run or idempotency id. Default 255.
    pub id_bytes_max: usize,
    /// The largest `recursion_limit`. Default 100.
    pub step_limit_max: i32,
}

impl Default for Limits {
    fn default() -> Self {
        const MIB: usize = 1024 * 1024;
        Self {
            body_bytes_max: 10 * MIB,
            run_input_bytes_max: 8 * MIB,
            message_count_max: 1_000,
            state_key_count_max: 256,
            string_bytes_max: 4 * MIB,
            json_depth_max: 100,
            id_bytes_max: 255,
            step_limit_max: 100,
        }
    }
}

impl Limits {
    /// Whether `value`, found at `loc`, may come in: no NUL, no string too long, not too deep.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place.
    pub fn check_json(&self, value: &Json, loc: &[Json]) -> Result<(), FieldError> {
        self.check_nested(value, &mut loc.to_vec(), 1)
    }

    fn check_nested(&self, value: &Json, loc: &mut Vec<Json>, depth: usize) -> Result<(), FieldError> {
        if depth > self.json_depth_max && (value.is_object() || value.is_array()) {
            let msg = format!("Value error, nested deeper than {} levels", self.json_depth_max);
            return Err(FieldError { loc: loc.clone(), msg, kind: "value_error" });
        }
        match value {
            Json::String(text) => self.check_text(text, loc),
            Json::Array(items) => items.iter().enumerate().try_for_each(|(index, item)| {
                loc.push(index.into());
                self.check_nested(item, loc, depth + 1)?;
                loc.pop();
                Ok(())
            }),
            Json::Object(map) => map.iter().try_for_each(|(key, item)| {
                self.check_text(key, loc)?;
                loc.push(key.as_str().into());
                self.check_nested(item, loc, depth + 1)?;
                loc.pop();
                Ok(())
            }),
            _ => Ok(()),
        }
    }

    fn check_text(&self, text: &str, loc: &[Json]) -> Result<(), FieldError> {
        if text.len() > self.string_bytes_max {
            let msg = format!("String should have at most {} bytes", self.string_bytes_max);
            return Err(FieldError { loc: loc.to_vec(), msg, kind: "string_too_long" });
        }
        if text.contains('\0') {
            let msg = "Value error, text must not contain NUL (\\u0000)".to_owned();
            return Err(FieldError { loc: loc.to_vec(), msg, kind: "value_error" });
        }
        Ok(())
    }

    /// Whether `text` may be an id: not blank, at most [`Self::id_bytes_max`] bytes, no control
    /// characters. Never cut, never normalised.
    ///
    /// # Errors
    /// What is wrong, found at `loc`.
    pub fn check_id(&self, text: &str, loc: &[Json]) -> Result<(), FieldError> {
        let wrong = |msg: String, kind| Err(FieldError { loc: loc.to_vec(), msg, kind });
        if text.trim().is_empty() {
            let name = loc.last().and_then(Json::as_str).unwrap_or("an id");
            return wrong(format!("Value error, {name} cannot be empty or whitespace"), "value_error");
        }
        if text.len() > self.id_bytes_max {
            return wrong(format!("String should have at most {} bytes", self.id_bytes_max), "string_too_long");
        }
        if text.chars().any(char::is_control) {
            return wrong("Value error, an id must not contain control characters".to_owned(), "value_error");
        }
        Ok(())
    }

    /// The thread that `config.thread_id` names: text or a number, trimmed. Null, blank and
    /// booleans mean a new thread.
    ///
    /// # Errors
    /// An id that is too long, has control characters or is no scalar.
    pub fn thread_id(&self, value: Option<&Json>, loc: &[Json]) -> Result<Option<ThreadId>, FieldError> {
        let text = match value {
            None | Some(Json::Null | Json::Bool(_)) => return Ok(None),
            Some(Json::String(text)) => text.trim().to_owned(),
            Some(Json::Number(number)) => number.to_string(),
            Some(_) => {
                let msg = "Input should be a valid string".to_owned();
                return Err(FieldError { loc: loc.to_vec(), msg, kind: "string_type" });
            }
        };
        if text.is_empty() {
            return Ok(None);
        }
        self.check_id(&text, loc)?;
        Ok(Some(ThreadId(text)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn thread_id(value: Json) -> Result<Option<ThreadId>, FieldError> {
        Limits::default().thread_id(Some(&value), &["body".into(), "config".into(), "thread_id".into()])
    }

    /// C85: NUL is refused in text and in keys; the six characters that spell it are plain text.
    #[test]
    fn nul_is_refused_wherever_it_stands() {
        let limits = Limits::default();
        let at = |value: Json| limits.check_json(&value, &["body".into()]).unwrap_err();

        assert_eq!(at(json!({"a": ["x", "\0"]})).loc, [json!("body"), json!("a"), json!(1)]);
        assert_eq!(at(json!({"a": {"k\0": 1}})).loc, [json!("body"), json!("a")]);
        assert_eq!(limits.check_json(&json!("\\u0000"), &[]), Ok(()));
    }

    /// C88: depth is counted, not overflowed.
    #[test]
    fn nesting_is_limited() {
        let limits = Limits { json_depth_max: 3, ..Limits::default() };

        assert_eq!(limits.check_json(&json!([[["x"]]]), &[]), Ok(()));
        assert!(limits.check_json(&json!([[[["x"]]]]), &[]).unwrap_err().msg.contains("3 levels"));
    }

    /// C89: one long string is refused by its own limit.
    #[test]
    fn long_strings_are_refused() {
        let limits = Limits { string_bytes_max: 4, ..Limits::default() };

        assert_eq!(limits.check_json(&json!(["1234"]), &[]), Ok(()));
        assert_eq!(limits.check_json(&json!(["12345"]), &[]).unwrap_err().kind, "string_too_long");
    }

    /// C90: blank means new, everything printable is kept exactly, the rest is refused.
    #[test]
    fn thread_ids_are_kept_exactly_or_refused() {
        for new in [json!(null), json!(true), json!(""), json!(" \t ")] {
            assert_eq!(thread_id(new), Ok(None));
        }
        for kept in ["a/b", "..", "\"quoted\"", "🦀", "\u{5e9}\u{202e}x", "e\u{301}", "\u{e9}", &"x".repeat(255)] {
            assert_eq!(thread_id(json!(kept)), Ok(Some(kept.into())));
        }
        assert_eq!(thread_id(json!(12345)), Ok(Some("12345".into())));
        assert_eq!(thread_id(json!(1.5)), Ok(Some("1.5".into())));
        assert_eq!(thread_id(json!("  t1 ")), Ok(Some("t1".into())));
        for refused in [json!("x".repeat(256)), json!("a\nb"), json!("a\0"), json!("a\u{7f}"), json!([1]), json!({})] {
            thread_id(refused).unwrap_err();
        }
    }
}
