//! How much a log keeps, so that what nobody follows costs next to nothing.

use std::time::Duration;

/// Events kept of one run.
pub(super) const EVENTS_MAX: usize = 1_000;

/// Bytes kept of one run's events.
pub(super) const BYTES_MAX: usize = 4 << 20;

/// How long a run's events are kept after the last one.
pub(super) const TTL: Duration = Duration::from_secs(60 * 60);

/// The same for a run that has ended: long enough to reconnect; later the store tells the story.
pub(super) const ENDED_TTL: Duration = Duration::from_secs(30);

/// Events a follower may be behind before it has to ask the log again.
pub(super) const CHANNEL: usize = 64;

/// Ends of runs a process may be behind before it has to ask the store; also how many are kept for
/// a reader that was away.
pub(super) const ENDS_MAX: usize = 1_024;
