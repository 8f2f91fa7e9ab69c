//! Seeing and steering a gate: the O cases, `Hosts`, run-time limits, permits for code that is no tower service.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::pin::pin;
use std::time::Duration;

use futures_util::FutureExt;
use http::{HeaderMap, StatusCode, Uri};
use support::reactive;
use support::script::{Reply, Script, get};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt};
use tower_host_gate::{HostGateLayer, HostSnapshot, Hosts, Limits, Outcome, RateLimited, Reason};

const URI: &str = "http://example.com/";
const HOST: &str = "example.com:80";
const TICK: Duration = Duration::from_millis(1);

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn uri() -> Uri {
    Uri::from_static(URI)
}

/// Sends in a task of its own; gives the response back with its body dropped.
fn fetch(layer: &HostGateLayer, script: &Script) -> JoinHandle<Result<StatusCode, RateLimited>> {
    let call = layer.layer(script.clone()).oneshot(get(URI));
    tokio::spawn(async {
        match call.await {
            Ok(response) => Ok(response.status()),
            Err(error) => Err(*error.downcast().unwrap()),
        }
    })
}

fn state(hosts: &Hosts) -> HostSnapshot {
    hosts.get(HOST).expect("there is something to say of the host")
}

// --- looking ------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn o02_a_snapshot_says_who_waits_and_why() {
    let script = Script::list([Reply::status(503).header("retry-after", "100")]);
    let layer = reactive();
    assert_eq!(layer.hosts().get(HOST), None);
    fetch(&layer, &script).await.unwrap().unwrap();
    sleep(secs(10)).await;
    let waiting = [fetch(&layer, &script), fetch(&layer, &script)];
    sleep(TICK).await;

    let seen = state(&layer.hosts());
    assert_eq!(seen.host, HOST);
    assert_eq!((seen.in_flight, seen.queued), (0, 2));
    assert_eq!(seen.cooldown, secs(50) - TICK, "capped at max_cooldown");
    assert_eq!((seen.next_send, seen.reason), (secs(50) - TICK, Some(Reason::Cooldown)));
    assert_eq!(seen.warm, secs(170) - TICK, "120 s after the end of the cooldown");
    assert_eq!((seen.gap, seen.streak), (Duration::ZERO, 1));
    assert_eq!((seen.last_hint, seen.last_status), (secs(100), Some(StatusCode::SERVICE_UNAVAILABLE)));
    assert_eq!(layer.hosts().snapshot(), [seen]);

    // The cooldown is over, and the second waits for the spacing.
    let [first, second] = waiting;
    first.await.unwrap().unwrap();
    let seen = state(&layer.hosts());
    assert_eq!((seen.cooldown, seen.next_send, seen.reason), (secs(0), secs(1), Some(Reason::Spacing)));
    assert_eq!((seen.queued, seen.streak), (1, 0));
    second.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn o02_a_snapshot_counts_requests_whose_body_is_still_being_read() {
    let script = Script::always(Reply::ok().open_for_ever());
    let layer = HostGateLayer::new();
    let response = layer.layer(script).oneshot(get(URI)).await.unwrap();
    let seen = state(&layer.hosts());
    assert_eq!((seen.in_flight, seen.queued, seen.reason), (1, 0, Some(Reason::InFlight)));
    assert_eq!((seen.cooldown, seen.next_send, seen.warm), (secs(0), secs(0), secs(0)));
    drop(response);
    assert_eq!(layer.hosts().get(HOST), None);
}

#[tokio::test(start_paused = true)]
async fn of_several_ports_under_one_name_get_gives_the_one_held_longest() {
    let hosts = HostGateLayer::new().hosts();
    hosts.penalize("example.com:8080", secs(30));
    hosts.penalize("example.com:8081", secs(40));
    hosts.penalize("www.example.com:80", secs(50));
    assert_eq!(hosts.get("example.com").unwrap().host, "example.com:8081");
    assert_eq!(hosts.get("example.com:8080").unwrap().cooldown, secs(30));
    assert_eq!(hosts.get("example.com:80"), None);
    assert_eq!(hosts.get("not a host"), None);
    assert_eq!(hosts.snapshot().len(), 3);
}

#[cfg(feature = "serde")]
#[tokio::test(start_paused = true)]
async fn a_snapshot_can_be_serialised() {
    let script = Script::list([Reply::status(429).header("retry-after", "30")]);
    let layer = reactive();
    fetch(&layer, &script).await.unwrap().unwrap();
    let json = serde_json::to_value(layer.hosts().snapshot()).unwrap();
    assert_eq!(json[0]["host"], HOST);
    assert_eq!(json[0]["last_status"], 429);
    assert_eq!(json[0]["cooldown"]["secs"], 30);
}

