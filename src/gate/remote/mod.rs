//! A slot whose host is shared: what the store has said, and what it is to be asked.
//!
//! The slot stays the gate of this process. Its pace is a mirror of the store's; before the head of the queue goes, the
//! store is asked, by one task that ends with the answer. So there is no task per host, and nobody has to be polled for
//! an answer to be taken up: it is left in the slot, and a permit that nobody wants goes back.

mod calls;

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

pub(in crate::gate) use self::calls::{Release, Shared};
use super::clock::Clock;
use super::slot::{Blocked, Paced, Slot};
use crate::config::Config;
use crate::error::Reason;
use crate::hosts::HostSnapshot;
use crate::pace::{Pace, Time};
use crate::shared::{Answer, Handed, HostTerms, Lease, Verdict};

/// How long a ticket holder waits for its turn before it asks whether it has missed it.
const SAFETY: Duration = Duration::from_millis(300);

/// Two clocks that count milliseconds may be apart by this.
const ROUNDING: Duration = Duration::from_millis(2);
/// What the end of a cooldown may be late by, as we know it.
const LATENCY: Duration = Duration::from_millis(100);
/// How long an answer may be under way.
const LATE: Duration = Duration::from_secs(1);

/// What there is to know of a host beyond this process.
#[derive(Debug, Default)]
pub(in crate::gate) struct Remote {
    /// The head's question is under way.
    asking: bool,
    /// It was put before what it depends on was changed here.
    asked_before: bool,
    /// When a permit was handed over while it was, by the server's clock in microseconds; zero is never.
    handed_at: u64,
    /// Leases on their way back.
    releasing: u32,
    /// No send before this, the store says.
    until: Option<(Time, Reason)>,
    /// All permits were taken: not to be asked again before this.
    full_until: Time,
    granted: VecDeque<Grant>,
    /// Granted before the host was held: to be given back.
    useless: Vec<Grant>,
    /// In use, and the store does not know yet.
    unconfirmed: Vec<Box<str>>,
    /// This process stands in the store's queue.
    ticket: bool,
    /// The store has failed: so many of the next admissions are decided here.
    on_our_own: usize,
    /// The store has not heard of what was learnt here.
    untold: bool,
    /// Refusals on their way to the store.
    reporting: u32,
    clears: u64,
    /// The newest answer, by the server's clock in microseconds.
    newest: u64,
    /// Answers from before the last clearing may come until then.
    clearing_until: Time,
    /// How many other processes have been looking for a permit lately.
    others: u32,
}

/// A permit from the store that nobody has taken yet.
#[derive(Debug)]
pub(in crate::gate) struct Grant {
    pub(in crate::gate) lease: Lease,
    /// No send before this.
    at: Time,
    /// To be confirmed before somebody else gets it.
    handed: bool,
}

/// What is left when nobody waits any more, and permits that came too late to be used.
#[derive(Debug, Default)]
pub(in crate::gate) struct Leftovers {
    grants: Vec<Grant>,
    confirm: Vec<Box<str>>,
    ticket: bool,
    /// There is nothing to wait for.
    idle: bool,
}

impl Remote {
    pub(in crate::gate) fn says_nothing(&self, now: Time) -> bool {
        let busy = self.asking
            || self.releasing > 0
            || self.reporting > 0
            || self.ticket
            || self.untold
            || self.on_our_own > 0;
        let kept = self.full_until.max(self.until.map_or(self.full_until, |(until, _)| until)) > now;
        !busy && !kept && self.granted.is_empty() && self.useless.is_empty() && self.unconfirmed.is_empty()
    }

    pub(in crate::gate) fn releasing(&self) -> u32 {
        self.releasing
    }

    /// Until when, by the store's word, and why.
    pub(in crate::gate) fn until(&self) -> Option<(Time, Reason)> {
        self.until
    }

    /// How many permits are there to be taken.
    pub(in crate::gate) fn granted(&self) -> usize {
        self.granted.len()
    }

    /// The store is to be asked anew.
    pub(in crate::gate) fn forget_answer(&mut self) {
        self.asked_before = self.asking;
        self.until = None;
        self.full_until = Time::default();
    }

