//! Runs every model of the gate in every order in which its threads can meet, within a bound.
#![cfg(host_gate_loom)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use loom::model::Builder;
use tower_host_gate::model;

/// Runs a model once per schedule and says how many those were. `LOOM_MAX_PREEMPTIONS` overrides how often threads may be
/// interrupted in one of them.
fn check(name: &str, preemptions: usize, model: fn()) {
    let schedules = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&schedules);
    let mut builder = Builder::new();
    let bound = *builder.preemption_bound.get_or_insert(preemptions);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("model: {name} preemptions {bound} schedules {}", schedules.load(Ordering::Relaxed));
}

macro_rules! check {
    ($preemptions:literal: $($model:ident)*) => {
        $(
            #[test]
            fn $model() {
                check(stringify!($model), $preemptions, model::$model);
            }
        )*
    };
}

// Two threads.
check! { 3:
    one_request_of_a_host_at_a_time
    two_requests_of_a_host_at_a_concurrency_of_two
    hosts_that_share_a_cell_do_not_wait_for_each_other
    the_rights_of_a_host_that_shares_its_cell_are_its_own
    a_host_limited_beforehand_goes_through_its_slot
    a_waiter_gets_the_permit_that_comes_back
    a_request_that_may_not_wait_leaves_nothing
    nothing_is_sent_once_a_refusal_is_known
    nothing_is_sent_once_a_penalty_is_known
    who_waits_hears_of_a_permit_that_is_turned_back_at_the_send
    who_is_turned_back_at_the_send_goes_once_the_host_is_cleared
    a_host_that_is_cleared_is_fast_again
    a_lowered_concurrency_holds_for_a_host_in_flight
    a_lowered_concurrency_holds_for_a_host_that_its_cell_remembers
    a_lowered_concurrency_holds_for_a_host_that_is_just_coming
    a_raised_concurrency_reaches_who_waits
    a_snapshot_never_names_a_host_that_nobody_asks
    heads_and_bodies_are_counted_whatever_the_cell_turns_to
    a_closed_gate_still_heeds_a_refusal
}

// Three threads.
check! { 2:
    two_waiters_get_the_permit_one_after_the_other
    a_waiter_that_goes_away_leaves_its_turn_to_the_next
    a_slow_host_is_not_disturbed_by_the_one_it_shares_its_cell_with
    a_waiter_that_a_penalty_leaves_no_prospect_hears_of_it
    a_snapshot_tells_who_is_in_flight_and_changes_nothing
    a_closed_gate_goes_with_its_last_permit
    a_closed_gate_still_serves_who_waits
    cells_go_from_a_gate_that_is_over_to_the_next
}
