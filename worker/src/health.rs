//! Whether a worker can do its work, for whoever shows it as readiness.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Longer without one successful exchange and the worker is not ready.
pub const CONTACT_AGE_MAX: Duration = Duration::from_secs(15);

/// A handle on a worker's health; cheap to clone, may be shown by another role.
#[derive(Debug, Clone)]
pub struct WorkerHealth(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    heartbeat_alive: AtomicBool,
    draining: AtomicBool,
    /// The last answer of the store.
    store: Mutex<Instant>,
    /// The last time work could be taken, from the queue or from the store.
    poll: Mutex<Instant>,
}

impl Default for WorkerHealth {
    fn default() -> Self {
        let now = Mutex::new(Instant::now());
        Self(Arc::new(Inner {
            heartbeat_alive: AtomicBool::new(true),
            draining: AtomicBool::new(false),
            poll: Mutex::new(Instant::now()),
            store: now,
        }))
    }
}

impl WorkerHealth {
    /// Whether the worker may be shown as ready.
    ///
    /// # Errors
    /// A sentence that says why not.
    pub fn check(&self) -> Result<(), String> {
        let age = |at: &Mutex<Instant>| at.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if !self.0.heartbeat_alive.load(Ordering::Relaxed) {
            return Err("the heartbeat ended, so no lease can be held; restart this worker".to_owned());
        }
        if self.0.draining.load(Ordering::Relaxed) {
            return Err("the worker is draining".to_owned());
        }
        let (store, poll) = (age(&self.0.store), age(&self.0.poll));
        if store > CONTACT_AGE_MAX {
            return Err(format!("the database has not answered for {} s", store.as_secs()));
        }
        if poll > CONTACT_AGE_MAX {
            return Err(format!("neither queue nor database gave work for {} s", poll.as_secs()));
        }
        Ok(())
    }

    pub(crate) fn store_answered(&self) {
        *self.0.store.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub(crate) fn polled(&self) {
        *self.0.poll.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub(crate) fn heartbeat_died(&self) {
        self.0.heartbeat_alive.store(false, Ordering::Relaxed);
    }

    pub(crate) fn draining(&self) {
        self.0.draining.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_worker_without_answers_is_not_ready_until_the_next_one() {
        let health = WorkerHealth::default();
        assert_eq!(health.check(), Ok(()));

        tokio::time::advance(CONTACT_AGE_MAX * 2).await;
        health.polled();
        assert!(health.check().unwrap_err().contains("database"));

        health.store_answered();
        assert_eq!(health.check(), Ok(()));
    }

    #[tokio::test]
    async fn a_draining_worker_is_not_ready() {
        let health = WorkerHealth::default();

        health.draining();

        assert!(health.check().unwrap_err().contains("draining"));
    }
}
