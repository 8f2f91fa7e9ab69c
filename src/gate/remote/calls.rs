//! The gate's calls to the store: each a task of its own that leaves its result in the slot.

use std::collections::HashMap;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use tokio::runtime::Handle;

use super::{Asked, Leftovers, ROUNDING};
use crate::gate::Gate;
use crate::gate::slot::Slot;
use crate::host::HostKey;
use crate::hosts::HostSnapshot;
use crate::observe::{self, ErrorEvent, Operation};
use crate::pace::{Memory, Time};
use crate::shared::{
    Ask, BackendError, BackendErrorKind, Connection, Hooks, HostTerms, Pushed, Redis, Released, Report, Steer, Store,
    Via,
};
#[cfg(feature = "retry")]
use crate::{gate::Refused, pace::Ticket, shared::Heard, verdict::Outcome};

/// How often it is tried to tell the store what could not be told before.
const CATCH_UP_EVERY: Duration = Duration::from_secs(1);
/// Leases that could not be given back are remembered, up to so many.
const UNRELEASED: usize = 4096;

/// The store, and what a gate remembers for it.
pub(in crate::gate) struct Shared {
    pub(in crate::gate) store: Store,
    /// The hosts that stand in the store's queue, by the key under which messages name them.
    in_line: Mutex<HashMap<String, HostKey>>,
    /// Leases that the store does not know to be over.
    unreleased: Mutex<Vec<(HostKey, HostTerms, Box<str>)>>,
    /// Some host's news could not be told, or some lease not given back.
    behind: AtomicBool,
    /// When to try again.
    catch_up_at: Mutex<Time>,
    /// For permits that are dropped outside of any runtime.
    runtime: OnceLock<Handle>,
}

impl Shared {
    pub(in crate::gate) fn new(settings: Redis, hooks: Weak<Gate>) -> Self {
        Self {
            store: Store::new(settings, hooks),
            in_line: Mutex::default(),
            unreleased: Mutex::default(),
            behind: AtomicBool::new(false),
            catch_up_at: Mutex::default(),
            runtime: OnceLock::new(),
        }
    }

    fn runtime(&self) -> Option<Handle> {
        let here = Handle::try_current().ok();
        if let Some(here) = &here {
            let _ = self.runtime.set(here.clone());
        }
        here.or_else(|| self.runtime.get().cloned())
    }

    fn could_not_release(&self, host: &HostKey, terms: HostTerms, token: Box<str>) {
        self.behind.store(true, Ordering::Release);
        let mut unreleased = lock(&self.unreleased);
        if unreleased.len() < UNRELEASED {
            unreleased.push((host.clone(), terms, token));
        }
    }
}

impl Gate {
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// The store, if it is to be asked.
    pub(in crate::gate) fn store_up(&self) -> Option<&Shared> {
        self.shared.as_ref().filter(|shared| shared.store.is_up())
    }

    fn spawn(&self, shared: &Shared, task: impl Future<Output = ()> + Send + 'static) -> bool {
        let runtime = shared.runtime();
        runtime.map(|runtime| runtime.spawn(task)).is_some()
    }

    // --- admission ------------------------------------------------------------------------------------------------

    /// Asks for a permit for the head of this host's queue. False: there is no runtime to do so.
    pub(in crate::gate) fn ask(
        self: &Arc<Self>,
        key: &HostKey,
        terms: HostTerms,
        confirm: Vec<Box<str>>,
        waited: Duration,
        budget: Duration,
        label: Option<&'static str>,
    ) -> bool {
        let Some(shared) = &self.shared else { return false };
        if shared.store.is_fair() {
            lock(&shared.in_line).insert(shared.store.state_key(key), key.clone());
        }
        let ask = Ask { terms, token: shared.store.token(), waited, budget, confirm };
        let asking = Asking { gate: Arc::clone(self), key: key.clone(), ask, label, over: false };
        self.spawn(shared, asking.run())
    }

