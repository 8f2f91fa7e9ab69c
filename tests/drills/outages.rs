//! The store is away for a while: every replica notices once, paces by itself, and comes back once.

use std::time::Duration;

use tokio::time::sleep;
use tower_host_gate::Redis;

use super::drill::{Drill, Promise};
use super::fleet::CAPPED;
use super::row::lasting;
use super::support::redis::{Cluster, Fault, Proxy, Sentinel, Standalone};

const SHORT: Duration = Duration::from_millis(1_500);
/// Long enough for several attempts to connect to time out.
const HANGING: Duration = Duration::from_secs(3);

fn open(url: &str) -> Redis {
    Redis::open(url).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_and_restart() {
    let mut server = Standalone::start().await;
    let mut drill = Drill::start("kill -9, restart", Promise::OUTAGE, open(&server.url())).await;
    drill.breaks();
    server.kill();
    sleep(lasting(SHORT)).await;
    server.restart().await;
    drill.mended();
    drill.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_is_stopped_and_goes_on() {
    let server = Standalone::start().await;
    let mut drill = Drill::start("SIGSTOP", Promise::OUTAGE, open(&server.url())).await;
    drill.breaks();
    server.stop();
    sleep(lasting(HANGING)).await;
    server.cont();
    drill.mended();
    drill.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_pauses_its_clients() {
    let server = Standalone::start().await;
    let mut drill = Drill::start("CLIENT PAUSE", Promise::OUTAGE, open(&server.url())).await;
    let pause = lasting(SHORT);
    drill.breaks();
    server.cli(&["CLIENT", "PAUSE", &pause.as_millis().to_string()]).await;
    sleep(pause).await;
    drill.mended();
    drill.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_becomes_a_replica_and_a_master_again() {
    let (server, master) = tokio::join!(Standalone::start(), Standalone::start());
    let mut drill = Drill::start("READONLY", Promise::OUTAGE, open(&server.url())).await;
    drill.breaks();
    server.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
    sleep(lasting(SHORT)).await;
    server.cli(&["REPLICAOF", "NO", "ONE"]).await;
    drill.mended();
    drill.end().await;
}

/// Everything that is sent is lost, on connections that stay open, new ones too.
#[tokio::test(flavor = "multi_thread")]
async fn the_network_swallows_everything() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let mut drill = Drill::start("blackhole", Promise::OUTAGE, open(&proxy.url())).await;
    drill.breaks();
    proxy.set(Fault::Blackhole).await;
    sleep(lasting(HANGING)).await;
    proxy.set(Fault::Pass).await;
    drill.mended();
    drill.end().await;
}

/// The server does what it is asked to, and nobody hears of it: whatever it has granted comes back.
#[tokio::test(flavor = "multi_thread")]
async fn replies_are_lost() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let mut drill = Drill::start("replies lost", Promise::OUTAGE, open(&proxy.url())).await;
    drill.breaks();
    proxy.set(Fault::DropReplies).await;
    sleep(lasting(SHORT)).await;
    proxy.set(Fault::Pass).await;
    drill.mended();
    drill.end().await;
}

/// As long as an operation may take: too slow for a store, and not to be tried again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_network_is_given_up_once() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let promise = Promise { outages: 0..=1, ..Promise::OUTAGE };
    let mut drill = Drill::start("200 ms round trip", promise, open(&proxy.url())).await;
    drill.breaks();
    proxy.set(Fault::round_trip(Duration::from_millis(200))).await;
    sleep(lasting(HANGING)).await;
    proxy.set(Fault::Pass).await;
    drill.mended();
    drill.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinel_replaces_a_master_that_is_killed() {
    let mut servers = Sentinel::start().await;
    let redis = Redis::sentinel(servers.sentinel_urls(), servers.service()).unwrap();
    let mut drill = Drill::start("Sentinel failover", Promise::OUTAGE, redis).await;
    drill.breaks();
    servers.kill_master();
    servers.wait_for_new_master().await;
    drill.mended();
    drill.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_replaces_a_master_that_is_killed() {
    let mut servers = Cluster::start_with_replicas().await;
    let mut drill = Drill::start("Cluster failover", Promise::OUTAGE, Redis::cluster(servers.urls()).unwrap()).await;
    drill.breaks();
    servers.kill_master_of(&format!("{{{CAPPED}:80}}")).await;
    servers.wait_until_ok().await;
    drill.mended();
    drill.end().await;
}
