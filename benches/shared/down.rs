//! What a request costs while the server is known to be gone, against the gate that knows of no server.
//!
//! Small blocks of requests through the one and the other in turns, all of the machine's moods being shared, on one thread.
//! After every request whatever it has spawned runs too, and is part of its time. The difference of the medians counts as
//! none when it is within the spread of the gate without a server (the distance of its quartiles), or within 5 % of its
//! median.

use std::time::{Duration, Instant};

use tokio::task::yield_now;
use tower_host_gate::{HostGateLayer, Queue};

use crate::gate::{Failures, request, shared};
use crate::goals::Goal;
use crate::statistics::{median, quantile};

const BLOCK: u32 = 64;

pub(crate) async fn measure(quick: bool) -> Vec<Goal> {
    // Nobody listens there: the port is not in use, and has just been.
    let vacant = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let url = format!("redis://{}/", vacant.expect("a loopback port"));
    let blocks = if quick { 2000 } else { 10_000 };
    let measured = std::thread::spawn(move || one_thread(compare(&url, blocks))).join();
    let (alone, down) = measured.expect("no panic");

    let spread = quantile(&alone, 0.75) - quantile(&alone, 0.25);
    let (alone, down) = (median(&alone), median(&down));
    let (added, tolerance) = (down - alone, spread.max(0.05 * alone));
    println!("time per request, nanoseconds (medians; {blocks} blocks of {BLOCK})");
    println!("  in process                      {alone:8.0}  quartiles {spread:.0} apart");
    println!("  shared, the server being gone   {down:8.0}  {added:+.0}");
    vec![Goal::at_most("down/added-ns", added, tolerance)]
}

fn one_thread<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(work)
}

/// Nanoseconds per request: of the gate without a server, and of the one whose server is gone.
async fn compare(url: &str, blocks: u32) -> (Vec<f64>, Vec<f64>) {
    let failures = Failures::default();
    let alone = HostGateLayer::new().concurrency(8);
    let down = shared(url, Queue::Delegate, 8).observer(failures.clone());
    // It finds out that the server is gone.
    block(&down).await;
    assert!(failures.count() > 0, "there is no server");
    let (mut times_alone, mut times_down) = (Vec::new(), Vec::new());
    for _ in 0..blocks {
        times_alone.push(block(&alone).await);
        times_down.push(block(&down).await);
    }
    (times_alone, times_down)
}

async fn block(gate: &HostGateLayer) -> f64 {
    let start = Instant::now();
    for _ in 0..BLOCK {
        request(gate, "feeds.example", Duration::ZERO).await;
        yield_now().await;
    }
    start.elapsed().as_nanos() as f64 / f64::from(BLOCK)
}
