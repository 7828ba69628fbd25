//! The ledger of tool calls: facts are read and rows written under the step's lock.

use async_trait::async_trait;
use sqlx::{FromRow, Postgres, Transaction};
use uuid::Uuid;

use super::PgStore;
use super::error::{Doing, corrupt, repeated};
use super::rows::{parsed, text_of};
use crate::domain::{CallResult, CallStatus, Effect, LeaseToken, MessageId, RunId, Scope, StepId, ThreadId};
use crate::store::ledger::{self, Entry, Facts};
use crate::store::{Begun, CallKey, Finished, Intent, Ledger, StoreError, Time, ToolExecution};

const BEGINNING: &str = "write down tool calls";
const FINISHING: &str = "store a tool's result";
const READING: &str = "read the ledger of tool calls";

/// The columns of a [`Row`]; `c` is the call.
macro_rules! columns {
    () => {
        "c.message_id, c.call_id, c.id_is_int, c.tool, c.arguments_hash, c.effect, c.status::text as status, c.token,
         c.lease, c.run_id, c.seq, c.attempt, c.approval, c.result::text as result, c.deadline, c.started_at,
         c.finished_at"
    };
}
#[async_trait]
impl Ledger for PgStore {
    async fn begin_calls(&self, step: StepId, lease: LeaseToken, intents: &[Intent]) -> Result<Vec<Begun>, StoreError> {
        repeated!(self.begin_once(step, lease, intents))
    }

    async fn finish_call(&self, key: &CallKey, token: LeaseToken, result: &CallResult) -> Result<Finished, StoreError> {
        repeated!(self.finish_once(key, token, result))
    }

    async fn calls(&self, scope: &Scope, thread: &ThreadId) -> Result<Vec<ToolExecution>, StoreError> {
        let rows: Vec<Row> = repeated!(async {
            sqlx::query_as(concat!(
                "select ",
                columns!(),
                " from tool_execution c join thread t on t.key = c.thread_key
                 where t.tenant = $1 and t.id = $2 and ($3::text is null or t.user_id = $3) order by c.place"
            ))
            .bind(scope.tenant.as_str())
            .bind(thread.as_str())
            .bind(scope.owner.as_ref().map(|owner| owner.as_str()))
            .fetch_all(&self.pool)
            .await
            .doing(READING)
        })?;
        rows.into_iter().map(|row| Ok(row.entry()?.row)).collect()
    }
}

impl PgStore {
    async fn begin_once(&self, step: StepId, lease: LeaseToken, intents: &[Intent]) -> Result<Vec<Begun>, StoreError> {
        let mut tx = self.begin(BEGINNING).await?;
        let held: Option<(i64, Time)> = sqlx::query_as(
            "select thread_key, clock_timestamp() from step
              where run_id = $1 and seq = $2 and token = $3 and status = 'leased' for no key update",
        )
        .bind(step.run_id.0)
        .bind(step.seq)
        .bind(lease.0)
        .fetch_optional(&mut *tx)
        .await
        .doing(BEGINNING)?;
        let Some((thread, now)) = held else { return Ok(vec![Begun::LeaseLost; intents.len()]) };
        let mut begun = Vec::with_capacity(intents.len());
        for (intent, known) in intents.iter().zip(known(&mut tx, thread, intents).await?) {
            let found = known.row.map(Row::entry).transpose()?;
            let is_later = |asked_at: Time| {
                found.as_ref().and_then(|entry| entry.row.started_at).is_none_or(|started| asked_at >= started)
            };
            let is_decided = known.decided_at.is_some_and(is_later);
            let facts = Facts { step, lease, approval: known.approval, is_decided, now };
            let (answer, entry) = ledger::decide(found.as_ref(), intent, &facts);
            if let Some(entry) = entry {
                write(&mut tx, thread, &entry).await?;
            }
            begun.push(answer);
        }
        tx.commit().await.doing(BEGINNING)?;
        Ok(begun)
    }

    async fn finish_once(&self, key: &CallKey, token: LeaseToken, result: &CallResult) -> Result<Finished, StoreError> {
        let mut tx = self.begin(FINISHING).await?;
        let row: Option<Row> = sqlx::query_as(concat!(
            "select ",
            columns!(),
            " from tool_execution c where thread_key = $1 and message_id = $2 and call_id = $3 for no key update"
        ))
        .bind(key.thread.0)
        .bind(&key.message_id.text)
        .bind(&key.call_id)
        .fetch_optional(&mut *tx)
        .await
        .doing(FINISHING)?;
        let found = row.map(Row::entry).transpose()?;
        let now: Time = sqlx::query_scalar("select clock_timestamp()").fetch_one(&mut *tx).await.doing(FINISHING)?;
        let (finished, entry) = ledger::finish(found.as_ref(), token, result, now);
        if let Some(entry) = entry {
            write(&mut tx, key.thread.0, &entry).await?;
            tx.commit().await.doing(FINISHING)?;
        }
        Ok(finished)
    }
}

/// What is known of an intent.
struct Known {
    row: Option<Row>,
    approval: Option<String>,
    /// When the newest question about its outcome was asked that was answered.
    decided_at: Option<Time>,
}

