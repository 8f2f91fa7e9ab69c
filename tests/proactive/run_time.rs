//! Limits per host, and changed while somebody waits.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_host_gate::{DelayFrom, HostGateLayer, Limits, Reason};

use super::support::script::{Reply, Script, get};
use super::{HOST, PACINGS, burst, client, fetch, patient, poke, run, secs, send, settle, spawn, state};

fn limits() -> Limits {
    Limits::default()
}

// --- per host ---------------------------------------------------------------------------------------------------------

/// How long a second request to this host waits after a first.
async fn wait_of(layer: &HostGateLayer, uri: &str) -> Duration {
    let script = Script::always(Reply::ok());
    let gated = client(layer, &script);
    for _ in 0..2 {
        send(&gated, get(uri)).await.unwrap();
    }
    script.times()[1]
}

#[tokio::test(start_paused = true)]
async fn a_name_means_all_ports_and_a_port_wins_over_the_name() {
    for pacing in PACINGS {
        for set_later in [false, true] {
            let named =
                [("feeds.example", limits().min_delay(secs(5))), ("feeds.example:8080", limits().quota(1, secs(9)))];
            let mut layer = patient().pacing(pacing).min_delay(secs(2));
            for (host, limits) in named {
                if set_later {
                    layer.hosts().set_limits(host, limits);
                } else {
                    layer = layer.per_host(host, limits);
                }
            }
            let waits = [
                ("http://feeds.example/", secs(5)),
                ("https://feeds.example/", secs(5)),
                // Exact, so the name's is not looked at; what it does not set is the layer's.
                ("http://feeds.example:8080/", secs(9)),
                ("http://other.example/", secs(2)),
            ];
            for (uri, wait) in waits {
                assert_eq!(wait_of(&layer, uri).await, wait, "{uri}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_set_for_a_host_is_the_layers() {
    let layer = || patient().min_delay(secs(2)).quota(1, secs(6)).delay_from(DelayFrom::Send);
    let cases = [
        (limits(), secs(6)),
        (limits().min_delay(secs(9)), secs(9)),
        (limits().quota(1, secs(8)), secs(8)),
        (limits().quota(0, secs(8)), secs(2)),
        (limits().quota(1, secs(0)), secs(2)),
        (limits().quota(5, secs(8)).min_delay(secs(0)), secs(0)),
        (limits().min_delay(secs(0)), secs(6)),
        (limits().concurrency(4), secs(6)),
        (limits().delay_from(DelayFrom::Completion), secs(6)),
    ];
    for (limits, wait) in cases {
        assert_eq!(wait_of(&layer().per_host(HOST, limits.clone()), super::URI).await, wait, "{limits:?}");
        let layer = layer();
        layer.hosts().set_limits(HOST, limits.clone());
        assert_eq!(wait_of(&layer, super::URI).await, wait, "{limits:?}");
        layer.hosts().set_limits(HOST, Limits::default());
        sleep(secs(60)).await;
        assert_eq!(wait_of(&layer, super::URI).await, secs(6), "the layer's again");
    }
}

#[tokio::test(start_paused = true)]
async fn jitter_can_be_a_hosts_own() {
    let layer = patient().min_delay(secs(2)).jitter(secs(3)).per_host(HOST, limits().jitter(secs(0)));
    for _ in 0..5 {
        assert_eq!(wait_of(&layer, super::URI).await, secs(2));
        sleep(secs(60)).await;
    }
    let mut jittered = 0;
    for _ in 0..5 {
        let wait = wait_of(&layer, "http://other.example/").await;
        assert!((secs(2)..=secs(5)).contains(&wait), "{wait:?}");
        jittered += u32::from(wait > secs(2));
        sleep(secs(60)).await;
    }
    assert_ne!(jittered, 0);
}

// --- while somebody waits ---------------------------------------------------------------------------------------------

/// The sends of five requests at once, with other limits set 4 s later.
fn changed(before: HostGateLayer, after: Limits) -> Vec<u64> {
    run(async {
        let script = Script::always(Reply::ok());
        let gated = client(&before, &script);
        let waiting = tokio::spawn(async move { burst(&gated, 5).await });
        sleep(secs(4)).await;
        before.hosts().set_limits(HOST, after);
        waiting.await.unwrap();
        script.times().iter().map(Duration::as_secs).collect()
    })
}

#[test]
fn o03_the_delay_can_be_changed_while_requests_wait() {
    for pacing in PACINGS {
        for from in [DelayFrom::Completion, DelayFrom::Send] {
            let before = || patient().pacing(pacing).min_delay(secs(10)).delay_from(from);
            assert_eq!(changed(before(), limits().min_delay(secs(10))), [0, 10, 20, 30, 40]);
            assert_eq!(changed(before(), limits().min_delay(secs(6))), [0, 6, 12, 18, 24], "shortened");
            assert_eq!(changed(before(), limits().min_delay(secs(3))), [0, 4, 7, 10, 13], "to less than has passed");
            assert_eq!(changed(before(), limits().min_delay(secs(15))), [0, 15, 30, 45, 60], "lengthened");
            assert_eq!(changed(before(), limits().min_delay(secs(0))), [0, 4, 4, 4, 4], "off");
        }
    }
}

#[test]
fn o03_the_quota_can_be_changed_while_requests_wait() {
    for pacing in PACINGS {
        let before = || patient().pacing(pacing).quota(2, secs(10));
        assert_eq!(changed(before(), limits().quota(2, secs(10))), [0, 0, 10, 10, 20]);
        assert_eq!(changed(before(), limits().quota(3, secs(10))), [0, 0, 4, 10, 10], "up");
        assert_eq!(changed(before(), limits().quota(1, secs(10))), [0, 0, 10, 20, 30], "down");
        assert_eq!(changed(before(), limits().quota(2, secs(15))), [0, 0, 15, 15, 30], "wider");
        assert_eq!(changed(before(), limits().quota(2, secs(3))), [0, 0, 4, 4, 7], "narrower");
        assert_eq!(changed(before(), limits().quota(0, secs(10))), [0, 0, 4, 4, 4], "off");
        assert_eq!(changed(before(), limits().quota(0, secs(0)).min_delay(secs(7))), [0, 0, 7, 14, 21], "for a delay");
        let before = || patient().pacing(pacing).min_delay(secs(20)).quota(9, secs(60));
        assert_eq!(
            changed(before(), limits().min_delay(secs(0)).quota(2, secs(10))),
            [0, 4, 10, 14, 20],
            "from a delay"
        );
    }
}

#[test]
fn o03_jitter_can_be_turned_off_while_requests_wait() {
    for seed in 0..10 {
        fastrand::seed(seed);
        let before = patient().min_delay(secs(5)).jitter(secs(86_400));
        assert_eq!(changed(before, limits().jitter(secs(0))), [0, 5, 10, 15, 20]);
    }
}

#[tokio::test(start_paused = true)]
async fn o03_a_delay_set_while_a_request_is_in_flight_begins_at_its_end() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok().after(secs(3)));
        let layer = patient().pacing(pacing);
        let gated = client(&layer, &script);
        let first = spawn(&gated);
        sleep(secs(1)).await;
        layer.hosts().set_limits(HOST, limits().min_delay(secs(5)));
        first.await.unwrap().unwrap();
        fetch(&gated).await.unwrap();
        assert_eq!(script.times(), [0, 8].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn o03_a_delay_lengthened_while_a_request_is_about_to_be_sent_is_waited_for() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).min_delay(secs(1)).quota(9, secs(60));
        let gated = client(&layer, &script);
        fetch(&gated).await.unwrap();
        sleep(secs(2)).await;
        script.hold();
        let admitted = spawn(&gated);
        settle().await;
        layer.hosts().set_limits(HOST, limits().min_delay(secs(5)));
        script.release();
        admitted.await.unwrap().unwrap();
        assert_eq!(script.times(), [0, 5].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn o03_a_request_that_is_sent_after_a_limit_was_set_counts_towards_it() {
    for pacing in PACINGS {
        let cases = [limits().quota(1, secs(10)), limits().min_delay(secs(10)).delay_from(DelayFrom::Send)];
        for limits in cases {
            let script = Script::always(Reply::ok());
            let layer = patient().pacing(pacing);
            let gated = client(&layer, &script);
            script.hold();
            let admitted = spawn(&gated);
            sleep(secs(1)).await;
            layer.hosts().set_limits(HOST, limits);
            script.release();
            admitted.await.unwrap().unwrap();
            fetch(&gated).await.unwrap();
            assert_eq!(script.times(), [1, 11].map(secs));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn o03_from_where_the_delay_is_measured_can_be_changed_too() {
    for pacing in PACINGS {
        for (before, after, next) in
            [(DelayFrom::Completion, DelayFrom::Send, 5), (DelayFrom::Send, DelayFrom::Completion, 8)]
        {
            let script = Script::always(Reply::ok().after(secs(3)));
            let layer = patient().pacing(pacing).min_delay(secs(5)).delay_from(before);
            let gated = client(&layer, &script);
            fetch(&gated).await.unwrap();
            let waiting = spawn(&gated);
            sleep(secs(1)).await;
            layer.hosts().set_limits(HOST, limits().delay_from(after));
            waiting.await.unwrap().unwrap();
            assert_eq!(script.times(), [0, next].map(secs));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn o03_limits_set_for_a_quiet_host_hold_from_the_next_request_on() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing);
        let gated = client(&layer, &script);
        burst(&gated, 3).await;
        layer.hosts().set_limits(HOST, limits().quota(2, secs(10)));
        burst(&gated, 3).await;
        assert_eq!(script.times(), [0, 0, 0, 0, 0, 10].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn o03_more_permits_within_a_quota_reach_those_who_wait() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok().after(secs(9)));
        let layer = patient().pacing(pacing).quota(4, secs(30));
        let gated = client(&layer, &script);
        let waiting = tokio::spawn(async move { burst(&gated, 5).await });
        sleep(secs(1)).await;
        layer.hosts().set_limits(HOST, limits().concurrency(3));
        waiting.await.unwrap();
        assert_eq!(script.times(), [0, 1, 1, 9, 30].map(secs));
        assert_eq!(script.peak(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn o03_a_limit_taken_off_is_forgotten() {
    for pacing in PACINGS {
        let layer = patient().pacing(pacing).min_delay(secs(50)).quota(1, secs(60));
        let gated = client(&layer, &Script::always(Reply::ok()));
        fetch(&gated).await.unwrap();
        assert_eq!(state(&layer).unwrap().reason, Some(Reason::Quota));
        layer.hosts().set_limits(HOST, limits().quota(0, secs(0)));
        assert_eq!(state(&layer).unwrap().reason, Some(Reason::Spacing));
        layer.hosts().set_limits(HOST, limits().quota(0, secs(0)).min_delay(secs(0)));
        assert_eq!(state(&layer), None);
        poke(&gated).await.unwrap();
        poke(&gated).await.unwrap();
    }
}

/// A longer limit than a waiter's budget is told at the latest when the budget ends.
#[tokio::test(start_paused = true)]
async fn o03_nobody_waits_beyond_the_budget_for_a_limit_that_was_lengthened() {
    let script = Script::always(Reply::ok());
    let layer = patient().min_delay(secs(5));
    let gated = client(&layer, &script);
    fetch(&gated).await.unwrap();
    let began = Instant::now();
    let waiting: Vec<_> = (0..3).map(|_| super::spawn_within(&gated, secs(20))).collect();
    settle().await;
    layer.hosts().set_limits(HOST, limits().min_delay(Duration::MAX));
    for task in waiting {
        assert_eq!(task.await.unwrap().unwrap_err().reason(), Reason::Spacing);
    }
    assert_eq!((began.elapsed(), script.times()), (secs(20), vec![secs(0)]));
}
