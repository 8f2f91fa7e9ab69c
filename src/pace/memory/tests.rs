//! A pace that is remembered goes on as one that was never interrupted, and one that somebody made up does no harm.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::pace::Refusal;

const RULES: Rules = Rules {
    base_cooldown: Duration::from_secs(2),
    max_cooldown: Duration::from_secs(900),
    spacing: Duration::from_secs(1),
    warm_for: Duration::from_secs(120),
};

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A clock has room for what was before it began.
fn noon() -> Time {
    Time::at(secs(1_000_000))
}

fn any_pacing() -> impl Strategy<Value = Pacing> {
    prop_oneof![Just(Pacing::Learned), Just(Pacing::Reactive)]
}

// --- as if nothing had happened ---------------------------------------------------------------------------------------

/// Requests one after the other: when each wants to be sent after the last one, how long it takes, both in milliseconds,
/// and what becomes of it.
#[derive(Clone, Debug)]
struct Visit {
    times: usize,
    idle: u64,
    latency: u64,
    answer: Answer,
}

/// One request that goes as soon as it may, and is answered at once.
fn answered(answer: Answer) -> Visit {
    Visit { times: 1, idle: 0, latency: 0, answer }
}

#[derive(Clone, Debug)]
enum Answer {
    Success,
    Refusal(Refusal),
    UsedUp(Duration),
    PacedByTheServer,
    Penalty(Duration),
}

fn any_visit() -> impl Strategy<Value = Visit> {
    let millis = |most: u64| (0..most).prop_map(Duration::from_millis);
    let refusal = (prop::option::of(millis(100_000)), any::<[bool; 3]>()).prop_map(|(hint, flags)| {
        let [soft, again, within_quota] = flags;
        Answer::Refusal(Refusal { hint, soft: soft && hint.is_none(), again, within_quota, used_up: false })
    });
    let answer = prop_oneof![
        8 => Just(Answer::Success),
        5 => Just(Answer::Refusal(Refusal::default())),
        1 => refusal,
        1 => millis(60_000).prop_map(Answer::UsedUp),
        1 => Just(Answer::PacedByTheServer),
        1 => millis(30_000).prop_map(Answer::Penalty),
    ];
    let idle = prop_oneof![6 => Just(0), 2 => 0..30_000_u64, 1 => 0..10_000_000_u64];
    let times = prop_oneof![4 => Just(1), 1 => 2..40_usize];
    (times, idle, 0..2_000_u64, answer).prop_map(|(times, idle, latency, answer)| Visit {
        times,
        idle,
        latency,
        answer,
    })
}

fn visit(pace: &mut Pace, now: Time, next: &Visit) -> Time {
    (0..next.times).fold(now, |now, _| {
        let sent_at = now.after(Duration::from_millis(next.idle)).max(pace.ready());
        let ticket = Some(pace.sent(sent_at, &RULES));
        let now = sent_at.after(Duration::from_millis(next.latency));
        match &next.answer {
            Answer::Success => pace.succeeded(ticket, &RULES),
            Answer::Refusal(refusal) => {
                pace.throttled(now, ticket, *refusal, &RULES);
            }
            Answer::UsedUp(reset) => pace.used_up(now, *reset, &RULES),
            Answer::PacedByTheServer => pace.is_paced_by_the_server(),
            Answer::Penalty(hold) => pace.penalize(now, *hold, &RULES),
        }
        now
    })
}

/// A request that goes now is refused now.
fn refuse(pace: &mut Pace, now: Time) {
    let ticket = pace.sent(now, &RULES);
    assert!(pace.throttled(now, Some(ticket), Refusal::default(), &RULES));
}

