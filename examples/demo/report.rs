//! What a person reads in the terminal, at most 100 columns wide: introduction, table, timeline, claims.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::iter;
use std::time::Duration;

use crate::claims::{Claim, Figures};
use crate::run::{Answer, FEEDS, HEADERLESS_WINDOW, HostRun, PATIENCE, RETRY_AFTER_WINDOW, Run, Way};
use crate::{SCALE, scaled};

/// Colours, where they are wanted. Text is padded before it is coloured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ink {
    pub(crate) colours: bool,
}

const BOLD: &str = "1";
const DIM: &str = "2";
const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";

impl Ink {
    fn paint(self, code: &str, text: impl AsRef<str>) -> String {
        let text = text.as_ref();
        if self.colours && !text.trim().is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Writing to a string cannot fail, so there is no result to look at.
macro_rules! line {
    ($out:expr) => { $out.push('\n') };
    ($out:expr, $($text:tt)*) => {{
        let _ = writeln!($out, $($text)*);
    }};
}

// --- introduction -------------------------------------------------------------------------------------------------

pub(crate) fn introduction(ink: Ink) -> String {
    let mut out = String::new();
    let here = |seconds: f64| span(scaled(seconds));
    line!(
        out,
        "{}",
        ink.paint(
            BOLD,
            format!("{FEEDS} feeds of each of three providers on loopback, all {} at once, four ways", FEEDS * 3)
        )
    );
    line!(out);
    line!(
        out,
        "  headerless    one feed per {HEADERLESS_WINDOW} s and client, else a bare 429 (the provider of ADR-0016)"
    );
    line!(
        out,
        "  Retry-After   one feed per {RETRY_AFTER_WINDOW} s and client, else a 429 that says when to come back"
    );
    line!(out, "  healthy       serves everybody");
    line!(out);
    line!(
        out,
        "Scaled down 1:{SCALE}: every second of the above, and of the gate's settings, takes {} here.",
        here(1.0)
    );
    line!(
        out,
        "The gate's first cooldown of 2 s is {}, its spacing of 1 s {}, its budget of 60 s {}.",
        here(2.0),
        here(1.0),
        here(60.0)
    );
    line!(out, "Times below are as measured. This takes about 15 seconds.");
    out
}

// --- table --------------------------------------------------------------------------------------------------------

pub(crate) fn table(runs: &[Run], ink: Ink) -> String {
    let mut out = String::new();
    line!(out);
    line!(out, "{:26}{:>16}   {:>20}   {:>17}", "", "requests", "feeds", "mean wait, for");
    line!(
        out,
        "{:12} {:12} {:>7} {:>8}   {:>7} {:>6} {:>5}   {:>8} {:>8}   {:>7}",
        "provider",
        "client",
        "sent",
        "refused",
        "served",
        "shed",
        "lost",
        "pacing",
        "the cap",
        "done in"
    );
    let rule = ink.paint(DIM, "─".repeat(95));
    let by_run: Vec<_> = runs.iter().map(|run| (run.way, run.figures())).collect();
    for n in 0..by_run.first().map_or(0, |(_, hosts)| hosts.len()) {
        line!(out, "{rule}");
        for (way, hosts) in &by_run {
            line!(out, "{}", row(*way, &hosts[n], ink));
        }
    }
    line!(out, "{rule}");
    line!(
        out,
        "{}",
        ink.paint(DIM, "shed: the gate's RateLimited, which says when to come back   lost: handed the provider's 429")
    );
    let learnt = runs.iter().filter(|run| run.way == Way::Gate).flat_map(|run| &run.hosts);
    let learnt: Vec<_> = learnt.filter(|host| !host.gap.is_zero()).map(gap).collect();
    line!(
        out,
        "{}",
        ink.paint(DIM, format!("learnt by the gate, scaled back: {} between requests", learnt.join(", ")))
    );
    out
}

/// What the gate leaves between two requests to a host, in seconds of the real world.
fn gap(host: &HostRun) -> String {
    format!("{} {:.1} s", host.provider, host.gap.as_secs_f64() * f64::from(SCALE))
}

fn row(way: Way, figures: &Figures, ink: Ink) -> String {
    let Figures { provider, sent, refused, served, shed, lost, feeds, pacing, queued, took, .. } = *figures;
    let per_feed = |wait: Duration| match way {
        Way::NoGate => "-".to_owned(),
        _ => span(wait / u32::try_from(feeds.max(1)).unwrap_or(u32::MAX)),
    };
    let provider = if way == Way::NoGate { provider } else { "" };
    let served_of = format!("{:>7}", format!("{served}/{feeds}"));
    let bad = |count: usize, width: usize| {
        let text = format!("{count:>width$}");
        if count > 0 { ink.paint(RED, text) } else { text }
    };
    format!(
        "{} {:12} {sent:>7} {}   {} {shed:>6} {}   {:>8} {:>8}   {:>7}",
        ink.paint(BOLD, format!("{provider:12}")),
        way.name(),
        bad(refused, 8),
        if served == feeds { ink.paint(GREEN, served_of) } else { served_of },
        bad(lost, 5),
        per_feed(pacing),
        per_feed(queued),
        span(took),
    )
}

/// `0`, `80 ms`, `2.4 s`.
fn span(time: Duration) -> String {
    if time.is_zero() {
        "0".to_owned()
    } else if time < Duration::from_secs(1) {
        format!("{:.0} ms", (time.as_secs_f64() * 1e3).ceil())
    } else {
        format!("{:.1} s", time.as_secs_f64())
    }
}

// --- timeline -----------------------------------------------------------------------------------------------------

const NAME: usize = 13;
const CELLS: usize = 82;

pub(crate) fn timeline(runs: &[Run], ink: Ink) -> String {
    let mut out = String::new();
    line!(out);
    let [served, refused] = [ink.paint(GREEN, "●"), ink.paint(RED, "✕")];
    let [shed, paced, queued] = [ink.paint(YELLOW, "▲"), ink.paint(YELLOW, "─"), ink.paint(DIM, "·")];
    line!(
        out,
        "{served} served  {refused} refused  {shed} shed (and how many)   \
         {paced} held back by pacing  {queued} queued behind the cap"
    );
    for run in runs {
        // The short burst without a gate is drawn to the scale of the one with it.
        let to_scale = runs.iter().find(|other| run.way == Way::NoGate && other.way == Way::Gate).unwrap_or(run);
        let length = to_scale.took();
        line!(out);
        line!(out, "{} {}", ink.paint(BOLD, run.way.name()), ink.paint(DIM, format!("· {}", run.way.description())));
        for host in &run.hosts {
            line!(out, "{:NAME$} {}", host.provider, lane(host, run, length, ink));
        }
        line!(out, "{}", ink.paint(DIM, axis(length)));
    }
    out
}

/// A ruler, and the times below its ticks.
fn axis(length: Duration) -> String {
    let mut ticks = String::new();
    let mut labels = format!("{:NAME$} ", "");
    for n in 0..=4_usize {
        let at = n * (CELLS - 1) / 4;
        let column = NAME + 1 + at;
        ticks.push_str(&"─".repeat(at - ticks.chars().count()));
        ticks.push(['└', '┴', '┴', '┴', '┘'][n]);
        let label = format!("{:.1} s", length.as_secs_f64() * n as f64 / 4.0);
        // Centred below its tick; the first one begins there, the last one ends there.
        let start = match n {
            0 => column,
            4 => column + 1 - label.len(),
            _ => column - label.len() / 2,
        };
        labels.push_str(&" ".repeat(start.saturating_sub(labels.len())));
        labels.push_str(&label);
    }
    format!("{:NAME$} {ticks}\n{labels}", "")
}

/// What happened in one cell of the line.
#[derive(Clone, Default)]
struct Cell {
    served: usize,
    refused: usize,
    shed: usize,
    paced: bool,
    queued: bool,
}

/// One host's line. Marks that do not fit into their cell go on in the next ones.
fn lane(host: &HostRun, run: &Run, length: Duration, ink: Ink) -> String {
    let cell = |at: Duration| {
        let share = at.as_secs_f64() / length.as_secs_f64().max(1e-9);
        ((share * CELLS as f64) as usize).min(CELLS - 1)
    };
    let mut cells = vec![Cell::default(); CELLS];
    for hit in host.hits.iter().filter(|hit| hit.refused) {
        cells[cell(hit.at - run.start)].refused += 1;
    }
    for end in &host.ends {
        let cell = &mut cells[cell(end.at - run.start)];
        match end.answer {
            Answer::Served => cell.served += 1,
            Answer::Shed => cell.shed += 1,
            // Its last refusal is there already.
            Answer::Lost => {}
        }
    }
    for wait in &host.waits {
        let until = wait.until - run.start;
        for cell in &mut cells[cell(until.saturating_sub(wait.waited))..=cell(until)] {
            cell.paced |= !wait.pacing.is_zero();
            cell.queued = true;
        }
    }

    let mut out = String::new();
    let mut pending = VecDeque::new();
    for cell in cells {
        for (mark, colour, count) in [('●', GREEN, cell.served), ('✕', RED, cell.refused), ('▲', YELLOW, cell.shed)]
        {
            if count > 0 {
                let number = if count > 1 { count.to_string() } else { String::new() };
                pending.extend(iter::once(mark).chain(number.chars()).map(|c| (c, colour)));
            }
        }
        let background = match cell {
            Cell { paced: true, .. } => ('─', YELLOW),
            Cell { queued: true, .. } => ('·', DIM),
            _ => (' ', DIM),
        };
        let (mark, colour) = pending.pop_front().unwrap_or(background);
        out.push_str(&ink.paint(colour, mark.to_string()));
    }
    // What is left at the end has no cell of its own any more.
    out.extend(pending.into_iter().map(|(mark, colour)| ink.paint(colour, mark.to_string())));
    out.trim_end().to_owned()
}

// --- claims -------------------------------------------------------------------------------------------------------

pub(crate) fn claims(claims: &[Claim], ink: Ink) -> String {
    let mut out = String::new();
    line!(out);
    for claim in claims {
        let mark = if claim.holds { ink.paint(GREEN, "✔") } else { ink.paint(RED, "✘ NOT TRUE:") };
        line!(out, "{mark} {}", claim.text);
    }
    line!(out);
    line!(out, "A budget of 60 s, the default, sheds what cannot be had in time and says when it can: here, feeds of");
    line!(out, "Retry-After. Callers with {} minutes got all of headerless: see `gate` in run.rs.", PATIENCE / 60.0);
    out
}
