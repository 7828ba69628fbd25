//! Runs as a client sees them, and their stop.

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::create::create;
use super::row::{Columns, Doing, json_text, now};
use super::run::Step;
use super::thread::{Thread, ThreadStatus};
use super::{Promise, SqliteStore, close, interrupts, load, pools, run};
use crate::domain::{RunId, RunStatus, Scope, ThreadId};
use crate::store::{
    Admit, Change, Created, NewRun, RunFilter, RunRecord, Runs, StepRecord, StepStatus, StopAnswer, StoreError, Time,
    WhyFacts,
};

const STOPPING: &str = "stop a run";

#[async_trait]
impl Runs for SqliteStore {
    async fn create_run(&self, new: NewRun, admit: Admit<'_>) -> Result<Created, StoreError> {
        const DOING: &str = "create a run";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        let created = create(&mut tx, new, admit, now()).await?;
        tx.commit().await.doing(DOING)?;
        Ok(created)
    }

    async fn run(&self, scope: &Scope, id: RunId) -> Result<Option<RunRecord>, StoreError> {
        const DOING: &str = "read a run";
        run::in_scope(&mut *self.reader(DOING).await?, scope, id).await.doing(DOING)
    }

    async fn last_of_chain(&self, root: RunId) -> Result<Option<RunRecord>, StoreError> {
        const DOING: &str = "read the last run of a chain";
        run::last_of_chain(&mut *self.reader(DOING).await?, root).await.doing(DOING)
    }

    async fn runs(&self, scope: &Scope, filter: &RunFilter) -> Result<Vec<RunRecord>, StoreError> {
        const DOING: &str = "list runs";
        run::list(&mut *self.reader(DOING).await?, scope, filter).await.doing(DOING)
    }

    async fn finished(&self, ids: &[RunId]) -> Result<Vec<(RunId, RunStatus)>, StoreError> {
        const DOING: &str = "look for finished runs";
        let rows = sqlx::query(
            "select id, status from run
              where id in (select value from json_each(?1)) and status not in ('waiting', 'queued', 'running')",
        )
        .bind(json_text(ids))
        .fetch_all(&self.readers)
        .await
        .doing(DOING)?;
        let read = |row| Ok((Columns::id(row, "id")?, Columns::word(row, "status", RunStatus::parse)?));
        rows.iter().map(read).collect::<Result<_, sqlx::Error>>().doing(DOING)
    }

    async fn steps(&self, run: RunId) -> Result<Vec<StepRecord>, StoreError> {
        const DOING: &str = "list the steps of a run";
        let mut tx = self.snapshot(DOING).await?;
        let steps = Step::all_of(&mut tx, run).await.doing(DOING)?;
        let mut attempts = run::attempts(&mut tx, run).await.doing(DOING)?.into_iter().peekable();
        let with_attempts = |step: Step| {
            let mut own = Vec::new();
            while let Some((_, attempt)) = attempts.next_if(|(seq, _)| *seq == step.id.seq) {
                own.push(attempt);
            }
            step.record(own)
        };
        Ok(steps.into_iter().map(with_attempts).collect())
    }

    async fn changes(&self, run: RunId, after: i64) -> Result<Vec<Change>, StoreError> {
        const DOING: &str = "read what a run changed";
        load::changes(&mut *self.snapshot(DOING).await?, run, after).await.doing(DOING)
    }

    async fn stop_thread(&self, scope: &Scope, thread: &ThreadId) -> Result<StopAnswer, StoreError> {
        let mut tx = self.begin(Promise::Durable, STOPPING).await?;
        let found = Thread::in_scope(&mut tx, scope, thread).await.doing(STOPPING)?;
        let Some(mut thread) = found.filter(|thread| thread.has_state) else {
            return Ok(StopAnswer::NoState);
        };
        let answer = match (thread.active_run, thread.last_run) {
            (Some(active), _) => stop_active(&mut tx, &mut thread, active, scope, now()).await?,
            (None, Some(last)) => {
                stop_paused(&mut tx, &mut thread, last, scope, now()).await?;
                StopAnswer::NotRunning
            }
            (None, None) => StopAnswer::NotRunning,
        };
        tx.commit().await.doing(STOPPING)?;
        Ok(answer)
    }

