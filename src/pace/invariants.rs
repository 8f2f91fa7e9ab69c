//! What holds of learned pacing whatever a server, its users and the clock come up with. No exact number is tested here.

use std::mem::needs_drop;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use self::providers::{Hints, Limit, Provider};
use super::reactive::SOFT_HOLD;
use super::{Learned, Refusal, Rules, Ticket, Time};

mod providers;
mod served;
mod shadow;

const HARD: Refusal = Refusal { hint: None, soft: false, again: false, within_quota: false, used_up: false };
const SOFT: Refusal = Refusal { soft: true, ..HARD };
const RULES: Rules = Rules {
    base_cooldown: Duration::from_secs(2),
    max_cooldown: Duration::from_secs(900),
    spacing: Duration::from_secs(1),
    warm_for: Duration::from_secs(120),
};

/// A host costs so much, and nothing on the heap: what is known of it cannot grow.
const _: () = assert!(size_of::<Learned>() <= 96 && !needs_drop::<Learned>());

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn at(seconds: u64) -> Time {
    Time::at(secs(seconds))
}

/// The learned gap is kept in whole milliseconds, one at least.
fn at_least_a_milli(duration: Duration) -> Duration {
    let milli = Duration::from_millis(1);
    let below = Duration::from_nanos(u64::from(duration.subsec_nanos() % 1_000_000));
    if below.is_zero() { duration.max(milli) } else { duration.saturating_add(milli - below) }
}

// --- any event, any number ----------------------------------------------------------------------------------------

/// Anything that can happen to a host, in any order.
#[derive(Clone, Debug)]
enum Event {
    Later(u64),
    Sent,
    Throttled {
        ticket: Origin,
        refusal: Refusal,
    },
    Succeeded {
        ticket: Origin,
        /// The request has been refused softly before.
        again: bool,
    },
    UsedUp(Duration),
    PacedByTheServer,
    Penalized(Duration),
    /// The user has changed the spacing.
    Spaced(Duration),
}

/// Where a ticket comes from.
#[derive(Clone, Debug)]
enum Origin {
    /// The request was sent before anything was recorded.
    Unrecorded,
    /// One of those sent so far.
    Sent(Index),
    /// A redirect has led here from another host.
    Elsewhere { ago: u64 },
}

impl Origin {
    fn ticket(&self, now: Time, sent: &[Ticket]) -> Option<Ticket> {
        match self {
            Self::Sent(index) if !sent.is_empty() => Some(*index.get(sent)),
            Self::Unrecorded | Self::Sent(_) => None,
            Self::Elsewhere { ago } => {
                Some(Ticket { at: Time(now.0.saturating_sub(*ago)), binding: false, again: false })
            }
        }
    }
}

fn any_duration() -> impl Strategy<Value = Duration> {
    prop_oneof![
        6 => (0..200_u64).prop_map(Duration::from_secs),
        3 => (0..5_000_u64).prop_map(Duration::from_millis),
        1 => any::<u64>().prop_map(Duration::from_nanos),
        1 => (any::<u64>(), 0..1_000_000_000_u32).prop_map(|(s, n)| Duration::new(s, n)),
        1 => Just(Duration::ZERO),
        1 => Just(Duration::MAX),
    ]
}

fn any_nanos() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0..400_000_000_000_u64,
        4 => 0..5_000_000_000_u64,
        1 => any::<u64>(),
        1 => u64::MAX - 1000..=u64::MAX,
    ]
}

/// The gate's clock never says zero.
fn any_beginning() -> impl Strategy<Value = Time> {
    prop_oneof![Just(1), 1..u64::MAX, u64::MAX - 3_600_000_000_000..=u64::MAX].prop_map(Time)
}

/// When recording begins, so many have just been sent.
fn in_flight() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0..20_u32, 1 => any::<u32>()]
}

fn any_rules() -> impl Strategy<Value = Rules> {
    let times = (any_duration(), any_duration(), any_duration(), any_duration());
    prop_oneof![
        Just(RULES),
        times.prop_map(|(base_cooldown, max_cooldown, spacing, warm_for)| Rules {
            base_cooldown,
            max_cooldown,
            spacing,
            warm_for
        }),
    ]
}

fn any_refusal() -> impl Strategy<Value = Refusal> {
    let hinted = any_duration().prop_map(|hint| Refusal { hint: Some(hint), ..HARD });
    let soft = any::<bool>().prop_map(|again| Refusal { again, ..SOFT });
    prop_oneof![4 => Just(HARD), 3 => hinted, 2 => soft, 1 => Just(Refusal { within_quota: true, ..HARD })]
}

