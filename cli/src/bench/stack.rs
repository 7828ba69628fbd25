//! The processes that are measured: one api, workers and one scheduler, each a child of the benchmark.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::{BenchArgs, cpu, limit, load};

const DATABASE: &str = "threadgate_bench";

/// Running processes on a database of their own.
pub(super) struct Stack {
    pub(super) base: String,
    server: String,
    pub(super) database: String,
    redis_url: String,
    children: Vec<(String, Child)>,
    service_pids: Vec<u32>,
    options: Options,
}

#[derive(Clone)]
struct Options {
    linger: String,
    log_dir: Option<std::path::PathBuf>,
    prefix: String,
}

impl Stack {
    /// Starts one api, and as many workers and schedulers as `workers` says; waits until they are ready.
    pub(super) async fn start(args: &BenchArgs, linger: &str, workers: usize) -> Result<Self> {
        limit::recreate(&args.database_url, DATABASE).await?;
        let database = limit::with_database(&args.database_url, DATABASE)?;
        let port = free_port()?;
        let options = Options {
            linger: linger.to_owned(),
            log_dir: args.log_dir.clone(),
            prefix: format!("bench{}", uuid::Uuid::new_v4().simple()),
        };
        let mut stack = Self {
            base: format!("http://127.0.0.1:{port}"),
            server: args.database_url.clone(),
            database,
            redis_url: args.redis_url.clone(),
            children: Vec::new(),
            service_pids: Vec::new(),
            options,
        };
        stack.service_pids = stack.services().await?;
        let migrated = stack.command(&["migrate"])?.status().await?;
        if !migrated.success() {
            bail!("threadgate migrate failed");
        }
        stack.spawn("api", &["api", "--listen", &format!("127.0.0.1:{port}")])?;
        for number in 0..workers {
            stack.spawn_worker(number)?;
        }
        for number in 0..workers {
            stack.spawn(&format!("scheduler-{number}"), &["scheduler"])?;
        }
        stack.ready().await?;
        Ok(stack)
    }

    fn spawn_worker(&mut self, number: usize) -> Result<()> {
        let (name, linger) = (format!("bench-{number}"), self.options.linger.clone());
        self.spawn(&name, &["worker", "--worker-name", &name, "--slots", "64", "--commit-linger", &linger])
    }

    fn command(&self, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe().context("the program's own path")?);
        command
            .args(args)
            .env("THREADGATE_DATABASE_URL", &self.database)
            .env("THREADGATE_REDIS_URL", &self.redis_url)
            .env("THREADGATE_REDIS_PREFIX", &self.options.prefix)
            .env("THREADGATE_BENCH_GRAPH", "true")
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null())
            .kill_on_drop(true);
        Ok(command)
    }

    fn spawn(&mut self, name: &str, args: &[&str]) -> Result<()> {
        let mut command = self.command(args)?;
        match &self.options.log_dir {
            Some(dir) => {
                std::fs::create_dir_all(dir)?;
                let log = std::fs::File::options().create(true).append(true).open(dir.join(format!("{name}.log")))?;
                command.stdout(log.try_clone()?).stderr(log);
            }
            None => {
                command.stdout(Stdio::null()).stderr(Stdio::inherit());
            }
        }
        let child = command.spawn().with_context(|| format!("start {name}"))?;
        self.children.push((name.to_owned(), child));
        Ok(())
    }

    /// The postmaster's and Redis' process ids, where both run on this machine.
    async fn services(&self) -> Result<Vec<u32>> {
        let postmaster: u32 = limit::ask(&self.database, "select pg_read_file('postmaster.pid')")
            .await?
            .lines()
            .next()
            .unwrap_or_default()
            .parse()
            .context("postmaster.pid")?;
        let client = redis_info(&self.redis_url).await?;
        Ok(vec![postmaster, client])
    }

    async fn ready(&self) -> Result<()> {
        let http = load::client()?;
        let up = async {
            loop {
                let pools = http.get(format!("{}/v1/pools", self.base)).send().await;
                if let Ok(response) = pools {
                    let body: Value = response.json().await.unwrap_or_default();
                    if body["pools"]
                        .as_array()
                        .is_some_and(|pools| pools.iter().any(|pool| pool["workers"].as_u64() > Some(0)))
                    {
                        return;
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), up).await.context("the processes were not ready in 30 s")
    }

    /// Seconds of CPU that all processes have used, Postgres and Redis included.
    pub(super) fn cpu(&self) -> Result<f64> {
        let mut pids = self.service_pids.clone();
        pids.extend(self.children.iter().filter_map(|(_, child)| child.id()));
        cpu::seconds(&pids)
    }

    /// Ends the processes and drops the database.
    pub(super) async fn end(mut self) -> Result<()> {
        for (_, child) in &mut self.children {
            child.kill().await?;
        }
        limit::ask(&self.server, &format!("drop database if exists {DATABASE} with (force)")).await.map(drop)
    }
}

/// How long runs stood still after a worker was killed.
pub(super) struct Recovery {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) repeated: u64,
}

