//! Edits by a client: only while no run is active, each as a version of its own.

use std::collections::{HashMap, HashSet};

use serde_json::json;
use sqlx::{Postgres, Transaction};

use super::PgStore;
use super::audit::Entry;
use super::error::Doing;
use super::interrupts;
use super::rows::{FieldColumns, MessageColumns, count, parsed, text_of};
use super::thread_lock::{self, LockedThread};
use super::threads::read_state;
use crate::domain::{Caller, ExecutionMeta, GraphVersion, Message, MessageId, Scope, ThreadId};
use crate::store::{PutMessages, StateEdit, StoreError, StoredState};

const DOING: &str = "edit a thread";

impl PgStore {
    pub(super) async fn edit_state_once(&self, edit: &StateEdit) -> Result<StoredState, StoreError> {
        let mut tx = self.begin(DOING).await?;
        let thread = thread_to_edit(&mut tx, &edit.caller, &edit.thread_id, (&edit.graph, &edit.graph_version)).await?;
        let messages = new_to_context(&mut tx, &thread, &edit.messages).await?;
        let version = new_version(&mut tx, &thread, &thread.meta()?, messages.len(), Some(true)).await?;
        let columns = MessageColumns::of(&messages);
        let fields = FieldColumns::of(&edit.fields);
        sqlx::query(
            "with m as (
               insert into message (thread_key, position, message_id, role, body, added_in, in_log)
               select $1, $3 + u.place - 1, u.id, u.role, u.body::json, $2, false
                 from unnest($4::text[], $5::text[], $6::text[]) with ordinality as u (id, role, body, place)
             )
             insert into field (thread_key, name, version, value)
             select $1, u.name, $2, u.value::json from unnest($7::text[], $8::text[]) as u (name, value)",
        )
        .bind(thread.key)
        .bind(version)
        .bind(thread.next_position)
        .bind(columns.ids)
        .bind(columns.roles)
        .bind(columns.bodies)
        .bind(fields.names)
        .bind(fields.values)
        .execute(&mut *tx)
        .await
        .doing(DOING)?;
        let state = read_state(&mut *tx, &edit.caller.scope(), &edit.thread_id, None).await?;
        tx.commit().await.doing(DOING)?;
        Ok(state.expect("the edit gave the thread a state"))
    }

    /// Rows of the context that the log has become rows of the log alone; the others go, and so do
    /// values and places. No version of the past can be read again.
    pub(super) async fn clear_state_once(&self, scope: &Scope, id: &ThreadId) -> Result<(), StoreError> {
        let mut tx = self.begin(DOING).await?;
        let Some(thread) = idle_thread(&mut tx, scope, id).await?.filter(|thread| thread.has_state) else {
            return Ok(());
        };
        new_version(&mut tx, &thread, &ExecutionMeta::fresh(id.as_str()), 0, Some(false)).await?;
        for clear in [
            "delete from message where thread_key = $1 and not in_log",
            "update message set removed_in = added_in where thread_key = $1 and removed_in is distinct from added_in",
            "delete from field where thread_key = $1",
            "delete from checkpoint where thread_key = $1",
            "delete from interrupt where thread_key = $1",
            "delete from tool_execution where thread_key = $1",
        ] {
            sqlx::query(clear).bind(thread.key).execute(&mut *tx).await.doing(DOING)?;
        }
        tx.commit().await.doing(DOING)
    }

    /// What only the context has joins the log where it stands; what neither has is a row of the log
    /// alone, removed in the version that adds it.
    pub(super) async fn put_messages_once(&self, put: &PutMessages) -> Result<(), StoreError> {
        let mut tx = self.begin(DOING).await?;
        let thread = thread_to_edit(&mut tx, &put.caller, &put.thread_id, (&put.graph, &put.graph_version)).await?;
        let version = new_version(&mut tx, &thread, &thread.meta()?, put.messages.len(), None).await?;
        let columns = MessageColumns::of(&distinct(&put.messages));
        sqlx::query(
            "with u as (
               select u.*, exists (select from message o where o.thread_key = $1 and o.message_id = u.id
                                      and o.removed_in is not null and o.in_log) as logged
                 from unnest($4::text[], $5::text[], $6::text[]) with ordinality as u (id, role, body, place)
             ), j as (
               update message m set in_log = true from u
                where m.thread_key = $1 and m.message_id = u.id and m.removed_in is null and not u.logged
               returning m.message_id
             )
             insert into message (thread_key, position, message_id, role, body, added_in, removed_in)
             select $1, $3 + u.place - 1, u.id, u.role, u.body::json, $2, $2 from u
              where not u.logged and u.id not in (select message_id from j)",
        )
        .bind(thread.key)
        .bind(version)
        .bind(thread.next_position)
        .bind(columns.ids)
        .bind(columns.roles)
        .bind(columns.bodies)
        .execute(&mut *tx)
        .await
        .doing(DOING)?;
        tx.commit().await.doing(DOING)
    }

    pub(super) async fn delete_message_once(
        &self,
        scope: &Scope,
        id: &ThreadId,
        message: &str,
    ) -> Result<bool, StoreError> {
        let mut tx = self.begin(DOING).await?;
        let Some(thread) = idle_thread(&mut tx, scope, id).await? else { return Ok(false) };
        let version = new_version(&mut tx, &thread, &thread.meta()?, 0, None).await?;
        let mut existed = 0;
        for delete in [
            "delete from message
              where thread_key = $1 and message_id = $2 and removed_in is not null and in_log and added_in = removed_in",
            "update message set in_log = false, removed_in = coalesce(removed_in, $3)
              where thread_key = $1 and message_id = $2 and removed_in is not null and in_log",
            "update message set in_log = false, removed_in = $3
              where thread_key = $1 and message_id = $2 and removed_in is null",
        ] {
            let done = sqlx::query(delete).bind(thread.key).bind(message).bind(version).execute(&mut *tx).await;
            existed += done.doing(DOING)?.rows_affected();
        }
        if existed > 0 {
            tx.commit().await.doing(DOING)?;
        }
        Ok(existed > 0)
    }

    pub(super) async fn fix_once(
        &self,
        scope: &Scope,
        id: &ThreadId,
        who: &str,
        choose: &(dyn for<'a> Fn(&'a [Message]) -> Vec<MessageId> + Send + Sync),
    ) -> Result<Option<(StoredState, usize)>, StoreError> {
        let mut tx = self.begin(DOING).await?;
        let Some(thread) = idle_thread(&mut tx, scope, id).await? else { return Ok(None) };
        let Some(before) = read_state(&mut *tx, scope, id, None).await? else { return Ok(None) };
        if interrupts::is_asking(&mut tx, &thread).await? {
            return Err(StoreError::Asked(id.clone()));
        }
        let chosen = choose(&before.context);
        let ids: Vec<&str> = chosen.iter().map(|id| id.text.as_str()).collect();
        let version = new_version(&mut tx, &thread, &before.meta, 0, None).await?;
        let removed = sqlx::query(
            "update message set removed_in = $2
              where thread_key = $1 and removed_in is null and message_id = any ($3::text[])",
        )
        .bind(thread.key)
        .bind(version)
        .bind(ids)
        .execute(&mut *tx)
        .await
        .doing(DOING)?
        .rows_affected();
        if removed > 0 {
            let detail = json!({ "removed": chosen });
            Entry { thread: &thread, run: None, who, action: "fix", detail }.write(&mut tx).await?;
            tx.commit().await.doing(DOING)?;
        }
        Ok(Some((before, usize::try_from(removed).unwrap_or(usize::MAX))))
    }

    pub(super) async fn delete_thread_once(&self, scope: &Scope, id: &ThreadId) -> Result<bool, StoreError> {
        let mut tx = self.begin(DOING).await?;
        let Some(thread) = idle_thread(&mut tx, scope, id).await? else { return Ok(false) };
        // Runs and messages go with the thread's row.
        for delete in [
            "delete from step_attempt a using run r where r.thread_key = $1 and a.run_id = r.id",
            "delete from step s using run r where r.thread_key = $1 and s.run_id = r.id",
            "delete from field where thread_key = $1",
            "delete from checkpoint where thread_key = $1",
            "delete from interrupt where thread_key = $1",
            "delete from tool_execution where thread_key = $1",
            "delete from thread where key = $1",
        ] {
            sqlx::query(delete).bind(thread.key).execute(&mut *tx).await.doing(DOING)?;
        }
        tx.commit().await.doing(DOING)?;
        Ok(true)
    }
}

