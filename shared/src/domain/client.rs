//! What a client may write: the inputs of a run, the message log and the state of a thread.
//!
//! The body must have passed [`Limits::check_json`].

use super::limits::Limits;
use super::message::FieldError;
use super::parse::{Fill, messages};
use super::size::json_bytes;
use super::state::{ENGINE_FIELDS, ThreadState};
use super::{Json, JsonMap, Message, MessageId, Role};

/// Why a body is refused (422); nothing is written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ClientError {
    /// It does not have the right shape: the wire's `VALIDATION_ERROR` with details.
    #[error("Validation error")]
    Fields(Vec<FieldError>),
    /// It has, but may not be done: a sentence, without details.
    #[error("{0}")]
    Refused(String),
}

impl From<FieldError> for ClientError {
    fn from(error: FieldError) -> Self {
        Self::Fields(vec![error])
    }
}

impl From<Vec<FieldError>> for ClientError {
    fn from(errors: Vec<FieldError>) -> Self {
        Self::Fields(errors)
    }
}

/// The input of a run, checked.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClientInput {
    /// New messages.
    pub messages: Vec<Message>,
    /// Values for fields, without the engine's; `current_node` may be among them.
    pub state: JsonMap,
}

/// The input of a run: `user` messages, and `tool` messages that hold nothing but results (whether
/// somebody waits for them is [`crate::graph::admission`]'s question).
///
/// # Errors
/// [`ClientError::Fields`], also where nothing is there to run: neither a message nor a resume.
pub fn run_input(
    messages: Option<&Json>,
    state: Option<&Json>,
    is_resume: bool,
    locs: &InputLocs<'_>,
    limits: &Limits,
    fill: &Fill<'_>,
) -> Result<ClientInput, ClientError> {
    let messages = match messages {
        Some(value) => self::messages(value, locs.messages, limits, fill)?,
        None => Vec::new(),
    };
    if messages.is_empty() && !is_resume {
        let msg = "Value error, messages must contain at least one message".to_owned();
        return Err(FieldError { loc: vec!["body".into()], msg, kind: "value_error" }.into());
    }
    for (index, message) in messages.iter().enumerate() {
        if carries_tool_call(message) {
            let msg = format!("Value error, {}", tool_call_refusal(index));
            return Err(FieldError { loc: locs.messages.to_vec(), msg, kind: "value_error" }.into());
        }
        if let Some(why) = why_not_an_input(message) {
            let mut loc = locs.messages.to_vec();
            loc.extend([index.into(), "role".into()]);
            let msg = format!("Value error, messages[{index}] {why}");
            return Err(FieldError { loc, msg, kind: "value_error" }.into());
        }
    }
    let state = initial_state(state, locs.state, limits)?;
    check_size(&messages, &state, limits)?;
    Ok(ClientInput { messages, state })
}

/// Where a run's input stands in its body.
#[derive(Debug, Clone, Copy)]
pub struct InputLocs<'a> {
    /// The messages.
    pub messages: &'a [Json],
    /// The state.
    pub state: &'a [Json],
}

/// The messages of `POST …/messages`, for the log only: `user`, `assistant` and `system`.
///
/// # Errors
/// [`ClientError`]; a tool's result is never taken.
pub fn log_messages(value: Option<&Json>, limits: &Limits, fill: &Fill<'_>) -> Result<Vec<Message>, ClientError> {
    let loc = ["body".into(), "messages".into()];
    let value = value.ok_or_else(|| missing(&loc))?;
    let mut messages = messages(value, &loc, limits, fill)?;
    if messages.is_empty() {
        return Err(ClientError::Refused("messages must not be empty".to_owned()));
    }
    for (index, message) in messages.iter().enumerate() {
        let why = if carries_tool_call(message) {
            tool_call_refusal(index)
        } else if message.role == Role::Tool || carries_tool_result(message) {
            format!("messages[{index}] carries a tool result; results enter through a run that waits for them")
        } else {
            continue;
        };
        return Err(FieldError { loc: loc.to_vec(), msg: format!("Value error, {why}"), kind: "value_error" }.into());
    }
    check_size(&messages, &JsonMap::new(), limits)?;
    messages.retain(|message| !message.delta);
    Ok(messages)
}

