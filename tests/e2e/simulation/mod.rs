//! The simulation: real workers and schedulers on a store and a queue in memory, under tokio's paused
//! clock, in weather drawn from a seed, while processes die, drain and come back. After every move
//! the laws of `laws.rs` hold, and when the faults end every run ends too.
//!
//! `SIMULATION_CASES` (default 50) says how many lives are simulated, `SIMULATION_SEED` repeats one
//! set of them. The seed fixes the moves and the faults; the workers' own jitter stays random.

mod laws;
mod model;
mod nodes;
mod queue;
mod tally;
mod world;

use proptest::test_runner::{Config, RngSeed, TestRunner};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};
use tokio::runtime::Runtime;

use model::{Model, Move};
use tally::Tally;
use world::World;

/// Moves in one life.
const MOVES: std::ops::Range<usize> = 5..60;

/// Of so many lives some must show every kind of end.
const ENOUGH: u32 = 20;

/// Invariants 1 to 5, 9, and C07, C08, C09, C11, C13, C14, C19, C21, C22, C24, C27: whatever happens
/// to processes, calls and jobs, no run is lost and no step is committed twice.
#[test]
fn no_fault_breaks_a_law() {
    let seed = number("SIMULATION_SEED").unwrap_or_else(rand::random);
    let config = Config {
        cases: number("SIMULATION_CASES").and_then(|cases| u32::try_from(cases).ok()).unwrap_or(50),
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 400,
        ..Config::default()
    };
    let mut runner = TestRunner::new(config.clone());

    let before = Tally::so_far();
    let outcome = runner.run(&Model::sequential_strategy(MOVES), |(model, moves, seen)| {
        Simulation::test_sequential(config.clone(), model, moves, seen);
        Ok(())
    });

    if let Err(failure) = outcome {
        panic!("{failure}\nSIMULATION_SEED={seed} repeats it");
    }
    let seen = Tally::so_far() - before;
    println!("{} lives: {seen:?}", config.cases);
    assert!(config.cases < ENOUGH || seen.has_everything(), "these lives were too quiet to prove anything: {seen:?}");
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not '{text}'")))
}

/// One life: a world in a runtime whose clock is paused.
struct Simulation {
    runtime: Runtime,
    world: World,
}

impl StateMachineTest for Simulation {
    type SystemUnderTest = Self;
    type Reference = Model;

    fn init_test(model: &Model) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let world = runtime.block_on(World::new(model));
        Self { runtime, world }
    }

    fn apply(mut life: Self, _: &Model, next: Move) -> Self {
        life.runtime.block_on(life.world.apply(next));
        life
    }

    fn check_invariants(life: &Self, _: &Model) {
        life.runtime.block_on(laws::hold(&life.world));
    }

    fn teardown(mut life: Self, _: Model) {
        life.runtime.block_on(async {
            life.world.end_of_faults().await;
            laws::hold(&life.world).await;
            laws::nothing_is_lost(&life.world).await;
            tally::count(&life.world).await;
        });
    }
}
