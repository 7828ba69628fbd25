//! Redis for tests: one server for all, told apart by key prefixes, or one of a test's own.

use std::path::PathBuf;

use rustix::process::Signal;

use crate::folder::Folder;
use crate::ports::free_port;
use crate::server::Server;

/// A Redis server and the prefix of this test's keys.
#[derive(Debug)]
pub struct Redis {
    /// `redis://127.0.0.1:port`.
    pub url: String,
    /// Starts every key of the test; new for each value.
    pub prefix: String,
    server: Option<Server>,
}

impl Redis {
    /// The server that all tests share (`TEST_REDIS_URL`; without it, one of this process), with a
    /// prefix of its own. Never flush or stop it.
    pub async fn shared() -> Self {
        static SHARED: tokio::sync::OnceCell<Redis> = tokio::sync::OnceCell::const_new();
        let url = match std::env::var("TEST_REDIS_URL") {
            Ok(url) => url,
            Err(_) => SHARED.get_or_init(Self::private).await.url.clone(),
        };
        Self { url, prefix: new_prefix(), server: None }
    }

    /// A server of the test's own, for tests that flush, stop or kill it.
    ///
    /// # Panics
    /// If none can be started.
    pub async fn private() -> Self {
        for _ in 0..5 {
            let port = free_port();
            let url = format!("redis://127.0.0.1:{port}");
            let mut server =
                Server::start(Folder::new("redis"), PathBuf::from("redis-server"), arguments(port), Signal::KILL);
            match server.ready(async || ping(&url).await).await {
                Ok(()) => return Self { url, prefix: new_prefix(), server: Some(server) },
                Err(log) => eprintln!("{log}"),
            }
        }
        panic!("redis-server did not start; is it installed? ./tests/run installs it");
    }

    /// A connection.
    ///
    /// # Panics
    /// If the server does not answer.
    pub async fn connect(&self) -> redis::aio::MultiplexedConnection {
        connect(&self.url).await.expect("Redis answers")
    }

    /// Empties the whole server; only for [`Redis::private`].
    pub async fn flush_all(&self) {
        assert!(self.server.is_some(), "the shared Redis is never flushed");
        let mut connection = self.connect().await;
        redis::cmd("FLUSHALL").exec_async(&mut connection).await.expect("Redis flushes");
    }

    /// Kills the server with everything it held; only for [`Redis::private`].
    pub fn kill(&mut self) {
        self.own().stop(Signal::KILL);
    }

    /// Starts a killed server again: empty, on the same port.
    pub async fn start_again(&mut self) {
        let url = self.url.clone();
        self.own().start_again();
        self.own().ready(async || ping(&url).await).await.expect("Redis starts again");
    }

    /// The server's port.
    ///
    /// # Panics
    /// If the URL names none.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("the URL ends in a port")
    }

    /// Where a private server's files are.
    #[must_use]
    pub fn folder(&self) -> Option<PathBuf> {
        self.server.as_ref().map(|server| server.folder.path().to_owned())
    }

    fn own(&mut self) -> &mut Server {
        self.server.as_mut().expect("only a private Redis is stopped")
    }
}

fn arguments(port: u16) -> Vec<String> {
    let arguments = format!("--port {port} --bind 127.0.0.1 --appendonly no --databases 1");
    // Nothing is saved: a killed Redis comes back empty.
    arguments.split(' ').map(str::to_owned).chain(["--save".to_owned(), String::new()]).collect()
}

fn new_prefix() -> String {
    format!("test-{}:", uuid::Uuid::new_v4().simple())
}

async fn connect(url: &str) -> redis::RedisResult<redis::aio::MultiplexedConnection> {
    redis::Client::open(url)?.get_multiplexed_async_connection().await
}

async fn ping(url: &str) -> redis::RedisResult<()> {
    let mut connection = connect(url).await?;
    redis::cmd("PING").exec_async(&mut connection).await
}
