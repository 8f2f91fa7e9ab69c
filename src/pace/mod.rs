//! When the next send to a host may go: pure arithmetic.
//!
//! Nothing here knows a clock, a lock, a task or I/O. The caller says what time it is; instants are [`Time`]s, counted
//! from whatever beginning the caller chose. All arithmetic saturates.
//!
//! [`Reactive`] answers what a host has just told us, [`Learned`] remembers what it tolerates, and [`Proactive`] keeps
//! the limits that the user has set beforehand. What applies at one time is their maximum.

mod forecast;
mod learned;
mod memory;
mod proactive;
mod reactive;
#[cfg(feature = "redis")]
pub(crate) mod wire;

use std::time::Duration;

pub(crate) use forecast::{Burst, Forecast};
pub(crate) use learned::Learned;
pub(crate) use memory::Memory;
pub use proactive::DelayFrom;
pub(crate) use proactive::{Bounds, Proactive};
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
    /// What [`Reactive`](Self::Reactive) does, and a memory: the spacing that a host tolerates is found once, survives
    /// success, and is tried to be shortened ever more rarely. A warm host is served one request at a time, and
    /// `RateLimit` headers are heeded. `max_cooldown` is 15 minutes unless set.
    #[default]
    Learned,
    /// A cooldown after every refusal: what the server asked for, else `base_cooldown` doubled with every consecutive
    /// refusal; then spaced sends until the host has been quiet for `warm_for`. The next success ends the
    /// streak, and beyond that nothing is remembered. `max_cooldown` is 60 s unless set.
    Reactive,
}

impl Pacing {
    /// The longest hold unless the user sets one.
    pub(crate) fn max_cooldown(self) -> Duration {
        match self {
            // With a minute, a host whose ban is longer and begins anew with every refusal would be locked out for ever.
            Self::Learned => Duration::from_secs(15 * 60),
            Self::Reactive => Duration::from_secs(60),
        }
    }
}

/// The four numbers of pacing, as one host has them.
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
    /// The same request has been refused softly before.
    pub(crate) again: bool,
    /// Its headers said that something was left of the quota.
    pub(crate) within_quota: bool,
    /// Its headers said that nothing was.
    pub(crate) used_up: bool,
}

/// A recorded send, to be handed back with its outcome. A request without one was sent before anything was recorded of
/// its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) at: Time,
    /// The learned gap was what kept this send back, so its outcome says something about the gap.
    pub(crate) binding: bool,
    /// The same request has been refused softly before.
    pub(crate) again: bool,
}

/// How much may still be sent, by the server's own account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) remaining: u64,
    /// Until there is more.
    pub(crate) reset: Duration,
}

/// The pace of one host.
#[derive(Clone, Debug)]
pub(crate) enum Pace {
    Learned(Learned),
    Reactive(Reactive),
}

impl Pace {
    /// Recording begins.
    pub(crate) fn begin(pacing: Pacing, now: Time, just_sent: u32) -> Self {
        match pacing {
            Pacing::Learned => Self::Learned(Learned::begin(now, just_sent)),
            Pacing::Reactive => Self::Reactive(Reactive::default()),
        }
    }

    /// The earliest instant of the next send.
    pub(crate) fn ready(&self) -> Time {
        match self {
            Self::Learned(pace) => pace.ready(),
            Self::Reactive(pace) => pace.ready(),
        }
    }

    pub(crate) fn hold_until(&self) -> Time {
        match self {
            Self::Learned(pace) => pace.hold_until(),
            Self::Reactive(pace) => pace.hold_until(),
        }
    }

    pub(crate) fn warm_until(&self) -> Time {
        match self {
            Self::Learned(pace) => pace.warm_until(),
            Self::Reactive(pace) => pace.warm_until(),
        }
    }

    /// Consecutive throttle events.
    pub(crate) fn streak(&self) -> u32 {
        match self {
            Self::Learned(pace) => pace.streak(),
            Self::Reactive(pace) => pace.streak(),
        }
    }

    /// The learned spacing; zero is none.
    pub(crate) fn gap(&self) -> Duration {
        match self {
            Self::Learned(pace) => pace.gap(),
            Self::Reactive(_) => Duration::ZERO,
        }
    }

