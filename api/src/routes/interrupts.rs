//! The inbox: what waits for a person across all threads, and the answers.

use axum::Json as AxumJson;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::LOCATION;
use http::{HeaderMap, HeaderValue, StatusCode};
use serde::Serialize;
use threadgate_shared::domain::{
    InterruptRecord, InterruptStatus, Json, JsonMap, Limits, QuestionKind, RunId, RunStatus,
};
use threadgate_shared::graph::admission::{Answer, Answerer, Given, RunInput};
use threadgate_shared::graph::declarative::APPROVAL;
use threadgate_shared::store::{InterruptCursor, InterruptFilter, NewRun};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::runs::{REPLAYED, idempotency};
use crate::app::App;
use crate::auth::{Access, Authenticated};
use crate::error::ApiError;
use crate::extract::{ApiJson, ApiQuery, Fields, FromFields, InterruptPath, unknown_interrupt};
use crate::routing::Routes;
use crate::start::{Begun, submit};
use crate::wire::envelope::{NotFound, StoreErrors, WriteErrors};
use crate::wire::interrupt_view::InterruptView;
use crate::wire::run_view::location;

/// Questions of one page where nobody says.
const PAGE: i64 = 50;

/// `/v1/interrupts` and what lies below.
pub fn routes(routes: Routes) -> Routes {
    routes
        .at(Access::Scope("interrupts:read"), routes!(list))
        .at(Access::Scope("interrupts:read"), routes!(read))
        .at(Access::Scope("interrupts:answer"), routes!(answer))
}

/// One page of questions.
#[derive(Debug, Serialize, ToSchema)]
struct InterruptList {
    /// Oldest first.
    interrupts: Vec<InterruptView>,
    /// Send it back as `cursor` for the next page; null on the last one.
    next_cursor: Option<String>,
}

/// Lists questions, oldest first: the open ones, unless others are asked for.
#[utoipa::path(get, path = "/v1/interrupts", tag = "interrupts",
    params(
        ("status" = Option<String>, Query,
            description = "One or several of open, answered, cancelled, expired, separated by commas, or `all`. Default open"),
        ("thread_id" = Option<String>, Query),
        ("run_id" = Option<Uuid>, Query, description = "The paused run"),
        ("graph" = Option<String>, Query),
        ("tool" = Option<String>, Query),
        ("limit" = Option<i64>, Query, minimum = 1, maximum = 1000, description = "Default 50"),
        ("cursor" = Option<String>, Query, description = "The `next_cursor` of the page before"),
    ),
    responses((status = 200, body = InterruptList), StoreErrors))]
async fn list(
    State(app): State<App>,
    caller: Authenticated,
    query: ApiQuery,
) -> Result<AxumJson<InterruptList>, ApiError> {
    let limit = query.limit(PAGE)?;
    let text = |name| query.text(name).filter(|text| !text.is_empty());
    let filter = InterruptFilter {
        statuses: statuses(&query)?,
        thread: text("thread_id").map(Into::into),
        run: run(&query)?,
        graph: text("graph").map(str::to_owned),
        tool: text("tool").map(str::to_owned),
        after: cursor(&query)?,
        limit: u32::try_from(limit + 1).unwrap_or(u32::MAX),
    };
    let mut found = app.parts.store.interrupts(&caller.scope(), &filter).await?;
    let page = usize::try_from(limit).unwrap_or(usize::MAX);
    let has_more = found.len() > page;
    found.truncate(page);
    let next_cursor = found.last().filter(|_| has_more).map(|last| cursor_text(&InterruptCursor::behind(last)));
    let interrupts = found.into_iter().map(InterruptView::new).collect();
    Ok(AxumJson(InterruptList { interrupts, next_cursor }))
}

fn statuses(query: &ApiQuery) -> Result<Vec<InterruptStatus>, ApiError> {
    let words: Vec<&str> =
        query.all("status").flat_map(|text| text.split(',')).map(str::trim).filter(|word| !word.is_empty()).collect();
    if words.is_empty() {
        return Ok(vec![InterruptStatus::Open]);
    }
    if words == ["all"] {
        return Ok(Vec::new());
    }
    let status = |word: &&str| {
        InterruptStatus::parse(word).ok_or_else(|| {
            let known: Vec<&str> = InterruptStatus::ALL.into_iter().map(InterruptStatus::as_str).collect();
            let msg = format!("Input should be all, or one of {}", known.join(", "));
            ApiError::field(vec!["query".into(), "status".into()], "enum", msg)
        })
    };
    words.iter().map(status).collect()
}

