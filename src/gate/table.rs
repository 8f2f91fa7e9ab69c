//! The hosts that have something to say, in sharded locks.
//!
//! Keys come from strangers, so the hash is seeded, at random. A lock is held for a handful of instructions, never across an await:
//! no function in this crate is `async` while it holds one.

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

#[derive(Debug)]
pub(super) struct Table {
    seed: DefaultHashBuilder,
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    slots: HashTable<Slot>,
    next_id: u64,
    sweep_at: Time,
}

/// Finds a slot again without its key. Never reused, so a slot found by it is the one it was given for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotId {
    pub(super) hash: u64,
    number: u64,
}

impl Table {
    pub(super) fn new() -> Self {
        Self { seed: DefaultHashBuilder::default(), shards: Default::default() }
    }

    pub(super) fn hash(&self, key: &HostKey) -> u64 {
        self.seed.hash_one(key)
    }

    /// The shard of this hash.
    pub(super) fn lock(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // The map picks its buckets by the low bits and tells entries apart by the top seven.
        lock(&self.shards[(hash >> 48) as usize % SHARDS])
    }

    /// Every shard in turn.
    pub(super) fn shards(&self) -> impl Iterator<Item = MutexGuard<'_, Shard>> {
        self.shards.iter().map(lock)
    }

    /// The slot of this key, made by `make` when there is none.
    pub(super) fn slot<'a>(
        &self,
        shard: &'a mut Shard,
        hash: u64,
        key: &HostKey,
        make: impl FnOnce(SlotId) -> Slot,
    ) -> &'a mut Slot {
        let rehash = |slot: &Slot| slot.id().hash;
        match shard.slots.entry(hash, |slot| slot.key() == key, rehash) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let number = shard.next_id;
                shard.next_id += 1;
                entry.insert(make(SlotId { hash, number })).into_mut()
            }
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

    pub(super) fn by_id(&mut self, id: SlotId) -> Option<&mut Slot> {
        self.slots.find_mut(id.hash, |slot| slot.id() == id)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut()
    }

    pub(super) fn remove(&mut self, id: SlotId) {
        if let Ok(entry) = self.slots.find_entry(id.hash, |slot| slot.id() == id) {
            entry.remove();
        }
    }

    /// Drops the hosts that have gone cold since anybody looked. Called by whoever has read the clock anyway.
    pub(super) fn sweep(&mut self, now: Time) {
        if now >= self.sweep_at {
            self.sweep_at = now.after(SWEEP_EVERY);
            self.slots.retain(|slot| !slot.says_nothing(|| now));
            // Twice the room, so that a steady number of hosts does not grow and shrink the table in turn.
            self.slots.shrink_to(self.slots.len() * 2, |slot| slot.id().hash);
        }
    }
}
