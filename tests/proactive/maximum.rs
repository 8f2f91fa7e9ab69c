//! The wait is the longest of all that apply, never a sum.

use std::time::Duration;

use tokio::time::sleep;
use tower_host_gate::{DelayFrom, HostGateLayer, Pacing, Reason};

use super::support::script::{Reply, Script};
use super::{HOST, PACINGS, burst, client, fetch, millis, patient, poke, run, secs, state};

/// What keeps the second request waiting, each from the first one on; zero is off.
#[derive(Clone, Copy, Debug)]
struct Waits {
    delay: Duration,
    quota: Duration,
    spacing: Duration,
    cooldown: Duration,
}

impl Waits {
    /// Everything off, short and long, in all combinations.
    fn all() -> Vec<Self> {
        let lengths = [secs(0), secs(4), secs(9)];
        let mut all = Vec::new();
        for delay in lengths {
            for quota in lengths {
                for spacing in lengths {
                    all.extend(lengths.map(|cooldown| Self { delay, quota, spacing, cooldown }));
                }
            }
        }
        all
    }

    fn longest(self) -> Duration {
        self.delay.max(self.quota).max(self.spacing).max(self.cooldown)
    }

    fn layer(self) -> HostGateLayer {
        patient().min_delay(self.delay).quota(1, self.quota).spacing(self.spacing)
    }
}

#[test]
fn of_delay_quota_spacing_and_cooldown_the_longest_counts() {
    for pacing in PACINGS {
        for from in [DelayFrom::Completion, DelayFrom::Send] {
            for waits in Waits::all() {
                let times = run(async {
                    let script = Script::always(Reply::ok());
                    let layer = waits.layer().pacing(pacing).delay_from(from);
                    let gated = client(&layer, &script);
                    // Warm, so that sends are spaced.
                    layer.hosts().penalize(HOST, millis(1));
                    fetch(&gated).await.unwrap();
                    layer.hosts().penalize(HOST, waits.cooldown);
                    fetch(&gated).await.unwrap();
                    script.times()
                });
                assert_eq!(times[1] - times[0], waits.longest(), "{pacing:?}, {from:?}, {waits:?}");
            }
        }
    }
}

/// What is told of a wait is the same as what is waited.
#[test]
fn a_shed_request_and_a_snapshot_name_the_longest() {
    for pacing in PACINGS {
        for waits in Waits::all().into_iter().filter(|waits| !waits.longest().is_zero()) {
            run(async {
                let layer = waits.layer().pacing(pacing);
                let gated = client(&layer, &Script::always(Reply::ok()));
                layer.hosts().penalize(HOST, millis(1));
                fetch(&gated).await.unwrap();
                layer.hosts().penalize(HOST, waits.cooldown);
                let limited = poke(&gated).await.unwrap_err();
                assert_eq!(limited.retry_after(), waits.longest(), "{waits:?}");
                let seen = state(&layer).unwrap();
                assert_eq!(seen.next_send, waits.longest(), "{waits:?}");
                assert_eq!(seen.cooldown, waits.cooldown, "{waits:?}");
            });
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_response_counts_towards_the_waits_that_begin_at_the_send() {
    let script = Script::always(Reply::ok().after(secs(7)));
    let layer = patient().quota(1, secs(10)).min_delay(secs(2));
    burst(&client(&layer, &script), 4).await;
    assert_eq!(script.times(), [0, 10, 20, 30].map(secs), "7 + 2 s are less than 10 s");
}

/// Delay and quota take turns in being the longest.
#[tokio::test(start_paused = true)]
async fn within_the_window_the_delay_counts_and_at_its_end_the_quota() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).min_delay(secs(2)).quota(3, secs(10));
        burst(&client(&layer, &script), 8).await;
        assert_eq!(script.times(), [0, 2, 4, 10, 12, 14, 20, 22].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn s07_a_delay_does_not_keep_cooldowns_from_escalating() {
    for pacing in PACINGS {
        let script = Script::always(Reply::status(429));
        let layer = patient().pacing(pacing).min_delay(secs(10));
        let gated = client(&layer, &script);
        for streak in 1..=6 {
            fetch(&gated).await.unwrap();
            assert_eq!(state(&layer).unwrap().streak, streak);
        }
        // Cooldowns of 2, 4 and 8 s, less than the delay, then of 16 and 32 s.
        assert_eq!(script.times(), [0, 10, 20, 30, 46, 78].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn a_cooldown_that_comes_while_somebody_waits_for_a_limit_is_waited_for_too() {
    for pacing in PACINGS {
        for layer in [patient().min_delay(secs(5)), patient().quota(1, secs(5))] {
            let script = Script::always(Reply::ok());
            let layer = layer.pacing(pacing);
            let gated = client(&layer, &script);
            fetch(&gated).await.unwrap();
            let waiting = super::spawn(&gated);
            sleep(secs(2)).await;
            layer.hosts().penalize(HOST, secs(10));
            waiting.await.unwrap().unwrap();
            assert_eq!(script.times(), [0, 12].map(secs));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_outlasts_a_cooldown_is_waited_for_after_it() {
    for pacing in PACINGS {
        let script = Script::list([Reply::status(429).header("retry-after", "2.5")]);
        let layer = patient().pacing(pacing).quota(1, secs(30));
        burst(&client(&layer, &script), 2).await;
        assert_eq!(script.times(), [0, 30].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn penalize_only_extends_and_zero_does_nothing() {
    for pacing in PACINGS {
        let script = Script::always(Reply::ok());
        let layer = patient().pacing(pacing).spacing(secs(0)).min_delay(secs(8)).quota(2, secs(20));
        let gated = client(&layer, &script);
        fetch(&gated).await.unwrap();
        layer.hosts().penalize(HOST, secs(0));
        layer.hosts().penalize(HOST, secs(3));
        fetch(&gated).await.unwrap();
        layer.hosts().penalize(HOST, secs(40));
        layer.hosts().penalize(HOST, secs(1));
        layer.hosts().penalize(HOST, secs(0));
        fetch(&gated).await.unwrap();
        assert_eq!(script.times(), [0, 8, 48].map(secs));
    }
}

/// The learned gap is one more wait among the others.
#[tokio::test(start_paused = true)]
async fn a_learned_gap_and_a_delay_are_not_added_up() {
    // One per 25 s, which is found out before any limit is set.
    let mut last = None;
    let script = Script::new(move |sent| {
        if last.is_none_or(|last| sent.at - last >= secs(25)) {
            last = Some(sent.at);
            Reply::ok()
        } else {
            Reply::status(429)
        }
    });
    let layer = patient().pacing(Pacing::Learned);
    let gated = client(&layer, &script);
    for _ in 0..12 {
        fetch(&gated).await.unwrap();
    }
    let gap = state(&layer).unwrap().gap;
    assert!(gap > secs(10), "{gap:?}");
    for delay in [gap / 2, gap * 2] {
        layer.hosts().set_limits(HOST, tower_host_gate::Limits::default().min_delay(delay));
        fetch(&gated).await.unwrap();
        let seen = state(&layer).unwrap();
        assert_eq!((seen.next_send, seen.reason), (delay.max(seen.gap), Some(Reason::Spacing)));
    }
}
