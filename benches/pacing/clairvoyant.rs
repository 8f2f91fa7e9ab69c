//! The schedule of a client that knows the provider: every request goes at the first instant at which it is accepted.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::load::Caller;
use crate::provider::Provider;

#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    /// From the beginning to the last answer.
    pub(crate) makespan: Duration,
    /// The longest time between asking and sending.
    pub(crate) longest_wait: Duration,
}

/// Sends what the callers of one host ask for, in the order in which they ask, `in_flight` at a time at most.
///
/// Panics when the provider refuses any of it: then it would be no measure.
pub(crate) fn schedule(provider: &mut Provider, callers: &[Caller], in_flight: usize) -> Schedule {
    let places = in_flight.min(provider.concurrency()).min(callers.len().max(1));
    let mut free: BinaryHeap<_> = std::iter::repeat_n(Reverse(Duration::ZERO), places).collect();
    let mut asking: BinaryHeap<_> =
        callers.iter().enumerate().map(|(n, caller)| Reverse((caller.from, n, caller.requests))).collect();
    let mut last_send = Duration::ZERO;
    let mut schedule = Schedule { makespan: Duration::ZERO, longest_wait: Duration::ZERO };

    while let Some(Reverse((asked, caller, left))) = asking.pop() {
        let Reverse(place) = free.pop().expect("a place is given back before the next one is taken");
        let sent = provider.earliest(asked.max(last_send).max(place));
        let busy = free.iter().filter(|Reverse(until)| *until > sent).count();
        let answer = provider.ask(sent, path(caller, left), busy);
        assert!(answer.status.is_success() || answer.forbidden, "refused at {sent:?} what was to be accepted");

        let answered = sent + answer.latency;
        free.push(Reverse(answered));
        last_send = sent;
        schedule.makespan = schedule.makespan.max(answered);
        schedule.longest_wait = schedule.longest_wait.max(sent - asked);
        if left > 1 {
            asking.push(Reverse((answered, caller, left - 1)));
        }
    }
    schedule
}

/// The path of the request with which a caller has so many left.
pub(crate) fn path(caller: usize, left: usize) -> u64 {
    (caller * 1000 + left) as u64
}