    async fn stop_run(&self, scope: &Scope, run: RunId) -> Result<Option<RunRecord>, StoreError> {
        let mut tx = self.begin(Promise::Durable, STOPPING).await?;
        let Some(named) = run::in_scope(&mut tx, scope, run).await.doing(STOPPING)? else {
            return Ok(None);
        };
        let last = run::last_of_chain(&mut tx, named.root).await.doing(STOPPING)?.unwrap_or(named);
        let thread = Thread::by_key(&mut tx, last.thread_key).await.doing(STOPPING)?;
        if let Some(mut thread) = thread {
            if thread.active_run == Some(last.id) {
                stop_active(&mut tx, &mut thread, last.id, scope, now()).await?;
            } else {
                stop_paused(&mut tx, &mut thread, last.id, scope, now()).await?;
            }
        }
        let after = run::find(&mut tx, last.id).await.doing(STOPPING)?;
        tx.commit().await.doing(STOPPING)?;
        Ok(after)
    }

    async fn why(&self, run: RunId) -> Result<Option<WhyFacts>, StoreError> {
        const DOING: &str = "find out why a run waits";
        pools::why(&mut *self.snapshot(DOING).await?, run, now()).await.doing(DOING)
    }
}

/// Flags a run whose step somebody holds; closes one that waits.
async fn stop_active(
    db: &mut SqliteConnection,
    thread: &mut Thread,
    run: RunId,
    scope: &Scope,
    now: Time,
) -> Result<StopAnswer, StoreError> {
    if thread.stop_run != Some(run) {
        audit_stop(db, thread, run, scope, now).await?;
    }
    let step = Step::open_of(db, run).await.doing(STOPPING)?;
    let Some(lease) = step.as_ref().filter(|step| step.status == StepStatus::Leased) else {
        close::stop_now(db, thread, run, step.as_ref(), now).await?;
        return Ok(StopAnswer::Running(run));
    };
    if thread.stop_run != Some(run) {
        thread.stop_run = Some(run);
        thread.save(db, now).await.doing(STOPPING)?;
    }
    let is_live = lease.due_at.is_some_and(|ends| ends > now);
    Ok(if is_live { StopAnswer::Running(run) } else { StopAnswer::NotRunning })
}

/// Closes a paused run that nobody resumed, and its pause; any other run is left as it is.
async fn stop_paused(
    db: &mut SqliteConnection,
    thread: &mut Thread,
    run: RunId,
    scope: &Scope,
    now: Time,
) -> Result<(), StoreError> {
    let paused = run::find(db, run).await.doing(STOPPING)?;
    let Some(paused) = paused.filter(|run| run.status == RunStatus::Interrupted) else {
        return Ok(());
    };
    audit_stop(db, thread, run, scope, now).await?;
    let denied = interrupts::cancel(db, thread, run, who(scope), now).await?;
    if thread.status == ThreadStatus::Interrupted && thread.last_run == Some(run) {
        return close::stop_paused(db, thread, run, &denied, now).await;
    }
    // The pause is gone already: its state was cleared, or another run went past it.
    close::end_run(db, run, RunStatus::Stopped, None, paused.version, now).await
}

async fn audit_stop(
    db: &mut SqliteConnection,
    thread: &Thread,
    run: RunId,
    scope: &Scope,
    now: Time,
) -> Result<(), StoreError> {
    close::audit(db, thread, who(scope), "stop", &serde_json::json!({"run": run}), now).await
}

fn who(scope: &Scope) -> &str {
    scope.owner.as_ref().map_or("anonymous", |owner| owner.as_str())
}
