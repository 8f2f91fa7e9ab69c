//! The hosts that have something to say, in sharded locks.
//!
//! Keys come from strangers, so the hash is seeded, at random. A lock is held for a handful of instructions, never across
//! an await: no function in this crate is `async` while it holds one.

use std::hash::BuildHasher;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};

use super::slot::Slot;
use crate::host::HostKey;
use crate::pace::Time;

const SHARDS: usize = 16;
/// How long a host that has gone cold may be remembered for nothing.
const SWEEP_EVERY: Duration = Duration::from_secs(10);
/// How many slots a shard may hold before it looks for idle ones: a program that talks to a few hundred hosts in turn
/// makes each of their slots once.
const ROOM: usize = 32;

#[derive(Debug)]
pub(super) struct Table {
    seed: DefaultHashBuilder,
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    slots: HashTable<Slot>,
    next_number: u64,
    sweep_at: Time,
    tidy_at: usize,
}

/// Finds a slot again without its key.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotId {
    pub(super) hash: u64,
    /// Never given twice, so a slot with this number is the one it was given for.
    number: u64,
    /// Where the slot was; it may have moved.
    bucket: usize,
}

impl Table {
    pub(super) fn new() -> Self {
        Self { seed: DefaultHashBuilder::default(), shards: Default::default() }
    }

    #[inline]
    pub(super) fn hash(&self, key: &HostKey) -> u64 {
        self.seed.hash_one(key)
    }

    /// The shard of this hash.
    #[inline]
    pub(super) fn lock(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // The map picks its buckets by the low bits and tells entries apart by the top seven.
        lock(&self.shards[(hash >> 48) as usize % SHARDS])
    }

    /// Every shard in turn.
    pub(super) fn shards(&self) -> impl Iterator<Item = MutexGuard<'_, Shard>> {
        self.shards.iter().map(lock)
    }

    /// The slot of this key, made by `make` out of its number when there is none.
    #[inline]
    pub(super) fn slot<'a>(
        &self,
        shard: &'a mut Shard,
        hash: u64,
        key: &HostKey,
        make: impl FnOnce(u64) -> Slot,
    ) -> (SlotId, &'a mut Slot) {
        let rehash = |slot: &Slot| self.hash(slot.key());
        let entry = match shard.slots.entry(hash, |slot| slot.key() == key, rehash) {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(entry) => {
                shard.next_number += 1;
                entry.insert(make(shard.next_number))
            }
        };
        let id = SlotId { hash, number: entry.get().number(), bucket: entry.bucket_index() };
        (id, entry.into_mut())
    }

    /// Drops the hosts of a shard that have gone cold since anybody looked. Called by whoever has read the clock anyway.
    pub(super) fn sweep(&self, shard: &mut Shard, now: Time) {
        if now >= shard.sweep_at {
            shard.sweep_at = now.after(SWEEP_EVERY);
            shard.slots.retain(|slot| !slot.says_nothing(|| now));
            // Twice the room, so that a steady number of hosts does not grow and shrink the table in turn.
            shard.slots.shrink_to(shard.slots.len() * 2, |slot| self.hash(slot.key()));
        }
    }
}

/// No caller's code runs under the lock, so a poisoned one guards nothing half-done.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shard {
    pub(super) fn get(&mut self, hash: u64, key: &HostKey) -> Option<&mut Slot> {
        self.slots.find_mut(hash, |slot| slot.key() == key)
    }

    #[inline]
    pub(super) fn by_id(&mut self, id: SlotId) -> Option<&mut Slot> {
        let is_it = |slot: &Slot| slot.number() == id.number;
        if self.slots.get_bucket(id.bucket).is_some_and(is_it) {
            return self.slots.get_bucket_mut(id.bucket);
        }
        self.slots.find_mut(id.hash, is_it)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut()
    }

    /// A slot has gone idle. Drops all idle ones once they might be as many as the others.
    #[inline]
    pub(super) fn tidy(&mut self) {
        if self.slots.len() > self.tidy_at.max(ROOM) {
            self.slots.retain(|slot| !slot.is_idle());
            self.tidy_at = self.slots.len() * 2;
        }
    }

    pub(super) fn remove(&mut self, id: SlotId) {
        if let Ok(entry) = self.slots.find_entry(id.hash, |slot| slot.number() == id.number) {
            entry.remove();
        }
    }
}
