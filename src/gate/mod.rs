//! This process's gate: one slot per host that has something to say.
//!
//! A request takes a [`Permit`] at once ([`Gate::try_enter`]) or waits for one ([`Waiter`]); the response reports to
//! [`Permit::settle`]; the permit's drop wakes the next waiter. Nothing runs in the background and no host owns a task.

mod clock;
mod permit;
mod queue;
#[cfg(feature = "redis")]
mod remote;
mod slot;
mod table;
mod waiter;

use std::collections::{HashMap, HashSet};
use std::fmt;
#[cfg(feature = "redis")]
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::task::Waker;
use std::time::Duration;

use http::{Extensions, HeaderMap, StatusCode};

use self::clock::Clock;
pub(crate) use self::permit::Permit;
use self::queue::Class;
use self::slot::Slot;
use self::table::Table;
pub(crate) use self::waiter::Waiter;
use crate::config::{Config, Limits, PermitUntil};
use crate::error::{LastRefusal, Throttled};
use crate::host::HostKey;
use crate::hosts::HostSnapshot;
use crate::observe::{self, Observer, ThrottleEvent};
use crate::pace::{Memory, Quota, Refusal, Ticket, Time};
use crate::verdict::{self, Outcome};

/// How many hosts are remembered as warned about.
const WARNED_HOSTS: usize = 1024;

pub(crate) struct Gate {
    pub(crate) config: Config,
    clock: Clock,
    table: Table,
    /// What was set per host, at first the configuration's.
    limits: RwLock<HashMap<HostKey, Arc<Limits>>>,
    /// Spares a gate without such settings the look-up.
    any_limits: AtomicBool,
    warned: Mutex<HashSet<HostKey>>,
    /// How often any host's pace has changed for the worse.
    holds: AtomicU64,
    /// The store that hosts are shared in.
    #[cfg(feature = "redis")]
    shared: Option<remote::Shared>,
    /// For what comes from the store.
    #[cfg(feature = "redis")]
    this: Weak<Gate>,
}

/// What one request asks of the gate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// Overrides `max_wait`.
    pub(crate) budget: Option<Duration>,
    pub(crate) until: Option<PermitUntil>,
    /// For a request that was admitted before: what it has waited by then.
    pub(crate) again: Option<Duration>,
    /// It has been refused softly before.
    pub(crate) softly_refused: bool,
    pub(crate) label: Option<&'static str>,
    /// The store is not to be asked: that takes longer than the caller has.
    #[cfg(feature = "redis")]
    pub(crate) only_here: bool,
}

impl Terms {
    /// What is left of the budget.
    fn left(&self, max_wait: Duration) -> Duration {
        self.budget.unwrap_or(max_wait).saturating_sub(self.waited_before())
    }

    fn waited_before(&self) -> Duration {
        self.again.unwrap_or_default()
    }

    fn class(&self) -> Class {
        if self.again.is_some() { Class::Again } else { Class::New }
    }
}

/// A refusal as it came in.
pub(crate) struct Refused<'a> {
    pub(crate) status: StatusCode,
    pub(crate) hint: Option<Duration>,
    pub(crate) soft: bool,
    /// The quota that it states.
    pub(crate) quota: Option<Quota>,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) label: Option<&'static str>,
}

impl Gate {
    pub(crate) fn new(config: Config) -> Arc<Self> {
        #[cfg(not(feature = "redis"))]
        return Arc::new(Self::build(config));
        #[cfg(feature = "redis")]
        Arc::new_cyclic(|this| {
            let shared = config.shared.clone().map(|settings| remote::Shared::new(settings, Weak::clone(this)));
            Self { shared, this: Weak::clone(this), ..Self::build(config) }
        })
    }

