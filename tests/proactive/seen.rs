//! What is seen of the limits from outside: events, snapshots, and permits for code that is no tower service.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Uri;
use tokio::time::{sleep, timeout};
use tower_host_gate::observe::{Observer, ShedEvent, WaitEvent, WaitOutcome};
use tower_host_gate::{HostGateLayer, Label, MaxWait, Outcome, Reason};

use super::support::script::{Reply, Script, get};
use super::{
    HOST, PACINGS, URI, burst, client, fetch, millis, patient, poke, secs, send, settle, spawn, state, within,
};

fn uri() -> Uri {
    Uri::from_static(URI)
}

// --- events -----------------------------------------------------------------------------------------------------------

/// An outcome, of the wait pacing and queue in seconds, and the label.
type Told = (&'static str, u64, u64, Option<&'static str>);

#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Told>>>);

impl Recorder {
    fn told(&self) -> Vec<Told> {
        self.0.lock().unwrap().clone()
    }
}

impl Observer for Recorder {
    fn waited(&self, event: &WaitEvent<'_>) {
        assert_eq!((event.host.as_str(), event.waited), (HOST, event.pacing + event.queued));
        let told = (event.outcome.as_str(), event.pacing.as_secs(), event.queued.as_secs(), event.label);
        self.0.lock().unwrap().push(told);
    }

    fn shed(&self, event: &ShedEvent<'_>) {
        self.0.lock().unwrap().push((event.error.reason().as_str(), 0, 0, event.label));
    }
}

fn labelled(label: &'static str, budget: Duration) -> http::Request<()> {
    let mut request = within(budget);
    request.extensions_mut().insert(Label(label));
    request
}

