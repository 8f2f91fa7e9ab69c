//! The client: the layers around hyper, and why each one is where it is.

use std::time::Duration;

use bytes::Bytes;
use http::header::USER_AGENT;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tower::limit::ConcurrencyLimitLayer;
use tower::retry::RetryLayer;
use tower::timeout::TimeoutLayer;
use tower::util::BoxCloneSyncService;
use tower::{BoxError, ServiceBuilder};
use tower_host_gate::retry::GateRetry;
use tower_host_gate::{HostGateLayer, Hosts, Observer, ResponseBody};
use tower_http::follow_redirect::FollowRedirectLayer;
use tower_http::set_header::SetRequestHeaderLayer;
use tower_http::timeout::{ResponseBodyTimeoutLayer, TimeoutBody};

pub(crate) type Client = BoxCloneSyncService<Request<Full<Bytes>>, Response<Body>, BoxError>;
pub(crate) type Body = ResponseBody<TimeoutBody<Incoming>>;

pub(crate) struct Settings<O> {
    pub(crate) user_agent: HeaderValue,
    pub(crate) attempts: u32,
    pub(crate) max_wait: Duration,
    pub(crate) timeout: Duration,
    pub(crate) concurrency_per_host: usize,
    pub(crate) global: usize,
    pub(crate) observer: O,
}

/// A client, to be built once and cloned, and a handle on the hosts of its gate.
pub(crate) fn new(settings: Settings<impl Observer>) -> (Client, Hosts) {
    let connector = HttpsConnectorBuilder::new().with_webpki_roots().https_or_http().enable_all_versions().build();
    let hyper = HyperClient::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);

    let gate = HostGateLayer::new()
        .concurrency(settings.concurrency_per_host)
        .max_wait(settings.max_wait)
        .observer(settings.observer);
    let hosts = gate.hosts();

    let client = ServiceBuilder::new()
        // Outermost: every attempt and every hop says who is asking.
        .layer(SetRequestHeaderLayer::overriding(USER_AGENT, settings.user_agent))
        // Outside the gate: each hop of a redirect is paced by the host it goes to.
        .layer(FollowRedirectLayer::new())
        // Outside the gate: a refused request goes back there, and the gate's pacing is the wait. Inside the redirects:
        // a refusal repeats its own hop, not all those before it.
        .layer(RetryLayer::new(GateRetry::new(settings.attempts)))
        .layer(gate)
        // Inside the gate: counts what the server takes, not what we wait for our turn. tower's rather than tower-http's,
        // whose answer is a 408 that looks like the server's own.
        .layer(TimeoutLayer::new(settings.timeout))
        // The timeout above ends with the head of the response; this one counts from piece to piece of the body. A body
        // that hangs would keep its permit, and its siblings waiting.
        .layer(ResponseBodyTimeoutLayer::new(settings.timeout))
        // Below the gate: a request that waits for its host holds no slot that another host could use. Below the
        // timeout: waiting for a slot does not count as the server's time either. A slot is free again at the head of
        // the response; how many bodies are read at a time is for the gate to say, host by host.
        .layer(ConcurrencyLimitLayer::new(settings.global))
        .service(hyper);
    (BoxCloneSyncService::new(client), hosts)
}
