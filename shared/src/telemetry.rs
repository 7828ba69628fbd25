//! What people and machines see of a running program: log lines and metrics.
//!
//! Metrics are recorded by whoever knows them with the `metrics` macros, under names that begin with
//! `threadgate_` and carry their unit; nothing is kept until [`Metrics::install`].

use std::io::IsTerminal;
use std::time::Duration;

use clap::{Args, ValueEnum};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

/// How often histograms are folded together; between two foldings they grow with every sample.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Upper bounds of the duration histograms, in seconds: from a claim to a long model call.
const DURATION_BUCKETS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0];

/// Upper bounds of the histograms that count things: steps in a commit, for instance.
const COUNT_BUCKETS: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

/// What is logged, and how.
#[derive(Debug, Clone, Args)]
pub struct LogConfig {
    /// Which lines: error, warn, info, debug or trace; also for a part: info,threadgate_worker=debug.
    #[arg(long, env = "RUST_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,

    /// How lines look: text for people, json for machines, auto = text on a terminal.
    #[arg(long, env = "THREADGATE_LOG_FORMAT", value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise.
    #[default]
    Auto,
    /// One readable line per event.
    Text,
    /// One JSON object per line: the event's fields and those of the spans it is in.
    Json,
}

/// Why logging or metrics could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter cannot be read.
    #[error("'{filter}' is not a log filter ({reason}); try info, or info,threadgate_worker=debug")]
    Filter {
        /// What was given.
        filter: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Something else was set up before.
    #[error("logs or metrics are set up already: {0}")]
    Twice(String),
}

/// Sends log lines to standard error, so that standard output is the command's own.
///
/// # Errors
/// [`TelemetryError`] for a filter that cannot be read, or a second call.
pub fn init_logs(config: &LogConfig) -> Result<(), TelemetryError> {
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|error| TelemetryError::Filter { filter: config.log.clone(), reason: error.to_string() })?;
    let on_terminal = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let set = match config.log_format {
        LogFormat::Text => lines.with_ansi(on_terminal && colour_wanted()).with_target(false).try_init(),
        LogFormat::Auto if on_terminal => lines.with_ansi(colour_wanted()).with_target(false).try_init(),
        LogFormat::Auto | LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).try_init(),
    };
    set.map_err(|error| TelemetryError::Twice(error.to_string()))
}

/// Whether the person at the terminal wants colours (`NO_COLOR` is not set).
#[must_use]
pub fn colour_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// The process's metrics, once they are kept.
#[derive(Clone)]
pub struct Metrics(PrometheusHandle);

impl Metrics {
    /// Starts to keep metrics. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`TelemetryError::Twice`] for a second call.
    pub fn install() -> Result<Self, TelemetryError> {
        let buckets = "the bucket lists are not empty";
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &DURATION_BUCKETS)
            .expect(buckets)
            .set_buckets_for_metric(Matcher::Suffix("_size".to_owned()), &COUNT_BUCKETS)
            .expect(buckets)
            .install_recorder()
            .map_err(|error| TelemetryError::Twice(error.to_string()))?;
        let upkeep = handle.clone();
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(UPKEEP_INTERVAL);
            loop {
                ticks.tick().await;
                upkeep.run_upkeep();
            }
        });
        Ok(Self(handle))
    }

    /// The text that Prometheus scrapes.
    #[must_use]
    pub fn render(&self) -> String {
        self.0.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn durations_and_sizes_are_histograms_with_buckets() {
        let metrics = Metrics::install().unwrap();

        metrics::histogram!("threadgate_step_seconds", "node" => "plan").record(0.02);
        metrics::histogram!("threadgate_commit_batch_size").record(3.0);
        metrics::counter!("threadgate_leases_lost_total").increment(2);

        let text = metrics.render();
        assert!(text.contains("threadgate_step_seconds_bucket{node=\"plan\",le=\"0.025\"} 1"), "{text}");
        assert!(text.contains("threadgate_commit_batch_size_bucket{le=\"4\"} 1"), "{text}");
        assert!(text.contains("threadgate_leases_lost_total 2"), "{text}");
        assert!(matches!(Metrics::install(), Err(TelemetryError::Twice(_))));
    }

    #[test]
    fn a_filter_that_cannot_be_read_is_refused_with_an_example() {
        let config = LogConfig { log: "info,=??=".to_owned(), log_format: LogFormat::Text };

        let error = init_logs(&config).unwrap_err().to_string();

        assert!(error.contains("info,threadgate_worker=debug"), "{error}");
    }
}
