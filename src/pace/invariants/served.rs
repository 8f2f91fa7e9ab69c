//! Who keeps asking is served, again and again, and seldom refused. The bounds are coarse, for they hold of any parameters:
//! what nothing is learnt of is refused at least once per success, 200 times here.

use std::time::Duration;

use proptest::prelude::*;

use super::providers::{Hints, Limit, Provider, any_hints};
use super::{HARD, RULES, SOFT, at, has_sense, secs};
use crate::pace::reactive::SOFT_HOLD;
use crate::pace::{Learned, Refusal, Rules, Ticket};

/// What a serial client, who always wants the next one, gets of a provider.
struct Tally {
    refused: u32,
    /// The most refusals between two successes.
    in_a_row: u32,
}

/// A client of one host, which repeats a request that a headerless 403 has refused once.
struct Asking<'a> {
    rules: &'a Rules,
    latency: Duration,
    /// Every so many-th URL is forbidden.
    forbidden: Option<u32>,
}

impl Asking<'_> {
    fn until_served(&self, times: u32, provider: &mut Provider) -> Result<Tally, TestCaseError> {
        let mut now = at(1);
        let mut pace = Learned::begin(now, 0);
        let mut tally = Tally { refused: 0, in_a_row: 0 };
        let (mut served, mut in_a_row) = (0, 0);
        let (mut url, mut again) = (1, false);
        // Enough for any bound below; a client that is locked out for ever ends here.
        for _ in 0..20 * times {
            now = now.max(pace.ready());
            let ticket = Some(Ticket { again, ..pace.sent(now, self.rules) });
            let is_forbidden = self.forbidden.is_some_and(|every| url % every == 0);
            let answer = provider.answer(now, 0);
            now = now.after(self.latency);
            let refusal = match answer {
                Ok(()) => is_forbidden.then_some(SOFT),
                Err(refusal) => Some(refusal),
            };
            match refusal {
                None => {
                    pace.succeeded(ticket, self.rules);
                    (served, in_a_row) = (served + 1, 0);
                }
                Some(refusal) => drop(pace.throttled(now, ticket, Refusal { again, ..refusal }, self.rules)),
            }
            if answer.is_err() {
                tally.refused += 1;
                in_a_row += 1;
                tally.in_a_row = tally.in_a_row.max(in_a_row);
            }
            again = !again && refusal.is_some_and(|refusal| refusal.soft);
            url += u32::from(!again);
            has_sense(&pace, self.rules)?;
            if served == times {
                break;
            }
        }
        Ok(tally)
    }
}

/// So many refusals in a row take the ladder from `base` to the cap, and one or two more are for where it begins.
fn ladder(rules: &Rules) -> u32 {
    (rules.max_cooldown.as_nanos() / rules.base_cooldown.as_nanos()).ilog2() + 3
}

#[test]
fn refusals_in_a_row_climb_to_the_cap_however_short_the_hints() {
    for hint in [Duration::from_nanos(1), Duration::from_millis(10), secs(1)] {
        let mut pace = Learned::begin(at(1), 0);
        let mut now = at(1);
        for _ in 0..ladder(&RULES) {
            now = now.max(pace.ready());
            let ticket = Some(pace.sent(now, &RULES));
            pace.throttled(now, ticket, Refusal { hint: Some(hint), ..HARD }, &RULES);
        }
        assert_eq!(pace.ready().since(now), RULES.max_cooldown, "{hint:?}");
    }
}

/// Rules, a latency, and a window that fits into the cap twice.
fn any_circumstances() -> impl Strategy<Value = (Rules, Duration, Duration)> {
    (500..5_000_u64, 4..500_u32, 0.01..0.5_f64, 1..1_000_u64).prop_map(|(base, factor, share, latency)| {
        let base_cooldown = Duration::from_millis(base);
        let rules = Rules { base_cooldown, max_cooldown: base_cooldown * factor, ..RULES };
        (rules, Duration::from_millis(latency), rules.max_cooldown.mul_f64(share))
    })
}

