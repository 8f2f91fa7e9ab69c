use std::time::UNIX_EPOCH;

use http::HeaderValue;
use proptest::prelude::*;

use super::*;

/// 2026-12-02 23:59:00 UTC: a minute before `MIDNIGHT`.
const NOW: u64 = 1_796_255_940;
const MIDNIGHT: &str = "Thu, 03 Dec 2026 00:00:00 GMT";

const FAMILIES: [(&str, &str); 3] = [
    ("ratelimit-remaining", "ratelimit-reset"),
    ("x-ratelimit-remaining", "x-ratelimit-reset"),
    ("x-rate-limit-remaining", "x-rate-limit-reset"),
];

fn headers<V: AsRef<[u8]>>(lines: &[(&str, V)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in lines {
        let name: HeaderName = name.parse().unwrap();
        map.append(name, HeaderValue::from_bytes(value.as_ref()).unwrap());
    }
    map
}

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(NOW)
}

fn said<V: AsRef<[u8]>>(lines: &[(&str, V)]) -> Option<Quota> {
    quota(&headers(lines), now)
}

/// In one of the headers of the structured field.
fn structured(value: &str) -> Option<Quota> {
    said(&[("ratelimit", value)])
}

/// What the reset comes to, in the same way in all the families.
#[track_caller]
fn reset(value: impl AsRef<[u8]>) -> Option<Duration> {
    let said = FAMILIES.map(|(remaining, reset)| said(&[(remaining, b"7".as_slice()), (reset, value.as_ref())]));
    let text = String::from_utf8_lossy(value.as_ref());
    assert!(said.iter().all(|quota| *quota == said[0]), "{text:.30}: {said:?}");
    said[0].map(|quota| {
        assert_eq!(quota.remaining, 7, "{text:.30}");
        quota.reset
    })
}

#[track_caller]
fn remaining(value: impl AsRef<[u8]>) -> Option<u64> {
    said(&[("x-ratelimit-remaining", value.as_ref()), ("x-ratelimit-reset", b"30")]).map(|quota| quota.remaining)
}

fn left(remaining: u64, seconds: u64) -> Option<Quota> {
    Some(Quota { remaining, reset: Duration::from_secs(seconds) })
}

fn secs(secs: u64) -> Option<Duration> {
    Some(Duration::from_secs(secs))
}

fn nanos(nanos: u64) -> Option<Duration> {
    Some(Duration::from_nanos(nanos))
}

// --- the forms --------------------------------------------------------------------------------------------------------