    fn build(config: Config) -> Self {
        Self {
            clock: Clock::start(),
            table: Table::new(),
            any_limits: AtomicBool::new(!config.per_host.is_empty()),
            limits: RwLock::new(config.per_host.clone()),
            warned: Mutex::default(),
            holds: AtomicU64::new(0),
            config,
            #[cfg(feature = "redis")]
            shared: None,
            #[cfg(feature = "redis")]
            this: Weak::new(),
        }
    }

    /// A permit, if one can be had at once. Costs a healthy host one short lock, no clock and no allocation.
    #[inline]
    pub(crate) fn try_enter(self: &Arc<Self>, key: &HostKey, terms: &Terms) -> Option<Permit> {
        #[cfg(feature = "redis")]
        if self.store_up().is_some() {
            // Somebody has to be asked.
            return None;
        }
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        let (id, slot) = self.table.slot(&mut shard, hash, key, |number| self.new_slot(number, key));
        if slot.ahead_of_new(terms.class()) > 0 {
            return None;
        }
        let admission = slot.admit(|| self.clock.now(), &self.config).ok()?;
        let until = terms.until.unwrap_or_else(|| slot.permit_until(&self.config));
        drop(shard);
        Some(Permit::new(Arc::clone(self), id, admission, until, terms, terms.waited_before()))
    }

    /// Tells, by comparison with an earlier reading, whether any host has been held since.
    #[inline]
    pub(crate) fn holds(&self) -> u64 {
        self.holds.load(Ordering::Acquire)
    }

