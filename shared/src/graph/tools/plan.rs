//! What becomes of the calls of one message, before any of them starts. Pure: whether a call has been
//! approved is asked of the ledger once more when it starts.

use std::collections::HashSet;

use super::guard::{is_gated, prompt};
use crate::domain::interrupt::{GateOutcome, OutcomeAction, OutcomeAnswer};
use crate::domain::results::result_message;
use crate::domain::{
    CallRef, CallResult, CallStatus, GateAnswer, Json, Message, MessageId, Question, QuestionKind, Role, ThreadState,
    ToolSpec, ToolsSpec,
};
use crate::graph::admission::answer_to;

/// What a model reads of a denied call where nobody said why.
const DENIED: &str = "A person denied this call; it did not run.";

/// The metadata key of the error that answers the second of two calls with one id.
const DUPLICATE: &str = "duplicate_call";

/// Calls of one message that are looked at, at most; the others get an error.
pub const CALLS_MAX: usize = 128;

/// What to do about the unanswered calls of the last assistant message.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    /// In the order of the calls.
    pub calls: Vec<Planned>,
    /// The node to hand the conversation to; nothing runs then.
    pub handoff: Option<String>,
}

/// What to do about one call.
#[derive(Debug, Clone, PartialEq)]
pub enum Planned {
    /// Start it, unless the ledger says otherwise.
    Start {
        /// With the arguments it may run with.
        call: CallRef,
        /// Whether it needs an approval of exactly these arguments.
        is_gated: bool,
        /// What a person decided about its unknown outcome.
        decided: Option<OutcomeAnswer>,
    },
    /// A person denied it: this is its result.
    Deny(CallRef, CallResult),
    /// It does not start: this is what the model reads.
    Answer(Message),
    /// Somebody must be asked first.
    Ask(Box<Question>),
}

/// The calls of the last assistant message that have no result yet, and what to do about each.
#[must_use]
pub fn plan(spec: &ToolsSpec, node: &str, state: &ThreadState) -> Plan {
    let Some(at) = state.context.iter().rposition(|message| message.role == Role::Assistant) else {
        return Plan::default();
    };
    let (message, later) = (&state.context[at], &state.context[at + 1..]);
    let mut open = Open::after(later);
    let allowed = allowed_tools(message);
    let mut plan = Plan::default();
    let mut waiting = Vec::new();
    for (index, call) in calls_of(message).into_iter().enumerate() {
        if !open.takes(&call.id) {
            continue;
        }
        let tool = spec.tool(&call.name).filter(|tool| is_allowed(tool, allowed.as_deref()));
        if let Some(target) = tool.and_then(|tool| tool.handoff.as_ref()) {
            plan.handoff.get_or_insert_with(|| target.clone());
            continue;
        }
        waiting.push(call.clone());
        plan.calls.push(match tool {
            _ if open.is_second(&call.id) => Planned::Answer(duplicate(&call)),
            _ if index >= CALLS_MAX => Planned::Answer(refused(
                &call,
                &format!("More than {CALLS_MAX} calls in one message; this one did not run."),
            )),
            None => Planned::Answer(not_found(&call)),
            Some(tool) => planned(spec, tool, node, &message.message_id, &call, state),
        });
    }
    if plan.handoff.is_some() {
        let why = "The conversation was handed to another agent; this call did not run.";
        plan.calls = waiting.iter().map(|call| Planned::Answer(refused(call, why))).collect();
    }
    plan
}

