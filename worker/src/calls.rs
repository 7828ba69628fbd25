//! The worker's calls to the store, folded into shared statements. What the store answers becomes
//! one of three things: an answer, "ask again", or "never".

use std::collections::HashMap;
use std::sync::Arc;

use threadgate_shared::domain::{GraphVersion, LeaseToken, RunId, StepId, WorkerId};
use threadgate_shared::store::{Claimed, CommitOutcome, LoadRequest, Loaded, StepCommit, Store, StoreError};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::warn;

use crate::batch::{Batcher, Folding};
use crate::config::WorkerConfig;
use crate::health::WorkerHealth;
use crate::telemetry;

/// What came of a question.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Asked<T> {
    /// The store's word.
    Answer(T),
    /// The store could not be reached, or its answer is lost: ask the same again.
    Again,
    /// The store refuses this very question; asking again changes nothing.
    Never(String),
}

/// A claimed step, and when the statement that took it was sent.
pub(crate) type Taken = Option<(Claimed, Instant)>;

/// The shared statements.
pub(crate) struct Calls {
    claims: Batcher<(StepId, LeaseToken), Asked<Taken>>,
    loads: Batcher<LoadRequest, Asked<Option<Loaded>>>,
    commits: Batcher<KeyedCommit, Asked<CommitOutcome>>,
    marks: Batcher<RunId, ()>,
    give_backs: Batcher<(StepId, LeaseToken), Asked<()>>,
}

/// A commit and its thread, of which a statement may hold one step only (R4).
#[derive(Debug)]
pub(crate) struct KeyedCommit {
    /// The thread's row.
    pub thread: i64,
    /// What is committed.
    pub commit: StepCommit,
}

impl Calls {
    pub(crate) fn spawn(
        store: &Arc<dyn Store>,
        config: &WorkerConfig,
        worker: WorkerId,
        versions: Vec<GraphVersion>,
        health: &WorkerHealth,
    ) -> Self {
        let folding = |metric| Folding {
            metric,
            batch_max: config.steps_per_statement(),
            lanes: config.statements_at_once(),
            linger: config.commit_linger,
        };
        let aside = |metric| Folding { lanes: 1, batch_max: config.batch_max, ..folding(metric) };
        let asker = Asker { store: Arc::clone(store), health: health.clone() };
        let (claimer, ttl) = (asker.clone(), config.lease_ttl);
        let (loader, committer, marker, giver) = (asker.clone(), asker.clone(), asker.clone(), asker);
        Self {
            claims: Batcher::spawn(
                folding(telemetry::CLAIM_BATCH),
                |claim| claim.0,
                move |claims| {
                    let (asker, versions) = (claimer.clone(), versions.clone());
                    async move { asker.claim(&claims, worker, &versions, ttl).await }
                },
            ),
            loads: Batcher::spawn(
                folding(telemetry::LOAD_BATCH),
                |wanted| wanted.run_id,
                move |wanted| {
                    let asker = loader.clone();
                    async move { asker.load(&wanted).await }
                },
            ),
            commits: Batcher::spawn(
                folding(telemetry::COMMIT_BATCH),
                |keyed| keyed.thread,
                move |commits| {
                    let asker = committer.clone();
                    async move { asker.commit(commits).await }
                },
            ),
            marks: Batcher::spawn(
                aside(telemetry::MARK_BATCH),
                |run| *run,
                move |runs| {
                    let asker = marker.clone();
                    async move { asker.mark_running(&runs).await }
                },
            ),
            give_backs: Batcher::spawn(
                aside(telemetry::GIVE_BACK_BATCH),
                |lease| lease.0,
                move |leases| {
                    let asker = giver.clone();
                    async move { asker.give_back(&leases).await }
                },
            ),
        }
    }

    /// Takes the lease of a step, if it is there to take.
    pub(crate) async fn claim(&self, step: StepId, token: LeaseToken) -> Asked<Taken> {
        self.claims.call((step, token)).await.unwrap_or(Asked::Again)
    }

    /// The run and the thread's state.
    pub(crate) async fn load(&self, wanted: LoadRequest) -> Asked<Option<Loaded>> {
        self.loads.call(wanted).await.unwrap_or(Asked::Again)
    }

