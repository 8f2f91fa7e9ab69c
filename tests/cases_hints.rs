//! The H cases: what a `Retry-After` does to the next send, through the real layer and under the paused clock.
//!
//! Dates are measured against the response's own `Date`, so a test that sends one is exact whatever the wall clock says.

mod support;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{Extensions, HeaderMap, Response, StatusCode};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep};
use tower::{BoxError, Layer as _, ServiceExt as _};
use tower_host_gate::{HostGate, HostGateLayer, Limits, Outcome, RateLimited, ResponseBody, RetryAfterUnit};

use support::reactive;
use support::script::{Reply, Script, ScriptBody, get};

const FEED: &str = "http://feeds.example/feed.xml";
const HOST: &str = "feeds.example:80";

/// The first cooldown of a host that names none: what a hint that is none comes to.
const ESCALATION: Duration = Duration::from_secs(2);
const CAP: Duration = Duration::from_secs(60);

async fn send(client: &HostGate<Script>, uri: &str) -> Result<Response<ResponseBody<ScriptBody>>, BoxError> {
    client.clone().oneshot(get(uri)).await
}

/// What the gate said instead of sending.
async fn shed(client: &HostGate<Script>, uri: &str) -> RateLimited {
    let error = send(client, uri).await.expect_err("the request is shed");
    RateLimited::find(&*error).expect("shed with RateLimited").clone()
}

/// When the request after this refusal goes out: refused at 0, asked for at 0.
async fn next_send_of(layer: HostGateLayer, refusal: Reply) -> Duration {
    let script = Script::list([refusal]);
    let client = layer.layer(script.clone());
    for _ in 0..2 {
        send(&client, FEED).await.expect("no error surfaces to the caller");
    }
    script.times()[1]
}

/// The same with the default settings.
async fn next_send(refusal: Reply) -> Duration {
    next_send_of(reactive(), refusal).await
}

fn refusal(retry_after: &str) -> Reply {
    Reply::status(429).header("retry-after", retry_after)
}

/// Does not get in the way of any hint of a test.
fn patient() -> HostGateLayer {
    reactive().max_cooldown(secs(100_000)).max_wait(secs(100_000))
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

// --- numbers ----------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn h01_a_hint_of_zero_escalates() {
    let script = Script::list(vec![refusal("0"); 5]);
    let client = reactive().layer(script.clone());
    for _ in 0..6 {
        send(&client, FEED).await.unwrap();
    }
    let gaps: Vec<_> = script.times().windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert_eq!(gaps, [2, 4, 8, 16, 32]);
    for zero in ["0.0", "000", "0, 0"] {
        assert_eq!(next_send(refusal(zero)).await, ESCALATION, "{zero}");
    }
}

#[tokio::test(start_paused = true)]
async fn h02_a_date_that_is_past_or_now_escalates() {
    let now = "Wed, 02 Dec 2026 23:59:00 GMT";
    for past in ["Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 02 Dec 2026 23:58:59 GMT", now] {
        assert_eq!(next_send(refusal(past).header("date", now)).await, ESCALATION, "{past}");
    }
    // Against our own clock, when the response has none.
    let a_second_ago = httpdate::fmt_http_date(SystemTime::now() - secs(1));
    assert_eq!(next_send(refusal(&a_second_ago)).await, ESCALATION);

    // And like any refusal without a hint it escalates further.
    let script = Script::always(refusal(now).header("date", now));
    let client = reactive().layer(script.clone());
    for _ in 0..4 {
        send(&client, FEED).await.unwrap();
    }
    assert_eq!(script.times(), [0, 2, 6, 14].map(secs));
}

#[tokio::test(start_paused = true)]
async fn h03_fractional_seconds_are_never_waited_for_too_briefly() {
    for (hint, wait) in [("0.129", 129), ("0.493", 493), ("1.5", 1_500), ("2.542", 2_542), ("299.997", 299_997)] {
        assert_eq!(next_send_of(patient(), refusal(hint)).await, millis(wait), "{hint}");
    }
    // Less than the clock's millisecond rounds up.
    assert_eq!(next_send_of(patient(), refusal("0.1290001")).await, millis(130));
    assert_eq!(next_send(refusal("299.997")).await, CAP, "capped, and not the default of a hint that is none");
}