    /// What the store has said is forgotten with the rest.
    pub(in crate::gate) fn clear(&mut self, now: Time) {
        self.forget_answer();
        self.clearing_until = now.after(LATE);
    }

    fn seek(&mut self, others: u64) {
        self.others = u32::try_from(others).unwrap_or(u32::MAX);
    }

    /// How long to wait before the store is asked again: the longer the more processes do, so that a permit is found as
    /// soon and the store is not asked the more often.
    fn next_look(&self, retry: Duration) -> Duration {
        jittered(retry.saturating_add(retry.saturating_mul(self.others) / 24))
    }

    /// What was learnt here has to be told later.
    pub(in crate::gate) fn tell_later(&mut self) {
        self.untold = true;
    }

    pub(in crate::gate) fn take_untold(&mut self) -> bool {
        mem::take(&mut self.untold)
    }
}

impl Slot {
    /// A permit that the store has given, for the head of the queue; or what is in the way.
    ///
    /// `newcomer`: until when it has time, if it has not asked yet.
    pub(in crate::gate) fn take_grant(
        &mut self,
        now: Time,
        newcomer: Option<Time>,
        fair: bool,
        config: &Config,
    ) -> Result<Grant, Blocked> {
        if self.is_bounded() {
            self.watch(now, config);
        }
        let held = self.next_send_here(now, config);
        let hold_until = self.hold_until();
        // The store may not know of what was sent while it was out of reach. What it does know it has counted in whole
        // milliseconds.
        let own = Some(self.own_limits_until(config)).filter(|own| own.since(now) > ROUNDING).unwrap_or_default();
        let full = self.is_full_at(now, config);
        let remote = self.remote();
        // A send never goes out after a hold that it has not waited for.
        let (waited_for, others) =
            remote.granted.drain(..).partition(|grant| grant.at >= hold_until || hold_until <= now);
        remote.granted = waited_for;
        remote.useless.extend::<VecDeque<_>>(others);
        if let Some(grant) = remote.granted.front() {
            if grant.at.max(own) > now {
                return Err(Blocked::Until(grant.at.max(own)));
            }
            // Invariant: it was there just now.
            if let Some(grant) = remote.granted.pop_front() {
                if grant.handed {
                    remote.unconfirmed.push(grant.lease.token.clone());
                }
                self.take_permit();
                return Ok(grant);
            }
        }
        if remote.asking {
            return Err(Blocked::Asking);
        }
        if full && !self.is_full_of_others(now, config) {
            // For as long as a lease of ours is on its way back: whoever is first in line gets it with that.
            return Err(Blocked::ByPermits);
        }
        let remote = self.remote();
        // Whoever is to be served in turn has to be known to the store, whatever is in the way.
        let stands_in_line = !fair || remote.ticket;
        if stands_in_line && full {
            return Err(Blocked::ByPermits);
        }
        if let (true, Some(until)) = (stands_in_line, held) {
            return Err(Blocked::Until(until));
        }
        // Those who wait look now and then; somebody who has less time than that looks once.
        let looks_once = newcomer.is_some_and(|deadline| fair || deadline < remote.full_until);
        if remote.full_until > now && !looks_once {
            return Err(Blocked::Retry(remote.full_until));
        }
        match remote.until {
            Some((until, _)) if until > now && stands_in_line => Err(Blocked::Until(until)),
            _ => Err(Blocked::Ask),
        }
    }

    /// The store has failed, and whoever waited for its answer is ours to decide.
    pub(in crate::gate) fn is_on_our_own(&self) -> bool {
        self.remote_ref().is_some_and(|remote| remote.on_our_own > 0)
    }

    /// One was admitted here. One that had to wait here would wait for news that only the store has: it asks again.
    pub(in crate::gate) fn decided_on_our_own(&mut self, admitted: bool) {
        if let Some(remote) = self.remote_mut() {
            remote.on_our_own = if admitted { remote.on_our_own.saturating_sub(1) } else { 0 };
        }
    }

    /// The head's question begins: the permits to be confirmed with it.
    pub(in crate::gate) fn begin_ask(&mut self) -> Vec<Box<str>> {
        let remote = self.remote();
        remote.asking = true;
        remote.asked_before = false;
        remote.handed_at = 0;
        mem::take(&mut remote.unconfirmed)
    }

