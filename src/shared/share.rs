//! Which part of the limits is this process's: all of them, but while the store is out of reach.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::pace::{Bounds, DelayFrom, Rules};

/// One part in so many. Never cloned: every gate begins with the whole.
#[derive(Debug)]
pub(crate) struct Share(AtomicU32);

impl Default for Share {
    fn default() -> Self {
        Self(AtomicU32::new(1))
    }
}

impl Clone for Share {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Share {
    pub(crate) fn set(&self, parts: u32) {
        self.0.store(parts.max(1), Ordering::Release);
    }

    fn parts(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// A part of so many requests, at least one.
    pub(crate) fn of(&self, requests: usize) -> usize {
        match self.parts() {
            1 => requests,
            parts => (requests / parts as usize).max(1),
        }
    }

    pub(crate) fn rules(&self, rules: Rules) -> Rules {
        Rules { spacing: rules.spacing.saturating_mul(self.parts()), ..rules }
    }

    /// A learned gap gets longer too: by a delay between sends, which leaves what was learnt alone.
    pub(crate) fn bounds(&self, bounds: Bounds, gap: impl FnOnce() -> Duration) -> Bounds {
        let parts = self.parts();
        if parts == 1 {
            return bounds;
        }
        let (sends, width) = bounds.quota;
        let quota = (if sends == 0 { 0 } else { (sends / parts).max(1) }, width);
        let gap = gap().saturating_mul(parts);
        let min_delay = bounds.min_delay.saturating_mul(parts);
        let delay_from = if gap > min_delay { DelayFrom::Send } else { bounds.delay_from };
        Bounds { min_delay: min_delay.max(gap), delay_from, quota, ..bounds }
    }
}
