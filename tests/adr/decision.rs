//! The Decision section: gate mechanism, cooldown value, what the gate wraps, and how long it blocks.

use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use http::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep, timeout};
use tower::{BoxError, Layer as _, Service};
use tower_host_gate::{HostGate, Reason, ResponseBody};

use crate::support::reactive;
use crate::support::script::{Reply, Script, ScriptBody};
use crate::{Answer, FEED, burst, millis, must_not_stand_still, secs, send, shed, spawn, status};

// --- one gate ---------------------------------------------------------------------------------------------------------

/// > process-wide per-host request gate [...] builds **once** and shares across all tool calls
// Fails when: `HostGateLayer::layer` or a clone of layer or service makes a gate of its own.
#[tokio::test(start_paused = true)]
async fn one_gate_is_shared_by_all_services_and_clones_of_a_layer() {
    let script = Script::list([Reply::status(429)]);
    let layer = reactive();
    let first = layer.layer(script.clone());
    let second = layer.clone().layer(script.clone());

    status(&first, FEED).await;
    status(&second.clone(), FEED).await;

    assert_eq!(script.times(), [secs(0), secs(2)]);
}

/// > Keyed on authority (`host:port`)
// Fails when: the default keying drops the port (`By::Host`), or looks at the path.
#[tokio::test(start_paused = true)]
async fn keyed_on_authority() {
    let script = Script::list([Reply::status(429)]);
    let client = reactive().layer(script.clone());
    status(&client, "http://feeds.example:8080/a").await;

    let tasks = ["http://feeds.example:8080/b", "http://feeds.example:9090/a", "http://other.example:8080/a"]
        .map(|uri| spawn(&client, uri));
    for task in tasks {
        task.await.unwrap().unwrap();
    }

    assert_eq!(script.times_of("feeds.example:8080"), [secs(0), secs(2)], "same host and port, another path: held");
    assert_eq!(script.times_of("feeds.example:9090"), [secs(0)], "another port is another host");
    assert_eq!(script.times_of("other.example:8080"), [secs(0)]);
}

/// > Distinct hosts stay fully parallel — a cooldown on one host never slows another (per-host isolation).
// Fails when: the permit or the cooldown is the gate's instead of the slot's.
#[tokio::test(start_paused = true)]
async fn distinct_hosts_stay_fully_parallel() {
    let script = Script::new(|sent| match sent.host.as_str() {
        "cooling.example" => Reply::status(429).header("retry-after", "60"),
        _ => Reply::ok().after(secs(3)),
    });
    let client = reactive().layer(script.clone());
    status(&client, "http://cooling.example/").await;
    let waiting = spawn(&client, "http://cooling.example/");

    let others: Vec<_> = (0..50).map(|n| spawn(&client, &format!("http://host-{n}.example/"))).collect();
    sleep(secs(1)).await;

    assert_eq!(script.sent().len(), 1 + 50, "every other host was asked at once");
    assert!(script.times().iter().all(Duration::is_zero));
    assert_eq!(script.peak(), 50, "and all of them are in flight together");
    for other in others {
        other.await.unwrap().unwrap();
    }
    assert!(!waiting.is_finished());
}

/// > must never hold the slot-map lock across an `.await`
///
/// The one thread of a current-thread runtime that meets such a lock stands still. Of 64 hosts many share a lock, however
/// it is split.
// Fails when: the guard of `Waiter::step` outlives its poll (`mem::forget(shard)` before `Step::Sleep`).
#[test]
fn risk_no_lock_is_held_while_a_request_waits() {
    must_not_stand_still(async {
        let script = Script::new(|sent| Reply::status(if sent.host.starts_with("cooling") { 429 } else { 200 }));
        let layer = reactive();
        let client = layer.layer(script.clone());
        let cooling: Vec<_> = (0..64).map(|n| format!("http://cooling-{n}.example/")).collect();
        for uri in &cooling {
            status(&client, uri).await;
        }
        let waiting: Vec<_> = cooling.iter().map(|uri| spawn(&client, uri)).collect();
        tokio::task::yield_now().await;

        for n in 0..64 {
            status(&client, &format!("http://free-{n}.example/")).await;
        }
        let hosts = layer.hosts();
        let state = hosts.get("cooling-0.example:80").unwrap();

        assert!(script.times().iter().all(Duration::is_zero), "no other host waited");
        assert_eq!((state.queued, state.cooldown), (1, secs(2)), "the cooling host itself can be looked at");
        assert_eq!(hosts.snapshot().len(), 64);
        for task in waiting {
            task.await.unwrap().unwrap();
        }
    });
}

