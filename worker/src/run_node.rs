//! Runs one node: on the nodes' threads, under its deadline, its panic caught, while the lease, the
//! worker's end and the node's own events are watched from outside.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use threadgate_shared::domain::meta::START;
use threadgate_shared::domain::{Caller, ThreadState, json_bytes};
use threadgate_shared::events::EventBody;
use threadgate_shared::graph::admission::answers_of;
use threadgate_shared::graph::engine::{self, Advance};
use threadgate_shared::graph::{Graph, NodeContext, NodeError, NodeEvent, NodeEvents, Outcome};
use threadgate_shared::store::{Claimed, RunRecord, Store};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::announce::{Announcer, Attempt};
use crate::lease::{Lease, Leases};
use crate::nodes::tools::{self, Book};
use crate::state::Place;
use crate::telemetry;
use crate::threads::NodeThreads;

/// A node that is quicker is announced together with its end.
const QUICK: Duration = Duration::from_millis(5);

/// Bytes of an error's text that are kept.
const ERROR_BYTES_MAX: usize = 16 * 1024;

/// How a node ended.
#[derive(Debug)]
pub(crate) enum NodeEnd {
    /// It returned, or asks somebody: this is what the step commits.
    Advanced(Box<Advance>),
    /// It did not.
    Failed(Failure),
}

/// Why a node did not return an outcome.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Failure {
    /// The attempt's end in words of the store: `error`, `timeout`, `panic` or `output_too_large`.
    pub end: &'static str,
    /// The wire's code.
    pub code: String,
    /// What happened, without the node's name.
    pub message: String,
    /// Whether another attempt could succeed.
    pub retryable: bool,
}

/// Why a step is left without a result.
#[derive(Debug, PartialEq)]
pub(crate) enum Left {
    /// The lease is somebody else's.
    Lost,
    /// The worker ends.
    Evicted,
    /// Nothing can be committed for it; says why.
    Unusable(String),
}

/// What runs nodes.
pub(crate) struct NodeRunner {
    pub store: Arc<dyn Store>,
    pub threads: NodeThreads,
    pub leases: Leases,
    pub announcer: Announcer,
    /// Cancelled when the grace of the worker's end is over.
    pub evict: CancellationToken,
    pub output_bytes_max: usize,
    pub timeout_max: Duration,
}

impl NodeRunner {
    /// Runs the claimed step's node once and decides what follows.
    ///
    /// # Errors
    /// [`Left`] where the step is no longer this worker's business.
    pub(crate) async fn run(
        &self,
        lease: &Lease,
        claimed: &Claimed,
        graph: &Arc<Graph>,
        place: &Place,
        attempt: &mut Attempt,
    ) -> Result<NodeEnd, Left> {
        let deadline = self.deadline(graph, &claimed.node, &place.run);
        let (events, mut pieces) = NodeEvents::channel();
        let ctx = context(lease, claimed, place, deadline, events.clone());
        let book = Book {
            store: Arc::clone(&self.store),
            runtime: tokio::runtime::Handle::current(),
            step: claimed.step,
            lease: claimed.token,
            thread: claimed.thread_key,
        };
        let work = execute(Arc::clone(graph), place, ctx, book, self.output_bytes_max);
        let started = Instant::now();
        let mut running = self.threads.spawn(work.in_current_span());

        let (over, spoken) = (sleep(deadline), sleep_until(started + QUICK));
        tokio::pin!(over, spoken);
        let end = loop {
            tokio::select! {
                ended = &mut running.task => break match ended {
                    Ok(end) => end,
                    Err(_) => return Err(Left::Evicted), // Only the end of its threads cancels a node's task.
                },
                () = self.leases.lost(lease) => {
                    running.task.abort();
                    self.threads.leave(running, claimed.node.clone());
                    return Err(Left::Lost);
                }
                () = self.evict.cancelled() => {
                    lease.node.cancel();
                    running.task.abort();
                    return Err(Left::Evicted);
                }
                () = &mut over => {
                    lease.node.cancel();
                    self.threads.leave(running, claimed.node.clone());
                    break NodeEnd::Failed(timed_out(deadline));
                }
                Some((number, piece)) = pieces.recv() => attempt.piece(&self.announcer, number, told(&claimed.node, piece)),
                () = &mut spoken, if attempt.is_holding() => attempt.speak(&self.announcer),
            }
        };
        while let Ok((number, piece)) = pieces.try_recv() {
            attempt.piece(&self.announcer, number, told(&claimed.node, piece));
        }
        attempt.heard(events.sent());
        measure(graph, &claimed.node, started, &end);
        Ok(end)
    }

    /// The node's own deadline, else the run's, else the server's; never above the server's.
    fn deadline(&self, graph: &Graph, node: &str, run: &RunRecord) -> Duration {
        let own = graph.manifest.policy(node).timeout_ms.map(Duration::from_millis);
        own.or(run.node_timeout).unwrap_or(self.timeout_max).min(self.timeout_max)
    }
}

