//! What can be seen from outside of how healthy hosts are let through without a lock: that it is not seen.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

#[path = "fast_path/crowd.rs"]
mod crowd;
#[path = "fast_path/layers.rs"]
mod layers;
#[path = "fast_path/memory.rs"]
mod memory;

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use support::script::{Reply, Script, get};
use tokio_test::task::spawn;
use tokio_test::{assert_pending, assert_ready_ok};
use tower::{BoxError, Layer, Service, ServiceExt};
use tower_host_gate::{By, HostGate, HostGateLayer, Limits, Reason, ResponseBody};

const URI: &str = "https://example.com/feed";

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A client whose requests are answered at once, with a body that is still to be read.
#[derive(Clone)]
struct AtOnce;

impl Service<Request<()>> for AtOnce {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(Full::from("the feed"))))
    }
}

/// A response whose request did not have to wait. As long as it is held, the request is in flight.
type Held = Response<ResponseBody<Full<Bytes>>>;

/// `None` if it has to wait.
fn send(client: &mut HostGate<AtOnce>, uri: impl TryInto<Uri>) -> Option<Held> {
    let mut request = Request::new(());
    *request.uri_mut() = uri.try_into().ok().unwrap();
    match pin!(client.call(request)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(response) => Some(response.unwrap()),
        Poll::Pending => None,
    }
}

fn in_flight(layer: &HostGateLayer) -> Vec<(String, usize)> {
    let hosts = layer.hosts().snapshot().into_iter().map(|host| (host.host.to_string(), host.in_flight));
    let mut hosts: Vec<_> = hosts.collect();
    hosts.sort();
    hosts
}

// --- whose permit it is -----------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn all_spellings_of_a_host_share_a_permit_in_flight() {
    const SPELLINGS: [&str; 7] = [
        URI,
        "https://Example.com/",
        "https://example.com:443/other",
        "https://example.com./",
        "https://user:secret@example.com/",
        "HTTPS://EXAMPLE.COM:0443",
        "wss://example.com/socket",
    ];
    for first in SPELLINGS {
        let layer = HostGateLayer::new();
        let mut client = layer.layer(AtOnce);
        let held = send(&mut client, first).unwrap();
        assert_eq!(in_flight(&layer), [("example.com:443".to_owned(), 1)], "{first}");
        for second in SPELLINGS {
            assert!(send(&mut client, second).is_none(), "{second} beside {first}");
        }
        drop(held);
        assert_eq!(in_flight(&layer), []);
    }
}

#[tokio::test(start_paused = true)]
async fn other_ports_and_schemes_of_a_host_have_permits_of_their_own() {
    let layer = HostGateLayer::new();
    let mut client = layer.layer(AtOnce);
    let uris = [URI, "http://example.com/", "https://example.com:8443/", "http://example.com:8080/"];
    let held: Vec<_> = uris.iter().map(|uri| send(&mut client, *uri).unwrap()).collect();
    let keys = ["example.com:443", "example.com:80", "example.com:8080", "example.com:8443"];
    assert_eq!(in_flight(&layer), keys.map(|key| (key.to_owned(), 1)));
    assert!(uris.iter().all(|uri| send(&mut client, *uri).is_none()));
    drop(held);
    assert_eq!(in_flight(&layer), []);
}

