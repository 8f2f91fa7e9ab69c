//! Faults that were found by trying to break the gate, each with the rule it broke. They stay fixed.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Extensions, HeaderMap, HeaderValue, Request, Uri};
use support::reactive;
use support::script::{Reply, Script, ScriptError, ScriptFuture, get};
use tokio::time::{Instant, sleep};
use tower::retry::RetryLayer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_host_gate::observe::{Observer, WaitEvent};
use tower_host_gate::retry::GateRetry;
use tower_host_gate::{By, HostGateLayer, HostKey, Hosts, Keying, MaxWait, RateLimited, Reason, Throttled};

const URI: &str = "http://example.com/";
const HOST: &str = "example.com:80";

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A permit that turns back into a waiter is given back, so the next one has to be woken. What used to hide it, the
/// check for unread bodies once a second, is used up first.
#[tokio::test(start_paused = true)]
async fn a_permit_that_is_turned_back_wakes_the_next_waiter() {
    let layer = HostGateLayer::new();
    let script = Script::list([Reply::ok().body("unread").open_for_ever()]);
    let gated = layer.layer(script.clone());
    let unread = gated.clone().oneshot(get(URI)).await.unwrap();
    let warned = tokio::spawn(gated.clone().oneshot(get(URI)));
    sleep(secs(3)).await;
    drop(unread);
    warned.await.unwrap().unwrap();

    script.hold();
    let mut hurried = get(URI);
    hurried.extensions_mut().insert(MaxWait(secs(1)));
    let first = tokio::spawn(gated.clone().oneshot(hurried));
    sleep(Duration::from_millis(10)).await;
    let second = tokio::spawn(gated.clone().oneshot(get(URI)));
    sleep(Duration::from_millis(10)).await;
    layer.hosts().penalize(HOST, secs(2));
    let held = Instant::now();
    script.release();

    first.await.unwrap().unwrap_err();
    second.await.unwrap().unwrap();
    assert_eq!(held.elapsed(), secs(2));
}

/// Sends are spaced only while the host is warm, so a queue is never longer than that.
#[tokio::test(start_paused = true)]
async fn nobody_is_shed_for_a_spacing_that_ends_before() {
    let layer = reactive().warm_for(secs(2)).max_wait(secs(10));
    layer.hosts().penalize(HOST, secs(2));
    let script = Script::always(Reply::ok());
    let gated = layer.layer(script.clone());
    let calls: Vec<_> = (0..30).map(|_| tokio::spawn(gated.clone().oneshot(get(URI)))).collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    // Two sends while it is warm, the first one after that, and then all the others.
    assert_eq!(script.times()[..3], [secs(2), secs(3), secs(4)]);
    assert!(script.times()[3..].iter().all(|at| *at == secs(4)));
}

#[derive(Clone, Default)]
struct Waits(Arc<Mutex<Vec<(Duration, Duration)>>>);

impl Observer for Waits {
    fn waited(&self, event: &WaitEvent<'_>) {
        self.0.lock().unwrap().push((event.pacing, event.queued));
    }
}

/// Nobody was in flight, so none of it was spent behind the cap.
#[tokio::test(start_paused = true)]
async fn waiters_that_are_refused_together_were_all_kept_by_pacing() {
    let waits = Waits::default();
    let layer = HostGateLayer::new().max_wait(secs(10)).observer(waits.clone());
    let gated = layer.layer(Script::always(Reply::ok()));
    layer.hosts().penalize(HOST, secs(5));
    let calls: Vec<_> = (0..3).map(|_| tokio::spawn(gated.clone().oneshot(get(URI)))).collect();
    sleep(secs(1)).await;
    layer.hosts().penalize(HOST, secs(50));
    for call in calls {
        call.await.unwrap().unwrap_err();
    }
    assert_eq!(*waits.0.lock().unwrap(), [(secs(1), Duration::ZERO); 3]);
}

/// Holds its host, as a sibling on another thread might, while it is polled ready.
#[derive(Clone)]
struct HeldMeanwhile {
    inner: Script,
    hosts: Hosts,
    armed: Arc<AtomicBool>,
}

impl HeldMeanwhile {
    fn new(inner: &Script, layer: &HostGateLayer) -> Self {
        Self { inner: inner.clone(), hosts: layer.hosts(), armed: Arc::default() }
    }
}

