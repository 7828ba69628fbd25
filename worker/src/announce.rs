//! Tells the event log what happens, in order within a run, without holding up any step: what the
//! log cannot take in time is dropped, for whoever follows can rebuild it from the store.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use threadgate_shared::domain::RunId;
use threadgate_shared::events::{Event, EventBody, EventId, EventLog};
use threadgate_shared::store::Claimed;
use tokio::sync::{mpsc, oneshot};

use crate::telemetry;

/// Sayings that wait at most; more are dropped.
const WAITING_MAX: usize = 8192;

/// Sayings told together at most.
const TOGETHER_MAX: usize = 256;

/// How long a step waits until its end is told, before the next step may speak.
const PATIENCE: Duration = Duration::from_millis(500);

/// The way to the event log.
#[derive(Debug, Clone)]
pub(crate) struct Announcer(mpsc::Sender<Saying>);

#[derive(Debug)]
struct Saying {
    run: RunId,
    events: Vec<Event>,
    told: Option<oneshot::Sender<()>>,
}

impl Announcer {
    pub(crate) fn spawn(log: Arc<dyn EventLog>) -> Self {
        let (sayings, inbox) = mpsc::channel(WAITING_MAX);
        tokio::spawn(tell_all(log, inbox));
        Self(sayings)
    }

    /// Tells `events` of `run` soon, or drops them.
    pub(crate) fn say(&self, run: RunId, events: Vec<Event>) {
        let count = u64::try_from(events.len()).unwrap_or(u64::MAX);
        if self.0.try_send(Saying { run, events, told: None }).is_err() {
            metrics::counter!(telemetry::EVENTS_DROPPED).increment(count);
        }
    }

    /// Tells `events` of `run` and returns when they are told, or have waited too long.
    pub(crate) async fn say_first(&self, run: RunId, events: Vec<Event>) {
        let (told, heard) = oneshot::channel();
        let saying = Saying { run, events, told: Some(told) };
        let _ = tokio::time::timeout(PATIENCE, async {
            if self.0.send(saying).await.is_ok() {
                let _ = heard.await;
            }
        })
        .await;
    }
}

async fn tell_all(log: Arc<dyn EventLog>, mut inbox: mpsc::Receiver<Saying>) {
    let mut sayings = Vec::with_capacity(TOGETHER_MAX);
    while inbox.recv_many(&mut sayings, TOGETHER_MAX).await > 0 {
        let mut by_run: HashMap<RunId, (Vec<Event>, Vec<oneshot::Sender<()>>)> = HashMap::new();
        for saying in sayings.drain(..) {
            let (events, told) = by_run.entry(saying.run).or_default();
            events.extend(saying.events);
            told.extend(saying.told);
        }
        let tellings = by_run.into_iter().map(|(run, (events, told))| {
            let log = &log;
            async move {
                log.publish(run, events).await;
                for told in told {
                    let _ = told.send(());
                }
            }
        });
        futures::future::join_all(tellings).await;
    }
}

/// The events of one attempt: numbers them and holds the first back for a moment, so that a quick
/// node is told in one go.
#[derive(Debug)]
pub(crate) struct Attempt {
    run: RunId,
    seq: i32,
    attempt: i16,
    told: u64,
    held_back: Vec<Event>,
}

impl Attempt {
    /// An attempt that starts; `step` is the wire's counter.
    pub(crate) fn starts(claimed: &Claimed, step: i64) -> Self {
        let mut attempt = Self {
            run: claimed.step.run_id,
            seq: claimed.step.seq,
            attempt: claimed.attempt,
            told: 0,
            held_back: Vec::new(),
        };
        let body = EventBody::NodeStarted { node: claimed.node.clone(), step, attempt: claimed.attempt };
        let event = attempt.event(0, body);
        attempt.held_back.push(event);
        attempt
    }

    /// Whether something is held back.
    pub(crate) fn is_holding(&self) -> bool {
        !self.held_back.is_empty()
    }

    /// Tells what is held back.
    pub(crate) fn speak(&mut self, announcer: &Announcer) {
        if self.is_holding() {
            announcer.say(self.run, std::mem::take(&mut self.held_back));
        }
    }

    /// Tells the piece `number`, from 1.
    pub(crate) fn piece(&mut self, announcer: &Announcer, number: u64, body: EventBody) {
        self.told += 1;
        let event = self.event(number, body);
        self.held_back.push(event);
        self.speak(announcer);
    }

    /// The node has ended and said `count` pieces in all; those that are missing were dropped.
    pub(crate) fn heard(&self, count: u64) {
        let dropped = count.saturating_sub(self.told);
        if dropped > 0 {
            metrics::counter!(telemetry::EVENTS_DROPPED).increment(dropped);
        }
    }

    /// Tells the attempt's end and returns when that is told.
    pub(crate) async fn ends(mut self, announcer: &Announcer, finished: Option<EventBody>, ended: Option<EventBody>) {
        let mut events = std::mem::take(&mut self.held_back);
        events.extend(finished.map(|body| self.event(EventId::FINISHED, body)));
        events.extend(ended.map(|body| self.event(EventId::ENDED, body)));
        if !events.is_empty() {
            announcer.say_first(self.run, events).await;
        }
    }

    fn event(&self, minor: u64, body: EventBody) -> Event {
        let at = chrono::Utc::now().timestamp_micros();
        #[expect(clippy::cast_precision_loss, reason = "microseconds of this millennium fit a double")]
        let at = at as f64 / 1e6;
        Event { id: EventId::of_step(self.seq, self.attempt, minor), at, body }
    }
}
