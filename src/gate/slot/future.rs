//! What is known of a host's future, and what is said of it: estimates, sheds, snapshots, and what outlives the process.

use std::task::Waker;
use std::time::Duration;

use super::{Outlook, Slot};
use crate::config::Config;
use crate::error::{Details, RateLimited, Reason};
use crate::gate::clock::Clock;
use crate::gate::queue::Place;
use crate::hosts::HostSnapshot;
use crate::pace::{Bounds, DelayFrom, Forecast, Memory, Pace, Time};

impl Slot {
    // --- beyond the life of the process ---------------------------------------------------------------------------

    /// The last recorded send to a host that is kept for nothing but what was learnt of it: unused, and nothing that keeps
    /// a request from going is live.
    pub(in crate::gate) fn forgettable_since(&self, now: Time, config: &Config) -> Option<Time> {
        let paced = self.paced.as_ref().filter(|_| self.is_unused())?;
        let bounds = self.bounds(config);
        let live = paced.ready(&bounds).max(paced.pace.warm_until()) > now || !paced.proactive.is_idle(now, &bounds);
        (!live).then(|| paced.pace.last_send())
    }

    /// What there is to keep of the host.
    pub(in crate::gate) fn memory(&self, now: Time) -> Option<Memory> {
        let pace = &self.paced.as_ref()?.pace;
        (!pace.is_cold(now)).then(|| pace.remember(now))
    }

    /// Takes up what was kept, if by now it says anything. What is known already is known better.
    pub(in crate::gate) fn recall(&mut self, memory: &Memory, age: Duration, now: Time, config: &Config) -> bool {
        let rules = self.rules(config);
        let pace = Pace::recall(memory, age, config.pacing, now, &rules);
        if pace.is_cold(now) {
            return false;
        }
        let known = &mut self.watch(now, config).pace;
        if known.is_cold(now) {
            *known = pace;
        } else if pace.hold_until() > known.hold_until() {
            known.penalize(now, pace.hold_until().since(now), &rules);
        }
        true
    }

    // --- the future, as far as it is known ------------------------------------------------------------------------

    /// When a request with `ahead` others in front of it would go, as far as pacing decides.
    pub(in crate::gate) fn estimate(&self, now: Time, ahead: usize, config: &Config) -> Time {
        self.forecast(now, ahead, config).behind(ahead)
    }

    /// The same for one that is waiting already.
    pub(in crate::gate) fn estimate_at(&self, now: Time, place: Place, config: &Config) -> Time {
        if self.paced.is_some() { self.estimate(now, self.ahead_of(place), config) } else { now }
    }