// --- penalize and clear -------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn penalize_only_extends_and_zero_does_nothing() {
    let hosts = reactive().hosts();
    hosts.penalize(HOST, Duration::ZERO);
    assert_eq!(hosts.snapshot(), []);
    for (penalty, held) in [(30, 30), (5, 30), (40, 40), (0, 40), (u64::MAX, 60)] {
        hosts.penalize(HOST, secs(penalty));
        assert_eq!(state(&hosts).cooldown, secs(held), "after {penalty} s");
    }
    assert_eq!((state(&hosts).warm, state(&hosts).streak), (secs(180), 0), "leaves the host warm, counts nothing");
}

#[tokio::test(start_paused = true)]
async fn penalize_by_name_means_its_default_ports_and_those_known() {
    let script = Script::always(Reply::ok().open_for_ever());
    let layer = HostGateLayer::new();
    let _open = layer.layer(script).oneshot(get("http://example.com:8080/")).await.unwrap();
    layer.hosts().penalize("Example.com", secs(30));
    for port in [80, 443, 8080] {
        let seen = layer.hosts().get(&format!("example.com:{port}")).unwrap();
        assert_eq!(seen.cooldown, secs(30), "port {port}");
    }
    assert_eq!(layer.hosts().get("example.com:8081"), None);
}

#[tokio::test(start_paused = true)]
async fn penalize_holds_those_who_wait_already() {
    let script = Script::always(Reply::ok());
    let layer = HostGateLayer::new();
    layer.hosts().penalize(HOST, secs(10));
    let waiting = fetch(&layer, &script);
    sleep(secs(5)).await;
    layer.hosts().penalize(HOST, secs(20));
    waiting.await.unwrap().unwrap();
    assert_eq!(script.times(), [secs(25)]);
}

#[tokio::test(start_paused = true)]
async fn penalize_past_their_budget_sheds_waiters_at_once() {
    let script = Script::always(Reply::ok());
    let layer = HostGateLayer::new().max_wait(secs(20));
    layer.hosts().penalize(HOST, secs(10));
    let waiting = fetch(&layer, &script);
    sleep(secs(5)).await;
    layer.hosts().penalize(HOST, secs(30));
    let before = Instant::now();
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!(before.elapsed(), secs(0));
    assert_eq!((error.reason(), error.retry_after()), (Reason::Cooldown, secs(30)));
    assert!(script.sent().is_empty());
}

#[tokio::test(start_paused = true)]
async fn clear_lets_the_waiters_go_and_forgets_the_host() {
    let script = Script::list([Reply::status(429).header("retry-after", "60")]);
    let layer = reactive().max_wait(secs(120));
    fetch(&layer, &script).await.unwrap().unwrap();
    let waiting = [fetch(&layer, &script), fetch(&layer, &script)];
    sleep(secs(5)).await;
    layer.hosts().clear(HOST);
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    assert_eq!(script.times(), [secs(0), secs(5), secs(5)], "not even spaced");
    assert_eq!(layer.hosts().snapshot(), []);
}

#[tokio::test(start_paused = true)]
async fn clear_by_name_means_all_ports_and_leaves_other_hosts_alone() {
    let hosts = HostGateLayer::new().hosts();
    for host in ["example.com:80", "example.com:8080", "www.example.com:80"] {
        hosts.penalize(host, secs(30));
    }
    hosts.clear("example.com");
    let left: Vec<_> = hosts.snapshot().into_iter().map(|seen| seen.host.to_string()).collect();
    assert_eq!(left, ["www.example.com:80"]);
    hosts.clear("never seen");
    hosts.clear("never-seen.example");
}

#[tokio::test(start_paused = true)]
async fn clear_takes_no_permit_away() {
    let script = Script::always(Reply::ok().after(secs(10)));
    let layer = HostGateLayer::new();
    let first = fetch(&layer, &script);
    sleep(secs(1)).await;
    layer.hosts().penalize(HOST, secs(60));
    let second = fetch(&layer, &script);
    layer.hosts().clear(HOST);
    assert_eq!(state(&layer.hosts()).in_flight, 1);
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(script.times(), [secs(0), secs(10)]);
}

