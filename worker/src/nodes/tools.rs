//! Carries out the calls of one message: what the plan lets start is written into the ledger first, runs
//! in parallel, and its result is a fact that is stored by the intent's own token, also after the lease is
//! lost or the node was ended. What must be asked is asked together, in one pause.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use threadgate_shared::domain::interrupt::OUTCOME_UNKNOWN;
use threadgate_shared::domain::results::result_message;
use threadgate_shared::domain::{
    CallRef, CallResult, CallStatus, Effect, Json, LeaseToken, Message, Question, QuestionKind, StepId, ThreadKey,
    ToolSpec, json_bytes,
};
use threadgate_shared::graph::admission::answer_to;
use threadgate_shared::graph::tools::plan::{Planned, decided_result, plan};
use threadgate_shared::graph::{
    Command, Interrupt, NodeContext, NodeError, Outcome, Patch, ToolContext, ToolError, ToolSet,
};
use threadgate_shared::store::{Begun, CallKey, Finished, Intent, Store, StoreError, Wish};
use tokio::runtime::Handle;
use tracing::{info, warn};

/// Bytes of one result as JSON at most; a tool that returns more has failed, as far as the model reads.
const RESULT_BYTES_MAX: usize = 1 << 20;

/// The ledger, for one step under its lease. The store is asked on the worker's own threads, so that a tool
/// that blocks its thread holds up no result.
#[derive(Clone)]
pub(crate) struct Book {
    pub store: Arc<dyn Store>,
    pub runtime: Handle,
    pub step: StepId,
    pub lease: LeaseToken,
    pub thread: ThreadKey,
}

/// What became of a call.
enum Settled {
    Message(Box<Message>),
    Question(Box<Question>),
}

/// Runs the `tools` node once.
///
/// # Errors
/// Where the ledger could not be asked, the lease is lost, or a stop came while a call was in doubt; results
/// that tools gave are kept.
pub(crate) async fn run(ctx: NodeContext, set: Arc<ToolSet>, book: Book) -> Result<Outcome, NodeError> {
    let plan = plan(set.spec(), &ctx.node, &ctx.state);
    let node = Arc::new(ToolsNode { ctx, set, book });
    let mut settled: Vec<Option<Settled>> = Vec::with_capacity(plan.calls.len());
    let mut intents = Vec::new();
    for (index, planned) in plan.calls.into_iter().enumerate() {
        settled.push(match planned {
            Planned::Answer(message) => Some(Settled::Message(Box::new(message))),
            Planned::Ask(question) => Some(Settled::Question(question)),
            Planned::Start { call, is_gated, decided } => {
                let wish = decided.map_or(Wish::Run, |answer| Wish::Decided(decided_result(&answer)));
                intents.push((index, node.intent(call, is_gated, wish)));
                None
            }
            Planned::Deny(call, result) => {
                intents.push((index, node.intent(call, true, Wish::Record(result))));
                None
            }
        });
    }
    // So many at once that a call never waits between its intent and its start.
    let at_once = usize::from(node.set.spec().concurrency.max(1));
    while !intents.is_empty() {
        let together: Vec<(usize, Intent)> = intents.drain(..at_once.min(intents.len())).collect();
        let begun = node.book.begin(together.iter().map(|(_, intent)| intent.clone()).collect()).await?;
        let calls = together.into_iter().zip(begun).map(|((index, intent), begun)| {
            let node = Arc::clone(&node);
            async move { (index, node.settle(intent, begun).await) }
        });
        for (index, outcome) in join_all(calls).await {
            settled[index] = Some(outcome?);
        }
    }
    let mut outcome =
        Outcome { command: Command { update: Patch::default(), goto: plan.handoff }, questions: Vec::new() };
    for settled in settled.into_iter().flatten() {
        match settled {
            Settled::Message(message) => outcome.command.update.messages.push(*message),
            Settled::Question(question) => outcome.questions.push(*question),
        }
    }
    Ok(outcome)
}

struct ToolsNode {
    ctx: NodeContext,
    set: Arc<ToolSet>,
    book: Book,
}

impl ToolsNode {
    fn tool(&self, name: &str) -> Option<&ToolSpec> {
        self.set.spec().tool(name)
    }

