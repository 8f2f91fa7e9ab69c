//! The fast path: healthy hosts with nobody waiting, in cells of one word each.
//!
//! A host's hash picks its cell. While the cell is *fast*, a request takes a permit with one compare-and-swap and gives it
//! back with another: no lock, no clock, no allocation, and a host that nobody asks just now holds no memory. As soon as
//! there is more to say of a host (somebody waits, it has refused, it is limited beforehand, or another host wants the
//! same cell) it gets a [`Slot`](super::slot::Slot) in the locked [`Table`](super::table::Table), and its cell turns
//! *slow*. When the last slot of a cell goes, the cell is fast again.
//!
//! ```text
//!   63                  18  17    16    15      8 7      0
//!  | hash of the occupant |slow|claim| bodies    | permits |
//! ```
//!
//! * **The occupant** is the host whose requests the permits of a cell belong to. It stays when they are all back, so the
//!   next request need not claim the cell, and goes when another host claims it. Its name stands beside the word, because
//!   a permit and a snapshot have to say whose they are.
//! * **Slow** is set and taken back under the lock of the cell's shard only. While it is set no permit is taken here, and
//!   those that were taken before go back under that lock. The slot of their host has *adopted* them: it counts them as
//!   its own.
//! * **Claim** is set while the claimer of a cell writes down who it is. Nobody takes a permit then, but one may be turned
//!   slow.
//!
//! # Whose host is it?
//!
//! Two hosts share permits only if the cell and 45 more bits of their hashes agree, which among a million hosts any two do
//! with a chance below four in a million. Then they share permits and nothing else: what is learnt of a host is kept in its
//! slot, under its whole key.
//!
//! # Ordering
//!
//! Giving back *releases* and taking *acquires*, so whoever takes a permit sees what its last holder has done. What a
//! claimer writes is released when the claim ends. Claims and [`stop`](Cells::stop) are sequentially consistent: whoever
//! changes a host's limits either sees the claim or is seen by the claimer.

use super::name::{Name, Shape, WORDS, Words};
use super::sync::{AtomicU32, AtomicU64, Ordering, yield_now};
use crate::host::HostKey;

/// So many that it hardly matters if two of the hosts in flight want the same one: half a MiB.
#[cfg(not(any(test, host_gate_loom)))]
const CELLS: usize = 4096;
/// So few that they do.
#[cfg(all(test, not(host_gate_loom)))]
const CELLS: usize = 2;
#[cfg(host_gate_loom)]
const CELLS: usize = 1;

const PERMIT: u64 = 1;
const PERMITS: u64 = 0xff;
const BODY: u64 = 1 << 8;
const BODIES: u64 = 0xff << 8;
const CLAIM: u64 = 1 << 16;
const SLOW: u64 = 1 << 17;
/// The part of the hash that tells the occupant.
const OCCUPANT: u64 = !0 << 18;

/// More at a time than a cell can count go through the slot.
pub(super) const MOST: usize = PERMITS as usize;

#[derive(Debug)]
pub(super) struct Cells {
    cells: Box<[Cell; CELLS]>,
}

/// On a cache line of its own, but for the end of a long name, so that two cores do not want the same one.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Cell {
    state: AtomicU64,
    /// Slots whose hosts belong here. Changed under the shard's lock only.
    slots: AtomicU32,
    /// Of the occupant: [`Shape`] and [`Rights`].
    about: AtomicU32,
    words: [AtomicU64; WORDS],
}

/// Where a host belongs, from its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) hash: u64,
}

/// What a cell knows of the hash of the host that its permits belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Occupant(u64);

/// What the occupant of a cell may do without its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rights {
    /// So many requests at a time; 0 sends them all to the slot.
    pub(super) permits: u8,
    /// They give their permits back with the response head.
    pub(super) until_head: bool,
}

#[derive(Debug)]
pub(super) enum Taken {
    Permit(Rights),
    /// The slot has to be asked.
    Slow,
    /// The same, and it has adopted a permit that it is to take back.
    Owed,
}

/// Permits that were taken in a cell and are still out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Out {
    pub(super) permits: u32,
    pub(super) bodies: u32,
}

impl Spot {
    #[inline]
    pub(super) fn place(self) -> usize {
        // The high bits pick the cell, the low ones tell the occupant.
        (((self.hash >> 32) * CELLS as u64) >> 32) as usize
    }