#[tokio::test(start_paused = true)]
async fn each_wait_for_a_limit_is_told_once_with_its_outcome_and_label() {
    for pacing in PACINGS {
        for (layer, reason) in
            [(patient().min_delay(secs(10)), Reason::Spacing), (patient().quota(1, secs(10)), Reason::Quota)]
        {
            let recorder = Recorder::default();
            let gated = client(&layer.pacing(pacing).observer(recorder.clone()), &Script::always(Reply::ok()));
            send(&gated, labelled("at once", secs(0))).await.unwrap();
            assert_eq!(recorder.told(), [], "a request that goes at once has not waited");

            let acquired = tokio::spawn({
                let gated = gated.clone();
                async move { send(&gated, labelled("nightly", secs(60))).await }
            });
            settle().await;
            send(&gated, labelled("impatient", secs(9))).await.unwrap_err();
            timeout(secs(3), send(&gated, labelled("fickle", secs(60)))).await.unwrap_err();
            acquired.await.unwrap().unwrap();

            let expected = [
                (WaitOutcome::Shed.as_str(), 0, 0, Some("impatient")),
                (reason.as_str(), 0, 0, Some("impatient")),
                (WaitOutcome::Canceled.as_str(), 3, 0, Some("fickle")),
                (WaitOutcome::Acquired.as_str(), 10, 0, Some("nightly")),
            ];
            assert_eq!(recorder.told(), expected);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_behind_a_request_in_flight_and_then_for_the_delay_is_told_in_its_parts() {
    let recorder = Recorder::default();
    let layer = patient().min_delay(secs(5)).observer(recorder.clone());
    burst(&client(&layer, &Script::always(Reply::ok().after(secs(3)))), 3).await;
    assert_eq!(recorder.told(), [("acquired", 5, 3, None), ("acquired", 10, 6, None)]);
}

// --- snapshots --------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_snapshot_says_which_limit_is_in_the_way_and_for_how_long() {
    for pacing in PACINGS {
        let layer = patient().pacing(pacing).min_delay(secs(5)).quota(2, secs(30));
        let gated = client(&layer, &Script::always(Reply::ok().after(secs(1))));
        assert_eq!(state(&layer), None);

        let first = spawn(&gated);
        settle().await;
        let seen = state(&layer).unwrap();
        assert_eq!((seen.in_flight, seen.queued, seen.reason), (1, 0, Some(Reason::InFlight)));
        first.await.unwrap().unwrap();
        let seen = state(&layer).unwrap();
        assert_eq!((seen.in_flight, seen.next_send, seen.reason), (0, secs(5), Some(Reason::Spacing)));

        fetch(&gated).await.unwrap();
        let waiting = [spawn(&gated), spawn(&gated)];
        settle().await;
        let seen = state(&layer).unwrap();
        assert_eq!((seen.queued, seen.next_send, seen.reason), (2, secs(23), Some(Reason::Quota)));
        assert_eq!((seen.cooldown, seen.warm, seen.gap, seen.streak), (secs(0), secs(0), secs(0), 0));
        assert_eq!(layer.hosts().snapshot(), [seen]);

        for task in waiting {
            task.await.unwrap().unwrap();
        }
        layer.hosts().penalize(HOST, secs(3));
        assert_eq!(state(&layer).unwrap().reason, Some(Reason::Cooldown));
    }
}

#[tokio::test(start_paused = true)]
async fn a_window_with_room_keeps_nobody() {
    let layer = patient().quota(2, secs(30));
    fetch(&client(&layer, &Script::always(Reply::ok()))).await.unwrap();
    let seen = state(&layer).expect("a send that counts is remembered");
    assert_eq!((seen.next_send, seen.reason), (secs(0), None));
}

#[tokio::test(start_paused = true)]
async fn what_the_dice_have_added_is_told_as_part_of_the_wait() {
    for pacing in PACINGS {
        for (layer, reason) in
            [(patient().min_delay(secs(5)), Reason::Spacing), (patient().quota(1, secs(5)), Reason::Quota)]
        {
            fastrand::seed(5);
            let layer = layer.pacing(pacing).jitter(secs(86_400));
            let script = Script::always(Reply::ok());
            let gated = client(&layer, &script);
            fetch(&gated).await.unwrap();
            let waiting = spawn(&gated);
            settle().await;
            let due = state(&layer).unwrap().next_send;
            assert!(due > secs(20), "of a day, {due:?}");
            // The limit's own part of the wait is over.
            sleep(secs(10)).await;
            let seen = state(&layer).unwrap();
            assert_eq!((seen.next_send, seen.queued), (due - secs(10), 1));
            assert_ne!(seen.reason, Some(Reason::InFlight), "nothing is in flight");
            let limited = poke(&gated).await.unwrap_err();
            assert_eq!(limited.reason(), reason);
            assert!(limited.retry_after() >= seen.next_send);
            waiting.await.unwrap().unwrap();
            assert!(script.times()[1] >= due && script.times()[1] <= due + millis(1));
        }
    }
}

// --- permits of one's own ---------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn permits_and_requests_count_towards_the_same_limits() {
    for pacing in PACINGS {
        let layer = patient().pacing(pacing).concurrency(3).quota(2, secs(10));
        let hosts = layer.hosts();
        let script = Script::always(Reply::ok());
        let gated = client(&layer, &script);
        hosts.try_acquire(&uri()).unwrap().settle(Outcome::Success);
        poke(&gated).await.unwrap();

        let limited = hosts.try_acquire(&uri()).unwrap_err();
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::Quota, secs(10)));
        let limited = hosts.acquire(&uri(), secs(9)).await.unwrap_err();
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::Quota, secs(10)));

        let waiting = spawn(&gated);
        settle().await;
        drop(hosts.acquire(&uri(), secs(11)).await.unwrap());
        waiting.await.unwrap().unwrap();
        assert_eq!(poke(&gated).await.unwrap_err().retry_after(), secs(10), "both went at 10 s");
        assert_eq!(script.times(), [0, 10].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_is_not_to_be_had_books_nothing() {
    let layer = patient().min_delay(secs(5));
    let hosts = layer.hosts();
    drop(hosts.try_acquire(&uri()).unwrap());
    for _ in 0..100 {
        assert_eq!(hosts.try_acquire(&uri()).unwrap_err().retry_after(), secs(5));
        timeout(Duration::ZERO, hosts.acquire(&uri(), secs(60))).await.unwrap_err();
    }
    sleep(millis(5_000)).await;
    drop(hosts.try_acquire(&uri()).unwrap());
}

#[tokio::test(start_paused = true)]
async fn who_polls_for_permits_when_told_gets_one_each_time() {
    for pacing in PACINGS {
        let hosts = HostGateLayer::new().pacing(pacing).min_delay(secs(2)).quota(3, secs(10)).hosts();
        let mut refusals = 0;
        for _ in 0..30 {
            let permit = match hosts.try_acquire(&uri()) {
                Ok(permit) => permit,
                Err(limited) => {
                    refusals += 1;
                    sleep(limited.retry_after()).await;
                    hosts.try_acquire(&uri()).unwrap()
                }
            };
            permit.settle(Outcome::Success);
        }
        assert_eq!(refusals, 29);
    }
}

/// The limits of a host are those of its key, whoever asks.
#[tokio::test(start_paused = true)]
async fn a_permit_for_one_host_takes_nothing_from_another() {
    let layer = patient().quota(1, secs(10));
    let hosts = layer.hosts();
    drop(hosts.try_acquire(&uri()).unwrap());
    drop(hosts.try_acquire(&Uri::from_static("http://other.example/")).unwrap());
    hosts.try_acquire(&uri()).unwrap_err();
    let gated = client(&layer, &Script::always(Reply::ok()));
    let mut request = get("http://other.example/");
    request.extensions_mut().insert(MaxWait(secs(9)));
    let limited = send(&gated, request).await.unwrap_err();
    assert_eq!((limited.host(), limited.reason()), ("other.example:80", Reason::Quota));
}
