//! What every event log promises, as stories. Each takes a fresh one; [`events_contract!`] makes a test of each.
//!
//! [`events_contract!`]: crate::events_contract

#![expect(missing_docs, reason = "a story's name says what it promises")]

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::time::timeout;

use super::*;

/// Makes a test of every story. `$fresh` is an async function without arguments that returns a pair:
/// an `Arc<dyn EventLog>` without any content, and whatever must live as long as the story.
#[macro_export]
macro_rules! events_contract {
    ($fresh:path) => {
        $crate::events_contract! { $fresh;
            a_stream_cut_anywhere_goes_on_behind_the_cursor
            a_repeated_or_late_event_is_refused
            a_follower_hears_the_replay_and_then_what_happens
            a_follower_may_be_there_before_the_first_event
            a_stream_that_lost_its_beginning_says_so
            an_event_lost_on_the_way_shows_as_a_gap
            an_unknown_cursor_gets_one_gap_and_all_there_is
            a_cursor_of_a_forgotten_run_gets_a_gap_and_goes_on
            an_old_run_without_events_is_told_as_a_gap
            a_cursor_the_log_let_go_of_gets_a_gap
            big_events_leave_room_for_few
            a_slow_follower_blocks_nobody_and_misses_nothing
        }
    };
    ($fresh:path; $($story:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                let (fresh, _alive) = $fresh().await;
                $crate::events::contract::$story(fresh).await;
            }
        )*
    };
}

/// How long a test waits for what must happen soon.
const SOON: Duration = Duration::from_secs(10);

pub fn started(seq: i32, attempt: i16) -> Event {
    event(EventId::of_step(seq, attempt, 0), EventBody::NodeStarted { node: "plan".to_owned(), step: 1, attempt })
}

pub fn piece(seq: i32, minor: u64) -> Event {
    custom(seq, minor, Json::from("a \u{0} piece"))
}

pub fn custom(seq: i32, minor: u64, value: Json) -> Event {
    event(EventId::of_step(seq, 1, minor), EventBody::Custom { node: "plan".to_owned(), value })
}

pub fn finished(seq: i32) -> Event {
    let body = EventBody::NodeFinished {
        node: "plan".to_owned(),
        version: i64::from(seq),
        messages: Vec::new(),
        removed: Vec::new(),
        fields: JsonMap::from_iter([(
            "n".to_owned(),
            serde_json::from_str("123456789012345678901234567890.10").expect("a number"),
        )]),
        meta: Box::new(ExecutionMeta::fresh("t")),
    };
    event(EventId::of_step(seq, 1, EventId::FINISHED), body)
}

pub fn ended(seq: i32) -> Event {
    let body =
        EventBody::RunEnded { status: RunStatus::Completed, meta: Box::new(ExecutionMeta::fresh("t")), error: None };
    event(EventId::of_step(seq, 1, EventId::ENDED), body)
}

fn event(id: EventId, body: EventBody) -> Event {
    Event { id, at: 1_700_000_000.25, body }
}

/// A whole run of two steps.
pub fn run_of_two_steps() -> Vec<Event> {
    vec![started(1, 1), piece(1, 1), piece(1, 2), finished(1), started(2, 1), finished(2), ended(2)]
}

pub async fn next(stream: &mut BoxStream<'static, Followed>) -> Option<Followed> {
    timeout(SOON, stream.next()).await.expect("something comes soon")
}

pub async fn next_event(stream: &mut BoxStream<'static, Followed>) -> Event {
    match next(stream).await {
        Some(Followed::Event(event)) => Event::clone(&event),
        other => panic!("expected an event, got {other:?}"),
    }
}

/// All that comes until the stream ends.
pub async fn whole(stream: BoxStream<'static, Followed>) -> Vec<Followed> {
    timeout(SOON, stream.collect()).await.expect("the stream ends soon")
}

