//! The event log inside one process, for the embedded default and the simulation.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use tokio::sync::broadcast::{self, Receiver, Sender};
use tokio::time::Instant;

use super::follow::{self, Live, Log};
use super::limits::{BYTES_MAX, CHANNEL, ENDED_TTL, ENDS_MAX, EVENTS_MAX, TTL};
use super::{End, Event, EventId, EventLog, Followed};
use crate::domain::{RunId, json_bytes};

/// How often runs without news are looked for.
const TIDY_EVERY: Duration = Duration::from_secs(10);

/// Events of runs in memory.
pub struct MemoryEvents {
    log: Arc<MemoryLog>,
    ends: Sender<End>,
}

impl Default for MemoryEvents {
    fn default() -> Self {
        Self { log: Arc::default(), ends: Sender::new(ENDS_MAX) }
    }
}

impl MemoryEvents {
    /// An empty log.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

#[async_trait]
impl EventLog for MemoryEvents {
    async fn publish(&self, run: RunId, events: Vec<Event>) {
        let mut runs = self.log.runs();
        runs.tidy(Instant::now());
        let topic = runs.topic(run);
        let end = events.iter().find_map(|event| event.body.end());
        for event in events {
            topic.add(event);
        }
        drop(runs);
        if let Some(status) = end {
            // Fails when nobody waits.
            let _ = self.ends.send((run, status));
        }
    }

    fn follow(&self, run: RunId, after: EventId) -> BoxStream<'static, Followed> {
        follow::follow(Arc::clone(&self.log), run, after)
    }

    fn ends(&self) -> Receiver<End> {
        self.ends.subscribe()
    }

    fn is_healthy(&self) -> bool {
        true
    }
}

#[derive(Default)]
struct MemoryLog {
    runs: Mutex<Topics>,
}

impl MemoryLog {
    fn runs(&self) -> MutexGuard<'_, Topics> {
        // Nothing panics while it holds the lock, and plain collections stay usable anyway.
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Log for MemoryLog {
    fn join(&self, run: RunId) -> Option<Receiver<Live>> {
        Some(self.runs().topic(run).live.get_or_insert_with(|| broadcast::channel(CHANNEL).0).subscribe())
    }

    fn open(&self, run: RunId, _after: EventId) -> Option<Receiver<Live>> {
        self.join(run)
    }

    async fn replay(&self, run: RunId, from: EventId) -> Option<Vec<Arc<Event>>> {
        let runs = self.runs();
        let events = runs.topics.get(&run).into_iter().flat_map(|topic| &topic.events);
        Some(events.filter(|(event, _)| event.id >= from).map(|(event, _)| Arc::clone(event)).collect())
    }
}

#[derive(Default)]
struct Topics {
    topics: HashMap<RunId, Topic>,
    tidied_at: Option<Instant>,
}

impl Topics {
    fn topic(&mut self, run: RunId) -> &mut Topic {
        self.topics.entry(run).or_insert_with(Topic::new)
    }

    /// Forgets runs that ended, or have had no news for long, unless somebody follows them.
    fn tidy(&mut self, now: Instant) {
        if self.tidied_at.is_some_and(|last| now - last < TIDY_EVERY) {
            return;
        }
        self.tidied_at = Some(now);
        self.topics.retain(|_, topic| now < topic.expires_at || topic.is_followed());
    }
}

struct Topic {
    /// Events with their sizes in bytes, oldest first.
    events: VecDeque<(Arc<Event>, usize)>,
    bytes: usize,
    last: EventId,
    expires_at: Instant,
    live: Option<Sender<Live>>,
}

impl Topic {
    fn new() -> Self {
        Self { events: VecDeque::new(), bytes: 0, last: EventId::ZERO, expires_at: Instant::now() + TTL, live: None }
    }

    fn add(&mut self, event: Event) {
        if event.id <= self.last {
            return;
        }
        self.last = event.id;
        self.expires_at = Instant::now() + if event.body.is_last() { ENDED_TTL } else { TTL };
        let (bytes, event) = (json_bytes(&event.body), Arc::new(event));
        self.bytes += bytes;
        self.events.push_back((Arc::clone(&event), bytes));
        while self.events.len() > EVENTS_MAX || self.bytes > BYTES_MAX {
            let Some((_, freed)) = self.events.pop_front() else { break };
            self.bytes -= freed;
        }
        if let Some(live) = &self.live {
            // Fails when nobody follows any more.
            let _ = live.send(Live::Event(event));
        }
    }

    fn is_followed(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.receiver_count() > 0)
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;
    use crate::events::contract::{run_of_two_steps, started};

    async fn fresh() -> (Arc<dyn EventLog>, ()) {
        (Arc::new(MemoryEvents::new()), ())
    }

    crate::events_contract!(fresh);

    #[test]
    fn runs_are_forgotten_some_time_after_their_end_or_their_last_news() {
        let (ended, silent, followed) = (RunId::new(), RunId::new(), RunId::new());
        let mut topics = Topics::default();
        run_of_two_steps().into_iter().for_each(|event| topics.topic(ended).add(event));
        topics.topic(silent).add(started(1, 1));
        let _follower = topics.topic(followed).live.insert(broadcast::channel(1).0).subscribe();
        let mut left_after = |time: Duration| {
            topics.tidy(Instant::now() + time);
            [ended, silent, followed].map(|run| topics.topics.contains_key(&run))
        };

        assert_eq!(left_after(ENDED_TTL / 2), [true, true, true]);
        assert_eq!(left_after(ENDED_TTL + TIDY_EVERY), [false, true, true]);
        assert_eq!(left_after(TTL + TIDY_EVERY), [false, false, true]);
    }
}
