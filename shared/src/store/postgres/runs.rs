//! Runs as a client sees them.

use std::collections::HashMap;

use async_trait::async_trait;
use sqlx::FromRow;
use uuid::Uuid;

use super::PgStore;
use super::error::{Doing, corrupt, repeated};
use super::rows::{RunRow, fields_from, parsed, run_status, select_run};
use crate::domain::{MessageId, PoolName, RunId, RunStatus, Scope, StepId, ThreadId, WorkerId};
use crate::store::{
    Admit, AttemptEnd, AttemptRecord, Change, Created, NewRun, RunFilter, RunRecord, Runs, StepRecord, StepStatus,
    StopAnswer, StoreError, Time, WhyFacts,
};

#[async_trait]
impl Runs for PgStore {
    async fn create_run(&self, new: NewRun, admit: Admit<'_>) -> Result<Created, StoreError> {
        self.create(&new, admit).await
    }

    async fn run(&self, scope: &Scope, id: RunId) -> Result<Option<RunRecord>, StoreError> {
        let one = select_run!("where r.id = $1 and r.tenant = $2 and ($3::text is null or t.user_id = $3)");
        let row: Option<RunRow> = repeated!(async {
            sqlx::query_as(one)
                .bind(id.0)
                .bind(scope.tenant.as_str())
                .bind(scope.owner.as_ref().map(|owner| owner.as_str()))
                .fetch_optional(&self.pool)
                .await
                .doing("read a run")
        })?;
        row.map(RunRow::record).transpose()
    }

    async fn last_of_chain(&self, root: RunId) -> Result<Option<RunRecord>, StoreError> {
        let last = select_run!(
            "where r.id = coalesce(
               (select c.id from run c where c.root_id = $1 and c.root_id <> c.id order by c.place desc limit 1), $1)"
        );
        let row: Option<RunRow> = repeated!(async {
            sqlx::query_as(last).bind(root.0).fetch_optional(&self.pool).await.doing("read a chain of runs")
        })?;
        row.map(RunRow::record).transpose()
    }

    async fn runs(&self, scope: &Scope, filter: &RunFilter) -> Result<Vec<RunRecord>, StoreError> {
        repeated!(self.runs_once(scope, filter))
    }

    async fn finished(&self, ids: &[RunId]) -> Result<Vec<(RunId, RunStatus)>, StoreError> {
        let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
        let final_ones = "select id, status::text from run where id = any ($1::uuid[]) and finished_at is not null";
        let rows: Vec<(Uuid, String)> = repeated!(async {
            sqlx::query_as(final_ones).bind(&ids).fetch_all(&self.pool).await.doing("ask which runs are final")
        })?;
        rows.into_iter().map(|(id, status)| Ok((RunId(id), run_status(&status)?))).collect()
    }

    async fn steps(&self, run: RunId) -> Result<Vec<StepRecord>, StoreError> {
        repeated!(self.steps_once(run))
    }

    async fn changes(&self, run: RunId, after: i64) -> Result<Vec<Change>, StoreError> {
        let rows: Vec<ChangeRow> = repeated!(async {
            sqlx::query_as(CHANGES).bind(run.0).bind(after).fetch_all(&self.pool).await.doing(READ_CHANGES)
        })?;
        rows.into_iter().map(ChangeRow::change).collect()
    }

    async fn stop_thread(&self, scope: &Scope, thread: &ThreadId) -> Result<StopAnswer, StoreError> {
        repeated!(self.stop_thread_once(scope, thread))
    }

    async fn stop_run(&self, scope: &Scope, run: RunId) -> Result<Option<RunRecord>, StoreError> {
        let Some(wanted) = self.run(scope, run).await? else { return Ok(None) };
        repeated!(self.stop_chain_once(scope, wanted.root))?;
        self.last_of_chain(wanted.root).await
    }

    async fn why(&self, run: RunId) -> Result<Option<WhyFacts>, StoreError> {
        let one = select_run!("where r.id = $1");
        let row: Option<RunRow> =
            repeated!(async { sqlx::query_as(one).bind(run.0).fetch_optional(&self.pool).await.doing("read a run") })?;
        let Some(row) = row else { return Ok(None) };
        let step = self.steps(run).await?.pop();
        let facts: FactsRow = repeated!(async {
            sqlx::query_as(FACTS).bind(run.0).fetch_one(&self.pool).await.doing("ask why a run waits")
        })?;
        Ok(Some(WhyFacts {
            run: row.record()?,
            in_backlog: facts.in_backlog,
            stop_requested: facts.stop_requested,
            due_at: facts.due_at,
            pool_workers: facts.pool_workers,
            able_workers: facts.able_workers,
            ready_in_pool: facts.ready_in_pool,
            now: facts.now,
            step,
        }))
    }
}

