//! Memory and order with many hosts: the M cases.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::collections::{HashMap, HashSet, VecDeque};
use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use allocation_counter::measure;
use futures_util::FutureExt;
use http::{Extensions, HeaderMap, Request, Response, Uri};
use support::reactive;
use support::script::{Reply, Script, get};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_host_gate::{HostGateLayer, HostKey, Outcome, RateLimited, Reason};

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn throttled() -> Ready<Result<Response<String>, Infallible>> {
    ready(Ok(Response::builder().status(429).header("retry-after", "10").body(String::new()).unwrap()))
}

/// Room that a near-empty map may keep, however many hosts it has seen.
const NEAR_EMPTY: i64 = 256 * 1024;

/// What a gate allocates once, with its first request, is no matter of how many hosts there are.
fn has_had_a_request(layer: &HostGateLayer) {
    drop(layer.hosts().try_acquire(&Uri::from_static("http://first.example/")).unwrap());
}

// SPEC 3.8: "a million distinct hosts leave a near-empty map".
#[test]
fn m01_a_million_hosts_that_never_throttled_leave_nothing() {
    // Every request is for another host. (Parsing a million URIs would take longer than all the rest.)
    let next = AtomicU32::new(0);
    let layer = HostGateLayer::new().keying(move |_: &Uri, _: &HeaderMap, _: &Extensions| {
        Some(HostKey::new(format!("h{}.example:80", next.fetch_add(1, Ordering::Relaxed))))
    });
    let mut gated = layer.layer(service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(String::new())))));
    let mut cx = Context::from_waker(Waker::noop());
    has_had_a_request(&layer);
    let memory = measure(|| {
        for _ in 0..1_000_000 {
            let response = pin!(gated.call(Request::new(()))).poll(&mut cx);
            assert!(matches!(response, Poll::Ready(Ok(_))));
        }
    });
    assert!(memory.bytes_max < NEAR_EMPTY as u64, "{memory:?}");
    assert_eq!(layer.hosts().snapshot(), []);
}

#[test]
fn m01_hosts_that_throttled_leave_nothing_once_they_are_cold() {
    const HOSTS: usize = 20_000;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let layer = reactive();
    let gated = layer.layer(service_fn(|_: Request<()>| throttled()));
    has_had_a_request(&layer);
    let memory = measure(|| {
        runtime.block_on(async {
            for n in 0..HOSTS {
                gated.clone().oneshot(get(&format!("http://h{n}.example/"))).await.unwrap();
            }
            assert_eq!(layer.hosts().snapshot().len(), HOSTS);
            sleep(secs(10 + 120 + 1)).await;
            assert_eq!(layer.hosts().snapshot().len(), 0);
        });
    });
    assert!(memory.bytes_current < NEAR_EMPTY, "{memory:?}");
}

#[tokio::test(start_paused = true)]
async fn m01_a_host_stays_known_until_cooldown_and_warmth_are_over() {
    let layer = reactive();
    let gated = layer.layer(Script::always(Reply::status(429).header("retry-after", "60")));
    gated.oneshot(get("http://example.com/")).await.unwrap();
    sleep(secs(179)).await;
    let snapshot = layer.hosts().get("example.com:80").unwrap();
    assert_eq!((snapshot.cooldown, snapshot.warm, snapshot.streak), (secs(0), secs(1), 1));
    sleep(secs(1)).await;
    assert_eq!(layer.hosts().get("example.com:80"), None);
}

#[test]
fn m01_nothing_per_host_runs_in_the_background() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let layer = HostGateLayer::new();
    let gated = layer.layer(Script::always(Reply::status(429)));
    runtime.block_on(async {
        for n in 0..1000 {
            gated.clone().oneshot(get(&format!("http://h{n}.example/"))).await.unwrap();
        }
        assert_eq!(runtime.metrics().num_alive_tasks(), 0);
    });
}