/// What an edit of a thread's state changes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StateChange {
    /// New to the context.
    pub messages: Vec<Message>,
    /// Fields whose value changes, merged; `context_summary` too.
    pub fields: JsonMap,
}

/// The state of `PUT …/state` over `current`, whose fields are all the graph has: messages the
/// context knows are left alone, new ones must be the user's; objects merge, null changes nothing;
/// `execution_meta` and unknown names are ignored.
///
/// # Errors
/// [`ClientError`].
pub fn put_state(
    patch: Option<&Json>,
    current: &ThreadState,
    limits: &Limits,
    fill: &Fill<'_>,
) -> Result<StateChange, ClientError> {
    let loc: [Json; 2] = ["body".into(), "state".into()];
    let patch = object(patch.ok_or_else(|| missing(&loc))?, &loc, limits)?;
    let messages = match patch.get("context") {
        None | Some(Json::Null) => Vec::new(),
        Some(context) => new_context(context, current, limits, fill)?,
    };
    check_size(&messages, patch, limits)?;
    let mut fields = JsonMap::new();
    match patch.get("context_summary") {
        None | Some(Json::Null) => {}
        Some(summary) if summary.is_string() => {
            if current.context_summary.as_ref() != Some(summary) {
                fields.insert("context_summary".to_owned(), summary.clone());
            }
        }
        Some(_) => {
            let loc = vec!["body".into(), "state".into(), "context_summary".into()];
            let msg = "Input should be a valid string".to_owned();
            return Err(FieldError { loc, msg, kind: "string_type" }.into());
        }
    }
    for (name, old) in &current.fields {
        let Some(new) = patch.get(name).filter(|value| !value.is_null()) else { continue };
        let mut merged = old.clone();
        merge(&mut merged, new);
        if merged != *old {
            fields.insert(name.clone(), merged);
        }
    }
    Ok(StateChange { messages, fields })
}

/// Messages of an edited context that are new to it.
fn new_context(
    context: &Json,
    current: &ThreadState,
    limits: &Limits,
    fill: &Fill<'_>,
) -> Result<Vec<Message>, ClientError> {
    let loc = ["body".into(), "state".into(), "context".into()];
    let known = |item: &Json| {
        let id = item.get("message_id").filter(|id| !id.is_null())?;
        let id: MessageId = serde_json::from_value(id.clone()).ok()?;
        current.context.iter().find(|message| message.message_id == id)
    };
    let mut messages = Vec::new();
    for (index, message) in unknown_messages(context, &loc, &known, limits, fill)? {
        if carries_tool_call(&message) {
            return Err(ClientError::Refused(tool_call_refusal(index)));
        }
        if message.role != Role::User || carries_tool_result(&message) {
            return Err(ClientError::Refused(format!(
                "messages[{index}] is new and not a plain 'user' message; a client may add only those"
            )));
        }
        if !message.delta {
            messages.push(message);
        }
    }
    Ok(messages)
}

/// The messages of the list that `known` does not know, with their places in it.
fn unknown_messages<'a>(
    list: &Json,
    loc: &[Json],
    known: &dyn Fn(&Json) -> Option<&'a Message>,
    limits: &Limits,
    fill: &Fill<'_>,
) -> Result<Vec<(usize, Message)>, ClientError> {
    let Json::Array(items) = list else {
        let msg = "Input should be a valid list".to_owned();
        return Err(FieldError { loc: loc.to_vec(), msg, kind: "list_type" }.into());
    };
    let new: Vec<(usize, &Json)> = items.iter().enumerate().filter(|(_, item)| known(item).is_none()).collect();
    if new.len() > limits.message_count_max {
        let msg = format!("List should have at most {} new items, not {}", limits.message_count_max, new.len());
        return Err(FieldError { loc: loc.to_vec(), msg, kind: "too_long" }.into());
    }
    let parse = |(index, item): (usize, &Json)| {
        let mut loc = loc.to_vec();
        loc.push(index.into());
        Ok((index, super::parse::message(item, &loc, limits, fill)?))
    };
    new.into_iter().map(parse).collect()
}

