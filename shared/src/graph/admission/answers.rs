//! Which questions an input answers, and with what: all of it fits, or nothing is recorded.
//!
//! The order of the checks is the wire's: ids first, then whether anything is asked, then each answer's
//! time, person and form. Source: graph semantics, "Acceptance"; AG-UI, "Malformed resumes".

use super::{Answer, Answered, Answerer, Given, OpenQuestion, Refusal, RunInput};
use crate::domain::interrupt::OutcomeAnswer;
use crate::domain::{
    CallRef, CallResult, CallStatus, GateAnswer, InterruptStatus, Json, Message, Question, QuestionKind, Role,
    ToolsSpec,
};
use crate::graph::Manifest;

/// What a client tool's cancelled call is answered with.
const CANCELLED: &str = "The client cancelled this call; it did not run.";

/// What an input does to the open questions.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// What is recorded, in the order the questions were asked.
    pub answered: Vec<Answered>,
    /// The position keys of those, for the node that runs again.
    pub keys: Vec<String>,
    /// Results of client tools that came as answers by id and not as messages.
    pub results: Vec<Message>,
    /// Ids of questions that stay open.
    pub still_open: Vec<String>,
}

/// Reads the answers in `input`. `manifest` is the version the thread is paused on.
pub(super) fn take(open: &[OpenQuestion], manifest: &Manifest, input: &RunInput) -> Result<Taken, Refusal> {
    let given = given(open, input)?;
    let mut taken = Taken::default();
    for (index, asked) in open.iter().enumerate() {
        let question = &asked.question;
        let Some((_, value, comment)) = given.iter().find(|(at, ..)| *at == index) else {
            taken.still_open.push(question.id.clone());
            continue;
        };
        check_time(asked, value, &input.answered_by)?;
        check_person(question, &input.answered_by)?;
        let (mut answered, result) = canonical(question, value, manifest)?;
        // A result that is a message already is not added once more.
        let call = question.call.as_ref().map(|call| call.call_id.as_str()).unwrap_or_default();
        let result = result.filter(|_| !sent_results(input).contains(&call));
        input.answered_by.as_str().clone_into(&mut answered.by);
        if answered.comment.is_none() {
            answered.comment.clone_from(comment);
        }
        if input.answered_by == Answerer::Expiry {
            answered.status = InterruptStatus::Expired;
            answered.action = "expire";
        }
        taken.answered.push(answered);
        taken.keys.push(question.key.clone());
        taken.results.extend(result);
    }
    Ok(taken)
}

/// Each answer with the index of its question and what was said about it.
type Matched = Vec<(usize, Given, Option<String>)>;

/// The calls whose results came as messages of the client's own.
fn sent_results(input: &RunInput) -> Vec<&str> {
    let results = input.messages.iter().filter(|message| message.role == Role::Tool);
    let blocks = results.flat_map(|message| &message.content).filter(|block| block["type"] == "tool_result");
    blocks.filter_map(|block| block["call_id"].as_str()).collect()
}

fn given(open: &[OpenQuestion], input: &RunInput) -> Result<Matched, Refusal> {
    let by_id = |id: &str| open.iter().position(|open| open.question.id == id);
    let mut given: Matched = Vec::new();
    let mut add = |index: usize, value: Given, comment: Option<String>| {
        if given.iter().any(|(known, ..)| *known == index) {
            return Err(Refusal::AnsweredTwice(open[index].question.id.clone()));
        }
        given.push((index, value, comment));
        Ok(())
    };
    for Answer { interrupt_id, value, comment } in &input.answers {
        let index = by_id(interrupt_id).ok_or_else(|| Refusal::NotThisInterrupt(interrupt_id.clone()))?;
        add(index, value.clone(), comment.clone())?;
    }
    let named = match &input.interrupt_id {
        Some(id) => Some(by_id(id).ok_or_else(|| Refusal::NotThisInterrupt(id.clone()))?),
        None => None,
    };
    // Without an id the answer goes to the question that the thread's state shows.
    let shown = || open.iter().position(|open| open.question.kind != QuestionKind::Remote);
    if let Some(answer) = &input.resume {
        add(named.or_else(shown).ok_or(Refusal::NothingToResume)?, Given::Resume(answer.clone()), None)?;
    }
    let results = input.messages.iter().filter(|message| message.role == Role::Tool);
    for block in results.flat_map(|message| &message.content).filter(|block| block["type"] == "tool_result") {
        let call = block["call_id"].as_str().unwrap_or_default();
        let waits = |open: &OpenQuestion| {
            open.question.kind == QuestionKind::Remote
                && open.question.call.as_ref().is_some_and(|asked| asked.call_id == call)
        };
        let index = open.iter().position(waits).ok_or_else(|| Refusal::NoSuchCall(call.to_owned()))?;
        add(index, Given::Canonical(block.clone()), None).map_err(|_| Refusal::ResultTwice)?;
    }
    if given.is_empty()
        && let Some(first) = shown().map(|index| &open[index]).or(open.first())
    {
        return Err(Refusal::Paused { id: first.question.id.clone(), node: first.question.node.clone() });
    }
    Ok(given)
}

