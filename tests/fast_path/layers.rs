//! A layer that goes while its requests are in flight, and layers side by side.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use support::script::ScriptBody;
use tokio::time::Instant;
use tower_host_gate::observe::{Observer, ThrottleEvent};
use tower_host_gate::{ResponseFuture, Throttled};

use super::*;

/// Says what a layer still holds, by being part of it.
#[derive(Clone, Default)]
struct Watch {
    refusals: Arc<AtomicUsize>,
    is_gone: Arc<AtomicBool>,
}

impl Watch {
    /// For a layer, once.
    fn observer(&self) -> impl Observer {
        Watched(self.clone())
    }

    fn refusals(&self) -> usize {
        self.refusals.load(Ordering::SeqCst)
    }

    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::SeqCst)
    }
}

struct Watched(Watch);

impl Observer for Watched {
    fn throttled(&self, event: &ThrottleEvent<'_>) {
        assert_eq!(event.host.as_str(), "example.com:443");
        self.0.refusals.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.is_gone.store(true, Ordering::SeqCst);
    }
}

fn refusal() -> Reply {
    Reply::status(429).header("retry-after", "10")
}

/// What is left of a layer is the one request that was called of it.
fn only_a_request_of(layer: HostGateLayer, script: &Script) -> ResponseFuture<Script, ()> {
    layer.layer(script.clone()).call(get(URI))
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_heard_after_its_layer_was_dropped() {
    let watch = Watch::default();
    let call =
        only_a_request_of(HostGateLayer::new().observer(watch.observer()), &Script::always(refusal().after(secs(1))));
    assert!(!watch.is_gone());
    let response = call.await.unwrap();
    assert_eq!(response.extensions().get::<Throttled>().unwrap().retry_after, secs(10));
    assert_eq!(watch.refusals(), 1);
    assert!(watch.is_gone(), "a refusal gives its permit back at the head");
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "");
}

#[tokio::test(start_paused = true)]
async fn what_a_layer_holds_is_freed_with_its_last_response() {
    let watch = Watch::default();
    let layer = HostGateLayer::new().concurrency(3).observer(watch.observer());
    let script = Script::always(Reply::ok().body("the feed"));
    let client = layer.layer(script);
    let other_host = client.clone().oneshot(get("https://other.example/")).await.unwrap();
    let [read, dropped] =
        [client.clone().oneshot(get(URI)).await.unwrap(), client.clone().oneshot(get(URI)).await.unwrap()];
    let unanswered = client.clone().call(get(URI));
    let hosts = layer.hosts();
    drop((client, layer));
    drop((unanswered, dropped));
    assert_eq!(hosts.get("example.com").unwrap().in_flight, 1, "a handle on the hosts is a handle on the gate");
    drop(hosts);
    assert!(!watch.is_gone());
    assert_eq!(read.into_body().collect().await.unwrap().to_bytes(), "the feed");
    assert!(!watch.is_gone());
    drop(other_host);
    assert!(watch.is_gone());
}

#[tokio::test(start_paused = true)]
async fn a_layer_that_was_never_asked_is_freed_at_once() {
    let watch = Watch::default();
    let layer = HostGateLayer::new().observer(watch.observer());
    assert_eq!(layer.hosts().snapshot(), []);
    drop(layer);
    assert!(watch.is_gone());
}