    /// Commits a step.
    pub(crate) async fn commit(&self, commit: KeyedCommit) -> Asked<CommitOutcome> {
        self.commits.call(commit).await.unwrap_or(Asked::Again)
    }

    /// Gives a lease back uncharged, if it is still ours.
    pub(crate) async fn give_back(&self, step: StepId, token: LeaseToken) -> Asked<()> {
        self.give_backs.call((step, token)).await.unwrap_or(Asked::Again)
    }

    /// Says that a run has started, off the critical path; the task ends when that is stored.
    pub(crate) fn mark_running(&self, run: RunId) -> JoinHandle<()> {
        let marks = self.marks.clone();
        tokio::spawn(async move {
            marks.call(run).await;
        })
    }
}

#[derive(Clone)]
struct Asker {
    store: Arc<dyn Store>,
    health: WorkerHealth,
}

impl Asker {
    async fn claim(
        &self,
        claims: &[(StepId, LeaseToken)],
        worker: WorkerId,
        versions: &[GraphVersion],
        ttl: std::time::Duration,
    ) -> Vec<Asked<Taken>> {
        let sent = Instant::now();
        match self.store.claim(claims, worker, versions, ttl).await {
            Ok(taken) => {
                self.health.store_answered();
                let mut taken: HashMap<_, _> = taken.into_iter().map(|claimed| (claimed.token, claimed)).collect();
                claims
                    .iter()
                    .map(|(_, token)| Asked::Answer(taken.remove(token).map(|claimed| (claimed, sent))))
                    .collect()
            }
            Err(failure) => repeated(judge(&failure), claims.len()),
        }
    }

    /// A load that is refused is repeated one by one, so that one bad row takes no neighbour along.
    async fn load(&self, wanted: &[LoadRequest]) -> Vec<Asked<Option<Loaded>>> {
        match (self.store.load(wanted).await, wanted) {
            (Ok(loaded), _) => {
                let mut loaded: HashMap<_, _> = loaded.into_iter().map(|loaded| (loaded.run.id, loaded)).collect();
                wanted.iter().map(|wanted| Asked::Answer(loaded.remove(&wanted.run_id))).collect()
            }
            (Err(failure), wanted) => match judge::<Option<Loaded>>(&failure) {
                Asked::Never(_) if wanted.len() > 1 => {
                    let mut answers = Vec::with_capacity(wanted.len());
                    for one in wanted {
                        let one = std::slice::from_ref(one);
                        answers.push(match self.store.load(one).await {
                            Ok(mut loaded) => Asked::Answer(loaded.pop()),
                            Err(failure) => judge(&failure),
                        });
                    }
                    answers
                }
                judged => repeated(judged, wanted.len()),
            },
        }
    }

    async fn commit(&self, keyed: Vec<KeyedCommit>) -> Vec<Asked<CommitOutcome>> {
        let commits: Vec<StepCommit> = keyed.into_iter().map(|keyed| keyed.commit).collect();
        let outcomes = self.store.commit(&commits).await;
        if outcomes.iter().any(Result::is_ok) {
            self.health.store_answered();
        }
        outcomes.into_iter().map(|outcome| outcome.map_or_else(|failure| judge(&failure), Asked::Answer)).collect()
    }

    async fn mark_running(&self, runs: &[RunId]) -> Vec<()> {
        if let Err(failure) = self.store.mark_running(runs).await {
            warn!(error = %failure, "Could not mark {} runs as running; they show as queued", runs.len());
        }
        vec![(); runs.len()]
    }

    async fn give_back(&self, leases: &[(StepId, LeaseToken)]) -> Vec<Asked<()>> {
        match self.store.give_back(leases).await {
            Ok(_) => vec![Asked::Answer(()); leases.len()],
            Err(failure) => repeated(judge(&failure), leases.len()),
        }
    }
}

fn judge<T>(failure: &StoreError) -> Asked<T> {
    let text = chain(failure);
    match failure {
        StoreError::Unavailable { .. } => {
            warn!(error = text, "The store did not answer; asking again");
            Asked::Again
        }
        _ => {
            warn!(error = text, "The store refused a question");
            Asked::Never(text)
        }
    }
}

fn repeated<T: Clone>(answer: Asked<T>, times: usize) -> Vec<Asked<T>> {
    vec![answer; times]
}

/// An error with what caused it, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
