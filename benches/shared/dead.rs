//! How long the others wait when the process at the head of the queue is killed.
//!
//! One permit, and this process has it. A child stands in line for it, this process behind the child, and the child is
//! killed without a word. When the permit comes back it goes to the dead; measured is until this process has it.

use std::env;
use std::process::Stdio;
use std::time::{Duration, Instant};

use ::redis::cmd;
use tokio::process::{Child, Command};
use tokio::time::sleep;
use tower_host_gate::{HostGateLayer, Queue};

use crate::gate::{shared, uri};
use crate::goals::Goal;
use crate::server::Server;

const HOST: &str = "feeds.example:80";
const LONG: Duration = Duration::from_secs(60);

pub(crate) async fn measure(server: &Server, quick: bool) -> Vec<Goal> {
    let holder = shared(&server.url(), Queue::Fifo, 1);
    let next = shared(&server.url(), Queue::Fifo, 1);
    let mut stalls = Vec::new();
    for _ in 0..if quick { 2 } else { 5 } {
        stalls.push(stall(server, &holder, &next).await);
    }
    println!("seconds until the next process goes, when the one at the head of the queue is killed");
    let all: Vec<_> = stalls.iter().map(|stall| format!("{stall:.2}")).collect();
    println!("  {}", all.join("  "));
    vec![Goal::at_most("stall-s/dead-head", stalls.into_iter().fold(0.0, f64::max), 1.2)]
}

async fn stall(server: &Server, holder: &HostGateLayer, next: &HostGateLayer) -> f64 {
    let uri = uri(HOST);
    let permit = holder.hosts().acquire(&uri, LONG).await.expect("a permit");
    let mut victim = victim(server);
    in_line(server, 1).await;
    let (hosts, waits_for) = (next.hosts(), uri.clone());
    let waiting = tokio::spawn(async move {
        let permit = hosts.acquire(&waits_for, LONG).await.expect("a permit");
        (Instant::now(), permit)
    });
    in_line(server, 2).await;
    // It asks again now and then, so it is not always killed at the same moment.
    sleep(Duration::from_millis(fastrand::u64(..400))).await;
    victim.kill().await.expect("a child that waits");

    let freed = Instant::now();
    drop(permit);
    let (sent, permit) = waiting.await.expect("no panic");
    drop(permit);
    // The permit is on its way back: the next round begins with nobody in flight.
    server.scripts().await;
    (sent - freed).as_secs_f64()
}

/// This program once more, as [`wait_in_line`].
fn victim(server: &Server) -> Child {
    let program = env::current_exe().expect("the path of this program");
    let mut command = Command::new(program);
    command.args(["--victim", &server.url()]).stdin(Stdio::null()).kill_on_drop(true);
    command.spawn().expect("this program again")
}

/// What the child does until it is killed.
pub(crate) async fn wait_in_line(url: &str) {
    let uri = uri(HOST);
    let permit = shared(url, Queue::Fifo, 1).hosts().acquire(&uri, LONG).await;
    panic!("the child was to be killed while it waits: {permit:?}");
}

/// Waits until so many processes stand in line.
async fn in_line(server: &Server, processes: usize) {
    let tickets = format!("host-gate:1:default:{{{HOST}}}:t");
    while server.ask::<usize>(cmd("ZCARD").arg(&tickets)).await != processes {
        sleep(Duration::from_millis(5)).await;
    }
}
