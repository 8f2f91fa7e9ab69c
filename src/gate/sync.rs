//! The parts of the fast path that a model checker has to know of.

use std::sync::PoisonError;

#[cfg(not(host_gate_loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
#[cfg(not(host_gate_loom))]
pub(super) use std::sync::{Mutex, MutexGuard};
#[cfg(not(host_gate_loom))]
pub(super) use std::thread::yield_now;

#[cfg(host_gate_loom)]
pub(super) use loom::sync::atomic::Ordering;
#[cfg(host_gate_loom)]
pub(super) use loom::sync::{Mutex, MutexGuard};
#[cfg(host_gate_loom)]
pub(super) use loom::thread::yield_now;

#[cfg(host_gate_loom)]
pub(super) use self::checked::{AtomicBool, AtomicU32, AtomicU64};

/// Of a caller's code only the clone of a waker runs under a lock, so a poisoned one guards nothing half-done.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Atomics of which loom tries every order.
///
/// It compares an access with the last one alone, so a thread that reads and then changes would hide that another one has
/// read before (its issues 166 and 392). Here each access changes something, too, which orders nothing else.
#[cfg(host_gate_loom)]
mod checked {
    use std::ops::Deref;

    use loom::sync::atomic::{self, AtomicUsize, Ordering};

    pub(in super::super) type AtomicBool = Checked<atomic::AtomicBool>;
    pub(in super::super) type AtomicU32 = Checked<atomic::AtomicU32>;
    pub(in super::super) type AtomicU64 = Checked<atomic::AtomicU64>;

    #[derive(Debug, Default)]
    pub(in super::super) struct Checked<T> {
        atomic: T,
        accesses: AtomicUsize,
    }

    impl<T> Checked<T> {
        pub(in super::super) fn new(value: impl Into<T>) -> Self {
            Self { atomic: value.into(), accesses: AtomicUsize::new(0) }
        }
    }

    impl<T> Deref for Checked<T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.accesses.fetch_add(1, Ordering::Relaxed);
            &self.atomic
        }
    }
}
