//! Answers: recorded under the thread's lock by the transaction that creates the run which goes on.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::asking::{all, gate, input, listed, paused};
use super::fixture::{World, says, step_of};
use crate::domain::interrupt::{EXPIRY, arguments_hash};
use crate::domain::{InterruptStatus, Json, Message, Question, QuestionKind, Role, RunStatus, ThreadId};
use crate::graph::admission::{Answer, Answerer, Given, Refusal, RunInput, answer_to};
use crate::store::{Created, Idempotency, NewRun, StillPaused, Store, StoreError};

fn answers(given: &[(&Question, Given)]) -> RunInput {
    let answer = |(question, value): &(&Question, Given)| Answer {
        interrupt_id: question.id.clone(),
        value: value.clone(),
        comment: None,
    };
    RunInput { answers: given.iter().map(answer).collect(), ..RunInput::default() }
}

fn approved() -> Given {
    Given::Canonical(json!({"outcome": "approved"}))
}

fn denied() -> Given {
    Given::Canonical(json!({"outcome": "denied", "comment": "no"}))
}

async fn partly(world: &World, new: NewRun, input: RunInput) -> StillPaused {
    match world.submit(new, input).await.unwrap() {
        Created::StillPaused(still) => *still,
        other => panic!("others of the pause are open: {other:?}"),
    }
}

/// C30: stored when it is accepted, not when the node has read it.
pub async fn an_answer_is_kept_and_reaches_the_node(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let question = input("first", 0);
    let first = paused(&world, "t", vec![question.clone()]).await;

    let given = answers(&[(&question, Given::Canonical(json!({"big": 12345678901234567890_u64})))]);
    let run = world.try_create(world.new_run("t"), given).await.unwrap().run;

    assert_eq!((run.resumes, run.root, run.status), (Some(first), first, RunStatus::Queued));
    let record = &listed(&world, &all()).await[0];
    assert_eq!(record.status, InterruptStatus::Answered);
    assert_eq!(record.answer, Some(json!({"big": 12345678901234567890_u64})));
    assert_eq!((record.answered_by.as_deref(), record.answered_at.is_some()), (Some("anonymous"), true));
    let claimed = world.claim(step_of(run.id, 1)).await;
    assert_eq!(answer_to(&world.load(&claimed, None).await.meta, &question.key), record.answer.as_ref());
    let commit = world.after(&claimed, Ok(says("done"))).await;
    world.commit(&commit).await.unwrap();
    assert_eq!(answer_to(&world.state("t").await.meta, &question.key), None, "dropped when the node is done");
}

/// D8: recorded, and still paused; no run, a version of its own.
pub async fn one_of_two_answers_keeps_the_pause(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (one, two) = (gate("first", "c1"), gate("first", "c2"));
    let run = paused(&world, "t", vec![one.clone(), two.clone()]).await;

    let still = partly(&world, world.new_run("t"), answers(&[(&one, approved())])).await;

    assert_eq!((still.run.id, still.run.status, still.version), (run, RunStatus::Interrupted, 3));
    let state = world.state("t").await;
    assert_eq!((&state.meta, state.version), (&still.meta, 3));
    assert_eq!(state.meta.interrupt_data.unwrap()["interrupt"]["id"], *two.id);
    let statuses: Vec<_> = listed(&world, &all()).await.iter().map(|record| record.status).collect();
    assert_eq!(statuses, [InterruptStatus::Answered, InterruptStatus::Open]);
    assert_eq!(world.store.last_of_chain(run).await.unwrap().unwrap().id, run, "nothing resumes it yet");
}

/// Invariant 6: the answer that leaves none open creates the run, with all answers.
pub async fn the_last_answer_makes_the_run_that_goes_on(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (one, two) = (gate("first", "c1"), gate("first", "c2"));
    let first = paused(&world, "t", vec![one.clone(), two.clone()]).await;
    partly(&world, world.new_run("t"), answers(&[(&two, denied())])).await;

    let run = world.try_create(world.new_run("t"), answers(&[(&one, approved())])).await.unwrap().run;

    assert_eq!((run.resumes, run.root), (Some(first), first));
    let claimed = world.claim(step_of(run.id, 1)).await;
    let meta = world.load(&claimed, None).await.meta;
    assert_eq!(answer_to(&meta, &one.key), Some(&json!({"outcome": "approved"})));
    assert_eq!(answer_to(&meta, &two.key), Some(&json!({"outcome": "denied", "comment": "no"})));
}

/// C32, C33: all or nothing, and nothing is written.
pub async fn a_refused_answer_writes_nothing(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (one, two) = (gate("first", "c1"), gate("first", "c2"));
    paused(&world, "t", vec![one.clone(), two.clone()]).await;
    let (before, questions) = (world.state("t").await, listed(&world, &all()).await);
    let wrong = Given::Canonical(json!({"outcome": "yes"}));

    for refused in [
        answers(&[(&one, approved()), (&two, wrong)]),
        answers(&[(&one, approved()), (&gate("first", "c1"), approved())]),
        answers(&[(&one, approved()), (&one, denied())]),
        super::fixture::hello(),
    ] {
        let answer = world.submit(world.new_run("t"), refused).await;
        assert!(matches!(answer, Err(StoreError::Refused(_))), "{answer:?}");
    }

    assert_eq!(world.state("t").await, before);
    assert_eq!(listed(&world, &all()).await, questions);
}