fn planned(
    spec: &ToolsSpec,
    tool: &ToolSpec,
    node: &str,
    message: &MessageId,
    call: &Call,
    state: &ThreadState,
) -> Planned {
    let Some(arguments) = call.arguments() else {
        return Planned::Answer(refused(call, "The arguments are not a JSON object; call the tool again with one."));
    };
    let call = CallRef::new(message.clone(), &call.id, &tool.name, arguments);
    let meta = &state.execution_meta;
    if tool.remote {
        return Planned::Ask(Box::new(remote_question(node, call)));
    }
    let decided = decision(state, &call.call_id);
    if !is_gated(spec, tool) {
        return Planned::Start { call, is_gated: false, decided };
    }
    match answer_to(meta, &format!("gate:{}", call.call_id)).map(GateAnswer::parse) {
        None => Planned::Ask(Box::new(gate_question(spec, tool, node, call))),
        Some(Ok(answer)) if answer.outcome == GateOutcome::Approved => {
            let call = match answer.arguments {
                Some(edited) => CallRef::new(call.message_id, &call.call_id, &call.tool, edited),
                None => call,
            };
            Planned::Start { call, is_gated: true, decided }
        }
        // What is no approval is none, whatever it is.
        Some(answer) => {
            let comment = answer.ok().and_then(|answer| answer.comment).filter(|comment| !comment.is_empty());
            let output = comment.unwrap_or_else(|| DENIED.to_owned()).into();
            Planned::Deny(call, CallResult { status: CallStatus::Denied, output })
        }
    }
}

/// The newest decision about a call whose outcome was unknown.
fn decision(state: &ThreadState, call: &str) -> Option<OutcomeAnswer> {
    let answers = state.execution_meta.internal_data.get("interrupt_resume")?.as_object()?;
    let prefix = format!("outcome:{call}:");
    let of_call = answers.iter().filter_map(|(key, answer)| {
        let attempt: i16 = key.strip_prefix(&prefix)?.parse().ok()?;
        Some((attempt, OutcomeAnswer::parse(answer).ok()?))
    });
    of_call.max_by_key(|(attempt, _)| *attempt).map(|(_, answer)| answer)
}

/// The result that a person gave to a call; `None` = call it again.
#[must_use]
pub fn decided_result(answer: &OutcomeAnswer) -> Option<CallResult> {
    let status = match answer.action {
        OutcomeAction::Retry => return None,
        OutcomeAction::Done => CallStatus::Done,
        OutcomeAction::Failed => CallStatus::Failed,
    };
    let output = answer.result.clone().unwrap_or_else(|| match status {
        CallStatus::Done => "A person says that this call took effect.".into(),
        _ => "A person says that this call did not take effect.".into(),
    });
    Some(CallResult { status, output })
}

/// The question of a gated call. Source: AG-UI, "The interrupt of a gated call".
fn gate_question(spec: &ToolsSpec, tool: &ToolSpec, node: &str, call: CallRef) -> Question {
    let mut properties = serde_json::json!({"approved": {"type": "boolean"}, "reason": {"type": "string"}});
    if tool.may_edit {
        properties["editedArgs"] = serde_json::json!({"type": "object"});
    }
    let mut question = Question::new(QuestionKind::Gate, node, format!("gate:{}", call.call_id), "tool_call");
    question.message = Some(format!("Approve {}({})?", call.tool, call.arguments));
    question.response_schema =
        Some(serde_json::json!({"type": "object", "required": ["approved"], "properties": properties}));
    question.metadata.extend(prompt(spec, tool).map(|text| ("x-confirm".to_owned(), text.into())));
    question.call = Some(call);
    question.expires_in = tool.expires_in;
    question.on_expiry.clone_from(&tool.on_expiry);
    question.may_edit = tool.may_edit;
    question.approvers.clone_from(&tool.approvers);
    question
}

fn remote_question(node: &str, call: CallRef) -> Question {
    let key = format!("remote:{}", call.call_id);
    Question { call: Some(call), ..Question::new(QuestionKind::Remote, node, key, "remote_tool_call") }
}

/// One call as a model wrote it.
#[derive(Debug, Clone)]
struct Call {
    id: String,
    name: String,
    raw: Json,
}

