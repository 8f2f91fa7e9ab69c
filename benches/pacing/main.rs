//! The simulator: how the gate fares with providers that throttle, against other ways of asking and against a client that
//! knows the provider's mind.
//!
//! ```sh
//! cargo bench --bench pacing                                        # everything, and at last the goals
//! cargo bench --bench pacing -- --only one-per-window               # one provider
//! cargo bench --bench pacing -- --only one-per-window --trace 7     # one run, event by event
//! ```
//!
//! The gate is the real one, in a runtime whose clock is paused. A seed draws every time constant of a provider, and the
//! same seed gives the same numbers. Rules are tuned on the seeds of `--train`; the report is of others, whose constants
//! range further. A complete one also writes the pictures of the README.
//!
//! A provider is judged by what it would have served: the clairvoyant client sends every request at the first instant at
//! which it is accepted, as many at a time as the gate is allowed to. A caller waits three times as long as the longest
//! wait of that client, and two minutes more; sent away, it comes back when it was told to.
//!
//! | file | what |
//! |---|---|
//! | `limit.rs` | what providers tolerate: pure state machines |
//! | `provider.rs` | a limit, what it says about itself, and its latency |
//! | `load.rs` | who asks for what, and when |
//! | `clairvoyant.rs` | the best that can be done |
//! | `client.rs`, `pacer.rs` | the policies |
//! | `site.rs`, `run.rs` | one run |
//! | `check.rs` | whether the providers keep their word |
//! | `metrics.rs`, `goals.rs`, `report.rs`, `plot/` | what came of it |

#![allow(clippy::cast_possible_truncation, reason = "numbers of a simulation are small")]

mod check;
mod clairvoyant;
mod client;
mod draw;
mod goals;
mod limit;
mod load;
mod metrics;
mod pacer;
mod plot;
mod provider;
mod report;
mod run;
mod site;

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use clap::Parser;

use crate::client::Policy;
use crate::draw::Seed;
use crate::load::Load;
use crate::metrics::Figures;
use crate::provider::{Hints, Kind};
use crate::run::{Cell, run};

/// Simulates clients of throttling providers.
#[derive(Debug, Parser)]
#[command(name = "pacing")]
struct Args {
    /// Use the seeds to tune on rather than those held out
    #[arg(long)]
    train: bool,
    /// Seeds per cell
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Only this provider
    #[arg(long, value_name = "NAME", value_parser = kind)]
    only: Option<Kind>,
    /// Only this policy
    #[arg(long, value_name = "NAME", value_parser = policy)]
    policy: Option<Policy>,
    /// Only this load
    #[arg(long, value_name = "NAME", value_parser = load)]
    load: Option<Load>,
    /// Only providers with these hints
    #[arg(long, value_name = "NAME", value_parser = hints)]
    hints: Option<Hints>,
    /// Print one run event by event: of the seed, with the provider, policy, load and hints chosen
    #[arg(long, value_name = "SEED")]
    trace: Option<u64>,
    /// Cargo says so
    #[arg(long, hide = true)]
    bench: bool,
}

fn kind(name: &str) -> Result<Kind, String> {
    named(name, &Kind::ALL, |kind| kind.name().to_owned())
}

fn policy(name: &str) -> Result<Policy, String> {
    named(name, &Policy::ALL, |policy| policy.name().to_owned())
}

fn load(name: &str) -> Result<Load, String> {
    named(name, &Load::ALL, Load::name)
}

fn hints(name: &str) -> Result<Hints, String> {
    named(name, &Hints::ALL, |hints| hints.name().to_owned())
}

fn named<T: Copy>(name: &str, all: &[T], name_of: impl Fn(T) -> String) -> Result<T, String> {
    let names = || all.iter().map(|one| name_of(*one)).collect::<Vec<_>>().join(", ");
    all.iter().copied().find(|one| name_of(*one) == name).ok_or_else(|| format!("one of: {}", names()))
}

/// The mean figures of every cell.
pub(crate) type Results = HashMap<Cell, Figures>;

fn main() {
    let args = Args::parse();
    let held_out = !args.train;
    if let Some(number) = args.trace {
        let cell = Cell {
            kind: args.only.unwrap_or(Kind::OnePerWindow),
            hints: args.hints.unwrap_or(Hints::None),
            load: args.load.unwrap_or(Load::Batch(20)),
            policy: args.policy.unwrap_or(Policy::Learned),
        };
        report::trace(&run(cell, Seed { held_out, number }, true));
        return;
    }
    let seeds: Vec<_> = (0..args.seeds).map(|number| Seed { held_out, number }).collect();
    let kinds: Vec<_> = Kind::ALL.into_iter().filter(|kind| args.only.is_none_or(|only| only == *kind)).collect();
    check::all(&kinds, &seeds);

    let cells: Vec<_> = cells().into_iter().filter(|cell| args.wants(cell)).collect();
    let results = run_all(&cells, &seeds);
    report::tables(&cells, &results);
    if held_out {
        plot(&results).unwrap_or_else(|error| eprintln!("no pictures: {error}"));
    }
    for goal in goals::goals(&results) {
        println!("{goal}");
    }
}

/// The pictures of the README. They show what is reported: a part of it makes none.
fn plot(results: &Results) -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    fs::create_dir_all(&folder)?;
    if plot::comparison(&folder.join("pacing-comparison.svg"), results)? {
        plot::trace(&folder.join("pacing-trace.svg"), Seed { held_out: true, number: 0 })?;
    }
    Ok(())
}

impl Args {
    fn wants(&self, cell: &Cell) -> bool {
        self.only.is_none_or(|kind| kind == cell.kind)
            && self.policy.is_none_or(|policy| policy == cell.policy)
            && self.load.is_none_or(|load| load == cell.load)
            && self.hints.is_none_or(|hints| hints == cell.hints)
    }
}

/// For the gate's two pacings every headerless provider under every load, and every way of hinting under batches; and all
/// policies in comparison.
fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for kind in Kind::ALL {
        for &hints in kind.hints() {
            for load in Load::ALL {
                let short = matches!(load, Load::Batch(20 | 50) | Load::Narrow);
                let long = load == Load::Batch(200) && goals::COUNTED.contains(&kind);
                let plain = hints == Hints::None || short || long;
                for policy in Policy::ALL {
                    let gated = plain && matches!(policy, Policy::Reactive | Policy::Learned);
                    if gated || compared(kind, hints, load) {
                        cells.push(Cell { kind, hints, load, policy });
                    }
                }
            }
        }
    }
    cells
}

/// Whether all policies are compared here.
fn compared(kind: Kind, hints: Hints, load: Load) -> bool {
    let telling = match kind {
        Kind::OnePerWindow => matches!(hints, Hints::None | Hints::Exact),
        Kind::TokenBucket | Kind::FixedWindow | Kind::ViolationExtends | Kind::Unlimited => hints == Hints::None,
        _ => false,
    };
    telling && load == Load::Batch(20)
}

fn run_all(cells: &[Cell], seeds: &[Seed]) -> Results {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Results::new());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let figures: Vec<_> = seeds.iter().map(|seed| Figures::of(&run(*cell, *seed, false))).collect();
                    let mean = Figures::mean(&figures).unwrap_or_default();
                    results.lock().expect("no other thread has panicked").insert(*cell, mean);
                }
            });
        }
    });
    results.into_inner().expect("no thread has panicked")
}
