//! A crowd in line for many hosts that are all held: what a waiter takes, and how late the first of each host goes when the
//! hold is over; beside as many tasks that sleep until then each by itself.

use std::future::{Future, pending, poll_fn};
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use allocation_counter::measure;
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep_until};
use tower_host_gate::Outcome;

use crate::contention::crowd::{Latch, runtime};
use crate::contention::line::{PATIENCE, layer};
use crate::peers::uri;
use crate::report::Report;
use crate::statistics::{median, quantile};

const HOSTS: usize = 1_000;

/// One run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// Heap bytes of a task, its future included.
    task: f64,
    /// Heap bytes that waiting adds to that.
    waiter: f64,
    /// Milliseconds.
    p50: f64,
    pub(crate) p99: f64,
}

pub(crate) fn run(report: &mut Report) {
    report.section("waiters: a crowd in line for 1,000 hosts that are held");
    let (waiters, runs) = if report.quick { (20_000, 1) } else { (1_000_000, 3) };
    println!("{waiters} tasks on one thread; hosts that take one request at a time; medians of {runs} runs.");
    println!("late: the first admission of each host after the end of its hold; of the sleeps, every one.\n");
    println!("{:<14}{:>14}{:>16}{:>13}{:>13}", "", "bytes a task", "bytes a waiter", "p50 late", "p99 late");
    let (gated, slept): (Vec<_>, Vec<_>) = (0..runs).map(|_| (gated(waiters), slept(waiters))).unzip();
    let p99 = row("gate", &gated);
    row("a sleep each", &slept);
    report.goal(format!("lateness of {waiters} waiters, p99"), format!("{p99:.2} ms"), "<=8 ms", p99 <= 8.0);
}

fn row(name: &str, runs: &[Run]) -> f64 {
    let of = |figure: fn(&Run) -> f64| median(&runs.iter().map(figure).collect::<Vec<_>>());
    let (task, waiter) = (of(|run| run.task), of(|run| run.waiter));
    let (p50, p99) = (of(|run| run.p50), of(|run| run.p99));
    println!("{name:<14}{task:>14.0}{waiter:>16.0}{p50:>10.2} ms{p99:>10.2} ms");
    p99
}

/// All hosts are asked, and while a crowd is in line for each they refuse, until one and the same instant.
pub(crate) fn gated(waiters: usize) -> Run {
    let runtime = runtime(1);
    let _entered = runtime.enter();
    let hosts = layer(1).hosts();
    let asked: Vec<_> = (0..HOSTS).map(|host| hosts.try_acquire(&uri(host)).expect("the host is idle")).collect();
    let crowd = Crowd::new(&runtime, HOSTS);
    let [task, waiter] = crowd.gather(waiters, |n| {
        let (hosts, uri) = (hosts.clone(), uri(n % HOSTS));
        async move { hosts.acquire(&uri, PATIENCE).await }
    });
    let end = Instant::now() + Duration::from_millis(500);
    for permit in asked {
        permit.settle(Outcome::Throttled { hint: Some(end - Instant::now()), soft: false });
    }
    let [p50, p99] = crowd.late(end);
    Run { task, waiter, p50, p99 }
}

fn slept(waiters: usize) -> Run {
    let runtime = runtime(1);
    let _entered = runtime.enter();
    let mut margin = Duration::from_millis(500) + Duration::from_micros(3) * waiters as u32;
    loop {
        let end = Instant::now() + margin;
        let crowd = Crowd::new(&runtime, waiters);
        let [task, waiter] = crowd.gather(waiters, |_| sleep_until(end));
        if Instant::now() < end {
            let [p50, p99] = crowd.late(end);
            return Run { task, waiter, p50, p99 };
        }
        // Some were not asleep yet. The machine is slower than that.
        margin *= 2;
    }
}

/// Tasks that wait for something.
struct Crowd<'a> {
    runtime: &'a Runtime,
    beginning: Instant,
    places: Arc<Places>,
}

struct Places {
    /// When the first waiter of each was through, in nanoseconds from the beginning.
    through: Box<[AtomicU64]>,
    all: Latch,
}

impl<'a> Crowd<'a> {
    /// Waiters take turns at these places; no place lets more than one through.
    fn new(runtime: &'a Runtime, places: usize) -> Self {
        let through = (0..places).map(|_| AtomicU64::default()).collect();
        Self { runtime, beginning: Instant::now(), places: Arc::new(Places { through, all: Latch::new(places) }) }
    }

    /// Returns when all wait. Gives back the heap bytes of a task, and what waiting adds to it.
    fn gather<F>(&self, waiters: usize, wait: impl Fn(usize) -> F) -> [f64; 2]
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let in_line = Arc::new(Latch::new(waiters));
        let spawned = measure(|| {
            for n in 0..waiters {
                let (places, in_line, beginning) = (Arc::clone(&self.places), Arc::clone(&in_line), self.beginning);
                let waiting = wait(n);
                self.runtime.spawn(async move {
                    let permit = noted(waiting, &in_line).await;
                    let through = beginning.elapsed().as_nanos();
                    places.through[n % places.through.len()].store(through as u64, Ordering::Relaxed);
                    places.all.count();
                    // Nobody else is let through.
                    pending::<()>().await;
                    drop(permit);
                });
            }
        });
        let waiting = measure(|| self.runtime.block_on(in_line.wait()));
        [spawned, waiting].map(|heap| heap.bytes_current as f64 / waiters as f64)
    }

    /// Returns when somebody was let through everywhere. Milliseconds, p50 and p99.
    fn late(&self, end: Instant) -> [f64; 2] {
        self.runtime.block_on(self.places.all.wait());
        let end = (end - self.beginning).as_nanos() as f64;
        let late = |through: &AtomicU64| (through.load(Ordering::Relaxed) as f64 - end) / 1e6;
        let late: Vec<_> = self.places.through.iter().map(late).collect();
        [0.5, 0.99].map(|part| quantile(&late, part))
    }
}

/// The same future, which says when it has been polled once.
async fn noted<F: Future>(waiting: F, in_line: &Latch) -> F::Output {
    let mut waiting = pin!(waiting);
    let mut first = true;
    poll_fn(|cx| {
        let polled = waiting.as_mut().poll(cx);
        if mem::take(&mut first) {
            in_line.count();
        }
        polled
    })
    .await
}
