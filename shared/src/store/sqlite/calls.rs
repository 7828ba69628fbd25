//! The ledger of tool calls.

use async_trait::async_trait;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::row::{Answer, Columns, Doing, json_text, micros, now};
use super::run::Step;
use super::{Promise, SqliteStore};
use crate::domain::{
    CallRef, CallResult, CallStatus, Effect, LeaseToken, MessageId, Scope, StepId, ThreadId, ThreadKey,
};
use crate::store::ledger::{self, Entry, Facts};
use crate::store::{Begun, CallKey, Finished, Intent, Ledger, StoreError, Time, ToolExecution, Wish};

#[async_trait]
impl Ledger for SqliteStore {
    async fn begin_calls(&self, step: StepId, lease: LeaseToken, intents: &[Intent]) -> Result<Vec<Begun>, StoreError> {
        const DOING: &str = "write down tool calls";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let held = Step::find(&mut tx, step).await.doing(DOING)?.filter(|step| step.is_held_by(lease));
        let Some(held) = held else { return Ok(vec![Begun::LeaseLost; intents.len()]) };
        let mut begun = Vec::with_capacity(intents.len());
        for intent in intents {
            begun.push(begin(&mut tx, held.thread_key, (step, lease), intent, now()).await.doing(DOING)?);
        }
        tx.commit().await.doing(DOING)?;
        Ok(begun)
    }

    async fn finish_call(&self, key: &CallKey, token: LeaseToken, result: &CallResult) -> Result<Finished, StoreError> {
        const DOING: &str = "store a tool's result";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let found = find(&mut tx, key.thread, &key.message_id, &key.call_id).await.doing(DOING)?;
        let (finished, entry) = ledger::finish(found.as_ref(), token, result, now());
        if let Some(entry) = entry {
            write(&mut tx, key.thread, &entry, now()).await.doing(DOING)?;
            tx.commit().await.doing(DOING)?;
        }
        Ok(finished)
    }

    async fn calls(&self, scope: &Scope, thread: &ThreadId) -> Result<Vec<ToolExecution>, StoreError> {
        const DOING: &str = "read the ledger of tool calls";
        let rows = sqlx::query(
            "select c.* from tool_execution c join thread t on t.key = c.thread_key
              where t.tenant = ?1 and t.id = ?2 and (?3 is null or t.user_id = ?3) order by c.rowid",
        )
        .bind(scope.tenant.as_str())
        .bind(thread.as_str())
        .bind(scope.owner.as_ref().map(|owner| owner.as_str()))
        .fetch_all(&mut *self.reader(DOING).await?)
        .await
        .doing(DOING)?;
        rows.iter().map(|row| Ok(entry(row)?.row)).collect::<Answer<_>>().doing(DOING)
    }
}

async fn begin(
    db: &mut SqliteConnection,
    thread: ThreadKey,
    (step, lease): (StepId, LeaseToken),
    intent: &Intent,
    now: Time,
) -> Answer<Begun> {
    let call = &intent.call;
    let found = find(db, thread, &call.message_id, &call.call_id).await?;
    let approval = approval(db, thread, call).await?;
    let decided_at = match &intent.wish {
        Wish::Decided(_) => decided_at(db, thread, call).await?,
        Wish::Run | Wish::Record(_) => None,
    };
    let started_at = found.as_ref().and_then(|entry| entry.row.started_at);
    let is_decided = decided_at.is_some_and(|asked_at| started_at.is_none_or(|started| asked_at >= started));
    let facts = Facts { step, lease, approval, is_decided, now };
    let (begun, entry) = ledger::decide(found.as_ref(), intent, &facts);
    if let Some(entry) = entry {
        write(db, thread, &entry, now).await?;
    }
    Ok(begun)
}

async fn find(db: &mut SqliteConnection, thread: ThreadKey, message: &MessageId, call: &str) -> Answer<Option<Entry>> {
    let row = sqlx::query("select * from tool_execution where thread_key = ?1 and message_id = ?2 and call_id = ?3")
        .bind(thread.0)
        .bind(&message.text)
        .bind(call)
        .fetch_optional(db)
        .await?;
    row.as_ref().map(entry).transpose()
}

