//! Questions: listed as people see them, answered and cancelled by whoever holds the writer.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Sqlite, SqliteConnection};

use super::row::{Answer, Columns, Doing, json_text, micros, now, span};
use super::thread::Thread;
use super::{SqliteStore, close};
use crate::domain::results::denied_by_stop;
use crate::domain::{
    InterruptRecord, InterruptStatus, Json, Message, Question, RunId, Scope, StepId, Tenant, ThreadId, ThreadKey,
    UserId,
};
use crate::graph::admission::{Answered, AnsweredQuestion, OpenQuestion, ThreadView};
use crate::store::{InterruptFilter, Interrupts, StoreError, Time, answer_entry, cancel_entry};

const LISTING: &str = "list questions";
const ANSWERING: &str = "answer a question";

const SELECT: &str = "
select i.question, i.tenant, t.id as thread_id, i.user_id, i.graph, i.run_id, i.seq, i.status, i.answer,
       i.approved_hash, i.answered_by, i.comment, i.created_at, i.expires_at, i.answered_at
  from interrupt i join thread t on t.key = i.thread_key
 where ";

#[async_trait]
impl Interrupts for SqliteStore {
    async fn interrupts(&self, scope: &Scope, filter: &InterruptFilter) -> Result<Vec<InterruptRecord>, StoreError> {
        let now = now();
        let mut query = listing(scope, filter, now);
        let rows = query.build().fetch_all(&mut *self.reader(LISTING).await?).await.doing(LISTING)?;
        rows.iter().map(|row| record(row, now)).collect::<Answer<_>>().doing(LISTING)
    }

    async fn interrupt(&self, scope: &Scope, id: &str) -> Result<Option<InterruptRecord>, StoreError> {
        const DOING: &str = "read a question";
        let mut query = QueryBuilder::new(SELECT);
        query.push("i.id = ").push_bind(id.to_owned()).push(" and ");
        in_scope(&mut query, scope);
        let row = query.build().fetch_optional(&mut *self.reader(DOING).await?).await.doing(DOING)?;
        row.map(|row| record(&row, now())).transpose().doing(DOING)
    }

    async fn due_for_expiry(&self, limit: u32) -> Result<Vec<InterruptRecord>, StoreError> {
        const DOING: &str = "look for questions whose time is over";
        let now = now();
        let mut query = QueryBuilder::new(SELECT);
        query.push("i.status = 'open' and i.on_expiry is not null and i.expires_at <= ").push_bind(micros(now));
        query.push(" order by i.expires_at, i.id limit ").push_bind(limit);
        let rows = query.build().fetch_all(&mut *self.reader(DOING).await?).await.doing(DOING)?;
        rows.iter().map(|row| record(row, now)).collect::<Answer<_>>().doing(DOING)
    }
}

fn listing(scope: &Scope, filter: &InterruptFilter, now: Time) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(SELECT);
    in_scope(&mut query, scope);
    if !filter.statuses.is_empty() {
        query.push(" and (false");
        for status in &filter.statuses {
            query.push(" or ");
            condition(&mut query, *status, now);
        }
        query.push(")");
    }
    if let Some(thread) = &filter.thread {
        query.push(" and t.id = ").push_bind(thread.as_str().to_owned());
    }
    if let Some(run) = filter.run {
        query.push(" and i.run_id = ").push_bind(run.to_string());
    }
    if let Some(graph) = &filter.graph {
        query.push(" and i.graph = ").push_bind(graph.clone());
    }
    if let Some(tool) = &filter.tool {
        query.push(" and i.tool = ").push_bind(tool.clone());
    }
    if let Some(after) = &filter.after {
        query.push(" and (i.created_at, i.id) > (").push_bind(micros(after.created_at));
        query.push(", ").push_bind(after.id.clone()).push(")");
    }
    query.push(" order by i.created_at, i.id limit ").push_bind(filter.limit);
    query
}

fn condition(query: &mut QueryBuilder<Sqlite>, status: InterruptStatus, now: Time) {
    let now = micros(now);
    match status {
        InterruptStatus::Open => {
            query.push("(i.status = 'open' and (i.expires_at is null or i.expires_at > ").push_bind(now).push("))");
        }
        InterruptStatus::Expired => {
            query.push("(i.status = 'expired' or (i.status = 'open' and i.expires_at <= ").push_bind(now).push("))");
        }
        InterruptStatus::Answered | InterruptStatus::Cancelled => {
            query.push("i.status = ").push_bind(status.as_str());
        }
    }
}

fn in_scope(query: &mut QueryBuilder<Sqlite>, scope: &Scope) {
    query.push("i.tenant = ").push_bind(scope.tenant.as_str().to_owned());
    if let Some(owner) = &scope.owner {
        query.push(" and i.user_id = ").push_bind(owner.as_str().to_owned());
    }
}

/// An open question whose time is over is shown as expired.
fn record(row: &SqliteRow, now: Time) -> Answer<InterruptRecord> {
    let expires_at = row.opt("expires_at", Columns::time)?;
    let status = match row.word("status", InterruptStatus::parse)? {
        InterruptStatus::Open if expires_at.is_some_and(|expires_at| expires_at <= now) => InterruptStatus::Expired,
        status => status,
    };
    Ok(InterruptRecord {
        question: row.json("question")?,
        tenant: Tenant(row.text("tenant")?),
        thread_id: ThreadId(row.text("thread_id")?),
        user: UserId(row.text("user_id")?),
        graph: row.text("graph")?,
        step: StepId { run_id: row.id("run_id")?, seq: row.int("seq")? },
        status,
        answer: row.opt("answer", Columns::json)?,
        approved_hash: row.opt("approved_hash", Columns::text)?,
        answered_by: row.opt("answered_by", Columns::text)?,
        comment: row.opt("comment", Columns::text)?,
        created_at: row.time("created_at")?,
        expires_at,
        answered_at: row.opt("answered_at", Columns::time)?,
    })
}

