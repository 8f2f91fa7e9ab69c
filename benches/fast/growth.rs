//! How the costs grow with the number of hosts and of waiters: the total for all of them, at a handful of sizes.
//!
//! A total that is in proportion has the exponent 1, one that is always the same 0. Time is not like that of itself: what
//! few need comes from a cache, what many need from memory. So times are measured beside those of something that does
//! not know hosts or waits in the plainest way, and may grow as fast as these and a little faster.
//!
//! Allocations are counted while all this is measured, which takes a while for each, but no longer for many.

mod plot;

use std::path::Path;
use std::time::Instant;

use tokio::runtime::Runtime;

use crate::contention;
use crate::contention::crowd::{Crowd, runtime};
use crate::contention::line::{Gate, Tokio};
use crate::memory::{self, ACTIVE, CALLING, FIXED, IDLE, THROTTLED, WAITING};
use crate::peers::{Answer, BARE, GATE, uri};
use crate::report::Report;
use crate::statistics::{exponent, median};
use crate::waiters;

const PICTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/fast-growth.svg");

/// By how much the exponent may be more than 1, or than that of a peer: a table grows by doubling.
const ROOM: f64 = 0.1;

/// Totals by size.
struct Curve {
    name: &'static str,
    points: Vec<(f64, f64)>,
    /// What it is measured beside: it is no cost of the gate.
    is_peer: bool,
}

/// Curves of one unit.
struct Panel {
    heading: &'static str,
    /// What there is more and more of.
    over: &'static str,
    unit: &'static str,
    curves: Vec<Curve>,
}

pub(crate) fn run(report: &mut Report) {
    report.section("growth: totals by number of hosts and waiters");
    let panels = panels(report.quick);
    for panel in &panels {
        println!("{}, {}, for so many {}", panel.heading, panel.unit, panel.over);
        let peers = panel.curves.iter().filter(|curve| curve.is_peer);
        let limit = peers.map(Curve::exponent).fold(1.0, f64::max) + ROOM;
        for curve in &panel.curves {
            let grown = curve.exponent();
            let totals: Vec<_> = curve.points.iter().map(|(size, total)| format!("{size}: {total:.3e}")).collect();
            println!("  {:<20}exponent {grown:>5.2}   {}", curve.name, totals.join("  "));
            if !curve.is_peer {
                let name = format!("growth, {}, {}, {}", panel.heading, panel.unit, curve.name);
                report.goal(name, format!("{grown:.2}"), format!("<={limit:.2}"), grown <= limit);
            }
        }
    }
    if !report.quick {
        plot::write(Path::new(PICTURE), &panels).expect("the picture can be written");
        println!("\nThe curves are in docs/fast-growth.svg.");
    }
}

fn panels(quick: bool) -> Vec<Panel> {
    let sizes = |from: u32, to: u32| (from..=to).map(|power| 10_usize.pow(power)).collect::<Vec<_>>();
    let (asked, known) = if quick { (sizes(0, 4), sizes(0, 4)) } else { (sizes(0, 6), sizes(0, 5)) };
    let (line, crowd) = if quick { (sizes(1, 3), sizes(3, 4)) } else { (sizes(1, 4), sizes(3, 5)) };
    let [one, two] = [1, 2].map(runtime);
    let fixed = memory::heap(FIXED, 1);
    let heap = |kind, size| (fixed + memory::heap(kind, size)) as f64;
    let instructions = |line, waiters| contention::instructions(line, waiters) * waiters as f64;
    vec![
        Panel {
            heading: "one request to each",
            over: "hosts",
            unit: "ns",
            curves: Curve::pair(["gate", "no layer"], &asked, requests),
        },
        Panel {
            heading: "heap with hosts",
            over: "hosts",
            unit: "bytes",
            curves: vec![
                Curve::new("idle", &asked, |hosts| heap(IDLE, hosts)),
                Curve::new("in flight", &known, |hosts| heap(ACTIVE, hosts)),
                Curve::new("throttled", &known, |hosts| heap(THROTTLED, hosts)),
            ],
        },
        Panel {
            heading: "heap with waiters",
            over: "waiters",
            unit: "bytes",
            curves: vec![
                Curve::new("Hosts::acquire", &known, |waiters| heap(WAITING, waiters)),
                Curve::new("service", &known, |waiters| heap(CALLING, waiters)),
            ],
        },
        Panel {
            heading: "p99 lateness, 1,000 hosts",
            over: "waiters",
            unit: "us",
            curves: vec![Curve::new("first admissions", &crowd, lateness)],
        },
        Panel {
            heading: "one handoff to each, 1 thread",
            over: "waiters",
            unit: "ns",
            curves: Curve::pair(["gate", "tokio's semaphore"], &line, |waiters| handoffs(&one, waiters)),
        },
        Panel {
            heading: "one handoff to each, 2 threads",
            over: "waiters",
            unit: "ns",
            curves: Curve::pair(["gate", "tokio's semaphore"], &line, |waiters| handoffs(&two, waiters)),
        },
        Panel {
            heading: "one handoff to each",
            over: "waiters",
            unit: "instructions",
            curves: vec![
                Curve::new("Hosts::acquire", &line, |waiters| instructions("gate-direct", waiters)),
                Curve::new("service", &line, |waiters| instructions("gate-service", waiters)),
            ],
        },
        Panel {
            heading: "polls of a wait of each",
            over: "waiters",
            unit: "polls",
            curves: vec![Curve::new("gate", &line, |waiters| polls(&one, waiters))],
        },
    ]
}

