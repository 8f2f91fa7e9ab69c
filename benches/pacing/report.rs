//! Tables, and the trace of one run.

use std::collections::HashSet;

use crate::Results;
use crate::client::Policy;
use crate::metrics::Figures;
use crate::run::{Cell, Run};

/// A column: its heading, its number, and how many decimals that has.
type Column = (&'static str, fn(&Figures) -> f64, usize);

const COLUMNS: [Column; 10] = [
    ("makespan", |figures| figures.makespan, 2),
    ("refusals", |figures| figures.refusals, 3),
    ("1-go", |figures| figures.in_one_go, 3),
    ("recovery", |figures| figures.recovery, 1),
    ("kept", |figures| figures.pacing, 1),
    ("fair", |figures| figures.fairness, 2),
    ("p50", |figures| figures.wait_p50, 0),
    ("p99", |figures| figures.wait_p99, 0),
    ("sheds", |figures| figures.sheds, 2),
    ("locked", |figures| figures.locked_out, 3),
];

const LEGEND: &str = "\
Every figure is a mean over n seeds, a ratio the mean of the seeds' ratios.
makespan  from the first request to the last answer, over the same of a client that knows the provider
refusals  per success                         recovery  seconds from a refusal to the next success
1-go      share of requests whose caller      kept      seconds for which pacing kept a request
          did not have to come back           fair      Jain's index of the callers' mean waits
p50, p99  seconds from asking to answer       sheds     per request
locked    share of requests never served      early     sends before a time that the host had named (a sum)
";

pub(crate) fn tables(cells: &[Cell], results: &Results) {
    print!("{LEGEND}");
    println!("\nThe gate's two pacings: reactive, learned\n");
    let mut seen = HashSet::new();
    println!("{}{}", scenario_heading(), heading(18));
    for cell in cells {
        let Cell { kind, hints, load, .. } = *cell;
        if !seen.insert((kind, hints, load)) {
            continue;
        }
        let of = |policy| results.get(&Cell { policy, ..*cell });
        if let (Some(reactive), Some(learned)) = (of(Policy::Reactive), of(Policy::Learned)) {
            let both = |column: &Column| format!("{} {:>8}", number(reactive, column), number(learned, column));
            println!("{}{}", scenario(cell), row(learned, 18, both));
        }
    }
    println!("\nAll policies\n");
    println!("{}{:<16}{}", scenario_heading(), "policy", heading(10));
    for cell in cells.iter().filter(|cell| crate::compared(cell.kind, cell.hints, cell.load)) {
        if let Some(figures) = results.get(cell) {
            let one = |column: &Column| number(figures, column);
            println!("{}{:<16}{}", scenario(cell), cell.policy.name(), row(figures, 10, one));
        }
    }
    println!();
}

fn scenario_heading() -> String {
    format!("{:<18}{:<13}{:<15}", "provider", "hints", "load")
}

fn scenario(cell: &Cell) -> String {
    format!("{:<18}{:<13}{:<15}", cell.kind.name(), cell.hints.name(), cell.load.name())
}

fn heading(width: usize) -> String {
    let columns: String = COLUMNS.iter().map(|(name, ..)| format!("{name:>width$}")).collect();
    format!("{columns}{:>6}{:>5}", "early", "n")
}

fn row(figures: &Figures, width: usize, text: impl Fn(&Column) -> String) -> String {
    let columns: String = COLUMNS.iter().map(|column| format!("{:>width$}", text(column))).collect();
    format!("{columns}{:>6}{:>5}", figures.early, figures.runs)
}

fn number(figures: &Figures, (_, get, decimals): &Column) -> String {
    format!("{:.decimals$}", get(figures))
}

/// One run, event by event, and what the gate knew then.
pub(crate) fn trace(run: &Run) {
    println!("clairvoyant: {:?}", run.clairvoyant);
    println!("{:>10}  {:<10}{:>10}{:>11}{:>12}", "time", "event", "gap", "too short", "known good");
    for event in &run.record {
        let known = run.lessons.iter().rev().find(|lesson| lesson.at <= event.at).copied().unwrap_or_default();
        let [at, gap, too_short, known_good] =
            [event.at, known.gap, known.too_short, known.known_good].map(|time| time.as_secs_f64());
        println!("{at:>10.3}  {:<10}{gap:>10.3}{too_short:>11.3}{known_good:>12.3}", format!("{:?}", event.what));
    }
}
