//! `jitter`: only ever adds, once per send, and only to a wait.

use std::sync::mpsc;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tower_host_gate::{DelayFrom, HostGateLayer, Limits};

use super::support::script::{Reply, Script};
use super::{
    Client, HOST, PACINGS, burst, client, fetch, millis, patient, poke, run, secs, settle, spawn, spawn_within,
};

/// How far the sends are apart.
fn gaps(script: &Script) -> Vec<Duration> {
    script.times().windows(2).map(|pair| pair[1] - pair[0]).collect()
}

fn mean(gaps: &[Duration]) -> Duration {
    gaps.iter().sum::<Duration>() / u32::try_from(gaps.len()).unwrap()
}

fn within(gap: Duration, from: Duration, to: Duration) -> bool {
    // A timer may be a millisecond late.
    (from..=to + millis(1)).contains(&gap)
}

#[tokio::test(start_paused = true)]
async fn s18_the_mean_of_many_waits_is_the_configured_one() {
    for pacing in PACINGS {
        for from in [DelayFrom::Completion, DelayFrom::Send] {
            fastrand::seed(18);
            let script = Script::always(Reply::ok());
            let layer = patient().pacing(pacing).min_delay(secs(2)).jitter(secs(2)).delay_from(from);
            burst(&client(&layer, &script), 1_000).await;

            let gaps = gaps(&script);
            assert!(gaps.iter().all(|gap| within(*gap, secs(2), secs(4))), "{gaps:?}");
            // Of a thousand, the mean strays by 18 ms on the average.
            assert!(within(mean(&gaps), millis(2_900), millis(3_100)), "{:?}", mean(&gaps));
            assert!(gaps.iter().any(|gap| *gap < millis(2_100)) && gaps.iter().any(|gap| *gap > millis(3_900)));
        }
    }
}

/// Looks and asks a hundred times while somebody waits.
async fn poke_much(layer: &HostGateLayer, gated: &Client) {
    for n in 0..100 {
        sleep(millis(10)).await;
        poke(gated).await.unwrap_err();
        assert!(layer.hosts().get(HOST).is_some());
        layer.hosts().set_limits(HOST, Limits::default().max_wait(secs(n)));
        timeout(millis(0), super::fetch_within(gated, Duration::MAX)).await.unwrap_err();
    }
}

#[test]
fn s18_a_hundred_pokes_while_somebody_waits_change_nothing() {
    for pacing in PACINGS {
        let times = [false, true].map(|poked| {
            run(async {
                fastrand::seed(18);
                let script = Script::always(Reply::ok());
                let layer = patient().pacing(pacing).min_delay(secs(2)).jitter(secs(2));
                let gated = client(&layer, &script);
                fetch(&gated).await.unwrap();
                let waiting = [spawn(&gated), spawn(&gated), spawn(&gated)];
                settle().await;
                if poked {
                    poke_much(&layer, &gated).await;
                }
                for task in waiting {
                    task.await.unwrap().unwrap();
                }
                script.times()
            })
        });
        assert_eq!(times[0], times[1]);
    }
}

#[test]
fn s18_whoever_comes_in_for_one_that_gave_up_waits_as_long() {
    let times = [false, true].map(|given_up| {
        run(async {
            fastrand::seed(18);
            let script = Script::always(Reply::ok());
            let gated = client(&patient().min_delay(secs(2)).jitter(secs(2)), &script);
            fetch(&gated).await.unwrap();
            let first = given_up.then(|| spawn(&gated));
            settle().await;
            let second = spawn(&gated);
            sleep(secs(1)).await;
            if let Some(first) = first {
                first.abort();
            }
            second.await.unwrap().unwrap();
            script.times()
        })
    });
    assert_eq!(times[0], times[1]);
}

