//! Messages from JSON: checked against their shape, what is missing filled in.

use super::limits::Limits;
use super::message::FieldError;
use super::shape::{Checker, Field, Kind, Missing, Shape};
use super::{Json, JsonMap, Message, MessageId};

/// What stands for what a sender left out.
pub struct Fill<'a> {
    /// Makes a message id.
    pub new_id: &'a dyn Fn() -> MessageId,
    /// The time, in UNIX seconds.
    pub now: f64,
}

/// The message that `value` is, found at `loc`. Numbers keep their digits; unknown keys are dropped.
///
/// # Errors
/// What is wrong with it, field by field.
pub fn message(value: &Json, loc: &[Json], limits: &Limits, fill: &Fill<'_>) -> Result<Message, Vec<FieldError>> {
    let mut checker = Checker::at(loc);
    let message = checked(&mut checker, value, limits, fill);
    message.filter(|_| checker.errors.is_empty()).ok_or(checker.errors)
}

/// The list of messages that `value` is, found at `loc`.
///
/// # Errors
/// What is wrong with it; a list that is too long is not looked into.
pub fn messages(value: &Json, loc: &[Json], limits: &Limits, fill: &Fill<'_>) -> Result<Vec<Message>, Vec<FieldError>> {
    let mut checker = Checker::at(loc);
    let Json::Array(items) = value else {
        checker.wrong("list_type", "Input should be a valid list");
        return Err(checker.errors);
    };
    if items.len() > limits.message_count_max {
        let msg = format!("List should have at most {} items, not {}", limits.message_count_max, items.len());
        checker.wrong("too_long", msg);
        return Err(checker.errors);
    }
    let mut messages = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        messages.extend(checker.within(index, |checker| checked(checker, item, limits, fill)));
        if !checker.has_room() {
            break;
        }
    }
    if checker.errors.is_empty() { Ok(messages) } else { Err(checker.errors) }
}

fn checked(checker: &mut Checker, value: &Json, limits: &Limits, fill: &Fill<'_>) -> Option<Message> {
    let before = checker.errors.len();
    let mut wire = checker.object(MESSAGE, value)?;
    let id = checker.within("message_id", |checker| message_id(checker, value.get("message_id"), limits, fill));
    wire.insert("message_id".to_owned(), id);
    if value.get("timestamp").is_none() {
        let now = serde_json::Number::from_f64(fill.now).map_or(Json::Null, Json::Number);
        wire.insert("timestamp".to_owned(), now);
    }
    let is_right = checker.errors.len() == before;
    is_right.then(|| from_wire(wire))
}

fn from_wire(wire: JsonMap) -> Message {
    serde_json::from_value(Json::Object(wire)).expect("every field was checked against the message's shape")
}

fn message_id(checker: &mut Checker, value: Option<&Json>, limits: &Limits, fill: &Fill<'_>) -> Json {
    match value {
        None | Some(Json::Null) => super::state::to_json(&(fill.new_id)()),
        Some(value) => match serde_json::from_value::<MessageId>(value.clone()) {
            Ok(id) => {
                if let Err(error) = limits.check_id(&id.text, &checker.loc) {
                    checker.wrong(error.kind, error.msg);
                }
                value.clone()
            }
            Err(_) => {
                checker.wrong("string_type", "Input should be a valid string or integer");
                Json::Null
            }
        },
    }
}

/// A message without its id, which is text or an integer, and with the time still missing.
const MESSAGE: Shape = &[
    Field::required("role", Kind::OneOf(&["user", "assistant", "system", "tool"])),
    Field::required("content", Kind::List(&Kind::Block)),
    Field::default("delta", Kind::Bool, Missing::False),
    Field::nullable("tools_calls", Kind::List(&Kind::Object)),
    Field::nullable("reasoning", Kind::Text),
    Field::nullable("timestamp", Kind::Number),
    Field::default("metadata", Kind::Object, Missing::EmptyObject),
    Field::nullable("usages", Kind::Nested(USAGES)),
    Field::nullable("raw", Kind::Object),
    Field::nullable("parsed_content", Kind::Object),
];

