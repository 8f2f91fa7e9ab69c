//! The `Service` contract around the inner service: SPEC section 2, and the C cases about readiness, types and errors.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::cell::Cell;
use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body_util::Full;
use support::reactive;
use support::script::{Reply, Script, ScriptBody, ScriptError, get};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tower::buffer::Buffer;
use tower::limit::{ConcurrencyLimit, RateLimit};
use tower::load_shed::LoadShed;
use tower::timeout::Timeout;
use tower::timeout::error::Elapsed;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_host_gate::{HostGate, HostGateLayer, Hosts, MaxWait, Permit, RateLimited, Reason, ResponseBody};

const A: &str = "http://a.example/";
const B: &str = "http://b.example/";
const C: &str = "http://c.example/";

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// One request at a time, over all hosts; the semaphore tells whether one is reserved.
fn one_at_a_time<S>(inner: S) -> (ConcurrencyLimit<S>, Arc<Semaphore>) {
    let semaphore = Arc::new(Semaphore::new(1));
    (ConcurrencyLimit::with_semaphore(inner, Arc::clone(&semaphore)), semaphore)
}

// --- types --------------------------------------------------------------------------------------------------------

#[test]
fn section_2_layer_service_future_and_body_are_send_and_sync() {
    fn check<T: Send + Sync>() {}
    check::<HostGateLayer>();
    check::<HostGate<Script>>();
    check::<<HostGate<Script> as Service<Request<()>>>::Future>();
    check::<<HostGate<Script> as Service<Request<String>>>::Future>();
    check::<ResponseBody<ScriptBody>>();
    check::<Hosts>();
    check::<Permit>();
    check::<RateLimited>();
}

