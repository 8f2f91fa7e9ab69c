//! The R cases: what a server's account of its quota does to the next send, through the real layer and under the paused
//! clock.
//!
//! `Pacing::Learned` heeds these headers by itself, to the letter until a host has refused right behind an instant that it
//! had named itself; `Pacing::Reactive` heeds them when asked to. Instants are measured against the response's own `Date`,
//! so a test that sends one is exact whatever the wall clock says.

mod support;

#[path = "cases_rate_limit/short_hints.rs"]
mod short_hints;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use http::{Response, Uri};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tower::retry::RetryLayer;
use tower::{BoxError, Layer as _, ServiceExt as _};
use tower_host_gate::{HostGate, HostGateLayer, HostSnapshot, RateLimited, Reason, ResponseBody};

use support::reactive;
use support::script::{Reply, Script, ScriptBody, get};

const FEED: &str = "http://feeds.example/feed.xml";
const HOST: &str = "feeds.example:80";

/// The first cooldown of a host that names none.
const ESCALATION: Duration = Duration::from_secs(2);

/// The server's clock in these tests, as a date and in Unix seconds.
const DATE: &str = "Wed, 02 Dec 2026 23:59:00 GMT";
const NOW: u64 = 1_796_255_940;

type Sent = Result<Response<ResponseBody<ScriptBody>>, BoxError>;

async fn send(client: &HostGate<Script>, uri: &str) -> Sent {
    client.clone().oneshot(get(uri)).await
}

fn spawn(client: &HostGate<Script>, uri: &'static str) -> JoinHandle<Sent> {
    let client = client.clone();
    tokio::spawn(async move { send(&client, uri).await })
}

fn shed(result: Sent) -> RateLimited {
    let error = result.expect_err("the request is shed");
    RateLimited::find(&*error).expect("shed with RateLimited").clone()
}

fn host(layer: &HostGateLayer) -> HostSnapshot {
    layer.hosts().get(HOST).expect("something is known of the host")
}

/// Reactive pacing, told to heed the headers.
fn heedful() -> HostGateLayer {
    reactive().rate_limit_headers(true)
}

/// Both ways of pacing that heed the headers, with the longest that each holds a host.
fn both() -> [(HostGateLayer, Duration); 2] {
    [(HostGateLayer::new(), secs(15 * 60)), (heedful(), secs(60))]
}

/// A gate of its own with the same settings, and all the time there is to wait.
fn another(layer: &HostGateLayer) -> HostGateLayer {
    layer.clone().max_wait(secs(100_000))
}

/// When the request after this reply goes out: answered at 0, asked for at 0.
async fn next_send(layer: &HostGateLayer, reply: Reply) -> Duration {
    let script = Script::list([reply]);
    let client = another(layer).layer(script.clone());
    for _ in 0..2 {
        send(&client, FEED).await.expect("no error surfaces to the caller");
    }
    script.times()[1]
}

/// A reply with this much left and this reset, in the commonest headers.
fn left(status: u16, remaining: &str, reset: &str) -> Reply {
    Reply::status(status).header("x-ratelimit-remaining", remaining).header("x-ratelimit-reset", reset)
}

