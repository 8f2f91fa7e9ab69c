//! The server's time for the gate's scripts, beside that for a bare rate limiter.
//!
//! Both run in turns on the same server, and the server says how long they took. Many calls come at once: those of a
//! server that sleeps in between would tell more of its caches than of the script.

use std::sync::LazyLock;
use std::time::Duration;

use ::redis::{Script, cmd};
use http::Uri;
use tokio::task::JoinSet;
use tower_host_gate::{HostGateLayer, Outcome, Permit, Queue};

use crate::gate::{shared, uri};
use crate::goals::Goal;
use crate::server::Server;
use crate::statistics::middle_mean;

/// One instant per key.
pub(crate) static GCRA: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("scripts/gcra.lua")));
/// A microsecond between two, a minute of them at once: it never refuses, so that it always does all of its work.
pub(crate) const GCRA_ARGS: [&str; 2] = ["1", "60000000"];

/// A round: so many permits of as many hosts are taken, then given back, then so many cells asked for.
const HOSTS: usize = 500;

pub(crate) async fn measure(server: &Server, quick: bool) -> Vec<Goal> {
    let (url, delegate) = (server.url(), Queue::Delegate);
    let kinds = [
        ("that has never refused", shared(&url, delegate, 1)),
        ("the same, Queue::Fifo", shared(&url, Queue::Fifo, 1)),
        ("with a quota", shared(&url, delegate, 1).quota(1000, Duration::from_secs(1))),
        ("that has refused before", shared(&url, delegate, 1).spacing(Duration::from_millis(1))),
    ];
    println!("server time per call for a host .., microseconds (mean of the middle half of the rounds)");
    println!("                               admit   release      pair   bare GCRA   admit / GCRA");
    let mut ratios = Vec::new();
    for (nth, (name, gate)) in kinds.iter().enumerate() {
        server.ask::<()>(&cmd("FLUSHALL")).await;
        let uris: Vec<Uri> = (0..HOSTS).map(|host| uri(&format!("host-{nth}-{host}.example"))).collect();
        if nth == 3 {
            // Every call reads and writes what was learnt from it.
            give_back(
                take(gate, &uris).await,
                Outcome::Throttled { hint: Some(Duration::from_millis(1)), soft: false },
            );
        }
        let (mut admit, mut release, mut gcra) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..if quick { 5 } else { 40 } {
            let begin = server.scripts().await;
            let permits = take(gate, &uris).await;
            let taken = server.scripts().await;
            give_back(permits, Outcome::Success);
            let returned = server.scripts().await;
            ask_gcra(server).await;
            let end = server.scripts().await;
            admit.push(taken.micros_per_call_since(&begin));
            release.push(returned.micros_per_call_since(&taken));
            gcra.push(end.micros_per_call_since(&returned));
        }
        let [admit, release, gcra] = [admit, release, gcra].map(|times| middle_mean(&times));
        let (pair, ratio) = (admit + release, admit / gcra);
        println!("  {name:<26} {admit:7.1} {release:9.1} {pair:9.1} {gcra:11.1} {ratio:14.2}");
        ratios.push(ratio);
    }
    vec![
        Goal::at_most("server-time/admit", ratios[0], 3.0),
        Goal::at_most("server-time/admit-after-refusal", ratios[3], 3.0),
    ]
}

async fn take(gate: &HostGateLayer, uris: &[Uri]) -> Vec<Permit> {
    let mut running = JoinSet::new();
    for uri in uris {
        let (hosts, uri) = (gate.hosts(), uri.clone());
        running.spawn(async move { hosts.acquire(&uri, Duration::from_secs(60)).await.expect("a permit") });
    }
    running.join_all().await
}

fn give_back(permits: Vec<Permit>, outcome: Outcome) {
    permits.into_iter().for_each(|permit| permit.settle(outcome));
}

async fn ask_gcra(server: &Server) {
    let connection = server.connect().await;
    let mut running = JoinSet::new();
    for nth in 0..HOSTS {
        let mut connection = connection.clone();
        running.spawn(async move {
            let mut call = GCRA.key(format!("gcra:host-{nth}.example"));
            let _: (i64, i64) = call.arg(&GCRA_ARGS).invoke_async(&mut connection).await.expect("an answer");
        });
    }
    running.join_all().await;
}
