//! Commits: everything of a step at once, once, under its lease.

use std::sync::Arc;

use serde_json::json;

use super::fixture::{OVER, World, manifest_in_pool, named, says, step_of, user, writes};
use crate::domain::{ExecutionStatus, Message, PoolName, Role, RunId, RunStatus};
use crate::graph::admission::RunInput;
use crate::graph::node::{NodeError, Patch};
use crate::store::{CommitOutcome, StepStatus, Store, Then};

/// C09, invariant 3: output, place, and the next step appear together.
pub async fn a_commit_holds_the_next_step(store: Arc<dyn Store>) {
    let world = World::with(store, manifest_in_pool("second", "slow")).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let patch = Patch { fields: writes([("topic", json!("rain"))]).fields, ..says("one") };
    let commit = world.after(&claimed, Ok(patch)).await;

    let outcome = world.commit(&commit).await.unwrap();

    assert_eq!(outcome, CommitOutcome::Committed { version: 2 });
    let steps = world.steps(run).await;
    let seen: Vec<_> = steps.iter().map(|s| (s.id.seq, s.node.as_str(), s.status, s.version)).collect();
    assert_eq!(seen, [(1, "first", StepStatus::Done, Some(2)), (2, "second", StepStatus::Ready, None)]);
    assert_eq!((&steps[1].pool, steps[1].attempt, steps[1].attempts_max), (&PoolName::from("slow"), 0, 3));
    assert!(steps[0].finished_at.is_some());
    let state = world.state("t").await;
    assert_eq!((state.version, state.fields.get("topic")), (2, Some(&json!("rain"))));
    assert_eq!((state.meta.current_node.as_str(), state.meta.status), ("second", ExecutionStatus::Running));
    assert_eq!(world.context("t").await, ["hello", "one"]);
    assert!(!world.store.why(run).await.unwrap().unwrap().in_backlog, "the worker is sending it");
}

/// Versions are consecutive, one per step; every one of them can be read.
pub async fn each_step_is_one_version(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;

    world.finish(run).await;

    let record = world.run(run).await;
    assert_eq!((record.status, record.version, record.error), (RunStatus::Completed, 4, None));
    assert!(record.finished_at.is_some());
    let versions: Vec<_> = world.steps(run).await.iter().map(|step| step.version).collect();
    assert_eq!(versions, [Some(2), Some(3), Some(4)]);
    for (version, messages) in [(1, 1), (2, 2), (3, 3), (4, 4)] {
        let state = world.store.state(&world.scope(), &"t".into(), Some(version)).await.unwrap().unwrap();
        assert_eq!((state.version, state.context.len()), (version, messages));
    }
    assert_eq!(world.store.state(&world.scope(), &"t".into(), Some(5)).await.unwrap(), None);
    assert_eq!(world.state("t").await.meta.status, ExecutionStatus::Completed);
}

/// C11: a worker that did not hear the answer asks again and hears it.
pub async fn a_commit_repeated_with_its_token_answers_the_same(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Ok(says("one"))).await;
    let first = world.commit(&commit).await.unwrap();

    let again = world.commit(&commit).await.unwrap();
    world.step(run, 2, "two").await;
    let much_later = world.commit(&commit).await.unwrap();

    assert_eq!((again, much_later), (first, first));
    assert_eq!(world.context("t").await, ["hello", "one", "two"]);
    assert_eq!(world.state("t").await.version, 3);
    assert_eq!(world.steps(run).await[0].attempt, 1);
}

/// C11: the same holds for the commit that closed the run, also after the next run.
pub async fn the_last_commit_may_be_repeated_too(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.step(run, 1, "one").await;
    world.step(run, 2, "two").await;
    let claimed = world.claim(step_of(run, 3)).await;
    let commit = world.after(&claimed, Ok(says("three"))).await;
    world.commit(&commit).await.unwrap();
    world.create("t").await;

    assert_eq!(world.commit(&commit).await.unwrap(), CommitOutcome::Committed { version: 4 });
    assert_eq!(world.state("t").await.version, 5);
}