impl PgStore {
    async fn runs_once(&self, scope: &Scope, filter: &RunFilter) -> Result<Vec<RunRecord>, StoreError> {
        let statuses: Vec<&str> = filter.statuses.iter().map(|status| status.as_str()).collect();
        let rows: Vec<RunRow> = sqlx::query_as(select_run!(
            "where r.tenant = $1 and ($2::text is null or r.user_id = $2)
               and (cardinality($3::text[]) = 0 or r.status = any ($3::run_status[]))
               and ($4::text is null or r.graph = $4)
               and ($5::text is null or r.thread_key = (select key from thread where tenant = $1 and id = $5))
               and ($6::uuid is null or r.id < $6)
             order by r.id desc limit $7"
        ))
        .bind(scope.tenant.as_str())
        .bind(scope.owner.as_ref().map(|owner| owner.as_str()))
        .bind(statuses)
        .bind(&filter.graph)
        .bind(filter.thread.as_ref().map(|thread| thread.as_str()))
        .bind(filter.before.map(|run| run.0))
        .bind(i64::from(filter.limit))
        .fetch_all(&self.pool)
        .await
        .doing("list runs")?;
        rows.into_iter().map(RunRow::record).collect()
    }

    async fn steps_once(&self, run: RunId) -> Result<Vec<StepRecord>, StoreError> {
        let doing = "read the steps of a run";
        let attempts: Vec<AttemptRow> = sqlx::query_as(
            "select seq, attempt, worker, started_at, ended_at, \"end\", error::text as error
               from step_attempt where run_id = $1 order by seq, attempt",
        )
        .bind(run.0)
        .fetch_all(&self.pool)
        .await
        .doing(doing)?;
        let mut of_step: HashMap<i32, Vec<AttemptRecord>> = HashMap::new();
        for row in attempts {
            of_step.entry(row.seq).or_default().push(row.record(doing)?);
        }
        let rows: Vec<StepRow> = sqlx::query_as(
            "select seq, node, pool, status::text as status, attempt, attempts_max, worker, version, started_at,
                    finished_at, run_at
               from step where run_id = $1 order by seq",
        )
        .bind(run.0)
        .fetch_all(&self.pool)
        .await
        .doing(doing)?;
        rows.into_iter()
            .map(|row| {
                let attempts = of_step.remove(&row.seq).unwrap_or_default();
                row.record(run, attempts)
            })
            .collect()
    }
}

#[derive(FromRow)]
struct StepRow {
    seq: i32,
    node: String,
    pool: String,
    status: String,
    attempt: i16,
    attempts_max: i16,
    worker: Option<Uuid>,
    version: Option<i64>,
    started_at: Option<Time>,
    finished_at: Option<Time>,
    run_at: Time,
}

impl StepRow {
    fn record(self, run: RunId, attempts: Vec<AttemptRecord>) -> Result<StepRecord, StoreError> {
        let status = StepStatus::parse(&self.status)
            .ok_or_else(|| corrupt("read a step", format!("'{}' is not a status of steps", self.status)))?;
        Ok(StepRecord {
            id: StepId { run_id: run, seq: self.seq },
            node: self.node,
            pool: PoolName(self.pool),
            status,
            attempt: self.attempt,
            attempts_max: self.attempts_max,
            worker: self.worker.map(WorkerId),
            version: self.version,
            started_at: self.started_at,
            finished_at: self.finished_at,
            run_at: self.run_at,
            attempts,
        })
    }
}

#[derive(FromRow)]
struct AttemptRow {
    seq: i32,
    attempt: i16,
    worker: Option<Uuid>,
    started_at: Option<Time>,
    ended_at: Time,
    end: String,
    error: Option<String>,
}

impl AttemptRow {
    fn record(self, doing: &'static str) -> Result<AttemptRecord, StoreError> {
        let error = self.error.map(|error| parsed(&error, doing)).transpose()?;
        Ok(AttemptRecord {
            attempt: self.attempt,
            worker: self.worker.map(WorkerId),
            started_at: self.started_at,
            ended_at: self.ended_at,
            end: AttemptEnd { end: self.end, error },
        })
    }
}