impl Service<Request<()>> for HeldMeanwhile {
    type Response = <Script as Service<Request<()>>>::Response;
    type Error = ScriptError;
    type Future = ScriptFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ScriptError>> {
        if self.armed.swap(false, Ordering::Relaxed) {
            self.hosts.penalize(HOST, secs(10));
        }
        Service::<Request<()>>::poll_ready(&mut self.inner, cx)
    }

    fn call(&mut self, request: Request<()>) -> ScriptFuture {
        self.inner.call(request)
    }
}

/// "A send must never go out after a hold it has not waited for", on a host that was healthy a moment ago too.
#[tokio::test(start_paused = true)]
async fn a_healthy_host_that_is_held_while_the_inner_service_gets_ready_is_waited_for() {
    let (layer, script) = (HostGateLayer::new(), Script::always(Reply::ok()));
    let inner = HeldMeanwhile::new(&script, &layer);
    let armed = Arc::clone(&inner.armed);
    armed.store(true, Ordering::Relaxed);
    layer.layer(inner).oneshot(get(URI)).await.unwrap();
    assert_eq!(script.times(), [secs(10)]);
}

/// A future that nobody polls holds no place in the queue, whichever way it came to wait.
#[tokio::test(start_paused = true)]
async fn a_request_turned_back_in_call_joins_the_queue_when_it_is_polled() {
    let (layer, script) = (HostGateLayer::new(), Script::always(Reply::ok()));
    let inner = HeldMeanwhile::new(&script, &layer);
    let armed = Arc::clone(&inner.armed);
    let mut gated = layer.layer(inner);
    layer.hosts().penalize(HOST, secs(1));
    sleep(secs(2)).await;
    armed.store(true, Ordering::Relaxed);
    let never_polled = gated.call(get(URI));
    assert_eq!(layer.hosts().get(HOST).unwrap().queued, 0);
    gated.clone().oneshot(get(URI)).await.unwrap();
    assert_eq!(script.times(), [secs(12)]);
    drop(never_polled);
}

/// The host that is asked is free, so the gate's pacing would be no wait at all.
#[tokio::test(start_paused = true)]
async fn a_refusal_that_a_redirect_inside_brought_from_elsewhere_is_not_repeated() {
    let elsewhere = Reply::status(429).header("retry-after", "30").extension(Uri::from_static("http://cdn.example/"));
    let script = Script::always(elsewhere);
    let layer = reactive().final_uri(|extensions| extensions.get::<Uri>().cloned());
    let client =
        ServiceBuilder::new().layer(RetryLayer::new(GateRetry::new(4))).layer(layer.clone()).service(script.clone());
    let response = client.oneshot(get(URI)).await.unwrap();
    assert_eq!(response.extensions().get::<Throttled>().unwrap().retry_after, secs(30));
    assert_eq!(script.times(), [secs(0)]);
    assert_eq!(layer.hosts().get("cdn.example:80").unwrap().cooldown, secs(30));
}

/// Two requests wait for a host that is then held past their budget of 5 s.
async fn refused_waiters(then: impl FnOnce(&Hosts)) -> Vec<Result<Duration, RateLimited>> {
    let layer = HostGateLayer::new().max_wait(secs(5));
    let gated = layer.layer(Script::always(Reply::ok()));
    layer.hosts().penalize(HOST, secs(3));
    let begun = Instant::now();
    let calls: Vec<_> = (0..2).map(|_| tokio::spawn(gated.clone().oneshot(get(URI)))).collect();
    sleep(secs(1)).await;
    layer.hosts().penalize(HOST, secs(20));
    // Before either of them has been polled again.
    then(&layer.hosts());
    let mut outcomes = Vec::new();
    for call in calls {
        outcomes.push(match call.await.unwrap() {
            Ok(_) => Ok(begun.elapsed()),
            Err(error) => Err(RateLimited::find(&*error).unwrap().clone()),
        });
    }
    outcomes
}

/// "`retry_after` ... never understating."
#[tokio::test(start_paused = true)]
async fn a_refused_waiter_says_what_holds_when_it_is_told() {
    for outcome in refused_waiters(|hosts| hosts.penalize(HOST, secs(50))).await {
        let error = outcome.unwrap_err();
        assert_eq!(error.reason(), Reason::Cooldown);
        assert!(error.retry_after() >= secs(50), "{error}");
    }
}