#[test]
fn there_are_never_two_slots_for_one_key() {
    const THREADS: usize = 8;
    let layer = HostGateLayer::new();
    let busy = Arc::new(Mutex::new(HashMap::<String, usize>::new()));
    let inner = service_fn({
        let busy = Arc::clone(&busy);
        move |request: Request<()>| {
            let (busy, host) = (Arc::clone(&busy), request.uri().host().unwrap().to_owned());
            async move {
                let others = std::mem::replace(busy.lock().unwrap().entry(host.clone()).or_default(), 1);
                assert_eq!(others, 0, "two requests at once: two slots for {host}");
                tokio::task::yield_now().await;
                busy.lock().unwrap().remove(&host);
                Ok::<_, Infallible>(Response::new(String::new()))
            }
        }
    });
    let gated = layer.layer(inner);
    let start = Barrier::new(THREADS);
    // Slots come and go all the time: the key of a host is in the table only while somebody wants it.
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
                start.wait();
                for n in 0..2000 {
                    let uri = format!("http://h{}.example/", n % 3);
                    runtime.block_on(gated.clone().oneshot(get(&uri))).unwrap();
                    let hosts = layer.hosts().snapshot();
                    let distinct: HashSet<_> = hosts.iter().map(|snapshot| &snapshot.host).collect();
                    assert_eq!(distinct.len(), hosts.len(), "{hosts:?}");
                }
            });
        }
    });
    assert!(layer.hosts().snapshot().is_empty());
}

#[tokio::test(start_paused = true)]
async fn m06_eight_waiting_fetches_of_a_cooled_host_do_not_delay_a_hundred_of_another() {
    let layer = HostGateLayer::new().max_wait(secs(600));
    layer.hosts().penalize("a.example:80", secs(60));
    let gated = layer.layer(Script::always(Reply::ok()));
    let begun = Instant::now();
    let fetch = |uri: &'static str| tokio::spawn(gated.clone().oneshot(get(uri)));
    let waiting: Vec<_> = (0..8).map(|_| fetch("http://a.example/")).collect();
    let others: Vec<_> = (0..100).map(|_| fetch("http://b.example/")).collect();
    for other in others {
        other.await.unwrap().unwrap();
    }
    assert_eq!(begun.elapsed(), secs(0));
    assert_eq!(layer.hosts().get("a.example:80").unwrap().queued, 8);
    for fetch in waiting {
        fetch.await.unwrap().unwrap();
    }
    assert!(begun.elapsed() >= secs(60));
}

// The recipe: a worker does not wait in the place of others. What cannot go now goes back to the end of the list.
#[tokio::test(start_paused = true)]
async fn m06_a_held_host_does_not_keep_the_others_of_a_list_waiting() {
    let layer = reactive();
    let hosts = layer.hosts();
    hosts.penalize("a.example:80", secs(60));

    let uri = |host: &str| -> Uri { format!("http://{host}.example/").parse().unwrap() };
    let mut jobs: VecDeque<_> = [vec![uri("a"); 8], vec![uri("b"); 100]].concat().into();
    let mut done = Vec::new();
    let mut put_back = 0;
    while let Some(job) = jobs.pop_front() {
        match hosts.try_acquire(&job) {
            Ok(permit) => {
                done.push((Instant::now(), job));
                permit.settle(Outcome::Success);
                put_back = 0;
            }
            Err(limited) => {
                assert!(matches!(limited.reason(), Reason::Cooldown | Reason::Spacing));
                jobs.push_back(job);
                put_back += 1;
                if put_back >= jobs.len() {
                    // Nothing else is left: now it is time to wait.
                    sleep(limited.retry_after()).await;
                }
            }
        }
    }
    let begin = done[0].0;
    let (first, rest) = done.split_at(100);
    assert!(first.iter().all(|(at, job)| *at == begin && job.host() == Some("b.example")));
    let waits: Vec<_> = rest.iter().map(|(at, _)| (*at - begin).as_secs()).collect();
    assert_eq!(waits, [60, 61, 62, 63, 64, 65, 66, 67], "each as soon as the host admits it");
}

#[tokio::test(start_paused = true)]
async fn m06_a_request_with_no_budget_says_at_once_when_to_put_it_back() {
    let script = Script::always(Reply::ok());
    let layer = HostGateLayer::new().max_wait(Duration::ZERO);
    let mut gated = layer.layer(script.clone());
    layer.hosts().penalize("a.example", secs(60));
    let error = gated.call(get("http://a.example/")).now_or_never().unwrap().unwrap_err();
    let limited = RateLimited::find(&*error).unwrap();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, secs(60)));
    assert!(gated.call(get("http://b.example/")).now_or_never().unwrap().is_ok());
    assert_eq!(script.sent().len(), 1);
}
