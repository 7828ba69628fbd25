//! Postgres for tests: one server for all with a database for each test, or one of a test's own.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use threadgate_shared::store::Schema;
use threadgate_shared::store::postgres::{PgOptions, PgStore};

use crate::folder::Folder;
use crate::ports::free_port;
use crate::server::Server;

/// The database with the current schema that others are copied from.
const TEMPLATE: &str = "threadgate_template";

/// A Postgres server.
#[derive(Debug)]
pub struct Postgres {
    /// `postgres://postgres@127.0.0.1:port`, without a database.
    pub url: String,
    server: Option<Server>,
}

/// A database of one test, dropped with it.
#[derive(Debug)]
pub struct Database {
    /// Where a program finds it.
    pub url: String,
    name: String,
    server_url: String,
}

impl Postgres {
    /// The server that all tests share: `TEST_DATABASE_URL` (a server, without a database), else
    /// one of this process. Never stop it.
    pub async fn shared() -> Self {
        static SHARED: tokio::sync::OnceCell<Postgres> = tokio::sync::OnceCell::const_new();
        let url = match std::env::var("TEST_DATABASE_URL") {
            Ok(url) => url,
            Err(_) => SHARED.get_or_init(Self::private).await.url.clone(),
        };
        Self { url, server: None }
    }

    /// A server of the test's own, for tests that stop it or read its statistics.
    ///
    /// `TEST_PG_FSYNC` (default `off`) says whether commits reach the disk.
    ///
    /// # Panics
    /// If none can be started.
    pub async fn private() -> Self {
        for _ in 0..5 {
            let folder = Folder::new("postgres");
            init(&folder);
            let port = free_port();
            let url = format!("postgres://postgres@127.0.0.1:{port}");
            let mut server = Server::start(folder, program("postgres"), arguments(port), Signal::QUIT);
            match server.ready(async || connect(&url, "postgres").await.map(drop)).await {
                Ok(()) => return Self { url, server: Some(server) },
                Err(log) => eprintln!("{log}"),
            }
        }
        panic!("Postgres did not start; see above");
    }

    /// A database with the current schema and nothing in it.
    ///
    /// # Panics
    /// If it cannot be made.
    pub async fn database(&self) -> Database {
        self.make_template().await;
        self.create(TEMPLATE).await
    }

    /// A database without any schema.
    ///
    /// # Panics
    /// If it cannot be made.
    pub async fn empty_database(&self) -> Database {
        self.create("template1").await
    }

    /// Stops the server as a machine that loses power would; only for [`Postgres::private`].
    pub fn kill(&mut self) {
        // SIGQUIT to the postmaster ends its children at once and recovers at the next start.
        self.own().stop(Signal::QUIT);
    }

    /// Ends the server's sessions and the server, cleanly; only for [`Postgres::private`].
    pub fn stop(&mut self) {
        self.own().stop(Signal::INT);
    }

    /// Starts a stopped server again, on the same port with the same data.
    pub async fn start_again(&mut self) {
        let url = self.url.clone();
        self.own().start_again();
        self.own().ready(async || connect(&url, "postgres").await.map(drop)).await.expect("Postgres starts again");
    }

    fn own(&mut self) -> &mut Server {
        self.server.as_mut().expect("only a private Postgres is stopped")
    }

    /// Makes the database that all others are copied from, once per server, whoever comes first.
    async fn make_template(&self) {
        let mut connection = connect(&self.url, "postgres").await.expect("Postgres answers");
        // Held until the connection closes: tests of other processes wait here.
        sqlx::query("select pg_advisory_lock(1)").execute(&mut connection).await.expect("a lock");
        let exists = sqlx::query("select from pg_database where datname = $1").bind(TEMPLATE);
        if exists.fetch_optional(&mut connection).await.expect("Postgres answers").is_some() {
            return;
        }
        let unfinished = self.create("template1").await;
        let store = PgStore::connect(&unfinished.url, &PgOptions::default()).await.expect("Postgres answers");
        store.migrate().await.expect("the migrations fit an empty database");
        store.close().await;
        let statement = format!("alter database {} rename to {TEMPLATE}", unfinished.name);
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await.expect("a template");
    }

    async fn create(&self, template: &str) -> Database {
        let name = format!("test_{}", uuid::Uuid::new_v4().simple());
        let mut connection = connect(&self.url, "postgres").await.expect("Postgres answers");
        let statement = format!("create database {name} template {template}");
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await.expect("a new database");
        Database { url: format!("{}/{name}", self.url), name, server_url: self.url.clone() }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, name) = (self.server_url.clone(), self.name.clone());
        // A thread of its own: a drop cannot await, and the test's runtime may be ending.
        let dropper = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let statement = format!("drop database if exists {name} with (force)");
                if let Ok(mut connection) = connect(&server, "postgres").await {
                    let _ = sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await;
                }
            });
        });
        let _ = dropper.join();
    }
}

async fn connect(server: &str, database: &str) -> Result<PgConnection, sqlx::Error> {
    PgConnection::connect(&format!("{server}/{database}")).await
}

fn init(folder: &Folder) {
    let mut command = folder.command(&program("initdb"));
    command.args("-D data -U postgres -A trust -E UTF8 --locale=C --no-sync".split(' '));
    let output = command.output().expect("initdb starts; ./tests/run installs it");
    assert!(output.status.success(), "initdb failed:\n{}", String::from_utf8_lossy(&output.stderr));
}

fn arguments(port: u16) -> Vec<String> {
    let fsync = std::env::var("TEST_PG_FSYNC").unwrap_or_else(|_| "off".to_owned());
    let mut settings = vec![
        format!("port={port}"),
        "listen_addresses=127.0.0.1".to_owned(),
        "unix_socket_directories=".to_owned(),
        "max_connections=400".to_owned(),
        "max_wal_size=2GB".to_owned(),
        format!("fsync={fsync}"),
    ];
    if library_exists("pg_stat_statements") {
        settings.push("shared_preload_libraries=pg_stat_statements".to_owned());
    }
    let flags = settings.into_iter().flat_map(|setting| ["-c".to_owned(), setting]);
    ["-D".to_owned(), "data".to_owned()].into_iter().chain(flags).collect()
}

/// A program of the newest Postgres; Debian keeps them outside PATH, in a folder per version.
fn program(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions
        .filter_map(|entry| {
            let version: u32 = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin").join(name)))
        })
        .filter(|(_, path)| path.exists())
        .max();
    newest.map_or_else(|| PathBuf::from(name), |(_, path)| path)
}

fn library_exists(name: &str) -> bool {
    let folder = program("postgres").parent().and_then(Path::parent).map(|root| root.join("lib"));
    folder.is_some_and(|folder| folder.join(format!("{name}.so")).exists())
}