fn run(query: &ApiQuery) -> Result<Option<RunId>, ApiError> {
    let Some(text) = query.text("run_id").filter(|text| !text.is_empty()) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| {
        let msg = "Input should be a valid UUID";
        ApiError::field(vec!["query".into(), "run_id".into()], "uuid_parsing", msg)
    })
}

fn cursor_text(cursor: &InterruptCursor) -> String {
    URL_SAFE_NO_PAD.encode(serde_json::to_vec(cursor).expect("a cursor has string keys"))
}

fn cursor(query: &ApiQuery) -> Result<Option<InterruptCursor>, ApiError> {
    let Some(text) = query.text("cursor").filter(|text| !text.is_empty()) else { return Ok(None) };
    let bytes = URL_SAFE_NO_PAD.decode(text).ok();
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).map(Some).ok_or_else(|| {
        let msg = "Value error, send back the next_cursor of the page before";
        ApiError::field(vec!["query".into(), "cursor".into()], "value_error", msg)
    })
}

/// Shows one question.
#[utoipa::path(get, path = "/v1/interrupts/{interrupt_id}", tag = "interrupts",
    params(("interrupt_id" = String, Path)),
    responses((status = 200, body = InterruptView), NotFound, StoreErrors))]
async fn read(
    State(app): State<App>,
    caller: Authenticated,
    InterruptPath(id): InterruptPath,
) -> Result<AxumJson<InterruptView>, ApiError> {
    Ok(AxumJson(InterruptView::new(known(&app, &caller, &id).await?)))
}

/// An answer to a question.
#[derive(Debug, ToSchema)]
#[schema(as = InterruptAnswer)]
pub struct AnswerBody {
    /// The answer to a question that is no gate; for an `outcome` `{"action": "retry" | "done" | "failed",
    /// "result"?}`, for a `remote` tool its output.
    #[schema(value_type = Option<Object>)]
    value: Option<Json>,
    /// Of a gate or an `approval` node: `approved` or `denied`.
    outcome: Option<String>,
    /// Of an approval, where the tool allows it: the arguments to run it with instead.
    #[schema(value_type = Option<Object>)]
    arguments: Option<Json>,
    /// What whoever answers says about it; of a denial the model reads it.
    comment: Option<String>,
    /// The body's text, which a key is bound to.
    #[schema(ignore)]
    text: String,
}

impl FromFields for AnswerBody {
    const KNOWN: &'static [&'static str] = &["value", "outcome", "arguments", "comment"];

    fn from_fields(mut fields: Fields, _: &Limits) -> Result<Self, ApiError> {
        let text = fields.to_text();
        Ok(Self {
            value: fields.take("value"),
            outcome: outcome(&mut fields)?,
            arguments: fields.take("arguments").filter(|arguments| !arguments.is_null()),
            comment: fields.text("comment")?,
            text,
        })
    }
}

fn outcome(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let outcome = fields.text("outcome")?;
    match outcome.as_deref() {
        None | Some("approved" | "denied") => Ok(outcome),
        Some(_) => {
            let msg = "Input should be 'approved' or 'denied'";
            Err(ApiError::field(vec!["body".into(), "outcome".into()], "enum", msg))
        }
    }
}

impl AnswerBody {
    /// The answer in its canonical form; what fits the question is the admission's to say.
    fn into_answer(self, record: &InterruptRecord) -> Result<Answer, ApiError> {
        let missing = |name: &str| ApiError::field(vec!["body".into(), name.into()], "missing", "Field required");
        let is_gate = record.question.kind == QuestionKind::Gate;
        let is_decision = is_gate || record.question.reason == APPROVAL;
        // What says two things, or something the question does not ask, decides nothing.
        for (name, is_there) in [
            ("value", self.value.is_some() && (is_gate || self.outcome.is_some())),
            ("outcome", self.outcome.is_some() && !is_decision),
            ("arguments", self.arguments.is_some() && !is_gate),
        ] {
            if is_there {
                let msg = "Value error, the question does not take this beside or instead of its answer";
                return Err(ApiError::field(vec!["body".into(), name.into()], "value_error", msg));
            }
        }
        let value = if is_gate {
            let mut answer = JsonMap::new();
            answer.insert("outcome".to_owned(), self.outcome.ok_or_else(|| missing("outcome"))?.into());
            answer.extend(self.arguments.map(|arguments| ("arguments".to_owned(), arguments)));
            answer.extend(self.comment.clone().map(|comment| ("comment".to_owned(), comment.into())));
            Json::Object(answer)
        } else if is_decision && self.value.is_none() {
            let approved = self.outcome.ok_or_else(|| missing("outcome"))? == "approved";
            let reason = self.comment.clone().map(|comment| ("reason".to_owned(), comment.into()));
            Json::Object([("approved".to_owned(), approved.into())].into_iter().chain(reason).collect())
        } else {
            self.value.ok_or_else(|| missing("value"))?
        };
        Ok(Answer { interrupt_id: record.question.id.clone(), value: Given::Canonical(value), comment: self.comment })
    }
}

