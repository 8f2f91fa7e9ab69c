//! What the gate costs per request, in instructions.
//!
//! ```sh
//! cargo bench --bench instructions                 # fails if the gate costs more than benches/instructions.baseline says
//! cargo bench --bench instructions -- --accept     # makes what it costs now the baseline
//! cargo bench --bench instructions -- --peers      # also the peers it is compared with nowhere else
//! ```
//!
//! Needs `valgrind`, and the runner of `gungraun` in the version that Cargo.lock has:
//! `cargo install --locked gungraun-runner --version 0.20.0`.
//!
//! Callgrind counts instructions, so a busy machine changes nothing. A row is a batch of requests through a service that
//! has served them before; building service and requests is not counted. What the client alone takes is subtracted, so
//! that a batch's own cost is, too. The gate's hash has a random seed, so the counts of two runs may differ by an
//! instruction or two; that is what the margin is for.

#[path = "fast"]
mod fast {
    #![allow(dead_code, reason = "other benches use the rest of it")]

    pub(crate) mod peers;
    pub(crate) mod report;
}

use std::fmt;
use std::fs;
use std::process::{Command, ExitCode, Stdio};

use clap::Parser;
use http::Uri;
use serde_json::Value;

use crate::fast::peers::{Answer, BARE, CONCURRENCY_LIMIT, GATE, GOVERNOR, Lane, PEERS, Peer, uri};
use crate::fast::report::Report;

const REQUESTS: usize = 64;

const BASELINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions.baseline");

/// How a process is started that counts: [`counted`] has a `main` of its own. Without `--bench` it would only test.
const COUNT: [&str; 3] = ["--output-format=json", "--nosummary=true", "--bench"];

/// Counts the instructions that the gate adds to a request.
#[derive(Debug, Parser)]
#[command(name = "instructions")]
struct Args {
    /// Write the baseline instead of comparing with it
    #[arg(long)]
    accept: bool,
    /// Count what all the peers add, too: it takes minutes
    #[arg(long)]
    peers: bool,
    /// Nothing here can be shortened
    #[arg(long, hide = true)]
    quick: bool,
    /// Cargo says so
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let first = std::env::args().nth(1);
    if first.is_some_and(|first| first == COUNT[0] || first == "--gungraun-run") {
        counted::run();
        return ExitCode::SUCCESS;
    }
    let args = Args::parse();
    let Some(mut counts) = Counts::take("gate", gate_rows()) else {
        return ExitCode::FAILURE;
    };
    if args.peers {
        counts.0.extend(Counts::take("peers", peer_rows()).expect("it ran before").0);
    }
    let mut report = Report::new(false);
    report.section("Added instructions per request");
    counts.print();
    counts.goals(&mut report);
    let kept = if args.accept { accept(&counts) } else { compare(&counts) };
    report.close();
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

// --- what is counted ----------------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq)]
enum Case {
    /// An empty response, always of the same host.
    OneHost,
    /// An empty response, each of another one of so many hosts that were all asked before.
    Hosts(usize),
    TenHeaders,
    Body,
    Port,
    Uppercase,
}

const CASES: [Case; 8] = [
    Case::OneHost,
    Case::Hosts(1_000),
    Case::Hosts(100_000),
    Case::Hosts(1_000_000),
    Case::TenHeaders,
    Case::Body,
    Case::Port,
    Case::Uppercase,
];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OneHost => f.pad("one host"),
            Self::Hosts(hosts) if hosts < 1_000_000 => f.pad(&format!("{}k hosts", hosts / 1_000)),
            Self::Hosts(hosts) => f.pad(&format!("{}M hosts", hosts / 1_000_000)),
            Self::TenHeaders => f.pad("ten headers"),
            Self::Body => f.pad("body to read"),
            Self::Port => f.pad("explicit port"),
            Self::Uppercase => f.pad("upper case"),
        }
    }
}

impl Case {
    fn hosts(self) -> usize {
        if let Self::Hosts(hosts) = self { hosts } else { 1 }
    }

    fn uri(self, host: usize) -> Uri {
        match self {
            Self::Port => Uri::from_static("http://localhost:8080/feed"),
            Self::Uppercase => Uri::from_static("https://HOST-000000.EXAMPLE.COM/feed"),
            _ => uri(host),
        }
    }

