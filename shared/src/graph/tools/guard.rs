//! Which tools need an approval, and what a person is asked. Source: AG-UI, "Tool guard".

use crate::domain::{Json, ToolSpec, ToolsSpec};

/// Set by whoever brings tools of an MCP server whose annotation says that they change something.
pub const MCP_DESTRUCTIVE: &str = "threadgate.mcp_destructive";

/// Whether a call of the tool needs an approval. Silence is no claim: a missing hint gates nothing.
#[must_use]
pub fn is_gated(spec: &ToolsSpec, tool: &ToolSpec) -> bool {
    let guard = &spec.guard;
    if !guard.enabled || tool.remote || tool.handoff.is_some() || guard.exempt.contains(&tool.name) {
        return false;
    }
    guard.require_approval.contains(&tool.name)
        || tool.destructive
        || tool.metadata.get(MCP_DESTRUCTIVE).is_some_and(is_truthy)
        || tool.metadata.get("annotations").and_then(|hints| hints.get("readOnlyHint")) == Some(&Json::Bool(false))
        || tool.parameters.get("x-destructive").is_some_and(is_truthy)
}

/// What a person is asked beside the generated question: the guard's own prompt first, then the tool's,
/// then its schema's. Empty texts count as absent.
#[must_use]
pub fn prompt<'a>(spec: &'a ToolsSpec, tool: &'a ToolSpec) -> Option<&'a str> {
    let of_guard = spec.guard.approval_prompts.get(&tool.name).and_then(Json::as_str);
    let of_schema = tool.parameters.get("x-confirm").and_then(Json::as_str);
    [of_guard, tool.confirm.as_deref(), of_schema].into_iter().flatten().find(|text| !text.is_empty())
}

fn is_truthy(value: &Json) -> bool {
    match value {
        Json::Null => false,
        Json::Bool(value) => *value,
        Json::Number(number) => number.as_f64() != Some(0.0),
        Json::String(text) => !text.is_empty(),
        Json::Array(items) => !items.is_empty(),
        Json::Object(map) => !map.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn guarded(change: impl FnOnce(&mut ToolsSpec, &mut ToolSpec)) -> bool {
        let (mut spec, mut tool) = (ToolsSpec::default(), ToolSpec::named("wipe"));
        spec.guard.enabled = true;
        change(&mut spec, &mut tool);
        is_gated(&spec, &tool)
    }

    #[test]
    fn there_are_five_ways_to_be_gated() {
        assert!(guarded(|spec, _| spec.guard.require_approval.push("wipe".into())));
        assert!(guarded(|_, tool| tool.destructive = true));
        assert!(guarded(|_, tool| drop(tool.metadata.insert(MCP_DESTRUCTIVE.into(), json!(true)))));
        assert!(guarded(|_, tool| drop(tool.metadata.insert("annotations".into(), json!({"readOnlyHint": false})))));
        assert!(guarded(|_, tool| tool.parameters["x-destructive"] = json!(1)));
    }

    #[test]
    fn silence_and_other_claims_gate_nothing() {
        for hints in
            [json!({}), json!({"readOnlyHint": "false"}), json!({"destructiveHint": true}), json!([]), json!(null)]
        {
            assert!(!guarded(|_, tool| drop(tool.metadata.insert("annotations".into(), hints.clone()))), "{hints}");
        }
        assert!(!guarded(|_, tool| tool.parameters = json!({"properties": {"a": {"x-destructive": true}}})));
        assert!(!guarded(|_, tool| tool.parameters["x-destructive"] = json!(false)));
    }

    #[test]
    fn exemption_wins_and_a_guard_that_is_off_gates_nothing() {
        assert!(!guarded(|spec, tool| {
            tool.destructive = true;
            spec.guard.require_approval.push("wipe".into());
            spec.guard.exempt.push("wipe".into());
        }));
        assert!(!guarded(|spec, tool| {
            tool.destructive = true;
            spec.guard.enabled = false;
        }));
        assert!(!guarded(|_, tool| {
            tool.destructive = true;
            tool.remote = true;
        }));
    }

    #[test]
    fn prompts_have_an_order() {
        let (mut spec, mut tool) = (ToolsSpec::default(), ToolSpec::named("wipe"));
        assert_eq!(prompt(&spec, &tool), None);
        tool.parameters["x-confirm"] = json!("schema");
        assert_eq!(prompt(&spec, &tool), Some("schema"));
        tool.confirm = Some("tool".into());
        assert_eq!(prompt(&spec, &tool), Some("tool"));
        spec.guard.approval_prompts.insert("wipe".into(), json!("guard"));
        assert_eq!(prompt(&spec, &tool), Some("guard"));
        spec.guard.approval_prompts.insert("wipe".into(), json!(""));
        assert_eq!(prompt(&spec, &tool), Some("tool"));
    }
}
