//! Who did what when, at most 100 columns wide.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::parts::{Part, Redis, Stage};
use crate::team::Said;
use crate::{LIMIT, WORKERS};

/// Writing to a string cannot fail, so there is no result to look at.
macro_rules! line {
    ($out:expr) => { $out.push('\n') };
    ($out:expr, $($text:tt)*) => {{
        let _ = writeln!($out, $($text)*);
    }};
}

const NAME: usize = 11;
const CELLS: usize = 84;

pub(crate) fn introduction(stage: &Stage) -> String {
    let mut out = String::new();
    line!(out, "One feed provider that takes {LIMIT} requests at a time, {WORKERS} processes that fetch from it, and");
    line!(out, "{}.", if stage.is_ours() { "a Redis that is killed on the way" } else { "the Redis named" });
    line!(out, "This takes about 10 seconds.");
    line!(out);
    line!(out, "● has got a feed  ✕ is refused  † is killed  ─ has one limit with all  ┄ has a limit of its own");
    out
}

pub(crate) fn draw<F>(part: &Part<F>) -> String {
    let scale = Scale::of(part);
    let mut out = String::new();
    line!(out);
    line!(out, "{}", part.title);
    for worker in 0..WORKERS {
        line!(out, "{:NAME$} {}", format!("process {}", worker + 1), lane(worker, part, &scale));
    }
    line!(out, "{:NAME$} {}", "in flight", in_flight(part, &scale));
    if let Some(redis) = redis(part, &scale) {
        line!(out, "{:NAME$} {redis}", "Redis");
    }
    if let Some([dead, free]) = part.orphan {
        line!(out, "{:NAME$} {}", "its permits", row(|n| if scale.has(n, dead, free) { '▬' } else { ' ' }));
    }
    line!(out, "{}", axis(scale.length));
    out
}

/// Which cell an instant is in.
struct Scale {
    start: Instant,
    length: Duration,
}

impl Scale {
    /// From the first feed given to the last thing of any note.
    fn of<F>(part: &Part<F>) -> Self {
        let events = part.events.iter().filter(|event| event.said != Said::Gone).map(|event| event.at);
        let ends = events.chain(part.orphan.map(|[_, free]| free));
        let length = ends.map(|at| at.saturating_duration_since(part.start)).max().unwrap_or_default();
        Self { start: part.start, length: length.max(Duration::from_millis(1)) }
    }

    fn cell(&self, at: Instant) -> usize {
        let share = at.saturating_duration_since(self.start).as_secs_f64() / self.length.as_secs_f64();
        ((share * CELLS as f64) as usize).min(CELLS - 1)
    }

    /// Whether the cell is touched by this span.
    fn has(&self, cell: usize, from: Instant, to: Instant) -> bool {
        (self.cell(from)..=self.cell(to)).contains(&cell)
    }
}

fn row(mark: impl Fn(usize) -> char) -> String {
    let row: String = (0..CELLS).map(mark).collect();
    row.trim_end().to_owned()
}

/// One process. A cell has one mark, the rarest.
fn lane<F>(worker: usize, part: &Part<F>, scale: &Scale) -> String {
    let events = || part.events.iter().filter(move |event| event.worker == worker);
    let at = |said: Said| events().find(|event| event.said == said).map(|event| scale.cell(event.at));
    let got: Vec<_> = events().filter(|event| matches!(event.said, Said::Has(_))).map(|e| scale.cell(e.at)).collect();
    let refused = part.hits.iter().filter(|hit| hit.worker == worker && hit.refused);
    let refused: Vec<_> = refused.map(|hit| scale.cell(hit.at)).collect();
    let (killed, degraded, recovered) = (at(Said::Gone), at(Said::Degraded), at(Said::Recovered));
    let end = killed.or(got.last().copied()).unwrap_or_default();
    row(|cell| match part.redis {
        _ if killed == Some(cell) => '†',
        _ if refused.contains(&cell) => '✕',
        _ if got.contains(&cell) => '●',
        _ if cell > end => ' ',
        Redis::Unused => '┄',
        _ if degraded.is_some_and(|from| cell >= from) && recovered.is_none_or(|to| cell < to) => '┄',
        _ => '─',
    })
}

/// The most requests the provider had to do with in each cell.
fn in_flight<F>(part: &Part<F>, scale: &Scale) -> String {
    row(|cell| {
        let accepted = part.hits.iter().filter(|hit| !hit.refused);
        let during = accepted.filter(|hit| scale.has(cell, hit.at, hit.until.unwrap_or(hit.at)));
        // One that goes makes room for another in the same cell: what was counted at their arrival is what there was.
        let arrivals = part.hits.iter().filter(|hit| scale.cell(hit.at) == cell).map(|hit| hit.in_flight);
        let most = arrivals.max().unwrap_or_else(|| during.count());
        if most == 0 { ' ' } else { char::from_digit(most as u32, 36).unwrap_or('+') }
    })
}

fn redis<F>(part: &Part<F>, scale: &Scale) -> Option<String> {
    match part.redis {
        Redis::Unused => None,
        Redis::Up => Some(row(|_| '━')),
        Redis::Down([from, to]) => {
            let (from, to) = (scale.cell(from), scale.cell(to));
            Some(row(|cell| match cell {
                _ if cell == from => '†',
                _ if from < cell && cell < to => ' ',
                _ => '━',
            }))
        }
    }
}

fn axis(length: Duration) -> String {
    let end = format!("{:.1} s", length.as_secs_f64());
    let line = "─".repeat(CELLS - "0 s  ".len() - end.len());
    format!("{:NAME$} 0 s {line} {end}", "")
}
