//! Reactive pacing: ADR-0016's cooldown, escalation and sticky spacing.
//!
//! ```text
//!   cold ──throttle──▶ held until `hold_until` ──▶ warm: sends `spacing` apart ──`warm_for` without a throttle──▶ cold
//!                        ▲                             │
//!                        └──────── throttle: streak+1 ─┘
//! ```
//!
//! Where this differs from the ADR's text:
//!
//! * *Only a success sent after the last throttle ends the streak.* An answer to a request that was already under way
//!   says nothing about what the host tolerates now.
//! * *Refusals of requests sent before the last throttle are the same event.* They may lengthen the hold when they carry
//!   a hint, and never escalate: N refusals of one burst are one event.
//! * *Warmth counts from the end of the cooldown.* Counted from the refusal, a cooldown longer than `warm_for` would
//!   end cold and let the whole herd go.
//! * *A headerless 403 is soft*: it may be about the URL, so it never holds longer than [`SOFT_HOLD`].
//! * *A hint of zero is no hint*; `verdict` sees to that, and a zero that gets here is treated alike.

use std::time::Duration;

use super::{Refusal, Rules, Time};

/// The longest hold a headerless 403 is worth: a revoked key must surface as 403, not as an hour of waiting.
pub(super) const SOFT_HOLD: Duration = Duration::from_secs(60);

/// What is known of a host that has refused a request. A host without one never did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reactive {
    /// No send before this: the cooldown. Only grows.
    pub(super) hold_until: Time,
    /// No send before this: the spacing behind the last warm send. Only grows.
    pub(super) spaced_until: Time,
    pub(super) warm_until: Time,
    pub(super) last_throttle: Option<Time>,
    /// Consecutive throttle events.
    pub(super) streak: u32,
}

impl Reactive {
    /// The earliest instant of the next send.
    pub(crate) fn ready(&self) -> Time {
        self.hold_until.max(self.spaced_until)
    }

    pub(crate) fn hold_until(&self) -> Time {
        self.hold_until
    }

    pub(crate) fn warm_until(&self) -> Time {
        self.warm_until
    }

    pub(crate) fn streak(&self) -> u32 {
        self.streak
    }

    /// Says nothing any more: indistinguishable from a host that never refused.
    pub(crate) fn is_cold(&self, now: Time) -> bool {
        now >= self.warm_until && now >= self.ready()
    }

    /// The time between two sends, for estimating how long a queue takes.
    pub(crate) fn spacing(&self, now: Time, rules: &Rules) -> Duration {
        if now < self.warm_until { rules.spacing } else { Duration::ZERO }
    }

    /// A request goes out now.
    pub(crate) fn sent(&mut self, now: Time, rules: &Rules) {
        if now < self.warm_until {
            self.spaced_until = self.spaced_until.max(now.after(rules.spacing));
        }
    }

    /// A request sent at `sent` was refused; `None` is a request sent before anything was recorded of this host. True
    /// when this is a new event rather than another refusal of one already counted.
    pub(crate) fn throttled(&mut self, now: Time, sent: Option<Time>, refusal: Refusal, rules: &Rules) -> bool {
        self.forget_if_cold(now);
        let hint = refusal.hint.filter(|hint| !hint.is_zero());
        let new_event = self.last_throttle.is_none_or(|last| sent.is_some_and(|sent| sent > last));
        let hold = match hint {
            _ if new_event => {
                self.streak = self.streak.saturating_add(1);
                self.last_throttle = Some(now);
                hint.unwrap_or_else(|| escalate(rules.base_cooldown, self.streak))
            }
            Some(hint) => hint,
            None => return false,
        };
        let cap = if refusal.soft { rules.max_cooldown.min(SOFT_HOLD) } else { rules.max_cooldown };
        self.hold(now, hold.min(cap), rules);
        new_event
    }

    /// A request sent at `sent` succeeded.
    pub(crate) fn succeeded(&mut self, sent: Option<Time>) {
        if sent > self.last_throttle {
            self.streak = 0;
        }
    }

    /// Nothing is left of the server's quota until its reset: holds the host, and counts nothing.
    pub(crate) fn used_up(&mut self, now: Time, reset: Duration, rules: &Rules) {
        self.hold_until = self.hold_until.max(now.after(reset.min(rules.max_cooldown)));
    }

    /// Holds the host back as a refusal would, but counts nothing.
    pub(crate) fn penalize(&mut self, now: Time, hold: Duration, rules: &Rules) {
        self.forget_if_cold(now);
        self.hold(now, hold.min(rules.max_cooldown), rules);
    }

    /// A streak lives until the host is cold.
    fn forget_if_cold(&mut self, now: Time) {
        if self.is_cold(now) {
            self.streak = 0;
            self.last_throttle = None;
        }
    }

    fn hold(&mut self, now: Time, hold: Duration, rules: &Rules) {
        self.hold_until = self.hold_until.max(now.after(hold));
        self.warm_until = self.warm_until.max(self.hold_until.after(rules.warm_for));
    }
}

/// `base * 2^(streak - 1)`, saturating.
pub(super) fn escalate(base: Duration, streak: u32) -> Duration {
    // Ninety-six doublings take any duration but zero to the end of the scale.
    (1..streak.min(96)).fold(base, |hold, _| hold.saturating_mul(2))
}