/// Kills a worker in the middle of a run's fourth node, again and again, and starts another.
pub(super) async fn recovery(args: &BenchArgs) -> Result<Recovery> {
    let mut stack = Stack::start(args, "1ms", 2).await?;
    let http = load::client()?;
    let mut times = Vec::new();
    for number in 0..args.kills {
        let run = load::submit(&http, &stack.base, 200).await?;
        let holder = holder_at_fourth_node(&stack, &run).await?;
        let at = stack.children.iter().position(|(name, _)| *name == holder).context("the holder is ours")?;
        let (_, mut child) = stack.children.remove(at);
        let killed_at: f64 =
            limit::ask(&stack.database, "select extract(epoch from clock_timestamp())").await?.parse()?;
        child.kill().await?;
        stack.spawn_worker(number + 2)?;
        load::wait(&http, &stack.base, &run).await?;
        let sql = format!(
            "select min(extract(epoch from at)) from checkpoint where run_id = '{run}' and extract(epoch from at) > {killed_at}"
        );
        let resumed: f64 = limit::ask(&stack.database, &sql).await?.parse()?;
        times.push((resumed - killed_at) * 1000.0);
    }
    let repeated = limit::ask(&stack.database, "select count(*) from (select 1 from checkpoint where run_id is not null group by run_id, seq having count(*) > 1) twice").await?;
    stack.end().await?;
    times.sort_by(f64::total_cmp);
    Ok(Recovery { p50: load::percentile(&times, 50), p99: load::percentile(&times, 99), repeated: repeated.parse()? })
}

/// Waits until the run's fourth step, or one behind it, is leased and returns the name of the worker that holds it.
async fn holder_at_fourth_node(stack: &Stack, run: &str) -> Result<String> {
    let sql = format!(
        "select w.name from step s join worker w on w.id = s.worker where s.run_id = '{run}' and s.seq >= 4 and s.status = 'leased'"
    );
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        let name = limit::ask(&stack.database, &sql).await?;
        if !name.is_empty() {
            return Ok(name);
        }
    }
    bail!("run {run} did not reach its fourth node in 30 s")
}

/// What an idle installation of one api, one worker and one scheduler costs.
pub(super) async fn idle(args: &BenchArgs) -> Result<Value> {
    let stack = Stack::start(args, "1ms", 1).await?;
    load::drive(&stack.base, load::Load { runs: 64, concurrency: 8, sleep_ms: 0 }).await?;
    tokio::time::sleep(Duration::from_secs(15)).await;
    let read = async || -> Result<(f64, f64, f64)> {
        let sql = format!(
            "select coalesce(sum(calls), 0) from pg_stat_statements s join pg_database d on d.oid = s.dbid where d.datname = '{DATABASE}'"
        );
        limit::ask(&args.database_url, "create extension if not exists pg_stat_statements").await?;
        let statements: f64 = limit::ask(&args.database_url, &sql).await?.parse()?;
        Ok((statements, redis_commands(&args.redis_url).await?, stack.cpu()?))
    };
    let begun = Instant::now();
    let before = read().await?;
    tokio::time::sleep(Duration::from_secs(args.idle_seconds)).await;
    let after = read().await?;
    let seconds = begun.elapsed().as_secs_f64();
    let memory: Vec<Value> = stack
        .children
        .iter()
        .filter_map(|(name, child)| {
            Some(json!({"process": name, "resident_mib": cpu::resident_mib(child.id()?).ok()?}))
        })
        .collect();
    stack.end().await?;
    Ok(json!({
        "idle_seconds": seconds,
        "postgres_statements_per_s": (after.0 - before.0) / seconds,
        "redis_commands_per_s": (after.1 - before.1 - 1.0) / seconds,
        "cpu_percent": 100.0 * (after.2 - before.2) / seconds,
        "memory": memory,
    }))
}

fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

async fn redis_commands(url: &str) -> Result<f64> {
    info(url, "total_commands_processed:").await?.parse().context("total_commands_processed")
}

async fn redis_info(url: &str) -> Result<u32> {
    info(url, "process_id:").await?.parse().context("process_id")
}

async fn info(url: &str, key: &str) -> Result<String> {
    let output = Command::new("redis-cli")
        .args(["-u", url, "info"])
        .output()
        .await
        .context("start redis-cli; install Redis' client program")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    value.map(|value| value.trim().to_owned()).with_context(|| format!("Redis does not say {key}"))
}
