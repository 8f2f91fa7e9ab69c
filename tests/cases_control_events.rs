//! What the gate tells: observer events and their tracing twins (O01), labels, and what a wait is made of.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Request;
use support::log::Log;
use support::reactive;
use support::script::{Reply, Script, get};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tower::{BoxError, Layer, ServiceExt};
use tower_host_gate::observe::{Observer, ShedEvent, ThrottleEvent, WaitEvent, WaitOutcome};
use tower_host_gate::{HostGateLayer, Label, MaxWait, Reason};

const URI: &str = "http://example.com/";
const HOST: &str = "example.com:80";
const ACQUIRED: WaitOutcome = WaitOutcome::Acquired;
const CANCELED: WaitOutcome = WaitOutcome::Canceled;
const SHED: WaitOutcome = WaitOutcome::Shed;

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// An event, without what borrows.
#[derive(Clone, Debug, PartialEq)]
enum Told {
    /// Outcome, of it pacing, of it queued, in seconds.
    Waited(WaitOutcome, u64, u64),
    /// Status, hint, hold in seconds, streak, whether it is a new event.
    Throttled(u16, Option<u64>, u64, u32, bool),
    Shed(Reason),
}

/// Host, label and event.
type Event = (String, Option<&'static str>, Told);

#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Event>>>);

impl Recorder {
    fn push(&self, host: &str, label: Option<&'static str>, told: Told) {
        self.0.lock().unwrap().push((host.to_owned(), label, told));
    }

    /// The events so far, and forgets them. All of them have to be about the one host.
    fn take(&self) -> Vec<Told> {
        let events = std::mem::take(&mut *self.0.lock().unwrap());
        assert!(events.iter().all(|(host, ..)| host == HOST));
        events.into_iter().map(|(_, _, told)| told).collect()
    }
}

impl Observer for Recorder {
    fn waited(&self, event: &WaitEvent<'_>) {
        assert_eq!(event.waited, event.pacing + event.queued, "the parts make the whole");
        let told = Told::Waited(event.outcome, event.pacing.as_secs(), event.queued.as_secs());
        self.push(event.host.as_str(), event.label, told);
    }

    fn throttled(&self, event: &ThrottleEvent<'_>) {
        let hint = event.hint.map(|hint| hint.as_secs());
        let (status, hold) = (event.status.as_u16(), event.hold.as_secs());
        let told = Told::Throttled(status, hint, hold, event.streak, event.new_event);
        self.push(event.host.as_str(), event.label, told);
    }

    fn shed(&self, event: &ShedEvent<'_>) {
        self.push(event.error.host(), event.label, Told::Shed(event.error.reason()));
    }
}

fn observed(layer: HostGateLayer) -> (HostGateLayer, Recorder) {
    let recorder = Recorder::default();
    (layer.observer(recorder.clone()), recorder)
}

/// Sends in a task of its own, which drops the response.
fn send(layer: &HostGateLayer, script: &Script, request: Request<()>) -> JoinHandle<Result<(), BoxError>> {
    let call = layer.layer(script.clone()).oneshot(request);
    tokio::spawn(async { call.await.map(drop) })
}

fn fetch(layer: &HostGateLayer, script: &Script) -> JoinHandle<Result<(), BoxError>> {
    send(layer, script, get(URI))
}

fn with<T: Clone + Send + Sync + 'static>(extension: T) -> Request<()> {
    let mut request = get(URI);
    request.extensions_mut().insert(extension);
    request
}

// --- once each ----------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn o01_a_request_that_goes_at_once_is_no_event() {
    let (layer, recorder) = observed(HostGateLayer::new());
    fetch(&layer, &Script::always(Reply::ok())).await.unwrap().unwrap();
    assert_eq!(recorder.take(), []);
}

#[tokio::test(start_paused = true)]
async fn o01_a_wait_that_ends_with_a_permit_is_told_once() {
    let (layer, recorder) = observed(HostGateLayer::new());
    layer.hosts().penalize(HOST, secs(3));
    fetch(&layer, &Script::always(Reply::ok())).await.unwrap().unwrap();
    assert_eq!(recorder.take(), [Told::Waited(ACQUIRED, 3, 0)]);
}

#[tokio::test(start_paused = true)]
async fn o01_a_wait_the_caller_gives_up_is_told_once() {
    let (layer, recorder) = observed(HostGateLayer::new());
    layer.hosts().penalize(HOST, secs(10));
    let waiting = fetch(&layer, &Script::always(Reply::ok()));
    sleep(secs(4)).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    assert_eq!(recorder.take(), [Told::Waited(CANCELED, 4, 0)]);
}

