//! The program as real processes on Postgres and Redis, for stories in which processes die.

use serde_json::{Value, json};
use sqlx::PgPool;
use std::path::PathBuf;

use crate::{Database, Postgres, Process, Redis, eventually, ports};

/// One installation: an api, workers and schedulers, each a process of its own.
pub struct Cluster {
    /// The api's address.
    pub base: String,
    /// Asks the tables.
    pub tables: PgPool,
    /// The api.
    pub api: Process,
    /// The workers, oldest first.
    pub workers: Vec<NamedWorker>,
    /// The schedulers.
    pub schedulers: Vec<Process>,
    /// The client.
    pub http: reqwest::Client,
    named: usize,
    environment: Vec<(String, String)>,
    starts: PathBuf,
    _folder: tempfile::TempDir,
    _database: Database,
}

/// A worker process and the name that the tables know it by.
pub struct NamedWorker {
    /// Its label; no two of a cluster share one.
    pub name: String,
    process: Process,
}

impl std::ops::Deref for NamedWorker {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl std::ops::DerefMut for NamedWorker {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

/// How many processes of each role, and what they are told.
#[derive(Debug, Clone, Default)]
pub struct Shape {
    /// Workers.
    pub workers: usize,
    /// Schedulers.
    pub schedulers: usize,
    /// More environment for all.
    pub environment: Vec<(&'static str, &'static str)>,
}

impl Cluster {
    /// Starts everything and waits until the api answers and every worker is known.
    ///
    /// # Panics
    /// If something does not start.
    pub async fn start(postgres: &Postgres, redis: &Redis, shape: &Shape) -> Self {
        let database = postgres.database().await;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let starts = folder.path().join("starts");
        let port = ports::free_port();
        let mut environment = vec![
            ("THREADGATE_DATABASE_URL".to_owned(), database.url.clone()),
            ("THREADGATE_REDIS_URL".to_owned(), redis.url.clone()),
            ("THREADGATE_REDIS_PREFIX".to_owned(), redis.prefix.clone()),
            ("THREADGATE_FIXTURE_STARTS".to_owned(), starts.display().to_string()),
            ("RUST_LOG".to_owned(), "info".to_owned()),
        ];
        environment.extend(shape.environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let listen = format!("127.0.0.1:{port}");
        let api = spawn(&["api", "--listen", &listen], &environment);
        let tables = PgPool::connect(&database.url).await.expect("the database answers");
        let http = crate::client::http();
        let mut cluster = Self {
            base: format!("http://{listen}"),
            tables,
            api,
            workers: Vec::new(),
            schedulers: Vec::new(),
            http,
            named: 0,
            environment,
            starts,
            _folder: folder,
            _database: database,
        };
        for _ in 0..shape.workers {
            cluster.add_worker(&[]);
        }
        for _ in 0..shape.schedulers {
            cluster.add_scheduler();
        }
        cluster.wait_for_workers(shape.workers).await;
        cluster
    }

    /// Starts one more worker.
    pub fn add_worker(&mut self, arguments: &[&str]) {
        self.named += 1;
        let name = format!("worker-{}", self.named);
        let arguments: Vec<&str> = ["worker", "--worker-name", &name].iter().chain(arguments).copied().collect();
        let process = spawn(&arguments, &self.environment);
        self.workers.push(NamedWorker { name, process });
    }

    /// Starts one more scheduler.
    pub fn add_scheduler(&mut self) {
        self.schedulers.push(spawn(&["scheduler"], &self.environment));
    }

    /// Starts the api again, at the same address.
    pub fn restart_api(&mut self) {
        let listen = self.base.trim_start_matches("http://").to_owned();
        self.api.kill_9();
        self.api = spawn(&["api", "--listen", &listen], &self.environment);
    }

    /// Waits until the api answers and `count` workers are known.
    pub async fn wait_for_workers(&self, count: usize) {
        eventually("the api and the workers", async || {
            let answer =
                self.http.get(format!("{}/v1/pools", self.base)).send().await.map_err(|error| error.to_string())?;
            let body: Value = answer.json().await.map_err(|error| error.to_string())?;
            let known =
                body["pools"].as_array().into_iter().flatten().filter_map(|pool| pool["workers"].as_u64()).max();
            if known.unwrap_or_default() >= count as u64 { Ok(()) } else { Err(body.to_string()) }
        })
        .await;
    }

    /// Creates a run of `graph` with one user message of `text` and `state`, on a thread of its own.
    ///
    /// # Panics
    /// If it is not accepted.
    pub async fn create_run(&self, graph: &str, text: &str, state: Value) -> String {
        let body = json!({
            "graph": graph,
            "thread_id": uuid::Uuid::new_v4().to_string(),
            "input": {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "state": state},
        });
        let answer =
            self.http.post(format!("{}/v1/runs", self.base)).json(&body).send().await.expect("the api answers");
        let status = answer.status();
        let body: Value = answer.json().await.expect("JSON");
        assert_eq!(status, 202, "{body}");
        body["run_id"].as_str().expect("a run id").to_owned()
    }

    /// Creates `count` runs, a few at a time.
    pub async fn create_runs(&self, count: usize, graph: &str, state: &Value) -> Vec<String> {
        use futures::StreamExt;
        futures::stream::iter(0..count)
            .map(|_| self.create_run(graph, "go", state.clone()))
            .buffer_unordered(16)
            .collect()
            .await
    }

    /// The status of a run, from the tables.
    pub async fn status(&self, run: &str) -> String {
        self.text(&format!("select status::text from run where id = '{run}'")).await
    }

    /// Waits until the tables say that every run has this status.
    pub async fn wait_for_all(&self, runs: &[String], status: &str) {
        let ids: Vec<uuid::Uuid> = runs.iter().map(|run| run.parse().expect("a run id")).collect();
        eventually(&format!("{} runs to be {status}", runs.len()), async || {
            let left: Vec<(String, i64)> = sqlx::query_as(
                "select status::text, count(*) from run where id = any($1) and status::text <> $2 group by 1",
            )
            .bind(&ids)
            .bind(status)
            .fetch_all(&self.tables)
            .await
            .map_err(|error| vec![(error.to_string(), 0)])?;
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
    }

    /// Waits until the step `seq` of `run` is leased; returns the worker's place in `workers`.
    pub async fn wait_for_lease(&self, run: &str, seq: i32) -> usize {
        let name = eventually(&format!("step {seq} of run {run} to be leased"), async || {
            let found: Option<(String,)> = sqlx::query_as(
                "select w.name from step s join worker w on w.id = s.worker where s.run_id::text = $1 and s.seq = $2 and s.status = 'leased'",
            )
            .bind(run)
            .bind(seq)
            .fetch_optional(&self.tables)
            .await
            .map_err(|error| error.to_string())?;
            found.map(|(name,)| name).ok_or_else(|| "not leased".to_owned())
        })
        .await;
        self.workers.iter().position(|worker| worker.name == name).expect("the holder is ours")
    }

    /// One value of the tables, as text.
    ///
    /// # Panics
    /// If the query fails.
    pub async fn text(&self, sql: &str) -> String {
        let (value,): (Option<String>,) =
            sqlx::query_as(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(&self.tables).await.expect(sql);
        value.unwrap_or_default()
    }

    /// One number of the tables.
    ///
    /// # Panics
    /// If the query fails.
    pub async fn number(&self, sql: &str) -> i64 {
        let (value,): (i64,) =
            sqlx::query_as(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(&self.tables).await.expect(sql);
        value
    }

    /// How often each node of `run` was started, by all workers: (node, attempt) in order.
    #[must_use]
    pub fn starts(&self, run: &str) -> Vec<(String, u32)> {
        let text = std::fs::read_to_string(&self.starts).unwrap_or_default();
        text.lines()
            .filter_map(|line| {
                let mut words = line.split(' ');
                (words.next()? == run).then_some(())?;
                Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
            })
            .collect()
    }

    /// What must hold in the tables whatever happened: invariants 2, 3 and 4 of the README.
    ///
    /// # Panics
    /// If one of them does not.
    pub async fn assert_invariants(&self) {
        let twice = "select count(*) from (select 1 from checkpoint where run_id is not null group by run_id, seq having count(*) > 1) t";
        assert_eq!(self.number(twice).await, 0, "a step was committed twice");
        let gaps = "select count(*) from (select version - lag(version) over (partition by thread_key order by version) as d from checkpoint) t where d <> 1";
        assert_eq!(self.number(gaps).await, 0, "a thread's versions are not consecutive");
        let behind = "select count(*) from thread t where t.version <> coalesce((select max(version) from checkpoint c where c.thread_key = t.key), 0)";
        assert_eq!(self.number(behind).await, 0, "a thread's version is not its last checkpoint's");
        let without = "select count(*) from step s where s.status = 'done' and not exists (select 1 from checkpoint c where c.run_id = s.run_id and c.seq = s.seq)";
        assert_eq!(self.number(without).await, 0, "a finished step has no checkpoint");
        let stuck = "select count(*) from run r where r.status in ('queued', 'running') and not exists (select 1 from step s where s.run_id = r.id and s.status in ('ready', 'leased', 'delayed'))";
        assert_eq!(self.number(stuck).await, 0, "an active run has no open step");
        let active = "select count(*) from (select 1 from run where status in ('queued', 'running') group by thread_key having count(*) > 1) t";
        assert_eq!(self.number(active).await, 0, "a thread has two active runs");
    }
}

fn spawn(arguments: &[&str], environment: &[(String, String)]) -> Process {
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    Process::fixture(arguments, &environment)
}