/// The thread, locked, if `scope` sees it and no run is active.
async fn idle_thread(
    tx: &mut Transaction<'_, Postgres>,
    scope: &Scope,
    id: &ThreadId,
) -> Result<Option<LockedThread>, StoreError> {
    match thread_lock::lock(tx, scope, id).await?.and_then(|thread| thread.seen_by(scope)) {
        Some(thread) if thread.active_run.is_some() => Err(StoreError::Busy(id.clone())),
        thread => Ok(thread),
    }
}

/// The thread, locked; a new one is the caller's.
async fn thread_to_edit(
    tx: &mut Transaction<'_, Postgres>,
    caller: &Caller,
    id: &ThreadId,
    (graph, version): (&str, &GraphVersion),
) -> Result<LockedThread, StoreError> {
    let scope = caller.scope();
    if let Some(thread) = thread_lock::lock(tx, &scope, id).await? {
        let thread = thread.seen_by(&scope).ok_or_else(|| StoreError::NoSuchThread(id.clone()))?;
        return if thread.active_run.is_some() { Err(StoreError::Busy(id.clone())) } else { Ok(thread) };
    }
    sqlx::query(
        "insert into thread (tenant, id, user_id, graph, graph_version, execution_meta)
         values ($1, $2, $3, $4, $5, $6::json) on conflict (tenant, id) do nothing",
    )
    .bind(scope.tenant.as_str())
    .bind(id.as_str())
    .bind(caller.user.as_str())
    .bind(graph)
    .bind(version.as_str())
    .bind(text_of(&ExecutionMeta::fresh(id.as_str())))
    .execute(&mut **tx)
    .await
    .doing(DOING)?;
    // Ours, or somebody else's who was faster.
    let thread = idle_thread(tx, &scope, id).await?;
    thread.ok_or_else(|| StoreError::NoSuchThread(id.clone()))
}

