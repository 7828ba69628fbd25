//! The names of the worker's metrics.

/// Seconds from a node's start to its end, by graph, node and outcome.
pub(crate) const STEP_SECONDS: &str = "threadgate_step_duration_seconds";
/// Seconds a run waited for its first step to start, by the worker's clock.
pub(crate) const QUEUE_WAIT_SECONDS: &str = "threadgate_queue_wait_seconds";
/// Leases that turned out to be somebody else's.
pub(crate) const LEASE_LOSSES: &str = "threadgate_lease_losses_total";
/// Attempts that failed and are repeated, by how they ended.
pub(crate) const RETRIES: &str = "threadgate_step_retries_total";
/// Steps in one commit statement.
pub(crate) const COMMIT_BATCH: &str = "threadgate_commit_batch_size";
/// Steps in one claim statement.
pub(crate) const CLAIM_BATCH: &str = "threadgate_claim_batch_size";
/// Steps in one load statement.
pub(crate) const LOAD_BATCH: &str = "threadgate_load_batch_size";
/// Runs in one statement that marks them as running.
pub(crate) const MARK_BATCH: &str = "threadgate_mark_running_batch_size";
/// Leases in one statement that gives them back.
pub(crate) const GIVE_BACK_BATCH: &str = "threadgate_give_back_batch_size";
/// Results that came after their attempt had ended; they are dropped.
pub(crate) const LATE_RESULTS: &str = "threadgate_late_results_total";
/// Nodes that block a thread long after their attempt ended; the thread is given up.
pub(crate) const LEFT_BEHIND: &str = "threadgate_nodes_left_behind_total";
/// Jobs whose step was not there to take: done, taken, or not this worker's.
pub(crate) const STALE_JOBS: &str = "threadgate_stale_jobs_total";
/// Events that were dropped because the event log could not keep up.
pub(crate) const EVENTS_DROPPED: &str = "threadgate_events_dropped_total";
/// Steps this worker runs now.
pub(crate) const SLOTS_IN_USE: &str = "threadgate_slots_in_use";
/// Steps this worker may run at once.
pub(crate) const SLOTS: &str = "threadgate_slots";

/// Describes them to whoever exports them.
pub(crate) fn describe() {
    use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
    describe_histogram!(STEP_SECONDS, Unit::Seconds, "From a node's start to its end.");
    describe_histogram!(QUEUE_WAIT_SECONDS, Unit::Seconds, "From a run's creation to the start of its first step.");
    describe_counter!(LEASE_LOSSES, "Leases that turned out to be somebody else's.");
    describe_counter!(RETRIES, "Attempts that failed and are repeated.");
    describe_histogram!(COMMIT_BATCH, "Steps in one commit statement.");
    describe_histogram!(CLAIM_BATCH, "Steps in one claim statement.");
    describe_counter!(LATE_RESULTS, "Results that came after their attempt had ended and were dropped.");
    describe_counter!(LEFT_BEHIND, "Nodes that block a thread long after their attempt ended.");
    describe_counter!(STALE_JOBS, "Jobs whose step was not there to take.");
    describe_counter!(EVENTS_DROPPED, "Events dropped because the event log could not keep up.");
    describe_gauge!(SLOTS_IN_USE, "Steps this worker runs now.");
    describe_gauge!(SLOTS, "Steps this worker may run at once.");
}
