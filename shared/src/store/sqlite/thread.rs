//! The thread's row and what hangs on its versions: messages, fields, checkpoints.

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::row::{Answer, Columns, json_text, micros};
use crate::domain::{
    ExecutionMeta, GraphVersion, Message, Role, RunId, RunStatus, Scope, StepId, Tenant, ThreadId, ThreadKey, UserId,
};
use crate::store::{Fields, Time};

/// Where a thread is, as the store sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ThreadStatus {
    /// Takes a run.
    Idle,
    /// Has an active run.
    Busy,
    /// Paused by its last run.
    Interrupted,
    /// Its last run failed.
    Error,
}

impl ThreadStatus {
    /// After a run that ended like this.
    pub(super) fn after(end: RunStatus) -> Self {
        match end {
            RunStatus::Waiting | RunStatus::Queued | RunStatus::Running => Self::Busy,
            RunStatus::Interrupted => Self::Interrupted,
            RunStatus::Failed => Self::Error,
            RunStatus::Completed | RunStatus::Stopped => Self::Idle,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Busy => "busy",
            Self::Interrupted => "interrupted",
            Self::Error => "error",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Idle, Self::Busy, Self::Interrupted, Self::Error].into_iter().find(|status| status.as_str() == text)
    }
}

/// A thread's row. Changed in memory inside a writing transaction, then saved whole.
#[derive(Debug, Clone)]
pub(super) struct Thread {
    pub(super) key: ThreadKey,
    pub(super) tenant: Tenant,
    pub(super) id: ThreadId,
    pub(super) user: UserId,
    pub(super) graph: String,
    pub(super) graph_version: GraphVersion,
    pub(super) status: ThreadStatus,
    pub(super) version: i64,
    pub(super) next_position: i64,
    pub(super) active_run: Option<RunId>,
    pub(super) stop_run: Option<RunId>,
    pub(super) last_run: Option<RunId>,
    pub(super) has_state: bool,
    pub(super) meta: ExecutionMeta,
}

/// What a new thread starts with.
pub(super) struct NewThread<'a> {
    pub(super) tenant: &'a Tenant,
    pub(super) id: &'a ThreadId,
    pub(super) user: &'a UserId,
    pub(super) name: Option<&'a str>,
    pub(super) meta: Option<&'a crate::domain::Json>,
    pub(super) graph: &'a str,
    pub(super) graph_version: &'a GraphVersion,
}

macro_rules! select_thread {
    ($where:literal) => {
        concat!(
            "select key, tenant, id, user_id, graph, graph_version, status, version, next_position, active_run,
                    stop_run, last_run, has_state, execution_meta
               from thread where ",
            $where
        )
    };
}

impl Thread {
    /// The thread of that name, whoever owns it.
    pub(super) async fn find(db: &mut SqliteConnection, tenant: &Tenant, id: &ThreadId) -> Answer<Option<Self>> {
        let row = sqlx::query(select_thread!("tenant = ?1 and id = ?2"))
            .bind(tenant.as_str())
            .bind(id.as_str())
            .fetch_optional(db)
            .await?;
        row.as_ref().map(Self::read).transpose()
    }

    /// The thread of that name, if the scope may see it.
    pub(super) async fn in_scope(db: &mut SqliteConnection, scope: &Scope, id: &ThreadId) -> Answer<Option<Self>> {
        let thread = Self::find(db, &scope.tenant, id).await?;
        Ok(thread.filter(|thread| thread.is_visible(scope)))
    }

    /// The thread in that row.
    pub(super) async fn by_key(db: &mut SqliteConnection, key: ThreadKey) -> Answer<Option<Self>> {
        let row = sqlx::query(select_thread!("key = ?1")).bind(key.0).fetch_optional(db).await?;
        row.as_ref().map(Self::read).transpose()
    }

