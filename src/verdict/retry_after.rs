//! When a server says to come back: `Retry-After` and its millisecond kin, read from bytes.
//!
//! Nothing here panics on any input or looks at a clock. A value either names a future instant, and
//! is a hint, or does not, and the gate escalates on its own.
//!
//! | value | read as |
//! |---|---|
//! | `120`, `007`, ` 5 ` | seconds; zeros in front and white space around are dropped |
//! | `0.129`, `299.997` | seconds, to the nanosecond, rounded up |
//! | above 10^9, from 10^11 on | an instant: Unix seconds, Unix milliseconds |
//! | a number past 64 bits, of any length | the longest wait there is |
//! | `Thu, 03 Dec 2026 00:00:00 GMT` | an instant (IMF-fixdate) |
//! | `Thursday, 03-Dec-26 00:00:00 GMT` | an instant (RFC 850); years 70 to 99 are 1970 to 1999 |
//! | `Thu Dec  3 00:00:00 2026` | an instant (asctime) |
//! | a date with `UTC`, `+0000` or `-0000`, in lower case, with a one-digit day or the wrong weekday | as with `GMT` and the right weekday |
//! | `Thu, 03-Dec-2026 ..`, `Thu, 03 Dec 26 ..` | the same instant: either date takes a year of two or four digits |
//! | a date ending in `:60` | the second after `:59` |
//! | `5, 10` or two header lines | the longest of the valid ones |
//! | **no hint:** `0`, a past date, a date equal to now | names no future instant |
//! | **no hint:** `-5`, `+120`, `10s`, `1e3`, `0x10`, `"120"`, `120;`, `1.`, `.5`, empty, not ASCII | malformed |
//! | **no hint:** `.. EST`, `.. +0100`, `.. Z`, no zone, no weekday, `2026-12-03T00:00:00Z` | not a zone known to be UTC, not an HTTP date |
//! | **no hint:** 30 February, before 1970, after 9999 | not a date |
//!
//! Instants are measured against the response's own `Date` when it has a valid one, so neither
//! clock need be right. `retry-after-ms` and `x-ms-retry-after-ms` (milliseconds, decimals allowed,
//! never an instant) win over `Retry-After` when they name a wait.

use std::mem;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderMap;

/// The unit in which a host means the numbers of its `Retry-After`.
///
/// Dates, and numbers so large that they are Unix times, mean the same in either.
///
/// ```
/// use tower_host_gate::{HostGateLayer, Limits, RetryAfterUnit};
///
/// let layer = HostGateLayer::new()
///     .per_host("odd.example", Limits::default().retry_after_unit(RetryAfterUnit::Millis));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RetryAfterUnit {
    /// Seconds, as HTTP has it.
    #[default]
    Seconds,
    /// Milliseconds: `64000` is 64 seconds.
    Millis,
}

/// What the headers of a refusal say about when to come back; `None` when they name no future
/// instant.
///
/// `now` is the local wall clock, used only when the response has no `Date` of its own.
pub(crate) fn hint(headers: &HeaderMap, now: SystemTime, unit: RetryAfterUnit) -> Option<Duration> {
    let said = Said::read(headers, unit);
    let now = said.date.unwrap_or_else(|| since_epoch(now));
    let wait = if said.millis.is_zero() { said.delta.max(said.instant.saturating_sub(now)) } else { said.millis };
    (!wait.is_zero()).then_some(wait)
}

/// The text of that hint as the server sent it, escaped to printable ASCII, at most 128 bytes.
///
/// Lines of the same meaning are joined by a comma. A `Retry-After` that is no hint has a text all
/// the same: whoever wonders why a host escalates wants to see the `0` or the `soon`.
pub(crate) fn raw(headers: &HeaderMap) -> Option<Box<str>> {
    let (mut millis, mut plain) = (String::new(), String::new());
    for (name, value) in headers {
        match name.as_str() {
            "retry-after" => push_line(&mut plain, value.as_bytes()),
            "retry-after-ms" | "x-ms-retry-after-ms" if !longest_millis(value.as_bytes()).is_zero() => {
                push_line(&mut millis, value.as_bytes());
            }
            _ => {}
        }
    }
    [millis, plain].into_iter().find(|text| !text.is_empty()).map(String::into_boxed_str)
}

