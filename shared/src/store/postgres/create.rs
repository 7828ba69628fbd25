//! Creating a run: key, lock, admission, and everything it writes, in one transaction.

use std::time::Duration;

use sqlx::{FromRow, Postgres, Transaction};
use uuid::Uuid;

use super::error::{Attempts, Doing, in_time};
use super::rows::{FieldColumns, MessageColumns, RunRow, count, parsed, run_status, seconds, select_run, text_of};
use super::thread_lock::{self, LockedThread};
use super::{PgStore, edits, interrupts};
use crate::domain::meta::START;
use crate::domain::{GraphVersion, Message, MessageId, PoolName, Role, RunId, RunStatus, Scope, ThreadKey};
use crate::graph::admission::{Admission, Start, ThreadView};
use crate::graph::engine::RunError;
use crate::store::{Admit, Created, FirstStep, NewRun, NewlyCreated, RunRecord, StillPaused, StoreError, Time};

const DOING: &str = "create a run";

/// What one try came to.
enum Try {
    Done(Created),
    /// Everything was written; the answer to the last word, the commit, is what is missing.
    Written(Created, Proof, StoreError),
    /// Somebody created the thread at the same moment: it must be looked at.
    Again,
}

/// What is there if a try's commit arrived.
enum Proof {
    Run(RunId),
    /// A question that was answered at exactly that moment.
    Answer(String, Time),
}

impl PgStore {
    pub(super) async fn create(&self, new: &NewRun, admit: Admit<'_>) -> Result<Created, StoreError> {
        let mut attempts = Attempts::new();
        let mut written: Option<(Created, Proof)> = None;
        loop {
            if let Some((created, proof)) = written.take() {
                match self.is_there(&proof).await {
                    Ok(true) => return Ok(created),
                    Ok(false) => {}
                    Err(error) => {
                        written = Some((created, proof));
                        attempts.again_after(error).await?;
                        continue;
                    }
                }
            }
            match in_time(self.try_create(new, admit)).await {
                Ok(Try::Done(created)) => return Ok(created),
                Ok(Try::Again) => {}
                Ok(Try::Written(created, proof, error)) => {
                    written = Some((created, proof));
                    attempts.again_after(error).await?;
                }
                Err(error) => attempts.again_after(error).await?,
            }
        }
    }

    async fn is_there(&self, proof: &Proof) -> Result<bool, StoreError> {
        let query = match proof {
            Proof::Run(id) => sqlx::query_scalar("select exists (select from run where id = $1)").bind(id.0),
            Proof::Answer(id, at) => {
                sqlx::query_scalar("select exists (select from interrupt where id = $1 and answered_at = $2)")
                    .bind(id)
                    .bind(at)
            }
        };
        query.fetch_one(&self.pool).await.doing(DOING)
    }

    async fn try_create(&self, new: &NewRun, admit: Admit<'_>) -> Result<Try, StoreError> {
        let mut tx = self.begin(DOING).await?;
        if let Some(replayed) = take_key(&mut tx, new).await? {
            return Ok(Try::Done(Created::Replayed(Box::new(replayed))));
        }
        let scope = new.caller.scope();
        let thread = thread_lock::lock(&mut tx, &scope, &new.thread_id).await?;
        let known = match thread {
            None => None,
            Some(thread) => {
                let thread = thread.seen_by(&scope).ok_or_else(|| StoreError::NoSuchThread(new.thread_id.clone()))?;
                Some(Known::read(&mut tx, new, thread).await?)
            }
        };
        let mut admission = admit(known.as_ref().map(|known| &known.view))?;
        let plan = Plan::of(new, known.as_ref(), &mut admission);
        if let Some(known) = &known {
            let answered_at = interrupts::answer(&mut tx, &known.thread, &known.view.open, &admission.answers).await?;
            if let (Start::StillPaused, Some(at)) = (&admission.start, answered_at) {
                let proof = Proof::Answer(admission.answers[0].id.clone(), at);
                let still = still_paused(&mut tx, new, known, &plan, admission).await?;
                return Ok(finish(tx, Created::StillPaused(Box::new(still)), proof).await);
            }
        }
        let Some(row) = write(&mut tx, new, &plan, &admission, known.is_none()).await? else {
            return Ok(Try::Again);
        };
        let created = plan.created(new, &scope, known.as_ref(), admission, &row);
        Ok(finish(tx, Created::New(Box::new(created)), Proof::Run(new.id)).await)
    }
}

