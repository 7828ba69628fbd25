//! Tools: what a model may call, written in Rust, and the node that calls them. How the calls of a
//! message are carried out is the worker's; what becomes of each is decided here.

pub mod guard;
pub mod plan;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use super::Interrupt;
use crate::domain::{CallRef, Caller, Guard, Json, JsonMap, ThreadId, ThreadState, ToolSpec, ToolsSpec};

/// One tool's code.
#[async_trait]
pub trait Tool: Send + Sync {
    /// Runs one call; under a deadline. What [`crate::domain::Effect`] its spec names says whether it may be
    /// called again with the same arguments after a crash.
    ///
    /// # Errors
    /// [`ToolError::Failed`] becomes a failed result, which the model reads; it is not retried.
    async fn call(&self, ctx: ToolContext, arguments: Json) -> Result<Json, ToolError>;
}

/// What a tool sees.
#[derive(Debug, Clone)]
pub struct ToolContext {
    /// The call, with the arguments it runs with.
    pub call: CallRef,
    /// The thread.
    pub thread_id: ThreadId,
    /// The thread's state as it was committed before this step.
    pub state: Arc<ThreadState>,
    /// The run's configuration.
    pub config: Arc<JsonMap>,
    /// Who started the run; verified, never from text.
    pub caller: Caller,
    /// The same for every attempt at this call, so that a receiver can refuse a repetition.
    pub idempotency_key: String,
    /// From 1; more where the tool was started before.
    pub attempt: i16,
    /// How long the call may take.
    pub timeout: std::time::Duration,
    /// Cancelled on a stop, a lost lease, a passed deadline or the end of the worker's grace.
    pub cancelled: CancellationToken,
    /// Answers given so far to this call's questions, in order.
    pub answers: Arc<Vec<Json>>,
    /// How many times `interrupt` was called.
    pub asked: Arc<AtomicUsize>,
}

impl ToolContext {
    /// Asks a question: returns the answer, or pauses the run until there is one; then the tool is called
    /// again from its beginning. Only for tools that may be called twice: one whose effect is `once` gets
    /// a failed result instead.
    ///
    /// # Errors
    /// [`ToolError::Interrupt`], which the tool passes on with `?`.
    pub fn interrupt(&self, question: Interrupt) -> Result<Json, ToolError> {
        let position = self.asked.fetch_add(1, Ordering::Relaxed);
        match self.answers.get(position) {
            Some(answer) => Ok(answer.clone()),
            None => Err(ToolError::Interrupt { position, question: Box::new(question) }),
        }
    }
}

/// Why a tool did not return.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ToolError {
    /// It failed; the model reads why.
    #[error("{0}")]
    Failed(String),
    /// It asks somebody; not a failure.
    #[error("the tool waits for an answer")]
    Interrupt {
        /// Which call of `interrupt` in this execution, from 0.
        position: usize,
        /// What it asks.
        question: Box<Interrupt>,
    },
}

/// The tools of a `tools` node: what they are, and their code.
#[derive(Clone, Default)]
pub struct ToolSet {
    spec: ToolsSpec,
    code: HashMap<String, Arc<dyn Tool>>,
}

