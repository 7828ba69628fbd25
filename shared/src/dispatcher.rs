//! The only path into the queue: sends the steps that follow committed ones at once, and lets new
//! runs in while the window has room.

use std::sync::Arc;

use crate::domain::PoolName;
use crate::queue::{Job, JobQueue};
use crate::store::{Store, StoreError};

/// Sends steps to the queue.
pub struct Dispatcher {
    store: Arc<dyn Store>,
    queue: Arc<dyn JobQueue>,
}

impl Dispatcher {
    /// A dispatcher over `store` and `queue`.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, queue: Arc<dyn JobQueue>) -> Arc<Self> {
        Arc::new(Self { store, queue })
    }

    /// Sends jobs whose steps are marked as being sent; best effort, the scheduler finds a miss.
    pub async fn send(&self, jobs: &[Job]) {
        let _ = self.queue.push(jobs).await;
    }

    /// Says that a pool has new backlog or a free place: tops the window up soon, in the background;
    /// many nudges become one round.
    pub fn nudge(self: &Arc<Self>, pool: &PoolName, class: i16) {
        let (dispatcher, pool) = (Arc::clone(self), pool.clone());
        tokio::spawn(async move { dispatcher.top_up(&pool, class).await });
    }

    /// Fills the window of a pool and class from the backlog, tenants in turn; how many were sent.
    ///
    /// # Errors
    /// [`StoreError`] if the store cannot be asked; a queue that cannot be reached sends nothing.
    pub async fn top_up(&self, pool: &PoolName, class: i16) -> Result<usize, StoreError> {
        let picked = self.store.dispatch(pool, class, &crate::domain::Tenant(String::new()), 16, 1, &[]).await?;
        let jobs: Vec<Job> = picked.into_iter().map(|(job, _)| job).collect();
        self.send(&jobs).await;
        Ok(jobs.len())
    }
}
