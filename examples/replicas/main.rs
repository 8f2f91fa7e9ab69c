//! One limit for four processes, shown in a quarter of a minute with nothing installed but Rust and Redis:
//!
//! ```sh
//! cargo run --example replicas --features redis
//! cargo run --example replicas --features redis -- --redis redis://127.0.0.1/    # one that runs already, and is let live
//! ```
//!
//! A feed provider on loopback serves four requests at a time and refuses whatever is more. Four worker processes (this
//! program, started again) fetch from it: each with a gate of its own; then with one that they share through Redis; then
//! Redis is killed under them and comes back empty; then one of them is killed with a permit in its hands. The program ends
//! with what all this has to show, and with exit code 1 if it does not show it.
//!
//! | file | what |
//! |---|---|
//! | `worker.rs` | what a replica does: **the part to copy from** |
//! | `team.rs` | four of them, what they are given to do and what they tell |
//! | `provider.rs` | the server, and how it throttles |
//! | `server.rs` | a `redis-server` that can be killed |
//! | `parts.rs` | the four parts of the show |
//! | `claims.rs` | what they have to show |
//! | `timeline.rs` | who did what when |

mod claims;
mod parts;
mod provider;
mod server;
mod team;
mod timeline;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tokio::time::timeout;
use tower::BoxError;

use crate::parts::{Part, Stage};

/// How many processes there are.
pub(crate) const WORKERS: usize = 4;
/// How many requests the provider takes at a time.
pub(crate) const LIMIT: usize = 4;
/// How long the permit of a process that was killed is taken, in the part that waits for its end.
pub(crate) const LEASE: Duration = Duration::from_secs(3);

/// Whatever hangs is told from what is slow by this.
const AT_MOST: Duration = Duration::from_secs(28);

/// Four processes fetch from one provider: each for itself, and with one limit that they share through Redis.
///
/// Exit code: 0 when sharing did what it is for, 1 when it did not, 2 for wrong usage or without a Redis.
#[derive(Debug, Parser)]
#[command(name = "replicas", version)]
struct Args {
    /// A Redis that runs already; without it, and without REDIS_URL, a redis-server of the example's own is started
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// What the example starts four times
    #[command(hide = true)]
    Worker(worker::Job),
}

#[tokio::main]
async fn main() -> Result<ExitCode, BoxError> {
    let args = Args::parse();
    if let Some(Role::Worker(job)) = args.role {
        worker::work(job).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let given = args.redis.or_else(|| std::env::var("REDIS_URL").ok()).filter(|url| !url.is_empty());
    let stage = match Stage::set(given).await {
        Ok(stage) => stage,
        Err(error) => {
            eprintln!("error: {error}");
            return Ok(ExitCode::from(2));
        }
    };
    print!("{}", timeline::introduction(&stage));
    timeout(AT_MOST, show(stage)).await.map_err(|_| format!("not done in {AT_MOST:?}"))?
}

async fn show(mut stage: Stage) -> Result<ExitCode, BoxError> {
    let alone = present(stage.alone().await?);
    let shared = present(stage.shared().await?);
    let outage = stage.outage().await?.map(present);
    let death = present(stage.death().await?);

    let claims = claims::check(LIMIT, &alone, &shared, outage.as_ref(), &death);
    println!();
    for claim in &claims {
        println!("{} {}", if claim.holds { "✔" } else { "✘ NOT TRUE:" }, claim.text);
    }
    if outage.is_none() {
        println!("This Redis is somebody else's, so it was not killed.");
    }
    Ok(if claims.iter().all(|claim| claim.holds) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn present<F>(part: Part<F>) -> F {
    print!("{}", timeline::draw(&part));
    part.figures
}
