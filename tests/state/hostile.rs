//! Content that nobody in their right mind has written: an error or no harm, and never a panic.

use std::iter::repeat_n;

use allocation_counter::measure;

use super::*;

/// The state of a host that says a lot, as JSON.
async fn rich() -> Value {
    let layer = HostGateLayer::new();
    let gated = layer.layer(refuses_once());
    for _ in 0..2 {
        gated.clone().oneshot(get("http://feeds.example/")).await.unwrap();
    }
    layer.hosts().penalize(HOST, secs(40));
    to_json(&layer.hosts().export())
}

/// The same with other keys.
fn with_keys(rich: &Value, keys: impl IntoIterator<Item = impl Into<String>>) -> HostsState {
    let mut json = rich.clone();
    let host = json["hosts"][0].take();
    json["hosts"] = keys
        .into_iter()
        .map(|key| {
            let mut host = host.clone();
            host["host"] = key.into().into();
            host
        })
        .collect();
    from_json(json)
}

/// Replaces every number in it.
fn replace(json: &mut Value, by: &Value) {
    match json {
        Value::Number(_) => *json = by.clone(),
        Value::Array(values) => values.iter_mut().for_each(|value| replace(value, by)),
        Value::Object(fields) => fields.values_mut().for_each(|value| replace(value, by)),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

#[tokio::test(start_paused = true)]
async fn the_largest_and_smallest_numbers_everywhere_hold_a_host_for_no_longer_than_the_cap() {
    let rich = rich().await;
    for number in [json!(i64::MAX), json!(i64::MIN), json!(u64::MAX), json!(0), json!(1), json!(u32::MAX), json!(-1.5)]
    {
        for pacing in PACINGS {
            let mut json = rich.clone();
            replace(&mut json["hosts"], &number);
            // An error is as good.
            let Ok(state) = serde_json::from_value::<HostsState>(json) else {
                continue;
            };
            let layer = HostGateLayer::new().pacing(pacing).max_cooldown(secs(100)).max_wait(secs(100_000));
            layer.hosts().import(state);
            let script = Script::always(Reply::ok());
            for n in 1..=200 {
                layer.layer(script.clone()).oneshot(get("http://feeds.example/")).await.unwrap();
                let state = layer.hosts().get(HOST).into_iter().collect::<Vec<_>>();
                assert!(state.iter().all(|state| state.gap <= secs(100)), "{number}: {state:?}");
                assert!(script.times().last() <= Some(&secs(100 * n)), "{number}: {:?}", script.times());
            }
            // And it can still be refused.
            layer.layer(Script::always(Reply::status(429))).oneshot(get("http://feeds.example/")).await.unwrap();
            assert!(state_of(&layer).cooldown <= secs(100));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_field_at_a_time_may_be_anything() {
    let rich = rich().await;
    let pace = rich["hosts"][0]["pace"].as_object().unwrap().clone();
    let learned = pace["learned"].as_object().unwrap().clone();
    let paths = pace.keys().map(|key| format!("/hosts/0/pace/{key}"));
    let paths = paths.chain(learned.keys().map(|key| format!("/hosts/0/pace/learned/{key}")));
    let paths: Vec<_> = paths.chain(["/version".into(), "/taken_at_ms".into(), "/hosts".into()]).collect();
    let mut accepted = 0;
    for path in &paths {
        for value in [
            json!(i64::MAX),
            json!(i64::MIN),
            json!(u64::MAX),
            json!(0),
            json!(true),
            json!(null),
            json!("x"),
            json!([]),
        ] {
            let mut json = rich.clone();
            *json.pointer_mut(path).unwrap() = value;
            let Ok(state) = serde_json::from_value::<HostsState>(json) else {
                continue;
            };
            accepted += 1;
            let layer = HostGateLayer::new().max_wait(secs(100_000));
            layer.hosts().import(state);
            let gated = layer.layer(refuses_once());
            for _ in 0..3 {
                gated.clone().oneshot(get("http://feeds.example/")).await.unwrap();
                let known = layer.hosts().snapshot();
                assert!(known.iter().all(|host| host.cooldown.max(host.gap) <= secs(900)), "{path}: {known:?}");
            }
        }
    }
    assert!(accepted > paths.len(), "most of it is well-formed: {accepted}");
}

#[test]
fn malformed_content_is_an_error() {
    for text in [
        "",
        "null",
        "[]",
        "{}",
        "\0",
        r#"{"version":1}"#,
        r#"{"version":1,"taken_at_ms":-1,"hosts":[]}"#,
        r#"{"version":1,"taken_at_ms":1e400,"hosts":[]}"#,
        r#"{"version":1,"taken_at_ms":0,"hosts":[{}]}"#,
        r#"{"version":1,"taken_at_ms":0,"hosts":[{"host":7,"pace":{}}]}"#,
        r#"{"version":1,"taken_at_ms":0,"hosts":[{"host":"a","pace":{"streak":-1}}]}"#,
        r#"{"version":1,"taken_at_ms":0,"hosts":[{"host":"a","pace":{"hold_until_ms":99999999999999999999}}]}"#,
        r#"{"version":1,"taken_at_ms":0,"hosts":"#,
        r#"{"version":1,"version":1,"taken_at_ms":0,"hosts":[]}"#,
    ] {
        let error = serde_json::from_str::<HostsState>(text).expect_err(text);
        assert!(!error.to_string().is_empty(), "{text}");
    }
    let deep = format!(r#"{{"version":1,"taken_at_ms":0,"hosts":{}"#, "[".repeat(1_000_000));
    assert!(serde_json::from_str::<HostsState>(&deep).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_text_that_is_no_key_is_passed_over() {
    let rich = rich().await;
    let bad = [
        "",
        " ",
        ":80",
        "two words:80",
        "new\nline:80",
        "nul\0:80",
        "esc\x1b[31m:80",
        "rtl\u{202e}:80",
        "user:secret@feeds.example:80",
        "secret@feeds.example:80",
        "http://feeds.example:80",
        "FEEDS.example:80",
        "feeds.example.:80",
        "feeds.example:080",
        "feeds.example:80/path",
        "[::1",
        "bücher.example:80",
    ];
    let layer = HostGateLayer::new();
    layer.hosts().import(with_keys(&rich, bad));
    assert_eq!(layer.hosts().snapshot(), []);
    layer.hosts().import(with_keys(&rich, bad.into_iter().chain([HOST])));
    assert_eq!(layer.hosts().snapshot().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn with_keys_of_the_callers_own_user_info_and_control_characters_are_passed_over_too() {
    let rich = rich().await;
    let layer = HostGateLayer::new().keying(|_: &http::Uri, _: &http::HeaderMap, _: &http::Extensions| None);
    layer.hosts().import(with_keys(
        &rich,
        ["user:secret@feeds.example", "http://a:secret@b/", "new\nline", "nul\0", "\u{202e}"],
    ));
    assert_eq!(layer.hosts().snapshot(), []);
    layer.hosts().import(with_keys(&rich, ["tenant 7, as it were"]));
    assert_eq!(layer.hosts().snapshot()[0].host, "tenant 7, as it were");
}

#[tokio::test(start_paused = true)]
async fn keys_of_a_megabyte_leave_nothing_behind() {
    let rich = rich().await;
    for letter in ["ü", "\n"] {
        let key = format!("{}:80", letter.repeat(1_000_000));
        for layer in [
            HostGateLayer::new(),
            HostGateLayer::new().keying(|_: &http::Uri, _: &http::HeaderMap, _: &http::Extensions| None),
        ] {
            let state = with_keys(&rich, [&key, HOST]);
            let memory = measure(|| layer.hosts().import(state));
            let known = layer.hosts().snapshot();
            assert_eq!(known.len(), 1, "{letter:?}: {known:?}");
            // Less what the state itself has given back.
            assert!(memory.bytes_current < 100_000, "{letter:?}: {memory:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_there_twice_is_one_host_held_for_the_longer_of_the_two() {
    let rich = rich().await;
    let mut json = to_json(&with_keys(&rich, repeat_n(HOST, 1000)));
    json["hosts"][7]["pace"]["hold_until_ms"] = 90_000.into();
    let layer = HostGateLayer::new();
    layer.hosts().import(from_json(json));
    let known = layer.hosts().snapshot();
    assert_eq!(known.len(), 1);
    assert!(known[0].cooldown > secs(60) && known[0].cooldown <= secs(90), "{known:?}");
}

#[tokio::test(start_paused = true)]
async fn of_ten_megabytes_of_hosts_no_more_than_max_hosts_are_taken() {
    let text = rich().await.to_string();
    let (start, end) = (text.find('[').unwrap() + 1, text.rfind(']').unwrap());
    let hosts: Vec<_> = (0..25_000).map(|n| text[start..end].replace("feeds", &format!("h{n}"))).collect();
    let text = [&text[..start], &hosts.join(","), &text[end..]].concat();
    assert!(text.len() > 10_000_000, "{}", text.len());
    let state: HostsState = serde_json::from_str(&text).unwrap();
    for (layer, taken) in [
        (HostGateLayer::new(), 10_000),
        (HostGateLayer::new().max_hosts(3), 3),
        (HostGateLayer::new().max_hosts(0), 0),
        (reactive().max_hosts(100), 100),
        (HostGateLayer::new().max_hosts(usize::MAX), 25_000),
    ] {
        layer.hosts().import(state.clone());
        let known = layer.hosts().snapshot();
        assert_eq!(known.len(), taken);
        // In what was exported they are those used last.
        let first =
            |host: &HostSnapshot| (0..taken).contains(&host.host.name()[1..].replace(".example", "").parse().unwrap());
        assert!(known.iter().all(first), "those that stand first are taken");
    }
}

#[tokio::test(start_paused = true)]
async fn one_import_after_the_other_does_not_add_up() {
    let rich = rich().await;
    let month = secs(30 * 24 * 3600);
    let states = (0..50).map(|run| later(&with_keys(&rich, (0..200).map(|n| format!("h{run}-{n}.example:80"))), month));
    let states: Vec<_> = states.collect();
    let layer = HostGateLayer::new().max_hosts(200);
    let memory = measure(|| states.iter().for_each(|state| layer.hosts().import(state.clone())));
    // Half a kilobyte each, and the state that is being read. All of them would be ten thousand.
    assert!(memory.bytes_max < 1024 * 1024, "{memory:?}");
}
