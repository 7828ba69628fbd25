//! Whether this process can do its work: the database is there, its schema is ours, and nobody
//! asked us to stop.

use std::time::Duration;

use threadgate_shared::parts::Parts;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::telemetry;

/// How long a finding is used again.
const REUSED_FOR: Duration = Duration::from_secs(3);

/// How long one check may take.
const CHECK_MAX: Duration = Duration::from_secs(2);

/// What the last look found.
#[derive(Default)]
pub struct Readiness(Mutex<Option<(Instant, Checks)>>);

/// The parts, one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checks {
    /// The database answers and has our schema.
    pub store: bool,
    /// The queue answers; without it everything goes on, slower.
    pub queue: bool,
}

impl Readiness {
    /// What the parts answer now, or answered a moment ago; many callers look once.
    pub async fn look(&self, parts: &Parts) -> Checks {
        let mut last = self.0.lock().await;
        if let Some((at, checks)) = *last
            && at.elapsed() < REUSED_FOR
        {
            return checks;
        }
        let store = tokio::time::timeout(CHECK_MAX, async {
            parts.store.ping().await?;
            parts.store.check_schema().await
        });
        let queue = tokio::time::timeout(CHECK_MAX, parts.queue.ping());
        let (store, queue) = tokio::join!(store, queue);
        let checks = Checks { store: matches!(store, Ok(Ok(()))), queue: matches!(queue, Ok(Ok(()))) };
        metrics::gauge!(telemetry::REDIS_UP).set(if checks.queue { 1.0 } else { 0.0 });
        *last = Some((Instant::now(), checks));
        checks
    }
}