/// The question that approved this very call with these very arguments.
async fn approval(db: &mut SqliteConnection, thread: ThreadKey, call: &CallRef) -> Answer<Option<String>> {
    let row = sqlx::query(
        "select id from interrupt
          where thread_key = ?1 and message_id = ?2 and call_id = ?3 and kind = 'gate' and approved_hash = ?4
          order by answered_at desc limit 1",
    )
    .bind(thread.0)
    .bind(&call.message_id.text)
    .bind(&call.call_id)
    .bind(&call.arguments_hash)
    .fetch_optional(db)
    .await?;
    row.map(|row| row.text("id")).transpose()
}

/// When the newest question was asked whose answer decided about this call.
async fn decided_at(db: &mut SqliteConnection, thread: ThreadKey, call: &CallRef) -> Answer<Option<Time>> {
    let row = sqlx::query(
        "select created_at from interrupt
          where thread_key = ?1 and message_id = ?2 and call_id = ?3 and kind = 'outcome'
            and status in ('answered', 'expired')
          order by created_at desc limit 1",
    )
    .bind(thread.0)
    .bind(&call.message_id.text)
    .bind(&call.call_id)
    .fetch_optional(db)
    .await?;
    row.map(|row| row.time("created_at")).transpose()
}

async fn write(db: &mut SqliteConnection, thread: ThreadKey, entry: &Entry, now: Time) -> Answer<()> {
    let row = &entry.row;
    sqlx::query(
        "insert into tool_execution (thread_key, message_id, call_id, id_is_int, tool, arguments_hash, effect, status,
                                     token, lease, run_id, seq, attempt, approval, result, deadline, started_at,
                                     created_at, finished_at)
         values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19)
         on conflict (thread_key, message_id, call_id) do update
            set tool = excluded.tool, arguments_hash = excluded.arguments_hash, effect = excluded.effect,
                status = excluded.status, token = excluded.token, lease = excluded.lease, run_id = excluded.run_id,
                seq = excluded.seq, attempt = excluded.attempt, approval = excluded.approval, result = excluded.result,
                deadline = excluded.deadline, started_at = excluded.started_at, finished_at = excluded.finished_at",
    )
    .bind(thread.0)
    .bind(&row.message_id.text)
    .bind(&row.call_id)
    .bind(row.message_id.is_int)
    .bind(&row.tool)
    .bind(&row.arguments_hash)
    .bind(row.effect.as_str())
    .bind(row.status.as_str())
    .bind(entry.token.to_string())
    .bind(entry.lease.to_string())
    .bind(row.step.run_id.to_string())
    .bind(row.step.seq)
    .bind(row.attempt)
    .bind(&row.approval)
    .bind(row.result.as_ref().map(|result| json_text(&result.output)))
    .bind(row.deadline.map(micros))
    .bind(row.started_at.map(micros))
    .bind(micros(now))
    .bind(row.finished_at.map(micros))
    .execute(db)
    .await
    .map(drop)
}

fn entry(row: &SqliteRow) -> Answer<Entry> {
    let status = row.word("status", CallStatus::parse)?;
    let output = row.opt("result", Columns::json)?;
    let shown = ToolExecution {
        message_id: MessageId { text: row.text("message_id")?, is_int: row.flag("id_is_int")? },
        call_id: row.text("call_id")?,
        tool: row.text("tool")?,
        arguments_hash: row.text("arguments_hash")?,
        effect: row.word("effect", Effect::parse)?,
        status,
        result: output.map(|output| CallResult { status, output }),
        step: StepId { run_id: row.id("run_id")?, seq: row.int("seq")? },
        attempt: row.int("attempt")?,
        approval: row.opt("approval", Columns::text)?,
        deadline: row.opt("deadline", Columns::time)?,
        started_at: row.opt("started_at", Columns::time)?,
        finished_at: row.opt("finished_at", Columns::time)?,
    };
    Ok(Entry { row: shown, token: row.id("token")?, lease: row.id("lease")? })
}
