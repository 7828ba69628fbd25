//! Faults a test can ask for.

use std::collections::{HashMap, VecDeque};

use crate::store::StoreError;

/// Which call is to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`crate::store::Runs::create_run`].
    CreateRun,
    /// [`crate::store::Runs::stop_thread`] and [`crate::store::Runs::stop_run`].
    Stop,
    /// [`crate::store::Steps::claim`].
    Claim,
    /// [`crate::store::Steps::load`].
    Load,
    /// [`crate::store::Steps::commit`].
    Commit,
    /// [`crate::store::Steps::heartbeat`].
    Heartbeat,
    /// [`crate::store::Steps::give_back`] and [`crate::store::Steps::retry_step`].
    GiveBack,
    /// [`crate::store::Upkeep::sweep`] and [`crate::store::Upkeep::dispatch`].
    Sweep,
    /// Everything else.
    Other,
}

impl Operation {
    /// What a caller sees of a fault: nobody answered.
    pub(super) fn unavailable(self) -> StoreError {
        let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        StoreError::Unavailable { doing: self.doing(), source: sqlx::Error::Io(reset) }
    }

    fn doing(self) -> &'static str {
        match self {
            Self::CreateRun => "create a run",
            Self::Stop => "stop a run",
            Self::Claim => "claim steps",
            Self::Load => "load a thread",
            Self::Commit => "commit steps",
            Self::Heartbeat => "renew leases",
            Self::GiveBack => "give leases back",
            Self::Sweep => "look for due steps",
            Self::Other => "ask the store",
        }
    }
}

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Nothing is written.
    Before,
    /// All is written and the answer is lost.
    After,
}

/// What was asked for.
#[derive(Debug, Default)]
pub(super) struct Faults {
    asked: HashMap<Operation, VecDeque<Failure>>,
    down: bool,
}

impl Faults {
    pub(super) fn ask(&mut self, operation: Operation, failure: Failure) {
        self.asked.entry(operation).or_default().push_back(failure);
    }

    pub(super) fn set_down(&mut self, down: bool) {
        self.down = down;
    }

    /// How this call fails, if it does.
    pub(super) fn next(&mut self, operation: Operation) -> Option<Failure> {
        if self.down {
            return Some(Failure::Before);
        }
        self.asked.get_mut(&operation)?.pop_front()
    }
}
