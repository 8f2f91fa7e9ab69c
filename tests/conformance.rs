//! One suite of pacing, queueing and budget, held against every kind of gate: in this process, and shared through
//! Redis, Valkey, Sentinel and Cluster.
//!
//! A rule is a function that is given a backend. Siblings, the clones of one client, are clones of a layer where the gate is
//! in process, and layers of separate processes where it is shared: what a rule says of them holds for both. Where a
//! shared gate differs by design, [`differences`] says so.
//!
//! | module | rules |
//! |---|---|
//! | [`reactive`] | cooldown, escalation, spacing, warmth |
//! | [`verdicts`] | what counts as a refusal, and what it says about when |
//! | [`learned`] | what is remembered of a host |
//! | [`limits`] | delay, quota, jitter; which of them counts |
//! | [`budget`] | who is refused, when, and with what error |
//! | [`queue`] | order, cancelling, bounds |
//! | [`permits`] | how many are in flight, and what ends a request |
//! | [`retries`] | both policies |
//! | [`steering`] | looking at hosts and changing them from outside |
//!
//! All of it runs in real time, all rules of a backend at once; no assertion depends on how fast the machine is. So there
//! are no upper bounds, and a lower bound counts from something that certainly came before: `CONFORMANCE=part of a
//! name` picks rules.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]
#![allow(unreachable_pub, reason = "`pub` is a module's interface to the rest of this program")]

mod support;

#[path = "conformance/backend.rs"]
mod backend;
#[path = "conformance/budget.rs"]
mod budget;
#[path = "conformance/differences.rs"]
mod differences;
#[path = "conformance/events.rs"]
mod events;
#[path = "conformance/learned.rs"]
mod learned;
#[path = "conformance/limits.rs"]
mod limits;
#[path = "conformance/permits.rs"]
mod permits;
#[path = "conformance/provider.rs"]
mod provider;
#[path = "conformance/queue.rs"]
mod queue;
#[path = "conformance/reactive.rs"]
mod reactive;
#[path = "conformance/retries.rs"]
mod retries;
#[path = "conformance/steering.rs"]
mod steering;
#[path = "conformance/suite.rs"]
mod suite;
#[path = "conformance/verdicts.rs"]
mod verdicts;

use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use http_body::Body;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tower::{BoxError, Service, ServiceExt as _};
use tower_host_gate::{HostGateLayer, MaxWait, Pacing, Queue, RateLimited, Redis};

use backend::Store;
use suite::{Rule, hold_all};
use support::client::drain;
use support::redis::{Build, Cluster, Sentinel, Standalone};

/// By how much a send may seem too early: a store grants it in whole milliseconds of a clock of its own.
const TOLERANCE: Duration = ms(20);

/// Cooldowns and distances short enough for real time.
const BASE: Duration = ms(150);
const SPACING: Duration = ms(60);
/// For what must not end, or must not be waited for, while a test is running.
const LONG: Duration = Duration::from_secs(120);