fn context(lease: &Lease, claimed: &Claimed, place: &Place, deadline: Duration, events: NodeEvents) -> NodeContext {
    let run = &place.run;
    let anonymous = Caller::anonymous();
    NodeContext {
        state: Arc::clone(&place.state),
        config: Arc::clone(&place.config),
        thread_id: run.thread_id.clone(),
        step: claimed.step,
        node: claimed.node.clone(),
        attempt: u16::try_from(claimed.attempt).unwrap_or(1),
        caller: Caller { tenant: run.tenant.clone(), verified: run.user != anonymous.user, user: run.user.clone() },
        trace: run.trace.clone(),
        deadline: Some(deadline),
        cancelled: lease.node.clone(),
        events,
        answers: Arc::new(answers_of(&place.state.execution_meta, &claimed.node)),
        asked: Arc::default(),
    }
}

/// The node's code and what follows it: both are the graph author's, so both may block or panic.
fn execute(
    graph: Arc<Graph>,
    place: &Place,
    ctx: NodeContext,
    book: Book,
    output_bytes_max: usize,
) -> impl Future<Output = NodeEnd> + Send + use<> {
    let state = Arc::clone(&place.state);
    let (seq, step_limit, node) = (ctx.step.seq, place.run.step_limit, ctx.node.clone());
    async move {
        let work = async {
            let result = match (graph.nodes.get(&node), graph.tools.get(&node)) {
                (Some(code), _) => code.run(ctx).await,
                (None, Some(set)) => tools::run(ctx, Arc::clone(set), book).await,
                (None, None) if node == START => Ok(Outcome::default()),
                (None, None) => Err(NodeError::permanent("this program has no code for it; deploy a worker that has")),
            };
            finish(&graph, engine::Place { node: &node, seq, step_limit }, &state, result, output_bytes_max)
        };
        match AssertUnwindSafe(work).catch_unwind().await {
            Ok(end) => end,
            Err(panic) => NodeEnd::Failed(panicked(&*panic)),
        }
    }
}

fn finish(
    graph: &Graph,
    place: engine::Place<'_>,
    state: &ThreadState,
    mut result: Result<Outcome, NodeError>,
    output_bytes_max: usize,
) -> NodeEnd {
    if let Ok(outcome) = &mut result {
        outcome.command.update.messages.iter_mut().for_each(|message| graph.manifest.ids.complete(message));
    }
    let bytes = match &result {
        Ok(Outcome { command, questions }) => {
            json_bytes(&command.update.messages) + json_bytes(&command.update.fields) + json_bytes(questions)
        }
        Err(NodeError::Interrupt { question, .. }) => json_bytes(question),
        Err(NodeError::Failed { .. }) => 0,
    };
    if bytes > output_bytes_max {
        return NodeEnd::Failed(too_large(bytes, output_bytes_max));
    }
    match result {
        Err(NodeError::Failed { code, message, .. }) if code == OUTPUT_TOO_LARGE => NodeEnd::Failed(refused(message)),
        Err(NodeError::Failed { code, message, retryable }) => {
            NodeEnd::Failed(Failure { end: "error", code, message: shortened(message), retryable })
        }
        result => NodeEnd::Advanced(Box::new(engine::advance(graph, place, state, result))),
    }
}

fn told(node: &str, piece: NodeEvent) -> EventBody {
    let node = node.to_owned();
    match piece {
        NodeEvent::Delta(message) => EventBody::Delta { node, message: Box::new(message) },
        NodeEvent::Custom(value) => EventBody::Custom { node, value },
    }
}

fn timed_out(deadline: Duration) -> Failure {
    Failure {
        end: "timeout",
        code: "NODE_TIMEOUT_001".to_owned(),
        message: format!("it ran past its deadline of {} s", deadline.as_secs_f64()),
        retryable: true,
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned());
    Failure {
        end: "panic",
        code: "NODE_001".to_owned(),
        message: shortened(format!("it panicked: {text}")),
        retryable: false,
    }
}

fn too_large(bytes: usize, bytes_max: usize) -> Failure {
    refused(format!(
        "it returned {bytes} bytes, more than the {bytes_max} that output_bytes_max allows; return less, or store it elsewhere and return where"
    ))
}

fn refused(message: String) -> Failure {
    Failure { end: OUTPUT_TOO_LARGE, code: "NODE_001".to_owned(), message, retryable: false }
}

/// The end of an attempt whose output was too large: it is never repeated. Nodes that stop reading
/// at the limit use it as the code of their error.
pub(crate) const OUTPUT_TOO_LARGE: &str = "output_too_large";

fn shortened(mut text: String) -> String {
    if text.len() > ERROR_BYTES_MAX {
        text.truncate(text.floor_char_boundary(ERROR_BYTES_MAX));
        text.push_str(" …");
    }
    text
}

fn measure(graph: &Graph, node: &str, started: Instant, end: &NodeEnd) {
    let outcome = match end {
        NodeEnd::Advanced(_) => "ok",
        NodeEnd::Failed(failure) => failure.end,
    };
    metrics::histogram!(
        telemetry::STEP_SECONDS,
        "graph" => graph.manifest.name.clone(),
        "node" => node.to_owned(),
        "outcome" => outcome,
    )
    .record(started.elapsed().as_secs_f64());
}
