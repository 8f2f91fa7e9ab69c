//! One host: its permits, its queue, its pace. Plain state; the lock around it is the table's.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::time::Instant;

use super::clock::Clock;
use crate::config::{Config, Limits, PermitUntil};
use crate::error::{Details, LastRefusal, RateLimited, Reason};
use crate::host::HostKey;
use crate::hosts::HostSnapshot;
use crate::pace::{Reactive, Rules, Time};

#[derive(Debug)]
pub(super) struct Slot {
    /// See `SlotId`.
    number: u64,
    key: HostKey,
    /// What was set for this host; `None` is the layer's.
    pub(super) limits: Option<Arc<Limits>>,
    in_flight: u32,
    /// Of those in flight, the ones whose response head has arrived.
    bodies: u32,
    /// Of those in flight, the ones admitted by pacing and not yet sent. At most one at a time, so that every send is
    /// judged by the one before it, whatever the concurrency.
    unsent: u32,
    /// Allocated for the first one who has to wait.
    queue: Option<Box<Queue>>,
    /// `None`: the host has never refused, or not for so long that it does not matter.
    pub(super) paced: Option<Box<Paced>>,
}

/// What is known of a host that has refused a request.
#[derive(Debug, Default)]
pub(super) struct Paced {
    pub(super) pace: Reactive,
    pub(super) last: Option<LastRefusal>,
    /// The first refusal of the present streak.
    pub(super) since: Option<Instant>,
}

/// How a request was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// By a host that does not pace: nothing is recorded of the send.
    Free,
    /// By pacing: the send has to be reported.
    Paced,
}

/// What keeps the next request from going.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// Others hold the permits; one of them will wake us.
    ByPermits,
    /// The pace of the host.
    Until(Time),
}

/// What a request that cannot go yet is up against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outlook {
    pub(super) now: Time,
    /// When this request would go, as far as pacing decides.
    pub(super) estimate: Time,
    pub(super) deadline: Time,
}

/// When the next requests go, as far as pacing decides.
#[derive(Clone, Copy, Debug)]
struct Forecast {
    first: Time,
    spacing: Duration,
    /// However many there are: from here on the host is cold.
    last: Time,
}

impl Slot {
    pub(super) fn new(number: u64, key: HostKey, limits: Option<Arc<Limits>>) -> Self {
        Self { number, key, limits, in_flight: 0, bodies: 0, unsent: 0, queue: None, paced: None }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn key(&self) -> &HostKey {
        &self.key
    }

    // --- settings -------------------------------------------------------------------------------------------------

    #[inline]
    fn concurrency(&self, config: &Config) -> usize {
        self.limit(|limits| limits.concurrency).unwrap_or(config.concurrency)
    }

    pub(super) fn max_wait(&self, config: &Config) -> Duration {
        self.limit(|limits| limits.max_wait).unwrap_or(config.max_wait)
    }

    #[inline]
    pub(super) fn permit_until(&self, config: &Config) -> PermitUntil {
        self.limit(|limits| limits.permit_until).unwrap_or(config.permit_until)
    }

    pub(super) fn rules(&self, config: &Config) -> Rules {
        Rules { spacing: self.limit(|limits| limits.spacing).unwrap_or(config.rules.spacing), ..config.rules }
    }

    #[inline]
    fn limit<T>(&self, read: impl FnOnce(&Limits) -> Option<T>) -> Option<T> {
        self.limits.as_deref().and_then(read)
    }

    // --- queue ----------------------------------------------------------------------------------------------------

    pub(super) fn queue(&mut self) -> &mut Queue {
        self.queue.get_or_insert_default()
    }

    pub(super) fn queued(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.len())
    }

