//! Forecasts against a simulation of what happens when each goes as soon as it may.

use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::{any_bounds, at, keeps_quota, ready, room, secs, up_to};
use crate::pace::{Bounds, Burst, DelayFrom, Forecast, Proactive, Time};

/// What a forecast is made of.
#[derive(Clone, Debug)]
struct Known {
    bounds: Bounds,
    /// Before now.
    sends: Vec<Time>,
    proactive: Proactive,
    now: Time,
    spacing: Duration,
    rhythm: Rhythm,
}

/// How long the spacing of the host lasts.
#[derive(Clone, Copy, Debug)]
enum Rhythm {
    /// A send at this instant or later is not followed by it.
    Until(Time),
    ForEver,
    /// For ever, within bursts.
    Bursts(Burst),
}

impl Known {
    /// As the gate does it: the last spaced send goes one spacing after the last that has to be followed by it.
    fn forecast(&self, ahead: usize) -> Forecast {
        let (last, burst) = match self.rhythm {
            Rhythm::Until(until) => (until.after(self.spacing), None),
            Rhythm::ForEver => (Time::END, None),
            Rhythm::Bursts(burst) => (Time::END, Some(burst)),
        };
        Forecast::new(self.now, self.spacing, last, &self.bounds, &self.proactive, ahead).in_bursts(burst)
    }

    /// The next sends, each of them at the earliest allowed instant and over at once. `dice` say what jitter adds.
    fn simulate(&self, dice: &[u8]) -> Vec<Time> {
        let mut known = self.clone();
        let mut paced = Time::default();
        let mut delayed = known.proactive.delayed_until(&known.bounds);
        let mut next = Vec::new();
        for roll in dice {
            let earliest = room(&known.sends, paced.max(delayed), known.bounds.quota);
            // For the first one they have been thrown already: it is known to go now.
            let jitter = if next.is_empty() { Duration::ZERO } else { known.bounds.jitter * u32::from(*roll) / 255 };
            let now = known.now.max(earliest.after(jitter));
            paced = known.rhythm.sent(now, known.spacing);
            if !known.bounds.min_delay.is_zero() {
                delayed = now.after(known.bounds.min_delay);
            }
            known.sends.push(now);
            known.now = now;
            next.push(now);
        }
        next
    }
}

impl Rhythm {
    /// When the next one may go.
    fn sent(&mut self, now: Time, spacing: Duration) -> Time {
        let spaced = now.after(spacing);
        match self {
            Self::Until(until) if now >= *until => Time::default(),
            Self::Until(_) | Self::ForEver => spaced,
            Self::Bursts(burst) => {
                if burst.out >= burst.size || now.since(burst.sent) >= burst.gap {
                    (burst.sent, burst.out) = (now, 0);
                }
                burst.out += 1;
                if burst.out >= burst.size { spaced.max(burst.sent.after(burst.gap)) } else { spaced }
            }
        }
    }
}

fn any_rhythm() -> impl Strategy<Value = Rhythm> {
    let burst = (up_to(20_000), 2..8_u32, 1..8_u32, up_to(20_000)).prop_map(|(ago, size, out, gap)| Burst {
        sent: Time::at(secs(70) - ago),
        out: out.min(size),
        size,
        gap,
    });
    prop_oneof![
        (0..40_u64).prop_map(|seconds| Rhythm::Until(at(100 + seconds))),
        Just(Rhythm::ForEver),
        burst.prop_map(Rhythm::Bursts),
    ]
}

fn any_known() -> impl Strategy<Value = Known> {
    (any_bounds(), vec(up_to(4000), 0..8), up_to(5000), up_to(4000), any_rhythm()).prop_map(
        |(bounds, pauses, idle, spacing, rhythm)| {
            let mut proactive = Proactive::default();
            let mut now = at(70);
            let mut sends = Vec::new();
            for pause in pauses {
                now = now.after(pause).max(ready(&proactive, &bounds));
                proactive.sent(now, now, &bounds);
                proactive.completed(now);
                sends.push(now);
            }
            let mut now = now.after(idle);
            // As the pace says: nothing goes before a burst that is complete is over.
            if let Rhythm::Bursts(burst) = rhythm {
                if burst.out >= burst.size {
                    now = now.max(burst.sent.after(burst.gap));
                }
            }
            Known { bounds, sends, proactive, now, spacing, rhythm }
        },
    )
}

