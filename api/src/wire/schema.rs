//! JSON Schemas of what is on the wire: for `GET /v1/graph:StateSchema` and for the documentation.

use std::sync::LazyLock;

use threadgate_shared::domain::{Json, JsonMap};
use threadgate_shared::graph::{FieldSpec, Manifest};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Messages, content blocks and the engine's part of the state; the same for every graph.
static DEFINITIONS: LazyLock<Json> = LazyLock::new(|| {
    serde_json::from_str(include_str!("definitions.json")).expect("the file is JSON, a test reads it")
});

/// The JSON Schema of a graph's state.
#[must_use]
pub fn of_state(manifest: &Manifest) -> Json {
    let mut properties = serde_json::json!({
        "context": {"items": {"$ref": "#/$defs/Message"}, "title": "Context", "type": "array"},
        "context_summary": {
            "anyOf": [{"type": "string"}, {"type": "null"}], "default": null, "title": "Context Summary",
        },
        "execution_meta": {"$ref": "#/$defs/ExecutionState"},
    });
    for field in &manifest.fields {
        properties[&field.name] = of_field(field);
    }
    serde_json::json!({
        "$defs": *DEFINITIONS, "properties": properties, "title": manifest.state_type, "type": "object",
    })
}

/// A field's own schema with its name and, where it is a plain value, its default.
fn of_field(field: &FieldSpec) -> Json {
    let mut schema = field.schema.as_object().cloned().unwrap_or_default();
    if !field.default.is_array() && !field.default.is_object() {
        schema.entry("default").or_insert_with(|| field.default.clone());
    }
    schema.entry("title").or_insert_with(|| title(&field.name).into());
    Json::Object(schema)
}

/// `context_summary` → `Context Summary`.
fn title(name: &str) -> String {
    let word = |word: &str| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_uppercase().chain(letters).collect::<String>()).unwrap_or_default()
    };
    name.split('_').map(word).collect::<Vec<_>>().join(" ")
}

/// The definitions as components of the `OpenAPI` document.
#[must_use]
pub fn components() -> JsonMap {
    let text = DEFINITIONS.to_string().replace("#/$defs/", "#/components/schemas/");
    let parsed: Json = serde_json::from_str(&text).expect("only references changed");
    parsed.as_object().cloned().unwrap_or_default()
}

/// Stands for a message in the documentation.
pub struct MessageSchema;

impl PartialSchema for MessageSchema {
    fn schema() -> RefOr<Schema> {
        RefOr::Ref(utoipa::openapi::Ref::from_schema_name("Message"))
    }
}

impl ToSchema for MessageSchema {
    fn name() -> std::borrow::Cow<'static, str> {
        "Message".into()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use threadgate_shared::graph::Reducer;

    use super::*;

    fn field(name: &str, default: Json, schema: Json) -> FieldSpec {
        FieldSpec { name: name.to_owned(), default, reducer: Reducer::default(), schema }
    }

    #[test]
    fn fields_get_a_title_and_plain_defaults() {
        let plain = of_field(&field("last_topic", json!("none"), json!({"type": "string"})));
        let list = of_field(&field("visits", json!([]), json!({"type": "array"})));

        assert_eq!(plain, json!({"type": "string", "default": "none", "title": "Last Topic"}));
        assert_eq!(list, json!({"type": "array", "title": "Visits"}));
    }

    #[test]
    fn every_reference_has_its_definition() {
        let components = components();
        let text = Json::Object(components.clone()).to_string();

        for reference in text.split("\"#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap_or_default();
            assert!(components.contains_key(name), "{name}");
        }
    }
}
