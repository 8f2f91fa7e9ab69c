//! What is remembered for a limit's sake, and what is forgotten.

use std::convert::Infallible;
use std::future::ready;

use allocation_counter::measure;
use http::{Request, Response};
use tokio::time::{sleep, timeout};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_host_gate::{DelayFrom, HostGateLayer, Limits};

use super::support::script::{Reply, Script, get};
use super::{HOST, PACINGS, client, fetch, patient, poke, run, secs, send, settle, spawn, state};

#[tokio::test(start_paused = true)]
async fn s10_a_delay_is_kept_from_request_to_request_however_idle_the_host() {
    for pacing in PACINGS {
        for (layer, wait) in [
            (patient().min_delay(secs(5)), 5),
            (patient().min_delay(secs(5)).delay_from(DelayFrom::Send), 5),
            (patient().quota(1, secs(5)), 5),
        ] {
            let script = Script::always(Reply::ok());
            let layer = layer.pacing(pacing);
            let gated = client(&layer, &script);
            for round in 0..4 {
                fetch(&gated).await.unwrap();
                // Hosts that come and go make the gate clear its table out, and whoever looks does so too.
                for other in 0..1_000 {
                    send(&gated, get(&format!("http://h{other}.r{round}.example/"))).await.unwrap();
                }
                assert!(state(&layer).is_some());
                sleep(secs(round)).await;
                layer.hosts().snapshot();
            }
            let expected: Vec<_> = (0..4).map(|n| secs(n * wait)).collect();
            assert_eq!(script.times_of("feeds.example"), expected);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn s10_a_cooldown_nobody_waits_for_is_kept_and_so_is_a_window() {
    for pacing in PACINGS {
        let script = Script::list([Reply::ok(), Reply::status(429).header("retry-after", "59.5")]);
        let layer = patient().pacing(pacing).per_host(HOST, Limits::default().quota(2, secs(600)));
        let gated = client(&layer, &script);
        fetch(&gated).await.unwrap();
        sleep(secs(30)).await;
        fetch(&gated).await.unwrap();
        // Long after cooldown and warmth.
        for _ in 0..56 {
            sleep(secs(10)).await;
            for other in 0..100 {
                send(&gated, get(&format!("http://h{other}.example/"))).await.unwrap();
            }
            assert!(layer.hosts().snapshot().iter().any(|seen| seen.host == HOST));
        }
        poke(&gated).await.unwrap_err();
        fetch(&gated).await.unwrap();
        assert_eq!(script.times_of("feeds.example"), [0, 30, 600].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn a_host_is_forgotten_when_no_limit_has_anything_left_to_say_of_it() {
    for pacing in PACINGS {
        let cases = [
            (patient().min_delay(secs(5)), 5),
            (patient().min_delay(secs(5)).delay_from(DelayFrom::Send), 5),
            (patient().quota(3, secs(20)), 20),
            (patient().quota(3, secs(20)).min_delay(secs(30)), 30),
            (patient().quota(3, secs(20)).min_delay(secs(5)), 20),
        ];
        for (layer, until) in cases {
            let layer = layer.pacing(pacing);
            fetch(&client(&layer, &Script::always(Reply::ok()))).await.unwrap();
            sleep(secs(until) - super::millis(1)).await;
            assert!(state(&layer).is_some());
            sleep(super::millis(1)).await;
            assert_eq!(state(&layer), None);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_thousand_who_gave_up_leave_nothing_behind() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).concurrency(3).min_delay(secs(5)).quota(2, secs(20)).jitter(secs(1));
        let gated = client(&layer, &script);
        fetch(&gated).await.unwrap();
        let waiting: Vec<_> = (0..1_000).map(|_| spawn(&gated)).collect();
        settle().await;
        assert_eq!(state(&layer).unwrap().queued, 1_000);
        for task in &waiting {
            task.abort();
        }
        settle().await;
        let seen = state(&layer).unwrap();
        assert_eq!((seen.queued, seen.in_flight), (0, 0));
        timeout(secs(20), fetch(&gated)).await.unwrap().unwrap();
        assert!(script.times()[1] <= secs(6), "{:?}", script.times());
        sleep(secs(20)).await;
        assert_eq!(state(&layer), None);
    }
}

// --- room -------------------------------------------------------------------------------------------------------------

/// An inner service that keeps no record.
fn answering(
    layer: &HostGateLayer,
) -> impl tower::Service<Request<()>, Error = tower::BoxError, Future: Send> + Clone + use<> {
    layer.layer(service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(String::new())))))
}

#[test]
fn a_window_remembers_no_more_than_it_is_wide() {
    for pacing in PACINGS {
        let memory = measure(|| {
            run(async {
                let gated = answering(&patient().pacing(pacing).quota(100, secs(1)));
                for _ in 0..20_000 {
                    gated.clone().oneshot(get(super::URI)).await.map(drop).unwrap();
                }
            });
        });
        // 800 bytes for the window; the runtime takes a few thousand.
        assert!(memory.bytes_max < 64 * 1024, "{memory:?}");
    }
}

#[test]
fn hosts_whose_limits_have_nothing_left_to_say_take_no_room() {
    const HOSTS: usize = 10_000;
    for pacing in PACINGS {
        let layer = patient().pacing(pacing).min_delay(secs(5)).quota(3, secs(10)).jitter(secs(1));
        let memory = measure(|| {
            run(async {
                let gated = answering(&layer);
                for host in 0..HOSTS {
                    gated.clone().oneshot(get(&format!("http://h{host}.example/"))).await.map(drop).unwrap();
                }
                assert_eq!(layer.hosts().snapshot().len(), HOSTS);
                sleep(secs(11)).await;
                assert_eq!(layer.hosts().snapshot().len(), 0);
            });
        });
        assert!(memory.bytes_current < 256 * 1024, "{memory:?}");
    }
}

/// Nobody looks: requests to other hosts are enough to clear the table out.
#[test]
fn hosts_that_come_and_go_under_a_delay_take_no_room() {
    let memory = measure(|| {
        run(async {
            let gated = answering(&patient().min_delay(super::millis(10)));
            for host in 0..20_000 {
                gated.clone().oneshot(get(&format!("http://h{host}.example/"))).await.map(drop).unwrap();
                tokio::time::advance(super::millis(1)).await;
            }
        });
    });
    assert!(memory.bytes_max < 1024 * 1024, "{memory:?}");
}