    fn answer(self) -> Answer {
        match self {
            Self::TenHeaders => Answer::TenHeaders,
            Self::Body => Answer::Body,
            _ => Answer::Empty,
        }
    }

    /// Of a peer that remembers no host the number of hosts is no matter.
    fn tells(self, peer: &Peer) -> bool {
        peer.keyed || !matches!(self, Self::Hosts(_))
    }
}

type Row = (Peer, Case);

/// What the baseline and the goals need.
fn gate_rows() -> Vec<Row> {
    let bare = CASES.into_iter().filter(|case| case.tells(&BARE)).map(|case| (BARE, case));
    let yardsticks = [(CONCURRENCY_LIMIT, Case::OneHost), (GOVERNOR, Case::OneHost)];
    bare.chain(yardsticks).chain(CASES.map(|case| (GATE, case))).collect()
}

/// All the others.
fn peer_rows() -> Vec<Row> {
    let done = gate_rows();
    let rows = PEERS.into_iter().flat_map(|peer| CASES.into_iter().map(move |case| (peer, case)));
    rows.filter(|(peer, case)| case.tells(peer) && !done.iter().any(|(it, of)| it.name == peer.name && of == case))
        .collect()
}

/// A service that is warm, and requests for it.
fn prepare((peer, case): Row) -> (Box<dyn Lane>, Vec<Uri>) {
    let mut lane = (peer.lane)(case.answer());
    let mut send = |hosts: &mut dyn Iterator<Item = usize>| {
        let uris: Vec<_> = hosts.map(|host| case.uri(host)).collect();
        lane.load(&uris);
        lane.send();
    };
    let hosts = case.hosts();
    for first in (0..hosts).step_by(REQUESTS) {
        send(&mut (first..hosts.min(first + REQUESTS)));
    }
    // Each was asked in its turn, and most of the others since: nothing that a peer keeps of the latest ones helps.
    let uris: Vec<_> = (0..REQUESTS).map(|request| case.uri(request * hosts / REQUESTS)).collect();
    lane.load(&uris);
    (lane, uris)
}

mod counted {
    use gungraun::Callgrind;
    use gungraun::prelude::*;

    use super::{Lane, Uri, gate_rows, peer_rows, prepare};

    #[library_benchmark]
    #[benches::gate(iter = gate_rows(), setup = prepare)]
    #[benches::peers(iter = peer_rows(), setup = prepare)]
    fn requests((mut lane, uris): (Box<dyn Lane>, Vec<Uri>)) -> (Box<dyn Lane>, Vec<Uri>) {
        lane.send();
        // Dropped by the caller, uncounted.
        (lane, uris)
    }

    library_benchmark_group!(name = added, benchmarks = requests);
    main!(
        config = LibraryBenchmarkConfig::default().tool(Callgrind::with_args(["--cache-sim=no"])),
        library_benchmark_groups = added
    );

    /// The `main` of that macro is private.
    pub(super) fn run() {
        main();
    }
}

// --- the counts ---------------------------------------------------------------------------------------------------

/// Instructions per request.
struct Counts(Vec<(Row, f64)>);

impl Counts {
    /// `None` if nothing could be counted; standard error says why.
    fn take(id: &str, rows: Vec<Row>) -> Option<Self> {
        let program = std::env::current_exe().expect("this program has a path");
        let output = Command::new(program).args(COUNT).arg(format!("*::{id}_*")).stderr(Stdio::inherit()).output();
        let output = output.expect("this program runs again");
        if !output.status.success() {
            eprintln!("Nothing was counted. It takes valgrind (Debian: apt-get install valgrind), and the runner:");
            eprintln!("cargo install --locked gungraun-runner --version 0.20.0");
            return None;
        }
        let printed = String::from_utf8(output.stdout).expect("text");
        let totals: Vec<_> =
            printed.lines().map(|line| serde_json::from_str(line).expect("a summary in JSON")).collect();
        assert_eq!(totals.len(), rows.len(), "a summary for every row");
        let counts = rows.into_iter().enumerate().map(|(index, row)| {
            let id = format!("{id}_{index}");
            let summary: &Value = totals.iter().find(|summary: &&Value| summary["id"] == id).expect("one of this row");
            let total = &summary["profiles"][0]["data"]["total"]["metrics"]["Ir"]["values"]["new"];
            (row, total.as_u64().expect("a count") as f64 / REQUESTS as f64)
        });
        Some(Self(counts.collect()))
    }

