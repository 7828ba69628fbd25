//! What holds at every moment, and what holds in the end.

use std::collections::{BTreeMap, BTreeSet};

use threadgate_shared::domain::{Role, RunStatus, StepId, Tenant};
use threadgate_shared::store::memory::Checkpoint;
use threadgate_shared::store::{RunRecord, Runs, StepRecord, StepStatus, StoredState, Threads};

use super::model::THREADS;
use super::nodes::Memory;
use super::world::{World, scope, thread_id};

/// A run with its steps.
type Told = (RunRecord, Vec<StepRecord>);

/// Everything about one thread at one moment.
struct Story {
    runs: Vec<Told>,
    checkpoints: Vec<Checkpoint>,
    state: Option<StoredState>,
}

/// The laws of every moment.
pub async fn hold(world: &World) {
    let mut told = Vec::new();
    for run in world.runs().await {
        let steps = world.observer.steps(run.id).await.unwrap();
        told.push((run, steps));
    }
    names_are_unique(&told);
    starts_are_charged(&world.memory, &told);
    for thread in 0..THREADS {
        let story = Story::read(world, thread, &told).await;
        story.has_one_active_run_at_most();
        story.has_consecutive_versions();
        story.has_one_checkpoint_per_step();
        story.counts_every_effect_once(&world.memory);
        for (run, steps) in &story.runs {
            steps_follow_each_other(run, steps);
            steps.iter().for_each(|step| attempts_are_charged_exactly(run, step));
            if let Some(last) = world.stopped.get(&run.id) {
                stop_is_honoured(run, steps, *last);
            }
        }
    }
}

/// The laws of the end: every run that was accepted is there and final, for a reason.
pub async fn nothing_is_lost(world: &World) {
    let runs: BTreeMap<_, _> = world.runs().await.into_iter().map(|run| (run.id, run)).collect();
    for asked in &world.asked {
        let Some(run) = asked.run else { continue };
        let run = runs.get(&run).unwrap_or_else(|| panic!("{} was accepted and is gone", asked.name));
        assert!(run.status.is_final(), "{run:?}");
        assert_eq!(run.thread_id, thread_id(asked.thread));
        let steps = world.observer.steps(run.id).await.unwrap();
        ends_for_a_reason(world, asked.thread, run, &steps);
    }
}

impl Story {
    async fn read(world: &World, thread: usize, told: &[Told]) -> Self {
        let id = thread_id(thread);
        let mut runs: Vec<Told> = told.iter().filter(|(run, _)| run.thread_id == id).cloned().collect();
        let checkpoints = world.observer.checkpoints(&Tenant::default_tenant(), &id);
        // A create that was repeated may have an older id than the run before it.
        let admitted =
            |run: &RunRecord| checkpoints.iter().position(|made| made.step == Some(StepId { run_id: run.id, seq: 0 }));
        runs.sort_by_key(|(run, _)| admitted(run));
        Self { runs, checkpoints, state: world.observer.state(&scope(), &id, None).await.unwrap() }
    }

    /// Invariant 4.
    fn has_one_active_run_at_most(&self) {
        let active: Vec<_> = self.runs.iter().filter(|(run, _)| !run.status.is_final()).collect();
        assert!(active.len() <= 1, "{active:#?}");
    }

    fn has_consecutive_versions(&self) {
        for (version, checkpoint) in (1..).zip(&self.checkpoints) {
            assert_eq!(checkpoint.version, version, "{:#?}", self.checkpoints);
        }
    }

    /// Invariant 2: what is done has one version, and what is not done has none.
    fn has_one_checkpoint_per_step(&self) {
        let mut made = BTreeSet::new();
        for step in self.checkpoints.iter().filter_map(|checkpoint| checkpoint.step) {
            assert!(made.insert(step), "step {step} was committed twice: {:#?}", self.checkpoints);
        }
        for (run, steps) in &self.runs {
            for step in steps {
                let closes = matches!(step.status, StepStatus::Done | StepStatus::Failed | StepStatus::Cancelled);
                assert_eq!(made.remove(&step.id), closes, "{run:#?} {step:#?} {:#?}", self.checkpoints);
            }
            made.remove(&StepId { run_id: run.id, seq: 0 });
        }
        assert!(made.is_empty(), "versions without a step: {made:?}");
    }

