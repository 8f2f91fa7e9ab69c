//! How much of its quota a server says is left: the `RateLimit` header and its older kin, read from bytes.
//!
//! Nothing here panics on any input, and a clock is looked at only where it is needed. A quota is what remains together
//! with a reset that is still to come; a header that says less says nothing.
//!
//! | headers | read as |
//! |---|---|
//! | `RateLimit: "burst";r=5;t=2, "daily";r=900;t=3600` | a quota each (structured field: a list of policies) |
//! | `RateLimit: limit=100, remaining=50, reset=30` | a quota (structured field of the older drafts: a dictionary) |
//! | `RateLimit-Remaining: 50` with `RateLimit-Reset: 30` | a quota |
//! | `X-RateLimit-Remaining` with `X-RateLimit-Reset` | a quota |
//! | `X-Rate-Limit-Remaining` with `X-Rate-Limit-Reset` | a quota |
//! | `X-RateLimit-Remaining: 0, 900` with `X-RateLimit-Reset: 1, 3600`, or the same in two lines each | two quotas |
//! | **nothing:** `Remaining` of one family with `Reset` of another, two values with three | not known to belong together |
//! | **nothing:** any of them with an `Age` above 0 | a cache is speaking of somebody else's request |
//!
//! | reset | read as |
//! |---|---|
//! | `30`, `1.5`, `007` | seconds from the response on, to the nanosecond, rounded up |
//! | above 10^9; from 10^11, 10^14, 10^17 on | an instant: Unix seconds; milliseconds, microseconds, nanoseconds |
//! | `Thu, 03 Dec 2026 00:00:00 GMT` | an instant; the dates that `Retry-After` may hold |
//! | a number past 64 bits, of any length | the longest time there is; in a structured field, where such a number is malformed, nothing |
//! | **nothing:** `0`, a past instant | already reset |
//! | **nothing:** `1s`, `6m0s`, `500ms`, `2026-12-03T00:00:42Z`, `-5`, `+5`, `1e3`, `"30"`, empty, not ASCII | malformed |
//!
//! What remains is a number of requests: `50`, `99.0` (a fraction of a request is none). A negative one is nothing: some
//! servers send `-1` for no limit, some for one they could not look up.
//!
//! Of several quotas the tightest counts. Instants are measured against the response's own `Date` when it has a valid
//! one, so neither clock need be right.

use std::cell::LazyCell;
use std::cmp::Reverse;
use std::time::{Duration, SystemTime};

use http::header::DATE;
use http::{HeaderMap, HeaderName};
use sfv::{BareItem, Dictionary, Item, List, ListEntry, Parser};

use super::retry_after::{
    ABOVE_IS_UNIX_SECONDS, FROM_IS_UNIX_MILLIS, Member, as_millis, date, is_weekday, members, number, since_epoch,
};
use crate::pace::Quota;

/// The tightest quota that the headers state: the smallest remainder, and of equal ones the longest reset.
///
/// `now` is the local wall clock, read only where a reset is an instant and the response has no `Date` of its own.
#[inline]
pub(crate) fn quota(headers: &HeaderMap, now: impl FnOnce() -> SystemTime) -> Option<Quota> {
    if mentions_quota(headers) { tightest(headers, now) } else { None }
}

/// Whether there is a `RateLimit`, or one of the three headers that say what remains, without which there is no quota.
///
/// Runs for every response there is, and nearly none has such a header. A name that `http` knows is told from these by
/// one look at its kind, and most others by their length: looking at its text would cost three times as much.
#[inline]
pub(crate) fn mentions_quota(headers: &HeaderMap) -> bool {
    const STRUCTURED: HeaderName = HeaderName::from_static("ratelimit");
    const PLAIN: HeaderName = HeaderName::from_static("ratelimit-remaining");
    const X_JOINED: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
    const X_SPELT: HeaderName = HeaderName::from_static("x-rate-limit-remaining");

    headers.keys().any(|name| *name == STRUCTURED || *name == PLAIN || *name == X_JOINED || *name == X_SPELT)
}

#[inline(never)]
fn tightest(headers: &HeaderMap, now: impl FnOnce() -> SystemTime) -> Option<Quota> {
    let now = LazyCell::new(|| {
        let own = headers.get_all(DATE).iter().find_map(|line| members(line.as_bytes()).find_map(date));
        own.unwrap_or_else(|| since_epoch(now()))
    });
    let quotas = stated(headers).into_iter().map(|(remaining, reset)| {
        let reset = match reset {
            Reset::After(delta) => delta,
            Reset::At(instant) => instant.saturating_sub(*now),
        };
        Quota { remaining, reset }
    });
    quotas.filter(|quota| !quota.reset.is_zero()).min_by_key(|quota| (quota.remaining, Reverse(quota.reset)))
}

