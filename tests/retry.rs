//! `GateRetry`, outside the gate (SPEC 3.7 b): no sleep of its own, each attempt is gated, and the gate's pacing is the
//! wait. And other retries: a policy that knows nothing of the gate, on either side of it, and both of ours together.

mod support;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header::RETRY_AFTER};
use http_body_util::{BodyExt, Full};
use support::{
    client,
    provider::Provider,
    reactive,
    script::{Reply, Script, ScriptBody, ScriptError, get},
};
use tokio::{
    join,
    time::{Sleep, sleep, timeout},
};
use tower::{
    BoxError, Service, ServiceBuilder, ServiceExt,
    retry::{Policy, Retry, RetryLayer},
};
use tower_host_gate::{
    HostGate, HostGateLayer, HostSnapshot, MaxWait, Observer, OnShed, RateLimited, Reason, ResponseBody, Shed,
    Throttled, observe::ShedEvent, retry::GateRetry,
};

const FEED: &str = "http://a.example/feed";
const HOST: &str = "a.example:80";

type Client = Retry<GateRetry, HostGate<Script>>;

fn client(attempts: u32, layer: &HostGateLayer, script: &Script) -> Client {
    ServiceBuilder::new().layer(RetryLayer::new(GateRetry::new(attempts))).layer(layer.clone()).service(script.clone())
}

/// Sends on a clone, as another task of the program would.
async fn send<S, R>(client: &S, request: Request<()>) -> Result<R, BoxError>
where
    S: Service<Request<()>, Response = R, Error = BoxError> + Clone,
{
    client.clone().oneshot(request).await
}

async fn status<S, B>(client: &S, request: Request<()>) -> u16
where
    S: Service<Request<()>, Response = Response<B>, Error = BoxError> + Clone,
{
    send(client, request).await.expect("a response").status().as_u16()
}

/// Like [`status`], begun this much later.
async fn status_at(at: Duration, client: &Client, request: Request<()>) -> u16 {
    sleep(at).await;
    status(client, request).await
}

fn limited(result: Result<Response<ResponseBody<ScriptBody>>, BoxError>) -> RateLimited {
    let error = result.expect_err("shed");
    RateLimited::find(&*error).expect("the gate's own error").clone()
}

fn host(layer: &HostGateLayer) -> HostSnapshot {
    layer.hosts().get(HOST).expect("the gate has something to say of the host")
}

/// Counts what was shed: an attempt that does not reach the inner service is seen here.
#[derive(Clone, Default)]
struct Sheds(Arc<AtomicUsize>);

