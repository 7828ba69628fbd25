//! What one worker is told: which pools it serves, how much at once, and how long anything may take.

use std::time::Duration;

use clap::Args;
use threadgate_shared::config::Secret;
use threadgate_shared::domain::PoolName;

/// No grace may be longer: correctness never rests on it, and a deploy waits for it.
pub const SHUTDOWN_GRACE_MAX: Duration = Duration::from_secs(600);

/// The configuration of one worker.
#[derive(Debug, Clone, Args)]
pub struct WorkerConfig {
    /// A label for people; two workers may share it, for each start has an id of its own.
    #[arg(long = "worker-name", env = "THREADGATE_WORKER_NAME", default_value = "worker")]
    pub name: String,

    /// The pools this worker serves, separated by commas.
    #[arg(long, env = "THREADGATE_POOLS", value_delimiter = ',', default_value = "default", value_parser = pool)]
    pub pools: Vec<PoolName>,

    /// How many nodes run at once.
    #[arg(long, env = "THREADGATE_SLOTS", default_value_t = 64)]
    pub slots: usize,

    /// Threads that run nodes, apart from those that hold leases and commit. As many nodes may block
    /// their thread before the other nodes wait (leases are renewed all the same). 0 runs nodes on
    /// the worker's own threads: only for nodes known never to block. Default: one per core, at least 2.
    #[arg(long, env = "THREADGATE_NODE_THREADS", default_value_t = default_node_threads())]
    pub node_threads: usize,

    /// How long a lease lasts without renewal; the time a lost worker costs.
    #[arg(long, env = "THREADGATE_LEASE_TTL", default_value = "4s", value_parser = humantime::parse_duration)]
    pub lease_ttl: Duration,

    /// How often all held leases are renewed, in one statement; at most a third of lease_ttl.
    #[arg(long, env = "THREADGATE_HEARTBEAT_INTERVAL", default_value = "1s", value_parser = humantime::parse_duration)]
    pub heartbeat_interval: Duration,

    /// How long a claim or commit waits for others to share its statement while other statements are
    /// under way; a lone one never waits. 0 puts every step in a statement of its own.
    #[arg(long, env = "THREADGATE_COMMIT_LINGER", default_value = "1ms", value_parser = humantime::parse_duration)]
    pub commit_linger: Duration,

    /// How many shared claim statements, and as many commit statements, are under way at once.
    #[arg(long, env = "THREADGATE_COMMIT_LANES", default_value_t = 4)]
    pub commit_lanes: usize,

    /// Steps in one shared statement at most.
    #[arg(long, env = "THREADGATE_BATCH_MAX", default_value_t = 64)]
    pub batch_max: usize,

    /// How long running nodes may go on after the signal to end; then their leases are given back
    /// uncharged. Below 10 minutes.
    #[arg(long, env = "THREADGATE_SHUTDOWN_GRACE", default_value = "25s", value_parser = humantime::parse_duration)]
    pub shutdown_grace: Duration,

    /// The longest deadline of a node; the deadline of nodes that neither the graph nor the run gives one.
    #[arg(long, env = "THREADGATE_NODE_TIMEOUT_MAX", default_value = "900s", value_parser = humantime::parse_duration)]
    pub node_timeout_max: Duration,

    /// Bytes of what one node returns, as JSON; over it the run fails for good.
    #[arg(long, env = "THREADGATE_OUTPUT_BYTES_MAX", default_value_t = 8 * 1024 * 1024)]
    pub output_bytes_max: usize,

    /// Bytes of thread states kept between two steps of a thread, so that the second need not load
    /// what the first has just written. 0 keeps none.
    #[arg(long, env = "THREADGATE_STATE_CACHE_BYTES_MAX", default_value_t = 8 * 1024 * 1024)]
    pub state_cache_bytes_max: usize,

    /// Nodes over HTTP.
    #[command(flatten)]
    pub http: HttpConfig,
}

/// How nodes over HTTP are called.
#[derive(Debug, Clone, Args)]
pub struct HttpConfig {
    /// Signs every request (HMAC-SHA256 in X-Threadgate-Signature); without it requests are not signed.
    #[arg(long = "http-node-secret", env = "THREADGATE_HTTP_NODE_SECRET", hide_env_values = true)]
    pub secret: Option<Secret>,

    /// How long a connection to a node may take to open.
    #[arg(
        long = "http-node-connect-timeout",
        env = "THREADGATE_HTTP_NODE_CONNECT_TIMEOUT",
        default_value = "5s",
        value_parser = humantime::parse_duration
    )]
    pub connect_timeout: Duration,
}

/// A configuration that does not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the worker's configuration cannot work: {0}")]
pub struct ConfigError(String);

