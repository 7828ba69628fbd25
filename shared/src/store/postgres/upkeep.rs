//! What the scheduler and the operators ask.

use async_trait::async_trait;
use sqlx::FromRow;

use super::PgStore;
use super::error::{Doing, repeated};
use super::rows::{JobRow, parsed, run_status};
use crate::domain::{GraphVersion, PoolName, RunStatus, Scope, StepId, Tenant, ThreadId, WorkerId};
use crate::queue::Job;
use crate::store::{AuditRecord, PoolRecord, StoreClock, StoreError, Swept, Time, Upkeep, WorkerRecord};

#[async_trait]
impl Upkeep for PgStore {
    async fn dispatch(
        &self,
        pool: &PoolName,
        class: i16,
        after: &Tenant,
        tenants: u32,
        each: u32,
        except: &[GraphVersion],
    ) -> Result<Vec<(Job, Tenant)>, StoreError> {
        let doing = "dispatch steps";
        let except: Vec<&str> = except.iter().map(GraphVersion::as_str).collect();
        let rows: Vec<JobRow> = repeated!(async {
            let mut connection = self.hints.take().await.doing(doing)?;
            let rows = sqlx::query_as(DISPATCH)
                .bind(pool.as_str())
                .bind(after.as_str())
                .bind(class)
                .bind(i64::from(tenants))
                .bind(i64::from(each))
                .bind(&except)
                .fetch_all(&mut *connection)
                .await
                .doing(doing)?;
            connection.keep();
            Ok(rows)
        })?;
        Ok(rows.into_iter().map(JobRow::job).collect())
    }

    async fn backlog_lanes(&self) -> Result<Vec<(PoolName, i16)>, StoreError> {
        let rows: Vec<(String, i16)> =
            repeated!(async { sqlx::query_as(BACKLOG_LANES).fetch_all(&self.pool).await.doing("look for backlog") })?;
        Ok(rows.into_iter().map(|(pool, class)| (PoolName(pool), class)).collect())
    }

    async fn sweep(&self, limit: u32, expire: bool) -> Result<Swept, StoreError> {
        repeated!(self.sweep_once(limit, expire))
    }

    async fn clock(&self) -> Result<StoreClock, StoreError> {
        let (now, started): (Time, Time) = repeated!(async {
            sqlx::query_as("select clock_timestamp(), pg_postmaster_start_time()")
                .fetch_one(&self.pool)
                .await
                .doing("read the database's clock")
        })?;
        Ok(StoreClock { now, started })
    }

    async fn repair(&self, limit: u32) -> Result<u32, StoreError> {
        self.repair_all(limit).await
    }

    async fn worker_seen(&self, worker: &WorkerRecord) -> Result<(), StoreError> {
        let pools: Vec<&str> = worker.pools.iter().map(PoolName::as_str).collect();
        let versions: Vec<&str> = worker.versions.iter().map(GraphVersion::as_str).collect();
        repeated!(async {
            sqlx::query(
                "insert into worker (id, name, pools, slots, versions, seen_at)
                 values ($1, $2, $3, $4, $5, clock_timestamp())
                 on conflict (id) do update set name = excluded.name, pools = excluded.pools, slots = excluded.slots,
                    versions = excluded.versions, seen_at = excluded.seen_at",
            )
            .bind(worker.id.0)
            .bind(&worker.name)
            .bind(&pools)
            .bind(worker.slots)
            .bind(&versions)
            .execute(&self.pool)
            .await
            .doing("say that a worker lives")
        })?;
        Ok(())
    }

    async fn unsend(&self, steps: &[StepId]) -> Result<(), StoreError> {
        let (runs, seqs): (Vec<uuid::Uuid>, Vec<i32>) = steps.iter().map(|step| (step.run_id.0, step.seq)).unzip();
        repeated!(async {
            sqlx::query(UNSEND)
                .bind(&runs)
                .bind(&seqs)
                .execute(&self.pool)
                .await
                .doing("put steps back into the backlog")
        })?;
        Ok(())
    }

    async fn worker_gone(&self, worker: WorkerId) -> Result<(), StoreError> {
        repeated!(async {
            sqlx::query("delete from worker where id = $1")
                .bind(worker.0)
                .execute(&self.pool)
                .await
                .doing("forget a worker")
        })?;
        Ok(())
    }

    async fn pools(&self) -> Result<Vec<PoolRecord>, StoreError> {
        let rows: Vec<PoolRow> =
            repeated!(async { sqlx::query_as(POOLS).fetch_all(&self.pool).await.doing("look at the pools") })?;
        Ok(rows.into_iter().map(PoolRow::record).collect())
    }

    async fn run_counts(&self) -> Result<Vec<(RunStatus, i64)>, StoreError> {
        let rows: Vec<(String, i64)> = repeated!(async {
            sqlx::query_as("select status::text, count(*) from run group by status")
                .fetch_all(&self.pool)
                .await
                .doing("count runs")
        })?;
        rows.into_iter().map(|(status, count)| Ok((run_status(&status)?, count))).collect()
    }

    async fn audit(&self, scope: &Scope, id: &ThreadId) -> Result<Vec<AuditRecord>, StoreError> {
        let doing = "read a thread's audit entries";
        let rows: Vec<(Time, String, String, String)> = repeated!(async {
            sqlx::query_as(
                "select a.at, a.who, a.action, a.detail::text from audit a
                  where a.thread_key = (select key from thread where tenant = $1 and id = $2
                                           and ($3::text is null or user_id = $3))
                  order by a.id",
            )
            .bind(scope.tenant.as_str())
            .bind(id.as_str())
            .bind(scope.owner.as_ref().map(|owner| owner.as_str()))
            .fetch_all(&self.pool)
            .await
            .doing(doing)
        })?;
        rows.into_iter()
            .map(|(at, who, action, detail)| Ok(AuditRecord { at, who, action, detail: parsed(&detail, doing)? }))
            .collect()
    }
}