    fn intent(&self, call: CallRef, is_gated: bool, wish: Wish) -> Intent {
        let tool = self.tool(&call.tool);
        Intent {
            effect: tool.map(|tool| tool.effect).unwrap_or_default(),
            timeout: tool.map_or(threadgate_shared::domain::tool::CALL_TIMEOUT, ToolSpec::call_timeout),
            call,
            is_gated,
            wish,
        }
    }

    /// Does what the ledger says to an intent, until there is a result or a question.
    async fn settle(self: Arc<Self>, intent: Intent, mut begun: Begun) -> Result<Settled, NodeError> {
        loop {
            match begun {
                Begun::Started { token, attempt, .. } => return self.start(&intent, token, attempt).await,
                Begun::Done(result) => return Ok(Settled::Message(Box::new(result_message(&intent.call, &result)))),
                Begun::InDoubt { wait, .. } if wait.is_zero() => {
                    return Ok(Settled::Question(Box::new(self.outcome_question(intent.call))));
                }
                Begun::InDoubt { wait, .. } => self.wait(&intent.call, wait).await?,
                Begun::NotApproved => {
                    warn!(
                        call = intent.call.call_id,
                        "A gated call of tool '{}' was not approved and did not run", intent.call.tool
                    );
                    let output = "Nobody approved this call with these arguments; it did not run.".into();
                    let denied = CallResult { status: CallStatus::Denied, output };
                    return Ok(Settled::Message(Box::new(result_message(&intent.call, &denied))));
                }
                Begun::LeaseLost => return Err(lost()),
            }
            begun = self.book.begin(vec![intent.clone()]).await?.pop().ok_or_else(lost)?;
        }
    }

    /// Waits for a call that may still end elsewhere; its result is looked for afterwards.
    async fn wait(&self, call: &CallRef, wait: Duration) -> Result<(), NodeError> {
        info!(
            call = call.call_id,
            wait_ms = wait.as_millis(),
            "A call of tool '{}' may still run elsewhere; waiting for its end",
            call.tool
        );
        tokio::select! {
            () = tokio::time::sleep(wait) => Ok(()),
            () = self.ctx.cancelled.cancelled() => {
                Err(NodeError::transient("it was ended while the outcome of a call was unknown"))
            }
        }
    }