// --- 1. the permit ----------------------------------------------------------------------------------------------------

/// > Each host slot holds a [...] concurrency cap
// Fails when: `Slot::admit` does not compare `in_flight` with the concurrency.
#[tokio::test(start_paused = true)]
async fn a_request_acquires_the_per_host_permit() {
    let script = Script::always(Reply::ok().after(secs(3)));
    let client = reactive().layer(script.clone());

    burst(&client, 3).await;

    assert_eq!(script.times(), [secs(0), secs(3), secs(6)]);
}

/// > a cancelled/timed-out call releases it via RAII — a cancel can never wedge a host
// Fails when: `Drop for Permit` does not give the permit back, or does not wake the next waiter.
#[tokio::test(start_paused = true)]
async fn a_timed_out_call_releases_its_permit_to_the_next_one_waiting() {
    let script = Script::list([Reply::hang()]);
    let layer = reactive();
    let client = layer.layer(script.clone());

    let (timed_out, next) = tokio::join!(timeout(secs(5), send(&client, FEED)), status(&client, FEED));

    assert!(timed_out.is_err());
    assert_eq!(next, StatusCode::OK);
    assert_eq!(script.times(), [secs(0), secs(5)]);
    assert_eq!(layer.hosts().get("feeds.example:80"), None, "nothing is left behind");
}

/// > a cancel can never wedge a host
// Fails when: a cancelled waiter stays in the queue (`Drop for Waiter`), or books a send before it is made.
#[tokio::test(start_paused = true)]
async fn a_call_cancelled_while_it_waits_is_in_nobodys_way() {
    let script = Script::list([Reply::status(429)]);
    let layer = reactive();
    let client = layer.layer(script.clone());
    status(&client, FEED).await;

    let cancelled: Vec<_> = (0..5).map(|_| spawn(&client, FEED)).collect();
    let last = spawn(&client, FEED);
    sleep(secs(1)).await;
    assert_eq!(layer.hosts().get("feeds.example:80").unwrap().queued, 6);
    cancelled.iter().for_each(|task| task.abort());
    last.await.unwrap().unwrap();

    assert_eq!(script.times(), [secs(0), secs(2)], "the end of the cooldown, not five spacings later");
}

// --- 2. the wait ------------------------------------------------------------------------------------------------------

/// > Computes `wait = max(next_allowed − now, 0)`. If `wait ≤ MAX_GATE_WAIT`, it sleeps `wait` then sends
// Fails when: the wait is a duration counted from the request instead of a deadline, or the comparison is `<`.
#[tokio::test(start_paused = true)]
async fn a_wait_within_max_gate_wait_is_slept_and_then_sent() {
    for (asked_at, sent_at) in [(0, 60), (20, 60), (59, 60), (60, 60), (75, 75)] {
        let script = Script::list([Reply::status(429).header("retry-after", "60")]);
        let client = reactive().layer(script.clone());
        status(&client, FEED).await;

        sleep(secs(asked_at)).await;
        status(&client, FEED).await;

        assert_eq!(script.times(), [secs(0), secs(sent_at)], "asked at {asked_at} s");
    }
}

/// The same for siblings whose waits all end with their budgets: whoever is not first has until then, not until before.
// Fails when: a waiter that wakes at its deadline is shed before it looks whether it may go.
#[tokio::test(start_paused = true)]
async fn siblings_that_all_wait_for_exactly_max_gate_wait_are_all_sent() {
    for concurrency in [1, 3] {
        let script = Script::list([Reply::status(429).header("retry-after", "60")]);
        let client = reactive().concurrency(concurrency).spacing(secs(0)).layer(script.clone());
        status(&client, FEED).await;

        burst(&client, 10).await.into_iter().for_each(|answer| assert!(answer.is_ok()));

        assert_eq!(script.times()[1..], [secs(60); 10]);
    }
}

