//! The hosts that have something to say, in sharded locks.
//!
//! Keys come from strangers, so the hash is seeded, at random: that stops whoever cannot time us. A lock is held for a handful of instructions, never across
//! an await: no function in this crate is `async` while it holds one.

use std::hash::BuildHasher;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::clock::Clock;
use super::slot::Slot;
use crate::config::Config;
use crate::host::HostKey;
use crate::pace::Time;

const SHARDS: usize = 16;
/// How long a host that has gone cold may be remembered for nothing.
const SWEEP_EVERY: Duration = Duration::from_secs(10);
/// How many slots a shard may hold for nothing: a program that talks to a few hundred hosts in turn need not make each
/// of their slots anew.
const ROOM: usize = 48;

#[derive(Debug)]
pub(super) struct Table {
    seed: DefaultHashBuilder,
    shards: [Mutex<Shard>; SHARDS],
    /// When to look for hosts beyond `max_hosts` again.
    forget_at: Mutex<Time>,
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
        Self { seed: DefaultHashBuilder::default(), shards: Default::default(), forget_at: Mutex::default() }
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
        let entry = match shard.slots.find_entry(hash, |slot| slot.key() == key) {
            Ok(entry) => entry,
            Err(absent) => {
                let slots = absent.into_table();
                let rehash = |slot: &Slot| self.hash(slot.key());
                if slots.capacity() == 0 {
                    // So much at once that an ordinary program never sees the table grow.
                    slots.reserve(2 * ROOM, rehash);
                }
                shard.next_number += 1;
                slots.insert_unique(hash, make(shard.next_number), rehash)
            }
        };
        let id = SlotId { hash, number: entry.get().number(), bucket: entry.bucket_index() };
        (id, entry.into_mut())
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
        shard.slots.retain(|slot| keep(slot));
        (shard.kept, shard.unused) = (shard.slots.len(), 0);
        // Far apart, so that a steady number of hosts does not grow and shrink the table in turn.
        let wanted = shard.slots.len().max(ROOM);
        if shard.slots.capacity() > 8 * wanted {
            shard.slots.shrink_to(2 * wanted, |slot| self.hash(slot.key()));
        }
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

/// Of a caller's code only the clone of a waker runs under a lock, so a poisoned one guards nothing half-done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

    pub(super) fn remove(&mut self, id: SlotId) {
        if let Ok(entry) = self.slots.find_entry(id.hash, |slot| slot.number() == id.number) {
            entry.remove();
        }
    }
}
