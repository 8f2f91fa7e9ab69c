//! Learned pacing without a clock: what it makes of a host, rule by rule.

mod bursts;
mod forbidden;

use std::collections::VecDeque;
use std::time::Duration;

use super::{Learned, MAX_PATIENCE, PATIENCE, Refusal, Rules, Ticket, Time};

const RULES: Rules = Rules {
    base_cooldown: Duration::from_secs(2),
    max_cooldown: Duration::from_secs(900),
    spacing: Duration::from_secs(1),
    warm_for: Duration::from_secs(120),
};
const HEADERLESS: Refusal = Refusal { hint: None, soft: false, again: false, within_quota: false, used_up: false };
const FORBIDDEN: Refusal = Refusal { soft: true, ..HEADERLESS };
/// When these tests begin.
const START: Time = Time(1_000_000_000_000_000);

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn asked(seconds: u64) -> Refusal {
    Refusal { hint: Some(secs(seconds)), ..HEADERLESS }
}

/// A host and a client that always has another request, answered at once. Instants are counted from the beginning.
#[derive(Clone)]
struct Host {
    pace: Learned,
    now: Time,
}

impl Host {
    fn new() -> Self {
        Self { pace: Learned::begin(START, 0), now: START }
    }

    /// One that has been refused until this long after it was served, and has been served since.
    fn with_gap(gap: u64) -> Self {
        let mut host = Self::new();
        host.served();
        host.refused(asked(gap));
        host.served();
        host
    }

    /// A gap of a minute for bursts of this many, found by the ladder.
    fn with_burst(size: usize) -> Self {
        let mut host = Self::new();
        host.play(2 * size + 1, limit(size, secs(60)));
        host
    }

    fn at(&self) -> Duration {
        self.now.since(START)
    }

    fn later(&mut self, by: Duration) {
        self.now = self.now.after(by);
    }

    /// The next request goes as soon as it may.
    fn sent(&mut self) -> Ticket {
        self.now = self.now.max(self.pace.ready());
        self.pace.sent(self.now, &RULES)
    }

    /// When the next request went that was served.
    fn served(&mut self) -> Duration {
        let ticket = self.sent();
        self.pace.succeeded(Some(ticket), &RULES);
        self.at()
    }

    /// The same of a request that had been refused before.
    fn served_again(&mut self) -> Duration {
        let ticket = Ticket { again: true, ..self.sent() };
        self.pace.succeeded(Some(ticket), &RULES);
        self.at()
    }

    /// When the next request went that was refused.
    fn refused(&mut self, refusal: Refusal) -> Duration {
        let ticket = self.sent();
        self.pace.throttled(self.now, Some(ticket), refusal, &RULES);
        self.at()
    }

    /// For how long nothing may be sent.
    fn held(&self) -> Duration {
        self.pace.hold_until().since(self.now)
    }

    /// Sends until so many are served. Gives back all of them, and which were.
    fn play(&mut self, served: usize, mut serves: impl FnMut(Duration) -> bool) -> Vec<(Duration, bool)> {
        let mut sends = Vec::new();
        let mut left = served;
        while left > 0 {
            assert!(sends.len() < 100 * served, "locked out: {sends:?}");
            let ticket = self.sent();
            let is_served = serves(self.at());
            if is_served {
                self.pace.succeeded(Some(ticket), &RULES);
                left -= 1;
            } else {
                self.pace.throttled(self.now, Some(ticket), HEADERLESS, &RULES);
            }
            sends.push((self.at(), is_served));
        }
        sends
    }
}

/// So many in any interval of this width.
fn limit(size: usize, window: Duration) -> impl FnMut(Duration) -> bool {
    let mut served = VecDeque::new();
    move |now| {
        while served.front().is_some_and(|first| *first + window <= now) {
            served.pop_front();
        }
        let is_served = served.len() < size;
        if is_served {
            served.push_back(now);
        }
        is_served
    }
}

/// A token every so often, and so many saved up.
fn bucket(size: u32, every: Duration) -> impl FnMut(Duration) -> bool {
    let mut full_at = Duration::ZERO;
    move |now| {
        let is_served = full_at.saturating_sub(now) <= every * (size - 1);
        if is_served {
            full_at = full_at.max(now) + every;
        }
        is_served
    }
}

fn refusals(sends: &[(Duration, bool)]) -> usize {
    sends.iter().filter(|(_, served)| !served).count()
}

// --- the gap ----------------------------------------------------------------------------------------------------------