#[tokio::test(start_paused = true)]
async fn h04_a_negative_number_is_no_hint() {
    for hint in ["-5", "-1.5", "-0"] {
        assert_eq!(next_send(refusal(hint)).await, ESCALATION, "{hint}");
    }
}

#[tokio::test(start_paused = true)]
async fn h06_a_number_with_trailing_junk_is_no_hint() {
    for hint in ["120junk", "0x10", "10s", "1e3", "120;", "\"120\"", "1.", "1 2", "120 seconds"] {
        assert_eq!(next_send(refusal(hint)).await, ESCALATION, "{hint}");
    }
}

#[tokio::test(start_paused = true)]
async fn h07_leading_zeros_are_dropped_and_a_leading_plus_is_no_hint() {
    assert_eq!(next_send(refusal("007")).await, secs(7));
    assert_eq!(next_send_of(patient(), refusal("0000000000000000000000060")).await, secs(60));
    assert_eq!(next_send(refusal("+120")).await, ESCALATION);
}

#[tokio::test(start_paused = true)]
async fn h08_a_huge_integer_saturates_at_the_cap() {
    let four_thousand_digits = "9".repeat(4_000);
    let huge = [
        "9999999999",
        "18446744073709551615",
        "18446744073709551616",
        "99999999999999999999999",
        &four_thousand_digits,
        "99999999999999999999999.5",
    ];
    for hint in huge {
        assert_eq!(next_send(refusal(hint)).await, CAP, "{hint:.30}");

        let client = reactive().max_wait(secs(1)).layer(Script::always(refusal(hint)));
        send(&client, FEED).await.unwrap();
        let limited = shed(&client, FEED).await;
        assert!(limited.asked().unwrap() > secs(365 * 86_400), "very long, and not no hint: {hint:.30}");
        assert!(limited.raw_hint().unwrap().len() <= 128);
    }
}

#[tokio::test(start_paused = true)]
async fn h09_a_wait_too_far_for_the_timer_does_not_panic() {
    let for_ever = || {
        reactive()
            .base_cooldown(Duration::MAX)
            .max_cooldown(Duration::MAX)
            .spacing(Duration::MAX)
            .warm_for(Duration::MAX)
            .max_wait(Duration::MAX)
    };
    // A second is waited out, and whoever comes behind it is spaced for ever; the others are held for ever.
    let cases = [
        (refusal("1"), vec![secs(0), secs(1)]),
        (refusal("1844674407370955161"), vec![secs(0)]),
        (Reply::status(429), vec![secs(0)]),
    ];
    for (refusal, expected) in cases {
        let script = Script::always(refusal.clone());
        let layer = for_ever();
        let client = layer.layer(script.clone());
        send(&client, FEED).await.unwrap();
        let waiting: Vec<_> = (0..3).map(|_| tokio::spawn(client.clone().oneshot(get(FEED)))).collect();

        sleep(secs(3 * 365 * 86_400)).await;

        assert_eq!(script.times(), expected, "{refusal:?}");
        let state = layer.hosts().get(HOST).unwrap();
        assert!(state.next_send.min(state.warm) > secs(100 * 365 * 86_400), "{state:?}");
        waiting.iter().for_each(|task| task.abort());
    }
}

