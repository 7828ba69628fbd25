//! Threads as a client sees and edits them: between runs, each edit a version of its own.

use async_trait::async_trait;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::row::{Answer, Columns, Doing, now};
use super::search::{Reading, record_text};
use super::thread::{NewThread, Thread, ThreadStatus};
use super::{Promise, SqliteStore, close, commit, interrupts, load};
use crate::domain::{Caller, ExecutionMeta, GraphVersion, Message, MessageId, Scope, ThreadId, ThreadKey, UserId};
use crate::store::{Page, PutMessages, StateEdit, StoreError, StoredState, ThreadRecord, Threads, Time};

macro_rules! select_record {
    ($where:literal) => {
        concat!(
            "select t.id, t.name, t.user_id, t.graph, t.graph_version, t.meta, t.has_state, t.version, t.updated_at,
                    coalesce(r.client_run_id, t.last_run) as run_id
               from thread t left join run r on r.id = t.last_run ",
            $where
        )
    };
}

#[async_trait]
impl Threads for SqliteStore {
    async fn thread(&self, scope: &Scope, id: &ThreadId) -> Result<Option<ThreadRecord>, StoreError> {
        const DOING: &str = "read a thread";
        let row = sqlx::query(select_record!("where t.tenant = ?1 and (?2 is null or t.user_id = ?2) and t.id = ?3"))
            .bind(scope.tenant.as_str())
            .bind(owner(scope))
            .bind(id.as_str())
            .fetch_optional(&self.readers)
            .await
            .doing(DOING)?;
        row.as_ref().map(record).transpose().doing(DOING)
    }

    async fn threads(&self, scope: &Scope, search: Option<&str>, page: Page) -> Result<Vec<ThreadRecord>, StoreError> {
        const DOING: &str = "list threads";
        let page = Reading::new(search, page);
        let rows = sqlx::query(select_record!(
            "where t.tenant = ?1 and (?2 is null or t.user_id = ?2) order by t.key limit ?3 offset ?4"
        ))
        .bind(scope.tenant.as_str())
        .bind(owner(scope))
        .bind(page.sql_limit())
        .bind(page.sql_offset())
        .fetch(&self.readers);
        page.collect(rows, record, record_text).await.doing(DOING)
    }

    async fn delete_thread(&self, scope: &Scope, id: &ThreadId) -> Result<bool, StoreError> {
        const DOING: &str = "delete a thread";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let Some(thread) = idle(&mut tx, scope, id, DOING).await? else {
            return Ok(false);
        };
        delete_all(&mut tx, thread.key).await.doing(DOING)?;
        tx.commit().await.doing(DOING)?;
        Ok(true)
    }

    async fn state(
        &self,
        scope: &Scope,
        id: &ThreadId,
        version: Option<i64>,
    ) -> Result<Option<StoredState>, StoreError> {
        const DOING: &str = "read a thread's state";
        load::state(&mut *self.snapshot(DOING).await?, scope, id, version).await.doing(DOING)
    }

    async fn edit_state(&self, scope: &Scope, edit: StateEdit) -> Result<StoredState, StoreError> {
        const DOING: &str = "edit a thread's state";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let now = now();
        let target =
            Target { id: &edit.thread_id, caller: &edit.caller, graph: &edit.graph, version: &edit.graph_version };
        let mut thread = idle_or_new(&mut tx, scope, &target, now, DOING).await?;
        thread.has_state = true;
        thread.version += 1;
        thread.append_context(&mut tx, &edit.messages, false).await.doing(DOING)?;
        thread.write_fields(&mut tx, &edit.fields).await.doing(DOING)?;
        finish_edit(&mut tx, &thread, now).await.doing(DOING)?;
        let state = load::state_of(&mut tx, &thread).await.doing(DOING)?;
        tx.commit().await.doing(DOING)?;
        Ok(state)
    }

    async fn clear_state(&self, scope: &Scope, id: &ThreadId) -> Result<(), StoreError> {
        const DOING: &str = "clear a thread's state";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let thread = idle(&mut tx, scope, id, DOING).await?.filter(|thread| thread.has_state);
        let Some(mut thread) = thread else {
            return Ok(());
        };
        delete_state(&mut tx, thread.key).await.doing(DOING)?;
        thread.version += 1;
        thread.meta = ExecutionMeta::fresh(thread.id.as_str());
        thread.status = ThreadStatus::Idle;
        thread.has_state = false;
        finish_edit(&mut tx, &thread, now()).await.doing(DOING)?;
        tx.commit().await.doing(DOING)
    }

