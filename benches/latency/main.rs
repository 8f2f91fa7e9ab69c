//! The time a request takes through the gate and through its peers.
//!
//! ```sh
//! cargo bench --bench latency                          # one peer after the other, at one host, by criterion
//! cargo bench --bench latency -- --compare hosts       # all of them in turn, at one host and at a million
//! cargo bench --bench latency -- --compare threads     # on two cores
//! ```
//!
//! Criterion tells whether a change made one peer faster or slower. It measures one peer for seconds before it comes to
//! the next one, so it cannot tell two peers apart that differ by less than the machine drifts in between; the
//! comparisons do, see `benches/fast/main.rs`.

mod interleaved;
mod threads;

#[path = "../fast"]
mod fast {
    #![allow(dead_code, reason = "other benches use the rest of it")]

    pub(crate) mod peers;
    pub(crate) mod report;
}

use std::env;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use criterion::{Criterion, Throughput};

use crate::fast::peers::{Answer, PEERS, uri};
use crate::fast::report::Report;

/// Compares the gate with its peers.
#[derive(Debug, Parser)]
#[command(name = "latency")]
struct Args {
    #[arg(long, value_enum)]
    compare: Comparison,
    /// Fewer samples and hosts
    #[arg(long)]
    quick: bool,
    /// Cargo says so
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Comparison {
    Hosts,
    Threads,
}

fn main() {
    // Criterion has arguments of its own.
    if !env::args().any(|argument| argument == "--compare") {
        return one_after_the_other(&mut Criterion::default().configure_from_args());
    }
    let args = Args::parse();
    let mut report = Report::new(args.quick);
    match args.compare {
        Comparison::Hosts => interleaved::run(&mut report),
        Comparison::Threads => threads::run(&mut report),
    }
    report.close();
}

fn one_after_the_other(criterion: &mut Criterion) {
    const REQUESTS: usize = 64;
    let uris = vec![uri(0); REQUESTS];
    let mut group = criterion.benchmark_group("one host, 64 requests");
    group.throughput(Throughput::Elements(REQUESTS as u64));
    group.warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    for peer in PEERS {
        let mut lane = (peer.lane)(Answer::Empty);
        group.bench_function(peer.name, |bencher| {
            bencher.iter_custom(|batches| {
                let mut total = Duration::ZERO;
                for _ in 0..batches {
                    lane.load(&uris);
                    let start = Instant::now();
                    lane.send();
                    total += start.elapsed();
                }
                total
            });
        });
    }
    group.finish();
}