    #[inline]
    pub(super) fn occupant(self) -> Occupant {
        // Never that of an empty cell.
        Occupant(self.hash << 18 | 1 << 18)
    }
}

impl Occupant {
    /// For the slots' table: equal for all hosts that a cell cannot tell apart.
    #[inline]
    pub(super) fn hash(self) -> u64 {
        self.0 | self.0 >> 46
    }
}

impl Out {
    fn of(state: u64) -> Self {
        Self { permits: (state & PERMITS) as u32, bodies: ((state & BODIES) >> 8) as u32 }
    }
}

impl Rights {
    #[inline]
    fn with(self, shape: Shape) -> u32 {
        u32::from_le_bytes([self.permits, u8::from(self.until_head), shape.len, shape.port])
    }

    #[inline]
    fn read(about: u32) -> (Self, Shape) {
        let [permits, until_head, len, port] = about.to_le_bytes();
        (Self { permits, until_head: until_head != 0 }, Shape { len, port })
    }
}

impl Cells {
    pub(super) fn new() -> Self {
        let cells: Box<[Cell]> = (0..CELLS).map(|_| Cell::default()).collect();
        let Ok(cells) = cells.try_into() else { unreachable!("as many as were made") };
        Self { cells }
    }

    pub(super) fn places(&self) -> std::ops::Range<usize> {
        0..self.cells.len()
    }

    #[inline]
    fn cell(&self, place: usize) -> &Cell {
        &self.cells[place]
    }

    // --- without the lock -----------------------------------------------------------------------------------------

    /// A permit, if one can be had here. A host that is not the occupant becomes it, if nothing of the old one is out;
    /// then its `rights` are asked for.
    #[inline]
    pub(super) fn take(&self, spot: Spot, name: Name<'_>, rights: impl FnOnce() -> Rights) -> Taken {
        let cell = self.cell(spot.place());
        let mut state = cell.state.load(Ordering::Acquire);
        loop {
            if state & !(PERMITS | BODIES) == spot.occupant().0 {
                let about = cell.about.load(Ordering::Relaxed);
                let (rights, _) = Rights::read(about);
                if state & PERMITS >= u64::from(rights.permits) {
                    return Taken::Slow;
                }
                match cell.state.compare_exchange_weak(state, state + PERMIT, Ordering::Acquire, Ordering::Acquire) {
                    // Between the look at the word and its change, another host may have come and gone. With a permit in hand
                    // the rights can be read for certain.
                    Ok(_) if cell.about.load(Ordering::Relaxed) == about => return Taken::Permit(rights),
                    Ok(_) if self.give_back(spot.place(), false) => state = cell.state.load(Ordering::Acquire),
                    Ok(_) => return Taken::Owed,
                    Err(now) => state = now,
                }
            } else if state & (PERMITS | CLAIM | SLOW) == 0 {
                let Some(shape) = name.shape() else { return Taken::Slow };
                let claimed = spot.occupant().0 | CLAIM | PERMIT;
                match cell.state.compare_exchange(state, claimed, Ordering::SeqCst, Ordering::Acquire) {
                    Ok(_) => return self.claim(cell, spot, name, shape, rights()),
                    Err(now) => state = now,
                }
            } else {
                return Taken::Slow;
            }
        }
    }

    #[inline]
    fn claim(&self, cell: &Cell, spot: Spot, name: Name<'_>, shape: Shape, rights: Rights) -> Taken {
        cell.about.store(rights.with(shape), Ordering::Relaxed);
        name.each_word(|place, word| cell.words[place].store(word, Ordering::Relaxed));
        cell.state.fetch_and(!CLAIM, Ordering::SeqCst);
        if rights.permits > 0 {
            return Taken::Permit(rights);
        }
        // A host that always goes through its slot. The cell remembers that.
        if self.give_back(spot.place(), false) { Taken::Slow } else { Taken::Owed }
    }

    /// False if that is for the slot to do: the cell is slow.
    #[inline]
    #[must_use]
    pub(super) fn give_back(&self, place: usize, body: bool) -> bool {
        self.change(place, |state| state - PERMIT - if body { BODY } else { 0 })
    }

    /// The response head of a permit's request has arrived. False as for [`give_back`](Self::give_back).
    #[inline]
    #[must_use]
    pub(super) fn head_arrived(&self, place: usize) -> bool {
        self.change(place, |state| state + BODY)
    }

