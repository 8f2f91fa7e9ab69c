//! The limits that are set beforehand, against a model that keeps every send there ever was.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::{Bounds, DelayFrom, Proactive};
use crate::pace::{Forecast, Time};

mod forecast;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn at(seconds: u64) -> Time {
    Time::at(secs(seconds))
}

/// Up to so many milliseconds, and rather often none.
fn up_to(millis: u64) -> impl Strategy<Value = Duration> {
    prop_oneof![1 => Just(0), 3 => 0..millis].prop_map(Duration::from_millis)
}

fn any_bounds() -> impl Strategy<Value = Bounds> {
    let delay_from = prop_oneof![Just(DelayFrom::Completion), Just(DelayFrom::Send)];
    (up_to(3000), delay_from, 0..6_u32, up_to(20_000)).prop_map(|(min_delay, delay_from, sends, width)| Bounds {
        min_delay,
        delay_from,
        quota: (sends, width),
        jitter: Duration::ZERO,
    })
}

/// When the quota has room from `from` on, found by counting.
fn room(sends: &[Time], from: Time, (most, width): (u32, Duration)) -> Time {
    if most == 0 || width.is_zero() {
        return from;
    }
    let counted = |now: Time| sends.iter().filter(|send| send.after(width) > now).count();
    // Room comes only when one of them leaves.
    let leaves = sends.iter().map(|send| send.after(width));
    let candidates = leaves.filter(|leaves| *leaves > from).chain([from]);
    candidates.filter(|now| counted(*now) < most as usize).min().expect("in the end all of them have left")
}

/// No interval of the width, its end not included, holds more than the quota.
fn keeps_quota(sends: &[Time], (most, width): (u32, Duration)) -> bool {
    let within = |from: &Time| sends.iter().filter(|at| (*from..from.after(width)).contains(*at)).count();
    most == 0 || sends.iter().all(|from| within(from) <= most as usize)
}

fn ready(known: &Proactive, bounds: &Bounds) -> Time {
    known.delayed_until(bounds).max(known.quota_until(bounds))
}

#[test]
fn a_quota_of_two_in_ten_seconds_rolls() {
    let bounds = Bounds { quota: (2, secs(10)), ..Bounds::default() };
    let mut known = Proactive::default();
    for (sent, next) in [(1, 0), (4, 11), (11, 14), (20, 21)] {
        known.sent(at(sent), at(sent), &bounds);
        assert_eq!(known.quota_until(&bounds), at(next), "after the one at {sent} s");
    }
}

#[test]
fn a_delay_from_completion_counts_from_the_last_one_to_end() {
    let bounds = Bounds { min_delay: secs(5), ..Bounds::default() };
    let mut known = Proactive::default();
    for second in [1, 2, 3] {
        known.sent(at(second), at(second), &bounds);
        assert_eq!(known.delayed_until(&bounds), Time::default(), "none has ended");
    }
    for (completed, next) in [(4, 9), (7, 12), (6, 12)] {
        known.completed(at(completed));
        assert_eq!(known.delayed_until(&bounds), at(next));
    }
}

#[test]
fn a_delay_from_send_counts_from_the_last_one_sent() {
    let bounds = Bounds { min_delay: secs(5), delay_from: DelayFrom::Send, ..Bounds::default() };
    let mut known = Proactive::default();
    known.sent(at(1), at(1), &bounds);
    known.completed(at(4));
    assert_eq!(known.delayed_until(&bounds), at(6));
}

#[test]
fn without_a_delay_nothing_is_delayed() {
    for delay_from in [DelayFrom::Completion, DelayFrom::Send] {
        let bounds = Bounds { delay_from, quota: (2, secs(10)), jitter: secs(5), ..Bounds::default() };
        let mut known = Proactive::default();
        known.sent(at(1), at(1), &bounds);
        known.completed(at(1));
        // An instant, even one that is past, would be jittered.
        assert_eq!(ready(&known, &bounds), Time::default());
    }
}

#[test]
fn the_wait_is_the_longest_and_not_the_sum() {
    let bounds = Bounds { min_delay: secs(3), delay_from: DelayFrom::Send, quota: (1, secs(4)), jitter: secs(0) };
    let mut known = Proactive::default();
    known.sent(at(10), at(10), &bounds);
    assert_eq!(ready(&known, &bounds), at(14));
    assert_eq!(Forecast::new(at(12), secs(2), Time::END, &bounds, &known, 2).behind(2), at(14 + 2 * 4));
}

