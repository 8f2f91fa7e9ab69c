//! Permits that come back late, twice, or because nobody wants them any more.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use http::Uri;
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt as _;
use tower_host_gate::observe::Operation;
use tower_host_gate::shared::BackendErrorKind;
use tower_host_gate::{Permit, Queue, Redis};

use super::drill::{ANSWER, until};
use super::fleet::{Fleet, Replica, SINGLE, Tally, Told, scope};
use super::row::{Row, is_long, publish};
use super::support::redis::{Fault, Proxy, Server, Standalone};
use super::upstream::{request, stays};

/// How long nobody must get a permit, to believe that there is none.
const A_WHILE: Duration = Duration::from_millis(300);

/// Long enough to wait for anything.
const BUDGET: Duration = Duration::from_secs(50);

/// Nothing here is about a slow store, and a busy machine is slow.
fn open(url: &str) -> Redis {
    Redis::open(url).unwrap().timeout(Duration::from_secs(5))
}

async fn acquire(replica: &Replica) -> Permit {
    let uri: Uri = format!("http://{SINGLE}/").parse().unwrap();
    replica.layer.hosts().acquire(&uri, BUDGET).await.expect("a permit within the budget")
}

async fn in_flight(replica: &Replica) -> usize {
    let known = replica.layer.hosts().get_shared(SINGLE).await.expect("the store answers");
    known.map_or(0, |known| known.in_flight)
}

/// With `taken` held by another, `replica` gets the permit when it comes back, and not before.
async fn only_after(taken: Permit, replica: &Replica) -> bool {
    let mut next = pin!(acquire(replica));
    let was_kept = timeout(A_WHILE, &mut next).await.is_err();
    drop(taken);
    drop(next.await);
    was_kept
}

// ---------------------------------------------------------------------------------------------------------------------
// Late and double release
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_permit_comes_back_when_its_lease_has_ended() {
    let server = Standalone::start().await;
    let rows = join_all([Queue::Delegate, Queue::Fifo].map(|queue| late(&server, queue))).await;
    publish(&rows);
}

async fn late(server: &Server, queue: Queue) -> Row {
    const LEASE: Duration = Duration::from_secs(3);
    let fleet = Fleet::new(3, open(&server.url()).lease_ttl(LEASE), queue).await;
    let [late, next, last] = &fleet.replicas[..] else { unreachable!("three replicas") };

    let began = Instant::now();
    let held_too_long = acquire(late).await;
    let held = acquire(next).await;
    let lasted = began.elapsed();
    drop(held_too_long);
    let expired = Told::Failed(Operation::Release, BackendErrorKind::LeaseExpired);
    until("the late release is reported", async || late.events.count(|told| told == expired) > 0).await;
    let was_kept = only_after(held, last).await;

    let mut row = Row::new("late release", &fleet, &Tally { answered: 3, lost: Vec::new() });
    row.check(lasted + Duration::from_millis(20) >= LEASE, format!("the lease lasted {lasted:?}"));
    row.check(was_kept, "the late release gave back a permit that was not its own".to_owned());
    row.check(row.failures == 1, format!("{} events of one late release", row.failures));
    row.leases_left(fleet.leases_left().await);
    row
}

#[tokio::test(flavor = "multi_thread")]
async fn a_permit_comes_back_twice() {
    let server = Standalone::start().await;
    let rows = join_all([Queue::Delegate, Queue::Fifo].map(|queue| double(&server, queue))).await;
    publish(&rows);
}

/// The reply to a release is lost, so it is repeated as soon as that is possible.
async fn double(server: &Server, queue: Queue) -> Row {
    let proxy = Proxy::start(server).await;
    let mut fleet = Fleet::new(2, open(&server.url()), queue).await;
    fleet.add(open(&proxy.url())).await;
    let [next, last, twice] = &fleet.replicas[..] else { unreachable!("three replicas") };

    // Now the server knows the script of a release, and needs no second try.
    drop(acquire(twice).await);
    let given_back = acquire(twice).await;
    proxy.set(Fault::DropReplies).await;
    drop(given_back);
    until("it is back", async || in_flight(next).await == 0).await;
    let held = acquire(next).await;
    proxy.set(Fault::Pass).await;
    proxy.cut().await;
    until("it is back again", async || twice.events.recoveries().len() == 1).await;
    let counted = in_flight(next).await;
    let was_kept = only_after(held, last).await;

    let mut row = Row::new("double release", &fleet, &Tally { answered: 4, lost: Vec::new() });
    row.check(counted == 1 && was_kept, "the second release gave back a permit that was not its own".to_owned());
    row.leases_left(fleet.leases_left().await);
    row
}

// ---------------------------------------------------------------------------------------------------------------------
// Requests dropped at every point
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_dropped_at_every_point() {
    let server = Standalone::start().await;
    // So that there is something between a question and its answer.
    let proxy = Proxy::start(&server).await;
    proxy.set(Fault::round_trip(Duration::from_millis(4))).await;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let queues = [Queue::Delegate, Queue::Fifo];
    publish(&join_all(queues.map(|queue| dropped(&server, &proxy, queue, seed))).await);
}

async fn dropped(server: &Server, proxy: &Proxy, queue: Queue, seed: u64) -> Row {
    let fleet = Fleet::new(3, open(&proxy.url()), queue).await;
    let requests = if is_long() { 2_000 } else { 200 };
    let began = Instant::now();
    let impatient = (0..).zip(&fleet.replicas).map(|(nth, replica)| async move {
        let mut rng = Rng::with_seed(seed.wrapping_add(nth));
        let mut answered = 0;
        for _ in 0..requests {
            let call = replica.client.clone().oneshot(stays(Duration::from_millis(2), request(SINGLE)));
            answered += usize::from(dropped_somewhere(call, &mut rng).await.is_some_and(|result| result.is_ok()));
        }
        answered
    });
    let answered: usize = join_all(impatient).await.into_iter().sum();
    let ended = Instant::now();

    let visits = fleet.upstream.visits(SINGLE);
    let sent = visits.count();
    let mut row = Row::new("dropped anywhere", &fleet, &Tally { answered: answered + 1, lost: Vec::new() });
    let all = requests * fleet.replicas.len();
    let met = answered > 0 && sent > answered && all > sent;
    row.check(met, format!("of {all}, {sent} were sent and {answered} answered: not at every point"));
    row.check(row.failures == 0, format!("{} operations failed", row.failures));
    row.in_flight(visits.most_in_flight(began, ended), 1);

    row.leases_left(fleet.leases_left().await);
    let tickets = format!("host-gate:1:{}:{{{SINGLE}:80}}:t", scope(queue));
    until("nobody is in line", async || server.cli(&["ZCARD", &tickets]).await == "0").await;
    // The next one goes at once.
    let asked = Instant::now();
    drop(acquire(&fleet.replicas[0]).await);
    row.answer(asked.elapsed(), ANSWER);
    row
}

/// Drives a request up to a random point and drops it there, unless it ends before.
async fn dropped_somewhere<F: Future>(call: F, rng: &mut Rng) -> Option<F::Output> {
    let mut call = pin!(call);
    if rng.bool() {
        let mut polls = rng.usize(..8);
        poll_fn(|cx| {
            if polls == 0 {
                return Poll::Ready(None);
            }
            polls -= 1;
            call.as_mut().poll(cx).map(Some)
        })
        .await
    } else {
        tokio::select! {
            biased;
            ended = call => Some(ended),
            () = sleep(Duration::from_millis(rng.u64(..40))) => None,
        }
    }
}