// --- limits at run time -------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn o03_raising_the_concurrency_lets_waiters_go_at_once() {
    let script = Script::always(Reply::ok().after(secs(10)));
    let layer = HostGateLayer::new();
    let tasks: Vec<_> = (0..6).map(|_| fetch(&layer, &script)).collect();
    // Not at a full second, at which a waiter looks after unread bodies anyway.
    sleep(Duration::from_millis(1500)).await;
    assert_eq!((state(&layer.hosts()).in_flight, state(&layer.hosts()).queued), (1, 5));
    layer.hosts().set_limits(HOST, Limits::default().concurrency(3));
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(script.times(), [0, 1500, 1500, 10_000, 11_500, 11_500].map(Duration::from_millis));
    assert_eq!(layer.hosts().snapshot(), []);
}

#[tokio::test(start_paused = true)]
async fn o03_lowering_the_concurrency_takes_nothing_away_and_holds_from_then_on() {
    let script = Script::always(Reply::ok().after(secs(10)));
    let layer = HostGateLayer::new().concurrency(3);
    let tasks: Vec<_> = (0..6).map(|_| fetch(&layer, &script)).collect();
    sleep(secs(1)).await;
    layer.hosts().set_limits(HOST, Limits::default().concurrency(1));
    assert_eq!((state(&layer.hosts()).in_flight, state(&layer.hosts()).queued), (3, 3));
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(script.times(), [0, 0, 0, 10, 20, 30].map(secs));
    assert_eq!(layer.hosts().snapshot(), []);
}