#[test]
fn a_gap_is_found_by_the_ladder() {
    let mut host = Host::new();
    let sends = host.play(2, limit(1, secs(25)));
    assert_eq!(sends.iter().map(|send| send.0).collect::<Vec<_>>(), [0, 0, 2, 6, 14, 30].map(secs));
    assert_eq!((host.pace.gap(), host.pace.bracket()), (secs(30), (secs(14), secs(30))));
}

#[test]
fn a_gap_survives_success_and_idleness() {
    let mut host = Host::with_gap(30);
    assert_eq!(host.served(), secs(60));
    for _ in 0..5 {
        let gap = host.pace.gap();
        assert!(gap >= secs(1), "{gap:?}");
        host.later(secs(3600));
        let first = host.served();
        assert_eq!(host.served() - first, gap);
    }
}

#[test]
fn a_gap_is_bisected_as_long_as_the_bracket_is_wide() {
    let mut host = Host::new();
    host.play(2, limit(1, secs(25)));
    host.served();
    assert_eq!(host.pace.gap(), secs(22), "between 14 and 30");
    host.served();
    assert_eq!((host.pace.gap(), host.pace.bracket()), (secs(18), (secs(14), secs(22))), "a gap that holds is good");
    host.refused(HEADERLESS);
    assert_eq!(
        (host.pace.gap(), host.pace.bracket()),
        (secs(22), (secs(18), secs(22))),
        "one that does not is too short"
    );
}

#[test]
fn no_step_shortens_a_gap_by_more_than_a_third() {
    let mut host = Host::with_gap(30);
    assert_eq!(host.pace.bracket(), (secs(0), secs(30)));
    host.served();
    assert_eq!(host.pace.gap(), secs(20));
}

#[test]
fn a_gap_that_failed_costs_no_more_than_waiting_for_the_good_one() {
    let mut host = Host::new();
    host.play(2, limit(1, secs(25)));
    let last = host.served();
    assert_eq!(host.refused(HEADERLESS), last + secs(22));
    assert_eq!(host.served(), last + secs(30));
    assert_eq!(host.served(), last + secs(60), "and it is kept");
}

#[test]
fn a_gap_is_found_to_within_a_seventh() {
    for window in [3, 8, 25, 60, 119, 400] {
        let mut host = Host::new();
        host.play(30, limit(1, secs(window)));
        let (_, good) = host.pace.bracket();
        assert!(good >= secs(window) && good <= secs(window) * 7 / 6, "{window} s: {good:?}");
    }
}

#[test]
fn a_tight_gap_is_tried_again_ever_more_rarely() {
    let mut host = Host::new();
    let sends = host.play(1_000, limit(1, secs(25)));
    let between = sends.split(|(_, served)| !served).map(<[_]>::len);
    // Behind the search. Two are served at the good gap before anybody begins to count: the first one, and the step's.
    let patience: Vec<_> = between.filter(|served| *served > PATIENCE.into()).map(|served| served - 2).collect();
    assert_eq!(patience[..5], [16, 32, 64, 128, 128]);
    assert_eq!(patience[4], MAX_PATIENCE.into());
}

#[test]
fn a_host_that_has_become_generous_is_found_out() {
    let mut host = Host::new();
    let sends = host.play(40, limit(1, secs(30)));
    assert!(refusals(&sends) > 0 && host.pace.gap() >= secs(20));
    let sends = host.play(300, limit(1, secs(5)));
    assert!(host.pace.gap() < secs(6), "{:?}", host.pace.gap());
    let apart = sends[299].0 - sends[298].0;
    assert!(apart < secs(6), "{apart:?}");
}

#[test]
fn a_host_that_has_become_strict_is_found_out() {
    let mut host = Host::new();
    host.play(40, limit(1, secs(5)));
    assert!(host.pace.gap() < secs(6));
    let sends = host.play(40, limit(1, secs(30)));
    assert!(host.pace.gap() >= secs(20), "{:?}", host.pace.gap());
    assert!(refusals(&sends) < 15, "{sends:?}");
}

#[test]
fn a_gap_that_nobody_needs_is_forgotten() {
    let mut host = Host::with_gap(30);
    host.play(300, |_| true);
    assert_eq!((host.pace.gap(), host.pace.bracket()), (secs(0), (secs(0), secs(0))));
    host.later(secs(120));
    assert!(host.pace.is_cold(host.now));
}

