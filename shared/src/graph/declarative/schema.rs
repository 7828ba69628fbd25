//! The published JSON Schema of a document, made from the types, and holding a document against it.

use std::sync::LazyLock;

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, ValidationError, Validator};
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};

use super::approval::ApprovalSpec;
use super::document::{Document, NodeCommon, SPAN_PATTERN};
use super::finding::Finding;
use super::http::{HttpSpec, URL_PATTERN};
use super::scripted::ScriptedSpec;
use super::set::SetSpec;
use super::source::{Source, step};
use super::tools::ToolsDoc;
use crate::domain::{Json, JsonMap};
use crate::graph::expression::suggestion;

/// The kinds of declarative nodes.
pub const KINDS: [&str; 5] = ["http", "set", "scripted", "tools", "approval"];

/// The published schema; editors complete and check documents with it.
#[must_use]
pub fn published() -> Json {
    let mut schema = ROOT.clone();
    let refs: Vec<Json> =
        KINDS.iter().map(|kind| serde_json::json!({"$ref": format!("#/$defs/{kind}_node")})).collect();
    let definitions = schema["$defs"].as_object_mut().expect("the document has definitions");
    for kind in KINDS {
        let mut node = node_schema(kind);
        if let Some(Json::Object(inner)) = node.as_object_mut().and_then(|node| node.shift_remove("$defs")) {
            definitions.extend(inner);
        }
        node.as_object_mut().map(|node| node.shift_remove("$schema"));
        definitions.insert(format!("{kind}_node"), node);
    }
    definitions.insert("Node".to_owned(), serde_json::json!({"oneOf": refs}));
    schema["title"] = "Threadgate graph".into();
    schema
}

/// Holds the document against the schema; nodes each against that of their kind.
pub(super) fn validate(source: &Source) -> Vec<Finding> {
    let mut findings = findings_of(source, "", &source.json, &ROOT, &ROOT_VALIDATOR);
    let nodes = source.json.get("nodes").and_then(Json::as_object).into_iter().flatten();
    for (name, node) in nodes.filter(|(_, node)| node.is_object()) {
        let pointer = format!("/nodes/{}", step(name));
        let kind = node.get("kind").and_then(Json::as_str);
        match kind.and_then(|kind| KIND_VALIDATORS.iter().find(|(name, ..)| *name == kind)) {
            Some((_, schema, validator)) => findings.extend(findings_of(source, &pointer, node, schema, validator)),
            None => findings.push(kind_finding(source, &pointer, name, node)),
        }
    }
    findings
}

fn kind_finding(source: &Source, pointer: &str, name: &str, node: &Json) -> Finding {
    match node.get("kind") {
        None => {
            let fix = format!("add 'kind: ' and one of {}", KINDS.join(", "));
            Finding::error(source.key_place(pointer), format!("node '{name}' does not say its kind"), fix)
        }
        Some(kind) => {
            let said = kind.as_str().map_or_else(|| kind.to_string(), |kind| format!("'{kind}'"));
            let fix = suggestion(kind.as_str().unwrap_or_default(), KINDS.iter().copied());
            let place = source.place(&format!("{pointer}/kind"));
            Finding::error(place, format!("{said} is no kind of node"), fix)
        }
    }
}

static ROOT: LazyLock<Json> = LazyLock::new(schema_of::<Document>);

static ROOT_VALIDATOR: LazyLock<Validator> = LazyLock::new(|| compiled(&ROOT));

static KIND_VALIDATORS: LazyLock<Vec<(&str, Json, Validator)>> = LazyLock::new(|| {
    let kind = |kind| {
        let schema = node_schema(kind);
        let validator = compiled(&schema);
        (kind, schema, validator)
    };
    KINDS.into_iter().map(kind).collect()
});

fn compiled(schema: &Json) -> Validator {
    jsonschema::validator_for(schema).expect("a schema made from types is one")
}

fn schema_of<T: JsonSchema>() -> Json {
    SchemaGenerator::new(SchemaSettings::draft2020_12()).into_root_schema_for::<T>().to_value()
}

/// What every node has and what its kind has, as one object.
fn node_schema(kind: &str) -> Json {
    let mut spec = match kind {
        "http" => schema_of::<HttpSpec>(),
        "set" => schema_of::<SetSpec>(),
        "tools" => schema_of::<ToolsDoc>(),
        "approval" => schema_of::<ApprovalSpec>(),
        _ => schema_of::<ScriptedSpec>(),
    };
    let common = schema_of::<NodeCommon>();
    let mut properties = object(&common, "properties");
    properties["kind"] = serde_json::json!({"const": kind});
    properties.extend(object(&spec, "properties"));
    let mut definitions = object(&common, "$defs");
    definitions.extend(object(&spec, "$defs"));
    let mut required = vec![Json::from("kind")];
    required.extend(spec["required"].as_array().cloned().unwrap_or_default());
    spec["properties"] = Json::Object(properties);
    spec["required"] = Json::Array(required);
    spec["$defs"] = Json::Object(definitions);
    spec
}

fn object(schema: &Json, name: &str) -> JsonMap {
    schema.get(name).and_then(Json::as_object).cloned().unwrap_or_default()
}

fn findings_of(source: &Source, base: &str, value: &Json, schema: &Json, validator: &Validator) -> Vec<Finding> {
    validator.iter_errors(value).flat_map(|error| explain(source, base, schema, &error)).collect()
}

