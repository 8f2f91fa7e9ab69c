use http::{HeaderName, HeaderValue};
use proptest::prelude::*;

use super::RetryAfterUnit::{Millis, Seconds};
use super::*;

/// 2026-12-02 23:59:00 UTC: a minute before `MIDNIGHT`.
const NOW: u64 = 1_796_255_940;
const MIDNIGHT: &str = "Thu, 03 Dec 2026 00:00:00 GMT";
const MINUTE: Option<Duration> = Some(Duration::from_secs(60));

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(NOW)
}

fn headers<V: AsRef<[u8]>>(lines: &[(&'static str, V)]) -> HeaderMap {
    let line = |(name, value): &(&'static str, V)| {
        (HeaderName::from_static(name), HeaderValue::from_bytes(value.as_ref()).unwrap())
    };
    // Not `collect`, which replaces a line with the next of its name.
    let mut map = HeaderMap::new();
    for (name, value) in lines.iter().map(line) {
        map.append(name, value);
    }
    map
}

fn said<V: AsRef<[u8]>>(lines: &[(&'static str, V)]) -> Option<Duration> {
    hint(&headers(lines), now(), Seconds)
}

fn retry_after(value: impl AsRef<[u8]>) -> Option<Duration> {
    said(&[("retry-after", value)])
}

fn in_millis(value: &str) -> Option<Duration> {
    hint(&headers(&[("retry-after", value)]), now(), Millis)
}

fn secs(secs: u64) -> Option<Duration> {
    Some(Duration::from_secs(secs))
}

fn nanos(nanos: u64) -> Option<Duration> {
    Some(Duration::from_nanos(nanos))
}

#[track_caller]
fn assert_no_hint(values: &[&str]) {
    for value in values {
        assert_eq!(retry_after(value), None, "{value:?}");
    }
}

#[test]
fn h01_zero() {
    assert_no_hint(&["0", "0.0", "000", "0.000000000000", "0, 0"]);
    assert_eq!(in_millis("0"), None);
}

#[test]
fn h02_date_already_past_or_now() {
    assert_no_hint(&[
        "Wed, 21 Oct 2015 07:28:00 GMT",
        "Wed, 02 Dec 2026 23:58:59 GMT",
        "Wed, 02 Dec 2026 23:59:00 GMT",
        "1796255940",
        "1796255939",
        "1796255940000",
        "1000000001",
        "100000000000",
    ]);
    assert_eq!(retry_after("Wed, 02 Dec 2026 23:59:01 GMT"), secs(1));
}

#[test]
fn h03_fractional_seconds() {
    assert_eq!(retry_after("0.129"), nanos(129_000_000));
    assert_eq!(retry_after("0.493"), nanos(493_000_000));
    assert_eq!(retry_after("1.5"), nanos(1_500_000_000));
    assert_eq!(retry_after("2.542"), nanos(2_542_000_000));
    assert_eq!(retry_after("299.997"), nanos(299_997_000_000));
    assert_eq!(retry_after("1.0000000000"), secs(1));
    assert_eq!(retry_after("1.0000000001"), nanos(1_000_000_001));
    assert_eq!(retry_after("1.9999999999"), secs(2));
    assert_eq!(retry_after("0.00000000000000000001"), nanos(1));
}

#[test]
fn h04_negative() {
    assert_no_hint(&["-5", "-1.5", "-0"]);
}

#[test]
fn h06_trailing_junk() {
    assert_no_hint(&["120junk", "0x10", "10s", "1e3", "120;", "\"120\"", "1.", ".5", ".", "1.2.3", "1 2", "soon"]);
}

#[test]
fn h07_leading_plus_is_malformed_and_leading_zeros_are_not() {
    assert_no_hint(&["+120", "+0"]);
    assert_eq!(retry_after("007"), secs(7));
    assert_eq!(retry_after("0000000000000000000000060"), secs(60));
    assert_eq!(retry_after("0".repeat(4000) + "60.5"), nanos(60_500_000_000));
}

#[test]
fn h08_huge_integer() {
    let year = Duration::from_secs(365 * 86_400);
    for value in ["9999999999", "18446744073709551615"] {
        assert!(retry_after(value) > Some(200 * year), "{value}");
    }
    let too_big = ["18446744073709551616", "99999999999999999999999", "18446744073709551615.9999999999"];
    for value in too_big.map(str::to_owned).into_iter().chain(["9".repeat(4000)]) {
        assert_eq!(retry_after(&value), Some(Duration::MAX), "{value}");
        assert_eq!(in_millis(&value), Some(Duration::MAX), "{value}");
        assert_eq!(said(&[("retry-after-ms", &value)]), Some(Duration::MAX), "{value}");
    }
}

#[test]
fn h09_far_but_not_too_far_for_the_timer() {
    let instant = Duration::from_millis(1_844_674_407_370_955_161);
    assert_eq!(retry_after("1844674407370955161"), Some(instant - Duration::from_secs(NOW)));
}

#[test]
fn h11_milliseconds_sent_as_seconds() {
    assert_eq!(in_millis("64000"), secs(64));
    assert_eq!(in_millis("0.5"), nanos(500_000));
    assert_eq!(in_millis("0.0000001"), nanos(1));
    assert_eq!(in_millis("1000000000"), secs(1_000_000));
    assert_eq!(retry_after("64000"), secs(64_000));
    // What names an instant does so in either unit.
    assert_eq!(in_millis(MIDNIGHT), MINUTE);
    assert_eq!(in_millis("1796256000"), MINUTE);
    assert_eq!(in_millis("1796256000000"), MINUTE);
}

#[test]
fn h12_every_unit_is_what_it_says() {
    assert_eq!(retry_after("60"), MINUTE);
    assert_eq!(in_millis("60000"), MINUTE);
    assert_eq!(said(&[("retry-after-ms", "60000")]), MINUTE);
    assert_eq!(said(&[("x-ms-retry-after-ms", "60000")]), MINUTE);
    assert_eq!(retry_after(MIDNIGHT), MINUTE);
    assert_eq!(retry_after("1796256000"), MINUTE);
    assert_eq!(retry_after("1796256000000"), MINUTE);
    assert_eq!(retry_after("1796256000.25"), nanos(60_250_000_000));
    assert_eq!(retry_after("1796256000000.25"), nanos(60_000_250_000));
    // Where one reading ends and the next begins.
    assert_eq!(retry_after("1000000000"), secs(1_000_000_000));
    assert_eq!(retry_after("99999999999"), secs(99_999_999_999 - NOW));
    // The millisecond headers name no instants.
    assert_eq!(said(&[("retry-after-ms", "1796256000000")]), secs(1_796_256_000));
}

#[test]
fn h14_the_three_date_forms() {
    assert_eq!(retry_after("Thu, 03 Dec 2026 00:00:00 GMT"), MINUTE);
    assert_eq!(retry_after("Thursday, 03-Dec-26 00:00:00 GMT"), MINUTE);
    assert_eq!(retry_after("Thu Dec  3 00:00:00 2026"), MINUTE);
}

#[test]
fn h15_two_digit_year() {
    assert_no_hint(&["Sunday, 06-Nov-94 08:49:37 GMT", "Thursday, 03-Dec-70 00:00:00 GMT"]);
    assert!(retry_after("Thursday, 03-Dec-69 00:00:00 GMT") > secs(42 * 365 * 86_400));
}

#[test]
fn h17_other_zones_and_shapes_that_are_honoured() {
    for value in [
        "Thu, 03 Dec 2026 00:00:00 UTC",
        "Thu, 03 Dec 2026 00:00:00 +0000",
        "Thu, 03 Dec 2026 00:00:00 -0000",
        "Thursday, 03-Dec-26 00:00:00 -0000",
        "thu, 03 dec 2026 00:00:00 gmt",
        "thursday, 03-dec-26 00:00:00 utc",
        "thu dec 3 00:00:00 2026",
        "THU, 03 DEC 2026 00:00:00 GMT",
        "Thu, 3 Dec 2026 00:00:00 GMT",
        "Mon, 03 Dec 2026 00:00:00 GMT",
        "Monday, 3-Dec-26 00:00:00 GMT",
        "Mon Dec 03 00:00:00 2026",
        "Thurs, 03 Dec 2026 00:00:00 GMT",
        "Thursday, 03 Dec 2026 00:00:00 GMT",
        "Thu, 03-Dec-2026 00:00:00 GMT",
        "Thu, 03 Dec 26 00:00:00 GMT",
        "Thu,03 Dec 2026  00:00:00 GMT",
    ] {
        assert_eq!(retry_after(value), MINUTE, "{value:?}");
    }
    assert!(retry_after("wed, 21 oct 2036 07:28:00 gmt").is_some());
    assert!(retry_after("Wed, 1 Oct 2031 07:28:00 GMT").is_some());
}

#[test]
fn h17_other_zones_and_shapes_that_are_not() {
    assert_no_hint(&[
        "Thu, 03 Dec 2026 00:00:00 EST",
        "Thu, 03 Dec 2026 00:00:00 +0100",
        "Thu, 03 Dec 2026 00:00:00 -0500",
        "Thu, 03 Dec 2026 00:00:00 Z",
        "Thu, 03 Dec 2026 00:00:00 GMT+1",
        "Thu, 03 Dec 2026 00:00:00",
        "Thursday, 03-Dec-26 00:00:00 EST",
        "Foo, 03-Dec-26 00:00:00 GMT",
        "03-Dec-26 00:00:00 GMT",
        "Foo Dec  3 00:00:00 2026",
        "Thu Dec  3 00:00:00 EST 2026",
        "Thu 03 Dec 2026 00:00:00 GMT",
        "Foo, 03 Dec 2026 00:00:00 GMT",
        "Th, 03 Dec 2026 00:00:00 GMT",
        "Thursdays, 03 Dec 2026 00:00:00 GMT",
        ", 03 Dec 2026 00:00:00 GMT",
        "03 Dec 2026 00:00:00 GMT",
        "Thu, 03 Foo 2026 00:00:00 GMT",
        "Thu, 003 Dec 2026 00:00:00 GMT",
        "Thu, -3 Dec 2026 00:00:00 GMT",
        "Thu, 03 Dec 02026 00:00:00 GMT",
        "Thu, 03 Dec 226 00:00:00 GMT",
        "Thu, 03 Dec 2026 0:00:00 GMT",
        "Thu, 03 Dec 2026 00:00 GMT",
        "2026-12-03T00:00:00Z",
        "2026-12-03 00:00:00",
        "1 Jan 2099 00:00:00",
    ]);
}

#[test]
fn h18_leap_second_and_impossible_dates() {
    assert_eq!(retry_after("Wed, 02 Dec 2026 23:59:60 GMT"), MINUTE);
    assert_eq!(retry_after("Wed Dec  2 23:59:60 2026"), MINUTE);
    assert!(retry_after("Fri, 31 Dec 9999 23:59:59 GMT") > secs(7900 * 365 * 86_400));
    assert!(retry_after("Fri, 31 Dec 9999 23:59:60 GMT") > secs(7900 * 365 * 86_400));
    assert_no_hint(&[
        "Sat, 31 Dec 2016 23:59:60 GMT",
        "Wed, 30 Feb 2031 00:00:00 GMT",
        "Wed, 29 Feb 2031 00:00:00 GMT",
        "Wed, 00 Dec 2031 00:00:00 GMT",
        "Wed, 32 Dec 9999 00:00:00 GMT",
        "Wed, 03 Dec 2031 24:00:00 GMT",
        "Wed, 03 Dec 2031 00:60:00 GMT",
        "Wed, 03 Dec 2031 00:00:61 GMT",
        "Wed, 31 Dec 1969 23:59:60 GMT",
        "Mon, 01 Jan 0001 00:00:00 GMT",
        "Sat, 01 Jan 0000 00:00:00 GMT",
        "Sat, 01 Jan 10000 00:00:00 GMT",
    ]);
}

#[test]
fn h19_white_space_and_bytes_that_are_not_ascii() {
    assert_eq!(retry_after(" 5 "), secs(5));
    assert_eq!(retry_after("\t5"), secs(5));
    assert_eq!(retry_after(format!("\t {MIDNIGHT}\t")), MINUTE);
    assert_no_hint(&["", " ", "\t", ",", "\u{0661}\u{0662}", "5\u{00a0}", "Thü, 03 Dec 2026 00:00:00 GMT"]);
    assert_eq!(retry_after(b"12\xa0"), None);
    assert_eq!(retry_after(b"\xff\xfe"), None);
}

#[test]
fn several_values_the_longest_valid_one() {
    assert_eq!(said(&[("retry-after", "5"), ("retry-after", "60"), ("retry-after", "7")]), MINUTE);
    assert_eq!(retry_after("5, 60,7"), MINUTE);
    assert_eq!(retry_after("soon, 60, -5, , 0"), MINUTE);
    assert_eq!(said(&[("retry-after", "soon"), ("retry-after", "60")]), MINUTE);
    assert_eq!(said(&[("retry-after", "5"), ("retry-after", MIDNIGHT)]), MINUTE);
    assert_eq!(retry_after(format!("{MIDNIGHT}, Wed, 02 Dec 2026 23:59:01 GMT")), MINUTE);
    // As a proxy joins those lines.
    assert_eq!(retry_after(format!("5, {MIDNIGHT}")), MINUTE);
    assert_eq!(retry_after(format!("Wed, 02 Dec 2026 23:59:01 GMT, {MIDNIGHT}, 5")), MINUTE);
}

#[test]
fn millisecond_headers_win_when_they_name_a_wait() {
    for name in ["retry-after-ms", "x-ms-retry-after-ms"] {
        assert_eq!(said(&[("retry-after", "60"), (name, "1500")]), nanos(1_500_000_000));
        assert_eq!(said(&[(name, "1500.5"), ("retry-after", "60")]), nanos(1_500_500_000));
        assert_eq!(said(&[(name, "5"), (name, "10, 7")]), nanos(10_000_000));
        for none in ["0", "-1", "", "soon", MIDNIGHT] {
            assert_eq!(said(&[(name, none), ("retry-after", "60")]), MINUTE, "{none:?}");
            assert_eq!(said(&[(name, none)]), None, "{none:?}");
        }
    }
    for (one, other) in [("5", "10"), ("10", "5")] {
        let both = [("retry-after-ms", one), ("x-ms-retry-after-ms", other)];
        assert_eq!(said(&both), nanos(10_000_000));
    }
}

#[test]
fn dates_are_measured_against_the_responses_own_clock() {
    let an_hour_behind = "Wed, 02 Dec 2026 22:59:00 GMT";
    for value in [MIDNIGHT, "1796256000", "1796256000000"] {
        assert_eq!(said(&[("date", an_hour_behind), ("retry-after", value)]), secs(3660), "{value}");
        assert_eq!(said(&[("retry-after", value), ("date", an_hour_behind)]), secs(3660), "{value}");
        assert_eq!(said(&[("retry-after", value), ("date", MIDNIGHT)]), None, "{value}");
        assert_eq!(said(&[("retry-after", value), ("date", "yesterday")]), MINUTE, "{value}");
    }
    assert_eq!(said(&[("retry-after", "5"), ("date", an_hour_behind)]), secs(5));
}

#[test]
fn a_local_clock_before_the_epoch_is_survived() {
    let long_ago = UNIX_EPOCH - Duration::from_secs(1);
    let asked = hint(&headers(&[("retry-after", "1796256000")]), long_ago, Seconds);
    assert_eq!(asked, secs(1_796_256_000));
}

#[test]
fn nothing_said() {
    assert_eq!(hint(&HeaderMap::new(), now(), Seconds), None);
    assert_eq!(said(&[("date", MIDNIGHT), ("x-retry-after", "5")]), None);
    assert_eq!(raw(&HeaderMap::new()), None);
}

#[test]
fn raw_is_what_was_sent_escaped_and_cut() {
    let text = |lines: &[(&'static str, &[u8])]| raw(&headers(lines)).map(String::from);
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(text(&[("retry-after", b"120")]), some("120"));
    assert_eq!(text(&[("retry-after", b"5"), ("retry-after", b"7")]), some("5, 7"));
    assert_eq!(text(&[("retry-after", b"soon \xa0\t")]), some("soon \\xa0\\t"));
    assert_eq!(text(&[("retry-after", b"")]), None);
    assert_eq!(text(&[("retry-after", b"60"), ("retry-after-ms", b"1500")]), some("1500"));
    assert_eq!(text(&[("retry-after", b"60"), ("retry-after-ms", b"0")]), some("60"));
    assert_eq!(text(&[("retry-after", &[b'9'; 4000])]), Some("9".repeat(128)));
    // 126 bytes are taken and an escape needs four.
    let uneven = [&[b'9'; 126][..], b"\xff9"].concat();
    assert_eq!(text(&[("retry-after", &uneven)]), Some("9".repeat(126)));
}

/// For a run to end in reasonable time each must be linear; no clock is asked.
#[test]
fn a_mebibyte_of_anything() {
    const MIB: usize = 1 << 20;
    for unit in ["9", "0", "1.", ",", " ", "\u{ff}", "Thu,", "Thu, 03 ", "5,", "Thu, 03 Dec 2026 00:00:00 GMT,"] {
        let value = unit.repeat(MIB / unit.len());
        let lines = ["date", "retry-after", "retry-after-ms", "x-ms-retry-after-ms"].map(|name| (name, &value));
        let _ = (said(&lines), raw(&headers(&lines)));
    }
    assert_eq!(retry_after("0.".to_owned() + &"0".repeat(MIB) + "1"), nanos(1));
    assert_eq!(retry_after("9".repeat(MIB)), Some(Duration::MAX));
}

const VALID: [&str; 9] = [
    MIDNIGHT,
    "Thursday, 03-Dec-26 00:00:00 GMT",
    "Thu Dec  3 00:00:00 2026",
    "Fri, 31 Dec 9999 23:59:60 +0000",
    "0000000000060",
    "299.9970000001",
    "18446744073709551615.999",
    "1796256000000",
    "5, 60, Thu, 03 Dec 2026 00:00:00 GMT",
];

fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![any::<u8>(), prop::sample::select(b" ,-.+:0189".to_vec())];
    super::super::mutated::mutated(&VALID, byte, 6)
}

proptest! {
    #[test]
    fn never_panics(
        value in prop_oneof![prop::collection::vec(any::<u8>(), 0..80), mutated()],
    ) {
        // Beneath the headers, as those refuse control characters.
        let _ = longest_millis(&value);
        for unit in [Seconds, Millis] {
            Said::default().retry_after(&value, unit);
        }
        let mut text = String::new();
        push_line(&mut text, &value);
        prop_assert!(text.len() <= 128);
        prop_assert!(text.bytes().all(|byte| (b' '..=b'~').contains(&byte)));

        if HeaderValue::from_bytes(&value).is_ok() {
            let lines = ["date", "retry-after", "retry-after-ms"].map(|name| (name, &value));
            prop_assert_ne!(said(&lines), Some(Duration::ZERO));
            prop_assert_ne!(retry_after(&value), Some(Duration::ZERO));
        }
    }

    /// By less than a nanosecond longer, and never shorter.
    #[test]
    fn decimals_are_never_shorter_than_asked(
        whole in 0..=1_000_000_000_u64,
        fraction in "[0-9]{1,26}",
    ) {
        let asked = format!("{whole}{fraction:0<26}").parse::<u128>().unwrap();
        let value = format!("{whole}.{fraction}");
        let read = number(value.as_bytes()).unwrap();
        let per_nano = 10_u128.pow(17);
        prop_assert_eq!(read.as_nanos(), asked.div_ceil(per_nano));
        prop_assert_eq!(as_millis(read).as_nanos(), asked.div_ceil(per_nano * 1000));
    }

    /// A proxy may join lines, or not.
    #[test]
    fn joined_lines_say_the_same(
        values in prop::collection::vec(prop::sample::select(VALID.to_vec()), 1..5),
    ) {
        let lines: Vec<_> = values.iter().map(|value| ("retry-after", *value)).collect();
        prop_assert_eq!(retry_after(values.join(", ")), said(&lines));
    }

    /// Any second there is, in any of the forms, is that second.
    #[test]
    fn dates_are_read_as_they_are_written(
        ahead in 1..40_u64 * 365 * 86_400,
        weekday in 0..7_usize,
    ) {
        let imf = httpdate::fmt_http_date(now() + Duration::from_secs(ahead));
        let (day, month, year, time) = (&imf[5..7], &imf[8..11], &imf[12..16], &imf[17..25]);
        let (weekday, wrong) = (&imf[..3], WEEKDAYS[weekday]);
        for value in [
            imf.clone(),
            format!("{wrong}, {day}-{month}-{} {time} GMT", &year[2..]),
            format!("{weekday} {month} {day} {time} {year}"),
            imf.to_lowercase(),
        ] {
            prop_assert_eq!(retry_after(&value), secs(ahead), "{}", value);
        }
    }
}