fn any_event() -> impl Strategy<Value = Event> {
    let origin = || {
        prop_oneof![
            1 => Just(Origin::Unrecorded),
            8 => any::<Index>().prop_map(Origin::Sent),
            1 => any_nanos().prop_map(|ago| Origin::Elsewhere { ago }),
        ]
    };
    prop_oneof![
        6 => any_nanos().prop_map(Event::Later),
        6 => Just(Event::Sent),
        4 => (origin(), any_refusal()).prop_map(|(ticket, refusal)| Event::Throttled { ticket, refusal }),
        6 => (origin(), any::<bool>()).prop_map(|(ticket, again)| Event::Succeeded { ticket, again }),
        1 => any_duration().prop_map(Event::UsedUp),
        1 => Just(Event::PacedByTheServer),
        1 => any_duration().prop_map(Event::Penalized),
        1 => any_duration().prop_map(Event::Spaced),
    ]
}

proptest! {
    /// No input overflows; whatever happens, nobody waits longer than the cap, and no event does what it must not.
    #[test]
    fn no_event_breaks_a_rule(
        mut rules in any_rules(),
        begin in any_beginning(),
        in_flight in in_flight(),
        events in vec(any_event(), 1..60),
    ) {
        let mut now = begin;
        let mut pace = Learned::begin(now, in_flight);
        let mut sent = Vec::new();
        let mut last_event = LastEvent::At(None);
        let mut last_send = Time::default();
        let mut longest_spacing = rules.spacing;
        let cap = rules.max_cooldown;
        let longest = at_least_a_milli(cap);
        for event in events {
            let before = pace.clone();
            let cold = before.is_cold(now);
            match event {
                Event::Later(by) => now = now.after(Duration::from_nanos(by)),
                Event::Spaced(spacing) => {
                    rules.spacing = spacing;
                    longest_spacing = longest_spacing.max(spacing);
                }
                Event::Sent => {
                    sent.push(pace.sent(now, &rules));
                    last_send = now;
                    prop_assert_eq!(pace.gap(), before.gap());
                    prop_assert!(pace.streak() == before.streak() || streak_is_over(&before, now));
                    prop_assert!(pace.hold_until() == before.hold_until() || cold);
                    if cold {
                        last_event = LastEvent::Perhaps;
                    }
                }
                Event::Throttled { ticket, refusal } => {
                    let ticket = ticket.ticket(now, &sent);
                    let new_event = pace.throttled(now, ticket, refusal, &rules);
                    if let Some(stale) = last_event.is_stale(ticket).filter(|_| !cold) {
                        prop_assert_eq!(new_event, !stale);
                    }
                    refused(&before, &pace, now, refusal, new_event, &rules)?;
                    last_event = last_event.after_refusal(now, new_event, cold);
                }
                Event::Succeeded { ticket, again } => {
                    let ticket = ticket.ticket(now, &sent).map(|ticket| Ticket { again, ..ticket });
                    pace.succeeded(ticket, &rules);
                    if ticket.is_none() || last_event.is_stale(ticket) == Some(true) {
                        prop_assert_eq!(&pace, &before);
                    } else if last_event.is_stale(ticket) == Some(false) {
                        prop_assert_eq!(pace.streak(), 0);
                    }
                    prop_assert_eq!(pace.hold_until(), before.hold_until());
                    prop_assert!(pace.warm_until() <= before.warm_until().max(now));
                    let sent = ticket.map_or(last_send, |ticket| last_send.max(ticket.at));
                    prop_assert!(pace.ready() <= before.ready().max(sent.after(longest)));
                }
                Event::UsedUp(reset) => {
                    pace.used_up(now, reset, &rules);
                    prop_assert_eq!((pace.streak(), pace.gap()), (before.streak(), before.gap()));
                    prop_assert!(pace.hold_until() >= now.after(reset.min(cap)));
                    prop_assert!(pace.hold_until() <= before.hold_until().max(now.after(cap)));
                }
                Event::PacedByTheServer => {
                    pace.is_paced_by_the_server();
                    prop_assert!(pace.gap() == before.gap() || pace.gap().is_zero());
                    prop_assert_eq!((pace.streak(), pace.hold_until()), (before.streak(), before.hold_until()));
                }
                Event::Penalized(hold) => {
                    pace.penalize(now, hold, &rules);
                    prop_assert_eq!(pace.gap(), before.gap());
                    prop_assert!(pace.streak() == before.streak() || streak_is_over(&before, now));
                    prop_assert!(pace.hold_until() >= now.after(hold.min(cap)));
                    prop_assert!(pace.hold_until() <= before.hold_until().max(now.after(cap)));
                    if cold {
                        last_event = LastEvent::Perhaps;
                    }
                }
            }
            // What is left of a hold shrinks with time alone.
            prop_assert!(pace.hold_until().max(now) >= before.hold_until());
            has_sense(&pace, &rules)?;
            prop_assert!(pace.ready() <= now.max(last_send).after(longest.max(longest_spacing)));
        }
    }

    /// Who is never refused never waits, whatever others in the queue have made the gate remember.
    #[test]
    fn a_host_that_never_refuses_is_always_ready(
        rules in any_rules(),
        begin in any_beginning(),
        in_flight in in_flight(),
        calls in vec((any_nanos(), any_nanos()), 1..60),
    ) {
        let mut now = begin;
        let mut pace = Learned::begin(now, in_flight);
        for (pause, latency) in calls {
            now = now.after(Duration::from_nanos(pause));
            let ticket = pace.sent(now, &rules);
            now = now.after(Duration::from_nanos(latency));
            pace.succeeded(Some(ticket), &rules);
            prop_assert!(pace.ready() <= now && !pace.is_serial(now) && pace.is_cold(now));
            prop_assert_eq!(pace.spacing(now, &rules), Duration::ZERO);
        }
    }
}

