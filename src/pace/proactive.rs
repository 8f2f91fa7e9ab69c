//! Limits that are set beforehand: a delay between requests, a quota in a rolling window, jitter.
//!
//! Each of them names an instant before which nothing is sent, and the latest one counts: the wait is a maximum, never a
//! sum. Only jitter adds.

use std::collections::VecDeque;
use std::time::Duration;

use super::Time;

/// From where `min_delay` is measured.
///
/// ```
/// use std::time::Duration;
/// use tower_host_gate::{DelayFrom, HostGateLayer};
///
/// let layer = HostGateLayer::new().min_delay(Duration::from_secs(5)).delay_from(DelayFrom::Send);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DelayFrom {
    /// From the moment the last request was over, when its permit came back: a slow server gets as much rest as a fast
    /// one. Of several in flight the last one to end counts; while none has ended they do not keep each other waiting.
    #[default]
    Completion,
    /// From the moment the last request was sent.
    Send,
}

/// The limits set for one host; all zero is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) min_delay: Duration,
    pub(crate) delay_from: DelayFrom,
    /// So many sends in any interval of this width; zero of either is no quota.
    pub(crate) quota: (u32, Duration),
    /// The most that is added to a wait.
    pub(crate) jitter: Duration,
}

impl Bounds {
    /// Nothing is limited. Jitter alone limits nothing: there is no wait that it could be added to.
    pub(crate) fn is_off(&self) -> bool {
        self.min_delay.is_zero() && self.width().is_none()
    }

    pub(crate) fn width(&self) -> Option<(usize, Duration)> {
        let (sends, width) = self.quota;
        (sends > 0 && !width.is_zero()).then_some((sends as usize, width))
    }
}

/// What the limits need to know of a host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proactive {
    /// The sends that still count towards the quota, oldest first.
    sends: VecDeque<Time>,
    last_send: Option<Time>,
    last_completion: Option<Time>,
}

impl Proactive {
    /// The earliest instant of the next send by the delay alone.
    pub(crate) fn delayed_until(&self, bounds: &Bounds) -> Time {
        let from = match bounds.delay_from {
            DelayFrom::Completion => self.last_completion,
            DelayFrom::Send => self.last_send,
        };
        from.filter(|_| !bounds.min_delay.is_zero()).map(|from| from.after(bounds.min_delay)).unwrap_or_default()
    }

    /// The earliest instant of the next send by the quota alone.
    pub(crate) fn quota_until(&self, bounds: &Bounds) -> Time {
        let leaving = bounds.width().and_then(|(sends, width)| {
            let oldest = self.sends.len().checked_sub(sends).and_then(|place| self.sends.get(place))?;
            Some(oldest.after(width))
        });
        leaving.unwrap_or_default()
    }

    /// A request goes out at this instant, which for a retry below the gate is still to come.
    pub(crate) fn sent(&mut self, now: Time, at: Time, bounds: &Bounds) {
        self.last_send = self.last_send.max(Some(at));
        if let Some((_, width)) = bounds.width() {
            while self.sends.front().is_some_and(|oldest| oldest.after(width) <= now) {
                self.sends.pop_front();
            }
            // A retry below the gate reports its send before it is due.
            let at = self.sends.back().map_or(at, |newest| at.max(*newest));
            self.sends.push_back(at);
        }
    }

    /// A request that went out is over.
    pub(crate) fn completed(&mut self, now: Time) {
        self.last_completion = self.last_completion.max(Some(now));
    }

    /// The sends that the next `ahead` have to wait for, oldest first, and how many more fit in before that.
    pub(super) fn leaving(&self, sends: usize, ahead: usize) -> (VecDeque<Time>, usize) {
        let counted = self.sends.len().min(sends);
        let newest = self.sends.range(self.sends.len() - counted..);
        (newest.take(ahead).copied().collect(), sends - counted)
    }

    /// There is nothing left that a limit would have to remember.
    pub(crate) fn is_idle(&self, now: Time, bounds: &Bounds) -> bool {
        let counted = bounds.width().zip(self.sends.back());
        self.delayed_until(bounds) <= now && counted.is_none_or(|((_, width), newest)| newest.after(width) <= now)
    }
}

#[cfg(test)]
mod tests;