#[tokio::test(start_paused = true)]
async fn section_2_the_gate_fits_into_a_boxed_clone_sync_service() {
    let script = Script::always(Reply::ok());
    let boxed = ServiceBuilder::new().boxed_clone_sync().layer(HostGateLayer::new()).service(script.clone());
    boxed.clone().oneshot(get(A)).await.unwrap();
    assert_eq!(script.sent().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn section_2_the_inner_service_need_not_be_send() {
    let calls = Rc::new(Cell::new(0));
    let inner = service_fn({
        let calls = Rc::clone(&calls);
        move |request: Request<Rc<str>>| {
            let calls = Rc::clone(&calls);
            async move {
                calls.set(calls.get() + 1);
                tokio::task::yield_now().await;
                let body = Full::new(Bytes::copy_from_slice(request.body().as_bytes()));
                Ok::<_, Infallible>(Response::new(body))
            }
        }
    });
    let gated = HostGateLayer::new().layer(inner);
    let request = |uri: &str| Request::get(uri).body(Rc::from("not Send")).unwrap();
    // One goes at once, one waits: both ways through the future.
    let fetch = async || drop(gated.clone().oneshot(request(A)).await.unwrap());
    tokio::join!(fetch(), fetch());
    assert_eq!(calls.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn section_2_the_inner_service_need_not_be_static() {
    let calls = Cell::new(0);
    let text = String::from("borrowed");
    let gated = HostGateLayer::new().layer(service_fn(|request: Request<&str>| {
        calls.set(calls.get() + request.body().len());
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    }));
    gated.clone().oneshot(Request::get(A).body(text.as_str()).unwrap()).await.unwrap();
    gated.oneshot(Request::get(A).body(&text[..1]).unwrap()).await.unwrap();
    assert_eq!(calls.get(), 9);
}

#[test]
fn layer_service_and_future_can_be_cloned_and_printed() {
    let layer = HostGateLayer::new().clone();
    let mut gated = layer.layer(service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(String::new())))));
    let printed = format!("{layer:?} {:?} {:?} {:?}", gated.clone(), gated.call(get(A)), layer.hosts());
    for name in ["HostGateLayer", "HostGate ", "ResponseFuture", "Hosts"] {
        assert!(printed.contains(name), "{name} in {printed}");
    }
    assert!(format!("{:?}", ResponseBody::<String>::default()).contains("ResponseBody"));
}

#[test]
fn the_inner_service_can_be_reached_and_taken_out() {
    let mut gated = HostGateLayer::new().layer(7);
    *gated.get_mut() += 1;
    assert_eq!(*gated.get_ref(), 8);
    assert_eq!(gated.into_inner(), 8);
}

// --- readiness ----------------------------------------------------------------------------------------------------

// "`poll_ready` is always ready."
#[test]
fn section_2_the_gate_is_always_ready() {
    let script = Script::always(Reply::ok());
    let mut gated = HostGateLayer::new().layer(script.clone());
    let mut ready = || Service::<Request<()>>::poll_ready(&mut gated, &mut Context::from_waker(Waker::noop()));
    script.hold();
    assert!(matches!(ready(), Poll::Ready(Ok(()))));
    script.fail_ready("closed");
    assert!(matches!(ready(), Poll::Ready(Ok(()))));
}

// "Nothing of the inner service is reserved while waiting."
#[tokio::test(start_paused = true)]
async fn section_2_a_waiting_request_reserves_nothing_of_the_inner_service() {
    let script = Script::always(Reply::ok());
    let (limited, semaphore) = one_at_a_time(script.clone());
    let layer = HostGateLayer::new();
    let mut gated = layer.layer(limited);
    layer.hosts().penalize("a.example", secs(30));

    let mut waiting = pin!(gated.call(get(A)));
    assert!(futures_util::poll!(&mut waiting).is_pending());
    assert_eq!(semaphore.available_permits(), 1);
    gated.call(get(B)).now_or_never().expect("nothing is in the way of another host").unwrap();
    waiting.await.unwrap();
    assert_eq!(script.times(), [secs(0), secs(30)]);
}

// "if the host was refused while the inner service was getting ready, the readied instance is dropped and the request
// waits again (a send must never go out after a hold it has not waited for)"
#[tokio::test(start_paused = true)]
async fn section_2_a_readied_instance_is_dropped_when_the_host_was_refused_meanwhile() {
    let script = Script::list([Reply::status(429).header("retry-after", "30").after(secs(5))]);
    let (limited, semaphore) = one_at_a_time(script.clone());
    let gated = reactive().concurrency(2).layer(limited);

    // The first is in flight until 5 s. The second has a permit of the gate and waits for the inner service.
    let first = tokio::spawn(gated.clone().oneshot(get(A)));
    let second = tokio::spawn(gated.clone().oneshot(get(A)));
    sleep(secs(6)).await;
    assert_eq!(first.await.unwrap().unwrap().status(), 429);
    assert_eq!(semaphore.available_permits(), 1, "what the second had reserved is free");
    gated.clone().oneshot(get(B)).await.unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(script.times(), [secs(0), secs(6), secs(35)]);
}

#[tokio::test(start_paused = true)]
async fn section_2_a_request_that_waits_again_still_has_its_one_budget() {
    let script = Script::list([Reply::status(429).header("retry-after", "30").after(secs(5))]);
    let (limited, _) = one_at_a_time(script.clone());
    let gated = reactive().concurrency(2).max_wait(secs(20)).layer(limited);
    let first = tokio::spawn(gated.clone().oneshot(get(A)));
    let second = tokio::spawn(gated.clone().oneshot(get(A)));
    first.await.unwrap().unwrap();
    // The refusal came at 5 s; to wait for what cannot come any more would help nobody.
    let error = timeout(Duration::from_millis(1), second).await.expect("refused at once").unwrap().unwrap_err();
    let limited = RateLimited::find(&*error).unwrap();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, secs(30)));
    assert_eq!(script.times(), [secs(0)]);
}

// "if that is pending, the polled instance itself moves into the future and a fresh clone stays behind (left in place it
// strands the inner permit for ever)"
#[tokio::test(start_paused = true)]
async fn section_2_a_pending_instance_moves_into_the_future_and_goes_with_it() {
    let script = Script::new(|sent| if sent.n == 0 { Reply::ok().after(secs(1)) } else { Reply::ok() });
    let (limited, semaphore) = one_at_a_time(script.clone());
    let mut gated = HostGateLayer::new().layer(limited);

    let first = gated.call(get(A));
    let mut second = Box::pin(gated.call(get(B)));
    assert!(futures_util::poll!(&mut second).is_pending(), "the first holds the only permit");
    drop(second);
    first.await.unwrap();
    assert_eq!(semaphore.available_permits(), 1, "stranded in an instance that nobody drives");
    gated.call(get(C)).now_or_never().expect("the way is free").unwrap();
}

