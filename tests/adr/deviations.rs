//! Where the gate differs from the ADR's text on purpose. The quotes (`>`) are the deviations.

use std::time::SystemTime;

use tokio::time::{Instant, sleep};
use tower::Layer as _;
use tower_host_gate::Reason;

use crate::support::reactive;
use crate::support::script::{Reply, Script};
use crate::{FEED, burst, millis, must_not_stand_still, secs, send, shed, spawn, status};

/// Whole seconds between the sends.
fn gaps(script: &Script) -> Vec<u64> {
    script.times().windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect()
}

// --- soft 403 ---------------------------------------------------------------------------------------------------------

/// > soft 403: one forbidden URL must not escalate a host; alone between successes it never passes level 1
// Fails when: a success does not end a streak of soft refusals, or they are counted apart.
#[tokio::test(start_paused = true)]
async fn one_forbidden_url_between_successes_never_passes_level_1() {
    let script = Script::new(|sent| Reply::status(if sent.path == "/forbidden" { 403 } else { 200 }));
    let layer = reactive();
    let client = layer.layer(script.clone());

    for _ in 0..10 {
        assert_eq!(status(&client, "http://feeds.example/forbidden").await, 403);
        let state = layer.hosts().get("feeds.example:80").unwrap();
        assert_eq!((state.streak, state.cooldown), (1, secs(2)));
        assert_eq!(status(&client, FEED).await, 200);
    }
}

/// > it never holds longer than 60 s
///
/// Whatever `max_cooldown` says, which a 429 without a header does reach.
// Fails when: `Reactive::throttled` does not cap a soft refusal on its own.
#[tokio::test(start_paused = true)]
async fn a_headerless_403_never_holds_longer_than_60_s() {
    for (status_code, expected) in [(403, [2, 4, 8, 16, 32, 60, 60, 60]), (429, [2, 4, 8, 16, 32, 64, 128, 256])] {
        let script = Script::always(Reply::status(status_code));
        let client = reactive().max_cooldown(secs(900)).max_wait(secs(900)).layer(script.clone());
        for _ in 0..9 {
            status(&client, FEED).await;
        }
        assert_eq!(gaps(&script), expected, "{status_code}");
    }
}

/// A 403 that says when to come back is about us, not about the URL: not soft.
// Fails when: every 403 is soft.
#[tokio::test(start_paused = true)]
async fn a_403_with_a_hint_is_held_as_long_as_it_asks() {
    let script = Script::list([Reply::status(403).header("retry-after", "300")]);
    let client = reactive().max_cooldown(secs(900)).max_wait(secs(900)).layer(script.clone());
    status(&client, FEED).await;
    status(&client, FEED).await;
    assert_eq!(script.times(), [secs(0), secs(300)]);
}

// --- 5xx --------------------------------------------------------------------------------------------------------------

/// > 5xx with a hint counts
// Fails when: the standard verdict takes 5xx for neutral altogether, or for 503 alone.
#[tokio::test(start_paused = true)]
async fn a_5xx_with_a_hint_is_a_throttle() {
    for code in [500, 502, 503, 504, 529] {
        let script = Script::list([Reply::status(code).header("retry-after", "7")]);
        let layer = reactive();
        let client = layer.layer(script.clone());
        status(&client, FEED).await;
        assert_eq!(layer.hosts().get("feeds.example:80").unwrap().streak, 1, "{code}");
        burst(&client, 2).await;
        assert_eq!(script.times(), [secs(0), secs(7), secs(8)], "{code}: held, then warm");
    }
}

/// And one without is neutral: nothing is learnt, and nothing reset. A hint that names no future instant is none.
// Fails when: a 5xx without a hint throttles, or counts as a success (the last gap would be 2 s).
#[tokio::test(start_paused = true)]
async fn a_5xx_without_a_hint_is_neutral() {
    for neutral in [Reply::status(500), Reply::status(503), Reply::status(503).header("retry-after", "0")] {
        let script = Script::always(neutral.clone());
        let layer = reactive();
        let client = layer.layer(script.clone());
        burst(&client, 5).await;
        assert_eq!(script.times(), [secs(0); 5]);
        assert_eq!(layer.hosts().snapshot(), []);

        let script = Script::list([Reply::status(429), neutral, Reply::status(429)]);
        let client = reactive().layer(script.clone());
        for _ in 0..4 {
            status(&client, FEED).await;
        }
        // 2 s after the refusal, a spacing after the neutral answer, and level 2 after the second refusal.
        assert_eq!(script.times(), [0, 2, 3, 7].map(secs));
    }
}

// --- the hint of zero -------------------------------------------------------------------------------------------------

/// > `Retry-After: 0` is no hint
// Fails when: a hint of zero is honoured as is (every gap would be the spacing, or nothing).
#[tokio::test(start_paused = true)]
async fn a_retry_after_of_zero_escalates() {
    let script = Script::always(Reply::status(429).header("retry-after", "0"));
    let client = reactive().layer(script.clone());
    for _ in 0..6 {
        status(&client, FEED).await;
    }
    assert_eq!(gaps(&script), [2, 4, 8, 16, 32]);
}

// --- which success resets ---------------------------------------------------------------------------------------------

