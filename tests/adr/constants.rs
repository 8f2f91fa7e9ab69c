//! The ADR's table of constants, seen from outside; its environment variables; its error code.

use std::process::Command;

use tokio::time::sleep;
use tower::Layer as _;
use tower::retry::RetryLayer;
use tower_host_gate::{HostGateLayer, Pacing, Reason};

use crate::support::reactive;
use crate::support::script::{Reply, Script};
use crate::{FEED, burst, millis, secs, send, shed, spawn, status};

// --- defaults ---------------------------------------------------------------------------------------------------------

/// > `HOST_MAX_CONCURRENCY` | `1` | [...] | serialize same-host requests
// Fails when: the default concurrency is any other.
#[tokio::test(start_paused = true)]
async fn host_max_concurrency_is_1() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let client = reactive().layer(script.clone());
    burst(&client, 5).await;
    assert_eq!(script.peak(), 1);
    assert_eq!(script.times(), [0, 1, 2, 3, 4].map(secs));
}

/// > `HOST_BASE_COOLDOWN` | `2 s` | — | first headerless cooldown; escalation base
// Fails when: the default base is any other.
#[tokio::test(start_paused = true)]
async fn host_base_cooldown_is_2_s() {
    let script = Script::list([Reply::status(429), Reply::status(429)]);
    let client = reactive().layer(script.clone());
    for _ in 0..3 {
        status(&client, FEED).await;
    }
    assert_eq!(script.times(), [secs(0), secs(2), secs(2 + 4)]);
}

/// > `HOST_MAX_COOLDOWN` | `60 s` | [...] | cap on any single cooldown
// Fails when: the default cap is any other.
#[tokio::test(start_paused = true)]
async fn host_max_cooldown_is_60_s() {
    let script = Script::list([Reply::status(429).header("retry-after", "600")]);
    let client = reactive().max_wait(secs(600)).layer(script.clone());
    status(&client, FEED).await;
    status(&client, FEED).await;
    assert_eq!(script.times(), [secs(0), secs(60)]);
}

/// > `STICKY_SPACING` | `1 s` | — | inter-request spacing once a host is warm
// Fails when: the default spacing is any other.
#[tokio::test(start_paused = true)]
async fn sticky_spacing_is_1_s() {
    let script = Script::list([Reply::status(429)]);
    let client = reactive().layer(script.clone());
    status(&client, FEED).await;
    burst(&client, 3).await;
    assert_eq!(script.times(), [secs(0), secs(2), secs(3), secs(4)]);
}

/// > `WARM_WINDOW` | `120 s` | — | how long sticky spacing stays active after a throttle
///
/// Counted from the end of the cooldown, here 2 s (a deviation, see there).
// Fails when: the default window is any other, or its end is not the end of the spacing.
#[tokio::test(start_paused = true)]
async fn warm_window_is_120_s() {
    for (asked_at, second_sent_at) in [(millis(121_999), millis(122_999)), (secs(122), secs(122))] {
        let script = Script::list([Reply::status(429)]);
        let client = reactive().layer(script.clone());
        status(&client, FEED).await;
        sleep(asked_at).await;
        burst(&client, 2).await;
        assert_eq!(script.times(), [secs(0), asked_at, second_sent_at]);
    }
}

/// > `MAX_GATE_WAIT` | `60 s` | [...] | max block before fail-fast
// Fails when: the default budget is any other.
#[tokio::test(start_paused = true)]
async fn max_gate_wait_is_60_s() {
    for (cooldown, sends) in [(secs(60), 2), (millis(60_001), 1)] {
        let script = Script::list([Reply::status(429)]);
        let client = reactive().base_cooldown(cooldown).max_cooldown(secs(600)).layer(script.clone());
        status(&client, FEED).await;
        let _ = send(&client, FEED).await;
        assert_eq!(script.sent().len(), sends, "{cooldown:?}");
    }
}

/// > `RETRY_BASE_DELAY` / `RETRY_MAX_DELAY` | `500 ms` / `5 s`
// Fails when: one of the two defaults is any other.
#[tokio::test(start_paused = true)]
async fn retry_base_and_max_delay_are_500_ms_and_5_s() {
    for (refusal, resent_at) in
        [(Reply::status(429), millis(500)), (Reply::status(429).header("retry-after", "30"), secs(5))]
    {
        let script = Script::list([refusal]);
        let layer = reactive();
        let client = layer.layer(RetryLayer::new(layer.in_flight_retry()).layer(script.clone()));
        status(&client, FEED).await;
        assert_eq!(script.times(), [secs(0), resent_at]);
    }
}

// --- environment ------------------------------------------------------------------------------------------------------

const CHILD: &str = "ADR_TEST_RUNS_AS_A_CHILD";
const VARIABLES: [&str; 3] = ["HOST_CONCURRENCY", "MAX_COOLDOWN_SECS", "MAX_GATE_WAIT_SECS"];

/// True in a process that has exactly these variables, of the gate's. False after such a process has run the test of
/// this name and passed: a process cannot safely change its own environment.
fn with_variables(test: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().expect("the test knows its own binary"));
    for name in VARIABLES {
        child.env_remove(format!("RSS_{name}")).env_remove(format!("HOST_GATE_{name}"));
    }
    let test = format!("constants::{test}");
    let output = child.args(["--exact", &test]).env(CHILD, "").envs(variables.iter().copied()).output();
    let output = output.expect("the test's own binary runs");
    let text = String::from_utf8_lossy(&output.stdout);
    // A name that matches no test would pass too.
    assert!(output.status.success() && text.contains("1 passed"), "{test} in a child: {text}");
    false
}