async fn finish(tx: Transaction<'_, Postgres>, created: Created, proof: Proof) -> Try {
    match tx.commit().await.doing(DOING) {
        Ok(()) => Try::Done(created),
        Err(error) => Try::Written(created, proof, error),
    }
}

/// Answers were recorded and others are awaited: messages and place are a version of their own, and
/// the client's key stands for the paused run.
async fn still_paused(
    tx: &mut Transaction<'_, Postgres>,
    new: &NewRun,
    known: &Known,
    plan: &Plan,
    admission: Admission,
) -> Result<StillPaused, StoreError> {
    let thread = &known.thread;
    let version = edits::new_version(tx, thread, &admission.meta, admission.messages.len(), None).await?;
    let columns = MessageColumns::of(&admission.messages);
    sqlx::query(
        "insert into message (thread_key, position, message_id, role, body, in_log, added_in)
         select $1, $2 + u.place - 1, u.id, u.role, u.body::json, u.in_log, $3
           from unnest($4::text[], $5::text[], $6::text[], $7::bool[]) with ordinality as u (id, role, body, in_log, place)",
    )
    .bind(thread.key)
    .bind(thread.next_position)
    .bind(version)
    .bind(columns.ids)
    .bind(columns.roles)
    .bind(columns.bodies)
    .bind(&plan.in_log)
    .execute(&mut **tx)
    .await
    .doing(DOING)?;
    if let Some(idempotency) = &new.idempotency {
        sqlx::query("update idempotency set run_id = $4 where tenant = $1 and user_id = $2 and key = $3")
            .bind(new.caller.tenant.as_str())
            .bind(new.caller.user.as_str())
            .bind(&idempotency.key)
            .bind(thread.last_run)
            .execute(&mut **tx)
            .await
            .doing(DOING)?;
    }
    let run: RunRow =
        sqlx::query_as(select_run!("where r.id = $1")).bind(thread.last_run).fetch_one(&mut **tx).await.doing(DOING)?;
    Ok(StillPaused { run: run.record()?, messages: admission.messages, version, meta: admission.meta })
}

/// Takes the client's key; `Some` is the run that has it. Whoever comes at the same moment waits for
/// this transaction. A key whose run was deleted with its thread is free again.
async fn take_key(tx: &mut Transaction<'_, Postgres>, new: &NewRun) -> Result<Option<RunRecord>, StoreError> {
    let Some(idempotency) = &new.idempotency else { return Ok(None) };
    let (tenant, user, key) = (new.caller.tenant.as_str(), new.caller.user.as_str(), idempotency.key.as_str());
    let taken = sqlx::query(
        "insert into idempotency as i (tenant, user_id, key, body_hash, run_id, expires_at)
         values ($1, $2, $3, $4, $5, clock_timestamp() + make_interval(secs => $6))
         on conflict (tenant, user_id, key) do update
            set body_hash = excluded.body_hash, run_id = excluded.run_id, expires_at = excluded.expires_at
          where i.expires_at <= clock_timestamp()",
    )
    .bind(tenant)
    .bind(user)
    .bind(key)
    .bind(&idempotency.body_hash)
    .bind(new.id.0)
    .bind(seconds(idempotency.ttl))
    .execute(&mut **tx)
    .await
    .doing(DOING)?;
    if taken.rows_affected() == 1 {
        return Ok(None);
    }
    let hash: String =
        sqlx::query_scalar("select body_hash from idempotency where tenant = $1 and user_id = $2 and key = $3")
            .bind(tenant)
            .bind(user)
            .bind(key)
            .fetch_one(&mut **tx)
            .await
            .doing(DOING)?;
    if hash != idempotency.body_hash {
        return Err(StoreError::IdempotencyMismatch);
    }
    let first: Option<RunRow> = sqlx::query_as(select_run!(
        "where r.id = (select run_id from idempotency where tenant = $1 and user_id = $2 and key = $3)"
    ))
    .bind(tenant)
    .bind(user)
    .bind(key)
    .fetch_optional(&mut **tx)
    .await
    .doing(DOING)?;
    if first.is_none() {
        sqlx::query("update idempotency set run_id = $4 where tenant = $1 and user_id = $2 and key = $3")
            .bind(tenant)
            .bind(user)
            .bind(key)
            .bind(new.id.0)
            .execute(&mut **tx)
            .await
            .doing(DOING)?;
    }
    first.map(RunRow::record).transpose()
}