    /// How many would be in front of a newcomer of this class.
    #[inline]
    pub(super) fn ahead_of_new(&self, class: Class) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.ahead_of_new(class))
    }

    // --- permits --------------------------------------------------------------------------------------------------

    /// Takes a permit if the next request may go now. Whether it is its turn is for the caller to know. Reads the clock
    /// only where the host paces.
    #[inline]
    pub(super) fn admit(&mut self, now: impl FnOnce() -> Time, config: &Config) -> Result<Admission, Blocked> {
        if self.is_full(config) {
            return Err(Blocked::ByPermits);
        }
        if let Some(paced) = &self.paced {
            let now = now();
            if paced.pace.is_cold(now) {
                self.paced = None;
            } else if self.unsent > 0 {
                return Err(Blocked::ByPermits);
            } else if paced.pace.ready() > now {
                return Err(Blocked::Until(paced.pace.ready()));
            } else {
                self.unsent += 1;
                self.take_permit();
                return Ok(Admission::Paced);
            }
        }
        self.take_permit();
        Ok(Admission::Free)
    }

    #[inline]
    fn take_permit(&mut self) {
        self.in_flight += 1;
        if let Some(queue) = &mut self.queue {
            queue.bodies_since = None;
        }
    }

    /// The request with this permit is about to go out. Records the send, or says until when it must not: the host may
    /// have refused another one since this one was admitted.
    pub(super) fn send(
        &mut self,
        admission: Admission,
        now: impl FnOnce() -> Time,
        config: &Config,
    ) -> Result<Option<Time>, Blocked> {
        let rules = self.rules(config);
        let mut at = None;
        if let Some(paced) = &mut self.paced {
            let now = now();
            if paced.pace.ready() > now {
                return Err(Blocked::Until(paced.pace.ready()));
            }
            paced.pace.sent(now, &rules);
            at = Some(now);
        }
        self.no_longer_unsent(admission);
        Ok(at)
    }

    #[inline]
    pub(super) fn no_longer_unsent(&mut self, admission: Admission) {
        if admission == Admission::Paced {
            self.unsent -= 1;
        }
    }

    /// The response head has arrived, the body holds the permit from here on. The clock is read only if somebody waits.
    #[inline]
    pub(super) fn head_arrived(&mut self, now: impl FnOnce() -> Time) {
        self.bodies += 1;
        if self.only_bodies() {
            if let Some(queue) = self.queue.as_mut().filter(|queue| !queue.is_empty()) {
                queue.bodies_since = Some(now());
            }
        }
    }

    #[inline]
    pub(super) fn give_back(&mut self, body: bool) {
        self.in_flight -= 1;
        self.bodies -= u32::from(body);
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight as usize
    }

    #[inline]
    pub(super) fn is_full(&self, config: &Config) -> bool {
        self.in_flight() >= self.concurrency(config)
    }

    /// Every request in flight has its head and is waiting for somebody to read its body.
    #[inline]
    fn only_bodies(&self) -> bool {
        self.in_flight > 0 && self.bodies == self.in_flight
    }

    /// Since when waiters have been waiting for nothing but bodies.
    pub(super) fn bodies_since(&mut self, now: Time) -> Option<Time> {
        if !self.only_bodies() {
            return None;
        }
        Some(*self.queue().bodies_since.get_or_insert(now))
    }

    /// The next waiter, when there might be a permit for it.
    #[inline]
    pub(super) fn next_waiter(&mut self, config: &Config) -> Option<Waker> {
        if self.is_full(config) { None } else { self.queue.as_mut()?.wake_head() }
    }

    /// Nobody is in flight or waiting.
    #[inline]
    pub(super) fn is_unused(&self) -> bool {
        self.in_flight == 0 && self.queue.as_ref().is_none_or(|queue| queue.is_empty())
    }

    /// Unused, and there is nothing to remember.
    pub(super) fn says_nothing(&self, now: impl FnOnce() -> Time) -> bool {
        self.is_unused() && self.paced.as_ref().is_none_or(|paced| paced.pace.is_cold(now()))
    }

    // --- the future, as far as it is known ------------------------------------------------------------------------

    /// When a request with `ahead` others in front of it would go, as far as pacing decides.
    pub(super) fn estimate(&self, now: Time, ahead: usize, config: &Config) -> Time {
        let Forecast { first, spacing, last } = self.forecast(now, config);
        first.after(spacing.saturating_mul(u32::try_from(ahead).unwrap_or(u32::MAX))).min(last)
    }

    /// The same for one that is waiting already.
    pub(super) fn estimate_at(&self, now: Time, place: Place, config: &Config) -> Time {
        match &self.queue {
            Some(queue) if self.paced.is_some() => self.estimate(now, queue.ahead_of(place), config),
            _ => now,
        }
    }

    /// Forgets the host's pace. Whoever was put past the budget by it has got the place back.
    pub(super) fn clear(&mut self) {
        self.paced = None;
        if let Some(queue) = &mut self.queue {
            queue.restore();
        }
    }

    fn forecast(&self, now: Time, config: &Config) -> Forecast {
        let Some(paced) = &self.paced else {
            return Forecast { first: now, spacing: Duration::ZERO, last: now };
        };
        let first = paced.pace.ready().max(now);
        let spacing = paced.pace.spacing(first, &self.rules(config));
        // The last send that anybody has to keep a distance to goes before the host is cold.
        let last = paced.pace.warm_until().after(spacing).max(first);
        Forecast { first, spacing, last }
    }

    /// Marks the waiters that the pace of the host puts past their budget, and wakes them.
    pub(super) fn refuse_hopeless(&mut self, now: Time, config: &Config) -> Vec<Waker> {
        let forecast = self.forecast(now, config);
        self.queue.as_mut().map(|queue| queue.refuse_later(forecast)).unwrap_or_default()
    }

    /// The error for a request that will not be admitted within its budget.
    pub(super) fn shed(&self, full: bool, outlook: Outlook, config: &Config) -> RateLimited {
        let Outlook { now, estimate, deadline } = outlook;
        let reason = if full {
            Reason::QueueFull
        } else if self.paced.as_ref().is_some_and(|paced| paced.pace.hold_until() > deadline) {
            Reason::Cooldown
        } else if now >= deadline && self.is_full(config) {
            Reason::InFlight
        } else if estimate > deadline.max(now) {
            Reason::Spacing
        } else {
            Reason::InFlight
        };
        let wait = match reason {
            Reason::InFlight | Reason::QueueFull => estimate.since(now).max(Duration::from_secs(1)),
            Reason::Cooldown | Reason::Spacing => estimate.since(now),
        };
        let paced = self.paced.as_deref();
        RateLimited::from(Details {
            host: self.key.clone(),
            retry_after: ceil_to_millis(wait),
            reason,
            refusal: paced.and_then(|paced| paced.last.clone()),
            streak: paced.map_or(0, |paced| paced.pace.streak()),
            throttled_since: paced.filter(|paced| paced.pace.streak() > 0).and_then(|paced| paced.since),
        })
    }

    fn kept_by(&self, now: Time, config: &Config) -> Option<Reason> {
        let pace = self.paced.as_ref().map(|paced| &paced.pace);
        if pace.is_some_and(|pace| pace.hold_until() > now) {
            Some(Reason::Cooldown)
        } else if self.is_full(config) {
            Some(Reason::InFlight)
        } else if pace.is_some_and(|pace| pace.ready() > now) {
            Some(Reason::Spacing)
        } else if self.unsent > 0 || self.queued() > 0 {
            Some(Reason::InFlight)
        } else {
            None
        }
    }

    pub(super) fn snapshot(&self, clock: &Clock, config: &Config) -> Option<HostSnapshot> {
        let now = clock.now();
        if self.says_nothing(|| now) {
            return None;
        }
        let paced = self.paced.as_deref().filter(|paced| !paced.pace.is_cold(now));
        let last = paced.and_then(|paced| paced.last.as_ref());
        Some(HostSnapshot {
            host: self.key.clone(),
            in_flight: self.in_flight(),
            queued: self.queued(),
            cooldown: paced.map_or(Duration::ZERO, |paced| paced.pace.hold_until().since(now)),
            next_send: paced.map_or(Duration::ZERO, |paced| paced.pace.ready().since(now)),
            reason: self.kept_by(now, config),
            warm: paced.map_or(Duration::ZERO, |paced| paced.pace.warm_until().since(now)),
            gap: Duration::ZERO,
            streak: paced.map_or(0, |paced| paced.pace.streak()),
            last_hint: last.and_then(|last| last.asked).unwrap_or_default(),
            last_status: last.map(|last| last.status),
        })
    }
}

