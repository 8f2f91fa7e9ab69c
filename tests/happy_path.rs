//! A host that never throttled costs nothing: no allocation, and no lock across an await.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use allocation_counter::{AllocationInfo, measure};
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use tower::{BoxError, Layer, Service};
use tower_host_gate::{HostGateLayer, Limits, PermitUntil};

/// Like a real client: its future and its response are on the heap.
#[derive(Clone)]
struct Inner;

type InnerFuture = Pin<Box<dyn Future<Output = Result<Response<Full<Bytes>>, BoxError>> + Send + Sync>>;

impl Service<Request<()>> for Inner {
    type Response = Response<Full<Bytes>>;
    type Error = BoxError;
    type Future = InnerFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> InnerFuture {
        Box::pin(async {
            let body = Full::new(Bytes::from("the feed".repeat(8)));
            Ok(Response::builder().header("content-type", "text/xml").body(body)?)
        })
    }
}

/// What one request allocates from the call to the end of its body. Needs no runtime: nothing in here waits.
fn allocations<S, B>(service: &mut S, request: Request<()>) -> AllocationInfo
where
    S: Service<Request<()>, Response = Response<B>, Error = BoxError>,
    B: Body<Data = Bytes>,
{
    let mut cx = Context::from_waker(Waker::noop());
    measure(|| {
        assert!(service.poll_ready(&mut cx).is_ready());
        let Poll::Ready(Ok(response)) = pin!(service.call(request)).poll(&mut cx) else {
            panic!("the inner service answers at once");
        };
        let mut body = pin!(response.into_body());
        let mut read = 0;
        while let Poll::Ready(Some(Ok(frame))) = body.as_mut().poll_frame(&mut cx) {
            read += frame.data_ref().map_or(0, Bytes::len);
        }
        assert_eq!(read, 64);
    })
}

fn request(uri: &str) -> Request<()> {
    Request::get(uri).body(()).unwrap()
}

#[track_caller]
fn assert_the_gate_allocates_nothing(layer: &HostGateLayer, make: impl Fn() -> Request<()>) {
    let mut gated = layer.layer(Inner);
    // The first request of all makes room in the table, and there it stays.
    allocations(&mut gated, make());
    for round in 0..1000 {
        let bare = allocations(&mut Inner, make());
        assert!(bare.count_total > 0);
        assert_eq!(allocations(&mut gated, make()), bare, "request {round}");
    }
}

// "The happy path gains zero latency: no permit contention, no cooldown, no spacing." (ADR-0016, Consequences)
#[test]
fn a_request_to_a_host_that_never_throttled_allocates_what_the_bare_service_does() {
    assert_the_gate_allocates_nothing(&HostGateLayer::new(), || request("http://example.com/feed"));
}

#[test]
fn a_host_key_of_up_to_62_bytes_allocates_nothing() {
    for length in [1, 10, 58, 59] {
        let name = "x".repeat(length);
        assert_the_gate_allocates_nothing(&HostGateLayer::new(), || request(&format!("http://{name}/")));
    }
    let key = format!("{}:8080", "x".repeat(57));
    assert_eq!(key.len(), 62);
    assert_the_gate_allocates_nothing(&HostGateLayer::new(), || request(&format!("http://{key}/")));
}

#[test]
fn a_key_that_is_not_in_its_normal_form_allocates_nothing() {
    for uri in ["HTTPS://User:pw@EXAMPLE.com./feed", "http://[2001:DB8:0:0:0:0:0:1]/", "http://example.com:080/"] {
        assert_the_gate_allocates_nothing(&HostGateLayer::new(), || request(uri));
    }
}

#[test]
fn settings_do_not_make_the_happy_path_allocate() {
    let layer = HostGateLayer::new()
        .concurrency(8)
        .per_host("other.example", Limits::default().concurrency(2))
        .permit_until(PermitUntil::Head);
    assert_the_gate_allocates_nothing(&layer, || request("http://example.com/feed"));
}

#[test]
fn a_host_with_limits_of_its_own_allocates_nothing() {
    let layer = HostGateLayer::new().per_host("example.com", Limits::default().permit_until(PermitUntil::Head));
    assert_the_gate_allocates_nothing(&layer, || request("http://example.com/feed"));
}

#[test]
fn a_thousand_hosts_in_turn_allocate_nothing_once_each_was_asked() {
    let mut gated = HostGateLayer::new().layer(Inner);
    let uris: Vec<_> = (0..1000).map(|n| format!("http://host-{n}.example/")).collect();
    for uri in &uris {
        allocations(&mut gated, request(uri));
    }
    for uri in &uris {
        let bare = allocations(&mut Inner, request(uri));
        assert_eq!(allocations(&mut gated, request(uri)), bare, "{uri}");
    }
}

#[test]
fn a_throttled_host_does_allocate_so_the_measure_would_show_it() {
    let layer = HostGateLayer::new().spacing(Duration::ZERO);
    let mut gated = layer.layer(Inner);
    allocations(&mut gated, request("http://example.com/feed"));
    let penalty = measure(|| layer.hosts().penalize("example.com:80", Duration::from_secs(1)));
    assert!(penalty.count_current > 0);
}

// "must never hold the slot-map lock across an `.await`" (ADR-0016, Consequences): a lock guard is not `Send`, so a
// future that keeps one over an await would not be either.
#[test]
fn no_lock_is_held_across_an_await() {
    fn assert_send(_: impl Send) {}
    let layer = HostGateLayer::new();
    assert_send(layer.layer(Inner).call(request("http://example.com/")));
    assert_send(layer.hosts().acquire(&"http://example.com/".parse().unwrap(), Duration::ZERO));
}
