//! What the ledger of tool calls decides, the same in every store. Pure: a store brings the facts it
//! read under its lock, and writes the row it is given.
//!
//! | found | the tool's effect | what happens |
//! |---|---|---|
//! | a result | any | it is answered again; the tool is not called |
//! | nothing | any | the intent is written, the tool is called |
//! | an intent of this very lease | any | the same answer once more: the first one may have been lost |
//! | an intent without a result | `none`, `idempotent` | called again, under the same idempotency key |
//! | an intent without a result | `once` | in doubt: never called again, unless a person decided so |
//!
//! A gated call is started only under an approval of that very call with those very arguments.

use std::time::Duration;

use super::ask::{Begun, CallKey, Finished, Intent, ToolExecution, Wish};
use crate::domain::{CallResult, CallStatus, Effect, LeaseToken, StepId};
use crate::store::Time;

/// A row of the ledger with what only the ledger needs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    /// What is shown of it.
    pub row: ToolExecution,
    /// The intent's own token: a result is taken by it.
    pub token: LeaseToken,
    /// The lease under which it was started last.
    pub lease: LeaseToken,
}

/// What a store knows of one intent when it holds the step.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    /// The step that asks.
    pub step: StepId,
    /// Its lease.
    pub lease: LeaseToken,
    /// The question that approved this very call with these very arguments.
    pub approval: Option<String>,
    /// Whether a question about this call's outcome was asked after its last start, and was answered.
    pub is_decided: bool,
    /// The store's clock, after the locks.
    pub now: Time,
}

/// What becomes of an intent: the answer, and the row to write.
pub(crate) fn decide(found: Option<&Entry>, intent: &Intent, facts: &Facts) -> (Begun, Option<Entry>) {
    if let Some(result) = found.and_then(|entry| entry.row.result.as_ref()) {
        return (Begun::Done(result.clone()), None);
    }
    if let (Wish::Record(result), None) = (&intent.wish, found) {
        return recorded(None, intent, facts, result);
    }
    if intent.is_gated && facts.approval.is_none() {
        return (Begun::NotApproved, None);
    }
    let Some(entry) = found else { return started(None, intent, facts) };
    if entry.lease == facts.lease && entry.row.status == CallStatus::Intended {
        return (begun(entry), None);
    }
    if let Wish::Decided(result) = &intent.wish
        && facts.is_decided
    {
        return match result {
            Some(result) => recorded(Some(entry), intent, facts, result),
            None => started(Some(entry), intent, facts),
        };
    }
    match entry.row.effect {
        Effect::None | Effect::Idempotent => started(Some(entry), intent, facts),
        Effect::Once => in_doubt(entry, facts.now),
    }
}

/// What becomes of a result that comes with `token`: the answer, and the row to write.
pub(crate) fn finish(
    found: Option<&Entry>,
    token: LeaseToken,
    result: &CallResult,
    now: Time,
) -> (Finished, Option<Entry>) {
    let Some(entry) = found else { return (Finished::Unknown, None) };
    if let Some(kept) = &entry.row.result {
        return (Finished::Kept(kept.clone()), None);
    }
    if entry.token != token {
        return (Finished::Unknown, None);
    }
    let mut entry = entry.clone();
    entry.row.status = result.status;
    entry.row.result = Some(result.clone());
    entry.row.finished_at = Some(now);
    (Finished::Stored, Some(entry))
}

fn begun(entry: &Entry) -> Begun {
    Begun::Started { token: entry.token, attempt: entry.row.attempt, approval: entry.row.approval.clone() }
}

fn fresh(found: Option<&Entry>, intent: &Intent, facts: &Facts) -> Entry {
    Entry {
        row: ToolExecution {
            message_id: intent.call.message_id.clone(),
            call_id: intent.call.call_id.clone(),
            tool: intent.call.tool.clone(),
            arguments_hash: intent.call.arguments_hash.clone(),
            effect: intent.effect,
            status: CallStatus::Intended,
            result: None,
            step: facts.step,
            attempt: found.map_or(0, |entry| entry.row.attempt),
            approval: facts.approval.clone(),
            deadline: found.and_then(|entry| entry.row.deadline),
            started_at: found.and_then(|entry| entry.row.started_at),
            finished_at: None,
        },
        token: LeaseToken::new(),
        lease: facts.lease,
    }
}

