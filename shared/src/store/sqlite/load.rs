//! The state of a thread, whole, at an earlier version, or what changed in it.

use sqlx::SqliteConnection;
use std::collections::BTreeMap;

use sqlx::sqlite::SqliteRow;

use super::row::{Answer, Columns, Doing};
use super::thread::Thread;
use super::{SqliteStore, run};
use crate::domain::{ExecutionMeta, Message, RunId, Scope, ThreadId, ThreadKey};
use crate::store::{Change, Fields, LoadRequest, Loaded, StoreError, StoredState};

/// See [`crate::store::Steps::load`].
pub(super) async fn load(store: &SqliteStore, wanted: &[LoadRequest]) -> Result<Vec<Loaded>, StoreError> {
    const DOING: &str = "load the state of a step";
    let mut tx = store.snapshot(DOING).await?;
    let mut all = Vec::with_capacity(wanted.len());
    for request in wanted {
        all.extend(load_one(&mut tx, request).await.doing(DOING)?);
    }
    Ok(all)
}

async fn load_one(db: &mut SqliteConnection, request: &LoadRequest) -> Answer<Option<Loaded>> {
    let (run, thread) = (run::find(db, request.run_id).await?, Thread::by_key(db, request.thread_key).await?);
    let (Some(run), Some(thread)) = (run, thread) else {
        return Ok(None);
    };
    let (added, removed) = match request.since {
        None => (context(db, thread.key).await?, Vec::new()),
        Some(since) => (added_since(db, thread.key, since).await?, removed_since(db, thread.key, since).await?),
    };
    let fields = fields(db, thread.key, request.since.unwrap_or(0), thread.version).await?;
    Ok(Some(Loaded { run, version: thread.version, meta: thread.meta, added, removed, fields }))
}

/// See [`crate::store::Threads::state`].
pub(super) async fn state(
    db: &mut SqliteConnection,
    scope: &Scope,
    id: &ThreadId,
    version: Option<i64>,
) -> Answer<Option<StoredState>> {
    let thread = Thread::in_scope(db, scope, id).await?.filter(|thread| thread.has_state);
    let Some(thread) = thread else {
        return Ok(None);
    };
    match version {
        None => state_of(db, &thread).await.map(Some),
        Some(version) => state_at(db, &thread, version).await,
    }
}

/// The state now.
pub(super) async fn state_of(db: &mut SqliteConnection, thread: &Thread) -> Answer<StoredState> {
    let context = context(db, thread.key).await?;
    Ok(StoredState {
        graph_version: thread.graph_version.clone(),
        version: thread.version,
        meta: thread.meta.clone(),
        context: context.into_iter().map(|(_, message)| message).collect(),
        fields: fields(db, thread.key, 0, thread.version).await?,
    })
}

async fn state_at(db: &mut SqliteConnection, thread: &Thread, version: i64) -> Answer<Option<StoredState>> {
    let row = sqlx::query("select execution_meta from checkpoint where thread_key = ?1 and version = ?2")
        .bind(thread.key.0)
        .bind(version)
        .fetch_optional(&mut *db)
        .await?;
    let Some(row) = row else {
        return Ok(None);
    };
    let meta: ExecutionMeta = row.json("execution_meta")?;
    let rows = sqlx::query(
        "select position, body from message
          where thread_key = ?1 and in_context = 1 and added_in <= ?2 and (removed_in is null or removed_in > ?2)
          order by position",
    )
    .bind(thread.key.0)
    .bind(version)
    .fetch_all(&mut *db)
    .await?;
    let context = rows.iter().map(|row| row.json("body")).collect::<Answer<_>>()?;
    let fields = fields(db, thread.key, 0, version).await?;
    Ok(Some(StoredState { graph_version: thread.graph_version.clone(), version, meta, context, fields }))
}

/// The living context by position. By its own index: what was removed costs nothing.
pub(super) async fn context(db: &mut SqliteConnection, key: ThreadKey) -> Answer<Vec<(i64, Message)>> {
    let rows = sqlx::query(
        "select position, body from message indexed by message_in_context
          where thread_key = ?1 and in_context = 1 and removed_in is null order by position",
    )
    .bind(key.0)
    .fetch_all(db)
    .await?;
    rows.iter().map(placed).collect()
}

/// What lives in the context since `since`: positions rise with versions, and the checkpoint knows
/// where those after it begin.
async fn added_since(db: &mut SqliteConnection, key: ThreadKey, since: i64) -> Answer<Vec<(i64, Message)>> {
    let rows = sqlx::query(
        "select position, body from message
          where thread_key = ?1 and in_context = 1 and removed_in is null
            and position >= coalesce((select next_position from checkpoint where thread_key = ?1 and version = ?2), 0)
          order by position",
    )
    .bind(key.0)
    .bind(since)
    .fetch_all(db)
    .await?;
    rows.iter().map(placed).collect()
}

async fn removed_since(db: &mut SqliteConnection, key: ThreadKey, since: i64) -> Answer<Vec<i64>> {
    let rows = sqlx::query(
        "select position from message where thread_key = ?1 and removed_in > ?2 and added_in <= ?2 order by position",
    )
    .bind(key.0)
    .bind(since)
    .fetch_all(db)
    .await?;
    rows.iter().map(|row| row.int("position")).collect()
}