#[tokio::test(start_paused = true)]
async fn section_2_a_pending_instance_is_the_one_that_is_called() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let (limited, _) = one_at_a_time(script.clone());
    let mut gated = HostGateLayer::new().layer(limited);
    // All on one instance of the gate, with no clone in between.
    let calls = [A, B, C, "http://d.example/"].map(|uri| gated.call(get(uri)));
    join_all(calls).await.into_iter().for_each(|result| drop(result.unwrap()));
    assert_eq!(script.times(), [secs(0), secs(1), secs(2), secs(3)]);
}

/// Fifty calls on clones, ten to each of five hosts, over an inner service that counts on the contract. The script
/// panics when a clone is called that was not polled ready.
async fn fifty_calls<S, ResB>(inner: S, script: &Script)
where
    S: Service<Request<()>, Response = Response<ResB>> + Clone,
    S::Error: Into<BoxError>,
    ResB: http_body::Body,
{
    let gated = HostGateLayer::new().layer(inner);
    let calls = (0..50).map(|n| gated.clone().oneshot(get(&format!("http://h{}.example/", n % 5))));
    for result in join_all(calls).await {
        assert!(result.is_ok());
    }
    assert_eq!(script.sent().len(), 50);
}

#[tokio::test(start_paused = true)]
async fn c01_the_readied_instance_is_the_one_called() {
    let script = || Script::always(Reply::ok().after(Duration::from_millis(10)));
    let inner = script();
    fifty_calls(inner.clone(), &inner).await;
    let inner = script();
    fifty_calls(ConcurrencyLimit::new(inner.clone(), 2), &inner).await;
    let inner = script();
    fifty_calls(Buffer::new(inner.clone(), 4), &inner).await;
    let inner = script();
    fifty_calls(LoadShed::new(inner.clone()), &inner).await;
    let inner = script();
    let rate = tower::limit::rate::Rate::new(7, secs(1));
    fifty_calls(Buffer::new(RateLimit::new(inner.clone(), rate), 4), &inner).await;
}

// --- errors -------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn c14_every_kind_of_error_can_be_told_from_the_others() {
    let script = Script::new(|sent| match sent.path.as_str() {
        "/hang" => Reply::hang(),
        "/reset" => Reply::error("connection reset"),
        _ => Reply::ok(),
    });
    let layer = reactive().max_queue(1).max_wait(secs(10));
    let gated = layer.layer(script.clone());

    // An inner error passes untouched.
    let error = gated.clone().oneshot(get("http://a.example/reset")).await.unwrap_err();
    assert_eq!(error.downcast_ref(), Some(&ScriptError("connection reset".into())));
    assert!(RateLimited::find(&*error).is_none());

    // So does an error of the inner `poll_ready`.
    script.fail_ready("closed");
    let error = gated.clone().oneshot(get(A)).await.unwrap_err();
    assert_eq!(error.downcast_ref(), Some(&ScriptError("closed".into())));
    script.release();

    // The caller's own timeout is the caller's own error.
    let hanging = tokio::spawn(gated.clone().oneshot(get("http://a.example/hang")));
    sleep(secs(1)).await;
    let error = Timeout::new(gated.clone(), secs(2)).oneshot(get(A)).await.unwrap_err();
    assert!(error.is::<Elapsed>() && RateLimited::find(&*error).is_none());

    // Three kinds of shedding.
    let shed = async |request| {
        let error = gated.clone().oneshot(request).await.unwrap_err();
        let limited = error.downcast_ref::<RateLimited>().unwrap().clone();
        (limited.host().to_owned(), limited.code(), limited.reason(), limited.retry_after())
    };
    let waiting = tokio::spawn(gated.clone().oneshot(get(A)));
    sleep(secs(1)).await;
    assert_eq!(shed(get(A)).await, ("a.example:80".into(), "RATE_LIMITED", Reason::QueueFull, secs(1)));
    let limited = waiting.await.unwrap().unwrap_err();
    assert_eq!(RateLimited::find(&*limited).unwrap().reason(), Reason::InFlight);
    hanging.abort();
    layer.hosts().penalize("b.example:80", secs(30));
    assert_eq!(shed(get(B)).await, ("b.example:80".into(), "RATE_LIMITED", Reason::Cooldown, secs(30)));
    sleep(secs(30)).await;
    gated.clone().oneshot(get(B)).await.unwrap();
    let mut hasty = get(B);
    hasty.extensions_mut().insert(MaxWait(Duration::ZERO));
    assert_eq!(shed(hasty).await, ("b.example:80".into(), "RATE_LIMITED", Reason::Spacing, secs(1)));
}

