//! Refused at once or served; when to come back, and why.

use std::time::Duration;

use proptest::prelude::*;
use tokio::time::{Instant, sleep, timeout};
use tower_host_gate::{DelayFrom, HostGateLayer, Limits, Reason};

use super::support::script::{Reply, Script};
use super::{
    HOST, PACINGS, client, fetch, fetch_within, millis, patient, poke, run, secs, settle, spawn, spawn_within, state,
};

#[tokio::test(start_paused = true)]
async fn a_wait_beyond_the_budget_is_refused_at_once_and_books_nothing() {
    for pacing in PACINGS {
        for (layer, reason) in
            [(patient().min_delay(secs(10)), Reason::Spacing), (patient().quota(1, secs(10)), Reason::Quota)]
        {
            let script = Script::always(Reply::ok());
            let gated = client(&layer.pacing(pacing), &script);
            fetch(&gated).await.unwrap();
            sleep(secs(4)).await;
            for _ in 0..100 {
                let began = Instant::now();
                let limited = fetch_within(&gated, millis(5_999)).await.unwrap_err();
                assert_eq!(began.elapsed(), secs(0));
                assert_eq!((limited.reason(), limited.retry_after()), (reason, secs(6)));
                assert_eq!((limited.status(), limited.streak(), limited.asked()), (None, 0, None));
            }
            fetch_within(&gated, secs(6)).await.unwrap();
            assert_eq!(script.times(), [0, 10].map(secs));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn who_has_waited_to_the_end_of_the_budget_is_told_the_rest() {
    let script = Script::always(Reply::ok());
    let layer = patient().min_delay(secs(5));
    let gated = client(&layer, &script);
    fetch(&gated).await.unwrap();
    let waiting = spawn_within(&gated, secs(7));
    sleep(secs(4)).await;
    layer.hosts().set_limits(HOST, Limits::default().min_delay(secs(20)));
    let limited = waiting.await.unwrap().unwrap_err();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Spacing, secs(13)));
}

/// The permit that a request waits for is followed by a whole delay, whenever it comes back.
#[tokio::test(start_paused = true)]
async fn behind_a_request_in_flight_there_is_a_whole_delay() {
    for pacing in PACINGS {
        let script = Script::list([Reply::hang()]);
        let gated = client(&patient().pacing(pacing).min_delay(secs(10)), &script);
        let first = spawn(&gated);
        sleep(secs(2)).await;
        let began = Instant::now();
        let limited = fetch_within(&gated, secs(9)).await.unwrap_err();
        assert_eq!(began.elapsed(), secs(0), "whatever becomes of the request in flight, it cannot go in time");
        assert!(limited.retry_after() >= secs(10), "{limited}");
        let limited = poke(&gated).await.unwrap_err();
        assert_eq!(limited.reason(), Reason::InFlight);
        assert!(limited.retry_after() >= secs(10), "{limited}");
        first.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn behind_a_request_in_flight_there_is_no_delay_that_began_at_its_send() {
    let script = Script::list([Reply::ok().after(secs(8))]);
    let gated = client(&patient().min_delay(secs(10)).delay_from(DelayFrom::Send), &script);
    let first = spawn(&gated);
    sleep(secs(2)).await;
    let limited = fetch_within(&gated, secs(7)).await.unwrap_err();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Spacing, secs(8)));
    fetch_within(&gated, secs(8)).await.unwrap();
    first.await.unwrap().unwrap();
    assert_eq!(script.times(), [0, 10].map(secs));
}

// --- a queue ----------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn behind_a_queue_the_estimate_counts_window_after_window() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).quota(3, secs(10));
        let gated = client(&layer, &script);
        fetch(&gated).await.unwrap();
        sleep(secs(4)).await;
        // Two go at once, and wait in the window with the first.
        let waiting: Vec<_> = (0..6).map(|_| spawn(&gated)).collect();
        settle().await;
        // At 10, 14, 14 and 20 s; a fifth one would go at 24 s.
        let limited = fetch_within(&gated, millis(19_999)).await.unwrap_err();
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::Quota, secs(20)));
        fetch_within(&gated, secs(20)).await.unwrap();
        for task in waiting {
            task.await.unwrap().unwrap();
        }
        assert_eq!(script.times(), [0, 4, 4, 10, 14, 14, 20, 24].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn behind_a_queue_the_reason_is_what_is_longest_for_this_very_request() {
    let layer = patient().min_delay(secs(2)).quota(3, secs(100));
    let gated = client(&layer, &Script::always(Reply::ok()));
    fetch(&gated).await.unwrap();
    let limited = poke(&gated).await.unwrap_err();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Spacing, secs(2)));
    let first = spawn(&gated);
    settle().await;
    let limited = poke(&gated).await.unwrap_err();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Spacing, secs(4)));
    let second = spawn(&gated);
    settle().await;
    let limited = poke(&gated).await.unwrap_err();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Quota, secs(100)));
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_finds_the_queue_full_is_told_when_the_limits_would_let_it_go() {
    for pacing in PACINGS {
        let gated = client(&patient().pacing(pacing).max_queue(2).quota(1, secs(10)), &Script::always(Reply::ok()));
        fetch(&gated).await.unwrap();
        let waiting = [spawn(&gated), spawn(&gated)];
        settle().await;
        let limited = fetch_within(&gated, secs(60)).await.unwrap_err();
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::QueueFull, secs(30)));
        for task in waiting {
            task.await.unwrap().unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_cooldown_beyond_the_budget_is_the_reason_for_a_refusal() {
    for pacing in PACINGS {
        let layer = patient().pacing(pacing).min_delay(secs(2)).quota(1, secs(5));
        let gated = client(&layer, &Script::always(Reply::ok()));
        fetch(&gated).await.unwrap();
        layer.hosts().penalize(HOST, secs(30));
        let limited = fetch_within(&gated, secs(20)).await.unwrap_err();
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, secs(30)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_tells_those_at_once_whom_the_quota_would_then_let_go_too_late() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).spacing(secs(0)).quota(1, secs(10));
        let gated = client(&layer, &script);
        fetch(&gated).await.unwrap();
        let [first, second] = [spawn_within(&gated, secs(25)), spawn_within(&gated, secs(25))];
        sleep(secs(1)).await;
        layer.hosts().penalize(HOST, secs(19));
        // At 20 and 30 s now, not at 10 and 20.
        let limited = second.await.unwrap().unwrap_err();
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::Quota, secs(29)));
        first.await.unwrap().unwrap();
        assert_eq!(script.times(), [0, 20].map(secs));
    }
}

