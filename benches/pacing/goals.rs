//! The numbers to reach.

use std::fmt;

use crate::Results;
use crate::client::Policy;
use crate::load::Load;
use crate::metrics::Figures;
use crate::provider::{Hints, Kind};
use crate::run::Cell;

pub(crate) struct Goal {
    name: String,
    measured: f64,
    target: f64,
    met: bool,
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, measured, target, met } = self;
        let verdict = if *met { "met" } else { "missed" };
        write!(f, "goal: {name} measured {measured:.3} target {target:.3} {verdict}")
    }
}

/// A row of the table of goals: which cells, and what their mean has to be.
struct Row {
    name: &'static str,
    kinds: &'static [Kind],
    hints: &'static [Hints],
    loads: &'static [Load],
    makespan: f64,
    refusals: f64,
    in_one_go: f64,
}

const BATCHES: &[Load] = &[Load::Batch(20), Load::Batch(50), Load::Batch(200)];
const PLAIN: &[Hints] = &[Hints::None];
/// Providers that know how many requests they will accept.
pub(crate) const COUNTED: &[Kind] = &[Kind::OnePerWindow, Kind::TokenBucket, Kind::FixedWindow, Kind::SlidingWindow];

const ROWS: &[Row] = &[
    Row {
        name: "one-per-window/batch-20",
        kinds: &[Kind::OnePerWindow],
        hints: PLAIN,
        loads: &[Load::Batch(20)],
        makespan: 1.12,
        refusals: 0.28,
        in_one_go: 1.0,
    },
    Row {
        name: "one-per-window/batch-50",
        kinds: &[Kind::OnePerWindow],
        hints: PLAIN,
        loads: &[Load::Batch(50)],
        makespan: 1.08,
        refusals: 0.13,
        in_one_go: 1.0,
    },
    Row {
        name: "token-bucket",
        kinds: &[Kind::TokenBucket],
        hints: PLAIN,
        loads: BATCHES,
        makespan: 1.06,
        refusals: 0.25,
        in_one_go: 1.0,
    },
    Row {
        name: "n-per-window",
        kinds: &[Kind::FixedWindow, Kind::SlidingWindow],
        hints: PLAIN,
        loads: BATCHES,
        makespan: 1.40,
        refusals: 0.16,
        in_one_go: 1.0,
    },
    Row {
        name: "violation-extends",
        kinds: &[Kind::ViolationExtends],
        hints: PLAIN,
        loads: BATCHES,
        makespan: 1.6,
        refusals: 0.30,
        in_one_go: 0.95,
    },
    Row {
        name: "noisy-and-drifting",
        kinds: &[Kind::NoisyWindow, Kind::DriftingWindow],
        hints: PLAIN,
        loads: BATCHES,
        makespan: 1.3,
        refusals: 0.27,
        in_one_go: 1.0,
    },
    Row {
        name: "limit-changes",
        kinds: &[Kind::LimitTightens, Kind::LimitLoosens],
        hints: PLAIN,
        loads: BATCHES,
        makespan: 1.35,
        refusals: 0.30,
        in_one_go: 1.0,
    },
    Row {
        name: "waf-403",
        kinds: &[Kind::Firewall],
        hints: PLAIN,
        loads: BATCHES,
        makespan: 6.0,
        refusals: 0.25,
        in_one_go: 0.85,
    },
    Row {
        name: "retry-after-exact",
        kinds: COUNTED,
        hints: &[Hints::Exact],
        loads: BATCHES,
        makespan: 1.09,
        refusals: 0.15,
        in_one_go: 1.0,
    },
    Row {
        name: "retry-after-rounded-down",
        kinds: COUNTED,
        hints: &[Hints::RoundedDown],
        loads: BATCHES,
        makespan: 1.09,
        refusals: 0.15,
        in_one_go: 1.0,
    },
    Row {
        name: "ratelimit-headers",
        kinds: COUNTED,
        hints: &[Hints::RateLimit],
        loads: BATCHES,
        makespan: 1.03,
        refusals: 0.0,
        in_one_go: 1.0,
    },
];

