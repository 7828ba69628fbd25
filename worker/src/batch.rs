//! Folds the calls of concurrent handlers into shared statements. A call that finds nothing under
//! way goes out at once, so a lone run never waits; while statements are under way, the next one
//! gathers company for at most the linger.

use std::collections::{HashSet, VecDeque};
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;

/// How calls are folded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Folding {
    /// The metric that records the size of each batch.
    pub metric: &'static str,
    /// Calls in one statement at most.
    pub batch_max: usize,
    /// Statements under way at once.
    pub lanes: usize,
    /// How long a statement waits for company while another is under way.
    pub linger: Duration,
}

/// Shares statements among callers. Ends when the last handle is dropped.
pub(crate) struct Batcher<Q, A> {
    calls: mpsc::UnboundedSender<Call<Q, A>>,
}

impl<Q, A> Clone for Batcher<Q, A> {
    fn clone(&self) -> Self {
        Self { calls: self.calls.clone() }
    }
}

struct Call<Q, A> {
    question: Q,
    answer: oneshot::Sender<A>,
}

impl<Q: Send + 'static, A: Send + 'static> Batcher<Q, A> {
    /// Starts a batcher: `ask` answers a batch, one answer per question, in order. Questions of equal
    /// `key` are never in one batch.
    pub(crate) fn spawn<K, F, Fut>(folding: Folding, key: fn(&Q) -> K, ask: F) -> Self
    where
        K: Eq + Hash + Send + 'static,
        F: Fn(Vec<Q>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Vec<A>> + Send + 'static,
    {
        let (calls, inbox) = mpsc::unbounded_channel();
        let collector = Collector { folding, key, inbox, held_over: VecDeque::new(), open: true };
        tokio::spawn(collector.run(Arc::new(ask)));
        Self { calls }
    }

    /// The answer to `question`; `None` where the batch it was in did not come back.
    pub(crate) async fn call(&self, question: Q) -> Option<A> {
        let (answer, answered) = oneshot::channel();
        self.calls.send(Call { question, answer }).ok()?;
        answered.await.ok()
    }
}

struct Collector<Q, A, K> {
    folding: Folding,
    key: fn(&Q) -> K,
    inbox: mpsc::UnboundedReceiver<Call<Q, A>>,
    /// Calls whose key was in the batch already.
    held_over: VecDeque<Call<Q, A>>,
    open: bool,
}

impl<Q: Send + 'static, A: Send + 'static, K: Eq + Hash + Send> Collector<Q, A, K> {
    async fn run<F, Fut>(mut self, ask: Arc<F>)
    where
        F: Fn(Vec<Q>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Vec<A>> + Send + 'static,
    {
        let lanes = Arc::new(Semaphore::new(self.folding.lanes));
        loop {
            let lane = Arc::clone(&lanes).acquire_owned().await.expect("the semaphore is never closed");
            let Some(batch) = self.gather(&lanes).await else { return };
            metrics::histogram!(self.folding.metric).record(u32::try_from(batch.len()).unwrap_or(u32::MAX));
            let ask = Arc::clone(&ask);
            tokio::spawn(async move {
                let (questions, answers): (Vec<Q>, Vec<_>) =
                    batch.into_iter().map(|call| (call.question, call.answer)).unzip();
                let given = ask(questions).await;
                for (to, answer) in answers.into_iter().zip(given) {
                    let _ = to.send(answer); // A caller that left does not wait for it.
                }
                drop(lane);
            });
        }
    }

    /// The next batch; `None` when nobody can call any more.
    async fn gather(&mut self, lanes: &Semaphore) -> Option<Vec<Call<Q, A>>> {
        let first = match self.held_over.pop_front() {
            Some(call) => call,
            None => self.inbox.recv().await?,
        };
        let mut keys = HashSet::from([(self.key)(&first.question)]);
        let mut batch = vec![first];
        for call in std::mem::take(&mut self.held_over) {
            self.admit(call, &mut batch, &mut keys);
        }
        if self.folding.batch_max > 1 {
            // Whoever is about to call at this very moment comes along.
            tokio::task::yield_now().await;
            self.gather_waiting(&mut batch, &mut keys);
            let others_under_way = lanes.available_permits() + 1 < self.folding.lanes;
            if others_under_way {
                self.linger(&mut batch, &mut keys).await;
            }
        }
        Some(batch)
    }

    fn gather_waiting(&mut self, batch: &mut Vec<Call<Q, A>>, keys: &mut HashSet<K>) {
        while batch.len() < self.folding.batch_max {
            let Ok(call) = self.inbox.try_recv() else { return };
            self.admit(call, batch, keys);
        }
    }

    async fn linger(&mut self, batch: &mut Vec<Call<Q, A>>, keys: &mut HashSet<K>) {
        let until = Instant::now() + self.folding.linger;
        while self.open && batch.len() < self.folding.batch_max {
            match tokio::time::timeout_at(until, self.inbox.recv()).await {
                Ok(Some(call)) => self.admit(call, batch, keys),
                Ok(None) => self.open = false,
                Err(_) => return,
            }
        }
    }

    fn admit(&mut self, call: Call<Q, A>, batch: &mut Vec<Call<Q, A>>, keys: &mut HashSet<K>) {
        if batch.len() < self.folding.batch_max && keys.insert((self.key)(&call.question)) {
            batch.push(call);
        } else {
            self.held_over.push_back(call);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::sync::Notify;

    use super::*;

    type Seen = Arc<Mutex<Vec<Vec<u32>>>>;

    /// Doubles numbers; a batch waits until `gate` lets one go.
    fn doubler(folding: Folding, key: fn(&u32) -> u32, gate: Option<Arc<Notify>>) -> (Batcher<u32, u32>, Seen) {
        let seen = Seen::default();
        let batches = Arc::clone(&seen);
        let batcher = Batcher::spawn(folding, key, move |numbers: Vec<u32>| {
            batches.lock().unwrap().push(numbers.clone());
            let gate = gate.clone();
            async move {
                if let Some(gate) = gate {
                    gate.notified().await;
                }
                numbers.into_iter().map(|number| number * 2).collect()
            }
        });
        (batcher, seen)
    }

    fn folding(lanes: usize) -> Folding {
        Folding { metric: "test_batch_size", batch_max: 64, lanes, linger: Duration::from_millis(1) }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lone_call_does_not_wait() {
        let (batcher, _) = doubler(folding(2), |n| *n, None);
        let before = Instant::now();

        assert_eq!(batcher.call(4).await, Some(8));

        assert_eq!(before.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_calls_share_statements_and_each_gets_its_own_answer() {
        let gate = Arc::new(Notify::new());
        let (batcher, seen) = doubler(folding(2), |n| *n, Some(Arc::clone(&gate)));

        let answers = tokio::spawn(async move {
            let calls = (0..40).map(|number| batcher.call(number));
            futures::future::join_all(calls).await
        });
        while !answers.is_finished() {
            gate.notify_one();
            tokio::time::advance(Duration::from_millis(1)).await;
        }

        let answers = answers.await.unwrap();
        assert_eq!(answers, (0..40).map(|number| Some(number * 2)).collect::<Vec<_>>());
        assert!(seen.lock().unwrap().len() <= 3, "{seen:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn one_batch_holds_a_key_once() {
        let (batcher, seen) = doubler(folding(1), |n| n % 10, None);

        let calls = [1, 11, 2, 21].map(|number| batcher.call(number));
        let answers = futures::future::join_all(calls).await;

        assert_eq!(answers, [Some(2), Some(22), Some(4), Some(42)]);
        assert_eq!(*seen.lock().unwrap(), [vec![1, 2], vec![11], vec![21]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_that_does_not_come_back_leaves_its_callers_without_an_answer() {
        let batcher: Batcher<u32, u32> =
            Batcher::spawn(folding(1), |n| *n, |_| async { panic!("the statement's task died") });

        assert_eq!(batcher.call(1).await, None);
        assert_eq!(batcher.call(2).await, None, "the next batch is tried all the same");
    }
}
