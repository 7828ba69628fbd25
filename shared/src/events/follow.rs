//! A follower: replays what the log still has, goes over to what happens now, and notices whatever
//! is missing in between. The same for every log.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures::stream::{self, BoxStream, StreamExt};
use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::{Event, EventId, Followed};
use crate::domain::RunId;

/// A run as young as this may have no events yet; an older one has lost them.
const YOUNG: Duration = Duration::from_secs(2);

/// What reaches a follower as it happens.
#[derive(Debug, Clone)]
pub(super) enum Live {
    /// The next event.
    Event(Arc<Event>),
    /// Events may have been lost here.
    Broken,
}

/// What a log must offer to be followed.
#[async_trait]
pub(super) trait Log: Send + Sync + 'static {
    /// A channel of what happens in `run`, if somebody follows it already.
    fn join(&self, run: RunId) -> Option<Receiver<Live>>;

    /// Such a channel from behind `after` on, if nobody follows the run yet.
    fn open(&self, run: RunId, after: EventId) -> Option<Receiver<Live>>;

    /// The events from `from` on that the log still has; `None` if it cannot be asked.
    async fn replay(&self, run: RunId, from: EventId) -> Option<Vec<Arc<Event>>>;
}

/// Follows `run` from behind `after`.
pub(super) fn follow<L: Log>(log: Arc<L>, run: RunId, after: EventId) -> BoxStream<'static, Followed> {
    let follower =
        Follower { log, run, last: after, live: None, ready: VecDeque::new(), gap_told: false, has_ended: false };
    stream::unfold(follower, Follower::next).boxed()
}

struct Follower<L> {
    log: Arc<L>,
    run: RunId,
    /// The newest event the client has or will have.
    last: EventId,
    live: Option<Receiver<Live>>,
    ready: VecDeque<Followed>,
    /// The last thing said was a gap, so that one hole is told once.
    gap_told: bool,
    has_ended: bool,
}

impl<L: Log> Follower<L> {
    async fn next(mut self) -> Option<(Followed, Self)> {
        loop {
            if let Some(followed) = self.ready.pop_front() {
                return Some((followed, self));
            }
            if self.has_ended {
                return None;
            }
            let Some(live) = &mut self.live else {
                self.catch_up().await;
                continue;
            };
            match live.recv().await {
                Ok(Live::Event(event)) => self.take(event),
                Ok(Live::Broken) => self.tell_gap(),
                // Too slow for the channel, or its log let go of it: what was missed is in the log.
                Err(RecvError::Lagged(_) | RecvError::Closed) => self.live = None,
            }
        }
    }

    /// Reads what the log has beyond `last` and opens the channel for what comes after that.
    async fn catch_up(&mut self) {
        while self.live.is_none() {
            let joined = self.log.join(self.run);
            match self.log.replay(self.run, self.last).await {
                None => self.tell_gap(),
                Some(events) if events.is_empty() && self.last != EventId::ZERO => {
                    // Nobody knows this cursor, it may even lie ahead: tell what there is.
                    self.tell_gap();
                    self.last = EventId::ZERO;
                    continue;
                }
                Some(events) => self.take_replay(events),
            }
            // Opened only behind the replay; if somebody else was faster, replay again behind theirs.
            self.live = joined.or_else(|| self.log.open(self.run, self.last));
        }
    }

    fn take_replay(&mut self, events: Vec<Arc<Event>>) {
        if events.is_empty() && !self.gap_told && !is_young(self.run) {
            self.tell_gap();
        }
        for event in events {
            self.take(event);
        }
    }

    /// Takes the next event; one the client has already is skipped.
    fn take(&mut self, event: Arc<Event>) {
        if event.id <= self.last || self.has_ended {
            return;
        }
        if !self.gap_told && !self.last.is_followed_by(event.id) {
            self.tell_gap();
        }
        self.last = event.id;
        self.gap_told = false;
        self.has_ended = event.body.is_last();
        self.ready.push_back(Followed::Event(event));
    }

    fn tell_gap(&mut self) {
        self.gap_told = true;
        self.ready.push_back(Followed::Gap);
    }
}

/// Judged by the time in the run's id; one without is taken for old.
fn is_young(run: RunId) -> bool {
    let Some(created) = run.0.get_timestamp() else { return false };
    let (seconds, nanos) = created.to_unix();
    let created = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
    SystemTime::now().duration_since(created).is_ok_and(|age| age < YOUNG)
}