/// From an expired question only its default is taken, and a cancellation; its default from no other.
fn check_time(asked: &OpenQuestion, value: &Given, by: &Answerer) -> Result<(), Refusal> {
    let question = &asked.question;
    let is_default = question.on_expiry.as_ref().is_some_and(|default| *value == Given::Canonical(default.clone()));
    match (asked.is_expired, by) {
        (true, Answerer::Expiry) if is_default => Ok(()),
        (true, Answerer::User(_)) if *value == Given::Cancelled => Ok(()),
        (true, _) => Err(Refusal::Expired(question.id.clone())),
        (false, Answerer::Expiry) => Err(Refusal::NotThisInterrupt(question.id.clone())),
        (false, Answerer::User(_)) => Ok(()),
    }
}

fn check_person(question: &Question, by: &Answerer) -> Result<(), Refusal> {
    match by {
        Answerer::User(user)
            if !question.approvers.is_empty() && !question.approvers.iter().any(|name| name == user.as_str()) =>
        {
            Err(Refusal::NotAnApprover(question.id.clone()))
        }
        _ => Ok(()),
    }
}

/// The answer as it is stored, and the message it becomes where it is a client tool's result.
fn canonical(question: &Question, value: &Given, manifest: &Manifest) -> Result<(Answered, Option<Message>), Refusal> {
    let (answer, result) = match question.kind {
        QuestionKind::Input => (input_answer(question, value)?, None),
        QuestionKind::Gate => return gate_answer(question, value, manifest).map(|answered| (answered, None)),
        QuestionKind::Outcome => (outcome_answer(value)?, None),
        QuestionKind::Remote => remote_answer(question, value)?,
    };
    let is_cancelled = *value == Given::Cancelled;
    let answered = Answered {
        id: question.id.clone(),
        status: if is_cancelled { InterruptStatus::Cancelled } else { InterruptStatus::Answered },
        answer,
        approved_hash: None,
        by: String::new(),
        comment: None,
        action: if is_cancelled { "cancel" } else { "answer" },
    };
    Ok((answered, result))
}

fn input_answer(question: &Question, value: &Given) -> Result<Json, Refusal> {
    let answer = match value {
        Given::Resume(answer) | Given::Canonical(answer) => answer.clone(),
        Given::Cancelled => return Ok(Json::Null),
    };
    match &question.response_schema {
        Some(schema) => satisfies(&answer, schema, "").map(|()| answer),
        None => Ok(answer),
    }
}

/// Where a value does not fit its schema; the value itself is never repeated.
fn satisfies(value: &Json, schema: &Json, at: &str) -> Result<(), Refusal> {
    let schema = jsonschema::validator_for(schema).map_err(|error| Refusal::AnswerSchema(error.to_string()))?;
    schema.validate(value).map_err(|error| {
        let place = error.instance_path().to_string();
        let place = if place.is_empty() && at.is_empty() { "the answer".to_owned() } else { format!("{at}{place}") };
        Refusal::AnswerSchema(format!("{place}: {}", error.masked_with("the value")))
    })
}

