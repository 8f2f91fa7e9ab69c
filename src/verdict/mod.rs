//! What a response says about its host. Pure: a response head in, an [`Outcome`] out.

#[cfg(test)]
mod mutated;
#[cfg(feature = "ratelimit-headers")]
mod rate_limit;
mod retry_after;

use std::time::{Duration, SystemTime};

use http::{Extensions, HeaderMap, StatusCode};

pub use retry_after::RetryAfterUnit;
pub(crate) use retry_after::{hint, raw};

use crate::pace::Quota;

/// What a response means for the pacing of its host.
///
/// ```
/// use std::time::Duration;
/// use http::{HeaderMap, HeaderValue, StatusCode};
/// use tower_host_gate::Outcome;
///
/// let mut headers = HeaderMap::new();
/// headers.insert("retry-after", HeaderValue::from_static("30"));
/// let asked = Outcome::Throttled { hint: Some(Duration::from_secs(30)), soft: false };
/// assert_eq!(Outcome::of(StatusCode::SERVICE_UNAVAILABLE, &headers), asked);
/// assert_eq!(Outcome::of(StatusCode::SERVICE_UNAVAILABLE, &HeaderMap::new()), Outcome::Neutral);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The host answered. Ends a streak of refusals when the request was sent after the last of them.
    Success,
    /// Says nothing about pacing: nothing is learnt and nothing reset.
    Neutral,
    /// The host asked to be left alone.
    Throttled {
        /// For how long, when it said so; `None` lets the cooldown escalate.
        hint: Option<Duration>,
        /// It may be about the URL rather than about our pace; never holds the host longer than a minute.
        soft: bool,
    },
}

/// Judges response heads. Implemented by every `Fn(StatusCode, &HeaderMap, &Extensions) -> Outcome`.
///
/// ```
/// use http::{Extensions, HeaderMap, StatusCode};
/// use tower_host_gate::{HostGateLayer, Outcome};
///
/// // A server that says "slow down" with a 420 and no header.
/// let layer = HostGateLayer::new().verdict(|status: StatusCode, headers: &HeaderMap, _: &Extensions| {
///     if status.as_u16() == 420 {
///         return Outcome::Throttled { hint: None, soft: false };
///     }
///     Outcome::of(status, headers)
/// });
/// ```
pub trait Verdict: Send + Sync + 'static {
    /// What this response head means.
    fn judge(&self, status: StatusCode, headers: &HeaderMap, extensions: &Extensions) -> Outcome;
}

impl<F> Verdict for F
where
    F: Fn(StatusCode, &HeaderMap, &Extensions) -> Outcome + Send + Sync + 'static,
{
    fn judge(&self, status: StatusCode, headers: &HeaderMap, extensions: &Extensions) -> Outcome {
        self(status, headers, extensions)
    }
}

/// The quota that a response states, if headers of that kind are read at all.
#[cfg(feature = "ratelimit-headers")]
#[inline]
pub(crate) fn quota(headers: &HeaderMap) -> Option<Quota> {
    rate_limit::quota(headers, SystemTime::now)
}

#[cfg(not(feature = "ratelimit-headers"))]
pub(crate) fn quota(_: &HeaderMap) -> Option<Quota> {
    None
}

/// Without this there is no [`quota`].
#[cfg(feature = "ratelimit-headers")]
pub(crate) use rate_limit::mentions_quota;

#[cfg(not(feature = "ratelimit-headers"))]
pub(crate) fn mentions_quota(_: &HeaderMap) -> bool {
    false
}

/// Whether [`Outcome::of`] looks any further than the status.
#[inline]
pub(crate) fn may_be_no_success(status: StatusCode) -> bool {
    matches!(status.as_u16(), 403 | 408 | 429 | 500..600)
}

impl Outcome {
    /// The verdict a gate uses unless it is given another:
    ///
    /// | response | outcome |
    /// |---|---|
    /// | 429 | throttled |
    /// | 403 | throttled; soft without a hint |
    /// | 5xx with a usable hint | throttled |
    /// | any other 5xx; 408, which a timeout layer below makes up | neutral |
    /// | everything else, 304 and 404 included | success |
    ///
    /// Reads the wall clock when the response is a refusal, because a `Retry-After` may be a date.
    pub fn of(status: StatusCode, headers: &HeaderMap) -> Self {
        Self::judged(status, headers, RetryAfterUnit::default)
    }

    /// The unit is asked for only where there may be a hint to read.
    #[inline]
    pub(crate) fn judged(status: StatusCode, headers: &HeaderMap, unit: impl FnOnce() -> RetryAfterUnit) -> Self {
        let hint = || hint(headers, SystemTime::now(), unit());
        match status {
            StatusCode::TOO_MANY_REQUESTS => Self::Throttled { hint: hint(), soft: false },
            StatusCode::FORBIDDEN => {
                let hint = hint();
                Self::Throttled { hint, soft: hint.is_none() }
            }
            StatusCode::REQUEST_TIMEOUT => Self::Neutral,
            _ if status.is_server_error() => match hint() {
                None => Self::Neutral,
                hint => Self::Throttled { hint, soft: false },
            },
            _ => Self::Success,
        }
    }
}
