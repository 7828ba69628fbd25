//! Mends what no rule should allow: a busy thread without a run, a running run without an open
//! step. Each repair leaves an audit entry; each is a bug to be found.

use std::time::Duration;

use async_trait::async_trait;
use threadgate_shared::parts::Parts;
use threadgate_shared::store::StoreError;

use crate::config::SchedulerConfig;
use crate::every::Pass;

/// Rows mended by one pass at most.
const ROWS_MAX: u32 = 100;

/// The pass.
pub struct Repair {
    parts: Parts,
    interval: Duration,
}

impl Repair {
    /// A pass with the interval of `config`.
    #[must_use]
    pub fn new(parts: Parts, config: &SchedulerConfig) -> Self {
        Self { parts, interval: config.repair_interval }
    }
}

#[async_trait]
impl Pass for Repair {
    fn name(&self) -> &'static str {
        "repair"
    }

    async fn once(&mut self) -> Result<Duration, StoreError> {
        let mended = self.parts.store.repair(ROWS_MAX).await?;
        if mended > 0 {
            metrics::counter!("threadgate_repairs_total").increment(u64::from(mended));
            tracing::error!(rows = mended, "Repaired {mended} rows that no rule allows; the audit table says which");
        }
        Ok(if mended == ROWS_MAX { Duration::ZERO } else { self.interval })
    }
}
