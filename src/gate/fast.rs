//! Who the cells of the fast path belong to.
//!
//! A permit must find its cell from wherever it is dropped, and a count of references that all permits share would cost
//! more than the rest of the gate: the cores would pass it to and fro with every request. So cells are never freed. They
//! are lent to a gate with its first request, and go to the next gate once the last handle on this one and all its
//! permits are gone: a process keeps as many as it has had gates at a time.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use http::{HeaderMap, StatusCode};

use super::Gate;
use super::cells::Cells;
use super::permit::Stage;
use super::sync::{Mutex, Ordering, lock};
use crate::config::Config;
use crate::verdict;

#[derive(Debug)]
pub(super) struct FastPath {
    pub(super) cells: Cells,
    /// See [`Judging`]: so much of its gate's configuration that an ordinary response need not ask the gate.
    judging: AtomicU8,
    owner: Mutex<Owner>,
}

#[derive(Debug, Default)]
struct Owner {
    /// `None` between two gates.
    gate: Option<Arc<Gate>>,
    /// Nobody can ask for a permit any more.
    closed: bool,
}

/// What responses are judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judging {
    /// The gate does it.
    Gate,
    /// Nothing else matters.
    Status,
    StatusAndQuota,
}

impl Judging {
    fn of(config: &Config) -> Self {
        if config.verdict.is_some() || config.final_uri.is_some() {
            Self::Gate
        } else if config.reads_quota() {
            Self::StatusAndQuota
        } else {
            Self::Status
        }
    }
}

impl FastPath {
    pub(super) fn lend(gate: Arc<Gate>) -> &'static Self {
        let fast = pool::take().unwrap_or_else(|| {
            Box::leak(Box::new(Self { cells: Cells::new(), judging: AtomicU8::new(0), owner: Mutex::default() }))
        });
        fast.judging.store(Judging::of(&gate.config) as u8, Ordering::Relaxed);
        *lock(&fast.owner) = Owner { gate: Some(gate), closed: false };
        fast
    }

    /// The gate of whoever holds a permit of these cells.
    pub(super) fn gate(&self) -> Option<Arc<Gate>> {
        lock(&self.owner).gate.clone()
    }

    /// The last handle on the gate is gone, and no cell is fast any more.
    pub(super) fn close(&'static self) {
        lock(&self.owner).closed = true;
        self.end_if_over();
    }

    /// For whoever has given a permit back to a slow cell.
    pub(super) fn end_if_over(&'static self) {
        let mut owner = lock(&self.owner);
        if !owner.closed || self.cells.places().any(|place| self.cells.is_taken(place)) {
            return;
        }
        // From here on nobody has a way to these cells.
        let gate = std::mem::take(&mut *owner).gate;
        drop(owner);
        if gate.is_some() {
            self.cells.reset();
            pool::put(self);
        }
        // What a gate drops may be anybody's code, and may drop another gate: no lock is held here.
    }

    #[inline]
    pub(super) fn give_back(&'static self, place: usize, stage: Stage) {
        if !self.cells.give_back(place, stage == Stage::Body) {
            self.give_back_slowly(place, stage);
        }
    }

    #[cold]
    fn give_back_slowly(&'static self, place: usize, stage: Stage) {
        // The gate is there, since this permit is out.
        if let Some(gate) = self.gate() {
            gate.take_back(self, place, stage);
        }
    }

    #[inline]
    pub(super) fn head_arrived(&'static self, place: usize) {
        if !self.cells.head_arrived(place) {
            self.head_arrived_slowly(place);
        }
    }

    #[cold]
    fn head_arrived_slowly(&'static self, place: usize) {
        if let Some(gate) = self.gate() {
            gate.body_begins(self, place);
        }
    }

    /// Whether a response says nothing that the gate would want to know. Its host has neither refused nor been waited for
    /// when the request went out, so a success says nothing either.
    #[inline]
    pub(super) fn says_nothing(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        const BY_STATUS: u8 = Judging::Status as u8;
        const BY_STATUS_AND_QUOTA: u8 = Judging::StatusAndQuota as u8;
        !verdict::may_be_no_success(status)
            && match self.judging.load(Ordering::Relaxed) {
                BY_STATUS => true,
                BY_STATUS_AND_QUOTA => headers.is_empty() || !verdict::mentions_quota(headers),
                _ => false,
            }
    }
}

/// The cells that no gate has.
#[cfg(not(host_gate_loom))]
mod pool {
    use super::super::sync::{Mutex, lock};
    use super::FastPath;

    static FREE: Mutex<Vec<&'static FastPath>> = Mutex::new(Vec::new());

    pub(super) fn take() -> Option<&'static FastPath> {
        lock(&FREE).pop()
    }

    pub(super) fn put(fast: &'static FastPath) {
        lock(&FREE).push(fast);
    }
}

/// The same for each run of a model checker.
#[cfg(host_gate_loom)]
mod pool {
    use super::super::sync::{Mutex, lock};
    use super::FastPath;

    loom::lazy_static! {
        static ref FREE: Mutex<Vec<&'static FastPath>> = Mutex::default();
    }

    pub(super) fn take() -> Option<&'static FastPath> {
        lock(&FREE).pop()
    }

    pub(super) fn put(fast: &'static FastPath) {
        lock(&FREE).push(fast);
    }
}