    /// Looks at the slot of a host that the store has said something of, and wakes whom that concerns.
    fn with_slot(self: &Arc<Self>, key: &HostKey, change: impl FnOnce(&mut Slot, Time)) {
        let now = self.clock.now();
        let spot = self.table.spot(key);
        let mut shard = self.table.lock(spot);
        let (id, slot) = self.table.slot(&mut shard, spot, key, |number| self.new_slot(number, key));
        let before = slot.kept_until();
        change(slot, now);
        // Sends keep coming nearer; only news takes a prospect away.
        let worse = slot.kept_until() > before.after(ROUNDING);
        let mut wakers = if worse { slot.refuse_hopeless(now, &self.config) } else { Vec::new() };
        wakers.extend(slot.wake_head());
        let leftovers = slot.leftovers();
        let terms = slot.host_terms(&self.config);
        if slot.says_nothing(|| now, &self.config) {
            self.table.remove(&mut shard, id);
        }
        drop(shard);
        wakers.into_iter().for_each(Waker::wake);
        self.give_back_leftovers(key, terms, leftovers);
    }

    pub(in crate::gate) fn give_back_leftovers(self: &Arc<Self>, key: &HostKey, terms: HostTerms, left: Leftovers) {
        let Leftovers { grants, confirm, ticket, idle } = left;
        for grant in grants {
            self.release(key, Release::unused(terms, grant.lease.token));
        }
        for token in confirm {
            self.steer(key, terms, Operation::Acquire, Steer::Confirm(token));
        }
        if ticket {
            self.steer(key, terms, Operation::Acquire, Steer::Leave);
        } else if idle {
            self.leave_line(key);
        }
    }

    /// Nobody here waits for this host any more, and no permit for it is on its way.
    fn leave_line(&self, key: &HostKey) {
        let Some(shared) = self.shared.as_ref().filter(|shared| shared.store.is_fair()) else { return };
        let mut shard = self.table.lock(self.table.spot(key));
        if shard.get(self.table.spot(key), key).is_none_or(|slot| !slot.is_in_line()) {
            lock(&shared.in_line).remove(&shared.store.state_key(key));
        }
    }

    // --- release and report ---------------------------------------------------------------------------------------

    /// Gives a lease back and reports. What cannot be given back now is when the store is there again.
    pub(in crate::gate) fn release(self: &Arc<Self>, key: &HostKey, release: Release) {
        let Some(shared) = &self.shared else { return };
        let news = release.report.is_news();
        let releasing = Releasing { gate: Arc::clone(self), key: key.clone(), release, news };
        self.spawn(shared, releasing.run());
    }

    /// What a response meant for a host of which the request has no permit.
    pub(in crate::gate) fn report(self: &Arc<Self>, key: &HostKey, report: Report, label: Option<&'static str>) {
        let terms = self.new_slot(0, key).host_terms(&self.config);
        if report.is_news() {
            self.with_slot(key, |slot, _| slot.begin_report());
        }
        self.release(key, Release { terms, token: Box::default(), sent: false, report, label, awaited: false });
    }

    /// A refusal that a retry below the gate has seen: the request keeps its permit, and the others hear of it now.
    #[cfg(feature = "retry")]
    pub(crate) fn report_at_once(
        self: &Arc<Self>,
        key: &HostKey,
        ticket: Option<Ticket>,
        outcome: Outcome,
        refused: &Refused<'_>,
    ) {
        let Some(shared) = &self.shared else { return };
        let sent_at = ticket.map_or(0, |ticket| shared.store.time_since(self.clock.now().since(ticket.at)));
        let (binding, again) = ticket.map(|ticket| (ticket.binding, ticket.again)).unwrap_or_default();
        let report = Report { outcome: Heard::from(outcome), sent_at, binding, again, quota: refused.quota };
        self.report(key, report, refused.label);
    }