pub fn as_followed(events: &[Event]) -> Vec<Followed> {
    events.iter().map(|event| Followed::Event(Arc::new(event.clone()))).collect()
}

/// Waits until the log has the run's last event.
pub async fn until_ended(log: &Arc<dyn EventLog>, run: RunId) {
    whole(log.follow(run, EventId::ZERO)).await;
}

/// C50: the first part and the rest, cut anywhere, are the whole stream.
pub async fn a_stream_cut_anywhere_goes_on_behind_the_cursor(log: Arc<dyn EventLog>) {
    let (run, events) = (RunId::new(), run_of_two_steps());
    log.publish(run, events.clone()).await;
    until_ended(&log, run).await;

    for cut in 0..events.len() {
        let after = if cut == 0 { EventId::ZERO } else { events[cut - 1].id };

        assert_eq!(whole(log.follow(run, after)).await, as_followed(&events[cut..]), "cut at {cut}");
    }
}

/// C50: two writers and a retried append give each number once.
pub async fn a_repeated_or_late_event_is_refused(log: Arc<dyn EventLog>) {
    let (run, events) = (RunId::new(), run_of_two_steps());
    log.publish(run, events[..4].to_vec()).await;
    log.publish(run, events[2..6].to_vec()).await;
    log.publish(run, vec![piece(1, 3)]).await;
    log.publish(run, events[5..].to_vec()).await;

    assert_eq!(whole(log.follow(run, EventId::ZERO)).await, as_followed(&events));
}

pub async fn a_follower_hears_the_replay_and_then_what_happens(log: Arc<dyn EventLog>) {
    let (run, events) = (RunId::new(), run_of_two_steps());
    log.publish(run, events[..2].to_vec()).await;
    let mut early = log.follow(run, EventId::ZERO);
    assert_eq!(next_event(&mut early).await, events[0]);
    assert_eq!(next_event(&mut early).await, events[1]);

    log.publish(run, events[2..4].to_vec()).await;
    assert_eq!(next_event(&mut early).await, events[2]);
    let mut late = log.follow(run, events[1].id);
    assert_eq!(next_event(&mut late).await, events[2]);
    log.publish(run, events[4..].to_vec()).await;

    assert_eq!(whole(early).await, as_followed(&events[3..]));
    assert_eq!(whole(late).await, as_followed(&events[3..]));
}

pub async fn a_follower_may_be_there_before_the_first_event(log: Arc<dyn EventLog>) {
    let (run, events) = (RunId::new(), run_of_two_steps());
    let follower = tokio::spawn(whole(log.follow(run, EventId::ZERO)));
    // Events of another run are none of its business.
    log.publish(RunId::new(), run_of_two_steps()).await;
    tokio::task::yield_now().await;

    for event in &events {
        log.publish(run, vec![event.clone()]).await;
    }

    assert_eq!(follower.await.expect("no panic"), as_followed(&events));
}

pub async fn a_stream_that_lost_its_beginning_says_so(log: Arc<dyn EventLog>) {
    let (run, events) = (RunId::new(), run_of_two_steps());
    log.publish(run, events[4..].to_vec()).await;

    let followed = whole(log.follow(run, EventId::ZERO)).await;

    assert_eq!(followed[0], Followed::Gap);
    assert_eq!(followed[1..], as_followed(&events[4..]));
}

pub async fn an_event_lost_on_the_way_shows_as_a_gap(log: Arc<dyn EventLog>) {
    let (run, events) = (RunId::new(), run_of_two_steps());
    log.publish(run, vec![events[0].clone(), events[2].clone()]).await;
    log.publish(run, events[3..].to_vec()).await;

    let followed = whole(log.follow(run, EventId::ZERO)).await;

    let mut expected = as_followed(&[&events[..1], &events[2..]].concat());
    expected.insert(1, Followed::Gap);
    assert_eq!(followed, expected);
}

