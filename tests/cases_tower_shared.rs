//! Many callers of one gate: the C cases about order, fairness, isolation, and callers that go away or fail.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use http::{Extensions, HeaderMap, Request, Response, StatusCode, Uri};
use support::reactive;
use support::script::{Reply, Script, get};
use tokio::runtime::Builder;
use tokio::sync::Barrier;
use tokio::time::{Instant, sleep, timeout};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_host_gate::observe::{Observer, WaitEvent};
use tower_host_gate::{By, HostGate, HostGateLayer, HostKey, Keying, Outcome, RateLimited, Reason, ResponseBody};

const A: &str = "http://a.example/";
const B: &str = "http://b.example/";

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

// --- cancellation, the deterministic half (cancellation.rs has the random one) ------------------------------------

/// A gate with one request in flight to A, and what follows when the next one is dropped.
struct Busy {
    layer: HostGateLayer,
    script: Script,
}

impl Busy {
    fn new() -> (Self, impl Future<Output = ()>) {
        let script = Script::always(Reply::ok().after(secs(1)));
        let layer = HostGateLayer::new();
        let mut gated = layer.layer(script.clone());
        let first = gated.call(get(A)).map(|result| drop(result.unwrap()));
        (Self { layer, script }, first)
    }

    fn call(&self) -> Pin<Box<impl Future<Output = Result<Response<impl Sized + use<>>, BoxError>> + use<>>> {
        Box::pin(self.layer.layer(self.script.clone()).call(get(A)))
    }