// --- only to a wait ---------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_first_request_waits_for_nothing() {
    for layer in [patient().min_delay(secs(5)), patient().quota(1, secs(5))] {
        let script = Script::always(Reply::ok());
        poke(&client(&layer.jitter(secs(60)), &script)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn jitter_alone_is_no_wait() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).jitter(secs(60));
        burst(&client(&layer, &script), 5).await;
        assert_eq!(script.times(), [secs(0); 5]);
        assert_eq!(super::state(&layer), None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_quota_with_room_is_no_wait() {
    let script = Script::always(Reply::ok());
    burst(&client(&patient().quota(3, secs(10)).jitter(secs(60)), &script), 3).await;
    assert_eq!(script.times(), [secs(0); 3]);
}

/// Whoever comes when nothing is in the way any more has no wait that anything could be added to.
#[tokio::test(start_paused = true)]
async fn a_request_that_comes_after_the_delay_goes_at_once() {
    let layers = [
        patient().min_delay(secs(1)),
        patient().min_delay(secs(1)).delay_from(DelayFrom::Send),
        patient().quota(1, secs(1)),
        // Something looser beside it makes no difference.
        patient().min_delay(secs(1)).quota(100, secs(3_600)),
        patient().quota(2, secs(12)),
    ];
    for layer in layers {
        for pacing in PACINGS {
            let script = Script::always(Reply::ok());
            let gated = client(&layer.clone().pacing(pacing).jitter(secs(10)), &script);
            for n in 0..20 {
                poke(&gated).await.unwrap_or_else(|error| panic!("{pacing:?}, {n}: {error}, with {layer:?}"));
                sleep(secs(7)).await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_comes_after_the_spacing_goes_at_once() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).jitter(secs(10));
        let gated = client(&layer, &script);
        layer.hosts().penalize(HOST, secs(1));
        sleep(secs(12)).await;
        for n in 0..15 {
            poke(&gated).await.unwrap_or_else(|error| panic!("{pacing:?}, {n}: {error}"));
            sleep(secs(7)).await;
        }
    }
}

// --- whatever the wait is for -----------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn jitter_adds_to_any_wait_and_never_shortens_one() {
    for pacing in PACINGS {
        for round in 0..20 {
            fastrand::seed(round);
            let base = patient().pacing(pacing).spacing(secs(3)).jitter(secs(2));
            let waits = [
                (base.clone().min_delay(secs(4)), secs(4)),
                (base.clone().quota(1, secs(5)), secs(5)),
                (base.clone().min_delay(secs(4)).quota(1, secs(5)), secs(5)),
                (base.clone(), secs(3)),
            ];
            for (layer, wait) in waits {
                let script = Script::always(Reply::ok());
                // The host is warm, so that its sends are spaced in any case.
                layer.hosts().penalize(HOST, secs(1));
                let gated = client(&layer, &script);
                burst(&gated, 4).await;
                assert!(within(script.times()[0], secs(1), secs(3)), "a cooldown: {:?}", script.times());
                let gaps = gaps(&script);
                assert!(gaps.iter().all(|gap| within(*gap, wait, wait + secs(2))), "{wait:?}: {gaps:?}");
                assert!(gaps.iter().any(|gap| *gap > wait), "{wait:?}: {gaps:?}");
            }
        }
    }
}

// --- known beforehand -------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn who_comes_back_when_told_does_not_find_a_longer_wait() {
    let layers = [
        patient().min_delay(secs(4)),
        patient().quota(1, secs(4)),
        patient().quota(3, secs(9)),
        patient().min_delay(secs(1)).quota(2, secs(6)),
    ];
    for (seed, layer) in (0..).zip(layers) {
        for pacing in PACINGS {
            fastrand::seed(seed);
            let script = Script::always(Reply::ok());
            let gated = client(&layer.clone().pacing(pacing).jitter(secs(5)), &script);
            for _ in 0..50 {
                if let Err(limited) = poke(&gated).await {
                    sleep(limited.retry_after()).await;
                    poke(&gated).await.unwrap();
                }
            }
        }
    }
}

/// What is let into the queue is served: the longest that the dice can say has been counted in.
#[tokio::test(start_paused = true)]
async fn nobody_who_was_let_into_the_queue_is_shed_for_bad_luck() {
    let layers = [
        patient().min_delay(secs(2)),
        patient().quota(1, secs(4)),
        patient().quota(3, secs(9)),
        patient().min_delay(secs(1)).quota(2, secs(6)),
    ];
    for (seed, layer) in (0..).zip(layers) {
        for pacing in PACINGS {
            fastrand::seed(seed);
            let script = Script::always(Reply::ok());
            let gated = client(&layer.clone().pacing(pacing).jitter(secs(5)), &script);
            let tasks: Vec<_> = (0..100)
                .map(|n| {
                    let gated = gated.clone();
                    tokio::spawn(async move {
                        let began = tokio::time::Instant::now();
                        (super::fetch_within(&gated, millis(n * 500)).await, began.elapsed())
                    })
                })
                .collect();
            let mut served = 0;
            for task in tasks {
                match task.await.unwrap() {
                    (Ok(_), _) => served += 1,
                    (Err(limited), waited) => assert_eq!(waited, secs(0), "{limited}, with {layer:?}"),
                }
            }
            assert!((4..100).contains(&served), "{served}");
        }
    }
}

/// A gate that cannot make up its mind never comes back, so this runs on a thread of its own.
fn must_come_back(test: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    std::thread::spawn(move || {
        test();
        done.send(()).unwrap();
    });
    finished.recv_timeout(secs(50)).expect("neither an endless loop nor a panic");
}

/// A warm host, and a seed of the dice, for each of both pacings.
fn warm_hosts() -> impl Iterator<Item = HostGateLayer> {
    PACINGS.into_iter().flat_map(|pacing| {
        (0..20).map(move |seed| {
            fastrand::seed(seed);
            let layer = patient().pacing(pacing).warm_for(secs(3)).jitter(secs(4));
            layer.hosts().penalize(HOST, secs(1));
            layer
        })
    })
}

#[test]
fn a_host_that_goes_cold_under_its_queue_lets_it_go() {
    must_come_back(|| {
        for layer in warm_hosts() {
            let script = Script::always(Reply::ok());
            run(burst(&client(&layer, &script), 10));
            // Warm until 4 s: the last send before that keeps the next one waiting for 5 s at most.
            assert!(*script.times().last().unwrap() <= secs(10), "{:?}", script.times());
        }
    });
}

#[test]
fn at_the_end_of_the_warmth_bad_luck_is_counted_in_too() {
    must_come_back(|| {
        for layer in warm_hosts() {
            run(async {
                let gated = client(&layer, &Script::always(Reply::ok()));
                let tasks: Vec<_> = (1..20).map(|n| spawn_within(&gated, millis(n * 900))).collect();
                settle().await;
                // Whoever was not refused at once is served.
                for task in tasks.into_iter().filter(|task| !task.is_finished()) {
                    task.await.unwrap().unwrap();
                }
            });
        }
    });
}

#[tokio::test(start_paused = true)]
async fn absurd_jitter_is_a_long_wait() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).min_delay(secs(1)).quota(1, secs(1)).jitter(Duration::MAX);
        let gated = client(&layer, &script);
        fetch(&gated).await.unwrap();
        assert!(poke(&gated).await.unwrap_err().retry_after() > secs(1));
        timeout(secs(86_400), spawn_within(&gated, Duration::MAX)).await.unwrap_err();
    }
}
