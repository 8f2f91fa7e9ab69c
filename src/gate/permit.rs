//! The right of one request to be in flight, given back when dropped.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;
use std::{fmt, mem};

use http::{HeaderMap, StatusCode};

use super::cells::Rights;
use super::fast::FastPath;
#[cfg(feature = "redis")]
use super::remote::Release;
use super::slot::{Admission, Slot};
use super::sync::MutexGuard;
use super::table::{Shard, SlotId};
use super::waiter::Waiter;
use super::{Gate, Refused, Terms};
use crate::config::PermitUntil;
use crate::error::Throttled;
use crate::host::HostKey;
#[cfg(feature = "redis")]
use crate::pace::Quota;
use crate::pace::Ticket;
#[cfg(feature = "redis")]
use crate::shared::{Heard, Lease, Report};
use crate::verdict::Outcome;

/// # Cancel safety
///
/// A permit is a guard: dropped at any moment, on any path, a panic included, it goes back and the next waiter is woken.
pub(crate) enum Permit {
    Plain(Plain),
    /// Apart, because a permit travels with every response and is kept small.
    Told(Box<Told>),
}

/// A permit of the host's cell, with nothing to tell of its request.
pub(crate) struct Plain {
    fast: &'static FastPath,
    place: u32,
    stage: Stage,
    until: PermitUntil,
}