/// What an answer did.
#[derive(Debug, Serialize, ToSchema)]
struct AnsweredView {
    /// The question after it.
    interrupt: InterruptView,
    /// The run that goes on; null while other questions of the pause are open.
    #[schema(value_type = Option<uuid::Uuid>)]
    run_id: Option<RunId>,
    /// Ids of the questions that are open still.
    still_open: Vec<String>,
}

/// Answers a question. The answer that leaves no question of its pause open creates the run that goes on.
#[utoipa::path(post, path = "/v1/interrupts/{interrupt_id}/answer", tag = "interrupts", request_body = AnswerBody,
    params(("interrupt_id" = String, Path),
        ("Idempotency-Key" = Option<String>, Header,
        description = "The same key with the same body gives the same answer, for a day unless configured otherwise")),
    responses(
        (status = 202, description = "Recorded; the run goes on, `Location` is where to look", body = AnsweredView),
        (status = 200, description = "Recorded; other questions of the pause are open", body = AnsweredView),
        NotFound, WriteErrors,
    ))]
async fn answer(
    State(app): State<App>,
    caller: Authenticated,
    InterruptPath(id): InterruptPath,
    headers: HeaderMap,
    ApiJson(body): ApiJson<AnswerBody>,
) -> Result<Response, ApiError> {
    let idempotency = idempotency(&app, &headers, &format!("{id}\n{}", body.text))?;
    let record = known(&app, &caller, &id).await?;
    let paused = app.parts.store.run(&caller.scope(), record.run_id()).await?.ok_or_else(unknown_interrupt)?;
    let graph = app.graphs.named(&record.graph).await?;
    let new = NewRun { idempotency, ..NewRun::resuming(&paused, caller.0.clone()) };
    let answered_by = Answerer::User(caller.0.user.clone());
    let input = RunInput { answers: vec![body.into_answer(&record)?], answered_by, ..RunInput::default() };
    let (run, is_replayed) = match submit(&app, new, graph, &input).await.map_err(ApiError::from)? {
        Begun::New(started) => (Some(started.created.run.id), false),
        Begun::StillPaused(_) => (None, false),
        Begun::Replayed(run) => ((run.status != RunStatus::Interrupted || run.id != paused.id).then_some(run.id), true),
    };
    tracing::info!(run.id = %paused.id, interrupt.id = id, "Question {id} of run {} was answered", paused.id);
    let filter = InterruptFilter {
        statuses: vec![InterruptStatus::Open],
        run: Some(paused.id),
        limit: u32::MAX,
        ..InterruptFilter::default()
    };
    let open = app.parts.store.interrupts(&caller.scope(), &filter).await?;
    let still_open = open.into_iter().map(|record| record.question.id).collect();
    let interrupt = InterruptView::new(known(&app, &caller, &id).await?);
    let status = if run.is_some() { StatusCode::ACCEPTED } else { StatusCode::OK };
    let mut response = (status, AxumJson(AnsweredView { interrupt, run_id: run, still_open })).into_response();
    if let Some(place) = run.and_then(|run| HeaderValue::from_str(&location(run)).ok()) {
        response.headers_mut().insert(LOCATION, place);
    }
    if is_replayed {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response)
}

async fn known(app: &App, caller: &Authenticated, id: &str) -> Result<InterruptRecord, ApiError> {
    app.parts.store.interrupt(&caller.scope(), id).await?.ok_or_else(unknown_interrupt)
}
