//! Commits: everything one step did becomes visible in one statement, or nothing does.

mod columns;
mod statement;

use std::collections::HashSet;

use futures::future::join_all;
use sqlx::FromRow;

use self::columns::Columns;
use self::statement::{REMOVE_FIRST, STANDING, Shape};
use super::PgStore;
use super::claim::lease_columns;
use super::error::{Attempts, Doing};
use crate::store::{CommitOutcome, StepCommit, StoreError};

const DOING: &str = "commit a step";

type Outcomes = Vec<Option<Result<CommitOutcome, StoreError>>>;

impl PgStore {
    /// Commits in rounds of at most one step per run, which is one per thread: only the active run
    /// of a thread passes the fence.
    pub(super) async fn commit_all(&self, steps: &[StepCommit]) -> Vec<Result<CommitOutcome, StoreError>> {
        let mut outcomes: Outcomes = steps.iter().map(|_| None).collect();
        for round in rounds(steps) {
            match round[..] {
                [only] => outcomes[only] = Some(self.commit_alone(&steps[only]).await),
                _ => self.commit_together(steps, &round, &mut outcomes).await,
            }
        }
        outcomes.into_iter().map(|outcome| outcome.expect("every step is in one round")).collect()
    }

    /// One statement for the round. What it refused, or all of it if the statement failed, is
    /// committed step by step: a payload that cannot be stored takes no neighbours along.
    async fn commit_together(&self, steps: &[StepCommit], round: &[usize], outcomes: &mut Outcomes) {
        let batch: Vec<&StepCommit> = round.iter().map(|index| &steps[*index]).collect();
        match self.try_batch(&batch).await {
            Ok(answers) => {
                for (index, outcome) in answers {
                    outcomes[round[index]] = Some(Ok(outcome));
                }
            }
            Err(error) => tracing::warn!(steps = batch.len(), "Repeating a batch of commits step by step: {error}"),
        }
        let left: Vec<usize> = round.iter().copied().filter(|index| outcomes[*index].is_none()).collect();
        let alone = join_all(left.iter().map(|index| self.commit_alone(&steps[*index]))).await;
        for (index, outcome) in left.into_iter().zip(alone) {
            outcomes[index] = Some(outcome);
        }
    }

    /// The outcomes of those that were committed, now or by an earlier try whose answer was lost, or
    /// whose lease is lost; the others are missing.
    async fn try_batch(&self, batch: &[&StepCommit]) -> Result<Vec<(usize, CommitOutcome)>, StoreError> {
        let mut attempts = Attempts::new();
        let committed = loop {
            match self.write_batch(batch).await {
                Ok(committed) => break committed,
                Err(error) => attempts.again_after(error).await?,
            }
        };
        let seen: HashSet<usize> = committed.iter().map(|(index, _)| *index).collect();
        let refused: Vec<usize> = (0..batch.len()).filter(|index| !seen.contains(index)).collect();
        let mut outcomes = committed;
        if !refused.is_empty() {
            let asked: Vec<&StepCommit> = refused.iter().map(|index| batch[*index]).collect();
            let standings = self.standings(&asked).await?;
            outcomes.extend(
                refused.into_iter().zip(standings).filter_map(|(index, standing)| Some((index, standing.outcome()?))),
            );
        }
        Ok(outcomes)
    }

    async fn write_batch(&self, batch: &[&StepCommit]) -> Result<Vec<(usize, CommitOutcome)>, StoreError> {
        let columns = Columns::of(batch);
        let shape = columns.shape(true);
        let query = columns.bind_many(sqlx::query_as::<_, CommittedRow>(shape.sql()), shape);
        let mut connection = self.steps.take().await.doing(DOING)?;
        let rows = query.fetch_all(&mut *connection).await.doing(DOING)?;
        connection.keep();
        Ok(rows.into_iter().map(|row| (row.index(), row.outcome())).collect())
    }

    /// Commits one step, waiting for its rows; repeated with the same token until it is decided.
    async fn commit_alone(&self, step: &StepCommit) -> Result<CommitOutcome, StoreError> {
        let mut attempts = Attempts::new();
        loop {
            match self.decide_alone(step).await {
                Ok(outcome) => return Ok(outcome),
                Err(error) => attempts.again_after(error).await?,
            }
        }
    }

    async fn decide_alone(&self, step: &StepCommit) -> Result<CommitOutcome, StoreError> {
        let mut columns = Columns::of(&[step]);
        let shape = columns.shape(false);
        let mut written = self.write_alone(&mut columns, shape).await?;
        if written.is_none() && !shape.ends {
            // Perhaps because of a stop, which ends the run.
            written = self.write_alone(&mut columns, Shape { ends: true, ..shape }).await?;
        }
        if let Some(row) = written {
            return Ok(row.outcome());
        }
        let standing = self.standings(&[step]).await?.pop().unwrap_or(Standing::Lost);
        Ok(standing.outcome().unwrap_or_else(|| {
            tracing::error!(
                step = %step.step, version = step.base_version,
                "Step {} holds its lease, but its thread is not where it was; its result is dropped", step.step
            );
            CommitOutcome::Conflict
        }))
    }