/// C04, C07: a late commit changes nothing, before and after somebody else's.
pub async fn a_commit_under_a_lost_lease_changes_nothing(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let late = world.claim_for(step_of(run, 1), OVER).await;
    let commit = world.after(&late, Ok(says("late"))).await;
    world.sweep_until(|swept| swept.released == 1).await;

    let while_ready = world.commit(&commit).await.unwrap();
    let other = world.claim(step_of(run, 1)).await;
    let while_taken = world.commit(&commit).await.unwrap();
    let winner = world.after(&other, Ok(says("one"))).await;
    world.commit(&winner).await.unwrap();
    let after = world.commit(&commit).await.unwrap();

    assert_eq!([while_ready, while_taken, after], [CommitOutcome::LeaseLost; 3]);
    assert_eq!(other.attempt, 2);
    assert_eq!(world.context("t").await, ["hello", "one"]);
    assert_eq!(world.state("t").await.version, 2);
    assert!(!world.store.heartbeat(&[(late.step, late.token)], OVER).await.unwrap()[0].held);
}

/// A commit of a step that does not exist is a lost lease.
pub async fn a_commit_of_an_unknown_step_is_refused(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let mut commit = world.after(&claimed, Ok(says("one"))).await;
    commit.step.run_id = RunId::new();

    assert_eq!(world.commit(&commit).await.unwrap(), CommitOutcome::LeaseLost);
    assert_eq!(world.state("t").await.version, 1);
}

/// A commit that started from another version is a bug and writes nothing.
pub async fn a_commit_from_another_version_is_a_conflict(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Ok(says("one"))).await;
    let mut wrong = commit.clone();
    wrong.base_version = 7;

    assert_eq!(world.commit(&wrong).await.unwrap(), CommitOutcome::Conflict);
    assert_eq!(world.context("t").await, ["hello"]);
    assert_eq!(world.commit(&commit).await.unwrap(), CommitOutcome::Committed { version: 2 });
}

/// Steps of different threads commit together; each hears its own outcome, in order.
pub async fn a_batch_commits_many_threads(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut commits = Vec::new();
    for n in 0..16 {
        let run = world.create(&format!("t{n}")).await.run.id;
        let claimed = world.claim(step_of(run, 1)).await;
        let mut patch = says(&format!("one of {n}"));
        patch.fields.insert("count".to_owned(), json!(n + 1));
        let mut commit = world.after(&claimed, Ok(patch)).await;
        if n == 5 {
            commit.token = crate::domain::LeaseToken::new();
        }
        commits.push(commit);
    }

    let outcomes = world.store.commit(&commits).await;

    for (n, outcome) in outcomes.into_iter().enumerate() {
        let expected = if n == 5 { CommitOutcome::LeaseLost } else { CommitOutcome::Committed { version: 2 } };
        assert_eq!(outcome.unwrap(), expected, "{n}");
        let state = world.state(&format!("t{n}")).await;
        if n != 5 {
            assert_eq!(state.fields.get("count"), Some(&json!(n + 1)));
            assert_eq!(state.context[1].plain_text(), format!("one of {n}"));
        }
    }
}

/// R5: what one step cannot store is its own affair.
pub async fn one_bad_step_does_not_take_its_batch_along(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut commits = Vec::new();
    for thread in ["a", "b", "c"] {
        let run = world.create(thread).await.run.id;
        let claimed = world.claim(step_of(run, 1)).await;
        let id = if thread == "b" { "nul \u{0}" } else { "m" };
        let patch = Patch { messages: vec![named(id, "one")], ..Patch::default() };
        commits.push(world.after(&claimed, Ok(patch)).await);
    }

    let outcomes = world.store.commit(&commits).await;

    let [first, bad, last] = outcomes.as_slice() else { panic!("three outcomes, not {outcomes:?}") };
    assert!(matches!(first, Ok(CommitOutcome::Committed { version: 2 })), "{first:?}");
    assert!(matches!(last, Ok(CommitOutcome::Committed { version: 2 })), "{last:?}");
    let stored = world.state("b").await.context.len();
    assert_eq!(stored, if bad.is_ok() { 2 } else { 1 }, "{bad:?}");
    if bad.is_err() {
        let held = world.store.heartbeat(&[(commits[1].step, commits[1].token)], OVER).await.unwrap();
        assert!(held[0].held, "the worker may commit the failure instead");
    }
}

