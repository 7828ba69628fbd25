//! Counts runs and pools for the metrics: what waits, for how long, and who is there to run it.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use metrics::gauge;
use threadgate_shared::domain::RunStatus;
use threadgate_shared::parts::Parts;
use threadgate_shared::store::{PoolRecord, StoreError};

use crate::every::Pass;

/// The pass. Every scheduler counts everything: take one of them, not their sum.
pub struct Observe {
    parts: Parts,
    interval: Duration,
    /// Pools that were there at the last look: one that is gone is shown as empty.
    shown: HashSet<String>,
}

impl Observe {
    /// A pass that looks every `interval`.
    #[must_use]
    pub fn new(parts: Parts, interval: Duration) -> Self {
        Self { parts, interval, shown: HashSet::new() }
    }
}

#[async_trait]
impl Pass for Observe {
    fn name(&self) -> &'static str {
        "observe"
    }

    async fn once(&mut self) -> Result<Duration, StoreError> {
        let counts = self.parts.store.run_counts().await?;
        for status in RunStatus::ALL {
            let count = counts.iter().find(|(counted, _)| *counted == status).map_or(0, |(_, count)| *count);
            gauge!("threadgate_runs", "status" => status.as_str()).set(exact(count));
        }
        let pools = self.parts.store.pools().await?;
        let now: HashSet<String> = pools.iter().map(|pool| pool.pool.to_string()).collect();
        for gone in self.shown.difference(&now) {
            show(&PoolRecord {
                pool: gone.as_str().into(),
                runnable: 0,
                running: 0,
                oldest_wait_s: 0.0,
                workers: 0,
                slots: 0,
            });
        }
        pools.iter().for_each(show);
        self.shown = now;
        Ok(self.interval)
    }
}

fn show(record: &PoolRecord) {
    let pool = || record.pool.to_string();
    gauge!("threadgate_pool_runnable_steps", "pool" => pool()).set(exact(record.runnable));
    gauge!("threadgate_pool_running_steps", "pool" => pool()).set(exact(record.running));
    gauge!("threadgate_pool_oldest_wait_seconds", "pool" => pool()).set(record.oldest_wait_s);
    gauge!("threadgate_pool_workers", "pool" => pool()).set(exact(record.workers));
    gauge!("threadgate_pool_slots", "pool" => pool()).set(exact(record.slots));
}

#[expect(clippy::cast_precision_loss, reason = "a count of rows is far below 2^53")]
fn exact(count: i64) -> f64 {
    count as f64
}
