//! Equality as the recordings mean it: placeholders, free text, unordered keys.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// The first difference between what was recorded and what was answered, as `pointer: why`.
#[must_use]
pub fn difference(expected: &Value, actual: &Value) -> Option<String> {
    at(String::new(), expected, actual, is_validation_error(expected))
}

/// The first header that was recorded and is not answered alike; `Vary` is a set.
#[must_use]
pub fn header_difference(expected: &Value, actual: &BTreeMap<String, String>) -> Option<String> {
    for (name, value) in expected.as_object().into_iter().flatten() {
        let expected = value.as_str().unwrap_or_default();
        let Some(answered) = actual.get(name) else {
            return Some(format!("header {name}: missing, recorded {expected:?}"));
        };
        let same = match name.as_str() {
            "vary" => tokens(expected) == tokens(answered),
            _ => text_fits(expected, answered),
        };
        if !same {
            return Some(format!("header {name}: {answered:?}, recorded {expected:?}"));
        }
    }
    None
}

fn tokens(list: &str) -> BTreeSet<String> {
    list.split(',').map(|token| token.trim().to_lowercase()).collect()
}

fn is_validation_error(body: &Value) -> bool {
    body["error"]["code"] == "VALIDATION_ERROR"
}

fn at(pointer: String, expected: &Value, actual: &Value, validation: bool) -> Option<String> {
    let ignored = pointer.ends_with("/is_new_thread")
        || (validation && (pointer == "/error/message" || pointer == "/metadata/message"))
        || (pointer.starts_with("/error/details/") && pointer.ends_with("/msg"));
    if ignored {
        return None;
    }
    match (expected, actual) {
        (Value::Object(expected), Value::Object(answered)) => {
            if let Some(extra) = answered.keys().find(|key| !expected.contains_key(*key)) {
                return Some(format!("{pointer}/{extra}: not recorded"));
            }
            expected.iter().find_map(|(key, value)| match answered.get(key) {
                Some(answer) => at(format!("{pointer}/{key}"), value, answer, validation),
                None => Some(format!("{pointer}/{key}: missing, recorded {value}")),
            })
        }
        (Value::Array(expected), Value::Array(answered)) => {
            let first = expected
                .iter()
                .zip(answered)
                .enumerate()
                .find_map(|(index, (value, answer))| at(format!("{pointer}/{index}"), value, answer, validation));
            first.or_else(|| {
                let (recorded, got) = (expected.len(), answered.len());
                (recorded != got).then(|| format!("{pointer}: {got} elements, recorded {recorded}"))
            })
        }
        (Value::String(text), answer) if text.starts_with('<') && text.ends_with('>') => {
            (!placeholder_fits(text, answer)).then(|| format!("{pointer}: {answer} does not fit {text}"))
        }
        (Value::String(text), Value::String(answer)) => {
            (!text_fits(text, answer)).then(|| format!("{pointer}: {answer:?}, recorded {text:?}"))
        }
        (Value::Number(recorded), Value::Number(answer)) => {
            let same = recorded == answer || recorded.as_f64() == answer.as_f64();
            (!same).then(|| format!("{pointer}: {answer}, recorded {recorded}"))
        }
        (recorded, answer) => (recorded != answer).then(|| format!("{pointer}: {answer}, recorded {recorded}")),
    }
}

fn text_fits(recorded: &str, answer: &str) -> bool {
    if recorded.starts_with('<') && recorded.ends_with('>') && !recorded[1..].contains('<') {
        return placeholder_fits(recorded, &Value::String(answer.to_owned()));
    }
    if let Some((before, after)) = recorded.split_once("<uuid>") {
        return answer.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)).is_some_and(is_uuid);
    }
    recorded == answer
}

fn is_uuid(text: &str) -> bool {
    uuid::Uuid::try_parse(text).is_ok()
}

fn placeholder_fits(placeholder: &str, answer: &Value) -> bool {
    let text = answer.as_str();
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match placeholder {
        "<uuid>" => text.is_some_and(is_uuid),
        "<ts>" | "<float>" => answer.is_number(),
        "<iso>" => text.is_some_and(|text| text.parse::<chrono::NaiveDateTime>().is_ok()),
        "<int>" => answer.as_number().is_some_and(|number| digits(&number.to_string())) || text.is_some_and(digits),
        "<digits>" => text.is_some_and(digits),
        "<hex32>" => text.is_some_and(|text| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())),
        // The reference prints its own word for an entry node's function.
        "<text>" | "<internal validator text>" | "<csp>" | "<lambda>" => text.is_some(),
        _ => text == Some(placeholder),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::difference;

    #[test]
    fn the_first_difference_is_named_by_pointer() {
        let recorded = json!({"data": {"messages": [{"role": "user"}, {"role": "assistant"}]}});
        let answered = json!({"data": {"messages": [{"role": "user"}, {"role": "tool"}]}});

        assert_eq!(
            difference(&recorded, &answered).unwrap(),
            "/data/messages/1/role: \"tool\", recorded \"assistant\""
        );
    }

    #[test]
    fn a_placeholder_is_checked_by_its_kind() {
        let recorded = json!({"id": "<uuid>", "at": "<ts>"});

        assert_eq!(difference(&recorded, &json!({"id": "4f7c5a3e-5a2b-4b0e-9d43-8a5c0b0c0f11", "at": 1.5})), None);
        assert!(difference(&recorded, &json!({"id": "one", "at": 1.5})).is_some());
        assert!(difference(&recorded, &json!({"id": "4f7c5a3e-5a2b-4b0e-9d43-8a5c0b0c0f11", "at": "now"})).is_some());
    }

    #[test]
    fn missing_and_extra_keys_are_differences() {
        assert!(difference(&json!({"a": null}), &json!({})).is_some());
        assert!(difference(&json!({}), &json!({"a": null})).is_some());
    }
}