fn push_line(text: &mut String, line: &[u8]) {
    const MAX: usize = 128;
    let comma: &[u8] = if text.is_empty() { b"" } else { b", " };
    for escaped in comma.iter().chain(line).map(|byte| byte.escape_ascii()) {
        // Whole escapes only: half of `\xa0` would read as something the server did not send.
        if text.len() + escaped.len() > MAX {
            return;
        }
        text.extend(escaped.map(char::from));
    }
}

/// The longest of each kind of thing the headers say. Zero is nothing said: it names no future
/// instant either.
///
/// `Date` may come after `Retry-After`, so instants are kept as such until all headers are read.
/// All are measured against the same now: the latest instant is the longest wait.
#[derive(Default)]
struct Said {
    /// From the millisecond headers.
    millis: Duration,
    /// From `Retry-After`, counted from the response.
    delta: Duration,
    /// From `Retry-After`, counted from the Unix epoch.
    instant: Duration,
    /// The response's own clock, counted from the Unix epoch.
    date: Option<Duration>,
}

impl Said {
    /// One pass over all headers: a look-up per name would hash each of them.
    fn read(headers: &HeaderMap, unit: RetryAfterUnit) -> Self {
        let mut said = Self::default();
        for (name, value) in headers {
            let value = value.as_bytes();
            match name.as_str() {
                "retry-after" => said.retry_after(value, unit),
                "retry-after-ms" | "x-ms-retry-after-ms" => {
                    said.millis = said.millis.max(longest_millis(value));
                }
                "date" => said.date = said.date.or_else(|| members(value).find_map(date)),
                _ => {}
            }
        }
        said
    }

    fn retry_after(&mut self, value: &[u8], unit: RetryAfterUnit) {
        for member in members(value) {
            if let Some(number) = number(member.text) {
                self.plain_number(number, unit);
            } else if let Some(instant) = date(member) {
                self.instant = self.instant.max(instant);
            }
        }
    }

    fn plain_number(&mut self, number: Duration, unit: RetryAfterUnit) {
        if number == Duration::MAX {
            self.delta = Duration::MAX;
        } else if number >= FROM_IS_UNIX_MILLIS {
            self.instant = self.instant.max(as_millis(number));
        } else if number > ABOVE_IS_UNIX_SECONDS {
            self.instant = self.instant.max(number);
        } else {
            self.delta = self.delta.max(match unit {
                RetryAfterUnit::Seconds => number,
                RetryAfterUnit::Millis => as_millis(number),
            });
        }
    }
}

/// A number that large is no wait but a Unix time: 10^9 s are 31 years ahead or the year 2001.
pub(super) const ABOVE_IS_UNIX_SECONDS: Duration = Duration::from_secs(1_000_000_000);
/// 10^11 s are three millennia ahead or, in milliseconds, the year 1973.
pub(super) const FROM_IS_UNIX_MILLIS: Duration = Duration::from_secs(100_000_000_000);

/// The longest of the milliseconds in a line, zero if none is valid.
fn longest_millis(line: &[u8]) -> Duration {
    let numbers = members(line).filter_map(|member| number(member.text));
    numbers.map(as_millis).max().unwrap_or_default()
}

/// One of the values in a line. The comma after a weekday looks like the one between two values, so
/// a value knows what stands before it.
pub(super) struct Member<'a> {
    before: &'a [u8],
    pub(super) text: &'a [u8],
}

pub(super) fn members(line: &[u8]) -> impl Iterator<Item = Member<'_>> {
    let mut last: &[u8] = b"";
    line.split(|byte| *byte == b',').map(move |text| {
        let text = text.trim_ascii();
        let before = mem::replace(&mut last, text);
        Member { before, text }
    })
}

