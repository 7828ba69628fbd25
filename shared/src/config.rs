//! Settings that several roles share: where the database and the queue are, and secrets that do not
//! print. Every field is a flag and an environment variable.

use std::fmt;

use clap::Args;

/// Where the truth and the wake-ups live.
#[derive(Debug, Clone, Args)]
pub struct StorageConfig {
    /// Postgres: postgres://user:password@host:port/database. The database must be migrated.
    #[arg(long, env = "THREADGATE_DATABASE_URL", hide_env_values = true, value_name = "URL")]
    pub database_url: Option<ServiceUrl>,

    /// Postgres connections of this process at most.
    #[arg(long, env = "THREADGATE_DATABASE_CONNECTIONS", default_value_t = 10, value_name = "NUMBER")]
    pub database_connections: u32,

    /// Redis: redis://user:password@host:port. Holds wake-ups and live events only; losing it loses
    /// no run.
    #[arg(long, env = "THREADGATE_REDIS_URL", hide_env_values = true, value_name = "URL")]
    pub redis_url: Option<ServiceUrl>,

    /// Starts the name of every Redis key, so that installations can share a server.
    #[arg(long, env = "THREADGATE_REDIS_PREFIX", default_value = "threadgate", value_name = "TEXT")]
    pub redis_prefix: String,
}

impl Default for StorageConfig {
    fn default() -> Self {
        Self { database_url: None, database_connections: 10, redis_url: None, redis_prefix: "threadgate".to_owned() }
    }
}

impl StorageConfig {
    /// Refuses values that do not fit together.
    ///
    /// # Errors
    /// A sentence that names the setting and what it may be.
    pub fn validate(&self) -> Result<(), String> {
        if self.database_connections < 2 {
            return Err("database_connections is below 2; one long statement would stop everything".to_owned());
        }
        if self.redis_prefix.is_empty() || self.redis_prefix.contains(['{', '}']) {
            return Err("redis_prefix must not be empty and must hold neither '{' nor '}'".to_owned());
        }
        let schemes: [(&str, &Option<ServiceUrl>, &[&str]); 2] = [
            ("database_url", &self.database_url, &["postgres", "postgresql"]),
            ("redis_url", &self.redis_url, &["redis", "rediss"]),
        ];
        for (name, url, allowed) in schemes {
            let scheme = url.as_ref().map(ServiceUrl::scheme);
            if scheme.is_some_and(|scheme| !allowed.contains(&scheme)) {
                return Err(format!("{name} must begin with {}://", allowed[0]));
            }
        }
        Ok(())
    }
}

/// The address of a service, whose password does not print.
#[derive(Clone, PartialEq, Eq)]
pub struct ServiceUrl(String);

impl ServiceUrl {
    /// The address with its password, for whoever connects.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    fn scheme(&self) -> &str {
        self.0.split("://").next().unwrap_or_default()
    }
}

impl From<String> for ServiceUrl {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for ServiceUrl {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Display for ServiceUrl {
    /// Scheme, host and path: no user, no password, no parameters.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rest = self.0.split_once("://").map_or(self.0.as_str(), |(_, rest)| rest);
        let rest = rest.split('?').next().unwrap_or_default();
        let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        write!(f, "{}://{host}", self.scheme())
    }
}

impl fmt::Debug for ServiceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A secret; does not print.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The secret itself, for whoever uses it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_password_is_ever_printed() {
        let url = ServiceUrl::from("postgres://ann:p@ss@db.internal:5432/runs?sslpassword=x");
        let config = StorageConfig { database_url: Some(url.clone()), ..StorageConfig::default() };

        let shown = format!("{url} {config:?} {:?}", Secret::from("hush"));
        assert_eq!(url.to_string(), "postgres://db.internal:5432/runs");
        assert!(!shown.contains("p@ss") && !shown.contains("hush") && !shown.contains("sslpassword"), "{shown}");
        assert_eq!(url.expose(), "postgres://ann:p@ss@db.internal:5432/runs?sslpassword=x");
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        let with = |change: fn(&mut StorageConfig)| {
            let mut config = StorageConfig::default();
            change(&mut config);
            config.validate().unwrap_err()
        };

        assert!(with(|c| c.database_url = Some("mysql://host/db".into())).contains("database_url"));
        assert!(with(|c| c.redis_url = Some("http://host".into())).contains("redis_url"));
        assert!(with(|c| c.redis_prefix.clear()).contains("redis_prefix"));
        assert!(with(|c| c.database_connections = 1).contains("database_connections"));
        StorageConfig::default().validate().unwrap();
    }
}