/// "Requests in flight and waiting stay, and the next may go at once."
#[tokio::test(start_paused = true)]
async fn a_waiter_whose_host_is_cleared_before_it_is_told_goes_at_once() {
    let outcomes = refused_waiters(|hosts| hosts.clear(HOST)).await;
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().is_ok_and(|at| *at == secs(1))), "{outcomes:?}");
}

/// "Refused at once": also the one whom a retried request, going to the head, has put past its budget.
#[tokio::test(start_paused = true)]
async fn whoever_is_overtaken_out_of_its_budget_is_told_at_once() {
    let script = Script::list([Reply::status(429).after(Duration::from_millis(100))]);
    let layer = reactive().max_wait(secs(5));
    let client = ServiceBuilder::new().layer(RetryLayer::new(GateRetry::new(3))).layer(layer).service(script);
    let begun = Instant::now();
    let calls: Vec<_> = (0..8)
        .map(|_| {
            let call = client.clone().oneshot(get(URI));
            tokio::spawn(async move { (call.await.is_ok(), begun.elapsed()) })
        })
        .collect();
    let mut served = 0;
    for call in calls {
        let (ok, at) = call.await.unwrap();
        served += usize::from(ok);
        assert!(ok || at == Duration::from_millis(100), "shed only after {at:?}");
    }
    // Held for 2 s, then one a second: at 2.1, 3.1 and 4.1 s.
    assert_eq!(served, 3);
}

/// The send instants that a gate leaves on a request are its own: another gate's clock began at another time.
#[tokio::test(start_paused = true)]
async fn stacked_gates_do_not_read_each_others_marks() {
    let outer = reactive().keying(|_: &Uri, _: &HeaderMap, _: &Extensions| Some(HostKey::new("token")));
    outer.hosts().penalize("token", secs(1));
    sleep(secs(100)).await;
    let inner = reactive().concurrency(2);
    let script = Script::list([
        Reply::status(429).after(secs(2)),
        Reply::status(429).after(secs(3)),
        Reply::status(429),
        Reply::status(429),
    ]);
    let client =
        ServiceBuilder::new().layer(inner.clone()).layer(RetryLayer::new(inner.in_flight_retry())).service(script);
    // Both are sent before the first refusal; the second one comes over the warm outer gate.
    let first = tokio::spawn(client.clone().oneshot(get(URI)));
    tokio::task::yield_now().await;
    let second = tokio::spawn(outer.layer(client).oneshot(get(URI)));
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(inner.hosts().get(HOST).unwrap().streak, 1);
}

/// A key is printable, so what cannot be a host is none.
#[test]
fn a_host_header_with_white_space_in_it_is_no_host() {
    for junk in ["a\tb", "two words", "a/b", "a?b", "a#b"] {
        let mut headers = HeaderMap::new();
        headers.insert("host", HeaderValue::from_bytes(junk.as_bytes()).unwrap());
        let key = By::Authority.key(&Uri::from_static("/"), &headers, &Extensions::new());
        assert_eq!(key, None, "{junk:?}");
    }
}

/// Neither what a peak has left behind stays, nor what one host after the other has.
#[test]
fn the_slots_of_a_peak_do_not_stay() {
    let hosts = HostGateLayer::new().hosts();
    let uris: Vec<Uri> = (0..20_000).map(|n| format!("http://h{n}.example/").parse().unwrap()).collect();
    let acquire = |uri| hosts.try_acquire(uri).unwrap();
    // What is allocated once, with the first request.
    drop(acquire(&uris[0]));
    let info = allocation_counter::measure(|| {
        drop(uris.iter().map(acquire).collect::<Vec<_>>());
        uris[..2_000].iter().for_each(|uri| drop(acquire(uri)));
    });
    // 16 shards with room for 32 slots of about 140 bytes, doubled by the table.
    assert!(info.bytes_current < 256 * 1024, "{} bytes stay", info.bytes_current);
    assert!(info.bytes_max > 2 * 1024 * 1024, "there was no peak: {} bytes", info.bytes_max);
}