    /// The longest spacing found too short, and the shortest known to be good.
    pub(crate) fn bracket(&self) -> (Duration, Duration) {
        match self {
            Self::Learned(pace) => pace.bracket(),
            Self::Reactive(_) => Default::default(),
        }
    }

    /// The burst that is under way, where more than one request may go per gap.
    pub(crate) fn burst(&self) -> Option<Burst> {
        match self {
            Self::Learned(pace) => pace.burst(),
            Self::Reactive(_) => None,
        }
    }

    /// Says nothing any more: indistinguishable from a host that never refused.
    pub(crate) fn is_cold(&self, now: Time) -> bool {
        match self {
            Self::Learned(pace) => pace.is_cold(now),
            Self::Reactive(pace) => pace.is_cold(now),
        }
    }

    /// One request at a time, whatever the concurrency.
    pub(crate) fn is_serial(&self, now: Time) -> bool {
        match self {
            Self::Learned(pace) => pace.is_serial(now),
            Self::Reactive(_) => false,
        }
    }

    /// The time between two sends from `now` on, for estimating how long a queue takes.
    pub(crate) fn spacing(&self, now: Time, rules: &Rules) -> Duration {
        match self {
            Self::Learned(pace) => pace.spacing(now, rules),
            Self::Reactive(pace) => pace.spacing(now, rules),
        }
    }

    /// A request goes out now.
    pub(crate) fn sent(&mut self, now: Time, rules: &Rules) -> Ticket {
        match self {
            Self::Learned(pace) => pace.sent(now, rules),
            Self::Reactive(pace) => {
                pace.sent(now, rules);
                Ticket { at: now, binding: false, again: false }
            }
        }
    }

    /// A request was refused; without a ticket it was sent before anything was recorded of this host. True when this is
    /// a new event rather than another refusal of one already counted.
    pub(crate) fn throttled(&mut self, now: Time, ticket: Option<Ticket>, refusal: Refusal, rules: &Rules) -> bool {
        match self {
            Self::Learned(pace) => pace.throttled(now, ticket, refusal, rules),
            Self::Reactive(pace) => pace.throttled(now, ticket.map(|ticket| ticket.at), refusal, rules),
        }
    }

    /// A request succeeded.
    pub(crate) fn succeeded(&mut self, ticket: Option<Ticket>, rules: &Rules) {
        match self {
            Self::Learned(pace) => pace.succeeded(ticket, rules),
            Self::Reactive(pace) => pace.succeeded(ticket.map(|ticket| ticket.at)),
        }
    }

    /// Nothing is left of the server's quota until its reset: holds the host, and counts nothing.
    pub(crate) fn used_up(&mut self, now: Time, reset: Duration, rules: &Rules) {
        match self {
            Self::Learned(pace) => pace.used_up(now, reset, rules),
            Self::Reactive(pace) => pace.used_up(now, reset, rules),
        }
    }

    /// A success said that something is left of the server's quota: it says by itself when to stop.
    pub(crate) fn is_paced_by_the_server(&mut self) {
        if let Self::Learned(pace) = self {
            pace.is_paced_by_the_server();
        }
    }

    /// Holds as long as another account of the same host does, and changes nothing else.
    #[cfg(feature = "redis")]
    pub(crate) fn keep_hold(&mut self, other: &Self) {
        let (hold_until, warm_until) = match self {
            Self::Learned(pace) => (&mut pace.hold_until, &mut pace.warm_until),
            Self::Reactive(pace) => (&mut pace.hold_until, &mut pace.warm_until),
        };
        if other.hold_until() > *hold_until {
            *hold_until = other.hold_until();
            *warm_until = other.warm_until().max(*warm_until);
        }
    }

    /// Holds the host back as a refusal would, but counts nothing.
    pub(crate) fn penalize(&mut self, now: Time, hold: Duration, rules: &Rules) {
        match self {
            Self::Learned(pace) => pace.penalize(now, hold, rules),
            Self::Reactive(pace) => pace.penalize(now, hold, rules),
        }
    }
}

/// An instant: nanoseconds since the gate's own beginning, enough for 584 years. Zero is before anything has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Time(u64);

impl Time {
    pub(crate) const END: Self = Self(u64::MAX);

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
mod invariants;
#[cfg(test)]
mod tests;
