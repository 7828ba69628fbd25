//! The leases this worker holds: taken through shared claim statements, kept in one register for
//! the heartbeat, each with the tokens that end its work.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use threadgate_shared::domain::{LeaseToken, StepId};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The right to execute one step, as far as this worker knows.
#[derive(Debug)]
pub(crate) struct Lease {
    /// The step.
    pub step: StepId,
    /// What every write carries.
    pub token: LeaseToken,
    /// Cancelled when the node should end: the node sees this one.
    pub node: CancellationToken,
    /// Cancelled when the lease is somebody else's: the work is dropped at once.
    pub lost: CancellationToken,
    stop_requested: AtomicBool,
    /// Its last write is under way, whose answer alone says how it ended.
    settling: AtomicBool,
    is_lost: AtomicBool,
    /// By this worker's monotonic clock, from before the statement that took or renewed it was sent.
    held_until: Mutex<Instant>,
}

impl Lease {
    fn new(step: StepId, token: LeaseToken, held_until: Instant) -> Self {
        Self {
            step,
            token,
            node: CancellationToken::new(),
            lost: CancellationToken::new(),
            stop_requested: AtomicBool::new(false),
            settling: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            held_until: Mutex::new(held_until),
        }
    }

    /// Until when it is certainly ours.
    pub(crate) fn held_until(&self) -> Instant {
        *lock(&self.held_until)
    }

    /// Whether it may be somebody else's by now, so that it must be renewed before any effect.
    pub(crate) fn is_doubtful(&self) -> bool {
        Instant::now() >= self.held_until()
    }

    /// It was renewed by a statement sent at `sent`.
    pub(crate) fn renewed(&self, sent: Instant, ttl: Duration) {
        let mut until = lock(&self.held_until);
        *until = (*until).max(sent + ttl);
    }

    /// It is somebody else's: node and work end. Whether that is news.
    pub(crate) fn lose(&self) -> bool {
        let is_news = !self.is_lost.swap(true, Ordering::Relaxed);
        self.node.cancel();
        self.lost.cancel();
        is_news
    }

    /// Its last write goes out now: from here a heartbeat that finds the step done proves no loss.
    pub(crate) fn settle(&self) {
        self.settling.store(true, Ordering::Relaxed);
    }

    /// Whether its last write is under way.
    pub(crate) fn is_settling(&self) -> bool {
        self.settling.load(Ordering::Relaxed)
    }

    /// The run is to stop: the node may end early, its output is kept.
    pub(crate) fn stop(&self) {
        self.stop_requested.store(true, Ordering::Relaxed);
        self.node.cancel();
    }

    /// Whether a stop was seen.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop_requested.load(Ordering::Relaxed)
    }
}

/// All leases this worker holds.
#[derive(Debug, Clone)]
pub(crate) struct Leases {
    held: Arc<Mutex<HashMap<LeaseToken, Arc<Lease>>>>,
    ttl: Duration,
    heartbeat_alive: watch::Sender<bool>,
}

impl Leases {
    pub(crate) fn new(ttl: Duration) -> Self {
        Self { held: Arc::default(), ttl, heartbeat_alive: watch::Sender::new(true) }
    }

    /// How long a lease lasts without renewal.
    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Notes a lease taken by a statement sent at `sent`; it is forgotten when the answer is dropped.
    pub(crate) fn hold(&self, step: StepId, token: LeaseToken, sent: Instant) -> HeldLease {
        let lease = Arc::new(Lease::new(step, token, sent + self.ttl));
        lock(&self.held).insert(token, Arc::clone(&lease));
        HeldLease { lease, held: Arc::clone(&self.held) }
    }

    /// All of them, now.
    pub(crate) fn snapshot(&self) -> Vec<Arc<Lease>> {
        lock(&self.held).values().map(Arc::clone).collect()
    }

    /// The heartbeat ended: from now on a lease is lost when its own time is over.
    pub(crate) fn heartbeat_died(&self) {
        self.heartbeat_alive.send_replace(false);
    }

    /// Whether leases are renewed.
    pub(crate) fn are_renewed(&self) -> bool {
        *self.heartbeat_alive.borrow()
    }

    /// Returns when leases are not renewed any more.
    pub(crate) async fn unrenewed(&self) {
        let _ = self.heartbeat_alive.subscribe().wait_for(|alive| !alive).await; // The sender lives in `self`.
    }

    /// Returns when `lease` is lost: somebody said so, or nobody renews it and its time is over.
    pub(crate) async fn lost(&self, lease: &Lease) {
        let abandoned = async {
            self.unrenewed().await;
            tokio::time::sleep_until(lease.held_until()).await;
            lease.lose();
        };
        tokio::select! {
            () = lease.lost.cancelled() => {}
            () = abandoned => {}
        }
    }
}

/// A lease in the register; dropping it takes it out.
#[derive(Debug)]
pub(crate) struct HeldLease {
    lease: Arc<Lease>,
    held: Arc<Mutex<HashMap<LeaseToken, Arc<Lease>>>>,
}

impl std::ops::Deref for HeldLease {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.lease
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        lock(&self.held).remove(&self.lease.token);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use threadgate_shared::domain::RunId;

    use super::*;

    fn step() -> StepId {
        StepId { run_id: RunId::new(), seq: 1 }
    }

    /// C27: the worker's own deadline is a monotonic span, from before the claim was sent.
    #[tokio::test(start_paused = true)]
    async fn a_lease_is_doubtful_one_ttl_after_the_statement_that_took_it_was_sent() {
        let leases = Leases::new(Duration::from_secs(4));
        let sent = Instant::now();
        tokio::time::advance(Duration::from_secs(3)).await; // The claim's answer was slow.
        let lease = leases.hold(step(), LeaseToken::new(), sent);
        assert!(!lease.is_doubtful());

        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(lease.is_doubtful());

        lease.renewed(Instant::now(), leases.ttl());
        assert!(!lease.is_doubtful());
    }

    /// C03
    #[tokio::test(start_paused = true)]
    async fn without_a_heartbeat_a_lease_is_lost_when_its_own_time_is_over() {
        let leases = Leases::new(Duration::from_secs(4));
        let start = Instant::now();
        let lease = leases.hold(step(), LeaseToken::new(), start);

        leases.heartbeat_died();
        leases.lost(&lease).await;

        assert_eq!(start.elapsed(), Duration::from_secs(4));
        assert!(lease.node.is_cancelled());
    }

    #[tokio::test]
    async fn a_dropped_lease_is_not_renewed_any_more() {
        let leases = Leases::new(Duration::from_secs(4));
        let lease = leases.hold(step(), LeaseToken::new(), Instant::now());
        assert_eq!(leases.snapshot().len(), 1);

        drop(lease);

        assert!(leases.snapshot().is_empty());
    }
}
