//! What the gate tells the outside: [`Observer`] events and their `tracing` twins.
//!
//! Log fields are bounded: a host key is at most 256 printable bytes, and nothing of a URL but its host is ever named.

use std::time::Duration;

use http::StatusCode;

use crate::error::RateLimited;
use crate::host::HostKey;
#[cfg(feature = "redis")]
use crate::shared::BackendError;

/// Request extension: a name under which the events of this request are reported.
///
/// ```
/// use tower_host_gate::Label;
///
/// let mut request = http::Request::get("https://example.com/feed").body(())?;
/// request.extensions_mut().insert(Label("nightly-crawl"));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label(pub &'static str);

/// Receives the gate's events, for metrics or a progress display.
///
/// Called in the middle of a request, outside all locks: be quick. A panic in here fails that request and nothing else.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tower_host_gate::{HostGateLayer, observe::{Observer, WaitEvent}};
///
/// #[derive(Default)]
/// struct Waits(AtomicU64);
///
/// impl Observer for Waits {
///     fn waited(&self, event: &WaitEvent<'_>) {
///         self.0.fetch_add(event.waited.as_millis() as u64, Ordering::Relaxed);
///     }
/// }
///
/// let layer = HostGateLayer::new().observer(Waits::default());
/// ```
pub trait Observer: Send + Sync + 'static {
    /// A request that could not go at once has stopped waiting. Once per wait; never for a request that went at once.
    fn waited(&self, event: &WaitEvent<'_>) {
        let _ = event;
    }

    /// A host refused a request.
    fn throttled(&self, event: &ThrottleEvent<'_>) {
        let _ = event;
    }

    /// A request was shed. Follows its [`waited`](Self::waited) event.
    fn shed(&self, event: &ShedEvent<'_>) {
        let _ = event;
    }

    /// The store that hosts are shared in is out of reach: from now on this process paces by itself. Once per outage.
    #[cfg(feature = "redis")]
    fn degraded(&self, event: &DegradedEvent<'_>) {
        let _ = event;
    }

    /// The store is back. Once per outage, after what was learnt meanwhile has been told to it.
    #[cfg(feature = "redis")]
    fn recovered(&self, event: &RecoveredEvent) {
        let _ = event;
    }

    /// An operation of the store has failed. A request is decided in process then, and does not fail.
    #[cfg(feature = "redis")]
    fn error(&self, event: &ErrorEvent<'_>) {
        let _ = event;
    }
}

/// See [`Observer::waited`].
///
/// ```
/// use tower_host_gate::observe::{Observer, WaitEvent};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn waited(&self, event: &WaitEvent<'_>) {
///         println!("{}: {} after {:?}", event.host, event.outcome.as_str(), event.waited);
///     }
/// }
/// # tower_host_gate::HostGateLayer::new().observer(Log);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct WaitEvent<'a> {
    /// The host waited for.
    pub host: &'a HostKey,
    /// How the wait ended.
    pub outcome: WaitOutcome,
    /// How long it took: the sum of the next two.
    pub waited: Duration,
    /// Of that, while the host's cooldown or spacing was in the way.
    pub pacing: Duration,
    /// Of that, behind other requests: while they held all its permits, or one was about to be sent.
    pub queued: Duration,
    /// The request's [`Label`].
    pub label: Option<&'static str>,
}

/// How a wait ended.
///
/// ```
/// use tower_host_gate::observe::WaitOutcome;
///
/// assert_eq!(WaitOutcome::Acquired.as_str(), "acquired");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WaitOutcome {
    /// With a permit.
    Acquired,
    /// The caller dropped the request.
    Canceled,
    /// The budget did not suffice.
    Shed,
}

impl WaitOutcome {
    /// The outcome as a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::Canceled => "canceled",
            Self::Shed => "shed",
        }
    }
}

/// See [`Observer::throttled`].
///
/// ```
/// use tower_host_gate::observe::{Observer, ThrottleEvent};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn throttled(&self, event: &ThrottleEvent<'_>) {
///         println!("{}: {}, held for {:?}", event.host, event.status, event.hold);
///     }
/// }
/// # tower_host_gate::HostGateLayer::new().observer(Log);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ThrottleEvent<'a> {
    /// The host that refused.
    pub host: &'a HostKey,
    /// With which status.
    pub status: StatusCode,
    /// What it asked for, uncapped.
    pub hint: Option<Duration>,
    /// How long the host is held from now on.
    pub hold: Duration,
    /// Consecutive throttle events, this one included.
    pub streak: u32,
    /// False when the refusal belongs to an event already counted, as the other refusals of one burst do.
    pub new_event: bool,
    /// The request's [`Label`].
    pub label: Option<&'static str>,
}

/// See [`Observer::shed`].
///
/// ```
/// use tower_host_gate::observe::{Observer, ShedEvent};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn shed(&self, event: &ShedEvent<'_>) {
///         println!("{:?}: {}", event.label, event.error);
///     }
/// }
/// # tower_host_gate::HostGateLayer::new().observer(Log);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ShedEvent<'a> {
    /// The error the caller gets.
    pub error: &'a RateLimited,
    /// The request's [`Label`].
    pub label: Option<&'static str>,
}

