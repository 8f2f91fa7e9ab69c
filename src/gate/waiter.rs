//! A request on its way through the queue of its host.

use std::fmt;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::time::{Sleep, sleep_until};

use super::cells::Spot;
use super::permit::Permit;
use super::queue::{Class, Place};
#[cfg(feature = "redis")]
use super::slot::Admission;
use super::slot::{Blocked, Outlook, Slot};
use super::table::SlotId;
use super::{Gate, Terms};
use crate::error::RateLimited;
use crate::host::HostKey;
use crate::observe::{self, ShedEvent, WaitEvent, WaitOutcome};
use crate::pace::{Pacing, Time};

/// How long waiting for nothing but unread bodies is taken for chance.
const PATIENCE_WITH_BODIES: Duration = Duration::from_secs(1);

/// Joins the queue when it is first polled, so a future that nobody polls is in nobody's way.
///
/// # Cancel safety
///
/// Dropped at any moment it leaves the queue, has booked nothing, and wakes the next one if it was that one's turn.
pub(crate) struct Waiter {
    gate: Arc<Gate>,
    spot: Spot,
    key: HostKey,
    terms: Terms,
    wait: Option<Wait>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// A wait under way.
#[derive(Clone, Copy)]
struct Wait {
    place: Place,
    since: Time,
    deadline: Time,
    /// The queue's reading of time kept by pacing when the wait began.
    paced_before: Duration,
    /// By more than the time that it takes to ask.
    kept: bool,
}

/// What one look at the host came to.
pub(super) enum Step {
    Admitted(Permit),
    Shed(RateLimited),
    /// Look again at this instant, or when woken.
    Sleep {
        now: Time,
        until: Time,
        warn: Option<usize>,
    },
}

impl Waiter {
    pub(crate) fn new(gate: Arc<Gate>, key: HostKey, terms: Terms) -> Self {
        let spot = gate.table.spot(&key);
        Self { gate, spot, key, terms, wait: None, timer: None }
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(crate) fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(crate) fn poll_admit(&mut self, cx: &mut Context<'_>) -> Poll<Result<Permit, RateLimited>> {
        loop {
            match self.step(cx.waker()) {
                Step::Admitted(permit) => return Poll::Ready(Ok(permit)),
                Step::Shed(error) => return Poll::Ready(Err(error)),
                Step::Sleep { now, until, warn } => {
                    if let Some(in_flight) = warn {
                        self.gate.warn_of_unread_bodies(&self.key, in_flight);
                    }
                    ready!(self.poll_timer(now, until, cx));
                }
            }
        }
    }

    fn poll_timer(&mut self, now: Time, until: Time, cx: &mut Context<'_>) -> Poll<()> {
        let at = self.gate.clock.timer(now, until);
        match &mut self.timer {
            Some(timer) if timer.deadline() == at => {}
            Some(timer) => timer.as_mut().reset(at),
            None => self.timer = Some(Box::pin(sleep_until(at))),
        }
        match &mut self.timer {
            Some(timer) => timer.as_mut().poll(cx),
            None => Poll::Ready(()),
        }
    }

    /// Looks at the host once, under its lock.
    pub(super) fn step(&mut self, waker: &Waker) -> Step {
        let gate = Arc::clone(&self.gate);
        let config = &gate.config;
        let now = gate.clock.now();
        let mut shard = gate.table.lock(self.spot);
        let (id, slot) = gate.table.slot(&mut shard, self.spot, &self.key, |number| gate.new_slot(number, &self.key));

        let blocked = match self.try_admit(id, slot, now) {
            Ok(permit) => {
                let (paced, next) = self.leave(slot, now);
                #[cfg(feature = "redis")]
                let leftovers = (slot.leftovers(), slot.host_terms(config));
                drop(shard);
                #[cfg(feature = "redis")]
                gate.give_back_leftovers(&self.key, leftovers.1, leftovers.0);
                self.wake(next);
                self.report(WaitOutcome::Acquired, now, paced);
                return Step::Admitted(permit);
            }
            Err(blocked) => blocked,
        };
        #[cfg(feature = "redis")]
        let is_asked = matches!(blocked, Some(Blocked::Ask | Blocked::Asking)) && !self.terms.only_here;
        #[cfg(not(feature = "redis"))]
        let is_asked = false;
        if let Some(error) = self.refuse(slot, is_asked, now) {
            let (paced, next) = self.leave(slot, now);
            #[cfg(feature = "redis")]
            let leftovers = (slot.leftovers(), slot.host_terms(config));
            if slot.says_nothing(|| now, config) {
                gate.table.remove(&mut shard, id);
            }
            drop(shard);
            #[cfg(feature = "redis")]
            gate.give_back_leftovers(&self.key, leftovers.1, leftovers.0);
            self.wake(next);
            self.report_shed(&error, now, paced);
            return Step::Shed(error);
        }

        let mut overtaken = Vec::new();
        let Wait { place, deadline, .. } = match self.wait {
            Some(wait) => wait,
            None => {
                let deadline = now.after(self.terms.left(slot.max_wait(config)));
                let paced_before = slot.queue().paced_for(now);
                if config.pacing == Pacing::Learned && !is_asked {
                    // Whoever waits may be about to learn how much the host takes at once.
                    slot.watch_queue(now, config);
                }
                let place = slot.queue().join(self.terms.class(), deadline);
                if self.terms.class() == Class::Again {
                    // It goes before those who came first, which may put one of them past its budget.
                    overtaken = slot.refuse_hopeless(now, config);
                }
                *self.wait.insert(Wait { place, since: now, deadline, paced_before, kept: false })
            }
        };
        if let Some(wait) = self.wait.as_mut().filter(|_| !is_asked) {
            wait.kept = true;
        }
        // The answer comes whatever becomes of the budget.
        let mut until = if is_asked { Time::END } else { deadline };
        let mut warn = None;
        #[cfg(feature = "redis")]
        let mut question = None;
        if slot.queue().is_head(place) {
            slot.queue().kept_by_pacing(matches!(blocked, Some(Blocked::Until(_))), now);
            match blocked {
                Some(Blocked::Until(ready)) => until = until.min(ready),
                #[cfg(feature = "redis")]
                Some(Blocked::Ask) => {
                    question = Some((slot.begin_ask(), slot.host_terms(config), self.waited(now), deadline.since(now)));
                }
                #[cfg(feature = "redis")]
                Some(Blocked::Asking) => {}
                #[cfg(feature = "redis")]
                Some(Blocked::Retry(at)) => until = until.min(at),
                _ if slot.queue().warned => {}
                _ => {
                    let check = slot.bodies_since(now).unwrap_or(now).after(PATIENCE_WITH_BODIES);
                    if check > now {
                        until = until.min(check);
                    } else {
                        slot.queue().warned = true;
                        warn = Some(slot.in_flight());
                    }
                }
            }
        }
        let old_waker = slot.queue().set_waker(place, waker);
        #[cfg(feature = "redis")]
        let leftovers = (slot.leftovers(), slot.host_terms(config));
        drop(shard);
        drop(old_waker);
        overtaken.into_iter().for_each(Waker::wake);
        #[cfg(feature = "redis")]
        {
            gate.give_back_leftovers(&self.key, leftovers.1, leftovers.0);
            if let Some((confirm, terms, waited, budget)) = question {
                let waited = waited.saturating_add(self.terms.waited_before());
                gate.ask(&self.key, terms, confirm, waited, budget, self.terms.label);
            }
        }
        Step::Sleep { now, until, warn }
    }

    /// A permit, if it is our turn and the host admits. `Err(None)` when others are first.
    fn try_admit(&self, id: SlotId, slot: &mut Slot, now: Time) -> Result<Permit, Option<Blocked>> {
        let our_turn = match &self.wait {
            Some(wait) => slot.queue().is_head(wait.place),
            None => slot.ahead_of_new(self.terms.class()) == 0,
        };
        if !our_turn {
            return Err(None);
        }
        #[cfg(feature = "redis")]
        if let Some(shared) = self.gate.store_up() {
            if !slot.is_on_our_own() {
                let config = &self.gate.config;
                let newcomer = self.wait.is_none().then(|| now.after(self.terms.left(slot.max_wait(config))));
                let grant = slot.take_grant(now, newcomer, shared.store.is_fair(), config).map_err(Some)?;
                let until = self.terms.until.unwrap_or_else(|| slot.permit_until(&self.gate.config));
                let waited = self.terms.waited_before().saturating_add(self.waited(now));
                let gate = Arc::clone(&self.gate);
                let permit = Permit::of_slot(gate, id, Admission::Recorded, until, &self.terms, waited);
                return Ok(permit.with_lease(grant.lease));
            }
        }
        let admission = slot.admit(|| now, &self.gate.config);
        #[cfg(feature = "redis")]
        slot.decided_on_our_own(admission.is_ok());
        let admission = admission.map_err(Some)?;
        let until = self.terms.until.unwrap_or_else(|| slot.permit_until(&self.gate.config));
        let waited = self.terms.waited_before().saturating_add(self.waited(now));
        let gate = Arc::clone(&self.gate);
        Ok(Permit::of_slot(gate, id, admission, until, &self.terms, waited))
    }

    /// The error, if this request has no prospect of being admitted within its budget.
    ///
    /// While the store is asked the answer is waited for, even with no budget at all: it is what decides.
    fn refuse(&self, slot: &mut Slot, is_asked: bool, now: Time) -> Option<RateLimited> {
        let config = &self.gate.config;
        match self.wait {
            None => {
                let class = self.terms.class();
                let ahead = slot.ahead_of_new(class);
                let deadline = now.after(self.terms.left(slot.max_wait(config)));
                let estimate = slot.estimate(now, ahead, config);
                let full = class == Class::New && config.max_queue > 0 && slot.queued() >= config.max_queue;
                let hopeless = estimate > deadline || (deadline <= now && !(is_asked && ahead == 0));
                (hopeless || full)
                    .then(|| slot.shed(full && !hopeless, Outlook { now, estimate, deadline, ahead }, config))
            }
            Some(Wait { place, deadline, .. }) => {
                let estimate = match slot.queue().refused(place) {
                    // The host may have been held for longer since.
                    Some(estimate) => estimate.max(slot.estimate(now, 0, config)),
                    None if now >= deadline && !is_asked => slot.estimate_at(now, place, config),
                    None => return None,
                };
                let ahead = slot.ahead_of(place);
                Some(slot.shed(false, Outlook { now, estimate, deadline, ahead }, config))
            }
        }
    }

    /// Leaves the queue, if in it. Gives back what the wait owed to pacing, and whom to wake: the next one, or the waker
    /// that is to be dropped outside the lock.
    fn leave(&mut self, slot: &mut Slot, now: Time) -> (Duration, [Option<Waker>; 2]) {
        let Some(wait) = &self.wait else {
            return (Duration::ZERO, [None, None]);
        };
        let was_head = slot.queue().is_head(wait.place);
        let paced = slot.queue().paced_for(now).saturating_sub(wait.paced_before);
        if was_head {
            slot.queue().kept_by_pacing(false, now);
        }
        let own = slot.queue().leave(wait.place, now);
        let next = if was_head { slot.new_head(&self.gate.config) } else { None };
        (paced, [next, own])
    }

    fn wake(&self, [next, own]: [Option<Waker>; 2]) {
        drop(own);
        next.into_iter().for_each(Waker::wake);
    }

    fn waited(&self, now: Time) -> Duration {
        self.wait.map_or(Duration::ZERO, |wait| now.since(wait.since))
    }

    fn report_shed(&mut self, error: &RateLimited, now: Time, paced: Duration) {
        if self.wait.is_none() {
            self.event(WaitOutcome::Shed, Duration::ZERO, Duration::ZERO);
        }
        self.report(WaitOutcome::Shed, now, paced);
        observe::shed(self.gate.observer(), &ShedEvent { error, label: self.terms.label });
    }

    /// Ends the wait, if there was one.
    fn report(&mut self, outcome: WaitOutcome, now: Time, paced: Duration) {
        let waited = self.waited(now);
        if let Some(wait) = self.wait.take() {
            if wait.kept || outcome != WaitOutcome::Acquired {
                self.event(outcome, waited, paced.min(waited));
            }
        }
    }

    fn event(&self, outcome: WaitOutcome, waited: Duration, pacing: Duration) {
        let (host, label) = (&self.key, self.terms.label);
        let event = WaitEvent { host, outcome, waited, pacing, queued: waited - pacing, label };
        observe::waited(self.gate.observer(), &event);
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.wait.is_none() {
            return;
        }
        let gate = Arc::clone(&self.gate);
        let now = gate.clock.now();
        let mut shard = gate.table.lock(self.spot);
        // Invariant: a slot with a waiter is never removed, so this finds it.
        let (id, slot) = gate.table.slot(&mut shard, self.spot, &self.key, |number| gate.new_slot(number, &self.key));
        let (paced, next) = self.leave(slot, now);
        #[cfg(feature = "redis")]
        let leftovers = (slot.leftovers(), slot.host_terms(&gate.config));
        if slot.says_nothing(|| now, &gate.config) {
            gate.table.remove(&mut shard, id);
        }
        drop(shard);
        #[cfg(feature = "redis")]
        gate.give_back_leftovers(&self.key, leftovers.1, leftovers.0);
        self.wake(next);
        // A second panic would end the process.
        if !std::thread::panicking() {
            self.report(WaitOutcome::Canceled, now, paced);
        }
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("host", &self.key).field("queued", &self.wait.is_some()).finish_non_exhaustive()
    }
}
