//! The gate in front of a real nginx: `limit_req` and `limit_conn`, refusing with 429.
//!
//! What is asserted are nginx's own figures, from its access log, and no test depends on how fast this machine is. Each
//! bound on the refusals rests on three facts:
//!
//! 1. nginx decides about a request before the client has its answer.
//! 2. With one request in flight, the next one is sent after the last answer, and after a refusal a cooldown later.
//! 3. So the time between two decisions of nginx is at least that cooldown. A slow machine makes it longer, and nginx
//!    refuses less.
//!
//! (nginx measures in whole milliseconds and may find a wait a millisecond short; the settings leave room for that.)
//! `limit_req` counts only what it lets through, so a refusal costs nothing but the time until the next attempt.

mod support;

use std::time::Duration;

use http::StatusCode;
use support::client::{self, HttpClient};
use support::reactive;
use support::servers::{Nginx, count, span};
use tower::{Layer, ServiceExt};
use tower_host_gate::{HostGate, HostGateLayer, PermitUntil};

/// A file that no socket buffer takes whole: nginx is not done with it before the client has read most of it.
const BIG: u64 = 8 << 20;

/// How many requests the client without a gate sends. So many that "most are refused" holds on any machine which sends
/// them within ten seconds.
const HERD: usize = 100;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn feeds(nginx: &Nginx, number: usize) -> impl Iterator<Item = String> {
    (0..number).map(|feed| nginx.url(&format!("/feed/{feed}")))
}

/// A gate that stays warm for longer than any test takes.
fn layer() -> HostGateLayer {
    reactive().warm_for(Duration::from_secs(3600))
}

fn gated(layer: &HostGateLayer) -> HostGate<HttpClient> {
    layer.layer(client::http1())
}

/// Sends the herd without a gate, checks that nginx lets no more through than its own rule allows (the first one, the
/// burst, and one per interval since), and gives back how many it refused.
async fn refused_without_gate(nginx: &Nginx, burst: usize, interval: Duration) -> usize {
    client::burst(client::http1(), feeds(nginx, HERD)).await;
    let log = nginx.log().await;
    let drained = span(&log).as_millis() / interval.as_millis() + 1;
    let refused = count(&log, 429);
    assert_eq!(log.len(), HERD);
    assert!(refused + 1 + burst + drained as usize >= HERD, "{refused} refused in {:?}", span(&log));
    refused
}

// --- limit_req ---------------------------------------------------------------------------------------------------------

/// One request per 500 ms, and nginx does not say when to come back: the ladder is 100, 200, 400 ms.
///
/// Three rungs are 700 ms, more than the interval, so after a request that nginx let through it refuses at most three
/// before it lets through the next. The first one of all meets an empty bucket. Five feeds: at most 4 * 3 refusals.
#[tokio::test]
async fn limit_req_without_a_hint_refuses_no_more_than_the_ladder_needs() {
    const FEEDS: usize = 5;
    const REFUSALS: usize = (FEEDS - 1) * 3;
    let config = Nginx::config().limit_req("2r/s");

    let nginx = config.clone().start().await;
    let layer = layer().base_cooldown(millis(100)).spacing(millis(10));
    let met = client::fetch_all(gated(&layer), feeds(&nginx, FEEDS)).await;
    let log = nginx.log().await;
    assert_eq!(count(&log, 200), FEEDS);
    assert_eq!(count(&log, 429), met);
    assert!(met <= REFUSALS, "{met} refusals, the ladder needs {REFUSALS}");

    let nginx = config.start().await;
    assert!(refused_without_gate(&nginx, 0, millis(500)).await > REFUSALS);
}

/// The same nginx with `Retry-After: 1`, which is longer than the interval: one refusal, and the next request passes.
///
/// The ladder alone would begin at 10 ms and need six rungs. Four feeds: at most 3 refusals.
#[tokio::test]
async fn limit_req_with_retry_after_refuses_once_per_feed() {
    const FEEDS: usize = 4;
    const REFUSALS: usize = FEEDS - 1;
    let config = Nginx::config().limit_req("2r/s").retry_after(1);

    let nginx = config.clone().start().await;
    let layer = layer().base_cooldown(millis(10)).spacing(millis(10));
    let met = client::fetch_all(gated(&layer), feeds(&nginx, FEEDS)).await;
    let log = nginx.log().await;
    assert_eq!(count(&log, 200), FEEDS);
    assert_eq!(count(&log, 429), met);
    assert!(met <= REFUSALS, "{met} refusals, the hint needs {REFUSALS}");

    let nginx = config.start().await;
    assert!(refused_without_gate(&nginx, 0, millis(500)).await > REFUSALS);
}

/// Three per second with a burst of three, and `Retry-After: 1`: in that second nginx drains room for two more at least
/// (three, less the millisecond), so it refuses at most once per two feeds beyond the first four. Eight feeds: 2.
#[tokio::test]
async fn limit_req_with_a_burst_refuses_once_per_second_waited() {
    const FEEDS: usize = 8;
    const BURST: usize = 3;
    const REFUSALS: usize = (FEEDS - 1 - BURST) / 2;
    let config = Nginx::config().limit_req("3r/s").burst(BURST as u32).retry_after(1);

    let nginx = config.clone().start().await;
    let layer = layer().base_cooldown(millis(10)).spacing(millis(10));
    let met = client::fetch_all(gated(&layer), feeds(&nginx, FEEDS)).await;
    let log = nginx.log().await;
    assert_eq!(count(&log, 200), FEEDS);
    assert_eq!(count(&log, 429), met);
    assert!(met <= REFUSALS, "{met} refusals, the hint needs {REFUSALS}");

    let nginx = config.start().await;
    assert!(refused_without_gate(&nginx, BURST, millis(334)).await > REFUSALS);
}

