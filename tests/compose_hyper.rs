//! hyper-util's legacy client behind the gate, against real servers: HTTP/1, HTTP/2, TLS, and a whole stack.

mod support;

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{
    HeaderValue, Request, Response, StatusCode, Version,
    header::{LOCATION, USER_AGENT},
};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use support::{
    client::{self, drain, get},
    provider::Provider,
    reactive,
};
use tokio::time::sleep;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, retry::RetryLayer, util::BoxCloneSyncService};
use tower_host_gate::{HostGateLayer, ResponseBody, Throttled, final_uri, retry::GateRetry};
use tower_http::{
    decompression::DecompressionLayer,
    follow_redirect::FollowRedirectLayer,
    map_request_body::MapRequestBodyLayer,
    set_header::SetRequestHeaderLayer,
    timeout::{RequestBodyTimeoutLayer, ResponseBodyTimeoutLayer, TimeoutBody, TimeoutLayer},
    trace::TraceLayer,
};

type Get = Request<Full<Bytes>>;

/// Sends on a clone, as another task of the program would.
async fn send<S, R>(service: &S, request: Get) -> Result<R, BoxError>
where
    S: Service<Get, Response = R, Error: Into<BoxError>> + Clone,
{
    service.clone().oneshot(request).await.map_err(Into::into)
}

/// Fetches and reads.
async fn fetch<S, B>(service: &S, url: String) -> (u16, Bytes)
where
    S: Service<Get, Response = Response<B>, Error: Into<BoxError>> + Clone,
    B: Body<Error: Into<BoxError>>,
{
    let response = send(service, get(url)).await.expect("a response");
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.map_err(Into::into).expect("a whole body");
    (status, body.to_bytes())
}

/// A gate whose constants are made for a test on a real clock.
fn quick() -> HostGateLayer {
    reactive().base_cooldown(ms(50)).spacing(ms(10))
}

fn answer(status: u16, text: &'static str) -> Response<Full<Bytes>> {
    Response::builder().status(status).body(Full::from(text)).expect("a response")
}