    pub(in crate::gate) fn ahead_of(&self, place: Place) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.ahead_of(place))
    }

    /// Forgets what the host has said and taught; what the user has set keeps counting. Whoever was put past the budget
    /// has got the place back.
    pub(in crate::gate) fn clear(&mut self, now: Time, config: &Config) {
        match self.paced.take() {
            Some(paced) if self.bounded => self.watch(now, config).proactive = paced.proactive,
            _ => {}
        }
        if let Some(queue) = &mut self.queue {
            queue.restore();
        }
        #[cfg(feature = "redis")]
        if let Some(remote) = &mut self.remote {
            remote.clear(now);
        }
    }

    /// Good for `ahead` requests and one more.
    fn forecast(&self, now: Time, ahead: usize, config: &Config) -> Forecast {
        self.forecast_within(now, ahead, &self.bounds(config), config)
    }

    fn forecast_within(&self, now: Time, ahead: usize, bounds: &Bounds, config: &Config) -> Forecast {
        let others = self.kept_by_others().map_or(now, |(until, _)| until.max(now));
        let Some(paced) = &self.paced else {
            return Forecast::at_once(others);
        };
        let mut first = paced.due(bounds).max(others);
        if bounds.delay_from == DelayFrom::Completion && self.is_full_at(now, config) {
            // Whenever the permit comes back, a whole delay follows.
            first = first.max(now.after(bounds.min_delay));
        }
        let step = paced.pace.spacing(first, &self.rules(config));
        // The last send that anybody has to keep a distance to goes before the host is cold; a learned gap is never.
        let last = if paced.pace.gap().is_zero() { paced.pace.warm_until().after(step) } else { Time::END };
        Forecast::new(first, step, last, bounds, &paced.proactive, ahead).in_bursts(paced.pace.burst())
    }

    /// Marks the waiters that the pace of the host puts past their budget, and wakes them.
    pub(in crate::gate) fn refuse_hopeless(&mut self, now: Time, config: &Config) -> Vec<Waker> {
        let forecast = self.forecast(now, self.queued(), config);
        #[cfg(feature = "redis")]
        let admitted = self.remote.as_ref().map_or(0, |remote| remote.granted());
        #[cfg(not(feature = "redis"))]
        let admitted = 0;
        self.queue.as_mut().map(|queue| queue.refuse_later(forecast, admitted)).unwrap_or_default()
    }

    /// The error for a request that will not be admitted within its budget.
    pub(in crate::gate) fn shed(&self, full: bool, outlook: Outlook, config: &Config) -> RateLimited {
        let Outlook { now, estimate, deadline, ahead } = outlook;
        let reason = if full {
            Reason::QueueFull
        } else if self.paced.as_ref().is_some_and(|paced| paced.pace.hold_until() > deadline) {
            Reason::Cooldown
        } else if let Some((_, reason)) = self.kept_by_others().filter(|(until, _)| *until > deadline) {
            reason
        } else if now >= deadline && self.is_full_at(now, config) {
            Reason::InFlight
        } else if estimate > deadline.max(now) {
            let unlimited = Bounds { quota: Bounds::default().quota, ..self.bounds(config) };
            let by_spacing = self.forecast_within(now, ahead, &unlimited, config).behind(ahead);
            if by_spacing < estimate { Reason::Quota } else { Reason::Spacing }
        } else {
            Reason::InFlight
        };
        let wait = match reason {
            Reason::InFlight | Reason::QueueFull => estimate.since(now).max(Duration::from_secs(1)),
            Reason::Cooldown | Reason::Spacing | Reason::Quota => estimate.since(now),
        };
        let paced = self.paced.as_deref();
        RateLimited::from(Details {
            host: self.key.clone(),
            retry_after: ceil_to_millis(wait),
            reason,
            refusal: paced.and_then(|paced| paced.last.clone()),
            streak: paced.map_or(0, |paced| paced.streak(now)),
            throttled_since: paced.filter(|paced| paced.streak(now) > 0).and_then(|paced| paced.since),
        })
    }

    fn kept_by(&self, now: Time, config: &Config) -> Option<Reason> {
        let bounds = self.bounds(config);
        let paced = self.paced.as_deref();
        if paced.is_some_and(|paced| paced.pace.hold_until() > now) {
            Some(Reason::Cooldown)
        } else if self.is_full_at(now, config) {
            Some(Reason::InFlight)
        } else if paced.is_some_and(|paced| paced.proactive.quota_until(&bounds) > now) {
            Some(Reason::Quota)
        } else if let Some((_, reason)) = self.kept_by_others().filter(|(until, _)| *until > now) {
            Some(reason)
        } else if paced.is_some_and(|paced| self.next_send(paced, now, &bounds) > now) {
            Some(Reason::Spacing)
        } else if self.unsent > 0 || self.queued() > 0 {
            Some(Reason::InFlight)
        } else {
            None
        }
    }

    pub(in crate::gate) fn snapshot(&self, clock: &Clock, config: &Config) -> Option<HostSnapshot> {
        let now = clock.now();
        if self.says_nothing(|| now, config) {
            return None;
        }
        let bounds = self.bounds(config);
        let paced = self.paced.as_deref().filter(|paced| self.queued() > 0 || !paced.says_nothing(now, &bounds));
        let last = paced.and_then(|paced| paced.last.as_ref());
        let others = self.kept_by_others().map_or(now, |(until, _)| until);
        let (too_short, known_good) = paced.map(|paced| paced.pace.bracket()).unwrap_or_default();
        Some(HostSnapshot {
            host: self.key.clone(),
            in_flight: self.in_flight(),
            queued: self.queued(),
            cooldown: paced.map_or(Duration::ZERO, |paced| paced.pace.hold_until().since(now)),
            next_send: paced.map_or(now, |paced| self.next_send(paced, now, &bounds)).max(others).since(now),
            reason: self.kept_by(now, config),
            warm: paced.map_or(Duration::ZERO, |paced| paced.pace.warm_until().since(now)),
            gap: paced.map_or(Duration::ZERO, |paced| paced.pace.gap()),
            too_short,
            known_good,
            streak: paced.map_or(0, |paced| paced.streak(now)),
            last_hint: last.and_then(|last| last.asked).unwrap_or_default(),
            last_status: last.map(|last| last.status),
        })
    }
}

fn ceil_to_millis(duration: Duration) -> Duration {
    let below = Duration::from_nanos(u64::from(duration.subsec_nanos() % 1_000_000));
    if below.is_zero() { duration } else { duration.saturating_add(Duration::from_millis(1) - below) }
}
