//! `quota`: a true rolling window.

use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tokio::time::{sleep, timeout};
use tower_host_gate::{HostGateLayer, Outcome, Reason};

use super::support::script::{Reply, Script, get};
use super::{
    PACINGS, URI, burst, client, fetch, fetch_within, millis, patient, poke, run, secs, send, settle, spawn,
    spawn_within, state,
};

/// No interval of this width holds more than so many.
fn assert_window(times: &[Duration], sends: usize, width: Duration) {
    for (first, beyond) in times.iter().zip(times.iter().skip(sends)) {
        assert!(*beyond - *first >= width, "more than {sends} in {width:?} from {first:?} on: {times:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn s15_thirty_callers_on_clones_go_in_three_windows() {
    for pacing in PACINGS {
        for concurrency in [1, 3, 10, 30] {
            let script = Script::always(Reply::ok());
            let layer = patient().pacing(pacing).concurrency(concurrency).quota(10, secs(1));
            burst(&client(&layer, &script), 30).await;
            assert_eq!(script.times(), [[secs(0); 10], [secs(1); 10], [secs(2); 10]].concat());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_send_leaves_the_window_when_it_is_as_old_as_the_window_is_wide() {
    let script = Script::always(Reply::ok());
    let gated = client(&patient().quota(3, secs(10)), &script);
    for _ in 0..3 {
        fetch(&gated).await.unwrap();
        sleep(secs(4)).await;
    }
    // Sent at 0, 4 and 8. A bucket that fills up would have one more to give by now.
    poke(&gated).await.unwrap();
    burst(&gated, 4).await;
    assert_eq!(script.times(), [0, 4, 8, 12, 14, 18, 22, 24].map(secs));
}

#[tokio::test(start_paused = true)]
async fn the_window_has_no_seam_for_a_burst() {
    let script = Script::always(Reply::ok());
    let gated = client(&patient().concurrency(3).quota(3, secs(10)), &script);
    fetch(&gated).await.unwrap();
    sleep(secs(9)).await;
    burst(&gated, 2).await;
    burst(&gated, 3).await;
    assert_eq!(script.times(), [0, 9, 9, 10, 19, 19].map(secs));
}

#[tokio::test(start_paused = true)]
async fn quiet_time_saves_nothing_up() {
    let script = Script::always(Reply::ok());
    let gated = client(&patient().concurrency(9).quota(3, secs(10)), &script);
    fetch(&gated).await.unwrap();
    sleep(secs(1_000)).await;
    burst(&gated, 6).await;
    assert_eq!(script.times(), [0, 1_000, 1_000, 1_000, 1_010, 1_010, 1_010].map(secs));
}

#[tokio::test(start_paused = true)]
async fn the_cap_holds_within_the_quota() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let gated = client(&patient().concurrency(3).quota(10, secs(10)), &script);
    burst(&gated, 14).await;
    assert_eq!(script.peak(), 3);
    assert_eq!(script.times(), [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 10, 10, 10, 11].map(secs));
}

#[tokio::test(start_paused = true)]
async fn clones_and_services_of_one_layer_share_a_quota_and_hosts_do_not() {
    let script = Script::always(Reply::ok());
    let layer = patient().quota(1, secs(10));
    let (one, other) = (client(&layer, &script), client(&layer.clone(), &script));
    poke(&one).await.unwrap();
    poke(&one.clone()).await.unwrap_err();
    poke(&other).await.unwrap_err();
    send(&one, get("http://other.example/")).await.unwrap();
    assert_eq!(script.times(), [secs(0); 2]);
}

#[tokio::test(start_paused = true)]
async fn two_gates_share_no_quota() {
    let script = Script::always(Reply::ok());
    let [crawl, search] =
        [client(&patient().quota(1, secs(10)), &script), client(&patient().quota(1, secs(10)), &script)];
    poke(&crawl).await.unwrap();
    poke(&search).await.unwrap();
    poke(&crawl).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn first_come_first_served() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let gated = client(&patient().pacing(pacing).concurrency(4).quota(3, secs(10)), &script);
        let paths: Vec<_> = (0..20).map(|n| format!("/{n}")).collect();
        let mut tasks = Vec::new();
        for path in &paths {
            let (gated, uri) = (gated.clone(), format!("http://feeds.example{path}"));
            tasks.push(tokio::spawn(async move { send(&gated, get(&uri)).await }));
            settle().await;
        }
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        let sent: Vec<_> = script.sent().into_iter().map(|sent| sent.path).collect();
        assert_eq!(sent, paths);
    }
}

#[tokio::test(start_paused = true)]
async fn what_went_out_counts_whatever_became_of_it() {
    let script = Script::list([
        Reply::error("connection reset"),
        Reply::hang(),
        Reply::status(404),
        Reply::status(500),
        Reply::ok().open_for_ever(),
    ]);
    let layer = patient().concurrency(2).quota(6, secs(60));
    let gated = client(&layer, &script);
    for _ in 0..5 {
        let _ = timeout(secs(1), fetch(&gated)).await;
    }
    layer.hosts().acquire(&URI.parse().unwrap(), secs(0)).await.unwrap().settle(Outcome::Success);
    let limited = poke(&gated).await.unwrap_err();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Quota, secs(59)));
    assert_eq!(script.times(), [0, 0, 1, 1, 1].map(secs));
}

/// On real threads and a real clock: the gate took note of a send between the beginning and the end of the call.
#[test]
fn the_window_holds_on_many_threads_too() {
    const WIDTH: Duration = millis(50);
    let hosts = patient().concurrency(8).quota(100, WIDTH).hosts();
    let acquire = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let acquire = || {
            let before = Instant::now();
            runtime.block_on(hosts.acquire(&URI.parse().unwrap(), secs(60))).unwrap().settle(Outcome::Success);
            (before, Instant::now())
        };
        (0..150).map(|_| acquire()).collect::<Vec<_>>()
    };
    let calls: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(acquire)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let (mut before, mut after): (Vec<_>, Vec<_>) = calls.into_iter().unzip();
    before.sort();
    after.sort();
    assert!(before.iter().zip(&after[100..]).all(|(first, beyond)| *beyond - *first >= WIDTH));
}