    /// Adds a thread that never ran.
    pub(super) async fn insert(db: &mut SqliteConnection, new: &NewThread<'_>, now: Time) -> Answer<Self> {
        let meta = ExecutionMeta::fresh(new.id.as_str());
        let row = sqlx::query(
            "insert into thread (tenant, id, user_id, name, meta, graph, graph_version, current_node, execution_meta,
                                 created_at, updated_at)
             values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?10)
             returning key, tenant, id, user_id, graph, graph_version, status, version, next_position, active_run,
                       stop_run, last_run, has_state, execution_meta",
        )
        .bind(new.tenant.as_str())
        .bind(new.id.as_str())
        .bind(new.user.as_str())
        .bind(new.name)
        .bind(new.meta.map(json_text))
        .bind(new.graph)
        .bind(new.graph_version.as_str())
        .bind(&meta.current_node)
        .bind(json_text(&meta))
        .bind(micros(now))
        .fetch_one(db)
        .await?;
        Self::read(&row)
    }

    fn read(row: &SqliteRow) -> Answer<Self> {
        Ok(Self {
            key: ThreadKey(row.int("key")?),
            tenant: Tenant(row.text("tenant")?),
            id: ThreadId(row.text("id")?),
            user: UserId(row.text("user_id")?),
            graph: row.text("graph")?,
            graph_version: GraphVersion(row.text("graph_version")?),
            status: row.word("status", ThreadStatus::parse)?,
            version: row.int("version")?,
            next_position: row.int("next_position")?,
            active_run: row.opt("active_run", Columns::id)?,
            stop_run: row.opt("stop_run", Columns::id)?,
            last_run: row.opt("last_run", Columns::id)?,
            has_state: row.flag("has_state")?,
            meta: row.json("execution_meta")?,
        })
    }

    /// Whether the scope may see it.
    pub(super) fn is_visible(&self, scope: &Scope) -> bool {
        self.tenant == scope.tenant && scope.owner.as_ref().is_none_or(|owner| *owner == self.user)
    }

    /// Writes the row as it is in memory; a name that waits for the number of messages gets it when
    /// no run is active any more.
    pub(super) async fn save(&self, db: &mut SqliteConnection, now: Time) -> Answer<()> {
        sqlx::query(
            "update thread
                set graph_version = ?2, status = ?3, version = ?4, next_position = ?5, active_run = ?6, stop_run = ?7,
                    last_run = ?8, has_state = ?9, current_node = ?10, execution_meta = ?11, updated_at = ?12,
                    name = case when ?6 is null and name like '%{messages}%' then replace(name, '{messages}', (
                        select count(*) from message m
                         where m.thread_key = ?1 and m.in_context = 1 and m.removed_in is null)) else name end
              where key = ?1",
        )
        .bind(self.key.0)
        .bind(self.graph_version.as_str())
        .bind(self.status.as_str())
        .bind(self.version)
        .bind(self.next_position)
        .bind(self.active_run.map(|run| run.to_string()))
        .bind(self.stop_run.map(|run| run.to_string()))
        .bind(self.last_run.map(|run| run.to_string()))
        .bind(self.has_state)
        .bind(&self.meta.current_node)
        .bind(json_text(&self.meta))
        .bind(micros(now))
        .execute(db)
        .await
        .map(drop)
    }

    /// The run no longer occupies the thread.
    pub(super) fn release(&mut self, end: RunStatus) {
        self.status = ThreadStatus::after(end);
        self.active_run = None;
        self.stop_run = None;
    }

    /// Appends to the context, in the current version, and to the log if `is_logged`; ids that live
    /// there are left out. A message that is in the log keeps its body and is not logged twice.
    pub(super) async fn append_context(
        &mut self,
        db: &mut SqliteConnection,
        messages: &[Message],
        is_logged: bool,
    ) -> Answer<()> {
        for message in messages {
            sqlx::query(
                "insert into message (thread_key, position, message_id, role, body, in_context, in_log, added_in)
                 select ?1, ?2, ?3, coalesce(l.role, ?4), coalesce(l.body, ?5), 1, ?7 and l.position is null, ?6
                   from (select 1) left join message l on l.thread_key = ?1 and l.message_id = ?3 and l.in_log = 1
                  where true
                     on conflict do nothing",
            )
            .bind(self.key.0)
            .bind(self.next_position)
            .bind(&message.message_id.text)
            .bind(message.role.as_str())
            .bind(json_text(message))
            .bind(self.version)
            .bind(is_logged)
            .execute(&mut *db)
            .await?;
            self.next_position += 1;
        }
        Ok(())
    }

    /// Appends to the log only, in the current version; ids that are there are left out. A message
    /// that is in the context keeps its body.
    pub(super) async fn append_log(&mut self, db: &mut SqliteConnection, messages: &[Message]) -> Answer<()> {
        for message in messages {
            sqlx::query(
                "insert into message (thread_key, position, message_id, role, body, in_context, in_log, added_in)
                 select ?1, ?2, ?3, coalesce(c.role, ?4), coalesce(c.body, ?5), 0, 1, ?6
                   from (select 1) left join message c
                     on c.thread_key = ?1 and c.message_id = ?3 and c.in_context = 1 and c.removed_in is null
                  where true
                     on conflict do nothing",
            )
            .bind(self.key.0)
            .bind(self.next_position)
            .bind(&message.message_id.text)
            .bind(message.role.as_str())
            .bind(json_text(message))
            .bind(self.version)
            .execute(&mut *db)
            .await?;
            self.next_position += 1;
        }
        Ok(())
    }

    /// Writes field values in the current version.
    pub(super) async fn write_fields(&self, db: &mut SqliteConnection, fields: &Fields) -> Answer<()> {
        for (name, value) in fields {
            sqlx::query("insert into field (thread_key, name, version, value) values (?1, ?2, ?3, ?4)")
                .bind(self.key.0)
                .bind(name)
                .bind(self.version)
                .bind(json_text(value))
                .execute(&mut *db)
                .await?;
        }
        Ok(())
    }

    /// Records the current version, when all it adds is there: made by `step`, or by a client.
    pub(super) async fn checkpoint(
        &self,
        db: &mut SqliteConnection,
        step: Option<StepId>,
        node: &str,
        now: Time,
    ) -> Answer<()> {
        sqlx::query(
            "insert into checkpoint (thread_key, version, run_id, seq, node, execution_meta, next_position, at)
             values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )
        .bind(self.key.0)
        .bind(self.version)
        .bind(step.map(|step| step.run_id.to_string()))
        .bind(step.map(|step| step.seq))
        .bind(node)
        .bind(json_text(&self.meta))
        .bind(self.next_position)
        .bind(micros(now))
        .execute(db)
        .await
        .map(drop)
    }
}

/// The role spelled `text`.
pub(super) fn role(text: &str) -> Option<Role> {
    [Role::User, Role::Assistant, Role::System, Role::Tool].into_iter().find(|role| role.as_str() == text)
}
