//! The gate's clock: `tokio`'s monotonic one, so a wall clock that steps changes nothing and tests can pause it.

use std::time::Duration;

use tokio::time::Instant;

use crate::pace::Time;

/// The first reading of a clock: what an earlier run of the program remembers happened before it.
const FIRST: Duration = Duration::from_secs(365 * 86_400);

#[derive(Debug)]
pub(crate) struct Clock {
    beginning: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { beginning: Instant::now() }
    }

    /// A host that has never refused and has nobody waiting must not cost a call of this.
    pub(crate) fn now(&self) -> Time {
        #[cfg(test)]
        READS.with(|reads| reads.set(reads.get() + 1));
        Time::at(Instant::now().saturating_duration_since(self.beginning)).after(FIRST)
    }

    /// The instant for a timer: never so far ahead that the sum overflows, which the waiter's re-check makes harmless.
    pub(crate) fn timer(&self, now: Time, at: Time) -> Instant {
        const FAR: Duration = Duration::from_secs(86_400);
        self.instant(now) + at.since(now).min(FAR)
    }

    pub(crate) fn instant(&self, at: Time) -> Instant {
        let since_beginning = at.since(Time::default().after(FIRST));
        self.beginning.checked_add(since_beginning).unwrap_or(self.beginning)
    }
}

#[cfg(test)]
thread_local! {
    pub(crate) static READS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}