/// `digits[.digits]` as seconds, rounded up to the nanosecond, `Duration::MAX` if there is no room
/// for it.
pub(super) fn number(text: &[u8]) -> Option<Duration> {
    let mut parts = text.splitn(2, |byte| *byte == b'.');
    let whole = digits(parts.next()?)?;
    let nanos = match parts.next() {
        Some(fraction) => nanos(digits(fraction)?),
        None => 0,
    };
    let seconds = whole.iter().try_fold(0_u64, |sum, digit| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0')));
    let exact = seconds.and_then(|seconds| Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanos)));
    Some(exact.unwrap_or(Duration::MAX))
}

fn digits(text: &[u8]) -> Option<&[u8]> {
    (!text.is_empty() && text.iter().all(u8::is_ascii_digit)).then_some(text)
}

/// The digits after a decimal point; up to a whole second, as they round up.
fn nanos(fraction: &[u8]) -> u64 {
    let (kept, cut) = fraction.split_at(fraction.len().min(9));
    let padded = kept.iter().chain(b"000000000").take(9);
    let nanos = padded.fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    nanos + u64::from(cut.iter().any(|digit| *digit != b'0'))
}

/// What was read as seconds, as milliseconds instead: rounded up, and too big stays too big.
pub(super) fn as_millis(seconds: Duration) -> Duration {
    if seconds == Duration::MAX {
        return seconds;
    }
    let whole = Duration::from_millis(seconds.as_secs());
    // A millionth of what is below 10^9: at most 10^6 ns.
    let rest = Duration::from_nanos(u64::from(seconds.subsec_nanos()).div_ceil(1000));
    whole.saturating_add(rest)
}

/// An HTTP date as the time since the Unix epoch.
pub(super) fn date(member: Member<'_>) -> Option<Duration> {
    /// With room to spare for white space; keeps the work small whatever is sent.
    const MAX: usize = 64;
    if member.text.len() > MAX {
        return None;
    }
    let text = std::str::from_utf8(member.text).ok()?;
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    match words[..] {
        [day, month, year, time, zone] if is_weekday(member.before) && is_utc(zone) => instant(day, month, year, time),
        [date, time, zone] if is_weekday(member.before) && is_utc(zone) => {
            let (day, rest) = date.split_once('-')?;
            let (month, year) = rest.split_once('-')?;
            instant(day, month, year, time)
        }
        [weekday, month, day, time, year] if is_weekday(weekday.as_bytes()) => instant(day, month, year, time),
        _ => None,
    }
}

const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// In full or cut to three letters or more: `Tues` and `Thurs` are seen.
pub(super) fn is_weekday(word: &[u8]) -> bool {
    let begins = |name: &&str| name.as_bytes().get(..word.len()).is_some_and(|head| head.eq_ignore_ascii_case(word));
    word.len() >= 3 && WEEKDAYS.iter().any(begins)
}

fn is_utc(zone: &str) -> bool {
    ["GMT", "UTC", "+0000", "-0000"].iter().any(|utc| utc.eq_ignore_ascii_case(zone))
}

/// Leaves the calendar to `httpdate`, which wants each thing exactly so. Whatever the words hold,
/// the text it is given has the layout of one of its forms or is refused, and it checks the year
/// before it reckons: it cannot panic.
fn instant(day: &str, month: &str, year: &str, time: &str) -> Option<Duration> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = MONTHS.iter().find(|name| name.eq_ignore_ascii_case(month))?;
    let (time, leap) = match time.strip_suffix(":60") {
        Some(minute) => (format!("{minute}:59"), Duration::from_secs(1)),
        None => (time.to_owned(), Duration::ZERO),
    };
    // It refuses a date whose weekday is wrong, and servers do send those: whichever day it takes
    // is the right one.
    let date = WEEKDAYS.iter().find_map(|weekday| {
        let text = if year.len() == 2 {
            format!("{weekday}, {day:0>2}-{month}-{year} {time} GMT")
        } else {
            format!("{weekday:.3}, {day:0>2} {month} {year} {time} GMT")
        };
        httpdate::parse_http_date(&text).ok()
    })?;
    Some(since_epoch(date) + leap)
}

/// Zero before 1970, where only a broken clock can be.
pub(super) fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests;