fn started(found: Option<&Entry>, intent: &Intent, facts: &Facts) -> (Begun, Option<Entry>) {
    let mut entry = fresh(found, intent, facts);
    entry.row.attempt += 1;
    entry.row.started_at = Some(facts.now);
    entry.row.deadline =
        Some(facts.now + chrono::TimeDelta::from_std(intent.timeout).unwrap_or(chrono::TimeDelta::MAX));
    (begun(&entry), Some(entry))
}

fn recorded(found: Option<&Entry>, intent: &Intent, facts: &Facts, result: &CallResult) -> (Begun, Option<Entry>) {
    let mut entry = fresh(found, intent, facts);
    entry.row.status = result.status;
    entry.row.result = Some(result.clone());
    entry.row.finished_at = Some(facts.now);
    (Begun::Done(result.clone()), Some(entry))
}

/// Until the deadline it may still end; then nobody will ever know by itself.
fn in_doubt(entry: &Entry, now: Time) -> (Begun, Option<Entry>) {
    let deadline = entry.row.deadline.unwrap_or(now);
    let wait = (deadline - now).to_std().unwrap_or(Duration::ZERO);
    let is_news = wait.is_zero() && entry.row.status != CallStatus::Unknown;
    let unknown = is_news.then(|| {
        let mut entry = entry.clone();
        entry.row.status = CallStatus::Unknown;
        entry
    });
    (Begun::InDoubt { deadline, wait }, unknown)
}

