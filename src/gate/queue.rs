//! Those who wait for one host.

use std::collections::BTreeMap;
use std::mem;
use std::task::Waker;
use std::time::Duration;

use crate::pace::{Forecast, Time};

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
    pub(super) bodies_since: Option<Time>,
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

    pub(super) fn ahead_of(&self, place: Place) -> usize {
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

    /// `admitted`: so many at the head have their permits, and only have to take them.
    pub(super) fn refuse_later(&mut self, mut forecast: Forecast, admitted: usize) -> Vec<Waker> {
        let mut wakers = Vec::new();
        let head = self.waiting.keys().next().copied();
        let refused = &mut self.refused;
        let mut admitted = admitted;
        self.waiting.retain(|place, waiting| {
            if admitted > 0 {
                admitted -= 1;
                return true;
            }
            let in_time = forecast.next <= waiting.deadline;
            if in_time {
                forecast.advance();
            } else {
                wakers.extend(waiting.waker.take());
                refused.insert(*place, (forecast.next, Waiting { waker: None, deadline: waiting.deadline }));
            }
            in_time
        });
        if self.waiting.keys().next().copied() != head {
            wakers.extend(self.wake_head());
        }
        wakers
    }

    /// Those who are about to hear that they are refused have their places back.
    pub(super) fn restore(&mut self) {
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
