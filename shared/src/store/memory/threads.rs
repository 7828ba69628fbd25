//! Threads as a client sees them.

use async_trait::async_trait;

use super::create::{insert_thread, is_owner};
use super::tables::{MessageRow, Tables, ThreadRow};
use super::{MemoryStore, Operation};
use crate::domain::{Caller, ExecutionMeta, GraphVersion, Message, MessageId, Scope, ThreadId};
use crate::store::{Page, PutMessages, StateEdit, StoreError, StoredState, ThreadRecord, Threads, Time};

#[async_trait]
impl Threads for MemoryStore {
    async fn thread(&self, scope: &Scope, id: &ThreadId) -> Result<Option<ThreadRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let Some(key) = tables.visible_thread(scope, id).map(|thread| thread.key) else { return Ok(None) };
            Ok(Some(tables.thread_record(&tables.threads[&key])))
        })
        .await
    }

    async fn threads(&self, scope: &Scope, search: Option<&str>, page: Page) -> Result<Vec<ThreadRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let visible = tables.threads.values().filter(|thread| thread.is_visible_to(scope));
            let records = visible.map(|thread| tables.thread_record(thread));
            Ok(page.of(records.filter(|record| search.is_none_or(|text| record_has(record, text)))))
        })
        .await
    }

    async fn delete_thread(&self, scope: &Scope, id: &ThreadId) -> Result<bool, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let Some(key) = tables.idle_thread(scope, id)?.map(|thread| thread.key) else { return Ok(false) };
            tables.threads.remove(&key);
            tables.thread_ids.retain(|_, other| *other != key);
            tables.steps.retain(|_, step| step.thread != key);
            tables.runs.retain(|_, run| run.thread_key != key);
            tables.audit.retain(|(thread, _)| *thread != key);
            tables.forget_questions(key);
            Ok(true)
        })
        .await
    }

    async fn state(
        &self,
        scope: &Scope,
        id: &ThreadId,
        version: Option<i64>,
    ) -> Result<Option<StoredState>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let thread = tables.visible_thread(scope, id).filter(|thread| thread.has_state);
            Ok(thread.and_then(|thread| thread.state_at(version.unwrap_or(thread.version))))
        })
        .await
    }

    async fn edit_state(&self, scope: &Scope, edit: StateEdit) -> Result<StoredState, StoreError> {
        self.transact(Operation::Other, |tables, now| {
            let graph = (edit.graph.as_str(), &edit.graph_version);
            let thread = tables.thread_to_edit(scope, &edit.thread_id, &edit.caller, graph, now)?;
            let version = thread.edited(thread.meta.clone(), now);
            thread.has_state = true;
            thread.add_to_context(&edit.messages, false, version);
            thread.write_fields(&edit.fields, version);
            Ok(thread.state_at(version).expect("it was just written"))
        })
        .await
    }

    async fn clear_state(&self, scope: &Scope, id: &ThreadId) -> Result<(), StoreError> {
        self.transact(Operation::Other, |tables, now| {
            let Some(thread) = tables.idle_thread(scope, id)?.filter(|thread| thread.has_state) else { return Ok(()) };
            let meta = ExecutionMeta::fresh(id.as_str());
            let version = thread.edited(meta, now);
            thread.messages.iter_mut().filter(|row| row.is_in_context()).for_each(|row| row.removed_in = Some(version));
            thread.floor = version;
            thread.has_state = false;
            let key = thread.key;
            tables.forget_questions(key);
            Ok(())
        })
        .await
    }

    async fn messages(
        &self,
        scope: &Scope,
        id: &ThreadId,
        search: Option<&str>,
        page: Page,
    ) -> Result<Vec<Message>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let Some(thread) = tables.visible_thread(scope, id) else { return Ok(Vec::new()) };
            let log = thread.log().map(|row| &row.message);
            let found = log.filter(|message| search.is_none_or(|text| has(&message.plain_text(), text)));
            Ok(page.of(found.cloned()))
        })
        .await
    }

    async fn message(&self, scope: &Scope, id: &ThreadId, message: &str) -> Result<Option<Message>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let Some(thread) = tables.visible_thread(scope, id) else { return Ok(None) };
            let found = thread.log().find(|row| row.id().text == message);
            Ok(found.map(|row| row.message.clone()))
        })
        .await
    }

    async fn put_messages(&self, scope: &Scope, put: PutMessages) -> Result<(), StoreError> {
        self.transact(Operation::Other, |tables, now| {
            let graph = (put.graph.as_str(), &put.graph_version);
            let thread = tables.thread_to_edit(scope, &put.thread_id, &put.caller, graph, now)?;
            let version = thread.edited(thread.meta.clone(), now);
            thread.add_to_log(&put.messages, true, version);
            Ok(())
        })
        .await
    }

    async fn delete_message(&self, scope: &Scope, id: &ThreadId, message: &str) -> Result<bool, StoreError> {
        self.transact(Operation::Other, |tables, now| {
            let Some(thread) = tables.idle_thread(scope, id)? else { return Ok(false) };
            let living = |row: &MessageRow| (row.is_in_context() || row.in_log) && row.id().text == message;
            if !thread.messages.iter().any(living) {
                return Ok(false);
            }
            let version = thread.edited(thread.meta.clone(), now);
            for row in thread.messages.iter_mut().filter(|row| living(row)) {
                row.removed_in = row.removed_in.or(Some(version));
                row.in_log = false;
            }
            Ok(true)
        })
        .await
    }

    async fn fix(
        &self,
        scope: &Scope,
        id: &ThreadId,
        who: &str,
        choose: &(dyn for<'a> Fn(&'a [Message]) -> Vec<MessageId> + Send + Sync),
    ) -> Result<Option<(StoredState, usize)>, StoreError> {
        self.transact(Operation::Other, |tables, now| {
            let Some(thread) = tables.idle_thread(scope, id)?.filter(|thread| thread.has_state) else {
                return Ok(None);
            };
            let key = thread.key;
            if tables.is_asking(key) {
                return Err(StoreError::Asked(id.clone()));
            }
            let thread = tables.thread_of(key);
            let before = thread.state_at(thread.version).expect("a thread with state has its version");
            let chosen = choose(&before.context);
            let leaves = |row: &MessageRow| row.is_in_context() && chosen.contains(row.id());
            let count = thread.messages.iter().filter(|row| leaves(row)).count();
            if count == 0 {
                return Ok(Some((before, 0)));
            }
            let version = thread.edited(thread.meta.clone(), now);
            thread.messages.iter_mut().filter(|row| leaves(row)).for_each(|row| row.removed_in = Some(version));
            tables.write_audit(key, who, "fix", serde_json::json!({"removed": chosen}), now);
            Ok(Some((before, count)))
        })
        .await
    }
}

