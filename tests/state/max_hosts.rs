//! What is forgotten when it gets too much: hosts that are remembered for nothing but what was learnt, those not used for
//! longest first. And what never is (S10): whatever anybody still has to wait for.

use std::sync::atomic::{AtomicU32, Ordering};

use allocation_counter::measure;
use futures_util::future::join_all;
use http::Uri;
use tower_host_gate::{Limits, Outcome};

use super::*;

fn known(layer: &HostGateLayer) -> Vec<String> {
    let mut names: Vec<_> = layer.hosts().snapshot().into_iter().map(|host| host.host.name().to_owned()).collect();
    names.sort();
    names
}

async fn ask(gated: &HostGate<Script>, host: &str) {
    gated.clone().oneshot(get(&format!("http://{host}/"))).await.unwrap();
}

/// Refusals of other hosts, one every ten seconds: at each of them it is looked for what to forget.
async fn others(refused: &HostGate<Script>, time: Duration) {
    for _ in 0..time.as_secs() / 10 {
        // The same one twice would wait.
        let fresh = FRESH.fetch_add(1, Ordering::Relaxed);
        ask(refused, &format!("other-{fresh}.example")).await;
        sleep(secs(10)).await;
    }
}

static FRESH: AtomicU32 = AtomicU32::new(0);

