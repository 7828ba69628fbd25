//! Answers that race: with each other, with a stop, with the end of their time. Exactly one counts.
//! `RACE_ROUNDS` is the number of rounds of each (default 20).

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::asking::{all, gate, listed, paused};
use super::fixture::World;
use crate::domain::{InterruptStatus, Json, Message, Question, QuestionKind, Role, RunId, RunStatus, ThreadId};
use crate::graph::admission::{Answer, Answerer, Given, Refusal, RunInput};
use crate::store::{Created, InterruptFilter, InterruptRecord, Store, StoreError};

fn rounds() -> usize {
    std::env::var("RACE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(20)
}

fn answer(question: &Question, value: Json, by: Answerer) -> RunInput {
    let answer = Answer { interrupt_id: question.id.clone(), value: Given::Canonical(value), comment: None };
    RunInput { answers: vec![answer], answered_by: by, ..RunInput::default() }
}

fn approved() -> Json {
    json!({"outcome": "approved"})
}

fn denied() -> Json {
    json!({"outcome": "denied"})
}

/// Submits in a task of its own, so that it races.
fn submitted(world: &World, thread: &str, input: RunInput) -> tokio::task::JoinHandle<Result<Created, StoreError>> {
    let (world, new) = (world.clone(), world.new_run(thread));
    tokio::spawn(async move { world.submit(new, input).await })
}

/// The question of a thread, and the runs that resume its pause.
async fn after(world: &World, thread: &str, paused: RunId) -> (InterruptRecord, Option<RunId>) {
    let filter = InterruptFilter { thread: Some(ThreadId::from(thread)), ..all() };
    let record = listed(world, &filter).await.remove(0);
    let last = world.store.last_of_chain(paused).await.unwrap().unwrap().id;
    (record, (last != paused).then_some(last))
}

/// C31: two different answers at once: one is recorded, the other refused, and one run goes on.
pub async fn of_two_answers_at_once_one_counts(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for round in 0..rounds() {
        let thread = format!("t{round}");
        let question = gate("first", "c1");
        let run = paused(&world, &thread, vec![question.clone()]).await;
        let by = || Answerer::default();

        let yes = submitted(&world, &thread, answer(&question, approved(), by()));
        let no = submitted(&world, &thread, answer(&question, denied(), by()));
        let (yes, no) = (yes.await.unwrap(), no.await.unwrap());

        let (record, resumed) = after(&world, &thread, run).await;
        let winner = if yes.is_ok() { approved() } else { denied() };
        assert!(yes.is_ok() != no.is_ok(), "{yes:?} {no:?}");
        let lost = yes.err().or(no.err()).unwrap();
        assert!(matches!(lost, StoreError::Refused(Refusal::NotThisInterrupt(_))), "{lost:?}");
        assert_eq!((record.answer, resumed.is_some()), (Some(winner), true));
    }
}

/// Either the answer counts and the stop meets its run, or the stop counts and the answer is refused.
pub async fn of_an_answer_and_a_stop_at_once_one_counts(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for round in 0..rounds() {
        let thread = format!("t{round}");
        let question = gate("first", "c1");
        let run = paused(&world, &thread, vec![question.clone()]).await;

        let yes = submitted(&world, &thread, answer(&question, approved(), Answerer::default()));
        let (stopper, id) = (world.clone(), ThreadId::from(thread.as_str()));
        let stop = tokio::spawn(async move { stopper.store.stop_thread(&stopper.scope(), &id).await });
        let (yes, _) = (yes.await.unwrap(), stop.await.unwrap().unwrap());

        let (record, resumed) = after(&world, &thread, run).await;
        let expected = if yes.is_ok() { InterruptStatus::Answered } else { InterruptStatus::Cancelled };
        assert_eq!((record.status, resumed.is_some()), (expected, yes.is_ok()));
        let last = resumed.unwrap_or(run);
        assert_eq!(world.run(last).await.status, RunStatus::Stopped, "the stop meets what is there");
        let results = world.state(&thread).await.context.iter().filter(|message| message.role == Role::Tool).count();
        assert_eq!(results, usize::from(yes.is_err()), "a cancelled call is denied, an answered one is not");
    }
}

/// C34: an answer and an expiry never both count.
pub async fn of_an_answer_and_an_expiry_at_once_one_counts(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for round in 0..rounds() {
        let thread = format!("t{round}");
        let mut question = gate("first", "c1");
        question.expires_in = Some(Duration::from_millis(2));
        question.on_expiry = Some(denied());
        let run = paused(&world, &thread, vec![question.clone()]).await;

        let yes = submitted(&world, &thread, answer(&question, approved(), Answerer::default()));
        let (clock, over, name) = (world.clone(), question.clone(), thread.clone());
        let expiry = tokio::spawn(async move {
            loop {
                match clock.submit(clock.new_run(&name), answer(&over, denied(), Answerer::Expiry)).await {
                    Ok(_) => return true,
                    Err(StoreError::Refused(_)) => {}
                    Err(error) => panic!("{error}"),
                }
                let record = clock.store.interrupt(&clock.scope(), &over.id).await.unwrap().unwrap();
                if record.status == InterruptStatus::Answered {
                    return false;
                }
            }
        });
        let (yes, expired) = (yes.await.unwrap(), expiry.await.unwrap());

        let (record, resumed) = after(&world, &thread, run).await;
        assert!(yes.is_ok() != expired, "{yes:?} {expired}");
        let expected =
            if expired { (InterruptStatus::Expired, denied()) } else { (InterruptStatus::Answered, approved()) };
        assert_eq!((record.status, record.answer.unwrap(), resumed.is_some()), (expected.0, expected.1, true));
    }
}

/// C39: two results for one client tool at once: one joins the context.
pub async fn of_two_results_at_once_one_counts(store: Arc<dyn Store>) {
    let world = World::new(store).await;
    for round in 0..rounds() {
        let thread = format!("t{round}");
        let question = Question { kind: QuestionKind::Remote, key: "remote:c1".to_owned(), ..gate("first", "c1") };
        let run = paused(&world, &thread, vec![question]).await;
        let result = |output: &str| {
            let block = json!({"type": "tool_result", "call_id": "c1", "output": output});
            let message = Message { content: vec![block], ..Message::text(Role::Tool, "") };
            RunInput { messages: vec![message], ..RunInput::default() }
        };

        let (one, two) = (submitted(&world, &thread, result("one")), submitted(&world, &thread, result("two")));
        let (one, two) = (one.await.unwrap(), two.await.unwrap());

        let (record, resumed) = after(&world, &thread, run).await;
        assert!(one.is_ok() != two.is_ok(), "{one:?} {two:?}");
        let lost = one.err().or(two.err()).unwrap();
        assert!(matches!(lost, StoreError::Refused(Refusal::Busy { .. } | Refusal::NoSuchCall(_))), "{lost:?}");
        assert_eq!((record.status, resumed.is_some()), (InterruptStatus::Answered, true));
        let context = world.state(&thread).await.context;
        assert_eq!(context.iter().filter(|message| message.role == Role::Tool).count(), 1);
    }
}
