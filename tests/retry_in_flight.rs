//! `InFlightRetry`, inside the gate (SPEC 3.7 a, ADR-0015): one quick second attempt while the permit is held.
//!
//! ADR-0016: "The current request keeps ADR-0015's single retry unchanged and holds its permit through it, so it never
//! waits on the cooldown *it* just set (no double-wait); the retry budget stays exactly two attempts."

mod support;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use support::{
    client,
    provider::Provider,
    reactive,
    script::{Reply, Script, ScriptBody, get},
};
use tokio::{
    join,
    time::{sleep, timeout},
};
use tower::{
    BoxError, Service, ServiceBuilder, ServiceExt,
    retry::{Retry, RetryLayer},
};
use tower_host_gate::{
    HostGate, HostGateLayer, HostSnapshot, Label, Observer, ResponseBody, Throttled,
    observe::{ThrottleEvent, WaitEvent},
    retry::InFlightRetry,
};

const FEED: &str = "http://a.example/feed";
const HOST: &str = "a.example:80";

type Client = HostGate<Retry<InFlightRetry, Script>>;

fn client(layer: &HostGateLayer, script: &Script) -> Client {
    ServiceBuilder::new().layer(layer.clone()).layer(RetryLayer::new(layer.in_flight_retry())).service(script.clone())
}

/// Sends on a clone, as another task of the program would.
async fn send(client: &Client, request: Request<()>) -> Result<Response<ResponseBody<ScriptBody>>, BoxError> {
    client.clone().oneshot(request).await
}

async fn status(client: &Client, request: Request<()>) -> u16 {
    send(client, request).await.expect("a response").status().as_u16()
}

/// Like [`status`], begun this much later.
async fn status_at(at: Duration, client: &Client, request: Request<()>) -> u16 {
    sleep(at).await;
    status(client, request).await
}