/// C31: the same key replays the first answer.
pub async fn a_key_of_a_partial_answer_stands_for_the_paused_run(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (one, two) = (gate("first", "c1"), gate("first", "c2"));
    let run = paused(&world, "t", vec![one.clone(), two]).await;
    let keyed = || NewRun {
        idempotency: Some(Idempotency { key: "k".to_owned(), body_hash: "h".to_owned(), ttl: Duration::from_secs(60) }),
        ..world.new_run("t")
    };
    partly(&world, keyed(), answers(&[(&one, approved())])).await;

    let again = world.submit(keyed(), answers(&[(&one, approved())])).await.unwrap();

    assert!(matches!(again, Created::Replayed(replayed) if replayed.id == run));
}

/// Invariant 7: the approval row names exactly the arguments.
pub async fn an_approval_keeps_the_hash_of_its_arguments(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let (one, two) = (gate("first", "c1"), gate("first", "c2"));
    paused(&world, "t", vec![one.clone(), two.clone()]).await;

    world.submit(world.new_run("t"), answers(&[(&one, approved()), (&two, denied())])).await.unwrap();

    let hashes: Vec<_> = listed(&world, &all()).await.into_iter().map(|record| record.approved_hash).collect();
    assert_eq!(hashes, [Some(arguments_hash(&json!({"amount": 42}))), None]);
}

/// C34: judged by the database's clock, behind the lock.
pub async fn an_expired_question_takes_its_default_alone(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let mut question = gate("first", "c1");
    question.expires_in = Some(Duration::ZERO);
    question.on_expiry = Some(json!({"outcome": "denied"}));
    paused(&world, "t", vec![question.clone()]).await;
    let by_expiry = |value: Given| RunInput { answered_by: Answerer::Expiry, ..answers(&[(&question, value)]) };

    let late = world.submit(world.new_run("t"), answers(&[(&question, approved())])).await;
    assert!(matches!(late, Err(StoreError::Refused(Refusal::Expired(id))) if id == question.id));
    let other = world.submit(world.new_run("t"), by_expiry(approved())).await;
    assert!(matches!(other, Err(StoreError::Refused(Refusal::Expired(_)))), "{other:?}");
    let default = Given::Canonical(json!({"outcome": "denied"}));
    let run = world.try_create(world.new_run("t"), by_expiry(default.clone())).await.unwrap().run;

    let record = &listed(&world, &all()).await[0];
    assert_eq!((record.status, record.answered_by.as_deref()), (InterruptStatus::Expired, Some(EXPIRY)));
    assert!(run.resumes.is_some());
    let twice = world.submit(world.new_run("t"), by_expiry(default)).await;
    assert!(matches!(twice, Err(StoreError::Refused(_))), "{twice:?}");
}

/// Who, what and about which call.
pub async fn each_decision_is_in_the_audit(store: Arc<dyn Store>) {
    let world = World::new(store).await.as_caller("acme", "ann");
    let (one, two) = (gate("first", "c1"), gate("first", "c2"));
    paused(&world, "t", vec![one.clone(), two.clone()]).await;
    let given = RunInput {
        answered_by: Answerer::User(world.caller.user.clone()),
        ..answers(&[(&one, approved()), (&two, denied())])
    };

    world.submit(world.new_run("t"), given).await.unwrap();

    let audit = world.store.audit(&world.scope(), &ThreadId::from("t")).await.unwrap();
    let said: Vec<_> = audit.iter().map(|entry| (entry.who.as_str(), entry.action.as_str())).collect();
    assert_eq!(said, [("ann", "approve"), ("ann", "deny")]);
    assert_eq!(audit[0].detail["interrupt_id"], *one.id);
    assert_eq!((&audit[0].detail["tool"], &audit[1].detail["comment"]), (&json!("refund"), &json!("no")));
}

/// C39: a partial result is kept and the pause stays.
pub async fn a_result_of_a_client_tool_joins_the_context(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    let remote =
        |call: &str| Question { key: format!("remote:{call}"), kind: QuestionKind::Remote, ..gate("first", call) };
    paused(&world, "t", vec![remote("c1"), remote("c2")]).await;
    let result = |call: &str| {
        let block: Json = json!({"type": "tool_result", "call_id": call, "output": "here"});
        let message = Message { content: vec![block], ..Message::text(Role::Tool, "") };
        RunInput { messages: vec![message], ..RunInput::default() }
    };

    let still = partly(&world, world.new_run("t"), result("c1")).await;
    let again = world.submit(world.new_run("t"), result("c1")).await;
    let run = world.try_create(world.new_run("t"), result("c2")).await.unwrap();

    assert_eq!(still.messages.len(), 1);
    assert!(matches!(again, Err(StoreError::Refused(Refusal::NoSuchCall(_)))), "{again:?}");
    assert!(run.run.resumes.is_some());
    let state = world.state("t").await;
    let calls: Vec<_> = state.context.iter().skip(1).map(|message| &message.content[0]["call_id"]).collect();
    assert_eq!(calls, ["c1", "c2"]);
}