// --- against the layer itself -----------------------------------------------------------------------------------------

fn any_layer() -> impl Strategy<Value = HostGateLayer> {
    let delay = prop_oneof![Just(0), 1..5_000_u64];
    let quota = prop_oneof![Just((0, 0)), (1..5_u32, 1..20_000_u64)];
    let from = prop::sample::select(vec![DelayFrom::Completion, DelayFrom::Send]);
    let spacing = prop_oneof![Just(0), 1..5_000_u64];
    let jitter = prop_oneof![Just(0), 1..5_000_u64];
    let pacing = prop::sample::select(PACINGS.to_vec());
    (delay, quota, from, spacing, jitter, pacing).prop_map(|(delay, (sends, width), from, spacing, jitter, pacing)| {
        HostGateLayer::new()
            .min_delay(millis(delay))
            .quota(sends, millis(width))
            .delay_from(from)
            .spacing(millis(spacing))
            .jitter(millis(jitter))
            .pacing(pacing)
    })
}

/// One that comes, how much later than the one before, and how long it can wait: never to the very moment of a send, at
/// which a budget that ends and a window that opens race each other.
fn arrivals() -> impl Strategy<Value = Vec<(Duration, Duration)>> {
    let later = prop_oneof![Just(millis(0)), (0..4_000_u64).prop_map(millis)];
    let budget = (0..30_000_u64).prop_map(|budget| millis(budget) + Duration::from_micros(500));
    prop::collection::vec((later, budget), 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// The server answers at once and refuses nobody, so pacing is all there is and can be foretold.
    #[test]
    fn a_request_is_refused_at_once_or_served_within_its_budget(
        layer in any_layer(),
        arrivals in arrivals(),
        warm in any::<bool>(),
        seed in any::<u64>(),
    ) {
        run(async {
            fastrand::seed(seed);
            if warm {
                layer.hosts().penalize(HOST, secs(2));
            }
            let gated = client(&layer, &Script::always(Reply::ok()));
            let mut tasks = Vec::new();
            for (later, budget) in arrivals {
                sleep(later).await;
                let gated = gated.clone();
                tasks.push(tokio::spawn(async move {
                    let began = Instant::now();
                    let answer = fetch_within(&gated, budget).await;
                    (answer, began.elapsed(), budget)
                }));
                settle().await;
            }
            for task in tasks {
                match task.await.unwrap() {
                    (Ok(_), waited, budget) => prop_assert!(waited <= budget + millis(1), "{:?} of {:?}", waited, budget),
                    (Err(limited), waited, _) => prop_assert_eq!(waited, secs(0), "{}", limited),
                }
            }
            Ok(())
        })?;
    }

    #[test]
    fn who_comes_back_when_told_is_admitted(
        layer in any_layer(),
        arrivals in arrivals(),
        warm in any::<bool>(),
        seed in any::<u64>(),
    ) {
        run(async {
            fastrand::seed(seed);
            if warm {
                layer.hosts().penalize(HOST, secs(2));
            }
            let gated = client(&layer, &Script::always(Reply::ok()));
            for (later, budget) in arrivals {
                sleep(later).await;
                spawn_within(&gated, budget);
                settle().await;
            }
            // Behind all those who wait, as the last one to come.
            if let Err(limited) = poke(&gated).await {
                sleep(limited.retry_after()).await;
                settle().await;
                let again = poke(&gated).await;
                prop_assert!(again.is_ok(), "told {}, then {:?}", limited, again);
            }
            Ok(())
        })?;
    }
}

// --- numbers near their ends ------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn h09_the_longest_delay_and_the_widest_window_never_end() {
    for pacing in PACINGS {
        let layers = [
            patient().min_delay(Duration::MAX),
            patient().min_delay(Duration::MAX).delay_from(DelayFrom::Send),
            patient().quota(1, Duration::MAX),
            patient().quota(1, Duration::MAX).min_delay(Duration::MAX).jitter(Duration::MAX),
            patient().quota(1, Duration::MAX).min_delay(Duration::MAX).spacing(Duration::MAX).warm_for(Duration::MAX),
        ];
        for layer in layers {
            let script = Script::always(Reply::ok());
            let layer = layer.pacing(pacing);
            let gated = client(&layer, &script);
            fetch(&gated).await.unwrap();

            let [first, second] = [spawn(&gated), spawn(&gated)];
            let limited = fetch_within(&gated, secs(86_400 * 365)).await.unwrap_err();
            assert!(matches!(limited.reason(), Reason::Spacing | Reason::Quota), "{limited}");
            assert!(limited.retry_after() > secs(86_400 * 365), "{limited}");
            assert!(state(&layer).unwrap().next_send > secs(86_400 * 365));
            layer.hosts().penalize(HOST, Duration::MAX);
            timeout(secs(86_400 * 3), first).await.unwrap_err();
            second.abort();
            assert_eq!(script.times(), [secs(0)]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn h09_the_largest_quota_lets_everybody_go() {
    for pacing in PACINGS {
        for width in [Duration::MAX, Duration::from_nanos(1)] {
            let script = Script::always(Reply::ok());
            let gated = client(&patient().pacing(pacing).quota(u32::MAX, width), &script);
            super::burst(&gated, 200).await;
            assert_eq!(script.times(), [secs(0); 200]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn h09_the_smallest_of_everything_is_no_wait_worth_mentioning() {
    for pacing in PACINGS {
        let nano = Duration::from_nanos(1);
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).min_delay(nano).quota(1, nano).jitter(nano);
        super::burst(&client(&layer, &script), 20).await;
        assert!(*script.times().last().unwrap() <= millis(20), "{:?}", script.times());
    }
}

#[tokio::test(start_paused = true)]
async fn h09_limits_work_at_the_end_of_a_long_life() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).min_delay(secs(5)).quota(2, secs(20));
        let gated = client(&layer, &script);
        tokio::time::advance(secs(86_400 * 365 * 100)).await;
        super::burst(&gated, 4).await;
        let times = script.times();
        assert_eq!(times.iter().map(|at| *at - times[0]).collect::<Vec<_>>(), [0, 5, 20, 25].map(secs));
    }
}

// --- with refusals of the server's own --------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_refusal_that_comes_while_somebody_waits_is_told_at_once_when_it_leaves_no_time() {
    for pacing in PACINGS {
        let script = Script::list([Reply::ok(), Reply::status(429).header("retry-after", "30").after(secs(1))]);
        let gated = client(&patient().pacing(pacing).min_delay(secs(5)), &script);
        fetch(&gated).await.unwrap();
        let began = Instant::now();
        let refused = spawn(&gated);
        settle().await;
        let limited = fetch_within(&gated, secs(20)).await.unwrap_err();
        assert_eq!((limited.reason(), limited.asked()), (Reason::Cooldown, Some(secs(30))));
        assert!(limited.retry_after() >= secs(30), "{limited}");
        assert_eq!(began.elapsed(), secs(6));
        refused.await.unwrap().unwrap();
    }
}