impl Observer for Sheds {
    fn shed(&self, _: &ShedEvent<'_>) {
        self.0.fetch_add(1, Relaxed);
    }
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
// Attempts, and when
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn so_many_attempts_and_the_wait_is_the_gates() {
    let script = Script::always(Reply::status(429));
    let response = send(&client(4, &reactive(), &script), get(FEED)).await.unwrap();
    assert_eq!(response.status(), 429);
    // 2 s, 4 s, 8 s: the gate's escalating cooldown.
    assert_eq!(script.times(), [0, 2, 6, 14].map(secs));
    let throttled = response.extensions().get::<Throttled>().expect("the mark of a refusal");
    assert_eq!((throttled.streak, throttled.waited), (4, secs(14)));
}

#[tokio::test(start_paused = true)]
async fn it_stops_at_the_first_success() {
    let script = Script::list([Reply::status(429), Reply::status(429)]);
    assert_eq!(status(&client(10, &reactive(), &script), get(FEED)).await, 200);
    assert_eq!(script.times(), [0, 2, 6].map(secs));
}

#[tokio::test(start_paused = true)]
async fn one_attempt_and_none_are_one() {
    for attempts in [0, 1] {
        let script = Script::always(Reply::status(429));
        assert_eq!(status(&client(attempts, &HostGateLayer::new(), &script), get(FEED)).await, 429);
        assert_eq!(script.times().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn each_request_has_attempts_of_its_own() {
    let script = Script::always(refused("1"));
    let client = client(2, &reactive(), &script);
    for sent in [2, 4, 6] {
        assert_eq!(status(&client, get(FEED)).await, 429);
        assert_eq!(script.times().len(), sent);
    }
}

// ADR-0016: "The two waits are one budget, never stacked"
#[tokio::test(start_paused = true)]
async fn c12_no_double_wait() {
    let script = Script::list([refused("30")]);
    assert_eq!(status(&client(2, &reactive(), &script), get(FEED)).await, 200);
    assert_eq!(script.times(), [secs(0), secs(30)]);
}

#[tokio::test(start_paused = true)]
async fn c12_no_double_wait_with_a_retry_that_sleeps_the_hint_itself() {
    let script = Script::list([refused("30")]);
    let client = ServiceBuilder::new().layer(RetryLayer::new(SleepsTheHint)).layer(reactive()).service(script.clone());
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(script.times(), [secs(0), secs(30)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// One budget
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn what_was_waited_is_subtracted_from_the_budget() {
    let script = Script::always(refused("40"));
    let client = client(3, &reactive().max_wait(secs(60)), &script);
    let error = limited(send(&client, get(FEED)).await);
    // 40 s of 60 are gone when the second refusal asks for 40 more.
    assert_eq!(script.times(), [secs(0), secs(40)]);
    assert_eq!((error.reason(), error.retry_after()), (Reason::Cooldown, secs(40)));
    assert_eq!(error.status(), Some(StatusCode::TOO_MANY_REQUESTS));
}

#[tokio::test(start_paused = true)]
async fn a_budget_that_just_reaches_is_used_to_its_end() {
    let script = Script::list([refused("40"), refused("20"), refused("1")]);
    let client = client(4, &reactive().max_wait(secs(60)), &script);
    let error = limited(send(&client, get(FEED)).await);
    assert_eq!(script.times(), [secs(0), secs(40), secs(60)]);
    assert_eq!(error.retry_after(), secs(1));
}

#[tokio::test(start_paused = true)]
async fn time_in_the_queue_counts_and_time_in_flight_does_not() {
    let script = Script::list([Reply::ok().after(secs(15)), refused("40").after(secs(100)), refused("40")]);
    let layer = reactive().max_wait(secs(60));
    let client = client(3, &layer, &script);
    let (_, error) = join!(status(&client, get(FEED)), send(&client, get(FEED)));
    // The second request: 15 s in the queue, 100 s in flight, 40 s of pacing; 5 s left for a cooldown of 40 s.
    assert_eq!(script.times(), [0, 15, 155].map(secs));
    assert_eq!(limited(error).retry_after(), secs(40));
}

#[tokio::test(start_paused = true)]
async fn a_budget_of_the_request_covers_all_its_attempts_too() {
    let script = Script::always(refused("4"));
    let client = client(9, &reactive(), &script);
    let mut request = get(FEED);
    request.extensions_mut().insert(MaxWait(secs(10)));
    limited(send(&client, request).await);
    assert_eq!(script.times(), [0, 4, 8].map(secs));

    let script = Script::always(refused("4"));
    let mut request = get(FEED);
    request.extensions_mut().insert(MaxWait(secs(0)));
    limited(send(&self::client(9, &reactive(), &script), request).await);
    assert_eq!(script.times(), [secs(0)], "zero never waits, so there is no second attempt");
}

// ---------------------------------------------------------------------------------------------------------------------
// Siblings
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn c11_outside_each_attempt_is_gated_and_the_permit_is_free_between_them() {
    let layer = reactive();
    let script = Script::list([Reply::status(429).body("slow down").open_for_ever()]);
    let client = client(2, &layer, &script);
    let looking = async {
        sleep(secs(1)).await;
        assert_eq!((host(&layer).in_flight, host(&layer).queued), (0, 2), "both wait for the cooldown");
        assert_eq!(script.open(), 0, "the refusal's body is gone");
    };
    join!(status(&client, get(FEED)), status(&client, get(FEED)), looking);
    assert_eq!(script.times(), [0, 2, 3].map(secs));
}

// SPEC 3.7: "the retried request re-enters at the head of its host's queue"
#[tokio::test(start_paused = true)]
async fn the_retried_request_goes_before_the_siblings_queued_before_it() {
    let script = Script::list([refused("10").after(secs(1))]);
    let client = client(2, &reactive(), &script);
    join!(
        status(&client, get("http://a.example/first")),
        status_at(ms(100), &client, get("http://a.example/second")),
        status_at(ms(200), &client, get("http://a.example/third")),
    );
    let order: Vec<_> = script.sent().into_iter().map(|sent| (sent.path, sent.at)).collect();
    let expected = [("/first", 0), ("/first", 11), ("/second", 12), ("/third", 13)];
    assert_eq!(order, expected.map(|(path, at)| (path.to_owned(), secs(at))));
}

#[tokio::test(start_paused = true)]
async fn retried_requests_keep_their_order_among_themselves() {
    let refused = || refused("10").after(secs(1));
    let script = Script::list([refused(), refused()]);
    let client = client(2, &reactive().concurrency(2), &script);
    join!(
        status(&client, get("http://a.example/first")),
        status_at(ms(100), &client, get("http://a.example/second")),
        status_at(ms(200), &client, get("http://a.example/third")),
    );
    let paths: Vec<_> = script.sent().into_iter().map(|sent| sent.path).collect();
    assert_eq!(paths, ["/first", "/second", "/first", "/second", "/third"]);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_does_not_turn_a_retried_request_away() {
    let layer = reactive().max_queue(1);
    let script = Script::list([refused("10").after(secs(1))]);
    let client = client(2, &layer, &script);
    let (first, second) = join!(status(&client, get(FEED)), status_at(ms(100), &client, get(FEED)));
    assert_eq!((first, second), (200, 200));
    assert_eq!(script.times(), [0, 11, 12].map(secs));
}

#[tokio::test(start_paused = true)]
async fn given_up_between_the_attempts_it_leaves_nothing_but_the_cooldown() {
    let layer = reactive();
    let script = Script::list([refused("10")]);
    let client = client(2, &layer, &script);
    timeout(secs(3), send(&client, get(FEED))).await.unwrap_err();
    assert_eq!((host(&layer).in_flight, host(&layer).queued, host(&layer).cooldown), (0, 0, secs(7)));
    assert_eq!(status(&client, get(FEED)).await, 200);
    assert_eq!(script.times(), [secs(0), secs(10)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// What is repeated
// ---------------------------------------------------------------------------------------------------------------------

/// How many requests the server sees when it gives this answer to every request of this method, of three attempts.
async fn sends(method: Method, reply: Reply) -> usize {
    let script = Script::always(reply);
    let mut request = get(FEED);
    *request.method_mut() = method;
    let _ = send(&client(3, &HostGateLayer::new(), &script), request).await;
    script.times().len()
}

#[tokio::test(start_paused = true)]
async fn a_429_and_a_hinted_503_are_repeated_with_any_method_other_refusals_with_safe_ones() {
    let hinted = |status| Reply::status(status).header("retry-after", "1");
    for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::POST, Method::PUT, Method::PATCH, Method::DELETE]
    {
        for refusal in [Reply::status(429), hinted(429), hinted(503)] {
            assert_eq!(sends(method.clone(), refusal.clone()).await, 3, "{method} {refusal:?}");
        }
        let expected = if method.is_safe() { 3 } else { 1 };
        for refusal in [hinted(403), hinted(500), hinted(529)] {
            assert_eq!(sends(method.clone(), refusal.clone()).await, expected, "{method} {refusal:?}");
        }
    }
}

// SPEC 3.7: "never retries a shed, nor a headerless 403 more than once"
#[tokio::test(start_paused = true)]
async fn a_headerless_403_is_repeated_once() {
    assert_eq!(sends(Method::GET, Reply::status(403)).await, 2);
    assert_eq!(sends(Method::POST, Reply::status(403)).await, 1);

    let script = Script::list([Reply::status(403), Reply::status(429), Reply::status(403), Reply::ok()]);
    assert_eq!(status(&client(9, &HostGateLayer::new(), &script), get(FEED)).await, 403, "once in all, not in a row");
    assert_eq!(script.times().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn what_the_gate_does_not_take_for_a_refusal_is_not_repeated() {
    for status in [200, 204, 301, 304, 401, 404, 408, 500, 502, 503, 504] {
        assert_eq!(sends(Method::GET, Reply::status(status)).await, 1, "{status}");
    }
    for status in [200, 301, 404, 408] {
        assert_eq!(sends(Method::GET, Reply::status(status).header("retry-after", "1")).await, 1, "{status}, a hint");
    }
}

#[tokio::test(start_paused = true)]
async fn a_transport_error_is_not_repeated() {
    let script = Script::always(Reply::error("connection reset"));
    let error = send(&client(3, &HostGateLayer::new(), &script), get(FEED)).await.unwrap_err();
    assert_eq!(error.downcast_ref(), Some(&ScriptError("connection reset".into())));
    assert_eq!(script.times().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_shed_request_is_not_repeated() {
    let sheds = Sheds::default();
    let layer = HostGateLayer::new().max_wait(secs(5)).observer(sheds.clone());
    let script = Script::list([]);
    layer.hosts().penalize(HOST, secs(30));
    limited(send(&client(3, &layer, &script), get(FEED)).await);
    assert_eq!((sheds.0.load(Relaxed), script.times().len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_shed_request_that_looks_like_a_429_is_not_repeated() {
    let sheds = Sheds::default();
    let layer = HostGateLayer::new().max_wait(secs(5)).observer(sheds.clone()).on_shed(OnShed::Response);
    let script = Script::list([]);
    layer.hosts().penalize(HOST, secs(30));
    let response = send(&client(3, &layer, &script), get(FEED)).await.unwrap();
    assert_eq!(
        (response.status(), &response.headers()[RETRY_AFTER]),
        (StatusCode::TOO_MANY_REQUESTS, &"30".parse().unwrap())
    );
    assert!(response.extensions().get::<Shed>().is_some() && response.extensions().get::<Throttled>().is_none());
    assert_eq!((sheds.0.load(Relaxed), script.times().len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_disabled_gate_repeats_nothing() {
    let script = Script::always(Reply::status(429));
    assert_eq!(status(&client(3, &HostGateLayer::new().disabled(true), &script), get(FEED)).await, 429);
    assert_eq!(script.times(), [secs(0)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Other retries
// ---------------------------------------------------------------------------------------------------------------------

/// A policy that knows nothing of the gate: repeats a 429 after what `Retry-After` asks, as often as it comes.
#[derive(Clone)]
struct SleepsTheHint;

impl<B, E> Policy<Request<()>, Response<B>, E> for SleepsTheHint {
    type Future = Sleep;

    fn retry(&mut self, _: &mut Request<()>, result: &mut Result<Response<B>, E>) -> Option<Sleep> {
        let response = result.as_ref().ok().filter(|response| response.status() == 429)?;
        let hint = response.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
        Some(sleep(secs(hint)))
    }

    fn clone_request(&mut self, request: &Request<()>) -> Option<Request<()>> {
        Some(request.clone())
    }
}

// CASES C11: "Inner retry: one admission, permit held, documented; the gate sees only the last response"
#[tokio::test(start_paused = true)]
async fn c11_any_other_policy_inside_is_one_admission_of_which_the_gate_sees_the_last_response() {
    let layer = HostGateLayer::new();
    let script = Script::list([refused("10"), refused("10")]);
    let client =
        ServiceBuilder::new().layer(layer.clone()).layer(RetryLayer::new(SleepsTheHint)).service(script.clone());
    let looking = async {
        sleep(secs(15)).await;
        let host = host(&layer);
        assert_eq!((host.in_flight, host.queued), (1, 1), "the permit is held between the attempts");
        assert_eq!((host.streak, host.cooldown), (0, secs(0)), "the gate has not seen a refusal");
    };
    let (first, sibling, ()) = join!(status(&client, get(FEED)), status(&client, get(FEED)), looking);
    assert_eq!((first, sibling), (200, 200));
    assert_eq!(script.times(), [0, 10, 20, 20].map(secs));
    assert!(layer.hosts().get(HOST).is_none());
}

#[tokio::test(start_paused = true)]
async fn both_policies_together() {
    let layer = reactive();
    let script = Script::always(Reply::status(429));
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new(GateRetry::new(3)))
        .layer(layer.clone())
        .layer(RetryLayer::new(layer.in_flight_retry()))
        .service(script.clone());
    let response = send(&client, get(FEED)).await.unwrap();
    // Three admissions of two attempts each; each pair is one event, and its cooldown counts from the first of the pair.
    assert_eq!(script.times(), [0, 500, 2000, 2500, 6000, 6500].map(ms));
    let throttled = response.extensions().get::<Throttled>().expect("the mark of a refusal");
    assert_eq!((throttled.streak, throttled.waited), (3, ms(1500) + ms(3500)));
}

// Requests are cloned, so their bodies are `Clone`: `Full<Bytes>` is.
#[tokio::test]
async fn a_real_server_sees_every_attempt_with_the_same_body_no_earlier_than_the_gate_allows() {
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let provider = Provider::start_async({
        let bodies = Arc::clone(&bodies);
        move |n, request| {
            let bodies = Arc::clone(&bodies);
            async move {
                let body = request.into_body().collect().await.expect("the request's body").to_bytes();
                bodies.lock().unwrap().push(body);
                let status = if n < 2 { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
                let mut response = Response::new(Full::<Bytes>::from("text"));
                *response.status_mut() = status;
                response
            }
        }
    })
    .await;
    let layer = reactive().base_cooldown(ms(40)).spacing(ms(10));
    let client =
        ServiceBuilder::new().layer(RetryLayer::new(GateRetry::new(3))).layer(layer.clone()).service(client::http1());

    let request = Request::post(provider.url("/feed")).body(Full::from("a question")).unwrap();
    let response = client.oneshot(request).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(*bodies.lock().unwrap(), ["a question"; 3]);
    let hits = provider.hits();
    assert!(hits[1].at - hits[0].at >= ms(40) && hits[2].at - hits[1].at >= ms(80), "{hits:?}");
    assert_eq!(client::drain(response).await.unwrap(), "text");
    assert_eq!(layer.hosts().snapshot()[0].streak, 0);
}
