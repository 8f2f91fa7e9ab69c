//! Two retry policies for [`tower::retry`], for two places in the stack.
//!
//! * [`GateRetry`] **outside** the gate, recommended: each attempt is gated, and the gate's pacing is the wait.
//! * [`InFlightRetry`] **inside** the gate: one quick second attempt while the permit is held.

mod gate_retry;
mod in_flight;

use http::{Method, StatusCode};

pub use gate_retry::GateRetry;
pub use in_flight::InFlightRetry;

/// A 429 or 503 was not acted upon, so any method may be sent again. Anything else may have been: only a safe one may.
fn may_repeat(method: &Method, status: StatusCode) -> bool {
    matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) || method.is_safe()
}
