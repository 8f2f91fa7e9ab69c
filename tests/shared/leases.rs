//! D11, D12, D13: permits that their holders cannot give back, and those that nobody has waited for.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::process::Stdio;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::join_all;
use http::Request;
use tokio::time::{sleep, timeout};
use tower::{Layer as _, ServiceExt as _};
use tower_host_gate::observe::Operation;
use tower_host_gate::{HostGateLayer, Label, Queue, Reason};

use super::eye::Eye;
use super::support::client::drain;
use super::support::redis::{Fault, Proxy, Standalone};
use super::support::script::{Reply, Script};
use super::{FEED, HOST, Replica, child, eventually, millis, redis, secs, told};

// --- D11 --------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn d11_the_permit_of_a_killed_process_is_free_when_its_lease_ends_by_the_servers_clock() {
    const TEST: &str = "leases::d11_the_permit_of_a_killed_process_is_free_when_its_lease_ends_by_the_servers_clock";
    if let Some(url) = told() {
        let doomed = Replica::connected(HostGateLayer::new(), redis(&url).lease_ttl(secs(300))).await;
        let _permit = doomed.acquire(FEED).await;
        return pending().await;
    }
    let mut server = Standalone::with_clock().await;
    let eye = Eye::open(&server).await;
    let mut holder = tokio::process::Command::from(child(TEST, &server.url()));
    let mut holder = holder.stdout(Stdio::null()).kill_on_drop(true).spawn().unwrap();
    eventually("the other process has the permit", async || eye.leases(HOST).await == 1).await;
    holder.kill().await.unwrap();

    let replica = Replica::connected(HostGateLayer::new(), redis(&server.url())).await;
    server.step_clock(200);
    assert_eq!(replica.at_once(FEED).await.unwrap_err().reason(), Reason::InFlight);
    let _other = replica.at_once("http://other.example/").await.expect("nothing else is blocked");
    server.step_clock(100);
    let _permit = replica.acquire(FEED).await;
    assert_eq!(eye.leases(HOST).await, 1);
    replica.events.assert_no_failure();
}

#[tokio::test]
async fn d11_the_permit_of_a_runtime_that_is_gone_is_free_when_its_lease_ends() {
    let server = Standalone::start().await;
    let url = server.url();
    let holder = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (replica, permit) = runtime.block_on(async {
            let store = redis(&url).lease_ttl(secs(2));
            let replica = Replica::connected(HostGateLayer::new(), store).await;
            let permit = replica.acquire(FEED).await;
            (replica, permit)
        });
        drop(runtime);
        // Nobody is there to tell the store.
        drop(permit);
        replica
    });
    let _dead = holder.await.unwrap();
    let replica = Replica::connected(HostGateLayer::new(), redis(&server.url())).await;
    let _permit = replica.acquire(FEED).await;
}

// --- D12 --------------------------------------------------------------------------------------------------------------

fn labelled() -> Request<()> {
    Request::get(FEED).extension(Label("nightly")).body(()).unwrap()
}

/// The caller has its response and has not read it, so its permit is taken, when the network breaks; then it reads.
async fn breaks_at_the_release(fault: Fault, back_after: Option<Duration>) {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let eye = Eye::open(&server).await;
    let store = |url: &str| redis(url).timeout(millis(500)).lease_ttl(secs(3));
    let replica = Replica::connected(HostGateLayer::new(), store(&proxy.url())).await;
    let client = replica.layer.layer(Script::always(Reply::ok().body("the feed")));

    let response = client.oneshot(labelled()).await.expect("a response");
    assert_eq!(eye.leases(HOST).await, 1);
    proxy.set(fault).await;
    if fault == Fault::Refuse {
        proxy.cut().await;
    }
    assert_eq!(drain(response).await.unwrap(), "the feed");

    eventually("it is told of", async || !replica.events.errors_of(Operation::Release).is_empty()).await;
    let errors = replica.events.errors_of(Operation::Release);
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!((errors[0].host.as_str(), errors[0].label), (HOST, Some("nightly")));

    if back_after.is_some() {
        proxy.set(Fault::Pass).await;
    }
    let other = Replica::connected(HostGateLayer::new(), redis(&server.url())).await;
    let _permit = other.acquire(FEED).await;
}

#[tokio::test]
async fn d12_a_permit_that_could_not_be_given_back_is_free_when_its_lease_ends() {
    breaks_at_the_release(Fault::Refuse, None).await;
}

#[tokio::test]
async fn d12_a_permit_whose_release_was_swallowed_is_free_when_its_lease_ends() {
    breaks_at_the_release(Fault::Blackhole, None).await;
}

#[tokio::test]
async fn d12_a_permit_that_could_not_be_given_back_is_when_redis_is_back() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let eye = Eye::open(&server).await;
    // The lease would outlive the test.
    let replica = Replica::connected(HostGateLayer::new(), redis(&proxy.url()).lease_ttl(secs(600))).await;
    let client = replica.layer.layer(Script::always(Reply::ok().body("the feed")));

    let response = client.oneshot(labelled()).await.expect("a response");
    proxy.set(Fault::Refuse).await;
    proxy.cut().await;
    assert_eq!(drain(response).await.unwrap(), "the feed");
    eventually("it is told of", async || replica.events.errors_of(Operation::Release).len() == 1).await;
    assert_eq!(eye.leases(HOST).await, 1);

    proxy.set(Fault::Pass).await;
    eventually("it is given back", async || eye.leases(HOST).await == 0).await;
    eventually("the outage is over", async || replica.events.recovered().len() == 1).await;
    assert_eq!(replica.events.degraded().len(), 1);
}

