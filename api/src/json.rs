//! JSON as it comes through the door: exact numbers, no bytes that are no text, and no known field
//! twice.

use std::collections::HashSet;

use threadgate_shared::domain::{FieldError, Json};

/// Fields of a message; twice in one message is a mistake.
const MESSAGE_FIELDS: [&str; 11] = [
    "message_id",
    "role",
    "content",
    "delta",
    "tools_calls",
    "reasoning",
    "timestamp",
    "metadata",
    "usages",
    "raw",
    "parsed_content",
];

/// The value that `bytes` spell.
///
/// # Errors
/// `json_invalid` with the byte at which reading ended: malformed, too deep, bad UTF-8, a surrogate
/// without its other half.
pub fn parse(bytes: &[u8]) -> Result<Json, FieldError> {
    serde_json::from_slice(bytes).map_err(|error| {
        let line_start = match error.line() {
            0 | 1 => 0,
            line => {
                bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(line - 2).map_or(0, |(at, _)| at + 1)
            }
        };
        let offset = (line_start + error.column().saturating_sub(1)).min(bytes.len());
        let text = error.to_string();
        let what = text.split(" at line ").next().unwrap_or_default();
        FieldError {
            loc: vec!["body".into(), offset.into()],
            msg: format!("JSON decode error: {what}"),
            kind: "json_invalid",
        }
    })
}

/// The first known field that stands twice in one object of the well-formed `bytes`: one of
/// `top` in the outermost object, `input`'s in a run's, or a message's. In free JSON the last counts.
#[must_use]
pub fn repeated_field(bytes: &[u8], top: &[&str]) -> Option<Vec<Json>> {
    let mut walk = Walk { bytes, at: 0, stack: Vec::new() };
    while let Some(key) = walk.next_key() {
        let path = walk.path();
        let is_known = match path.as_slice() {
            [Step::Key(key)] => top.contains(&key.as_str()),
            [Step::Key(outer), Step::Key(key)] if outer == "input" => ["messages", "state"].contains(&key.as_str()),
            [Step::Key(list), Step::Index(_), Step::Key(key)] => list == "messages" && is_message_field(key),
            [Step::Key(outer), Step::Key(list), Step::Index(_), Step::Key(key)] => {
                let lists = [("input", "messages"), ("state", "context")];
                lists.contains(&(outer.as_str(), list.as_str())) && is_message_field(key)
            }
            _ => false,
        };
        if is_known && key == Seen::Again {
            let body = std::iter::once("body".into());
            return Some(body.chain(path.into_iter().map(Json::from)).collect());
        }
    }
    None
}

fn is_message_field(key: &str) -> bool {
    MESSAGE_FIELDS.contains(&key)
}

/// Walks over the keys of well-formed JSON without recursion; looks no deeper than fields can be.
struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Open>,
}

/// No known field is deeper.
const DEPTH_MAX: usize = 4;

/// An array or object that is not closed yet.
enum Open {
    Object { seen: HashSet<String>, key: String, expects_key: bool },
    Array { index: usize },
}

#[derive(PartialEq)]
enum Seen {
    First,
    Again,
}

enum Step {
    Key(String),
    Index(usize),
}

impl From<Step> for Json {
    fn from(step: Step) -> Self {
        match step {
            Step::Key(key) => key.into(),
            Step::Index(index) => index.into(),
        }
    }
}

