//! The safety net of the dispatcher: steps that wait and that nobody has let into the queue, because
//! whoever should have died or could not reach it.

use std::time::Duration;

use async_trait::async_trait;
use threadgate_shared::parts::Parts;
use threadgate_shared::store::StoreError;

use crate::config::SchedulerConfig;
use crate::every::Pass;

/// The pass.
pub struct Dispatch {
    parts: Parts,
    interval: Duration,
    idle_interval: Duration,
}

impl Dispatch {
    /// A pass with the intervals of `config`.
    #[must_use]
    pub fn new(parts: Parts, config: &SchedulerConfig) -> Self {
        Self { parts, interval: config.dispatch_interval, idle_interval: config.dispatch_idle_interval }
    }
}

#[async_trait]
impl Pass for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    async fn once(&mut self) -> Result<Duration, StoreError> {
        let lanes = self.parts.store.backlog_lanes().await?;
        for (pool, class) in &lanes {
            let sent = self.parts.dispatcher.top_up(pool, *class).await?;
            metrics::counter!("threadgate_steps_dispatched_late_total").increment(sent as u64);
        }
        Ok(if lanes.is_empty() { self.idle_interval } else { self.interval })
    }
}
