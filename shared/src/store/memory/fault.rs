//! Faults a test can ask for.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

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
    /// [`crate::store::Ledger::begin_calls`].
    BeginCalls,
    /// [`crate::store::Ledger::finish_call`].
    FinishCall,
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
            Self::BeginCalls => "write down tool calls",
            Self::FinishCall => "store a tool's result",
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

/// How all calls fare, drawn from a seed.
#[derive(Debug, Clone)]
pub struct Weather {
    /// Of what is drawn.
    pub seed: u64,
    /// How many of a hundred calls fail before they do anything.
    pub refused_percent: u8,
    /// How many of a hundred calls do their work and lose the answer.
    pub lost_percent: u8,
    /// How long one way of a call takes at most.
    pub way_max: Duration,
}

/// How one call fares.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Fate {
    /// How long the question travels.
    pub there: Duration,
    /// How the call fails, if it does.
    pub failure: Option<Failure>,
    /// How long the answer travels.
    pub back: Duration,
}

/// What was asked for.
#[derive(Default)]
pub(super) struct Faults {
    asked: HashMap<Operation, VecDeque<Failure>>,
    down: bool,
    weather: Option<(Weather, StdRng)>,
}

impl Faults {
    pub(super) fn ask(&mut self, operation: Operation, failure: Failure) {
        self.asked.entry(operation).or_default().push_back(failure);
    }

    pub(super) fn forget(&mut self) {
        self.asked.clear();
    }

    pub(super) fn set_down(&mut self, down: bool) {
        self.down = down;
    }

    pub(super) fn set_weather(&mut self, weather: Option<Weather>) {
        self.weather = weather.map(|weather| {
            let drawn = StdRng::seed_from_u64(weather.seed);
            (weather, drawn)
        });
    }

    /// How this call fares.
    pub(super) fn next(&mut self, operation: Operation) -> Fate {
        let mut fate = self.weather.as_mut().map(|(weather, drawn)| weather.draw(drawn)).unwrap_or_default();
        let asked = self.asked.get_mut(&operation).and_then(VecDeque::pop_front);
        fate.failure = if self.down { Some(Failure::Before) } else { asked.or(fate.failure) };
        fate
    }
}

impl Weather {
    fn draw(&self, drawn: &mut StdRng) -> Fate {
        let way_max = u64::try_from(self.way_max.as_micros()).unwrap_or(u64::MAX);
        let mut way = || Duration::from_micros(drawn.random_range(0..=way_max));
        let (there, back) = (way(), way());
        let luck = drawn.random_range(0..100);
        let failure = if luck < self.refused_percent {
            Some(Failure::Before)
        } else if luck < self.refused_percent + self.lost_percent {
            Some(Failure::After)
        } else {
            None
        };
        Fate { there, failure, back }
    }
}