    #[inline]
    fn change(&self, place: usize, change: impl Fn(u64) -> u64) -> bool {
        let state = &self.cell(place).state;
        let mut old = state.load(Ordering::Relaxed);
        while old & SLOW == 0 {
            match state.compare_exchange_weak(old, change(old), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
        false
    }

    #[inline]
    pub(super) fn is_slow(&self, place: usize) -> bool {
        self.cell(place).state.load(Ordering::Acquire) & SLOW != 0
    }

    /// The occupant's key, for whoever has a permit of it: then it is written down, and stays.
    pub(super) fn key(&self, place: usize) -> HostKey {
        let cell = self.cell(place);
        let words: Words = std::array::from_fn(|word| cell.words[word].load(Ordering::Relaxed));
        let (_, shape) = Rights::read(cell.about.load(Ordering::Relaxed));
        shape.key(&words)
    }

    // --- under the lock of the cell's shard -----------------------------------------------------------------------

    /// A slot of this host has been made. The permits that are out, if they are this host's as far as a cell can tell.
    pub(super) fn slot_made(&self, spot: Spot) -> Out {
        let cell = self.cell(spot.place());
        cell.slots.fetch_add(1, Ordering::Relaxed);
        let state = cell.state.fetch_or(SLOW, Ordering::AcqRel);
        if state & OCCUPANT == spot.occupant().0 { Out::of(state) } else { Out::default() }
    }

    pub(super) fn slot_gone(&self, spot: Spot) {
        self.cell(spot.place()).slots.fetch_sub(1, Ordering::Relaxed);
        self.go_on(spot.place());
    }

    /// A permit goes back. Whose it was, for the slot that has adopted it if the cell is slow.
    pub(super) fn given_back(&self, place: usize, body: bool) -> Occupant {
        let less = PERMIT + if body { BODY } else { 0 };
        Occupant(self.cell(place).state.fetch_sub(less, Ordering::AcqRel) & OCCUPANT)
    }

    /// The same for a head that has arrived.
    pub(super) fn body_begun(&self, place: usize) -> Occupant {
        Occupant(self.cell(place).state.fetch_add(BODY, Ordering::AcqRel) & OCCUPANT)
    }

    /// Turns a cell slow until [`go_on`](Self::go_on), and says whose permits are out.
    pub(super) fn stop(&self, place: usize) -> Option<(HostKey, Out)> {
        let state = &self.cell(place).state;
        let mut now = state.fetch_or(SLOW, Ordering::SeqCst);
        while now & CLAIM != 0 {
            // The claimer waits for none of the locks held here. At most it looks limits up.
            yield_now();
            now = state.load(Ordering::SeqCst);
        }
        (now & PERMITS != 0).then(|| (self.key(place), Out::of(now)))
    }

    /// Turns a cell fast that no slot needs slow. Then it has no occupant, unless permits are out: whoever comes next asks
    /// for the rights anew.
    pub(super) fn go_on(&self, place: usize) {
        let cell = self.cell(place);
        if cell.slots.load(Ordering::Relaxed) > 0 {
            return;
        }
        let state = cell.state.load(Ordering::Acquire);
        if state & (PERMITS | CLAIM) == 0 {
            // While a cell is slow nobody else changes it, but for a claimer.
            cell.state.store(0, Ordering::Release);
        } else {
            cell.state.fetch_and(!SLOW, Ordering::AcqRel);
        }
    }

    pub(super) fn occupant(&self, place: usize) -> Occupant {
        Occupant(self.cell(place).state.load(Ordering::Acquire) & OCCUPANT)
    }

    /// The permits of a host that are out, as far as a cell can tell.
    pub(super) fn out(&self, spot: Spot) -> Out {
        let state = self.cell(spot.place()).state.load(Ordering::Acquire);
        if state & OCCUPANT == spot.occupant().0 { Out::of(state) } else { Out::default() }
    }

    /// For another gate.
    pub(super) fn reset(&self) {
        for cell in self.cells.iter() {
            cell.slots.store(0, Ordering::Relaxed);
            cell.state.store(0, Ordering::Release);
        }
    }

    /// Whether a permit is out.
    pub(super) fn is_taken(&self, place: usize) -> bool {
        self.cell(place).state.load(Ordering::Acquire) & PERMITS != 0
    }
}