proptest! {
    #[test]
    fn behind_so_many_is_so_many_steps(known in any_known(), jitter in up_to(3000), ahead in 0..60_usize) {
        let bounds = Bounds { jitter, ..known.bounds };
        let forecast = Known { bounds, ..known }.forecast(ahead);
        let mut stepped = forecast.clone();
        for _ in 0..ahead {
            let before = stepped.next;
            stepped.advance();
            prop_assert!(stepped.next >= before);
        }
        prop_assert_eq!(forecast.behind(ahead), stepped.next);
    }

    /// Exact, while the spacing does not end.
    #[test]
    fn a_forecast_is_what_happens_when_all_go_as_soon_as_they_may(known in any_known(), ahead in 0..60_usize) {
        // The end of the spacing has a test of its own.
        let rhythm = if let Rhythm::Until(_) = known.rhythm { Rhythm::ForEver } else { known.rhythm };
        let known = Known { rhythm, ..known };
        let sends = known.simulate(&vec![0; ahead + 1]);
        prop_assert_eq!(known.forecast(ahead).behind(ahead), sends[ahead]);
        prop_assert!(keeps_quota(&[&known.sends[..], &sends].concat(), known.bounds.quota));
    }

    /// The end of the spacing is foreseen to a step, or not at all where a delay goes on.
    #[test]
    fn a_forecast_foresees_the_end_of_the_spacing(known in any_known(), until in 100..140_u64, ahead in 0..60_usize) {
        let known = Known { rhythm: Rhythm::Until(at(until)), ..known };
        let sent = known.simulate(&vec![0; ahead + 1])[ahead];
        let foreseen = known.forecast(ahead).behind(ahead);
        prop_assert!(foreseen >= sent, "{foreseen:?} is before {sent:?}");
        if known.bounds.min_delay.is_zero() {
            prop_assert!(foreseen <= sent.after(known.spacing), "{foreseen:?} is long after {sent:?}");
        }
    }

    #[test]
    fn a_forecast_never_understates_whatever_the_dice_say(
        known in any_known(),
        jitter in up_to(3000),
        dice in vec(any::<u8>(), 1..30),
    ) {
        let known = Known { bounds: Bounds { jitter, ..known.bounds }, ..known };
        let mut forecast = known.forecast(dice.len());
        // Other limits drag a burst out: one that jitter has dragged beyond its end may do for more than one that it has not.
        let is_dragged = matches!(known.rhythm, Rhythm::Bursts(_));
        let slack = if is_dragged { jitter } else { Duration::ZERO };
        for sent in known.simulate(&dice) {
            prop_assert!(forecast.next.after(slack) >= sent, "{:?} is before {sent:?}", forecast.next);
            forecast.advance();
        }
    }

    /// No number overflows, and time goes one way.
    #[test]
    fn any_numbers_will_do(
        first in any::<u64>(),
        last in any::<u64>(),
        [step, min_delay, width, jitter] in [(); 4].map(|()| any_length()),
        sends in any::<u32>(),
        before in vec(any::<u64>(), 0..6),
        ahead in 0..1000_usize,
        burst in option::of(any_burst()),
    ) {
        let bounds = Bounds { min_delay, delay_from: DelayFrom::Send, quota: (sends, width), jitter };
        let mut known = Proactive::default();
        for at in before {
            known.sent(Time(at), Time(at), &bounds);
            known.completed(Time(at));
        }
        let mut forecast = Forecast::new(Time(first), step, Time(last), &bounds, &known, ahead).in_bursts(burst);
        prop_assert!(forecast.next >= Time(first));
        for _ in 0..6 {
            let before = forecast.next;
            forecast.advance();
            prop_assert!(forecast.next >= before);
        }
        prop_assert!(forecast.clone().behind(ahead) >= forecast.next);
    }
}

fn any_burst() -> impl Strategy<Value = Burst> {
    (any::<u64>(), any::<u32>(), 2..u32::MAX, any_length()).prop_map(|(sent, out, size, gap)| Burst {
        sent: Time(sent),
        out,
        size,
        gap,
    })
}

fn any_length() -> impl Strategy<Value = Duration> {
    prop_oneof![
        Just(Duration::ZERO),
        any::<u64>().prop_map(Duration::from_nanos),
        (any::<u64>(), 0..1_000_000_000_u32).prop_map(|(seconds, nanos)| Duration::new(seconds, nanos)),
        Just(Duration::MAX),
    ]
}
