//! What the lives have shown: laws that nothing put to the test prove nothing.

use std::sync::Mutex;

use threadgate_shared::domain::RunStatus;
use threadgate_shared::store::Runs;

use super::world::World;

static SO_FAR: Mutex<Tally> =
    Mutex::new(Tally { completed: 0, failed: 0, stopped: 0, interrupted: 0, crashes: 0, retries: 0 });

/// How often what was seen.
#[derive(Debug, Clone, Copy)]
pub struct Tally {
    completed: usize,
    failed: usize,
    stopped: usize,
    interrupted: usize,
    /// Attempts whose lease ran out.
    crashes: usize,
    /// Attempts whose node failed.
    retries: usize,
}

impl Tally {
    /// Of all lives of this process.
    pub fn so_far() -> Self {
        *SO_FAR.lock().unwrap()
    }

    /// Whether every kind of end was seen.
    pub fn has_everything(self) -> bool {
        let Self { completed, failed: _, stopped, interrupted, crashes, retries } = self;
        [completed, stopped, interrupted, crashes, retries].into_iter().all(|seen| seen > 0)
    }
}

impl std::ops::Sub for Tally {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            completed: self.completed - before.completed,
            failed: self.failed - before.failed,
            stopped: self.stopped - before.stopped,
            interrupted: self.interrupted - before.interrupted,
            crashes: self.crashes - before.crashes,
            retries: self.retries - before.retries,
        }
    }
}

/// Adds a life that has ended.
pub async fn count(world: &World) {
    let mut attempts = Vec::new();
    let runs = world.runs().await;
    for run in &runs {
        let steps = world.observer.steps(run.id).await.unwrap();
        attempts.extend(steps.into_iter().flat_map(|step| step.attempts).map(|attempt| attempt.end.end));
    }
    let ended = |status| runs.iter().filter(|run| run.status == status).count();
    let mut so_far = SO_FAR.lock().unwrap();
    so_far.completed += ended(RunStatus::Completed);
    so_far.failed += ended(RunStatus::Failed);
    so_far.stopped += ended(RunStatus::Stopped);
    so_far.interrupted += ended(RunStatus::Interrupted);
    so_far.crashes += attempts.iter().filter(|end| *end == "crash").count();
    so_far.retries += attempts.iter().filter(|end| *end == "error").count();
}