/// The value each field has at `version`, of those written after `since`: one look into the index
/// per name, however many versions a field has.
async fn fields(db: &mut SqliteConnection, key: ThreadKey, since: i64, version: i64) -> Answer<Fields> {
    let rows = sqlx::query(
        "with recursive names (name) as (
            select min(name) from field where thread_key = ?1
             union all
            select (select min(name) from field where thread_key = ?1 and name > names.name)
              from names where name is not null
         )
         select f.name, f.value
           from names join field f
             on f.thread_key = ?1 and f.name = names.name
            and f.version = (select max(version) from field l
                              where l.thread_key = ?1 and l.name = names.name and l.version <= ?3)
          where f.version > ?2
          order by f.name",
    )
    .bind(key.0)
    .bind(since)
    .bind(version)
    .fetch_all(db)
    .await?;
    rows.iter().map(|row| Ok((row.text("name")?, row.json("value")?))).collect()
}

fn placed(row: &SqliteRow) -> Answer<(i64, Message)> {
    Ok((row.int("position")?, row.json("body")?))
}

/// See [`crate::store::Runs::changes`].
pub(super) async fn changes(db: &mut SqliteConnection, run: RunId, after: i64) -> Answer<Vec<Change>> {
    let row = sqlx::query(
        "select r.thread_key, max(r.accepted_in - 1, ?2) as after, coalesce(r.version, t.version) as until
           from run r join thread t on t.key = r.thread_key where r.id = ?1",
    )
    .bind(run.to_string())
    .bind(after)
    .fetch_optional(&mut *db)
    .await?;
    let Some(row) = row else {
        return Ok(Vec::new());
    };
    let span = Span { key: ThreadKey(row.int("thread_key")?), after: row.int("after")?, until: row.int("until")? };
    let mut changes = span.checkpoints(db, run).await?;
    span.add_messages(db, &mut changes).await?;
    span.add_removed(db, &mut changes).await?;
    span.add_fields(db, &mut changes).await?;
    Ok(changes.into_values().collect())
}

/// Some consecutive versions of a thread.
struct Span {
    key: ThreadKey,
    after: i64,
    until: i64,
}

impl Span {
    async fn rows(&self, db: &mut SqliteConnection, sql: &'static str) -> Answer<Vec<SqliteRow>> {
        sqlx::query(sql).bind(self.key.0).bind(self.after).bind(self.until).fetch_all(db).await
    }

    /// The run's versions among these, without what they changed.
    async fn checkpoints(&self, db: &mut SqliteConnection, run: RunId) -> Answer<BTreeMap<i64, Change>> {
        let sql = "select version, run_id, seq, node, execution_meta, at from checkpoint
                    where thread_key = ?1 and version > ?2 and version <= ?3";
        let mut changes = BTreeMap::new();
        for row in self.rows(db, sql).await? {
            if row.opt("run_id", Columns::id::<RunId>)? != Some(run) {
                continue;
            }
            let version = row.int("version")?;
            let change = Change {
                seq: row.int("seq")?,
                node: row.text("node")?,
                version,
                at: row.time("at")?,
                messages: Vec::new(),
                removed: Vec::new(),
                fields: Fields::new(),
                meta: row.json("execution_meta")?,
            };
            changes.insert(version, change);
        }
        Ok(changes)
    }

    async fn add_messages(&self, db: &mut SqliteConnection, changes: &mut BTreeMap<i64, Change>) -> Answer<()> {
        let sql = "select added_in, body from message
                    where thread_key = ?1 and in_context = 1
                      and position >= coalesce((select next_position from checkpoint
                                                 where thread_key = ?1 and version = ?2), 0)
                      and position < (select next_position from checkpoint where thread_key = ?1 and version = ?3)
                    order by position";
        for row in self.rows(db, sql).await? {
            if let Some(change) = changes.get_mut(&row.int("added_in")?) {
                change.messages.push(row.json("body")?);
            }
        }
        Ok(())
    }

    async fn add_removed(&self, db: &mut SqliteConnection, changes: &mut BTreeMap<i64, Change>) -> Answer<()> {
        let sql = "select removed_in, body from message
                    where thread_key = ?1 and removed_in > ?2 and removed_in <= ?3 order by position";
        for row in self.rows(db, sql).await? {
            if let Some(change) = changes.get_mut(&row.int("removed_in")?) {
                change.removed.push(row.json::<Message>("body")?.message_id);
            }
        }
        Ok(())
    }

    async fn add_fields(&self, db: &mut SqliteConnection, changes: &mut BTreeMap<i64, Change>) -> Answer<()> {
        let sql = "with recursive names (name) as (
                      select min(name) from field where thread_key = ?1
                       union all
                      select (select min(name) from field where thread_key = ?1 and name > names.name)
                        from names where name is not null
                   )
                   select f.version, f.name, f.value
                     from names join field f
                       on f.thread_key = ?1 and f.name = names.name and f.version > ?2 and f.version <= ?3
                    order by f.version, f.rowid";
        for row in self.rows(db, sql).await? {
            if let Some(change) = changes.get_mut(&row.int("version")?) {
                change.fields.insert(row.text("name")?, row.json("value")?);
            }
        }
        Ok(())
    }
}
