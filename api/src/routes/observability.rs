//! What happened in a thread's runs, from what was stored: every replica tells the same, also long
//! afterwards.

use axum::extract::State;
use serde::Serialize;
use threadgate_shared::domain::observe::{Record, Trace, TracedRun, Visit, trace};
use threadgate_shared::domain::{ExecutionStatus, RunStatus};
use threadgate_shared::store::{Change, RunFilter, RunRecord, StepRecord};
use utoipa::ToSchema;
use utoipa_axum::routes;

use crate::app::App;
use crate::auth::{Access, Authenticated};
use crate::error::ApiError;
use crate::extract::{ApiQuery, LIST_MAX, ThreadPath};
use crate::follow::seconds;
use crate::middleware::Enveloped;
use crate::routing::Routes;
use crate::wire::envelope::{Envelope, StoreErrors};

/// `/v1/observability/{thread_id}`.
pub fn routes(routes: Routes) -> Routes {
    routes.at(Access::Scope("graph:read"), routes!(observe))
}

/// The runs of a thread, one of them in detail.
#[derive(Debug, Serialize, ToSchema)]
struct Observed {
    /// The thread.
    thread_id: String,
    /// How many runs there are, at most the newest 1000.
    run_count: usize,
    /// The clients' ids of them, or ours; oldest first.
    run_ids: Vec<String>,
    /// The named run, or the newest; null where there is none.
    #[schema(value_type = Option<Object>)]
    run: Option<Trace>,
}

/// Shows what happened in a thread's newest run, or in the named one.
#[utoipa::path(get, path = "/v1/observability/{thread_id}", tag = "observability",
    params(("thread_id" = String, Path), ("run_id" = Option<String>, Query, description = "The client's id or ours")),
    responses((status = 200, body = Envelope<Observed>), StoreErrors))]
async fn observe(
    State(app): State<App>,
    caller: Authenticated,
    ThreadPath(thread): ThreadPath,
    query: ApiQuery,
) -> Result<Enveloped<Observed>, ApiError> {
    let limit = u32::try_from(LIST_MAX).unwrap_or(u32::MAX);
    let filter = RunFilter { thread: Some(thread.clone()), limit, ..RunFilter::default() };
    let mut runs = app.parts.store.runs(&caller.scope(), &filter).await?;
    runs.retain(|run| run.observability);
    let chosen = match query.text("run_id").filter(|id| !id.is_empty()) {
        Some(id) => runs.iter().find(|run| shown_id(run) == id || run.id.to_string() == id),
        None => runs.first(),
    };
    let run = match chosen {
        Some(run) => Some(traced(&app, run).await?),
        None => None,
    };
    let run_ids: Vec<String> = runs.iter().rev().map(shown_id).collect();
    Ok(Enveloped(Observed { thread_id: thread.0, run_count: run_ids.len(), run_ids, run }))
}

fn shown_id(run: &RunRecord) -> String {
    run.client_run_id.clone().unwrap_or_else(|| run.id.to_string())
}

async fn traced(app: &App, run: &RunRecord) -> Result<Trace, ApiError> {
    let steps = app.parts.store.steps(run.id).await?;
    // The input's checkpoint is the one before the first step's.
    let first = steps.iter().filter_map(|step| step.version).min().map_or(run.version, |version| version - 1);
    let changes = app.parts.store.changes(run.id, first - 1).await?;
    let mut records = Vec::new();
    for change in changes.iter().filter(|change| is_input(change, &steps)) {
        records.extend(change.messages.iter().map(|message| Record::message("", 0, seconds(change.at), message)));
    }
    for step in &steps {
        let change = changes.iter().find(|change| step.version == Some(change.version));
        records.extend(visit(run, step, change).into_iter().flat_map(|visit| visit.records()));
    }
    let about = TracedRun {
        run_id: shown_id(run),
        thread_id: run.thread_id.0.clone(),
        status: status(run.status).to_owned(),
        started_at: seconds(run.created_at),
        finished_at: run.finished_at.map(seconds),
    };
    Ok(trace(about, &records))
}

fn is_input(change: &Change, steps: &[StepRecord]) -> bool {
    change.seq == 0 && !steps.iter().any(|step| step.version == Some(change.version))
}

/// The step as a visit of its node; `None` if it never started.
fn visit<'a>(run: &RunRecord, step: &'a StepRecord, change: Option<&'a Change>) -> Option<Visit<'a>> {
    let failed_for_good = run.status == RunStatus::Failed
        && run.error.as_ref().is_some_and(|error| error.node.as_deref() == Some(&step.node));
    let failed = match change {
        Some(change) => change.meta.status == ExecutionStatus::Error,
        None => failed_for_good && run.finished_at.is_some() && step.finished_at.is_none(),
    };
    let finished = change.map(|change| change.at).or(step.finished_at).or(run.finished_at.filter(|_| failed));
    Some(Visit {
        node: &step.node,
        seq: step.id.seq,
        started_at: seconds(step.started_at?),
        finished_at: finished.map(seconds),
        retries: step.attempts.iter().map(|attempt| seconds(attempt.ended_at)).collect(),
        messages: change.into_iter().flat_map(|change| &change.messages).collect(),
        failed,
    })
}

fn status(status: RunStatus) -> &'static str {
    match status {
        RunStatus::Waiting | RunStatus::Queued | RunStatus::Running => "running",
        RunStatus::Completed => "done",
        RunStatus::Failed => "error",
        RunStatus::Stopped => "stopped",
        RunStatus::Interrupted => "interrupted",
    }
}