/// `patch` over `base`: objects key by key, null changes nothing, the rest replaces.
fn merge(base: &mut Json, patch: &Json) {
    match (base, patch) {
        (_, Json::Null) => {}
        (Json::Object(base), Json::Object(patch)) => {
            for (key, value) in patch {
                match base.get_mut(key) {
                    Some(old) => merge(old, value),
                    None => {
                        base.insert(key.clone(), value.clone());
                    }
                }
            }
        }
        (base, patch) => patch.clone_into(base),
    }
}

fn initial_state(value: Option<&Json>, loc: &[Json], limits: &Limits) -> Result<JsonMap, ClientError> {
    let state = match value {
        None | Some(Json::Null) => return Ok(JsonMap::new()),
        Some(value) => object(value, loc, limits)?,
    };
    let is_ours = |name: &str| ENGINE_FIELDS.contains(&name);
    Ok(state.iter().filter(|(name, _)| !is_ours(name)).map(|(name, value)| (name.clone(), value.clone())).collect())
}

fn object<'a>(value: &'a Json, loc: &[Json], limits: &Limits) -> Result<&'a JsonMap, ClientError> {
    let Json::Object(map) = value else {
        let msg = "Input should be a valid dictionary".to_owned();
        return Err(FieldError { loc: loc.to_vec(), msg, kind: "dict_type" }.into());
    };
    if map.len() > limits.state_key_count_max {
        let msg = format!("Dictionary should have at most {} keys, not {}", limits.state_key_count_max, map.len());
        return Err(FieldError { loc: loc.to_vec(), msg, kind: "too_long" }.into());
    }
    Ok(map)
}

fn check_size(messages: &[Message], state: &JsonMap, limits: &Limits) -> Result<(), ClientError> {
    let bytes = json_bytes(&messages) + json_bytes(&state);
    if bytes <= limits.run_input_bytes_max {
        return Ok(());
    }
    let msg = format!("Value error, the input has {bytes} bytes; at most {} are taken", limits.run_input_bytes_max);
    Err(FieldError { loc: vec!["body".into()], msg, kind: "value_error" }.into())
}

fn missing(loc: &[Json]) -> FieldError {
    FieldError { loc: loc.to_vec(), msg: "Field required".to_owned(), kind: "missing" }
}

fn carries_tool_call(message: &Message) -> bool {
    let is_call = |block: &Json| matches!(block["type"].as_str(), Some("tool_call" | "remote_tool_call"));
    message.tools_calls.as_ref().is_some_and(|calls| !calls.is_empty()) || message.content.iter().any(is_call)
}

fn carries_tool_result(message: &Message) -> bool {
    message.content.iter().any(|block| block["type"] == "tool_result")
}

fn tool_call_refusal(index: usize) -> String {
    format!("messages[{index}] carries a tool call; only the model may request tools")
}

/// Why a client may not send `message` to a run.
fn why_not_an_input(message: &Message) -> Option<&'static str> {
    let all_results = !message.content.is_empty() && message.content.iter().all(|block| block["type"] == "tool_result");
    match message.role {
        Role::User if carries_tool_result(message) => Some("carries a tool result; send it with the role 'tool'"),
        Role::Tool if !all_results => Some("has the role 'tool'; such a message holds tool results and nothing else"),
        Role::User | Role::Tool => None,
        Role::Assistant => Some("has the role 'assistant'; a client may send only 'user' messages and tool results"),
        Role::System => Some("has the role 'system'; a client may send only 'user' messages and tool results"),
    }
}

#[cfg(test)]
mod tests;