/// See [`Observer::degraded`].
///
/// ```
/// use tower_host_gate::observe::{DegradedEvent, Observer, RecoveredEvent};
///
/// struct Alarm;
///
/// impl Observer for Alarm {
///     fn degraded(&self, event: &DegradedEvent<'_>) {
///         println!("every process paces by itself: {}", event.cause);
///     }
///
///     fn recovered(&self, event: &RecoveredEvent) {
///         println!("limits are shared again after {:?}", event.down_for);
///     }
/// }
/// # tower_host_gate::HostGateLayer::new().observer(Alarm);
/// ```
#[cfg(feature = "redis")]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DegradedEvent<'a> {
    /// What happened.
    pub cause: &'a BackendError,
}

/// See [`Observer::recovered`]. [`DegradedEvent`] has an example.
#[cfg(feature = "redis")]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RecoveredEvent {
    /// How long the store was out of reach.
    pub down_for: Duration,
}

/// See [`Observer::error`].
///
/// ```
/// use tower_host_gate::observe::{ErrorEvent, Observer};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn error(&self, event: &ErrorEvent<'_>) {
///         println!("{} failed: {}", event.operation.as_str(), event.error);
///     }
/// }
/// # tower_host_gate::HostGateLayer::new().observer(Log);
/// ```
#[cfg(feature = "redis")]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ErrorEvent<'a> {
    /// What was being done.
    pub operation: Operation,
    /// Why it failed.
    pub error: &'a BackendError,
    /// For which host.
    pub host: &'a HostKey,
    /// The request's [`Label`], where there is one.
    pub label: Option<&'static str>,
}

/// What is done in the store.
///
/// ```
/// use tower_host_gate::observe::Operation;
///
/// assert_eq!(Operation::Acquire.as_str(), "acquire");
/// ```
#[cfg(feature = "redis")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// A request asks for its permit, or takes one up that was handed to it.
    Acquire,
    /// A request gives its permit back and reports.
    Release,
    /// A response is reported without a permit.
    Report,
    /// [`Hosts::penalize`](crate::Hosts::penalize).
    Penalize,
    /// [`Hosts::clear`](crate::Hosts::clear).
    Clear,
}

#[cfg(feature = "redis")]
impl Operation {
    /// The operation as a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Release => "release",
            Self::Report => "report",
            Self::Penalize => "penalize",
            Self::Clear => "clear",
        }
    }
}

pub(crate) fn waited(observer: Option<&dyn Observer>, event: &WaitEvent<'_>) {
    tracing::debug!(
        host = event.host.as_str(),
        outcome = event.outcome.as_str(),
        waited_ms = millis(event.waited),
        pacing_ms = millis(event.pacing),
        label = event.label,
        "waited"
    );
    if let Some(observer) = observer {
        observer.waited(event);
    }
}

pub(crate) fn throttled(observer: Option<&dyn Observer>, event: &ThrottleEvent<'_>) {
    tracing::info!(
        host = event.host.as_str(),
        status = event.status.as_u16(),
        hint_ms = event.hint.map(millis),
        hold_ms = millis(event.hold),
        streak = event.streak,
        new_event = event.new_event,
        label = event.label,
        "throttled"
    );
    if let Some(observer) = observer {
        observer.throttled(event);
    }
}

pub(crate) fn shed(observer: Option<&dyn Observer>, event: &ShedEvent<'_>) {
    tracing::info!(
        host = event.error.host(),
        reason = event.error.reason().as_str(),
        retry_after_ms = millis(event.error.retry_after()),
        label = event.label,
        "shed"
    );
    if let Some(observer) = observer {
        observer.shed(event);
    }
}

#[cfg(feature = "redis")]
pub(crate) fn degraded(observer: Option<&dyn Observer>, cause: &BackendError) {
    tracing::warn!(kind = cause.kind().as_str(), %cause, "the store is out of reach: pacing in process");
    if let Some(observer) = observer {
        observer.degraded(&DegradedEvent { cause });
    }
}

#[cfg(feature = "redis")]
pub(crate) fn recovered(observer: Option<&dyn Observer>, down_for: Duration) {
    tracing::info!(down_for_ms = millis(down_for), "the store is back: limits are shared again");
    if let Some(observer) = observer {
        observer.recovered(&RecoveredEvent { down_for });
    }
}

/// At a level that a store which is down does not fill the log with: it was reported when it went.
#[cfg(feature = "redis")]
pub(crate) fn error(observer: Option<&dyn Observer>, event: &ErrorEvent<'_>) {
    tracing::debug!(
        operation = event.operation.as_str(),
        kind = event.error.kind().as_str(),
        error = %event.error,
        host = event.host.as_str(),
        label = event.label,
        "the store has failed"
    );
    if let Some(observer) = observer {
        observer.error(event);
    }
}

/// One per host: somebody waits for a response body that somebody else does not read.
pub(crate) fn unread_bodies(host: &HostKey, in_flight: usize) {
    tracing::warn!(
        host = host.as_str(),
        in_flight,
        "requests wait for unread response bodies: read or drop a body before asking the same host again, \
         or set `PermitUntil::Head`"
    );
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
