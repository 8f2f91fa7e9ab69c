//! Two threads on two cores that ask different hosts: what they cost each other.

use std::hint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use core_affinity::CoreId;

use crate::fast::peers::{Answer, GATE, Lane, PEERS, Peer, uri};
use crate::fast::report::Report;
use crate::interleaved::median;

/// Requests per sample: longer than two threads need to start together.
const BATCH: usize = 256;
/// Samples before it is the next peer's turn.
const ROUNDS: usize = 50;
/// How often two threads may fail to run at the same time.
const ATTEMPTS: usize = 100;

pub(crate) fn run(report: &mut Report) {
    report.section("Added time per request on disjoint hosts, ns (median)");
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let [first, second, ..] = cores[..] else {
        return println!("There is only one core.");
    };

    let turns = if report.quick { 3 } else { 40 };
    let mut contestants: Vec<_> = PEERS.into_iter().filter_map(|peer| Contestant::new(peer, [first, second])).collect();
    for _ in 0..turns {
        contestants.iter_mut().for_each(Contestant::turn);
    }
    let times: Vec<_> = contestants.into_iter().map(|it| (it.peer, median(it.alone), median(it.together))).collect();

    println!("{:<20}{:>12}{:>14}{:>10}", "", "one thread", "two threads", "ratio");
    for &(peer, mut one, mut two) in &times {
        if !peer.is_bare() {
            let (_, bare_one, bare_two) =
                times.iter().find(|(it, ..)| it.name == peer.bare).expect("a bare one for each");
            (one, two) = (one - bare_one, two - bare_two);
        }
        let label = if peer.is_bare() { format!("{} (all)", peer.name) } else { peer.name.to_owned() };
        let ratio = two / one;
        println!("{label:<20}{one:>12.1}{two:>14.1}{ratio:>9.2}x");
        if peer.name == GATE.name {
            report.goal("added time of two threads, beside one", format!("{ratio:.2}x"), "<=1.2x", ratio <= 1.2);
        }
    }
}

/// A peer in both threads, and its samples.
struct Contestant {
    peer: Peer,
    threads: [Thread; 2],
    alone: Vec<f64>,
    together: Vec<f64>,
}

struct Thread {
    core: CoreId,
    lane: Box<dyn Lane>,
    uris: Vec<http::Uri>,
}

impl Contestant {
    /// `None` for a peer that cannot be in two threads.
    fn new(peer: Peer, cores: [CoreId; 2]) -> Option<Self> {
        let lane = (peer.lane)(Answer::Empty);
        let clone = lane.split()?;
        let [first, second] = cores;
        let threads = [
            Thread { core: first, lane, uris: (0..BATCH).map(uri).collect() },
            Thread { core: second, lane: clone, uris: (BATCH..2 * BATCH).map(uri).collect() },
        ];
        Some(Self { peer, threads, alone: Vec::new(), together: Vec::new() })
    }

    fn turn(&mut self) {
        let [first, _] = &mut self.threads;
        self.alone.extend(rounds([first]).into_iter().map(|[(start, end)]| per_request(start, end)));
        // Where something else has taken a core for the while, another attempt may do better.
        let before = self.together.len();
        for _ in 0..ATTEMPTS {
            let [first, second] = &mut self.threads;
            self.together.extend(rounds([first, second]).into_iter().filter_map(side_by_side).flatten());
            if self.together.len() > before {
                return;
            }
        }
        panic!("{}: no two samples ran side by side; is the machine busy?", self.peer.name);
    }
}

/// Start and end of each sample, of which all threads begin each at the same moment. The first round of all warms up.
fn rounds<const N: usize>(threads: [&mut Thread; N]) -> Vec<[(Instant, Instant); N]> {
    let arrived = AtomicUsize::new(0);
    let samples = thread::scope(|scope| {
        let handles = threads.map(|thread| scope.spawn(|| thread.run(&arrived, N)));
        handles.map(|handle| handle.join().expect("the thread ends"))
    });
    (1..ROUNDS).map(|round| samples.each_ref().map(|of_thread| of_thread[round])).collect()
}

impl Thread {
    fn run(&mut self, arrived: &AtomicUsize, threads: usize) -> Vec<(Instant, Instant)> {
        core_affinity::set_for_current(self.core);
        let round = |round: usize| {
            self.lane.load(&self.uris);
            arrived.fetch_add(1, Ordering::AcqRel);
            while arrived.load(Ordering::Acquire) < threads * (round + 1) {
                hint::spin_loop();
            }
            let start = Instant::now();
            self.lane.send();
            (start, Instant::now())
        };
        (0..ROUNDS).map(round).collect()
    }
}

/// Nanoseconds per request of the two threads, if both ran nearly all of the time.
fn side_by_side(samples: [(Instant, Instant); 2]) -> Option<[f64; 2]> {
    let [one, two] = samples.map(|(start, end)| per_request(start, end));
    let [(one_start, one_end), (two_start, two_end)] = samples;
    let overlap = per_request(one_start.max(two_start), one_end.min(two_end));
    (overlap >= 0.9 * one.max(two)).then_some([one, two])
}

/// Nanoseconds; 0 if the end is before the start.
fn per_request(start: Instant, end: Instant) -> f64 {
    end.saturating_duration_since(start).as_nanos() as f64 / BATCH as f64
}
