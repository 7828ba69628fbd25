//! The store in memory, for tests: one mutex is the transaction, tokio's clock is the database's
//! clock (so a paused test moves it), and faults can be asked for by name.

mod calls;
mod clock;
mod create;
mod fault;
mod interrupts;
mod runs;
mod steps;
mod sweep;
mod tables;
mod threads;
mod upkeep;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

pub use fault::{Failure, Operation, Weather};
pub use tables::Checkpoint;

use super::{GraphRecord, Graphs, Schema, StoreError, Time};
use crate::domain::{GraphVersion, Tenant, ThreadId};
use clock::Clock;
use fault::{Fate, Faults};
use tables::Tables;

/// How long a step that was sent counts as being sent; then it is sent again.
const RESEND_AFTER: Duration = Duration::from_secs(4);

/// One connection to a database in memory; [`MemoryStore::connect`] opens another.
pub struct MemoryStore {
    database: Arc<Database>,
    /// Cancelled when the process at this end is gone.
    cut: CancellationToken,
    /// Where the process at this end is going to die.
    cut_at: Mutex<Option<(Operation, Failure)>>,
    /// Whether no fault concerns it.
    is_calm: bool,
}

#[derive(Default)]
struct Database {
    tables: Mutex<Tables>,
    clock: Clock,
    faults: Mutex<Faults>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::over(Arc::default(), false)
    }
}

impl MemoryStore {
    /// A connection to an empty database.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Another connection to the same database.
    #[must_use]
    pub fn connect(&self) -> Self {
        Self::over(Arc::clone(&self.database), false)
    }

    /// A connection that no fault concerns and whose calls let nobody else run: calls that follow
    /// each other see one moment.
    #[must_use]
    pub fn observer(&self) -> Self {
        Self::over(Arc::clone(&self.database), true)
    }

    fn over(database: Arc<Database>, is_calm: bool) -> Self {
        Self { database, cut: CancellationToken::new(), cut_at: Mutex::default(), is_calm }
    }

    /// Ends this connection as kill -9 of its process does: what was asked and not yet done is not
    /// done any more, and nobody gets an answer.
    pub fn cut(&self) {
        self.cut.cancel();
    }

    /// Cuts it at its next call of `operation`, before or after that is done.
    pub fn cut_at(&self, operation: Operation, moment: Failure) {
        *self.cut_at.lock().unwrap_or_else(PoisonError::into_inner) = Some((operation, moment));
    }

    /// Returns when it is cut.
    pub async fn is_gone(&self) {
        self.cut.cancelled().await;
    }

    /// Makes the next call of `operation` fail in the given way; calls queue up.
    pub fn fail_next(&self, operation: Operation, failure: Failure) {
        self.faults().ask(operation, failure);
    }

    /// Forgets the failures that were asked for and did not happen yet.
    pub fn forget_faults(&self) {
        self.faults().forget();
    }

    /// Makes every call fail without effect until it is switched off again.
    pub fn set_down(&self, down: bool) {
        self.faults().set_down(down);
    }

    /// Makes calls slow and unreliable, or (`None`) quick and reliable again.
    pub fn set_weather(&self, weather: Option<Weather>) {
        self.faults().set_weather(weather);
    }

    /// Moves the database's clock ahead of everybody else's.
    pub fn skew(&self, ahead: Duration) {
        self.database.clock.skew(ahead);
    }

    /// The versions of a thread, oldest first.
    #[must_use]
    pub fn checkpoints(&self, tenant: &Tenant, thread: &ThreadId) -> Vec<Checkpoint> {
        let tables = self.tables();
        tables.find_thread(tenant, thread).map(|thread| thread.checkpoints.clone()).unwrap_or_default()
    }

    /// One transaction: the clock is read once, a fault may come before it or hide its answer.
    async fn transact<T>(
        &self,
        operation: Operation,
        body: impl FnOnce(&mut Tables, Time) -> Result<T, StoreError> + Send,
    ) -> Result<T, StoreError> {
        let fate = if self.is_calm { Fate::default() } else { self.faults().next(operation) };
        self.dies_at(operation, Failure::Before);
        self.travel(fate.there).await;
        if fate.failure == Some(Failure::Before) {
            return Err(operation.unavailable());
        }
        let answer = body(&mut self.tables(), self.database.clock.now());
        self.dies_at(operation, Failure::After);
        self.travel(fate.back).await;
        if fate.failure == Some(Failure::After) {
            return Err(operation.unavailable());
        }
        answer
    }

    fn dies_at(&self, operation: Operation, moment: Failure) {
        let mut cut_at = self.cut_at.lock().unwrap_or_else(PoisonError::into_inner);
        if cut_at.take_if(|cut_at| *cut_at == (operation, moment)).is_some() {
            self.cut();
        }
    }

    /// One way of a round trip: lets everybody else run; a cut connection has no end.
    async fn travel(&self, time: Duration) {
        if !time.is_zero() {
            tokio::time::sleep(time).await;
        } else if !self.is_calm {
            tokio::task::yield_now().await;
        }
        if self.cut.is_cancelled() {
            std::future::pending::<()>().await;
        }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.database.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.database.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Schema for MemoryStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn check_schema(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn ping(&self) -> Result<(), StoreError> {
        self.transact(Operation::Other, |_, _| Ok(())).await
    }
}

#[async_trait]
impl Graphs for MemoryStore {
    async fn register_graphs(&self, graphs: &[GraphRecord]) -> Result<(), StoreError> {
        self.transact(Operation::Other, |tables, now| {
            for graph in graphs {
                tables.graphs.retain(|known| known.version != graph.version);
                tables.graphs.push(GraphRecord { registered_at: now, ..graph.clone() });
            }
            Ok(())
        })
        .await
    }

    async fn graphs(&self) -> Result<Vec<GraphRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            let newest: std::collections::BTreeMap<_, _> =
                tables.graphs.iter().map(|graph| (graph.name.clone(), graph.clone())).collect();
            Ok(newest.into_values().collect())
        })
        .await
    }

    async fn graph_version(&self, version: &GraphVersion) -> Result<Option<GraphRecord>, StoreError> {
        self.transact(Operation::Other, |tables, _| {
            Ok(tables.graphs.iter().find(|graph| graph.version == *version).cloned())
        })
        .await
    }
}
