//! Sweeps: what a lost worker leaves behind is found and counted once.

use std::sync::Arc;

use super::fixture::{LONG, OVER, World, says, step_of};
use crate::domain::{ExecutionStatus, RunStatus};
use crate::store::{CommitOutcome, StepStatus, Store};

/// C08: the step of a dead worker is ready again, charged, recorded and sent.
pub async fn an_expired_lease_makes_the_step_ready(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.step(run, 1, "one").await;
    world.claim_for(step_of(run, 2), OVER).await;

    let swept = world.sweep_until(|swept| swept.released == 1).await;

    assert_eq!(swept.send.iter().map(|job| (job.step, job.attempt)).collect::<Vec<_>>(), [(step_of(run, 2), 1)]);
    let lane = &swept.send[0].lane;
    assert_eq!((lane.pool.as_str(), lane.class, lane.graph.as_ref()), ("default", 0, Some(&world.graph.version)));
    assert!(swept.failed.is_empty());
    let step = &world.steps(run).await[1];
    assert_eq!((step.status, step.attempt), (StepStatus::Ready, 1));
    let [attempt] = step.attempts.as_slice() else { panic!("one attempt, not {:?}", step.attempts) };
    assert_eq!((attempt.attempt, attempt.end.end.as_str(), attempt.worker), (1, "crash", Some(world.worker)));
    assert_eq!(world.run(run).await.status, RunStatus::Queued);
    assert_eq!(world.claim(step_of(run, 2)).await.attempt, 2);
}

/// R10: after an outage nobody is charged for it.
pub async fn a_sweep_that_may_not_expire_leaves_leases_alone(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim_for(step_of(run, 1), OVER).await;
    let given_back = world.create("u").await.run.id;
    let other = world.claim(step_of(given_back, 1)).await;
    world.store.give_back(&[(other.step, other.token)]).await.unwrap();

    let swept = loop {
        let swept = world.store.sweep(100, false).await.unwrap();
        assert_eq!(swept.released, 0);
        if !swept.send.is_empty() {
            break swept;
        }
    };

    assert_eq!(swept.send[0].step, other.step);
    assert_eq!(world.steps(run).await[0].status, StepStatus::Leased);
    let commit = world.after(&claimed, Ok(says("one"))).await;
    assert!(matches!(world.commit(&commit).await.unwrap(), CommitOutcome::Committed { .. }));
}

/// C12, C07: three starts, no fourth; run and thread are settled in one go, and the holder is fenced.
pub async fn a_step_that_kills_its_workers_fails_its_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.step(run, 1, "one").await;
    let mut last = None;
    for attempt in 1..=3 {
        let claimed = world.claim_for(step_of(run, 2), OVER).await;
        assert_eq!(claimed.attempt, attempt);
        last = Some(world.after(&claimed, Ok(says("too late"))).await);
        let swept = world.sweep_until(|swept| swept.released == 1 || !swept.failed.is_empty()).await;
        assert_eq!(swept.failed.len(), usize::from(attempt == 3));
    }

    let record = world.run(run).await;
    let error = record.error.unwrap();
    assert_eq!((record.status, error.code.as_str()), (RunStatus::Failed, "worker_crash"));
    assert_eq!((error.node.as_deref(), record.version), (Some("second"), 3));
    assert!(record.finished_at.is_some());
    let step = &world.steps(run).await[1];
    assert_eq!((step.status, step.attempt, step.attempts.len()), (StepStatus::Failed, 3, 3));
    assert!(world.try_claim(step_of(run, 2), LONG).await.is_none());
    assert_eq!(world.commit(&last.unwrap()).await.unwrap(), CommitOutcome::LeaseLost);
    let state = world.state("t").await;
    assert_eq!((state.version, state.meta.status), (3, ExecutionStatus::Error));
    assert_eq!(world.context("t").await, ["hello", "one"]);
    let next = world.create("t").await.run.id;
    assert_eq!(world.steps(next).await[0].node, "second");
}

/// Two schedulers at once find an expired lease once.
pub async fn sweeps_at_once_find_a_lease_once(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for n in 0..10 {
        let run = world.create(&format!("t{n}")).await.run.id;
        world.claim_for(step_of(run, 1), OVER).await;
    }

    let mut released = 0;
    while released < 10 {
        let sweeps = (0..4).map(|_| {
            let store = Arc::clone(&world.store);
            tokio::spawn(async move { store.sweep(100, true).await.unwrap() })
        });
        for swept in futures::future::join_all(sweeps).await {
            let swept = swept.unwrap();
            assert_eq!(swept.send.len(), swept.released as usize);
            released += swept.released;
        }
    }

    assert_eq!(released, 10);
}

/// A sweep looks at as many rows as it was told.
pub async fn a_sweep_is_bounded(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for n in 0..5 {
        let run = world.create(&format!("t{n}")).await.run.id;
        world.claim_for(step_of(run, 1), OVER).await;
    }

    let mut released = 0;
    while released < 5 {
        let swept = world.store.sweep(2, true).await.unwrap();
        assert!(swept.released <= 2);
        released += swept.released;
    }
}

/// A sweep says when it is worth looking again.
pub async fn a_sweep_knows_what_is_due_next(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let nothing = world.store.sweep(100, true).await.unwrap();
    let run = world.create("t").await.run.id;
    world.claim(step_of(run, 1)).await;

    let swept = world.store.sweep(100, true).await.unwrap();

    assert_eq!(nothing.next_due, None);
    let next = swept.next_due.unwrap();
    let wait = (next - swept.now).to_std().unwrap();
    assert!(wait <= LONG && wait > LONG / 2, "{wait:?}");
    assert_eq!(next, world.store.why(run).await.unwrap().unwrap().due_at.unwrap());
}

/// What was just sent is not sent again at once.
pub async fn a_step_that_was_sent_is_left_alone(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.step(run, 1, "one").await;

    let swept = world.store.sweep(100, true).await.unwrap();

    assert!(swept.send.is_empty());
    assert!(swept.next_due.is_some(), "if the queue loses it, it is sent again");
}
