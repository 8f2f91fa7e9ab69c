//! The numbers of the shared gate, measured at a Redis server that is started for it.
//!
//! ```sh
//! cargo bench --bench shared --features redis               # everything, and at last the goals
//! cargo bench --bench shared --features redis -- --quick    # shorter, for a machine that only looks whether it runs
//! cargo bench --bench shared --features redis -- --only down
//! ```
//!
//! | file | what |
//! |---|---|
//! | `server.rs` | the server, and what it counts |
//! | `gate.rs` | the gates, and requests through them |
//! | `uncontended.rs` | how often the server is asked for a request that need not wait |
//! | `contention.rs`, `lone.rs` | a thousand requests of sixteen processes for eight permits, and the same without a queue |
//! | `script.rs` | the server's time for a script, beside that of a bare rate limiter |
//! | `pairs.rs` | permits taken and given back per second |
//! | `down.rs` | what a request costs while the server is gone |
//! | `dead.rs` | how long the others wait when the process at the head of the queue is killed |
//! | `statistics.rs`, `goals.rs` | what came of it |

mod contention;
mod dead;
mod down;
mod gate;
mod goals;
mod lone;
mod pairs;
mod script;
mod server;
mod statistics;
mod uncontended;

#[path = "../../tests/support"]
mod support {
    #![allow(dead_code, reason = "the tests use the rest of it")]
    #![allow(unreachable_pub, reason = "`pub` is this module's interface to the file that includes it")]

    pub mod redis;
}

use clap::{Parser, ValueEnum};

use crate::goals::Goal;
use crate::server::Server;

/// Measures the gate that is shared through Redis.
#[derive(Debug, Parser)]
#[command(name = "shared")]
struct Args {
    /// Fewer requests and rounds: it takes less than 20 s, and the numbers are rougher
    #[arg(long)]
    quick: bool,
    /// Only this
    #[arg(long, value_enum)]
    only: Option<Row>,
    /// Be the process that is killed: wait for a permit at this server
    #[arg(long, value_name = "URL", hide = true)]
    victim: Option<String>,
    /// Cargo says so
    #[arg(long, hide = true)]
    bench: bool,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Row {
    Uncontended,
    Contention,
    Script,
    Pairs,
    Down,
    Dead,
}

#[tokio::main]
async fn main() {
    let args = Args::parse();
    if let Some(url) = &args.victim {
        dead::wait_in_line(url).await;
        return;
    }
    let mut goals = Vec::new();
    for &row in Row::value_variants() {
        if args.only.is_none_or(|only| only == row) {
            // A server of its own, so that nothing is left of the row before.
            let server = Server::start().await;
            goals.extend(measure(row, &server, args.quick).await);
            println!();
        }
    }
    for goal in goals {
        println!("{goal}");
    }
}

async fn measure(row: Row, server: &Server, quick: bool) -> Vec<Goal> {
    match row {
        Row::Uncontended => uncontended::measure(server, quick).await,
        Row::Contention => contention::measure(server, quick).await,
        Row::Script => script::measure(server, quick).await,
        Row::Pairs => pairs::measure(server, quick).await,
        Row::Down => down::measure(quick).await,
        Row::Dead => dead::measure(server, quick).await,
    }
}
