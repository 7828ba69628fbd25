//! What the scheduler is told: how often it looks, and how much it does at once.

use std::time::Duration;

use clap::Args;
use humantime::parse_duration;

/// The configuration of one scheduler.
#[derive(Debug, Clone, Args)]
pub struct SchedulerConfig {
    /// How long the workers' leases last; the same for all of them.
    #[arg(skip = Duration::from_secs(4))]
    pub lease_ttl: Duration,

    /// How often due steps are looked for while any step is running or due.
    #[arg(long, env = "THREADGATE_SWEEP_INTERVAL", default_value = "500ms", value_parser = parse_duration, value_name = "DURATION")]
    pub sweep_interval: Duration,

    /// The same while nothing runs and nothing is due; at most `lease_ttl`, so that a lease taken
    /// meanwhile is seen before it can run out.
    #[arg(long, env = "THREADGATE_SWEEP_IDLE_INTERVAL", default_value = "4s", value_parser = parse_duration, value_name = "DURATION")]
    pub sweep_idle_interval: Duration,

    /// Steps one pass looks at, at most; more wait for the next pass, which follows at once.
    #[arg(long, env = "THREADGATE_SWEEP_STEPS_MAX", default_value_t = 100, value_name = "NUMBER")]
    pub sweep_steps_max: u32,

    /// How often waiting steps that nobody has sent are looked for while there are any.
    #[arg(long, env = "THREADGATE_DISPATCH_INTERVAL", default_value = "1s", value_parser = parse_duration, value_name = "DURATION")]
    pub dispatch_interval: Duration,

    /// The same while there are none.
    #[arg(long, env = "THREADGATE_DISPATCH_IDLE_INTERVAL", default_value = "5s", value_parser = parse_duration, value_name = "DURATION")]
    pub dispatch_idle_interval: Duration,

    /// How often questions whose time is over are looked for: by so much later their default answer counts.
    #[arg(long, env = "THREADGATE_EXPIRY_INTERVAL", default_value = "5s", value_parser = parse_duration, value_name = "DURATION")]
    pub expiry_interval: Duration,

    /// How often states that no rule should allow are looked for.
    #[arg(long, env = "THREADGATE_REPAIR_INTERVAL", default_value = "30s", value_parser = parse_duration, value_name = "DURATION")]
    pub repair_interval: Duration,

    /// How often runs and pools are counted for the metrics; not at all without --metrics-listen.
    #[arg(long, env = "THREADGATE_METRICS_INTERVAL", default_value = "15s", value_parser = parse_duration, value_name = "DURATION")]
    pub metrics_interval: Duration,

    /// Whether somebody reads the metrics.
    #[arg(skip)]
    pub observes: bool,
}

/// A configuration that does not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the scheduler's configuration cannot work: {0}")]
pub struct ConfigError(String);

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            lease_ttl: Duration::from_secs(4),
            sweep_interval: Duration::from_millis(500),
            sweep_idle_interval: Duration::from_secs(4),
            sweep_steps_max: 100,
            dispatch_interval: Duration::from_secs(1),
            dispatch_idle_interval: Duration::from_secs(5),
            expiry_interval: Duration::from_secs(5),
            repair_interval: Duration::from_secs(30),
            metrics_interval: Duration::from_secs(15),
            observes: false,
        }
    }
}

impl SchedulerConfig {
    /// The defaults for leases of `lease_ttl`: looks that are no rarer than those leases allow.
    #[must_use]
    pub fn for_leases(lease_ttl: Duration) -> Self {
        let defaults = Self::default();
        Self {
            lease_ttl,
            sweep_interval: defaults.sweep_interval.min(lease_ttl / 8),
            sweep_idle_interval: defaults.sweep_idle_interval.min(lease_ttl),
            ..defaults
        }
    }

    /// Refuses values that do not fit together.
    ///
    /// # Errors
    /// [`ConfigError`] names the setting and what it may be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let refuse = |text: &str| Err(ConfigError(text.to_owned()));
        let intervals = [
            ("sweep_interval", self.sweep_interval),
            ("dispatch_interval", self.dispatch_interval),
            ("expiry_interval", self.expiry_interval),
            ("repair_interval", self.repair_interval),
            ("metrics_interval", self.metrics_interval),
        ];
        if let Some((name, _)) = intervals.iter().find(|(_, interval)| *interval < Duration::from_millis(1)) {
            return refuse(&format!("{name} is 0; the database would be asked without a pause"));
        }
        if self.sweep_interval > self.lease_ttl / 4 {
            return refuse("sweep_interval must be at most a quarter of lease_ttl, or lost workers go unnoticed");
        }
        if self.sweep_idle_interval > self.lease_ttl || self.sweep_idle_interval < self.sweep_interval {
            return refuse("sweep_idle_interval must be between sweep_interval and lease_ttl");
        }
        if self.dispatch_idle_interval < self.dispatch_interval {
            return refuse("dispatch_idle_interval must not be below dispatch_interval");
        }
        if self.sweep_steps_max == 0 {
            return refuse("sweep_steps_max is 0; a pass looks at least at 1 step");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        scheduler: SchedulerConfig,
    }

    #[test]
    fn the_documented_defaults_are_the_defaults_and_fit_together() {
        let parsed = Program::try_parse_from(["scheduler"]).unwrap().scheduler;

        assert_eq!(format!("{parsed:?}"), format!("{:?}", SchedulerConfig::default()));
        parsed.validate().unwrap();
        SchedulerConfig::for_leases(Duration::from_millis(200)).validate().unwrap();
        SchedulerConfig::for_leases(Duration::from_secs(60)).validate().unwrap();
    }

    #[test]
    fn values_that_do_not_fit_together_are_refused_by_name() {
        let with = |change: fn(&mut SchedulerConfig)| {
            let mut config = SchedulerConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };

        assert!(with(|c| c.sweep_interval = Duration::from_secs(2)).contains("sweep_interval"));
        assert!(with(|c| c.sweep_idle_interval = Duration::from_secs(5)).contains("sweep_idle_interval"));
        assert!(with(|c| c.repair_interval = Duration::ZERO).contains("repair_interval"));
        assert!(with(|c| c.dispatch_idle_interval = Duration::ZERO).contains("dispatch_idle_interval"));
        assert!(with(|c| c.sweep_steps_max = 0).contains("sweep_steps_max"));
    }
}
