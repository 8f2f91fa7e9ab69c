//! One host: its permits, its queue, its pace. Plain state; the lock around it is the table's.

mod future;

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::time::Instant;

use super::cells::{Out, Spot};
use super::queue::{Class, Queue};
#[cfg(feature = "redis")]
use super::remote::Remote;
use crate::config::{Config, Limits, PermitUntil};
use crate::error::{LastRefusal, Reason};
use crate::host::HostKey;
use crate::pace::{Bounds, Pace, Pacing, Proactive, Rules, Ticket, Time};

#[derive(Debug)]
pub(super) struct Slot {
    /// See `SlotId`.
    number: u64,
    spot: Spot,
    key: HostKey,
    /// What was set for this host; `None` is the layer's.
    limits: Option<Arc<Limits>>,
    /// Some proactive limit is in force.
    bounded: bool,
    in_flight: u32,
    /// Of those in flight, the ones with a permit of the host's cell, taken before this slot was made.
    adopted: u32,
    /// Of those in flight, the ones whose response head has arrived.
    bodies: u32,
    /// Of those in flight, the ones admitted by pacing and not yet sent. At most one at a time, so that every send is
    /// judged by the one before it, whatever the concurrency.
    unsent: u32,
    /// Allocated for the first one who has to wait.
    queue: Option<Box<Queue>>,
    /// `None`: nothing is to be remembered of this host.
    paced: Option<Box<Paced>>,
    /// What is shared with other processes; `None` until the store is asked.
    #[cfg(feature = "redis")]
    remote: Option<Box<Remote>>,
}

/// What is known of a host that has refused a request, that requests wait for, or that is limited beforehand.
#[derive(Debug)]
pub(super) struct Paced {
    pub(super) pace: Pace,
    proactive: Proactive,
    /// This wait's share of the jitter: drawn once per send, however often anybody looks.
    jitter: Duration,
    pub(super) last: Option<LastRefusal>,
    /// The first refusal of the present streak.
    pub(super) since: Option<Instant>,
}

/// How a request was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// By a host that does not pace: nothing is recorded of the send.
    Free,
    /// By a host that does not pace, while others wait: the send is to be reported, in case it begins to.
    Recorded,
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
    /// Nothing here: the store has to be asked.
    #[cfg(feature = "redis")]
    Ask,
    /// Nothing here, and the store is being asked.
    #[cfg(feature = "redis")]
    Asking,
    /// Others hold the permits, in other processes too: the store is to be asked again then.
    #[cfg(feature = "redis")]
    Retry(Time),
}

/// What a request that cannot go yet is up against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outlook {
    pub(super) now: Time,
    /// When this request would go, as far as pacing decides.
    pub(super) estimate: Time,
    pub(super) deadline: Time,
    /// How many go before it.
    pub(super) ahead: usize,
}

impl Paced {
    fn begin(pacing: Pacing, now: Time, just_sent: u32, jitter: Duration) -> Self {
        let jitter = draw(jitter);
        Self {
            pace: Pace::begin(pacing, now, just_sent),
            proactive: Proactive::default(),
            jitter,
            last: None,
            since: None,
        }
    }

    /// No send before this.
    fn ready(&self, bounds: &Bounds) -> Time {
        let proactive = self.proactive.delayed_until(bounds).max(self.proactive.quota_until(bounds));
        self.pace.ready().max(proactive)
    }

    /// The same for a request that has to wait until then: with its share of the jitter.
    fn due(&self, bounds: &Bounds) -> Time {
        let ready = self.ready(bounds);
        // A host that nothing has been sent to yet need not be spread out.
        if ready == Time::default() { ready } else { ready.after(self.jitter.min(bounds.jitter)) }
    }

    fn sent(&mut self, now: Time, at: Time, rules: &Rules, bounds: &Bounds) -> Ticket {
        self.proactive.sent(now, at, bounds);
        self.jitter = draw(bounds.jitter);
        self.pace.sent(at, rules)
    }

    /// A streak is over when the host is no longer warm, even if nobody has come since to notice.
    fn streak(&self, now: Time) -> u32 {
        if now < self.pace.warm_until() { self.pace.streak() } else { 0 }
    }

    fn says_nothing(&self, now: Time, bounds: &Bounds) -> bool {
        self.pace.is_cold(now) && self.proactive.is_idle(now, bounds)
    }
}

/// Anything up to `jitter`.
fn draw(jitter: Duration) -> Duration {
    let most = u64::try_from(jitter.as_nanos()).unwrap_or(u64::MAX);
    if most == 0 { jitter } else { Duration::from_nanos(fastrand::u64(0..=most)) }
}