#[tokio::test(start_paused = true)]
async fn o01_a_request_dropped_before_it_waited_is_no_event() {
    let (layer, recorder) = observed(HostGateLayer::new());
    layer.hosts().penalize(HOST, secs(10));
    drop(layer.layer(Script::always(Reply::ok())).oneshot(get(URI)));
    assert_eq!(recorder.take(), []);
}

#[tokio::test(start_paused = true)]
async fn o01_a_shed_is_told_once_at_once_or_at_the_end_of_the_budget() {
    let (layer, recorder) = observed(HostGateLayer::new().max_wait(secs(5)));
    layer.hosts().penalize(HOST, secs(10));
    fetch(&layer, &Script::always(Reply::ok())).await.unwrap().unwrap_err();
    assert_eq!(recorder.take(), [Told::Waited(SHED, 0, 0), Told::Shed(Reason::Cooldown)]);
    layer.hosts().clear(HOST);

    let script = Script::always(Reply::hang());
    let hanging = fetch(&layer, &script);
    sleep(Duration::from_millis(1)).await;
    fetch(&layer, &script).await.unwrap().unwrap_err();
    assert_eq!(recorder.take(), [Told::Waited(SHED, 0, 5), Told::Shed(Reason::InFlight)]);
    hanging.abort();
}

#[tokio::test(start_paused = true)]
async fn o01_acquire_and_try_acquire_are_told_as_requests_are() {
    let (layer, recorder) = observed(HostGateLayer::new());
    let (hosts, uri) = (layer.hosts(), URI.parse().unwrap());
    drop(hosts.try_acquire(&uri).unwrap());
    assert_eq!(recorder.take(), []);
    hosts.penalize(HOST, secs(3));
    hosts.try_acquire(&uri).unwrap_err();
    assert_eq!(recorder.take(), [Told::Waited(SHED, 0, 0), Told::Shed(Reason::Cooldown)]);
    drop(hosts.acquire(&uri, secs(5)).await.unwrap());
    assert_eq!(recorder.take(), [Told::Waited(ACQUIRED, 3, 0)]);
}

#[tokio::test(start_paused = true)]
async fn every_refusal_is_told_and_a_burst_is_one_new_event() {
    let (layer, recorder) = observed(reactive().concurrency(2));
    let script = Script::new(|sent| match sent.n {
        0 | 1 => Reply::status(429).after(secs(1)),
        2 => Reply::status(503).header("retry-after", "100"),
        3 => Reply::status(500),
        _ => Reply::status(404),
    });
    let burst = [fetch(&layer, &script), fetch(&layer, &script)];
    for task in burst {
        task.await.unwrap().unwrap();
    }
    let throttled = |new_event| Told::Throttled(429, None, 2, 1, new_event);
    assert_eq!(recorder.take(), [throttled(true), throttled(false)]);

    for _ in 2..5 {
        fetch(&layer, &script).await.unwrap().unwrap();
    }
    assert_eq!(
        recorder.take(),
        [
            Told::Waited(ACQUIRED, 2, 0),
            Told::Throttled(503, Some(100), 60, 2, true),
            Told::Waited(ACQUIRED, 60, 0),
            Told::Waited(ACQUIRED, 1, 0),
        ]
    );
}

// --- what a wait is made of ---------------------------------------------------------------------------------------

// SPEC 3.4: "'Pays nothing' means zero pacing delay (cooldown, spacing, quota); time queued behind the concurrency cap
// is the cap's and is reported apart."
#[tokio::test(start_paused = true)]
async fn a_host_that_never_throttled_reports_no_pacing_however_long_its_queue() {
    let (layer, recorder) = observed(HostGateLayer::new());
    let script = Script::always(Reply::ok().after(secs(1)));
    let tasks: Vec<_> = (0..5).map(|_| fetch(&layer, &script)).collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(recorder.take(), [1, 2, 3, 4].map(|queued| Told::Waited(ACQUIRED, 0, queued)));
}

