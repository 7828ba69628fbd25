//! Questions: listed as people see them, answered and cancelled under the thread's lock.

use async_trait::async_trait;
use sqlx::{FromRow, Postgres, QueryBuilder, Transaction};
use uuid::Uuid;

use super::PgStore;
use super::audit::Entry;
use super::error::{Doing, corrupt, repeated};
use super::rows::parsed;
use super::thread_lock::LockedThread;
use crate::domain::results::denied_by_stop;
use crate::domain::{
    InterruptRecord, InterruptStatus, Json, Message, Question, RunId, Scope, StepId, Tenant, ThreadId, UserId,
};
use crate::graph::admission::{Answered, AnsweredQuestion, OpenQuestion, ThreadView};
use crate::store::{InterruptFilter, Interrupts, StoreError, Time, answer_entry, cancel_entry};

const LISTING: &str = "list questions";
const ANSWERING: &str = "answer a question";
const CANCELLING: &str = "cancel questions";

/// The columns of a [`Row`]; `i` is the question, `t` its thread. An open question whose time is over
/// is shown as expired.
const SELECT: &str = "
select i.question::text as question, i.tenant, t.id as thread_id, i.user_id, i.graph, i.run_id, i.seq,
       case when i.status = 'open' and i.expires_at <= statement_timestamp() then 'expired' else i.status::text end
         as status,
       i.answer::text as answer, i.approved_hash, i.answered_by, i.comment, i.created_at, i.expires_at, i.answered_at
  from interrupt i join thread t on t.key = i.thread_key
 where ";

#[derive(FromRow)]
struct Row {
    question: String,
    tenant: String,
    thread_id: String,
    user_id: String,
    graph: String,
    run_id: Uuid,
    seq: i32,
    status: String,
    answer: Option<String>,
    approved_hash: Option<String>,
    answered_by: Option<String>,
    comment: Option<String>,
    created_at: Time,
    expires_at: Option<Time>,
    answered_at: Option<Time>,
}

impl Row {
    fn record(self) -> Result<InterruptRecord, StoreError> {
        Ok(InterruptRecord {
            question: parsed(&self.question, LISTING)?,
            tenant: Tenant(self.tenant),
            thread_id: ThreadId(self.thread_id),
            user: UserId(self.user_id),
            graph: self.graph,
            step: StepId { run_id: RunId(self.run_id), seq: self.seq },
            status: status_named(&self.status)?,
            answer: self.answer.map(|answer| parsed(&answer, LISTING)).transpose()?,
            approved_hash: self.approved_hash,
            answered_by: self.answered_by,
            comment: self.comment,
            created_at: self.created_at,
            expires_at: self.expires_at,
            answered_at: self.answered_at,
        })
    }
}

fn status_named(text: &str) -> Result<InterruptStatus, StoreError> {
    InterruptStatus::parse(text).ok_or_else(|| corrupt(LISTING, format!("'{text}' is not a status of questions")))
}

#[async_trait]
impl Interrupts for PgStore {
    async fn interrupts(&self, scope: &Scope, filter: &InterruptFilter) -> Result<Vec<InterruptRecord>, StoreError> {
        let rows: Vec<Row> =
            repeated!(async { listing(scope, filter).build_query_as().fetch_all(&self.pool).await.doing(LISTING) })?;
        rows.into_iter().map(Row::record).collect()
    }

    async fn interrupt(&self, scope: &Scope, id: &str) -> Result<Option<InterruptRecord>, StoreError> {
        let row: Option<Row> = repeated!(async {
            let mut query = QueryBuilder::new(SELECT);
            query.push("i.id = ").push_bind(id);
            in_scope(&mut query, scope);
            query.build_query_as().fetch_optional(&self.pool).await.doing("read a question")
        })?;
        row.map(Row::record).transpose()
    }

    async fn due_for_expiry(&self, limit: u32) -> Result<Vec<InterruptRecord>, StoreError> {
        let rows: Vec<Row> = repeated!(async {
            let mut query = QueryBuilder::new(SELECT);
            query.push(
                "i.status = 'open' and i.on_expiry is not null and i.expires_at <= statement_timestamp()
                 order by i.expires_at, i.id limit ",
            );
            query.push_bind(i64::from(limit));
            query.build_query_as().fetch_all(&self.pool).await.doing("look for questions whose time is over")
        })?;
        rows.into_iter().map(Row::record).collect()
    }
}

/// Only the conditions that are asked for, so that each text has a plan of its own.
fn listing(scope: &Scope, filter: &InterruptFilter) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new(SELECT);
    query.push("i.tenant = ").push_bind(scope.tenant.as_str());
    if let Some(owner) = &scope.owner {
        query.push(" and i.user_id = ").push_bind(owner.as_str());
    }
    let conditions: Vec<&str> = filter.statuses.iter().map(|status| condition(*status)).collect();
    if !conditions.is_empty() {
        query.push(" and (").push(conditions.join(" or ")).push(")");
    }
    if let Some(thread) = &filter.thread {
        query.push(" and i.thread_key = (select key from thread where tenant = ").push_bind(scope.tenant.as_str());
        query.push(" and id = ").push_bind(thread.as_str()).push(")");
    }
    if let Some(run) = filter.run {
        query.push(" and i.run_id = ").push_bind(run.0);
    }
    if let Some(graph) = &filter.graph {
        query.push(" and i.graph = ").push_bind(graph);
    }
    if let Some(tool) = &filter.tool {
        query.push(" and i.tool = ").push_bind(tool);
    }
    if let Some(after) = &filter.after {
        query.push(" and (i.created_at, i.id) > (").push_bind(after.created_at);
        query.push(", ").push_bind(&after.id).push(")");
    }
    query.push(" order by i.created_at, i.id limit ").push_bind(i64::from(filter.limit));
    query
}