impl Slot {
    #[inline]
    pub(super) fn new(number: u64, spot: Spot, key: HostKey, limits: Option<Arc<Limits>>, config: &Config) -> Self {
        let bounded = config.is_bounded(limits.as_deref());
        Self {
            number,
            spot,
            key,
            limits,
            bounded,
            in_flight: 0,
            adopted: 0,
            bodies: 0,
            unsent: 0,
            queue: None,
            paced: None,
            #[cfg(feature = "redis")]
            remote: None,
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn spot(&self) -> Spot {
        self.spot
    }

    pub(super) fn key(&self) -> &HostKey {
        &self.key
    }

    // --- settings -------------------------------------------------------------------------------------------------

    #[inline]
    pub(super) fn concurrency(&self, config: &Config) -> usize {
        let requests = self.limit(|limits| limits.concurrency).unwrap_or(config.concurrency);
        #[cfg(feature = "redis")]
        let requests = config.share.of(requests);
        requests
    }

    pub(super) fn max_wait(&self, config: &Config) -> Duration {
        self.limit(|limits| limits.max_wait).unwrap_or(config.max_wait)
    }

    #[inline]
    pub(super) fn permit_until(&self, config: &Config) -> PermitUntil {
        self.limit(|limits| limits.permit_until).unwrap_or(config.permit_until)
    }

    pub(super) fn rules(&self, config: &Config) -> Rules {
        let rules =
            Rules { spacing: self.limit(|limits| limits.spacing).unwrap_or(config.rules.spacing), ..config.rules };
        #[cfg(feature = "redis")]
        let rules = config.share.rules(rules);
        rules
    }

    pub(super) fn bounds(&self, config: &Config) -> Bounds {
        let bounds = config.bounds(self.limits.as_deref());
        #[cfg(feature = "redis")]
        let bounds =
            config.share.bounds(bounds, || self.paced.as_ref().map_or(Duration::ZERO, |paced| paced.pace.gap()));
        bounds
    }

    pub(super) fn set_limits(&mut self, limits: Option<Arc<Limits>>, config: &Config) {
        self.bounded = config.is_bounded(limits.as_deref());
        self.limits = limits;
        #[cfg(feature = "redis")]
        if let Some(remote) = &mut self.remote {
            // That was about other limits.
            remote.forget_answer();
        }
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

    // --- what is shared -------------------------------------------------------------------------------------------

    #[cfg(feature = "redis")]
    pub(super) fn remote(&mut self) -> &mut Remote {
        self.remote.get_or_insert_default()
    }

    #[cfg(feature = "redis")]
    pub(super) fn remote_ref(&self) -> Option<&Remote> {
        self.remote.as_deref()
    }

    #[cfg(feature = "redis")]
    pub(super) fn remote_mut(&mut self) -> Option<&mut Remote> {
        self.remote.as_deref_mut()
    }

    /// Permits that are on their way back to the store.
    #[inline]
    fn releasing(&self) -> u32 {
        #[cfg(feature = "redis")]
        let releasing = self.remote.as_ref().map_or(0, |remote| remote.releasing());
        #[cfg(not(feature = "redis"))]
        let releasing = 0;
        releasing
    }

    /// No send before this, by the store's word, and why.
    #[inline]
    fn kept_by_others(&self) -> Option<(Time, Reason)> {
        #[cfg(feature = "redis")]
        let kept = self.remote.as_ref().and_then(|remote| remote.until());
        #[cfg(not(feature = "redis"))]
        let kept = None;
        kept
    }

    #[inline]
    fn is_shared_with_others(&self, now: impl FnOnce() -> Time) -> bool {
        #[cfg(feature = "redis")]
        let busy = self.remote.as_ref().is_some_and(|remote| !remote.says_nothing(now()));
        #[cfg(not(feature = "redis"))]
        let busy = {
            let _ = now;
            false
        };
        busy
    }

    // --- permits --------------------------------------------------------------------------------------------------

    /// Takes a permit if the next request may go now. Whether it is its turn is for the caller to know. Reads the clock
    /// only where there is something to remember.
    #[inline]
    pub(super) fn admit(&mut self, now: impl FnOnce() -> Time, config: &Config) -> Result<Admission, Blocked> {
        if self.is_full(config) {
            return Err(Blocked::ByPermits);
        }
        let admission =
            if self.paced.is_some() || self.bounded { self.admit_paced(now(), config)? } else { Admission::Free };
        self.unsent += u32::from(admission == Admission::Paced);
        self.take_permit();
        Ok(admission)
    }

    #[cold]
    fn admit_paced(&mut self, now: Time, config: &Config) -> Result<Admission, Blocked> {
        let bounds = self.bounds(config);
        let is_waited_for = self.queued() > 0;
        if self.paced.as_ref().is_some_and(|paced| !is_waited_for && paced.says_nothing(now, &bounds)) {
            self.paced = None;
        }
        if self.bounded {
            self.watch(now, config);
        }
        let Some(paced) = &self.paced else {
            return Ok(Admission::Free);
        };
        let is_cold = paced.pace.is_cold(now);
        if is_cold && !self.bounded {
            return Ok(Admission::Recorded);
        }
        let serial = self.unsent > 0 || (self.in_flight > 0 && paced.pace.is_serial(now));
        let next_send = self.next_send(paced, now, &bounds);
        if serial {
            Err(Blocked::ByPermits)
        } else if next_send > now {
            Err(Blocked::Until(next_send))
        } else {
            Ok(Admission::Paced)
        }
    }

    /// When the next one goes. Whoever comes when nothing is in the way any more has no wait that jitter could be added to.
    fn next_send(&self, paced: &Paced, now: Time, bounds: &Bounds) -> Time {
        let ready = paced.ready(bounds);
        if self.queued() > 0 || ready > now { paced.due(bounds) } else { ready }
    }

    /// What is known of the host; recording begins if there was nothing.
    pub(super) fn watch(&mut self, now: Time, config: &Config) -> &mut Paced {
        self.watch_from(now, 0, config)
    }

    /// The same, when somebody begins to wait for those in flight: they count as sent just now.
    pub(super) fn watch_queue(&mut self, now: Time, config: &Config) {
        self.watch_from(now, self.in_flight, config);
    }

    fn watch_from(&mut self, now: Time, just_sent: u32, config: &Config) -> &mut Paced {
        let jitter = self.bounds(config).jitter;
        self.paced.get_or_insert_with(|| Box::new(Paced::begin(config.pacing, now, just_sent, jitter)))
    }

    pub(super) fn paced(&mut self) -> Option<&mut Paced> {
        self.paced.as_deref_mut()
    }

    #[inline]
    pub(super) fn take_permit(&mut self) {
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
        now: impl Fn() -> Time,
        config: &Config,
    ) -> Result<Option<Ticket>, Blocked> {
        let (rules, bounds) = (self.rules(config), self.bounds(config));
        if self.bounded {
            // The limits may have been set since this request was admitted.
            self.watch(now(), config);
        }
        let mut ticket = None;
        if let Some(paced) = &mut self.paced {
            let now = now();
            let ready = paced.ready(&bounds);
            if ready > now {
                return Err(Blocked::Until(ready));
            }
            ticket = Some(paced.sent(now, now, &rules, &bounds));
        }
        self.no_longer_unsent(admission);
        Ok(ticket)
    }

    /// The same for a request with a permit from the store, which has recorded the send and kept it apart from others.
    #[cfg(feature = "redis")]
    pub(super) fn send_leased(&mut self, binding: bool, now: Time, config: &Config) -> Result<Option<Ticket>, Blocked> {
        let bounds = self.bounds(config);
        if self.bounded {
            self.watch(now, config);
        }
        let Some(paced) = &mut self.paced else { return Ok(None) };
        if paced.pace.hold_until() > now {
            return Err(Blocked::Until(paced.pace.hold_until()));
        }
        paced.proactive.sent(now, now, &bounds);
        paced.jitter = draw(bounds.jitter);
        Ok(Some(Ticket { at: now, binding, again: false }))
    }

    #[cfg(feature = "redis")]
    pub(super) fn is_bounded(&self) -> bool {
        self.bounded
    }

    #[cfg(feature = "redis")]
    pub(super) fn hold_until(&self) -> Time {
        self.paced.as_ref().map(|paced| paced.pace.hold_until()).unwrap_or_default()
    }

    /// When the next one goes by the user's limits and what this process has sent itself.
    #[cfg(feature = "redis")]
    pub(super) fn own_limits_until(&self, config: &Config) -> Time {
        let bounds = self.bounds(config);
        let proactive = self.paced.as_ref().map(|paced| &paced.proactive);
        let until = proactive.map(|known| known.delayed_until(&bounds).max(known.quota_until(&bounds)));
        until.unwrap_or_default()
    }

    /// What is known here of when the next one goes, if that is not now.
    #[cfg(feature = "redis")]
    pub(super) fn next_send_here(&self, now: Time, config: &Config) -> Option<Time> {
        let next = self.next_send(self.paced.as_deref()?, now, &self.bounds(config));
        (next > now).then_some(next)
    }

    /// A retry below the gate will send at this instant, if the quota has room for it then.
    #[cfg(feature = "retry")]
    pub(super) fn resend(&mut self, now: Time, at: Time, config: &Config) -> bool {
        let (rules, bounds) = (self.rules(config), self.bounds(config));
        let Some(paced) = &mut self.paced else { return true };
        let has_room = paced.proactive.quota_until(&bounds) <= at;
        if has_room {
            paced.sent(now, at, &rules, &bounds);
        }
        has_room
    }

    #[inline]
    pub(super) fn no_longer_unsent(&mut self, admission: Admission) {
        if admission == Admission::Paced {
            self.unsent -= 1;
        }
    }

    /// The response head has arrived, the body holds the permit from here on. The clock is read only if somebody waits; then
    /// the head of the queue is to watch how long for.
    #[inline]
    pub(super) fn head_arrived(&mut self, now: impl FnOnce() -> Time) -> Option<Waker> {
        self.bodies += 1;
        if !self.only_bodies() {
            return None;
        }
        let queue = self.queue.as_mut().filter(|queue| !queue.is_empty())?;
        queue.bodies_since = Some(now());
        if queue.warned { None } else { queue.wake_head() }
    }

    // --- permits of the host's cell -------------------------------------------------------------------------------

    /// Counts the permits that are out as its own.
    pub(super) fn adopt(&mut self, out: Out) {
        (self.in_flight, self.bodies, self.adopted) = (out.permits, out.bodies, out.permits);
    }

    pub(super) fn has_adopted(&self) -> bool {
        self.adopted > 0
    }

    pub(super) fn give_adopted_back(&mut self, body: bool) {
        self.adopted -= 1;
        self.give_back(body);
    }

    #[inline]
    pub(super) fn give_back(&mut self, body: bool) {
        self.in_flight -= 1;
        self.bodies -= u32::from(body);
    }

    /// A request that went out is over. The clock is read only where a delay is measured from here.
    #[inline]
    pub(super) fn completed(&mut self, now: impl FnOnce() -> Time, config: &Config) {
        if self.bounded {
            self.record_completion(now(), config);
        }
    }

    #[cold]
    fn record_completion(&mut self, now: Time, config: &Config) {
        self.watch(now, config).proactive.completed(now);
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight as usize
    }

    #[inline]
    pub(super) fn is_full(&self, config: &Config) -> bool {
        self.taken() as usize >= self.concurrency(config)
    }

    /// In flight, or not back in the store yet.
    #[inline]
    fn taken(&self) -> u32 {
        self.in_flight + self.releasing()
    }

    /// Full for what the pace of the host allows at present.
    pub(super) fn is_full_at(&self, now: Time, config: &Config) -> bool {
        let serial = self.paced.as_ref().is_some_and(|paced| paced.pace.is_serial(now));
        self.is_full(config) || (serial && self.taken() > 0)
    }

    /// The same without those that are over and not back in the store yet.
    #[cfg(feature = "redis")]
    pub(super) fn is_full_of_others(&self, now: Time, config: &Config) -> bool {
        let serial = self.paced.as_ref().is_some_and(|paced| paced.pace.is_serial(now));
        self.in_flight() >= self.concurrency(config) || (serial && self.in_flight > 0)
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

    /// The head of the queue, which has come there just now, if there is something for it to do: there may be a permit, a
    /// timer to set, or the store to be asked. Else whoever gives a permit back wakes it.
    pub(super) fn new_head(&mut self, config: &Config) -> Option<Waker> {
        #[cfg(feature = "redis")]
        if config.shared.is_some() {
            return self.wake_head();
        }
        let only_bodies = self.only_bodies() && self.queue.as_ref().is_some_and(|queue| !queue.warned);
        if only_bodies { self.queue.as_mut()?.wake_head() } else { self.next_waiter(config) }
    }

    /// The head of the queue, to look for itself.
    #[cfg(feature = "redis")]
    pub(super) fn wake_head(&mut self) -> Option<Waker> {
        self.queue.as_mut()?.wake_head()
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

    /// Unused, and as it was made: there is no need of a clock to see that it says nothing.
    #[inline]
    pub(super) fn is_blank(&self) -> bool {
        #[cfg(feature = "redis")]
        if self.remote.is_some() {
            return false;
        }
        self.paced.is_none() && self.is_unused()
    }

    /// Unused, and there is nothing to remember.
    pub(super) fn says_nothing(&self, mut now: impl FnMut() -> Time, config: &Config) -> bool {
        self.is_unused()
            && self.paced.as_ref().is_none_or(|paced| paced.says_nothing(now(), &self.bounds(config)))
            && !self.is_shared_with_others(now)
    }
}
