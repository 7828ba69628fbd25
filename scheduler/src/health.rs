//! Whether a scheduler does its work, for whoever shows it as readiness.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Longer without a successful sweep and the scheduler is not ready.
pub const SWEEP_AGE_MAX: Duration = Duration::from_secs(15);

/// A handle on a scheduler's health; cheap to clone.
#[derive(Debug, Clone)]
pub struct SchedulerHealth(Arc<Mutex<Instant>>);

impl Default for SchedulerHealth {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl SchedulerHealth {
    /// Whether the scheduler may be shown as ready.
    ///
    /// # Errors
    /// A sentence that says why not.
    pub fn check(&self) -> Result<(), String> {
        let age = self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if age > SWEEP_AGE_MAX {
            return Err(format!("no sweep has succeeded for {} s; the log says why", age.as_secs()));
        }
        Ok(())
    }

    pub(crate) fn swept(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}
