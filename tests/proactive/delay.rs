//! `min_delay`: from the completion of the last request, or from its send.

use std::time::Duration;

use http_body_util::BodyExt as _;
use proptest::prelude::*;
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt as _;
use tower_host_gate::{DelayFrom, HostGateLayer, Outcome, PermitUntil};

use super::support::script::{Reply, Script, Sent, get};
use super::{PACINGS, URI, burst, client, fetch, millis, patient, poke, run, secs, settle, spawn};

#[tokio::test(start_paused = true)]
async fn the_delay_begins_when_the_request_before_is_over() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok().after(secs(3)));
        let gated = client(&patient().pacing(pacing).min_delay(secs(5)), &script);
        for _ in 0..3 {
            fetch(&gated).await.unwrap();
        }
        assert_eq!(script.times(), [0, 8, 16].map(secs), "one by one");

        burst(&gated, 3).await;
        assert_eq!(script.times()[3..], [24, 32, 40].map(secs), "and queued");
    }
}

#[tokio::test(start_paused = true)]
async fn the_delay_can_begin_at_the_send() {
    for pacing in PACINGS {
        // The last two are slower than the delay: what is in flight has to end first, and then nothing is left to wait for.
        let latencies = [3, 0, 8, 9, 0];
        let script = Script::list(latencies.map(|latency| Reply::ok().after(secs(latency))));
        let layer = patient().pacing(pacing).min_delay(secs(5)).delay_from(DelayFrom::Send);
        burst(&client(&layer, &script), 5).await;
        assert_eq!(script.times(), [0, 5, 10, 18, 27].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn sends_are_spaced_while_several_are_in_flight() {
    let script = Script::always(Reply::ok().after(secs(12)));
    let layer = patient().concurrency(3).min_delay(secs(5)).delay_from(DelayFrom::Send);
    burst(&client(&layer, &script), 5).await;
    assert_eq!(script.times(), [0, 5, 10, 15, 20].map(secs));
    assert_eq!(script.peak(), 3);
}

#[tokio::test(start_paused = true)]
async fn of_several_in_flight_the_last_one_to_end_counts() {
    for pacing in PACINGS {
        let script = Script::list([1, 3, 0].map(|latency| Reply::ok().after(secs(latency))));
        let gated = client(&patient().pacing(pacing).concurrency(2).min_delay(secs(5)), &script);
        let first = [spawn(&gated), spawn(&gated)];
        sleep(secs(2)).await;
        fetch(&gated).await.unwrap();
        assert_eq!(script.times(), [0, 0, 8].map(secs), "none had ended when the second went");
        for task in first {
            task.await.unwrap().unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_request_that_ends_late_begins_the_delay_anew() {
    let script = Script::list([10, 1, 0, 0].map(|latency| Reply::ok().after(secs(latency))));
    let gated = client(&patient().concurrency(2).min_delay(secs(5)), &script);
    burst(&gated, 4).await;
    // The third 5 s after the end of the second; the fourth 5 s after the end of the first.
    assert_eq!(script.times(), [0, 0, 6, 15].map(secs));
}

/// A send must never go out after a wait it has not waited for.
#[tokio::test(start_paused = true)]
async fn who_was_getting_ready_when_another_ended_waits_again() {
    for pacing in PACINGS {
        let script = Script::list([Reply::ok().after(secs(1))]);
        let gated = client(&patient().pacing(pacing).concurrency(2).min_delay(secs(5)), &script);
        let first = spawn(&gated);
        settle().await;
        script.hold();
        let second = spawn(&gated);
        sleep(secs(2)).await;
        script.release();
        second.await.unwrap().unwrap();
        first.await.unwrap().unwrap();
        assert_eq!(script.times(), [0, 6].map(secs));
    }
}

// --- what ends a request ----------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_request_is_over_when_its_body_has_been_read() {
    let script = Script::list([Reply::ok().body("a").open_for(secs(4)).body("b")]);
    let gated = client(&patient().min_delay(secs(5)), &script);
    let response = gated.clone().oneshot(get(URI)).await.unwrap();
    response.into_body().collect().await.unwrap();
    fetch(&gated).await.unwrap();
    assert_eq!(script.times(), [0, 9].map(secs));
}

#[tokio::test(start_paused = true)]
async fn a_request_is_over_when_its_body_is_dropped() {
    let script = Script::list([Reply::ok().open_for_ever()]);
    let gated = client(&patient().min_delay(secs(5)), &script);
    let response = gated.clone().oneshot(get(URI)).await.unwrap();
    let next = spawn(&gated);
    sleep(secs(7)).await;
    drop(response);
    next.await.unwrap().unwrap();
    assert_eq!(script.times(), [0, 12].map(secs));
}

#[tokio::test(start_paused = true)]
async fn a_request_is_over_at_its_head_where_the_permit_comes_back_there() {
    let script = Script::list([Reply::ok().after(secs(1)).open_for_ever()]);
    let gated = client(&patient().min_delay(secs(5)).permit_until(PermitUntil::Head), &script);
    let response = gated.clone().oneshot(get(URI)).await.unwrap();
    fetch(&gated).await.unwrap();
    assert_eq!(script.times(), [0, 6].map(secs));
    drop(response);
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_is_over_at_its_head() {
    for pacing in PACINGS {
        let script = Script::list([Reply::status(429).after(secs(1)).open_for_ever()]);
        let gated = client(&patient().pacing(pacing).min_delay(secs(5)), &script);
        let response = gated.clone().oneshot(get(URI)).await.unwrap();
        fetch(&gated).await.unwrap();
        assert_eq!(script.times(), [0, 6].map(secs));
        drop(response);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_fails_is_over_then() {
    let script = Script::list([Reply::error("connection reset").after(secs(2))]);
    let gated = client(&patient().min_delay(secs(5)), &script);
    fetch(&gated).await.unwrap();
    fetch(&gated).await.unwrap();
    assert_eq!(script.times(), [0, 7].map(secs));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_panics_is_over_then() {
    let script = Script::list([Reply::panic().after(secs(2))]);
    let gated = client(&patient().min_delay(secs(5)), &script);
    spawn(&gated).await.unwrap_err();
    fetch(&gated).await.unwrap();
    assert_eq!(script.times(), [0, 7].map(secs));
}

#[tokio::test(start_paused = true)]
async fn a_request_given_up_in_flight_is_over_then() {
    let script = Script::list([Reply::hang()]);
    let gated = client(&patient().min_delay(secs(5)), &script);
    timeout(secs(2), fetch(&gated)).await.unwrap_err();
    fetch(&gated).await.unwrap();
    assert_eq!(script.times(), [0, 7].map(secs));
}

#[tokio::test(start_paused = true)]
async fn a_permit_of_ones_own_begins_the_delay_when_it_goes_back() {
    for settled in [true, false] {
        let layer = patient().min_delay(secs(5));
        let (hosts, uri) = (layer.hosts(), URI.parse().unwrap());
        let script = Script::always(Reply::ok());
        let permit = hosts.acquire(&uri, secs(0)).await.unwrap();
        sleep(secs(3)).await;
        if settled {
            permit.settle(Outcome::Success);
        } else {
            drop(permit);
        }
        fetch(&client(&layer, &script)).await.unwrap();
        assert_eq!(script.times(), [secs(8)]);
    }
}

// --- what begins no delay ---------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_request_that_was_never_sent_begins_no_delay() {
    let script = Script::always(Reply::ok());
    let gated = client(&patient().min_delay(secs(5)), &script);
    script.hold();
    // Admitted, and given up while the inner service was getting ready.
    timeout(secs(2), fetch(&gated)).await.unwrap_err();
    script.release();
    poke(&gated).await.unwrap();
    assert_eq!(script.times(), [secs(2)]);
}

#[tokio::test(start_paused = true)]
async fn an_inner_service_that_fails_before_the_send_begins_no_delay() {
    let script = Script::always(Reply::ok());
    let gated = client(&patient().min_delay(secs(5)), &script);
    script.fail_ready("no connection");
    fetch(&gated).await.unwrap();
    script.release();
    poke(&gated).await.unwrap();
    assert_eq!(script.times(), [secs(0)]);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_given_up_moves_nobody() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let gated = client(&patient().pacing(pacing).min_delay(secs(5)), &script);
        fetch(&gated).await.unwrap();
        let given_up = [spawn(&gated), spawn(&gated), spawn(&gated)];
        settle().await;
        let next = spawn(&gated);
        sleep(secs(1)).await;
        given_up.iter().for_each(tokio::task::JoinHandle::abort);
        next.await.unwrap().unwrap();
        assert_eq!(script.times(), [0, 5].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn another_host_is_not_delayed_and_neither_is_another_port() {
    let script = Script::always(Reply::ok());
    let gated = client(&patient().min_delay(secs(5)), &script);
    for uri in ["http://a.example/", "http://b.example/", "http://a.example:8080/", "https://a.example/"] {
        super::send(&gated, get(uri)).await.unwrap();
    }
    assert_eq!(script.times(), [secs(0); 4]);
}

#[tokio::test(start_paused = true)]
async fn after_the_delay_a_request_goes_at_once() {
    let script = Script::always(Reply::ok().after(millis(100)));
    let gated = client(&patient().min_delay(secs(5)), &script);
    fetch(&gated).await.unwrap();
    sleep(millis(4_999)).await;
    poke(&gated).await.unwrap_err();
    sleep(millis(1)).await;
    poke(&gated).await.unwrap();
    assert_eq!(script.times(), [millis(0), millis(5_100)]);
}

// --- whatever happens -------------------------------------------------------------------------------------------------

/// One request of a random crowd, in milliseconds.
#[derive(Clone, Debug)]
struct Caller {
    /// After the one before.
    comes_after: u64,
    takes: u64,
    gives_up_after: u64,
}

fn crowd() -> impl Strategy<Value = Vec<Caller>> {
    let caller = (0..2_000_u64, 0..3_000_u64, 0..20_000_u64).prop_map(|(comes_after, takes, gives_up_after)| Caller {
        comes_after: comes_after.saturating_sub(700),
        takes,
        gives_up_after,
    });
    prop::collection::vec(caller, 1..40)
}

/// When the requests of a crowd were sent, and when they were over, by answer or by their callers' giving up.
async fn spans(layer: HostGateLayer, crowd: Vec<Caller>) -> Vec<(Duration, Duration)> {
    let takes: Vec<_> = crowd.iter().map(|caller| millis(caller.takes)).collect();
    let number = |path: &str| path.trim_start_matches('/').parse::<usize>().unwrap();
    let script = Script::new(move |sent| Reply::ok().after(takes[number(&sent.path)]));
    let gated = client(&layer, &script);
    let mut tasks = Vec::new();
    let mut gone = Vec::new();
    let began = Instant::now();
    for (n, caller) in crowd.iter().enumerate() {
        sleep(millis(caller.comes_after)).await;
        let (gated, patience) = (gated.clone(), millis(caller.gives_up_after));
        gone.push(began.elapsed() + patience);
        let request = get(&format!("http://feeds.example/{n}"));
        tasks.push(tokio::spawn(async move { timeout(patience, super::send(&gated, request)).await.map(drop) }));
    }
    for task in tasks {
        let _ = task.await.unwrap();
    }
    let span = |sent: Sent| {
        let n = number(&sent.path);
        (sent.at, gone[n].min(sent.at + millis(crowd[n].takes)))
    };
    script.sent().into_iter().map(span).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_request_ever_follows_the_end_of_another_too_soon(
        crowd in crowd(),
        delay in 1..3_000_u64,
        concurrency in 1..4_usize,
        pacing in prop::sample::select(PACINGS.to_vec()),
    ) {
        let layer = patient().pacing(pacing).concurrency(concurrency).min_delay(millis(delay));
        let spans = run(spans(layer, crowd));
        for (sent, _) in &spans {
            let ended = spans.iter().map(|(_, over)| *over).filter(|over| over < sent).max();
            prop_assert!(ended.is_none_or(|ended| *sent - ended >= millis(delay)), "{:?}", spans);
        }
    }

    #[test]
    fn no_request_ever_follows_the_send_of_another_too_soon(
        crowd in crowd(),
        delay in 1..3_000_u64,
        concurrency in 1..4_usize,
        pacing in prop::sample::select(PACINGS.to_vec()),
    ) {
        let layer = patient().pacing(pacing).concurrency(concurrency).min_delay(millis(delay)).delay_from(DelayFrom::Send);
        let spans = run(spans(layer, crowd));
        prop_assert!(spans.windows(2).all(|pair| pair[1].0 - pair[0].0 >= millis(delay)), "{:?}", spans);
    }
}