#[tokio::test(start_paused = true)]
async fn h11_a_host_that_means_milliseconds_can_be_said_to() {
    let layer = reactive().max_cooldown(secs(120)).max_wait(secs(120));
    let in_millis = Limits::default().retry_after_unit(RetryAfterUnit::Millis);

    let with_override = layer.clone().per_host("feeds.example", in_millis.clone());
    assert_eq!(next_send_of(with_override, refusal("64000")).await, secs(64));
    let for_another_host = layer.clone().per_host("other.example", in_millis.clone());
    assert_eq!(next_send_of(for_another_host, refusal("64000")).await, secs(120), "read as seconds, and capped");

    let at_run_time = layer.clone();
    at_run_time.hosts().set_limits(HOST, in_millis);
    assert_eq!(next_send_of(at_run_time, refusal("64000")).await, secs(64));
}

#[tokio::test(start_paused = true)]
async fn h12_a_minute_is_a_minute_in_every_header() {
    const NOW: &str = "Wed, 02 Dec 2026 23:59:00 GMT";
    let midnight = httpdate::parse_http_date(NOW).unwrap() + secs(60);
    let since_epoch = midnight.duration_since(UNIX_EPOCH).unwrap();
    let headers = [
        ("retry-after", "60".to_owned()),
        ("retry-after", "60.0".to_owned()),
        ("retry-after", httpdate::fmt_http_date(midnight)),
        ("retry-after", since_epoch.as_secs().to_string()),
        ("retry-after", since_epoch.as_millis().to_string()),
        ("retry-after-ms", "60000".to_owned()),
        ("x-ms-retry-after-ms", "60000".to_owned()),
    ];
    for (name, value) in headers {
        let refusal = Reply::status(429).header("date", NOW).header(name, &value);
        assert_eq!(next_send_of(patient(), refusal).await, secs(60), "{name}: {value}");
    }
    // The finer header wins.
    let both = refusal("2").header("retry-after-ms", "1500");
    assert_eq!(next_send_of(patient(), both).await, millis(1_500));
}

// --- dates ------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn h14_the_three_forms_of_an_http_date() {
    let forms = ["Thu, 03 Dec 2026 00:00:00 GMT", "Thursday, 03-Dec-26 00:00:00 GMT", "Thu Dec  3 00:00:00 2026"];
    for date in forms {
        let refusal = refusal(date).header("date", "Wed, 02 Dec 2026 23:59:00 GMT");
        assert_eq!(next_send_of(patient(), refusal).await, secs(60), "{date}");
    }
}

/// Without a `Date` of the response our own clock is the measure.
#[tokio::test(start_paused = true)]
async fn h14_a_date_is_measured_against_the_wall_clock_when_the_response_has_none() {
    let in_an_hour = httpdate::fmt_http_date(SystemTime::now() + secs(3600));
    let wait = next_send_of(patient(), refusal(&in_an_hour)).await;
    // Its second is cut, and this test may have been slow.
    assert!(wait > secs(3500) && wait <= secs(3600), "{wait:?}");
}

#[tokio::test(start_paused = true)]
async fn h15_a_two_digit_year_is_not_68_years_ahead() {
    let past = refusal("Sunday, 06-Nov-94 08:49:37 GMT");
    assert_eq!(next_send(past.clone()).await, ESCALATION);
    assert_eq!(next_send(past.header("date", "Wed, 02 Dec 2026 23:59:00 GMT")).await, ESCALATION);
}

#[tokio::test(start_paused = true)]
async fn h17_zones_and_shapes_that_servers_send() {
    const NOW: &str = "Wed, 21 Oct 2026 07:27:00 GMT";
    let a_minute_ahead = [
        "Wed, 21 Oct 2026 07:28:00 UTC",
        "Wed, 21 Oct 2026 07:28:00 +0000",
        "Wed, 21 Oct 2026 07:28:00 -0000",
        "wed, 21 oct 2026 07:28:00 gmt",
        // It is a Wednesday.
        "Mon, 21 Oct 2026 07:28:00 GMT",
    ];
    for date in a_minute_ahead {
        assert_eq!(next_send_of(patient(), refusal(date).header("date", NOW)).await, secs(60), "{date}");
    }
    let one_digit = refusal("Wed, 1 Oct 2031 07:28:00 GMT").header("date", "Wed, 01 Oct 2031 07:27:00 GMT");
    assert_eq!(next_send_of(patient(), one_digit).await, secs(60));

    let not_honoured = [
        "Wed, 21 Oct 2026 07:28:00 EST",
        "Wed, 21 Oct 2026 07:28:00 +0100",
        "Wed, 21 Oct 2026 07:28:00",
        "2026-12-03T00:00:00Z",
        "1 Jan 2099 00:00:00",
    ];
    for date in not_honoured {
        assert_eq!(next_send_of(patient(), refusal(date).header("date", NOW)).await, ESCALATION, "{date}");
    }
}

