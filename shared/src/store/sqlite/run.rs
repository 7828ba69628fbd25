//! Runs and steps as they are read.

use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::row::{Answer, Columns, json_text};
use crate::domain::{
    GraphVersion, LeaseToken, PoolName, RunId, RunStatus, Scope, StepId, Tenant, ThreadId, ThreadKey, UserId, WorkerId,
};
use crate::queue::{Job, Lane};
use crate::store::{AttemptEnd, AttemptRecord, RunFilter, RunRecord, StepRecord, StepStatus, Time};

macro_rules! select_run {
    ($where:literal) => {
        concat!(
            "select r.id, r.client_run_id, r.root_id, r.resumes, t.id as thread_id, r.thread_key, r.tenant, t.user_id,
                    r.graph, r.graph_version, r.class, r.status, r.input, r.config, r.step_limit, r.node_timeout,
                    r.error, r.trace, r.observability, coalesce(r.version, t.version) as version, r.created_at,
                    r.started_at, r.finished_at
               from run r join thread t on t.key = r.thread_key ",
            $where
        )
    };
}

macro_rules! select_step {
    ($where:literal) => {
        concat!(
            "select run_id, seq, thread_key, pool, class, graph_version, node, status, attempt, attempts_max,
                    run_at, due_at, token, worker, started_at, finished_at, version
               from step where ",
            $where
        )
    };
}

/// A step's row.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) id: StepId,
    pub(super) thread_key: ThreadKey,
    pub(super) pool: PoolName,
    pub(super) class: i16,
    pub(super) graph_version: GraphVersion,
    pub(super) node: String,
    pub(super) status: StepStatus,
    pub(super) attempt: i16,
    pub(super) attempts_max: i16,
    pub(super) run_at: Time,
    pub(super) due_at: Option<Time>,
    pub(super) token: Option<LeaseToken>,
    pub(super) worker: Option<WorkerId>,
    pub(super) started_at: Option<Time>,
    pub(super) finished_at: Option<Time>,
    pub(super) version: Option<i64>,
}

impl Step {
    /// The step of that id.
    pub(super) async fn find(db: &mut SqliteConnection, id: StepId) -> Answer<Option<Self>> {
        let row = sqlx::query(select_step!("run_id = ?1 and seq = ?2"))
            .bind(id.run_id.to_string())
            .bind(id.seq)
            .fetch_optional(db)
            .await?;
        row.as_ref().map(Self::read).transpose()
    }

    /// The step of a run that is not over yet.
    pub(super) async fn open_of(db: &mut SqliteConnection, run: RunId) -> Answer<Option<Self>> {
        let row = sqlx::query(select_step!(
            "run_id = ?1 and status in ('ready', 'leased', 'delayed') order by seq desc limit 1"
        ))
        .bind(run.to_string())
        .fetch_optional(db)
        .await?;
        row.as_ref().map(Self::read).transpose()
    }

    /// The newest step of a run.
    pub(super) async fn last_of(db: &mut SqliteConnection, run: RunId) -> Answer<Option<Self>> {
        let row = sqlx::query(select_step!("run_id = ?1 order by seq desc limit 1"))
            .bind(run.to_string())
            .fetch_optional(db)
            .await?;
        row.as_ref().map(Self::read).transpose()
    }

    /// The steps of a run in order.
    pub(super) async fn all_of(db: &mut SqliteConnection, run: RunId) -> Answer<Vec<Self>> {
        let rows = sqlx::query(select_step!("run_id = ?1 order by seq")).bind(run.to_string()).fetch_all(db).await?;
        rows.iter().map(Self::read).collect()
    }

    /// Steps to look at, longest due first; without `leased` the leases are left alone.
    pub(super) async fn due(db: &mut SqliteConnection, now: i64, limit: u32, leased: bool) -> Answer<Vec<Self>> {
        let rows = sqlx::query(select_step!("due_at <= ?1 and (status <> 'leased' or ?2) order by due_at limit ?3"))
            .bind(now)
            .bind(leased)
            .bind(limit)
            .fetch_all(db)
            .await?;
        rows.iter().map(Self::read).collect()
    }

    fn read(row: &SqliteRow) -> Answer<Self> {
        Ok(Self {
            id: StepId { run_id: row.id("run_id")?, seq: row.int("seq")? },
            thread_key: ThreadKey(row.int("thread_key")?),
            pool: PoolName(row.text("pool")?),
            class: row.int("class")?,
            graph_version: GraphVersion(row.text("graph_version")?),
            node: row.text("node")?,
            status: row.word("status", StepStatus::parse)?,
            attempt: row.int("attempt")?,
            attempts_max: row.int("attempts_max")?,
            run_at: row.time("run_at")?,
            due_at: row.opt("due_at", Columns::time)?,
            token: row.opt("token", Columns::id)?,
            worker: row.opt("worker", Columns::id)?,
            started_at: row.opt("started_at", Columns::time)?,
            finished_at: row.opt("finished_at", Columns::time)?,
            version: row.opt("version", Columns::int)?,
        })
    }

    /// Whether this lease is the step's.
    pub(super) fn is_held_by(&self, token: LeaseToken) -> bool {
        self.status == StepStatus::Leased && self.token == Some(token)
    }

    /// The wake-up for it.
    pub(super) fn job(&self, trace: Option<String>) -> Job {
        let graph = self.graph_version.is_code().then(|| self.graph_version.clone());
        let lane = Lane { pool: self.pool.clone(), class: self.class, graph };
        Job { step: self.id, lane, attempt: self.attempt, trace }
    }

