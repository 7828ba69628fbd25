//! Leases: taken by one, kept by a heartbeat, given back without charge.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::fixture::{LONG, OVER, World, graph, manifest, record, says, step_of};
use crate::domain::{GraphVersion, LeaseToken, RunId, RunStatus, WorkerId};
use crate::store::{AttemptEnd, CommitOutcome, LeaseState, StepStatus, Store};

/// Sixteen claims at once: one winner, one charged attempt.
pub async fn of_many_claims_at_once_one_wins(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;

    let claims = (0..16).map(|_| {
        let world = World { worker: WorkerId::new(), ..world.clone() };
        tokio::spawn(async move { (world.worker, world.try_claim(step_of(run, 1), LONG).await) })
    });
    let claims = futures::future::join_all(claims).await;

    let winners: Vec<_> =
        claims.into_iter().map(Result::unwrap).filter_map(|(worker, claimed)| Some((worker, claimed?))).collect();
    let [(worker, claimed)] = winners.as_slice() else { panic!("one winner, not {winners:?}") };
    assert_eq!((claimed.attempt, claimed.attempts_max, claimed.version), (1, 3, 1));
    assert_eq!((claimed.node.as_str(), &claimed.graph_version), ("first", &world.graph.version));
    let step = &world.steps(run).await[0];
    assert_eq!((step.status, step.attempt, step.worker), (StepStatus::Leased, 1, Some(*worker)));
    assert!(step.started_at.is_some());
}

/// Code runs only where it is; a declarative version everywhere.
pub async fn a_claim_needs_the_code(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut declarative = manifest();
    (declarative.name, declarative.code) = ("declared".to_owned(), false);
    let declared = World { graph: graph(declarative), ..world.clone() };
    declared.store.register_graphs(&[record(&declared.graph)]).await.unwrap();
    let code = step_of(world.create("a").await.run.id, 1);
    let free = step_of(declared.create("b").await.run.id, 1);
    let claims = [(code, LeaseToken::new()), (free, LeaseToken::new())];

    let other = [GraphVersion::from("c-other")];
    let claimed = world.store.claim(&claims, world.worker, &other, LONG).await.unwrap();

    assert_eq!(claimed.iter().map(|claimed| claimed.step).collect::<Vec<_>>(), [free]);
    assert_eq!(world.claim(code).await.attempt, 1);
}

/// C24: what is unknown, taken or done is left out; the rest of the batch is taken.
pub async fn a_claim_takes_what_is_free(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (done, taken, free) =
        (world.create("a").await.run.id, world.create("b").await.run.id, world.create("c").await.run.id);
    world.step(done, 1, "one").await;
    world.claim(step_of(taken, 1)).await;
    let steps = [step_of(RunId::new(), 1), step_of(done, 1), step_of(taken, 1), step_of(free, 1), step_of(free, 2)];

    let claims = steps.map(|step| (step, LeaseToken::new()));
    let claimed = world.store.claim(&claims, world.worker, &world.versions(), LONG).await.unwrap();

    assert_eq!(claimed.len(), 1);
    assert_eq!((claimed[0].step, claimed[0].token), (step_of(free, 1), claims[3].1));
}

/// A queued run becomes running; nothing else changes.
pub async fn a_started_run_is_running(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (started, finished) = (world.create("a").await.run.id, world.create("b").await.run.id);
    world.finish(finished).await;
    world.claim(step_of(started, 1)).await;

    world.store.mark_running(&[started, finished, RunId::new()]).await.unwrap();

    let run = world.run(started).await;
    assert_eq!(run.status, RunStatus::Running);
    assert!(run.started_at.is_some());
    assert_eq!(world.run(finished).await.status, RunStatus::Completed);
}

/// C01: a heartbeat moves the lease; a sweep leaves it alone.
pub async fn a_heartbeat_keeps_the_lease(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim_for(step_of(run, 1), Duration::from_secs(5)).await;
    let due = async || world.store.why(run).await.unwrap().unwrap().due_at.unwrap();
    let before = due().await;

    let leases = [(claimed.step, claimed.token)];
    let states = world.store.heartbeat(&leases, LONG).await.unwrap();

    assert_eq!(states, [LeaseState { held: true, renewed: true, stop_requested: false }]);
    assert!(due().await - before > chrono::TimeDelta::seconds(60));
    let swept = world.store.sweep(100, true).await.unwrap();
    assert_eq!((swept.released, swept.failed.len()), (0, 0));
    assert_eq!(world.steps(run).await[0].attempt, 1);
}