#[tokio::test(start_paused = true)]
async fn h18_a_leap_second_and_impossible_dates() {
    let leap = refusal("Thu, 31 Dec 2026 23:59:60 GMT").header("date", "Thu, 31 Dec 2026 23:59:30 GMT");
    assert_eq!(next_send(leap).await, secs(30), "the second after :59");
    assert_eq!(next_send(refusal("Fri, 31 Dec 9999 23:59:59 GMT")).await, CAP);
    for date in ["Wed, 30 Feb 2031 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "Sat, 31 Dec 2016 23:59:60 GMT"] {
        assert_eq!(next_send(refusal(date)).await, ESCALATION, "{date}");
    }
}

#[tokio::test(start_paused = true)]
async fn h19_white_space_is_trimmed_and_bytes_that_are_not_ascii_are_no_hint() {
    for hint in [" 5 ", "\t5", "5\t "] {
        assert_eq!(next_send(refusal(hint)).await, secs(5), "{hint:?}");
    }
    for hint in [b"".as_slice(), b"  ", b"12\xa0", b"\xff", "٦٠".as_bytes(), "６０".as_bytes()] {
        let refusal = Reply::status(429).header_bytes("retry-after", hint);
        assert_eq!(next_send(refusal).await, ESCALATION, "{hint:?}");
    }
}

// --- what the gate makes of it ----------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn h21_a_wait_past_the_cap_is_told_to_siblings_at_once_and_the_gate_tries_again_at_the_cap() {
    let script = Script::list([refusal("3600").after(millis(100))]);
    let client = reactive().layer(script.clone());
    let first = tokio::spawn(client.clone().oneshot(get(FEED)));
    let siblings: Vec<_> = (0..20).map(|_| tokio::spawn(client.clone().oneshot(get(FEED)))).collect();
    first.await.unwrap().unwrap();
    let refused_at = Instant::now();

    for sibling in siblings {
        let error = sibling.await.unwrap().expect_err("60.1 s are more than the budget of 60 s");
        let limited = RateLimited::find(&*error).unwrap();
        assert_eq!(refused_at.elapsed(), secs(0), "told at once");
        assert_eq!(limited.asked(), Some(secs(3600)), "what the server said, uncapped");
        assert_eq!(limited.raw_hint(), Some("3600"));
        assert_eq!(limited.retry_after(), CAP, "what the gate will do: try again at the cap");
    }

    // A request whose budget begins now is absorbed, and goes at the cap, not after the hour.
    send(&client, FEED).await.unwrap();
    assert_eq!(script.times(), [secs(0), millis(60_100)]);
}

/// Siblings that have just been refused for want of budget are no longer in front of anybody, though their tasks have not
/// run yet to hear of it.
#[tokio::test(start_paused = true)]
async fn h21_a_request_is_not_counted_behind_siblings_that_are_being_shed() {
    let script = Script::list([refusal("3600").after(millis(100))]);
    let client = reactive().max_queue(20).layer(script.clone());
    let first = tokio::spawn({
        let client = client.clone();
        async move {
            send(&client, FEED).await.unwrap();
            // In the same poll as the refusal.
            send(&client, FEED).await
        }
    });
    let siblings: Vec<_> = (0..20).map(|_| tokio::spawn(client.clone().oneshot(get(FEED)))).collect();

    first.await.unwrap().expect("60 s of cooldown are within the budget of 60 s");

    for sibling in siblings {
        assert!(sibling.await.unwrap().is_err());
    }
    assert_eq!(script.times(), [secs(0), millis(60_100)]);
}

