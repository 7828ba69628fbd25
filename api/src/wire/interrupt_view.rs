//! A question as the inbox shows it.

use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;
use threadgate_shared::domain::{InterruptRecord, Json, JsonMap};
use utoipa::ToSchema;
use uuid::Uuid;

/// A question to a person, or to a client that runs a tool.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Interrupt)]
pub struct InterruptView {
    /// What it is answered by.
    id: String,
    /// `open`, `answered`, `cancelled` or `expired`. An open one whose time is over is expired.
    status: &'static str,
    /// `input` (asked by code), `gate` (a tool that needs an approval), `remote` (a tool that the client
    /// runs) or `outcome` (a tool that may have run).
    kind: &'static str,
    /// A word for the kind of question.
    reason: String,
    /// The question in words.
    message: Option<String>,
    /// Its thread.
    thread_id: String,
    /// The run that is paused.
    run_id: Uuid,
    /// Its graph.
    graph: String,
    /// The node that asks.
    node: String,
    /// The tool it is about.
    tool: Option<String>,
    /// The call it is about.
    tool_call_id: Option<String>,
    /// The call's arguments, as the tool would get them.
    #[schema(value_type = Option<Object>)]
    arguments: Option<Json>,
    /// Whether whoever approves may change them.
    may_edit: bool,
    /// Who may answer; empty = everybody who sees the question.
    approvers: Vec<String>,
    /// What it is about.
    #[schema(value_type = Option<Object>)]
    value: Json,
    /// JSON Schema of the answer.
    #[schema(value_type = Option<Object>)]
    response_schema: Option<Json>,
    /// Free data for whoever shows it, such as `x-confirm`.
    #[schema(value_type = Object)]
    metadata: JsonMap,
    /// When it was asked (RFC 3339).
    created_at: String,
    /// From when on no answer is taken.
    expires_at: Option<String>,
    /// When it was answered or cancelled.
    answered_at: Option<String>,
    /// By whom.
    answered_by: Option<String>,
    /// With what.
    #[schema(value_type = Option<Object>)]
    answer: Option<Json>,
    /// What they said about it.
    comment: Option<String>,
}

impl InterruptView {
    /// The view of `record`.
    #[must_use]
    pub fn new(record: InterruptRecord) -> Self {
        let question = record.question;
        let (tool, tool_call_id, arguments) = match question.call {
            Some(call) => (Some(call.tool), Some(call.call_id), Some(call.arguments)),
            None => (None, None, None),
        };
        Self {
            id: question.id,
            status: record.status.as_str(),
            kind: question.kind.as_str(),
            reason: question.reason,
            message: question.message,
            thread_id: record.thread_id.0,
            run_id: record.step.run_id.0,
            graph: record.graph,
            node: question.node,
            tool,
            tool_call_id,
            arguments,
            may_edit: question.may_edit,
            approvers: question.approvers,
            value: question.value,
            response_schema: question.response_schema,
            metadata: question.metadata,
            created_at: time(record.created_at),
            expires_at: record.expires_at.map(time),
            answered_at: record.answered_at.map(time),
            answered_by: record.answered_by,
            answer: record.answer,
            comment: record.comment,
        }
    }
}

fn time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Micros, true)
}
