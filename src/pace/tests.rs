//! Reactive pacing without a clock: the rules one by one, and what must hold at any input.

use std::time::Duration;

use proptest::prelude::*;

use super::{Reactive, Refusal, Rules, Time};

const RULES: Rules = Rules {
    base_cooldown: Duration::from_secs(2),
    max_cooldown: Duration::from_secs(60),
    spacing: Duration::from_secs(1),
    warm_for: Duration::from_secs(120),
};
const HEADERLESS: Refusal = Refusal { hint: None, soft: false, again: false, within_quota: false, used_up: false };

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn at(seconds: u64) -> Time {
    Time::at(secs(seconds))
}

fn asked(seconds: u64) -> Refusal {
    Refusal { hint: Some(secs(seconds)), soft: false, again: false, within_quota: false, used_up: false }
}

#[test]
fn headerless_cooldowns_double_up_to_the_cap() {
    let mut pace = Reactive::default();
    let mut now = at(100);
    for hold in [2, 4, 8, 16, 32, 60, 60] {
        assert!(pace.throttled(now, Some(now), HEADERLESS, &RULES));
        assert_eq!(pace.ready().since(now), secs(hold));
        // The next one is sent when it may be, and refused.
        now = pace.ready();
    }
    assert_eq!(pace.streak(), 7);
}

#[test]
fn a_hint_is_taken_as_it_is_below_the_cap() {
    for (hint, hold) in [(1, 1), (59, 59), (61, 60), (86_400, 60)] {
        let mut pace = Reactive::default();
        pace.throttled(at(0), None, asked(hint), &RULES);
        assert_eq!(pace.ready(), at(hold));
    }
}

#[test]
fn a_hold_only_grows() {
    let mut pace = Reactive::default();
    pace.throttled(at(0), None, asked(30), &RULES);
    pace.throttled(at(1), Some(at(1)), asked(1), &RULES);
    assert_eq!(pace.ready(), at(30));
}

#[test]
fn refusals_of_one_burst_are_one_event() {
    let mut pace = Reactive::default();
    assert!(pace.throttled(at(10), Some(at(9)), HEADERLESS, &RULES));
    for sent in [Some(at(8)), Some(at(10)), None] {
        assert!(!pace.throttled(at(11), sent, HEADERLESS, &RULES));
        assert_eq!((pace.streak(), pace.ready()), (1, at(12)));
    }
    // One of them says how long: that lengthens, and escalates nothing.
    assert!(!pace.throttled(at(11), Some(at(9)), asked(20), &RULES));
    assert_eq!((pace.streak(), pace.ready()), (1, at(31)));
}

#[test]
fn only_a_success_sent_after_the_last_throttle_ends_the_streak() {
    let mut pace = Reactive::default();
    pace.throttled(at(10), Some(at(9)), HEADERLESS, &RULES);
    for sent in [None, Some(at(9)), Some(at(10))] {
        pace.succeeded(sent);
        assert_eq!(pace.streak(), 1);
    }
    pace.succeeded(Some(at(12)));
    assert_eq!(pace.streak(), 0);
}

#[test]
fn warmth_counts_from_the_end_of_the_cooldown() {
    let mut pace = Reactive::default();
    pace.throttled(at(0), None, asked(60), &RULES);
    assert_eq!(pace.warm_until(), at(180));
    assert!(!pace.is_cold(at(179)) && pace.is_cold(at(180)));
}

#[test]
fn warm_sends_are_spaced_and_cold_ones_are_not() {
    let mut pace = Reactive::default();
    pace.throttled(at(0), None, HEADERLESS, &RULES);
    pace.sent(at(2), &RULES);
    assert_eq!(pace.ready(), at(3));
    pace.sent(at(121), &RULES);
    assert_eq!(pace.ready(), at(122));
    pace.sent(at(122), &RULES);
    assert_eq!(pace.ready(), at(122));
}

#[test]
fn a_streak_ends_when_the_host_is_cold() {
    let mut pace = Reactive::default();
    pace.throttled(at(0), None, HEADERLESS, &RULES);
    pace.throttled(at(2), Some(at(2)), HEADERLESS, &RULES);
    assert_eq!(pace.warm_until(), at(126));
    let mut warm = pace.clone();
    warm.throttled(at(125), Some(at(125)), HEADERLESS, &RULES);
    assert_eq!(warm.streak(), 3);
    pace.throttled(at(126), Some(at(126)), HEADERLESS, &RULES);
    assert_eq!(pace.streak(), 1);
    // A penalty does not bring an old streak back to life either.
    let mut cold = warm.clone();
    let later = cold.warm_until();
    cold.penalize(later, secs(1), &RULES);
    cold.throttled(later.after(secs(1)), Some(later.after(secs(1))), HEADERLESS, &RULES);
    assert_eq!(cold.streak(), 1);
}