fn moved(location: &str) -> Response<Full<Bytes>> {
    let mut response = answer(302, "moved");
    response.headers_mut().insert(LOCATION, location.parse().expect("a header value"));
    response
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The first request is refused, the others are served; a client that asks ten times at once keeps all of the gate's
/// promises, whatever it speaks.
async fn a_burst_is_gated<C>(provider: &Provider, client: C, version: Version)
where
    C: Service<Get, Response = Response<Incoming>, Error: Into<BoxError>> + Clone,
{
    let layer = quick();
    let client = ServiceBuilder::new().layer(layer.clone()).service(client);
    let answers = join_all((0..10).map(|n| fetch(&client, provider.url(&format!("/{n}"))))).await;

    let refused = answers.iter().filter(|(status, _)| *status == 429).count();
    assert_eq!((refused, provider.count(429), provider.count(200)), (1, 1, 9));
    assert_eq!(provider.peak(), 1, "one request at a time");
    let hits = provider.hits();
    assert!(hits.iter().all(|hit| hit.version == version), "{hits:?}");
    assert!(hits[1].at - hits[0].at >= ms(50), "the cooldown: {hits:?}");
    let state = &layer.hosts().snapshot()[0];
    assert_eq!((state.in_flight, state.queued, state.streak), (0, 0, 0));
}

fn refuse_the_first(n: usize, _: Request<Incoming>) -> Response<Full<Bytes>> {
    if n == 0 { answer(429, "slow down") } else { answer(200, "the feed") }
}

#[tokio::test]
async fn over_http1() {
    let provider = Provider::start(refuse_the_first).await;
    a_burst_is_gated(&provider, client::http1(), Version::HTTP_11).await;
}

// One connection would carry all ten at once.
#[tokio::test]
async fn over_http2() {
    let provider = Provider::start(refuse_the_first).await;
    a_burst_is_gated(&provider, client::http2(), Version::HTTP_2).await;
}

#[tokio::test]
async fn over_tls() {
    let provider = Provider::start_tls(refuse_the_first).await;
    a_burst_is_gated(&provider, client::https(provider.certificate()), Version::HTTP_2).await;
}

// The client as tower-http users have it: one error type and one future type, `Sync`.
#[tokio::test]
async fn boxed() {
    let provider = Provider::start(|_, _| answer(200, "the feed")).await;
    let boxed: BoxCloneSyncService<Get, Response<ResponseBody<Incoming>>, BoxError> =
        BoxCloneSyncService::new(quick().layer(client::http1()));
    assert_eq!(fetch(&boxed, provider.url("/")).await, (200, "the feed".into()));
    let built = ServiceBuilder::new().layer(quick()).boxed_clone_sync().service(client::http1());
    assert_eq!(fetch(&built, provider.url("/")).await, (200, "the feed".into()));
}

#[tokio::test]
async fn http2_streams_of_one_connection_are_capped_at_the_concurrency() {
    let provider = Provider::start_async(async |_, _| {
        sleep(ms(5)).await;
        answer(200, "the feed")
    })
    .await;
    let client = ServiceBuilder::new().layer(HostGateLayer::new().concurrency(3)).service(client::http2());
    let answers = join_all((0..20).map(|_| fetch(&client, provider.url("/")))).await;
    assert!(answers.iter().all(|(status, _)| *status == 200));
    assert!(provider.peak() <= 3, "{}", provider.peak());
}

#[tokio::test]
async fn an_unread_body_holds_its_permit_and_a_dropped_one_gives_it_back() {
    for client in [client::http1(), client::http2()] {
        let layer = HostGateLayer::new();
        // More than the client takes in without a reader.
        let provider = Provider::start(|_, _| Response::new(Full::from(vec![b'x'; 8 << 20]))).await;
        let client = ServiceBuilder::new().layer(layer.clone()).service(client);
        let unread = send(&client, get(provider.url("/"))).await.unwrap();

        let next = tokio::spawn({
            let (client, url) = (client.clone(), provider.url("/"));
            async move { fetch(&client, url).await.1.len() }
        });
        let name = provider.addr().to_string();
        while layer.hosts().get(&name).is_none_or(|host| host.queued == 0) {
            tokio::task::yield_now().await;
        }
        assert_eq!(provider.hits().len(), 1);
        drop(unread);
        assert_eq!(next.await.unwrap(), 8 << 20);
        assert_eq!(provider.hits().len(), 2);
        assert!(layer.hosts().snapshot().is_empty());
    }
}

// `tower_http`'s timeout makes up a response and so needs `Default` of the body, which `Incoming` has not.
#[tokio::test]
async fn a_tower_http_timeout_goes_around_a_gate_over_hyper() {
    let provider = Provider::start_async(async |_, request: Request<Incoming>| {
        if request.uri().path() == "/hang" {
            std::future::pending::<()>().await;
        }
        answer(200, "the feed")
    })
    .await;
    let layer = HostGateLayer::new();
    let client = |patience| {
        ServiceBuilder::new()
            .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, patience))
            .layer(layer.clone())
            .service(client::http1())
    };
    assert_eq!(fetch(&client(ms(60_000)), provider.url("/")).await, (200, "the feed".into()));
    assert_eq!(fetch(&client(ms(100)), provider.url("/hang")).await, (504, Bytes::new()));
    assert!(layer.hosts().snapshot().is_empty(), "the request that was given up has left its permit");
}

#[tokio::test]
async fn body_timeouts_go_on_either_side_of_a_gate_over_hyper() {
    let provider = Provider::start(|_, _| answer(200, "the feed")).await;
    let idle = Duration::from_secs(60);
    // hyper's client asks for a body that is `Unpin`, which a body with a timer is only in a box.
    let unpin = || MapRequestBodyLayer::new(Box::<TimeoutBody<Full<Bytes>>>::pin);
    let connect = || Client::builder(TokioExecutor::new()).build_http();
    let outside = ServiceBuilder::new()
        .layer(RequestBodyTimeoutLayer::new(idle))
        .layer(ResponseBodyTimeoutLayer::new(idle))
        .layer(quick())
        .layer(unpin())
        .service(connect());
    assert_eq!(fetch(&outside, provider.url("/")).await, (200, "the feed".into()));
    let inside = ServiceBuilder::new()
        .layer(quick())
        .layer(RequestBodyTimeoutLayer::new(idle))
        .layer(ResponseBodyTimeoutLayer::new(idle))
        .layer(unpin())
        .service(connect());
    assert_eq!(fetch(&inside, provider.url("/")).await, (200, "the feed".into()));
}