/// In the words of the partial index of open questions, which passes expired ones by.
fn condition(status: InterruptStatus) -> &'static str {
    match status {
        InterruptStatus::Open => {
            "(i.status = 'open' and coalesce(i.expires_at, 'infinity'::timestamptz) > statement_timestamp())"
        }
        InterruptStatus::Expired => {
            "(i.status = 'expired' or (i.status = 'open' and i.expires_at <= statement_timestamp()))"
        }
        InterruptStatus::Answered => "i.status = 'answered'",
        InterruptStatus::Cancelled => "i.status = 'cancelled'",
    }
}

fn in_scope(query: &mut QueryBuilder<Postgres>, scope: &Scope) {
    query.push(" and i.tenant = ").push_bind(scope.tenant.as_str());
    if let Some(owner) = &scope.owner {
        query.push(" and i.user_id = ").push_bind(owner.as_str());
    }
}

/// Adds the questions of `run`'s pause to the view, in the order they were asked; whether their time
/// is over is judged now, behind the lock.
pub(super) async fn add_to_view(
    tx: &mut Transaction<'_, Postgres>,
    run: Uuid,
    view: &mut ThreadView,
) -> Result<(), StoreError> {
    let rows: Vec<(String, String, Option<String>, bool)> = sqlx::query_as(
        "select question::text, status::text, answer::text, coalesce(expires_at <= clock_timestamp(), false)
           from interrupt where run_id = $1 order by seq, place",
    )
    .bind(run)
    .fetch_all(&mut **tx)
    .await
    .doing(ANSWERING)?;
    for (question, status, answer, is_expired) in rows {
        let question: Question = parsed(&question, ANSWERING)?;
        match status_named(&status)? {
            InterruptStatus::Open => view.open.push(OpenQuestion { question, is_expired }),
            status => {
                let answer = answer.map_or(Ok(Json::Null), |answer| parsed(&answer, ANSWERING))?;
                view.answered.push(AnsweredQuestion { question, status, answer });
            }
        }
    }
    Ok(())
}

/// Records answers, each with an audit entry; when the first was recorded.
pub(super) async fn answer(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    open: &[OpenQuestion],
    answers: &[Answered],
) -> Result<Option<Time>, StoreError> {
    let mut first = None;
    for answered in answers {
        let at: Option<Time> = sqlx::query_scalar(
            "update interrupt set status = $3::interrupt_status, answer = $4::json, approved_hash = $5, answered_by = $6,
                    comment = $7, answered_at = clock_timestamp()
              where id = $1 and thread_key = $2 and status = 'open'
             returning answered_at",
        )
        .bind(&answered.id)
        .bind(thread.key)
        .bind(answered.status.as_str())
        .bind(answered.answer.to_string())
        .bind(&answered.approved_hash)
        .bind(&answered.by)
        .bind(&answered.comment)
        .fetch_optional(&mut **tx)
        .await
        .doing(ANSWERING)?;
        let question = open.iter().map(|open| &open.question).find(|question| question.id == answered.id);
        let (Some(at), Some(question)) = (at, question) else {
            return Err(corrupt(ANSWERING, format!("question {} is not open", answered.id)));
        };
        first = first.or(Some(at));
        let run = thread.last_run.map(RunId);
        let detail = answer_entry(question, answered);
        Entry { thread, run, who: &answered.by, action: answered.action, detail }.write(tx).await?;
    }
    Ok(first)
}

/// Cancels what the pause of `run` still asks; the results its calls get.
pub(super) async fn cancel(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    run: RunId,
    who: &str,
) -> Result<Vec<Message>, StoreError> {
    let mut rows: Vec<(i32, i16, String)> = sqlx::query_as(
        "update interrupt set status = 'cancelled', answered_by = $2, answered_at = clock_timestamp()
          where run_id = $1 and status = 'open' returning seq, place, question::text",
    )
    .bind(run.0)
    .bind(who)
    .fetch_all(&mut **tx)
    .await
    .doing(CANCELLING)?;
    rows.sort_unstable();
    let open = rows.iter().map(|(.., question)| parsed(question, CANCELLING)).collect::<Result<Vec<Question>, _>>()?;
    for question in &open {
        let detail = cancel_entry(question);
        Entry { thread, run: Some(run), who, action: "cancel", detail }.write(tx).await?;
    }
    Ok(denied_by_stop(&open))
}

/// Whether the thread has open questions.
pub(super) async fn is_asking(tx: &mut Transaction<'_, Postgres>, thread: &LockedThread) -> Result<bool, StoreError> {
    sqlx::query_scalar("select exists (select from interrupt where thread_key = $1 and status = 'open')")
        .bind(thread.key)
        .fetch_one(&mut **tx)
        .await
        .doing(LISTING)
}
