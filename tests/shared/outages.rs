//! D15, D16, O01: Redis is slow or gone.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};
use tower_host_gate::observe::WaitOutcome;
use tower_host_gate::shared::BackendErrorKind;
use tower_host_gate::{HostGateLayer, Limits, Reason, Redis};

use super::eye::{Eye, key};
use super::support::reactive;
use super::support::redis::{Fault, Proxy, Standalone};
use super::{FEED, HOST, Replica, eventually, millis, redis, secs, throttled};

// --- D15 --------------------------------------------------------------------------------------------------------------

/// What an operation may take here: more than any that works, on a machine that has other things to do.
const TIMEOUT: Duration = secs(1);
/// So many requests that do not wait for that, but for the first few.
const REQUESTS: u32 = 30;

/// An outage of this kind, of a store that was there before or was not: all requests go, and at once but for the first;
/// it is told once; what was learnt meanwhile holds here, and for others when it is over.
async fn outage(fault: Fault, boots_without: bool) {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let layer = || reactive().concurrency(REQUESTS as usize);
    let store = redis(&proxy.url()).timeout(TIMEOUT);
    let replica = if boots_without {
        proxy.set(fault).await;
        Replica::new(layer(), store)
    } else {
        let replica = Replica::connected(layer(), store).await;
        proxy.set(fault).await;
        if fault == Fault::Refuse {
            proxy.cut().await;
        }
        replica
    };

    let began = Instant::now();
    let mut held = Vec::new();
    for _ in 0..REQUESTS {
        held.push(replica.acquire(FEED).await);
    }
    // Sent by all of them it would be twice as long.
    assert!(began.elapsed() < TIMEOUT * REQUESTS / 2, "{:?}", began.elapsed());
    assert!(replica.at_once(FEED).await.is_err(), "the cap of this process holds");
    assert_eq!(replica.events.degraded().len(), 1, "{:?}", replica.events.degraded());
    assert!(replica.events.recovered().is_empty());

    held.pop().unwrap().settle(throttled(secs(50)));
    assert_eq!(replica.at_once(FEED).await.unwrap_err().reason(), Reason::Cooldown);

    proxy.set(Fault::Pass).await;
    eventually("it is noticed that the store is back", async || replica.events.recovered().len() == 1).await;
    assert_eq!(replica.events.degraded().len(), 1, "{:?}", replica.events.degraded());
    let other = Replica::connected(layer(), redis(&server.url())).await;
    assert!(other.cooldown(HOST).await > secs(10), "told before anybody asked");
    assert_eq!(other.at_once(FEED).await.unwrap_err().reason(), Reason::Cooldown);
}

/// Answers, after ten seconds.
fn slow() -> Fault {
    Fault::round_trip(secs(10))
}

#[tokio::test]
async fn d15_connections_are_refused_from_the_beginning() {
    outage(Fault::Refuse, true).await;
}

#[tokio::test]
async fn d15_connections_break_and_are_refused() {
    outage(Fault::Refuse, false).await;
}

#[tokio::test]
async fn d15_connections_are_accepted_and_never_answered_from_the_beginning() {
    outage(Fault::Blackhole, true).await;
}

#[tokio::test]
async fn d15_the_connection_is_never_answered_any_more() {
    outage(Fault::Blackhole, false).await;
}

#[tokio::test]
async fn d15_the_connection_loses_all_replies() {
    outage(Fault::DropReplies, false).await;
}

#[tokio::test]
async fn d15_answers_come_after_ten_seconds_from_the_beginning() {
    outage(slow(), true).await;
}

#[tokio::test]
async fn d15_answers_come_after_ten_seconds() {
    outage(slow(), false).await;
}

#[tokio::test]
async fn d15_a_replica_boots_without_redis_and_shares_when_it_comes() {
    let mut server = Standalone::start().await;
    server.kill();
    let replica = Replica::new(HostGateLayer::new(), redis(&server.url()));
    drop(replica.acquire(FEED).await);
    assert_eq!(replica.events.degraded(), [BackendErrorKind::Unreachable]);

    server.restart().await;
    eventually("it is noticed that the store is there", async || replica.events.recovered().len() == 1).await;
    let _permit = replica.acquire(FEED).await;
    assert_eq!(Eye::open(&server).await.leases(HOST).await, 1);
}

#[tokio::test]
async fn d15_a_server_that_stands_still_for_a_while_is_one_outage() {
    let server = Standalone::start().await;
    let layer = HostGateLayer::new().concurrency(REQUESTS as usize);
    let replica = Replica::connected(layer, redis(&server.url()).timeout(TIMEOUT)).await;
    server.stop();
    let began = Instant::now();
    let asked = (0..REQUESTS).map(|n| format!("http://feed-{n}.example/"));
    for uri in asked {
        drop(replica.acquire(&uri).await);
    }
    assert!(began.elapsed() < TIMEOUT * REQUESTS / 2, "{:?}", began.elapsed());
    server.cont();
    eventually("it is noticed that the server goes on", async || replica.events.recovered().len() == 1).await;
    assert_eq!(replica.events.degraded(), [BackendErrorKind::Timeout]);

    // Whatever it ran late, and whatever was given back to nobody, is over.
    let eye = Eye::open(&server).await;
    eventually("no lease is left", async || !eye.keys().await.iter().any(|key| key.ends_with(":l"))).await;
}

// --- D16 --------------------------------------------------------------------------------------------------------------