/// What a test knows of the last throttle event.
#[derive(Clone, Copy, Debug)]
enum LastEvent {
    At(Option<Time>),
    /// The host has been cold since: it may be forgotten.
    Perhaps,
}

impl LastEvent {
    /// Whether a request was sent before the last throttle.
    fn is_stale(self, ticket: Option<Ticket>) -> Option<bool> {
        match self {
            Self::At(last) => Some(last.is_some_and(|last| ticket.is_none_or(|ticket| ticket.at <= last))),
            Self::Perhaps => None,
        }
    }

    fn after_refusal(self, now: Time, new_event: bool, cold: bool) -> Self {
        match (new_event, cold) {
            (true, _) => Self::At(Some(now)),
            (false, true) => Self::Perhaps,
            (false, false) => self,
        }
    }
}

/// The bracket is one, and the gap no longer than the cap, whatever has been learnt.
fn has_sense(pace: &Learned, rules: &Rules) -> Result<(), TestCaseError> {
    let Learned { gap, lo, hi, .. } = *pace;
    // In a streak it is perhaps being measured.
    prop_assert!(lo <= hi && gap <= hi || hi == 0 && pace.streak() > 0, "{gap} in {lo}..{hi}: {pace:?}");
    prop_assert!(Duration::from_millis(gap.into()) <= at_least_a_milli(rules.max_cooldown), "{pace:?}");
    Ok(())
}

/// A streak lives as long as the host is warm, a gap longer.
fn streak_is_over(pace: &Learned, now: Time) -> bool {
    let warm = now < pace.warm_until().max(pace.hold_until()).max(pace.spaced_until);
    pace.is_cold(now) || (pace.gap() > Duration::ZERO && !warm)
}

/// What a refusal may change, and what it must.
fn refused(
    before: &Learned,
    pace: &Learned,
    now: Time,
    refusal: Refusal,
    new_event: bool,
    rules: &Rules,
) -> Result<(), TestCaseError> {
    let hint = refusal.hint.filter(|hint| !hint.is_zero());
    let soft = refusal.soft && hint.is_none();
    let cap = if soft { rules.max_cooldown.min(SOFT_HOLD) } else { rules.max_cooldown };
    let streak = if streak_is_over(before, now) { 0 } else { before.streak() };
    if new_event {
        let escalates = !(soft && refusal.again);
        prop_assert_eq!(pace.streak(), streak.saturating_add(u32::from(escalates)));
        // On trial it is the floor that keeps sends apart, not the gap that is to be proved.
        prop_assert!(pace.gap() >= before.gap() || before.evidence == 0);
        prop_assert!(pace.hold_until() >= now.after(hint.unwrap_or(rules.base_cooldown).min(cap)));
    } else {
        prop_assert_eq!((pace.streak(), pace.gap()), (streak, before.gap()));
        match hint {
            Some(hint) => prop_assert!(pace.hold_until() >= now.after(hint.min(cap))),
            None => prop_assert_eq!(pace.hold_until(), before.hold_until()),
        }
    }
    prop_assert!(pace.hold_until() <= before.hold_until().max(now.after(cap)));
    prop_assert!(pace.warm_until() >= before.warm_until() || before.is_cold(now));
    prop_assert!(pace.warm_until() >= pace.hold_until() || !new_event);
    Ok(())
}

