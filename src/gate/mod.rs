//! This process's gate: one slot per host that has something to say.
//!
//! A request takes a [`Permit`] at once ([`Gate::try_enter`]) or waits for one ([`Waiter`]); the response reports to
//! [`Permit::settle`]; the permit's drop wakes the next waiter. Nothing runs in the background and no host owns a task.

mod clock;
mod permit;
mod slot;
mod table;
mod waiter;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::task::Waker;
use std::time::Duration;

use http::{Extensions, HeaderMap, StatusCode};

use self::clock::Clock;
pub(crate) use self::permit::Permit;
use self::slot::{Class, Slot};
use self::table::Table;
pub(crate) use self::waiter::Waiter;
use crate::config::{Config, Limits, PermitUntil};
use crate::error::{LastRefusal, Throttled};
use crate::host::HostKey;
use crate::hosts::HostSnapshot;
use crate::observe::{self, Observer, ThrottleEvent};
use crate::pace::{Refusal, Time};
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
}

/// What one request asks of the gate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// Overrides `max_wait`.
    pub(crate) budget: Option<Duration>,
    pub(crate) until: Option<PermitUntil>,
    /// For a request that was admitted before: what it has waited by then.
    pub(crate) again: Option<Duration>,
    pub(crate) label: Option<&'static str>,
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
    pub(crate) headers: &'a HeaderMap,
    pub(crate) label: Option<&'static str>,
}

impl Gate {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            clock: Clock::start(),
            table: Table::new(),
            any_limits: AtomicBool::new(!config.per_host.is_empty()),
            limits: RwLock::new(config.per_host.clone()),
            warned: Mutex::default(),
            holds: AtomicU64::new(0),
            config,
        }
    }

    /// A permit, if one can be had at once. Costs a healthy host one short lock, no clock and no allocation.
    #[inline]
    pub(crate) fn try_enter(self: &Arc<Self>, key: &HostKey, terms: &Terms) -> Option<Permit> {
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
        match &self.config.verdict {
            Some(verdict) => verdict.judge(status, headers, extensions),
            None => Outcome::judged(status, headers, || {
                let limits = host().and_then(|host| self.limits_of(&host));
                limits.and_then(|limits| limits.retry_after_unit).unwrap_or_default()
            }),
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

    pub(crate) fn succeeded(&self, key: &HostKey, sent: Option<Time>) {
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        if let Some(paced) = shard.get(hash, key).and_then(|slot| slot.paced.as_mut()) {
            paced.pace.succeeded(sent);
        }
    }

    /// A refusal: holds the host back and tells the waiters that have no prospect any more.
    pub(crate) fn throttled(
        &self,
        key: &HostKey,
        sent: Option<Time>,
        refused: &Refused<'_>,
        waited: Duration,
    ) -> Throttled {
        let hint = refused.hint;
        let raw_hint = verdict::raw(refused.headers);
        let refusal = Refusal { hint, soft: refused.soft };
        let (new_event, hold, streak) = self.hold(key, |slot, now| {
            let rules = slot.rules(&self.config);
            let paced = slot.paced.get_or_insert_default();
            let new_event = paced.pace.throttled(now, sent, refusal, &rules);
            if new_event && paced.pace.streak() == 1 {
                paced.since = Some(self.clock.instant(now));
            }
            if new_event || hint.is_some() {
                paced.last = Some(LastRefusal { status: refused.status, asked: hint, raw_hint });
            }
            (new_event, paced.pace.ready().since(now), paced.pace.streak())
        });
        let event =
            ThrottleEvent { host: key, status: refused.status, hint, hold, streak, new_event, label: refused.label };
        observe::throttled(self.observer(), &event);
        Throttled { retry_after: hold, streak, waited, soft: refused.soft, elsewhere: false }
    }

    /// A retry below the gate will send at this instant: the next send keeps its distance to that one.
    #[cfg(feature = "retry")]
    pub(crate) fn resend(&self, key: &HostKey, at: Time) {
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        if let Some(slot) = shard.get(hash, key) {
            let rules = slot.rules(&self.config);
            if let Some(paced) = &mut slot.paced {
                paced.pace.sent(at, &rules);
            }
        }
    }

    /// Changes the pace of a host for the worse.
    fn hold<T>(&self, key: &HostKey, change: impl FnOnce(&mut Slot, Time) -> T) -> T {
        let now = self.clock.now();
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        self.table.sweep(&mut shard, now);
        let (id, slot) = self.table.slot(&mut shard, hash, key, |number| self.new_slot(number, key));
        let result = change(slot, now);
        // Within the lock: whoever was admitted before the change took its reading before this.
        self.holds.fetch_add(1, Ordering::Release);
        let wakers = slot.refuse_hopeless(now, &self.config);
        if slot.says_nothing(|| now) {
            shard.remove(id);
        }
        drop(shard);
        wakers.into_iter().for_each(Waker::wake);
        result
    }

    // --- steering -------------------------------------------------------------------------------------------------

    pub(crate) fn penalize(&self, key: &HostKey, duration: Duration) {
        if duration.is_zero() {
            return;
        }
        self.hold(key, |slot, now| {
            let rules = slot.rules(&self.config);
            slot.paced.get_or_insert_default().pace.penalize(now, duration, &rules);
        });
    }

    pub(crate) fn clear(&self, key: &HostKey) {
        let hash = self.table.hash(key);
        let mut shard = self.table.lock(hash);
        let (id, slot) = self.table.slot(&mut shard, hash, key, |number| self.new_slot(number, key));
        slot.clear();
        let next = slot.next_waiter(&self.config);
        if slot.says_nothing(|| self.clock.now()) {
            shard.remove(id);
        }
        drop(shard);
        next.into_iter().for_each(Waker::wake);
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
                slot.limits = self.limits_of(slot.key());
                wakers.extend(slot.next_waiter(&self.config));
            }
            drop(shard);
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// The hosts for which `wanted` holds.
    pub(crate) fn snapshots(&self, wanted: impl Fn(&HostKey) -> bool) -> Vec<HostSnapshot> {
        let mut found = Vec::new();
        for mut shard in self.table.shards() {
            self.table.sweep(&mut shard, self.clock.now());
            let slots = shard.iter_mut().filter(|slot| wanted(slot.key()));
            found.extend(slots.filter_map(|slot| slot.snapshot(&self.clock, &self.config)));
        }
        found
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
        Slot::new(number, key.clone(), self.limits_of(key))
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