    /// Something that nobody waits for. What the store says of the host then is taken up.
    pub(in crate::gate) fn steer(
        self: &Arc<Self>,
        key: &HostKey,
        terms: HostTerms,
        operation: Operation,
        steer: Steer,
    ) -> bool {
        let Some(shared) = self.store_up() else { return false };
        let (gate, key) = (Arc::clone(self), key.clone());
        self.spawn(shared, async move {
            let Some(shared) = &gate.shared else { return };
            match shared.store.steer(Via::Link, &key, &terms, &steer).await {
                Ok(answer) => {
                    gate.with_slot(&key, |slot, now| slot.reflect(&answer, now, &gate.config));
                    if matches!(steer, Steer::Leave) {
                        gate.leave_line(&key);
                    }
                }
                Err(error) => {
                    gate.tell_later(&key);
                    gate.report_error(operation, &error, &key, None);
                }
            }
        })
    }

    pub(in crate::gate) fn tell_of_penalty(self: &Arc<Self>, key: &HostKey, hold: Duration) {
        self.tell(key, Operation::Penalize, |_| Some(Steer::Penalize(hold)));
    }

    pub(in crate::gate) fn tell_of_clearing(self: &Arc<Self>, key: &HostKey) {
        self.tell(key, Operation::Clear, |_| Some(Steer::Clear));
    }

    #[cfg(feature = "retry")]
    pub(in crate::gate) fn tell_of_resending(self: &Arc<Self>, key: &HostKey, delay: Duration) {
        self.tell(key, Operation::Report, |_| Some(Steer::Resend(delay)));
    }

    pub(in crate::gate) fn tell_of_memory(self: &Arc<Self>, key: &HostKey) {
        let now = self.clock.now();
        self.tell(key, Operation::Report, |slot| slot.memory(now).map(Box::new).map(Steer::Merge));
    }

    fn tell(self: &Arc<Self>, key: &HostKey, operation: Operation, what: impl FnOnce(&Slot) -> Option<Steer>) {
        if self.shared.is_none() {
            return;
        }
        let spot = self.table.spot(key);
        let mut shard = self.table.lock(spot);
        let (_, slot) = self.table.slot(&mut shard, spot, key, |number| self.new_slot(number, key));
        let (terms, steer) = (slot.host_terms(&self.config), what(slot));
        drop(shard);
        if let Some(steer) = steer {
            self.steer(key, terms, operation, steer);
        }
    }

    fn report_error(&self, operation: Operation, error: &BackendError, host: &HostKey, label: Option<&'static str>) {
        observe::error(self.observer(), &ErrorEvent { operation, error, host, label });
    }

    /// One host as all processes know it.
    pub(crate) async fn look(&self, key: &HostKey) -> Result<Option<HostSnapshot>, BackendError> {
        let Some(shared) = &self.shared else { return Ok(None) };
        let slot = self.new_slot(0, key);
        let terms = slot.host_terms(&self.config);
        let answer = shared.store.steer(Via::Link, key, &terms, &Steer::Look).await?;
        Ok(slot.seen_by_all(&answer, &self.clock, &self.config))
    }
}

// --- one question -------------------------------------------------------------------------------------------------

/// The head's question. However it ends, dropped with its runtime included, the slot hears that it is over.
struct Asking {
    gate: Arc<Gate>,
    key: HostKey,
    ask: Ask,
    label: Option<&'static str>,
    over: bool,
}

impl Asking {
    async fn run(mut self) {
        let gate = Arc::clone(&self.gate);
        let Some(shared) = &gate.shared else { return };
        let result = shared.store.admit(&self.key, &self.ask).await;
        self.over = true;
        match result {
            Ok((answer, verdict)) => {
                let asked = Asked {
                    token: mem::take(&mut self.ask.token),
                    fair: shared.store.is_fair(),
                    retry: shared.store.settings.retry_interval,
                    budget: self.ask.budget,
                };
                gate.with_slot(&self.key, |slot, now| slot.answered(&answer, verdict, asked, now, &gate.config));
                gate.catch_up();
            }
            Err(error) => {
                self.failed();
                gate.report_error(Operation::Acquire, &error, &self.key, self.label);
            }
        }
    }

    /// It may have been admitted all the same: that is undone.
    fn failed(&mut self) {
        let token = mem::take(&mut self.ask.token);
        self.gate.with_slot(&self.key, |slot, _| slot.ask_failed());
        self.gate.release(&self.key, Release::unused(self.ask.terms, token));
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if !self.over {
            self.failed();
        }
    }
}