/// Every goal whose cells were run.
pub(crate) fn goals(results: &Results) -> Vec<Goal> {
    let mut goals = Vec::new();
    for row in ROWS {
        let Some(mean) = mean(results, row, Policy::Learned) else { continue };
        goals.push(at_most(format!("{}/makespan", row.name), mean.makespan, row.makespan));
        goals.push(at_most(format!("{}/refusals", row.name), mean.refusals, row.refusals));
        goals.push(at_least(format!("{}/served", row.name), mean.in_one_go, row.in_one_go));
    }
    goals.extend(random_refusals(results).into_iter().flatten());
    goals.extend(never_throttles(results));
    goals.extend(early_sends(results));
    goals
}

/// On a fast host that refuses at random, the floor is the ADR's: no worse than Reactive.
fn random_refusals(results: &Results) -> Option<[Goal; 3]> {
    let row = |loads| Row {
        name: "random-429",
        kinds: &[Kind::RandomRefusals],
        hints: PLAIN,
        loads,
        makespan: 1.1,
        refusals: 0.0,
        in_one_go: 0.99,
    };
    let learned = mean(results, &row(BATCHES), Policy::Learned)?;
    let reactive = mean(results, &row(BATCHES), Policy::Reactive)?;
    // Two hundred, a second apart, are more than the budget that goes by the pace of a fast host.
    let served = mean(results, &row(&BATCHES[..2]), Policy::Learned)?.in_one_go;
    Some([
        at_most("random-429/makespan-over-reactive".to_owned(), learned.makespan / reactive.makespan, 1.1),
        at_most("random-429/refusals".to_owned(), learned.refusals, reactive.refusals),
        at_least("random-429/served".to_owned(), served, 0.99),
    ])
}

/// Under any load, that is, and also beside a host that throttles.
fn never_throttles(results: &Results) -> Vec<Goal> {
    let mean = |wanted: &dyn Fn(&Cell) -> bool| {
        let cells = results.iter().filter(|(cell, _)| cell.policy == Policy::Learned && wanted(cell));
        Figures::mean(cells.map(|(_, figures)| figures))
    };
    let mut goals = Vec::new();
    if let Some(all) = mean(&|cell| cell.kind == Kind::Unlimited) {
        goals.push(at_most("never-throttles/pacing-delay".to_owned(), all.pacing, 0.0));
        goals.push(at_most("never-throttles/refusals".to_owned(), all.refusals, 0.0));
        goals.push(at_least("never-throttles/served".to_owned(), all.in_one_go, 1.0));
    }
    // What the gate says of itself is one thing; that it takes no longer than need be, another. One at a time, so that
    // every request has the latency that it has for the clairvoyant client.
    if let Some(serial) = mean(&|cell| cell.kind == Kind::Unlimited && cell.load.in_flight() == 1) {
        goals.push(at_most("never-throttles/makespan".to_owned(), serial.makespan, 1.0));
    }
    if let Some(beside) = mean(&|cell| cell.load == Load::TwentyHosts) {
        let delay = beside.pacing_elsewhere;
        goals.push(at_most("never-throttles/pacing-delay-beside-a-throttler".to_owned(), delay, 0.0));
    }
    goals
}

fn early_sends(results: &Results) -> Option<Goal> {
    // As it comes, Reactive does not read the RateLimit headers.
    let heeded = |cell: &Cell| match cell.policy {
        Policy::Reactive => cell.hints != Hints::RateLimit,
        policy => policy == Policy::Learned,
    };
    let gated = results.iter().filter(|(cell, _)| heeded(cell));
    let mean = Figures::mean(gated.map(|(_, figures)| figures))?;
    Some(at_most("sends-earlier-than-a-hint".to_owned(), mean.early as f64, 0.0))
}

fn mean(results: &Results, row: &Row, policy: Policy) -> Option<Figures> {
    let mut all = Vec::new();
    for &kind in row.kinds {
        for &hints in row.hints {
            for &load in row.loads {
                all.push(results.get(&Cell { kind, hints, load, policy })?);
            }
        }
    }
    Figures::mean(all)
}

/// The last digit of the report is half a thousandth off at most; that is no miss.
const ROUNDING: f64 = 0.0005;

fn at_most(name: String, measured: f64, target: f64) -> Goal {
    Goal { name, measured, target, met: measured < target + ROUNDING }
}

fn at_least(name: String, measured: f64, target: f64) -> Goal {
    Goal { name, measured, target, met: measured > target - ROUNDING }
}