    async fn messages(
        &self,
        scope: &Scope,
        id: &ThreadId,
        search: Option<&str>,
        page: Page,
    ) -> Result<Vec<Message>, StoreError> {
        const DOING: &str = "read the message log";
        let mut tx = self.snapshot(DOING).await?;
        let Some(thread) = Thread::in_scope(&mut tx, scope, id).await.doing(DOING)? else {
            return Ok(Vec::new());
        };
        let page = Reading::new(search, page);
        let rows = sqlx::query(
            "select body from message where thread_key = ?1 and in_log = 1 order by position limit ?2 offset ?3",
        )
        .bind(thread.key.0)
        .bind(page.sql_limit())
        .bind(page.sql_offset())
        .fetch(&mut *tx);
        page.collect(rows, |row| row.json("body"), Message::plain_text).await.doing(DOING)
    }

    async fn message(&self, scope: &Scope, id: &ThreadId, message: &str) -> Result<Option<Message>, StoreError> {
        const DOING: &str = "read a message";
        let mut tx = self.snapshot(DOING).await?;
        let Some(thread) = Thread::in_scope(&mut tx, scope, id).await.doing(DOING)? else {
            return Ok(None);
        };
        let row = sqlx::query("select body from message where thread_key = ?1 and message_id = ?2 and in_log = 1")
            .bind(thread.key.0)
            .bind(message)
            .fetch_optional(&mut *tx)
            .await
            .doing(DOING)?;
        row.map(|row| row.json("body")).transpose().doing(DOING)
    }

    async fn put_messages(&self, scope: &Scope, put: PutMessages) -> Result<(), StoreError> {
        const DOING: &str = "add messages to the log";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let now = now();
        let target = Target { id: &put.thread_id, caller: &put.caller, graph: &put.graph, version: &put.graph_version };
        let mut thread = idle_or_new(&mut tx, scope, &target, now, DOING).await?;
        thread.version += 1;
        thread.append_log(&mut tx, &put.messages).await.doing(DOING)?;
        finish_edit(&mut tx, &thread, now).await.doing(DOING)?;
        tx.commit().await.doing(DOING)
    }

    async fn delete_message(&self, scope: &Scope, id: &ThreadId, message: &str) -> Result<bool, StoreError> {
        const DOING: &str = "delete a message";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let Some(mut thread) = idle(&mut tx, scope, id, DOING).await? else {
            return Ok(false);
        };
        thread.version += 1;
        let left = leave_context(&mut tx, &thread, message).await.doing(DOING)?;
        let unlogged = commit::unlog(&mut tx, &thread, message).await.doing(DOING)?;
        if left + unlogged == 0 {
            return Ok(false);
        }
        finish_edit(&mut tx, &thread, now()).await.doing(DOING)?;
        tx.commit().await.doing(DOING)?;
        Ok(true)
    }

    async fn fix(
        &self,
        scope: &Scope,
        id: &ThreadId,
        who: &str,
        choose: &(dyn for<'a> Fn(&'a [Message]) -> Vec<MessageId> + Send + Sync),
    ) -> Result<Option<(StoredState, usize)>, StoreError> {
        const DOING: &str = "fix a thread";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let thread = idle(&mut tx, scope, id, DOING).await?.filter(|thread| thread.has_state);
        let Some(mut thread) = thread else {
            return Ok(None);
        };
        let before = load::state_of(&mut tx, &thread).await.doing(DOING)?;
        if interrupts::is_asking(&mut tx, thread.key).await.doing(DOING)? {
            return Err(StoreError::Asked(id.clone()));
        }
        thread.version += 1;
        let mut gone = Vec::new();
        for message in choose(&before.context) {
            if leave_context(&mut tx, &thread, &message.text).await.doing(DOING)? > 0 {
                gone.push(message.text);
            }
        }
        if gone.is_empty() {
            return Ok(Some((before, 0)));
        }
        let now = now();
        finish_edit(&mut tx, &thread, now).await.doing(DOING)?;
        close::audit(&mut tx, &thread, who, "fix", &serde_json::json!({"removed": gone}), now).await?;
        tx.commit().await.doing(DOING)?;
        Ok(Some((before, gone.len())))
    }
}

