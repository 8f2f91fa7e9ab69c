//! tower's timeouts and limits around and below the gate, and a cache around it: for each order that matters, what
//! happens. Retries, buffers, load shedding and boxes have files of their own.

mod support;

use std::{
    collections::HashMap,
    future::{poll_fn, ready},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use http::{Request, Response, Uri};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use support::reactive;
use support::script::{Reply, Script, ScriptError, get};
use tokio::{
    join,
    time::{Instant, sleep, timeout},
};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, timeout::error::Elapsed};
use tower_host_gate::{HostGateLayer, HostSnapshot, Hosts, RateLimited};
use tower_test::mock;

const A: &str = "http://a.example/";
const B: &str = "http://b.example/";

/// Sends on a clone, as another task of the program would.
async fn send<S, B, R>(service: &S, request: Request<B>) -> Result<R, BoxError>
where
    S: Service<Request<B>, Response = R, Error: Into<BoxError>> + Clone,
{
    service.clone().oneshot(request).await.map_err(Into::into)
}

/// Like [`send`], begun this much later.
async fn send_at<S, B, R>(at: Duration, service: &S, request: Request<B>) -> Result<R, BoxError>
where
    S: Service<Request<B>, Response = R, Error: Into<BoxError>> + Clone,
{
    sleep(at).await;
    send(service, request).await
}

fn host_a(layer: &HostGateLayer) -> HostSnapshot {
    layer.hosts().get("a.example:80").expect("the gate has something to say of the host")
}