impl Call {
    /// The arguments, if they are an object; a model may write them as text, decoded once.
    fn arguments(&self) -> Option<Json> {
        let arguments = match &self.raw {
            Json::String(text) if text.trim().is_empty() => return Some(serde_json::json!({})),
            Json::String(text) => serde_json::from_str(text).ok()?,
            Json::Null => return Some(serde_json::json!({})),
            other => other.clone(),
        };
        arguments.is_object().then_some(arguments)
    }
}

/// The calls of a message: `tools_calls`, or else its `tool_call` blocks.
fn calls_of(message: &Message) -> Vec<Call> {
    let text = |value: &Json| value.as_str().unwrap_or_default().to_owned();
    let listed = message.tools_calls.iter().flatten();
    let listed: Vec<Call> = listed
        .map(|call| Call {
            id: text(&call["id"]),
            name: text(&call["function"]["name"]),
            raw: call["function"]["arguments"].clone(),
        })
        .collect();
    if !listed.is_empty() {
        return listed;
    }
    let blocks = message.content.iter().filter(|block| block["type"] == "tool_call");
    blocks
        .map(|block| Call { id: text(&block["id"]), name: text(&block["name"]), raw: block["args"].clone() })
        .collect()
}

/// Which calls have no result yet.
struct Open {
    answered: HashSet<String>,
    /// Ids whose second call has been answered.
    duplicates: HashSet<String>,
    seen: HashSet<String>,
}

impl Open {
    fn after(later: &[Message]) -> Self {
        let ids = |duplicate: bool| -> HashSet<String> {
            let results = later.iter().filter(|message| message.role == Role::Tool);
            let results = results.filter(|message| message.metadata.contains_key(DUPLICATE) == duplicate);
            let blocks = results.flat_map(|message| &message.content).filter(|block| block["type"] == "tool_result");
            blocks.filter_map(|block| block["call_id"].as_str().map(str::to_owned)).collect()
        };
        Self { answered: ids(false), duplicates: ids(true), seen: HashSet::new() }
    }

    /// Whether the next call of that id is to be looked at.
    fn takes(&mut self, id: &str) -> bool {
        let is_second = self.seen.contains(id);
        if is_second { !self.duplicates.contains(id) } else { self.first(id) }
    }

    fn first(&mut self, id: &str) -> bool {
        let is_open = !self.answered.contains(id);
        if !is_open {
            self.seen.insert(id.to_owned());
        }
        is_open
    }

    /// Whether a call of that id came before in the message.
    fn is_second(&mut self, id: &str) -> bool {
        !self.seen.insert(id.to_owned())
    }
}

fn allowed_tools(message: &Message) -> Option<Vec<String>> {
    let allowed = message.metadata.get("allowed_tools").filter(|allowed| !allowed.is_null())?;
    let names = allowed.as_array().into_iter().flatten();
    Some(names.filter_map(|name| name.as_str().map(str::to_owned)).collect())
}

/// Client tools are always offered, so they are always allowed.
fn is_allowed(tool: &ToolSpec, allowed: Option<&[String]>) -> bool {
    allowed.is_none_or(|names| tool.remote || names.contains(&tool.name))
}

/// Source: graph semantics, "Results": an error block, then the failed result.
fn not_found(call: &Call) -> Message {
    let text = format!("Tool '{}' not found.", call.name);
    let mut message = refused(call, &text);
    message.content.reverse();
    message.metadata = crate::domain::JsonMap::new();
    message
}

fn duplicate(call: &Call) -> Message {
    let mut message = refused(call, &format!("Two calls have the id '{}'; only the first of them counts.", call.id));
    message.metadata.insert(DUPLICATE.to_owned(), true.into());
    message
}

fn refused(call: &Call, why: &str) -> Message {
    let shown = call.arguments().unwrap_or_else(|| call.raw.clone());
    let call = CallRef::new(MessageId::random(), &call.id, &call.name, shown);
    result_message(&call, &CallResult { status: CallStatus::Failed, output: why.into() })
}