/// > if `wait > MAX_GATE_WAIT`, it **fails fast** with a structured `RATE_LIMITED` error carrying `retry_after` rather
/// > than blocking unboundedly
// Fails when: `Waiter::refuse` waits for the deadline instead of comparing it with the estimate.
#[tokio::test(start_paused = true)]
async fn a_wait_past_max_gate_wait_fails_fast() {
    let script = Script::list([Reply::status(429).header("retry-after", "60")]);
    let client = reactive().max_wait(millis(59_999)).layer(script.clone());
    status(&client, FEED).await;
    let asked = Instant::now();

    let limited = shed(send(&client, FEED).await);

    assert_eq!(asked.elapsed(), Duration::ZERO, "at once");
    assert_eq!(limited.code(), "RATE_LIMITED");
    assert_eq!((limited.retry_after(), limited.reason()), (secs(60), Reason::Cooldown));
    assert_eq!(script.times().len(), 1, "and it was not sent");
}

// --- 3. sticky spacing ------------------------------------------------------------------------------------------------

/// > While a host is **warm** (recently throttled), reserves `next_allowed = now + STICKY_SPACING` for the following
/// > sibling
// Fails when: `Reactive::sent` does not book, or is not called before the request goes out.
#[tokio::test(start_paused = true)]
async fn a_warm_host_is_sent_to_one_spacing_apart() {
    // The cap is not what keeps them apart: eight could be in flight.
    let script = Script::list([Reply::status(429)]);
    let client = reactive().concurrency(8).layer(script.clone());
    status(&client, FEED).await;

    burst(&client, 4).await;

    assert_eq!(script.times(), [secs(0), secs(2), secs(3), secs(4), secs(5)]);
}

/// > proactive spacing that costs the happy path **nothing** (a host that has never 429'd is never warm)
// Fails when: a host is spaced before it has refused anything.
#[tokio::test(start_paused = true)]
async fn a_host_that_has_never_refused_is_not_spaced() {
    let script = Script::always(Reply::ok());
    let layer = reactive();
    let client = layer.layer(script.clone());

    burst(&client, 100).await;

    assert_eq!(script.times(), [Duration::ZERO; 100]);
    assert_eq!(layer.hosts().snapshot(), [], "and nothing is remembered of it");
}

// --- 4. what a refusal does -------------------------------------------------------------------------------------------

/// > On a `403`/`429` response, sets the sibling cooldown [...] and marks the host warm
// Fails when: the standard verdict takes one of the two for a success, or the hold leaves the host cold.
#[tokio::test(start_paused = true)]
async fn a_403_and_a_429_cool_the_host_down_and_mark_it_warm() {
    for refusal in [403, 429] {
        let script = Script::list([Reply::status(refusal)]);
        let layer = reactive();
        let client = layer.layer(script.clone());

        assert_eq!(status(&client, FEED).await, refusal, "the caller gets the server's own answer");
        let state = layer.hosts().get("feeds.example:80").unwrap();
        assert_eq!((state.cooldown, state.warm), (secs(2), secs(122)));
        burst(&client, 2).await;

        assert_eq!(script.times(), [secs(0), secs(2), secs(3)]);
    }
}

/// > `next_allowed = max(next_allowed, now + cooldown)`
// Fails when: `Reactive::hold` assigns instead of taking the maximum.
#[tokio::test(start_paused = true)]
async fn the_next_allowed_instant_only_grows() {
    for (first, second, sent_at) in [("30", "5", millis(30_100)), ("5", "30", millis(30_200))] {
        let script = Script::list([
            Reply::status(429).header("retry-after", first).after(millis(100)),
            Reply::status(429).header("retry-after", second).after(millis(200)),
        ]);
        let client = reactive().concurrency(2).layer(script.clone());

        burst(&client, 2).await;
        status(&client, FEED).await;

        assert_eq!(script.times(), [secs(0), secs(0), sent_at], "{first} s, then {second} s");
    }
}