#[test]
fn zero_is_off_and_jitter_alone_limits_nothing() {
    let off = Bounds { jitter: secs(5), ..Bounds::default() };
    for quota in [(0, secs(10)), (10, Duration::ZERO)] {
        let off = Bounds { quota, ..off };
        let mut known = Proactive::default();
        known.sent(at(1), at(1), &off);
        assert!(off.is_off() && known.is_idle(at(1), &off));
        assert_eq!(known.quota_until(&off), Time::default());
    }
    assert!(!Bounds { min_delay: secs(1), ..off }.is_off());
    assert!(!Bounds { quota: (1, secs(1)), ..off }.is_off());
}

#[test]
fn a_send_that_is_reported_ahead_takes_its_place_in_the_window() {
    let bounds = Bounds { quota: (2, secs(10)), ..Bounds::default() };
    let mut known = Proactive::default();
    // A retry below the gate is going to send at 5 s, and another request goes before that.
    known.sent(at(3), at(5), &bounds);
    known.sent(at(4), at(4), &bounds);
    assert_eq!(known.quota_until(&bounds), at(15));
}

#[test]
fn a_smaller_quota_counts_what_was_sent_before_it_was_set() {
    let [wide, narrow] = [4, 2].map(|sends| Bounds { quota: (sends, secs(10)), ..Bounds::default() });
    let mut known = Proactive::default();
    for second in [1, 2, 3, 4] {
        known.sent(at(second), at(second), &wide);
    }
    assert_eq!(known.quota_until(&narrow), at(13));
    known.sent(at(13), at(13), &narrow);
    assert_eq!(known.quota_until(&narrow), at(14));
}

proptest! {
    /// Each at the earliest instant that the bounds allow, and no earlier, whenever they come and however long they take.
    #[test]
    fn sends_keep_the_bounds_and_wait_no_longer_than_that(
        bounds in any_bounds(),
        calls in vec((up_to(8000), up_to(5000)), 1..40),
    ) {
        let mut known = Proactive::default();
        let mut now = at(1);
        let mut sends: Vec<Time> = Vec::new();
        let mut completions: Vec<Time> = Vec::new();
        for (pause, latency) in calls {
            let wish = now.after(pause);
            // Callers overlap: what has ended by then is known by then.
            let (ended, running) = completions.iter().partition::<Vec<_>, _>(|ended| **ended <= wish);
            ended.iter().for_each(|ended| known.completed(*ended));
            let last = match bounds.delay_from {
                DelayFrom::Completion => ended.iter().max().copied(),
                DelayFrom::Send => sends.last().copied(),
            };
            let delayed = last.map_or(wish, |last| wish.max(last.after(bounds.min_delay)));
            now = wish.max(ready(&known, &bounds));
            prop_assert_eq!(now, room(&sends, delayed, bounds.quota));
            known.sent(now, now, &bounds);
            sends.push(now);
            completions = ended;
            completions.extend(running);
            completions.push(now.after(latency));
        }
        prop_assert!(keeps_quota(&sends, bounds.quota), "{sends:?}");
    }

    /// What is idle may be forgotten: nobody could tell.
    #[test]
    fn an_idle_host_is_like_one_never_seen(
        bounds in any_bounds(),
        pauses in vec(up_to(8000), 1..20),
        later in up_to(30_000),
    ) {
        let mut known = Proactive::default();
        let mut now = at(1);
        for pause in pauses {
            now = now.after(pause).max(ready(&known, &bounds));
            known.sent(now, now, &bounds);
            known.completed(now);
        }
        now = now.after(later);
        let delay_is_over = later >= bounds.min_delay;
        let window_is_over = later >= bounds.quota.1 || bounds.quota.0 == 0;
        prop_assert_eq!(known.is_idle(now, &bounds), delay_is_over && window_is_over);
        if known.is_idle(now, &bounds) {
            let mut fresh = Proactive::default();
            for _ in 0..6 {
                prop_assert_eq!(now.max(ready(&known, &bounds)), now.max(ready(&fresh, &bounds)));
                now = now.max(ready(&known, &bounds));
                for host in [&mut known, &mut fresh] {
                    host.sent(now, now, &bounds);
                    host.completed(now);
                }
            }
        }
    }
}