/// C51: an unknown cursor is answered with one gap and what there is, never with silence.
pub async fn an_unknown_cursor_gets_one_gap_and_all_there_is(log: Arc<dyn EventLog>) {
    let (run, events) = (RunId::new(), run_of_two_steps());
    log.publish(run, events.clone()).await;
    until_ended(&log, run).await;

    let ahead = EventId { major: u64::MAX, minor: u64::MAX };
    let followed = whole(log.follow(run, ahead)).await;

    assert_eq!(followed[0], Followed::Gap);
    assert_eq!(followed[1..], as_followed(&events));
}

/// C51: a cursor of a run the log knows nothing of gets a gap, then live events.
pub async fn a_cursor_of_a_forgotten_run_gets_a_gap_and_goes_on(log: Arc<dyn EventLog>) {
    let (run, events) = (RunId::new(), run_of_two_steps());
    let mut follower = log.follow(run, events[3].id);

    assert_eq!(next(&mut follower).await, Some(Followed::Gap));
    log.publish(run, events[4..].to_vec()).await;

    assert_eq!(whole(follower).await, as_followed(&events[4..]));
}

pub async fn an_old_run_without_events_is_told_as_a_gap(log: Arc<dyn EventLog>) {
    // Created in 2023, by the time in its id.
    let run = RunId("018bcfe5-6800-7000-8000-000000000000".parse().expect("an id"));

    let mut follower = log.follow(run, EventId::ZERO);

    assert_eq!(next(&mut follower).await, Some(Followed::Gap));
}

/// C51: a buffer of limited size and many more events.
pub async fn a_cursor_the_log_let_go_of_gets_a_gap(log: Arc<dyn EventLog>) {
    let run = RunId::new();
    let many = u64::try_from(limits::EVENTS_MAX).expect("fits") + 500;
    for minors in (0..many).collect::<Vec<_>>().chunks(100) {
        let batch = minors.iter().map(|minor| if *minor == 0 { started(1, 1) } else { piece(1, *minor) });
        log.publish(run, batch.collect()).await;
    }
    log.publish(run, vec![finished(1), ended(1)]).await;
    until_ended(&log, run).await;

    let followed = whole(log.follow(run, piece(1, 10).id)).await;

    assert_eq!(followed[0], Followed::Gap);
    assert_eq!(followed.len(), limits::EVENTS_MAX + 1);
    assert_eq!(followed.last(), as_followed(&[ended(1)]).first());
    assert!(!followed[1..].contains(&Followed::Gap));
}

pub async fn big_events_leave_room_for_few(log: Arc<dyn EventLog>) {
    let (run, big) = (RunId::new(), Json::from("x".repeat(1 << 20)));
    log.publish(run, vec![started(1, 1)]).await;
    for minor in 1..10 {
        log.publish(run, vec![custom(1, minor, big.clone())]).await;
    }
    log.publish(run, vec![finished(1), ended(1)]).await;
    until_ended(&log, run).await;

    let followed = whole(log.follow(run, EventId::ZERO)).await;

    assert_eq!(followed[0], Followed::Gap);
    assert!((4..=6).contains(&(followed.len() - 1)), "{} events kept", followed.len() - 1);
}

/// C49: a slow reader blocks nobody and catches up from the log.
pub async fn a_slow_follower_blocks_nobody_and_misses_nothing(log: Arc<dyn EventLog>) {
    let run = RunId::new();
    let mut slow = log.follow(run, EventId::ZERO);
    log.publish(run, vec![started(1, 1)]).await;
    next_event(&mut slow).await;
    let mut expected: Vec<Event> = (1..500).map(|minor| piece(1, minor)).collect();
    expected.extend([finished(1), ended(1)]);

    let quick = tokio::spawn(whole(log.follow(run, started(1, 1).id)));
    for batch in expected.chunks(10) {
        log.publish(run, batch.to_vec()).await;
    }

    assert_eq!(quick.await.expect("no panic"), as_followed(&expected));
    assert_eq!(whole(slow).await, as_followed(&expected));
}
