//! Following a run to its end: events as they come, and what is missing of them rebuilt from the
//! store. Whoever follows sees every node that was committed, once and in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use threadgate_shared::domain::{ExecutionMeta, RunId, RunStatus, Scope};
use threadgate_shared::events::{Event, EventBody, EventId, Followed};
use threadgate_shared::graph::engine::RunError;
use threadgate_shared::store::{Change, NewlyCreated, RunRecord, StepRecord, StepStatus, Store, StoreError};

use crate::app::App;
use crate::waiters::Ticket;

/// What a follower sees.
#[derive(Debug, Clone)]
pub enum Item {
    /// The next event.
    Event(Arc<Event>),
    /// Events behind this one were lost; what can be rebuilt follows, pieces of growing messages cannot.
    Gap(EventId),
    /// What was lost is told as far as it can be: this is where the run was when that was read.
    Rebuilt {
        /// The newest event that the run can have had then.
        id: EventId,
        /// Its status.
        status: RunStatus,
        /// The thread's version.
        version: i64,
    },
}

/// How long a follower waits for a store that cannot be reached before it asks again.
const STORE_PAUSE: Duration = Duration::from_millis(250);

/// Whether a gap is told.
#[derive(Clone, Copy, PartialEq)]
enum Gap {
    /// The log said so.
    Told,
    /// Only where the store knows of nodes that no event told of.
    IfMissed,
}

/// How a run ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// How.
    pub status: RunStatus,
    /// The place after it.
    pub meta: ExecutionMeta,
    /// Why, if it failed.
    pub error: Option<RunError>,
}

/// Follows one run.
pub struct Follower {
    app: App,
    scope: Scope,
    run: RunId,
    ticket: Ticket,
    events: BoxStream<'static, Followed>,
    /// Whether the log may still say something.
    is_live: bool,
    /// The newest event that was passed on.
    last: EventId,
    /// The thread's version after it.
    version: i64,
    /// The place after it, where it is known.
    meta: Option<ExecutionMeta>,
    ready: VecDeque<Item>,
    is_done: bool,
}

impl Follower {
    /// Follows a run that was created just now.
    #[must_use]
    pub fn of_new(app: &App, scope: Scope, created: &NewlyCreated) -> Self {
        let mut follower = Self::after(app, scope, &created.run, EventId::ZERO, created.version);
        follower.meta = Some(created.meta.clone());
        if created.run.status.is_final() {
            follower.end_with(&created.run, created.meta.clone(), EventId::of_step(0, 1, EventId::ENDED));
        }
        follower
    }

    /// Follows a run from behind an event; `version` is the thread's after it.
    #[must_use]
    pub fn after(app: &App, scope: Scope, run: &RunRecord, last: EventId, version: i64) -> Self {
        Self {
            app: app.clone(),
            scope,
            run: run.id,
            ticket: app.waiters.wait_for(run.id),
            events: app.parts.events.follow(run.id, last),
            is_live: true,
            last,
            version,
            meta: None,
            ready: VecDeque::new(),
            is_done: false,
        }
    }