#[tokio::test(start_paused = true)]
async fn h22_a_hint_of_a_year_is_no_denial_of_service() {
    let script = Script::new(|sent| match sent.host.as_str() {
        "hostile.example" => refusal("31536000"),
        _ => Reply::ok(),
    });
    let layer = reactive();
    let client = layer.layer(script.clone());
    send(&client, "http://hostile.example/").await.unwrap();

    for n in 0..20 {
        send(&client, &format!("http://other-{n}.example/")).await.unwrap();
    }
    assert!(script.times().iter().all(Duration::is_zero), "no other host is affected");

    // Whoever waits holds no permit, and not for longer than its budget.
    let waiting = tokio::spawn(client.clone().oneshot(get("http://hostile.example/")));
    tokio::task::yield_now().await;
    let state = layer.hosts().get("hostile.example:80").unwrap();
    assert_eq!((state.in_flight, state.queued, state.cooldown), (0, 1, CAP));
    waiting.await.unwrap().unwrap();
    assert_eq!(script.times_of("hostile.example"), [secs(0), CAP]);
}

#[tokio::test(start_paused = true)]
async fn h23_only_a_throttle_status_changes_anything() {
    let hinted = |status| Reply::status(status).header("retry-after", "30");
    let says_nothing =
        [hinted(200), hinted(202), hinted(301), hinted(404), hinted(408), Reply::status(500), Reply::status(503)];
    for answer in says_nothing {
        let script = Script::list([answer.clone()]);
        let layer = reactive();
        let client = layer.layer(script.clone());
        send(&client, FEED).await.unwrap();
        assert_eq!(layer.hosts().get(HOST), None, "{answer:?}");
        send(&client, FEED).await.unwrap();
        assert_eq!(script.times(), [secs(0), secs(0)], "{answer:?}");
    }
    let throttles = [
        (hinted(429), secs(30)),
        (hinted(403), secs(30)),
        (hinted(503), secs(30)),
        (hinted(500), secs(30)),
        (hinted(529), secs(30)),
        (Reply::status(429), ESCALATION),
        (Reply::status(403), ESCALATION),
    ];
    for (answer, wait) in throttles {
        assert_eq!(next_send(answer.clone()).await, wait, "{answer:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn h25_a_hint_in_the_body_is_not_read_and_the_body_arrives_whole() {
    let body = r#"{"retry_after": 30}"#;
    let script = Script::list([refusal("0").body(body)]);
    let client = reactive().layer(script.clone());

    let response = send(&client, FEED).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), body);
    send(&client, FEED).await.unwrap();

    assert_eq!(script.times(), [secs(0), ESCALATION]);
}

/// What a layer below has read from a body.
#[derive(Clone, Copy)]
struct ReadFromBody(Duration);

#[tokio::test(start_paused = true)]
async fn h25_a_verdict_of_the_users_can_find_a_hint_in_headers_and_extensions() {
    let verdict = |status: StatusCode, headers: &HeaderMap, extensions: &Extensions| {
        let from_body = extensions.get().map(|ReadFromBody(wait)| *wait);
        let from_header = headers.get("x-backoff").and_then(|value| value.to_str().ok()?.parse().ok()).map(secs);
        match from_body.or(from_header) {
            None => Outcome::of(status, headers),
            hint => Outcome::Throttled { hint, soft: false },
        }
    };
    for answer in [
        refusal("0").extension(ReadFromBody(secs(30))),
        Reply::status(429).header("x-backoff", "30"),
        // The verdict's word, not the status, is what counts.
        Reply::ok().header("x-backoff", "30"),
    ] {
        assert_eq!(next_send_of(reactive().verdict(verdict), answer).await, secs(30));
    }
    assert_eq!(next_send_of(reactive().verdict(verdict), Reply::status(429)).await, ESCALATION);
}