/// A gate that holds host A for a minute, and in which everybody has the patience for that.
fn holding_a_for_a_minute() -> HostGateLayer {
    let layer = HostGateLayer::new().max_wait(secs(120));
    layer.hosts().penalize("a.example", secs(60));
    layer
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

// ---------------------------------------------------------------------------------------------------------------------
// Timeout
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_timeout_outside_counts_the_wait() {
    let layer = holding_a_for_a_minute();
    let script = Script::list([]);
    let client = ServiceBuilder::new().timeout(secs(5)).layer(layer.clone()).service(script.clone());

    let start = Instant::now();
    let error = send(&client, get(A)).await.unwrap_err();
    assert_eq!(start.elapsed(), secs(5));
    // CASES C14: the caller's timeout and the gate's refusal are distinct kinds.
    assert!(error.is::<Elapsed>() && RateLimited::find(&*error).is_none(), "{error:?}");
    assert!(script.sent().is_empty());
    let host = host_a(&layer);
    assert_eq!((host.queued, host.in_flight, host.cooldown), (0, 0, secs(55)), "the request has left the queue");
}

#[tokio::test(start_paused = true)]
async fn a_timeout_inside_counts_the_send_only() {
    let layer = holding_a_for_a_minute();
    let script = Script::list([Reply::ok().after(secs(4))]);
    let client = ServiceBuilder::new().layer(layer).timeout(secs(5)).service(script.clone());
    assert_eq!(send(&client, get(A)).await.unwrap().status(), 200);
    assert_eq!(script.times(), [secs(60)]);
}

#[tokio::test(start_paused = true)]
async fn an_inner_timeout_stays_downcastable_teaches_nothing_and_gives_the_permit_back() {
    let layer = reactive();
    let script = Script::list([Reply::status(429), Reply::hang(), Reply::ok()]);
    let client = ServiceBuilder::new().layer(layer.clone()).timeout(secs(5)).service(script.clone());
    assert_eq!(send(&client, get(A)).await.unwrap().status(), 429);

    let error = send(&client, get(A)).await.unwrap_err();
    assert!(error.is::<Elapsed>(), "{error:?}");
    let host = host_a(&layer);
    assert_eq!((host.streak, host.cooldown, host.in_flight), (1, secs(0), 0));
    assert_eq!(send(&client, get(A)).await.unwrap().status(), 200);
    assert_eq!(script.times(), [0, 2, 7].map(secs));
}

// ---------------------------------------------------------------------------------------------------------------------
// A limit over all hosts
// ---------------------------------------------------------------------------------------------------------------------

// SPEC 2: "the usual delegate-and-swap idiom makes host B wait for host A's cooldown whenever the inner service reserves
// something in `poll_ready` (measured over `ConcurrencyLimit(1)`: 60 s against 0 s)"
#[tokio::test(start_paused = true)]
async fn a_limit_inside_never_lets_one_hosts_cooldown_delay_another() {
    let script = Script::list([]);
    let client = ServiceBuilder::new().layer(holding_a_for_a_minute()).concurrency_limit(1).service(script.clone());
    let (a, b) = join!(send(&client, get(A)), send(&client, get(B)));
    assert_eq!((a.unwrap().status(), b.unwrap().status()), (http::StatusCode::OK, http::StatusCode::OK));
    assert_eq!(script.times_of("b.example"), [secs(0)]);
    assert_eq!(script.times_of("a.example"), [secs(60)]);
}

// The same on one service value, polled ready and called as tower's contract has it: nothing is reserved on its behalf.
#[tokio::test(start_paused = true)]
async fn a_limit_inside_never_lets_one_hosts_cooldown_delay_another_on_the_same_clone() {
    let script = Script::list([]);
    let mut client = ServiceBuilder::new().layer(holding_a_for_a_minute()).concurrency_limit(1).service(script.clone());
    let a = ServiceExt::<Request<()>>::ready(&mut client).await.unwrap().call(get(A));
    let b = ServiceExt::<Request<()>>::ready(&mut client).await.unwrap().call(get(B));
    let (a, b) = join!(a, b);
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(script.times_of("b.example"), [secs(0)]);
    assert_eq!(script.times_of("a.example"), [secs(60)]);
}

// Documented: a global cap belongs BELOW the gate. Above, a request that waits in the gate holds a slot of it.
#[tokio::test(start_paused = true)]
async fn with_the_limit_outside_it_does() {
    let script = Script::list([]);
    let client = ServiceBuilder::new().concurrency_limit(1).layer(holding_a_for_a_minute()).service(script.clone());
    let (a, b) = join!(send(&client, get(A)), send(&client, get(B)));
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(script.times_of("b.example"), [secs(60)]);
}

#[tokio::test(start_paused = true)]
async fn a_limit_inside_caps_all_hosts_together() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let client = ServiceBuilder::new().layer(HostGateLayer::new()).concurrency_limit(3).service(script.clone());
    let requests = (0..20).map(|n| send(&client, get(&format!("http://{n}.example/"))));
    assert!(join_all(requests).await.iter().all(Result::is_ok));
    assert_eq!((script.sent().len(), script.peak()), (20, 3));
    assert_eq!(*script.times().last().unwrap(), secs(6), "all slots were used all the time");
}

// SPEC 2: "if the host was refused while the inner service was getting ready, the readied instance is dropped and the
// request waits again"
#[tokio::test(start_paused = true)]
async fn a_slot_that_comes_after_a_refusal_goes_on_to_another_host() {
    let script = Script::list([Reply::status(429).header("retry-after", "10").after(secs(1))]);
    let client = ServiceBuilder::new().layer(reactive().concurrency(2)).concurrency_limit(1).service(script.clone());
    // The second request has its permit and waits for the slot when the first one is refused.
    let (a1, a2, b) = join!(send(&client, get(A)), send(&client, get(A)), send_at(secs(0), &client, get(B)));
    assert_eq!((a1.unwrap().status().as_u16(), a2.unwrap().status().as_u16()), (429, 200));
    assert!(b.is_ok());
    assert_eq!(script.times_of("a.example"), [0, 11].map(secs));
    assert_eq!(script.times_of("b.example"), [secs(1)]);
}

