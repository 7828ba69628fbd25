//! Waiting for something to become true, with a limit; never a fixed time.

use std::time::Duration;

use tokio::time::Instant;

/// How long a test waits for what should take well under a second; long because the machine may be
/// busy with other tests.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Asks `probe` until it answers `Ok`, at most for `limit`.
///
/// # Panics
/// With `what` and the last `Err` when the limit has passed.
pub async fn eventually_within<T, E: std::fmt::Debug>(
    limit: Duration,
    what: &str,
    mut probe: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let start = Instant::now();
    let mut pause = Duration::from_millis(2);
    loop {
        match probe().await {
            Ok(found) => return found,
            Err(seen) if start.elapsed() > limit => panic!("waited {limit:?} for {what}; the last look saw {seen:?}"),
            Err(_) => tokio::time::sleep(pause).await,
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// [`eventually_within`] the usual [`LIMIT`].
pub async fn eventually<T, E: std::fmt::Debug>(what: &str, probe: impl AsyncFnMut() -> Result<T, E>) -> T {
    eventually_within(LIMIT, what, probe).await
}