// --- what books nothing -----------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s17_a_request_whose_time_is_up_leaves_the_quota_untouched() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let gated = client(&HostGateLayer::new().pacing(pacing).quota(1, secs(10)), &script);
        fetch(&gated).await.unwrap();
        let waiting = spawn(&gated);
        sleep(secs(4)).await;
        for budget in [secs(0), millis(1), secs(9)] {
            fetch_within(&gated, budget).await.unwrap_err();
        }
        // Its caller has no time left at all: it is dropped when it has been polled once.
        timeout(secs(0), fetch(&gated)).await.unwrap_err();
        waiting.await.unwrap().unwrap();
        fetch(&gated).await.unwrap();
        assert_eq!(script.times(), [0, 10, 20].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_never_sent_does_not_count() {
    let script = Script::always(Reply::ok());
    let gated = client(&patient().quota(1, secs(10)), &script);
    script.hold();
    timeout(secs(1), fetch(&gated)).await.unwrap_err();
    script.fail_ready("no connection");
    fetch(&gated).await.unwrap();
    script.release();
    drop(tower::ServiceExt::oneshot(gated.clone(), get(URI)));
    poke(&gated).await.unwrap();
    poke(&gated).await.unwrap_err();
    assert_eq!(script.times(), [secs(1)]);
}

/// Each send is judged by the one before it, so one at a time is admitted until it has been sent.
#[tokio::test(start_paused = true)]
async fn while_one_is_about_to_be_sent_nobody_else_is_admitted() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).concurrency(3).quota(2, secs(10));
        let gated = client(&layer, &script);
        script.hold();
        let waiting = [spawn(&gated), spawn(&gated), spawn(&gated)];
        settle().await;
        let seen = state(&layer).unwrap();
        assert_eq!((seen.in_flight, seen.queued, seen.reason), (1, 2, Some(Reason::InFlight)));
        assert_eq!(poke(&gated).await.unwrap_err().reason(), Reason::Quota, "behind those two there is no room");
        script.release();
        for task in waiting {
            task.await.unwrap().unwrap();
        }
        assert_eq!(script.times(), [0, 0, 10].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_behind_one_that_is_never_sent_goes_in_its_place() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let gated = client(&patient().pacing(pacing).concurrency(2).quota(1, secs(10)), &script);
        script.hold();
        let [first, second] = [spawn(&gated), spawn(&gated)];
        sleep(secs(1)).await;
        first.abort();
        sleep(secs(1)).await;
        script.release();
        second.await.unwrap().unwrap();
        assert_eq!(script.times(), [secs(2)]);
    }
}

