//! Gives questions whose time is over the default answer that they were asked with, by the same
//! transaction as any other answer: of an answer and an expiry one counts. A question without a
//! default is left alone: it takes no answer any more, is listed as expired, and waits for a stop.
//!
//! There is no pass for pauses that were answered and did not go on: the answer that leaves no
//! question open creates the run in its own transaction, so there is no such pause.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use threadgate_shared::domain::{Caller, InterruptRecord, Scope};
use threadgate_shared::graph::admission::{Answer, Answerer, Given, RunInput, admit};
use threadgate_shared::parts::Parts;
use threadgate_shared::store::{Created, NewRun, StoreError};
use tracing::{info, warn};

use crate::config::SchedulerConfig;
use crate::every::Pass;

/// Questions one pass answers at most.
const QUESTIONS_MAX: usize = 100;

/// Questions that are remembered because their default was refused, at most; they are left out so
/// that others are reached.
const REFUSED_MAX: usize = 1_000;

/// The pass.
pub struct Interrupts {
    parts: Parts,
    interval: Duration,
    /// Ids of questions whose default was refused, oldest first.
    refused: VecDeque<String>,
}

impl Interrupts {
    /// A pass with the interval of `config`.
    #[must_use]
    pub fn new(parts: Parts, config: &SchedulerConfig) -> Self {
        Self { parts, interval: config.expiry_interval, refused: VecDeque::new() }
    }

    /// Applies the default; a refusal is somebody's answer, or a default that cannot be taken.
    async fn expire(&mut self, record: &InterruptRecord) -> Result<(), StoreError> {
        let Some(default) = record.question.on_expiry.clone() else { return Ok(()) };
        let scope = Scope { tenant: record.tenant.clone(), owner: None };
        let store = &self.parts.store;
        let Some(paused) = store.run(&scope, record.run_id()).await? else { return Ok(()) };
        let Some(graph) = store.graph_version(&paused.graph_version).await? else { return Ok(()) };
        let caller = Caller { tenant: record.tenant.clone(), user: record.user.clone(), verified: true };
        let versions = vec![(graph.version, Arc::new(graph.manifest))];
        let new = NewRun { versions: versions.clone(), ..NewRun::resuming(&paused, caller) };
        let id = record.question.id.clone();
        let answer = Answer { interrupt_id: id.clone(), value: Given::Canonical(default), comment: None };
        let input = RunInput { answers: vec![answer], answered_by: Answerer::Expiry, ..RunInput::default() };
        let thread = record.thread_id.clone();
        match store.create_run(new, &|view| admit(&versions, &thread, view, &input)).await {
            Ok(Created::New(created)) => {
                info!(run.id = %created.run.id, interrupt.id = id, "The time of question {id} was over; its default counts");
                if let Some((pool, class)) = &created.lane {
                    self.parts.dispatcher.nudge(pool, *class);
                }
            }
            Ok(Created::StillPaused(_) | Created::Replayed(_)) => {
                info!(run.id = %paused.id, interrupt.id = id, "The time of question {id} was over; others of its pause are open");
            }
            Err(StoreError::Refused(refusal)) => {
                warn!(run.id = %paused.id, interrupt.id = id, "The default answer to question {id} was not taken: {refusal}");
                self.refused.push_back(id);
                if self.refused.len() > REFUSED_MAX {
                    self.refused.pop_front();
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

#[async_trait]
impl Pass for Interrupts {
    fn name(&self) -> &'static str {
        "interrupts"
    }

    async fn once(&mut self) -> Result<Duration, StoreError> {
        let limit = u32::try_from(QUESTIONS_MAX + self.refused.len()).unwrap_or(u32::MAX);
        let mut due = self.parts.store.due_for_expiry(limit).await?;
        let is_full = due.len() == limit as usize;
        due.retain(|record| !self.refused.contains(&record.question.id));
        for record in &due {
            self.expire(record).await?;
            metrics::counter!("threadgate_interrupts_expired_total").increment(1);
        }
        Ok(if is_full && !due.is_empty() { Duration::ZERO } else { self.interval })
    }
}
