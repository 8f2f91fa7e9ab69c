//! What the gate costs, beside its peers, measured in one run.
//!
//! ```sh
//! cargo bench --bench fast                      # everything, and at last one line per goal
//! cargo bench --bench fast -- --quick           # smaller, to see that it runs: not to be quoted
//! cargo bench --bench fast -- --only latency
//! ```
//!
//! | section | file | what |
//! |---|---|---|
//! | `allocations` | `happy.rs` | allocations per request, and the heap of the first one |
//! | `instructions` | `../instructions.rs` | instructions per request |
//! | `latency` | `../latency/interleaved.rs` | time per request, at one host and at a million |
//! | `threads` | `../latency/threads.rs` | the same on two cores |
//! | `contention` | `contention.rs` | handoffs on one host beside those of a semaphore |
//! | `memory` | `memory.rs` | heap bytes per host, waiter and request |
//! | `waiters` | `waiters.rs` | how late a million waiting requests wake |
//! | `end-to-end` | `end_to_end.rs` | requests per second of a real client to a server |
//! | `growth` | `growth.rs` | each of these costs as a curve over hosts and waiters |
//!
//! # How it measures
//!
//! **What is added.** Every peer (`peers.rs`) stands in front of the same client, which is always ready and answers at
//! once; futures are polled by hand, with a waker that does nothing. So there is neither a network nor a runtime in the
//! figures, and what the client alone takes is subtracted. Requests are built before, and in batches: a clock is read
//! once per batch, not once per request. A batch is one call through a vtable; within it everything is compiled for the
//! one peer, as it would be in a program that uses it.
//!
//! **Instructions** first, as they can be compared: callgrind counts them, and a busy machine changes nothing. They are
//! checked against a committed baseline on every change. They say little about memory, though: a cache miss counts
//! nothing.
//!
//! **Time** on a machine that is not alone drifts by more than what is to be told apart. So peers are never measured one
//! after the other, but in short turns; what a peer took is compared with what the bare client took in the same round, and
//! the median over all rounds counts. What is quoted is a ratio of two such medians of one run. The hosts advance from
//! sample to sample, so that at a million hosts the memory of a host is as cold as it would be; but a turn is long enough
//! to have a peer's own tables back in the cache, however many others there are.
//!
//! **Two threads** are pinned to two cores and start each sample together, spinning; only samples that ran side by side
//! almost to the end count, for otherwise a thread that had to wait for its core would look like one without rivals.
//!
//! **Allocations** are counted by an allocator that stands in for the system's, and counting takes time, from those who
//! allocate. Where that would tell, a program of its own measures, and this one runs it: `instructions`, `latency` and
//! `uncounted`.

#[allow(dead_code, reason = "`uncounted` uses the rest of it")]
mod child;
#[allow(dead_code, reason = "it is a section of `uncounted`")]
mod contention;
mod growth;
mod happy;
mod memory;
#[allow(dead_code, reason = "other benches use the rest of it")]
mod peers;
mod program;
mod report;
#[allow(dead_code, reason = "`uncounted` uses the rest of it")]
mod statistics;
mod waiters;

use clap::{Parser, ValueEnum};

use crate::report::Report;

/// Measures what the gate costs beside its peers.
#[derive(Debug, Parser)]
#[command(name = "fast")]
struct Args {
    /// Smaller sizes and fewer samples: it shows that everything runs, and the numbers are not to be quoted
    #[arg(long)]
    quick: bool,
    /// Only this
    #[arg(long, value_enum)]
    only: Option<Section>,
    /// Cargo says so
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Section {
    Allocations,
    Instructions,
    Latency,
    Threads,
    Contention,
    Memory,
    Waiters,
    EndToEnd,
    Growth,
}

type Run = fn(&mut Report);

/// In their order. The allocations come first: they need a process in which no gate was used.
const SECTIONS: [(Section, Run); 9] = [
    (Section::Allocations, happy::run),
    (Section::Instructions, |report| program::run(report, "instructions", &["--peers"])),
    (Section::Latency, |report| program::run(report, "latency", &["--compare", "hosts"])),
    (Section::Threads, |report| program::run(report, "latency", &["--compare", "threads"])),
    (Section::Contention, |report| program::run(report, "uncounted", &["--only", "contention"])),
    (Section::Memory, memory::run),
    (Section::Waiters, waiters::run),
    (Section::EndToEnd, |report| program::run(report, "uncounted", &["--only", "end-to-end"])),
    (Section::Growth, growth::run),
];

fn main() {
    if child::was_one(&[memory::child, contention::child]) {
        return;
    }
    let args = Args::parse();
    let mut report = Report::new(args.quick);
    for (section, run) in SECTIONS {
        if args.only.is_none_or(|only| only == section) {
            run(&mut report);
        }
    }
    report.close();
}
