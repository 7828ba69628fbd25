//! The threads that run nodes, apart from those that hold leases and commit: a node that blocks its
//! thread delays other nodes at most, never a lease. Threads that a node does not give back are left
//! behind, and new nodes get new ones.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tracing::warn;

use crate::telemetry;

/// How long a node whose attempt is over may still return; then it is aborted.
const LATE_GRACE: Duration = Duration::from_secs(5);

/// Where nodes run.
#[derive(Debug, Clone)]
pub(crate) struct NodeThreads {
    count: usize,
    current: Arc<Mutex<Arc<Pool>>>,
}

/// One set of threads; ends in the background when the last node on it is let go.
#[derive(Debug)]
struct Pool(Option<Runtime>);

/// A node that runs.
#[derive(Debug)]
pub(crate) struct Running<T> {
    /// Its end.
    pub task: JoinHandle<T>,
    pool: Arc<Pool>,
}

impl NodeThreads {
    /// `count` threads for nodes; with 0 they run on the caller's runtime.
    ///
    /// # Errors
    /// If the operating system gives no threads.
    pub(crate) fn new(count: usize) -> std::io::Result<Self> {
        Ok(Self { count, current: Arc::new(Mutex::new(Pool::new(count)?)) })
    }

    /// Starts `node`.
    pub(crate) fn spawn<F>(&self, node: F) -> Running<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let pool = Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner));
        let task = match &pool.0 {
            Some(runtime) => runtime.spawn(node),
            None => tokio::spawn(node),
        };
        Running { task, pool }
    }

    /// Lets go of a node whose attempt is over: waits in the background for its late result, aborts
    /// it, and gives its thread up if it does not return even then.
    pub(crate) fn leave<T: Send + 'static>(&self, running: Running<T>, node: String) {
        let threads = self.clone();
        tokio::spawn(async move {
            let Running { mut task, pool } = running;
            if let Ok(ended) = tokio::time::timeout(LATE_GRACE, &mut task).await {
                if ended.is_ok() {
                    metrics::counter!(telemetry::LATE_RESULTS).increment(1);
                    warn!(node, "Node '{node}' returned after its attempt had ended; its result is dropped");
                }
                return;
            }
            task.abort();
            if tokio::time::timeout(LATE_GRACE, task).await.is_err() {
                metrics::counter!(telemetry::LEFT_BEHIND).increment(1);
                warn!(node, "Node '{node}' blocks its thread and cannot be ended; the thread is left behind");
                threads.replace(&pool);
            }
        });
    }

    /// New nodes get new threads, if `stuck` is still where nodes go.
    fn replace(&self, stuck: &Arc<Pool>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&current, stuck) {
            return;
        }
        match Pool::new(self.count) {
            Ok(fresh) => *current = fresh,
            Err(error) => warn!(%error, "Could not start new threads for nodes; the old ones are kept"),
        }
    }
}

impl Pool {
    fn new(count: usize) -> std::io::Result<Arc<Self>> {
        if count == 0 {
            return Ok(Arc::new(Self(None)));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(count)
            .thread_name("threadgate-node")
            .enable_all()
            .build()?;
        Ok(Arc::new(Self(Some(runtime))))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background(); // A thread that is blocked is not waited for.
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// C05: a node that blocks its thread for ever costs that thread and nothing else.
    #[tokio::test(start_paused = true)]
    async fn a_thread_that_is_never_given_back_is_replaced() {
        let threads = NodeThreads::new(1).unwrap();
        let (release, blocked) = mpsc::channel::<()>();
        let (starts, started) = tokio::sync::oneshot::channel();
        let stuck = threads.spawn(async move {
            let _ = starts.send(());
            blocked.recv().is_err()
        });
        let pool = Arc::clone(&stuck.pool);
        started.await.unwrap();

        threads.leave(stuck, "stuck".to_owned());
        while Arc::ptr_eq(&threads.current.lock().unwrap(), &pool) {
            tokio::time::sleep(LATE_GRACE).await; // The clock is paused: this takes no time.
        }

        assert_eq!(threads.spawn(async { 7 }).task.await.unwrap(), 7);
        drop(release);
    }

    #[tokio::test]
    async fn nodes_run_beside_the_callers_threads() {
        let threads = NodeThreads::new(1).unwrap();

        let name = threads.spawn(async { std::thread::current().name().map(str::to_owned) }).task.await.unwrap();

        assert_eq!(name.as_deref(), Some("threadgate-node"));
    }
}
