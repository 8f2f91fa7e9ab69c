//! A crowd that wants the permits of one line, all at once.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::line::Line;

/// How many waiters for how many permits, and how often each waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crowd {
    pub(crate) permits: usize,
    pub(crate) waiters: usize,
    pub(crate) rounds: usize,
}

/// What handing the permits on to all of them took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Took {
    pub(crate) time: Duration,
    pub(crate) polls: usize,
}

pub(crate) fn runtime(threads: usize) -> Runtime {
    let mut builder = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    // The former has no use for the number.
    builder.worker_threads(threads).enable_all().build().expect("a runtime")
}

impl Crowd {
    pub(crate) fn handoffs(self) -> usize {
        self.waiters * self.rounds
    }

    /// Everybody is in line before the first permit is free. From then on each permit goes from one waiter to the next:
    /// who gives it back goes to the end of the line at once, so there is always one.
    pub(crate) fn pass<L: Line>(self, runtime: &Runtime) -> Took {
        let mut line = L::new(self.permits);
        runtime.block_on(async {
            let mut held = Vec::new();
            for _ in 0..self.permits {
                held.push(line.take().await);
            }
            let in_line = Arc::new(Latch::new(self.waiters));
            let waiters: JoinSet<_> =
                (0..self.waiters).map(|_| wait(line.clone(), self.rounds, Arc::clone(&in_line))).collect();
            in_line.wait().await;
            let start = Instant::now();
            drop(held);
            let done = waiters.join_all().await;
            let end = done.iter().map(|(end, _)| *end).max().unwrap_or(start);
            Took { time: end - start, polls: done.iter().map(|(_, polls)| polls).sum() }
        })
    }

    /// How many of a crowd got their permit before one who had come earlier. For one permit: who has it is alone.
    pub(crate) fn inversions<L: Line>(runtime: &Runtime, waiters: usize) -> usize {
        let mut line = L::new(1);
        let mut turns = runtime.block_on(async {
            let held = line.take().await;
            let next_turn = Arc::new(AtomicUsize::new(0));
            let mut tasks = JoinSet::new();
            for arrival in 0..waiters {
                let (mut line, next_turn) = (line.clone(), Arc::clone(&next_turn));
                let mut waiter = Box::pin(async move {
                    let permit = line.take().await;
                    let turn = next_turn.fetch_add(1, Ordering::Relaxed);
                    drop(permit);
                    (arrival, turn)
                });
                // In line before the next one, whichever thread its task comes to.
                assert!(waiter.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
                tasks.spawn(waiter);
            }
            drop(held);
            tasks.join_all().await
        });
        turns.sort_unstable();
        let mut latest = 0;
        let overtook = |(_, turn): &&(usize, usize)| {
            latest = latest.max(*turn);
            *turn < latest
        };
        turns.iter().filter(overtook).count()
    }
}

async fn wait(mut line: impl Line, rounds: usize, in_line: Arc<Latch>) -> (Instant, usize) {
    let mut polls = 0;
    for _ in 0..rounds {
        let mut turn = pin!(line.take());
        let permit = poll_fn(|cx| {
            let polled = turn.as_mut().poll(cx);
            if polls == 0 {
                in_line.count();
            }
            polls += 1;
            polled
        });
        let permit = permit.await;
        trip().await;
        drop(permit);
    }
    (Instant::now(), polls)
}

/// To the end of the runtime's queue and back. `yield_now` has the runtime look for I/O first, which costs more than all
/// that is measured here.
async fn trip() {
    let mut gone = false;
    poll_fn(|cx| {
        if mem::replace(&mut gone, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Opens when as many as expected have been counted.
pub(crate) struct Latch {
    missing: AtomicUsize,
    open: Notify,
}

impl Latch {
    pub(crate) fn new(expected: usize) -> Self {
        Self { missing: AtomicUsize::new(expected), open: Notify::new() }
    }

    pub(crate) fn count(&self) {
        if self.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.open.notify_one();
        }
    }

    pub(crate) async fn wait(&self) {
        self.open.notified().await;
    }
}