    /// The step as clients see it.
    pub(super) fn record(self, attempts: Vec<AttemptRecord>) -> StepRecord {
        StepRecord {
            id: self.id,
            node: self.node,
            pool: self.pool,
            status: self.status,
            attempt: self.attempt,
            attempts_max: self.attempts_max,
            worker: self.worker,
            version: self.version,
            started_at: self.started_at,
            finished_at: self.finished_at,
            run_at: self.run_at,
            attempts,
        }
    }
}

/// The attempts of a run's steps that did not commit, with the steps' seqs, oldest first.
pub(super) async fn attempts(db: &mut SqliteConnection, run: RunId) -> Answer<Vec<(i32, AttemptRecord)>> {
    let rows = sqlx::query(
        "select seq, attempt, worker, started_at, ended_at, outcome, error
           from step_attempt where run_id = ?1 order by seq, attempt",
    )
    .bind(run.to_string())
    .fetch_all(db)
    .await?;
    let read = |row: &SqliteRow| {
        let end = AttemptEnd { end: row.text("outcome")?, error: row.opt("error", Columns::json)? };
        let attempt = AttemptRecord {
            attempt: row.int("attempt")?,
            worker: row.opt("worker", Columns::id)?,
            started_at: row.opt("started_at", Columns::time)?,
            ended_at: row.time("ended_at")?,
            end,
        };
        Ok((row.int("seq")?, attempt))
    };
    rows.iter().map(read).collect()
}

/// One run, whoever owns it.
pub(super) async fn find(db: &mut SqliteConnection, id: RunId) -> Answer<Option<RunRecord>> {
    let row = sqlx::query(select_run!("where r.id = ?1")).bind(id.to_string()).fetch_optional(db).await?;
    row.as_ref().map(read).transpose()
}

/// One run, if the scope may see it.
pub(super) async fn in_scope(db: &mut SqliteConnection, scope: &Scope, id: RunId) -> Answer<Option<RunRecord>> {
    let visible =
        |run: &RunRecord| run.tenant == scope.tenant && scope.owner.as_ref().is_none_or(|owner| *owner == run.user);
    Ok(find(db, id).await?.filter(visible))
}

/// The last run of the chain that starts at `root`.
pub(super) async fn last_of_chain(db: &mut SqliteConnection, root: RunId) -> Answer<Option<RunRecord>> {
    let row = sqlx::query(select_run!("where r.root_id = ?1 order by r.place desc limit 1"))
        .bind(root.to_string())
        .fetch_optional(db)
        .await?;
    row.as_ref().map(read).transpose()
}

/// The W3C `traceparent` of a run.
pub(super) async fn trace_of(db: &mut SqliteConnection, run: RunId) -> Answer<Option<String>> {
    let row = sqlx::query("select trace from run where id = ?1").bind(run.to_string()).fetch_optional(db).await?;
    row.map_or(Ok(None), |row| row.try_get("trace"))
}

/// Runs, newest first.
pub(super) async fn list(db: &mut SqliteConnection, scope: &Scope, filter: &RunFilter) -> Answer<Vec<RunRecord>> {
    let statuses: Vec<&str> = filter.statuses.iter().map(|status| status.as_str()).collect();
    let narrowing = [
        (scope.owner.is_some(), "and t.user_id = ?2"),
        (!statuses.is_empty(), "and r.status in (select value from json_each(?3))"),
        (filter.graph.is_some(), "and r.graph = ?4"),
        (filter.thread.is_some(), "and t.id = ?5"),
        (filter.before.is_some(), "and r.id < ?6"),
    ];
    let narrowing = narrowing.iter().filter(|(wanted, _)| *wanted).map(|(_, sql)| *sql).collect::<Vec<_>>();
    let order = "order by r.id desc limit ?7";
    let rows =
        sqlx::query(AssertSqlSafe(format!("{} {} {order}", select_run!("where r.tenant = ?1"), narrowing.join(" "))))
            .bind(scope.tenant.as_str())
            .bind(scope.owner.as_ref().map(|owner| owner.as_str().to_owned()))
            .bind(json_text(&statuses))
            .bind(filter.graph.as_deref())
            .bind(filter.thread.as_ref().map(|thread: &ThreadId| thread.as_str().to_owned()))
            .bind(filter.before.map(|run| run.to_string()))
            .bind(filter.limit)
            .fetch_all(db)
            .await?;
    rows.iter().map(read).collect()
}

fn read(row: &SqliteRow) -> Answer<RunRecord> {
    Ok(RunRecord {
        id: row.id("id")?,
        client_run_id: row.opt("client_run_id", Columns::text)?,
        root: row.id("root_id")?,
        resumes: row.opt("resumes", Columns::id)?,
        thread_id: ThreadId(row.text("thread_id")?),
        thread_key: ThreadKey(row.int("thread_key")?),
        tenant: Tenant(row.text("tenant")?),
        user: UserId(row.text("user_id")?),
        graph: row.text("graph")?,
        graph_version: GraphVersion(row.text("graph_version")?),
        class: row.int("class")?,
        status: row.word("status", RunStatus::parse)?,
        input: row.json("input")?,
        config: row.json("config")?,
        step_limit: row.int("step_limit")?,
        node_timeout: row.opt("node_timeout", Columns::int)?.map(Duration::from_micros),
        error: row.opt("error", Columns::json)?,
        trace: row.opt("trace", Columns::text)?,
        observability: row.flag("observability")?,
        version: row.int("version")?,
        created_at: row.time("created_at")?,
        started_at: row.opt("started_at", Columns::time)?,
        finished_at: row.opt("finished_at", Columns::time)?,
    })
}
