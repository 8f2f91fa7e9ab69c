//! Servers that limit their clients: small models, pure like the pace they are played against.

use std::collections::VecDeque;
use std::time::Duration;

use proptest::prelude::*;

use crate::pace::{Refusal, Time};

/// What a server allows.
#[derive(Clone, Debug)]
pub(super) enum Limit {
    /// So many in any interval of this width.
    Sliding { sends: usize, window: Duration },
    /// So many in each interval of this width, counted anew at its end.
    Fixed { sends: usize, window: Duration },
    /// One more every so often, and up to `size` saved.
    Bucket { size: u32, every: Duration },
    /// One per window; whoever does not wait for its end has it begin anew.
    Extends { window: Duration },
    /// One per window, and the window wanders between half and one and a half of this.
    Drifting { window: Duration },
    /// Whatever the client does, so many of a hundred requests are refused.
    Random { percent: u8 },
}

/// What a refusal says about when to come back.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hints {
    None,
    Exact,
    RoundedDown,
    TooShort,
    TooLong,
}

/// A server with a limit and what it remembers of its one client.
#[derive(Clone, Debug)]
pub(super) struct Provider {
    limit: Limit,
    hints: Hints,
    /// Refuses with a 403 instead of a 429.
    forbids: bool,
    /// What was served, the latest last.
    served: VecDeque<Time>,
    /// How much was ever served.
    total: u32,
    /// Of `Extends`: when the ban ends. Of `Bucket`: when it would be full.
    until: Time,
}

impl Provider {
    pub(super) fn new(limit: Limit, hints: Hints, forbids: bool) -> Self {
        Self { limit, hints, forbids, served: VecDeque::new(), total: 0, until: Time::default() }
    }

    /// A request has arrived. `roll`, one of a hundred, is chance.
    pub(super) fn answer(&mut self, now: Time, roll: u8) -> Result<(), Refusal> {
        let free = self.free_from(now, roll);
        if free > now {
            if let Limit::Extends { window } = self.limit {
                self.until = now.after(window);
            }
            return Err(self.refusal(free.since(now)));
        }
        self.total += 1;
        match self.limit {
            Limit::Extends { window } => self.until = now.after(window),
            Limit::Bucket { every, .. } => self.until = self.until.max(now).after(every),
            Limit::Sliding { sends, .. } | Limit::Fixed { sends, .. } => self.remember(now, sends),
            Limit::Drifting { .. } => self.remember(now, 1),
            Limit::Random { .. } => {}
        }
        Ok(())
    }

    /// From when a request would be served, if no other came.
    fn free_from(&self, now: Time, roll: u8) -> Time {
        match self.limit {
            Limit::Sliding { sends, window } => self.full_until(sends, |oldest| oldest.after(window)),
            Limit::Fixed { sends, window } => self.full_until(sends, |oldest| {
                let into = oldest.since(Time::default()).as_nanos() % window.as_nanos();
                oldest.after(window - Duration::from_nanos(into as u64))
            }),
            Limit::Bucket { size, every } => {
                let ahead = every * (size - 1);
                if self.until.since(now) <= ahead { now } else { now.after(self.until.since(now) - ahead) }
            }
            Limit::Extends { .. } => self.until,
            Limit::Drifting { window } => {
                self.full_until(1, |last| last.after(window / 2 + window / 8 * (self.total % 9)))
            }
            Limit::Random { percent } => now.after(Duration::from_secs(u64::from(roll < percent))),
        }
    }

    /// When the first of the last so many that were served no longer counts.
    fn full_until(&self, sends: usize, leaves: impl Fn(Time) -> Time) -> Time {
        if self.served.len() < sends { Time::default() } else { leaves(self.served[0]) }
    }

    fn remember(&mut self, now: Time, sends: usize) {
        self.served.push_back(now);
        if self.served.len() > sends {
            self.served.pop_front();
        }
    }

    fn refusal(&self, left: Duration) -> Refusal {
        let hint = match self.hints {
            Hints::None => None,
            Hints::Exact => Some(left),
            Hints::RoundedDown => Some(Duration::from_secs(left.as_secs())),
            Hints::TooShort => Some(left / 3),
            Hints::TooLong => Some(left * 3),
        };
        // A hint that names no future instant is none, and a 403 with one is not soft.
        let hint = hint.filter(|hint| !hint.is_zero());
        Refusal { hint, soft: self.forbids && hint.is_none(), again: false, within_quota: false, used_up: false }
    }
}

fn window() -> impl Strategy<Value = Duration> {
    (100..60_000_u64).prop_map(Duration::from_millis)
}

pub(super) fn any_hints() -> impl Strategy<Value = Hints> {
    prop_oneof![
        2 => Just(Hints::None),
        1 => prop_oneof![Just(Hints::Exact), Just(Hints::RoundedDown), Just(Hints::TooShort), Just(Hints::TooLong)],
    ]
}

pub(super) fn any_provider() -> impl Strategy<Value = Provider> {
    let limit = prop_oneof![
        window().prop_map(|window| Limit::Sliding { sends: 1, window }),
        (2..20_usize, window()).prop_map(|(sends, window)| Limit::Sliding { sends, window }),
        (1..20_usize, window()).prop_map(|(sends, window)| Limit::Fixed { sends, window }),
        (1..20_u32, window()).prop_map(|(size, every)| Limit::Bucket { size, every }),
        window().prop_map(|window| Limit::Extends { window }),
        window().prop_map(|window| Limit::Drifting { window }),
        (1..60_u8).prop_map(|percent| Limit::Random { percent }),
    ];
    (limit, any_hints(), any::<bool>()).prop_map(|(limit, hints, forbids)| Provider::new(limit, hints, forbids))
}
