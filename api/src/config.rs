//! Configuration of the API: read once, checked whole.

use std::net::SocketAddr;
use std::time::Duration;

use threadgate_shared::domain::Limits;

/// How careful the server is with what it tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Errors carry their texts.
    #[default]
    Development,
    /// Texts of failures inside are replaced by general ones, the documentation pages are off, and
    /// settings that are only right on one's own machine are refused.
    Production,
}

/// How callers prove who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuthMode {
    /// They do not: everybody is `anonymous` of the tenant `default`.
    #[default]
    None,
}

/// Settings of the API, by flag or environment.
#[derive(Debug, Clone, clap::Args)]
pub struct ApiConfig {
    /// Address and port to listen on; port 0 takes a free one.
    #[arg(long, env = "THREADGATE_LISTEN", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// How careful the server is with what it tells.
    #[arg(long, env = "THREADGATE_MODE", value_enum, default_value_t)]
    pub mode: Mode,
    /// How callers prove who they are; `none` is refused in production.
    #[arg(long, env = "THREADGATE_AUTH", value_enum, default_value_t)]
    pub auth: AuthMode,
    /// The graph behind `/v1/graph/*`; default: the one that was registered first.
    #[arg(long, env = "THREADGATE_GRAPH")]
    pub graph: Option<String>,
    /// Origins that browsers may call from, separated by commas; `*` is every origin.
    #[arg(long, env = "THREADGATE_ORIGINS", value_delimiter = ',', default_value = "*")]
    pub origins: Vec<String>,
    /// Whether browsers may send credentials.
    #[arg(long, env = "THREADGATE_CORS_CREDENTIALS", default_value_t = true, action = clap::ArgAction::Set)]
    pub cors_credentials: bool,
    /// Whether answers carry security headers.
    #[arg(long, env = "THREADGATE_SECURITY_HEADERS", default_value_t = true, action = clap::ArgAction::Set)]
    pub security_headers: bool,
    /// Whether `/docs` and `/openapi.json` exist; default: everywhere but in production.
    #[arg(long, env = "THREADGATE_DOCS", action = clap::ArgAction::Set)]
    pub docs: Option<bool>,
    /// Whether runs are shown by `/v1/observability`.
    #[arg(long, env = "THREADGATE_OBSERVABILITY", default_value_t = true, action = clap::ArgAction::Set)]
    pub observability: bool,
    /// Bytes of a request's body at most.
    #[arg(long, env = "THREADGATE_BODY_BYTES_MAX", default_value_t = 10 * 1024 * 1024)]
    pub body_bytes_max: usize,
    /// The deadline of a node without one of its own where the client names none; a client cannot
    /// ask for more.
    #[arg(long, env = "THREADGATE_NODE_TIMEOUT", default_value = "900s", value_parser = humantime::parse_duration)]
    pub node_timeout: Duration,
    /// How long an `Idempotency-Key` is kept; at most a year.
    #[arg(long, env = "THREADGATE_IDEMPOTENCY_TTL", default_value = "24h", value_parser = humantime::parse_duration)]
    pub idempotency_ttl: Duration,
    /// How often a silent event stream sends a comment, so that no proxy closes it.
    #[arg(long, env = "THREADGATE_KEEP_ALIVE", default_value = "15s", value_parser = humantime::parse_duration)]
    pub keep_alive: Duration,
    /// How long requests may go on after a shutdown began.
    #[arg(long, env = "THREADGATE_REQUEST_GRACE", default_value = "10s", value_parser = humantime::parse_duration)]
    pub request_grace: Duration,
    /// How long a client may take to send the head of a request; a connection that is idle for as long is
    /// closed.
    #[arg(long, env = "THREADGATE_HEADER_READ_TIMEOUT", default_value = "30s", value_parser = humantime::parse_duration)]
    pub header_read_timeout: Duration,
    /// Connections at once, followers of runs included; more wait until one ends.
    #[arg(long, env = "THREADGATE_CONNECTIONS_MAX", default_value_t = 10_000)]
    pub connections_max: usize,
    /// What `GET /v1/graph` calls the place where threads are kept.
    #[arg(long, env = "THREADGATE_CHECKPOINTER_NAME", default_value = "ThreadgateStore")]
    pub checkpointer_name: String,
}

/// No idempotency key is kept longer.
const IDEMPOTENCY_TTL_MAX: Duration = Duration::from_secs(366 * 24 * 3_600);

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            mode: Mode::default(),
            auth: AuthMode::default(),
            graph: None,
            origins: vec!["*".to_owned()],
            cors_credentials: true,
            security_headers: true,
            docs: None,
            observability: true,
            body_bytes_max: 10 * 1024 * 1024,
            node_timeout: Duration::from_secs(900),
            idempotency_ttl: Duration::from_secs(24 * 3_600),
            keep_alive: Duration::from_secs(15),
            request_grace: Duration::from_secs(10),
            header_read_timeout: Duration::from_secs(30),
            connections_max: 10_000,
            checkpointer_name: "ThreadgateStore".to_owned(),
        }
    }
}

impl ApiConfig {
    /// Refuses values that do not fit together.
    ///
    /// # Errors
    /// A sentence that says which setting to change.
    pub fn validate(&self) -> Result<(), String> {
        if self.is_production() && self.auth == AuthMode::None {
            return Err("production needs authentication, and THREADGATE_AUTH is 'none'; \
                 set it, or THREADGATE_MODE=development on a machine nobody else reaches"
                .to_owned());
        }
        if self.is_production() && self.cors_credentials && self.origins.iter().any(|origin| origin == "*") {
            return Err("production refuses THREADGATE_ORIGINS=* together with credentials; \
                 name the origins, or set THREADGATE_CORS_CREDENTIALS=false"
                .to_owned());
        }
        if self.body_bytes_max == 0 || self.node_timeout.is_zero() || self.keep_alive.is_zero() {
            return Err("THREADGATE_BODY_BYTES_MAX, THREADGATE_NODE_TIMEOUT and THREADGATE_KEEP_ALIVE must be above 0"
                .to_owned());
        }
        if self.header_read_timeout.is_zero() || self.connections_max == 0 {
            return Err("THREADGATE_HEADER_READ_TIMEOUT and THREADGATE_CONNECTIONS_MAX must be above 0".to_owned());
        }
        if self.idempotency_ttl > IDEMPOTENCY_TTL_MAX {
            return Err("THREADGATE_IDEMPOTENCY_TTL is more than a year; choose less".to_owned());
        }
        Ok(())
    }

    /// Whether texts of failures inside stay inside.
    #[must_use]
    pub fn is_production(&self) -> bool {
        self.mode == Mode::Production
    }

    /// Whether the documentation pages exist.
    #[must_use]
    pub fn serves_docs(&self) -> bool {
        self.docs.unwrap_or(!self.is_production())
    }

    /// The limits on what a client sends.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits { body_bytes_max: self.body_bytes_max, ..Limits::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn production_refuses_a_server_that_knows_nobody() {
        let config = ApiConfig { mode: Mode::Production, ..ApiConfig::default() };

        assert!(config.validate().unwrap_err().contains("THREADGATE_AUTH"));
    }

    #[test]
    fn the_defaults_fit_together() {
        assert_eq!(ApiConfig::default().validate(), Ok(()));
    }

    #[test]
    fn flags_and_defaults_agree() {
        #[derive(clap::Parser)]
        struct Program {
            #[command(flatten)]
            api: ApiConfig,
        }

        let parsed = <Program as clap::Parser>::parse_from(["threadgate"]).api;

        assert_eq!(format!("{parsed:?}"), format!("{:?}", ApiConfig::default()));
    }
}