impl Walk<'_> {
    /// Goes on to the next key; whether it was in its object before. `None` at the end.
    fn next_key(&mut self) -> Option<Seen> {
        while let Some(&byte) = self.bytes.get(self.at) {
            self.at += 1;
            match byte {
                b'{' => self.stack.push(Open::Object { seen: HashSet::new(), key: String::new(), expects_key: true }),
                b'[' => self.stack.push(Open::Array { index: 0 }),
                b'}' | b']' => {
                    self.stack.pop();
                }
                b',' => match self.stack.last_mut() {
                    Some(Open::Object { expects_key, .. }) => *expects_key = true,
                    Some(Open::Array { index }) => *index += 1,
                    None => {}
                },
                b'"' => {
                    let text = self.string();
                    if let Some(seen) = self.key(text) {
                        return Some(seen);
                    }
                }
                _ => {}
            }
        }
        None
    }

    /// The raw text of the string whose opening quote was just read, quotes included.
    fn string(&mut self) -> std::ops::Range<usize> {
        let start = self.at - 1;
        while let Some(&byte) = self.bytes.get(self.at) {
            self.at += 1;
            match byte {
                b'\\' => self.at += 1,
                b'"' => break,
                _ => {}
            }
        }
        start..self.at.min(self.bytes.len())
    }

    /// Takes the string as a key, if one is due here and keys matter at this depth.
    fn key(&mut self, text: std::ops::Range<usize>) -> Option<Seen> {
        let is_shallow = self.stack.len() <= DEPTH_MAX;
        let Some(Open::Object { seen, key, expects_key }) = self.stack.last_mut() else { return None };
        if !std::mem::take(expects_key) || !is_shallow {
            return None;
        }
        *key = serde_json::from_slice(&self.bytes[text]).unwrap_or_default();
        Some(if seen.insert(key.clone()) { Seen::First } else { Seen::Again })
    }

    /// Where the walk is.
    fn path(&self) -> Vec<Step> {
        let step = |open: &Open| match open {
            Open::Object { key, .. } => Step::Key(key.clone()),
            Open::Array { index } => Step::Index(*index),
        };
        self.stack.iter().map(step).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn repeated(text: &str) -> Option<Json> {
        parse(text.as_bytes()).expect("well formed");
        repeated_field(text.as_bytes(), &["messages", "config"]).map(Json::Array)
    }

    fn offset(bytes: &[u8]) -> Json {
        let error = parse(bytes).unwrap_err();
        assert_eq!(error.kind, "json_invalid");
        error.loc[1].clone()
    }

    #[test]
    fn malformed_json_is_told_with_its_byte() {
        assert_eq!(offset(b"{nope"), json!(1));
        assert_eq!(offset(b"{\n\"a\": x}"), json!(7));
    }

    /// C86: bytes that are no text and halves of surrogate pairs are refused; a pair is one character.
    #[test]
    fn text_that_is_no_text_is_refused() {
        offset(b"\"\xff\"");
        offset(br#""\ud83d""#);
        offset(br#""\udc00""#);
        offset(br#"{"\ud83d x": 1}"#);
        assert_eq!(parse(br#""\ud83e\udd80""#).unwrap(), json!("🦀"));
    }

    /// C87: numbers keep every digit.
    #[test]
    fn numbers_keep_their_digits() {
        let big = "1606938044258990275541962092341162602522202993782792835301376";
        for digits in ["9007199254740993", "-9223372036854775809", "18446744073709551616", "-0.0", big] {
            assert_eq!(parse(digits.as_bytes()).unwrap().to_string(), digits);
        }
    }

    /// C88: ten thousand levels are refused without a stack for each.
    #[test]
    fn bottomless_nesting_is_refused() {
        let arrays = "[".repeat(10_000) + &"]".repeat(10_000);
        let objects = r#"{"a":"#.repeat(10_000) + "1" + &"}".repeat(10_000);

        offset(arrays.as_bytes());
        offset(objects.as_bytes());
    }

    /// C88: a known field twice is a mistake; in free JSON the last one counts.
    #[test]
    fn known_fields_stand_once() {
        assert_eq!(repeated(r#"{"messages": [], "messages": []}"#), Some(json!(["body", "messages"])));
        assert_eq!(repeated(r#"{"messages": [], "mess\u0061ges": []}"#), Some(json!(["body", "messages"])));
        assert_eq!(
            repeated(r#"{"messages": [{"role": "user"}, {"role": "user", "role": "tool"}]}"#),
            Some(json!(["body", "messages", 1, "role"]))
        );
        assert_eq!(repeated(r#"{"input": {"state": {}, "state": {}}}"#), Some(json!(["body", "input", "state"])));
        assert_eq!(
            repeated(r#"{"state": {"context": [{"content": [], "content": []}]}}"#),
            Some(json!(["body", "state", "context", 0, "content"]))
        );
        for free in [
            r#"{"config": {"a": 1, "a": 2}, "messages": [{"metadata": {"role": 1, "role": 2}}]}"#,
            r#"{"initial_state": {"messages": [{"role": 1, "role": 2}]}, "other": 1, "other": 2}"#,
            r#"{"messages": ["\"messages\": [], ", {"x": "}]"}], "config": {}}"#,
        ] {
            assert_eq!(repeated(free), None, "{free}");
        }
        assert_eq!(parse(br#"{"a": 1, "a": 2}"#).unwrap(), json!({"a": 2}));
    }
}
