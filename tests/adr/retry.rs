//! ADR-0015's in-flight retry under the gate, and the two risks that come with it: the two caps conflated, and a wait that
//! is waited twice.

use std::time::Duration;

use http::{Method, Request, Response};
use tokio::time::{Sleep, sleep};
use tower::retry::{Policy, Retry, RetryLayer};
use tower::{Layer as _, ServiceExt as _};
use tower_host_gate::retry::GateRetry;
use tower_host_gate::{HostGate, HostGateLayer, Reason};

use crate::support::reactive;
use crate::support::script::{Reply, Script};
use crate::{FEED, millis, secs, send, shed, spawn, status};

/// The gate, and inside of it the retry that belongs to it.
fn with_in_flight_retry(
    layer: &HostGateLayer,
    script: &Script,
) -> HostGate<Retry<tower_host_gate::retry::InFlightRetry, Script>> {
    layer.layer(RetryLayer::new(layer.in_flight_retry()).layer(script.clone()))
}

fn refused(hint: &str) -> Reply {
    Reply::status(429).header("retry-after", hint)
}

// --- the in-flight retry ----------------------------------------------------------------------------------------------

/// > the retry budget stays exactly two attempts
// Fails when: `InFlightRetry::retry` does not look at `resent`, or the second refusal is an event of its own.
#[tokio::test(start_paused = true)]
async fn exactly_two_attempts_and_one_event() {
    let script = Script::always(Reply::status(429));
    let layer = reactive();
    let client = with_in_flight_retry(&layer, &script);

    assert_eq!(status(&client, FEED).await, 429, "the second refusal is the answer");

    assert_eq!(script.times(), [secs(0), millis(500)]);
    let state = layer.hosts().get("feeds.example:80").unwrap();
    assert_eq!(state.streak, 1, "both refusals of one request are one event");
}

/// > keeps ADR-0015's single retry unchanged
///
/// Which waits for `min(hint, 5 s)`, or for 500 ms.
// Fails when: the delay is not the hint, not capped at 5 s, or another one without a hint.
#[tokio::test(start_paused = true)]
async fn the_retry_waits_for_the_hint_up_to_five_seconds_or_half_a_second() {
    let cases = [
        (Reply::status(429), millis(500)),
        (Reply::status(403), millis(500)),
        (refused("0"), millis(500)),
        (refused("0.2"), millis(200)),
        (refused("3"), secs(3)),
        (refused("5"), secs(5)),
        (refused("6"), secs(5)),
        (refused("86400"), secs(5)),
    ];
    for (refusal, resent_at) in cases {
        let script = Script::list([refusal.clone()]);
        let client = with_in_flight_retry(&reactive(), &script);
        assert_eq!(status(&client, FEED).await, 200);
        assert_eq!(script.times(), [secs(0), resent_at], "{refusal:?}");
    }
}

/// ADR-0015 repeats what is safe to repeat: a refused send of any method, a 403 only of a safe one.
// Fails when: `may_repeat` says yes to a POST's 403, or no to its 429.
#[tokio::test(start_paused = true)]
async fn a_403_is_repeated_for_safe_methods_only() {
    for (method, refusal, attempts) in [(Method::POST, 403, 1), (Method::POST, 429, 2), (Method::HEAD, 403, 2)] {
        let script = Script::list([Reply::status(refusal)]);
        let client = with_in_flight_retry(&reactive(), &script);
        let request = Request::builder().method(method.clone()).uri(FEED).body(()).unwrap();
        client.oneshot(request).await.unwrap();
        assert_eq!(script.sent().len(), attempts, "{method} {refusal}");
    }
}

/// > and holds its permit through it
// Fails when: the permit goes back at the first refusal (a sibling would go at 2 s, when the cooldown ends).
#[tokio::test(start_paused = true)]
async fn the_permit_is_held_through_the_retry() {
    let script = Script::list([Reply::status(429), Reply::ok().after(secs(10))]);
    let layer = reactive();
    let client = with_in_flight_retry(&layer, &script);

    let retrying = spawn(&client, FEED);
    let sibling = spawn(&client, FEED);
    for at in [millis(250), millis(250), secs(5)] {
        sleep(at).await;
        let state = layer.hosts().get("feeds.example:80").unwrap();
        assert_eq!((state.in_flight, state.queued), (1, 1), "during the wait and during the second attempt");
    }
    assert_eq!(retrying.await.unwrap().unwrap().status(), 200);
    sibling.await.unwrap().unwrap();

    assert_eq!(script.times(), [secs(0), millis(500), millis(10_500)]);
}

/// > so it never waits on the cooldown *it* just set (no double-wait)
// Fails when: the second attempt asks the gate again, or the first refusal is not reported before it.
#[tokio::test(start_paused = true)]
async fn the_retry_never_waits_on_the_cooldown_it_has_just_set() {
    let script = Script::list([refused("40")]);
    let layer = reactive();
    let client = with_in_flight_retry(&layer, &script);

    let retrying = spawn(&client, FEED);
    sleep(secs(1)).await;
    assert_eq!(layer.hosts().get("feeds.example:80").unwrap().cooldown, secs(39), "the cooldown is set already");
    assert_eq!(retrying.await.unwrap().unwrap().status(), 200);
    assert_eq!(script.times(), [secs(0), secs(5)], "and the request that set it went past it");

    // A sibling waits the whole of it.
    status(&client, FEED).await;
    assert_eq!(script.times()[2], secs(40));
}

