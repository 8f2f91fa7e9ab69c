//! What a gate has learnt, beyond the end of its program (S23) and within bounds (S10).
//!
//! | module | what |
//! |---|---|
//! | here | export and import: what is kept, how it ages, what it must not overrule |
//! | [`cron`] | a batch that is run again and again meets a known host |
//! | [`hostile`] | content that nobody in their right mind has written |
//! | [`max_hosts`] | what is forgotten when it gets too much, and what never is |
//!
//! The clock of these tests is paused and the wall clock is not. A test that needs time to pass by the wall moves the
//! moment of taking, see [`later`].

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

#[path = "state/cron.rs"]
mod cron;
#[path = "state/hostile.rs"]
mod hostile;
#[path = "state/max_hosts.rs"]
mod max_hosts;

use std::collections::HashSet;
use std::time::Duration;

use serde_json::{Value, json};
use support::reactive;
use support::script::{Reply, Script, get};
use tokio::time::{Instant, sleep};
use tower::{Layer as _, ServiceExt as _};
use tower_host_gate::{HostGate, HostGateLayer, HostSnapshot, HostsState, Pacing};

const HOST: &str = "feeds.example:80";
const PACINGS: [Pacing; 2] = [Pacing::Learned, Pacing::Reactive];

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn to_json(state: &HostsState) -> Value {
    serde_json::to_value(state).unwrap()
}

fn from_json(json: Value) -> HostsState {
    serde_json::from_value(json).unwrap()
}

/// The state as a run finds it so much later by the wall clock. (Counted from its moment of taking; what the test itself
/// takes comes on top.)
fn later(state: &HostsState, passed: Duration) -> HostsState {
    let mut json = to_json(state);
    let taken = json["taken_at_ms"].as_u64().unwrap();
    json["taken_at_ms"] = (taken - passed.as_millis() as u64).into();
    from_json(json)
}

/// A host that has refused every first request, and nothing since.
fn refuses_once() -> Script {
    let mut seen = HashSet::new();
    Script::new(
        move |sent| if seen.insert(sent.host.clone()) { Reply::status(429).after(secs(1)) } else { Reply::ok() },
    )
}

/// Two requests at once to a host that [`refuses_once`], so that a spacing is learnt, and time for it to get cold.
async fn teach(gated: &HostGate<Script>, host: &str) {
    let ask = || gated.clone().oneshot(get(&format!("http://{host}/")));
    let (first, second) = tokio::join!(ask(), ask());
    drop((first.unwrap(), second.unwrap()));
    sleep(secs(300)).await;
}

fn state_of(layer: &HostGateLayer) -> HostSnapshot {
    layer.hosts().get(HOST).expect("the host is known")
}

