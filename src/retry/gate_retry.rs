//! A retry whose wait is the gate's.

use std::future::{Ready, ready};

use http::{Request, Response};
use tower::retry::Policy;

use super::may_repeat;
use crate::error::Throttled;
use crate::extensions::Again;

/// Retry policy for a [`RetryLayer`](tower::retry::RetryLayer) **outside** the gate.
///
/// Sleeps for nothing itself. A refused request goes back to the gate, at the head of its host's queue, and the gate's
/// pacing is the wait; what it has waited before is subtracted from its budget, so two attempts share one. When the
/// budget does not reach, the caller gets [`RateLimited`](crate::RateLimited).
///
/// Repeats what the gate has judged to be a refusal: 429 and 503 with any method, others with safe ones only, a 403
/// without a hint only once. Never repeats a request that was shed, nor a transport error, nor a refusal that a redirect
/// layer below the gate has brought from another host: the gate could not wait for that one.
///
/// ```
/// use tower::{ServiceBuilder, retry::RetryLayer};
/// use tower_host_gate::{HostGateLayer, retry::GateRetry};
/// # use std::convert::Infallible;
/// # async fn fetch(_: http::Request<String>) -> Result<http::Response<String>, Infallible> { Ok(http::Response::default()) }
///
/// let client = ServiceBuilder::new()
///     .layer(RetryLayer::new(GateRetry::new(3)))
///     .layer(HostGateLayer::new())
///     .service_fn(fetch);
/// ```
///
/// Requests are cloned, so their bodies have to be `Clone`.
#[derive(Clone, Debug)]
pub struct GateRetry {
    left: u32,
    softly_refused: bool,
}

impl GateRetry {
    /// At most `attempts` sends, the first one included; zero and one never repeat.
    pub fn new(attempts: u32) -> Self {
        Self { left: attempts.saturating_sub(1), softly_refused: false }
    }
}

impl<B: Clone, ResB, E> Policy<Request<B>, Response<ResB>, E> for GateRetry {
    type Future = Ready<()>;

    fn retry(&mut self, request: &mut Request<B>, result: &mut Result<Response<ResB>, E>) -> Option<Ready<()>> {
        let response = result.as_ref().ok()?;
        let throttled = response.extensions().get::<Throttled>()?;
        let once_is_enough = throttled.soft && self.softly_refused;
        // Refused elsewhere, the host that is asked is not the one that is held: the next attempt would not wait.
        if self.left == 0 || !may_repeat(request.method(), response.status()) || once_is_enough || throttled.elsewhere {
            return None;
        }
        self.left -= 1;
        self.softly_refused |= throttled.soft;
        request.extensions_mut().insert(Again { waited: throttled.waited, softly_refused: self.softly_refused });
        Some(ready(()))
    }

    fn clone_request(&mut self, request: &Request<B>) -> Option<Request<B>> {
        Some(request.clone())
    }
}