const USAGES: Shape = &[
    Field::required("completion_tokens", Kind::Int),
    Field::required("prompt_tokens", Kind::Int),
    Field::required("total_tokens", Kind::Int),
    Field::default("reasoning_tokens", Kind::Int, Missing::Zero),
    Field::default("cache_creation_input_tokens", Kind::Int, Missing::Zero),
    Field::default("cache_read_input_tokens", Kind::Int, Missing::Zero),
    Field { name: "image_tokens", kind: Kind::Int, missing: Missing::Zero, nullable: true },
    Field { name: "audio_tokens", kind: Kind::Int, missing: Missing::Zero, nullable: true },
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Json) -> Result<Json, Vec<FieldError>> {
        let fill = Fill { new_id: &|| MessageId::from("new"), now: 1.5 };
        message(&value, &["body".into()], &Limits::default(), &fill)
            .map(|message| super::super::state::to_json(&message))
    }

    fn error(value: Json) -> (Json, &'static str) {
        let error = parse(value).unwrap_err().remove(0);
        (Json::Array(error.loc), error.kind)
    }

    fn text(text: &str) -> Json {
        Json::Number(text.parse().unwrap())
    }

    #[test]
    fn what_is_missing_is_filled_in_as_the_wire_shows_it() {
        let parsed = parse(json!({
            "role": "user",
            "content": [{"type": "text", "text": "hi", "unknown": 1}],
            "usages": {"completion_tokens": "7", "prompt_tokens": 11, "total_tokens": 18.0},
            "unknown": 1,
        }));

        let expected = json!({
            "message_id": "new", "role": "user", "content": [{"type": "text", "text": "hi", "annotations": []}],
            "delta": false, "tools_calls": null, "reasoning": null, "timestamp": 1.5, "metadata": {},
            "usages": {"completion_tokens": 7, "prompt_tokens": 11, "total_tokens": 18, "reasoning_tokens": 0,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "image_tokens": 0, "audio_tokens": 0},
            "raw": null, "parsed_content": null,
        });
        assert_eq!(parsed.unwrap().to_string(), expected.to_string());
    }

    #[test]
    fn every_block_type_gets_its_defaults() {
        let media = json!({"kind": "url", "url": "x", "file_id": null, "data_base64": null, "mime_type": null,
            "size_bytes": null, "sha256": null, "filename": null, "width": null, "height": null,
            "duration_ms": null, "page": null});
        let given = json!([
            {"type": "image", "media": {"url": "x"}},
            {"type": "audio", "media": {"url": "x"}},
            {"type": "video", "media": {"url": "x"}},
            {"type": "document", "media": {"url": "x"}, "pages": [1, 2]},
            {"type": "data", "mime_type": "a/b"},
            {"type": "tool_call", "id": "c", "name": "n"},
            {"type": "remote_tool_call", "id": "c", "name": "n"},
            {"type": "tool_result", "call_id": "c"},
            {"type": "reasoning", "summary": "s"},
            {"type": "annotation", "spans": [[1, 2]], "refs": [{"page": 3}]},
            {"type": "error", "message": "m"},
        ]);

        let parsed = parse(json!({"role": "user", "content": given})).unwrap();

        let expected = json!([
            {"type": "image", "media": media, "alt_text": null, "bbox": null},
            {"type": "audio", "media": media, "transcript": null, "sample_rate": null, "channels": null},
            {"type": "video", "media": media, "thumbnail": null},
            {"type": "document", "media": media, "text": null, "pages": [1, 2], "excerpt": null},
            {"type": "data", "mime_type": "a/b", "data_base64": null, "media": null},
            {"type": "tool_call", "id": "c", "name": "n", "args": {}, "tool_type": null},
            {"type": "remote_tool_call", "id": "c", "name": "n", "args": {}, "tool_type": "remote"},
            {"type": "tool_result", "call_id": "c", "output": null, "is_error": false, "status": null},
            {"type": "reasoning", "summary": "s", "details": null},
            {"type": "annotation", "kind": "citation",
                "refs": [{"url": null, "file_id": null, "page": 3, "index": null, "title": null}], "spans": [[1, 2]]},
            {"type": "error", "message": "m", "code": null, "data": null},
        ]);
        assert_eq!(parsed["content"].to_string(), expected.to_string());
    }

    #[test]
    fn mistakes_are_named_as_the_wire_names_them() {
        assert_eq!(error(json!("x")), (json!(["body"]), "model_attributes_type"));
        assert_eq!(error(json!({"content": []})), (json!(["body", "role"]), "missing"));
        assert_eq!(error(json!({"role": "robot", "content": []})), (json!(["body", "role"]), "literal_error"));
        assert_eq!(error(json!({"role": "user"})), (json!(["body", "content"]), "missing"));
        assert_eq!(error(json!({"role": "user", "content": "x"})), (json!(["body", "content"]), "sequence_str"));
        let block = |block: Json| error(json!({"role": "user", "content": [block]}));
        assert_eq!(block(json!({"type": "hologram"})), (json!(["body", "content", 0]), "union_tag_invalid"));
        assert_eq!(block(json!({"text": "x"})), (json!(["body", "content", 0]), "union_tag_not_found"));
        assert_eq!(block(json!({"type": "text"})), (json!(["body", "content", 0, "text"]), "missing"));
        assert_eq!(block(json!({"type": "text", "text": 1})), (json!(["body", "content", 0, "text"]), "string_type"));
        let media = block(json!({"type": "image", "media": {"width": "wide"}}));
        assert_eq!(media, (json!(["body", "content", 0, "media", "width"]), "int_parsing"));
        let with = |key: &str, value: Json| error(json!({"role": "user", "content": [], key: value}));
        assert_eq!(with("delta", json!("true")), (json!(["body", "delta"]), "bool_type"));
        assert_eq!(with("metadata", json!([])), (json!(["body", "metadata"]), "dict_type"));
        assert_eq!(with("tools_calls", json!([1])), (json!(["body", "tools_calls", 0]), "dict_type"));
        assert_eq!(with("usages", json!({})), (json!(["body", "usages", "completion_tokens"]), "missing"));
        assert_eq!(with("timestamp", text("1e400")), (json!(["body", "timestamp"]), "finite_number"));
    }

    /// C87: numbers keep every digit, wherever they stand.
    #[test]
    fn numbers_keep_their_digits() {
        let big = "1606938044258990275541962092341162602522202993782792835301376";
        for digits in [big, "9007199254740993", "-9223372036854775809", "18446744073709551616", "-0.0", "1e+400"] {
            let block = json!({"type": "tool_result", "call_id": "c", "output": {"n": text(digits)}});

            let parsed = parse(json!({"role": "tool", "content": [block], "metadata": {"n": text(digits)}})).unwrap();

            assert_eq!(parsed["content"][0]["output"]["n"].to_string(), digits);
            assert_eq!(parsed["metadata"]["n"].to_string(), digits);
        }
        let parsed =
            parse(json!({"role": "user", "content": [], "message_id": text(big), "timestamp": text("253402300800.5")}));
        let parsed = parsed.unwrap();
        assert_eq!(
            (parsed["message_id"].to_string(), parsed["timestamp"].to_string()),
            (big.into(), "253402300800.5".into())
        );
    }

    /// C90: message ids keep their JSON type and spelling; what cannot be an id is refused.
    #[test]
    fn message_ids_are_kept_or_refused() {
        let id = |id: Json| parse(json!({"role": "user", "content": [], "message_id": id}));

        assert_eq!(id(json!(41)).unwrap()["message_id"], json!(41));
        assert_eq!(id(json!(" 41 ")).unwrap()["message_id"], json!(" 41 "));
        assert_eq!(id(json!(null)).unwrap()["message_id"], json!("new"));
        for refused in
            [json!(""), json!("  "), json!("a\u{0}"), json!("a\n"), json!("x".repeat(256)), json!(1.5), json!(true)]
        {
            assert_eq!(id(refused).unwrap_err()[0].loc, [json!("body"), json!("message_id")]);
        }
    }

    /// C89: a list that is too long is refused before it is looked into, and mistakes are not
    /// repeated without end.
    #[test]
    fn long_lists_are_refused() {
        let limits = Limits { message_count_max: 100, ..Limits::default() };
        let fill = Fill { new_id: &MessageId::random, now: 0.0 };
        let parse = |count: usize| messages(&json!(vec![json!({}); count]), &[], &limits, &fill).unwrap_err();

        assert_eq!(parse(101).len(), 1);
        assert_eq!(parse(101)[0].kind, "too_long");
        assert_eq!(parse(100).len(), 32);
    }
}