/// One mistake as a person would say it.
fn explain(source: &Source, base: &str, schema: &Json, error: &ValidationError<'_>) -> Vec<Finding> {
    let pointer = format!("{base}{}", error.instance_path().as_str());
    let name = dotted(&pointer);
    let at_value = |message: String, fix: String| vec![Finding::error(source.place(&pointer), message, fix)];
    match error.kind() {
        ValidationErrorKind::AdditionalProperties { unexpected } => {
            let known = known_keys(schema, error.schema_path().as_str());
            let unknown = |key: &String| {
                let place = source.key_place(&format!("{pointer}/{}", step(key)));
                let fix = suggestion(key, known.iter().map(String::as_str));
                Finding::error(place, format!("{name} does not have a key '{key}'"), fix)
            };
            unexpected.iter().map(unknown).collect()
        }
        ValidationErrorKind::Required { property } => {
            let property = property.as_str().unwrap_or_default();
            let place = source.key_place(&pointer);
            vec![Finding::error(place, format!("{name} has no '{property}'"), format!("add '{property}: …'"))]
        }
        ValidationErrorKind::Type { kind } => {
            let wanted = wanted(kind);
            let message = format!("{name} must be {wanted}, not {}", word(JsonType::from(error.instance().as_ref())));
            let is_text = wanted.contains("text") && !(error.instance().is_object() || error.instance().is_array());
            at_value(message, if is_text { "put it in quotes" } else { "write it so" }.to_owned())
        }
        ValidationErrorKind::Enum { options } => {
            let options: Vec<&str> = options.as_array().into_iter().flatten().filter_map(Json::as_str).collect();
            let said = error.instance().as_str().unwrap_or_default();
            at_value(format!("{name} cannot be {}", error.instance()), suggestion(said, options.into_iter()))
        }
        ValidationErrorKind::OneOfNotValid { .. } => {
            let options = allowed_words(schema, error.schema_path().as_str());
            let said = error.instance().as_str().unwrap_or_default();
            at_value(
                format!("{name} cannot be {}", error.instance()),
                suggestion(said, options.iter().map(String::as_str)),
            )
        }
        ValidationErrorKind::Pattern { pattern } if pattern == SPAN_PATTERN => {
            let message = format!("{name} is no span of time: {}", error.instance());
            at_value(message, "write it as 500ms, 30s or 1m 30s".to_owned())
        }
        ValidationErrorKind::Pattern { pattern } if pattern == URL_PATTERN => at_value(
            format!("{name} is no address: {}", error.instance()),
            "begin it with http:// or https://".to_owned(),
        ),
        _ => at_value(format!("{name} is wrong: {error}"), "see the graph's schema for what is allowed".to_owned()),
    }
}

/// The keys of the object schema whose `additionalProperties` is at `path`.
fn known_keys(schema: &Json, path: &str) -> Vec<String> {
    let around = path.rfind('/').map_or("", |end| &path[..end]);
    let properties = resolve(schema, around).get("properties").and_then(Json::as_object);
    properties.into_iter().flatten().map(|(key, _)| key.clone()).collect()
}

/// The words that the `oneOf` at `path` allows.
fn allowed_words(schema: &Json, path: &str) -> Vec<String> {
    let options = resolve(schema, path).as_array().into_iter().flatten();
    options.filter_map(|option| option["const"].as_str().map(str::to_owned)).collect()
}

/// The part of `schema` at `path`, references followed.
fn resolve<'a>(schema: &'a Json, path: &str) -> &'a Json {
    let mut at = schema;
    for step in path.split('/').skip(1) {
        let step = step.replace("~1", "/").replace("~0", "~");
        let next = match at {
            Json::Array(items) => step.parse().ok().and_then(|index: usize| items.get(index)),
            at => at.get(step.as_str()),
        };
        at = match (step.as_str(), next) {
            ("$ref", Some(Json::String(target))) => {
                schema.pointer(target.trim_start_matches('#')).unwrap_or(&Json::Null)
            }
            (_, next) => next.unwrap_or(&Json::Null),
        };
    }
    at
}

fn wanted(kind: &TypeKind) -> String {
    match kind {
        TypeKind::Single(kind) => word(*kind).to_owned(),
        TypeKind::Multiple(kinds) => {
            let kinds = kinds.iter().filter(|kind| *kind != JsonType::Null).map(word);
            kinds.collect::<Vec<_>>().join(" or ")
        }
    }
}

fn word(kind: JsonType) -> &'static str {
    match kind {
        JsonType::Array => "a list",
        JsonType::Boolean => "true or false",
        JsonType::Integer => "a whole number",
        JsonType::Null => "nothing",
        JsonType::Number => "a number",
        JsonType::Object => "an object",
        JsonType::String => "text",
    }
}

/// `/nodes/a/replies/0` as `nodes.a.replies[0]`; the whole document as `the graph`.
pub(super) fn dotted(pointer: &str) -> String {
    let mut text = String::new();
    for step in pointer.split('/').skip(1) {
        let step = step.replace("~1", "/").replace("~0", "~");
        if step.parse::<usize>().is_ok() {
            text.push_str(&format!("[{step}]"));
        } else {
            text.push_str(if text.is_empty() { "" } else { "." });
            text.push_str(&step);
        }
    }
    if text.is_empty() { "the graph".to_owned() } else { text }
}
