//! What went wrong with a statement, and whether the same call is worth repeating.

use std::time::Duration;

use tokio::time::Instant;

use crate::store::StoreError;

/// Adds what was being done to an error of the driver.
pub(super) trait Doing<T> {
    /// The error as the store's, `doing` in the words of "could not …".
    fn doing(self, doing: &'static str) -> Result<T, StoreError>;
}

impl<T> Doing<T> for Result<T, sqlx::Error> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| match Trouble::of(&source) {
            Trouble::Refused => StoreError::Database { doing, source },
            _ => StoreError::Unavailable { doing, source },
        })
    }
}

impl<T> Doing<T> for Result<T, serde_json::Error> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|error| StoreError::Corrupt { doing, message: error.to_string() })
    }
}

/// A row that holds what it cannot hold.
pub(super) fn corrupt(doing: &'static str, message: impl Into<String>) -> StoreError {
    StoreError::Corrupt { doing, message: message.into() }
}

/// The kinds of errors that are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    /// Deadlock or serialization failure: at once again.
    Collision,
    /// A lock was not to be had in time: again after a while.
    Locked,
    /// The connection broke, or the server goes away or comes back.
    Lost,
    /// No connection to be had: the pool has waited long enough already.
    Starved,
    /// The statement itself: again changes nothing.
    Refused,
}

impl Trouble {
    fn of(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::WorkerCrashed | sqlx::Error::BeginFailed => {
                Self::Lost
            }
            sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => Self::Starved,
            sqlx::Error::Database(error) => error.code().map_or(Self::Refused, |code| Self::of_code(&code)),
            _ => Self::Refused,
        }
    }

    /// 57P01 to 57P05: the server stops, crashed, starts, or ends the session; 57014: it took too long,
    /// or somebody ended it; 25006: the server is a standby (a failover); class 08: the connection;
    /// 25P03: we were too slow inside a transaction; class 53: out of something; class 58: its disk.
    fn of_code(code: &str) -> Self {
        match code {
            "40P01" | "40001" => Self::Collision,
            "55P03" => Self::Locked,
            "57P01" | "57P02" | "57P03" | "57P04" | "57P05" | "57014" | "25006" | "25P03" => Self::Lost,
            code if ["08", "53", "58"].iter().any(|class| code.starts_with(class)) => Self::Lost,
            _ => Self::Refused,
        }
    }
}

/// Makes the call `$once` until it succeeds or [`Attempts`] says that it is enough.
macro_rules! repeated {
    ($once:expr) => {{
        let mut attempts = $crate::store::postgres::error::Attempts::new();
        loop {
            match $crate::store::postgres::error::in_time($once).await {
                Ok(value) => break Ok(value),
                Err(error) => {
                    if let Err(error) = attempts.again_after(error).await {
                        break Err(error);
                    }
                }
            }
        }
    }};
}
pub(super) use repeated;

/// How long one call may take. A connection that died without a word never answers; whoever waits
/// for it for ever holds a slot, a lock or a pass.
const CALL_MAX: Duration = Duration::from_secs(10);

/// The call's answer, or that none came in time.
pub(super) async fn in_time<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    let silent = |_| {
        let source = sqlx::Error::Io(std::io::ErrorKind::TimedOut.into());
        Err(StoreError::Unavailable { doing: "get an answer in time", source })
    };
    tokio::time::timeout(CALL_MAX, call).await.unwrap_or_else(silent)
}

/// How often one call was repeated so far, and the rule for once more.
pub(super) struct Attempts {
    started: Instant,
    collisions: u32,
    waits: u32,
}

/// Repeats after a deadlock or serialization failure.
const COLLISIONS_MAX: u32 = 3;

/// The longest time in which a call is repeated for locks and lost connections. Every connection of
/// a pool breaks when the server restarts, so a number of repeats would be the wrong limit.
const PATIENCE: Duration = Duration::from_secs(3);

impl Attempts {
    pub(super) fn new() -> Self {
        Self { started: Instant::now(), collisions: 0, waits: 0 }
    }

    /// Waits until the same call may be made again.
    ///
    /// # Errors
    /// `error` itself where once more would change nothing, or was tried often enough.
    pub(super) async fn again_after(&mut self, error: StoreError) -> Result<(), StoreError> {
        let trouble = match &error {
            StoreError::Unavailable { source, .. } => Trouble::of(source),
            _ => Trouble::Refused,
        };
        match trouble {
            Trouble::Collision if self.collisions < COLLISIONS_MAX => self.collisions += 1,
            Trouble::Locked | Trouble::Lost if self.started.elapsed() < PATIENCE => {
                tokio::time::sleep(self.pause()).await;
                self.waits += 1;
            }
            _ => return Err(error),
        }
        tracing::debug!(error = %source_text(&error), "Repeating a statement: {error}");
        Ok(())
    }

    /// 0 to 5 ms, then 0 to 10, …, at most 160: whoever waits for one lock does not come back at once.
    fn pause(&self) -> Duration {
        Duration::from_millis(5 << self.waits.min(5)).mul_f64(rand::random::<f64>())
    }
}

fn source_text(error: &StoreError) -> String {
    std::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_comes_back_is_asked_again_and_a_refusal_is_final() {
        for code in ["57P01", "57P03", "57P05", "57014", "25006", "08006", "53300", "58030"] {
            assert_eq!(Trouble::of_code(code), Trouble::Lost, "{code}");
        }
        assert_eq!(Trouble::of_code("40P01"), Trouble::Collision);
        assert_eq!(Trouble::of_code("55P03"), Trouble::Locked);
        for code in ["23505", "22P05", "54000", "42601"] {
            assert_eq!(Trouble::of_code(code), Trouble::Refused, "{code}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_without_an_answer_is_given_up_and_not_repeated() {
        let calls = std::sync::atomic::AtomicUsize::new(0);
        let silent = || {
            calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            std::future::pending::<Result<(), StoreError>>()
        };

        let answer: Result<(), StoreError> = repeated!(silent());

        assert!(matches!(answer, Err(StoreError::Unavailable { .. })), "{answer:?}");
        assert!(calls.into_inner() <= 2);
    }
}
