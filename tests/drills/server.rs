//! The store is there all the time, and something happens to what it keeps.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_host_gate::Redis;
use tower_host_gate::shared::BackendErrorKind;

use super::drill::{Drill, Promise};
use super::fleet::REPLICAS;
use super::row::lasting;
use super::support::redis::{Server, Standalone};

const SHORT: Duration = Duration::from_secs(2);

/// No drill here is about a slow store, and a busy machine is slow.
fn open(server: &Server) -> Redis {
    Redis::open(&server.url()).unwrap().timeout(Duration::from_secs(5))
}

/// Until the fault has lasted long enough.
async fn for_a_while(mut again: impl AsyncFnMut()) {
    let until = Instant::now() + lasting(SHORT);
    while Instant::now() < until {
        again().await;
        sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_are_forgotten() {
    let server = Standalone::start().await;
    let mut drill = Drill::start("SCRIPT FLUSH", Promise::NOTHING, open(&server)).await;
    drill.breaks();
    for_a_while(async || {
        server.cli(&["SCRIPT", "FLUSH"]).await;
    })
    .await;
    drill.mended();
    drill.end().await;
}

/// The connection is well, so there is no outage; but each request is decided by its own replica.
#[tokio::test(flavor = "multi_thread")]
async fn memory_is_used_up() {
    let server = Standalone::start().await;
    let promise = Promise { times_the_limit: REPLICAS, ..Promise::NOTHING };
    let mut drill = Drill::start("OOM", promise, open(&server)).await;
    drill.breaks();
    server.cli(&["SETRANGE", "junk", "10000000", "x"]).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "8mb", "maxmemory-policy", "noeviction"]).await;
    sleep(lasting(SHORT)).await;
    server.cli(&["DEL", "junk"]).await;
    drill.mended();
    assert!(drill.has_failed_with(BackendErrorKind::OutOfMemory), "there was no memory");
    drill.end().await;
}

/// Leases are lost, and so more are granted; the limits of each replica hold.
#[tokio::test(flavor = "multi_thread")]
async fn keys_are_evicted() {
    let server = Standalone::start_with(&["--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru"]).await;
    let promise = Promise { times_the_limit: REPLICAS, ..Promise::NOTHING };
    let mut drill = Drill::start("eviction", promise, open(&server)).await;
    drill.breaks();
    let junk = "for i = 1, 200 do redis.call('SETRANGE', KEYS[1] .. i, 10000, 'x') end";
    let mut nth = 0;
    for_a_while(async || {
        nth += 1;
        server.cli(&["EVAL", junk, "1", &format!("junk {nth} ")]).await;
    })
    .await;
    drill.mended();
    assert!(!server.cli(&["INFO", "STATS"]).await.contains("evicted_keys:0\r"), "something was evicted");
    drill.end().await;
}

/// Leases and windows are over earlier than they should be, once.
#[tokio::test(flavor = "multi_thread")]
async fn the_clock_is_set_forward() {
    let mut server = Standalone::with_clock().await;
    let promise = Promise { times_the_limit: 2, ..Promise::NOTHING };
    let redis = open(&server).lease_ttl(Duration::from_secs(30));
    let mut drill = Drill::start("clock +60 s", promise, redis).await;
    drill.breaks();
    server.step_clock(60);
    sleep(SHORT).await;
    drill.mended();
    drill.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clock_is_set_back() {
    let mut server = Standalone::with_clock().await;
    let mut drill = Drill::start("clock -1 h", Promise::NOTHING, open(&server)).await;
    drill.breaks();
    server.step_clock(-3_600);
    sleep(SHORT).await;
    drill.mended();
    drill.end().await;
}
