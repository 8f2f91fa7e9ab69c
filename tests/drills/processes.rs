//! A process of several is killed, and the others must not wait for it longer than they have to.

use std::process::Stdio;
use std::time::Duration;

use futures_util::future::join_all;
use http::Uri;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};
use tower_host_gate::{Permit, Queue, Redis};

use super::drill::{ANSWER, RECOVERY, until};
use super::fleet::{CAP, CAPPED, FREE, Fleet, Replica, Tally, scope};
use super::row::{Row, is_long, publish};
use super::support::redis::{Server, Standalone};
use super::upstream::Upstream;

/// Says to the [`process`] what to do: queue, URL of the store, how many permits.
const TASK: &str = "HOST_GATE_DRILL_PROCESS";

const LEASE: Duration = Duration::from_secs(2);

/// No process here is to wait for longer than a request may.
const BUDGET: Duration = Duration::from_secs(50);

// ---------------------------------------------------------------------------------------------------------------------
// The process
// ---------------------------------------------------------------------------------------------------------------------

/// Takes permits, and keeps them until it is killed.
async fn process(task: &str) {
    let [queue, url, permits] = task.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let queue = if queue == scope(Queue::Fifo) { Queue::Fifo } else { Queue::Delegate };
    let replica = Replica::new(open(url, queue), &Upstream::default());
    replica.connect().await;
    let _held = acquire(&replica, permits.parse().unwrap()).await;
    // It ends by itself when whoever started it could not end it.
    sleep(BUDGET).await;
}

/// Killed when it is dropped.
fn start_process(server: &Server, queue: Queue, permits: usize) -> Child {
    // This program again: with a task, that test is the process.
    let program = std::env::current_exe().unwrap();
    let arguments = ["--exact", "processes::a_process_is_killed_with_all_permits"];
    let task = format!("{} {} {permits}", scope(queue), server.url());
    let mut command = Command::new(program);
    command.args(arguments).env(TASK, task).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    command.spawn().unwrap()
}

fn open(url: &str, queue: Queue) -> Redis {
    // Nothing here is about a slow store, and a busy machine is slow.
    let redis = Redis::open(url).unwrap().timeout(Duration::from_secs(5));
    redis.scope(scope(queue)).queue(queue).lease_ttl(LEASE)
}

async fn acquire(replica: &Replica, permits: usize) -> Vec<Permit> {
    let uri: Uri = format!("http://{CAPPED}/").parse().unwrap();
    let hosts = replica.layer.hosts();
    let permits = join_all((0..permits).map(|_| hosts.acquire(&uri, BUDGET))).await;
    permits.into_iter().map(|permit| permit.expect("a permit within the budget")).collect()
}

// ---------------------------------------------------------------------------------------------------------------------
// Killed with all leases
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_killed_with_all_permits() {
    if let Ok(task) = std::env::var(TASK) {
        return process(&task).await;
    }
    let server = Standalone::start().await;
    let rows = join_all([Queue::Delegate, Queue::Fifo].map(|queue| killed_with_all_permits(&server, queue))).await;
    publish(&rows);
}

async fn killed_with_all_permits(server: &Server, queue: Queue) -> Row {
    let mut fleet = Fleet::new(3, open(&server.url(), queue), queue).await;
    let began = Instant::now();
    let mut process = start_process(server, queue, CAP);
    until("the process has all permits", async || in_flight(&fleet.replicas[0]).await == CAP).await;
    fleet.load();
    process.kill().await.unwrap();
    let killed = Instant::now();

    let upstream = fleet.upstream.clone();
    until("permits are back", async || upstream.visits(CAPPED).count() > CAP).await;
    let ended = Instant::now();
    let tally = fleet.unload().await;

    let mut row = Row::new("killed with leases", &fleet, &tally);
    row.leases_left(fleet.leases_left().await);
    let (capped, free) = (upstream.visits(CAPPED), upstream.visits(FREE));
    let first = capped.first_since(began).expect("one was sent");
    let recovery = first.saturating_duration_since(killed);
    row.recovery = Some(recovery);
    row.check(first + Duration::from_millis(20) >= began + LEASE, "sent while the leases lasted".to_owned());
    row.check(recovery < LEASE + RECOVERY, format!("permits were back only after {recovery:?}"));
    row.in_flight(capped.most_in_flight(began, ended), CAP);
    row.answer(free.longest_wait(), ANSWER);
    row
}

async fn in_flight(replica: &Replica) -> usize {
    let known = replica.layer.hosts().get_shared(CAPPED).await.expect("the store answers");
    known.map_or(0, |known| known.in_flight)
}

// ---------------------------------------------------------------------------------------------------------------------
// Killed as the first in line
// ---------------------------------------------------------------------------------------------------------------------

/// A permit that comes free is handed to a process that does not exist any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_killed_first_in_line() {
    let server = Standalone::start().await;
    let queue = Queue::Fifo;
    let fleet = Fleet::new(3, open(&server.url(), queue).lease_ttl(BUDGET), queue).await;
    let [holder, second, third] = &fleet.replicas[..] else { unreachable!("three replicas") };
    let in_line = async || server.cli(&["ZCARD", &format!("host-gate:1:fifo:{{{CAPPED}:80}}:t")]).await;

    let mut tally = Tally::default();
    let mut stalls = Vec::new();
    for _ in 0..if is_long() { 10 } else { 3 } {
        let mut held = acquire(holder, CAP).await;
        let mut process = start_process(&server, queue, 1);
        until("the process is in line", async || in_line().await == "1").await;
        let waiting = async {
            let (served, _) = tokio::join!(served(second), served(third));
            served
        };
        let dying = async {
            until("the others are in line behind it", async || in_line().await == "3").await;
            process.kill().await.unwrap();
            let freed = Instant::now();
            drop(held.pop());
            freed
        };
        let (served, freed) = tokio::join!(waiting, dying);
        stalls.push(served - freed);
        tally.answered += CAP + 2;
        drop(held);
        until("all permits are back", async || in_flight(holder).await == 0).await;
    }

    let mut row = Row::new("killed first in line", &fleet, &tally);
    let longest = stalls.into_iter().max().unwrap();
    row.recovery = Some(longest);
    row.check(longest < Duration::from_secs(5), format!("the line stood still for {longest:?}"));
    row.leases_left(fleet.leases_left().await);
    publish(&[row]);
}

/// When it had a permit.
async fn served(replica: &Replica) -> Instant {
    let _permit = acquire(replica, 1).await;
    Instant::now()
}
