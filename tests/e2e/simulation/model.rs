//! What may happen, and when it makes sense: the moves of a life and how many processes live.

use std::time::Duration;

use proptest::prelude::*;
use proptest_state_machine::ReferenceStateMachine;
use threadgate_shared::store::memory::{Failure, Operation, Weather};

/// Threads of a life; thread `n` belongs to graph `n % GRAPHS`.
pub const THREADS: usize = 5;

/// Workers, or schedulers, at once.
const PROCESSES_MAX: usize = 3;

/// What the laws need no record of: how many processes live, and what is out of order.
#[derive(Debug, Clone)]
pub struct Model {
    pub weather: Weather,
    /// How far the store's clock is ahead of everybody else's (C27).
    pub clock_ahead: Duration,
    pub workers: usize,
    pub schedulers: usize,
    pub is_store_down: bool,
    pub is_queue_away: bool,
}

/// Something that happens.
#[derive(Debug, Clone)]
pub enum Move {
    /// A client sends a message to a thread, or answers the question it waits with.
    Send {
        thread: usize,
    },
    /// A client stops a thread; a calm one sees the moment at which the stop counts.
    Stop {
        thread: usize,
        is_calm: bool,
    },
    /// Nothing but time.
    Wait(Duration),
    StartWorker,
    /// kill -9, now or at a call to the store.
    KillWorker {
        worker: usize,
        at: Option<(Operation, Failure)>,
    },
    /// SIGTERM.
    DrainWorker {
        worker: usize,
    },
    StartScheduler,
    KillScheduler {
        at: Option<(Operation, Failure)>,
    },
    /// FLUSHALL.
    Flush,
    /// Every job there ever was comes again.
    Redeliver,
    SetQueueAway(bool),
    SetStoreDown(bool),
    /// The next call of its kind goes wrong.
    Fail(Operation, Failure),
    /// The store's clock jumps.
    Skew(Duration),
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Move;

    fn init_state() -> BoxedStrategy<Self> {
        let weather = (any::<u64>(), 0..6_u8, 0..6_u8, 0..60_u64);
        (weather, 0..600_u64)
            .prop_map(|((seed, refused_percent, lost_percent, way_max), ahead)| Self {
                weather: Weather { seed, refused_percent, lost_percent, way_max: Duration::from_millis(way_max) },
                clock_ahead: Duration::from_secs(ahead),
                workers: 1,
                schedulers: 1,
                is_store_down: false,
                is_queue_away: false,
            })
            .boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Move> {
        let thread = 0..THREADS;
        let worker = 0..PROCESSES_MAX;
        let wait = prop_oneof![4 => 1..400_u64, 3 => 400..6_000_u64, 1 => 6_000..30_000_u64];
        let at_a_call = (worker_call(), moment()).prop_map(Some);
        let at = prop_oneof![1 => Just(None), 2 => at_a_call];
        let sweep = prop_oneof![Just(None), moment().prop_map(|moment| Some((Operation::Sweep, moment)))];
        prop_oneof![
            12 => thread.clone().prop_map(|thread| Move::Send { thread }),
            4 => (thread, any::<bool>()).prop_map(|(thread, is_calm)| Move::Stop { thread, is_calm }),
            16 => wait.prop_map(|ms| Move::Wait(Duration::from_millis(ms))),
            5 => Just(Move::StartWorker),
            4 => (worker.clone(), at).prop_map(|(worker, at)| Move::KillWorker { worker, at }),
            3 => worker.prop_map(|worker| Move::DrainWorker { worker }),
            2 => Just(Move::StartScheduler),
            1 => sweep.prop_map(|at| Move::KillScheduler { at }),
            1 => Just(Move::Flush),
            1 => Just(Move::Redeliver),
            2 => any::<bool>().prop_map(Move::SetQueueAway),
            2 => any::<bool>().prop_map(Move::SetStoreDown),
            4 => (any_call(), moment()).prop_map(|(operation, failure)| Move::Fail(operation, failure)),
            1 => (1..3_000_u64).prop_map(|ms| Move::Skew(Duration::from_millis(ms))),
        ]
        .boxed()
    }

    fn apply(mut model: Self, next: &Move) -> Self {
        match next {
            Move::StartWorker => model.workers += 1,
            Move::KillWorker { .. } | Move::DrainWorker { .. } => model.workers -= 1,
            Move::StartScheduler => model.schedulers += 1,
            Move::KillScheduler { .. } => model.schedulers -= 1,
            Move::SetQueueAway(away) => model.is_queue_away = *away,
            Move::SetStoreDown(down) => model.is_store_down = *down,
            _ => {}
        }
        model
    }

    fn preconditions(model: &Self, next: &Move) -> bool {
        match next {
            Move::StartWorker => model.workers < PROCESSES_MAX,
            Move::KillWorker { worker, .. } | Move::DrainWorker { worker } => *worker < model.workers,
            Move::StartScheduler => model.schedulers < PROCESSES_MAX,
            Move::KillScheduler { .. } => model.schedulers > 0,
            Move::SetQueueAway(away) => *away != model.is_queue_away,
            Move::SetStoreDown(down) => *down != model.is_store_down,
            _ => true,
        }
    }
}

fn worker_call() -> impl Strategy<Value = Operation> {
    use Operation as O;
    prop_oneof![1 => Just(O::Claim), 1 => Just(O::Load), 3 => Just(O::Commit), 1 => Just(O::Heartbeat), 1 => Just(O::GiveBack)]
}

fn any_call() -> impl Strategy<Value = Operation> {
    use Operation as O;
    let client = prop_oneof![Just(O::CreateRun), Just(O::Stop), Just(O::Sweep), Just(O::Other)];
    prop_oneof![worker_call(), client]
}

fn moment() -> impl Strategy<Value = Failure> {
    prop_oneof![Just(Failure::Before), Just(Failure::After)]
}