/// > only a later success resets
///
/// An answer to a request that was under way before the refusal says nothing of what the host tolerates now.
// Fails when: `Reactive::succeeded` does not compare with `last_throttle`.
#[tokio::test(start_paused = true)]
async fn a_success_sent_before_the_last_throttle_does_not_reset() {
    // The first one is sent to a host of which nothing is recorded, the second one to a warm host.
    let script =
        Script::list([Reply::ok().after(secs(1)), Reply::status(429), Reply::ok().after(secs(5)), Reply::status(429)]);
    let layer = reactive().concurrency(2);
    let client = layer.layer(script.clone());
    let streak = || layer.hosts().get("feeds.example:80").unwrap().streak;

    let slow = spawn(&client, FEED);
    tokio::task::yield_now().await;
    status(&client, FEED).await;
    slow.await.unwrap().unwrap();
    assert_eq!(streak(), 1, "sent at 0 and answered at 1 s, after the refusal at 0");

    let slow = spawn(&client, FEED);
    sleep(millis(1_500)).await;
    status(&client, FEED).await;
    assert_eq!(streak(), 2, "sent at 2 s and still under way while another one is refused at 3 s");
    slow.await.unwrap().unwrap();
    assert_eq!(streak(), 2, "nor does it reset anything when it is answered at 7 s");

    status(&client, FEED).await;
    assert_eq!(streak(), 0, "a later one does");
    assert_eq!(script.times(), [0, 0, 2, 3, 7].map(secs));
}

// --- the permit and the body ------------------------------------------------------------------------------------------

/// > the permit lasts to the body's end
// Fails when: `pass` drops the permit at the head (the sibling would go at 0 s).
#[tokio::test(start_paused = true)]
async fn the_permit_lasts_to_the_end_of_the_body() {
    use http_body_util::BodyExt as _;

    let script = Script::list([Reply::ok().body("begin").open_for(secs(10)).body("end")]);
    let client = reactive().layer(script.clone());
    let response = send(&client, FEED).await.unwrap();
    let sibling = spawn(&client, FEED);

    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "beginend");
    sibling.await.unwrap().unwrap();

    assert_eq!(script.times(), [secs(0), secs(10)]);
    assert_eq!(script.peak(), 1, "as a server counts it: until the body is sent");
}

// --- one budget -------------------------------------------------------------------------------------------------------

/// > queue time counts against `max_wait` (else 20 siblings behind 60 s wait 20 minutes, and the ADR's fail-fast can never
/// > fire)
// Fails when: the budget begins when the permit is there instead of when the request is made, or the estimate ignores
// those in front.
#[tokio::test(start_paused = true)]
async fn queue_time_counts_against_max_wait() {
    let script = Script::list([Reply::status(429).header("retry-after", "60"), Reply::ok().after(secs(60))]);
    let client = reactive().layer(script.clone());
    status(&client, FEED).await;
    let began = Instant::now();

    let siblings: Vec<_> = (0..20).map(|_| spawn(&client, FEED)).collect();
    tokio::task::yield_now().await;

    let mut siblings = siblings.into_iter();
    let first = siblings.next().unwrap();
    for sibling in siblings {
        let limited = shed(sibling.await.unwrap());
        assert_eq!(
            (limited.reason(), limited.retry_after()),
            (Reason::Spacing, secs(61)),
            "a spacing behind the first"
        );
        assert_eq!(began.elapsed(), secs(0), "and it is told at once");
    }
    first.await.unwrap().unwrap();
    assert_eq!(script.times(), [secs(0), secs(60)]);
}

/// The same for the time behind requests in flight, which no estimate foresees.
// Fails when: the deadline begins when the permit is there (shed 5 s after that, or sent).
#[tokio::test(start_paused = true)]
async fn time_behind_requests_in_flight_counts_too() {
    // The permit is free after 40 s and the cooldown ends 30 s after that: 70 s, more than the budget.
    let script = Script::list([Reply::status(429).header("retry-after", "30").after(secs(40))]);
    let client = reactive().layer(script.clone());
    let first = spawn(&client, FEED);
    tokio::task::yield_now().await;
    let asked = Instant::now();

    let limited = shed(send(&client, FEED).await);

    assert_eq!(asked.elapsed(), secs(40), "as soon as it is certain");
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, secs(30)));
    first.await.unwrap().unwrap();
}

// --- warmth -----------------------------------------------------------------------------------------------------------

/// > warmth counts from the cooldown's end (a longer cooldown would end cold and let the herd go)
// Fails when: `Reactive::hold` counts `warm_for` from the refusal (all three at 200 s).
#[tokio::test(start_paused = true)]
async fn warmth_counts_from_the_end_of_the_cooldown() {
    let script = Script::list([Reply::status(429).header("retry-after", "200")]);
    let layer = reactive().max_cooldown(secs(300)).max_wait(secs(300)).concurrency(8);
    let client = layer.layer(script.clone());
    status(&client, FEED).await;

    burst(&client, 3).await;

    assert_eq!(script.times(), [0, 200, 201, 202].map(secs));
    assert_eq!(layer.hosts().get("feeds.example:80").unwrap().warm, secs(118));
}

// --- the clock --------------------------------------------------------------------------------------------------------

/// > monotonic clock instead of epoch
///
/// The paused clock runs ahead of the wall clock by two hours here. A gate that measured holds by the wall clock would
/// find that its timers are due and the host is still held, for ever.
// Fails when: `Clock` reads `SystemTime`.
#[test]
fn holds_are_measured_by_the_monotonic_clock() {
    must_not_stand_still(async {
        let wall = SystemTime::now();
        let script = Script::list([Reply::status(429).header("retry-after", "7200")]);
        let client = reactive().max_cooldown(secs(9000)).max_wait(secs(9000)).layer(script.clone());
        status(&client, FEED).await;

        status(&client, FEED).await;

        assert_eq!(script.times(), [secs(0), secs(7200)]);
        assert!(wall.elapsed().unwrap_or_default() < secs(3600), "the wall clock has hardly moved");
    });
}