// --- off --------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s21_zero_of_anything_is_off() {
    for pacing in PACINGS {
        let off = [
            patient().quota(0, secs(10)),
            patient().quota(1, secs(0)),
            patient().quota(0, secs(0)),
            patient().min_delay(secs(0)),
            patient().jitter(secs(0)),
            patient().min_delay(secs(0)).quota(0, secs(0)).jitter(secs(0)),
            // A later setting replaces an earlier one.
            patient().quota(1, secs(10)).min_delay(secs(5)).quota(0, secs(10)).min_delay(secs(0)),
        ];
        for layer in off {
            let layer = layer.pacing(pacing);
            let script = Script::always(Reply::ok());
            burst(&client(&layer, &script), 5).await;
            assert_eq!(script.times(), [secs(0); 5]);
            assert_eq!(state(&layer), None, "and nothing is remembered");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_disabled_gate_limits_nothing() {
    let script = Script::always(Reply::ok());
    let layer = patient().quota(1, secs(10)).min_delay(secs(5)).disabled(true);
    burst(&client(&layer, &script), 5).await;
    assert_eq!(script.times(), [secs(0); 5]);
}

// --- against a model --------------------------------------------------------------------------------------------------

/// One request of a random crowd. Everything happens at even moments, and nobody gives up at one.
#[derive(Clone, Debug)]
struct Caller {
    /// After the one before.
    comes_after: Duration,
    gives_up_after: Option<Duration>,
}

fn crowd() -> impl Strategy<Value = Vec<Caller>> {
    let patience = prop_oneof![2 => Just(None), 1 => (0..400_u64).prop_map(|tens| Some(millis(tens * 10 + 5)))];
    let caller = (0..200_u64, patience).prop_map(|(tens, gives_up_after)| Caller {
        comes_after: millis(tens.saturating_sub(60) * 10),
        gives_up_after,
    });
    prop::collection::vec(caller, 1..40)
}

/// Sends at once what the window has room for, first come first served; who gives up has never been there.
fn model(crowd: &[Caller], sends: usize, width: Duration) -> Vec<Duration> {
    let mut now = secs(0);
    let mut sent: Vec<Duration> = Vec::new();
    for caller in crowd {
        now += caller.comes_after;
        let leaves = sent.len().checked_sub(sends).map_or(secs(0), |place| sent[place] + width);
        let goes = now.max(leaves);
        if caller.gives_up_after.is_none_or(|patience| goes < now + patience) {
            sent.push(goes);
        }
    }
    sent
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sends_go_as_early_as_the_window_lets_them_and_no_earlier(
        crowd in crowd(),
        sends in 1..6_u32,
        tens in 1..500_u64,
        concurrency in 1..4_usize,
        pacing in prop::sample::select(PACINGS.to_vec()),
    ) {
        let width = millis(tens * 10);
        let times = run(async {
            let script = Script::always(Reply::ok());
            let layer = patient().pacing(pacing).concurrency(concurrency).quota(sends, width);
            let gated = client(&layer, &script);
            let mut tasks = Vec::new();
            for caller in &crowd {
                sleep(caller.comes_after).await;
                let (gated, patience) = (gated.clone(), caller.gives_up_after.unwrap_or(Duration::MAX));
                tasks.push(tokio::spawn(async move { timeout(patience, fetch(&gated)).await.map(drop) }));
                settle().await;
            }
            for task in tasks {
                let _ = task.await.unwrap();
            }
            sleep(width).await;
            assert_eq!(state(&layer), None, "whoever came and went has left nothing behind");
            script.times()
        });
        prop_assert_eq!(&times, &model(&crowd, sends as usize, width));
        assert_window(&times, sends as usize, width);
    }

    #[test]
    fn no_window_ever_holds_more_whatever_takes_how_long(
        arrivals in prop::collection::vec((0..3_000_u64, 0..4_000_u64, 0..20_000_u64), 1..60),
        sends in 1..6_u32,
        width in 1..8_000_u64,
        concurrency in 1..6_usize,
        pacing in prop::sample::select(PACINGS.to_vec()),
    ) {
        let times = run(async {
            let latencies: Vec<_> = arrivals.iter().map(|(_, latency, _)| millis(*latency)).collect();
            // Some are refused, so that cooldowns come in between.
            let script = Script::new(move |sent| {
                let latency = latencies[sent.n % latencies.len()];
                if sent.n % 7 == 3 { Reply::status(429).after(latency) } else { Reply::ok().after(latency) }
            });
            let layer = HostGateLayer::new().pacing(pacing).concurrency(concurrency).quota(sends, millis(width));
            let gated = client(&layer, &script);
            let mut tasks = Vec::new();
            for (comes_after, _, budget) in &arrivals {
                sleep(millis(*comes_after)).await;
                tasks.push(spawn_within(&gated, millis(*budget)));
            }
            for task in tasks {
                let _ = task.await.unwrap();
            }
            script.times()
        });
        assert_window(&times, sends as usize, millis(width));
    }
}