proptest! {
    #[test]
    fn a_host_goes_on_where_it_was(
        pacing in any_pacing(),
        before in vec(any_visit(), 0..40),
        passed in prop_oneof![Just(0), 0..100_000_u64, 0..10_000_000_u64].prop_map(Duration::from_millis),
        after in vec(any_visit(), 1..40),
    ) {
        let mut pace = Pace::begin(pacing, noon(), 0);
        let taken = before.iter().fold(noon(), |now, next| visit(&mut pace, now, next));
        // Another process, another beginning.
        let (mut old, mut new) = (taken.after(passed), noon().after(secs(77)));
        let mut recalled = Pace::recall(&pace.remember(taken), passed, pacing, new, &RULES);
        for next in &after {
            prop_assert_eq!(pace.ready().since(old), recalled.ready().since(new));
            prop_assert_eq!(pace.warm_until().since(old), recalled.warm_until().since(new));
            prop_assert_eq!((pace.streak(), pace.gap()), (recalled.streak(), recalled.gap()));
            prop_assert_eq!(pace.is_cold(old), recalled.is_cold(new));
            old = visit(&mut pace, old, next);
            new = visit(&mut recalled, new, next);
        }
    }
}

/// Through all that learning from an honest host leads to, a gap tried again that was too short included.
#[test]
fn what_is_found_out_is_kept_at_every_step() {
    let mut pace = Pace::begin(Pacing::Learned, noon(), 0);
    let (mut now, mut last_ok) = (noon(), None);
    let mut tried_again = 0;
    for _ in 0..300 {
        now = now.max(pace.ready());
        let free = last_ok.is_none_or(|last_ok| now.since(last_ok) >= secs(25));
        let answer = if free { Answer::Success } else { Answer::Refusal(Refusal::default()) };
        last_ok = if free { Some(now) } else { last_ok };
        visit(&mut pace, now, &answered(answer));
        let recalled = Pace::recall(&pace.remember(now), Duration::ZERO, Pacing::Learned, now, &RULES);
        assert_eq!((recalled.gap(), recalled.bracket()), (pace.gap(), pace.bracket()));
        assert_eq!(recalled.ready(), pace.ready());
        tried_again += usize::from(pace.gap() < pace.bracket().0);
    }
    assert!(tried_again > 0, "{pace:?}");
}

#[test]
fn a_lone_forbidden_url_is_still_no_lesson() {
    let mut pace = Pace::begin(Pacing::Learned, noon(), 0);
    let soft = Refusal { soft: true, ..Refusal::default() };
    let now = visit(&mut pace, noon(), &answered(Answer::Refusal(soft)));
    let mut recalled = Pace::recall(&pace.remember(now), Duration::ZERO, Pacing::Learned, now, &RULES);
    visit(&mut recalled, now, &answered(Answer::Success));
    assert_eq!((recalled.streak(), recalled.gap()), (0, Duration::ZERO));
}

#[test]
fn a_wait_is_rounded_up_to_whole_milliseconds() {
    let mut pace = Pace::begin(Pacing::Reactive, noon(), 0);
    pace.penalize(noon(), Duration::from_nanos(1_500_001), &RULES);
    let recalled = Pace::recall(&pace.remember(noon()), Duration::ZERO, Pacing::Reactive, noon(), &RULES);
    assert_eq!(recalled.ready().since(noon()), Duration::from_millis(2));
}

// --- from one pacing to the other -------------------------------------------------------------------------------------

/// One success per 25 s, found by three refusals.
fn taught() -> (Pace, Time) {
    let mut pace = Pace::begin(Pacing::Learned, noon(), 0);
    let refusal = || Answer::Refusal(Refusal::default());
    let answers = [Answer::Success, refusal(), refusal(), refusal(), refusal(), Answer::Success];
    let now = answers.into_iter().fold(noon(), |now, answer| visit(&mut pace, now, &answered(answer)));
    assert!(pace.gap() >= secs(20), "{pace:?}");
    (pace, now)
}

#[test]
fn reactive_pacing_takes_cooldown_warmth_and_streak_of_learned() {
    let (mut pace, now) = taught();
    refuse(&mut pace, now);
    let reactive = Pace::recall(&pace.remember(now), Duration::ZERO, Pacing::Reactive, now, &RULES);
    assert_eq!(reactive.hold_until(), pace.hold_until());
    assert_eq!(reactive.warm_until(), pace.warm_until());
    assert_eq!((reactive.streak(), reactive.gap()), (1, Duration::ZERO));
    let cold = now.after(secs(900 + 120));
    assert!(reactive.is_cold(cold) && !pace.is_cold(cold), "and forgets as it always does");
}