/// In the order of `intents`; rows of the ledger are locked, for their results come without the lease.
async fn known(tx: &mut Transaction<'_, Postgres>, thread: i64, intents: &[Intent]) -> Result<Vec<Known>, StoreError> {
    let messages: Vec<&str> = intents.iter().map(|intent| intent.call.message_id.text.as_str()).collect();
    let calls: Vec<&str> = intents.iter().map(|intent| intent.call.call_id.as_str()).collect();
    let hashes: Vec<&str> = intents.iter().map(|intent| intent.call.arguments_hash.as_str()).collect();
    let rows: Vec<Row> = sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from tool_execution c join unnest($2::text[], $3::text[]) as u (message_id, call_id)
            on c.message_id = u.message_id and c.call_id = u.call_id
         where c.thread_key = $1 order by c.message_id, c.call_id for no key update of c"
    ))
    .bind(thread)
    .bind(&messages)
    .bind(&calls)
    .fetch_all(&mut **tx)
    .await
    .doing(BEGINNING)?;
    let questions: Vec<(Option<String>, Option<Time>)> = sqlx::query_as(
        "select (select i.id from interrupt i
                  where i.thread_key = $1 and i.message_id = u.message_id and i.call_id = u.call_id and i.kind = 'gate'
                    and i.approved_hash = u.hash order by i.answered_at desc limit 1),
                (select i.created_at from interrupt i
                  where i.thread_key = $1 and i.message_id = u.message_id and i.call_id = u.call_id
                    and i.kind = 'outcome' and i.status in ('answered', 'expired')
                  order by i.created_at desc limit 1)
           from unnest($2::text[], $3::text[], $4::text[]) with ordinality as u (message_id, call_id, hash, i)
          order by u.i",
    )
    .bind(thread)
    .bind(&messages)
    .bind(&calls)
    .bind(hashes)
    .fetch_all(&mut **tx)
    .await
    .doing(BEGINNING)?;
    let mut rows: Vec<Option<Row>> = rows.into_iter().map(Some).collect();
    let mut take = |intent: &Intent| {
        let is_its = |row: &Option<Row>| {
            row.as_ref()
                .is_some_and(|row| row.message_id == intent.call.message_id.text && row.call_id == intent.call.call_id)
        };
        rows.iter().position(is_its).and_then(|index| rows[index].take())
    };
    let known = intents.iter().zip(questions);
    Ok(known.map(|(intent, (approval, decided_at))| Known { row: take(intent), approval, decided_at }).collect())
}

async fn write(tx: &mut Transaction<'_, Postgres>, thread: i64, entry: &Entry) -> Result<(), StoreError> {
    let row = &entry.row;
    sqlx::query(
        "insert into tool_execution (thread_key, message_id, call_id, id_is_int, tool, arguments_hash, effect, status,
                                     token, lease, run_id, seq, attempt, approval, result, deadline, started_at,
                                     finished_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8::call_status, $9, $10, $11, $12, $13, $14, $15::json, $16, $17, $18)
         on conflict (thread_key, message_id, call_id) do update
            set tool = excluded.tool, arguments_hash = excluded.arguments_hash, effect = excluded.effect,
                status = excluded.status, token = excluded.token, lease = excluded.lease, run_id = excluded.run_id,
                seq = excluded.seq, attempt = excluded.attempt, approval = excluded.approval, result = excluded.result,
                deadline = excluded.deadline, started_at = excluded.started_at, finished_at = excluded.finished_at",
    )
    .bind(thread)
    .bind(&row.message_id.text)
    .bind(&row.call_id)
    .bind(row.message_id.is_int)
    .bind(&row.tool)
    .bind(&row.arguments_hash)
    .bind(row.effect.as_str())
    .bind(row.status.as_str())
    .bind(entry.token.0)
    .bind(entry.lease.0)
    .bind(row.step.run_id.0)
    .bind(row.step.seq)
    .bind(row.attempt)
    .bind(&row.approval)
    .bind(row.result.as_ref().map(|result| text_of(&result.output)))
    .bind(row.deadline)
    .bind(row.started_at)
    .bind(row.finished_at)
    .execute(&mut **tx)
    .await
    .doing(BEGINNING)?;
    Ok(())
}

#[derive(FromRow)]
struct Row {
    message_id: String,
    call_id: String,
    id_is_int: bool,
    tool: String,
    arguments_hash: String,
    effect: String,
    status: String,
    token: Uuid,
    lease: Uuid,
    run_id: Uuid,
    seq: i32,
    attempt: i16,
    approval: Option<String>,
    result: Option<String>,
    deadline: Option<Time>,
    started_at: Option<Time>,
    finished_at: Option<Time>,
}

impl Row {
    fn entry(self) -> Result<Entry, StoreError> {
        let unknown = |what: &str| corrupt(READING, format!("'{what}' is neither an effect nor a status of calls"));
        let status = CallStatus::parse(&self.status).ok_or_else(|| unknown(&self.status))?;
        let output = self.result.map(|result| parsed(&result, READING)).transpose()?;
        let row = ToolExecution {
            message_id: MessageId { text: self.message_id, is_int: self.id_is_int },
            call_id: self.call_id,
            tool: self.tool,
            arguments_hash: self.arguments_hash,
            effect: Effect::parse(&self.effect).ok_or_else(|| unknown(&self.effect))?,
            status,
            result: output.map(|output| CallResult { status, output }),
            step: StepId { run_id: RunId(self.run_id), seq: self.seq },
            attempt: self.attempt,
            approval: self.approval,
            deadline: self.deadline,
            started_at: self.started_at,
            finished_at: self.finished_at,
        };
        Ok(Entry { row, token: LeaseToken(self.token), lease: LeaseToken(self.lease) })
    }
}
