//! Settings of the layer and of a request: whose gate it is, how long it waits, how it is shed, how it is switched off.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use http::{Method, Request, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use support::reactive;
use support::script::{Reply, Script, get};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_host_gate::observe::{Observer, ThrottleEvent};
use tower_host_gate::{HostGateLayer, Limits, MaxWait, OnShed, RateLimited, Reason, Shed};

const URI: &str = "http://example.com/";
const HOST: &str = "example.com:80";

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// How long the next request waits that is sent through this layer; it is answered at once.
async fn wait_of(layer: &HostGateLayer) -> Duration {
    let before = Instant::now();
    layer.layer(Script::always(Reply::ok())).oneshot(get(URI)).await.unwrap();
    before.elapsed()
}

fn within(budget: Duration) -> Request<()> {
    let mut request = get(URI);
    request.extensions_mut().insert(MaxWait(budget));
    request
}

// --- whose gate it is ---------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn two_new_are_two_gates() {
    let (one, two) = (HostGateLayer::new(), HostGateLayer::new());
    one.hosts().penalize(HOST, secs(30));
    assert_eq!(wait_of(&two).await, secs(0));
    assert_eq!(two.hosts().snapshot(), []);
    assert_eq!(wait_of(&one).await, secs(30));
}

#[tokio::test(start_paused = true)]
async fn clones_of_layer_service_and_hosts_share_one_gate() {
    let layer = HostGateLayer::new();
    let clone = layer.clone();
    let gated = clone.layer(Script::always(Reply::ok()));
    layer.hosts().clone().penalize(HOST, secs(30));
    let before = Instant::now();
    gated.clone().oneshot(get(URI)).await.unwrap();
    assert_eq!(before.elapsed(), secs(30));
    assert_eq!(layer.hosts().snapshot(), clone.hosts().snapshot());
    assert_eq!(layer.hosts().snapshot().len(), 1);
}

// SPEC 6: "a setter on a layer that was already cloned or used makes a separate gate".
#[tokio::test(start_paused = true)]
async fn a_setter_on_a_layer_in_use_makes_a_separate_gate() {
    let layer = reactive().per_host(HOST, Limits::default().spacing(secs(7)));
    layer.hosts().penalize(HOST, secs(30));
    let changed = layer.clone().max_wait(secs(40));
    assert_eq!(changed.hosts().snapshot(), []);
    assert_eq!(wait_of(&changed).await, secs(0));
    assert_eq!(wait_of(&layer).await, secs(30), "the old one is as it was");

    // It keeps the settings it was made with.
    changed.hosts().penalize(HOST, secs(1));
    assert_eq!(wait_of(&changed).await, secs(1));
    assert_eq!(wait_of(&changed).await, secs(7));
}

// --- disabled -----------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_disabled_gate_passes_everything_and_learns_nothing() {
    struct Counter(Arc<AtomicUsize>);
    impl Observer for Counter {
        fn throttled(&self, _: &ThrottleEvent<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let events = Arc::new(AtomicUsize::new(0));
    let script = Script::always(Reply::status(429).header("retry-after", "30").after(secs(1)));
    let layer = HostGateLayer::new().observer(Counter(Arc::clone(&events))).disabled(true);
    let gated = layer.layer(script.clone());
    let calls = (0..5).map(|_| gated.clone().oneshot(get(URI)));
    for result in futures_util::future::join_all(calls).await {
        assert_eq!(result.unwrap().status(), 429);
    }
    assert_eq!((script.times(), script.peak()), (vec![secs(0); 5], 5));
    assert_eq!(layer.hosts().snapshot(), []);
    assert_eq!(events.load(Ordering::Relaxed), 0);

    let permits = [(); 3].map(|()| layer.hosts().try_acquire(&URI.parse().unwrap()).unwrap());
    assert!(permits.iter().all(|permit| permit.host().is_none()));
    assert_eq!(wait_of(&layer.disabled(false)).await, secs(0));
}

#[tokio::test(start_paused = true)]
async fn a_disabled_gate_still_says_what_the_inner_service_says() {
    let layer = HostGateLayer::new().disabled(true);
    let gated = layer.layer(Script::list([Reply::error("reset"), Reply::ok().body("feed").trailer("x", "y")]));
    assert_eq!(gated.clone().oneshot(get(URI)).await.unwrap_err().to_string(), "reset");
    let body = gated.oneshot(get(URI)).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["x"], "y");
    assert_eq!(body.to_bytes(), "feed");
}

// --- shed as a response -------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_shed_can_come_back_as_a_429_with_retry_after_and_a_marker() {
    let script = Script::list([Reply::status(503).header("retry-after", "100")]);
    let gated = reactive().on_shed(OnShed::Response).layer(script.clone());
    let passed = gated.clone().oneshot(get(URI)).await.unwrap();
    assert!(passed.extensions().get::<Shed>().is_none(), "this one is the server's");
    sleep(Duration::from_millis(500)).await;

    let response = gated.clone().oneshot(within(secs(1))).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()["retry-after"], "60", "59.5 s, rounded up");
    let error = response.extensions().get::<Shed>().unwrap().error();
    assert_eq!((error.reason(), error.retry_after()), (Reason::Cooldown, Duration::from_millis(59_500)));
    assert_eq!(error.asked(), Some(secs(100)));
    assert!(response.body().is_end_stream());
    assert!(response.into_body().collect().await.unwrap().to_bytes().is_empty());
    assert_eq!(script.sent().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_inner_service_stays_an_error() {
    let gated = HostGateLayer::new().on_shed(OnShed::Response).layer(Script::always(Reply::error("reset")));
    assert_eq!(gated.oneshot(get(URI)).await.unwrap_err().to_string(), "reset");
}

// --- the budget ---------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn max_wait_of_a_request_wins_over_the_hosts_and_that_over_the_layers() {
    let layer = HostGateLayer::new().max_wait(secs(10)).per_host(HOST, Limits::default().max_wait(secs(20)));
    let script = Script::always(Reply::hang());
    let gated = layer.layer(script);
    for (host, request, budget) in [
        ("http://other.example/", None, secs(10)),
        (URI, None, secs(20)),
        (URI, Some(secs(5)), secs(5)),
        (URI, Some(secs(90)), secs(90)),
    ] {
        let hanging = tokio::spawn(gated.clone().oneshot(get(host)));
        sleep(Duration::from_millis(1)).await;
        let before = Instant::now();
        let request = match request {
            Some(budget) => within(budget),
            None => get(host),
        };
        let error = gated.clone().oneshot(request).await.unwrap_err();
        assert_eq!(RateLimited::find(&*error).unwrap().reason(), Reason::InFlight);
        assert_eq!(before.elapsed(), budget);
        hanging.abort();
        assert!(hanging.await.unwrap_err().is_cancelled());
    }
}