fn gate_answer(question: &Question, value: &Given, manifest: &Manifest) -> Result<Answered, Refusal> {
    let answer = match value {
        Given::Cancelled | Given::Resume(Json::Null) => GateAnswer::denied(None),
        Given::Resume(answer) => resumed(answer)?,
        Given::Canonical(answer) => GateAnswer::parse(answer).map_err(Refusal::AnswerSchema)?,
    };
    let call = question.call.as_ref().ok_or_else(|| Refusal::NotThisInterrupt(question.id.clone()))?;
    if let Some(arguments) = &answer.arguments {
        check_edit(question, call, arguments, &answer, manifest)?;
    }
    let approved_hash = answer.approved_hash(call);
    let is_cancelled = *value == Given::Cancelled;
    Ok(Answered {
        id: question.id.clone(),
        status: if is_cancelled { InterruptStatus::Cancelled } else { InterruptStatus::Answered },
        action: if approved_hash.is_some() { "approve" } else { "deny" },
        comment: answer.comment.clone(),
        answer: answer.to_json(),
        approved_hash,
        by: String::new(),
    })
}

/// `{"approved": bool, "editedArgs"?, "reason"?}`: only the boolean itself approves. Source: AG-UI, "The
/// interrupt of a gated call".
fn resumed(answer: &Json) -> Result<GateAnswer, Refusal> {
    let wrong = |what: &str| Err(Refusal::AnswerSchema(what.to_owned()));
    let Some(approved) = answer.get("approved").and_then(Json::as_bool) else {
        return wrong("the answer must be an object whose 'approved' is true or false");
    };
    let comment = match answer.get("reason") {
        None | Some(Json::Null) => None,
        Some(Json::String(reason)) => Some(reason.clone()).filter(|reason| !reason.is_empty()),
        Some(_) => return wrong("/reason must be a text"),
    };
    let arguments = answer.get("editedArgs").filter(|arguments| !arguments.is_null()).cloned();
    Ok(match approved {
        true => GateAnswer { arguments, comment, ..GateAnswer::approved() },
        false => GateAnswer::denied(comment),
    })
}

fn check_edit(
    question: &Question,
    call: &CallRef,
    arguments: &Json,
    answer: &GateAnswer,
    manifest: &Manifest,
) -> Result<(), Refusal> {
    let wrong = |what: &str| Err(Refusal::AnswerSchema(what.to_owned()));
    if answer.outcome != crate::domain::interrupt::GateOutcome::Approved {
        return wrong("a denial has no arguments");
    }
    if !question.may_edit {
        return wrong("the arguments of this call cannot be changed; approve it as it is, or deny it");
    }
    if !arguments.is_object() {
        return wrong("/arguments must be an object");
    }
    let spec =
        manifest.node(&question.node).and_then(|node| serde_json::from_value::<ToolsSpec>(node.spec.clone()).ok());
    match spec.as_ref().and_then(|spec| spec.tool(&call.tool)) {
        Some(tool) => satisfies(arguments, &tool.parameters, "/arguments"),
        None => wrong("the tool is not in the graph any more; deny the call"),
    }
}

fn outcome_answer(value: &Given) -> Result<Json, Refusal> {
    match value {
        Given::Cancelled => Ok(serde_json::json!({"action": "failed"})),
        Given::Resume(answer) | Given::Canonical(answer) => {
            OutcomeAnswer::parse(answer).map(|answer| answer.to_json()).map_err(Refusal::AnswerSchema)
        }
    }
}

/// A block is the result as it is; any other value is the tool's output.
fn remote_answer(question: &Question, value: &Given) -> Result<(Json, Option<Message>), Refusal> {
    let call = question.call.as_ref().ok_or_else(|| Refusal::NotThisInterrupt(question.id.clone()))?;
    let result = match value {
        Given::Canonical(block) if block["type"] == "tool_result" && block["call_id"] == *call.call_id => {
            let message = Message { content: vec![block.clone()], ..Message::text(Role::Tool, "") };
            return Ok((block.clone(), Some(message)));
        }
        Given::Canonical(output) | Given::Resume(output) => {
            CallResult { status: CallStatus::Done, output: output.clone() }
        }
        Given::Cancelled => CallResult { status: CallStatus::Failed, output: CANCELLED.into() },
    };
    let message = crate::domain::results::result_message(call, &result);
    Ok((message.content[0].clone(), Some(message)))
}