/// A host that is known to serve one per ten seconds.
fn one_per_ten_seconds() -> (Learned, Time) {
    let mut pace = Learned::begin(at(1), 0);
    let mut provider = Provider::new(Limit::Sliding { sends: 1, window: secs(10) }, Hints::None, false);
    let mut now = at(1);
    while pace.gap().is_zero() || pace.streak() > 0 {
        now = now.max(pace.ready());
        let ticket = Some(pace.sent(now, &RULES));
        now = now.after(Duration::from_millis(1));
        match provider.answer(now, 0) {
            Ok(()) => pace.succeeded(ticket, &RULES),
            Err(refusal) => drop(pace.throttled(now, ticket, refusal, &RULES)),
        }
    }
    (pace, now)
}

#[test]
fn a_gap_is_no_longer_than_the_cap_even_when_the_spacing_is() {
    let rules = Rules { max_cooldown: secs(2), spacing: secs(5), ..RULES };
    let mut pace = Learned::begin(at(1), 0);
    // A burst, then the refusals that end it.
    for second in 1..=3 {
        let ticket = pace.sent(at(second), &rules);
        pace.succeeded(Some(ticket), &rules);
    }
    for second in [4, 10] {
        let ticket = pace.sent(at(second), &rules);
        pace.throttled(at(second), Some(ticket), HARD, &rules);
    }
    let ticket = pace.sent(at(20), &rules);
    pace.succeeded(Some(ticket), &rules);
    assert!(pace.gap() <= secs(2), "{:?}", pace.gap());
}

#[test]
fn a_headerless_403_in_one_event_with_a_429_is_not_alone() {
    let mut pace = Learned::begin(at(1), 0);
    let [first, second] = [at(1), at(2)].map(|now| Some(pace.sent(now, &RULES)));
    pace.throttled(at(3), first, SOFT, &RULES);
    pace.throttled(at(4), second, HARD, &RULES);
    let now = pace.ready();
    let ticket = Some(pace.sent(now, &RULES));
    pace.succeeded(ticket, &RULES);
    assert!(pace.warm_until() > now, "who is refused with a 429 stays warm");
}

#[test]
fn a_forgiven_403_says_nothing_about_later_refusals() {
    let (mut pace, now) = one_per_ten_seconds();
    let refused = |pace: &mut Learned, now: Time, refusal| {
        let now = now.max(pace.ready());
        let ticket = Some(pace.sent(now, &RULES));
        pace.throttled(now, ticket, refusal, &RULES);
        now
    };
    let mut unforgiven = pace.clone();
    // A forbidden URL between two that are not.
    let mut later = refused(&mut pace, now, SOFT);
    later = later.max(pace.ready());
    let ticket = Some(pace.sent(later, &RULES));
    pace.succeeded(ticket, &RULES);
    // Twice too early, as the server said itself: no sign of a host that punishes.
    for (pace, now) in [(&mut pace, later), (&mut unforgiven, now)] {
        let now = refused(pace, now, Refusal { hint: Some(secs(3)), ..HARD });
        refused(pace, now, HARD);
    }
    assert_eq!(pace.extends, unforgiven.extends);
}

#[test]
fn a_forgiven_403_leaves_the_next_streak_to_be_judged() {
    let (mut pace, mut now) = one_per_ten_seconds();
    let ask = |pace: &mut Learned, now: &mut Time, again| {
        *now = pace.ready().max(*now);
        let ticket = Ticket { again, ..pace.sent(*now, &RULES) };
        *now = now.after(Duration::from_millis(1));
        Some(ticket)
    };
    while pace.gap == pace.hi {
        let ticket = ask(&mut pace, &mut now, false);
        pace.succeeded(ticket, &RULES);
    }
    // The trial of a shorter gap ends with a 403, and its repetition is served.
    let ticket = ask(&mut pace, &mut now, false);
    pace.throttled(now, ticket, SOFT, &RULES);
    let ticket = ask(&mut pace, &mut now, true);
    pace.succeeded(ticket, &RULES);
    let known = pace.hi;
    // From now on there is no more than one per hour.
    for _ in 0..11 {
        let ticket = ask(&mut pace, &mut now, false);
        pace.throttled(now, ticket, HARD, &RULES);
    }
    let ticket = ask(&mut pace, &mut now, false);
    pace.succeeded(ticket, &RULES);
    assert!(pace.gap > known, "{} is not more than {known}", pace.gap);
}

#[test]
fn a_streak_is_over_when_the_host_is_cold() {
    let mut pace = Learned::begin(at(1), 0);
    for second in [1, 4] {
        let ticket = Some(pace.sent(at(second), &RULES));
        pace.throttled(at(second), ticket, HARD, &RULES);
    }
    assert!(pace.is_cold(at(1000)));
    let ticket = Some(pace.sent(at(1000), &RULES));
    pace.succeeded(ticket, &RULES);
    assert_eq!(pace.gap(), Duration::ZERO);
}
