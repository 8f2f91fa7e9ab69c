//! How often the server is asked for a request that need not wait: once for its permit, and once to give it back.

use std::time::Duration;

use tower_host_gate::Queue;

use crate::gate::{request, shared};
use crate::goals::Goal;
use crate::server::Server;

const QUEUES: [Queue; 2] = [Queue::Delegate, Queue::Fifo];

pub(crate) async fn measure(server: &Server, quick: bool) -> Vec<Goal> {
    println!("operations per request, one request at a time");
    let mut most: f64 = 0.0;
    for queue in QUEUES {
        for concurrency in [1, 8] {
            let operations = operations(server, queue, concurrency, if quick { 200 } else { 2000 }).await;
            println!("  {queue:?}, {concurrency} permits: {operations:.3}");
            most = most.max(operations);
        }
    }
    vec![Goal::at_most("operations/uncontended", most, 2.0)]
}

async fn operations(server: &Server, queue: Queue, concurrency: usize, requests: u32) -> f64 {
    let gate = shared(&server.url(), queue, concurrency);
    // Connects, and brings the scripts to the server.
    request(&gate, "first.example", Duration::ZERO).await;
    let before = server.scripts().await.calls;
    for _ in 0..requests {
        request(&gate, "feeds.example", Duration::ZERO).await;
    }
    (server.scripts().await.calls - before) as f64 / f64::from(requests)
}