/// The locked thread as the admission sees it, and what a resumed run hands down.
struct Known {
    thread: LockedThread,
    view: ThreadView,
    last: Option<LastRun>,
    /// Messages of the input that only the log has.
    logged: Vec<Message>,
}

struct LastRun {
    id: RunId,
    root: RunId,
    status: RunStatus,
    class: i16,
    trace: Option<String>,
}

#[derive(FromRow)]
struct ViewRow {
    known: Option<Vec<String>>,
    logged: Option<Vec<String>>,
    last_role: Option<String>,
    root_id: Option<Uuid>,
    status: Option<String>,
    class: Option<i16>,
    trace: Option<String>,
    error: Option<String>,
}

impl Known {
    async fn read(tx: &mut Transaction<'_, Postgres>, new: &NewRun, thread: LockedThread) -> Result<Self, StoreError> {
        let ids: Vec<&str> = new.message_ids.iter().map(|id| id.text.as_str()).collect();
        let row: ViewRow = sqlx::query_as(
            "select (select array_agg(message_id) from message
                      where thread_key = $1 and removed_in is null and message_id = any ($2::text[])) as known,
                    (select array_agg(body::text) from message
                      where thread_key = $1 and removed_in is not null and in_log
                        and message_id = any ($2::text[])) as logged,
                    (select role from message
                      where thread_key = $1 and removed_in is null order by position desc limit 1) as last_role,
                    r.root_id, r.status::text as status, r.class, r.trace, r.error::text as error
               from (values (1)) as one left join run r on r.id = $3",
        )
        .bind(thread.key)
        .bind(ids)
        .bind(thread.last_run)
        .fetch_one(&mut **tx)
        .await
        .doing(DOING)?;
        let error = row.error.map(|error| parsed::<RunError>(&error, DOING)).transpose()?;
        let logged = row.logged.unwrap_or_default();
        let mut view = ThreadView {
            graph: thread.graph.clone(),
            graph_version: GraphVersion(thread.graph_version.clone()),
            meta: thread.meta()?,
            active_run: thread.active_run.map(RunId),
            known_ids: row.known.unwrap_or_default().iter().map(|id| MessageId::from(id.as_str())).collect(),
            last_role: row.last_role.and_then(|role| role_named(&role)),
            last_error: error.map(|error| error.code),
            open: Vec::new(),
            answered: Vec::new(),
        };
        let last = match (thread.last_run, row.root_id, row.status, row.class) {
            (Some(id), Some(root), Some(status), Some(class)) => Some(LastRun {
                id: RunId(id),
                root: RunId(root),
                status: run_status(&status)?,
                class,
                trace: row.trace,
            }),
            _ => None,
        };
        let logged = logged.iter().map(|body| parsed(body, DOING)).collect::<Result<_, _>>()?;
        if let Some(paused) = last.as_ref().filter(|last| last.status == RunStatus::Interrupted)
            && thread.status == "interrupted"
        {
            interrupts::add_to_view(tx, paused.id.0, &mut view).await?;
        }
        Ok(Self { thread, view, last, logged })
    }
}

fn role_named(text: &str) -> Option<Role> {
    [Role::User, Role::Assistant, Role::System, Role::Tool].into_iter().find(|role| role.as_str() == text)
}

/// What the transaction writes beside the admission.
struct Plan {
    status: RunStatus,
    thread_status: &'static str,
    first: Option<(String, i32, FirstStep)>,
    resumes: Option<RunId>,
    root: RunId,
    class: i16,
    trace: Option<String>,
    in_log: Vec<bool>,
}

