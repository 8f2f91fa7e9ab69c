//! The hosts that have something to say, in sharded locks.
//!
//! Keys come from strangers, so the hash is seeded, at random: that stops whoever cannot time us. A lock is held for a handful of instructions, never across
//! an await: no function in this crate is `async` while it holds one.

use std::sync::{OnceLock, Weak};
use std::time::Duration;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::Gate;
use super::cells::{Occupant, Out, Spot};
use super::clock::Clock;
use super::fast::FastPath;
use super::name::Name;
use super::slot::Slot;
use super::sync::{Mutex, MutexGuard, lock};
use crate::config::Config;
use crate::host::HostKey;
use crate::pace::Time;

#[cfg(not(host_gate_loom))]
const SHARDS: usize = 16;
#[cfg(host_gate_loom)]
const SHARDS: usize = 1;
/// How long a host that has gone cold may be remembered for nothing.
const SWEEP_EVERY: Duration = Duration::from_secs(10);
/// How many slots a shard may hold for nothing, until somebody looks.
const ROOM: usize = 8;

#[derive(Debug)]
pub(super) struct Table {
    seed: DefaultHashBuilder,
    shards: [Mutex<Shard>; SHARDS],
    /// When to look for hosts beyond `max_hosts` again.
    forget_at: Mutex<Time>,
    /// The gate, if it has a fast path.
    gate: Option<Weak<Gate>>,
    fast: OnceLock<Option<&'static FastPath>>,
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    slots: HashTable<Slot>,
    next_number: u64,
    sweep_at: Time,
    /// How many slots the last look at all of them has left.
    kept: usize,
    /// How often a slot has come out of use since then.
    unused: usize,
    /// The gate is closed: its cells stay slow, and may soon be another gate's.
    detached: bool,
}

/// Finds a slot again without its key.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotId {
    pub(super) spot: Spot,
    /// Never given twice, so a slot with this number is the one it was given for.
    number: u64,
    /// Where the slot was; it may have moved.
    bucket: usize,
}

impl SlotId {
    /// Without its place.
    pub(super) fn of(slot: &Slot) -> Self {
        Self { spot: slot.spot(), number: slot.number(), bucket: usize::MAX }
    }
}

/// Which cells to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    InFlight,
    All,
}

impl Table {
    /// With the gate, if it has a fast path.
    pub(super) fn new(gate: Option<Weak<Gate>>) -> Self {
        Self {
            seed: DefaultHashBuilder::default(),
            shards: std::array::from_fn(|_| Mutex::new(Shard::default())),
            forget_at: Mutex::new(Time::default()),
            gate,
            fast: OnceLock::new(),
        }
    }

