//! What the gate is for, shown in a quarter of a minute with nothing installed but Rust:
//!
//! ```sh
//! cargo run --example demo                      # a table and a timeline
//! cargo run --example demo -- --svg gate.svg    # the timeline as a picture, too
//! ```
//!
//! Three feed providers on loopback get the same burst, four ways at the same time, each from a hyper client of its own and
//! at providers of its own: without the gate, with reactive pacing, with the gate as it comes, and with one that is told
//! what is known of these providers. The demo ends with what the figures have to show, and with exit code 1 if they do not
//! show it.
//!
//! | file | what |
//! |---|---|
//! | `run.rs` | the four clients, and one burst through one of them: **the part to copy from** |
//! | `provider.rs` | the servers, and how they throttle |
//! | `claims.rs` | what the figures have to show |
//! | `report.rs`, `svg.rs` | table and timeline, for the terminal and as a picture |

mod claims;
mod provider;
mod report;
mod run;
mod svg;

use std::fs::File;
use std::io::{IsTerminal as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use futures_util::future::try_join_all;
use indicatif::ProgressBar;
use tower::BoxError;

use crate::report::Ink;
use crate::run::{Run, Way};

/// One second of the real world takes 40 ms here. Everything is scaled alike: the providers' windows and what they ask
/// for in `Retry-After`, the gate's cooldowns, spacing and budgets, and the waits of the retries.
pub(crate) const SCALE: u32 = 25;

/// A time of the real world, as long as it takes here.
pub(crate) fn scaled(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds) / SCALE
}

/// Sends one burst to three feed providers, four ways: without the gate, and with it, reactive, as it comes, and tuned.
///
/// Exit code: 0 when the gate did what it is for, 1 when it did not, 2 for wrong usage.
#[derive(Debug, Parser)]
#[command(name = "demo", version)]
struct Args {
    /// Also write the timeline as an SVG picture
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> Result<ExitCode, BoxError> {
    let args = Args::parse();
    if let Some(file) = &args.svg {
        // Now rather than in a quarter of a minute.
        if let Err(error) = File::create(file) {
            eprintln!("error: cannot write {}: {error}", file.display());
            return Ok(ExitCode::from(2));
        }
    }
    let ink = Ink { colours: stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() };
    print!("{}", report::introduction(ink));

    // Drawn on a terminal only, and on stderr, so that a pipe gets nothing but the report.
    let spinner = ProgressBar::new_spinner().with_message("four bursts at the same time");
    spinner.enable_steady_tick(Duration::from_millis(100));
    let runs = try_join_all(Way::ALL.map(Run::new)).await?;
    spinner.finish_and_clear();

    print!("{}", report::table(&runs, ink));
    print!("{}", report::timeline(&runs, ink));
    if let Some(file) = &args.svg {
        svg::write(file, &runs).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        println!("\nThe timeline of every single feed is in {}.", file.display());
    }

    let figures: Vec<_> = runs.iter().map(Run::figures).collect();
    let [without, reactive, gate, tuned] = &figures[..] else {
        unreachable!("there are four ways");
    };
    let claims = claims::check([without, reactive, gate, tuned]);
    print!("{}", report::claims(&claims, ink));
    Ok(if claims.iter().all(|claim| claim.holds) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