/// The spacing of a warm host keeps nginx content: one refusal, and never again.
///
/// One request per 100 ms with a burst of one; the base cooldown and the spacing are 250 ms, two intervals and a bit.
/// The refused host has drained when the cooldown ends. From then on sends are 250 ms apart; nginx may take one up
/// late and so see it close to the next, but not to the one after: that is sent 250 ms after the next, and the next
/// not before the first was answered. So two requests one after the other may be as close as they like (the burst has
/// room for it), and any three are at least 250 ms apart, in which both have drained.
#[tokio::test]
async fn limit_req_refuses_once_where_the_spacing_suffices() {
    const FEEDS: usize = 8;
    let config = Nginx::config().limit_req("10r/s").burst(1);

    let nginx = config.clone().start().await;
    let layer = layer().base_cooldown(millis(250)).spacing(millis(250));
    let met = client::fetch_all(gated(&layer), feeds(&nginx, FEEDS)).await;
    let log = nginx.log().await;
    assert_eq!(count(&log, 200), FEEDS);
    assert_eq!(count(&log, 429), met);
    assert!(met <= 1, "{met} refusals, the spacing needs one");

    let nginx = config.start().await;
    assert!(refused_without_gate(&nginx, 1, millis(100)).await > 1);
}

/// The recommended stack: with `GateRetry` outside the gate nobody sees a refusal. `Retry-After` is longer than the
/// interval, so the second attempt always passes, and two are enough.
#[cfg(feature = "retry")]
#[tokio::test]
async fn limit_req_behind_a_gate_retry_refuses_nobody_for_good() {
    use tower::retry::RetryLayer;
    use tower_host_gate::retry::GateRetry;

    const FEEDS: usize = 4;
    let nginx = Nginx::config().limit_req("2r/s").retry_after(1).start().await;
    let layer = layer().base_cooldown(millis(10)).spacing(millis(10));
    let stack = RetryLayer::new(GateRetry::new(2)).layer(gated(&layer));
    let statuses = client::burst(stack, feeds(&nginx, FEEDS)).await;

    assert_eq!(statuses, [StatusCode::OK; FEEDS]);
    let log = nginx.log().await;
    assert_eq!(count(&log, 200), FEEDS);
    assert!(count(&log, 429) < FEEDS, "{} refusals", count(&log, 429));
}

// --- limit_conn --------------------------------------------------------------------------------------------------------

/// nginx counts a request until it has sent the whole body, and so does the gate: it gives the permit back when the
/// client has read the end, which nginx must have sent before. So nginx never has more open than the gate allows.
#[tokio::test]
async fn limit_conn_never_refuses_what_the_gate_lets_through() {
    const FEEDS: usize = 12;
    for connections in [1, 3] {
        let nginx = Nginx::config().limit_conn(connections).file_size(BIG).start().await;
        let layer = layer().concurrency(connections as usize);
        let statuses = client::burst(gated(&layer), feeds(&nginx, FEEDS)).await;

        assert_eq!(statuses, [StatusCode::OK; FEEDS]);
        let log = nginx.log().await;
        assert_eq!((count(&log, 200), count(&log, 429)), (FEEDS, 0), "limit_conn {connections}");
    }
}

/// All heads are here before any body is read, and the first body is too big to be under way: all others are refused.
#[tokio::test]
async fn limit_conn_refuses_the_herd_without_a_gate() {
    const FEEDS: usize = 12;
    let nginx = Nginx::config().limit_conn(1).file_size(BIG).start().await;
    let client = client::http1();
    let requests = feeds(&nginx, FEEDS).map(|url| client.request(client::get(url)));
    let responses = futures_util::future::join_all(requests).await;
    for response in responses {
        client::drain(response.expect("a response")).await.expect("a whole body");
    }

    let log = nginx.log().await;
    assert_eq!((count(&log, 200), count(&log, 429)), (1, FEEDS - 1));
}

/// The difference is the body: a permit that ends with the head lets the second request go while nginx still sends.
#[tokio::test]
async fn limit_conn_refuses_when_the_permit_ends_with_the_head() {
    let nginx = Nginx::config().limit_conn(1).file_size(BIG).start().await;
    let layer = layer().permit_until(PermitUntil::Head);
    let first = gated(&layer).oneshot(client::get(nginx.url("/first"))).await.expect("a response");
    let second = gated(&layer).oneshot(client::get(nginx.url("/second"))).await.expect("a response");

    assert_eq!(first.status(), StatusCode::OK);
    assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
    client::drain(first).await.expect("a whole body");
    client::drain(second).await.expect("a whole body");
    assert_eq!(count(&nginx.log().await, 429), 1);
}

/// While the first body is unread the second request waits; it goes when the first one is read.
#[tokio::test]
async fn limit_conn_has_the_second_request_wait_for_the_first_body() {
    let nginx = Nginx::config().limit_conn(1).file_size(BIG).start().await;
    let layer = layer();
    let first = gated(&layer).oneshot(client::get(nginx.url("/first"))).await.expect("a response");
    let second = tokio::spawn(gated(&layer).oneshot(client::get(nginx.url("/second"))));
    while layer.hosts().snapshot().iter().map(|host| host.queued).sum::<usize>() == 0 {
        assert!(!second.is_finished(), "the second request did not wait");
        tokio::task::yield_now().await;
    }
    assert_eq!(nginx.log().await, [], "neither is done");

    client::drain(first).await.expect("a whole body");
    let second = second.await.expect("no panic").expect("a response");
    assert_eq!(second.status(), StatusCode::OK);
    client::drain(second).await.expect("a whole body");
    let log = nginx.log().await;
    assert_eq!((count(&log, 200), count(&log, 429)), (2, 0));
}
