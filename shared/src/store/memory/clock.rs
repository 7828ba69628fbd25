//! The database's clock: tokio's, from a fixed beginning, plus a skew.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use tokio::time::Instant;

use crate::store::Time;

/// Rises with tokio's clock.
pub(super) struct Clock {
    started: Time,
    origin: Instant,
    skew_us: AtomicU64,
}

impl Default for Clock {
    fn default() -> Self {
        Self { started: Utc::now(), origin: Instant::now(), skew_us: AtomicU64::new(0) }
    }
}

impl Clock {
    /// The database's time.
    pub(super) fn now(&self) -> Time {
        let skew = Duration::from_micros(self.skew_us.load(Ordering::Relaxed));
        self.started + span(self.origin.elapsed() + skew)
    }

    /// When the database started.
    pub(super) fn started(&self) -> Time {
        self.started
    }

    /// Moves the clock ahead.
    pub(super) fn skew(&self, ahead: Duration) {
        let us = u64::try_from(ahead.as_micros()).unwrap_or(u64::MAX);
        self.skew_us.fetch_add(us, Ordering::Relaxed);
    }
}

/// A span the clock can add; one beyond its range is the longest there is.
pub(super) fn span(duration: Duration) -> TimeDelta {
    TimeDelta::from_std(duration).unwrap_or(TimeDelta::MAX)
}