#[test]
fn the_structured_field_is_a_list_of_policies() {
    assert_eq!(structured(r#""default";r=50;t=30"#), left(50, 30));
    assert_eq!(structured(r#""p";r=0;t=10"#), left(0, 10));
    assert_eq!(structured(r#""100-in-15min"; r=99; t=900"#), left(99, 900));
    assert_eq!(structured(r#""a\"b";r=1;t=2;pk=:cGs=:;note="x""#), left(1, 2));
    assert_eq!(structured("default;r=50;t=30"), left(50, 30), "a token, as an older draft had it");
    assert_eq!(structured(r#""burst";r=5;t=2, "daily";r=900;t=3600"#), left(5, 2));
    assert_eq!(structured(r#""burst";r=5;t=2, "daily";r=0;t=3600"#), left(0, 3600));
    assert_eq!(said(&[("ratelimit", r#""burst";r=5;t=2"#), ("ratelimit", r#""daily";r=4;t=3600"#)]), left(4, 3600));
    assert_eq!(structured(r#""a";r=9;r=3;t=1;t=2"#), left(3, 2), "of equal parameters the last one counts");
    assert_eq!(structured(r#""a";r=0;t=1.5"#).unwrap().reset, Duration::from_millis(1_500));
    assert_eq!(structured(r#""a";r=0;t=1796256000"#), left(0, 60), "an instant, whatever the draft says");
}

#[test]
fn the_structured_field_was_once_a_dictionary() {
    assert_eq!(structured("limit=100, remaining=50, reset=30"), left(50, 30));
    assert_eq!(structured("limit=100,remaining=0,reset=30"), left(0, 30));
    assert_eq!(structured("reset=30, remaining=50"), left(50, 30));
    assert_eq!(structured("limit=100;w=60, remaining=50;x=1, reset=30"), left(50, 30));
    assert_eq!(structured("remaining=99.0, reset=0.5").unwrap().reset, Duration::from_millis(500));
    let two = [("ratelimit", "remaining=50, reset=30"), ("ratelimit", "remaining=0, reset=5")];
    assert_eq!(said(&two), left(0, 5));
}

#[test]
fn a_policy_that_says_too_little_says_nothing() {
    for nothing in [
        r#""default""#,
        r#""default";r=0"#,
        r#""default";t=30"#,
        r#""default";r;t=30"#,
        r#""default";r=0;t"#,
        r#""default";r=0;t="30""#,
        r#""default";r=-1;t=30"#,
        r#""default";r=0;t=-30"#,
        r#""default";r=0;t=0"#,
        r#"("default");r=0;t=30"#,
        "100",
        "limit=100, remaining=0",
        "limit=100, reset=30",
        "remaining=(0), reset=30",
        "remaining, reset=30",
        "remaining=0, reset=0",
        r#"remaining="0", reset=30"#,
    ] {
        assert_eq!(structured(nothing), None, "{nothing}");
    }
    assert_eq!(structured(r#""silent", "burst";r=0, "daily";r=9;t=30"#), left(9, 30), "and does not spoil another");
}

#[test]
fn a_malformed_structured_field_says_nothing() {
    for malformed in [
        "",
        ",",
        r#""default";r=0;t=30,"#,
        r#""default";r=0;t=30 junk"#,
        r#""default;r=0;t=30"#,
        r#""default";R=0;T=30"#,
        r#""default";r=0;t=30s"#,
        r#""default";r=0;t=1234567890123456"#,
        "limit=100 remaining=0 reset=30",
        "remaining: 0, reset: 30",
        "remaining=0, reset=30s",
        "remaining=0, reset=30,",
        "Remaining=0, Reset=30",
    ] {
        assert_eq!(structured(malformed), None, "{malformed}");
    }
    let beside = [("ratelimit", "junk;;"), ("ratelimit", r#""default";r=1;t=30"#)];
    assert_eq!(said(&beside), left(1, 30), "a line of its own");
}

#[test]
fn each_of_the_three_families_of_two_headers() {
    for (remaining, reset) in FAMILIES {
        assert_eq!(said(&[(remaining, "50"), (reset, "30")]), left(50, 30), "{remaining}");
        assert_eq!(said(&[(reset, "30"), (remaining, "0")]), left(0, 30), "{remaining}: in either order");
        assert_eq!(said(&[(remaining, "0")]), None, "{remaining}");
        assert_eq!(said(&[(reset, "30")]), None, "{reset}");
    }
}

#[test]
fn families_are_not_mixed() {
    for (remaining, _) in FAMILIES {
        for (other, reset) in FAMILIES.into_iter().filter(|(other, _)| *other != remaining) {
            assert_eq!(said(&[(remaining, "0"), (reset, "30")]), None, "{remaining} with {reset}");
            assert_eq!(said(&[(remaining, "0"), (reset, "30"), (other, "9")]), left(9, 30));
        }
        assert_eq!(said(&[(remaining, "0"), ("ratelimit", r#""default";t=30"#)]), None, "{remaining}");
    }
}

#[test]
fn other_headers_of_a_similar_name_say_nothing() {
    for (remaining, reset) in [
        ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
        ("x-ratelimit-requests-remaining", "x-ratelimit-requests-reset"),
        ("anthropic-ratelimit-requests-remaining", "anthropic-ratelimit-requests-reset"),
        ("x-ratelimit-remaining", "x-ratelimit-reset-after"),
        ("ratelimit-policy", "ratelimit-limit"),
        ("rate-limit-remaining", "rate-limit-reset"),
        ("x-readlimit-remaining", "x-readlimit-reset"),
    ] {
        assert_eq!(said(&[(remaining, "0"), (reset, "30")]), None, "{remaining}");
    }
}

#[test]
fn what_servers_send() {
    // A site with an hourly limit.
    let github = [
        ("date", "Wed, 02 Dec 2026 23:59:00 GMT"),
        ("x-ratelimit-limit", "5000"),
        ("x-ratelimit-remaining", "4800"),
        ("x-ratelimit-reset", "1796258940"),
        ("x-ratelimit-resource", "core"),
        ("x-ratelimit-used", "200"),
    ];
    assert_eq!(said(&github), left(4800, 3000));
    // Remainders that are floats.
    let reddit = [("x-ratelimit-used", "100"), ("x-ratelimit-remaining", "0.0"), ("x-ratelimit-reset", "300")];
    assert_eq!(said(&reddit), left(0, 300));
    // A dash more in each name.
    let twitter =
        [("x-rate-limit-limit", "900"), ("x-rate-limit-remaining", "0"), ("x-rate-limit-reset", "1796256840")];
    assert_eq!(said(&twitter), left(0, 900));
    // Instants with a fraction.
    let discord =
        [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1796255941.470"), ("x-ratelimit-reset-after", "1.470")];
    assert_eq!(said(&discord), Some(Quota { remaining: 0, reset: Duration::from_millis(1_470) }));
    // Instants in milliseconds.
    let rocket_chat =
        [("x-ratelimit-limit", "10"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1796256000000")];
    assert_eq!(said(&rocket_chat), left(0, 60));
    // The same instant twice.
    let gitlab = [
        ("ratelimit-observed", "60"),
        ("ratelimit-remaining", "0"),
        ("ratelimit-reset", "1796256000"),
        ("ratelimit-resettime", MIDNIGHT),
    ];
    assert_eq!(said(&gitlab), left(0, 60));
    // A second's window and a month's.
    let brave = [
        ("x-ratelimit-limit", "1, 15000"),
        ("x-ratelimit-policy", "1;w=1, 15000;w=2592000"),
        ("x-ratelimit-remaining", "0, 14000"),
        ("x-ratelimit-reset", "1, 1419704"),
    ];
    assert_eq!(said(&brave), left(0, 1));
    // A window in place of a reset.
    let docker = [("ratelimit-limit", "100;w=21600"), ("ratelimit-remaining", "0;w=21600")];
    assert_eq!(said(&docker), None);
    // A limit that could not be looked up.
    let spring = [("x-ratelimit-remaining", "-1"), ("x-ratelimit-reset", "30")];
    assert_eq!(said(&spring), None);
}

// --- values -----------------------------------------------------------------------------------------------------------

#[test]
fn a_reset_is_seconds_from_the_response_on() {
    assert_eq!(reset("30"), secs(30));
    assert_eq!(reset(" 5\t"), secs(5));
    assert_eq!(reset("007"), secs(7));
    assert_eq!(reset("0".repeat(4000) + "60"), secs(60));
    assert_eq!(reset("0.129"), nanos(129_000_000));
    assert_eq!(reset("1.0000000001"), nanos(1_000_000_001));
    assert_eq!(reset("0.00000000000000000001"), nanos(1));
    assert_eq!(reset("999999999"), secs(999_999_999));
    assert_eq!(reset("1000000000"), secs(1_000_000_000));
}

#[test]
fn r01_a_reset_may_be_an_instant_in_any_unit() {
    for instant in ["1796256000", "1796256000000", "1796256000000000", "1796256000000000000", MIDNIGHT] {
        assert_eq!(reset(instant), secs(60), "{instant}");
    }
    assert_eq!(reset("1796256000.25"), nanos(60_250_000_000));
    assert_eq!(reset("1796256000250"), nanos(60_250_000_000));
    assert_eq!(reset("1796256000250000.5"), nanos(60_250_000_500));
    assert_eq!(reset("1796256000250000001.5"), nanos(60_250_000_002), "rounded up");
    assert_eq!(reset("Thursday, 03-Dec-26 00:00:00 GMT"), secs(60));
    assert_eq!(reset("Thu Dec  3 00:00:00 2026"), secs(60));
    assert_eq!(said(&[("ratelimit-remaining", "0"), ("ratelimit-reset", "1796256000")]), left(0, 60));
}

/// Each of them a thousand times the one before: between 1973 and 5138, whatever the unit.
#[test]
fn the_unit_of_an_instant_changes_at_powers_of_ten() {
    assert_eq!(reset("99999999999"), secs(99_999_999_999 - NOW));
    assert_eq!(reset("99999999999999"), Some(Duration::from_millis(99_999_999_999_999 - NOW * 1000)));
    for just_enough_for_the_next_unit in ["100000000000", "100000000000000", "100000000000000000"] {
        assert_eq!(reset(just_enough_for_the_next_unit), None, "1973");
    }
    assert_eq!(reset("18446744073709551615"), nanos(u64::MAX - NOW * 1_000_000_000));
}

#[test]
fn a_number_past_64_bits_is_the_longest_time() {
    for value in ["18446744073709551616".to_owned(), "9".repeat(23), "9".repeat(4000), "9".repeat(4000) + ".5"] {
        assert_eq!(reset(&value), Some(Duration::MAX), "{value:.30}");
        assert_eq!(remaining(&value), Some(u64::MAX), "{value:.30}");
    }
}

#[test]
fn r04_a_reset_that_is_over_says_nothing() {
    for over in [
        "0",
        "0.0",
        "1796255935",
        "1796255940",
        "1796255939999",
        "1796255940000000000",
        "1000000001",
        "Wed, 02 Dec 2026 23:58:55 GMT",
        "Wed, 02 Dec 2026 23:59:00 GMT",
    ] {
        assert_eq!(reset(over), None, "{over}");
    }
    assert_eq!(said(&[("x-ratelimit-remaining", "0, 9"), ("x-ratelimit-reset", "1796255935, 30")]), left(9, 30));
}

#[test]
fn r07_durations_and_rfc_3339_are_never_read_by_their_first_digits() {
    for other in [
        "1s",
        "6m0s",
        "2m59.56s",
        "500ms",
        "12ms",
        "1h",
        "2026-12-03T00:00:42Z",
        "2026-12-03T00:00:42+00:00",
        "2026-12-03 00:00:42 UTC",
        "Thu, 03 Dec 2026 00:00:00 EST",
        "30;w=60",
        "30 seconds",
        "-5",
        "+5",
        "1e3",
        "0x10",
        "\"30\"",
        "30.",
        ".5",
        "",
        " ",
        "never",
        "\u{0661}\u{0662}",
    ] {
        assert_eq!(reset(other), None, "{other}");
    }
    assert_eq!(reset(b"30\xa0"), None);
    assert_eq!(reset(b"\xff\xfe"), None);
}

#[test]
fn a_remainder_is_a_whole_number_of_requests() {
    assert_eq!(remaining("0"), Some(0));
    assert_eq!(remaining("007"), Some(7));
    assert_eq!(remaining("99.0"), Some(99));
    assert_eq!(remaining("0.9"), Some(0), "too little for one");
    for malformed in ["", "-1", "-0", "+5", "5s", "5;w=60", "5/100", "many", "1e3", "5.", "\"5\"", "5\u{a0}"] {
        assert_eq!(remaining(malformed), None, "{malformed}");
    }
}

#[test]
fn the_tightest_quota_counts() {
    let several = [
        ("ratelimit", r#""a";r=9;t=10"#),
        ("ratelimit-remaining", "8"),
        ("ratelimit-reset", "20"),
        ("x-ratelimit-remaining", "7"),
        ("x-ratelimit-reset", "30"),
        ("x-rate-limit-remaining", "6"),
        ("x-rate-limit-reset", "40"),
    ];
    assert_eq!(said(&several), left(6, 40));
    assert_eq!(said(&several[..5]), left(7, 30));
    assert_eq!(said(&several[..3]), left(8, 20));
    assert_eq!(said(&several[..1]), left(9, 10));

    let same = [
        ("ratelimit-remaining", "0, 0, 0"),
        ("ratelimit-reset", "30, 1796256000, 10"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", MIDNIGHT),
    ];
    assert_eq!(said(&same), left(0, 60), "of equal ones the longest");
}

#[test]
fn several_values_belong_together_one_by_one() {
    for (remaining, reset) in FAMILIES {
        assert_eq!(said(&[(remaining, "9, 0, 5"), (reset, "1, 2, 3")]), left(0, 2));
        assert_eq!(said(&[(remaining, "9"), (reset, "1"), (remaining, "0"), (reset, "2")]), left(0, 2), "in two lines");
        assert_eq!(said(&[(remaining, "9"), (reset, "1, 2"), (remaining, "0")]), left(0, 2), "as a proxy joins them");
        assert_eq!(said(&[(remaining, "junk, 4"), (reset, "1, 2")]), left(4, 2), "one of them malformed");
        assert_eq!(said(&[(remaining, "0, 4"), (reset, "1s, 2")]), left(4, 2));
        assert_eq!(said(&[(remaining, "0, 4"), (reset, &format!("{MIDNIGHT}, 2"))]), left(0, 60), "a date has a comma");
        assert_eq!(said(&[(remaining, "4, 0"), (reset, &format!("2, {MIDNIGHT}"))]), left(0, 60));
        assert_eq!(said(&[(remaining, "0, 4"), (reset, "30")]), None, "there is no telling whose reset it is");
        assert_eq!(said(&[(remaining, "0"), (reset, "30, 60")]), None);
    }
}

// --- the rest of the response -----------------------------------------------------------------------------------------

#[test]
fn r09_what_a_cache_says_is_ignored() {
    for age in ["1", "30", "0.5", "007", "30, 0", "99999999999999999999"] {
        assert_eq!(said(&[("age", age), ("ratelimit", r#""p";r=0;t=60"#)]), None, "{age}");
        assert_eq!(said(&[("ratelimit-remaining", "0"), ("ratelimit-reset", "60"), ("age", age)]), None, "{age}");
    }
    for fresh in ["0", "000", "", "-1", "young"] {
        assert_eq!(said(&[("age", fresh), ("ratelimit", r#""p";r=0;t=60"#)]), left(0, 60), "{fresh}");
    }
}

#[test]
fn instants_are_measured_against_the_responses_own_clock() {
    let an_hour_behind = "Wed, 02 Dec 2026 22:59:00 GMT";
    for instant in [MIDNIGHT, "1796256000", "1796256000000"] {
        let said = |date| said(&[("date", date), ("ratelimit-remaining", "0"), ("ratelimit-reset", instant)]);
        assert_eq!(said(an_hour_behind), left(0, 3660), "{instant}");
        assert_eq!(said(MIDNIGHT), None, "{instant}");
        assert_eq!(said("yesterday"), left(0, 60), "{instant}");
    }
    let behind = [("ratelimit-remaining", "0"), ("ratelimit-reset", MIDNIGHT), ("date", an_hour_behind)];
    assert_eq!(said(&behind), left(0, 3660), "whatever the order");
    assert_eq!(said(&[("date", an_hour_behind), ("ratelimit", r#""p";r=0;t=60"#)]), left(0, 60), "not an instant");
}

#[test]
fn our_own_clock_is_read_only_where_it_is_needed() {
    let unread = |lines: &[(&str, &str)]| quota(&headers(lines), || panic!("the clock was read"));
    assert_eq!(unread(&[]), None);
    assert_eq!(unread(&[("x-content-type-options", "nosniff"), ("age", "30")]), None);
    assert_eq!(unread(&[("ratelimit-remaining", "0"), ("ratelimit-reset", "30")]), left(0, 30));
    assert_eq!(unread(&[("ratelimit", r#""p";r=0;t=60"#)]), left(0, 60));
    assert_eq!(unread(&[("ratelimit-remaining", "0"), ("x-ratelimit-reset", "1796256000")]), None);
    let cached = [("age", "1"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "1796256000")];
    assert_eq!(unread(&cached), None);
    let dated =
        [("date", "Wed, 02 Dec 2026 23:59:00 GMT"), ("ratelimit-remaining", "0"), ("ratelimit-reset", MIDNIGHT)];
    assert_eq!(unread(&dated), left(0, 60));
}

#[test]
fn a_local_clock_before_the_epoch_is_survived() {
    let long_ago = || UNIX_EPOCH - Duration::from_secs(1);
    let lines = headers(&[("ratelimit-remaining", "0"), ("ratelimit-reset", "1796256000")]);
    assert_eq!(quota(&lines, long_ago), left(0, 1_796_256_000));
}

/// That none of these is worth a closer look is what a response costs that has nothing to say.
#[test]
fn ordinary_headers_are_passed_over() {
    const ORDINARY: &str = "accept-ranges access-control-allow-origin age alt-svc cache-control cf-ray connection content-encoding \
        content-length content-security-policy content-type date etag expires last-modified link location nel \
        permissions-policy pragma referrer-policy report-to retry-after server server-timing set-cookie \
        strict-transport-security transfer-encoding vary via x-amz-cf-id x-amz-request-id x-aspnet-version \
        x-cache x-cache-hits x-content-type-options x-dns-prefetch-control x-download-options x-frame-options \
        x-github-request-id x-permitted-cross-domain-policies x-powered-by x-ratelimit-limit x-request-id \
        x-robots-tag x-served-by x-timer x-ua-compatible x-xss-protection";
    let ordinary: Vec<_> = ORDINARY.split(' ').map(|name| (name, "1")).collect();
    assert!(!mentions_quota(&headers(&ordinary)));
    for name in FAMILIES.iter().map(|(remaining, _)| *remaining).chain(["ratelimit"]) {
        assert!(mentions_quota(&headers(&[&ordinary[..], &[(name, "1")]].concat())), "{name}");
    }
}

/// For a run to end in reasonable time each must be linear; no clock is asked.
#[test]
fn a_very_long_line_of_anything() {
    const LEN: usize = 1 << 18;
    for unit in ["9", "1.", ",", " ", "\u{ff}", "Thu,", "5,", "\"p\";r=0;t=9,", "a=1,", ";r=0", "(", "a=(1 2), "] {
        let value = &unit.repeat(LEN / unit.len());
        let _ = structured(value);
        let _ = said(&[("date", value), ("x-ratelimit-remaining", value), ("x-ratelimit-reset", value)]);
        let _ = said(&[("age", value), ("ratelimit", value)]);
    }
}

// --- any headers ------------------------------------------------------------------------------------------------------

const NAMES: [&str; 12] = [
    "age",
    "date",
    "ratelimit",
    "ratelimit-limit",
    "ratelimit-remaining",
    "ratelimit-reset",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "x-rate-limit-remaining",
    "x-rate-limit-reset",
    "x-content-type-options",
];

const VALUES: [&str; 14] = [
    "0",
    "9",
    "30.5",
    "0, 9",
    "1, 30",
    "1796256000",
    "1796256000000000000",
    MIDNIGHT,
    "2026-12-03T00:00:42Z",
    "-1",
    "99999999999999999999",
    r#""default";r=0;t=30"#,
    r#""burst";r=5;t=2, "daily";r=0;t=3600.5"#,
    "limit=100, remaining=0, reset=30",
];

fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![0x20..=0x7e_u8, 0x80..=0xff_u8, prop::sample::select(b" ,-.=;\":()@%?rt019".to_vec())];
    super::super::mutated::mutated(&VALUES, byte, 5)
}

fn any_value() -> impl Strategy<Value = Vec<u8>> {
    let any_bytes = prop::collection::vec(any::<u8>(), 0..40)
        .prop_map(|bytes| bytes.into_iter().filter(|byte| *byte >= 0x20 && *byte != 0x7f).collect());
    let digits = "[0-9]{1,4000}".prop_map(String::into_bytes);
    prop_oneof![4 => mutated(), 2 => any_bytes, 1 => digits]
}

/// How a quota may be written, and the lines it is written in.
fn written() -> impl Strategy<Value = (Quota, usize, bool)> {
    // Few remainders, so that some are equal.
    (0..4_u64, 1..1_000_000_u64, 0..5_usize, any::<bool>()).prop_map(|(remaining, seconds, form, instant)| {
        (Quota { remaining, reset: Duration::from_secs(seconds) }, form, instant)
    })
}

proptest! {
    #[test]
    fn never_panics_and_never_says_a_reset_of_zero(
        lines in prop::collection::vec((prop::sample::select(NAMES.to_vec()), any_value()), 0..8),
    ) {
        let lines = headers(&lines);
        let said = quota(&lines, now);
        prop_assert!(said.is_none_or(|quota| !quota.reset.is_zero()));
        // The quick look misses nothing.
        prop_assert_eq!(said, tightest(&lines, now));
    }

    #[test]
    fn any_bytes_in_a_structured_field(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        // Beneath the headers, as those refuse control characters.
        let _ = super::structured(&bytes);
        let mut pairs = Pairs::default();
        pairs.remaining(&bytes);
        pairs.reset(&bytes);
        prop_assert!(pairs.stated().count() <= bytes.len() + 1);
    }

    #[test]
    fn whatever_the_forms_the_tightest_is_found(quotas in prop::collection::vec(written(), 1..9)) {
        let mut lines = Vec::new();
        for (quota, form, instant) in &quotas {
            let reset = quota.reset.as_secs() + if *instant { NOW } else { 0 };
            match FAMILIES.get(*form) {
                Some((remaining_name, reset_name)) => {
                    lines.push((*remaining_name, quota.remaining.to_string()));
                    lines.push((*reset_name, reset.to_string()));
                }
                None if *form == FAMILIES.len() => {
                    lines.push(("ratelimit", format!("\"p\";r={};t={reset}", quota.remaining)));
                }
                None => {
                    lines.push(("ratelimit", format!("limit=9, remaining={}, reset={reset}", quota.remaining)));
                }
            }
        }
        let mut tightest = quotas[0].0;
        for (quota, ..) in quotas {
            let tighter = quota.remaining < tightest.remaining;
            if tighter || quota.remaining == tightest.remaining && quota.reset > tightest.reset {
                tightest = quota;
            }
        }
        prop_assert_eq!(said(&lines), Some(tightest));
    }
}