    async fn assert_free(&self) {
        assert_eq!(self.layer.hosts().snapshot(), []);
        let before = self.script.sent().len();
        let next = self.call();
        assert_eq!(self.script.sent().len(), before + 1, "the next request goes at once");
        drop(next);
        assert_eq!(self.layer.hosts().snapshot(), []);
        assert_eq!(self.script.peak(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn c04_dropped_before_the_first_poll() {
    let (busy, first) = Busy::new();
    let dropped = busy.call();
    assert_eq!(busy.layer.hosts().get("a.example:80").unwrap().queued, 0, "nobody queues unpolled");
    drop(dropped);
    first.await;
    busy.assert_free().await;
}

#[tokio::test(start_paused = true)]
async fn c04_dropped_while_waiting_for_the_permit() {
    let (busy, first) = Busy::new();
    let mut dropped = busy.call();
    assert!(futures_util::poll!(&mut dropped).is_pending());
    assert_eq!(busy.layer.hosts().get("a.example:80").unwrap().queued, 1);
    drop(dropped);
    assert_eq!(busy.layer.hosts().get("a.example:80").unwrap().queued, 0);
    first.await;
    busy.assert_free().await;
}

#[tokio::test(start_paused = true)]
async fn c04_dropped_while_sleeping_a_cooldown() {
    let (busy, first) = Busy::new();
    first.await;
    busy.layer.hosts().penalize("a.example:80", secs(30));
    let mut dropped = busy.call();
    assert!(timeout(secs(10), &mut dropped).await.is_err());
    let mut behind = busy.call();
    assert!(futures_util::poll!(&mut behind).is_pending());
    drop(dropped);
    drop(behind.await.unwrap());
    assert_eq!(busy.script.times(), [secs(0), secs(31)], "the dropped one had booked nothing");
    busy.layer.hosts().clear("a.example:80");
    busy.assert_free().await;
}

#[tokio::test(start_paused = true)]
async fn c04_dropped_in_flight() {
    let (busy, first) = Busy::new();
    drop(first);
    busy.assert_free().await;
}

#[tokio::test(start_paused = true)]
async fn c04_dropped_in_the_same_tick_as_the_hand_over() {
    let (busy, first) = Busy::new();
    let mut dropped = busy.call();
    assert!(futures_util::poll!(&mut dropped).is_pending());
    let mut behind = tokio_test::task::spawn(busy.call());
    assert!(behind.poll().is_pending());
    first.await;
    // The permit is free and the head has been woken. It goes without having looked, and must pass the call on.
    assert!(!behind.is_woken());
    drop(dropped);
    assert!(behind.is_woken());
    drop(behind.await.unwrap());
    busy.assert_free().await;
}

// --- many at once -------------------------------------------------------------------------------------------------

#[test]
fn c06_clones_on_many_threads_never_exceed_the_cap() {
    const CLONES: usize = 64;
    let (open, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let inner = service_fn({
        let (open, peak) = (Arc::clone(&open), Arc::clone(&peak));
        move |_: Request<()>| {
            let (open, peak) = (Arc::clone(&open), Arc::clone(&peak));
            async move {
                peak.fetch_max(open.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(Duration::from_millis(1)).await;
                open.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, Infallible>(Response::new(String::new()))
            }
        }
    });
    let layer = HostGateLayer::new().concurrency(3);
    let gated = layer.layer(inner);
    let runtime = Builder::new_multi_thread().worker_threads(8).enable_time().build().unwrap();
    runtime.block_on(async {
        let start = Arc::new(Barrier::new(CLONES));
        let tasks: Vec<_> = (0..CLONES)
            .map(|_| {
                let (gated, start) = (gated.clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    gated.oneshot(get(A)).await.map(drop)
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap().unwrap();
        }
    });
    assert_eq!(peak.load(Ordering::SeqCst), 3);
    assert_eq!(layer.hosts().snapshot(), []);
}

#[tokio::test(start_paused = true)]
async fn c07_ten_thousand_waiters_sleep_through_a_cooldown() {
    const WAITERS: usize = 10_000;
    let script = Script::always(Reply::ok());
    let layer = reactive().spacing(Duration::ZERO);
    let gated = layer.layer(script.clone());
    layer.hosts().penalize("a.example:80", secs(30));

    let polls = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..WAITERS)
        .map(|_| {
            let mut call = Box::pin(gated.clone().oneshot(get(A)));
            let polls = Arc::clone(&polls);
            tokio::spawn(poll_fn(move |cx| {
                polls.fetch_add(1, Ordering::Relaxed);
                call.as_mut().poll(cx).map(|result| drop(result.unwrap()))
            }))
        })
        .collect();
    sleep(secs(29)).await;
    assert_eq!(layer.hosts().get("a.example:80").unwrap().queued, WAITERS);
    assert_eq!(polls.load(Ordering::Relaxed), WAITERS, "one look each, and then sleep");
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(script.times(), vec![secs(30); WAITERS]);
    assert!(polls.load(Ordering::Relaxed) <= 4 * WAITERS, "{polls:?} polls");
}

#[tokio::test(start_paused = true)]
async fn c08_first_come_first_served_however_many_come_late() {
    let script = Script::always(Reply::ok().after(Duration::from_millis(10)));
    let gated = HostGateLayer::new().layer(script.clone());
    let arrive = |n: usize| tokio::spawn(gated.clone().oneshot(get(&format!("http://a.example/{n}"))));

    let mut tasks: Vec<_> = (0..100).map(arrive).collect();
    // Twice as fast as they are served, some of them in the very moment in which a permit comes free.
    for n in 100..200 {
        sleep(Duration::from_millis(5)).await;
        tasks.push(arrive(n));
    }
    for task in tasks {
        drop(task.await.unwrap().unwrap());
    }
    let order: Vec<_> = script.sent().iter().map(|sent| sent.path[1..].parse::<usize>().unwrap()).collect();
    assert_eq!(order, Vec::from_iter(0..200));
}

#[tokio::test(start_paused = true)]
async fn c08_a_newcomer_does_not_overtake_a_woken_waiter() {
    let (busy, first) = Busy::new();
    let mut waiting = busy.call();
    assert!(futures_util::poll!(&mut waiting).is_pending());
    first.await;
    // The permit is free, the waiter woken but not polled yet.
    let mut newcomer = busy.call();
    assert!(futures_util::poll!(&mut newcomer).is_pending());
    assert_eq!(busy.script.sent().len(), 1);
    drop(waiting.await.unwrap());
    drop(newcomer.await.unwrap());
    assert_eq!(busy.script.times(), [secs(0), secs(1), secs(2)]);
}

#[tokio::test(start_paused = true)]
async fn c09_a_host_in_its_cooldown_keeps_no_other_waiting() {
    let script = Script::list([Reply::status(429).header("retry-after", "4")]);
    let gated = reactive().layer(script.clone());
    drop(gated.clone().oneshot(get(A)).await.unwrap());
    let held = tokio::spawn(gated.clone().oneshot(get(A)));
    sleep(secs(1)).await;
    let before = Instant::now();
    drop(gated.clone().oneshot(get(B)).await.unwrap());
    assert_eq!(before.elapsed(), secs(0));
    held.await.unwrap().unwrap();
    assert_eq!(script.times_of("a.example"), [secs(0), secs(4)]);
}

#[tokio::test(start_paused = true)]
async fn c10_two_services_of_one_layer_share_its_state() {
    let layer = reactive();
    let one = Script::list([Reply::status(429).header("retry-after", "30")]);
    let two = Script::always(Reply::ok());
    let (gated_one, gated_two) = (layer.layer(one.clone()), layer.clone().layer(two.clone()));
    drop(gated_one.clone().oneshot(get(A)).await.unwrap());
    let fetch = async |gated: HostGate<Script>| drop(gated.oneshot(get(A)).await.unwrap());
    tokio::join!(fetch(gated_one), fetch(gated_two));
    assert_eq!((one.times(), two.times()), (vec![secs(0), secs(30)], vec![secs(31)]));
}

// --- inner services that fail -------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn c18_a_failing_inner_service_gives_its_permit_back() {
    let layer = HostGateLayer::new();
    let script = Script::list([Reply::panic(), Reply::error("refused"), Reply::panic().after(secs(1))]);
    let gated = layer.layer(script.clone());
    let panicked = async || tokio::spawn(gated.clone().oneshot(get(A))).await.unwrap_err().is_panic();

    assert!(panicked().await, "the inner future panics");
    assert_eq!(layer.hosts().snapshot(), []);
    assert!(gated.clone().oneshot(get(A)).await.is_err());
    assert_eq!(layer.hosts().snapshot(), []);

    // While one waits.
    let waiting = async {
        sleep(Duration::from_millis(1)).await;
        drop(gated.clone().oneshot(get(A)).await.unwrap());
    };
    assert_eq!(tokio::join!(panicked(), waiting), (true, ()));
    assert_eq!(script.times().last(), Some(&secs(1)));
    assert_eq!(layer.hosts().snapshot(), []);

    script.fail_ready("closed");
    assert!(gated.clone().oneshot(get(A)).await.is_err());
    assert_eq!(layer.hosts().snapshot(), []);
    script.release();

    let inner = service_fn(|_: Request<()>| -> std::future::Ready<Result<Response<String>, Infallible>> {
        panic!("in the call itself")
    });
    assert!(tokio::spawn(layer.layer(inner).oneshot(get(A))).await.unwrap_err().is_panic());
    assert_eq!(layer.hosts().snapshot(), []);

    drop(gated.clone().oneshot(get(A)).now_or_never().expect("the host is usable").unwrap());
}

#[tokio::test(start_paused = true)]
async fn c18_the_ready_error_of_a_request_that_has_waited_gives_its_permit_back() {
    let layer = HostGateLayer::new();
    let script = Script::always(Reply::ok().after(secs(1)));
    let gated = layer.layer(script.clone());
    let first = tokio::spawn(gated.clone().oneshot(get(A)));
    sleep(Duration::from_millis(1)).await;
    let second = tokio::spawn(gated.clone().oneshot(get(A)));
    sleep(Duration::from_millis(1)).await;
    script.fail_ready("closed");
    assert!(first.await.unwrap().is_ok());
    assert_eq!(second.await.unwrap().unwrap_err().to_string(), "closed");
    assert_eq!(layer.hosts().snapshot(), []);
}

// SPEC 3.8: "Panics in the inner service or a callback release the permit."
#[tokio::test(start_paused = true)]
async fn c18_a_panic_in_a_callback_gives_the_permit_back() {
    struct Panicking;
    impl Keying for Panicking {
        fn key(&self, uri: &Uri, headers: &HeaderMap, extensions: &Extensions) -> Option<HostKey> {
            assert_ne!(uri.path(), "/panic", "in the keying");
            By::Authority.key(uri, headers, extensions)
        }
    }
    impl Observer for Panicking {
        fn waited(&self, _: &WaitEvent<'_>) {
            panic!("in the observer");
        }
    }
    async fn panics(layer: &HostGateLayer, uri: &str) {
        let gated = layer.layer(Script::always(Reply::ok()));
        assert!(tokio::spawn(gated.oneshot(get(uri))).await.unwrap_err().is_panic(), "{uri}");
        assert!(layer.hosts().snapshot().iter().all(|host| (host.in_flight, host.queued) == (0, 0)));
    }

    panics(&HostGateLayer::new().keying(Panicking), "http://a.example/panic").await;
    let verdict = |_: StatusCode, _: &HeaderMap, _: &Extensions| -> Outcome { panic!("in the verdict") };
    panics(&HostGateLayer::new().verdict(verdict), A).await;
    panics(&HostGateLayer::new().final_uri(|_| panic!("in the hook")), A).await;

    // At the end of a wait: with a permit just taken, and on the way out without one.
    let layer = HostGateLayer::new().observer(Panicking);
    layer.hosts().penalize("a.example:80", secs(1));
    panics(&layer, A).await;
    layer.hosts().penalize("a.example:80", secs(60));
    let gated = layer.layer(Script::always(Reply::ok()));
    let canceled = tokio::spawn(async move {
        let mut call = gated.oneshot(get(A));
        let _ = timeout(secs(1), pin!(&mut call)).await;
        drop(call);
    });
    assert!(canceled.await.unwrap_err().is_panic());
    let host = layer.hosts().get("a.example:80").unwrap();
    assert_eq!((host.in_flight, host.queued), (0, 0));
}

// --- the end ------------------------------------------------------------------------------------------------------

#[test]
fn c19_waiters_end_with_their_runtime() {
    let layer = HostGateLayer::new();
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let gated = layer.layer(Script::always(Reply::hang()));
        for _ in 0..6 {
            tokio::spawn(gated.clone().oneshot(get(A)));
        }
        sleep(secs(1)).await;
    });
    // Every clone of the service is in one of the six tasks now.
    let host = layer.hosts().get("a.example:80").unwrap();
    assert_eq!((host.in_flight, host.queued), (1, 5));
    drop(runtime);
    assert_eq!(layer.hosts().snapshot(), []);
}

#[tokio::test(start_paused = true)]
async fn c19_a_task_is_all_there_is_to_a_waiter() {
    let gated = HostGateLayer::new().layer(Script::always(Reply::hang()));
    let tasks: Vec<_> = (0..6).map(|_| tokio::spawn(gated.clone().oneshot(get(A)))).collect();
    drop(gated);
    sleep(secs(1)).await;
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 6, "the gate runs none of its own");
    for task in tasks {
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn c19_a_reentrant_call_is_shed_and_does_not_hang() {
    type Outer = BoxCloneSyncService<Request<()>, Response<ResponseBody<String>>, BoxError>;
    let outer = Arc::new(OnceLock::<Mutex<Outer>>::new());
    let inner = service_fn({
        let outer = Arc::clone(&outer);
        move |request: Request<()>| {
            let outer = outer.get().unwrap().lock().unwrap().clone();
            async move {
                if request.uri().path() == "/outer" {
                    outer.oneshot(get("http://a.example/inner")).await?;
                }
                Ok::<_, BoxError>(Response::new(String::new()))
            }
        }
    });
    let gated = HostGateLayer::new().max_wait(secs(5)).layer(inner);
    outer.set(Mutex::new(BoxCloneSyncService::new(gated.clone()))).unwrap();

    let before = Instant::now();
    let error = gated.oneshot(get("http://a.example/outer")).await.unwrap_err();
    assert_eq!(before.elapsed(), secs(5));
    assert_eq!(RateLimited::find(&*error).unwrap().reason(), Reason::InFlight);
}
