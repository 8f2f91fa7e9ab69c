//! ADR-0015: one bounded retry within a request.

use std::time::Duration;

use http::{Request, Response, StatusCode};
use tokio::time::{Sleep, sleep};
use tower::retry::Policy;

use super::may_repeat;
use crate::extensions::SentAt;
use crate::gate::{Handle, Refused};
use crate::observe::Label;
use crate::pace::{Ticket, Time};
use crate::verdict::Outcome;

/// Retry policy for a [`RetryLayer`](tower::retry::RetryLayer) **inside** the gate it was made from
/// ([`HostGateLayer::in_flight_retry`]).
///
/// Exactly two attempts. After a 429 or 503 (another refusal, such as 403, for safe methods only) it waits for what the
/// server asked, at most 5 s, or 500 ms, with the permit held throughout, and sends once more. The first refusal is
/// reported to the gate at once, so siblings cool down meanwhile; both refusals of one request are one event. The request
/// never waits on the cooldown it has caused.
///
/// These 5 s and the gate's `max_cooldown` are two numbers on purpose: whoever retries here holds a permit, and a long
/// wait would keep all its siblings waiting.
///
/// ```
/// use tower::{ServiceBuilder, retry::RetryLayer};
/// use tower_host_gate::HostGateLayer;
/// # use std::convert::Infallible;
/// # async fn fetch(_: http::Request<String>) -> Result<http::Response<String>, Infallible> { Ok(http::Response::default()) }
///
/// let gate = HostGateLayer::new();
/// let client = ServiceBuilder::new()
///     .layer(gate.clone())
///     .layer(RetryLayer::new(gate.in_flight_retry()))
///     .service_fn(fetch);
/// ```
///
/// The layers between gate and retry must leave the URI alone: the host is read from it again. Requests are cloned, so
/// their bodies have to be `Clone`.
///
/// [`HostGateLayer::in_flight_retry`]: crate::HostGateLayer::in_flight_retry
#[derive(Clone, Debug)]
pub struct InFlightRetry {
    gate: Handle,
    base_delay: Duration,
    max_delay: Duration,
    /// When the second attempt went out; none has before the first one was refused.
    resent: Option<Time>,
}

impl InFlightRetry {
    pub(crate) fn new(gate: Handle) -> Self {
        Self { gate, base_delay: Duration::from_millis(500), max_delay: Duration::from_secs(5), resent: None }
    }

    /// The wait before the second attempt when the server names none. Default 500 ms.
    #[must_use]
    pub fn base_delay(mut self, delay: Duration) -> Self {
        self.base_delay = delay;
        self
    }

    /// The longest wait before the second attempt. Default 5 s.
    #[must_use]
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = delay;
        self
    }
}

impl<B: Clone, ResB, E> Policy<Request<B>, Response<ResB>, E> for InFlightRetry {
    type Future = Sleep;

    fn retry(&mut self, request: &mut Request<B>, result: &mut Result<Response<ResB>, E>) -> Option<Sleep> {
        let response = result.as_ref().ok()?;
        let config = &self.gate.config;
        if config.disabled {
            return None;
        }
        let asked = config.keying.key(request.uri(), request.headers(), request.extensions())?;
        let key = self.gate.final_host(|| Some(asked.clone()), response.extensions()).unwrap_or(asked);
        let (status, headers, extensions) = (response.status(), response.headers(), response.extensions());
        let outcome = self.gate.judge(|| Some(key.clone()), status, headers, extensions);
        if let Some(resent) = self.resent {
            // A second refusal is for the gate to see, as part of the same event. That a second attempt has succeeded it
            // cannot see: it knows the request by when it was first sent.
            if outcome == Outcome::Success {
                self.gate.succeeded(&key, Some(Ticket { at: resent, binding: false, again: true }));
            }
            return None;
        }
        let refused = matches!(outcome, Outcome::Throttled { .. }) || status == StatusCode::SERVICE_UNAVAILABLE;
        if !refused || !may_repeat(request.method(), status) {
            return None;
        }
        let mut wait = None;
        if let Outcome::Throttled { hint, soft } = outcome {
            wait = hint;
            let ticket =
                request.extensions().get::<SentAt>().filter(|mark| mark.gate == self.gate.id()).map(|mark| mark.ticket);
            let label = request.extensions().get().map(|Label(label)| *label);
            let refused = Refused { status, hint, soft, quota: self.gate.quota(headers), headers, label };
            self.gate.throttled(&key, ticket, &refused, Duration::ZERO);
            #[cfg(feature = "redis")]
            self.gate.report_at_once(&key, ticket, outcome, &refused);
        }
        let delay = wait.unwrap_or(self.base_delay).min(self.max_delay);
        let now = self.gate.now();
        let resent = now.after(delay);
        if !self.gate.resend(&key, now, resent) {
            return None;
        }
        self.resent = Some(resent);
        Some(sleep(delay))
    }

    fn clone_request(&mut self, request: &Request<B>) -> Option<Request<B>> {
        Some(request.clone())
    }
}
