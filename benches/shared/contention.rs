//! A thousand requests of sixteen processes for eight permits of one host.
//!
//! The processes are layers that know nothing of each other, each with its own connection, in one program: what is between
//! them goes through the server. Requests arrive a millisecond apart, each at a process drawn at random, so there is an
//! order to keep. Each is held for 45 to 55 ms: were all of the same length, they would end together, at the ticks of the
//! runtime's timer. All that is drawn is the same for all.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::{self, sleep_until};
use tower_host_gate::{HostGateLayer, Queue};

use crate::gate::{Failures, Held, request, shared};
use crate::goals::Goal;
use crate::lone::Lone;
use crate::server::Server;
use crate::statistics::{median, quantile};

const PROCESSES: usize = 16;
const PERMITS: usize = 8;
const HOLD: Duration = Duration::from_millis(50);
const LONGER_OR_SHORTER: f64 = 0.1;
const BETWEEN_ARRIVALS: Duration = Duration::from_millis(1);

pub(crate) async fn measure(server: &Server, quick: bool) -> Vec<Goal> {
    let requests = if quick { 240 } else { 1000 };
    let round_trip = server.round_trip().await.as_micros();
    println!("{requests} requests of {PROCESSES} processes, {PERMITS} permits, each held for about {HOLD:?}");
    println!("(a script that does nothing takes {round_trip} us here, there and back)");
    println!("                        operations  of the ideal    lateness       the  inversions   most at   failed");
    println!("                       per request    throughput      median    latest    of pairs      once    calls");
    let delegate = shared_gates(server, Queue::Delegate, requests).await;
    println!("  Queue::Delegate      {delegate}");
    let fifo = shared_gates(server, Queue::Fifo, requests).await;
    println!("  Queue::Fifo          {fifo}");
    let lone = lone_waiters(server, requests).await;
    println!("  each one for itself  {lone}");
    vec![
        Goal::at_most("operations/delegate", delegate.operations, 4.0),
        Goal::at_most("operations/fifo", fifo.operations, 2.5),
        Goal::at_least("throughput/delegate", delegate.throughput, 0.95),
        Goal::at_least("throughput/fifo", fifo.throughput, 0.99),
        Goal::at_most("lateness-ms/fifo", fifo.lateness_ms, 1.0),
        Goal::at_most("inversions/fifo", fifo.inversions, 0.002),
    ]
}

async fn shared_gates(server: &Server, queue: Queue, requests: usize) -> Figures {
    let failures = Failures::default();
    let gates: Vec<HostGateLayer> =
        (0..PROCESSES).map(|_| shared(&server.url(), queue, PERMITS).observer(failures.clone())).collect();
    for gate in &gates {
        // Connects.
        request(gate, "first.example", Duration::ZERO).await;
    }
    let host = format!("{queue:?}.example");
    let mut figures = contend(server, requests, |process, hold| {
        let (gate, host) = (gates[process].clone(), host.clone());
        async move { request(&gate, &host, hold).await }
    })
    .await;
    figures.failures = failures.count();
    // A gate that has lost the server goes on alone; anything else is a broken limit, and not worth measuring.
    assert!(figures.most_at_once <= PERMITS || figures.failures > 0, "{figures:?}");
    figures
}

/// The way without a queue, for comparison: every request asks for itself until it has a permit.
async fn lone_waiters(server: &Server, requests: usize) -> Figures {
    let mut processes = Vec::new();
    for _ in 0..PROCESSES {
        processes.push(Lone::new(server.connect().await, PERMITS));
    }
    contend(server, requests, |process, hold| processes[process].clone().request(hold)).await
}