/// The thread an edit is about, and what it becomes if it is new.
struct Target<'a> {
    id: &'a ThreadId,
    caller: &'a Caller,
    graph: &'a str,
    version: &'a GraphVersion,
}

/// The thread, if the scope sees it; it must not have an active run.
async fn idle(
    db: &mut SqliteConnection,
    scope: &Scope,
    id: &ThreadId,
    doing: &'static str,
) -> Result<Option<Thread>, StoreError> {
    let thread = Thread::in_scope(db, scope, id).await.doing(doing)?;
    match thread {
        Some(thread) if thread.active_run.is_some() => Err(StoreError::Busy(thread.id)),
        thread => Ok(thread),
    }
}

async fn idle_or_new(
    db: &mut SqliteConnection,
    scope: &Scope,
    target: &Target<'_>,
    now: Time,
    doing: &'static str,
) -> Result<Thread, StoreError> {
    match Thread::find(db, &scope.tenant, target.id).await.doing(doing)? {
        Some(thread) if !thread.is_visible(scope) => Err(StoreError::NoSuchThread(thread.id)),
        Some(thread) if thread.active_run.is_some() => Err(StoreError::Busy(thread.id)),
        Some(thread) => Ok(thread),
        None => {
            let new = NewThread {
                tenant: &scope.tenant,
                id: target.id,
                user: &target.caller.user,
                name: None,
                meta: None,
                graph: target.graph,
                graph_version: target.version,
            };
            Thread::insert(db, &new, now).await.doing(doing)
        }
    }
}

async fn finish_edit(db: &mut SqliteConnection, thread: &Thread, now: Time) -> Answer<()> {
    thread.checkpoint(db, None, &thread.meta.current_node, now).await?;
    thread.save(db, now).await
}

/// Takes a message out of the context in the thread's current version; the log keeps it.
async fn leave_context(db: &mut SqliteConnection, thread: &Thread, message_id: &str) -> Answer<u64> {
    sqlx::query(
        "update message set removed_in = ?3
          where thread_key = ?1 and message_id = ?2 and in_context = 1 and removed_in is null",
    )
    .bind(thread.key.0)
    .bind(message_id)
    .bind(thread.version)
    .execute(db)
    .await
    .map(|done| done.rows_affected())
}

/// Fields, history and context; the log stays, and its ids may come back into a context.
async fn delete_state(db: &mut SqliteConnection, key: ThreadKey) -> Answer<()> {
    const STATEMENTS: [&str; 6] = [
        "delete from interrupt where thread_key = ?1",
        "delete from tool_execution where thread_key = ?1",
        "delete from field where thread_key = ?1",
        "delete from checkpoint where thread_key = ?1",
        "delete from message where thread_key = ?1 and in_log = 0",
        "update message set in_context = 0, removed_in = null where thread_key = ?1 and in_context = 1",
    ];
    for statement in STATEMENTS {
        sqlx::query(statement).bind(key.0).execute(&mut *db).await?;
    }
    Ok(())
}

/// The thread with all that belongs to it; messages and runs go with its row. The audit stays.
async fn delete_all(db: &mut SqliteConnection, key: ThreadKey) -> Answer<()> {
    const STATEMENTS: [&str; 6] = [
        "delete from step_attempt where run_id in (select id from run where thread_key = ?1)",
        "delete from step where run_id in (select id from run where thread_key = ?1)",
        "delete from idempotency where run_id in (select id from run where thread_key = ?1)",
        "delete from field where thread_key = ?1",
        "delete from checkpoint where thread_key = ?1",
        "delete from thread where key = ?1",
    ];
    for statement in STATEMENTS {
        sqlx::query(statement).bind(key.0).execute(&mut *db).await?;
    }
    Ok(())
}

fn owner(scope: &Scope) -> Option<&str> {
    scope.owner.as_ref().map(|owner| owner.as_str())
}

fn record(row: &SqliteRow) -> Answer<ThreadRecord> {
    Ok(ThreadRecord {
        id: ThreadId(row.text("id")?),
        name: row.opt("name", Columns::text)?,
        user: UserId(row.text("user_id")?),
        graph: row.text("graph")?,
        graph_version: GraphVersion(row.text("graph_version")?),
        meta: row.opt("meta", Columns::json)?,
        run_id: row.opt("run_id", Columns::text)?,
        has_state: row.flag("has_state")?,
        version: row.int("version")?,
        updated_at: row.time("updated_at")?,
    })
}
