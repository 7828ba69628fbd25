//! The loop around a pass: it looks, says when to look again, and a failure is only a later look.

use std::error::Error;
use std::time::Duration;

use async_trait::async_trait;
use threadgate_shared::store::StoreError;
use tokio_util::sync::CancellationToken;

/// How long after a failed pass the next one follows.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// One kind of look at the tables: takes no input, acts on a bounded number of rows, may run twice.
#[async_trait]
pub trait Pass: Send {
    /// The pass's name in logs and metrics.
    fn name(&self) -> &'static str;

    /// Looks once; says how long to wait before the next look.
    ///
    /// # Errors
    /// [`StoreError`]; the next look is the repetition.
    async fn once(&mut self) -> Result<Duration, StoreError>;
}

/// Runs `pass` until `shutdown`; waits are shortened by up to a tenth at random, so that replicas
/// which started together do not stay together.
pub async fn every(mut pass: impl Pass, shutdown: &CancellationToken) {
    while !shutdown.is_cancelled() {
        let wait = match pass.once().await {
            Ok(wait) => wait,
            Err(error) => {
                let name = pass.name();
                metrics::counter!("threadgate_scheduler_pass_failures_total", "pass" => name).increment(1);
                tracing::warn!(pass = name, error = chain(&error), "The pass '{name}' failed and will be repeated");
                RETRY_AFTER
            }
        };
        let wait = wait.mul_f64(1.0 - 0.1 * rand::random::<f64>());
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// An error and its causes, in one line.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    struct Failing {
        looks: Arc<AtomicU32>,
        shutdown: CancellationToken,
    }

    #[async_trait]
    impl Pass for Failing {
        fn name(&self) -> &'static str {
            "failing"
        }

        async fn once(&mut self) -> Result<Duration, StoreError> {
            if self.looks.fetch_add(1, Ordering::Relaxed) == 2 {
                self.shutdown.cancel();
            }
            Err(StoreError::Schema("the schema is old".to_owned()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_pass_is_repeated_after_a_pause_until_the_shutdown() {
        let (looks, shutdown) = (Arc::new(AtomicU32::new(0)), CancellationToken::new());
        let start = tokio::time::Instant::now();

        every(Failing { looks: Arc::clone(&looks), shutdown: shutdown.clone() }, &shutdown).await;

        assert_eq!(looks.load(Ordering::Relaxed), 3);
        assert!(start.elapsed() >= RETRY_AFTER, "two pauses of at least nine tenths of a second");
    }
}
