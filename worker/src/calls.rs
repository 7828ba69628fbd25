//! The worker's calls to the store, folded into shared statements. What the store answers becomes
//! one of three things: an answer, "ask again", or "never".

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use threadgate_shared::domain::{GraphVersion, LeaseToken, RunId, StepId, WorkerId};
use threadgate_shared::store::{
    AttemptEnd, Claimed, CommitOutcome, LoadRequest, Loaded, StepCommit, Store, StoreError,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::warn;

use crate::batch::{Batcher, Folding};
use crate::config::WorkerConfig;
use crate::health::WorkerHealth;
use crate::telemetry;

/// How long a statement may take: longer than any of ours does. A connection that gives no sign of
/// life by then is given up, and the same is asked again.
const PATIENCE: Duration = Duration::from_secs(10);

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
    store: Arc<dyn Store>,
}

/// A commit and its thread, of which a statement may hold one step only.
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
            store: Arc::clone(store),
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

    /// Ends an attempt that is to be repeated after `delay`; whether the lease was held. Rare, so it
    /// has a statement of its own.
    pub(crate) async fn end_attempt(
        &self,
        step: StepId,
        token: LeaseToken,
        end: &AttemptEnd,
        delay: Duration,
    ) -> Asked<bool> {
        asked(self.store.retry_step(step, token, end, delay)).await
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
        ttl: Duration,
    ) -> Vec<Asked<Taken>> {
        let sent = Instant::now();
        match asked(self.store.claim(claims, worker, versions, ttl)).await {
            Asked::Answer(taken) => {
                self.health.store_answered();
                let mut taken: HashMap<_, _> = taken.into_iter().map(|claimed| (claimed.token, claimed)).collect();
                let mut taken = |token| taken.remove(token).map(|claimed| (claimed, sent));
                claims.iter().map(|(_, token)| Asked::Answer(taken(token))).collect()
            }
            Asked::Again => vec![Asked::Again; claims.len()],
            Asked::Never(reason) => vec![Asked::Never(reason); claims.len()],
        }
    }

    /// A load that is refused is repeated one by one, so that one bad row takes no neighbour along.
    async fn load(&self, wanted: &[LoadRequest]) -> Vec<Asked<Option<Loaded>>> {
        match asked(self.store.load(wanted)).await {
            Asked::Answer(loaded) => {
                let mut loaded: HashMap<_, _> = loaded.into_iter().map(|loaded| (loaded.run.id, loaded)).collect();
                wanted.iter().map(|wanted| Asked::Answer(loaded.remove(&wanted.run_id))).collect()
            }
            Asked::Again => vec![Asked::Again; wanted.len()],
            Asked::Never(reason) if wanted.len() == 1 => vec![Asked::Never(reason)],
            Asked::Never(_) => {
                let mut answers = Vec::with_capacity(wanted.len());
                for one in wanted {
                    answers.push(match asked(self.store.load(std::slice::from_ref(one))).await {
                        Asked::Answer(mut loaded) => Asked::Answer(loaded.pop()),
                        Asked::Again => Asked::Again,
                        Asked::Never(reason) => Asked::Never(reason),
                    });
                }
                answers
            }
        }
    }

    async fn commit(&self, keyed: Vec<KeyedCommit>) -> Vec<Asked<CommitOutcome>> {
        let commits: Vec<StepCommit> = keyed.into_iter().map(|keyed| keyed.commit).collect();
        let Ok(outcomes) = timeout(PATIENCE, self.store.commit(&commits)).await else {
            return vec![no_sign_of_life(); commits.len()];
        };
        if outcomes.iter().any(Result::is_ok) {
            self.health.store_answered();
        }
        outcomes.into_iter().map(|outcome| outcome.map_or_else(|failure| judge(&failure), Asked::Answer)).collect()
    }

    async fn mark_running(&self, runs: &[RunId]) -> Vec<()> {
        // Where it fails, the runs show as queued until they end; the store has said why.
        asked(self.store.mark_running(runs)).await;
        vec![(); runs.len()]
    }

    async fn give_back(&self, leases: &[(StepId, LeaseToken)]) -> Vec<Asked<()>> {
        let answer = match asked(self.store.give_back(leases)).await {
            Asked::Answer(_) => Asked::Answer(()),
            Asked::Again => Asked::Again,
            Asked::Never(reason) => Asked::Never(reason),
        };
        vec![answer; leases.len()]
    }
}

async fn asked<T>(question: impl Future<Output = Result<T, StoreError>>) -> Asked<T> {
    match timeout(PATIENCE, question).await {
        Ok(Ok(answer)) => Asked::Answer(answer),
        Ok(Err(failure)) => judge(&failure),
        Err(_) => no_sign_of_life(),
    }
}

fn no_sign_of_life<T>() -> Asked<T> {
    warn!("The store gave no sign of life for {} s; asking again", PATIENCE.as_secs());
    Asked::Again
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