    /// The fast path, if a request has come yet.
    #[inline]
    pub(super) fn fast_in_use(&self) -> Option<&'static FastPath> {
        self.fast.get().copied().flatten()
    }

    /// The fast path, if this gate has one.
    #[inline]
    pub(super) fn fast(&self) -> Option<&'static FastPath> {
        *self.fast.get_or_init(|| self.gate.as_ref()?.upgrade().map(FastPath::lend))
    }

    /// The fast path, if it is in use; from here on it can no longer come into use.
    pub(super) fn fast_at_the_end(&self) -> Option<&'static FastPath> {
        *self.fast.get_or_init(|| None)
    }

    #[inline]
    pub(super) fn spot_of(&self, name: Name<'_>) -> Spot {
        Spot { hash: name.hash(&self.seed) }
    }

    #[inline]
    pub(super) fn spot(&self, key: &HostKey) -> Spot {
        self.spot_of(Name::of(key))
    }

    /// The shard of the hosts that belong here.
    #[inline]
    pub(super) fn lock(&self, spot: Spot) -> MutexGuard<'_, Shard> {
        self.lock_place(spot.place())
    }

    /// The shard of the hosts that belong to this cell.
    #[inline]
    pub(super) fn lock_place(&self, place: usize) -> MutexGuard<'_, Shard> {
        lock(&self.shards[place % SHARDS])
    }

    /// Every shard in turn.
    pub(super) fn shards(&self) -> impl Iterator<Item = MutexGuard<'_, Shard>> {
        self.shards.iter().map(lock)
    }

    /// The slot of this key, made by `make` out of its number when there is none.
    pub(super) fn slot<'a>(
        &self,
        shard: &'a mut Shard,
        spot: Spot,
        key: &HostKey,
        make: impl FnOnce(u64) -> Slot,
    ) -> (SlotId, &'a mut Slot) {
        let found = shard.slots.find_bucket_index(spot.occupant().hash(), |slot| slot.key() == key);
        let bucket = found.unwrap_or_else(|| self.insert(shard, spot, make));
        // Invariant: it was found, or put there, just now.
        let Some(slot) = shard.slots.get_bucket_mut(bucket) else { unreachable!("a slot in its bucket") };
        (SlotId { spot, number: slot.number(), bucket }, slot)
    }

    fn insert(&self, shard: &mut Shard, spot: Spot, make: impl FnOnce(u64) -> Slot) -> usize {
        shard.next_number += 1;
        let mut slot = make(shard.next_number);
        if let Some(fast) = self.fast().filter(|_| !shard.detached) {
            let out = fast.cells.slot_made(spot);
            // Two hosts that a cell cannot tell apart: the first one has them all.
            if shard.adopter(spot.place(), spot.occupant()).is_none() {
                slot.adopt(out);
            }
        }
        shard.slots.insert_unique(spot.occupant().hash(), slot, |slot| slot.spot().occupant().hash()).bucket_index()
    }

    /// Drops a slot that says nothing.
    pub(super) fn remove(&self, shard: &mut Shard, id: SlotId) {
        if let Ok(entry) = shard.slots.find_entry(id.spot.occupant().hash(), |slot| slot.number() == id.number) {
            entry.remove();
            self.gone(shard.detached, id.spot);
            shard.make_smaller();
        }
    }

    fn gone(&self, detached: bool, spot: Spot) {
        if let Some(fast) = self.fast_in_use().filter(|_| !detached) {
            fast.cells.slot_gone(spot);
        }
    }

    /// The hosts with permits out that have no slot, of the `nth` shard. [`Sight::All`] makes the others be claimed anew.
    pub(super) fn each_without_slot(
        &self,
        shard: &mut Shard,
        nth: usize,
        sight: Sight,
        mut visit: impl FnMut(&mut Shard, HostKey, Out),
    ) {
        let Some(fast) = self.fast_in_use().filter(|_| !shard.detached) else { return };
        for place in fast.cells.places().skip(nth).step_by(SHARDS) {
            if sight == Sight::InFlight && !fast.cells.is_taken(place) {
                continue;
            }
            if let Some((key, out)) = fast.cells.stop(place) {
                if shard.adopter(place, self.spot(&key).occupant()).is_none() {
                    visit(shard, key, out);
                }
            }
            fast.cells.go_on(place);
        }
    }

    /// Drops the hosts of a shard that have gone cold since anybody looked. Called by whoever has read the clock anyway.
    pub(super) fn sweep(&self, shard: &mut Shard, now: Time, config: &Config) {
        if now >= shard.sweep_at {
            self.drop_silent(shard, || now, config);
            shard.sweep_at = now.after(SWEEP_EVERY);
        }
    }

    /// A slot has come out of use. Once that has happened as often as the last look has left slots, those that say nothing
    /// are dropped: so each costs two looks at most, and no more are kept than twice those that say something, or
    /// [`ROOM`]. The clock is read only if some host is being paced.
    #[inline]
    pub(super) fn tidy(&self, shard: &mut Shard, clock: &Clock, config: &Config) {
        shard.unused += 1;
        if shard.unused >= shard.kept.max(ROOM) {
            let mut now = None;
            self.drop_silent(shard, || *now.get_or_insert_with(|| clock.now()), config);
        }
    }

    fn drop_silent(&self, shard: &mut Shard, mut now: impl FnMut() -> Time, config: &Config) {
        self.retain(shard, |slot| !slot.says_nothing(&mut now, config));
    }

    fn retain(&self, shard: &mut Shard, mut keep: impl FnMut(&Slot) -> bool) {
        let detached = shard.detached;
        shard.slots.retain(|slot| {
            let kept = keep(slot);
            if !kept {
                self.gone(detached, slot.spot());
            }
            kept
        });
        (shard.kept, shard.unused) = (shard.slots.len(), 0);
        shard.make_smaller();
    }

    /// [`forget`](Self::forget), for where a host is learnt of: beyond the bound there are only those of the last ten
    /// seconds, and those that were held or warm when it was looked last.
    pub(super) fn forget_now_and_then(&self, now: Time, config: &Config) {
        let mut at = lock(&self.forget_at);
        if now >= *at {
            *at = now.after(SWEEP_EVERY);
            drop(at);
            self.forget(now, config);
        }
    }

    /// Of the hosts that are kept for nothing but what was learnt, drops those beyond `max_hosts` that have not been used
    /// for longest. Never holds two locks at a time: a host that comes into use in between stays.
    pub(super) fn forget(&self, now: Time, config: &Config) {
        let known: usize = self.shards().map(|shard| shard.slots.len()).sum();
        if known <= config.max_hosts {
            return;
        }
        // In the order in which they are to go.
        let rank = |nth: usize, slot: &Slot| Some((slot.forgettable_since(now, config)?, nth, slot.number()));
        let mut ranks = Vec::new();
        for (nth, shard) in self.shards().enumerate() {
            ranks.extend(shard.slots.iter().filter_map(|slot| rank(nth, slot)));
        }
        let Some(last) = ranks.len().checked_sub(config.max_hosts + 1) else {
            return;
        };
        let (_, &mut last, _) = ranks.select_nth_unstable(last);
        for (nth, mut shard) in self.shards().enumerate() {
            self.retain(&mut shard, |slot| rank(nth, slot).is_none_or(|rank| rank > last));
        }
    }
}

impl Shard {
    pub(super) fn get(&mut self, spot: Spot, key: &HostKey) -> Option<&mut Slot> {
        self.slots.find_mut(spot.occupant().hash(), |slot| slot.key() == key)
    }

    #[inline]
    pub(super) fn by_id(&mut self, id: SlotId) -> Option<&mut Slot> {
        let is_it = |slot: &Slot| slot.number() == id.number;
        if self.slots.get_bucket(id.bucket).is_some_and(is_it) {
            return self.slots.get_bucket_mut(id.bucket);
        }
        self.slots.find_mut(id.spot.occupant().hash(), is_it)
    }

    /// The slot that counts the permits of a cell.
    pub(super) fn adopter(&mut self, place: usize, occupant: Occupant) -> Option<&mut Slot> {
        self.slots.find_mut(occupant.hash(), |slot| {
            slot.has_adopted() && slot.spot().place() == place && slot.spot().occupant() == occupant
        })
    }

    /// Nobody can ask for a permit any more, and those that are out have been adopted.
    pub(super) fn detach(&mut self) {
        self.detached = true;
    }

    fn make_smaller(&mut self) {
        // Far apart, so that a steady number of hosts does not grow and shrink the table in turn.
        let wanted = self.slots.len().max(ROOM);
        if self.slots.capacity() > 8 * wanted {
            self.slots.shrink_to(2 * wanted, |slot| slot.spot().occupant().hash());
        }
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut()
    }
}
