//! The error of a request that was shed, and the marks a refusal leaves on a response.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use http::StatusCode;
use tokio::time::Instant;

use crate::host::HostKey;

/// The gate did not send this request: its host could not admit it within the budget.
///
/// Says when to come back. Inside a [`tower::BoxError`](https://docs.rs/tower/latest/tower/type.BoxError.html), possibly
/// wrapped by other layers; [`RateLimited::find`] gets it out.
///
/// ```
/// use tower_host_gate::RateLimited;
///
/// fn reschedule(error: &(dyn std::error::Error + 'static)) {
///     if let Some(limited) = RateLimited::find(error) {
///         println!("{}: again in {:?}", limited.host(), limited.retry_after());
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct RateLimited(Box<Details>);

#[derive(Clone, Debug)]
pub(crate) struct Details {
    pub(crate) host: HostKey,
    pub(crate) retry_after: Duration,
    pub(crate) reason: Reason,
    pub(crate) refusal: Option<LastRefusal>,
    pub(crate) streak: u32,
    pub(crate) throttled_since: Option<Instant>,
}

impl From<Details> for RateLimited {
    fn from(details: Details) -> Self {
        Self(Box::new(details))
    }
}

/// The last refusal of a host, as a shed request reports it.
#[derive(Clone, Debug)]
pub(crate) struct LastRefusal {
    pub(crate) status: StatusCode,
    pub(crate) asked: Option<Duration>,
    pub(crate) raw_hint: Option<Box<str>>,
}

/// Why a request was shed.
///
/// ```
/// use tower_host_gate::{RateLimited, Reason};
///
/// fn advice(limited: &RateLimited) -> &'static str {
///     match limited.reason() {
///         Reason::Cooldown | Reason::Spacing => "come back later",
///         Reason::InFlight => "read or drop the responses you have",
///         _ => "ask for less at a time",
///     }
/// }
/// assert_eq!(Reason::InFlight.to_string(), "in-flight");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The host refused requests, has nothing left of its quota, or was penalized, and its cooldown outlasts the budget.
    Cooldown,
    /// Sends have to be some time apart (the host is warm, has been found to want it, or has a
    /// [delay](crate::HostGateLayer::min_delay) set for it), and so do not reach this request within the budget.
    Spacing,
    /// The [quota](crate::HostGateLayer::quota) that was set for the host does not reach this request within the budget.
    Quota,
    /// The requests in flight did not end within the budget. Is a response body left unread?
    InFlight,
    /// `max_queue` requests are waiting already.
    QueueFull,
}

impl Reason {
    /// The reason in kebab-case, as the serialised error has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cooldown => "cooldown",
            Self::Spacing => "spacing",
            Self::Quota => "quota",
            Self::InFlight => "in-flight",
            Self::QueueFull => "queue-full",
        }
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Reason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl RateLimited {
    /// The host key.
    pub fn host(&self) -> &str {
        self.0.host.as_str()
    }

    /// When the gate would admit this request behind those already waiting: rounded up to a millisecond, and never an
    /// understatement as far as pacing goes. How long requests in flight take nobody knows, so for
    /// [`Reason::InFlight`] and [`Reason::QueueFull`] it is a guess, and at least one second.
    pub fn retry_after(&self) -> Duration {
        self.0.retry_after
    }

    /// What the server itself asked for in its last refusal, uncapped: it may be [`Duration::MAX`], which added to an
    /// `Instant` panics.
    pub fn asked(&self) -> Option<Duration> {
        self.0.refusal.as_ref()?.asked
    }

    /// The text in which it asked, escaped, at most 128 bytes.
    pub fn raw_hint(&self) -> Option<&str> {
        self.0.refusal.as_ref()?.raw_hint.as_deref()
    }

    /// The status of the host's last refusal; `None` when it never refused.
    pub fn status(&self) -> Option<StatusCode> {
        Some(self.0.refusal.as_ref()?.status)
    }

    /// Consecutive throttle events of the host.
    pub fn streak(&self) -> u32 {
        self.0.streak
    }

    /// When the present run of refusals began; `None` outside of one.
    pub fn throttled_since(&self) -> Option<Instant> {
        self.0.throttled_since
    }

    /// Which limit was in the way.
    pub fn reason(&self) -> Reason {
        self.0.reason
    }

    /// `"RATE_LIMITED"`, to branch on.
    pub fn code(&self) -> &'static str {
        "RATE_LIMITED"
    }

    /// Looks for a `RateLimited` in an error and its sources.
    pub fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            next = error.source();
        }
        None
    }

    /// Whole seconds, rounded up, for a `Retry-After`.
    pub(crate) fn retry_after_secs(&self) -> u64 {
        whole_seconds(self.0.retry_after)
    }
}

fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

impl fmt::Display for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is rate limited: retry in {} s ({}", self.0.host, self.retry_after_secs(), self.0.reason)?;
        if let Some(status) = self.status() {
            write!(f, ", last status {}", status.as_u16())?;
        }
        match self.0.reason {
            Reason::InFlight => f.write_str("; are response bodies left unread?)"),
            _ => f.write_str(")"),
        }
    }
}

impl Error for RateLimited {}

/// `{"code", "message", "details": {"host", "retry_after", "asked", "raw_hint", "reason", "status", "streak",
/// "throttled_for"}}`; times in whole seconds, rounded up; absent values are `null`.
#[cfg(feature = "serde")]
impl serde::Serialize for RateLimited {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct as _;

        #[derive(serde::Serialize)]
        struct Form<'a> {
            host: &'a str,
            retry_after: u64,
            asked: Option<u64>,
            raw_hint: Option<&'a str>,
            reason: Reason,
            status: Option<u16>,
            streak: u32,
            throttled_for: Option<u64>,
        }

        let details = Form {
            host: self.host(),
            retry_after: self.retry_after_secs(),
            asked: self.asked().map(whole_seconds),
            raw_hint: self.raw_hint(),
            reason: self.0.reason,
            status: self.status().map(|status| status.as_u16()),
            streak: self.0.streak,
            throttled_for: self.0.throttled_since.map(|since| whole_seconds(since.elapsed())),
        };
        let mut form = serializer.serialize_struct("RateLimited", 3)?;
        form.serialize_field("code", self.code())?;
        form.serialize_field("message", &self.to_string())?;
        form.serialize_field("details", &details)?;
        form.end()
    }
}

/// Response extension on a refusal that passed through the gate: the server's answer, with what the gate made of it.
///
/// ```
/// use tower::{Layer, ServiceExt};
/// use tower_host_gate::{HostGateLayer, Throttled};
/// # use std::{convert::Infallible, time::Duration};
/// # use http::{Request, Response};
/// # async fn fetch(_: Request<String>) -> Result<Response<String>, Infallible> {
/// #     Ok(Response::builder().status(429).header("retry-after", "5").body(String::new()).unwrap())
/// # }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower::BoxError> {
///
/// // A server that answers 429 with `Retry-After: 5`.
/// let client = HostGateLayer::new().layer(tower::service_fn(fetch));
/// let response = client.oneshot(Request::get("https://example.com/").body(String::new())?).await?;
/// let throttled = response.extensions().get::<Throttled>().unwrap();
/// assert_eq!((throttled.retry_after, throttled.streak), (Duration::from_secs(5), 1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Throttled {
    /// How long the gate now holds the host.
    pub retry_after: Duration,
    /// Consecutive throttle events of the host.
    pub streak: u32,
    /// How long this request had waited in the gate, earlier attempts included.
    pub waited: Duration,
    /// A 403 without a hint: perhaps about the URL.
    pub soft: bool,
    /// Charged to another host than the one that was asked, at the end of a redirect below the gate.
    pub elsewhere: bool,
}

/// Response extension marking a 429 that the gate made up because the request was shed ([`OnShed::Response`]).
///
/// [`OnShed::Response`]: crate::OnShed::Response
///
/// ```
/// use tower_host_gate::Shed;
///
/// fn shed_by_the_gate<B>(response: &http::Response<B>) -> Option<String> {
///     response.extensions().get::<Shed>().map(|shed| shed.error().to_string())
/// }
/// # assert_eq!(shed_by_the_gate(&http::Response::new(())), None);
/// ```
#[derive(Clone, Debug)]
pub struct Shed(pub(crate) RateLimited);

impl Shed {
    /// What the error would have been.
    pub fn error(&self) -> &RateLimited {
        &self.0
    }
}