impl Plan {
    /// An id that only the log has keeps its first body, which `admission` gets.
    fn of(new: &NewRun, known: Option<&Known>, admission: &mut Admission) -> Self {
        let (status, thread_status) = match admission.start {
            Start::Node(_) => (RunStatus::Queued, "busy"),
            Start::Completed => (RunStatus::Completed, "idle"),
            Start::Interrupted | Start::StillPaused => (RunStatus::Interrupted, "interrupted"),
        };
        let first = match &admission.start {
            Start::Node(node) => {
                let manifest = new.versions.iter().find(|(version, _)| *version == admission.graph_version);
                let step = manifest.map_or_else(
                    || FirstStep { pool: PoolName::default_pool(), attempts_max: 3 },
                    |(_, manifest)| FirstStep::of(manifest, node),
                );
                Some((node.clone(), i32::from(node != START), step))
            }
            Start::Completed | Start::Interrupted | Start::StillPaused => None,
        };
        let paused = known
            .and_then(|known| known.last.as_ref())
            .filter(|last| admission.continues && last.status == RunStatus::Interrupted);
        let logged = known.map(|known| known.logged.as_slice()).unwrap_or_default();
        let mut in_log = Vec::with_capacity(admission.messages.len());
        for message in &mut admission.messages {
            let first_body = logged.iter().find(|logged| logged.message_id == message.message_id);
            in_log.push(first_body.is_none());
            if let Some(first_body) = first_body {
                message.clone_from(first_body);
            }
        }
        Self {
            status,
            thread_status,
            first,
            resumes: paused.map(|last| last.id),
            root: paused.map_or(new.id, |last| last.root),
            class: paused.map_or(new.class, |last| last.class),
            trace: paused.and_then(|last| last.trace.clone()).or_else(|| new.trace.clone()),
            in_log,
        }
    }

    fn created(
        self,
        new: &NewRun,
        scope: &Scope,
        known: Option<&Known>,
        admission: Admission,
        row: &WrittenRow,
    ) -> NewlyCreated {
        let user = known.map_or_else(|| new.caller.user.clone(), |known| known.thread.user_id.as_str().into());
        let lane = self.first.map(|(_, _, step)| (step.pool, self.class));
        let run = RunRecord {
            id: new.id,
            client_run_id: new.client_run_id.clone(),
            root: self.root,
            resumes: self.resumes,
            thread_id: new.thread_id.clone(),
            thread_key: ThreadKey(row.key),
            tenant: scope.tenant.clone(),
            user,
            graph: new.graph.clone(),
            graph_version: admission.graph_version,
            class: self.class,
            status: self.status,
            input: new.input.clone(),
            config: new.config.clone(),
            step_limit: new.step_limit,
            node_timeout: new.node_timeout,
            error: None,
            trace: self.trace,
            observability: new.observability,
            version: row.version,
            created_at: row.created_at,
            started_at: None,
            finished_at: row.finished_at,
        };
        NewlyCreated {
            run,
            is_new_thread: known.is_none(),
            messages: admission.messages,
            version: row.version,
            meta: admission.meta,
            lane,
        }
    }
}

#[derive(FromRow)]
struct WrittenRow {
    key: i64,
    version: i64,
    created_at: Time,
    finished_at: Option<Time>,
}

/// Writes all of it; `None` if the thread was to be new and is there by now.
async fn write(
    tx: &mut Transaction<'_, Postgres>,
    new: &NewRun,
    plan: &Plan,
    admission: &Admission,
    is_new_thread: bool,
) -> Result<Option<WrittenRow>, StoreError> {
    let sql = if is_new_thread { concat!(insert_thread!(), create!()) } else { concat!(update_thread!(), create!()) };
    let messages = MessageColumns::of(&admission.messages);
    let fields = FieldColumns::of(&admission.fields);
    let first = plan.first.as_ref();
    sqlx::query_as(sql)
        .bind(new.caller.tenant.as_str())
        .bind(new.thread_id.as_str())
        .bind(new.caller.user.as_str())
        .bind(&new.thread_name)
        .bind(new.thread_meta.as_ref().map(text_of))
        .bind(&new.graph)
        .bind(admission.graph_version.as_str())
        .bind(text_of(&admission.meta))
        .bind(plan.thread_status)
        .bind(new.id.0)
        .bind(count(admission.messages.len()))
        .bind(&new.client_run_id)
        .bind(plan.root.0)
        .bind(plan.class)
        .bind(plan.status.as_str())
        .bind(plan.resumes.map(|run| run.0))
        .bind(text_of(&new.input))
        .bind(text_of(&new.config))
        .bind(new.step_limit)
        .bind(new.node_timeout.map(milliseconds))
        .bind(&plan.trace)
        .bind(new.observability)
        .bind(first.map(|(node, ..)| node))
        .bind(first.map(|(_, seq, _)| *seq))
        .bind(first.map(|(_, _, step)| step.pool.as_str()))
        .bind(first.map(|(_, _, step)| step.attempts_max))
        .bind(messages.ids)
        .bind(messages.roles)
        .bind(messages.bodies)
        .bind(&plan.in_log)
        .bind(fields.names)
        .bind(fields.values)
        .fetch_optional(&mut **tx)
        .await
        .doing(DOING)
}

