//! Where a gate that is shared differs from one in process, by design: each rule it concerns, and why. Anything else that
//! differs is a fault.

use tower_host_gate::Queue;

use super::backend::Store;

pub struct Difference {
    pub rule: &'static str,
    on: On,
    pub instead: Instead,
    pub reason: &'static str,
}

enum On {
    Shared,
    SharedWith(Queue),
}

/// What becomes of the rule there.
#[derive(PartialEq)]
pub enum Instead {
    /// It asserts the other behaviour, which is documented.
    Other,
    LeftOut,
}

const ALL: &[Difference] = &[
    Difference {
        rule: "a_delay_from_completion_counts_from_there",
        on: On::Shared,
        instead: Instead::Other,
        reason: "with leases it counts from the send: from completion it would let one request of all processes go at a \
            time, whatever the cap; with spacing only it does count from completion",
    },
    Difference {
        rule: "try_acquire_admits_at_a_free_host",
        on: On::Shared,
        instead: Instead::Other,
        reason: "it cannot wait for the store's answer, so it never admits while the store is up",
    },
    Difference {
        rule: "a_retry_below_the_gate_counts_what_siblings_have_sent",
        on: On::Shared,
        instead: Instead::Other,
        reason: "the second send is recorded in the store, and not asked for: only this process's own quota is checked",
    },
    Difference {
        rule: "a_burst_of_refusals_is_one_event",
        on: On::Shared,
        instead: Instead::Other,
        reason: "one event for the host, and told once by each process that was refused: observers do not wait for the store",
    },
    Difference {
        rule: "first_come_first_served_across_siblings",
        on: On::SharedWith(Queue::Delegate),
        instead: Instead::LeftOut,
        reason: "requests of one process go in their order, processes as they ask; `Queue::Fifo` orders them too",
    },
    Difference {
        rule: "the_estimate_counts_those_ahead_of_the_caller_everywhere",
        on: On::Shared,
        instead: Instead::Other,
        reason: "how many wait in other processes nobody knows: an estimate counts this process's own queue",
    },
];

pub fn of(rule: &str, store: &Store) -> Option<&'static Difference> {
    let Store::Shared { queue, .. } = store else {
        return None;
    };
    ALL.iter().find(|difference| {
        difference.rule == rule
            && match difference.on {
                On::Shared => true,
                On::SharedWith(with) => with == *queue,
            }
    })
}

pub fn rules() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|difference| difference.rule)
}