/// Asks the questions of a pause.
pub(super) async fn ask(
    db: &mut SqliteConnection,
    thread: &Thread,
    step: StepId,
    node: &str,
    questions: &[Question],
    now: Time,
) -> Answer<()> {
    for (place, question) in (1_i64..).zip(questions) {
        let call = question.call.as_ref();
        sqlx::query(
            "insert into interrupt (id, thread_key, tenant, user_id, graph, run_id, seq, place, key, node, kind,
                                    message_id, call_id, tool, question, on_expiry, created_at, expires_at)
             values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)",
        )
        .bind(&question.id)
        .bind(thread.key.0)
        .bind(thread.tenant.as_str())
        .bind(thread.user.as_str())
        .bind(&thread.graph)
        .bind(step.run_id.to_string())
        .bind(step.seq)
        .bind(place)
        .bind(&question.key)
        .bind(node)
        .bind(question.kind.as_str())
        .bind(call.map(|call| call.message_id.text.as_str()))
        .bind(call.map(|call| call.call_id.as_str()))
        .bind(call.map(|call| call.tool.as_str()))
        .bind(json_text(question))
        .bind(question.on_expiry.as_ref().map(json_text))
        .bind(micros(now) + place)
        .bind(question.expires_in.map(|time| micros(now) + span(time)))
        .execute(&mut *db)
        .await?;
    }
    Ok(())
}

/// Adds the questions of `run`'s pause to the view, in the order they were asked.
pub(super) async fn add_to_view(db: &mut SqliteConnection, run: RunId, view: &mut ThreadView, now: Time) -> Answer<()> {
    let rows =
        sqlx::query("select question, status, answer, expires_at from interrupt where run_id = ?1 order by seq, place")
            .bind(run.to_string())
            .fetch_all(db)
            .await?;
    for row in rows {
        let question = row.json("question")?;
        match row.word("status", InterruptStatus::parse)? {
            InterruptStatus::Open => {
                let is_expired = row.opt("expires_at", Columns::time)?.is_some_and(|expires_at| expires_at <= now);
                view.open.push(OpenQuestion { question, is_expired });
            }
            status => {
                let answer = row.opt("answer", Columns::json)?.unwrap_or(Json::Null);
                view.answered.push(AnsweredQuestion { question, status, answer });
            }
        }
    }
    Ok(())
}

/// Records answers, each with an audit entry.
pub(super) async fn answer(
    db: &mut SqliteConnection,
    thread: &Thread,
    open: &[OpenQuestion],
    answers: &[Answered],
    now: Time,
) -> Result<(), StoreError> {
    for answered in answers {
        let written = sqlx::query(
            "update interrupt set status = ?3, answer = ?4, approved_hash = ?5, answered_by = ?6, comment = ?7,
                    answered_at = ?8
              where id = ?1 and thread_key = ?2 and status = 'open'",
        )
        .bind(&answered.id)
        .bind(thread.key.0)
        .bind(answered.status.as_str())
        .bind(json_text(&answered.answer))
        .bind(&answered.approved_hash)
        .bind(&answered.by)
        .bind(&answered.comment)
        .bind(micros(now))
        .execute(&mut *db)
        .await
        .doing(ANSWERING)?;
        let question = open.iter().map(|open| &open.question).find(|question| question.id == answered.id);
        let (1, Some(question)) = (written.rows_affected(), question) else {
            let message = format!("question {} is not open", answered.id);
            return Err(StoreError::Corrupt { doing: ANSWERING, message });
        };
        close::audit(db, thread, &answered.by, answered.action, &answer_entry(question, answered), now).await?;
    }
    Ok(())
}

/// Cancels what the pause of `run` still asks; the results its calls get.
pub(super) async fn cancel(
    db: &mut SqliteConnection,
    thread: &Thread,
    run: RunId,
    who: &str,
    now: Time,
) -> Result<Vec<Message>, StoreError> {
    const DOING: &str = "cancel questions";
    let rows = sqlx::query("select question from interrupt where run_id = ?1 and status = 'open' order by seq, place")
        .bind(run.to_string())
        .fetch_all(&mut *db)
        .await
        .doing(DOING)?;
    let open = rows.iter().map(|row| row.json("question")).collect::<Answer<Vec<Question>>>().doing(DOING)?;
    sqlx::query(
        "update interrupt set status = 'cancelled', answered_by = ?2, answered_at = ?3
          where run_id = ?1 and status = 'open'",
    )
    .bind(run.to_string())
    .bind(who)
    .bind(micros(now))
    .execute(&mut *db)
    .await
    .doing(DOING)?;
    for question in &open {
        close::audit(db, thread, who, "cancel", &cancel_entry(question), now).await?;
    }
    Ok(denied_by_stop(&open))
}

/// Whether the thread has open questions.
pub(super) async fn is_asking(db: &mut SqliteConnection, thread: ThreadKey) -> Answer<bool> {
    let row = sqlx::query("select 1 from interrupt where thread_key = ?1 and status = 'open' limit 1")
        .bind(thread.0)
        .fetch_optional(db)
        .await?;
    Ok(row.is_some())
}
