//! Allocations of a request that need not wait.

use allocation_counter::{AllocationInfo, measure};

use crate::peers::{Answer, GATE, Lane, PEERS, uri};
use crate::report::Report;

const REQUESTS: usize = 64;

/// What a fixed table may take, once it is needed.
const TABLE: u64 = 520 * 1024;

/// To be run before anything else has used a gate: a gate may take over what another one has left behind.
pub(crate) fn run(report: &mut Report) {
    report.section("Allocations of a request to a host that is free");
    println!(
        "{:<20}{:>18}{:>22}{:>20}{:>22}",
        "", "bytes when built", "bytes of the first", "each allocates", "bytes of each"
    );
    for peer in PEERS {
        let mut lane = None;
        let built = measure(|| lane = Some((peer.lane)(Answer::Empty)));
        let mut lane = lane.expect("it is built");
        let first = send(&mut *lane, 1);
        let steady = send(&mut *lane, REQUESTS);
        let [each, bytes] = [steady.count_total, steady.bytes_total].map(|total| total as f64 / REQUESTS as f64);
        println!("{:<20}{:>18}{:>22}{each:>20.1}{bytes:>22.1}", peer.name, built.bytes_current, first.bytes_total);

        if peer.name == GATE.name {
            let (total, kib) = (first.bytes_total, first.bytes_total as f64 / 1024.0);
            report.goal(
                "heap bytes allocated by the first request",
                format!("{kib:.1} KiB"),
                "<=520 KiB",
                total <= TABLE,
            );
            report.goal("allocations per request", each, "0", steady.count_total == 0);
        }
    }
}

fn send(lane: &mut dyn Lane, requests: usize) -> AllocationInfo {
    let uris = vec![uri(0); requests];
    lane.load(&uris);
    measure(|| lane.send())
}