#[tokio::test(start_paused = true)]
async fn o03_unset_limits_are_the_layers_again() {
    let script = Script::always(Reply::ok().after(secs(10)));
    let layer = HostGateLayer::new().concurrency(4).per_host("example.com", Limits::default().concurrency(1));
    let tasks: Vec<_> = (0..4).map(|_| fetch(&layer, &script)).collect();
    sleep(secs(1)).await;
    assert_eq!(script.open(), 1);
    layer.hosts().set_limits("example.com", Limits::default());
    sleep(TICK).await;
    assert_eq!(script.open(), 4);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn o03_limits_by_name_reach_every_port_and_host_port_wins() {
    let script = Script::always(Reply::ok().after(secs(10)));
    let layer = HostGateLayer::new();
    layer.hosts().set_limits(HOST, Limits::default().concurrency(2));
    layer.hosts().set_limits("example.com", Limits::default().concurrency(5));
    let tasks: Vec<_> = (0..4).map(|_| fetch(&layer, &script)).collect();
    sleep(TICK).await;
    assert_eq!(script.open(), 2);
    layer.hosts().set_limits(HOST, Limits::default());
    sleep(TICK).await;
    assert_eq!(script.open(), 4, "the name's limit is what is left");
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn o03_a_zero_concurrency_is_one() {
    let script = Script::always(Reply::ok());
    let layer = HostGateLayer::new().concurrency(0);
    layer.hosts().set_limits(HOST, Limits::default().concurrency(0));
    fetch(&layer, &script).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn o03_max_wait_and_spacing_can_be_changed_at_run_time() {
    let script = Script::always(Reply::ok());
    let layer = reactive();
    layer.hosts().penalize(HOST, secs(10));
    layer.hosts().set_limits(HOST, Limits::default().max_wait(secs(5)));
    assert_eq!(fetch(&layer, &script).await.unwrap().unwrap_err().reason(), Reason::Cooldown);
    layer.hosts().set_limits(HOST, Limits::default().spacing(secs(7)));
    let tasks = [fetch(&layer, &script), fetch(&layer, &script)];
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(script.times(), [secs(10), secs(17)]);
}

// --- permits without a service ------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn acquire_takes_its_turn_among_requests_and_gives_the_permit_back() {
    let script = Script::always(Reply::ok().after(secs(2)));
    let layer = HostGateLayer::new();
    let first = fetch(&layer, &script);
    sleep(TICK).await;
    let permit = layer.hosts().acquire(&uri(), secs(60)).await.unwrap();
    assert_eq!(permit.host().unwrap().as_str(), HOST);
    first.await.unwrap().unwrap();
    let behind = fetch(&layer, &script);
    sleep(secs(10)).await;
    assert_eq!((state(&layer.hosts()).in_flight, state(&layer.hosts()).queued), (1, 1));
    drop(permit);
    behind.await.unwrap().unwrap();
    assert_eq!(script.times(), [secs(0), secs(12)]);
}

#[tokio::test(start_paused = true)]
async fn acquire_waits_for_its_budget_and_no_longer() {
    let hosts = HostGateLayer::new().hosts();
    let held = hosts.try_acquire(&uri()).unwrap();
    let before = Instant::now();
    let error = hosts.acquire(&uri(), secs(5)).await.unwrap_err();
    assert_eq!((error.reason(), before.elapsed()), (Reason::InFlight, secs(5)));
    drop(held);

    hosts.penalize(HOST, secs(10));
    let error = hosts.acquire(&uri(), secs(5)).now_or_never().expect("refused at once").unwrap_err();
    assert_eq!((error.reason(), error.retry_after()), (Reason::Cooldown, secs(10)));
    let before = Instant::now();
    drop(hosts.acquire(&uri(), secs(10)).await.unwrap());
    assert_eq!(before.elapsed(), secs(10));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_acquire_leaves_nothing_behind() {
    let hosts = HostGateLayer::new().hosts();
    let held = hosts.try_acquire(&uri()).unwrap();
    {
        let uri = uri();
        let mut acquire = pin!(hosts.acquire(&uri, secs(60)));
        assert!(futures_util::poll!(&mut acquire).is_pending());
        assert_eq!(state(&hosts).queued, 1);
    }
    assert_eq!(state(&hosts).queued, 0);
    drop(held);
    assert_eq!(hosts.snapshot(), []);
}

#[tokio::test(start_paused = true)]
async fn try_acquire_never_waits() {
    let hosts = reactive().hosts();
    let held = hosts.try_acquire(&uri()).unwrap();
    assert_eq!(hosts.try_acquire(&uri()).unwrap_err().reason(), Reason::InFlight);
    drop(held);
    hosts.penalize(HOST, secs(10));
    let error = hosts.try_acquire(&uri()).unwrap_err();
    assert_eq!((error.reason(), error.retry_after()), (Reason::Cooldown, secs(10)));
    sleep(secs(10)).await;
    drop(hosts.try_acquire(&uri()).unwrap());
    let error = hosts.try_acquire(&uri()).unwrap_err();
    assert_eq!((error.reason(), error.retry_after()), (Reason::Spacing, secs(1)));
    assert_eq!(state(&hosts).queued, 0);
}

#[tokio::test(start_paused = true)]
async fn settle_teaches_the_gate_what_a_response_would() {
    let hosts = reactive().hosts();
    let throttled = |hint: Option<u64>| Outcome::Throttled { hint: hint.map(secs), soft: false };
    let settle = |outcome| hosts.try_acquire(&uri()).unwrap().settle(outcome);

    settle(Outcome::Success);
    assert_eq!(hosts.snapshot(), []);
    settle(throttled(None));
    let seen = state(&hosts);
    assert_eq!((seen.in_flight, seen.cooldown, seen.streak), (0, secs(2), 1));
    assert_eq!(seen.last_status, Some(StatusCode::TOO_MANY_REQUESTS));
    sleep(secs(2)).await;
    settle(throttled(Some(9)));
    assert_eq!((state(&hosts).cooldown, state(&hosts).streak), (secs(9), 2));
    sleep(secs(9)).await;
    settle(Outcome::Neutral);
    assert_eq!(state(&hosts).streak, 2);
    sleep(secs(1)).await;
    settle(Outcome::Success);
    assert_eq!(state(&hosts).streak, 0);
    sleep(secs(1)).await;
    drop(hosts.try_acquire(&uri()).unwrap());
    assert_eq!(state(&hosts).streak, 0, "a permit dropped unsettled teaches nothing");
}

#[tokio::test(start_paused = true)]
async fn settle_response_judges_a_head_as_the_layer_does() {
    let hosts = reactive().hosts();
    let headers = HeaderMap::from_iter([(http::header::RETRY_AFTER, "7".parse().unwrap())]);
    hosts.try_acquire(&uri()).unwrap().settle_response(StatusCode::SERVICE_UNAVAILABLE, &headers);
    let seen = state(&hosts);
    assert_eq!((seen.cooldown, seen.last_status), (secs(7), Some(StatusCode::SERVICE_UNAVAILABLE)));

    // So a verdict of the layer's own is asked, too.
    let hosts = reactive().verdict(|_: StatusCode, _: &HeaderMap, _: &http::Extensions| Outcome::Success);
    let hosts = hosts.hosts();
    hosts.try_acquire(&uri()).unwrap().settle_response(StatusCode::SERVICE_UNAVAILABLE, &headers);
    assert_eq!(hosts.snapshot(), []);
}

#[tokio::test(start_paused = true)]
async fn a_permit_for_a_uri_without_a_host_guards_nothing() {
    let hosts = HostGateLayer::new().hosts();
    let permit = hosts.try_acquire(&Uri::from_static("/path")).unwrap();
    assert_eq!((permit.host(), hosts.snapshot().len()), (None, 0));
    permit.settle(Outcome::Throttled { hint: None, soft: false });
    assert_eq!(hosts.snapshot(), []);
}