    fn total(&self, name: &str, case: Case) -> Option<f64> {
        self.0.iter().find(|((peer, of), _)| peer.name == name && *of == case).map(|&(_, count)| count)
    }

    /// What this peer adds to its bare client; what a request takes if it is bare itself.
    fn added(&self, peer: &Peer, case: Case) -> Option<f64> {
        let total = self.total(peer.name, case)?;
        if peer.is_bare() {
            return Some(total);
        }
        let alike = if case.tells(&BARE) { case } else { Case::OneHost };
        Some(total - self.total(peer.bare, alike)?)
    }

    fn gate(&self, case: Case) -> f64 {
        self.added(&GATE, case).expect("it is always counted").round()
    }

    fn print(&self) {
        print!("{:<20}", "");
        CASES.iter().for_each(|case| print!("{case:>15}"));
        println!();
        for peer in PEERS {
            let added = CASES.map(|case| self.added(&peer, case));
            if added.iter().any(Option::is_some) {
                let label = if peer.is_bare() { format!("{} (all)", peer.name) } else { peer.name.to_owned() };
                print!("{label:<20}");
                for added in added {
                    print!("{:>15}", added.map_or_else(String::new, |added| format!("{added:.0}")));
                }
                println!();
            }
        }
    }

    fn goals(&self, report: &mut Report) {
        let empty = [Case::OneHost, Case::Hosts(1_000), Case::Hosts(100_000), Case::Hosts(1_000_000)];
        let most = empty.map(|case| self.gate(case)).into_iter().fold(0.0, f64::max);
        let to = |peer| most / self.added(&peer, Case::OneHost).expect("it is always counted");
        let (limit, governor) = (to(CONCURRENCY_LIMIT), to(GOVERNOR));
        report.goal("added instructions, 1 to 1M hosts", most, "<=110", most <= 110.0);
        report.goal("added instructions, beside ConcurrencyLimit", format!("{limit:.2}x"), "<=0.61x", limit <= 0.61);
        report.goal("added instructions, beside governor", format!("{governor:.2}x"), "<=0.2x", governor <= 0.2);
        let headers = self.gate(Case::TenHeaders);
        report.goal("added instructions, ten headers", headers, "<=250", headers <= 250.0);
    }
}

// --- the baseline -------------------------------------------------------------------------------------------------

fn accept(counts: &Counts) -> bool {
    let mut lines = String::from(
        "# What the gate adds to a request, in instructions: cargo bench --bench instructions -- --accept\n",
    );
    for case in CASES {
        lines += &format!("{case:<15}{:>5}\n", counts.gate(case));
    }
    fs::write(BASELINE, lines).expect("the baseline can be written");
    println!("\nAccepted: {BASELINE}");
    true
}

/// Whether no case costs more than the baseline says.
fn compare(counts: &Counts) -> bool {
    let baseline = fs::read_to_string(BASELINE).expect("a baseline");
    let accepted = |case: Case| -> f64 {
        let line = baseline.lines().find_map(|line| line.strip_prefix(&case.to_string()));
        let count = line.unwrap_or_else(|| {
            panic!("no {case:?} in the baseline; --accept makes a new one", case = case.to_string())
        });
        count.trim().parse().expect("a count in the baseline")
    };
    println!();
    let mut kept = true;
    for case in CASES {
        let (accepted, now) = (accepted(case), counts.gate(case));
        let margin = f64::max(5.0, 0.03 * accepted);
        if now > accepted + margin {
            kept = false;
            println!("FAILED: {case}: the gate adds {now} instructions, and {accepted} were accepted.");
        } else if now < accepted - margin {
            println!(
                "Better: {case}: the gate adds {now} instructions, and {accepted} were accepted. Please keep that: --accept"
            );
        }
    }
    if !kept {
        println!("If it is worth its price: cargo bench --bench instructions -- --accept, and commit the baseline.");
    }
    kept
}
