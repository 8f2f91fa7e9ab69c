//! One host, more who want a permit than there are, and what it costs to hand one on.
//!
//! Time is compared with that of `tokio`'s semaphore in runs that take turns, as the median of the ratios; instructions are
//! counted in a runtime of one thread.

pub(crate) mod crowd;
pub(crate) mod line;

use tokio::runtime::Runtime;

use self::crowd::{Crowd, Took, runtime};
use self::line::{Gate, GatedClient, LimitedClient, Line, Tokio};
use crate::child;
use crate::report::Report;
use crate::statistics::median;

const WAITERS: [usize; 4] = [10, 64, 1_000, 10_000];

/// Of those whose handoffs per second are a goal.
const GOAL_WAITERS: usize = 64;

pub(crate) fn run(report: &mut Report) {
    report.section("contention: handing on the permits of one host, beside tokio's semaphore");
    println!("direct: Hosts::acquire and acquire_owned. service: the gate and the semaphore in front of a client.");
    println!(
        "A permit is kept while everybody who can run does once. instr: per handoff. polls: per wait. early: waiters"
    );
    println!("that overtook one who had come before them.\n");
    println!(
        "{:<9}{:>7}{:>8}{:>8}{:>11}{:>11}{:>7}{:>8}{:>8}{:>7}{:>7}{:>7}",
        "",
        "threads",
        "permits",
        "waiters",
        "gate /s",
        "tokio /s",
        "ratio",
        "instr",
        "tokio",
        "polls",
        "tokio",
        "early"
    );
    let mut rows = Vec::new();
    for threads in [1, 2] {
        let runtime = runtime(threads);
        for permits in [1, 8] {
            for waiters in WAITERS {
                let cell = Cell { threads, permits, waiters };
                rows.push(cell.measure::<Gate, Tokio>("direct", &runtime, report.quick));
                rows.push(cell.measure::<GatedClient, LimitedClient>("service", &runtime, report.quick));
            }
        }
    }
    goals(&rows, report);
}

fn goals(rows: &[Row], report: &mut Report) {
    for (threads, words, target) in [(1, "one thread", 1.4), (2, "two threads", 1.1)] {
        let goal = Cell { threads, permits: 1, waiters: GOAL_WAITERS };
        let row = rows.iter().find(|row| row.cell == goal && row.kind == "direct").expect("it was measured");
        let name = format!("handoffs per second, {words}, to acquire_owned");
        report.goal(name, format!("{:.2}x", row.ratio), format!(">={target}x"), row.ratio >= target);
    }
    let polls = rows.iter().map(|row| row.polls).fold(0.0, f64::max);
    report.goal("polls per wait, any number of waiters", format!("{polls:.2}"), "<=3.1", polls <= 3.1);
    let early: usize = rows.iter().filter_map(|row| row.early).sum();
    report.goal("waiters that overtook one who had come before them", early, "0", early == 0);
}

/// What is counted: one crowd.
pub(crate) fn child(case: &[&str]) -> bool {
    let ["handoffs", line, waiters, rounds] = case else { return false };
    let crowd = Crowd { permits: 1, waiters: child::number(waiters), rounds: child::number(rounds) };
    let runtime = runtime(1);
    match *line {
        "gate-direct" => crowd.pass::<Gate>(&runtime),
        "tokio-direct" => crowd.pass::<Tokio>(&runtime),
        "gate-service" => crowd.pass::<GatedClient>(&runtime),
        "tokio-service" => crowd.pass::<LimitedClient>(&runtime),
        other => panic!("no such line: {other}"),
    };
    true
}

/// Instructions per handoff of a crowd for one permit, with one thread.
pub(crate) fn instructions(line: &str, waiters: usize) -> f64 {
    let few = (1_000 / waiters).max(1);
    let many = few + (5_000 / waiters).max(1);
    child::instructions_each(|rounds| format!("handoffs {line} {waiters} {rounds}"), few, many) / waiters as f64
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Cell {
    threads: usize,
    permits: usize,
    waiters: usize,
}

struct Row {
    cell: Cell,
    kind: &'static str,
    /// Of handoffs per second, gate to semaphore.
    ratio: f64,
    polls: f64,
    /// Known for one permit.
    early: Option<usize>,
}

impl Cell {
    fn measure<G: Line, T: Line>(self, kind: &'static str, runtime: &Runtime, quick: bool) -> Row {
        let Self { threads, permits, waiters } = self;
        let (runs, handoffs) = if quick { (5, 2_000) } else { (31, 6_000) };
        let crowd = Crowd { permits, waiters, rounds: (handoffs / waiters).max(2) };
        let (gate, tokio): (Vec<Took>, Vec<Took>) =
            (0..runs).map(|_| (crowd.pass::<G>(runtime), crowd.pass::<T>(runtime))).unzip();
        let (gate_rates, tokio_rates) = (rates(crowd, &gate), rates(crowd, &tokio));
        let ratios: Vec<_> = gate_rates.iter().zip(&tokio_rates).map(|(gate, tokio)| gate / tokio).collect();
        let row = Row {
            cell: self,
            kind,
            ratio: median(&ratios),
            polls: polls(crowd, &gate),
            early: (permits == 1).then(|| Crowd::inversions::<G>(runtime, waiters)),
        };
        let counted = |line: &str| {
            (threads == 1 && permits == 1).then(|| format!("{:.0}", instructions(&format!("{line}-{kind}"), waiters)))
        };
        println!(
            "{kind:<9}{threads:>7}{permits:>8}{waiters:>8}{:>11.0}{:>11.0}{:>7.2}{:>8}{:>8}{:>7.2}{:>7.2}{:>7}",
            median(&gate_rates),
            median(&tokio_rates),
            row.ratio,
            or_dash(counted("gate")),
            or_dash(counted("tokio")),
            row.polls,
            polls(crowd, &tokio),
            or_dash(row.early),
        );
        row
    }
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn rates(crowd: Crowd, took: &[Took]) -> Vec<f64> {
    took.iter().map(|took| crowd.handoffs() as f64 / took.time.as_secs_f64()).collect()
}

/// Of one wait, in the worst of the runs.
fn polls(crowd: Crowd, took: &[Took]) -> f64 {
    took.iter().map(|took| took.polls as f64 / crowd.handoffs() as f64).fold(0.0, f64::max)
}
