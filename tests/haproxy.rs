//! The gate in front of a real HAProxy that refuses by its stick table (`http_req_rate`).
//!
//! HAProxy counts what it refuses as well, so impatience is punished: who keeps asking keeps being refused. What is
//! asserted are its own figures, from its log and from the backend behind it, and no test depends on how fast this
//! machine is. Each bound on the refusals rests on this:
//!
//! 1. HAProxy decides about a request before the client has its answer, and with one request in flight the next one is
//!    sent after that. So between two decisions is at least the cooldown in between; on a slow machine, more.
//! 2. After two periods without a request the table has forgotten everything. (It keeps the count of this period and
//!    of the one before.)
//! 3. An empty table lets at least `ALLOWED` requests through before it refuses one.

mod support;

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use support::client;
use support::provider::Provider;
use support::reactive;
use support::servers::{Haproxy, HaproxyConfig, count};
use tower::Layer;

const FEEDS: usize = 8;
const ALLOWED: usize = 3;

async fn backend() -> Provider {
    Provider::start(|_, _| Response::new(Full::new(Bytes::from_static(b"a feed")))).await
}

fn feeds(haproxy: &Haproxy, number: usize) -> impl Iterator<Item = String> {
    (0..number).map(|feed| haproxy.url(&format!("/feed/{feed}")))
}

/// Fetches all feeds through a gate whose ladder begins at this cooldown, and checks that everybody's books agree.
/// Gives back the number of refusals.
async fn refused_with_gate(config: HaproxyConfig, backend: &Provider, base_cooldown: Duration) -> usize {
    let haproxy = config.start().await;
    let layer = reactive()
        .base_cooldown(base_cooldown)
        .spacing(Duration::from_millis(10))
        // Longer than any test takes.
        .warm_for(Duration::from_secs(3600));
    let met = client::fetch_all(layer.layer(client::http1()), feeds(&haproxy, FEEDS)).await;

    let log = haproxy.finish().await;
    assert_eq!(count(&log, 200), FEEDS);
    assert_eq!(count(&log, 429), met);
    assert_eq!(backend.count(200), FEEDS);
    met
}

/// Sends a hundred requests at once without a gate, and gives back how many were refused: with the first three the
/// table is full, and all others keep it full.
async fn refused_without_gate(config: HaproxyConfig) -> usize {
    let haproxy = config.start().await;
    client::burst(client::http1(), feeds(&haproxy, 100)).await;
    count(&haproxy.finish().await, 429)
}

/// Refusals say `Retry-After: 2`, more than two periods of 800 ms. So each one is followed by an empty table, and that
/// by three feeds or by the last one: of eight feeds, two refusals. (The ladder alone would begin at 10 ms.)
#[tokio::test]
async fn stick_table_with_retry_after_refuses_once_per_pause() {
    const REFUSALS: usize = (FEEDS - 1) / ALLOWED;
    let backend = backend().await;
    let config = Haproxy::config(backend.addr(), ALLOWED as u32, Duration::from_millis(800)).retry_after(2);
    let met = refused_with_gate(config.clone(), &backend, Duration::from_millis(10)).await;
    assert!(met <= REFUSALS, "{met} refusals, the hint needs {REFUSALS}");

    assert!(refused_without_gate(config).await > REFUSALS);
}

/// Without a hint the ladder is 40, 80, 160, 320, 640 ms. The fifth rung is more than two periods of 250 ms, so what
/// follows it passes: at most five refusals before each feed, and none before the first three. (Without the doubling
/// nothing would ever pass: a request every 40 ms keeps the table full.)
#[tokio::test]
async fn stick_table_without_a_hint_refuses_no_more_than_the_ladder_needs() {
    const REFUSALS: usize = (FEEDS - ALLOWED) * 5;
    let backend = backend().await;
    let config = Haproxy::config(backend.addr(), ALLOWED as u32, Duration::from_millis(250));
    let met = refused_with_gate(config.clone(), &backend, Duration::from_millis(40)).await;
    assert!(met <= REFUSALS, "{met} refusals, the ladder needs {REFUSALS}");

    assert!(refused_without_gate(config).await > REFUSALS);
}
