//! Who waits for the end of a run. Events say it at once; the store, asked once for all that wait,
//! says it where events are missing. While nobody waits, nothing is asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use threadgate_shared::domain::{RunId, RunStatus};
use threadgate_shared::events::{End, EventLog};
use threadgate_shared::store::Store;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// How often the store is asked while events cannot be relied upon.
const ASK_EVERY_UNHEALTHY: Duration = Duration::from_millis(250);

/// How long a run may be silent before the store is asked about it.
const ASK_AFTER_SILENCE: Duration = Duration::from_secs(1);

/// All who wait in this process.
pub struct Waiters {
    store: Arc<dyn Store>,
    events: Arc<dyn EventLog>,
    waited: Mutex<State>,
    /// Ask now: somebody changed a run by other means than a step.
    now: Notify,
}

#[derive(Default)]
struct State {
    runs: HashMap<RunId, Waited>,
    /// Whether a task asks the store.
    asking: bool,
}

struct Waited {
    ended: watch::Sender<Option<RunStatus>>,
    tickets: usize,
    heard: Instant,
}

/// One who waits; letting go of it ends the waiting.
pub struct Ticket {
    waiters: Arc<Waiters>,
    run: RunId,
    ended: watch::Receiver<Option<RunStatus>>,
}

impl Waiters {
    /// Nobody waits yet.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, events: Arc<dyn EventLog>) -> Arc<Self> {
        Arc::new(Self { store, events, waited: Mutex::default(), now: Notify::new() })
    }

    /// Begins to wait for the end of `run`.
    #[must_use]
    pub fn wait_for(self: &Arc<Self>, run: RunId) -> Ticket {
        let mut state = self.lock();
        let entry = state.runs.entry(run).or_insert_with(|| Waited {
            ended: watch::Sender::new(None),
            tickets: 0,
            heard: Instant::now(),
        });
        entry.tickets += 1;
        let ended = entry.ended.subscribe();
        let is_asking = std::mem::replace(&mut state.asking, true);
        drop(state);
        if !is_asking {
            // From here on no end is missed.
            let ends = self.events.ends();
            tokio::spawn(Arc::clone(self).ask_while_waited_for(ends));
        }
        Ticket { waiters: Arc::clone(self), run, ended }
    }

    /// Asks the store at once about all that is waited for.
    pub fn ask_now(&self) {
        self.now.notify_one();
    }

    async fn ask_while_waited_for(self: Arc<Self>, mut ends: Receiver<End>) {
        let mut asked = Instant::now();
        loop {
            let pause = if self.events.is_healthy() { ASK_AFTER_SILENCE } else { ASK_EVERY_UNHEALTHY };
            let at_once = tokio::select! {
                biased;
                end = ends.recv() => match end {
                    Ok(end) => {
                        self.tell(&[end]);
                        continue;
                    }
                    Err(RecvError::Lagged(_)) => true,
                    // A log that ends while somebody waits says nothing more.
                    Err(RecvError::Closed) => {
                        tokio::time::sleep(pause).await;
                        false
                    }
                },
                () = self.now.notified() => true,
                () = tokio::time::sleep_until(asked + pause) => false,
            };
            asked = Instant::now();
            let Some(silent) = self.silent_runs(at_once) else { return };
            if silent.is_empty() {
                continue;
            }
            match self.store.finished(&silent).await {
                Ok(finished) => self.tell(&finished),
                Err(error) => tracing::warn!(%error, "Could not ask which runs have ended; asking again"),
            }
        }
    }

    /// The runs to ask about; `None` once nobody waits, which ends the asking.
    fn silent_runs(&self, all: bool) -> Option<Vec<RunId>> {
        let mut state = self.lock();
        if state.runs.is_empty() {
            state.asking = false;
            return None;
        }
        let all = all || !self.events.is_healthy();
        let is_due = |entry: &Waited| all || entry.heard.elapsed() >= ASK_AFTER_SILENCE;
        let silent = state.runs.iter().filter(|(_, entry)| entry.ended.borrow().is_none() && is_due(entry));
        Some(silent.map(|(run, _)| *run).collect())
    }

    fn tell(&self, finished: &[(RunId, RunStatus)]) {
        let state = self.lock();
        for (run, status) in finished {
            if let Some(entry) = state.runs.get(run) {
                entry.ended.send_replace(Some(*status));
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.waited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ticket {
    /// The run.
    #[must_use]
    pub fn run(&self) -> RunId {
        self.run
    }

    /// Returns once the log or the store says that the run has ended.
    pub async fn ended(&mut self) -> RunStatus {
        match self.ended.wait_for(Option::is_some).await.map(|status| *status) {
            Ok(Some(status)) => status,
            // The sender lives as long as a ticket does.
            _ => std::future::pending().await,
        }
    }

    /// Events of the run arrive: the store need not be asked for a while.
    pub fn heard(&self) {
        if let Some(entry) = self.waiters.lock().runs.get_mut(&self.run) {
            entry.heard = Instant::now();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.waiters.lock();
        if let Some(entry) = state.runs.get_mut(&self.run) {
            entry.tickets -= 1;
            if entry.tickets == 0 {
                state.runs.remove(&self.run);
            }
        }
    }
}
