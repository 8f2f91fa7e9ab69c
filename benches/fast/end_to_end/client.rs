//! The client, with and without a layer, and the requests it is sent.

use std::fmt::Debug;
use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body::Body;
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::task::JoinSet;
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt};
use tower_host_gate::{HostGate, HostGateLayer};

use crate::contention::line::request;
use crate::statistics::quantile;

/// Requests under way at a time: as many as the layers let through, so that none ever waits for them.
pub(crate) const AT_A_TIME: usize = 16;

pub(crate) const LAYERS: [&str; 3] = ["none", "ConcurrencyLimit", "gate"];

type Hyper = legacy::Client<HttpConnector, Empty<Bytes>>;

/// One client, three ways to it.
pub(crate) struct Client {
    uri: Uri,
    bare: Hyper,
    limited: ConcurrencyLimit<Hyper>,
    gated: HostGate<Hyper>,
}

/// What came of some requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    pub(crate) per_second: f64,
    pub(crate) p99_us: f64,
}

impl Client {
    pub(crate) fn new(protocol: &str, port: u16) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let bare = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .http2_only(protocol == "HTTP/2")
            .build(connector);
        Self {
            uri: format!("http://127.0.0.1:{port}/feed").parse().expect("a URI"),
            limited: ConcurrencyLimit::new(bare.clone(), AT_A_TIME),
            gated: HostGateLayer::new().concurrency(AT_A_TIME).layer(bare.clone()),
            bare,
        }
    }

    /// So many at a time, each as soon as another one is over.
    pub(crate) async fn send(&self, layer: &str, requests: usize, at_a_time: usize) -> Figures {
        match layer {
            "none" => send(&self.bare, &self.uri, requests, at_a_time).await,
            "ConcurrencyLimit" => send(&self.limited, &self.uri, requests, at_a_time).await,
            "gate" => send(&self.gated, &self.uri, requests, at_a_time).await,
            other => panic!("no such layer: {other}"),
        }
    }
}

async fn send<S, B>(service: &S, uri: &Uri, requests: usize, at_a_time: usize) -> Figures
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error: Debug, Future: Send> + Clone + Send + 'static,
    B: Body<Data: Send, Error: Debug> + Send + 'static,
{
    let start = Instant::now();
    let tasks: JoinSet<_> = (0..at_a_time)
        .map(|n| {
            let share = requests / at_a_time + usize::from(n < requests % at_a_time);
            several(service.clone(), uri.clone(), share)
        })
        .collect();
    let times: Vec<f64> = tasks.join_all().await.concat();
    Figures { per_second: requests as f64 / start.elapsed().as_secs_f64(), p99_us: quantile(&times, 0.99) }
}

/// One after the other. Gives back how long each took, in microseconds.
async fn several<S, B>(mut service: S, uri: Uri, requests: usize) -> Vec<f64>
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error: Debug>,
    B: Body<Error: Debug>,
{
    let mut times = Vec::with_capacity(requests);
    for _ in 0..requests {
        let start = Instant::now();
        let ready = service.ready().await.expect("a ready client");
        let response = ready.call(request(&uri)).await.expect("a response");
        // A refusal must not pass for a quick success.
        assert!(response.status().is_success());
        response.into_body().collect().await.expect("a whole body");
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times
}