#[test]
fn a_soft_refusal_never_holds_longer_than_a_minute() {
    let rules = Rules { max_cooldown: secs(900), ..RULES };
    let mut pace = Reactive::default();
    let mut now = at(0);
    for _ in 0..12 {
        pace.throttled(
            now,
            Some(now),
            Refusal { hint: None, soft: true, again: false, within_quota: false, used_up: false },
            &rules,
        );
        assert!(pace.ready().since(now) <= secs(60));
        now = pace.ready();
    }
    pace.throttled(now, Some(now), HEADERLESS, &rules);
    assert_eq!(pace.ready().since(now), secs(900));
}

/// Anything that can happen to a host.
#[derive(Clone, Debug)]
enum Event {
    Throttled { sent: Option<u64>, hint: Option<Duration>, soft: bool },
    Succeeded { sent: Option<u64> },
    Sent,
    Penalized(Duration),
    Later(u64),
}

fn any_duration() -> impl Strategy<Value = Duration> {
    prop_oneof![
        (0..200_u64).prop_map(Duration::from_secs),
        any::<u64>().prop_map(Duration::from_nanos),
        (any::<u64>(), 0..1_000_000_000_u32).prop_map(|(s, n)| Duration::new(s, n)),
        Just(Duration::MAX),
    ]
}

fn any_instant() -> impl Strategy<Value = u64> {
    prop_oneof![0..400_000_000_000_u64, any::<u64>(), u64::MAX - 1000..=u64::MAX]
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (proptest::option::of(any_instant()), proptest::option::of(any_duration()), any::<bool>())
            .prop_map(|(sent, hint, soft)| Event::Throttled { sent, hint, soft }),
        proptest::option::of(any_instant()).prop_map(|sent| Event::Succeeded { sent }),
        Just(Event::Sent),
        any_duration().prop_map(Event::Penalized),
        any_instant().prop_map(Event::Later),
    ]
}

proptest! {
    /// No input overflows; holds only grow and stay below the cap; a refusal never shortens anything.
    #[test]
    fn invariants(
        base in any_duration(), cap in any_duration(), spacing in any_duration(), warm_for in any_duration(),
        begin in any_instant(),
        events in proptest::collection::vec(any_event(), 1..40),
    ) {
        let rules = Rules { base_cooldown: base, max_cooldown: cap, spacing, warm_for };
        let mut pace = Reactive::default();
        let mut now = Time(begin);
        for event in events {
            let before = pace.clone();
            match event {
                Event::Throttled { sent, hint, soft } => {
                    let new_event = pace.throttled(now, sent.map(Time), Refusal { hint, soft, again: false, within_quota: false, used_up: false }, &rules);
                    if before.is_cold(now) {
                        prop_assert!(new_event && pace.streak() == 1);
                    } else {
                        prop_assert_eq!(pace.streak(), before.streak().saturating_add(u32::from(new_event)));
                    }
                    prop_assert!(pace.hold_until() <= before.hold_until().max(now.after(cap)));
                }
                Event::Succeeded { sent } => {
                    pace.succeeded(sent.map(Time));
                    prop_assert_eq!(pace.ready(), before.ready());
                }
                Event::Sent => pace.sent(now, &rules),
                Event::Penalized(hold) => {
                    pace.penalize(now, hold, &rules);
                    prop_assert!(pace.hold_until() <= before.hold_until().max(now.after(cap)));
                }
                Event::Later(by) => now = now.after(Duration::from_nanos(by)),
            }
            prop_assert!(pace.ready() >= before.ready());
            prop_assert!(pace.warm_until() >= before.warm_until());
        }
    }

    /// Escalation is monotone and ends at the cap, for any streak.
    #[test]
    fn escalation_is_monotone(base in 1..u64::MAX, cap in any_duration(), streak in 1..u32::MAX) {
        let base = Duration::from_nanos(base);
        let (this, next) = (super::reactive::escalate(base, streak), super::reactive::escalate(base, streak + 1));
        prop_assert!(this <= next);
        prop_assert!(this.min(cap) <= cap);
        prop_assert_eq!(super::reactive::escalate(base, u32::MAX), Duration::MAX);
    }
}