fn ceil_to_millis(duration: Duration) -> Duration {
    let below = Duration::from_nanos(u64::from(duration.subsec_nanos() % 1_000_000));
    if below.is_zero() { duration } else { duration.saturating_add(Duration::from_millis(1) - below) }
}

/// A place in the queue. Smaller is nearer to the head: retried requests before all others, within a class first come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    class: Class,
    number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// Has been admitted before.
    Again,
    New,
}

/// The waiters of one host, first come first served. Only the head is ever admitted, so a send is decided by what the
/// host has seen up to that moment, and nobody sleeps on a booking that a refusal has made worthless.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: BTreeMap<Place, Waiting>,
    /// Put past their budget by a refusal, and about to hear of it: when they would have gone.
    refused: BTreeMap<Place, (Time, Waiting)>,
    next: u64,
    /// How long the head has been kept by pacing while a permit was free, all told.
    paced_for: Duration,
    /// Since when it is kept so now.
    paced_since: Option<Time>,
    bodies_since: Option<Time>,
    /// The owner of the gate has been told about unread bodies.
    pub(super) warned: bool,
}

#[derive(Debug)]
struct Waiting {
    /// Taken by whoever wakes.
    waker: Option<Waker>,
    deadline: Time,
}

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.refused.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// How many would be in front of a newcomer of this class.
    pub(super) fn ahead_of_new(&self, class: Class) -> usize {
        match class {
            Class::New => self.waiting.len(),
            Class::Again => self.waiting.keys().take_while(|place| place.class == Class::Again).count(),
        }
    }

    fn ahead_of(&self, place: Place) -> usize {
        self.waiting.range(..place).count()
    }

    pub(super) fn join(&mut self, class: Class, deadline: Time) -> Place {
        let place = Place { class, number: self.next };
        self.next += 1;
        self.waiting.insert(place, Waiting { waker: None, deadline });
        place
    }

    pub(super) fn leave(&mut self, place: Place, now: Time) -> Option<Waker> {
        self.refused.remove(&place);
        let waiting = self.waiting.remove(&place);
        if self.waiting.is_empty() {
            self.kept_by_pacing(false, now);
            self.bodies_since = None;
        }
        waiting.and_then(|waiting| waiting.waker)
    }

    pub(super) fn is_head(&self, place: Place) -> bool {
        self.waiting.keys().next() == Some(&place)
    }

    /// When this waiter would have gone, if a refusal has put that past its budget.
    pub(super) fn refused(&self, place: Place) -> Option<Time> {
        self.refused.get(&place).map(|(estimate, _)| *estimate)
    }

    /// Remembers whom to wake; gives the old waker back, to be dropped outside the lock.
    pub(super) fn set_waker(&mut self, place: Place, waker: &Waker) -> Option<Waker> {
        let waiting = self.waiting.get_mut(&place)?;
        match &waiting.waker {
            Some(old) if old.will_wake(waker) => None,
            _ => waiting.waker.replace(waker.clone()),
        }
    }

    pub(super) fn wake_head(&mut self) -> Option<Waker> {
        self.waiting.values_mut().next()?.waker.take()
    }

    fn refuse_later(&mut self, Forecast { first, spacing, last }: Forecast) -> Vec<Waker> {
        let mut next = first;
        let mut wakers = Vec::new();
        let head = self.waiting.keys().next().copied();
        let refused = &mut self.refused;
        self.waiting.retain(|place, waiting| {
            let in_time = next <= waiting.deadline;
            if in_time {
                next = next.after(spacing).min(last);
            } else {
                wakers.extend(waiting.waker.take());
                refused.insert(*place, (next, Waiting { waker: None, deadline: waiting.deadline }));
            }
            in_time
        });
        if self.waiting.keys().next().copied() != head {
            wakers.extend(self.wake_head());
        }
        wakers
    }

    /// Those who are about to hear that they are refused have their places back.
    fn restore(&mut self) {
        let refused = mem::take(&mut self.refused);
        self.waiting.extend(refused.into_iter().map(|(place, (_, waiting))| (place, waiting)));
    }

    // --- which part of a wait is pacing's -------------------------------------------------------------------------

    /// The head is, or is no longer, kept by nothing but pacing.
    pub(super) fn kept_by_pacing(&mut self, kept: bool, now: Time) {
        match (kept, self.paced_since) {
            (true, None) => self.paced_since = Some(now),
            (false, Some(since)) => {
                self.paced_for = self.paced_for.saturating_add(now.since(since));
                self.paced_since = None;
            }
            _ => {}
        }
    }

    /// The difference of two readings is what pacing cost in between.
    pub(super) fn paced_for(&self, now: Time) -> Duration {
        let running = self.paced_since.map_or(Duration::ZERO, |since| now.since(since));
        self.paced_for.saturating_add(running)
    }
}
