//! The message log of a thread: what was said, apart from the context that a model sees.

use axum::extract::State;
use serde::Serialize;
use threadgate_shared::domain::client::log_messages;
use threadgate_shared::domain::parse::Fill;
use threadgate_shared::domain::{Json, Limits, Message};
use threadgate_shared::graph::ids::unix_seconds;
use threadgate_shared::store::{Page, PutMessages};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::threads::{Done, Unread};
use crate::app::App;
use crate::auth::{Access, Authenticated};
use crate::error::ApiError;
use crate::extract::{ApiJson, ApiQuery, Fields, FromFields, MessagePath, ThreadPath};
use crate::middleware::Enveloped;
use crate::routing::Routes;
use crate::wire::envelope::{Envelope, NotFound, StoreErrors, WriteErrors};
use crate::wire::schema::MessageSchema;

/// `/v1/threads/{thread_id}/messages` and `…/{message_id}`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .at(Access::Scope("checkpointer:read"), routes!(list))
        .at(Access::Scope("checkpointer:write"), routes!(put))
        .at(Access::Scope("checkpointer:read"), routes!(read))
        .at(Access::Scope("checkpointer:delete"), routes!(delete))
}

/// A list of messages.
#[derive(Debug, Serialize, ToSchema)]
struct MessageList {
    /// Oldest first.
    #[schema(value_type = Vec<MessageSchema>)]
    messages: Vec<Message>,
}

/// Lists a thread's messages; none for an unknown thread.
#[utoipa::path(get, path = "/v1/threads/{thread_id}/messages", tag = "threads",
    params(
        ("thread_id" = String, Path),
        ("search" = Option<String>, Query, description = "A part of the text, in any case"),
        ("offset" = Option<i64>, Query, minimum = 0),
        ("limit" = Option<i64>, Query, minimum = 1, maximum = 1000, description = "Default 100"),
    ),
    responses((status = 200, body = Envelope<MessageList>), StoreErrors))]
async fn list(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(id): ThreadPath,
    query: ApiQuery,
) -> Result<Enveloped<MessageList>, ApiError> {
    let page = Page { offset: query.offset()?, limit: query.limit(100)? };
    let messages = app.parts.store.messages(&caller.scope(), &id, query.text("search"), page).await?;
    Ok(Enveloped(MessageList { messages }))
}

/// Messages for the log.
#[derive(Debug, ToSchema)]
pub struct NewMessages {
    /// Of users, assistants or the system, at least one; never a tool call or its result.
    #[schema(value_type = Vec<MessageSchema>)]
    messages: Option<Json>,
    /// Not read.
    #[schema(value_type = Option<Object>)]
    #[expect(dead_code, reason = "documented, checked, and without effect")]
    metadata: (),
    /// Not read: the path says which thread.
    #[schema(value_type = Option<Object>)]
    #[expect(dead_code, reason = "documented, checked, and without effect")]
    config: (),
}

impl FromFields for NewMessages {
    const KNOWN: &'static [&'static str] = &["messages", "metadata", "config"];

    fn from_fields(mut fields: Fields, _: &Limits) -> Result<Self, ApiError> {
        fields.object("metadata")?;
        fields.object("config")?;
        Ok(Self { messages: fields.take("messages"), metadata: (), config: () })
    }
}

/// Adds messages to the log, not to the context.
#[utoipa::path(post, path = "/v1/threads/{thread_id}/messages", tag = "threads", params(("thread_id" = String, Path)),
    request_body = NewMessages, responses((status = 200, body = Envelope<Done>), WriteErrors))]
async fn put(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(id): ThreadPath,
    ApiJson(body): ApiJson<NewMessages>,
) -> Result<Enveloped<Done>, ApiError> {
    let graph = app.graphs.served().await?;
    let messages = {
        let fill = Fill { new_id: &|| graph.manifest.ids.message_id(), now: unix_seconds() };
        log_messages(body.messages.as_ref(), &app.limits, &fill)?
    };
    let put = PutMessages {
        thread_id: id,
        caller: caller.0.clone(),
        graph: graph.manifest.name.clone(),
        graph_version: graph.version,
        messages,
    };
    app.parts.store.put_messages(&caller.scope(), put).await?;
    Ok(Enveloped(Done { success: true, message: "Messages put successfully", data: Some(true) }))
}

/// Shows one message; integers and their digits are the same id.
#[utoipa::path(get, path = "/v1/threads/{thread_id}/messages/{message_id}", tag = "threads",
    params(("thread_id" = String, Path), ("message_id" = String, Path)),
    responses((status = 200, body = Envelope<MessageSchema>), NotFound, StoreErrors))]
async fn read(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(thread): ThreadPath,
    MessagePath(id): MessagePath,
) -> Result<Enveloped<Message>, ApiError> {
    let message = app.parts.store.message(&caller.scope(), &thread, &id).await?;
    message.map(Enveloped).ok_or_else(unknown_message)
}

/// Deletes one message from log and context.
#[utoipa::path(delete, path = "/v1/threads/{thread_id}/messages/{message_id}", tag = "threads",
    params(("thread_id" = String, Path), ("message_id" = String, Path)), request_body = Unread,
    responses((status = 200, body = Envelope<Done>), NotFound, WriteErrors))]
async fn delete(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(thread): ThreadPath,
    MessagePath(id): MessagePath,
    ApiJson(Unread { .. }): ApiJson<Unread>,
) -> Result<Enveloped<Done>, ApiError> {
    if !app.parts.store.delete_message(&caller.scope(), &thread, &id).await? {
        return Err(unknown_message());
    }
    Ok(Enveloped(Done { success: true, message: "Message deleted successfully", data: None }))
}

fn unknown_message() -> ApiError {
    ApiError::not_found("no such message on this thread; list them for the ids there are")
}