/// Makes the next version, by a client: `added` positions are used; `state` says whether the thread
/// has one from now on.
pub(super) async fn new_version(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    meta: &ExecutionMeta,
    added: usize,
    state: Option<bool>,
) -> Result<i64, StoreError> {
    sqlx::query_scalar(
        "with t as (
           update thread
              set version = version + 1, next_position = next_position + $2, execution_meta = $3::json,
                  has_state = coalesce($4, has_state), updated_at = clock_timestamp()
            where key = $1
           returning key, version, next_position
         ), c as (
           insert into checkpoint (thread_key, version, node, execution_meta, next_position)
           select key, version, $5, $3::json, next_position from t
         )
         select version from t",
    )
    .bind(thread.key)
    .bind(i64::from(count(added)))
    .bind(text_of(meta))
    .bind(state)
    .bind(&meta.current_node)
    .fetch_one(&mut **tx)
    .await
    .doing(DOING)
}

/// Each id once, the first counts.
fn distinct(messages: &[Message]) -> Vec<Message> {
    let mut seen = HashSet::new();
    messages.iter().filter(|message| seen.insert(&message.message_id)).cloned().collect()
}

/// Those whose id is not in the context; one that the log has keeps its first body.
async fn new_to_context(
    tx: &mut Transaction<'_, Postgres>,
    thread: &LockedThread,
    messages: &[Message],
) -> Result<Vec<Message>, StoreError> {
    let ids: Vec<&str> = messages.iter().map(|message| message.message_id.text.as_str()).collect();
    let rows: Vec<(String, bool, String)> = sqlx::query_as(
        "select message_id, removed_in is null, body::text from message
          where thread_key = $1 and message_id = any ($2::text[]) and (removed_in is null or in_log)",
    )
    .bind(thread.key)
    .bind(ids)
    .fetch_all(&mut **tx)
    .await
    .doing(DOING)?;
    let living: HashSet<&str> = rows.iter().filter(|row| row.1).map(|row| row.0.as_str()).collect();
    let logged: HashMap<&str, &str> =
        rows.iter().filter(|row| !row.1).map(|row| (row.0.as_str(), row.2.as_str())).collect();
    let fresh = distinct(messages).into_iter().filter(|message| !living.contains(message.message_id.text.as_str()));
    fresh
        .map(|message| match logged.get(message.message_id.text.as_str()) {
            Some(body) => parsed(body, DOING),
            None => Ok(message),
        })
        .collect()
}