// --- what is forgotten ------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn of_learnt_hosts_those_used_last_are_remembered() {
    let names = ["a.example", "b.example", "c.example", "d.example"];
    for max_hosts in 0..=4 {
        let layer = HostGateLayer::new().max_hosts(max_hosts);
        let gated = layer.layer(refuses_once());
        for name in names {
            teach(&gated, name).await;
        }
        assert_eq!(known(&layer), names[names.len() - max_hosts..], "{max_hosts}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_makes_a_host_the_one_used_last() {
    let layer = HostGateLayer::new().max_hosts(2);
    let gated = layer.layer(refuses_once());
    teach(&gated, "a.example").await;
    teach(&gated, "b.example").await;
    ask(&gated, "a.example").await;
    teach(&gated, "c.example").await;
    assert_eq!(known(&layer), ["a.example", "c.example"]);
}

#[tokio::test(start_paused = true)]
async fn hosts_that_are_merely_in_use_count_for_nothing() {
    let layer = HostGateLayer::new().max_hosts(1);
    teach(&layer.layer(refuses_once()), "a.example").await;
    let healthy = layer.layer(Script::always(Reply::ok().open_for_ever()));
    let open = join_all((0..100).map(|n| healthy.clone().oneshot(get(&format!("http://open-{n}.example/"))))).await;
    assert_eq!(known(&layer).len(), 101);
    drop(open);
    assert_eq!(known(&layer), ["a.example"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_imported_counts_and_is_as_old_as_it_is() {
    let first = HostGateLayer::new();
    let gated = first.layer(refuses_once());
    for name in ["a.example", "b.example", "c.example"] {
        teach(&gated, name).await;
    }
    let state = first.hosts().export();
    assert_eq!(to_json(&state)["hosts"].as_array().unwrap().len(), 3);
    assert_eq!(to_json(&state)["hosts"][0]["host"], "c.example:80", "used last, it comes first");

    let second = HostGateLayer::new().max_hosts(2);
    teach(&second.layer(refuses_once()), "z.example").await;
    // Meanwhile it has got older, by the wall clock too.
    second.hosts().import(later(&state, secs(302)));
    let exported = to_json(&second.hosts().export());
    let hosts: Vec<_> = exported["hosts"].as_array().unwrap().iter().map(|host| &host["host"]).collect();
    assert_eq!(hosts, ["z.example:80", "c.example:80"]);
}

#[tokio::test(start_paused = true)]
async fn no_more_are_exported_than_are_remembered() {
    let layer = HostGateLayer::new().max_hosts(2);
    let gated = layer.layer(refuses_once());
    for name in ["a.example", "b.example", "c.example"] {
        teach(&gated, name).await;
    }
    let exported = to_json(&layer.hosts().export());
    let hosts: Vec<_> = exported["hosts"].as_array().unwrap().iter().map(|host| &host["host"]).collect();
    assert_eq!(hosts, ["c.example:80", "b.example:80"]);
}

#[test]
fn thirty_thousand_throttling_hosts_do_not_grow_the_memory() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let layer = HostGateLayer::new().max_hosts(100);
    has_had_a_request(&layer);
    let mut hosts = (0..30_000).map(|n| format!("http://h{n}.example/").parse::<Uri>().unwrap());
    let memory = measure(|| {
        runtime.block_on(async {
            for uri in &mut hosts {
                for outcome in [throttled(), Outcome::Success] {
                    layer.hosts().acquire(&uri, secs(60)).await.unwrap().settle(outcome);
                }
            }
        });
    });
    // The hosts of the last two minutes, one every two seconds, are warm. Each takes about half a kilobyte, and a table
    // may be half empty.
    assert!(memory.bytes_max < 512 * 1024, "{memory:?}");
    runtime.block_on(async {
        sleep(secs(300)).await;
        assert_eq!(layer.hosts().snapshot().len(), 100);
    });
}

#[test]
fn thirty_thousand_hosts_that_throttle_at_once_are_forgotten_when_the_next_one_does() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let layer = HostGateLayer::new().max_hosts(100);
    has_had_a_request(&layer);
    let hosts = layer.hosts();
    let memory = measure(|| {
        runtime.block_on(async {
            for outcome in [throttled(), Outcome::Success] {
                for n in 0..30_000 {
                    let uri = format!("http://h{n}.example/").parse().unwrap();
                    hosts.acquire(&uri, secs(60)).await.unwrap().settle(outcome);
                }
            }
            sleep(secs(300)).await;
            let uri = Uri::from_static("http://next.example/");
            hosts.acquire(&uri, secs(60)).await.unwrap().settle(throttled());
        });
    });
    assert!(memory.bytes_max > 4 * 1024 * 1024, "the measure would show it: {memory:?}");
    assert!(memory.bytes_current < 512 * 1024, "{memory:?}");
}

/// What a gate allocates once, with its first request, is no matter of how many hosts there are.
fn has_had_a_request(layer: &HostGateLayer) {
    drop(layer.hosts().try_acquire(&Uri::from_static("http://first.example/")).unwrap());
}

fn throttled() -> Outcome {
    Outcome::Throttled { hint: None, soft: false }
}

// --- what never is ----------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s10_a_cooldown_without_a_waiter_and_its_warmth_are_never_forgotten() {
    let layer = HostGateLayer::new().max_hosts(0);
    let gated = layer.layer(Script::always(Reply::status(429)));
    layer.hosts().penalize(HOST, secs(60));
    others(&gated, secs(50)).await;
    let state = state_of(&layer);
    assert_eq!((state.cooldown, state.warm), (secs(10), secs(130)));
    others(&gated, secs(120)).await;
    assert_eq!(state_of(&layer).warm, secs(10));
}

#[tokio::test(start_paused = true)]
async fn s10_a_streak_lives_as_long_as_the_warmth() {
    let layer = HostGateLayer::new().max_hosts(0);
    let gated = layer.layer(Script::always(Reply::status(429)));
    for _ in 0..3 {
        ask(&gated, "feeds.example").await;
    }
    others(&gated, secs(120)).await;
    assert_eq!(state_of(&layer).streak, 3);
    ask(&gated, "feeds.example").await;
    assert_eq!(state_of(&layer).streak, 4, "what comes now is the fourth in a row");
}

#[tokio::test(start_paused = true)]
async fn s10_a_min_delay_holds_between_requests_one_by_one() {
    let script = Script::always(Reply::ok());
    let layer = HostGateLayer::new().max_hosts(0).min_delay(secs(35));
    let gated = layer.layer(script.clone());
    let refused = layer.layer(Script::always(Reply::status(429)));
    for _ in 0..3 {
        ask(&gated, "feeds.example").await;
        others(&refused, secs(30)).await;
    }
    ask(&gated, "feeds.example").await;
    assert_eq!(script.times(), [0, 35, 70, 105].map(secs));
}

#[tokio::test(start_paused = true)]
async fn s10_a_quota_record_counts_until_it_has_left_the_window() {
    let script = Script::always(Reply::ok());
    let layer = HostGateLayer::new().max_hosts(0).max_wait(secs(600));
    layer.hosts().set_limits("feeds.example", Limits::default().quota(2, secs(100)));
    let gated = layer.layer(script.clone());
    let refused = layer.layer(Script::always(Reply::status(429)));
    ask(&gated, "feeds.example").await;
    others(&refused, secs(50)).await;
    ask(&gated, "feeds.example").await;
    others(&refused, secs(40)).await;
    ask(&gated, "feeds.example").await;
    ask(&gated, "feeds.example").await;
    assert_eq!(script.times(), [0, 50, 100, 150].map(secs));
}

#[tokio::test(start_paused = true)]
async fn s10_a_learnt_spacing_is_kept_while_it_keeps_the_next_request() {
    let script = Script::list([Reply::status(429).header("retry-after", "120").after(secs(1)), Reply::ok()]);
    let layer = HostGateLayer::new().max_hosts(0).warm_for(secs(10)).max_wait(secs(600));
    let gated = layer.layer(script.clone());
    tokio::join!(ask(&gated, "feeds.example"), ask(&gated, "feeds.example"));
    let gap = state_of(&layer).gap;
    assert!(gap > secs(100), "{gap:?}");
    let refused = layer.layer(Script::always(Reply::status(429)));
    others(&refused, gap - secs(15)).await;
    assert_eq!(state_of(&layer).gap, gap);
    sleep(secs(30)).await;
    assert_eq!(layer.hosts().get(HOST), None, "and no longer");
}

#[tokio::test(start_paused = true)]
async fn s10_a_host_with_a_request_in_flight_or_waiting_is_never_forgotten() {
    let layer = HostGateLayer::new().max_hosts(0);
    let hosts = layer.hosts();
    let uri = Uri::from_static("http://feeds.example/");
    hosts.acquire(&uri, secs(60)).await.unwrap().settle(throttled());
    hosts.acquire(&uri, secs(60)).await.unwrap().settle(Outcome::Success);
    let gap = state_of(&layer).gap;
    let permit = hosts.acquire(&uri, secs(60)).await.unwrap();
    let refused = layer.layer(Script::always(Reply::status(429)));
    others(&refused, secs(600)).await;
    assert_eq!((state_of(&layer).gap, state_of(&layer).in_flight), (gap, 1));
    drop(permit);
    assert_eq!(hosts.get(HOST), None);
}