/// A permit with what there is to tell of a request that was not simply let through.
pub(crate) struct Told {
    gate: Arc<Gate>,
    right: Right,
    stage: Stage,
    admission: Admission,
    until: PermitUntil,
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

/// Where a permit is counted.
#[derive(Clone, Copy, Debug)]
enum Right {
    Cell(&'static FastPath, u32),
    Slot(SlotId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Admitted,
    Sent,
    Body,
    /// Given back; there is nothing left to do.
    Over,
}

impl Plain {
    #[inline]
    pub(super) fn new(fast: &'static FastPath, place: usize, rights: Rights) -> Self {
        let until = if rights.until_head { PermitUntil::Head } else { PermitUntil::BodyEnd };
        // Invariant: there are fewer cells than that.
        Self { fast, place: place as u32, stage: Stage::Admitted, until }
    }

    /// With what there is to tell of its request.
    pub(super) fn with(mut self, gate: &Arc<Gate>, terms: &Terms) -> Permit {
        self.until = terms.until.unwrap_or(self.until);
        let tells = terms.again.is_some() || terms.softly_refused || terms.label.is_some();
        if !tells && gate.config.final_uri.is_none() {
            return Permit::Plain(self);
        }
        Permit::Told(Box::new(self.told(Arc::clone(gate), terms)))
    }

    fn told(&mut self, gate: Arc<Gate>, terms: &Terms) -> Told {
        let right = Right::Cell(self.fast, self.place);
        let stage = mem::replace(&mut self.stage, Stage::Over);
        let mut told = Told::new(gate, right, Admission::Free, self.until, terms, terms.waited_before());
        told.stage = stage;
        told
    }

    /// The request is about to go out. False if its host may have refused another one since the permit was granted: then
    /// there is more to do, see [`Permit::send`].
    #[inline]
    pub(crate) fn send_plainly(&mut self) -> bool {
        let fast = !self.fast.cells.is_slow(self.place());
        if fast {
            self.stage = Stage::Sent;
        }
        fast
    }

    /// Whether the gate has nothing to learn from this response head.
    #[inline]
    pub(crate) fn says_nothing(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        self.fast.says_nothing(status, headers)
    }

    /// The response head is here and its body keeps the permit.
    #[inline]
    pub(crate) fn head_arrived(&mut self) {
        self.fast.head_arrived(self.place());
        self.stage = Stage::Body;
    }

    #[inline]
    pub(crate) fn until(&self) -> PermitUntil {
        self.until
    }

    #[inline]
    fn place(&self) -> usize {
        self.place as usize
    }
}

impl Drop for Plain {
    #[inline]
    fn drop(&mut self) {
        if self.stage != Stage::Over {
            self.fast.give_back(self.place(), self.stage);
        }
    }
}

impl Permit {
    pub(super) fn of_slot(
        gate: Arc<Gate>,
        slot: SlotId,
        admission: Admission,
        until: PermitUntil,
        terms: &Terms,
        waited: Duration,
    ) -> Self {
        Self::Told(Box::new(Told::new(gate, Right::Slot(slot), admission, until, terms, waited)))
    }

    /// The request is about to go out.
    ///
    /// A host may have refused another request since the permit was granted. A send must never go out after a hold it has
    /// not waited for: the permit turns back into a waiter, with a claim to the head of the queue.
    #[inline]
    pub(crate) fn send(&mut self, terms: impl FnOnce() -> Terms) -> Result<(), Box<Waiter>> {
        let sent = if let Self::Plain(plain) = self { plain.send_plainly() } else { false };
        if sent { Ok(()) } else { self.send_slowly(&terms()) }
    }

    #[cold]
    fn send_slowly(&mut self, terms: &Terms) -> Result<(), Box<Waiter>> {
        if let Self::Plain(plain) = self {
            // Invariant: a gate stays while a permit of its cells is out.
            let Some(gate) = plain.fast.gate() else { return Ok(()) };
            *self = Self::Told(Box::new(plain.told(gate, terms)));
        }
        match self {
            Self::Told(told) if told.stage == Stage::Admitted => told.send(terms),
            _ => Ok(()),
        }
    }

    /// The response head is here and its body keeps the permit.
    #[inline]
    pub(crate) fn head_arrived(&mut self) {
        match self {
            Self::Plain(plain) => plain.head_arrived(),
            Self::Told(told) => told.head_arrived(),
        }
    }

    /// To settle with.
    pub(crate) fn told(&mut self) -> Option<&mut Told> {
        if let Self::Plain(plain) = self {
            let gate = plain.fast.gate()?;
            *self = Self::Told(Box::new(plain.told(gate, &Terms::default())));
        }
        match self {
            Self::Plain(_) => None,
            Self::Told(told) => Some(told),
        }
    }

    #[cfg(feature = "redis")]
    pub(super) fn with_lease(mut self, lease: Lease) -> Self {
        if let Self::Told(told) = &mut self {
            told.lease = Some(lease);
        }
        self
    }

    /// The host, looked up.
    pub(crate) fn key(&self) -> Option<HostKey> {
        match self {
            Self::Plain(plain) => Some(plain.fast.cells.key(plain.place())),
            Self::Told(told) => told.key(),
        }
    }

    #[inline]
    pub(crate) fn until(&self) -> PermitUntil {
        match self {
            Self::Plain(plain) => plain.until,
            Self::Told(told) => told.until,
        }
    }

    /// Of the request's send, for a retry policy below that reports on its own, and the gate that knows the time.
    #[inline]
    pub(crate) fn ticket(&self) -> Option<(usize, Ticket)> {
        match self {
            Self::Plain(_) => None,
            Self::Told(told) => told.ticket.map(|ticket| (told.gate.id(), ticket)),
        }
    }

    fn stage(&self) -> Stage {
        match self {
            Self::Plain(plain) => plain.stage,
            Self::Told(told) => told.stage,
        }
    }
}

impl Told {
    fn new(
        gate: Arc<Gate>,
        right: Right,
        admission: Admission,
        until: PermitUntil,
        terms: &Terms,
        waited: Duration,
    ) -> Self {
        let &Terms { softly_refused, label, .. } = terms;
        Self {
            gate,
            right,
            stage: Stage::Admitted,
            admission,
            until,
            ticket: None,
            waited,
            softly_refused,
            label,
            #[cfg(feature = "redis")]
            lease: None,
            #[cfg(feature = "redis")]
            report: Report::default(),
        }
    }

    /// Records the send, or gives the permit back for a place at the head of the queue.
    fn send(&mut self, terms: &Terms) -> Result<(), Box<Waiter>> {
        self.stage = Stage::Sent;
        if self.gate.config.final_uri.is_some() {
            // A redirect inside may end at another host, whose verdict needs to know when this began.
            self.ticket = Some(Ticket { at: self.gate.clock.now(), binding: false, again: false });
        }
        let gate = Arc::clone(&self.gate);
        let mut shard = self.shard(&gate);
        let Some(slot) = self.slot(&mut shard) else {
            // A cell that is fast, or whose slots are other hosts'.
            return Ok(());
        };
        #[cfg(feature = "redis")]
        let sent = match &self.lease {
            Some(lease) => slot.send_leased(lease.binding, gate.clock.now(), &gate.config),
            None => slot.send(self.admission, || gate.clock.now(), &gate.config),
        };
        #[cfg(not(feature = "redis"))]
        let sent = slot.send(self.admission, || gate.clock.now(), &gate.config);
        match sent {
            Ok(None) => Ok(()),
            Ok(Some(ticket)) => {
                self.ticket = Some(Ticket { again: self.softly_refused, ..ticket });
                let next = if self.admission == Admission::Paced { slot.next_waiter(&gate.config) } else { None };
                drop(shard);
                next.into_iter().for_each(Waker::wake);
                Ok(())
            }
            Err(_) => {
                slot.no_longer_unsent(self.admission);
                let key = slot.key().clone();
                #[cfg(feature = "redis")]
                let host_terms = slot.host_terms(&gate.config);
                self.stage = Stage::Over;
                match self.right {
                    Right::Slot(_) => slot.give_back(false),
                    Right::Cell(fast, place) => {
                        fast.cells.given_back(place as usize, false);
                        slot.give_adopted_back(false);
                    }
                }
                let next = slot.next_waiter(&gate.config);
                drop(shard);
                if let Right::Cell(fast, _) = self.right {
                    fast.end_if_over();
                }
                #[cfg(feature = "redis")]
                if let Some(lease) = self.lease.take() {
                    gate.release(&key, Release::unused(host_terms, lease.token));
                }
                next.into_iter().for_each(Waker::wake);
                let terms = Terms { again: Some(self.waited), ..*terms };
                Err(Box::new(Waiter::new(gate, key, terms)))
            }
        }
    }

    fn shard<'a>(&self, gate: &'a Gate) -> MutexGuard<'a, Shard> {
        match self.right {
            Right::Slot(id) => gate.table.lock(id.spot),
            Right::Cell(_, place) => gate.table.lock_place(place as usize),
        }
    }