/// A lease on its way back, with what is to be told.
pub(in crate::gate) struct Release {
    pub(in crate::gate) terms: HostTerms,
    /// Empty: there is none, only something to tell.
    pub(in crate::gate) token: Box<str>,
    pub(in crate::gate) sent: bool,
    pub(in crate::gate) report: Report,
    pub(in crate::gate) label: Option<&'static str>,
    /// The slot waits for it to arrive.
    pub(in crate::gate) awaited: bool,
}

impl Release {
    /// Of a permit that nobody has used.
    pub(in crate::gate) fn unused(terms: HostTerms, token: Box<str>) -> Self {
        Self { terms, token, sent: false, report: Report::default(), label: None, awaited: false }
    }
}

struct Releasing {
    gate: Arc<Gate>,
    key: HostKey,
    release: Release,
    /// The slot waits for a report in it to arrive.
    news: bool,
}

impl Releasing {
    async fn run(mut self) {
        let gate = Arc::clone(&self.gate);
        let Some(shared) = &gate.shared else { return };
        let Release { terms, token, sent, report, .. } = &self.release;
        let result = shared.store.release(Via::Link, &self.key, terms, token, *sent, report).await;
        let token = &mem::take(&mut self.release.token);
        let Release { terms, sent, report, label, .. } = &self.release;
        let operation = if token.is_empty() { Operation::Report } else { Operation::Release };
        let error = match result {
            Ok((answer, Released { held, others })) => {
                let news = mem::take(&mut self.news);
                gate.with_slot(&self.key, |slot, now| {
                    if news {
                        slot.reported();
                    }
                    slot.reflect(&answer, now, &gate.config);
                    slot.remote().seek(others);
                });
                gate.catch_up();
                let lost = *sent && !held && !token.is_empty();
                lost.then(|| {
                    BackendError::new(BackendErrorKind::LeaseExpired, "the lease had ended before the request")
                })
            }
            Err(error) => {
                if !token.is_empty() {
                    shared.could_not_release(&self.key, *terms, token.clone());
                }
                if report.is_news() {
                    gate.tell_later(&self.key);
                }
                Some(error)
            }
        };
        if let Some(error) = error {
            gate.report_error(operation, &error, &self.key, *label);
        }
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if let Some(shared) = self.gate.shared.as_ref().filter(|_| !self.release.token.is_empty()) {
            // Its runtime has ended before it has.
            shared.could_not_release(&self.key, self.release.terms, mem::take(&mut self.release.token));
        }
        if mem::take(&mut self.news) {
            self.gate.with_slot(&self.key, |slot, _| slot.reported());
        }
        if self.release.awaited {
            let fair = self.gate.shared.as_ref().is_some_and(|shared| shared.store.is_fair());
            self.gate.with_slot(&self.key, |slot, _| slot.released(fair));
        }
    }
}

// --- what the link has to say -------------------------------------------------------------------------------------

impl Hooks for Gate {
    fn degraded(&self, cause: &BackendError) {
        self.config.share.set(self.shared.as_ref().map_or(1, |shared| shared.store.settings.share));
        observe::degraded(self.observer(), cause);
        self.wake_all();
    }

    /// Tells the store what was learnt without it, and gives back what it counts although it is over.
    fn recover<'a>(
        &'a self,
        connection: &'a Connection,
    ) -> Pin<Box<dyn Future<Output = Result<(), BackendError>> + Send + 'a>> {
        Box::pin(self.tell_all(Via::Connection(connection)))
    }

    fn recovered(&self, down_for: Duration) {
        self.config.share.set(1);
        observe::recovered(self.observer(), down_for);
        self.wake_all();
    }

    fn pushed(&self, _channel: &str, payload: &[u8]) {
        let Some((shared, gate)) = self.shared.as_ref().zip(self.this.upgrade()) else { return };
        match shared.store.read_message(payload) {
            Some(Pushed::Handed(handed)) => {
                let Some(key) = lock(&shared.in_line).get(&handed.state).cloned() else { return };
                if shared.store.is_stale(&handed) {
                    let terms = self.new_slot(0, &key).host_terms(&self.config);
                    gate.release(&key, Release::unused(terms, handed.lease.token));
                } else {
                    gate.with_slot(&key, |slot, now| slot.handed(*handed, now, &gate.config));
                }
            }
            Some(Pushed::Cleared { state, clears }) => self.cleared(&state, clears),
            None => tracing::debug!("a message that is none of ours"),
        }
    }
}