async fn contend<R>(server: &Server, requests: usize, request: impl Fn(usize, Duration) -> R) -> Figures
where
    R: Future<Output = Held> + Send + 'static,
{
    let mut draw = fastrand::Rng::with_seed(1);
    let before = server.scripts().await.calls;
    let start = time::Instant::now();
    let mut running = JoinSet::new();
    for nth in 0..requests {
        sleep_until(start + BETWEEN_ARRIVALS * nth as u32).await;
        let (process, length) = (draw.usize(..PROCESSES), 1.0 + LONGER_OR_SHORTER * (2.0 * draw.f64() - 1.0));
        let request = request(process, HOLD.mul_f64(length));
        running.spawn(async move { (Instant::now(), request.await) });
    }
    let mut arrived = running.join_all().await;
    arrived.sort_by_key(|(arrival, _)| *arrival);
    let operations = (server.scripts().await.calls - before) as f64 / requests as f64;
    Figures { operations, ..Figures::of(&arrived) }
}

/// What came of one way of waiting.
#[derive(Debug, Default)]
struct Figures {
    operations: f64,
    throughput: f64,
    lateness_ms: f64,
    latest_ms: f64,
    inversions: f64,
    most_at_once: usize,
    failures: u32,
}

impl Figures {
    /// Of requests in the order of their arrivals.
    fn of(arrived: &[(Instant, Held)]) -> Self {
        let begin = arrived.first().expect("there are requests").0;
        let mut sent: Vec<_> = arrived.iter().map(|(_, held)| held.sent).collect();
        let mut done: Vec<_> = arrived.iter().map(|(_, held)| held.done).collect();
        let inversions = inversions(&sent);
        sent.sort();
        done.sort();
        let (ideal, end) = (ideal_end(arrived) - begin, *done.last().expect("there are requests") - begin);
        // All permits are taken: the one that frees first makes the next send possible.
        let late = sent[PERMITS..].iter().zip(&done).map(|(sent, free)| ms(sent.saturating_duration_since(*free)));
        let late: Vec<_> = late.collect();
        Self {
            throughput: ideal.as_secs_f64() / end.as_secs_f64(),
            lateness_ms: median(&late),
            latest_ms: quantile(&late, 1.0),
            inversions,
            most_at_once: most_at_once(&sent, &done),
            ..Self::default()
        }
    }
}

/// When all would be over if no permit ever lay idle while somebody waits.
///
/// Whoever was sent first is sent first, and held for as long as it was in fact: the times are measured, not wished for, so
/// that a machine which wakes a sleeper late makes the ideal longer by as much. It comes to the sum of these times divided by
/// the number of permits, and what is left of the last ones when nobody waits any more.
fn ideal_end(arrived: &[(Instant, Held)]) -> Instant {
    let mut in_turn = arrived.to_vec();
    in_turn.sort_by_key(|(_, held)| held.sent);
    let mut free = BinaryHeap::from([Reverse(in_turn[0].0); PERMITS]);
    let mut end = in_turn[0].0;
    for (arrival, Held { sent, done }) in in_turn {
        let Reverse(from) = free.pop().expect("as many as there are permits");
        let until = from.max(arrival) + (done - sent);
        end = end.max(until);
        free.push(Reverse(until));
    }
    end
}

/// How many pairs of all went the other way round than they came.
fn inversions(sent: &[Instant]) -> f64 {
    let inverted = |nth: usize| sent[nth + 1..].iter().filter(|later| **later < sent[nth]).count();
    let pairs = sent.len() * (sent.len() - 1) / 2;
    (0..sent.len()).map(inverted).sum::<usize>() as f64 / pairs as f64
}

fn most_at_once(sent: &[Instant], done: &[Instant]) -> usize {
    let over = |at: &Instant| done.partition_point(|done| done <= at);
    sent.iter().enumerate().map(|(nth, at)| nth + 1 - over(at)).max().unwrap_or_default()
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operations, throughput, lateness_ms, latest_ms, inversions, most_at_once, failures } = self;
        let (throughput, inversions) = (throughput * 100.0, inversions * 100.0);
        write!(
            f,
            "{operations:11.2} {throughput:11.2} % {lateness_ms:8.2} ms {latest_ms:6.1} ms {inversions:9.3} % {most_at_once:9} {failures:8}"
        )
    }
}
