//! What every store promises, as stories. Each takes a fresh database; [`store_contract!`] makes a
//! test of each. A promise that is not written here is not kept by all of them.
//!
//! [`store_contract!`]: crate::store_contract

#![expect(clippy::unwrap_used, reason = "a story fails by panicking, like every test")]

pub(crate) mod fixture;

pub mod admitting;
pub mod answering;
pub mod asking;
pub mod bytes;
pub mod creating;
pub mod dispatching;
pub mod graphs;
pub mod leasing;
pub mod ledger;
pub mod racing;
pub mod resuming;
pub mod stepping;
pub mod stopping;
pub mod sweeping;
pub mod threads;
pub mod upkeep;

/// Makes a test of every story. `$fresh` is an async function without arguments that returns a pair:
/// an `Arc<dyn Store>` over a migrated, empty database, and whatever must live as long as the story.
#[macro_export]
macro_rules! store_contract {
    ($fresh:path) => {
        $crate::store_contract! { $fresh;
            admitting {
                admission_sees_the_thread_as_it_is
                admission_of_a_new_thread_sees_nothing
                a_run_that_pauses_at_once_is_closed_at_once
                a_run_that_starts_at_the_end_completes_at_once
                a_run_that_begins_before_the_entry_has_a_step_zero
                the_input_may_set_fields
                a_message_of_the_log_may_join_the_context
            }
            answering {
                an_answer_is_kept_and_reaches_the_node
                one_of_two_answers_keeps_the_pause
                the_last_answer_makes_the_run_that_goes_on
                a_refused_answer_writes_nothing
                a_key_of_a_partial_answer_stands_for_the_paused_run
                an_approval_keeps_the_hash_of_its_arguments
                an_expired_question_takes_its_default_alone
                each_decision_is_in_the_audit
                a_result_of_a_client_tool_joins_the_context
            }
            asking {
                questions_are_written_by_the_commit_that_pauses
                a_stop_that_the_commit_sees_asks_nothing
                a_batch_asks_for_many_threads
                the_inbox_is_paged_oldest_first
                the_inbox_is_filtered
                questions_belong_to_their_owner
                questions_that_are_due_are_found
                a_stop_cancels_questions_and_denies_their_calls
                a_thread_that_asks_is_not_fixed
                a_cleared_thread_asks_nothing
            }
            bytes {
                what_a_node_returns_is_kept_exactly
                what_a_client_sends_is_kept_exactly
                the_place_is_kept_exactly
                a_huge_message_id_keeps_its_digits
                deep_values_are_read_back
                ids_are_exact
            }
            creating {
                a_new_run_creates_its_thread_and_a_backlog_step
                a_refused_run_writes_nothing
                a_second_run_goes_on_with_the_same_thread
                of_many_runs_at_once_a_thread_takes_one
                runs_on_many_threads_do_not_hinder_each_other
                one_key_makes_one_run
                a_key_belongs_to_one_body_of_one_user
                a_key_that_ran_out_is_free
                message_ids_belong_to_their_thread
                an_integer_id_is_found_by_both_spellings
                a_thread_belongs_to_its_user
                runs_are_listed_newest_first
                a_thread_is_named_when_its_first_run_is_closed
                tenants_do_not_see_each_other
            }
            dispatching {
                tenants_take_turns
                a_round_goes_on_after_its_last_tenant
                a_job_carries_its_lane
                each_pool_and_class_has_its_own_backlog
                a_full_version_does_not_take_the_places_of_others
                dispatchers_at_once_pick_a_step_once
                an_unsent_step_is_backlog_again
            }
            graphs {
                the_schema_may_be_migrated_again
                the_last_registered_version_is_the_newest
            }
            leasing {
                of_many_claims_at_once_one_wins
                a_claim_needs_the_code
                a_claim_takes_what_is_free
                a_started_run_is_running
                a_heartbeat_keeps_the_lease
                an_expired_lease_that_nobody_took_is_ours_still
                a_heartbeat_answers_for_each_lease
                a_lease_given_back_is_not_charged
                a_step_given_back_is_sent_again
                a_retried_step_waits_for_its_time
                an_attempt_keeps_its_error
            }
            ledger {
                a_call_is_written_down_before_it_starts
                a_result_is_kept_and_answered_again
                a_result_is_a_fact_after_the_lease_is_lost
                only_the_first_result_counts
                a_call_that_may_be_repeated_is_started_again
                a_once_call_is_in_doubt
                a_decision_ends_the_doubt
                a_gated_call_needs_its_approval
                a_lost_lease_starts_no_call
                a_call_belongs_to_its_message
            }
            racing {
                of_two_answers_at_once_one_counts
                of_an_answer_and_a_stop_at_once_one_counts
                of_an_answer_and_an_expiry_at_once_one_counts
                of_two_results_at_once_one_counts
            }
            resuming {
                a_question_pauses_the_run
                an_answer_makes_a_run_that_resumes_the_paused_one
                a_chain_follows_its_links_and_not_its_ids
                a_run_that_starts_anew_resumes_nobody
                a_paused_run_is_resumed_once
            }
            stepping {
                a_commit_holds_the_next_step
                each_step_is_one_version
                a_commit_repeated_with_its_token_answers_the_same
                the_last_commit_may_be_repeated_too
                a_commit_under_a_lost_lease_changes_nothing
                a_commit_of_an_unknown_step_is_refused
                a_commit_from_another_version_is_a_conflict
                a_batch_commits_many_threads
                one_bad_step_does_not_take_its_batch_along
                a_failed_step_fails_its_run
                a_worker_loads_what_changed_since
                a_removed_message_stays_in_older_versions
                a_message_may_be_replaced_in_one_step
                a_field_has_a_value_per_version
                the_changes_of_a_run_are_read_by_version
                a_waiter_hears_of_final_runs_only
                empty_batches_do_nothing
                many_runs_step_at_once
                the_output_before_the_limit_is_kept
            }
            stopping {
                a_stop_during_a_node_keeps_its_output
                a_stop_between_nodes_cancels_the_next
                a_stop_in_the_queue_closes_the_run
                a_run_at_its_end_completes_despite_a_stop
                a_stop_beats_a_pause
                a_stop_belongs_to_one_run
                a_second_stop_changes_nothing
                a_stop_of_nothing_says_so
                a_run_may_be_stopped_by_its_id
                a_stop_closes_a_paused_run
                a_stop_of_a_chain_reaches_its_last_run
                a_stop_of_a_run_whose_worker_is_gone_is_honoured
                a_step_given_back_under_a_stop_never_starts_again
                a_step_to_retry_under_a_stop_never_starts_again
                a_stop_ends_the_wait_for_a_retry
                a_stop_and_a_commit_at_once_agree
            }
            sweeping {
                an_expired_lease_makes_the_step_ready
                a_sweep_that_may_not_expire_leaves_leases_alone
                a_step_that_kills_its_workers_fails_its_run
                sweeps_at_once_find_a_lease_once
                a_sweep_is_bounded
                a_sweep_knows_what_is_due_next
                a_step_that_was_sent_is_left_alone
            }
            threads {
                an_edit_is_a_version_of_its_own
                an_edit_may_create_the_thread
                an_edit_does_not_repeat_messages
                a_busy_thread_is_not_edited
                a_foreign_thread_is_not_edited
                logged_messages_are_not_in_the_context
                the_log_is_paged_and_searched
                a_deleted_message_is_gone
                a_cleared_thread_keeps_its_log
                a_deleted_thread_is_gone
                threads_are_listed_and_searched
                a_fix_drops_chosen_messages_from_the_context
                a_long_thread_is_readable_at_every_version
            }
            upkeep {
                pools_say_what_waits_and_who_serves
                a_run_says_why_it_waits
                runs_are_counted_by_status
                a_repair_leaves_healthy_runs_alone
            }
        }
    };
    ($fresh:path; $($area:ident { $($story:ident)* })*) => {
        $($(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                let (store, _alive) = $fresh().await;
                $crate::store::contract::$area::$story(store).await;
            }
        )*)*
    };
}

#[cfg(test)]
mod tests {
    /// A story that is not in the list would never be told.
    #[test]
    fn every_story_is_in_the_list() {
        let list = include_str!("mod.rs");
        let areas = [
            include_str!("admitting.rs"),
            include_str!("answering.rs"),
            include_str!("asking.rs"),
            include_str!("bytes.rs"),
            include_str!("creating.rs"),
            include_str!("dispatching.rs"),
            include_str!("graphs.rs"),
            include_str!("leasing.rs"),
            include_str!("ledger.rs"),
            include_str!("racing.rs"),
            include_str!("resuming.rs"),
            include_str!("stepping.rs"),
            include_str!("stopping.rs"),
            include_str!("sweeping.rs"),
            include_str!("threads.rs"),
            include_str!("upkeep.rs"),
        ];

        let declared = areas.iter().flat_map(|area| area.lines()).filter_map(|line| line.strip_prefix("pub async fn "));
        for story in declared.filter_map(|line| line.split('(').next()) {
            assert!(list.lines().any(|line| line.trim() == story), "{story} is not in the list of store_contract!");
        }
    }
}
