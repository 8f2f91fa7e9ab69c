//! What a drill has measured: a row of the table, and what of it is not as it must be.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use tower_host_gate::Queue;

use super::fleet::{Fleet, Tally, scope};

/// Names the file that rows are added to, and asks for the long form of the drills.
const TABLE: &str = "HOST_GATE_DRILLS";

pub fn is_long() -> bool {
    std::env::var_os(TABLE).is_some()
}

/// Ten seconds, or so much in the short form.
pub fn lasting(short: Duration) -> Duration {
    if is_long() { Duration::from_secs(10) } else { short }
}

/// How far a limit was used.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    pub limit: usize,
    /// While all was well.
    pub well: usize,
    /// From the break on, until all was well again; where there was one.
    pub broken: Option<usize>,
}

/// A line of the table. What a drill does not measure stays empty.
#[derive(Default)]
pub struct Row {
    drill: &'static str,
    queue: Queue,
    requests: usize,
    lost: usize,
    /// The longest the gate took to answer where nothing but the store was in the way.
    answer: Option<Duration>,
    pub in_flight: Option<Peaks>,
    pub per_window: Option<Peaks>,
    /// The longest time in which nothing was sent although there was something to send.
    pub pause: Option<Duration>,
    /// From the end of the fault until all was as before.
    pub recovery: Option<Duration>,
    /// By how much the machine was late.
    pub held_up: Option<Duration>,
    degraded: usize,
    recovered: usize,
    pub failures: usize,
    leases_left: Option<usize>,
    wrong: Vec<String>,
}

impl Row {
    /// Begins with what every drill counts, and that no request may be lost.
    pub fn new(drill: &'static str, fleet: &Fleet, tally: &Tally) -> Self {
        let sum = |count: fn(&super::fleet::Events) -> usize| -> usize {
            fleet.replicas.iter().map(|replica| count(&replica.events)).sum()
        };
        let mut row = Self {
            drill,
            queue: fleet.queue,
            requests: tally.answered + tally.lost.len(),
            lost: tally.lost.len(),
            degraded: sum(|events| events.degraded()),
            recovered: sum(|events| events.recoveries().len()),
            failures: sum(|events| events.failures()),
            ..Self::default()
        };
        row.check(tally.answered > 0, "no request was answered".to_owned());
        row.check(tally.lost.is_empty(), format!("lost: {:?}", &tally.lost[..tally.lost.len().min(3)]));
        row
    }

    /// Says what is wrong unless this holds. The drill fails once its row is in the table.
    pub fn check(&mut self, holds: bool, otherwise: String) {
        if !holds {
            self.wrong.push(otherwise);
        }
    }

    pub fn answer(&mut self, longest: Duration, at_most: Duration) {
        self.answer = Some(longest);
        self.check(longest < at_most, format!("it took {longest:?} to answer"));
    }

    /// A limit that holds all the time.
    pub fn in_flight(&mut self, most: usize, limit: usize) {
        self.in_flight = Some(Peaks { limit, well: most, broken: None });
        self.check(most <= limit, format!("{most} in flight"));
    }

    pub fn leases_left(&mut self, left: usize) {
        self.leases_left = Some(left);
        self.check(left == 0, format!("{left} leases are left that nobody has"));
    }

    /// The columns are those of `scripts/drills`.
    fn cells(&self) -> Vec<String> {
        let time = |time: Option<Duration>| time.map_or("-".to_owned(), |time| format!("{} ms", time.as_millis()));
        let number = |number: Option<usize>| number.map_or("-".to_owned(), |number| number.to_string());
        let peaks = |peaks: Option<Peaks>| {
            peaks.map_or("-".to_owned(), |Peaks { limit, well, broken }| {
                let broken = broken.map(|broken| format!(", then {broken}")).unwrap_or_default();
                format!("{well} of {limit}{broken}")
            })
        };
        vec![
            self.drill.to_owned(),
            scope(self.queue).to_owned(),
            self.requests.to_string(),
            self.lost.to_string(),
            time(self.answer),
            peaks(self.in_flight),
            peaks(self.per_window),
            time(self.pause),
            time(self.recovery),
            time(self.held_up),
            self.degraded.to_string(),
            self.recovered.to_string(),
            self.failures.to_string(),
            number(self.leases_left),
            if self.wrong.is_empty() { "ok".to_owned() } else { self.wrong.join("; ").replace(['\t', '\n'], " ") },
        ]
    }
}

/// Into the table with these; then they are judged.
pub fn publish(rows: &[Row]) {
    let lines: String = rows.iter().map(|row| row.cells().join("\t") + "\n").collect();
    print!("{lines}");
    if let Some(path) = std::env::var_os(TABLE) {
        // In one piece: other drills may be about to do the same.
        let table = File::options().create(true).append(true).open(path);
        table.and_then(|mut table| table.write_all(lines.as_bytes())).expect("a row in the table");
    }
    let wrong: Vec<_> =
        rows.iter().filter(|row| !row.wrong.is_empty()).map(|row| (scope(row.queue), &row.wrong)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