impl Curve {
    fn new(name: &'static str, sizes: &[usize], total: impl Fn(usize) -> f64) -> Self {
        let points = sizes.iter().map(|&size| (size as f64, total(size))).collect();
        Self { name, points, is_peer: false }
    }

    /// The gate and a peer, measured in turn at each size.
    fn pair(names: [&'static str; 2], sizes: &[usize], totals: impl Fn(usize) -> [f64; 2]) -> Vec<Self> {
        let totals: Vec<_> = sizes.iter().map(|&size| (size as f64, totals(size))).collect();
        let curve = |n: usize| Self {
            name: names[n],
            points: totals.iter().map(|(size, totals)| (*size, totals[n])).collect(),
            is_peer: n == 1,
        };
        vec![curve(0), curve(1)]
    }

    fn exponent(&self) -> f64 {
        exponent(&self.points)
    }
}

/// The client that answers included; and that alone.
fn requests(hosts: usize) -> [f64; 2] {
    const BATCH: usize = 64;
    const AT_LEAST: usize = 100_000;
    let mut lanes = [GATE, BARE].map(|peer| (peer.lane)(Answer::Empty));
    let uris: Vec<_> = (0..hosts).map(uri).collect();
    let mut next = uris.iter().cycle();
    let mut turn = || {
        let batch: Vec<_> = next.by_ref().take(BATCH).cloned().collect();
        lanes.each_mut().map(|lane| {
            lane.load(&batch);
            let start = Instant::now();
            lane.send();
            start.elapsed().as_nanos() as f64 / BATCH as f64
        })
    };
    medians((0..hosts.max(AT_LEAST) / BATCH).map(|_| turn())).map(|each| each * hosts as f64)
}

/// The gate's, and those of `tokio`'s semaphore.
fn handoffs(runtime: &Runtime, waiters: usize) -> [f64; 2] {
    const RUNS: usize = 15;
    let crowd = Crowd { permits: 1, waiters, rounds: (6_000 / waiters).max(2) };
    let turn = || [crowd.pass::<Gate>(runtime), crowd.pass::<Tokio>(runtime)];
    medians((0..RUNS).map(|_| turn().map(|took| took.time.as_nanos() as f64 / crowd.rounds as f64)))
}

fn medians(turns: impl Iterator<Item = [f64; 2]>) -> [f64; 2] {
    let (gate, peer): (Vec<_>, Vec<_>) = turns.map(|[gate, peer]| (gate, peer)).unzip();
    [median(&gate), median(&peer)]
}

fn lateness(waiters: usize) -> f64 {
    const RUNS: usize = 3;
    median(&[(); RUNS].map(|()| waiters::gated(waiters).p99 * 1e3))
}

fn polls(runtime: &Runtime, waiters: usize) -> f64 {
    Crowd { permits: 1, waiters, rounds: 1 }.pass::<Gate>(runtime).polls as f64
}
