//! Keeps the leases: one statement per worker and interval for all of them, none when there are
//! none. Nodes run on threads of their own, so a busy node cannot delay it.

use std::sync::Arc;
use std::time::Duration;

use threadgate_shared::store::Store;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use crate::health::WorkerHealth;
use crate::lease::{Lease, Leases};
use crate::telemetry;

/// The task that renews the leases.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    task: JoinHandle<()>,
    end: CancellationToken,
}

impl Heartbeat {
    /// Starts renewing all of `leases` every `interval`.
    pub(crate) fn spawn(store: Arc<dyn Store>, leases: Leases, interval: Duration, health: WorkerHealth) -> Self {
        let end = CancellationToken::new();
        let ended = end.clone();
        let death = Death { leases: leases.clone(), health: health.clone(), is_expected: false };
        let task = tokio::spawn(async move {
            let mut death = death; // Lives and dies with this task.
            let mut ticks = tokio::time::interval(interval);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    () = ended.cancelled() => break,
                    _ = ticks.tick() => {}
                }
                let held = leases.snapshot();
                if !held.is_empty() && renew(&*store, &leases, &held, interval).await {
                    health.store_answered();
                }
            }
            death.is_expected = true;
        });
        Self { task, end }
    }

    /// Kills it, and nothing else.
    #[cfg(test)]
    pub(crate) fn abort_handle(&self) -> tokio::task::AbortHandle {
        self.task.abort_handle()
    }

    /// Ends it once nothing is held any more.
    pub(crate) async fn stop(self) {
        self.end.cancel();
        let _ = self.task.await; // A task that died has said so already.
    }
}

/// Renews `held`; whether the store answered. Without an answer the leases stay as they are: an
/// outage of the store is no reason to drop work nobody else can take.
pub(crate) async fn renew(store: &dyn Store, leases: &Leases, held: &[Arc<Lease>], patience: Duration) -> bool {
    let wanted: Vec<_> = held.iter().map(|lease| (lease.step, lease.token)).collect();
    let sent = Instant::now();
    let states = match tokio::time::timeout(patience, store.heartbeat(&wanted, leases.ttl())).await {
        Ok(Ok(states)) => states,
        Ok(Err(failure)) => {
            warn!(error = %failure, "Could not renew {} leases; trying again", held.len());
            return false;
        }
        Err(_) => {
            warn!("Renewing {} leases got no answer within {patience:?}; trying again", held.len());
            return false;
        }
    };
    for (lease, state) in held.iter().zip(states) {
        if !state.held {
            if !lease.is_settling() && lease.lose() {
                warn!(run.id = %lease.step.run_id, step.seq = lease.step.seq, "Lost the lease on step {}; dropping its work", lease.step);
                metrics::counter!(telemetry::LEASE_LOSSES).increment(1);
            }
            continue;
        }
        if state.renewed {
            lease.renewed(sent, leases.ttl());
        }
        if state.stop_requested {
            lease.stop();
        }
    }
    true
}

/// Says that the heartbeat ended otherwise than by the worker's end.
struct Death {
    leases: Leases,
    health: WorkerHealth,
    is_expected: bool,
}

impl Drop for Death {
    fn drop(&mut self) {
        if self.is_expected {
            return;
        }
        error!("The heartbeat of this worker ended; its leases run out and it takes no more work: restart it");
        self.leases.heartbeat_died();
        self.health.heartbeat_died();
    }
}
