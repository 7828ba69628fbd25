//! The limit: one statement that moves a thread row on by compare-and-set and inserts one 2 KB step
//! row, one commit each, under pgbench on the Postgres that is measured.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

const DATABASE: &str = "threadgate_bench_limit";

const SCHEMA: &str = "
create table lim_thread (id bigint primary key, version bigint not null, node text not null, updated_at timestamptz not null) with (fillfactor = 50);
create table lim_step (thread_id bigint not null, version bigint not null, node text not null, state jsonb not null, primary key (thread_id, version));
insert into lim_thread select g, 0, 'start', now() from generate_series(1, 20000) g;
";

const SCRIPT: &str = "\\set t random(1, 20000)
with t as (update lim_thread set version = version + 1, node = 'n5', updated_at = now() where id = :t and version >= 0 returning id, version)
insert into lim_step select id, version, 'n5', :state::jsonb from t;
";

/// Commits per second with 1 and with 32 clients.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    pub(super) one: f64,
    pub(super) many: f64,
}

/// A database of its own for the limit.
pub(super) struct Limit {
    server: String,
    url: String,
}

impl Limit {
    pub(super) async fn prepare(server: &str) -> Result<Self> {
        recreate(server, DATABASE).await?;
        let url = with_database(server, DATABASE)?;
        psql(&url, SCHEMA).await?;
        Ok(Self { server: server.to_owned(), url })
    }

    /// One reading of each, `seconds` long.
    pub(super) async fn read(&self, seconds: u32) -> Result<Reading> {
        Ok(Reading { one: self.clients(1, seconds).await?, many: self.clients(32, seconds).await? })
    }

    async fn clients(&self, clients: u32, seconds: u32) -> Result<f64> {
        let clients = clients.to_string();
        let threads = if clients == "1" { "1" } else { "2" };
        let mut child = Command::new("pgbench")
            .args(["-n", "-M", "prepared", "-c", &clients, "-j", threads, "-T", &seconds.to_string(), "-D"])
            .arg(format!("state={}", state()))
            .args(["-f", "/dev/stdin", &self.url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start pgbench; install the PostgreSQL client programs")?;
        child.stdin.take().context("its input")?.write_all(SCRIPT.as_bytes()).await?;
        let output = child.wait_with_output().await?;
        let text = String::from_utf8_lossy(&output.stdout);
        let rate = text.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
        rate.with_context(|| format!("pgbench said no rate: {text}{}", String::from_utf8_lossy(&output.stderr)))
    }

    pub(super) async fn drop(self) -> Result<()> {
        psql(&self.server, &format!("drop database if exists {DATABASE} with (force)")).await
    }
}

/// About 2 KB of JSON that does not compress.
fn state() -> String {
    let noise: String = (0..54).map(|_| uuid::Uuid::new_v4().simple().to_string()).collect();
    serde_json::json!({"n": 5, "pad": noise, "out": "x".repeat(180)}).to_string()
}

/// Makes `database` anew on the server of `url`.
pub(super) async fn recreate(server: &str, database: &str) -> Result<()> {
    psql(server, &format!("drop database if exists {database} with (force)")).await?;
    psql(server, &format!("create database {database}")).await
}

/// The same server, another database.
pub(super) fn with_database(server: &str, database: &str) -> Result<String> {
    let mut url: reqwest::Url =
        server.parse().context("--database-url is not a URL; write postgres://user@host:port/database")?;
    url.set_path(database);
    Ok(url.to_string())
}

/// One answer of psql, trimmed.
pub(super) async fn ask(url: &str, sql: &str) -> Result<String> {
    let output = Command::new("psql").args(["-X", "-v", "ON_ERROR_STOP=1", "-Atqc", sql, url]).output().await;
    let output = output.context("start psql; install the PostgreSQL client programs")?;
    if !output.status.success() {
        bail!("psql refused: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

async fn psql(url: &str, sql: &str) -> Result<()> {
    ask(url, sql).await.map(drop)
}
