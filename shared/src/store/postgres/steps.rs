//! The steps of workers.

use std::time::Duration;

use async_trait::async_trait;

use super::PgStore;
use super::error::repeated;
use crate::domain::{GraphVersion, LeaseToken, RunId, StepId, WorkerId};
use crate::store::{
    AttemptEnd, Claimed, CommitOutcome, LeaseState, LoadRequest, Loaded, StepCommit, Steps, StoreError,
};

#[async_trait]
impl Steps for PgStore {
    async fn claim(
        &self,
        claims: &[(StepId, LeaseToken)],
        worker: WorkerId,
        versions: &[GraphVersion],
        ttl: Duration,
    ) -> Result<Vec<Claimed>, StoreError> {
        repeated!(self.claim_once(claims, worker, versions, ttl))
    }

    async fn mark_running(&self, runs: &[RunId]) -> Result<(), StoreError> {
        repeated!(self.mark_running_once(runs))
    }

    async fn load(&self, wanted: &[LoadRequest]) -> Result<Vec<Loaded>, StoreError> {
        repeated!(self.load_once(wanted))
    }

    async fn commit(&self, steps: &[StepCommit]) -> Vec<Result<CommitOutcome, StoreError>> {
        self.commit_all(steps).await
    }

    async fn heartbeat(&self, leases: &[(StepId, LeaseToken)], ttl: Duration) -> Result<Vec<LeaseState>, StoreError> {
        repeated!(self.heartbeat_once(leases, ttl))
    }

    async fn give_back(&self, leases: &[(StepId, LeaseToken)]) -> Result<u64, StoreError> {
        repeated!(self.give_back_once(leases))
    }

    async fn retry_step(
        &self,
        step: StepId,
        token: LeaseToken,
        end: &AttemptEnd,
        delay: Duration,
    ) -> Result<bool, StoreError> {
        repeated!(self.retry_step_once(step, token, end, delay))
    }
}