#[tokio::test(start_paused = true)]
async fn keyed_by_host_all_ports_and_schemes_share_a_permit() {
    let layer = HostGateLayer::new().keying(By::Host);
    let mut client = layer.layer(AtOnce);
    let held = send(&mut client, URI).unwrap();
    for other in ["http://example.com/", "https://example.com:8443/", "https://EXAMPLE.com/"] {
        assert!(send(&mut client, other).is_none(), "{other}");
    }
    assert_eq!(in_flight(&layer), [("example.com".to_owned(), 1)]);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn hosts_of_any_length_are_shown_under_their_names_while_in_flight() {
    for (scheme, port, shown) in [
        ("https", "", ":443"),
        ("http", "", ":80"),
        ("https", ":8443", ":8443"),
        ("http", ":443", ":443"),
        ("wss", ":80", ":80"),
    ] {
        let layer = HostGateLayer::new();
        let mut client = layer.layer(AtOnce);
        let names: Vec<_> = (1..=70).map(|length| "abcdefghij".repeat(7)[70 - length..].to_owned()).collect();
        let uris: Vec<_> = names.iter().map(|name| format!("{scheme}://{name}{port}/")).collect();
        let mut keys: Vec<_> = names.iter().map(|name| (format!("{name}{shown}"), 1)).collect();
        keys.sort();

        // One at a time, and all of them together.
        for (uri, name) in uris.iter().zip(&names) {
            let held = send(&mut client, uri.as_str()).unwrap();
            assert_eq!(in_flight(&layer), [(format!("{name}{shown}"), 1)]);
            assert!(send(&mut client, uri.as_str()).is_none(), "{uri}");
            drop(held);
        }
        let held: Vec<_> = uris.iter().map(|uri| send(&mut client, uri.as_str()).unwrap()).collect();
        assert_eq!(in_flight(&layer), keys);
        for name in &names {
            assert_eq!(layer.hosts().get(&format!("{name}{shown}")).unwrap().in_flight, 1);
        }
        drop(held);
        assert_eq!(in_flight(&layer), []);
    }
}

// --- how many at a time -----------------------------------------------------------------------------------------------

fn limits_of_300() -> [HostGateLayer; 4] {
    let limits = || Limits::default().concurrency(300);
    let at_run_time = HostGateLayer::new();
    at_run_time.hosts().set_limits("example.com", limits());
    [
        HostGateLayer::new().concurrency(300),
        HostGateLayer::new().per_host("example.com:443", limits()),
        HostGateLayer::new().concurrency(1).per_host("example.com", limits()),
        at_run_time,
    ]
}

#[tokio::test(start_paused = true)]
async fn more_can_be_in_flight_than_a_byte_can_count() {
    for layer in limits_of_300() {
        let mut client = layer.layer(AtOnce);
        let mut held: Vec<_> = (0..300).map(|_| send(&mut client, URI).unwrap()).collect();
        assert_eq!(in_flight(&layer), [("example.com:443".to_owned(), 300)]);
        assert!(send(&mut client, URI).is_none());

        // Whichever of them ends, the next one in line goes.
        for ended in [0, 254, 255, 256, 297] {
            let mut next = spawn(client.call(get(URI)));
            assert_pending!(next.poll());
            drop(held.remove(ended));
            assert!(next.is_woken(), "the end of request {ended} went unnoticed");
            held.push(assert_ready_ok!(next.poll()));
            assert!(send(&mut client, URI).is_none());
        }
        while held.pop().is_some() {
            assert_eq!(layer.hosts().get("example.com:443").map_or(0, |host| host.in_flight), held.len());
        }
        assert_eq!(layer.hosts().snapshot(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_is_set_while_requests_are_in_flight_counts_them() {
    let layer = HostGateLayer::new().concurrency(3);
    let mut client = layer.layer(AtOnce);
    let mut held: Vec<_> = (0..3).map(|_| send(&mut client, URI).unwrap()).collect();
    layer.hosts().set_limits("example.com:443", Limits::default().concurrency(2));
    for _ in 0..2 {
        assert!(send(&mut client, URI).is_none());
        held.pop();
    }
    held.push(send(&mut client, URI).unwrap());
    assert!(send(&mut client, URI).is_none());

    layer.hosts().set_limits("example.com:443", Limits::default().concurrency(300));
    held.extend((2..300).map(|_| send(&mut client, URI).unwrap()));
    assert!(send(&mut client, URI).is_none());
    held.clear();

    layer.hosts().set_limits("example.com:443", Limits::default());
    let held: Vec<_> = (0..3).map(|_| send(&mut client, URI).unwrap()).collect();
    assert!(send(&mut client, URI).is_none());
    drop(held);
}

/// The refusals of a burst that was let through without a look are one event, and hold back whoever has not gone yet.
#[tokio::test(start_paused = true)]
async fn a_burst_that_is_refused_is_one_event() {
    let layer = support::reactive().concurrency(8).max_wait(secs(1));
    let script = Script::always(Reply::status(429).header("retry-after", "30").after(secs(1)));
    let calls: Vec<_> = (0..8).map(|_| tokio::spawn(layer.layer(script.clone()).oneshot(get(URI)))).collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status(), 429);
    }
    let host = layer.hosts().get("example.com").unwrap();
    assert_eq!((host.in_flight, host.streak, host.cooldown, host.reason), (0, 1, secs(30), Some(Reason::Cooldown)));
    layer.layer(script.clone()).oneshot(get(URI)).await.unwrap_err();
    assert_eq!(script.sent().len(), 8);
}
