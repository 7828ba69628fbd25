//! Threads as a client sees them.

use async_trait::async_trait;
use futures::TryStreamExt;
use sqlx::{FromRow, PgExecutor};

use super::PgStore;
use super::error::{Doing, repeated};
use super::rows::{fields_from, parsed};
use crate::domain::{GraphVersion, Message, MessageId, Scope, ThreadId, UserId};
use crate::store::{Page, PutMessages, StateEdit, StoreError, StoredState, ThreadRecord, Threads, Time};

#[async_trait]
impl Threads for PgStore {
    async fn thread(&self, scope: &Scope, id: &ThreadId) -> Result<Option<ThreadRecord>, StoreError> {
        let one = select_thread!("where t.tenant = $1 and t.id = $2 and ($3::text is null or t.user_id = $3)");
        let row: Option<ThreadRow> = repeated!(async {
            sqlx::query_as(one)
                .bind(scope.tenant.as_str())
                .bind(id.as_str())
                .bind(owner(scope))
                .fetch_optional(&self.pool)
                .await
                .doing("read a thread")
        })?;
        row.map(ThreadRow::record).transpose()
    }

    async fn threads(&self, scope: &Scope, search: Option<&str>, page: Page) -> Result<Vec<ThreadRecord>, StoreError> {
        let list = select_thread!(
            "where t.tenant = $1 and ($2::text is null or t.user_id = $2)
               and ($3::text is null or strpos(lower(t.id), $3) > 0 or strpos(lower(t.name), $3) > 0
                    or strpos(lower(t.user_id), $3) > 0 or strpos(lower(t.meta::text), $3) > 0
                    or strpos(lower(coalesce(r.client_run_id, t.last_run::text)), $3) > 0)
             order by t.key offset $4 limit $5"
        );
        let search = search.map(str::to_lowercase);
        let rows: Vec<ThreadRow> = repeated!(async {
            sqlx::query_as(list)
                .bind(scope.tenant.as_str())
                .bind(owner(scope))
                .bind(&search)
                .bind(page.offset)
                .bind(page.limit)
                .fetch_all(&self.pool)
                .await
                .doing("list threads")
        })?;
        rows.into_iter().map(ThreadRow::record).collect()
    }

    async fn delete_thread(&self, scope: &Scope, id: &ThreadId) -> Result<bool, StoreError> {
        repeated!(self.delete_thread_once(scope, id))
    }

    async fn state(
        &self,
        scope: &Scope,
        id: &ThreadId,
        version: Option<i64>,
    ) -> Result<Option<StoredState>, StoreError> {
        repeated!(read_state(&self.pool, scope, id, version))
    }

    async fn edit_state(&self, _scope: &Scope, edit: StateEdit) -> Result<StoredState, StoreError> {
        repeated!(self.edit_state_once(&edit))
    }

    async fn clear_state(&self, scope: &Scope, id: &ThreadId) -> Result<(), StoreError> {
        repeated!(self.clear_state_once(scope, id))
    }

    async fn messages(
        &self,
        scope: &Scope,
        id: &ThreadId,
        search: Option<&str>,
        page: Page,
    ) -> Result<Vec<Message>, StoreError> {
        match search {
            Some(text) => repeated!(self.search_log(scope, id, &text.to_lowercase(), page)),
            None => repeated!(self.read_log(scope, id, page)),
        }
    }

    async fn message(&self, scope: &Scope, id: &ThreadId, message: &str) -> Result<Option<Message>, StoreError> {
        let doing = "read a message";
        let body: Option<String> = repeated!(async {
            sqlx::query_scalar(ONE_MESSAGE)
                .bind(scope.tenant.as_str())
                .bind(id.as_str())
                .bind(owner(scope))
                .bind(message)
                .fetch_optional(&self.pool)
                .await
                .doing(doing)
        })?;
        body.map(|body| parsed(&body, doing)).transpose()
    }

    async fn put_messages(&self, _scope: &Scope, put: PutMessages) -> Result<(), StoreError> {
        repeated!(self.put_messages_once(&put))
    }

    async fn delete_message(&self, scope: &Scope, id: &ThreadId, message: &str) -> Result<bool, StoreError> {
        repeated!(self.delete_message_once(scope, id, message))
    }

    async fn fix(
        &self,
        scope: &Scope,
        id: &ThreadId,
        who: &str,
        choose: &(dyn for<'a> Fn(&'a [Message]) -> Vec<MessageId> + Send + Sync),
    ) -> Result<Option<(StoredState, usize)>, StoreError> {
        repeated!(self.fix_once(scope, id, who, choose))
    }
}

impl PgStore {
    async fn read_log(&self, scope: &Scope, id: &ThreadId, page: Page) -> Result<Vec<Message>, StoreError> {
        let bodies: Vec<String> = sqlx::query_scalar(log!("offset $4 limit $5"))
            .bind(scope.tenant.as_str())
            .bind(id.as_str())
            .bind(owner(scope))
            .bind(page.offset)
            .bind(page.limit)
            .fetch_all(&self.pool)
            .await
            .doing(READ_LOG)?;
        bodies.iter().map(|body| parsed(body, READ_LOG)).collect()
    }