impl ThreadRow {
    /// A version made by a client.
    pub(super) fn edited(&mut self, meta: ExecutionMeta, now: Time) -> i64 {
        let node = meta.current_node.clone();
        self.checkpoint(None, &node, meta, now)
    }

    fn log(&self) -> impl Iterator<Item = &MessageRow> {
        self.messages.iter().filter(|row| row.in_log)
    }
}

impl Tables {
    /// The thread a client edits; a new one is the caller's.
    fn thread_to_edit(
        &mut self,
        scope: &Scope,
        id: &ThreadId,
        caller: &Caller,
        graph: (&str, &GraphVersion),
        now: Time,
    ) -> Result<&mut ThreadRow, StoreError> {
        let found = self.find_thread(&scope.tenant, id).map(|thread| (thread.key, is_owner(thread, caller)));
        let key = match found {
            Some((_, false)) => return Err(StoreError::NoSuchThread(id.clone())),
            Some((key, true)) => key,
            None => insert_thread(self, id, caller, graph, (None, None), now),
        };
        let thread = self.thread_of(key);
        if thread.active_run.is_some() {
            return Err(StoreError::Busy(id.clone()));
        }
        Ok(thread)
    }

    fn thread_record(&self, thread: &ThreadRow) -> ThreadRecord {
        let last = thread.last_run.and_then(|run| self.runs.get(&run));
        ThreadRecord {
            id: thread.id.clone(),
            name: thread.name.clone(),
            user: thread.user.clone(),
            graph: thread.graph.clone(),
            graph_version: thread.graph_version.clone(),
            meta: thread.meta_of_client.clone(),
            run_id: last.map(|run| run.client_run_id.clone().unwrap_or_else(|| run.id.to_string())),
            has_state: thread.has_state,
            version: thread.version,
            updated_at: thread.updated_at,
        }
    }
}

impl Page {
    /// The rows of this page.
    fn of<T>(self, rows: impl Iterator<Item = T>) -> Vec<T> {
        let bound = |number: i64| usize::try_from(number).unwrap_or_default();
        rows.skip(bound(self.offset)).take(bound(self.limit)).collect()
    }
}

fn record_has(record: &ThreadRecord, text: &str) -> bool {
    let meta = record.meta.as_ref().map(ToString::to_string);
    let values = [
        Some(record.id.as_str()),
        record.name.as_deref(),
        Some(record.user.as_str()),
        meta.as_deref(),
        record.run_id.as_deref(),
    ];
    values.into_iter().flatten().any(|value| has(value, text))
}

fn has(value: &str, text: &str) -> bool {
    value.to_lowercase().contains(&text.to_lowercase())
}
