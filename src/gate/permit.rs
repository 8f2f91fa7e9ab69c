//! The right of one request to be in flight, given back when dropped.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use http::{HeaderMap, StatusCode};

#[cfg(feature = "redis")]
use super::remote::Release;
use super::slot::Admission;
#[cfg(feature = "redis")]
use super::slot::Slot;
use super::table::SlotId;
use super::waiter::Waiter;
use super::{Gate, Refused, Terms};
use crate::config::PermitUntil;
use crate::error::Throttled;
use crate::host::HostKey;
use crate::pace::{Quota, Ticket};
#[cfg(feature = "redis")]
use crate::shared::{Heard, Lease, Report};
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
#[derive(Debug, Default)]
struct Story {
    /// Of the request's send; `None` when nothing was recorded of its host then.
    ticket: Option<Ticket>,
    waited: Duration,
    /// The same request has been refused softly before.
    softly_refused: bool,
    label: Option<&'static str>,
    /// The permit in the store, which goes back with what the response meant.
    #[cfg(feature = "redis")]
    lease: Option<Lease>,
    #[cfg(feature = "redis")]
    report: Report,
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
        let story = tells.then(|| Box::new(Story { waited, softly_refused, label, ..Story::default() }));
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
        #[cfg(feature = "redis")]
        let sent = match self.story.as_ref().and_then(|story| story.lease.as_ref()) {
            Some(lease) => slot.send_leased(lease.binding, gate.clock.now(), &gate.config),
            None => slot.send(admission, || gate.clock.now(), &gate.config),
        };
        #[cfg(not(feature = "redis"))]
        let sent = slot.send(admission, || gate.clock.now(), &gate.config);
        match sent {
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
                #[cfg(feature = "redis")]
                let host_terms = slot.host_terms(&gate.config);
                drop(shard);
                let waited = self.story.as_ref().map_or(Duration::ZERO, |story| story.waited);
                #[cfg(feature = "redis")]
                if let Some(lease) = self.story.take().and_then(|story| story.lease) {
                    gate.release(&key, Release::unused(host_terms, lease.token));
                }
                next.into_iter().for_each(Waker::wake);
                let terms = Terms { again: Some(waited), ..*terms };
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
        &mut self,
        elsewhere: Option<&HostKey>,
        outcome: Outcome,
        status: StatusCode,
        headers: &HeaderMap,
    ) -> Option<Throttled> {
        // A request of which no send was recorded counts as sent before any refusal: its success says nothing.
        let quota = self.gate.quota(headers);
        #[cfg(feature = "redis")]
        self.note(elsewhere, outcome, quota);
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
        let (ticket, waited, label) =
            self.story.as_ref().map(|story| (story.ticket, story.waited, story.label)).unwrap_or_default();
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

    #[cfg(feature = "redis")]
    pub(super) fn with_lease(mut self, lease: Lease) -> Self {
        self.story.get_or_insert_default().lease = Some(lease);
        self
    }

    /// Keeps in mind what the store is to be told when the permit goes back; of another host it is told at once.
    #[cfg(feature = "redis")]
    fn note(&mut self, elsewhere: Option<&HostKey>, outcome: Outcome, quota: Option<Quota>) {
        let Some(shared) = &self.gate.shared else { return };
        if outcome == Outcome::Success && quota.is_none() && self.story.is_none() {
            // Admitted without the store: it knows nothing that this would change.
            return;
        }
        let story = self.story.get_or_insert_default();
        let sent_at = match &story.lease {
            Some(lease) => lease.at,
            // Admitted while the store was out of reach.
            None => story.ticket.map_or(0, |ticket| shared.store.time_since(self.gate.clock.now().since(ticket.at))),
        };
        let binding = story.ticket.is_some_and(|ticket| ticket.binding);
        let (outcome, again) = (Heard::from(outcome), story.softly_refused);
        let report = Report { outcome, sent_at, binding, again, quota };
        match elsewhere {
            Some(host) => self.gate.report(host, report, story.label),
            None => story.report = report,
        }
    }

    /// What goes to the store when this permit goes back.
    #[cfg(feature = "redis")]
    fn take_release(&mut self, slot: &mut Slot) -> Option<Release> {
        let story = self.story.take().filter(|_| self.gate.shared.is_some())?;
        let Story { lease, report, label, .. } = *story;
        let awaited = lease.is_some();
        if awaited {
            slot.begin_release();
        } else if !report.is_news() {
            return None;
        } else if self.gate.store_up().is_none() {
            slot.remote().tell_later();
            return None;
        }
        if report.is_news() {
            slot.begin_report();
        }
        let token = lease.map(|lease| lease.token).unwrap_or_default();
        let sent = !matches!(self.stage, Stage::Admitted(_));
        Some(Release { terms: slot.host_terms(&self.gate.config), token, sent, report, label, awaited })
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
        #[cfg(feature = "redis")]
        let gate = &Arc::clone(&self.gate);
        #[cfg(not(feature = "redis"))]
        let gate = &*self.gate;
        let (admission, body) = match self.stage {
            Stage::Admitted(admission) => (admission, false),
            Stage::Sent => (Admission::Free, false),
            Stage::Body => (Admission::Free, true),
            Stage::Over => return,
        };
        let mut shard = gate.table.lock(self.slot.hash);
        let Some(slot) = shard.by_id(self.slot) else {
            return;
        };
        slot.no_longer_unsent(admission);
        slot.give_back(body);
        if !matches!(self.stage, Stage::Admitted(_)) {
            slot.completed(|| gate.clock.now(), &gate.config);
        }
        #[cfg(feature = "redis")]
        let release = self.take_release(slot).map(|release| (slot.key().clone(), release));
        let next = slot.next_waiter(&gate.config);
        if slot.is_unused() {
            gate.table.tidy(&mut shard, &gate.clock, &gate.config);
        }
        drop(shard);
        #[cfg(feature = "redis")]
        if let Some((key, release)) = release {
            gate.release(&key, release);
        }
        next.into_iter().for_each(Waker::wake);
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("host", &self.key()).field("stage", &self.stage).finish_non_exhaustive()
    }
}