// --- the cooldown's value ---------------------------------------------------------------------------------------------

/// When the second request goes out after this refusal, with the settings of the ADR.
async fn next_send(refusal: Reply) -> Duration {
    let script = Script::list([refusal]);
    let client = reactive().layer(script.clone());
    status(&client, FEED).await;
    status(&client, FEED).await;
    script.times()[1]
}

/// > When the server sent a `Retry-After` (delta-seconds *or* HTTP-date), the cooldown is that value [...] honored as-is
/// > below that — no lower floor
// Fails when: the hold is `max(hint, base_cooldown)` or `max(hint, spacing)`, or dates are not read.
#[tokio::test(start_paused = true)]
async fn a_retry_after_is_honoured_as_is_without_a_lower_floor() {
    let now = SystemTime::now();
    let date = |time| httpdate::fmt_http_date(time);
    for wait in [1, 2, 17, 59] {
        let delta = Reply::status(429).header("retry-after", &wait.to_string());
        assert_eq!(next_send(delta).await, secs(wait));

        let dated = Reply::status(429).header("date", &date(now)).header("retry-after", &date(now + secs(wait)));
        assert_eq!(next_send(dated).await, secs(wait));
    }
}

/// > capped at `HOST_MAX_COOLDOWN` [...] so a skewed date can never produce a wrong sleep
// Fails when: `Reactive::throttled` does not cap the hint.
#[tokio::test(start_paused = true)]
async fn a_retry_after_is_capped_at_the_longest_cooldown() {
    for hint in ["60", "61", "3600", "999999999", "Fri, 31 Dec 9999 23:59:59 GMT"] {
        let refusal = Reply::status(429).header("retry-after", hint);
        assert_eq!(next_send(refusal).await, secs(60), "{hint}");
    }
}

/// > a past/negative date parses to `None`
// Fails when: a past date is a hint of zero instead of none.
#[tokio::test(start_paused = true)]
async fn a_past_date_is_no_retry_after() {
    let refusal = Reply::status(429).header("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT");
    assert_eq!(next_send(refusal).await, secs(2));
}

/// > When it sent none, the cooldown **escalates** with consecutive throttles on that host (`HOST_BASE_COOLDOWN ·
/// > 2^(n−1)`, capped at `HOST_MAX_COOLDOWN`)
// Fails when: the cooldown is fixed, grows by another factor, begins at another power, or is not capped.
#[tokio::test(start_paused = true)]
async fn a_headerless_cooldown_escalates_up_to_the_cap() {
    let script = Script::always(Reply::status(429));
    let client = reactive().layer(script.clone());

    for _ in 0..9 {
        status(&client, FEED).await;
    }

    let gaps: Vec<_> = script.times().windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert_eq!(gaps, [2, 4, 8, 16, 32, 60, 60, 60]);
}

/// > and resets on the next success
// Fails when: `Permit::settle` does not report a success, or `Reactive::succeeded` keeps the streak.
#[tokio::test(start_paused = true)]
async fn the_next_success_resets_the_escalation() {
    let refused = || Reply::status(429);
    let script = Script::list([refused(), refused(), refused(), Reply::ok(), refused()]);
    let client = reactive().layer(script.clone());

    for _ in 0..6 {
        status(&client, FEED).await;
    }

    // Cooldowns of 2, 4 and 8 s; a success at 14, a spacing of 1 s behind it, and 2 s again after the refusal at 15.
    assert_eq!(script.times(), [0, 2, 6, 14, 15, 17].map(secs));
}

// --- what is wrapped --------------------------------------------------------------------------------------------------