#[test]
fn a_layer_goes_with_its_last_response_whichever_thread_that_ends_on() {
    for _ in 0..300 {
        let watch = Watch::default();
        let layer = HostGateLayer::new().concurrency(4).observer(watch.observer());
        let mut client = layer.layer(AtOnce);
        let hosts = [URI, "https://other.example/", "https://third.example/"];
        let held = hosts.map(|uri| [(); 3].map(|()| send(&mut client, uri).unwrap()));
        let start = Barrier::new(hosts.len() + 1);
        thread::scope(|scope| {
            for held in held {
                scope.spawn(|| {
                    start.wait();
                    drop(held);
                });
            }
            start.wait();
            drop((client, layer));
        });
        assert!(watch.is_gone());
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_when_its_layer_is_dropped_goes_in_turn() {
    let watch = Watch::default();
    let layer = HostGateLayer::new().observer(watch.observer());
    let script = Script::always(Reply::ok().body("the feed").after(secs(1)));
    let calls: Vec<_> = (0..3).map(|_| tokio::spawn(layer.layer(script.clone()).oneshot(get(URI)))).collect();
    tokio::task::yield_now().await;
    assert_eq!(layer.hosts().get("example.com").unwrap().queued, 2);
    drop(layer);
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!((script.times(), script.peak()), (vec![secs(0), secs(1), secs(2)], 1));
    assert!(watch.is_gone());
}

/// "A send must never go out after a hold it has not waited for."
#[tokio::test(start_paused = true)]
async fn a_request_getting_ready_when_its_layer_is_dropped_is_held_back_by_a_refusal() {
    let layer = HostGateLayer::new().concurrency(2);
    let script = Script::list([refusal().after(secs(1))]);
    let first = layer.layer(script.clone()).call(get(URI));
    script.hold();
    let mut second = spawn(layer.layer(script.clone()).call(get(URI)));
    assert_pending!(second.poll());
    drop(layer);
    assert_eq!(first.await.unwrap().status(), 429);
    let refused = Instant::now();
    script.release();
    second.await.unwrap();
    assert_eq!(refused.elapsed(), secs(10));
}

#[tokio::test(start_paused = true)]
async fn requests_in_flight_when_their_layer_is_dropped_are_counted_for_one_that_comes_to_wait() {
    let layer = HostGateLayer::new();
    let mut client = layer.layer(AtOnce);
    let held = send(&mut client, URI).unwrap();
    // A future that nobody polls is in nobody's way: another one goes first.
    let mut waiting = spawn(client.call(get(URI)));
    drop(held);
    let held = send(&mut client, URI).unwrap();
    drop((client, layer));
    assert_pending!(waiting.poll(), "two at a time");
    drop(held);
    assert!(waiting.is_woken());
    assert_ready_ok!(waiting.poll());
}

// --- side by side -----------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn layers_know_nothing_of_each_other_however_many_there_are() {
    let layers: Vec<_> = (0..50).map(|_| HostGateLayer::new()).collect();
    let mut clients: Vec<_> = layers.iter().map(|layer| layer.layer(AtOnce)).collect();
    let held: Vec<_> = clients.iter_mut().map(|client| send(client, URI).unwrap()).collect();
    layers[7].hosts().penalize("example.com:443", secs(10));
    for (nth, layer) in layers.iter().enumerate() {
        let host = layer.hosts().get("example.com").unwrap();
        assert_eq!((host.in_flight, host.cooldown), (1, if nth == 7 { secs(10) } else { secs(0) }));
    }
    drop(held);
    for (nth, client) in clients.iter_mut().enumerate() {
        assert_eq!(send(client, URI).is_some(), nth != 7);
    }
}

/// What a layer leaves behind may be used again, but not before its last response is gone.
#[tokio::test(start_paused = true)]
async fn a_response_of_a_layer_that_was_dropped_is_nothing_to_the_next_layer() {
    for _ in 0..100 {
        let old = HostGateLayer::new();
        let mut client = old.layer(AtOnce);
        let (held_of_old, other_of_old) =
            (send(&mut client, URI).unwrap(), send(&mut client, "https://other.example/"));
        drop((old, client));

        let new = HostGateLayer::new();
        let mut client = new.layer(AtOnce);
        assert_eq!(in_flight(&new), []);
        let held = send(&mut client, URI).unwrap();
        drop(held_of_old);
        assert_eq!(in_flight(&new), [("example.com:443".to_owned(), 1)]);
        assert!(send(&mut client, URI).is_none());
        drop(other_of_old);
        assert!(send(&mut client, URI).is_none());
        drop(held);
        assert_eq!(in_flight(&new), []);
    }
}

/// It is anybody's code that a layer drops, and that code may drop another layer.
#[tokio::test(start_paused = true)]
async fn a_layer_may_own_another_one() {
    struct Owner(#[expect(dead_code, reason = "owned, and dropped")] Response<ResponseBody<ScriptBody>>);
    impl Observer for Owner {}

    let watch = Watch::default();
    let script = Script::always(Reply::ok().body("the feed"));
    let inner = only_a_request_of(HostGateLayer::new().observer(watch.observer()), &script).await.unwrap();
    let outer = only_a_request_of(HostGateLayer::new().observer(Owner(inner)), &script).await.unwrap();
    assert!(!watch.is_gone());
    drop(outer);
    assert!(watch.is_gone());
}