// ---------------------------------------------------------------------------------------------------------------------
// The backends
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn in_process() {
    hold_all("in process", Store::InProcess).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn standalone() {
    let server = Standalone::start().await;
    hold_all("standalone", at_url(server.url(), Queue::Delegate)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn standalone_fifo() {
    let server = Standalone::start().await;
    hold_all("standalone, fifo", at_url(server.url(), Queue::Fifo)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn valkey() {
    build(Build::Valkey, Queue::Delegate).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn valkey_fifo() {
    build(Build::Valkey, Queue::Fifo).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_6_2() {
    build(Build::Redis62, Queue::Delegate).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_6_2_fifo() {
    build(Build::Redis62, Queue::Fifo).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinel() {
    at_sentinel("sentinel", Queue::Delegate).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinel_fifo() {
    at_sentinel("sentinel, fifo", Queue::Fifo).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster() {
    at_cluster("cluster", Queue::Delegate).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_fifo() {
    at_cluster("cluster, fifo", Queue::Fifo).await;
}

async fn build(build: Build, queue: Queue) {
    if !build.is_available() {
        return;
    }
    let server = Standalone::build(build).await;
    hold_all(&format!("{build:?}, {queue:?}"), at_url(server.url(), queue)).await;
}

async fn at_sentinel(name: &str, queue: Queue) {
    let servers = Sentinel::start().await;
    let (urls, service) = (servers.sentinel_urls(), servers.service());
    hold_all(name, shared(queue, move || Redis::sentinel(urls.clone(), service).unwrap())).await;
}

async fn at_cluster(name: &str, queue: Queue) {
    let servers = Cluster::start().await;
    let urls = servers.urls();
    hold_all(name, shared(queue, move || Redis::cluster(urls.clone()).unwrap())).await;
}

fn at_url(url: String, queue: Queue) -> Store {
    shared(queue, move || Redis::open(&url).unwrap())
}

fn shared(queue: Queue, open: impl Fn() -> Redis + Send + Sync + 'static) -> Store {
    Store::Shared { open: Arc::new(open), queue }
}

#[test]
fn every_difference_is_one_of_a_rule() {
    for rule in differences::rules() {
        assert!(RULES.iter().any(|known| known.name == rule), "{rule}");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The rules
// ---------------------------------------------------------------------------------------------------------------------

macro_rules! rules {
    ($($module:ident: $($rule:ident)+;)+) => {
        &[$($(Rule {
            name: stringify!($rule),
            hold: |backend| Box::pin(async move { $module::$rule(&backend).await }),
        },)+)+]
    };
}

const RULES: &[Rule] = rules! {
    reactive:
        nothing_is_paced_before_the_first_refusal
        a_refusal_holds_every_sibling
        each_further_refusal_doubles_the_cooldown
        a_cooldown_is_capped
        a_servers_own_wait_is_honoured
        a_servers_own_wait_is_capped
        a_cooldown_never_gets_shorter
        a_burst_of_refusals_is_one_event
        a_late_refusal_lengthens_the_cooldown_and_counts_nothing
        a_refusal_of_something_sent_before_the_last_one_does_not_escalate
        only_a_success_sent_after_the_last_refusal_ends_the_streak
        a_warm_host_is_sent_to_at_a_distance
        who_waits_for_a_cooldown_books_one_send
        warmth_counts_from_the_end_of_the_cooldown
        a_streak_ends_when_the_host_is_cold
        a_cold_host_is_not_paced
        who_waits_looks_again_before_it_sends;
    verdicts:
        a_404_and_a_304_end_a_streak_like_any_success
        an_error_a_500_and_a_408_change_nothing
        a_5xx_that_says_when_is_a_refusal
        a_headerless_403_between_successes_never_escalates
        a_headerless_403_never_holds_longer_than_a_minute
        a_403_that_says_when_is_a_refusal_like_any_other
        retry_after_zero_is_no_hint
        a_past_date_is_no_hint
        milliseconds_win_over_retry_after
        the_longest_of_several_values_counts
        a_date_counts_from_the_responses_own
        nothing_left_of_the_servers_quota_holds_every_sibling
        something_left_of_the_servers_quota_holds_nobody
        what_siblings_have_in_flight_counts_against_what_is_left
        reactive_pacing_minds_no_quota_headers;
    learned:
        a_warm_host_is_served_one_request_at_a_time
        a_learned_gap_survives_success
        a_learned_gap_keeps_every_sibling
        refused_alike_it_is_never_earlier_than_reactive
        a_second_headerless_403_of_one_request_does_not_escalate;
    limits:
        a_delay_from_the_send_keeps_sends_apart
        a_delay_from_completion_counts_from_there
        a_quota_lets_so_many_go_in_each_window
        a_quota_is_a_window_that_rolls
        a_quota_counts_requests_that_fail
        jitter_only_adds
        the_longest_wait_counts_and_not_the_sum
        a_cooldown_and_a_delay_overlap
        a_limit_for_one_host_counts_for_every_sibling;
    budget:
        past_its_budget_a_request_is_refused_at_once
        what_is_refused_has_booked_nothing
        zero_never_waits
        a_request_brings_a_budget_of_its_own
        a_budget_can_be_set_per_host
        at_the_latest_the_budget_ends_the_wait
        one_budget_covers_queue_and_pacing
        a_refusal_turns_away_those_it_puts_past_their_budget
        every_field_of_an_error_after_a_refusal
        a_sibling_is_told_when_to_come_back
        an_error_for_want_of_distance
        an_error_for_want_of_quota
        the_estimate_counts_those_ahead_of_the_caller
        the_estimate_counts_those_ahead_of_the_caller_everywhere
        a_refusal_can_be_a_response;
    queue:
        first_come_first_served
        first_come_first_served_across_siblings
        nobody_starves
        who_gives_up_is_not_in_the_way_of_the_next
        who_gives_up_in_a_cooldown_has_booked_nothing
        the_next_waits_on_when_the_first_gives_up
        a_full_queue_turns_newcomers_away
        every_wait_is_reported_once;
    permits:
        no_more_are_in_flight_than_the_cap
        a_permit_lasts_until_the_body_ends
        a_body_that_is_dropped_or_fails_gives_its_permit_back
        a_permit_can_end_at_the_head
        what_has_no_body_gives_its_permit_back_at_the_head
        a_refusal_gives_its_permit_back_at_the_head
        an_error_passes_and_gives_its_permit_back
        a_panic_gives_its_permit_back
        a_request_dropped_in_flight_gives_its_permit_back
        nothing_is_sent_after_a_hold_it_has_not_waited_for
        an_inner_service_that_is_not_ready_fails_nobody_else;
    retries:
        in_flight_both_attempts_hold_one_permit
        in_flight_the_first_refusal_holds_siblings_at_once
        in_flight_both_refusals_are_one_event
        in_flight_nobody_waits_for_its_own_cooldown
        in_flight_the_second_attempt_counts_towards_the_quota
        a_retry_below_the_gate_counts_what_siblings_have_sent
        the_pacing_is_the_wait_of_a_retry
        all_attempts_share_one_budget
        a_retried_request_goes_before_those_behind_it
        what_was_shed_is_not_retried
        a_headerless_403_is_retried_once;
    steering:
        a_penalty_holds_every_sibling
        a_penalty_only_extends
        a_penalty_is_capped
        clearing_forgets_the_host_for_every_sibling
        clearing_lets_every_waiter_go
        clearing_keeps_what_counts_towards_own_limits
        raising_the_cap_lets_waiters_go
        lowering_the_cap_takes_nothing_away
        a_shorter_delay_lets_waiters_go
        acquire_holds_a_permit_against_every_sibling
        what_a_permit_is_settled_with_holds_every_sibling
        acquire_is_refused_past_its_budget
        try_acquire_admits_at_a_free_host
        a_snapshot_tells_who_waits_and_why
        a_snapshot_tells_of_the_last_refusal;
};

// ---------------------------------------------------------------------------------------------------------------------
// What rules are made of
// ---------------------------------------------------------------------------------------------------------------------

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Reactive pacing in short, with a warmth that no busy machine outlasts and patience for all that a rule makes wait.
fn reactive() -> HostGateLayer {
    learned().pacing(Pacing::Reactive)
}

fn learned() -> HostGateLayer {
    HostGateLayer::new().base_cooldown(BASE).spacing(SPACING).warm_for(LONG).max_wait(secs(40)).max_cooldown(secs(600))
}

/// Sends on a clone, as another task of the program would.
async fn send<S, R>(client: &S, request: Request<()>) -> Result<R, BoxError>
where
    S: Service<Request<()>, Response = R, Error = BoxError> + Clone,
{
    client.clone().oneshot(request).await
}

/// The status, when the body has been read to its end.
async fn status<S, B>(client: &S, request: Request<()>) -> u16
where
    S: Service<Request<()>, Response = Response<B>, Error = BoxError> + Clone,
    B: Body,
{
    let response = send(client, request).await.expect("a response");
    let status = response.status().as_u16();
    let _ = drain(response).await;
    status
}

/// [`status`], in a task of its own.
fn start<S, B>(client: &S, request: Request<()>) -> JoinHandle<u16>
where
    S: Service<Request<()>, Response = Response<B>, Error = BoxError, Future: Send> + Clone + Send + Sync + 'static,
    B: Body<Data: Send, Error: Send> + Send + 'static,
{
    let client = client.clone();
    tokio::spawn(async move { status(&client, request).await })
}

/// What the gate says in place of sending.
async fn shed<S, R>(client: &S, request: Request<()>) -> RateLimited
where
    S: Service<Request<()>, Response = R, Error = BoxError> + Clone,
{
    match send(client, request).await {
        Ok(_) => panic!("it was sent"),
        Err(error) => RateLimited::find(&*error).expect("the gate's own error").clone(),
    }
}

/// The same request with this budget.
fn within(budget: Duration, mut request: Request<()>) -> Request<()> {
    request.extensions_mut().insert(MaxWait(budget));
    request
}

/// Waits for something that happens behind the caller's back.
async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is_so() {
            return;
        }
        sleep(ms(2)).await;
    }
    panic!("never: {what}");
}

#[track_caller]
fn not_before(at: Duration, bound: Duration) {
    assert!(at + TOLERANCE >= bound, "{at:?} is before {bound:?}");
}

/// The first not before `from`, and each a step later.
#[track_caller]
fn in_steps(times: &[Duration], from: Duration, step: Duration) {
    for (place, at) in (0..).zip(times) {
        assert!(*at + TOLERANCE >= from + step * place, "{place} of {times:?} is too early, from {from:?} by {step:?}");
    }
}

/// So much of it is left, no more than that much time after it began.
#[track_caller]
fn is_left(left: Duration, of: Duration, since_it_began: Duration) {
    let is_so = left <= of + TOLERANCE && left + since_it_began + TOLERANCE >= of;
    assert!(is_so, "{left:?} are left of {of:?}, {since_it_began:?} after they began");
}