#[tokio::test]
async fn a_redirect_between_two_servers_is_gated_on_both() {
    let b = Provider::start(refuse_the_first).await;
    let a = Provider::start({
        let to = b.url("/moved");
        move |_, _| moved(&to)
    })
    .await;
    let layer = quick();
    let client = ServiceBuilder::new()
        .layer(FollowRedirectLayer::new())
        .layer(RetryLayer::new(GateRetry::new(2)))
        .layer(layer.clone())
        .service(client::http1());
    assert_eq!(fetch(&client, a.url("/")).await, (200, "the feed".into()));
    assert_eq!((a.hits().len(), b.hits().len()), (1, 2));
    assert!(b.hits()[1].at - b.hits()[0].at >= ms(50));
    assert!(layer.hosts().get(&b.addr().to_string()).is_some(), "B has refused a request, and is warm");
    assert!(layer.hosts().get(&a.addr().to_string()).is_none(), "A never has");
}

#[tokio::test]
async fn a_redirect_to_the_same_server_at_concurrency_one_does_not_wait_for_itself() {
    let provider = Provider::start(|n, _| if n < 3 { moved("/again") } else { answer(200, "the feed") }).await;
    for gated in [client::http1(), client::http2()] {
        let client = ServiceBuilder::new().layer(FollowRedirectLayer::new()).layer(quick()).service(gated);
        assert_eq!(fetch(&client, provider.url("/")).await, (200, "the feed".into()));
    }
    assert_eq!(provider.hits().len(), 5);
}

#[tokio::test]
async fn a_refusal_at_the_end_of_a_redirect_inside_is_charged_to_that_server() {
    let b = Provider::start(|_, _| answer(429, "slow down")).await;
    let a = Provider::start({
        let to = b.url("/moved");
        move |_, _| moved(&to)
    })
    .await;
    let layer = HostGateLayer::new().final_uri(final_uri::tower_http);
    let client = ServiceBuilder::new().layer(layer.clone()).layer(FollowRedirectLayer::new()).service(client::http1());
    let response = send(&client, get(a.url("/"))).await.unwrap();
    assert_eq!(response.extensions().get::<Throttled>().expect("the mark of a refusal").streak, 1);
    assert_eq!(drain(response).await.unwrap(), "slow down");
    assert_eq!(layer.hosts().get(&b.addr().to_string()).expect("held").streak, 1);
    assert!(layer.hosts().get(&a.addr().to_string()).is_none());
}

// The order the crate's documentation recommends, with everything in it.
#[tokio::test]
async fn the_whole_stack() {
    let b = Provider::start_tls(|n, request| {
        assert_eq!(request.headers()[USER_AGENT], "reader/1.0 (+https://reader.example)");
        match n {
            0 | 1 => answer(429, "slow down"),
            _ => answer(200, "the feed"),
        }
    })
    .await;
    let a = Provider::start({
        let to = b.url("/moved");
        move |_, _| moved(&to)
    })
    .await;
    let layer = quick();
    let agent = HeaderValue::from_static("reader/1.0 (+https://reader.example)");
    let client = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(SetRequestHeaderLayer::if_not_present(USER_AGENT, agent))
        .layer(DecompressionLayer::new())
        .layer(FollowRedirectLayer::new())
        .layer(RetryLayer::new(GateRetry::new(3)))
        .layer(layer.clone())
        .layer(RetryLayer::new(layer.in_flight_retry().base_delay(ms(20))))
        .timeout(Duration::from_secs(30))
        .concurrency_limit(16)
        .service(client::https(b.certificate()));
    let answers = join_all((0..4).map(|_| fetch(&client, a.url("/")))).await;
    assert!(answers.iter().all(|answer| *answer == (200, "the feed".into())), "{answers:?}");
    assert_eq!((a.hits().len(), b.count(429), b.count(200)), (4, 2, 4));
    assert!(a.peak() == 1 && b.peak() == 1);
    let hits = b.hits();
    // Refused twice within one admission, which is one event: 20 ms to the second attempt, then what is left of 50 ms.
    assert!(hits[1].at - hits[0].at >= ms(20) && hits[2].at - hits[0].at >= ms(50), "{hits:?}");
}
