//! The apalis worker that both queues run on. A reader fetches as many jobs as there are free slots,
//! each becomes a task of its own, and its receipt is handed back when its handler has returned.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use apalis::layers::WorkerBuilderExt;
use apalis::layers::tracing::TraceLayer;
use apalis_core::backend::finalize::Ephemeral;
use apalis_core::backend::{Backend, BackendConfig};
use apalis_core::task::Task;
use apalis_core::task::task_id::RandomId;
use apalis_core::worker::builder::WorkerBuilder;
use apalis_core::worker::context::WorkerContext;
use apalis_core::worker::ext::parallelize::ParallelizeExt;
use async_trait::async_trait;
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tower::{Layer, Service};

use super::{Job, JobHandler, QueueError};

/// Where a worker's jobs come from.
#[async_trait]
pub(super) trait Reader: Send + 'static {
    /// What names a job when it is done.
    type Receipt: Clone + Send + Sync + 'static;

    /// Waits for jobs, at most `max`; an empty answer means ask again.
    async fn read(&mut self, max: usize, shutdown: &CancellationToken) -> Vec<(Job, Self::Receipt)>;
}

/// Takes the receipts of jobs whose handlers have returned.
pub(super) type Done<R> = Arc<dyn Fn(R) + Send + Sync>;

/// Hands what `reader` finds to `handler`, at most `slots` at once, until `shutdown` is cancelled and
/// the last handler has returned.
pub(super) async fn run<T: Reader>(
    name: &str,
    reader: T,
    done: Done<T::Receipt>,
    slots: usize,
    handler: Arc<dyn JobHandler>,
    shutdown: CancellationToken,
) -> Result<(), QueueError> {
    // Every job in the channel has its slot already, so the channel hoards nothing.
    let (sender, jobs) = mpsc::channel(slots.max(1));
    let worker = worker(name, Feed { jobs, done }, handler);
    let (worked, ()) = futures::join!(worker, feed(reader, slots.max(1), sender, shutdown));
    worked.map_err(|message| QueueError { doing: "run the worker's queue", message })
}

/// Reads while there are free slots.
async fn feed<T: Reader>(
    mut reader: T,
    slots: usize,
    sender: mpsc::Sender<Delivery<T::Receipt>>,
    shutdown: CancellationToken,
) {
    let free = Arc::new(Semaphore::new(slots));
    while let Some(mut permit) = shutdown.run_until_cancelled(free_slots(&free)).await {
        // A slot that becomes free at the moment of the shutdown stays free.
        if shutdown.is_cancelled() {
            return;
        }
        let jobs = reader.read(permit.num_permits(), &shutdown).await;
        for (job, receipt) in jobs {
            let slot = permit.split(1).expect("a reader answers at most what was asked");
            if sender.send(Delivery { job, receipt, slot }).await.is_err() {
                return;
            }
        }
    }
}

/// All free slots, at least one.
async fn free_slots(free: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    let mut one = Arc::clone(free).acquire_owned().await.expect("the semaphore is never closed");
    let more = u32::try_from(free.available_permits()).unwrap_or(u32::MAX);
    if let Ok(others) = Arc::clone(free).try_acquire_many_owned(more) {
        one.merge(others);
    }
    one
}

/// A job with the slot it runs in.
struct Delivery<R> {
    job: Job,
    receipt: R,
    slot: OwnedSemaphorePermit,
}

/// Builds the worker outside of any async block: its type is too general for one.
fn worker<R: Clone + Send + Sync + 'static>(
    name: &str,
    feed: Feed<R>,
    handler: Arc<dyn JobHandler>,
) -> BoxFuture<'static, Result<(), String>> {
    let span = |task: &Task<Delivery<R>>| {
        let job = &task.args.job;
        let trace = job.trace.as_deref().unwrap_or_default();
        tracing::info_span!("job", run.id = %job.step.run_id, step.seq = job.step.seq, trace)
    };
    let worker = WorkerBuilder::new(name)
        .backend(feed)
        .parallelize(tokio::spawn)
        .layer(TraceLayer::new().make_span_with(span).on_request(|_: &Task<Delivery<R>>, _: &tracing::Span| {}))
        .catch_panic()
        .build(move |delivery: Delivery<R>| {
            let handler = Arc::clone(&handler);
            async move {
                let Delivery { job, slot, .. } = delivery;
                handler.handle(job).await;
                drop(slot);
            }
        });
    worker.run().map(|ended| ended.map_err(|error| error.to_string())).boxed()
}

/// The backend: a channel the reader fills.
struct Feed<R> {
    jobs: mpsc::Receiver<Delivery<R>>,
    done: Done<R>,
}

impl<R: Clone + Send + Sync + 'static> Backend for Feed<R> {
    type Task = Task<Delivery<R>>;
    type Error = Infallible;

    fn poll_ready(&mut self, _: &mut Context<'_>, _: &WorkerContext) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn poll_next(&mut self, cx: &mut Context<'_>, _: &WorkerContext) -> Poll<Option<Result<Self::Task, Infallible>>> {
        self.jobs.poll_recv(cx).map(|delivery| delivery.map(|delivery| Ok(Task::new(delivery))))
    }

    fn poll_close(&mut self, _: &mut Context<'_>, worker: &WorkerContext) -> Poll<Result<(), Infallible>> {
        // The feed has ended; without this the worker would wait for a stop of its own.
        let _ = worker.stop();
        Poll::Ready(Ok(()))
    }
}

impl<R: Clone + Send + Sync + 'static> BackendConfig for Feed<R> {
    type Args = Delivery<R>;
    type Id = RandomId;
    type Kind = Ephemeral;
    type Config = ();
    type Layer = AckLayer<R>;

    fn config(&self) -> &() {
        &()
    }

    fn middleware(&mut self, _: &mut WorkerContext) -> AckLayer<R> {
        AckLayer { done: Arc::clone(&self.done) }
    }
}

/// Hands back the receipt of every job, also of one whose handler panicked: what went wrong is in
/// the store, and a job that comes back would only repeat it.
struct AckLayer<R> {
    done: Done<R>,
}

impl<S, R> Layer<S> for AckLayer<R> {
    type Service = Ack<S, R>;

    fn layer(&self, inner: S) -> Self::Service {
        Ack { inner, done: Arc::clone(&self.done) }
    }
}

struct Ack<S, R> {
    inner: S,
    done: Done<R>,
}

impl<S, R> Service<Task<Delivery<R>>> for Ack<S, R>
where
    S: Service<Task<Delivery<R>>>,
    S::Future: Send + 'static,
    R: Clone + Send + Sync + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, task: Task<Delivery<R>>) -> Self::Future {
        let (receipt, done) = (task.args.receipt.clone(), Arc::clone(&self.done));
        let handled = self.inner.call(task);
        async move {
            let result = handled.await;
            done(receipt);
            result
        }
        .boxed()
    }
}