/// A failure closes the run, keeps its error, and frees the thread.
pub async fn a_failed_step_fails_its_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    world.step(run, 1, "one").await;
    let claimed = world.claim(step_of(run, 2)).await;
    let commit = world.after(&claimed, Err(NodeError::permanent("no \u{0} luck"))).await;

    world.commit(&commit).await.unwrap();

    let record = world.run(run).await;
    let error = record.error.unwrap();
    assert_eq!((record.status, error.code.as_str()), (RunStatus::Failed, "NODE_001"));
    assert_eq!((error.message.as_str(), error.transient), ("Error in node 'second': no \u{0} luck", false));
    assert_eq!(world.state("t").await.meta.status, ExecutionStatus::Error);
    assert_eq!(world.context("t").await, ["hello", "one"]);
    let next = world.create("t").await.run.id;
    assert_eq!(world.steps(next).await[0].node, "second");
}

/// A worker that has a version asks only for what came after it.
pub async fn a_worker_loads_what_changed_since(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let input = RunInput { messages: vec![named("m", "hello"), named("n", "there")], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    let first = world.claim(step_of(run, 1)).await;
    let mut patch = writes([("topic", json!("rain")), ("context_summary", json!("short"))]);
    patch.messages = vec![Message::text(Role::Assistant, "one")];
    patch.remove = vec!["m".into()];
    let commit = world.after(&first, Ok(patch)).await;
    world.commit(&commit).await.unwrap();
    let second = world.claim(step_of(run, 2)).await;

    let all = world.load(&second, None).await;
    let since = world.load(&second, Some(1)).await;
    let nothing = world.load(&second, Some(2)).await;

    let texts = |added: &[(i64, Message)]| added.iter().map(|(_, message)| message.plain_text()).collect::<Vec<_>>();
    assert_eq!(second.version, 2);
    assert_eq!((all.version, texts(&all.added), all.removed.len()), (2, vec!["there".to_owned(), "one".to_owned()], 0));
    assert_eq!((since.version, texts(&since.added)), (2, vec!["one".to_owned()]));
    assert_eq!(since.removed.len(), 1);
    assert!(since.removed[0] < all.added[0].0, "the removed message stood before those that stay");
    assert_eq!(since.added[0].0, all.added[1].0);
    let fields = json!({"topic": "rain", "context_summary": "short"});
    assert_eq!((json!(all.fields), json!(since.fields)), (fields.clone(), fields));
    assert!(nothing.added.is_empty() && nothing.removed.is_empty() && nothing.fields.is_empty());
    assert_eq!((nothing.run.id, nothing.meta), (run, all.meta));
}

/// A removed message leaves context and log, and older versions still show it.
pub async fn a_removed_message_stays_in_older_versions(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let input = RunInput { messages: vec![named("m", "secret"), user("hello")], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Ok(Patch { remove: vec!["m".into()], ..says("one") })).await;

    world.commit(&commit).await.unwrap();

    assert_eq!(world.context("t").await, ["hello", "one"]);
    assert_eq!(super::threads::log(&world, "t").await, ["hello", "one"]);
    assert_eq!(world.store.message(&world.scope(), &"t".into(), "m").await.unwrap(), None);
    let before = world.store.state(&world.scope(), &"t".into(), Some(1)).await.unwrap().unwrap();
    assert_eq!(before.context.iter().map(Message::plain_text).collect::<Vec<_>>(), ["secret", "hello"]);
}

/// R18: an id that leaves in a step may come back in the same one.
pub async fn a_message_may_be_replaced_in_one_step(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let input = RunInput { messages: vec![named("m", "draft"), user("hello")], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let patch = Patch { remove: vec!["m".into()], messages: vec![named("m", "final")], ..Patch::default() };
    let commit = world.after(&claimed, Ok(patch)).await;

    assert_eq!(world.commit(&commit).await.unwrap(), CommitOutcome::Committed { version: 2 });

    assert_eq!(world.context("t").await, ["hello", "final"]);
    let before = world.store.state(&world.scope(), &"t".into(), Some(1)).await.unwrap().unwrap();
    assert_eq!(before.context[0].plain_text(), "draft");
}

/// The newest value of a field counts; older versions keep theirs.
pub async fn a_field_has_a_value_per_version(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let run = world.create("t").await.run.id;
    for (seq, topic) in [(1, json!("rain")), (2, json!("sun")), (3, json!(null))] {
        let claimed = world.claim(step_of(run, seq)).await;
        let commit = world.after(&claimed, Ok(writes([("topic", topic)]))).await;
        world.commit(&commit).await.unwrap();
    }

    for (version, topic) in [(1, None), (2, Some(json!("rain"))), (3, Some(json!("sun"))), (4, Some(json!(null)))] {
        let state = world.store.state(&world.scope(), &"t".into(), Some(version)).await.unwrap().unwrap();
        assert_eq!(state.fields.get("topic"), topic.as_ref(), "version {version}");
    }
}

/// What a follower missed is read by version, the accepted input first.
pub async fn the_changes_of_a_run_are_read_by_version(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let other = world.create("other").await.run.id;
    let input = RunInput { messages: vec![named("m", "hello")], ..RunInput::default() };
    let run = world.try_create(world.new_run("t"), input).await.unwrap().run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let patch = Patch { remove: vec!["m".into()], fields: writes([("count", json!(1))]).fields, ..says("one") };
    let commit = world.after(&claimed, Ok(patch)).await;
    world.commit(&commit).await.unwrap();
    world.step(run, 2, "two").await;

    let all = world.store.changes(run, 0).await.unwrap();
    let later = world.store.changes(run, 2).await.unwrap();

    let seen: Vec<_> = all.iter().map(|change| (change.seq, change.node.as_str(), change.version)).collect();
    assert_eq!(seen, [(0, "__start__", 1), (1, "first", 2), (2, "second", 3)]);
    assert_eq!(all[0].messages.iter().map(Message::plain_text).collect::<Vec<_>>(), ["hello"]);
    assert_eq!(all[1].removed, ["m".into()]);
    assert_eq!(json!(all[1].fields), json!({"count": 1}));
    assert_eq!((all[1].meta.clone(), all[2].messages[0].plain_text()), (commit.meta, "two".to_owned()));
    assert_eq!(later, all[2..]);
    assert_eq!(world.store.changes(other, 0).await.unwrap().len(), 1);
    assert!(world.store.changes(RunId::new(), 0).await.unwrap().is_empty());
}

/// Only final runs are finished.
pub async fn a_waiter_hears_of_final_runs_only(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (done, open) = (world.create("a").await.run.id, world.create("b").await.run.id);
    world.finish(done).await;
    world.claim(step_of(open, 1)).await;

    let finished = world.store.finished(&[open, done, RunId::new()]).await.unwrap();

    assert_eq!(finished, [(done, RunStatus::Completed)]);
    assert!(world.store.finished(&[]).await.unwrap().is_empty());
}

/// An empty batch is nothing to do.
pub async fn empty_batches_do_nothing(store: Arc<dyn Store>) {
    let world = World::new(store).await;

    assert!(world.store.commit(&[]).await.is_empty());
    assert!(world.store.claim(&[], world.worker, &[], OVER).await.unwrap().is_empty());
    assert!(world.store.heartbeat(&[], OVER).await.unwrap().is_empty());
    assert_eq!(world.store.give_back(&[]).await.unwrap(), 0);
    assert!(world.store.load(&[]).await.unwrap().is_empty());
    world.store.mark_running(&[]).await.unwrap();
}

/// Commits of many threads at once neither mix nor block each other.
pub async fn many_runs_step_at_once(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let runs = (0..12).map(|n| {
        let world = world.clone();
        tokio::spawn(async move {
            let run = world.create(&format!("t{n}")).await.run.id;
            world.finish(run).await;
            (n, run)
        })
    });

    for finished in futures::future::join_all(runs).await {
        let (n, run) = finished.unwrap();
        assert_eq!(world.run(run).await.status, RunStatus::Completed);
        assert_eq!(world.context(&format!("t{n}")).await, ["hello", "one", "two", "three"]);
    }
}

/// A step limit is the engine's to judge; its failure is committed with the output.
pub async fn the_output_before_the_limit_is_kept(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut new = world.new_run("t");
    new.step_limit = 2;
    let run = world.try_create(new, super::fixture::hello()).await.unwrap().run.id;
    let claimed = world.claim(step_of(run, 1)).await;
    let commit = world.after(&claimed, Ok(says("one"))).await;
    assert!(matches!(commit.then, Then::End { status: RunStatus::Failed, .. }));

    world.commit(&commit).await.unwrap();

    assert_eq!(world.run(run).await.error.unwrap().code, "RECURSION_001");
    assert_eq!(world.context("t").await, ["hello", "one"]);
}