impl std::fmt::Debug for ToolSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ToolSet").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl ToolSet {
    /// No tools yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tool that takes any JSON that satisfies its spec's `parameters`.
    #[must_use]
    pub fn tool(self, spec: ToolSpec, tool: impl Tool + 'static) -> Self {
        self.shared(spec, Arc::new(tool))
    }

    /// Adds an async function whose arguments are read from JSON; their schema becomes the spec's.
    #[must_use]
    pub fn function<A, R, F, Fut>(self, mut spec: ToolSpec, function: F) -> Self
    where
        A: DeserializeOwned + JsonSchema + Send + 'static,
        R: Serialize,
        F: Fn(ToolContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, ToolError>> + Send + 'static,
    {
        let own = schemars::schema_for!(A).to_value();
        if let (Json::Object(parameters), Json::Object(own)) = (&mut spec.parameters, own) {
            parameters.extend(own); // What the spec says beside the schema, such as `x-confirm`, stays.
        }
        self.tool(spec, Function { function, arguments: std::marker::PhantomData })
    }

    /// Adds a tool whose code is shared with others.
    #[must_use]
    pub fn shared(mut self, spec: ToolSpec, tool: Arc<dyn Tool>) -> Self {
        self.code.insert(spec.name.clone(), tool);
        self.spec.tools.push(spec);
        self
    }

    /// Adds a tool that has no code here: the client runs it, or it hands over.
    #[must_use]
    pub fn declared(mut self, spec: ToolSpec) -> Self {
        self.spec.tools.push(spec);
        self
    }

    /// Adds a tool that the client runs.
    #[must_use]
    pub fn remote(self, spec: ToolSpec) -> Self {
        self.declared(ToolSpec { remote: true, ..spec })
    }

    /// Adds `transfer_to_<node>`, whose call goes on at that node.
    #[must_use]
    pub fn handoff(self, node: &str) -> Self {
        let name = format!("transfer_to_{node}");
        self.declared(ToolSpec { handoff: Some(node.to_owned()), ..ToolSpec::named(&name) })
    }

    /// Says which tools need an approval.
    #[must_use]
    pub fn guard(mut self, guard: Guard) -> Self {
        self.spec.guard = guard;
        self
    }

    /// How many calls of one message run at once; default 8.
    #[must_use]
    pub fn concurrency(mut self, calls: u16) -> Self {
        self.spec.concurrency = calls;
        self
    }

    /// What the tools are.
    #[must_use]
    pub fn spec(&self) -> &ToolsSpec {
        &self.spec
    }

    /// A tool's code; none for tools that the client runs and for handoffs.
    #[must_use]
    pub fn code(&self, name: &str) -> Option<&Arc<dyn Tool>> {
        self.code.get(name)
    }
}

struct Function<A, F> {
    function: F,
    arguments: std::marker::PhantomData<fn(A)>,
}

#[async_trait]
impl<A, R, F, Fut> Tool for Function<A, F>
where
    A: DeserializeOwned + Send + 'static,
    R: Serialize,
    F: Fn(ToolContext, A) -> Fut + Send + Sync,
    Fut: Future<Output = Result<R, ToolError>> + Send,
{
    async fn call(&self, ctx: ToolContext, arguments: Json) -> Result<Json, ToolError> {
        let arguments = serde_json::from_value(arguments)
            .map_err(|error| ToolError::Failed(format!("The arguments do not fit the tool: {error}")))?;
        let result = (self.function)(ctx, arguments).await?;
        serde_json::to_value(result)
            .map_err(|error| ToolError::Failed(format!("The tool's result is no JSON: {error}")))
    }
}

/// What is wrong with the tools of a node: codes and sentences for the graph's author.
#[must_use]
pub fn problems(spec: &ToolsSpec, is_node: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let mut wrong = |message: String| found.push(("GRAPH_000", message));
    let mut handoffs = Vec::new();
    let mut seen = HashSet::new();
    for tool in &spec.tools {
        let name = tool.name.as_str();
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_name) {
            wrong(format!("'{name}' cannot name a tool; use 1 to 64 letters, digits, '-' or '_'"));
        }
        if !seen.insert(name) {
            wrong(format!("two tools have the name '{name}'; rename one of them"));
        }
        if let Err(error) = jsonschema::validator_for(&tool.parameters) {
            wrong(format!("the parameters of tool '{name}' are no JSON Schema: {error}; correct them"));
        }
        if let Some(Err(error)) = tool.on_expiry.as_ref().map(crate::domain::GateAnswer::parse) {
            wrong(format!("on_expiry of tool '{name}' is no decision ({error}); use {{\"outcome\": \"denied\"}}"));
        }
        if let Some(target) = tool.handoff.as_deref().filter(|target| !is_node(target)) {
            handoffs.push((
                "GRAPH_007",
                format!("tool '{name}' hands over to '{target}', which is not a node; add the node or remove the tool"),
            ));
        }
        if tool.timeout.is_some_and(|timeout| timeout.is_zero()) {
            wrong(format!("the timeout of tool '{name}' is 0; leave it out for the default"));
        }
    }
    let known = |name: &String| spec.tools.iter().any(|tool| tool.name == *name);
    let guard = &spec.guard;
    let prompts = guard.approval_prompts.keys();
    for name in guard.require_approval.iter().chain(&guard.exempt).chain(prompts).filter(|name| !known(name)) {
        wrong(format!("the guard names the tool '{name}', which the node does not have; correct the name"));
    }
    if spec.concurrency == 0 {
        wrong("concurrency is 0; let at least 1 call run".to_owned());
    }
    found.extend(handoffs);
    found
}

#[cfg(test)]
mod tests;
