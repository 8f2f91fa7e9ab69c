//! What only the inside can see: how often the clock is read.

mod oracle;

use std::convert::Infallible;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use http::{Request, Response};
use tower::{Layer as _, Service as _, service_fn};

use super::clock::READS;
use crate::HostGateLayer;

/// Sends one request that does not have to wait, by hand, and reads its body.
fn send(status: u16) -> u64 {
    let layer = HostGateLayer::new();
    let mut service = layer.layer(service_fn(move |_: Request<()>| {
        let response = Response::builder().status(status).body(String::from("body")).unwrap();
        std::future::ready(Ok::<_, Infallible>(response))
    }));
    let before = READS.get();
    let request = Request::get("https://example.com/").body(()).unwrap();
    let future = pin!(service.call(request));
    let Poll::Ready(Ok(response)) = future.poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("the request did not go at once");
    };
    drop(response);
    READS.get() - before
}

#[test]
fn a_host_that_never_throttled_costs_no_clock_read() {
    assert_eq!(send(200), 0);
    assert_eq!(send(304), 0);
    assert_eq!(send(500), 0);
}

#[test]
fn the_counter_counts() {
    assert_ne!(send(429), 0);
}
