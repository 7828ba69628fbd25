//! The store in memory, for tests: one mutex is the transaction, tokio's clock is the database's
//! clock (so a paused test moves it), and faults can be asked for by name.

mod clock;
#[cfg(test)]
mod contract_test;
mod create;
mod fault;
mod runs;
mod steps;
mod sweep;
mod tables;
mod threads;
mod upkeep;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

pub use fault::{Failure, Operation};
pub use tables::Checkpoint;

use super::{GraphRecord, Graphs, Schema, StoreError, Time};
use crate::domain::{GraphVersion, Tenant, ThreadId};
use clock::Clock;
use fault::Faults;
use tables::Tables;

/// How long a step that was sent counts as being sent; then it is sent again.
const RESEND_AFTER: Duration = Duration::from_secs(10);

/// A whole database in memory. Cloning the `Arc` around it is opening another connection.
#[derive(Default)]
pub struct MemoryStore {
    tables: Mutex<Tables>,
    clock: Clock,
    faults: Mutex<Faults>,
}

impl MemoryStore {
    /// An empty database.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the next call of `operation` fail in the given way; calls queue up.
    pub fn fail_next(&self, operation: Operation, failure: Failure) {
        self.faults().ask(operation, failure);
    }

    /// Makes every call fail without effect until it is switched off again.
    pub fn set_down(&self, down: bool) {
        self.faults().set_down(down);
    }

    /// Moves the database's clock ahead of everybody else's.
    pub fn skew(&self, ahead: Duration) {
        self.clock.skew(ahead);
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
        // A round trip lets everybody else run.
        tokio::task::yield_now().await;
        let failure = self.faults().next(operation);
        if failure == Some(Failure::Before) {
            return Err(operation.unavailable());
        }
        let answer = body(&mut self.tables(), self.clock.now());
        if failure == Some(Failure::After) {
            return Err(operation.unavailable());
        }
        answer
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
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