fn from_env_prefix_rss() -> HostGateLayer {
    HostGateLayer::from_env_prefix("RSS").expect("good variables").pacing(Pacing::Reactive)
}

/// > `RSS_HOST_CONCURRENCY` [...] `RSS_MAX_COOLDOWN_SECS` [...] `RSS_MAX_GATE_WAIT_SECS`
// Fails when: a variable has another name or unit, or is read and not used.
#[tokio::test(start_paused = true)]
async fn the_adrs_three_variables_under_the_prefix_rss() {
    let variables = [("RSS_HOST_CONCURRENCY", "3"), ("RSS_MAX_COOLDOWN_SECS", "90"), ("RSS_MAX_GATE_WAIT_SECS", "95")];
    if !with_variables("the_adrs_three_variables_under_the_prefix_rss", &variables) {
        return;
    }
    let script = Script::list(vec![Reply::ok().after(secs(1)); 6]);
    let client = from_env_prefix_rss().layer(script.clone());
    burst(&client, 6).await;
    assert_eq!(script.peak(), 3);

    let script = Script::list([Reply::status(429).header("retry-after", "600")]);
    let client = from_env_prefix_rss().layer(script.clone());
    status(&client, FEED).await;
    let waiting: Vec<_> = (0..6).map(|_| spawn(&client, FEED)).collect();
    tokio::task::yield_now().await;
    // Sends at 90, 91, .. 95 s: the seventh would be the first one past the budget.
    let limited = shed(send(&client, FEED).await);
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Spacing, secs(96)));
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    assert_eq!(script.times(), [0, 90, 91, 92, 93, 94, 95].map(secs));
}

/// > `MAX_GATE_WAIT` is env-tunable (`RSS_MAX_GATE_WAIT_SECS`) so a client with a tighter tool-call timeout can lower it
// Fails when: the variable can only raise the budget.
#[tokio::test(start_paused = true)]
async fn the_variable_can_lower_the_wait() {
    if !with_variables("the_variable_can_lower_the_wait", &[("RSS_MAX_GATE_WAIT_SECS", "5")]) {
        return;
    }
    let script = Script::list([Reply::status(429).header("retry-after", "6")]);
    let client = from_env_prefix_rss().layer(script.clone());
    status(&client, FEED).await;
    assert_eq!(shed(send(&client, FEED).await).retry_after(), secs(6));
}

/// Another prefix is another program's: `from_env` reads `HOST_GATE_`, and what is not set has the ADR's default.
// Fails when: the prefix is fixed, or an absent variable means anything but the default.
#[tokio::test(start_paused = true)]
async fn another_prefix_is_not_read_and_absent_variables_are_the_defaults() {
    let variables = [("RSS_HOST_CONCURRENCY", "3"), ("HOST_GATE_MAX_COOLDOWN_SECS", "7")];
    if !with_variables("another_prefix_is_not_read_and_absent_variables_are_the_defaults", &variables) {
        return;
    }
    let script = Script::list([Reply::ok().after(secs(1)), Reply::status(429).header("retry-after", "600")]);
    let client = HostGateLayer::from_env().unwrap().pacing(Pacing::Reactive).layer(script.clone());
    burst(&client, 3).await;
    assert_eq!(script.times(), [secs(0), secs(1), secs(1 + 7)]);
}

/// A bad value is an error that names its variable.
// Fails when: a bad value is silently the default.
#[tokio::test(start_paused = true)]
async fn a_bad_value_is_an_error_that_names_its_variable() {
    if !with_variables("a_bad_value_is_an_error_that_names_its_variable", &[("RSS_MAX_GATE_WAIT_SECS", "1 min")]) {
        return;
    }
    let error = HostGateLayer::from_env_prefix("RSS").unwrap_err();
    assert_eq!(error.variable(), "RSS_MAX_GATE_WAIT_SECS");
    assert!(error.to_string().contains("RSS_MAX_GATE_WAIT_SECS"), "{error}");
    assert!(HostGateLayer::from_env().is_ok(), "a variable of another prefix is in nobody's way");
}

// --- the error --------------------------------------------------------------------------------------------------------

/// > A distinct `RATE_LIMITED` error code [...] carrying `retry_after` in the free-form `details`, so an agent can branch
/// > on it and pace [...] The raw header is still surfaced in the error details.
// Fails when: the code or a name in `details` changes, or the server's own words get lost.
#[tokio::test(start_paused = true)]
async fn the_error_has_a_code_and_carries_retry_after_in_its_details() {
    let script = Script::list([Reply::status(429).header("retry-after", "3600")]);
    let client = reactive().max_wait(secs(10)).layer(script.clone());
    status(&client, FEED).await;
    sleep(millis(1_500)).await;

    let limited = shed(send(&client, FEED).await);

    let json = serde_json::to_value(&limited).unwrap();
    assert_eq!(json["code"], "RATE_LIMITED");
    assert_eq!(
        json["details"],
        serde_json::json!({
            "host": "feeds.example:80",
            // 58.5 s, in whole seconds and never too few.
            "retry_after": 59,
            "asked": 3600,
            "raw_hint": "3600",
            "reason": "cooldown",
            "status": 429,
            "streak": 1,
            "throttled_for": 2,
        })
    );
    let message = json["message"].as_str().unwrap();
    for part in ["feeds.example", "59 s", "cooldown", "429"] {
        assert!(message.contains(part), "{message}");
    }
}