impl Gate {
    /// Whoever waits decides anew, by asking where that is possible.
    fn wake_all(&self) {
        for mut shard in self.table.shards() {
            let mut wakers = Vec::new();
            for slot in shard.iter_mut() {
                slot.decided_on_our_own(false);
                wakers.extend(slot.wake_head());
            }
            drop(shard);
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// An answer has come: if there is something that could not be told before, it may be told now.
    fn catch_up(self: &Arc<Self>) {
        let Some(shared) = self.shared.as_ref().filter(|shared| shared.behind.load(Ordering::Acquire)) else { return };
        let now = self.clock.now();
        let mut at = lock(&shared.catch_up_at);
        if now < *at {
            return;
        }
        *at = now.after(CATCH_UP_EVERY);
        drop(at);
        let gate = Arc::clone(self);
        self.spawn(shared, async move {
            if let Err(error) = gate.tell_all(Via::Link).await {
                tracing::debug!(%error, "not everything could be told");
            }
        });
    }

    /// Tells the store what was learnt without it, and gives back what it counts although it is over.
    async fn tell_all(&self, via: Via<'_>) -> Result<(), BackendError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        shared.behind.store(false, Ordering::Release);
        let mut outage = None;
        for (key, terms, memory) in self.untold() {
            if outage.is_none() {
                match shared.store.steer(via, &key, &terms, &Steer::Merge(Box::new(memory))).await {
                    Ok(_) => continue,
                    // One host that the store does not take is no reason to do without it.
                    Err(error) => outage = Some(error).filter(BackendError::is_outage),
                }
            }
            self.tell_later(&key);
        }
        if let Some(outage) = outage {
            return Err(outage);
        }
        let count = lock(&shared.unreleased).len();
        for _ in 0..count {
            let Some((key, terms, token)) = lock(&shared.unreleased).pop() else { break };
            let nothing = Report::default();
            if let Err(error) = shared.store.release(via, &key, &terms, &token, false, &nothing).await {
                shared.could_not_release(&key, terms, token);
                return if error.is_outage() { Err(error) } else { Ok(()) };
            }
        }
        Ok(())
    }

    /// The hosts of which the store has not heard all, and what is known of them.
    fn untold(&self) -> Vec<(HostKey, HostTerms, Memory)> {
        let now = self.clock.now();
        let mut hosts = Vec::new();
        for mut shard in self.table.shards() {
            for slot in shard.iter_mut().filter(|slot| slot.remote_ref().is_some()) {
                if slot.remote().take_untold() {
                    let terms = slot.host_terms(&self.config);
                    hosts.extend(slot.memory(now).map(|memory| (slot.key().clone(), terms, memory)));
                }
            }
        }
        hosts
    }

    fn tell_later(&self, key: &HostKey) {
        if let Some(shared) = &self.shared {
            shared.behind.store(true, Ordering::Release);
        }
        let mut shard = self.table.lock(self.table.spot(key));
        if let Some(slot) = shard.get(self.table.spot(key), key) {
            slot.remote().tell_later();
        }
    }

    /// Another process has cleared a host.
    fn cleared(&self, state: &str, clears: u64) {
        let Some(shared) = &self.shared else { return };
        let now = self.clock.now();
        for mut shard in self.table.shards() {
            let mut wakers = Vec::new();
            for slot in shard.iter_mut().filter(|slot| shared.store.state_key(slot.key()) == state) {
                slot.cleared(clears, now, &self.config);
                wakers.extend(slot.wake_head());
            }
            drop(shard);
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