    async fn write_alone(&self, columns: &mut Columns, mut shape: Shape) -> Result<Option<CommittedRow>, StoreError> {
        if !(shape.removed && shape.messages) {
            let query = columns.bind_one(sqlx::query_as::<_, CommittedRow>(shape.sql()), shape);
            let mut connection = self.steps.take().await.doing(DOING)?;
            let row = query.fetch_optional(&mut *connection).await.doing(DOING)?;
            connection.keep();
            return Ok(row);
        }
        shape.removed = false;
        let mut tx = self.begin(DOING).await?;
        columns.bind_removal(sqlx::query(REMOVE_FIRST)).execute(&mut *tx).await.doing(DOING)?;
        columns.removed_before();
        let query = columns.bind_one(sqlx::query_as::<_, CommittedRow>(shape.sql()), shape);
        let row = query.fetch_optional(&mut *tx).await.doing(DOING)?;
        match row.is_some() {
            true => tx.commit().await.doing(DOING)?,
            false => tx.rollback().await.doing(DOING)?, // What was refused removes nothing either.
        }
        Ok(row)
    }

    /// How refused steps stand, in order.
    async fn standings(&self, steps: &[&StepCommit]) -> Result<Vec<Standing>, StoreError> {
        let leases: Vec<_> = steps.iter().map(|step| (step.step, step.token)).collect();
        let (run_ids, seqs, tokens) = lease_columns(&leases);
        let rows: Vec<StandingRow> = sqlx::query_as(STANDING)
            .bind(run_ids)
            .bind(seqs)
            .bind(tokens)
            .fetch_all(&self.pool)
            .await
            .doing("look at a refused commit")?;
        let mut standings = vec![Standing::Lost; steps.len()];
        for row in rows {
            let index = usize::try_from(row.i - 1).expect("ordinality counts from 1");
            standings[index] = row.standing();
        }
        Ok(standings)
    }
}

/// Indexes of steps that may be committed together, in order. A step that both removes and adds
/// messages takes a transaction of its own.
fn rounds(steps: &[StepCommit]) -> Vec<Vec<usize>> {
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<usize> = (0..steps.len()).collect();
    while !open.is_empty() {
        let mut runs = HashSet::new();
        let (now, later): (Vec<usize>, Vec<usize>) =
            open.into_iter().partition(|index| runs.insert(steps[*index].step.run_id));
        let (alone, together): (Vec<usize>, Vec<usize>) =
            now.into_iter().partition(|index| !steps[*index].removed.is_empty() && !steps[*index].messages.is_empty());
        rounds.extend(Some(together).filter(|round| !round.is_empty()));
        rounds.extend(alone.into_iter().map(|index| vec![index]));
        open = later;
    }
    rounds
}

#[derive(FromRow)]
struct CommittedRow {
    i: i32,
    stop: bool,
    version: i64,
}

impl CommittedRow {
    fn index(&self) -> usize {
        usize::try_from(self.i - 1).expect("ordinality counts from 1")
    }

    fn outcome(&self) -> CommitOutcome {
        match self.stop {
            true => CommitOutcome::Stopped { version: self.version },
            false => CommitOutcome::Committed { version: self.version },
        }
    }
}

#[derive(FromRow)]
struct StandingRow {
    i: i32,
    status: String,
    mine: Option<bool>,
    version: Option<i64>,
    stopped: Option<bool>,
}

impl StandingRow {
    fn standing(&self) -> Standing {
        match (self.mine, self.status.as_str(), self.version) {
            (Some(true), "done", Some(version)) if self.stopped == Some(true) => {
                Standing::Decided(CommitOutcome::Stopped { version })
            }
            (Some(true), "done", Some(version)) => Standing::Decided(CommitOutcome::Committed { version }),
            (Some(true), "leased", _) => Standing::Held,
            _ => Standing::Lost,
        }
    }
}

/// How a step stands whose commit was refused.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Standing {
    /// An earlier try was the one; its answer was lost.
    Decided(CommitOutcome),
    /// Leased under this token: another statement held a row (commit alone), or, alone, a conflict.
    Held,
    /// Somebody else's now, or closed.
    Lost,
}

impl Standing {
    fn outcome(self) -> Option<CommitOutcome> {
        match self {
            Self::Decided(outcome) => Some(outcome),
            Self::Held => None,
            Self::Lost => Some(CommitOutcome::LeaseLost),
        }
    }
}