/// > `304` short-circuits [...] gain zero latency
///
/// And a 304 is an answer: a success like any other.
// Fails when: the standard verdict takes a 304 for neutral, or the gate touches its head.
#[tokio::test(start_paused = true)]
async fn a_304_passes_through_untouched_and_is_a_success() {
    let not_modified = || Reply::status(304).header("etag", "\"v1\"").header("retry-after", "30");
    let script = Script::list([Reply::status(429), Reply::status(429), not_modified(), not_modified()]);
    let layer = reactive();
    let client = layer.layer(script.clone());
    for _ in 0..2 {
        status(&client, FEED).await;
    }
    assert_eq!(layer.hosts().get("feeds.example:80").unwrap().streak, 2);

    let response = send(&client, FEED).await.unwrap();

    assert_eq!(response.status(), StatusCode::NOT_MODIFIED);
    assert_eq!(response.headers()["etag"], "\"v1\"");
    assert!(response.extensions().is_empty());
    let state = layer.hosts().get("feeds.example:80").unwrap();
    assert_eq!((state.streak, state.in_flight, state.cooldown), (0, 0, secs(0)), "its permit is back, the streak over");

    // To a host in good standing.
    let script = Script::always(not_modified());
    let client = reactive().layer(script.clone());
    burst(&client, 20).await;
    assert_eq!(script.times(), [Duration::ZERO; 20]);
}

/// > The gate wraps **only the real network send** — cache hits [...] return before it and gain zero latency
// Fails when: `HostGate::poll_ready` waits, for the cooldown or for the inner service: the cache asks it first.
#[tokio::test(start_paused = true)]
async fn a_cache_outside_the_gate_answers_while_the_host_cools_down() {
    let script = Script::always(Reply::status(429).header("retry-after", "60"));
    let layer = reactive();
    let client = Cache { gate: layer.layer(script.clone()) };
    status(&client, FEED).await;
    let waiting = spawn(&client, FEED);
    tokio::task::yield_now().await;
    script.hold();

    let asked = Instant::now();
    assert_eq!(status(&client, "http://feeds.example/cached").await, StatusCode::OK);

    assert_eq!(asked.elapsed(), Duration::ZERO);
    assert_eq!(script.times().len(), 1);
    let state = layer.hosts().get("feeds.example:80").unwrap();
    assert_eq!((state.queued, state.in_flight), (1, 0), "the hit took no place in the queue and no permit");
    waiting.abort();
}

/// Has a fresh copy of everything under `/cached`.
#[derive(Clone)]
struct Cache {
    gate: HostGate<Script>,
}

impl Service<Request<()>> for Cache {
    type Response = Response<ResponseBody<ScriptBody>>;
    type Error = BoxError;
    type Future = futures_util::future::BoxFuture<'static, Answer>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Service::<Request<()>>::poll_ready(&mut self.gate, cx)
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        if request.uri().path() == "/cached" {
            return Box::pin(std::future::ready(Ok(Response::default())));
        }
        Box::pin(self.gate.call(request))
    }
}

// --- a long throttle --------------------------------------------------------------------------------------------------

/// > a gated call **blocks** up to `MAX_GATE_WAIT` (default 60 s) waiting the cooldown out, and only sheds to a
/// > `RATE_LIMITED` error past that hard bound
// Fails when: a wait that can be slept is shed, or a waiter does not look at its deadline while it sleeps.
#[tokio::test(start_paused = true)]
async fn the_gate_absorbs_a_wait_up_to_the_bound_and_sheds_at_it() {
    // A host that refuses everything: the cooldowns of 2, 4, 8 and 16 s are waited out.
    let script = Script::always(Reply::status(429));
    let client = reactive().layer(script.clone());
    for _ in 0..5 {
        assert_eq!(status(&client, FEED).await, 429, "the server's answer, not the gate's");
    }
    assert_eq!(script.times(), [0, 2, 6, 14, 30].map(secs));

    // A host that answers nobody: no estimate can tell how long that takes, the bound still holds.
    let script = Script::always(Reply::hang());
    let client = reactive().layer(script.clone());
    let hanging = spawn(&client, FEED);
    tokio::task::yield_now().await;
    let asked = Instant::now();
    let limited = shed(send(&client, FEED).await);
    assert_eq!((asked.elapsed(), limited.reason()), (secs(60), Reason::InFlight));
    hanging.abort();
}