#[tokio::test(start_paused = true)]
async fn a_wait_is_pacing_while_a_permit_was_free_and_queued_while_none_was() {
    let (layer, recorder) = observed(reactive());
    let script = Script::new(|sent| match sent.n {
        0 => Reply::status(429).header("retry-after", "10").after(secs(5)),
        _ => Reply::ok().after(secs(4)),
    });
    let tasks: Vec<_> = (0..4).map(|_| fetch(&layer, &script)).collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    // Sent at 0, 15, 19 and 23 s: five seconds behind the first, ten of cooldown, then behind each other.
    assert_eq!(script.times(), [0, 15, 19, 23].map(secs));
    assert_eq!(
        recorder.take(),
        [
            Told::Throttled(429, Some(10), 10, 1, true),
            Told::Waited(ACQUIRED, 10, 5),
            Told::Waited(ACQUIRED, 10, 9),
            Told::Waited(ACQUIRED, 10, 13),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn spacing_is_pacing_for_everybody_in_the_queue() {
    let (layer, recorder) = observed(reactive().spacing(secs(3)));
    let script = Script::always(Reply::ok());
    layer.hosts().penalize(HOST, secs(2));
    let tasks: Vec<_> = (0..3).map(|_| fetch(&layer, &script)).collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(recorder.take(), [2, 5, 8].map(|pacing| Told::Waited(ACQUIRED, pacing, 0)));
}

#[tokio::test(start_paused = true)]
async fn one_who_comes_late_is_charged_only_for_its_own_wait() {
    let (layer, recorder) = observed(reactive().spacing(secs(3)));
    let script = Script::always(Reply::ok());
    layer.hosts().penalize(HOST, secs(10));
    let first = fetch(&layer, &script);
    sleep(secs(8)).await;
    let second = fetch(&layer, &script);
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(recorder.take(), [Told::Waited(ACQUIRED, 10, 0), Told::Waited(ACQUIRED, 5, 0)]);
}

// --- labels -------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn every_event_carries_the_label_of_its_request() {
    let (log, _guard) = Log::capture();
    let (layer, recorder) = observed(reactive());
    let script = Script::always(Reply::status(429).header("retry-after", "10"));
    send(&layer, &script, with(Label("first"))).await.unwrap().unwrap();
    let canceled = send(&layer, &script, with(Label("canceled")));
    let acquired = send(&layer, &script, with(Label("acquired")));
    sleep(secs(1)).await;
    canceled.abort();
    assert!(canceled.await.unwrap_err().is_cancelled());
    let mut hasty = with(Label("hasty"));
    hasty.extensions_mut().insert(MaxWait(secs(1)));
    send(&layer, &script, hasty).await.unwrap().unwrap_err();
    acquired.await.unwrap().unwrap();
    fetch(&layer, &script).await.unwrap().unwrap();

    let events = recorder.0.lock().unwrap().clone();
    let labels: Vec<_> = events.iter().map(|(_, label, told)| (*label, told.clone())).collect();
    assert_eq!(
        labels,
        [
            (Some("first"), Told::Throttled(429, Some(10), 10, 1, true)),
            (Some("canceled"), Told::Waited(CANCELED, 1, 0)),
            (Some("hasty"), Told::Waited(SHED, 0, 0)),
            (Some("hasty"), Told::Shed(Reason::Cooldown)),
            (Some("acquired"), Told::Waited(ACQUIRED, 10, 0)),
            (Some("acquired"), Told::Throttled(429, Some(10), 10, 2, true)),
            (None, Told::Waited(ACQUIRED, 10, 0)),
            (None, Told::Throttled(429, Some(10), 10, 3, true)),
        ]
    );
    let text = log.text();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), events.len(), "{text}");
    for (line, (_, label, told)) in lines.iter().zip(&events) {
        let name = match told {
            Told::Waited(..) => "DEBUG tower_host_gate::observe: waited",
            Told::Throttled(..) => "INFO tower_host_gate::observe: throttled",
            Told::Shed(..) => "INFO tower_host_gate::observe: shed",
        };
        let label = label.map_or(String::new(), |label| format!("label=\"{label}\""));
        for part in [name, &label, "host=\"example.com:80\""] {
            assert!(line.contains(part), "{part} in {line}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_label_stays_with_the_request_and_reaches_the_inner_service() {
    let layer = HostGateLayer::new();
    let gated = layer.layer(tower::service_fn(async |request: Request<()>| {
        assert_eq!(request.extensions().get(), Some(&Label("feed")));
        Ok::<_, std::convert::Infallible>(http::Response::new(String::new()))
    }));
    gated.oneshot(with(Label("feed"))).await.unwrap();
}