    /// Invariants 2 and 3: each finished node's message is there once, and the counter that every
    /// node raises has lost nothing.
    fn counts_every_effect_once(&self, memory: &Memory) {
        let Some(state) = &self.state else { return };
        let said: Vec<_> = state.context.iter().filter(|message| message.role == Role::Assistant).collect();
        let said: Vec<_> = said.into_iter().map(|message| message.message_id.text.clone()).collect();
        let mut expected = Vec::new();
        for (run, steps) in &self.runs {
            let finished = steps.iter().filter(|step| step.status == StepStatus::Done && !memory.asks(step.id));
            expected.extend(finished.map(|step| format!("{}:{}", run.id, step.id.seq)));
        }
        assert_eq!(said, expected);
        let count = state.fields.get("count").and_then(serde_json::Value::as_u64).unwrap_or_default();
        assert_eq!(count, expected.len() as u64);
    }
}

/// Steps are done in order, and only the last one may be open; a final run has none.
fn steps_follow_each_other(run: &RunRecord, steps: &[StepRecord]) {
    for (seq, step) in (1..).zip(steps) {
        assert_eq!(step.id.seq, seq, "{steps:#?}");
    }
    let open = |step: &&StepRecord| matches!(step.status, StepStatus::Ready | StepStatus::Leased | StepStatus::Delayed);
    let before_last = steps.len().saturating_sub(1);
    assert!(steps[..before_last].iter().all(|step| step.status == StepStatus::Done), "{run:#?} {steps:#?}");
    assert_eq!(steps.iter().filter(open).count(), usize::from(!run.status.is_final()), "{run:#?} {steps:#?}");
}

/// Invariant 9: a crash or a failure charges one attempt, a drain none; never more than there are.
fn attempts_are_charged_exactly(run: &RunRecord, step: &StepRecord) {
    let ended = i16::try_from(step.attempts.len()).unwrap();
    let expected = match step.status {
        StepStatus::Leased | StepStatus::Done => ended + 1,
        StepStatus::Ready | StepStatus::Delayed | StepStatus::Failed | StepStatus::Cancelled => ended,
    };
    assert_eq!(step.attempt, expected, "{run:#?} {step:#?}");
    assert!(step.attempt <= step.attempts_max, "{step:#?}");
}

/// Invariant 5: no node behind the one that was next when the stop counted.
fn stop_is_honoured(run: &RunRecord, steps: &[StepRecord], last: i32) {
    assert!(steps.iter().all(|step| step.id.seq <= last), "{run:#?} went on after its stop at {last}: {steps:#?}");
    assert_ne!(run.status, RunStatus::Interrupted, "a stop beats a pause");
}

/// One key, one run.
fn names_are_unique(told: &[Told]) {
    let mut names = BTreeSet::new();
    for (run, _) in told {
        assert!(names.insert(run.client_run_id.clone()), "{:?} was created twice", run.client_run_id);
    }
}

/// A node starts for a step that is there, under an attempt that it has.
fn starts_are_charged(memory: &Memory, told: &[Told]) {
    let attempts: BTreeMap<StepId, i16> =
        told.iter().flat_map(|(_, steps)| steps).map(|step| (step.id, step.attempts_max)).collect();
    for (step, attempt) in memory.starts() {
        let attempts_max = attempts.get(&step).unwrap_or_else(|| panic!("{step} started and is not there"));
        assert!(i32::from(attempt) <= i32::from(*attempts_max), "{step} started as attempt {attempt}");
    }
}

/// A run completes with all its nodes, fails when its workers died too often, is stopped by a stop,
/// and pauses where its graph asks.
fn ends_for_a_reason(world: &World, thread: usize, run: &RunRecord, steps: &[StepRecord]) {
    let nodes = &world.graph(thread).manifest.nodes;
    match run.status {
        RunStatus::Completed => {
            let last = nodes.last().unwrap();
            assert_eq!(steps.last().map(|step| step.node.as_str()), Some(last.name.as_str()), "{run:#?} {steps:#?}");
        }
        RunStatus::Failed => {
            let error = run.error.as_ref().expect("a failed run says why");
            assert_eq!(error.code, "worker_crash", "{run:#?} {steps:#?}");
        }
        RunStatus::Interrupted => {
            assert_eq!(steps.last().map(|step| step.node.as_str()), Some("asks"), "{run:#?} {steps:#?}");
        }
        RunStatus::Stopped | RunStatus::Waiting | RunStatus::Queued | RunStatus::Running => {}
    }
}