type Stated = (u64, Reset);

enum Reset {
    /// This long after the response.
    After(Duration),
    /// This long after the Unix epoch.
    At(Duration),
}

impl Reset {
    fn read(member: Member<'_>) -> Option<Self> {
        number(member.text).map(Self::from_number).or_else(|| date(member).map(Self::At))
    }

    fn from_number(number: Duration) -> Self {
        if number == Duration::MAX || number <= ABOVE_IS_UNIX_SECONDS {
            return Self::After(number);
        }
        let mut instant = number;
        // What is too large for one unit is a thousand times as large as in the next.
        while instant >= FROM_IS_UNIX_MILLIS {
            instant = as_millis(instant);
        }
        Self::At(instant)
    }
}

/// Everything the headers state, in one pass over them: a look-up per name would hash each of them.
fn stated(headers: &HeaderMap) -> Vec<Stated> {
    let [mut plain, mut x_joined, mut x_spelt] = [Pairs::default(), Pairs::default(), Pairs::default()];
    let mut stated = Vec::new();
    for (name, value) in headers {
        let value = value.as_bytes();
        match name.as_str() {
            "age" if members(value).any(|age| number(age.text).is_some_and(|age| !age.is_zero())) => return Vec::new(),
            "ratelimit" => stated.extend(structured(value)),
            "ratelimit-remaining" => plain.remaining(value),
            "ratelimit-reset" => plain.reset(value),
            "x-ratelimit-remaining" => x_joined.remaining(value),
            "x-ratelimit-reset" => x_joined.reset(value),
            "x-rate-limit-remaining" => x_spelt.remaining(value),
            "x-rate-limit-reset" => x_spelt.reset(value),
            _ => {}
        }
    }
    for pairs in [plain, x_joined, x_spelt] {
        stated.extend(pairs.stated());
    }
    stated
}

/// What the two headers of one family say, value by value: the first belongs to the first, the second to the second.
///
/// A malformed value keeps its place, so that those behind it keep theirs.
#[derive(Default)]
struct Pairs {
    remaining: Vec<Option<u64>>,
    resets: Vec<Option<Reset>>,
}

impl Pairs {
    fn remaining(&mut self, line: &[u8]) {
        self.remaining.extend(members(line).map(|member| Some(number(member.text)?.as_secs())));
    }

    fn reset(&mut self, line: &[u8]) {
        // A weekday is half of the value behind it.
        let values = members(line).filter(|member| !is_weekday(member.text));
        self.resets.extend(values.map(Reset::read));
    }

    fn stated(self) -> impl Iterator<Item = Stated> {
        let paired = self.remaining.len() == self.resets.len();
        let pairs = self.remaining.into_iter().zip(self.resets).filter(move |_| paired);
        pairs.filter_map(|(remaining, reset)| remaining.zip(reset))
    }
}

/// A line of the `RateLimit` header, of today's draft or of an older one.
fn structured(line: &[u8]) -> Vec<Stated> {
    if let Ok(policies) = Parser::new(line).parse::<List>() {
        let policy = |policy: &ListEntry| {
            let params = &item(policy)?.params;
            both(params.get("r"), params.get("t"))
        };
        return policies.iter().filter_map(policy).collect();
    }
    let Ok(fields) = Parser::new(line).parse::<Dictionary>() else {
        return Vec::new();
    };
    let value = |key| Some(&item(fields.get(key)?)?.bare_item);
    both(value("remaining"), value("reset")).into_iter().collect()
}

fn item(entry: &ListEntry) -> Option<&Item> {
    match entry {
        ListEntry::Item(item) => Some(item),
        ListEntry::InnerList(_) => None,
    }
}

fn both(remaining: Option<&BareItem>, reset: Option<&BareItem>) -> Option<Stated> {
    Some((structured_number(remaining?)?.as_secs(), Reset::from_number(structured_number(reset?)?)))
}

/// Seconds: a structured field has at most fifteen digits of them, or three behind the decimal point.
fn structured_number(value: &BareItem) -> Option<Duration> {
    let millis = match value {
        BareItem::Integer(whole) => i64::from(*whole).saturating_mul(1000),
        BareItem::Decimal(decimal) => i64::from(decimal.as_integer_scaled_1000()),
        _ => return None,
    };
    u64::try_from(millis).ok().map(Duration::from_millis)
}

#[cfg(test)]
mod tests;