/// R7: an expired lease that nobody took is renewed, and commits.
pub async fn an_expired_lease_that_nobody_took_is_ours_still(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (renewed, late) = (world.create("a").await.run.id, world.create("b").await.run.id);
    let ours = world.claim_for(step_of(renewed, 1), OVER).await;
    let late = world.claim_for(step_of(late, 1), OVER).await;

    let states = world.store.heartbeat(&[(ours.step, ours.token)], LONG).await.unwrap();
    let commit = world.after(&late, Ok(says("late"))).await;

    assert!(states[0].held);
    assert_eq!(world.commit(&commit).await.unwrap(), CommitOutcome::Committed { version: 2 });
    assert_eq!(world.steps(renewed).await[0].status, StepStatus::Leased);
}

/// One answer per lease, in order: lost, held, unknown, under a stop.
pub async fn a_heartbeat_answers_for_each_lease(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (held, stopped) = (world.create("a").await.run.id, world.create("b").await.run.id);
    let (held, stopped) = (world.claim(step_of(held, 1)).await, world.claim(step_of(stopped, 1)).await);
    world.store.stop_thread(&world.scope(), &"b".into()).await.unwrap();
    let leases = [
        (held.step, LeaseToken::new()),
        (held.step, held.token),
        (step_of(RunId::new(), 1), LeaseToken::new()),
        (stopped.step, stopped.token),
    ];

    let states = world.store.heartbeat(&leases, LONG).await.unwrap();

    assert_eq!(states.iter().map(|state| state.held).collect::<Vec<_>>(), [false, true, false, true]);
    assert!(!states[1].stop_requested);
    assert!(states[3].stop_requested);
}

/// C14: a drain charges nothing, queues the run, and the step may start at once.
pub async fn a_lease_given_back_is_not_charged(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    world.store.mark_running(&[run]).await.unwrap();

    let lost = (claimed.step, LeaseToken::new());
    let given = world.store.give_back(&[(claimed.step, claimed.token), lost]).await.unwrap();

    assert_eq!(given, 1);
    let step = &world.steps(run).await[0];
    assert_eq!((step.status, step.attempt, step.attempts.len()), (StepStatus::Ready, 0, 0));
    assert_eq!(world.run(run).await.status, RunStatus::Queued);
    assert_eq!(world.store.give_back(&[(claimed.step, claimed.token)]).await.unwrap(), 0);
    let commit = world.after(&claimed, Ok(says("late"))).await;
    assert_eq!(world.commit(&commit).await.unwrap(), CommitOutcome::LeaseLost);
    assert_eq!(world.claim(claimed.step).await.attempt, 1);
}

/// C14: somebody is told of a step that was given back.
pub async fn a_step_given_back_is_sent_again(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;

    world.store.give_back(&[(claimed.step, claimed.token)]).await.unwrap();

    let swept = world.sweep_until(|swept| !swept.send.is_empty()).await;
    assert_eq!((swept.send[0].step, swept.released), (claimed.step, 0));
}

/// A failed attempt is recorded and charged; the step waits for a sweep.
pub async fn a_retried_step_waits_for_its_time(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (soon, later) = (world.create("a").await.run.id, world.create("b").await.run.id);
    let (soon, later) = (world.claim(step_of(soon, 1)).await, world.claim(step_of(later, 1)).await);
    let end = AttemptEnd { end: "error".to_owned(), error: None };

    assert!(world.store.retry_step(soon.step, soon.token, &end, Duration::ZERO).await.unwrap());
    assert!(world.store.retry_step(later.step, later.token, &end, LONG).await.unwrap());
    assert!(!world.store.retry_step(later.step, later.token, &end, LONG).await.unwrap());

    let waiting = &world.steps(later.step.run_id).await[0];
    assert_eq!((waiting.status, waiting.attempt), (StepStatus::Delayed, 1));
    let [attempt] = waiting.attempts.as_slice() else { panic!("one attempt, not {:?}", waiting.attempts) };
    assert_eq!((attempt.attempt, attempt.worker, &attempt.end), (1, Some(world.worker), &end));
    assert!(attempt.started_at.is_some());
    assert!(waiting.run_at > attempt.ended_at);
    assert!(world.try_claim(later.step, LONG).await.is_none());
    let swept = world.sweep_until(|swept| !swept.send.is_empty()).await;
    assert_eq!(swept.send.iter().map(|job| (job.step, job.attempt)).collect::<Vec<_>>(), [(soon.step, 1)]);
    assert_eq!(world.claim(soon.step).await.attempt, 2);
    assert!(world.try_claim(later.step, LONG).await.is_none());
}

/// The error of an attempt comes back as it was.
pub async fn an_attempt_keeps_its_error(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let error = serde_json::from_value(
        json!({"code": "NODE_001", "message": "nul \u{0} and é", "node": "first", "transient": true}),
    );
    let end = AttemptEnd { end: "error".to_owned(), error: Some(error.unwrap()) };

    world.store.retry_step(claimed.step, claimed.token, &end, Duration::ZERO).await.unwrap();

    assert_eq!(world.steps(run).await[0].attempts[0].end, end);
}