#[tokio::test(start_paused = true)]
async fn a_budget_of_zero_never_waits() {
    let script = Script::new(|sent| if sent.n == 0 { Reply::ok() } else { Reply::hang() });
    let layer = HostGateLayer::new();
    let mut gated = layer.layer(script);
    assert!(gated.call(within(secs(0))).now_or_never().unwrap().is_ok(), "a free host admits it");
    let hanging = gated.call(get(URI));
    let error = gated.call(within(secs(0))).now_or_never().expect("refused at once").unwrap_err();
    assert_eq!(RateLimited::find(&*error).unwrap().reason(), Reason::InFlight);
    drop(hanging);
    layer.hosts().penalize(HOST, Duration::from_nanos(1));
    let error = gated.call(within(secs(0))).now_or_never().expect("refused at once").unwrap_err();
    let limited = RateLimited::find(&*error).unwrap();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, Duration::from_millis(1)), "rounded up");
}

#[tokio::test(start_paused = true)]
async fn a_budget_of_for_ever_does_not_overflow() {
    let layer = HostGateLayer::new().max_wait(Duration::MAX).max_cooldown(Duration::MAX);
    let gated = layer.layer(Script::always(Reply::ok()));
    layer.hosts().penalize(HOST, secs(100_000));
    let before = Instant::now();
    gated.oneshot(within(Duration::MAX)).await.unwrap();
    assert_eq!(before.elapsed(), secs(100_000));
}

// --- the queue ----------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_full_queue_sheds_the_next_and_only_on_that_host() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let layer = HostGateLayer::new().max_queue(2);
    let gated = layer.layer(script.clone());
    let tasks: Vec<_> = (0..3).map(|_| tokio::spawn(gated.clone().oneshot(get(URI)))).collect();
    sleep(Duration::from_millis(1)).await;

    let mut full = gated.clone();
    let error = full.call(get(URI)).now_or_never().expect("refused at once").unwrap_err();
    let limited = RateLimited::find(&*error).unwrap();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::QueueFull, secs(1)));
    assert!(error.to_string().contains("queue-full"), "{error}");
    drop(gated.clone().oneshot(get("http://other.example/")).await.unwrap());
    for task in tasks {
        drop(task.await.unwrap().unwrap());
    }
    drop(gated.oneshot(get(URI)).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_place_that_was_given_up_is_free_again() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let gated = HostGateLayer::new().max_queue(1).layer(script.clone());
    let first = tokio::spawn(gated.clone().oneshot(get(URI)));
    let canceled = tokio::spawn(gated.clone().oneshot(get(URI)));
    sleep(Duration::from_millis(1)).await;
    canceled.abort();
    assert!(canceled.await.unwrap_err().is_cancelled());
    drop(gated.oneshot(get(URI)).await.unwrap());
    assert!(first.await.unwrap().is_ok());
    assert_eq!(script.times(), [secs(0), secs(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_queue_bound_of_zero_is_none() {
    let script = Script::always(Reply::ok());
    let layer = reactive().max_queue(0).spacing(Duration::ZERO);
    layer.hosts().penalize(HOST, secs(1));
    let gated = layer.layer(script.clone());
    let calls = (0..20_000).map(|_| gated.clone().oneshot(get(URI)));
    for result in futures_util::future::join_all(calls).await {
        result.unwrap();
    }
    assert_eq!(script.times(), vec![secs(1); 20_000]);
}

// --- as the documentation shows it --------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn the_layer_fits_into_a_service_builder_and_leaves_the_request_alone() {
    let seen = Arc::new(Mutex::new(None));
    let client = ServiceBuilder::new().layer(HostGateLayer::new()).service_fn({
        let seen = Arc::clone(&seen);
        move |request: Request<String>| {
            *seen.lock().unwrap() = Some(request);
            std::future::ready(Ok::<_, std::convert::Infallible>(http::Response::new(String::new())))
        }
    });
    let request =
        Request::builder().method(Method::POST).uri("http://u:p@Example.com/a?b").header("x", "y").body("z".to_owned());
    client.oneshot(request.unwrap()).await.unwrap();
    let request = seen.lock().unwrap().take().unwrap();
    assert_eq!((request.method(), request.uri().to_string().as_str()), (&Method::POST, "http://u:p@Example.com/a?b"));
    assert_eq!(
        (request.headers().len(), &request.headers()["x"], request.body().as_str()),
        (1, &"y".parse().unwrap(), "z")
    );
    assert!(request.extensions().is_empty(), "no extension is inserted on the happy path");
}
