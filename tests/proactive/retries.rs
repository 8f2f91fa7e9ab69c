//! Attempts count as sends, whoever makes them.

use std::time::Duration;

use tokio::time::sleep;
use tower::{
    Layer as _,
    retry::{Retry, RetryLayer},
};
use tower_host_gate::{
    DelayFrom, HostGate, HostGateLayer, Pacing, Reason,
    retry::{GateRetry, InFlightRetry},
};

use super::support::script::{Reply, Script, get};
use super::{PACINGS, URI, millis, patient, secs, send, settle, within};

/// Each attempt is gated.
fn outside(attempts: u32, layer: &HostGateLayer, script: &Script) -> Retry<GateRetry, HostGate<Script>> {
    RetryLayer::new(GateRetry::new(attempts)).layer(layer.layer(script.clone()))
}

/// One quick second attempt with the permit held.
fn inside(layer: &HostGateLayer, script: &Script) -> HostGate<Retry<InFlightRetry, Script>> {
    layer.layer(RetryLayer::new(layer.in_flight_retry()).layer(script.clone()))
}

#[tokio::test(start_paused = true)]
async fn a_gated_attempt_waits_for_the_limits_and_counts_towards_them() {
    for pacing in PACINGS {
        let cases = [
            (patient().min_delay(secs(10)), [0, 10, 20, 30]),
            (patient().quota(1, secs(10)), [0, 10, 20, 30]),
            (patient().quota(2, secs(30)), [0, 2, 30, 38]),
        ];
        for (layer, expected) in cases {
            let script = Script::always(Reply::status(429));
            let gated = outside(4, &layer.pacing(pacing), &script);
            assert_eq!(send(&gated, get(URI)).await.unwrap(), 429);
            assert_eq!(script.times(), expected.map(secs));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_gated_attempt_goes_before_those_who_wait_for_a_limit() {
    // Reactive, which does not learn from the refusal.
    let script = Script::list([Reply::status(429).after(secs(1))]);
    let gated = outside(2, &patient().pacing(Pacing::Reactive).min_delay(secs(10)), &script);
    let mut tasks = Vec::new();
    for path in ["first", "second", "third"] {
        let gated = gated.clone();
        tasks.push(tokio::spawn(async move { send(&gated, get(&format!("http://feeds.example/{path}"))).await }));
        settle().await;
    }
    for task in tasks {
        assert_eq!(task.await.unwrap().unwrap(), 200);
    }
    let sent: Vec<_> = script.sent().into_iter().map(|sent| (sent.path, sent.at)).collect();
    let expected = [("/first", 0), ("/first", 11), ("/second", 21), ("/third", 31)];
    assert_eq!(sent, expected.map(|(path, at)| (path.to_owned(), secs(at))));
}

#[tokio::test(start_paused = true)]
async fn a_gated_attempt_whose_limit_outlasts_what_is_left_of_the_budget_is_refused_at_once() {
    for pacing in PACINGS {
        let script = Script::always(Reply::status(429));
        let gated = outside(9, &patient().pacing(pacing).quota(2, secs(30)), &script);
        let began = tokio::time::Instant::now();
        let limited = send(&gated, within(secs(29))).await.unwrap_err();
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::Quota, secs(28)));
        assert_eq!(began.elapsed(), secs(2));
        assert_eq!(script.times(), [0, 2].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn a_quick_second_attempt_counts_towards_the_quota() {
    for pacing in PACINGS {
        let script = Script::list([Reply::status(503)]);
        let layer = patient().pacing(pacing).quota(3, secs(10));
        let gated = inside(&layer, &script);
        for _ in 0..3 {
            send(&gated, get(URI)).await.unwrap();
        }
        assert_eq!(script.times(), [0, 500, 500, 10_000].map(millis));
    }
}

#[tokio::test(start_paused = true)]
async fn a_delay_begins_at_the_second_attempt() {
    for pacing in PACINGS {
        for from in [DelayFrom::Send, DelayFrom::Completion] {
            let script = Script::list([Reply::status(503)]);
            let gated = inside(&patient().pacing(pacing).min_delay(secs(5)).delay_from(from), &script);
            for _ in 0..2 {
                send(&gated, get(URI)).await.unwrap();
            }
            assert_eq!(script.times(), [0, 500, 5_500].map(millis));
        }
    }
}

/// "No interval of that width ever holds more than n sends."
#[tokio::test(start_paused = true)]
async fn a_quick_second_attempt_for_which_the_window_has_no_room_is_not_made_too_early() {
    for status in [429, 503] {
        let script = Script::list([Reply::status(status)]);
        let layer = patient().quota(1, secs(10));
        let gated = inside(&layer, &script);
        send(&gated, get(URI)).await.unwrap();
        send(&gated, get(URI)).await.unwrap();
        let times = script.times();
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= secs(10)), "{times:?}");
    }
}

/// A second attempt is reported before it is due: what is still in the window until then goes on counting.
#[tokio::test(start_paused = true)]
async fn a_second_attempt_that_is_still_to_come_makes_no_room() {
    let script = Script::new(|sent| if sent.n == 2 { Reply::status(503) } else { Reply::ok() });
    let layer = patient().concurrency(2).quota(3, secs(10));
    let gated = inside(&layer, &script);
    for at in [0, 0, 9_700] {
        let at = Duration::from_millis(at);
        sleep(at).await;
        let gated = gated.clone();
        tokio::spawn(async move { send(&gated, get(URI)).await });
        settle().await;
    }
    sleep(millis(100)).await;
    send(&gated, get(URI)).await.unwrap();
    sleep(secs(1)).await;
    // Two at 0 and one at 9.7 s fill the window up to 10 s; with the second attempt at 10.2 s it is full again.
    let times = script.times();
    for (first, beyond) in times.iter().zip(times.iter().skip(3)) {
        assert!(*beyond - *first >= secs(10), "{times:?}");
    }
    assert_eq!(script.sent().len(), 5);
}