impl Default for HttpConfig {
    fn default() -> Self {
        Self { secret: None, connect_timeout: Duration::from_secs(5) }
    }
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            name: "worker".to_owned(),
            pools: vec![PoolName::default_pool()],
            slots: 64,
            node_threads: default_node_threads(),
            lease_ttl: Duration::from_secs(4),
            heartbeat_interval: Duration::from_secs(1),
            commit_linger: Duration::from_millis(1),
            commit_lanes: 4,
            batch_max: 64,
            shutdown_grace: Duration::from_secs(25),
            node_timeout_max: Duration::from_secs(900),
            output_bytes_max: 8 * 1024 * 1024,
            state_cache_bytes_max: 8 * 1024 * 1024,
            http: HttpConfig::default(),
        }
    }
}

impl WorkerConfig {
    /// Refuses values that do not fit together.
    ///
    /// # Errors
    /// [`ConfigError`] names the setting and what it may be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let refuse = |text: &str| Err(ConfigError(text.to_owned()));
        if self.pools.is_empty() {
            return refuse("pools is empty; name at least one, such as 'default'");
        }
        if self.slots == 0 {
            return refuse("slots is 0; a worker needs at least 1");
        }
        if self.lease_ttl < Duration::from_millis(30) {
            return refuse("lease_ttl is below 30ms; a lease must outlast a few round trips to the database");
        }
        if self.heartbeat_interval.is_zero() || self.heartbeat_interval * 3 > self.lease_ttl {
            return refuse("heartbeat_interval must be above 0 and at most a third of lease_ttl");
        }
        if self.commit_linger > self.lease_ttl / 4 {
            return refuse("commit_linger must be at most a quarter of lease_ttl");
        }
        if self.commit_lanes == 0 || self.batch_max == 0 {
            return refuse("commit_lanes and batch_max must be at least 1");
        }
        if self.shutdown_grace >= SHUTDOWN_GRACE_MAX {
            return refuse("shutdown_grace must be below 10 minutes");
        }
        if self.node_timeout_max.is_zero() || self.output_bytes_max == 0 {
            return refuse("node_timeout_max and output_bytes_max must be above 0");
        }
        Ok(())
    }

    /// Steps in one shared statement: one where batching is off.
    #[must_use]
    pub(crate) fn steps_per_statement(&self) -> usize {
        if self.commit_linger.is_zero() { 1 } else { self.batch_max }
    }

    /// Statements of one sort that are under way at once: as many as slots where batching is off.
    #[must_use]
    pub(crate) fn statements_at_once(&self) -> usize {
        if self.commit_linger.is_zero() { self.slots } else { self.commit_lanes }
    }
}

fn default_node_threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).max(2)
}

fn pool(text: &str) -> Result<PoolName, String> {
    let name = text.trim();
    if name.is_empty() {
        return Err("a pool's name is empty".to_owned());
    }
    Ok(PoolName::from(name))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        worker: WorkerConfig,
    }

    #[test]
    fn the_documented_defaults_are_the_defaults_and_fit_together() {
        let parsed = Program::try_parse_from(["worker"]).unwrap().worker;

        assert_eq!(format!("{parsed:?}"), format!("{:?}", WorkerConfig::default()));
        parsed.validate().unwrap();
    }

    #[test]
    fn pools_are_a_list() {
        let parsed = Program::try_parse_from(["worker", "--pools", "gpu, default", "--slots", "3"]).unwrap().worker;

        assert_eq!(parsed.pools, [PoolName::from("gpu"), PoolName::from("default")]);
        assert_eq!(parsed.slots, 3);
    }

    #[test]
    fn values_that_do_not_fit_together_are_refused_by_name() {
        let with = |change: fn(&mut WorkerConfig)| {
            let mut config = WorkerConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };

        assert!(with(|c| c.heartbeat_interval = Duration::from_secs(2)).contains("heartbeat_interval"));
        assert!(with(|c| c.shutdown_grace = Duration::from_secs(600)).contains("shutdown_grace"));
        assert!(with(|c| c.slots = 0).contains("slots"));
        assert!(with(|c| c.pools.clear()).contains("pools"));
        assert!(with(|c| c.commit_linger = Duration::from_secs(2)).contains("commit_linger"));
        assert!(with(|c| c.output_bytes_max = 0).contains("output_bytes_max"));
    }

    #[test]
    fn the_secret_of_http_nodes_does_not_print() {
        let parsed = Program::try_parse_from(["worker", "--http-node-secret", "hush"]).unwrap().worker;

        assert!(!format!("{parsed:?}").contains("hush"));
    }
}