    /// The next thing to see; `None` after the run's last event.
    ///
    /// # Errors
    /// What could not be read where something had to be rebuilt.
    pub async fn next(&mut self) -> Result<Option<Item>, StoreError> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Ok(Some(item));
            }
            if self.is_done {
                return Ok(None);
            }
            tokio::select! {
                // What has come already goes first: the store knows of an end before the log says it.
                biased;
                followed = self.events.next(), if self.is_live => match followed {
                    Some(Followed::Event(event)) => self.take(event).await?,
                    Some(Followed::Gap) => self.rebuild_when_possible(Gap::Told).await?,
                    None => self.is_live = false,
                },
                _ = self.ticket.ended() => {
                    self.rebuild_when_possible(Gap::IfMissed).await?;
                    // What ended cannot go on; never ask in a tight loop, whatever the store says.
                    tokio::task::yield_now().await;
                    self.is_done = true;
                }
            }
        }
    }

    /// The thread's version after the newest event that was seen.
    #[must_use]
    pub fn version(&self) -> i64 {
        self.version
    }

    async fn take(&mut self, event: Arc<Event>) -> Result<(), StoreError> {
        self.ticket.heard();
        if event.id <= self.last {
            return Ok(());
        }
        let is_behind = match &event.body {
            EventBody::NodeFinished { version, .. } => *version > self.version + 1,
            // A step may end without an output of its own, or with one that the log could not hold.
            EventBody::RunEnded { .. } => event.id.major != self.last.major || self.last.minor < EventId::FINISHED,
            _ => false,
        };
        if is_behind {
            self.rebuild_when_possible(Gap::IfMissed).await?;
        }
        if event.id > self.last && !self.is_done {
            self.pass_on(event);
        }
        Ok(())
    }

    /// Rebuilds as soon as the store can be reached: what was accepted goes on, and whoever follows it
    /// must not be told otherwise because the database is away for a moment.
    async fn rebuild_when_possible(&mut self, gap: Gap) -> Result<(), StoreError> {
        loop {
            match self.rebuild(gap).await {
                Err(StoreError::Unavailable { .. }) => tokio::time::sleep(STORE_PAUSE).await,
                rebuilt => return rebuilt,
            }
        }
    }

    /// Reads from the store what was committed since the last event, and the end if there was one.
    async fn rebuild(&mut self, gap: Gap) -> Result<(), StoreError> {
        let store = Arc::clone(&self.app.parts.store);
        // The run first: what it says has ended is in the changes read after it.
        let Some(run) = store.run(&self.scope, self.run).await? else {
            self.is_done = true;
            return Ok(());
        };
        let steps = store.steps(self.run).await?;
        let newest = newest_id(&steps);
        let cursor = self.last;
        if cursor.major > newest.major {
            // A cursor that no event of this run has: all there is to say is what comes.
            self.last = open_id(&steps);
            self.version = run.version;
        }
        let changes = store.changes(self.run, self.version).await?;
        let meta = changes.last().map(|change| change.meta.clone());
        let missed: Vec<Event> = changes.into_iter().filter_map(|change| finished_event(&steps, change)).collect();
        let is_gap = gap == Gap::Told || missed.iter().any(|event| event.id > self.last);
        if is_gap {
            self.ready.push_back(Item::Gap(cursor));
        }
        for event in missed {
            if event.id > self.last {
                self.pass_on(Arc::new(event));
            }
        }
        if is_gap {
            self.ready.push_back(Item::Rebuilt { id: self.last, status: run.status, version: self.version });
        }
        if run.status.is_final() {
            let meta = match meta.or_else(|| self.meta.clone()) {
                Some(meta) => meta,
                None => meta_at(&*store, &run).await?,
            };
            self.end_with(&run, meta, EventId { minor: EventId::ENDED, ..newest });
        }
        Ok(())
    }

    fn end_with(&mut self, run: &RunRecord, meta: ExecutionMeta, id: EventId) {
        let at = run.finished_at.map_or_else(threadgate_shared::graph::ids::unix_seconds, seconds);
        let body = EventBody::RunEnded { status: run.status, meta: Box::new(meta), error: run.error.clone() };
        self.pass_on(Arc::new(Event { id: id.max(self.last), at, body }));
    }

    fn pass_on(&mut self, event: Arc<Event>) {
        self.last = event.id;
        match &event.body {
            EventBody::NodeFinished { version, meta, .. } => {
                self.version = *version;
                self.meta = Some((**meta).clone());
            }
            EventBody::RunEnded { .. } => self.is_done = true,
            _ => {}
        }
        self.ready.push_back(Item::Event(event));
    }
}

impl Item {
    /// How the run ended, if this says so.
    #[must_use]
    pub fn ended(&self) -> Option<Ended> {
        let Self::Event(event) = self else { return None };
        let EventBody::RunEnded { status, meta, error } = &event.body else { return None };
        Some(Ended { status: *status, meta: (**meta).clone(), error: error.clone() })
    }
}

/// The newest event that the steps can have had.
#[must_use]
pub fn newest_id(steps: &[StepRecord]) -> EventId {
    let of = |step: &StepRecord| EventId::of_step(step.id.seq, step.attempt, EventId::FINISHED);
    steps.iter().map(of).max().unwrap_or(EventId::of_step(0, 1, EventId::FINISHED))
}

/// The newest event that was certainly told: of a step that still runs its start.
fn open_id(steps: &[StepRecord]) -> EventId {
    let of = |step: &StepRecord| {
        let is_over = matches!(step.status, StepStatus::Done | StepStatus::Failed | StepStatus::Cancelled);
        EventId::of_step(step.id.seq, step.attempt, if is_over { EventId::FINISHED } else { 0 })
    };
    steps.iter().map(of).max().unwrap_or(EventId::ZERO)
}

/// The event of a committed node; `None` for the accepted input and for a stop's own checkpoint.
fn finished_event(steps: &[StepRecord], change: Change) -> Option<Event> {
    let step = steps.iter().find(|step| step.version == Some(change.version) && step.status == StepStatus::Done)?;
    let body = EventBody::NodeFinished {
        node: change.node,
        version: change.version,
        messages: change.messages,
        removed: change.removed,
        fields: change.fields,
        meta: Box::new(change.meta),
    };
    Some(Event { id: EventId::of_step(step.id.seq, step.attempt, EventId::FINISHED), at: seconds(change.at), body })
}

/// The place after the run's last checkpoint.
async fn meta_at(store: &dyn Store, run: &RunRecord) -> Result<ExecutionMeta, StoreError> {
    let last = store.changes(run.id, run.version - 1).await?.pop();
    Ok(last.map_or_else(|| ExecutionMeta::fresh(run.thread_id.as_str()), |change| change.meta))
}

/// A time of the store in UNIX seconds.
#[must_use]
pub fn seconds(at: chrono::DateTime<chrono::Utc>) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "microseconds of this century fit an f64")]
    let micros = at.timestamp_micros() as f64;
    micros / 1e6
}
