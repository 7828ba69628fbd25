//! Results of tool calls as the messages a model reads.

use super::{CallRef, CallResult, CallStatus, Json, Message, Question, Role};

/// What a model reads of a call that a stop kept from running.
const STOPPED: &str = "The run was stopped before anybody decided about this call; it did not run.";

/// The message that answers `call`. Source: graph semantics, "Results"; of a denial AG-UI, "Approval,
/// denial, stop".
#[must_use]
pub fn result_message(call: &CallRef, result: &CallResult) -> Message {
    let failed = result.status == CallStatus::Failed;
    let status = if failed { "failed" } else { "completed" };
    let block = serde_json::json!({
        "type": "tool_result", "call_id": call.call_id, "output": result.output, "is_error": failed, "status": status,
    });
    let mut message = Message { content: vec![block], ..Message::text(Role::Tool, "") };
    if failed {
        let text = match &result.output {
            Json::String(text) => text.clone(),
            other => other.to_string(),
        };
        message.content.push(serde_json::json!({"type": "error", "message": text, "code": null, "data": null}));
    }
    let metadata = &mut message.metadata;
    metadata.insert("function_name".to_owned(), call.tool.clone().into());
    metadata.insert("function_argument".to_owned(), call.arguments.clone());
    metadata.insert("tool_call_id".to_owned(), call.call_id.clone().into());
    let outcome = match result.status {
        CallStatus::Denied => Some("denied"),
        CallStatus::Failed => Some("failed"),
        CallStatus::Done | CallStatus::Intended | CallStatus::Unknown => None,
    };
    if let Some(outcome) = outcome {
        metadata.insert("outcome".to_owned(), outcome.into());
    }
    message
}

/// The results that a stop gives to the calls of the questions it cancels, one for each call.
#[must_use]
pub fn denied_by_stop<'a>(open: impl IntoIterator<Item = &'a Question>) -> Vec<Message> {
    let mut messages: Vec<Message> = Vec::new();
    let mut seen = Vec::new();
    for call in open.into_iter().filter_map(|question| question.call.as_ref()) {
        if !seen.contains(&(&call.message_id, &call.call_id)) {
            seen.push((&call.message_id, &call.call_id));
            let result = CallResult { status: CallStatus::Denied, output: STOPPED.into() };
            messages.push(result_message(call, &result));
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::QuestionKind;

    fn call(id: &str) -> CallRef {
        CallRef::new("m".into(), id, "refund", json!({"amount": 42}))
    }

    #[test]
    fn each_kind_of_end_has_its_shape() {
        let of = |status, output: Json| result_message(&call("c"), &CallResult { status, output });

        let done = of(CallStatus::Done, json!({"id": 7}));
        assert_eq!(
            done.content,
            [
                json!({"type": "tool_result", "call_id": "c", "output": {"id": 7}, "is_error": false, "status": "completed"})
            ]
        );
        assert_eq!(
            Json::Object(done.metadata),
            json!({"function_name": "refund", "function_argument": {"amount": 42}, "tool_call_id": "c"})
        );
        let failed = of(CallStatus::Failed, json!("no money"));
        assert_eq!(failed.content[0]["is_error"], true);
        assert_eq!(failed.content[1], json!({"type": "error", "message": "no money", "code": null, "data": null}));
        let denied = of(CallStatus::Denied, json!("not today"));
        assert_eq!((&denied.content[0]["is_error"], &denied.metadata["outcome"]), (&json!(false), &json!("denied")));
    }

    #[test]
    fn a_stop_answers_each_call_once_and_questions_without_a_call_not_at_all() {
        let asked = |kind, id: Option<&str>| Question {
            call: id.map(call),
            ..Question::new(kind, "tools", format!("{kind:?}:{id:?}"), "tool_call")
        };
        let open = [
            asked(QuestionKind::Gate, Some("a")),
            asked(QuestionKind::Input, Some("a")),
            asked(QuestionKind::Input, None),
        ];

        let messages = denied_by_stop(&open);

        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].content[0]["call_id"], "a");
        assert_eq!(messages[0].metadata["outcome"], "denied");
    }
}
