//! The gate and its peers, each around the same client that answers at once, and all driven in one way.

mod governed;
mod naive;
mod reqwest;
mod server;

use std::fmt::Debug;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::LazyLock;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body::Body;
use http_body_util::Empty;
use tokio::runtime::{Builder, Runtime};
use tower::limit::{ConcurrencyLimit, RateLimit, rate::Rate};
use tower::{Layer, Service};
use tower_host_gate::HostGateLayer;
use tower_http::trace::TraceLayer;
use tower_resilience_ratelimiter::RateLimiterLayer;

pub(crate) use server::{Answer, Server};

use self::governed::Governed;
use self::naive::Naive;

/// What a peer with a limit allows: never reached.
const PER_SECOND: u32 = 1_000_000_000;

/// Something that stands in front of a client, or nothing.
#[derive(Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    /// What it is measured against: the peer of this name, which adds nothing to the client.
    pub(crate) bare: &'static str,
    /// Whether it remembers the hosts it was sent to, or may: then what it costs depends on how many there are.
    pub(crate) keyed: bool,
    pub(crate) lane: fn(Answer) -> Box<dyn Lane>,
}

pub(crate) const BARE: Peer = Peer::new("bare", |answer| lane(answer, Server::new(answer)));
pub(crate) const CONCURRENCY_LIMIT: Peer =
    Peer::new("ConcurrencyLimit", |answer| lane(answer, ConcurrencyLimit::new(Server::new(answer), 1_000)));
pub(crate) const GOVERNOR: Peer = Peer::keyed("governor", |answer| lane(answer, Governed::new(Server::new(answer))));
pub(crate) const GATE: Peer =
    Peer::keyed("gate", |answer| lane(answer, HostGateLayer::new().layer(Server::new(answer))));

/// All of them, the bare ones first.
pub(crate) const PEERS: [Peer; 10] = [
    BARE,
    Peer { bare: reqwest::BARE, ..Peer::new(reqwest::BARE, reqwest::bare) },
    CONCURRENCY_LIMIT,
    Peer::new("RateLimit", |answer| lane_of_one(answer, rate_limit(Server::new(answer)))),
    Peer::new("Trace", |answer| lane(answer, TraceLayer::new_for_http().layer(Server::new(answer)))),
    GOVERNOR,
    Peer::new("tower-resilience", |answer| lane(answer, resilience().layer(Server::new(answer)))),
    Peer { bare: reqwest::BARE, ..Peer::new("reqwest-ratelimit", reqwest::limited) },
    Peer::keyed("naive gate", |answer| lane(answer, Naive::new(Server::new(answer)))),
    GATE,
];

impl Peer {
    const fn new(name: &'static str, lane: fn(Answer) -> Box<dyn Lane>) -> Self {
        Self { name, bare: "bare", keyed: false, lane }
    }

    const fn keyed(name: &'static str, lane: fn(Answer) -> Box<dyn Lane>) -> Self {
        Self { keyed: true, ..Self::new(name, lane) }
    }

    pub(crate) fn is_bare(&self) -> bool {
        self.name == self.bare
    }
}

/// A service and the requests it will be sent. What happens to one request is compiled for this one service; only a
/// whole batch goes through the vtable.
pub(crate) trait Lane: Send {
    /// Builds the requests, as nothing of that is to be measured.
    fn load(&mut self, uris: &[Uri]);

    /// Sends what was loaded, one request after the other. Each response is dropped, or first read to its end if there is
    /// something to read.
    fn send(&mut self);

    /// Another lane with a clone of the service, for another thread. `None` if the service has no clones.
    fn split(&self) -> Option<Box<dyn Lane>>;
}

/// The ordinary URI of the host of this number.
pub(crate) fn uri(host: usize) -> Uri {
    Uri::try_from(format!("https://host-{host:06}.example.com/feed")).expect("a URI")
}

fn lane<S, B>(answer: Answer, service: S) -> Box<dyn Lane>
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error: Debug> + Clone + Send + 'static,
    B: Body<Data = Bytes, Error: Debug> + Unpin + 'static,
{
    Box::new(Many(One::new(answer, service)))
}

fn lane_of_one<S, B>(answer: Answer, service: S) -> Box<dyn Lane>
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error: Debug> + Send + 'static,
    B: Body<Data = Bytes, Error: Debug> + Unpin + 'static,
{
    Box::new(One::new(answer, service))
}

/// A lane of a service that has clones.
struct Many<S>(One<S>);

impl<S, B> Lane for Many<S>
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error: Debug> + Clone + Send + 'static,
    B: Body<Data = Bytes, Error: Debug> + Unpin + 'static,
{
    fn load(&mut self, uris: &[Uri]) {
        self.0.load(uris);
    }

    fn send(&mut self) {
        self.0.send();
    }

    fn split(&self) -> Option<Box<dyn Lane>> {
        Some(Box::new(Self(One { requests: Vec::new(), service: self.0.service.clone(), reads: self.0.reads })))
    }
}

/// A lane of a service that has no clones.
struct One<S> {
    service: S,
    requests: Vec<Request<Empty<Bytes>>>,
    reads: bool,
}

impl<S> One<S> {
    fn new(answer: Answer, service: S) -> Self {
        Self { service, requests: Vec::new(), reads: answer == Answer::Body }
    }
}

impl<S, B> Lane for One<S>
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error: Debug> + Send + 'static,
    B: Body<Data = Bytes, Error: Debug> + Unpin + 'static,
{
    fn load(&mut self, uris: &[Uri]) {
        self.requests.extend(uris.iter().map(|uri| {
            let mut request = Request::new(Empty::new());
            *request.uri_mut() = uri.clone();
            request
        }));
    }

    fn send(&mut self) {
        let cx = &mut Context::from_waker(Waker::noop());
        for request in self.requests.drain(..) {
            assert!(self.service.poll_ready(cx).is_ready());
            // The response stays where the future left it: moves in here are not the peer's.
            let Poll::Ready(Ok(mut response)) = pin!(self.service.call(request)).poll(cx) else {
                panic!("no response at once");
            };
            while self.reads && more(response.body_mut(), cx) {}
        }
    }

    fn split(&self) -> Option<Box<dyn Lane>> {
        None
    }
}

/// Whether there was another frame.
fn more<B: Body<Error: Debug> + Unpin>(body: &mut B, cx: &mut Context<'_>) -> bool {
    match Pin::new(body).poll_frame(cx) {
        Poll::Ready(frame) => frame.transpose().expect("a body without faults").is_some(),
        Poll::Pending => panic!("no frame at once"),
    }
}

fn rate_limit(server: Server) -> RateLimit<Server> {
    // It owns a timer from the start.
    static RUNTIME: LazyLock<Runtime> =
        LazyLock::new(|| Builder::new_current_thread().enable_time().build().expect("a runtime"));
    let _entered = RUNTIME.enter();
    RateLimit::new(server, Rate::new(PER_SECOND.into(), Duration::from_secs(1)))
}

fn resilience() -> RateLimiterLayer {
    let layer = RateLimiterLayer::per_second(PER_SECOND as usize).build();
    layer.expect("a limit and a period")
}