const READ_CHANGES: &str = "read what a run changed";

/// $1 run, $2 version. Messages of a version are the positions between its checkpoint and the one
/// before; fields are probed name by name.
const CHANGES: &str = "
select c.seq, c.node, c.version, c.at, c.execution_meta::text as meta, a.bodies, g.removed, f.names, f.values
  from run r
  join checkpoint c on c.thread_key = r.thread_key and c.run_id = r.id
                   and c.version >= greatest(r.first_version, $2 + 1)
                   and c.version <= coalesce(r.version, 9223372036854775807)
  left join checkpoint p on p.thread_key = c.thread_key and p.version = c.version - 1
 cross join lateral (
   select array_agg(m.body::text order by m.position) as bodies from message m
    where m.thread_key = c.thread_key and m.position >= coalesce(p.next_position, 0) and m.position < c.next_position
      and m.added_in = c.version and m.removed_in is distinct from m.added_in
 ) a
 cross join lateral (
   select array_agg(m.body::text order by m.position) as removed from message m
    where m.thread_key = c.thread_key and m.removed_in = c.version and m.added_in < c.version
 ) g
 cross join lateral (
   with recursive names (name) as (
     (select x.name from field x where x.thread_key = c.thread_key order by x.name limit 1)
     union all
     select n.name from names cross join lateral (
       select x.name from field x where x.thread_key = c.thread_key and x.name > names.name order by x.name limit 1) n
   )
   select array_agg(x.name order by x.name) as names, array_agg(x.value::text order by x.name) as values
     from names join field x on x.thread_key = c.thread_key and x.name = names.name and x.version = c.version
 ) f
 where r.id = $1
 order by c.version";

#[derive(FromRow)]
struct ChangeRow {
    seq: Option<i32>,
    node: String,
    version: i64,
    at: Time,
    meta: String,
    bodies: Option<Vec<String>>,
    removed: Option<Vec<String>>,
    names: Option<Vec<String>>,
    values: Option<Vec<String>>,
}

/// Of a stored message only its id, whose JSON type the body keeps.
#[derive(serde::Deserialize)]
struct OnlyId {
    message_id: MessageId,
}

impl ChangeRow {
    fn change(self) -> Result<Change, StoreError> {
        let removed = self.removed.unwrap_or_default();
        let removed = removed.iter().map(|body| parsed::<OnlyId>(body, READ_CHANGES).map(|only| only.message_id));
        let bodies = self.bodies.unwrap_or_default();
        Ok(Change {
            seq: self.seq.unwrap_or_default(),
            node: self.node,
            version: self.version,
            at: self.at,
            messages: bodies.iter().map(|body| parsed(body, READ_CHANGES)).collect::<Result<_, _>>()?,
            removed: removed.collect::<Result<_, _>>()?,
            fields: fields_from(self.names, self.values, READ_CHANGES)?,
            meta: parsed(&self.meta, READ_CHANGES)?,
        })
    }
}

/// $1 run: its last step, and who could take it.
const FACTS: &str = "
select s.status is not distinct from 'ready' and s.run_id is not null and s.due_at is null as in_backlog,
       (t.stop_run = r.id) is true as stop_requested, s.due_at, clock_timestamp() as now,
       (select count(*) from worker w where w.seen_at > statement_timestamp() - interval '30 s'
           and s.pool = any (w.pools)) as pool_workers,
       (select count(*) from worker w where w.seen_at > statement_timestamp() - interval '30 s'
           and s.pool = any (w.pools)
           and (r.graph_version like 'd-%' or r.graph_version = any (w.versions))) as able_workers,
       (select count(*) from step q where q.status = 'ready' and q.due_at is null and q.pool = s.pool)
       + (select count(*) from step q where q.due_at is not null and q.status = 'ready' and q.pool = s.pool) as ready_in_pool
  from run r join thread t on t.key = r.thread_key
  left join lateral (select * from step where run_id = r.id order by seq desc limit 1) s on true
 where r.id = $1";

#[derive(FromRow)]
struct FactsRow {
    in_backlog: bool,
    stop_requested: bool,
    due_at: Option<Time>,
    pool_workers: i64,
    able_workers: i64,
    ready_in_pool: i64,
    now: Time,
}
