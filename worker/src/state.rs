//! The threads' states a worker still has, so that the step after its own commit loads nothing and
//! a later one only what changed.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use threadgate_shared::domain::{JsonMap, Message, MessageId, RunId, ThreadKey, ThreadState, json_bytes};
use threadgate_shared::graph::Manifest;
use threadgate_shared::graph::engine::{self, Advance};
use threadgate_shared::store::{Loaded, RunRecord};
use tokio::time::Instant;

/// States kept at most, whatever their size.
const ENTRIES_MAX: usize = 4096;

/// A run, and its thread's state at one version.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// The run.
    pub run: Arc<RunRecord>,
    /// What its nodes see as `config`.
    pub config: Arc<JsonMap>,
    /// The thread's version.
    pub version: i64,
    /// The state, defaults filled in.
    pub state: Arc<ThreadState>,
    /// When it was put away last.
    pub kept_at: Instant,
    /// Where each message of the context is stored; `None` = this worker has just added it and does
    /// not know.
    positions: Vec<Option<i64>>,
    /// About how much memory it takes.
    bytes: usize,
}

impl Place {
    /// From a full load; without a manifest the state has no defaults, which is enough to fail a run.
    pub(crate) fn from_full(manifest: Option<&Manifest>, loaded: Loaded) -> Self {
        let bytes = loaded.added.iter().map(|(_, message)| json_bytes(message)).sum::<usize>()
            + json_bytes(&loaded.fields)
            + json_bytes(&loaded.meta);
        let (positions, context) =
            loaded.added.into_iter().map(|(position, message)| (Some(position), message)).unzip();
        let state = ThreadState {
            context,
            context_summary: loaded.fields.get("context_summary").cloned(),
            execution_meta: loaded.meta,
            fields: manifest.map_or_else(JsonMap::new, |manifest| manifest.fields_with(&loaded.fields)),
        };
        let config = Arc::new(loaded.run.config.clone());
        Self {
            run: Arc::new(loaded.run),
            config,
            version: loaded.version,
            state: Arc::new(state),
            kept_at: Instant::now(),
            positions,
            bytes,
        }
    }

    /// With what the same run's commits changed since; `None` where that does not fit what is here.
    pub(crate) fn updated(mut self, loaded: Loaded) -> Option<Self> {
        let state = Arc::make_mut(&mut self.state);
        for position in loaded.removed {
            let index = self.positions.iter().position(|known| *known == Some(position))?;
            self.positions.remove(index);
            state.context.remove(index);
        }
        for (position, message) in loaded.added {
            self.bytes += json_bytes(&message);
            self.positions.push(Some(position));
            state.context.push(message);
        }
        for (name, value) in loaded.fields {
            self.bytes += json_bytes(&value);
            if name == "context_summary" {
                state.context_summary = Some(value);
            } else if let Some(field) = state.fields.get_mut(&name) {
                *field = value;
            }
        }
        state.execution_meta = loaded.meta;
        self.run = Arc::new(loaded.run);
        self.version = loaded.version;
        Some(self)
    }

    /// After this worker committed `advance` as `version`.
    pub(crate) fn committed(mut self, advance: &Advance, version: i64) -> Self {
        if !advance.removed.is_empty() {
            let mut context = self.state.context.iter();
            self.positions
                .retain(|_| context.next().is_none_or(|message| !advance.removed.contains(&message.message_id)));
        }
        self.positions.extend(advance.messages.iter().map(|_| None));
        engine::apply(Arc::make_mut(&mut self.state), advance);
        self.version = version;
        self.bytes += advance.messages.iter().map(json_bytes).sum::<usize>() + json_bytes(&advance.fields);
        self
    }

    /// Where the messages `ids` are stored; `None` where one is not known, and all must be loaded.
    pub(crate) fn positions_of(&self, ids: &[MessageId]) -> Option<Vec<i64>> {
        let indexes = self.state.context.iter().enumerate().filter(|(_, message)| ids.contains(&message.message_id));
        indexes.map(|(index, _)| self.positions[index]).collect()
    }
}

/// Where the messages `ids` of a full load are stored.
pub(crate) fn positions_in(added: &[(i64, Message)], ids: &[MessageId]) -> Vec<i64> {
    added.iter().filter(|(_, message)| ids.contains(&message.message_id)).map(|(position, _)| *position).collect()
}

/// The places of threads, the least used ones dropped when they take too much memory. A place is
/// taken out while a step works on it.
#[derive(Debug)]
pub(crate) struct Places {
    bytes_max: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    places: HashMap<ThreadKey, (u64, Place)>,
    /// Keys by age, oldest first.
    ages: BTreeMap<u64, ThreadKey>,
    now: u64,
    bytes: usize,
}

impl Places {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, kept: Mutex::default() }
    }

    /// Takes out what is known of a thread from this very run: clients edit threads between runs.
    pub(crate) fn take(&self, key: ThreadKey, run: RunId) -> Option<Place> {
        let place = self.kept().remove(key)?;
        (place.run.id == run).then_some(place)
    }

    /// Keeps `place` for the thread's next step.
    pub(crate) fn keep(&self, key: ThreadKey, mut place: Place) {
        place.kept_at = Instant::now();
        if place.bytes > self.bytes_max {
            return;
        }
        let mut kept = self.kept();
        kept.remove(key);
        kept.now += 1;
        let now = kept.now;
        kept.bytes += place.bytes;
        kept.ages.insert(now, key);
        kept.places.insert(key, (now, place));
        while kept.bytes > self.bytes_max || kept.places.len() > ENTRIES_MAX {
            let Some((_, oldest)) = kept.ages.first_key_value() else { return };
            let oldest = *oldest;
            kept.remove(oldest);
        }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn remove(&mut self, key: ThreadKey) -> Option<Place> {
        let (age, place) = self.places.remove(&key)?;
        self.ages.remove(&age);
        self.bytes -= place.bytes;
        Some(place)
    }
}