fn host(layer: &HostGateLayer) -> HostSnapshot {
    layer.hosts().get(HOST).expect("the gate has something to say of the host")
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn refused(retry_after: &str) -> Reply {
    Reply::status(429).header("retry-after", retry_after)
}

// ---------------------------------------------------------------------------------------------------------------------
// Two attempts, and when
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn exactly_two_attempts_half_a_second_apart() {
    let script = Script::always(Reply::status(429));
    let response = send(&client(&HostGateLayer::new(), &script), get(FEED)).await.unwrap();
    assert_eq!(response.status(), 429);
    assert_eq!(script.times(), [secs(0), ms(500)]);
}

#[tokio::test(start_paused = true)]
async fn the_second_attempt_comes_when_the_server_asked_for_it() {
    let script = Script::list([refused("3")]);
    assert_eq!(status(&client(&HostGateLayer::new(), &script), get(FEED)).await, 200);
    assert_eq!(script.times(), [secs(0), secs(3)]);
}

// ADR-0016: "the two caps are deliberately distinct: the in-flight `RETRY_MAX_DELAY` stays 5 s, while the new
// `HOST_MAX_COOLDOWN`/`MAX_GATE_WAIT` govern the sibling-facing wait"
#[tokio::test(start_paused = true)]
async fn the_request_waits_five_seconds_at_most_and_its_siblings_as_long_as_the_server_asked() {
    let layer = reactive();
    let script = Script::list([refused("40")]);
    let client = client(&layer, &script);
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(script.times(), [secs(0), secs(5)], "never waits on the cooldown it has caused itself");
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(script.times()[2], secs(40));
}

// CASES C12: the gate's cooldown and the retry's wait run side by side.
#[tokio::test(start_paused = true)]
async fn c12_no_double_wait_inside() {
    let layer = reactive();
    let script = Script::list([refused("4"), refused("4")]);
    let client = client(&layer, &script);
    assert_eq!(status(&client, get(FEED)).await, 429);
    assert_eq!(host(&layer).cooldown, secs(4), "counted from the second refusal, at t = 4");
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(script.times(), [secs(0), secs(4), secs(8)]);
}

#[tokio::test(start_paused = true)]
async fn both_delays_can_be_set() {
    let layer = reactive();
    let script = Script::list([Reply::status(429), Reply::ok(), refused("30")]);
    let policy = layer.in_flight_retry().base_delay(ms(100)).max_delay(secs(2));
    let client = ServiceBuilder::new().layer(layer.clone()).layer(RetryLayer::new(policy)).service(script.clone());
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(script.times(), [secs(0), ms(100), secs(2), secs(4)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// The permit and the siblings
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn c11_inside_the_permit_is_held_throughout() {
    let layer = reactive();
    let script = Script::list([Reply::status(429), Reply::ok().after(secs(10))]);
    let client = client(&layer, &script);
    let looking = async {
        sleep(ms(300)).await;
        assert_eq!((host(&layer).in_flight, host(&layer).queued), (1, 1), "between the attempts");
    };
    let (first, sibling, ()) = join!(status(&client, get(FEED)), status(&client, get(FEED)), looking);
    assert_eq!((first, sibling), (200, 200));
    // The cooldown has been over since t = 2.
    assert_eq!(script.times(), [ms(0), ms(500), ms(10_500)]);
    assert_eq!(script.peak(), 1);
}

#[tokio::test(start_paused = true)]
async fn siblings_cool_down_while_the_retry_is_in_flight() {
    let layer = reactive().concurrency(2);
    let script = Script::list([Reply::status(429)]);
    let client = client(&layer, &script);
    let looking = async {
        sleep(ms(100)).await;
        let host = host(&layer);
        assert_eq!((host.streak, host.cooldown), (1, ms(1900)), "reported at once");
        assert_eq!(host.last_status, Some(StatusCode::TOO_MANY_REQUESTS));
    };
    join!(status(&client, get(FEED)), looking, status_at(ms(200), &client, get(FEED)));
    assert_eq!(script.times(), [ms(0), ms(500), ms(2000)]);
}

// SPEC 3.4: "while warm, consecutive sends are `spacing` apart"
#[tokio::test(start_paused = true)]
async fn a_sibling_keeps_its_spacing_to_the_second_attempt() {
    for concurrency in [1, 2] {
        let layer = reactive().concurrency(concurrency);
        let script = Script::list([refused("3")]);
        let client = client(&layer, &script);
        join!(status(&client, get(FEED)), status_at(ms(1), &client, get(FEED)));
        assert_eq!(script.times(), [secs(0), secs(3), secs(4)]);
    }
}

#[tokio::test(start_paused = true)]
async fn given_up_between_the_attempts_it_leaves_the_cooldown_and_nothing_else() {
    let layer = reactive();
    let script = Script::list([Reply::status(429)]);
    let client = client(&layer, &script);
    timeout(ms(200), send(&client, get(FEED))).await.unwrap_err();
    assert_eq!((host(&layer).in_flight, host(&layer).cooldown), (0, ms(1800)));
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(script.times(), [secs(0), secs(2)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// What the gate learns
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn both_refusals_of_one_request_are_one_event() {
    let layer = reactive();
    let script = Script::always(Reply::status(429));
    let client = client(&layer, &script);

    let response = send(&client, get(FEED)).await.unwrap();
    let throttled = response.extensions().get::<Throttled>().expect("the mark of a refusal");
    assert_eq!((throttled.streak, throttled.retry_after), (1, ms(1500)));

    // On a warm host, where sends are recorded, the same: 4 s from the first refusal, at t = 2.
    let response = send(&client, get(FEED)).await.unwrap();
    let throttled = response.extensions().get::<Throttled>().expect("the mark of a refusal");
    assert_eq!((throttled.streak, throttled.retry_after, throttled.waited), (2, ms(3500), ms(1500)));
    assert_eq!(script.times(), [ms(0), ms(500), ms(2000), ms(2500)]);
}

#[tokio::test(start_paused = true)]
async fn a_burst_with_all_its_second_attempts_is_one_event() {
    let layer = reactive().concurrency(8);
    let script = Script::always(Reply::status(429).after(ms(100)));
    let client = client(&layer, &script);
    let burst = (0..8).map(|_| status(&client, get(FEED)));
    assert_eq!(futures_util::future::join_all(burst).await, [429; 8]);
    assert_eq!(script.times().len(), 16);
    // 2 s from the first refusal, at t = 0.1; the last one has come at t = 0.7.
    assert_eq!((host(&layer).streak, host(&layer).cooldown), (1, ms(1400)));
}

#[tokio::test(start_paused = true)]
async fn the_second_refusal_may_lengthen_the_cooldown() {
    let layer = reactive();
    let script = Script::list([Reply::status(429), refused("20")]);
    assert_eq!(status(&client(&layer, &script), get(FEED)).await, 429);
    assert_eq!((host(&layer).streak, host(&layer).cooldown), (1, secs(20)));
}

#[tokio::test(start_paused = true)]
async fn a_success_of_the_second_attempt_ends_the_streak() {
    let layer = reactive();
    let script = Script::list([Reply::status(429)]);
    assert_eq!(status(&client(&layer, &script), get(FEED)).await, 200);
    assert_eq!((host(&layer).streak, host(&layer).cooldown), (0, ms(1500)), "and never shortens the cooldown");
}

#[tokio::test(start_paused = true)]
async fn a_success_of_the_second_attempt_ends_the_streak_on_a_warm_host_too() {
    let layer = reactive();
    let refused = || Reply::status(429);
    let script = Script::list([refused(), refused(), refused(), Reply::ok(), refused(), refused()]);
    let client = client(&layer, &script);
    assert_eq!(status(&client, get(FEED)).await, 429);
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(host(&layer).streak, 0);
    // So the next refusal is the first of a new streak: 2 s, of which half a second has passed.
    assert_eq!(status(&client, get(FEED)).await, 429);
    assert_eq!((host(&layer).streak, host(&layer).cooldown), (1, ms(1500)));
    assert_eq!(script.times(), [0, 500, 2000, 2500, 6000, 6500].map(ms));
}

// SPEC 3.2: "Only a success SENT AFTER the last throttle resets the streak."
#[tokio::test(start_paused = true)]
async fn a_sibling_sent_before_the_refusal_does_not_end_the_streak() {
    let layer = reactive().concurrency(2);
    let refused = || Reply::status(429).after(ms(100));
    let script = Script::list([refused(), Reply::ok().after(ms(200)), refused()]);
    let client = client(&layer, &script);
    assert_eq!(join!(status(&client, get(FEED)), status(&client, get(FEED))), (429, 200));
    assert_eq!(host(&layer).streak, 1);
}

// SPEC 3.10: "every event carries the request's `Label` extension when set"
#[tokio::test(start_paused = true)]
async fn the_first_refusal_is_reported_under_the_requests_label() {
    type Event = (bool, Option<&'static str>);
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<Event>>>);
    impl Observer for Seen {
        fn throttled(&self, event: &ThrottleEvent<'_>) {
            self.0.lock().unwrap().push((event.new_event, event.label));
        }
    }

    let seen = Seen::default();
    let layer = HostGateLayer::new().observer(seen.clone());
    let script = Script::always(Reply::status(429));
    let mut request = get(FEED);
    request.extensions_mut().insert(Label("nightly"));
    send(&client(&layer, &script), request).await.unwrap();
    assert_eq!(*seen.0.lock().unwrap(), [(true, Some("nightly")), (false, Some("nightly"))]);
}

#[tokio::test(start_paused = true)]
async fn the_time_between_the_attempts_is_no_wait_of_the_gate() {
    #[derive(Clone, Default)]
    struct Waits(Arc<Mutex<usize>>);
    impl Observer for Waits {
        fn waited(&self, _: &WaitEvent<'_>) {
            *self.0.lock().unwrap() += 1;
        }
    }

    let waits = Waits::default();
    let layer = HostGateLayer::new().observer(waits.clone());
    let script = Script::always(refused("40"));
    let response = send(&client(&layer, &script), get(FEED)).await.unwrap();
    assert_eq!(response.extensions().get::<Throttled>().expect("the mark of a refusal").waited, secs(0));
    assert_eq!(*waits.0.lock().unwrap(), 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// What is repeated
// ---------------------------------------------------------------------------------------------------------------------

/// How many requests the server sees when it gives this answer to every request of this method.
async fn sends(method: Method, reply: Reply) -> usize {
    let script = Script::always(reply);
    let mut request = get(FEED);
    *request.method_mut() = method;
    let _ = send(&client(&HostGateLayer::new(), &script), request).await;
    script.times().len()
}

// SPEC 3.7: "429/503 for any method, 403 only for safe ones". A 5xx with a hint is a refusal as well, and like a 403 it
// may have been acted upon.
#[tokio::test(start_paused = true)]
async fn a_429_and_a_503_are_repeated_with_any_method_other_refusals_with_safe_ones() {
    let hinted = |status| Reply::status(status).header("retry-after", "1");
    for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::POST, Method::PUT, Method::PATCH, Method::DELETE]
    {
        for refusal in [429, 503].into_iter().flat_map(|status| [Reply::status(status), hinted(status)]) {
            assert_eq!(sends(method.clone(), refusal.clone()).await, 2, "{method} {refusal:?}");
        }
        let expected = if method.is_safe() { 2 } else { 1 };
        for refusal in [Reply::status(403), hinted(403), hinted(500), hinted(502), hinted(529)] {
            assert_eq!(sends(method.clone(), refusal.clone()).await, expected, "{method} {refusal:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_else_is_repeated() {
    for status in [200, 204, 301, 304, 400, 401, 404, 408] {
        assert_eq!(sends(Method::GET, Reply::status(status)).await, 1, "{status}");
        assert_eq!(
            sends(Method::GET, Reply::status(status).header("retry-after", "1")).await,
            1,
            "{status} with a hint"
        );
    }
    for status in [500, 502, 504, 529] {
        assert_eq!(sends(Method::GET, Reply::status(status)).await, 1, "{status}");
    }
    assert_eq!(sends(Method::GET, Reply::error("connection reset")).await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_503_without_a_hint_is_repeated_but_not_reported() {
    let layer = HostGateLayer::new().concurrency(2);
    let script = Script::list([Reply::status(503)]);
    let client = client(&layer, &script);
    // Reported, it would hold the sibling back.
    join!(status(&client, get(FEED)), status_at(ms(100), &client, get(FEED)));
    assert_eq!(script.times(), [0, 100, 500].map(ms));
    assert!(layer.hosts().get(HOST).is_none(), "nothing is known of the host");
}

#[tokio::test(start_paused = true)]
async fn a_503_with_a_hint_is_repeated_and_reported() {
    let layer = reactive().concurrency(2);
    let script = Script::list([Reply::status(503).header("retry-after", "2")]);
    let client = client(&layer, &script);
    let looking = async {
        sleep(ms(100)).await;
        assert_eq!((host(&layer).streak, host(&layer).cooldown), (1, ms(1900)));
    };
    join!(status(&client, get(FEED)), looking);
    assert_eq!(script.times(), [secs(0), secs(2)]);
}

#[tokio::test(start_paused = true)]
async fn a_disabled_gate_repeats_nothing() {
    let script = Script::always(Reply::status(429));
    assert_eq!(status(&client(&HostGateLayer::new().disabled(true), &script), get(FEED)).await, 429);
    assert_eq!(script.times(), [secs(0)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Requests
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn on_the_happy_path_no_extension_is_inserted() {
    let layer = HostGateLayer::new();
    let script = Script::list([]);
    let mut client = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(RetryLayer::new(layer.in_flight_retry()))
        .map_request(|request: Request<()>| {
            assert!(request.extensions().is_empty(), "{:?}", request.extensions());
            request
        })
        .service(script.clone());
    // The second one from the queue.
    let (first, second) = (client.call(get(FEED)), client.call(get(FEED)));
    let (first, second) = join!(first, second);
    assert!(first.unwrap().extensions().is_empty() && second.unwrap().extensions().is_empty());
    assert_eq!(script.times().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_limit_below_is_free_for_other_hosts_between_the_attempts() {
    let layer = HostGateLayer::new();
    let script = Script::list([refused("4")]);
    let client = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(RetryLayer::new(layer.in_flight_retry()))
        .concurrency_limit(1)
        .service(script.clone());
    let other = async {
        sleep(secs(1)).await;
        client.clone().oneshot(get("http://b.example/")).await
    };
    let (first, other) = join!(client.clone().oneshot(get(FEED)), other);
    assert_eq!((first.unwrap().status().as_u16(), other.unwrap().status().as_u16()), (200, 200));
    assert_eq!(script.times_of("b.example"), [secs(1)]);
    assert_eq!(script.times_of("a.example"), [secs(0), secs(4)]);
}

// Requests are cloned, so their bodies are `Clone`: `Full<Bytes>` is.
#[tokio::test]
async fn a_real_server_sees_two_requests_with_the_same_body() {
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let provider = Provider::start_async({
        let bodies = Arc::clone(&bodies);
        move |n, request| {
            let bodies = Arc::clone(&bodies);
            async move {
                use http_body_util::BodyExt as _;
                let body = request.into_body().collect().await.expect("the request's body").to_bytes();
                bodies.lock().unwrap().push(body);
                let status = if n == 0 { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
                let mut response = Response::new(Full::<Bytes>::default());
                *response.status_mut() = status;
                response
            }
        }
    })
    .await;
    let layer = HostGateLayer::new();
    let client = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(RetryLayer::new(layer.in_flight_retry().base_delay(ms(40))))
        .service(client::http1());

    let request = Request::post(provider.url("/feed")).body(Full::from("a question")).unwrap();
    let response = client.oneshot(request).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(*bodies.lock().unwrap(), ["a question", "a question"]);
    let hits = provider.hits();
    assert!(hits[1].at - hits[0].at >= ms(40), "{hits:?}");
    let state = layer.hosts().snapshot();
    assert_eq!((state[0].streak, state[0].in_flight), (0, 0));
}
