//! This process's gate: a word per host in flight, and a slot per host that has more to say.
//!
//! A request takes a [`Permit`] at once ([`Gate::enter`]) or waits for one ([`Waiter`]); the response reports to
//! [`Permit::settle`]; the permit's drop wakes the next waiter. Nothing runs in the background and no host owns a task.

mod cells;
mod clock;
mod fast;
mod handle;
mod name;
mod permit;
mod queue;
#[cfg(feature = "redis")]
mod remote;
mod slot;
mod sync;
mod table;
mod waiter;

use std::collections::{HashMap, HashSet};
use std::fmt;
#[cfg(feature = "redis")]
use std::sync::Weak;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::task::Waker;
use std::time::Duration;

use http::{Extensions, HeaderMap, Method, Request, StatusCode, Uri};

use self::cells::{MOST, Rights, Spot, Taken};
use self::clock::Clock;
use self::fast::FastPath;
pub(crate) use self::handle::Handle;
use self::name::Name;
use self::permit::Stage;
pub(crate) use self::permit::{Permit, Plain, Told};
use self::queue::Class;
use self::slot::Slot;
use self::sync::{AtomicBool, Ordering};
use self::table::{Shard, Sight, SlotId, Table};
pub(crate) use self::waiter::Waiter;
use crate::config::{Config, Limits, PermitUntil};
use crate::error::{LastRefusal, Throttled};
use crate::extensions;
use crate::host::{By, HostKey};
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
    /// How hosts are told apart, if requests need not be looked at any closer than that.
    plain: Option<By>,
    /// Of a host without settings of its own.
    rights: Rights,
    /// What was set per host, at first the configuration's.
    limits: RwLock<HashMap<HostKey, Arc<Limits>>>,
    /// Spares a gate that never had such settings the look-up.
    any_limits: AtomicBool,
    warned: Mutex<HashSet<HostKey>>,
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
    fn new(config: Config) -> Arc<Self> {
        Arc::new_cyclic(|this| {
            #[cfg(feature = "redis")]
            let shared = config.shared.clone().map(|settings| remote::Shared::new(settings, this.clone()));
            #[cfg(feature = "redis")]
            let is_shared = shared.is_some();
            #[cfg(not(feature = "redis"))]
            let is_shared = false;

            // Of a host that is limited beforehand each send counts, and those of a shared one are others' too.
            let has_fast_path = !is_shared && !config.is_bounded(None);
            #[cfg(test)]
            let has_fast_path = has_fast_path && !config.slots_only;
            let is_plain = has_fast_path && !config.disabled && config.final_uri.is_none();
            Self {
                clock: Clock::start(),
                table: Table::new(has_fast_path.then(|| this.clone())),
                plain: config.keying_is.filter(|_| is_plain),
                rights: Rights {
                    permits: config.concurrency.min(MOST) as u8,
                    until_head: config.permit_until == PermitUntil::Head,
                },
                any_limits: AtomicBool::new(!config.per_host.is_empty()),
                limits: RwLock::new(config.per_host.clone()),
                warned: Mutex::default(),
                config,
                #[cfg(feature = "redis")]
                shared,
                #[cfg(feature = "redis")]
                this: this.clone(),
            }
        })
    }

    /// The last handle is gone: nobody can ask for a permit any more. Slots take over what is still out, for those who wait
    /// and those who have not sent yet.
    fn close(&self) {
        let Some(fast) = self.table.fast_at_the_end() else { return };
        for (nth, mut shard) in self.table.shards().enumerate() {
            self.give_slots(&mut shard, nth, Sight::InFlight);
            shard.detach();
        }
        fast.close();
    }

    /// Makes slots for the hosts in flight that have none.
    fn give_slots(&self, shard: &mut Shard, nth: usize, sight: Sight) {
        self.table.each_without_slot(shard, nth, sight, |shard, key, _| {
            self.table.slot(shard, self.table.spot(&key), &key, |number| self.new_slot(number, &key));
        });
    }

    // --- permits --------------------------------------------------------------------------------------------------

    /// The way of nearly every request: there is nothing special about it or its host.
    #[inline]
    pub(crate) fn enter_plainly<B>(&self, request: &Request<B>) -> Option<Plain> {
        let by = self.plain?;
        let fast = self.table.fast_in_use()?;
        if !request.extensions().is_empty() || request.method() == Method::HEAD {
            return None;
        }
        let name = Name::plain(request.uri(), by)?;
        self.take(fast, name, self.table.spot_of(name))
    }

    /// A permit, if one can be had at once, or none for a request that passes ungated; else a place to wait.
    pub(crate) fn enter<B>(self: &Arc<Self>, request: &Request<B>) -> Result<Option<Permit>, Box<Waiter>> {
        self.enter_by(request.uri(), request.headers(), request.extensions(), || extensions::terms(request))
    }

    /// The same for what a request is told by.
    pub(crate) fn enter_by(
        self: &Arc<Self>,
        uri: &Uri,
        headers: &HeaderMap,
        extensions: &Extensions,
        terms: impl FnOnce() -> Terms,
    ) -> Result<Option<Permit>, Box<Waiter>> {
        if self.config.disabled {
            return Ok(None);
        }
        let Some(key) = self.config.keying.key(uri, headers, extensions) else {
            return Ok(None);
        };
        let terms = terms();
        match self.try_enter(&key, &terms) {
            Some(permit) => Ok(Some(permit)),
            None => Err(Box::new(Waiter::new(Arc::clone(self), key, terms))),
        }
    }

    fn try_enter(self: &Arc<Self>, key: &HostKey, terms: &Terms) -> Option<Permit> {
        #[cfg(feature = "redis")]
        if self.store_up().is_some() {
            // Somebody has to be asked.
            return None;
        }
        let spot = self.table.spot(key);
        if let Some(plain) = self.table.fast().and_then(|fast| self.take(fast, Name::of(key), spot)) {
            return Some(plain.with(self, terms));
        }
        let mut shard = self.table.lock(spot);
        let (id, slot) = self.table.slot(&mut shard, spot, key, |number| self.new_slot(number, key));
        if slot.ahead_of_new(terms.class()) > 0 {
            return None;
        }
        let admission = slot.admit(|| self.clock.now(), &self.config).ok()?;
        let until = terms.until.unwrap_or_else(|| slot.permit_until(&self.config));
        drop(shard);
        Some(Permit::of_slot(Arc::clone(self), id, admission, until, terms, terms.waited_before()))
    }

    /// A permit of the host's cell.
    #[inline]
    fn take(&self, fast: &'static FastPath, name: Name<'_>, spot: Spot) -> Option<Plain> {
        match fast.cells.take(spot, name, || self.rights_of(name)) {
            Taken::Permit(rights) => Some(Plain::new(fast, spot.place(), rights)),
            Taken::Slow => None,
            Taken::Owed => {
                fast.give_back(spot.place(), Stage::Admitted);
                None
            }
        }
    }

    #[inline]
    fn rights_of(&self, name: Name<'_>) -> Rights {
        if self.any_limits.load(Ordering::SeqCst) { self.look_up_rights(name) } else { self.rights }
    }

    #[cold]
    fn look_up_rights(&self, name: Name<'_>) -> Rights {
        let Some(limits) = self.look_up_limits(&name.key()) else { return self.rights };
        let concurrency = limits.concurrency.unwrap_or(self.config.concurrency);
        let until = limits.permit_until.unwrap_or(self.config.permit_until);
        let permits = if self.config.is_bounded(Some(&*limits)) { 0 } else { concurrency.min(MOST) as u8 };
        Rights { permits, until_head: until == PermitUntil::Head }
    }

    /// A permit of a cell goes back under the lock.
    fn take_back(&self, fast: &'static FastPath, place: usize, stage: Stage) {
        let mut shard = self.table.lock_place(place);
        let occupant = fast.cells.given_back(place, stage == Stage::Body);
        let mut next = None;
        if let Some(slot) = shard.adopter(place, occupant) {
            slot.give_adopted_back(stage == Stage::Body);
            if stage != Stage::Admitted {
                slot.completed(|| self.clock.now(), &self.config);
            }
            next = slot.next_waiter(&self.config);
            let id = SlotId::of(slot);
            self.tidy(&mut shard, id);
        }
        drop(shard);
        fast.end_if_over();
        next.into_iter().for_each(Waker::wake);
    }

    /// The head of a response has arrived for a permit of a cell.
    fn body_begins(&self, fast: &'static FastPath, place: usize) {
        let mut shard = self.table.lock_place(place);
        let occupant = fast.cells.body_begun(place);
        let next = shard.adopter(place, occupant).and_then(|slot| slot.head_arrived(|| self.clock.now()));
        drop(shard);
        next.into_iter().for_each(Waker::wake);
    }

    /// Drops a slot that has come out of use, at once or in time.
    fn tidy(&self, shard: &mut Shard, id: SlotId) {
        let Some(slot) = shard.by_id(id) else { return };
        if slot.is_blank() {
            self.table.remove(shard, id);
        } else if slot.is_unused() {
            self.table.tidy(shard, &self.clock, &self.config);
        }
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
        let spot = self.table.spot(key);
        let mut shard = self.table.lock(spot);
        if let Some(slot) = shard.get(spot, key) {
            let rules = slot.rules(&self.config);
            if let Some(paced) = slot.paced() {
                paced.pace.succeeded(ticket, &rules);
            }
        }
    }

    /// A response that was no refusal said how much is left of the quota of a host, of whose requests in flight it has
    /// answered so many.
    pub(crate) fn quota_left(&self, key: &HostKey, quota: Quota, answered: u64, success: bool) {
        let spot = self.table.spot(key);
        let mut shard = self.table.lock(spot);
        let slot = shard.get(spot, key);
        let in_flight = match (&slot, self.table.fast_in_use()) {
            (Some(slot), _) => slot.in_flight() as u64,
            (None, Some(fast)) => u64::from(fast.cells.out(spot).permits),
            (None, None) => 0,
        };
        let others = in_flight.saturating_sub(answered);
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
        let spot = self.table.spot(key);
        let mut shard = self.table.lock(spot);
        let has_room = shard.get(spot, key).is_none_or(|slot| slot.resend(now, at, &self.config));
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
        let spot = self.table.spot(key);
        let mut shard = self.table.lock(spot);
        self.table.sweep(&mut shard, now, &self.config);
        let (id, slot) = self.table.slot(&mut shard, spot, key, |number| self.new_slot(number, key));
        let result = change(slot, now);
        #[cfg(feature = "redis")]
        if self.shared.is_some() && self.store_up().is_none() {
            slot.remote().tell_later();
        }
        let wakers = slot.refuse_hopeless(now, &self.config);
        if slot.says_nothing(|| now, &self.config) {
            self.table.remove(&mut shard, id);
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
        let spot = self.table.spot(key);
        let mut shard = self.table.lock(spot);
        let (id, slot) = self.table.slot(&mut shard, spot, key, |number| self.new_slot(number, key));
        slot.clear(self.clock.now(), &self.config);
        let next = slot.next_waiter(&self.config);
        if slot.says_nothing(|| self.clock.now(), &self.config) {
            self.table.remove(&mut shard, id);
        }
        drop(shard);
        next.into_iter().for_each(Waker::wake);
        #[cfg(feature = "redis")]
        self.tell_of_clearing(key);
    }

    pub(crate) fn set_limits(&self, key: HostKey, limits: Limits) {
        let mut map = self.limits.write().unwrap_or_else(PoisonError::into_inner);
        if limits == Limits::default() {
            map.remove(&key);
        } else {
            map.insert(key, Arc::new(limits));
        }
        drop(map);
        // Before any cell is looked at: whoever claims one from here on looks the limits up.
        self.any_limits.store(true, Ordering::SeqCst);
        // A slot reads its limits when it is made, under its shard's lock: one that was made before the change is met here.
        // A cell is given its rights when it is claimed: those of hosts in flight have slots from here on, and the others
        // are to be claimed anew.
        for (nth, mut shard) in self.table.shards().enumerate() {
            self.give_slots(&mut shard, nth, Sight::All);
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
        for (nth, mut shard) in self.table.shards().enumerate() {
            self.table.sweep(&mut shard, self.clock.now(), &self.config);
            let slots = shard.iter_mut().filter(|slot| wanted(slot.key()));
            found.extend(slots.filter_map(|slot| slot.snapshot(&self.clock, &self.config)));
            self.table.each_without_slot(&mut shard, nth, Sight::InFlight, |_, key, out| {
                if wanted(&key) {
                    let mut slot = self.new_slot(0, &key);
                    slot.adopt(out);
                    found.extend(slot.snapshot(&self.clock, &self.config));
                }
            });
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
    fn limits_of(&self, key: &HostKey) -> Option<Arc<Limits>> {
        if self.any_limits.load(Ordering::Acquire) { self.look_up_limits(key) } else { None }
    }

    #[cold]
    fn look_up_limits(&self, key: &HostKey) -> Option<Arc<Limits>> {
        let map = self.limits.read().unwrap_or_else(PoisonError::into_inner);
        map.get(key).or_else(|| map.get(&HostKey::new(key.name()))).cloned()
    }

    fn new_slot(&self, number: u64, key: &HostKey) -> Slot {
        Slot::new(number, self.table.spot(key), key.clone(), self.limits_of(key), &self.config)
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

#[cfg(host_gate_loom)]
pub mod model;
#[cfg(test)]
mod tests;