/// How many requests three replicas let go together of a quota of 30, while Redis is down.
async fn admitted_without_redis(share: u32) -> [usize; 3] {
    let mut server = Standalone::start().await;
    let layer = || HostGateLayer::new().concurrency(100).quota(30, secs(600));
    let store = || redis(&server.url()).share_while_degraded(share);
    let [one, two, three] = [(); 3].map(|()| Replica::new(layer(), store()));
    server.kill();
    let mut admitted = [0; 3];
    for (replica, admitted) in [one, two, three].iter().zip(&mut admitted) {
        *admitted = replica.admitted(50, FEED).await;
        assert_eq!(replica.events.degraded().len(), 1, "a replica says that it is by itself");
    }
    admitted
}

#[tokio::test]
async fn d16_each_of_three_replicas_keeps_the_whole_quota_without_redis() {
    assert_eq!(admitted_without_redis(1).await, [30; 3]);
}

#[tokio::test]
async fn d16_each_of_three_replicas_keeps_a_third_of_the_quota_without_redis_if_so_set() {
    assert_eq!(admitted_without_redis(3).await, [10; 3]);
}

#[tokio::test]
async fn d16_a_share_of_concurrency_and_delay_too_and_all_of_it_again_with_redis() {
    let mut server = Standalone::start().await;
    let layer = HostGateLayer::new()
        .concurrency(6)
        .per_host("slow.example", Limits::default().concurrency(100).min_delay(secs(100)));
    let replica = Replica::connected(layer, redis(&server.url()).share_while_degraded(3)).await;
    server.kill();
    eventually("it is by itself", async || replica.events.degraded().len() == 1).await;
    let held = join_all((0..2).map(|_| replica.acquire(FEED))).await;
    assert_eq!(replica.at_once(FEED).await.unwrap_err().reason(), Reason::InFlight);
    drop(held);
    drop(replica.acquire("http://slow.example/").await);
    let shed = replica.at_once("http://slow.example/").await.unwrap_err();
    assert!(shed.retry_after() > secs(200), "three times the delay: {shed}");

    server.restart().await;
    eventually("it is not by itself", async || replica.events.recovered().len() == 1).await;
    let _held = join_all((0..6).map(|_| replica.acquire(FEED))).await;
    assert_eq!(Eye::open(&server).await.ask::<usize>(&["ZCARD", &key(HOST, ":l")]).await, 6);
}

// --- O01 --------------------------------------------------------------------------------------------------------------

/// Holds a host in process, where there is no store that could be told.
fn held_without_redis(store: Redis) -> Replica {
    let replica = Replica::new(HostGateLayer::new().spacing(millis(1)), store);
    replica.hosts.penalize(HOST, millis(300));
    replica
}

#[tokio::test]
async fn o01_without_redis_a_wait_that_ends_with_a_permit_is_one_event() {
    let mut server = Standalone::start().await;
    server.kill();
    let replica = held_without_redis(redis(&server.url()));
    drop(replica.acquire(FEED).await);
    let waits = replica.events.waits();
    assert_eq!(waits.len(), 1, "{waits:?}");
    assert_eq!(waits[0].0, WaitOutcome::Acquired);
    assert!(waits[0].1 >= millis(250), "{waits:?}");
    assert_eq!(replica.events.degraded().len(), 1);
}

#[tokio::test]
async fn o01_a_wait_during_which_redis_goes_is_one_event() {
    let mut server = Standalone::start().await;
    let replica = Replica::connected(HostGateLayer::new(), redis(&server.url())).await;
    let held = replica.acquire(FEED).await;
    let waiting = replica.acquire(FEED);
    let meanwhile = async {
        eventually("somebody waits", async || replica.hosts.get(HOST).is_some_and(|seen| seen.queued == 1)).await;
        server.kill();
        eventually("it is noticed", async || replica.events.degraded().len() == 1).await;
        drop(held);
    };
    let _permit = tokio::join!(waiting, meanwhile);
    let waits = replica.events.waits();
    assert_eq!(waits.iter().map(|wait| wait.0).collect::<Vec<_>>(), [WaitOutcome::Acquired]);
}

#[tokio::test]
async fn o01_without_redis_a_wait_that_is_given_up_is_one_event() {
    let mut server = Standalone::start().await;
    server.kill();
    let replica = held_without_redis(redis(&server.url()));
    replica.hosts.penalize(HOST, secs(50));
    assert!(timeout(millis(300), replica.acquire(FEED)).await.is_err());
    let waits = replica.events.waits();
    assert_eq!(waits.iter().map(|wait| wait.0).collect::<Vec<_>>(), [WaitOutcome::Canceled]);
}

#[tokio::test]
async fn o01_without_redis_a_request_past_its_budget_is_one_event() {
    let mut server = Standalone::start().await;
    server.kill();
    let replica = held_without_redis(redis(&server.url()));
    replica.hosts.penalize(HOST, secs(50));
    assert_eq!(replica.within(secs(1), FEED).await.unwrap_err().reason(), Reason::Cooldown);
    let waits = replica.events.waits();
    assert_eq!(waits.iter().map(|wait| wait.0).collect::<Vec<_>>(), [WaitOutcome::Shed]);
    assert_eq!(replica.events.sheds(), 1);
}

/// Each operation fails, though there is a connection.
#[tokio::test]
async fn o01_with_a_failure_for_every_question_a_wait_is_one_event_all_the_same() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let replica = Replica::connected(HostGateLayer::new(), redis(&server.url())).await;
    eye.ask::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let held = replica.acquire(FEED).await;
    let waiting = replica.acquire(FEED);
    let meanwhile = async {
        eventually("somebody waits", async || replica.hosts.get(HOST).is_some_and(|seen| seen.queued == 1)).await;
        // For long enough to ask again and again.
        sleep(millis(200)).await;
        drop(held);
    };
    let _permit = tokio::join!(waiting, meanwhile);
    let waits = replica.events.waits();
    assert_eq!(waits.iter().map(|wait| wait.0).collect::<Vec<_>>(), [WaitOutcome::Acquired]);
}
