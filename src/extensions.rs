//! What a request's extensions tell the gate, and what the gate writes there.

use std::time::Duration;

use http::{Method, Request};

use crate::config::PermitUntil;
use crate::gate::{Permit, Terms};
use crate::observe::Label;
use crate::pace::Ticket;

/// Request extension: this request's budget for queue and pacing, instead of the layer's or the host's. Zero never waits.
///
/// ```
/// use std::time::Duration;
/// use tower_host_gate::MaxWait;
///
/// let mut request = http::Request::get("https://example.com/feed").body(())?;
/// request.extensions_mut().insert(MaxWait(Duration::from_secs(5)));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxWait(pub Duration);

/// Request extension: an attempt after the first one, and what became of the earlier ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Again {
    pub(crate) waited: Duration,
    pub(crate) softly_refused: bool,
}

/// Request extension: when the gate sent this, for a retry policy below that reports on its own. Absent on requests to a
/// host that has not refused any.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "retry"), expect(dead_code, reason = "only a retry policy reads it"))]
pub(crate) struct SentAt {
    /// Another gate's time means nothing.
    pub(crate) gate: usize,
    pub(crate) ticket: Ticket,
}

#[inline]
pub(crate) fn terms<B>(request: &Request<B>) -> Terms {
    let extensions = request.extensions();
    let mut terms = if extensions.is_empty() {
        Terms::default()
    } else {
        let again = extensions.get::<Again>();
        Terms {
            budget: extensions.get().map(|MaxWait(budget)| *budget),
            until: extensions.get::<PermitUntil>().copied(),
            again: again.map(|again| again.waited),
            softly_refused: again.is_some_and(|again| again.softly_refused),
            label: extensions.get().map(|Label(label)| *label),
            #[cfg(feature = "redis")]
            only_here: false,
        }
    };
    if request.method() == Method::HEAD {
        // There will be no body, whatever the response's says of itself.
        terms.until = Some(PermitUntil::Head);
    }
    terms
}

#[inline]
pub(crate) fn mark_sent<B>(request: &mut Request<B>, permit: Option<&Permit>) {
    let Some(permit) = permit else { return };
    if let Some((gate, ticket)) = permit.ticket() {
        request.extensions_mut().insert(SentAt { gate, ticket });
    }
}