#[test]
fn learned_pacing_takes_cooldown_warmth_and_streak_of_reactive() {
    let mut pace = Pace::begin(Pacing::Reactive, noon(), 0);
    for _ in 0..3 {
        let now = pace.ready().max(noon());
        refuse(&mut pace, now);
    }
    let now = pace.hold_until();
    let mut learned = Pace::recall(&pace.remember(now), Duration::ZERO, Pacing::Learned, now, &RULES);
    assert_eq!((learned.streak(), learned.gap()), (3, Duration::ZERO));
    assert_eq!((learned.ready(), learned.warm_until()), (pace.ready(), pace.warm_until()));
    refuse(&mut learned, now);
    assert_eq!(learned.hold_until().since(now), secs(16), "the fourth of the streak");
}

// --- what anybody may have written ------------------------------------------------------------------------------------

fn any_moment() -> impl Strategy<Value = Moment> {
    prop::option::of(prop_oneof![Just(i64::MAX), Just(i64::MIN), any::<i64>(), -2_000_000..2_000_000_i64])
}

fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), 0..2_000_000_u64, 0..300_u64]
}

fn any_memory() -> impl Strategy<Value = Memory> {
    let moments = [any_moment(), any_moment(), any_moment(), any_moment()];
    let lesson = ([any_moment(), any_moment(), any_moment()], vec(any_number(), 12), any::<[bool; 9]>());
    (moments, any_number(), prop::option::of(lesson)).prop_map(|(moments, streak, lesson)| {
        let [hold_until_ms, spaced_until_ms, warm_until_ms, last_throttle_ms] = moments;
        let learned = lesson.map(|(moments, numbers, flags)| {
            let [burst_sent_ms, last_ok_ms, run_sent_ms] = moments;
            let [only_soft, was_warm, judged, early, extends, hinted, short_hints, quota_left, quota_lies] = flags;
            Lesson {
                burst_sent_ms,
                last_ok_ms,
                run_sent_ms,
                hold_ms: numbers[0],
                gap_ms: numbers[1],
                hi_ms: numbers[2],
                lo_ms: numbers[3],
                tried_ms: numbers[4],
                run: numbers[5],
                since: numbers[6],
                need: numbers[7],
                patience: numbers[8],
                evidence: numbers[9],
                burst: numbers[10],
                out: numbers[11],
                only_soft,
                was_warm,
                judged,
                early,
                extends,
                hinted,
                short_hints,
                quota_left,
                quota_lies,
            }
        });
        Memory { hold_until_ms, spaced_until_ms, warm_until_ms, last_throttle_ms, streak, learned }
    })
}

proptest! {
    #[test]
    fn no_memory_holds_a_host_for_longer_than_the_layer_may(
        memory in any_memory(),
        pacing in any_pacing(),
        passed in prop_oneof![Just(Duration::ZERO), Just(Duration::MAX), any::<u64>().prop_map(Duration::from_millis)],
        now in prop_oneof![Just(1), Just(u64::MAX), any::<u64>()].prop_map(Time),
        visits in vec(any_visit(), 0..30),
    ) {
        let mut pace = Pace::recall(&memory, passed, pacing, now, &RULES);
        prop_assert!(pace.ready() <= now.after(RULES.max_cooldown), "{pace:?}");
        prop_assert!(pace.warm_until() <= now.after(RULES.max_cooldown).after(RULES.warm_for), "{pace:?}");
        if let Pace::Learned(Learned { gap, lo, hi, need, burst_sent, streak, .. }) = &pace {
            prop_assert!(pace.gap() <= RULES.max_cooldown);
            prop_assert!(lo <= gap.max(hi) && (gap <= hi || (*hi == 0 && *streak > 0)), "{pace:?}");
            prop_assert!((*gap == 0 || *need > 0) && *burst_sent <= now, "{pace:?}");
        }
        // Whatever happens next overflows nothing, and no later hold is longer either.
        let mut now = now;
        for next in &visits {
            now = visit(&mut pace, now, next);
            prop_assert!(pace.gap() <= RULES.max_cooldown);
            prop_assert!(pace.ready() <= now.after(RULES.max_cooldown), "{pace:?}");
        }
    }
}