    /// The text of a message is not a column, and a body may hold what no text of the database can:
    /// it is looked at here, row by row, until the page is full.
    async fn search_log(
        &self,
        scope: &Scope,
        id: &ThreadId,
        text: &str,
        page: Page,
    ) -> Result<Vec<Message>, StoreError> {
        let mut rows = sqlx::query_scalar::<_, String>(log!(""))
            .bind(scope.tenant.as_str())
            .bind(id.as_str())
            .bind(owner(scope))
            .fetch(&self.pool);
        let (mut skip, mut found) = (page.offset, Vec::new());
        while let Some(body) = rows.try_next().await.doing(READ_LOG)? {
            let message: Message = parsed(&body, READ_LOG)?;
            if !message.plain_text().to_lowercase().contains(text) {
                continue;
            }
            if skip > 0 {
                skip -= 1;
                continue;
            }
            if i64::try_from(found.len()).is_ok_and(|len| len >= page.limit) {
                break;
            }
            found.push(message);
        }
        Ok(found)
    }
}

const READ_LOG: &str = "read a thread's messages";

fn owner(scope: &Scope) -> Option<&str> {
    scope.owner.as_ref().map(UserId::as_str)
}

/// The state at `version`, `None` = now; `None` without one.
pub(super) async fn read_state(
    db: impl PgExecutor<'_>,
    scope: &Scope,
    id: &ThreadId,
    version: Option<i64>,
) -> Result<Option<StoredState>, StoreError> {
    let row: Option<StateRow> = sqlx::query_as(STATE)
        .bind(scope.tenant.as_str())
        .bind(id.as_str())
        .bind(owner(scope))
        .bind(version)
        .fetch_optional(db)
        .await
        .doing(READ_STATE)?;
    row.map(StateRow::state).transpose()
}

const READ_STATE: &str = "read a thread's state";

/// $1 tenant, $2 thread, $3 owner, $4 version. Fields are found name by name from the end of the key.
const STATE: &str = "
select t.graph_version, c.version, c.execution_meta::text as meta, a.bodies, f.names, f.values
  from thread t
  join checkpoint c on c.thread_key = t.key and c.version = coalesce($4::bigint, t.version)
 cross join lateral (
   select array_agg(m.body::text order by m.position) as bodies from message m
    where m.thread_key = t.key and m.added_in <= c.version and (m.removed_in is null or m.removed_in > c.version)
 ) a
 cross join lateral (
   with recursive latest (name, value) as (
     (select x.name, x.value from field x
       where x.thread_key = t.key and x.version <= c.version order by x.name desc, x.version desc limit 1)
     union all
     select n.name, n.value from latest
      cross join lateral (
        select x.name, x.value from field x
         where x.thread_key = t.key and x.name < latest.name and x.version <= c.version
         order by x.name desc, x.version desc limit 1) n
   )
   select array_agg(name order by name) as names, array_agg(value::text order by name) as values from latest
 ) f
 where t.tenant = $1 and t.id = $2 and ($3::text is null or t.user_id = $3) and t.has_state";

/// $1 tenant, $2 thread, $3 owner, $4 message: in the context too, or in the log alone.
const ONE_MESSAGE: &str = "
with t as (
  select key from thread where tenant = $1 and id = $2 and ($3::text is null or user_id = $3)
)
select body::text from message m join t on t.key = m.thread_key
 where m.message_id = $4 and m.removed_in is null and m.in_log
 union all
select body::text from message m join t on t.key = m.thread_key
 where m.message_id = $4 and m.removed_in is not null and m.in_log
 limit 1";

macro_rules! log {
    ($tail:literal) => {
        concat!(
            "select body::text from message
              where thread_key = (select key from thread where tenant = $1 and id = $2
                                     and ($3::text is null or user_id = $3))
                and in_log order by position ",
            $tail
        )
    };
}
macro_rules! select_thread {
    ($tail:literal) => {
        concat!(
            "select t.id, t.name, t.user_id, t.graph, t.graph_version, t.meta::text as meta,
                    coalesce(r.client_run_id, t.last_run::text) as run_id, t.has_state, t.version, t.updated_at
               from thread t left join run r on r.id = t.last_run ",
            $tail
        )
    };
}
use {log, select_thread};

#[derive(FromRow)]
struct StateRow {
    graph_version: String,
    version: i64,
    meta: String,
    bodies: Option<Vec<String>>,
    names: Option<Vec<String>>,
    values: Option<Vec<String>>,
}

impl StateRow {
    fn state(self) -> Result<StoredState, StoreError> {
        let bodies = self.bodies.unwrap_or_default();
        Ok(StoredState {
            graph_version: GraphVersion(self.graph_version),
            version: self.version,
            meta: parsed(&self.meta, READ_STATE)?,
            context: bodies.iter().map(|body| parsed(body, READ_STATE)).collect::<Result<_, _>>()?,
            fields: fields_from(self.names, self.values, READ_STATE)?,
        })
    }
}

#[derive(FromRow)]
struct ThreadRow {
    id: String,
    name: Option<String>,
    user_id: String,
    graph: String,
    graph_version: String,
    meta: Option<String>,
    run_id: Option<String>,
    has_state: bool,
    version: i64,
    updated_at: Time,
}

impl ThreadRow {
    fn record(self) -> Result<ThreadRecord, StoreError> {
        Ok(ThreadRecord {
            id: ThreadId(self.id),
            name: self.name,
            user: UserId(self.user_id),
            graph: self.graph,
            graph_version: GraphVersion(self.graph_version),
            meta: self.meta.map(|meta| parsed(&meta, "read a thread")).transpose()?,
            run_id: self.run_id,
            has_state: self.has_state,
            version: self.version,
            updated_at: self.updated_at,
        })
    }
}