    pub(in crate::gate) fn ask_failed(&mut self) {
        // All of them have waited for this answer.
        let waiting = self.queued().max(1);
        let remote = self.remote();
        remote.asking = false;
        remote.on_our_own = waiting;
    }

    /// The answer to the head's question.
    fn answered(&mut self, answer: &Answer, verdict: Verdict, asked: Asked, now: Time, config: &Config) {
        self.reflect(answer, now, config);
        let outdated = self.is_outdated(answer, now);
        let Asked { token, fair, retry, budget } = asked;
        let concurrency = self.concurrency(config);
        let usable_at = match verdict {
            Verdict::Admitted { at, .. } => self.usable_at(now.after(answer.until(at))),
            _ => now,
        };
        let remote = self.remote();
        remote.asking = false;
        remote.on_our_own = 0;
        remote.until = None;
        // Whoever was handed a permit after this answer has no ticket any more.
        let in_line = fair && remote.handed_at < answer.micros;
        match verdict {
            Verdict::Admitted { at, binding } => {
                remote.ticket = false;
                remote.full_until = Time::default();
                if !fair && answer.in_flight >= concurrency {
                    // That was the last one.
                    remote.full_until = now.after(remote.next_look(retry));
                }
                let lease = Lease { token, at, binding };
                remote.granted.push_back(Grant { lease, at: usable_at, handed: false });
            }
            Verdict::Wait { at, reason } => {
                let wait = answer.until(at);
                remote.ticket = in_line && wait <= budget;
                remote.until = (!outdated && !remote.asked_before).then(|| (now.after(wait), reason));
            }
            Verdict::Claim => {
                remote.ticket = false;
                // Taken up already, as a rule; if not, word of it may be lost.
                let taken_up = remote.handed_at > 0;
                remote.full_until = if taken_up { Time::default() } else { now.after(jittered(retry)) };
            }
            Verdict::Full { others } => {
                remote.ticket = in_line && !budget.is_zero();
                remote.seek(others);
                remote.full_until = match fair {
                    _ if remote.asked_before => Time::default(),
                    false => now.after(remote.next_look(retry)),
                    true if !in_line => Time::default(),
                    true => now.after(jittered(SAFETY)),
                };
            }
        }
    }

    /// A permit that another process has handed to this one.
    fn handed(&mut self, handed: Handed, now: Time, config: &Config) {
        let Handed { lease, answer, .. } = handed;
        self.reflect(&answer, now, config);
        let at = self.usable_at(now.after(answer.until(lease.at)));
        let remote = self.remote();
        remote.ticket = false;
        remote.handed_at = answer.micros;
        remote.full_until = Time::default();
        remote.granted.push_back(Grant { lease, at, handed: true });
    }

    /// No send before this, for reasons that come from outside: a cooldown, or the store's word.
    fn kept_until(&self) -> Time {
        let told = self.remote_ref().and_then(|remote| remote.until).map(|(until, _)| until);
        self.hold_until().max(told.unwrap_or_default())
    }

    /// A refusal is on its way to the store, and has arrived there, or will not.
    pub(in crate::gate) fn begin_report(&mut self) {
        self.remote().reporting += 1;
    }

    fn reported(&mut self) {
        let remote = self.remote();
        remote.reporting = remote.reporting.saturating_sub(1);
    }

    /// A lease is on its way back.
    pub(in crate::gate) fn begin_release(&mut self) {
        self.remote().releasing += 1;
    }

    /// It has arrived, or will not. Where other processes look for a permit it is left to them one time in four: whoever
    /// gives it back knows first that it is free, and would keep it for ever.
    fn released(&mut self, fair: bool) {
        let remote = self.remote();
        remote.releasing = remote.releasing.saturating_sub(1);
        if !fair && (remote.others == 0 || fastrand::u8(..4) > 0) {
            remote.full_until = Time::default();
        }
    }

