//! Content blocks: their shapes by `type`, as the wire knows them.

use super::shape::{Checker, Field, Kind, Missing, Shape};
use super::{Json, JsonMap};

/// The blocks' types, in the order the wire names them.
pub const BLOCK_TYPES: [&str; 12] = [
    "text",
    "image",
    "audio",
    "video",
    "document",
    "data",
    "tool_call",
    "remote_tool_call",
    "tool_result",
    "reasoning",
    "annotation",
    "error",
];

/// `value` as the block its `type` names, defaults filled in and `type` first.
pub(crate) fn check(checker: &mut Checker, value: &Json) -> Json {
    let Json::Object(map) = value else {
        checker.wrong("model_attributes_type", "Input should be a valid dictionary or object to extract fields from");
        return Json::Null;
    };
    let Some(tag) = map.get("type") else {
        checker.wrong("union_tag_not_found", "Unable to extract tag using discriminator 'type'");
        return Json::Null;
    };
    let Some((name, shape)) = tag.as_str().and_then(|tag| Some((tag, shape_of(tag)?))) else {
        let tag = tag.as_str().map_or_else(|| tag.to_string(), str::to_owned);
        let types = BLOCK_TYPES.map(|name| format!("'{name}'")).join(", ");
        checker.wrong(
            "union_tag_invalid",
            format!("Input tag '{tag}' found using 'type' does not match any of the expected tags: {types}"),
        );
        return Json::Null;
    };
    let mut block = JsonMap::new();
    block.insert("type".to_owned(), name.into());
    block.extend(checker.object(shape, value).unwrap_or_default());
    Json::Object(block)
}

fn shape_of(block_type: &str) -> Option<Shape> {
    Some(match block_type {
        "text" => TEXT,
        "image" => IMAGE,
        "audio" => AUDIO,
        "video" => VIDEO,
        "document" => DOCUMENT,
        "data" => DATA,
        "tool_call" => TOOL_CALL,
        "remote_tool_call" => REMOTE_TOOL_CALL,
        "tool_result" => TOOL_RESULT,
        "reasoning" => REASONING,
        "annotation" => ANNOTATION,
        "error" => ERROR,
        _ => return None,
    })
}

const TEXT: Shape = &[
    Field::required("text", Kind::Text),
    Field::default("annotations", Kind::List(&Kind::Nested(ANNOTATION_REF)), Missing::EmptyList),
];

const IMAGE: Shape = &[
    Field::required("media", Kind::Nested(MEDIA)),
    Field::nullable("alt_text", Kind::Text),
    Field::nullable("bbox", Kind::List(&Kind::Number)),
];

const AUDIO: Shape = &[
    Field::required("media", Kind::Nested(MEDIA)),
    Field::nullable("transcript", Kind::Text),
    Field::nullable("sample_rate", Kind::Int),
    Field::nullable("channels", Kind::Int),
];

const VIDEO: Shape =
    &[Field::required("media", Kind::Nested(MEDIA)), Field::nullable("thumbnail", Kind::Nested(MEDIA))];

const DOCUMENT: Shape = &[
    Field::required("media", Kind::Nested(MEDIA)),
    Field::nullable("text", Kind::Text),
    Field::nullable("pages", Kind::List(&Kind::Int)),
    Field::nullable("excerpt", Kind::Text),
];

const DATA: Shape = &[
    Field::required("mime_type", Kind::Text),
    Field::nullable("data_base64", Kind::Text),
    Field::nullable("media", Kind::Nested(MEDIA)),
];

const TOOL_CALL: Shape = &[
    Field::required("id", Kind::Text),
    Field::required("name", Kind::Text),
    Field::default("args", Kind::Object, Missing::EmptyObject),
    Field::nullable("tool_type", Kind::Text),
];

const REMOTE_TOOL_CALL: Shape = &[
    Field::required("id", Kind::Text),
    Field::required("name", Kind::Text),
    Field::default("args", Kind::Object, Missing::EmptyObject),
    Field::default("tool_type", Kind::OneOf(&["remote"]), Missing::Text("remote")),
];

const TOOL_RESULT: Shape = &[
    Field::required("call_id", Kind::Text),
    Field::nullable("output", Kind::Any),
    Field::default("is_error", Kind::Bool, Missing::False),
    Field::nullable("status", Kind::OneOf(&["completed", "failed"])),
];

const REASONING: Shape = &[Field::required("summary", Kind::Text), Field::nullable("details", Kind::List(&Kind::Text))];

const ANNOTATION: Shape = &[
    Field::default("kind", Kind::OneOf(&["citation", "note"]), Missing::Text("citation")),
    Field::default("refs", Kind::List(&Kind::Nested(ANNOTATION_REF)), Missing::EmptyList),
    Field::nullable("spans", Kind::List(&Kind::IntPair)),
];

const ERROR: Shape = &[
    Field::required("message", Kind::Text),
    Field::nullable("code", Kind::Text),
    Field::nullable("data", Kind::Object),
];

const MEDIA: Shape = &[
    Field::default("kind", Kind::OneOf(&["url", "file_id", "data"]), Missing::Text("url")),
    Field::nullable("url", Kind::Text),
    Field::nullable("file_id", Kind::Text),
    Field::nullable("data_base64", Kind::Text),
    Field::nullable("mime_type", Kind::Text),
    Field::nullable("size_bytes", Kind::Int),
    Field::nullable("sha256", Kind::Text),
    Field::nullable("filename", Kind::Text),
    Field::nullable("width", Kind::Int),
    Field::nullable("height", Kind::Int),
    Field::nullable("duration_ms", Kind::Int),
    Field::nullable("page", Kind::Int),
];

const ANNOTATION_REF: Shape = &[
    Field::nullable("url", Kind::Text),
    Field::nullable("file_id", Kind::Text),
    Field::nullable("page", Kind::Int),
    Field::nullable("index", Kind::Int),
    Field::nullable("title", Kind::Text),
];
