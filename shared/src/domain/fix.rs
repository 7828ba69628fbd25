//! `fix`: which messages of a context leave, so that no model refuses it for a call without a result.
//!
//! A call is answered by a result behind it, or by a `content` of its own. A model may use a call id
//! again in a later turn, so a result belongs to the newest call of its id before it.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use super::{Json, Message, MessageId};

/// What leaves a context.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Repair {
    /// Messages with an unanswered call, and the results of their other calls.
    pub remove: Vec<MessageId>,
    /// How many of them hold an unanswered call.
    pub dangling: usize,
}

/// What `POST /v1/graph/fix` says beside the state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FixReport {
    /// False only if the thread has no state.
    pub success: bool,
    /// A sentence.
    pub message: String,
    /// How many messages with an unanswered call left.
    pub removed_count: usize,
}

/// The repair of `context`; nothing leaves a healthy one.
#[must_use]
pub fn repair(context: &[Message]) -> Repair {
    let results = results_by_call(context);
    let mut removed = HashSet::new();
    let mut dangling = 0;
    for (index, message) in context.iter().enumerate() {
        let calls = message.tools_calls.iter().flatten();
        let is_open = |call: &Json| !has_content(call) && !results.contains_key(&(index, call_id(call)));
        if calls.clone().any(is_open) {
            dangling += 1;
            removed.insert(index);
            removed.extend(calls.flat_map(|call| results.get(&(index, call_id(call))).into_iter().flatten().copied()));
        }
    }
    // A message that also answers a call which stays is needed.
    for ((call, _), results) in &results {
        if !removed.contains(call) {
            results.iter().for_each(|result| {
                removed.remove(result);
            });
        }
    }
    let remove = context.iter().enumerate().filter(|(index, _)| removed.contains(index));
    Repair { remove: remove.map(|(_, message)| message.message_id.clone()).collect(), dangling }
}

/// The report on `context`, the state before the repair; `None` for a thread without a state.
#[must_use]
pub fn report(thread: &str, context: Option<&[Message]>) -> FixReport {
    let Some(context) = context else {
        let message = format!("No state found for thread: {thread}");
        return FixReport { success: false, message, removed_count: 0 };
    };
    let removed_count = repair(context).dangling;
    let message = match removed_count {
        _ if context.is_empty() => "No messages found in state".to_owned(),
        0 => "No messages with empty tool calls found".to_owned(),
        count => format!("Successfully removed {count} message(s)"),
    };
    FixReport { success: true, message, removed_count }
}

/// (Place of the message with the call, its id) → places of the messages with its results.
fn results_by_call(context: &[Message]) -> HashMap<(usize, &str), Vec<usize>> {
    let mut asked: HashMap<&str, usize> = HashMap::new();
    let mut results: HashMap<(usize, &str), Vec<usize>> = HashMap::new();
    for (index, message) in context.iter().enumerate() {
        for call in message.tools_calls.iter().flatten() {
            asked.insert(call_id(call), index);
        }
        for block in message.content.iter().filter(|block| block["type"] == "tool_result") {
            let id = block["call_id"].as_str().unwrap_or_default();
            if let Some(call) = asked.get(id) {
                results.entry((*call, id)).or_default().push(index);
            }
        }
    }
    results
}

fn call_id(call: &Json) -> &str {
    call["id"].as_str().unwrap_or_default()
}

/// Whether the call carries its result itself; `null` and empty text are none.
fn has_content(call: &Json) -> bool {
    !matches!(call.get("content"), None | Some(Json::Null)) && call["content"] != ""
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::Role;

    fn calls(id: &str, calls: &[&str]) -> Message {
        let mut message = Message::text(Role::Assistant, "");
        message.message_id = id.into();
        message.tools_calls = Some(calls.iter().map(|id| json!({"id": id, "type": "function"})).collect());
        message
    }

    fn results(id: &str, calls: &[&str]) -> Message {
        let mut message = Message::text(Role::Tool, "");
        message.message_id = id.into();
        message.content = calls.iter().map(|id| json!({"type": "tool_result", "call_id": id, "output": 1})).collect();
        message
    }

    fn removed(context: &[Message]) -> (Vec<String>, usize) {
        let repair = repair(context);
        (repair.remove.into_iter().map(|id| id.text).collect(), repair.dangling)
    }

    /// C45: answered calls stay, an open one leaves with its siblings' results, orphans are not touched,
    /// and a second repair changes nothing.
    #[test]
    fn only_what_is_broken_leaves() {
        let healthy = [calls("a1", &["c1", "c2"]), results("t1", &["c1"]), results("t2", &["c2"])];
        assert_eq!(removed(&healthy), (vec![], 0));

        let half = [calls("a1", &["c1", "c2"]), results("t1", &["c1"]), results("orphan", &["c9"])];
        assert_eq!(removed(&half), (vec!["a1".into(), "t1".into()], 1));

        assert_eq!(removed(&half[2..]), (vec![], 0));
    }

    #[test]
    fn a_call_id_that_is_used_again_is_another_call() {
        let context = [calls("a1", &["c1"]), results("t1", &["c1"]), calls("a2", &["c1"])];
        assert_eq!(removed(&context), (vec!["a2".into()], 1));

        let context = [calls("a1", &["c1"]), calls("a2", &["c1"]), results("t2", &["c1"])];
        assert_eq!(removed(&context), (vec!["a1".into()], 1));
    }

    #[test]
    fn a_message_that_answers_a_healthy_call_too_stays() {
        let context = [calls("a1", &["c1"]), calls("a2", &["c2", "c3"]), results("both", &["c1", "c2"])];

        assert_eq!(removed(&context), (vec!["a2".into()], 1));
    }
}
