//! The life of a run: one state machine, one function.

use serde::{Deserialize, Serialize};

/// Where a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "run_status", rename_all = "snake_case")]
pub enum RunStatus {
    /// Behind another run of its thread, or not due yet.
    Waiting,
    /// Its next step may be taken by a worker.
    Queued,
    /// A worker has started it.
    Running,
    /// Ended at the graph's end.
    Completed,
    /// Ended by an error; the thread is usable.
    Failed,
    /// Ended by a stop.
    Stopped,
    /// Ended at a pause; an answer creates the run that resumes it.
    Interrupted,
}

impl RunStatus {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Waiting, Self::Queued, Self::Running, Self::Completed, Self::Failed, Self::Stopped, Self::Interrupted];

    /// Whether the run is closed.
    #[must_use]
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Waiting | Self::Queued | Self::Running)
    }

    /// Whether the run occupies its thread.
    #[must_use]
    pub fn is_active(self) -> bool {
        matches!(self, Self::Queued | Self::Running)
    }

    /// The word on the wire and in the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
            Self::Interrupted => "interrupted",
        }
    }

    /// The status named by `text`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }

    /// The status after `event`; the only place that says which changes are legal.
    ///
    /// # Errors
    /// [`IllegalTransition`] for every pair that is not listed.
    pub fn after(self, event: RunEvent) -> Result<Self, IllegalTransition> {
        match (self, event) {
            (Self::Waiting, RunEvent::Promoted) => Ok(Self::Queued),
            (Self::Queued, RunEvent::Leased) => Ok(Self::Running),
            (Self::Running, RunEvent::LeaseExpired | RunEvent::Drained) => Ok(Self::Queued),
            (Self::Running, RunEvent::Paused) => Ok(Self::Interrupted),
            (Self::Running, RunEvent::Finished) => Ok(Self::Completed),
            (Self::Running, RunEvent::Failed) => Ok(Self::Failed),
            // Interrupted: paused, and nobody has resumed it.
            (Self::Waiting | Self::Queued | Self::Running | Self::Interrupted, RunEvent::Stopped) => Ok(Self::Stopped),
            (from, event) => Err(IllegalTransition { from, event }),
        }
    }
}

/// What can happen to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEvent {
    /// The run before it closed, or its time came.
    Promoted,
    /// A worker took a step.
    Leased,
    /// A worker was lost.
    LeaseExpired,
    /// A worker gave its step back.
    Drained,
    /// A node asks somebody.
    Paused,
    /// The last node ended.
    Finished,
    /// A node failed for good.
    Failed,
    /// Somebody stopped it.
    Stopped,
}

/// A change that is not listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a run that is {} cannot take the event {event:?}", from.as_str())]
pub struct IllegalTransition {
    /// The status before.
    pub from: RunStatus,
    /// The event that was refused.
    pub event: RunEvent,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_listed_changes_are_legal() {
        use RunEvent as E;
        use RunStatus as S;
        let events =
            [E::Promoted, E::Leased, E::LeaseExpired, E::Drained, E::Paused, E::Finished, E::Failed, E::Stopped];
        let legal = [
            (S::Waiting, E::Promoted, S::Queued),
            (S::Queued, E::Leased, S::Running),
            (S::Running, E::LeaseExpired, S::Queued),
            (S::Running, E::Drained, S::Queued),
            (S::Running, E::Paused, S::Interrupted),
            (S::Running, E::Finished, S::Completed),
            (S::Running, E::Failed, S::Failed),
            (S::Waiting, E::Stopped, S::Stopped),
            (S::Queued, E::Stopped, S::Stopped),
            (S::Running, E::Stopped, S::Stopped),
            (S::Interrupted, E::Stopped, S::Stopped),
        ];

        for from in S::ALL {
            for event in events {
                let expected = legal.iter().find(|(f, e, _)| (*f, *e) == (from, event)).map(|(_, _, to)| *to);
                assert_eq!(from.after(event).ok(), expected, "{from:?} {event:?}");
            }
        }
    }
}