proptest! {
    /// One per window, counted or punished.
    #[test]
    fn whoever_keeps_asking_is_served_again_and_again(
        (rules, latency, window) in any_circumstances(),
        extends in any::<bool>(),
        hints in any_hints(),
    ) {
        let limit = if extends { Limit::Extends { window } } else { Limit::Sliding { sends: 1, window } };
        let asking = Asking { rules: &rules, latency, forbidden: None };
        let tally = asking.until_served(200, &mut Provider::new(limit, hints, false))?;
        prop_assert!(tally.in_a_row <= ladder(&rules), "{} in a row", tally.in_a_row);
        prop_assert!(tally.refused <= 40, "{} refused of 200 served", tally.refused);
    }

    /// There is nothing to be learnt but the longest window, which comes once in nine.
    #[test]
    fn a_wandering_window_is_followed((rules, latency, window) in any_circumstances()) {
        let limit = Limit::Drifting { window: window * 2 / 3 };
        let asking = Asking { rules: &rules, latency, forbidden: None };
        let tally = asking.until_served(200, &mut Provider::new(limit, Hints::None, false))?;
        prop_assert!(tally.in_a_row <= ladder(&rules), "{} in a row", tally.in_a_row);
        prop_assert!(tally.refused <= 80, "{} refused of 200 served", tally.refused);
    }

    /// Several per window, or saved up.
    #[test]
    fn a_host_that_gives_bursts_is_learnt_as_well(
        (rules, latency, window) in any_circumstances(),
        kind in 0..3_usize,
        hints in any_hints(),
        size in 2..20_u32,
    ) {
        let sends = size as usize;
        let limits = [Limit::Sliding { sends, window }, Limit::Fixed { sends, window }, Limit::Bucket { size, every: window }];
        let asking = Asking { rules: &rules, latency, forbidden: None };
        let tally = asking.until_served(200, &mut Provider::new(limits[kind].clone(), hints, false))?;
        prop_assert!(tally.in_a_row <= ladder(&rules), "{} in a row", tally.in_a_row);
        prop_assert!(tally.refused <= 100, "{} refused of 200 served", tally.refused);
    }

    /// URLs that are forbidden among others, on a host that refuses whoever is too fast with a 429.
    #[test]
    fn forbidden_urls_do_not_confuse_what_is_learnt(
        (rules, latency, window) in any_circumstances(),
        sends in 1..20_usize,
        spacing in 0..2_000_u64,
        every in 3..20_u32,
    ) {
        let rules = Rules { spacing: Duration::from_millis(spacing), ..rules };
        let asking = Asking { rules: &rules, latency, forbidden: Some(every) };
        let mut provider = Provider::new(Limit::Sliding { sends, window }, Hints::None, false);
        let tally = asking.until_served(200, &mut provider)?;
        prop_assert!(tally.in_a_row <= ladder(&rules), "{} in a row", tally.in_a_row);
        prop_assert!(tally.refused <= 140, "{} refused of 200 served", tally.refused);
    }

    /// Two 403s may be about their URLs: so the window has to be long enough for three in a row, and a hold to outlast it.
    #[test]
    fn a_host_that_says_403_is_learnt_as_well(base in 500..5_000_u64, share in 0.0..1.0_f64, latency in 1..500_u64) {
        let base_cooldown = Duration::from_millis(base);
        let shortest = base_cooldown * 3 + secs(3);
        let window = shortest + (SOFT_HOLD / 2 - shortest).mul_f64(share);
        let mut provider = Provider::new(Limit::Sliding { sends: 1, window }, Hints::None, true);
        let rules = Rules { base_cooldown, ..RULES };
        let asking = Asking { rules: &rules, latency: Duration::from_millis(latency), forbidden: None };
        let tally = asking.until_served(200, &mut provider)?;
        prop_assert!(tally.in_a_row <= ladder(&rules), "{} in a row", tally.in_a_row);
        prop_assert!(tally.refused <= 40, "{} refused of 200 served", tally.refused);
    }
}
