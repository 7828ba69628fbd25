//! The store in memory, for tests: one mutex is the transaction, tokio's clock is the database's
//! clock (so a paused test moves it), and faults can be asked for by name.

mod clock;
mod create;
mod fault;
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
use fault::Faults;
use tables::Tables;

/// How long a step that was sent counts as being sent; then it is sent again.
const RESEND_AFTER: Duration = Duration::from_secs(10);

/// One connection to a database in memory; [`MemoryStore::connect`] opens another.
pub struct MemoryStore {
    database: Arc<Database>,
    /// Cancelled when the process at this end is gone.
    cut: CancellationToken,
}

#[derive(Default)]
struct Database {
    tables: Mutex<Tables>,
    clock: Clock,
    faults: Mutex<Faults>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self { database: Arc::default(), cut: CancellationToken::new() }
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
        Self { database: Arc::clone(&self.database), cut: CancellationToken::new() }
    }

    /// Ends this connection as kill -9 of its process does: what was asked and not yet done is not
    /// done any more, and nobody gets an answer.
    pub fn cut(&self) {
        self.cut.cancel();
    }

    /// Makes the next call of `operation` fail in the given way; calls queue up.
    pub fn fail_next(&self, operation: Operation, failure: Failure) {
        self.faults().ask(operation, failure);
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
        let fate = self.faults().next(operation);
        self.travel(fate.there).await;
        if fate.failure == Some(Failure::Before) {
            return Err(operation.unavailable());
        }
        let answer = body(&mut self.tables(), self.database.clock.now());
        self.travel(fate.back).await;
        if fate.failure == Some(Failure::After) {
            return Err(operation.unavailable());
        }
        answer
    }

    /// One way of a round trip: lets everybody else run; a cut connection has no end.
    async fn travel(&self, time: Duration) {
        if time.is_zero() {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(time).await;
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