// --- D13 --------------------------------------------------------------------------------------------------------------

const CAP: usize = 2;

/// Nothing is left of requests that were dropped: as many as ever can be in flight, and then nothing is.
async fn assert_whole(replica: &Replica, eye: &Eye, when: &str) {
    let mut held = Vec::new();
    for _ in 0..CAP {
        held.push(replica.acquire(FEED).await);
    }
    assert!(replica.at_once(FEED).await.is_err(), "{when}");
    assert_eq!(eye.leases(HOST).await, CAP, "{when}");
    drop(held);
    eventually(when, async || eye.leases(HOST).await == 0 && eye.tickets(HOST).await == 0).await;
}

/// Polls so often, and then drops the future; or it is ready.
async fn polled<T>(times: u32, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = times;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        future.as_mut().poll(cx).map(Some)
    })
    .await
}

async fn dropped_at_every_point(queue: Queue) {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let eye = Eye::open(&server).await;
    let store = || redis(&proxy.url()).queue(queue).lease_ttl(secs(600));
    let layer = || HostGateLayer::new().concurrency(CAP);
    let replica = Replica::connected(layer(), store()).await;
    let other = Replica::connected(layer(), store()).await;
    proxy.set(Fault::round_trip(millis(20))).await;

    for polls in 0..=4 {
        let _ = polled(polls, replica.acquire(FEED)).await;
        assert_whole(&replica, &eye, &format!("{queue:?}: dropped after {polls} polls")).await;
    }
    // On the way there, at the server, on the way back, in hand.
    for point in (0..=40).step_by(4) {
        let _ = timeout(millis(point), replica.acquire(FEED)).await;
        assert_whole(&other, &eye, &format!("{queue:?}: dropped after {point} ms")).await;
    }
    // While another one's permit is on its way here.
    for point in (0..=60).step_by(6) {
        let held = [other.acquire(FEED).await, other.acquire(FEED).await];
        let waiting = async {
            let _ = timeout(millis(40 + point), replica.acquire(FEED)).await;
        };
        let giving_back = async {
            sleep(millis(40)).await;
            drop(held);
        };
        tokio::join!(waiting, giving_back);
        assert_whole(&other, &eye, &format!("{queue:?}: dropped {point} ms after a permit was given back")).await;
    }
    replica.events.assert_no_failure();
    other.events.assert_no_failure();
}

#[tokio::test]
async fn d13_a_request_that_is_dropped_at_any_point_leaves_no_lease() {
    dropped_at_every_point(Queue::Delegate).await;
}

#[tokio::test]
async fn d13_a_request_that_is_dropped_at_any_point_leaves_no_lease_and_no_ticket() {
    dropped_at_every_point(Queue::Fifo).await;
}

#[tokio::test]
async fn d13_whoever_gives_up_waiting_leaves_the_line_at_once() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let store = || redis(&server.url()).queue(Queue::Fifo);
    let holder = Replica::connected(HostGateLayer::new(), store()).await;
    let waiter = Replica::connected(HostGateLayer::new(), store()).await;
    let _held = holder.acquire(FEED).await;
    tokio::select! {
        _ = waiter.acquire(FEED) => panic!("the permit is taken"),
        () = eventually("it stands in line", async || eye.tickets(HOST).await == 1) => {}
    }
    eventually("it does no longer", async || eye.tickets(HOST).await == 0).await;
}

/// Time is not given back: what was admitted counts as sent.
#[tokio::test]
async fn d13_requests_that_were_dropped_leave_no_more_than_one_interval_of_debt() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let layer = HostGateLayer::new().concurrency(CAP).min_delay(secs(300));
    let replica = Replica::connected(layer, redis(&proxy.url())).await;
    proxy.set(Fault::round_trip(millis(20))).await;
    for point in (0..=40).step_by(4) {
        // From the second one on they may be told that the interval is longer than they would wait.
        let _ = timeout(millis(point), replica.within(secs(1), FEED)).await;
    }
    eventually("nothing is in flight", async || {
        replica.hosts.get_shared(HOST).await.unwrap().is_none_or(|seen| seen.in_flight == 0)
    })
    .await;
    let seen = replica.hosts.get_shared(HOST).await.unwrap();
    assert!(seen.is_none_or(|seen| seen.next_send <= secs(300)));
}

/// A server that hangs and then runs what it was sent long ago makes no leases of it, though nobody is left to undo that.
#[tokio::test]
async fn d13_a_server_that_runs_commands_late_admits_nobody() {
    const ASKING: usize = 10;
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let store = redis(&server.url()).timeout(millis(300)).lease_ttl(secs(600));
    // A runtime of their own, to end with all that they would still do.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let replicas = runtime.spawn(join_all((0..ASKING).map(move |_| {
        let layer = HostGateLayer::new().concurrency(100);
        Replica::connected(layer, store.clone())
    })));
    let replicas = replicas.await.unwrap();
    // A script that the server does not know yet would not be run late: nobody is left to send it.
    drop(replicas[0].acquire(FEED).await);
    eventually("the permit is given back", async || eye.leases(HOST).await == 0).await;

    let before = eye.script_calls().await;
    server.stop();
    runtime.spawn(async move {
        join_all(replicas.iter().map(|replica| replica.acquire(FEED))).await;
    });
    sleep(millis(100)).await;
    runtime.shutdown_background();
    // Longer than anybody waits for an answer.
    sleep(millis(400)).await;
    server.cont();
    eventually("all it was sent is run", async || eye.script_calls().await >= before + ASKING as u64).await;
    assert_eq!(eye.leases(HOST).await, 0);
}
