//! When the requests that wait will go, as far as pacing decides.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Bounds, Proactive, Time};

/// When the next requests go, one behind the other. Never an understatement: who knows what the dice say.
#[derive(Clone, Debug)]
pub(crate) struct Forecast {
    /// The next one.
    pub(crate) next: Time,
    step: Duration,
    jitter: Duration,
    /// However many there are: from here on nothing keeps two of them apart.
    last: Time,
    burst: Option<Burst>,
    window: Option<Window>,
}

/// So many sends, `step` apart, in every `gap`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Burst {
    /// When the present one began.
    pub(crate) sent: Time,
    /// How many of it have gone.
    pub(crate) out: u32,
    pub(crate) size: u32,
    pub(crate) gap: Duration,
}

/// A quota that is being used up.
#[derive(Clone, Debug)]
struct Window {
    width: Duration,
    /// How many fit in at once.
    free: usize,
    /// What leaves it next.
    leaving: VecDeque<Time>,
}

impl Forecast {
    pub(crate) fn at_once(now: Time) -> Self {
        Self { next: now, step: Duration::ZERO, jitter: Duration::ZERO, last: now, burst: None, window: None }
    }

    /// Nothing before `first`, then one every `step` until `last`, and no more than the bounds allow. Good for `ahead`
    /// requests and one more.
    pub(crate) fn new(
        first: Time,
        step: Duration,
        last: Time,
        bounds: &Bounds,
        known: &Proactive,
        ahead: usize,
    ) -> Self {
        let window = bounds.width().map(|(sends, width)| {
            let (leaving, free) = known.leaving(sends, ahead.saturating_add(1));
            Window { width, free, leaving }
        });
        Self {
            next: first.max(known.delayed_until(bounds)).max(known.quota_until(bounds)),
            step: step.max(bounds.min_delay).saturating_add(bounds.jitter),
            jitter: bounds.jitter,
            last: if bounds.min_delay.is_zero() { last.max(first).after(bounds.jitter) } else { Time::END },
            burst: None,
            window,
        }
    }

    pub(crate) fn in_bursts(self, burst: Option<Burst>) -> Self {
        Self { burst, ..self }
    }

    /// The next one has gone.
    pub(crate) fn advance(&mut self) {
        let sent = self.next;
        self.next = sent.after(self.step).min(self.last.max(sent));
        if let Some(burst) = &mut self.burst {
            let over = burst.sent.after(burst.gap);
            if burst.out >= burst.size || sent >= over {
                (burst.sent, burst.out) = (sent, 0);
            }
            burst.out += 1;
            if burst.out >= burst.size {
                self.next = self.next.max(burst.sent.after(burst.gap).after(self.jitter));
            }
        }
        if let Some(window) = &mut self.window {
            if window.free > 0 {
                window.free -= 1;
            } else {
                window.leaving.pop_front();
            }
            window.leaving.push_back(sent);
            if window.free == 0 {
                let leaves = window.leaving.front().map(|oldest| oldest.after(window.width)).unwrap_or_default();
                self.next = self.next.max(leaves.after(self.jitter));
            }
        }
    }

    /// When the one behind `ahead` others goes.
    pub(crate) fn behind(mut self, ahead: usize) -> Time {
        if self.window.is_none() && self.burst.is_none() {
            let steps = self.step.saturating_mul(u32::try_from(ahead).unwrap_or(u32::MAX));
            return self.next.after(steps).min(self.last.max(self.next));
        }
        for _ in 0..ahead {
            self.advance();
        }
        self.next
    }
}