#[test]
fn no_gap_is_longer_than_the_longest_cooldown() {
    let mut host = Host::new();
    let sends = host.play(20, limit(1, secs(880)));
    assert!(refusals(&sends) < 20, "{sends:?}");
    assert!(host.pace.gap() <= RULES.max_cooldown);
    // However long somebody waits before asking again.
    let mut host = Host::new();
    host.served();
    for _ in 0..3 {
        host.refused(HEADERLESS);
        host.later(secs(100_000));
    }
    host.served();
    assert!(host.pace.gap() <= RULES.max_cooldown, "{:?}", host.pace.gap());
}

// --- evidence ---------------------------------------------------------------------------------------------------------

#[test]
fn nobody_asking_teaches_nothing() {
    let mut host = Host::with_gap(30);
    let before = host.pace.gap();
    for _ in 0..20 {
        host.later(secs(600));
        host.served();
        assert_eq!(host.pace.gap(), before, "a host that is asked this rarely would have served any gap");
    }
}

#[test]
fn a_lone_refusal_after_many_successes_is_noise() {
    let mut host = Host::new();
    host.play(40, limit(1, secs(25)));
    while host.pace.gap != host.pace.hi {
        host.served();
    }
    for _ in 0..8 {
        host.served();
    }
    let before = (host.pace.gap(), host.pace.bracket().1);
    host.refused(HEADERLESS);
    host.served();
    assert_eq!((host.pace.gap(), host.pace.bracket().1), before);
}

#[test]
fn a_refusal_soon_after_the_last_one_makes_the_gap_longer() {
    let mut host = Host::with_gap(30);
    host.refused(HEADERLESS);
    host.served();
    let gap = host.pace.gap();
    assert!(gap > secs(30) && gap <= secs(45), "{gap:?}");
    assert_eq!(host.pace.bracket().0, secs(30));
}

#[test]
fn refusals_of_requests_sent_before_the_last_one_are_the_same_event() {
    let mut host = Host::new();
    let tickets = [host.sent(), host.sent(), host.sent()];
    assert!(host.pace.throttled(host.now.after(secs(1)), Some(tickets[0]), HEADERLESS, &RULES));
    let once = host.pace.clone();
    for stale in [Some(tickets[1]), None] {
        assert!(!host.pace.throttled(host.now.after(secs(1)), stale, HEADERLESS, &RULES));
        assert_eq!(host.pace, once);
    }
    assert!(!host.pace.throttled(host.now.after(secs(1)), Some(tickets[2]), asked(30), &RULES));
    assert_eq!(
        (host.pace.hold_until().since(START), host.pace.streak()),
        (secs(31), 1),
        "only a hint lengthens the hold"
    );
}

#[test]
fn successes_of_requests_sent_before_the_last_refusal_say_nothing() {
    let mut host = Host::new();
    let (first, second) = (host.sent(), host.sent());
    host.pace.throttled(host.now.after(secs(1)), Some(first), HEADERLESS, &RULES);
    let refused = host.pace.clone();
    for stale in [Some(second), None] {
        host.pace.succeeded(stale, &RULES);
        assert_eq!(host.pace, refused);
    }
}

// --- hints ------------------------------------------------------------------------------------------------------------

#[test]
fn a_hint_is_the_first_gap() {
    let host = Host::with_gap(30);
    assert_eq!(host.at(), secs(30));
    assert_eq!((host.pace.gap(), host.pace.bracket()), (secs(30), (secs(0), secs(30))));
}

#[test]
fn a_hint_of_a_gap_that_failed_is_the_longest_that_is_too_short() {
    let mut host = Host::with_gap(30);
    host.served();
    let last = host.at();
    assert_eq!(host.refused(asked(8)), last + secs(20));
    assert_eq!((host.pace.gap(), host.pace.bracket()), (secs(30), (secs(28), secs(30))), "20 s and 8 s more");
    assert_eq!(host.served(), last + secs(28), "the server's own word");
    assert_eq!(host.served(), last + secs(58));
}

#[test]
fn short_hints_are_guarded() {
    let mut host = Host::new();
    host.refused(asked(10));
    assert_eq!(host.held(), secs(10));
    host.refused(asked(10));
    assert_eq!(host.held(), secs(11));
    host.served();
    host.pace.used_up(host.now, secs(20), &RULES);
    assert_eq!(host.held(), secs(21));
}