    /// The pace as all processes know it. What is known here of a cooldown is given up only when the host was cleared: the
    /// store may have lost it.
    fn reflect(&mut self, answer: &Answer, now: Time, config: &Config) {
        if self.is_outdated(answer, now) {
            return;
        }
        let rules = self.rules(config);
        let cleared = answer.clears > self.remote().clears;
        self.remote().clears = answer.clears;
        self.remote().newest = answer.micros;
        if cleared {
            self.clear(now, config);
        }
        let pace = match &answer.pace {
            Some(memory) => Pace::recall(memory, Duration::ZERO, config.pacing, now, &rules),
            None => Pace::begin(config.pacing, now, 0),
        };
        let is_behind = self.remote().untold || self.remote().reporting > 0;
        if answer.pace.is_some() {
            self.watch(now, config);
        }
        match self.paced() {
            // What was learnt here is news to it yet.
            Some(paced) if is_behind => paced.pace.keep_hold(&pace),
            Some(paced) => paced.mirror(pace, now),
            None => {}
        }
    }

    /// When a permit for this instant can be used. The store has minded the cooldown that it knows of, which we may believe to
    /// end later by as long as an answer takes; one that ends later than that it does not know of.
    fn usable_at(&self, at: Time) -> Time {
        let hold_until = self.hold_until();
        if hold_until.since(at) < LATENCY { at.max(hold_until) } else { at }
    }

    fn cleared(&mut self, clears: u64, now: Time, config: &Config) {
        if self.remote_ref().is_none_or(|remote| remote.clears < clears) {
            self.remote().clears = clears;
            self.clear(now, config);
        }
    }

    /// A snapshot of a host as all processes know it, taken with a slot that is nobody's.
    fn seen_by_all(mut self, answer: &Answer, clock: &Clock, config: &Config) -> Option<HostSnapshot> {
        let now = clock.now();
        self.reflect(answer, now, config);
        self.remote().until = Some((now.after(answer.next_send()), answer.reason()));
        (0..answer.in_flight).for_each(|_| self.take_permit());
        self.snapshot(clock, config)
    }

    /// Overtaken by a newer one, or from before the host was cleared. Neither lasts: the server's clock may be set back, and
    /// a store that has lost its data counts anew.
    fn is_outdated(&self, answer: &Answer, now: Time) -> bool {
        let Some(remote) = self.remote_ref() else { return false };
        let overtaken = answer.micros < remote.newest && remote.newest - answer.micros < LATE.as_micros() as u64;
        overtaken || (answer.clears < remote.clears && now < remote.clearing_until)
    }

    /// What is left when the last waiter has gone.
    pub(in crate::gate) fn leftovers(&mut self) -> Leftovers {
        let waited_for = self.queued() > 0;
        let Some(remote) = self.remote_mut() else {
            return Leftovers::default();
        };
        if waited_for {
            return Leftovers { grants: mem::take(&mut remote.useless), ..Leftovers::default() };
        }
        remote.granted.extend(mem::take(&mut remote.useless));
        Leftovers {
            grants: remote.granted.drain(..).collect(),
            confirm: mem::take(&mut remote.unconfirmed),
            ticket: mem::take(&mut remote.ticket),
            idle: !remote.asking,
        }
    }

    /// A permit may be handed to this process.
    fn is_in_line(&self) -> bool {
        self.queued() > 0 || self.remote_ref().is_some_and(|remote| remote.asking || remote.ticket)
    }

    /// What this process brings to a call.
    pub(in crate::gate) fn host_terms(&self, config: &Config) -> HostTerms {
        HostTerms {
            concurrency: self.concurrency(config),
            bounds: self.bounds(config),
            pacing: config.pacing,
            rules: self.rules(config),
        }
    }
}

impl Paced {
    fn mirror(&mut self, mut pace: Pace, now: Time) {
        if self.pace.hold_until() > now {
            pace.keep_hold(&self.pace);
        }
        self.pace = pace;
    }
}

/// What was asked, for understanding the answer.
#[derive(Debug)]
struct Asked {
    token: Box<str>,
    fair: bool,
    retry: Duration,
    budget: Duration,
}

/// Up to a fifth more or less, so that processes which were refused together do not come back together.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(0.8 + 0.4 * fastrand::f64())
}