// The same on threads: whoever gets the slot of a refused request must already see the refusal.
#[tokio::test(start_paused = true)]
async fn the_refusal_is_known_before_anything_of_the_inner_service_is_free_again() {
    struct Look {
        hosts: Hosts,
        cooldowns: Mutex<Vec<Duration>>,
    }
    impl Wake for Look {
        fn wake(self: Arc<Self>) {
            let host = self.hosts.get("a.example:80").expect("two requests are in flight");
            lock(&self.cooldowns).push(host.cooldown);
        }
    }

    let layer = reactive().concurrency(2);
    let script = Script::list([Reply::status(429).header("retry-after", "10").after(secs(1))]);
    let mut client = ServiceBuilder::new().layer(layer.clone()).concurrency_limit(1).service(script.clone());
    let first = client.call(get(A));
    let mut second = pin!(client.call(get(A)));
    let look = Arc::new(Look { hosts: layer.hosts(), cooldowns: Mutex::default() });
    let waker = Waker::from(Arc::clone(&look));
    assert_pending!(second.as_mut().poll(&mut Context::from_waker(&waker)));

    assert_eq!(first.await.unwrap().status(), 429);
    assert_eq!(*lock(&look.cooldowns), [secs(10)]);
}

#[tokio::test(start_paused = true)]
async fn a_request_given_up_while_it_waits_for_the_limit_leaves_both_permits() {
    let layer = HostGateLayer::new();
    let script = Script::list([Reply::ok().after(secs(10))]);
    let client = ServiceBuilder::new().layer(layer.clone()).concurrency_limit(1).service(script.clone());
    let given_up = timeout(secs(1), send(&client, get(B)));
    let (a, given_up, b) = join!(send(&client, get(A)), given_up, send_at(secs(2), &client, get(B)));
    assert!(a.is_ok() && given_up.is_err() && b.is_ok());
    assert_eq!(script.times_of("b.example"), [secs(10)]);
    assert!(layer.hosts().snapshot().is_empty());
    assert!(send(&client, get(A)).await.is_ok(), "the limit's slot is free as well");
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_inner_service_while_getting_ready_gives_the_permit_back() {
    let layer = HostGateLayer::new();
    let script = Script::list([]);
    let client = ServiceBuilder::new().layer(layer.clone()).concurrency_limit(1).service(script.clone());
    script.fail_ready("closed");
    let error = send(&client, get(A)).await.unwrap_err();
    assert_eq!(error.downcast_ref(), Some(&ScriptError("closed".into())));
    assert!(layer.hosts().snapshot().is_empty());
    script.release();
    assert!(send(&client, get(A)).await.is_ok());
}

// ---------------------------------------------------------------------------------------------------------------------
// What the inner service is asked, and when
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn nothing_of_the_inner_service_is_polled_while_a_request_waits() {
    let (mock, mut handle) = mock::pair::<Request<()>, Response<Full<Bytes>>>();
    let mut bare = mock.clone();
    let client = holding_a_for_a_minute().layer(mock);
    handle.send_error("for whoever polls readiness first");
    let mut waiting = task::spawn(client.oneshot(get(A)));
    assert_pending!(waiting.poll());
    sleep(secs(59)).await;
    assert_pending!(waiting.poll());
    assert!(poll_fn(|cx| bare.poll_ready(cx)).await.is_err(), "nobody was faster");
}

// SPEC 2: "if that is pending, the polled instance itself moves into the future"
#[tokio::test(start_paused = true)]
async fn a_service_that_gets_ready_later_wakes_the_request_that_polled_it() {
    let (mock, mut handle) = mock::pair::<Request<()>, Response<Full<Bytes>>>();
    handle.allow(0);
    let mut client = HostGateLayer::new().layer(mock);
    let (mut a, mut b) = (task::spawn(client.call(get(A))), task::spawn(client.call(get(B))));
    assert_pending!(a.poll());
    assert_pending!(b.poll());

    handle.allow(2);
    for waiting in [&mut a, &mut b] {
        assert!(waiting.is_woken());
        assert_pending!(waiting.poll());
        let (_, respond) = handle.next_request().await.unwrap();
        respond.send_response(Response::default());
        assert!(assert_ready!(waiting.poll()).is_ok());
    }
}

// CASES A12: "gate wrapped by .. `MapRequest` that rewrites the URI. Right: still per host"
#[tokio::test(start_paused = true)]
async fn a_request_is_gated_on_the_host_it_has_when_it_comes_to_the_gate() {
    let to_b = |mut request: Request<()>| {
        *request.uri_mut() = Uri::from_static(B);
        request
    };
    let script = Script::list([]);
    let outside = ServiceBuilder::new().map_request(to_b).layer(holding_a_for_a_minute()).service(script.clone());
    send(&outside, get(A)).await.unwrap();
    let inside = ServiceBuilder::new().layer(holding_a_for_a_minute()).map_request(to_b).service(script.clone());
    send(&inside, get(A)).await.unwrap();
    assert_eq!(script.times_of("b.example"), [0, 60].map(secs));
}

// ---------------------------------------------------------------------------------------------------------------------
// A cache outside
// ---------------------------------------------------------------------------------------------------------------------

/// The smallest cache there is: successful responses by URI, for ever.
#[derive(Clone)]
struct Cache<S> {
    inner: S,
    stored: Arc<Mutex<HashMap<Uri, Bytes>>>,
}

impl<S, B> Service<Request<()>> for Cache<S>
where
    S: Service<Request<()>, Response = Response<B>, Error = BoxError, Future: Send> + Clone + Send + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
{
    type Response = Response<Full<Bytes>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let uri = request.uri().clone();
        if let Some(hit) = lock(&self.stored).get(&uri) {
            return Box::pin(ready(Ok(Response::new(Full::from(hit.clone())))));
        }
        let Self { inner, stored } = self.clone();
        Box::pin(async move {
            let (head, body) = inner.oneshot(request).await?.into_parts();
            let body = body.collect().await.map_err(Into::into)?.to_bytes();
            if head.status.is_success() {
                lock(&stored).insert(uri, body.clone());
            }
            Ok(Response::from_parts(head, Full::from(body)))
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// SPEC 3.2: "a cache layer sits outside the gate, so a hit takes no permit and waits for nothing"
#[tokio::test(start_paused = true)]
async fn a_hit_in_a_cache_outside_takes_no_permit_and_waits_for_nothing_while_its_host_cools() {
    let layer = reactive();
    let script = Script::list([
        Reply::ok().body("the feed"),
        Reply::status(429).header("retry-after", "30"),
        Reply::ok().body("news").after(secs(20)),
    ]);
    let client = Cache { inner: layer.layer(script.clone()), stored: Arc::default() };
    assert_eq!(send(&client, get("http://a.example/feed")).await.unwrap().status(), 200);
    assert_eq!(send(&client, get("http://a.example/news")).await.unwrap().status(), 429);

    let hit = async |what| {
        let start = Instant::now();
        let response = send(&client, get("http://a.example/feed")).await.unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "the feed", "{what}");
        assert_eq!(start.elapsed(), secs(0), "{what}");
    };
    hit("while the host cools").await;
    let hits = async {
        sleep(secs(10)).await;
        assert_eq!(host_a(&layer).queued, 1);
        hit("past a request that waits").await;
        sleep(secs(30)).await;
        assert_eq!(host_a(&layer).in_flight, 1);
        hit("past a request in flight").await;
        assert_eq!(host_a(&layer).in_flight, 1);
    };
    let (miss, ()) = join!(send(&client, get("http://a.example/news")), hits);
    assert_eq!(miss.unwrap().status(), 200);
    assert_eq!(script.times(), [0, 0, 30].map(secs), "only misses are sent");
}
