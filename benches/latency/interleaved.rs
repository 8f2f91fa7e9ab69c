//! Time per request at one host and at many: all peers in turn, in short samples.

use std::time::Instant;

use crate::fast::peers::{Answer, CONCURRENCY_LIMIT, GATE, GOVERNOR, Lane, PEERS, uri};
use crate::fast::report::Report;

/// Requests per sample: enough that reading the clock does not matter, few enough that a sample is rarely interrupted.
const BATCH: usize = 64;
/// Samples in a peer's turn. Those of the first half do not count: they bring the peer's code and tables back into the
/// caches, which the other peers have used in between.
const SAMPLES: usize = 32;

pub(crate) fn run(report: &mut Report) {
    let (sizes, turns): (&[usize], _) =
        if report.quick { (&[1, 1_000, 10_000], 10) } else { (&[1, 1_000, 100_000, 1_000_000], 250) };
    report.section("Added time per request, ns (median)");
    let columns: Vec<_> = sizes.iter().map(|&hosts| (hosts, compare(hosts, turns))).collect();

    print!("{:<20}", "hosts");
    columns.iter().for_each(|(hosts, _)| print!("{hosts:>12}"));
    println!();
    for (index, peer) in PEERS.iter().enumerate() {
        let label = if peer.is_bare() { format!("{} (all)", peer.name) } else { peer.name.to_owned() };
        print!("{label:<20}");
        columns.iter().for_each(|(_, times)| print!("{:>12.1}", times[index]));
        println!();
    }

    let added = |name: &str, column: usize| {
        let index = PEERS.iter().position(|peer| peer.name == name).expect("one of the peers");
        columns[column].1[index]
    };
    let mut goal = |column: usize, than: &str, most: f64| {
        let name = format!("added time, hosts {}, beside {than}", columns[column].0);
        let ratio = added(GATE.name, column) / added(than, column);
        report.goal(name, format!("{ratio:.2}x"), format!("<={most}x"), ratio <= most);
    };
    goal(0, CONCURRENCY_LIMIT.name, 1.0);
    goal(0, GOVERNOR.name, 0.4);
    goal(columns.len() - 1, GOVERNOR.name, 0.2);
}

/// For each of the peers what it adds to a request; for a bare one what a request takes.
fn compare(hosts: usize, turns: usize) -> Vec<f64> {
    let mut lanes = PEERS.map(|peer| (peer.lane)(Answer::Empty));
    for first in (0..hosts).step_by(BATCH) {
        let uris: Vec<_> = (first..hosts.min(first + BATCH)).map(uri).collect();
        for (lane, peer) in lanes.iter_mut().zip(PEERS) {
            // The others have nothing to remember.
            if peer.keyed || first == 0 {
                lane.load(&uris);
                lane.send();
            }
        }
    }

    let bare = PEERS.map(|peer| PEERS.iter().position(|other| other.name == peer.bare).expect("one of the peers"));
    let mut added = PEERS.map(|_| Vec::with_capacity(turns));
    for turn in 0..turns {
        let mut times = [0.0; PEERS.len()];
        // Nobody always comes after the same other one.
        for index in (0..PEERS.len()).map(|index| (index + turn) % PEERS.len()) {
            times[index] = take_turn(&mut *lanes[index], turn * SAMPLES * BATCH, hosts);
        }
        for (index, peer) in PEERS.iter().enumerate() {
            added[index].push(if peer.is_bare() { times[index] } else { times[index] - times[bare[index]] });
        }
    }
    added.into_iter().map(median).collect()
}

/// Nanoseconds per request, to the hosts from this one on.
fn take_turn(lane: &mut dyn Lane, first: usize, hosts: usize) -> f64 {
    let samples = (0..SAMPLES).map(|sample| {
        let batch = first + sample * BATCH;
        let uris: Vec<_> = (batch..batch + BATCH).map(|host| uri(host % hosts)).collect();
        lane.load(&uris);
        let start = Instant::now();
        lane.send();
        start.elapsed().as_nanos() as f64 / BATCH as f64
    });
    median(samples.skip(SAMPLES / 2).collect())
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}