fn in_seconds(seconds: u64) -> String {
    (NOW + seconds).to_string()
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

// --- forms ------------------------------------------------------------------------------------------------------------

/// Nothing left for 30 s, in every way there is to say so.
fn forms() -> Vec<Reply> {
    let families = [
        ("ratelimit-remaining", "ratelimit-reset"),
        ("x-ratelimit-remaining", "x-ratelimit-reset"),
        ("x-rate-limit-remaining", "x-rate-limit-reset"),
    ];
    let resets = [
        "30",
        "30.0",
        "0030",
        "1796255970",
        "1796255970.0",
        "1796255970000",
        "1796255970000000",
        "1796255970000000000",
        "Wed, 02 Dec 2026 23:59:30 GMT",
    ];
    let structured = [
        r#""default";r=0;t=30"#,
        r#""default"; r=0; t=30; pk=:cGs=:"#,
        "default;r=0;t=30",
        r#""default";r=0;t=30.0"#,
        r#""default";r=0;t=1796255970"#,
        r#""daily";r=900;t=3600, "burst";r=0;t=30"#,
        r#""burst";r=0;t=30, "second";r=0;t=1"#,
        "limit=100, remaining=0, reset=30",
        "limit=100, remaining=0, reset=1796255970",
    ];
    let reply = |lines: &[(&str, &str)]| {
        lines.iter().fold(Reply::ok().header("date", DATE), |reply, (name, value)| reply.header(name, value))
    };
    let mut forms = Vec::new();
    for (remaining, reset) in families {
        forms.extend(resets.map(|value| reply(&[(remaining, "0"), (reset, value)])));
        forms.push(reply(&[(remaining, "0.0"), (reset, "30")]));
        forms.push(reply(&[(remaining, "900, 0"), (reset, "3600, 30")]));
        forms.push(reply(&[(remaining, "900"), (reset, "3600"), (remaining, "0"), (reset, "30")]));
    }
    forms.extend(structured.map(|value| reply(&[("ratelimit", value)])));
    forms.push(reply(&[("ratelimit", r#""a";r=9;t=60"#), ("ratelimit", r#""b";r=0;t=30"#)]));
    forms.push(reply(&[("x-ratelimit-remaining", "5"), ("x-ratelimit-reset", "90"), ("ratelimit", structured[0])]));
    forms
}

#[tokio::test(start_paused = true)]
async fn nothing_left_on_a_success_holds_the_host_until_the_reset_in_every_form() {
    for (layer, _) in both() {
        for form in forms() {
            assert_eq!(next_send(&layer, form.clone()).await, secs(30), "{form:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn reactive_pacing_ignores_the_headers_unless_told_to_heed_them() {
    for form in forms() {
        assert_eq!(next_send(&reactive(), form.clone()).await, secs(0), "{form:?}");
        assert_eq!(next_send(&HostGateLayer::new().rate_limit_headers(false), form.clone()).await, secs(0), "{form:?}");
    }
    assert_eq!(next_send(&reactive(), left(429, "0", "30")).await, ESCALATION, "a refusal's as well");
}

#[tokio::test(start_paused = true)]
async fn a_fraction_of_a_second_is_waited_for() {
    assert_eq!(next_send(&heedful(), left(200, "0", "1.5")).await, millis(1_500));
    assert_eq!(next_send(&heedful(), left(200, "0", "0.0000000001")).await, millis(1), "the clock's millisecond");
    let discord = left(200, "0", "1796255941.470").header("date", DATE);
    assert_eq!(next_send(&heedful(), discord).await, millis(1_470));
}

#[tokio::test(start_paused = true)]
async fn headers_of_two_families_are_not_combined() {
    for (layer, _) in both() {
        let mixed = Reply::ok().header("x-ratelimit-remaining", "0").header("ratelimit-reset", "30");
        assert_eq!(next_send(&layer, mixed).await, secs(0));
    }
}

// --- how much is left -------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn r01_with_something_left_there_is_no_wait_at_all() {
    for (layer, _) in both() {
        let reply = Reply::ok()
            .header("date", DATE)
            .header("ratelimit-limit", "2000")
            .header("ratelimit-remaining", "1999")
            .header("ratelimit-reset", &in_seconds(60));
        let script = Script::always(reply);
        let client = layer.concurrency(4).layer(script.clone());
        for sent in join_all((0..20).map(|_| send(&client, FEED))).await {
            sent.unwrap();
        }
        assert_eq!(script.times(), [secs(0); 20]);
    }
}

/// Four requests go out at 0; the answer to the first, at 1 s, says what is left; a fifth is waiting.
async fn fifth_of_five(layer: HostGateLayer, remaining: &str) -> Duration {
    let script = Script::list([
        left(200, remaining, "20").after(secs(1)),
        Reply::ok().after(secs(10)),
        Reply::ok().after(secs(10)),
        Reply::ok().after(secs(10)),
    ]);
    let client = layer.concurrency(4).layer(script.clone());
    for sent in join_all((0..5).map(|_| send(&client, FEED))).await {
        sent.expect("let through");
    }
    script.times()[4]
}

#[tokio::test(start_paused = true)]
async fn what_is_left_is_first_of_all_for_the_requests_in_flight() {
    for (layer, _) in both() {
        for used_up in ["0", "1", "3"] {
            assert_eq!(fifth_of_five(layer.clone(), used_up).await, secs(21), "{used_up} for three");
        }
        for more in ["4", "100"] {
            assert_eq!(fifth_of_five(layer.clone(), more).await, secs(1), "{more} for three");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_negative_remainder_is_no_limit() {
    for (layer, _) in both() {
        assert_eq!(next_send(&layer, left(200, "-1", "30")).await, secs(0));
        assert_eq!(next_send(&layer, left(429, "-1", "30")).await, ESCALATION);
    }
}

// --- the reset --------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_hold_is_no_longer_than_the_longest_cooldown() {
    for (layer, cap) in both() {
        for far in ["3600", "99999999999999999999", &in_seconds(3600), "Fri, 31 Dec 9999 23:59:59 GMT"] {
            for status in [200, 429, 403] {
                let reply = left(status, "0", far).header("date", DATE);
                assert_eq!(next_send(&layer, reply).await, cap, "{status}, {far}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r04_a_reset_that_is_over_is_none() {
    for (layer, _) in both() {
        for over in ["0", "0.0", &(NOW - 5).to_string(), &NOW.to_string(), "Wed, 02 Dec 2026 23:58:55 GMT"] {
            assert_eq!(next_send(&layer, left(200, "0", over).header("date", DATE)).await, secs(0), "{over}");
            let refusal = left(429, "0", over).header("date", DATE);
            assert_eq!(next_send(&layer, refusal.clone()).await, ESCALATION, "{over}");

            // And like any refusal without a hint it escalates further.
            let script = Script::always(refusal);
            let client = another(&layer).layer(script.clone());
            for _ in 0..4 {
                send(&client, FEED).await.unwrap();
            }
            assert_eq!(script.times(), [0, 2, 6, 14].map(secs), "{over}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r07_durations_and_rfc_3339_are_never_read_by_their_first_digits() {
    for (layer, _) in both() {
        for other in ["1s", "6m0s", "2m59.56s", "500ms", "2026-12-03T00:00:42Z", "30;w=60", "-30", "soon", ""] {
            assert_eq!(next_send(&layer, left(200, "0", other).header("date", DATE)).await, secs(0), "{other}");
            assert_eq!(next_send(&layer, left(429, "0", other).header("date", DATE)).await, ESCALATION, "{other}");
            assert_eq!(next_send(&layer, left(200, other, "30")).await, secs(0), "{other} left");
            let structured = Reply::ok().header("ratelimit", &format!("\"p\";r=0;t={other}"));
            if other != "30;w=60" {
                assert_eq!(next_send(&layer, structured).await, secs(0), "{other} structured");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn bytes_that_are_not_text_say_nothing() {
    for (layer, _) in both() {
        let bytes = Reply::ok()
            .header_bytes("x-ratelimit-remaining", b"0\xa0")
            .header_bytes("x-ratelimit-reset", b"\xff\xfe")
            .header_bytes("ratelimit", b"\"\xc3\xa9\";r=0;t=30")
            .header_bytes("age", b"\xb3\xb0");
        assert_eq!(next_send(&layer, bytes).await, secs(0));
    }
}

#[tokio::test(start_paused = true)]
async fn an_instant_measured_against_our_own_clock_is_waited_for() {
    let reset = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + 30;
    for (layer, _) in both() {
        send(&layer.layer(Script::list([left(200, "0", &reset.to_string())])), FEED).await.unwrap();
        // However late this is looked at: the hold began before.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        assert!(now + host(&layer).cooldown >= secs(reset), "{:?}", host(&layer).cooldown);
    }
}

// --- refusals ---------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn nothing_left_is_the_hint_of_a_refusal_that_has_no_other() {
    for (layer, _) in both() {
        for status in [429, 403] {
            let layer = layer.clone().max_wait(secs(10));
            let client = layer.layer(Script::always(left(status, "0", "40")));
            send(&client, FEED).await.unwrap();
            let limited = shed(send(&client, FEED).await);
            assert_eq!(limited.retry_after(), secs(40));
            assert_eq!(limited.asked(), Some(secs(40)), "what the server itself said");
            assert_eq!((limited.reason(), limited.streak()), (Reason::Cooldown, 1));
            assert_eq!(host(&layer).last_hint, secs(40), "{status}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r03_retry_after_wins() {
    for (layer, _) in both() {
        for remaining in ["10", "0"] {
            let reply = Reply::status(429)
                .header("retry-after", "5")
                .header("ratelimit-limit", "100")
                .header("ratelimit-remaining", remaining)
                .header("ratelimit-reset", "3600");
            assert_eq!(next_send(&layer, reply).await, secs(5), "{remaining} left");
        }
        let longer = left(429, "0", "5").header("retry-after", "40");
        assert_eq!(next_send(&layer, longer).await, secs(40));
        let none = left(429, "0", "20").header("retry-after", "soon");
        assert_eq!(next_send(&layer, none).await, secs(20), "one that is none wins over nothing");
    }
}

#[tokio::test(start_paused = true)]
async fn r10_a_refusal_with_something_left_escalates() {
    for (layer, _) in both() {
        for status in [403, 429] {
            let reply = left(status, "4800", &in_seconds(3000)).header("date", DATE);
            assert_eq!(next_send(&layer, reply.clone()).await, ESCALATION, "{status}");

            let script = Script::always(reply);
            let client = another(&layer).layer(script.clone());
            for _ in 0..4 {
                send(&client, FEED).await.unwrap();
            }
            assert_eq!(script.times(), [0, 2, 6, 14].map(secs), "{status}");
        }
    }
}

// A 403 is the URL's, perhaps; one that says that nothing is left is not.
#[tokio::test(start_paused = true)]
async fn a_403_with_nothing_left_is_held_as_long_as_it_says() {
    for (layer, _) in both() {
        let layer = layer.max_cooldown(secs(100_000));
        let reply = left(403, "0", &in_seconds(3000)).header("date", DATE);
        assert_eq!(next_send(&layer, reply).await, secs(3000), "and not a minute");
    }
}

#[tokio::test(start_paused = true)]
async fn the_retry_in_flight_waits_for_the_reset_too() {
    for (layer, _) in both() {
        for (reset, resent) in [("3", 3), ("40", 5)] {
            let script = Script::list([left(429, "0", reset)]);
            let layer = another(&layer);
            let client = layer.layer(RetryLayer::new(layer.in_flight_retry()).layer(script.clone()));
            assert_eq!(client.oneshot(get(FEED)).await.unwrap().status(), 200);
            assert_eq!(script.times(), [secs(0), secs(resent)], "a reset of {reset} s");
        }
    }
}

// --- other responses --------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn r09_a_redirect_counts_and_a_cached_response_does_not() {
    for (layer, _) in both() {
        let redirect = Reply::status(301).header("location", "/elsewhere").header("ratelimit", r#""p";r=0;t=10"#);
        assert_eq!(next_send(&layer, redirect).await, secs(10));

        let cached = |age| Reply::ok().header("age", age).header("ratelimit", r#""p";r=0;t=60"#);
        assert_eq!(next_send(&layer, cached("30")).await, secs(0));
        assert_eq!(next_send(&layer, cached("0")).await, secs(60), "fresh from the server");
        assert_eq!(next_send(&layer, left(429, "0", "60").header("age", "30")).await, ESCALATION);
    }
}

#[tokio::test(start_paused = true)]
async fn any_answer_counts_whatever_its_status() {
    for (layer, _) in both() {
        for status in [204, 304, 404, 500, 503] {
            assert_eq!(next_send(&layer, left(status, "0", "30")).await, secs(30), "{status}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_redirect_inside_ends_with_is_charged_to_the_final_host_alone() {
    for (layer, _) in both() {
        let layer = layer.final_uri(|extensions| extensions.get::<Uri>().cloned());
        let elsewhere = Uri::from_static("http://mirror.example/feed.xml");
        let client = layer.layer(Script::list([left(200, "0", "30").extension(elsewhere)]));
        send(&client, FEED).await.unwrap();
        assert_eq!(layer.hosts().get("mirror.example:80").unwrap().cooldown, secs(30));
        assert_eq!(layer.hosts().get(HOST).map_or(Duration::ZERO, |asked| asked.cooldown), Duration::ZERO);
    }
}

// --- the hold ---------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_hold_is_the_hosts_alone() {
    for (layer, _) in both() {
        let script = Script::list([left(200, "0", "30")]);
        let client = layer.layer(script.clone());
        send(&client, FEED).await.unwrap();
        send(&client, "http://other.example/feed.xml").await.unwrap();
        assert_eq!(script.times(), [secs(0); 2]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_no_refusal_and_leaves_nothing_behind() {
    for (layer, _) in both() {
        let script = Script::list([left(200, "0", "30")]);
        let client = layer.layer(script.clone());
        send(&client, FEED).await.unwrap();
        let held = host(&layer);
        assert_eq!((held.cooldown, held.streak, held.warm), (secs(30), 0, Duration::ZERO));

        for sent in join_all((0..3).map(|_| send(&client, FEED))).await {
            sent.unwrap();
        }
        assert_eq!(script.times()[1..], [secs(30); 3], "unspaced");
        sleep(secs(200)).await;
        assert!(layer.hosts().snapshot().is_empty(), "{:?}", layer.hosts().snapshot());
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_only_grows() {
    for (layer, _) in both() {
        let script = Script::list([left(200, "0", "30").after(secs(1)), left(200, "0", "5").after(secs(2))]);
        let client = layer.concurrency(2).layer(script.clone());
        for sent in join_all((0..3).map(|_| send(&client, FEED))).await {
            sent.unwrap();
        }
        assert_eq!(script.times(), [secs(0), secs(0), secs(31)]);
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_and_has_no_prospect_any_more_is_told_at_once() {
    for (layer, cap) in both() {
        let layer = layer.max_wait(secs(30));
        let script = Script::list([left(200, "0", "3600").after(secs(1))]);
        let client = layer.layer(script.clone());
        let [first, second] = [FEED, FEED].map(|uri| spawn(&client, uri));
        first.await.unwrap().unwrap();
        let limited = shed(second.await.unwrap());
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, cap));
        assert_eq!((limited.status(), limited.streak()), (None, 0), "nobody was refused");
        assert_eq!(script.times(), [secs(0)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_already_let_through_waits_as_well() {
    for (layer, _) in both() {
        let script = Script::list([left(200, "0", "30").after(secs(1))]);
        let client = layer.concurrency(2).layer(script.clone());
        let first = spawn(&client, FEED);
        sleep(millis(500)).await;
        // With a permit at once, but the inner service is not ready before the answer to the first is here.
        script.hold();
        let second = spawn(&client, FEED);
        sleep(secs(1)).await;
        script.release();
        first.await.unwrap().unwrap();
        second.await.unwrap().unwrap();
        assert_eq!(script.times(), [secs(0), secs(31)]);
    }
}

// --- what is learnt ---------------------------------------------------------------------------------------------------

/// The spacing learnt of a host that has refused the second of two requests at once, before and after this answer.
async fn gaps(refusal: Reply, answer: Reply) -> (Duration, Duration) {
    let layer = HostGateLayer::new();
    let client = layer.layer(Script::list([Reply::ok().after(millis(1)), refusal, Reply::ok(), answer]));
    join_all((0..2).map(|_| send(&client, FEED))).await;
    let mut gaps = Vec::new();
    for _ in 0..2 {
        send(&client, FEED).await.expect("let through");
        gaps.push(host(&layer).gap);
    }
    (gaps[0], gaps[1])
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_what_is_left_needs_no_learnt_spacing() {
    let (before, after) = gaps(Reply::status(429), left(200, "50", "60")).await;
    assert!(before > Duration::ZERO);
    assert_eq!(after, Duration::ZERO);
}

// A daily quota beside a limit on bursts.
#[tokio::test(start_paused = true)]
async fn a_server_that_has_refused_with_something_left_does() {
    let (before, after) = gaps(left(429, "70", "60"), left(200, "50", "60")).await;
    assert!(before > Duration::ZERO && after > Duration::ZERO, "{before:?}, {after:?}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_no_success_changes_nothing_that_is_learnt() {
    for neutral in [500, 503, 408] {
        let (before, after) = gaps(Reply::status(429), left(neutral, "50", "60")).await;
        assert!(before > Duration::ZERO);
        assert_eq!(after, before, "{neutral}");
    }
}