#[tokio::test(start_paused = true)]
async fn c14_a_shed_request_carries_what_the_server_said() {
    let script = Script::list([Reply::status(503).header("retry-after", "120")]);
    let gated = reactive().layer(script);
    gated.clone().oneshot(get(A)).await.unwrap();
    sleep(secs(10)).await;
    let mut hasty = get(A);
    hasty.extensions_mut().insert(MaxWait(secs(5)));
    let error = gated.oneshot(hasty).await.unwrap_err();
    let limited = RateLimited::find(&*error).unwrap();
    assert_eq!(limited.retry_after(), secs(50), "capped at max_cooldown");
    assert_eq!(limited.asked(), Some(secs(120)), "uncapped");
    assert_eq!(limited.raw_hint(), Some("120"));
    assert_eq!((limited.status().unwrap().as_u16(), limited.streak()), (503, 1));
    assert_eq!(limited.throttled_since().unwrap().elapsed(), secs(10));
    let text = error.to_string();
    for part in ["a.example:80", "50 s", "cooldown", "503"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

// "`RateLimited::find(&dyn Error)` walks `source()`."
#[tokio::test(start_paused = true)]
async fn c14_a_shed_is_found_behind_other_layers() {
    #[derive(Debug)]
    struct Wrapped(BoxError);
    impl std::fmt::Display for Wrapped {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("wrapped")
        }
    }
    impl std::error::Error for Wrapped {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&*self.0)
        }
    }
    let layer = HostGateLayer::new().max_wait(secs(1));
    layer.hosts().penalize("a.example", secs(60));
    let shed = layer.layer(Script::always(Reply::ok())).oneshot(get(A)).await.unwrap_err();
    let error = Wrapped(Wrapped(shed).into());
    assert_eq!(RateLimited::find(&error).unwrap().retry_after(), secs(60));
}

#[tokio::test(start_paused = true)]
async fn c15_a_hopeless_request_is_refused_at_once() {
    let script = Script::list([Reply::status(429).header("retry-after", "90")]);
    let layer = reactive().max_cooldown(secs(90));
    let mut gated = layer.layer(script.clone());
    gated.call(get(A)).await.unwrap();
    let error = gated.call(get(A)).now_or_never().expect("refused without a wait").unwrap_err();
    let limited = RateLimited::find(&*error).unwrap();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, secs(90)));
    assert_eq!(layer.hosts().get("a.example:80").unwrap().queued, 0);
    assert_eq!(script.sent().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn c16_the_budget_covers_the_wait_for_a_permit() {
    let script = Script::always(Reply::hang());
    let mut gated = HostGateLayer::new().max_wait(secs(5)).layer(script);
    let _hanging = gated.call(get(A));
    let before = Instant::now();
    let error = gated.call(get(A)).await.unwrap_err();
    assert_eq!(before.elapsed(), secs(5));
    assert_eq!(RateLimited::find(&*error).unwrap().reason(), Reason::InFlight);
}

#[test]
fn a_request_that_need_not_wait_needs_no_runtime() {
    let gated = HostGateLayer::new();
    let mut gated = gated.layer(service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(String::new())))));
    let response = pin!(gated.call(get(A))).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(response, Poll::Ready(Ok(_))));
}