#[test]
fn hints_that_were_good_are_not_guarded() {
    let mut host = Host::with_gap(30);
    host.refused(asked(10));
    assert_eq!(host.held(), secs(10));
    host.later(secs(40));
    host.refused(asked(10));
    assert_eq!(host.held(), secs(10), "refused, but not right behind the hint");
}

#[test]
fn a_hint_that_is_too_short_again_and_again_does_not_lock_anybody_out() {
    let mut host = Host::new();
    let holds: Vec<_> = (0..6)
        .map(|_| {
            host.refused(asked(1));
            host.held()
        })
        .collect();
    assert_eq!(holds, [1, 4, 8, 16, 32, 64].map(secs));
}

// --- hosts that punish ------------------------------------------------------------------------------------------------

#[test]
fn refusals_that_have_cost_nothing_so_far_are_followed_by_the_shortest_hold_that_may_do() {
    let mut host = Host::with_gap(30);
    host.served();
    host.refused(HEADERLESS);
    assert_eq!(host.held(), secs(10), "20 s of 30 s are over");
}

#[test]
fn a_host_that_punishes_is_given_its_whole_gap() {
    let mut host = Host::with_gap(30);
    host.served();
    host.refused(HEADERLESS);
    host.refused(HEADERLESS);
    assert!(host.held() >= secs(30), "{:?}", host.held());
    host.served();
    let gap = host.pace.gap();
    while host.pace.gap() == gap {
        host.served();
    }
    // And from then on.
    host.refused(HEADERLESS);
    assert!(host.held() >= gap, "{:?} of {gap:?}", host.held());
}

#[test]
fn a_ban_that_begins_anew_with_every_refusal_locks_nobody_out() {
    for window in [8, 25, 60, 300] {
        let mut host = Host::new();
        let mut banned_until = Duration::ZERO;
        let sends = host.play(30, |now| {
            let is_served = now >= banned_until;
            banned_until = now + secs(window);
            is_served
        });
        assert!(refusals(&sends) <= 18, "{window} s: {sends:?}");
    }
}

// --- what the server says of its quota --------------------------------------------------------------------------------

#[test]
fn a_host_that_says_what_is_left_needs_no_gap() {
    let mut host = Host::with_gap(30);
    host.pace.is_paced_by_the_server();
    assert_eq!((host.pace.gap(), host.pace.bracket()), (secs(0), (secs(0), secs(0))));
}

#[test]
fn a_host_that_has_refused_with_something_left_does() {
    let mut host = Host::new();
    host.served();
    host.refused(Refusal { within_quota: true, ..asked(30) });
    host.served();
    host.pace.is_paced_by_the_server();
    assert_eq!(host.pace.gap(), secs(30));
}

/// As a front server's error page, which has none of the application's headers, or a 403 that has them.
#[test]
fn so_does_one_whose_last_word_was_that_something_is_left() {
    for refusal in [HEADERLESS, Refusal { within_quota: true, ..FORBIDDEN }] {
        let mut host = Host::new();
        host.served();
        host.pace.is_paced_by_the_server();
        host.refused(refusal);
        host.served();
        assert!(host.pace.quota_lies, "{refusal:?}");
    }
    for refusal in [FORBIDDEN, Refusal { used_up: true, ..asked(30) }] {
        let mut host = Host::new();
        host.served();
        host.pace.is_paced_by_the_server();
        host.refused(refusal);
        assert!(!host.pace.quota_lies, "{refusal:?}");
    }
}

#[test]
fn a_streak_ends_with_the_warmth_and_the_gap_does_not() {
    let mut host = Host::with_gap(30);
    for _ in 0..4 {
        host.refused(HEADERLESS);
    }
    host.later(secs(24 * 3600));
    host.refused(HEADERLESS);
    assert_eq!(host.pace.streak(), 1);
    assert!(host.held() <= secs(30) && host.pace.gap() >= secs(30), "{:?}", host.held());
}

#[test]
fn a_quota_that_is_used_up_holds_and_counts_nothing() {
    let mut host = Host::new();
    host.served();
    host.pace.used_up(host.now, secs(30), &RULES);
    assert_eq!((host.held(), host.pace.streak(), host.pace.gap()), (secs(30), 0, secs(0)));
    host.pace.used_up(host.now, secs(5), &RULES);
    assert_eq!(host.held(), secs(30), "a hold only grows");
    host.pace.used_up(host.now, secs(5_000), &RULES);
    assert_eq!(host.held(), RULES.max_cooldown);
    host.served();
    assert!(host.pace.is_cold(host.now), "and leaves nothing behind");
}