    /// Tells this gate from others.
    pub(crate) fn id(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    #[cfg(feature = "retry")]
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    // --- what responses say ---------------------------------------------------------------------------------------

    /// What a response means. Its host is asked for only where that matters.
    #[inline]
    pub(crate) fn judge(
        &self,
        host: impl FnOnce() -> Option<HostKey>,
        status: StatusCode,
        headers: &HeaderMap,
        extensions: &Extensions,
    ) -> Outcome {
        let outcome = match &self.config.verdict {
            Some(verdict) => verdict.judge(status, headers, extensions),
            None => Outcome::judged(status, headers, || {
                let limits = host().and_then(|host| self.limits_of(&host));
                limits.and_then(|limits| limits.retry_after_unit).unwrap_or_default()
            }),
        };
        match outcome {
            Outcome::Throttled { hint: None, soft } => {
                let used_up = self.quota(headers).filter(|quota| quota.remaining == 0);
                Outcome::Throttled { hint: used_up.map(|quota| quota.reset), soft: soft && used_up.is_none() }
            }
            outcome => outcome,
        }
    }

    /// The host of a response that came over redirects from elsewhere.
    #[inline]
    pub(crate) fn final_host(
        &self,
        asked: impl FnOnce() -> Option<HostKey>,
        extensions: &Extensions,
    ) -> Option<HostKey> {
        let uri = self.config.final_uri.as_ref()?(extensions)?;
        let key = self.config.keying.key(&uri, &HeaderMap::new(), extensions)?;
        (Some(&key) != asked().as_ref()).then_some(key)
    }

    /// The quota that a response states.
    #[inline]
    pub(crate) fn quota(&self, headers: &HeaderMap) -> Option<Quota> {
        if !headers.is_empty() && self.config.reads_quota() { verdict::quota(headers) } else { None }
    }

    pub(crate) fn succeeded(&self, key: &HostKey, ticket: Option<Ticket>) {
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        if let Some(slot) = shard.get(hash, key) {
            let rules = slot.rules(&self.config);
            if let Some(paced) = slot.paced() {
                paced.pace.succeeded(ticket, &rules);
            }
        }
    }

    /// A response that was no refusal said how much is left of the quota of a host, of whose requests in flight it has
    /// answered so many.
    pub(crate) fn quota_left(&self, key: &HostKey, quota: Quota, answered: u64, success: bool) {
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        let slot = shard.get(hash, key);
        let others = slot.as_ref().map_or(0, |slot| (slot.in_flight() as u64).saturating_sub(answered));
        if quota.remaining > others {
            if let Some(paced) = slot.filter(|_| success).and_then(Slot::paced) {
                paced.pace.is_paced_by_the_server();
            }
            return;
        }
        drop(shard);
        self.hold(key, |slot, now| {
            let rules = slot.rules(&self.config);
            slot.watch(now, &self.config).pace.used_up(now, quota.reset, &rules);
        });
    }

    /// A refusal: holds the host back and tells the waiters that have no prospect any more.
    pub(crate) fn throttled(
        &self,
        key: &HostKey,
        ticket: Option<Ticket>,
        refused: &Refused<'_>,
        waited: Duration,
    ) -> Throttled {
        let Refused { hint, soft, quota, .. } = *refused;
        let again = ticket.is_some_and(|ticket| ticket.again);
        let left = quota.map(|quota| quota.remaining);
        let (within_quota, used_up) = (left.is_some_and(|left| left > 0), left == Some(0));
        let raw_hint = verdict::raw(refused.headers);
        let refusal = Refusal { hint, soft, again, within_quota, used_up };
        let (new_event, hold, streak, now) = self.hold(key, |slot, now| {
            let rules = slot.rules(&self.config);
            let paced = slot.watch(now, &self.config);
            let new_event = paced.pace.throttled(now, ticket, refusal, &rules);
            if new_event && paced.pace.streak() == 1 {
                paced.since = Some(self.clock.instant(now));
            }
            if new_event || hint.is_some() {
                paced.last = Some(LastRefusal { status: refused.status, asked: hint, raw_hint });
            }
            (new_event, paced.pace.ready().since(now), paced.pace.streak(), now)
        });
        if new_event {
            self.table.forget_now_and_then(now, &self.config);
        }
        let event =
            ThrottleEvent { host: key, status: refused.status, hint, hold, streak, new_event, label: refused.label };
        observe::throttled(self.observer(), &event);
        Throttled { retry_after: hold, streak, waited, soft, elsewhere: false }
    }

    /// A retry below the gate will send at this instant: the next send keeps its distance to that one.
    #[cfg(feature = "retry")]
    pub(crate) fn resend(self: &Arc<Self>, key: &HostKey, now: Time, at: Time) -> bool {
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        let has_room = shard.get(hash, key).is_none_or(|slot| slot.resend(now, at, &self.config));
        drop(shard);
        #[cfg(feature = "redis")]
        if has_room {
            self.tell_of_resending(key, at.since(now));
        }
        has_room
    }

    /// Changes the pace of a host for the worse.
    fn hold<T>(&self, key: &HostKey, change: impl FnOnce(&mut Slot, Time) -> T) -> T {
        let now = self.clock.now();
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        self.table.sweep(&mut shard, now, &self.config);
        let (id, slot) = self.table.slot(&mut shard, hash, key, |number| self.new_slot(number, key));
        let result = change(slot, now);
        #[cfg(feature = "redis")]
        if self.shared.is_some() && self.store_up().is_none() {
            slot.remote().tell_later();
        }
        // Within the lock: whoever was admitted before the change took its reading before this.
        self.holds.fetch_add(1, Ordering::Release);
        let wakers = slot.refuse_hopeless(now, &self.config);
        if slot.says_nothing(|| now, &self.config) {
            shard.remove(id);
        }
        drop(shard);
        wakers.into_iter().for_each(Waker::wake);
        result
    }

    // --- steering -------------------------------------------------------------------------------------------------

    pub(crate) fn penalize(self: &Arc<Self>, key: &HostKey, duration: Duration) {
        if duration.is_zero() {
            return;
        }
        self.hold(key, |slot, now| {
            let rules = slot.rules(&self.config);
            slot.watch(now, &self.config).pace.penalize(now, duration, &rules);
        });
        #[cfg(feature = "redis")]
        self.tell_of_penalty(key, duration);
    }

    pub(crate) fn clear(self: &Arc<Self>, key: &HostKey) {
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        let (id, slot) = self.table.slot(&mut shard, hash, key, |number| self.new_slot(number, key));
        slot.clear(self.clock.now(), &self.config);
        let next = slot.next_waiter(&self.config);
        if slot.says_nothing(|| self.clock.now(), &self.config) {
            shard.remove(id);
        }
        drop(shard);
        next.into_iter().for_each(Waker::wake);
        #[cfg(feature = "redis")]
        self.tell_of_clearing(key);
    }

    pub(crate) fn set_limits(&self, key: HostKey, limits: Limits) {
        {
            let mut map = self.limits.write().unwrap_or_else(PoisonError::into_inner);
            if limits == Limits::default() {
                map.remove(&key);
            } else {
                map.insert(key, Arc::new(limits));
            }
            self.any_limits.store(!map.is_empty(), Ordering::Release);
        }
        // A slot reads its limits when it is made, under its shard's lock: one that was made before the change is met here.
        for mut shard in self.table.shards() {
            let mut wakers = Vec::new();
            for slot in shard.iter_mut() {
                let limits = self.limits_of(slot.key());
                slot.set_limits(limits, &self.config);
                wakers.extend(slot.next_waiter(&self.config));
            }
            drop(shard);
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// The hosts for which `wanted` holds.
    pub(crate) fn snapshots(&self, wanted: impl Fn(&HostKey) -> bool) -> Vec<HostSnapshot> {
        let mut found = Vec::new();
        self.table.forget(self.clock.now(), &self.config);
        for mut shard in self.table.shards() {
            self.table.sweep(&mut shard, self.clock.now(), &self.config);
            let slots = shard.iter_mut().filter(|slot| wanted(slot.key()));
            found.extend(slots.filter_map(|slot| slot.snapshot(&self.clock, &self.config)));
        }
        found
    }

    pub(crate) fn export(&self) -> Vec<(HostKey, Memory)> {
        let now = self.clock.now();
        self.table.forget(now, &self.config);
        let mut hosts = Vec::new();
        for mut shard in self.table.shards() {
            hosts.extend(shard.iter_mut().filter_map(|slot| Some((slot.key().clone(), slot.memory(now)?))));
        }
        hosts
    }

    /// Takes up what was known so long ago, of as many hosts as are remembered at most.
    pub(crate) fn import<'a>(self: &Arc<Self>, hosts: impl Iterator<Item = (HostKey, &'a Memory)>, age: Duration) {
        let mut room = self.config.max_hosts;
        for (key, memory) in hosts {
            if room == 0 {
                break;
            }
            let taken = self.hold(&key, |slot, now| slot.recall(memory, age, now, &self.config));
            room -= usize::from(taken);
            #[cfg(feature = "redis")]
            if taken {
                self.tell_of_memory(&key);
            }
        }
        self.table.forget(self.clock.now(), &self.config);
    }

    pub(crate) fn observer(&self) -> Option<&dyn Observer> {
        self.config.observer.as_deref()
    }

    /// What was set for the key, or else for its name.
    #[inline]
    fn limits_of(&self, key: &HostKey) -> Option<Arc<Limits>> {
        if self.any_limits.load(Ordering::Acquire) { self.look_up_limits(key) } else { None }
    }

    #[cold]
    fn look_up_limits(&self, key: &HostKey) -> Option<Arc<Limits>> {
        let map = self.limits.read().unwrap_or_else(PoisonError::into_inner);
        map.get(key).or_else(|| map.get(&HostKey::new(key.name()))).cloned()
    }

    #[inline]
    fn new_slot(&self, number: u64, key: &HostKey) -> Slot {
        Slot::new(number, key.clone(), self.limits_of(key), &self.config)
    }

    fn warn_of_unread_bodies(&self, key: &HostKey, in_flight: usize) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let first = warned.len() < WARNED_HOSTS && warned.insert(key.clone());
        drop(warned);
        if first {
            observe::unread_bodies(key, in_flight);
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("config", &self.config).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