    /// Calls the tool in a task of its own: what ends this node does not keep the result from the ledger.
    async fn start(self: Arc<Self>, intent: &Intent, token: LeaseToken, attempt: i16) -> Result<Settled, NodeError> {
        let (node, intent) = (Arc::clone(&self), intent.clone());
        let carried = tokio::spawn(async move {
            let result = match node.call(&intent, attempt).await {
                Ended::Result(result) => result,
                Ended::Asks(question) => return Ok(Settled::Question(question)),
            };
            let key = CallKey {
                thread: node.book.thread,
                message_id: intent.call.message_id.clone(),
                call_id: intent.call.call_id.clone(),
            };
            match node.book.finish(key, token, result.clone()).await? {
                Finished::Stored => Ok(Settled::Message(Box::new(result_message(&intent.call, &result)))),
                Finished::Kept(kept) => Ok(Settled::Message(Box::new(result_message(&intent.call, &kept)))),
                Finished::Unknown => Err(lost()),
            }
        });
        carried.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Runs the tool under its deadline, its panic caught.
    async fn call(&self, intent: &Intent, attempt: i16) -> Ended {
        let call = &intent.call;
        let Some(code) = self.set.code(&call.tool) else {
            return Ended::failed("This program has no code for the tool; deploy a worker that has.");
        };
        let ctx = self.context(intent, attempt);
        let cancelled = ctx.cancelled.clone();
        let work = AssertUnwindSafe(code.call(ctx, call.arguments.clone())).catch_unwind();
        match tokio::time::timeout(intent.timeout, work).await {
            Err(_) => {
                cancelled.cancel();
                let seconds = intent.timeout.as_secs_f64();
                Ended::failed(format!("NODE_TIMEOUT_002: the tool ran past its deadline of {seconds} s."))
            }
            Ok(Err(_)) => Ended::failed("Internal execution error: the tool panicked."),
            Ok(Ok(Err(ToolError::Failed(why)))) => Ended::failed(why),
            Ok(Ok(Err(ToolError::Interrupt { .. }))) if intent.effect == Effect::Once => Ended::failed(
                "The tool asked a question, which a tool that must not be called twice cannot; gate it instead.",
            ),
            Ok(Ok(Err(ToolError::Interrupt { position, question }))) => {
                Ended::Asks(Box::new(self.tool_question(call, position, *question)))
            }
            Ok(Ok(Ok(output))) => match json_bytes(&output) {
                bytes if bytes > RESULT_BYTES_MAX => {
                    Ended::failed(format!("The tool returned {bytes} bytes; at most {RESULT_BYTES_MAX} are kept."))
                }
                _ => Ended::Result(CallResult { status: CallStatus::Done, output }),
            },
        }
    }

    fn context(&self, intent: &Intent, attempt: i16) -> ToolContext {
        let call = &intent.call;
        let key = |position: usize| format!("tool:{}:{position}", call.call_id);
        let meta = &self.ctx.state.execution_meta;
        let answers = (0..).map_while(|position| answer_to(meta, &key(position)).cloned()).collect();
        ToolContext {
            call: call.clone(),
            thread_id: self.ctx.thread_id.clone(),
            state: Arc::clone(&self.ctx.state),
            config: Arc::clone(&self.ctx.config),
            caller: self.ctx.caller.clone(),
            idempotency_key: CallKey::idempotency_key(self.ctx.thread_id.as_str(), call),
            attempt,
            timeout: intent.timeout,
            cancelled: self.ctx.cancelled.child_token(),
            answers: Arc::new(answers),
            asked: Arc::default(),
        }
    }

    fn tool_question(&self, call: &CallRef, position: usize, question: Interrupt) -> Question {
        let key = format!("tool:{}:{position}", call.call_id);
        Question { call: Some(call.clone()), ..question.asked_at(&self.ctx.node, key) }
    }

    fn outcome_question(&self, call: CallRef) -> Question {
        let meta = &self.ctx.state.execution_meta;
        let key = |number: u32| format!("outcome:{}:{number}", call.call_id);
        let number = (1..).find(|number| answer_to(meta, &key(*number)).is_none()).unwrap_or(1);
        let mut question = Question::new(QuestionKind::Outcome, &self.ctx.node, key(number), OUTCOME_UNKNOWN);
        question.message = Some(format!(
            "Nobody knows whether {}({}) took effect: whoever ran it was lost. Call it again, or say how it ended?",
            call.tool, call.arguments
        ));
        question.response_schema = Some(serde_json::json!({
            "type": "object",
            "required": ["action"],
            "properties": {"action": {"enum": ["retry", "done", "failed"]}, "result": {}},
        }));
        question.call = Some(call);
        question
    }
}

/// How one execution of a tool ended.
enum Ended {
    Result(CallResult),
    Asks(Box<Question>),
}

impl Ended {
    fn failed(why: impl Into<String>) -> Self {
        Self::Result(CallResult { status: CallStatus::Failed, output: Json::String(why.into()) })
    }
}

fn lost() -> NodeError {
    NodeError::transient("another worker carries the step on")
}

impl Book {
    /// Asked again until the store answers: the same question gets the same answer.
    async fn begin(&self, intents: Vec<Intent>) -> Result<Vec<Begun>, NodeError> {
        let (step, lease, intents) = (self.step, self.lease, Arc::new(intents));
        self.ask(move |store| {
            let intents = Arc::clone(&intents);
            async move { store.begin_calls(step, lease, &intents).await }
        })
        .await
    }

    async fn finish(&self, key: CallKey, token: LeaseToken, result: CallResult) -> Result<Finished, NodeError> {
        let fact = Arc::new((key, result));
        self.ask(move |store| {
            let fact = Arc::clone(&fact);
            async move { store.finish_call(&fact.0, token, &fact.1).await }
        })
        .await
    }

    async fn ask<T, F, Fut>(&self, question: F) -> Result<T, NodeError>
    where
        T: Send + 'static,
        F: Fn(Arc<dyn Store>) -> Fut,
        Fut: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let mut pause = Duration::from_millis(50);
        loop {
            match self.runtime.spawn(question(Arc::clone(&self.store))).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(StoreError::Unavailable { .. })) => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(2));
                }
                Ok(Err(error)) => {
                    return Err(NodeError::transient(format!("the ledger of tool calls refused: {error}")));
                }
                Err(_) => return Err(NodeError::transient("the worker ends")),
            }
        }
    }
}
