//! The hosts that have something to say, in sharded locks.
//!
//! Keys come from strangers, so the hash is seeded. A lock is held for a handful of instructions, never across an await:
//! no function in this crate is `async` while it holds one.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::slot::Slot;
use crate::host::HostKey;
use crate::pace::Time;

const SHARDS: usize = 16;
/// How long a host that has gone cold may be remembered for nothing.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Table {
    seed: RandomState,
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    slots: HashTable<Slot>,
    sweep_at: Time,
}

impl Table {
    pub(super) fn new() -> Self {
        Self { seed: RandomState::new(), shards: Default::default() }
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
        make: impl FnOnce() -> Slot,
    ) -> &'a mut Slot {
        let rehash = |slot: &Slot| self.hash(slot.key());
        match shard.slots.entry(hash, |slot| slot.key() == key, rehash) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(make()).into_mut(),
        }
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

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut()
    }

    pub(super) fn remove(&mut self, hash: u64, key: &HostKey) {
        if let Ok(entry) = self.slots.find_entry(hash, |slot| slot.key() == key) {
            entry.remove();
        }
    }
}
