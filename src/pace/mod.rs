//! When the next send to a host may go: pure arithmetic.
//!
//! Nothing here knows a clock, a lock, a task or I/O. The caller says what time it is; instants are [`Time`]s, counted
//! from whatever beginning the caller chose. All arithmetic saturates.
//!
//! [`Reactive`] answers what one host told us. A policy that remembers more belongs in a file beside it and answers the
//! same questions.

mod reactive;

use std::time::Duration;

pub(crate) use reactive::Reactive;

/// How the gate paces a host once it has refused a request.
///
/// ```
/// use tower_host_gate::{HostGateLayer, Pacing};
///
/// let layer = HostGateLayer::new().pacing(Pacing::Reactive);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pacing {
    /// A cooldown after every refusal: what the server asked for, else `base_cooldown` doubled with every consecutive
    /// refusal; then spaced sends until the host has been quiet for `warm_for`. The next success ends the
    /// streak, and beyond that nothing is remembered.
    #[default]
    Reactive,
}

/// The four numbers of reactive pacing, as one host has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) base_cooldown: Duration,
    pub(crate) max_cooldown: Duration,
    pub(crate) spacing: Duration,
    pub(crate) warm_for: Duration,
}

/// A refusal, as far as pacing is concerned.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refusal {
    /// What the server asked for; `None` when it named no future instant.
    pub(crate) hint: Option<Duration>,
    /// Perhaps about the URL rather than about us (a headerless 403).
    pub(crate) soft: bool,
}

/// An instant: nanoseconds since the gate's own beginning, enough for 584 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Time(u64);

impl Time {
    pub(crate) fn at(since_beginning: Duration) -> Self {
        Self(u64::try_from(since_beginning.as_nanos()).unwrap_or(u64::MAX))
    }

    /// The end of time when the sum is beyond it.
    pub(crate) fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(Self::at(wait).0))
    }

    /// Zero when `earlier` is the later one.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests;
