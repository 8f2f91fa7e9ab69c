//! How many permits per second one process can take and give back, over its one connection.
//!
//! Beside it `redis-benchmark`, asking the same server for one bare GCRA per request: on 50 connections, each waiting for
//! its answer, which is what it does unless told otherwise; and on one connection with 50 requests on their way, as the
//! gate has it. A pair is two scripts, and so can be no more than half of the latter even with scripts as short.

use std::time::{Duration, Instant};

use tokio::process::Command;
use tokio::task::JoinSet;
use tower_host_gate::{HostGateLayer, Outcome, Queue};

use crate::gate::{shared, uri};
use crate::goals::Goal;
use crate::script::{GCRA, GCRA_ARGS};
use crate::server::Server;
use crate::statistics::median;

const HOSTS: usize = 256;

pub(crate) async fn measure(server: &Server, quick: bool) -> Vec<Goal> {
    let (rounds, requests, seconds) = if quick { (1, 50_000, 1.0) } else { (3, 200_000, 3.0) };
    let sha: String = GCRA.load_async(&mut server.connect().await).await.expect("a script");
    let gate = shared(&server.url(), Queue::Delegate, 1);
    let (mut pairs, mut plain, mut pipelined) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        plain.push(benchmark(server, requests, &["-c", "50"], &sha).await);
        pipelined.push(benchmark(server, requests, &["-c", "1", "-P", "50"], &sha).await);
        pairs.push(pairs_per_second(server, &gate, Duration::from_secs_f64(seconds)).await);
    }
    let [pairs, plain, pipelined] = [pairs, plain, pipelined].map(|rates| median(&rates));
    let part = |rate: f64| pairs / rate * 100.0;
    println!("pairs of admission and release per second, {HOSTS} hosts at once");
    println!("  the gate, one connection                       {pairs:9.0}");
    println!("  redis-benchmark EVALSHA, -c 50                 {plain:9.0}  of which {:.1} %", part(plain));
    println!("  redis-benchmark EVALSHA, -c 1 -P 50            {pipelined:9.0}  of which {:.1} %", part(pipelined));
    vec![Goal::at_least("pairs/redis-benchmark", pairs / plain, 0.4)]
}

async fn pairs_per_second(server: &Server, gate: &HostGateLayer, during: Duration) -> f64 {
    let before = server.scripts().await.calls;
    let start = Instant::now();
    let mut running = JoinSet::new();
    for nth in 0..HOSTS {
        let hosts = gate.hosts();
        let uri = uri(&format!("host-{nth}.example"));
        running.spawn(async move {
            while start.elapsed() < during {
                let permit = hosts.acquire(&uri, Duration::from_secs(60)).await.expect("a permit");
                permit.settle(Outcome::Success);
            }
        });
    }
    running.join_all().await;
    let took = start.elapsed();
    (server.scripts().await.calls - before) as f64 / 2.0 / took.as_secs_f64()
}

/// Requests per second, as `redis-benchmark` has it.
async fn benchmark(server: &Server, requests: u32, how: &[&str], sha: &str) -> f64 {
    let mut command = Command::new("redis-benchmark");
    command.args(["-p", &server.port().to_string(), "-n", &requests.to_string(), "-r", &HOSTS.to_string(), "--csv"]);
    command.args(how).args(["EVALSHA", sha, "1", "gcra:__rand_int__"]).args(GCRA_ARGS).kill_on_drop(true);
    let output = command.output().await.expect("redis-benchmark, which comes with redis-cli");
    let printed = String::from_utf8_lossy(&output.stdout);
    // A line of headings, and one of numbers in quotes, the rate second.
    let rate = printed.lines().last().and_then(|line| line.split(',').nth(1)?.trim_matches('"').parse().ok());
    rate.unwrap_or_else(|| panic!("no rate in {printed:?}"))
}