// --- S23 --------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s23_of_a_cooldown_of_40_s_restored_10_s_later_there_are_30_s_left() {
    for pacing in PACINGS {
        let first = HostGateLayer::new().pacing(pacing);
        first.hosts().penalize(HOST, secs(40));
        let wall = std::time::Instant::now();
        let state = later(&first.hosts().export(), secs(10));

        let second = HostGateLayer::new().pacing(pacing);
        second.hosts().import(state);
        let (left, test_took) = (state_of(&second), wall.elapsed() + Duration::from_millis(1));
        assert!(left.cooldown <= secs(30) && left.cooldown >= secs(30).saturating_sub(test_took), "{left:?}");
        assert!(left.warm <= secs(150) && left.warm >= secs(150).saturating_sub(test_took), "{left:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn s23_a_deadline_three_years_ahead_is_cut_to_the_cap() {
    for (pacing, cap) in [(Pacing::Learned, secs(900)), (Pacing::Reactive, secs(60))] {
        let layer = HostGateLayer::new().pacing(pacing);
        layer.hosts().penalize(HOST, secs(40));
        let mut json = to_json(&layer.hosts().export());
        let three_years = 3 * 365 * 24 * 3_600_000_u64;
        for deadline in ["hold_until_ms", "warm_until_ms", "spaced_until_ms"] {
            assert!(json["hosts"][0]["pace"].get(deadline).is_some(), "{json}");
            json["hosts"][0]["pace"][deadline] = three_years.into();
        }
        let layer = HostGateLayer::new().pacing(pacing);
        layer.hosts().import(from_json(json));
        let state = state_of(&layer);
        assert_eq!((state.cooldown, state.next_send, state.warm), (cap, cap, cap + secs(120)));
    }
}

#[tokio::test(start_paused = true)]
async fn s23_a_state_from_a_future_wall_clock_is_ignored() {
    let layer = HostGateLayer::new();
    layer.hosts().penalize(HOST, secs(40));
    let mut json = to_json(&layer.hosts().export());
    for ahead in [60_000, 3 * 365 * 24 * 3_600_000, u64::MAX / 2] {
        json["taken_at_ms"] = (json["taken_at_ms"].as_u64().unwrap() + ahead).into();
        let layer = HostGateLayer::new();
        layer.hosts().import(from_json(json.clone()));
        assert_eq!(layer.hosts().snapshot(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn s23_one_host_can_be_cleared_of_what_was_learnt() {
    let script = refuses_once();
    let layer = HostGateLayer::new();
    let gated = layer.layer(script.clone());
    teach(&gated, "feeds.example").await;
    teach(&gated, "other.example").await;
    assert!(state_of(&layer).gap >= secs(2), "{:?}", state_of(&layer));

    layer.hosts().clear("feeds.example");

    assert_eq!(layer.hosts().get(HOST), None);
    let exported = to_json(&layer.hosts().export());
    assert_eq!(exported["hosts"].as_array().unwrap().len(), 1, "{exported}");
    assert_eq!(exported["hosts"][0]["host"], "other.example:80");
    let begun = Instant::now();
    for _ in 0..2 {
        gated.clone().oneshot(get("http://feeds.example/")).await.unwrap();
    }
    assert_eq!(begun.elapsed(), secs(0), "nothing is spaced any more");
    for _ in 0..2 {
        gated.clone().oneshot(get("http://other.example/")).await.unwrap();
    }
    assert!(begun.elapsed() >= secs(1), "the other host's spacing is not touched");
}

// --- what is kept -----------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn only_hosts_that_say_something_are_kept() {
    let script = refuses_once();
    let layer = HostGateLayer::new();
    let gated = layer.layer(script.clone());
    gated.clone().oneshot(get("http://held.example/")).await.unwrap();
    let healthy = Script::always(Reply::ok());
    // Contended, so that its sends are recorded.
    let client = layer.layer(healthy);
    let (a, b) = tokio::join!(
        client.clone().oneshot(get("http://healthy.example/")),
        client.clone().oneshot(get("http://healthy.example/")),
    );
    let in_flight = (a.unwrap(), b.unwrap());
    let exported = to_json(&layer.hosts().export());
    assert_eq!(exported["hosts"].as_array().unwrap().len(), 1, "{exported}");
    assert_eq!(exported["hosts"][0]["host"], "held.example:80");
    drop(in_flight);
}

#[tokio::test(start_paused = true)]
async fn a_learnt_spacing_outlives_a_month_and_a_reactive_host_is_forgotten_when_cold() {
    for (pacing, known) in [(Pacing::Learned, true), (Pacing::Reactive, false)] {
        let layer = HostGateLayer::new().pacing(pacing);
        let gated = layer.layer(refuses_once());
        for _ in 0..2 {
            gated.clone().oneshot(get("http://feeds.example/")).await.unwrap();
        }
        let state = later(&layer.hosts().export(), secs(30 * 24 * 3600));
        let learnt = state_of(&layer).gap;
        let layer = HostGateLayer::new().pacing(pacing);
        layer.hosts().import(state);
        let found = layer.hosts().get(HOST);
        assert_eq!(found.is_some(), known, "{pacing:?}: {found:?}");
        if let Some(found) = found {
            assert_eq!(found.gap, learnt);
            assert_eq!((found.cooldown, found.next_send, found.warm), (secs(0), secs(0), secs(0)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_exported_comes_back_from_json_as_it_was() {
    let layer = HostGateLayer::new();
    let gated = layer.layer(refuses_once());
    teach(&gated, "feeds.example").await;
    layer.hosts().penalize("held.example:8080", secs(40));
    let state = layer.hosts().export();
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<HostsState>(&text).unwrap(), state);
    assert!(text.starts_with(r#"{"version":1,"taken_at_ms":"#), "{text}");
}

#[tokio::test(start_paused = true)]
async fn keys_of_every_kind_come_back() {
    use tower_host_gate::{By, HostKey};

    let authorities =
        ["a.example:80", "a.example:443", "a.example:99999", "[2001:db8::1]:443", "xn--bcher-kva.example:80"];
    let long = "x".repeat(300).parse::<HostKey>().unwrap().to_string();
    let layers: [(_, &[&str]); 3] = [
        (HostGateLayer::new(), &authorities),
        (HostGateLayer::new().keying(By::Host), &["a.example", "[2001:db8::1]", "127.0.0.1"]),
        (
            HostGateLayer::new().keying(|_: &http::Uri, _: &http::HeaderMap, _: &http::Extensions| None),
            &["api.example/v2", "bücher, überall", &long],
        ),
    ];
    for (layer, keys) in layers {
        for key in keys {
            layer.hosts().penalize(key, secs(40));
        }
        let before: HashSet<_> = layer.hosts().snapshot().into_iter().map(|host| host.host.to_string()).collect();
        assert!(keys.iter().all(|key| before.contains(*key)), "{keys:?} {before:?}");
        // A setter makes a gate of its own with the same settings.
        let next = layer.clone().max_queue(7);
        next.hosts().import(layer.hosts().export());
        let after: HashSet<_> = next.hosts().snapshot().into_iter().map(|host| host.host.to_string()).collect();
        assert_eq!(before, after);
    }
}

// --- what it must not overrule ----------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_host_that_is_known_keeps_what_is_known_and_only_its_hold_is_extended() {
    for (held_before, imported, expected) in [(40, 20, 40), (20, 40, 40)] {
        let layer = HostGateLayer::new();
        layer.hosts().penalize(HOST, secs(imported));
        let gated = layer.layer(refuses_once());
        let state = {
            // It knows a spacing beside its hold.
            sleep(secs(imported)).await;
            for _ in 0..2 {
                gated.clone().oneshot(get("http://feeds.example/")).await.unwrap();
            }
            layer.hosts().penalize(HOST, secs(imported));
            layer.hosts().export()
        };
        assert!(state_of(&layer).gap > secs(0));

        let known = HostGateLayer::new();
        known.hosts().penalize(HOST, secs(held_before));
        known.hosts().import(state);
        let found = state_of(&known);
        let late = secs(expected) - found.cooldown;
        assert!(late < secs(10), "{expected} s but for what the test took: {found:?}");
        assert_eq!((found.gap, found.streak), (secs(0), 0), "what is known here is no spacing");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_is_held_or_refused_by_what_is_imported() {
    let script = Script::always(Reply::ok());
    let layer = HostGateLayer::new().max_wait(secs(60));
    let hosts = layer.hosts();
    hosts.penalize(HOST, secs(20));
    let patient = tokio::spawn(layer.layer(script.clone()).oneshot(get("http://feeds.example/")));
    tokio::task::yield_now().await;

    let other = HostGateLayer::new().hosts();
    other.penalize(HOST, secs(300));
    hosts.import(other.export());
    let begun = Instant::now();
    let error = patient.await.unwrap().unwrap_err();
    assert!(tower_host_gate::RateLimited::find(&*error).unwrap().retry_after() > secs(200));
    assert_eq!((begun.elapsed(), script.sent().len()), (secs(0), 0));
}

#[tokio::test(start_paused = true)]
async fn a_disabled_gate_heeds_nothing_and_hands_it_on() {
    let layer = HostGateLayer::new();
    layer.hosts().penalize(HOST, secs(40));
    let off = HostGateLayer::new().disabled(true);
    off.hosts().import(layer.hosts().export());

    let script = Script::always(Reply::ok());
    off.layer(script.clone()).oneshot(get("http://feeds.example/")).await.unwrap();
    assert_eq!(script.times(), [secs(0)]);

    let on = HostGateLayer::new();
    on.hosts().import(off.hosts().export());
    assert!(state_of(&on).cooldown > secs(20));
}

#[tokio::test(start_paused = true)]
async fn reactive_and_learned_read_each_others_state() {
    let learned = HostGateLayer::new();
    let gated = learned.layer(refuses_once());
    for _ in 0..2 {
        gated.clone().oneshot(get("http://feeds.example/")).await.unwrap();
    }
    learned.hosts().penalize(HOST, secs(40));
    let other = reactive();
    other.hosts().import(learned.hosts().export());
    let state = state_of(&other);
    assert!(state.cooldown > secs(20) && state.warm > secs(120), "{state:?}");
    assert_eq!(state.gap, secs(0));

    let again = HostGateLayer::new();
    again.hosts().import(other.hosts().export());
    assert!(state_of(&again).cooldown > secs(20));
}

// --- versions ---------------------------------------------------------------------------------------------------------

#[test]
fn another_version_is_an_error_that_names_it() {
    for version in [json!(0), json!(2), json!(u64::MAX)] {
        let text = format!(r#"{{"version":{version},"taken_at_ms":0,"hosts":[]}}"#);
        let error = serde_json::from_str::<HostsState>(&text).unwrap_err().to_string();
        assert!(error.contains(&format!("version {version} is not known, only 1")), "{error}");
    }
    let error = serde_json::from_str::<HostsState>(r#"{"taken_at_ms":0,"hosts":[]}"#).unwrap_err();
    assert!(error.to_string().contains("missing field `version`"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn fields_of_a_later_minor_version_are_skipped_and_missing_ones_are_zero() {
    let layer = HostGateLayer::new();
    layer.hosts().penalize(HOST, secs(40));
    let mut json = to_json(&layer.hosts().export());
    json["minor"] = 7.into();
    json["hosts"][0]["region"] = json!({ "name": ["eu", null] });
    json["hosts"][0]["pace"]["mood"] = "sour".into();
    json["hosts"][0]["pace"]["learned"]["confidence"] = 0.5.into();
    json["hosts"][0]["pace"]["learned"].as_object_mut().unwrap().remove("cycle_start_ms");
    json["hosts"][0]["pace"].as_object_mut().unwrap().remove("streak");
    let layer = HostGateLayer::new();
    layer.hosts().import(from_json(json));
    assert!(state_of(&layer).cooldown > secs(20));
}