/// $1 pool, $2 the last tenant served, $3 class, $4 tenants, $5 steps each, $6 versions left out.
///
/// Walks the backlog's index from one pair of tenant and version to the next, counting tenants that
/// have something to send, so that neither anyone's backlog nor a version left out is ever read
/// through. Rows somebody holds are skipped: two dispatchers share the work. The commit is
/// asynchronous: a step whose mark is lost is sent again.
const DISPATCH: &str = "
with recursive lane as (
  (select s.tenant, s.graph_version, (s.graph_version <> all ($6::text[])) as wanted,
          case when s.graph_version <> all ($6) then 1 else 0 end as n,
          case when s.graph_version <> all ($6) then s.tenant end as counted
     from step s
    where s.pool = $1 and s.class = $3 and s.status = 'ready' and s.due_at is null and s.tenant > $2
    order by s.tenant, s.graph_version limit 1)
  union all
  select p.tenant, p.graph_version, p.wanted,
         lane.n + case when p.wanted and p.tenant is distinct from lane.counted then 1 else 0 end,
         case when p.wanted then p.tenant else lane.counted end
    from lane cross join lateral (
      select s.tenant, s.graph_version, (s.graph_version <> all ($6)) as wanted
        from step s
       where s.pool = $1 and s.class = $3 and s.status = 'ready' and s.due_at is null
         and (s.tenant, s.graph_version) > (lane.tenant, lane.graph_version)
       order by s.tenant, s.graph_version limit 1) p
   where lane.n <= $4
), pick as (
  select p.run_id, p.seq, p.run_at, lane.tenant
    from lane cross join lateral (
      select s.run_id, s.seq, s.run_at from step s
       where s.pool = $1 and s.class = $3 and s.tenant = lane.tenant and s.graph_version = lane.graph_version
         and s.status = 'ready' and s.due_at is null
       order by s.run_at limit $5 for no key update skip locked) p
   where lane.wanted and lane.n <= $4
), ranked as (
  select run_id, seq, row_number() over (partition by tenant order by run_at, run_id) as place from pick
), taken as (
  update step s set due_at = clock_timestamp() + interval '4 s'
    from ranked k where s.run_id = k.run_id and s.seq = k.seq and k.place <= $5
  returning s.run_id, s.seq, s.tenant, s.pool, s.class, s.graph_version, s.attempt, k.place
)
select k.run_id, k.seq, k.tenant, k.pool, k.class, k.graph_version, k.attempt, r.trace
  from taken k join run r on r.id = k.run_id
 order by k.place, k.tenant";

/// From one pair to the next in the index, however much waits behind each.
const BACKLOG_LANES: &str = "
with recursive lane as (
  (select s.pool, s.class from step s where s.status = 'ready' and s.due_at is null order by s.pool, s.class limit 1)
  union all
  select p.pool, p.class from lane cross join lateral (
    select s.pool, s.class from step s
     where s.status = 'ready' and s.due_at is null and (s.pool, s.class) > (lane.pool, lane.class)
     order by s.pool, s.class limit 1) p
)
select pool, class from lane";

/// Backlog and watched steps are found by their own indexes; steps that are over are in neither.
const POOLS: &str = "
with open as (
  select pool, status, run_at from step where status = 'ready' and due_at is null
  union all
  select pool, status, run_at from step where due_at is not null
), work as (
  select pool, count(*) filter (where status = 'ready') as runnable, count(*) filter (where status = 'leased') as running,
         min(run_at) filter (where status = 'ready') as oldest
    from open where status <> 'delayed' group by pool
), crew as (
  select p.pool, count(*) as workers, sum(w.slots) as slots
    from worker w cross join unnest(w.pools) as p (pool)
   where w.seen_at > statement_timestamp() - interval '30 s' group by p.pool
)
select coalesce(work.pool, crew.pool) as pool, coalesce(runnable, 0) as runnable, coalesce(running, 0) as running,
       coalesce(extract(epoch from clock_timestamp() - oldest), 0)::float8 as oldest_wait_s,
       coalesce(workers, 0) as workers, coalesce(slots, 0)::bigint as slots
  from work full join crew on crew.pool = work.pool
 order by 1";

#[derive(FromRow)]
struct PoolRow {
    pool: String,
    runnable: i64,
    running: i64,
    oldest_wait_s: f64,
    workers: i64,
    slots: i64,
}

impl PoolRow {
    fn record(self) -> PoolRecord {
        PoolRecord {
            pool: PoolName(self.pool),
            runnable: self.runnable,
            running: self.running,
            oldest_wait_s: self.oldest_wait_s.max(0.0),
            workers: self.workers,
            slots: self.slots,
        }
    }
}

const UNSEND: &str = "
with sent as (
  select s.run_id, s.seq from unnest($1::uuid[], $2::int[]) as j (run_id, seq)
    join step s on s.run_id = j.run_id and s.seq = j.seq
   where s.status = 'ready' and s.due_at is not null order by s.run_id, s.seq for no key update of s skip locked
)
update step s set due_at = null from sent where s.run_id = sent.run_id and s.seq = sent.seq";