// --- risk: the two caps conflated -------------------------------------------------------------------------------------

/// > the two caps are deliberately **distinct**: the in-flight `RETRY_MAX_DELAY` stays 5 s [...], while the new
/// > `HOST_MAX_COOLDOWN`/`MAX_GATE_WAIT` govern the sibling-facing wait
// Fails when: `InFlightRetry` takes its cap from `max_cooldown` (the retry at 60 s), or the cooldown its cap from the
// retry (the sibling at 5 s).
#[tokio::test(start_paused = true)]
async fn risk_the_two_caps_are_distinct() {
    let script = Script::list([refused("3600")]);
    let client = with_in_flight_retry(&reactive(), &script);

    assert_eq!(status(&client, FEED).await, 200);
    status(&client, FEED).await;

    assert_eq!(script.times(), [secs(0), secs(5), secs(60)], "the retry's cap, then the cooldown's");
}

/// The same, for each cap moved on its own.
// Fails when: one of the two follows the other.
#[tokio::test(start_paused = true)]
async fn risk_either_cap_can_be_moved_without_the_other() {
    for (max_cooldown, max_delay) in [(secs(10), secs(5)), (secs(300), secs(5)), (secs(60), secs(2))] {
        let script = Script::list([refused("3600")]);
        let layer = reactive().max_cooldown(max_cooldown).max_wait(secs(600));
        let retry = layer.in_flight_retry().max_delay(max_delay);
        let client = layer.layer(RetryLayer::new(retry).layer(script.clone()));

        assert_eq!(status(&client, FEED).await, 200);
        status(&client, FEED).await;

        assert_eq!(script.times(), [secs(0), max_delay, max_cooldown]);
    }
}

// --- risk: a wait that is waited twice --------------------------------------------------------------------------------

/// Sleeps for `Retry-After` itself, as retry layers that know nothing of a gate do.
#[derive(Clone)]
struct SleepsItself;

impl<ResB, E> Policy<Request<()>, Response<ResB>, E> for SleepsItself {
    type Future = Sleep;

    fn retry(&mut self, _: &mut Request<()>, result: &mut Result<Response<ResB>, E>) -> Option<Sleep> {
        let hint = result.as_ref().ok()?.headers().get("retry-after")?;
        Some(sleep(Duration::from_secs(hint.to_str().ok()?.parse().ok()?)))
    }

    fn clone_request(&mut self, request: &Request<()>) -> Option<Request<()>> {
        Some(request.clone())
    }
}

/// > The two waits are one budget, never stacked
///
/// CASES C12: the gate's cooldown of 30 s, plus a retry layer outside that sleeps as long.
// Fails when: the hold of a slot is a duration that begins with the next request instead of a deadline (second attempt at
// 60 s).
#[tokio::test(start_paused = true)]
async fn c12_risk_a_retry_layer_that_sleeps_itself_and_the_gate_do_not_wait_twice() {
    let script = Script::list([refused("30")]);
    let client = RetryLayer::new(SleepsItself).layer(reactive().layer(script.clone()));

    assert_eq!(status(&client, FEED).await, 200);

    assert_eq!(script.times(), [secs(0), secs(30)]);
}

/// The crate's own retry outside the gate has no sleep of its own: the gate's cooldown is the wait, its cap included.
// Fails when: `GateRetry` sleeps for `Retry-After` itself (second attempt after the hour), or the hold of a slot is a
// duration, as above.
#[tokio::test(start_paused = true)]
async fn c12_risk_the_gates_own_retry_outside_waits_once() {
    for (hint, resent_at) in [("30", secs(30)), ("3600", secs(60))] {
        let script = Script::list([refused(hint)]);
        let client = RetryLayer::new(GateRetry::new(2)).layer(reactive().layer(script.clone()));

        assert_eq!(status(&client, FEED).await, 200);

        assert_eq!(script.times(), [secs(0), resent_at]);
    }
}

/// > The two waits are one budget
// Fails when: `Terms::left` forgets what the attempts before have waited, or `GateRetry` sleeps instead of the gate (a
// third attempt at 80 s).
#[tokio::test(start_paused = true)]
async fn risk_two_waits_of_one_request_share_one_budget() {
    let script = Script::always(refused("40"));
    let client = RetryLayer::new(GateRetry::new(5)).layer(reactive().layer(script.clone()));
    let began = tokio::time::Instant::now();

    let limited = shed(send(&client, FEED).await);

    assert_eq!(script.times(), [secs(0), secs(40)]);
    assert_eq!(began.elapsed(), secs(40), "shed at once: 20 s of the budget are left, and 40 s would be needed");
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, secs(40)));
}
