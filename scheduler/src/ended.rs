//! Tells whoever follows a run that the scheduler has ended it.

use threadgate_shared::domain::{RunId, Scope};
use threadgate_shared::events::{Event, EventBody, EventId};
use threadgate_shared::parts::Parts;
use threadgate_shared::store::{StoreError, WhyFacts};

/// Publishes the last event of a run that was closed without its worker.
///
/// # Errors
/// [`StoreError`] if the store cannot be asked how the run ended.
pub(crate) async fn announce_end(parts: &Parts, run_id: RunId) -> Result<(), StoreError> {
    let Some(facts) = parts.store.why(run_id).await? else {
        return Ok(()); // Deleted meanwhile.
    };
    let Some(body) = how_it_ended(parts, &facts).await? else {
        return Ok(());
    };
    let (seq, attempt) = facts.step.map_or((0, 0), |step| (step.id.seq, step.attempt));
    let at = facts.run.finished_at.unwrap_or(facts.now).timestamp_micros();
    #[expect(clippy::cast_precision_loss, reason = "microseconds of this century fit a float exactly")]
    let at = at as f64 / 1e6;
    let event = Event { id: EventId::of_step(seq, attempt, EventId::ENDED), at, body };
    parts.events.publish(run_id, vec![event]).await;
    Ok(())
}

async fn how_it_ended(parts: &Parts, facts: &WhyFacts) -> Result<Option<EventBody>, StoreError> {
    let run = &facts.run;
    if !run.status.is_final() {
        return Ok(None);
    }
    let closing = parts.store.changes(run.id, run.version - 1).await?.pop();
    let meta = match closing {
        Some(change) => change.meta,
        None => {
            let scope = Scope { tenant: run.tenant.clone(), owner: None };
            let Some(state) = parts.store.state(&scope, &run.thread_id, None).await? else {
                return Ok(None);
            };
            state.meta
        }
    };
    Ok(Some(EventBody::RunEnded { status: run.status, meta: Box::new(meta), error: run.error.clone() }))
}
