//! The sections of `fast` in which the counting of allocations would be in the way: where the gate allocates and what it
//! is compared with does not, or where everybody does. See `main.rs`, which runs this.

#[allow(dead_code, reason = "`fast` uses the rest of it")]
mod child;
mod contention;
mod end_to_end;
#[allow(dead_code, reason = "other benches use the rest of it")]
mod peers;
mod report;
#[allow(dead_code, reason = "`fast` uses the rest of it")]
mod statistics;

use clap::{Parser, ValueEnum};

use crate::report::Report;

/// Measures what the gate costs those who wait, and a real client.
#[derive(Debug, Parser)]
#[command(name = "uncounted")]
struct Args {
    /// Smaller sizes and fewer samples
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
    Contention,
    EndToEnd,
}

fn main() {
    if child::was_one(&[contention::child, end_to_end::child]) {
        return;
    }
    let args = Args::parse();
    let mut report = Report::new(args.quick);
    if args.only.is_none_or(|only| only == Section::Contention) {
        contention::run(&mut report);
    }
    if args.only.is_none_or(|only| only == Section::EndToEnd) {
        end_to_end::run(&mut report);
    }
    report.close();
}