fn milliseconds(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

/// $1 tenant, $2 thread, $3 user, $4 name, $5 meta, $6 graph, $7 version, $8 place, $9 thread status,
/// $10 run, $11 new messages, $15 run status.
macro_rules! insert_thread {
    () => {
        "
with t as (
  insert into thread (tenant, id, user_id, name, meta, graph, graph_version, execution_meta, status, version,
                      next_position, has_state, active_run, last_run)
  values ($1, $2, $3, case when $9 = 'busy' then $4 else replace($4, '{messages}', ($11::int)::text) end, $5::json,
          $6, $7, $8::json, $9::thread_status, 1, $11, true, case when $9 = 'busy' then $10::uuid end, $10)
  on conflict (tenant, id) do nothing
  returning key, version, 0::bigint as position
)"
    };
}

/// The same for a thread that is there; its name and meta stay what they are.
macro_rules! update_thread {
    () => {
        "
with t as (
  update thread
     set name = case when $9 <> 'busy' and name like '%{messages}%'
                     then replace(name, '{messages}', ((select count(*) from message m
                            where m.thread_key = key and m.removed_in is null) + $11::int)::text)
                     else name end,
         graph_version = $7, execution_meta = $8::json, status = $9::thread_status, version = version + 1,
         next_position = next_position + $11::int, has_state = true, stop_run = null, last_run = $10,
         active_run = case when $9 = 'busy' then $10::uuid end, updated_at = clock_timestamp()
   where tenant = $1 and id = $2
  returning key, version, next_position - $11::int as position
)"
    };
}

/// The checkpoint of the accepted input, the run, its messages and fields, and its first step, which
/// is backlog: dispatch sends it.
macro_rules! create {
    () => {
        ", c as (
  insert into checkpoint (thread_key, version, run_id, seq, node, execution_meta, next_position)
  select key, version, $10, 0, '__start__', $8::json, position + $11 from t
), r as (
  insert into run (id, client_run_id, root_id, resumes, thread_key, tenant, user_id, graph, graph_version, class, status,
                   input, config, step_limit, node_timeout_ms, trace, observability, first_version, version, finished_at)
  select $10, $12, $13::uuid, $16::uuid, t.key, $1, $3, $6, $7, $14::smallint, $15::run_status, $17::json, $18::json,
         $19::int, $20::bigint, $21, $22::bool, t.version, case when $9 <> 'busy' then t.version end,
         case when $9 <> 'busy' then clock_timestamp() end
    from t
  returning created_at, finished_at
), s as (
  insert into step (run_id, seq, thread_key, tenant, pool, class, graph_version, node, attempts_max)
  select $10, $24::int, t.key, $1, $25, $14, $7, $23, $26::smallint from t where $23::text is not null
), m as (
  insert into message (thread_key, position, message_id, role, body, in_log, added_in)
  select t.key, t.position + u.place - 1, u.id, u.role, u.body::json, u.in_log, t.version
    from t, unnest($27::text[], $28::text[], $29::text[], $30::bool[]) with ordinality as u (id, role, body, in_log, place)
), f as (
  insert into field (thread_key, name, version, value)
  select t.key, u.name, t.version, u.value::json from t, unnest($31::text[], $32::text[]) as u (name, value)
)
select t.key, t.version, r.created_at, r.finished_at from t, r"
    };
}
use {create, insert_thread, update_thread};
