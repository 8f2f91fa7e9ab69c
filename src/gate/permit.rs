//! The right of one request to be in flight, given back when dropped.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use http::{HeaderMap, StatusCode};

use super::slot::Admission;
use super::table::SlotId;
use super::waiter::Waiter;
use super::{Gate, Refused, Terms};
use crate::config::PermitUntil;
use crate::error::Throttled;
use crate::host::HostKey;
use crate::pace::{Quota, Ticket};
use crate::verdict::Outcome;

/// # Cancel safety
///
/// A permit is a guard: dropped at any moment, on any path, a panic included, it goes back and the next waiter is woken.
pub(crate) struct Permit {
    gate: Arc<Gate>,
    slot: SlotId,
    stage: Stage,
    until: PermitUntil,
    /// Apart, because a permit travels with every response and is kept small; most requests have nothing to tell.
    story: Option<Box<Story>>,
}

/// What there is to tell of a request that was not simply let through.
#[derive(Clone, Copy, Debug, Default)]
struct Story {
    /// Of the request's send; `None` when nothing was recorded of its host then.
    ticket: Option<Ticket>,
    waited: Duration,
    /// The same request has been refused softly before.
    softly_refused: bool,
    label: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Admitted(Admission),
    Sent,
    Body,
    /// Given back; there is nothing left to do.
    Over,
}

impl Permit {
    #[inline]
    pub(super) fn new(
        gate: Arc<Gate>,
        slot: SlotId,
        admission: Admission,
        until: PermitUntil,
        terms: &Terms,
        waited: Duration,
    ) -> Self {
        let &Terms { softly_refused, label, .. } = terms;
        let tells = !waited.is_zero() || softly_refused || label.is_some();
        let story = tells.then(|| Box::new(Story { ticket: None, waited, softly_refused, label }));
        Self { gate, slot, stage: Stage::Admitted(admission), until, story }
    }

    /// The request is about to go out.
    ///
    /// `late` says that a host may have refused another request since the permit was granted. A send must never go out
    /// after a hold it has not waited for: the permit turns back into a waiter, with a claim to the head of the queue.
    #[inline]
    pub(crate) fn send(&mut self, late: bool, terms: &Terms) -> Result<(), Box<Waiter>> {
        let Stage::Admitted(admission) = self.stage else {
            return Ok(());
        };
        self.stage = Stage::Sent;
        if self.gate.config.final_uri.is_some() {
            // A redirect inside may end at another host, whose verdict needs to know when this began.
            let at = self.gate.clock.now();
            self.story.get_or_insert_default().ticket = Some(Ticket { at, binding: false, again: false });
        }
        if admission == Admission::Free && !late { Ok(()) } else { self.record_send(admission, terms) }
    }

    #[cold]
    fn record_send(&mut self, admission: Admission, terms: &Terms) -> Result<(), Box<Waiter>> {
        let gate = Arc::clone(&self.gate);
        let mut shard = gate.table.lock(self.slot.hash);
        // Invariant: a slot with a request in flight is never removed.
        let Some(slot) = shard.by_id(self.slot) else {
            return Ok(());
        };
        match slot.send(admission, || gate.clock.now(), &gate.config) {
            Ok(None) => Ok(()),
            Ok(ticket) => {
                let story = self.story.get_or_insert_default();
                story.ticket = ticket.map(|ticket| Ticket { again: story.softly_refused, ..ticket });
                let next = if admission == Admission::Paced { slot.next_waiter(&gate.config) } else { None };
                drop(shard);
                next.into_iter().for_each(Waker::wake);
                Ok(())
            }
            Err(_) => {
                self.stage = Stage::Over;
                slot.no_longer_unsent(admission);
                slot.give_back(false);
                let key = slot.key().clone();
                let next = slot.next_waiter(&gate.config);
                drop(shard);
                next.into_iter().for_each(Waker::wake);
                let terms = Terms { again: Some(self.story().waited), ..*terms };
                Err(Box::new(Waiter::new(gate, key, terms)))
            }
        }
    }

    /// The response head is here and its body keeps the permit.
    #[inline]
    pub(crate) fn head_arrived(&mut self) {
        self.stage = Stage::Body;
        if let Some(slot) = self.gate.table.lock(self.slot.hash).by_id(self.slot) {
            slot.head_arrived(|| self.gate.clock.now());
        }
    }

    /// Tells the gate what the response meant for this permit's host, or for the one where a redirect has ended.
    /// `None` unless it was a refusal.
    #[inline]
    pub(crate) fn settle(
        &self,
        elsewhere: Option<&HostKey>,
        outcome: Outcome,
        status: StatusCode,
        headers: &HeaderMap,
    ) -> Option<Throttled> {
        // A request of which no send was recorded counts as sent before any refusal: its success says nothing.
        let quota = self.gate.quota(headers);
        if outcome == Outcome::Success && self.ticket().is_none() && quota.is_none() {
            return None;
        }
        self.report(elsewhere, outcome, status, headers, quota)
    }

    /// Apart from [`settle`](Self::settle), so that what happens to nearly every response is inlined where it comes in.
    #[cold]
    fn report(
        &self,
        elsewhere: Option<&HostKey>,
        outcome: Outcome,
        status: StatusCode,
        headers: &HeaderMap,
        quota: Option<Quota>,
    ) -> Option<Throttled> {
        let Story { ticket, waited, label, .. } = self.story();
        let key = elsewhere.cloned().or_else(|| self.key())?;
        match outcome {
            Outcome::Neutral | Outcome::Success => {
                if outcome == Outcome::Success {
                    self.gate.succeeded(&key, ticket);
                }
                if let Some(quota) = quota {
                    let answered = u64::from(elsewhere.is_none());
                    self.gate.quota_left(&key, quota, answered, outcome == Outcome::Success);
                }
                None
            }
            Outcome::Throttled { hint, soft } => {
                let refused = Refused { status, hint, soft, quota, headers, label };
                let throttled = self.gate.throttled(&key, ticket, &refused, waited);
                Some(Throttled { elsewhere: elsewhere.is_some(), ..throttled })
            }
        }
    }

    fn story(&self) -> Story {
        self.story.as_deref().copied().unwrap_or_default()
    }

    #[inline]
    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// The host, looked up.
    pub(crate) fn key(&self) -> Option<HostKey> {
        self.gate.table.lock(self.slot.hash).by_id(self.slot).map(|slot| slot.key().clone())
    }

    #[inline]
    pub(crate) fn until(&self) -> PermitUntil {
        self.until
    }

    /// Of the request's send, for a retry policy below that reports on its own.
    #[inline]
    pub(crate) fn ticket(&self) -> Option<Ticket> {
        self.story.as_ref()?.ticket
    }
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        let (admission, body) = match self.stage {
            Stage::Admitted(admission) => (admission, false),
            Stage::Sent => (Admission::Free, false),
            Stage::Body => (Admission::Free, true),
            Stage::Over => return,
        };
        let gate = &*self.gate;
        let mut shard = gate.table.lock(self.slot.hash);
        let Some(slot) = shard.by_id(self.slot) else {
            return;
        };
        slot.no_longer_unsent(admission);
        slot.give_back(body);
        if !matches!(self.stage, Stage::Admitted(_)) {
            slot.completed(|| gate.clock.now(), &gate.config);
        }
        let next = slot.next_waiter(&gate.config);
        if slot.is_unused() {
            gate.table.tidy(&mut shard, &gate.clock, &gate.config);
        }
        drop(shard);
        next.into_iter().for_each(Waker::wake);
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("host", &self.key()).field("stage", &self.stage).finish_non_exhaustive()
    }
}