impl CallKey {
    /// What a receiver refuses a repetition by: the same for every attempt. Source: decision D19.
    #[must_use]
    pub fn idempotency_key(thread: &str, call: &crate::domain::CallRef) -> String {
        format!("{thread}:{}:{}", call.message_id.text, call.call_id)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::{CallRef, RunId};

    fn intent(effect: Effect, wish: Wish) -> Intent {
        let call = CallRef::new("m".into(), "c", "pay", json!({"amount": 1}));
        Intent { call, effect, is_gated: false, timeout: Duration::from_secs(60), wish }
    }

    fn facts() -> Facts {
        let step = StepId { run_id: RunId::new(), seq: 1 };
        let now = chrono::DateTime::from_timestamp(1_000_000, 0).unwrap();
        Facts { step, lease: LeaseToken::new(), approval: None, is_decided: false, now }
    }

    fn later(facts: &Facts, seconds: i64) -> Facts {
        let now = facts.now + chrono::TimeDelta::seconds(seconds);
        Facts { lease: LeaseToken::new(), now, ..facts.clone() }
    }

    fn done(text: &str) -> CallResult {
        CallResult { status: CallStatus::Done, output: json!(text) }
    }

    /// A call that was started and has no result.
    fn started_call(effect: Effect, facts: &Facts) -> Entry {
        decide(None, &intent(effect, Wish::Run), facts).1.expect("an intent is written")
    }

    #[test]
    fn a_call_with_a_result_is_never_called_again() {
        let facts = facts();
        let entry = started_call(Effect::None, &facts);
        let (_, entry) = finish(Some(&entry), entry.token, &done("x"), facts.now);

        let again = decide(entry.as_ref(), &intent(Effect::None, Wish::Run), &later(&facts, 9));

        assert_eq!(again, (Begun::Done(done("x")), None));
    }

    #[test]
    fn the_same_question_under_the_same_lease_gets_the_same_answer() {
        let facts = facts();
        let (first, entry) = decide(None, &intent(Effect::Once, Wish::Run), &facts);

        let again = decide(entry.as_ref(), &intent(Effect::Once, Wish::Run), &facts);

        assert_eq!(again, (first, None));
    }

    #[test]
    fn what_may_be_repeated_is_started_again_and_its_old_token_counts_no_more() {
        let facts = facts();
        let entry = started_call(Effect::Idempotent, &facts);

        let (begun, second) = decide(Some(&entry), &intent(Effect::Idempotent, Wish::Run), &later(&facts, 1));

        let Begun::Started { attempt: 2, .. } = begun else { panic!("{begun:?}") };
        assert_eq!(finish(second.as_ref(), entry.token, &done("old"), facts.now).0, Finished::Unknown);
        let second = second.unwrap();
        assert_eq!(finish(Some(&second), second.token, &done("new"), facts.now).0, Finished::Stored);
    }

    /// Invariant 8: a tool call whose outcome is unknown is never silently repeated.
    #[test]
    fn a_once_call_without_a_result_is_in_doubt_until_a_person_decides() {
        let facts = facts();
        let entry = started_call(Effect::Once, &facts);
        let once = |wish| intent(Effect::Once, wish);

        let (early, nothing) = decide(Some(&entry), &once(Wish::Run), &later(&facts, 59));
        let (late, unknown) = decide(Some(&entry), &once(Wish::Run), &later(&facts, 60));

        let deadline = entry.row.deadline.unwrap();
        assert_eq!((early, nothing), (Begun::InDoubt { deadline, wait: Duration::from_secs(1) }, None));
        assert_eq!(late, Begun::InDoubt { deadline, wait: Duration::ZERO });
        let unknown = unknown.unwrap();
        assert_eq!(unknown.row.status, CallStatus::Unknown);
        let retry = || Wish::Decided(None);
        let (undecided, _) = decide(Some(&unknown), &once(retry()), &later(&facts, 61));
        assert!(matches!(undecided, Begun::InDoubt { .. }));
        let decided = Facts { is_decided: true, ..later(&facts, 62) };
        let (retried, _) = decide(Some(&unknown), &once(retry()), &decided);
        assert!(matches!(retried, Begun::Started { attempt: 2, .. }));
        let taken = Wish::Decided(Some(done("paid")));
        assert_eq!(decide(Some(&unknown), &once(taken), &decided).0, Begun::Done(done("paid")));
    }

    #[test]
    fn a_late_result_of_a_call_in_doubt_is_a_fact_still() {
        let facts = facts();
        let entry = started_call(Effect::Once, &facts);
        let (_, unknown) = decide(Some(&entry), &intent(Effect::Once, Wish::Run), &later(&facts, 99));

        let (finished, entry) = finish(unknown.as_ref(), entry.token, &done("late"), facts.now);

        assert_eq!(finished, Finished::Stored);
        assert_eq!(finish(entry.as_ref(), LeaseToken::new(), &done("x"), facts.now).0, Finished::Kept(done("late")));
    }

    /// Invariant 7: no gated tool runs without an approval row for that very call.
    #[test]
    fn a_gated_call_starts_only_under_its_approval_and_a_denial_needs_none() {
        let gated = |wish| Intent { is_gated: true, ..intent(Effect::Once, wish) };
        let facts = facts();

        assert_eq!(decide(None, &gated(Wish::Run), &facts), (Begun::NotApproved, None));
        let approved = Facts { approval: Some("int_2".to_owned()), ..facts.clone() };
        let (begun, _) = decide(None, &gated(Wish::Run), &approved);
        assert!(matches!(begun, Begun::Started { approval: Some(id), .. } if id == "int_2"));
        let denied = CallResult { status: CallStatus::Denied, output: json!("no") };
        assert_eq!(decide(None, &gated(Wish::Record(denied.clone())), &facts).0, Begun::Done(denied));
    }

    #[test]
    fn a_denial_cannot_hide_a_call_that_was_started() {
        let facts = facts();
        let entry = started_call(Effect::Once, &facts);
        let denied = CallResult { status: CallStatus::Denied, output: json!("no") };

        let (begun, _) = decide(Some(&entry), &intent(Effect::Once, Wish::Record(denied)), &later(&facts, 99));

        assert!(matches!(begun, Begun::InDoubt { .. }), "{begun:?}");
    }
}
