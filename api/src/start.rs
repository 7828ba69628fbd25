//! How a run begins, whichever face asked for it.

use std::sync::{Arc, Mutex, PoisonError};

use threadgate_shared::domain::{Caller, GraphVersion, Json, RunId, ThreadId};
use threadgate_shared::graph::Manifest;
use threadgate_shared::graph::admission::{self, Admission, Refusal, RunInput};
use threadgate_shared::store::{Created, Idempotency, NewRun, NewlyCreated, RunRecord, StillPaused, StoreError};

use crate::app::App;
use crate::error::ApiError;
use crate::graphs::KnownGraph;
use crate::wire::run_request::RunRequest;

/// Graph versions one admission may turn out to need: the newest, and the thread's own.
const VERSIONS_TRIED: usize = 3;

/// A run to start.
pub struct Start<'a> {
    /// Who asks.
    pub caller: &'a Caller,
    /// Which graph, in its newest version.
    pub graph: KnownGraph,
    /// What to run.
    pub request: RunRequest,
    /// 0 = interactive, 1 = batch.
    pub class: i16,
    /// The input as the Runs API shows it.
    pub shown_input: Json,
    /// A client's key.
    pub idempotency: Option<Idempotency>,
    /// W3C `traceparent`.
    pub trace: Option<String>,
}

/// What became of it.
pub enum Begun {
    /// A new run.
    New(Box<Started>),
    /// The key was used before: its run.
    Replayed(Box<RunRecord>),
    /// No run: answers were recorded, and other questions of the pause are open still.
    StillPaused(Box<StillPaused>),
}

/// A run that was accepted just now.
#[derive(Debug)]
pub struct Started {
    /// What the store made.
    pub created: NewlyCreated,
    /// How it begins.
    pub admission: Admission,
    /// The graph version it is pinned to.
    pub manifest: Arc<Manifest>,
}

/// Why a run did not begin.
#[derive(Debug)]
pub struct NotBegun {
    /// The thread, also where the server chose its id.
    pub thread_id: ThreadId,
    /// The thread did not take it.
    pub refusal: Option<Refusal>,
    /// What the client is told.
    pub error: ApiError,
}

/// Creates the run and says that there is work.
///
/// # Errors
/// [`NotBegun`], for the face to tell in its own way.
pub async fn start(app: &App, start: Start<'_>) -> Result<Begun, NotBegun> {
    let config = start.request.config;
    let thread_id = config.thread_id.unwrap_or_else(|| start.graph.manifest.ids.thread_id());
    let input = start.request.input;
    let new = NewRun {
        id: RunId::new(),
        client_run_id: config.client_run_id,
        caller: start.caller.clone(),
        thread_id: thread_id.clone(),
        thread_name: config.thread_name.or_else(|| start.graph.manifest.thread_name.clone()),
        thread_meta: config.thread_meta,
        graph: start.graph.manifest.name.clone(),
        class: start.class,
        message_ids: input.messages.iter().map(|message| message.message_id.clone()).collect(),
        input: start.shown_input,
        config: config.for_nodes,
        step_limit: start.request.step_limit,
        node_timeout: config.node_timeout,
        versions: Vec::new(),
        idempotency: start.idempotency,
        trace: start.trace,
        observability: app.config.observability,
    };
    submit(app, new, start.graph, &input).await
}

/// Creates `new` on a thread that takes `input`, and says that there is work. `graph` is the newest
/// version.
///
/// # Errors
/// [`NotBegun`], for the face to tell in its own way.
pub async fn submit(app: &App, new: NewRun, graph: KnownGraph, input: &RunInput) -> Result<Begun, NotBegun> {
    let thread_id = new.thread_id.clone();
    let mut versions = vec![(graph.version.clone(), Arc::clone(&graph.manifest))];
    for _ in 0..VERSIONS_TRIED {
        let admitted: Mutex<Option<Admission>> = Mutex::new(None);
        let new = NewRun { versions: versions.clone(), ..new.clone() };
        let created = app
            .parts
            .store
            .create_run(new, &|view| {
                let admission = admission::admit(&versions, &thread_id, view, input)?;
                *admitted.lock().unwrap_or_else(PoisonError::into_inner) = Some(admission.clone());
                Ok(admission)
            })
            .await;
        let admission = admitted.into_inner().unwrap_or_else(PoisonError::into_inner);
        match created {
            Ok(Created::Replayed(run)) => return Ok(Begun::Replayed(run)),
            Ok(Created::StillPaused(paused)) => return Ok(Begun::StillPaused(paused)),
            Ok(Created::New(created)) => {
                return begun(app, *created, admission, &versions).map_err(|error| NotBegun::failed(thread_id, error));
            }
            Err(StoreError::Refused(Refusal::VersionNeeded(version))) => match app.graphs.version(&version).await {
                Ok(manifest) => versions.push((version, manifest)),
                Err(error) => return Err(NotBegun::failed(thread_id, error)),
            },
            Err(error) => return Err(NotBegun::new(thread_id, error)),
        }
    }
    let needed = versions.pop().map_or(graph.version, |(version, _)| version);
    Err(NotBegun::new(thread_id, Refusal::VersionNeeded(needed).into()))
}

fn begun(
    app: &App,
    created: NewlyCreated,
    admission: Option<Admission>,
    versions: &[(GraphVersion, Arc<Manifest>)],
) -> Result<Begun, ApiError> {
    let run = &created.run;
    tracing::info!(run.id = %run.id, thread.id = %run.thread_id, "Accepted run {} of graph {}", run.id, run.graph);
    if let Some((pool, class)) = &created.lane {
        app.parts.dispatcher.nudge(pool, *class);
    }
    let manifest = versions.iter().find(|(version, _)| *version == run.graph_version);
    let (Some(admission), Some((_, manifest))) = (admission, manifest) else {
        tracing::error!(run.id = %run.id, "The store created run {} without asking for its admission", run.id);
        return Err(ApiError::internal());
    };
    Ok(Begun::New(Box::new(Started { created, admission, manifest: Arc::clone(manifest) })))
}

impl NotBegun {
    fn new(thread_id: ThreadId, error: StoreError) -> Self {
        let refusal = match &error {
            StoreError::Refused(refusal) => Some(refusal.clone()),
            _ => None,
        };
        Self { thread_id, refusal, error: error.into() }
    }

    fn failed(thread_id: ThreadId, error: ApiError) -> Self {
        Self { thread_id, refusal: None, error }
    }
}

impl From<NotBegun> for ApiError {
    fn from(not: NotBegun) -> Self {
        not.error
    }
}