    /// The slot that counts this permit. Invariant: one with a request in flight is never removed; a cell's permit may have
    /// none.
    fn slot<'a>(&self, shard: &'a mut Shard) -> Option<&'a mut Slot> {
        match self.right {
            Right::Slot(id) => shard.by_id(id),
            Right::Cell(fast, place) => shard.adopter(place as usize, fast.cells.occupant(place as usize)),
        }
    }

    fn head_arrived(&mut self) {
        self.stage = Stage::Body;
        match self.right {
            Right::Slot(id) => {
                let mut shard = self.gate.table.lock(id.spot);
                let next = shard.by_id(id).and_then(|slot| slot.head_arrived(|| self.gate.clock.now()));
                drop(shard);
                next.into_iter().for_each(Waker::wake);
            }
            Right::Cell(fast, place) => fast.head_arrived(place as usize),
        }
    }

    /// Tells the gate what the response meant for this permit's host, or for the one where a redirect has ended.
    /// `None` unless it was a refusal.
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
        if outcome == Outcome::Success && self.ticket.is_none() && quota.is_none() {
            return None;
        }
        let &mut Self { ticket, waited, label, .. } = self;
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

    /// Keeps in mind what the store is to be told when the permit goes back; of another host it is told at once.
    #[cfg(feature = "redis")]
    fn note(&mut self, elsewhere: Option<&HostKey>, outcome: Outcome, quota: Option<Quota>) {
        let Some(shared) = &self.gate.shared else { return };
        if outcome == Outcome::Success && quota.is_none() && self.lease.is_none() && self.ticket.is_none() {
            // Admitted without the store: it knows nothing that this would change.
            return;
        }
        let sent_at = match &self.lease {
            Some(lease) => lease.at,
            // Admitted while the store was out of reach.
            None => self.ticket.map_or(0, |ticket| shared.store.time_since(self.gate.clock.now().since(ticket.at))),
        };
        let binding = self.ticket.is_some_and(|ticket| ticket.binding);
        let (outcome, again) = (Heard::from(outcome), self.softly_refused);
        let report = Report { outcome, sent_at, binding, again, quota };
        match elsewhere {
            Some(host) => self.gate.report(host, report, self.label),
            None => self.report = report,
        }
    }

    /// What goes to the store when this permit goes back.
    #[cfg(feature = "redis")]
    fn take_release(&mut self, slot: &mut Slot) -> Option<Release> {
        self.gate.shared.as_ref()?;
        let (lease, report) = (self.lease.take(), mem::take(&mut self.report));
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
        let sent = self.stage != Stage::Admitted;
        Some(Release { terms: slot.host_terms(&self.gate.config), token, sent, report, label: self.label, awaited })
    }

    #[inline]
    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    pub(crate) fn key(&self) -> Option<HostKey> {
        match self.right {
            Right::Slot(id) => self.gate.table.lock(id.spot).by_id(id).map(|slot| slot.key().clone()),
            Right::Cell(fast, place) => Some(fast.cells.key(place as usize)),
        }
    }

    fn give_back_to(&mut self, id: SlotId) {
        let gate = Arc::clone(&self.gate);
        let mut shard = gate.table.lock(id.spot);
        let Some(slot) = shard.by_id(id) else {
            return;
        };
        if self.stage == Stage::Admitted {
            slot.no_longer_unsent(self.admission);
        }
        slot.give_back(self.stage == Stage::Body);
        if self.stage != Stage::Admitted {
            slot.completed(|| gate.clock.now(), &gate.config);
        }
        #[cfg(feature = "redis")]
        let release = self.take_release(slot).map(|release| (slot.key().clone(), release));
        let next = slot.next_waiter(&gate.config);
        gate.tidy(&mut shard, id);
        drop(shard);
        #[cfg(feature = "redis")]
        if let Some((key, release)) = release {
            gate.release(&key, release);
        }
        next.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        match self.right {
            _ if self.stage == Stage::Over => {}
            Right::Slot(id) => self.give_back_to(id),
            Right::Cell(fast, place) => fast.give_back(place as usize, self.stage),
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("host", &self.key()).field("stage", &self.stage()).finish_non_exhaustive()
    }
}
