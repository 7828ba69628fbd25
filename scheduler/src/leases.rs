//! The sweep: what is due again. Leases that ran out make their steps ready (or, without an attempt
//! left, end the run), delayed steps become ready, and sent steps that nobody took are sent again.

use std::time::Duration;

use async_trait::async_trait;
use threadgate_shared::parts::Parts;
use threadgate_shared::store::{StoreClock, StoreError, Swept};
use tokio::time::Instant;

use crate::config::SchedulerConfig;
use crate::ended::announce_end;
use crate::every::Pass;
use crate::health::SchedulerHealth;

/// The pass.
///
/// An outage must not charge every running step an attempt: workers could not renew their leases
/// then. So nothing expires until one `lease_ttl` after Postgres started, or after a look that came
/// much later than planned.
pub struct Leases {
    parts: Parts,
    lease_ttl: Duration,
    interval: Duration,
    idle_interval: Duration,
    steps_max: u32,
    health: SchedulerHealth,
    last: Option<Look>,
    /// Until then nothing expires.
    hold_until: Option<Instant>,
}

/// A successful look.
#[derive(Debug, Clone, Copy)]
struct Look {
    at: Instant,
    /// How long after it the next one was to follow.
    wait: Duration,
}

impl Leases {
    /// A pass that has not looked yet.
    #[must_use]
    pub fn new(parts: Parts, config: &SchedulerConfig, health: SchedulerHealth) -> Self {
        Self {
            parts,
            lease_ttl: config.lease_ttl,
            interval: config.sweep_interval,
            idle_interval: config.sweep_idle_interval,
            steps_max: config.sweep_steps_max,
            health,
            last: None,
            hold_until: None,
        }
    }

    /// Whether leases may expire in a look that begins at `now`.
    fn may_expire(&mut self, now: Instant) -> bool {
        if self.last.is_none_or(|last| now > last.at + self.late_after(last.wait)) {
            self.hold(now + self.lease_ttl);
        }
        self.hold_until.is_none_or(|until| now >= until)
    }

    /// How long after a look the next one is late.
    fn late_after(&self, wait: Duration) -> Duration {
        (self.lease_ttl / 2).max(wait + self.lease_ttl / 4)
    }

    fn hold(&mut self, until: Instant) {
        self.hold_until = self.hold_until.max(Some(until));
    }

    /// After an idle pause: if Postgres was started in it, workers need time to renew.
    fn hold_after_restart(&mut self, now: Instant, clock: StoreClock) {
        let up = (clock.now - clock.started).to_std().unwrap_or_default();
        if let Some(left) = self.lease_ttl.checked_sub(up) {
            self.hold(now + left);
        }
    }

    fn next_wait(&self, swept: &Swept) -> Duration {
        let handled = swept.send.len() + swept.failed.len() + swept.stopped.len();
        if handled >= self.steps_max as usize {
            return Duration::ZERO;
        }
        let idle = swept
            .next_due
            .is_none_or(|due| (due - swept.now).to_std().is_ok_and(|until_due| until_due > self.idle_interval));
        if idle { self.idle_interval } else { self.interval }
    }

    async fn act_on(&self, swept: &Swept) {
        self.parts.dispatcher.send(&swept.send).await;
        for run_id in swept.failed.iter().chain(&swept.stopped) {
            if let Err(error) = announce_end(&self.parts, *run_id).await {
                // Whoever waits for the run finds its end in the store.
                tracing::warn!(run.id = %run_id, %error, "Could not announce the end of run {run_id}");
            }
        }
        report(swept);
    }
}

#[async_trait]
impl Pass for Leases {
    fn name(&self) -> &'static str {
        "leases"
    }

    async fn once(&mut self) -> Result<Duration, StoreError> {
        let began = Instant::now();
        let was_idle = self.last.is_some_and(|last| last.wait > self.lease_ttl / 2);
        let expire = self.may_expire(began) && !was_idle;
        let swept = self.parts.store.sweep(self.steps_max, expire).await?;
        self.health.swept();
        self.act_on(&swept).await;
        if was_idle && swept.next_due.is_some() {
            self.hold_after_restart(began, self.parts.store.clock().await?);
        }
        if began.elapsed() > self.lease_ttl / 2 {
            self.hold(Instant::now() + self.lease_ttl);
        }
        let wait = self.next_wait(&swept);
        self.last = Some(Look { at: Instant::now(), wait });
        Ok(wait)
    }
}

fn report(swept: &Swept) {
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    metrics::counter!("threadgate_leases_expired_total")
        .increment(u64::from(swept.released) + count(swept.failed.len()));
    metrics::counter!("threadgate_steps_sent_again_total").increment(count(swept.send.len()));
    metrics::counter!("threadgate_runs_quarantined_total").increment(count(swept.failed.len()));
    if swept.released > 0 {
        tracing::warn!(steps = swept.released, "Leases ran out; {} steps start again", swept.released);
    }
    for run_id in &swept.failed {
        tracing::error!(run.id = %run_id, "Run {run_id} failed: its step ended too many workers");
    }
}
