//! A provider: a limit, what it says about it, and how long it takes to answer.

use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::draw::{Draw, Seed, noise};
use crate::limit::{
    Concurrency, Firewall, FixedWindow, Length, Limit, OnePerWindow, RandomRefusals, Refused, SlidingWindow,
    TokenBucket, Unlimited,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    OnePerWindow,
    TokenBucket,
    FixedWindow,
    SlidingWindow,
    ViolationExtends,
    DoublingBan,
    NoisyWindow,
    DriftingWindow,
    LimitTightens,
    LimitLoosens,
    SharedAddress,
    Firewall,
    FirewallRestarts,
    RandomRefusals,
    ForbiddenPaths,
    ConcurrencyLimit,
    Unlimited,
}

impl Kind {
    pub(crate) const ALL: [Self; 17] = [
        Self::OnePerWindow,
        Self::TokenBucket,
        Self::FixedWindow,
        Self::SlidingWindow,
        Self::ViolationExtends,
        Self::DoublingBan,
        Self::NoisyWindow,
        Self::DriftingWindow,
        Self::LimitTightens,
        Self::LimitLoosens,
        Self::SharedAddress,
        Self::Firewall,
        Self::FirewallRestarts,
        Self::RandomRefusals,
        Self::ForbiddenPaths,
        Self::ConcurrencyLimit,
        Self::Unlimited,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OnePerWindow => "one-per-window",
            Self::TokenBucket => "token-bucket",
            Self::FixedWindow => "fixed-window",
            Self::SlidingWindow => "sliding-window",
            Self::ViolationExtends => "violation-extends",
            Self::DoublingBan => "doubling-ban",
            Self::NoisyWindow => "noisy-window",
            Self::DriftingWindow => "drifting-window",
            Self::LimitTightens => "limit-tightens",
            Self::LimitLoosens => "limit-loosens",
            Self::SharedAddress => "shared-address",
            Self::Firewall => "waf-403",
            Self::FirewallRestarts => "waf-403-restarts",
            Self::RandomRefusals => "random-429",
            Self::ForbiddenPaths => "path-only-403",
            Self::ConcurrencyLimit => "concurrency-limit",
            Self::Unlimited => "never-throttles",
        }
    }

    /// What such a provider may say of when to come back.
    pub(crate) fn hints(self) -> &'static [Hints] {
        match self {
            Self::OnePerWindow | Self::TokenBucket | Self::FixedWindow | Self::SlidingWindow => &Hints::ALL,
            // It knows no instant, or has none to tell.
            Self::RandomRefusals | Self::ForbiddenPaths | Self::ConcurrencyLimit | Self::Unlimited => &[Hints::None],
            // Here what remains is no number that could be told.
            _ => Hints::ALL.split_last().expect("there are hints").1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Hints {
    None,
    Exact,
    RoundedDown,
    TooShort,
    TooLong,
    RateLimit,
}

impl Hints {
    pub(crate) const ALL: [Self; 6] =
        [Self::None, Self::Exact, Self::RoundedDown, Self::TooShort, Self::TooLong, Self::RateLimit];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "headerless",
            Self::Exact => "exact",
            Self::RoundedDown => "rounded-down",
            Self::TooShort => "too-short",
            Self::TooLong => "too-long",
            Self::RateLimit => "ratelimit",
        }
    }
}

/// A response head.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// Refused because of what was asked, not because of how often.
    pub(crate) forbidden: bool,
    pub(crate) headers: HeaderMap,
    /// The time until which the headers ask to wait.
    pub(crate) asked: Option<Duration>,
    pub(crate) latency: Duration,
}

pub(crate) struct Provider {
    limit: Box<dyn Limit>,
    hints: Hints,
    refusal: StatusCode,
    /// The share of paths that are always 403.
    forbidden: f64,
    /// Numbers are written as `12.345` rather than as the next whole second; `RateLimit` rather than `X-RateLimit-*`.
    variant: bool,
    seed: Seed,
    answers: u64,
}

impl Provider {
    /// The provider that belongs to the seed; whatever changes during a run of `requests` changes within it.
    pub(crate) fn draw(kind: Kind, hints: Hints, seed: Seed, requests: usize) -> Self {
        let variant = Draw::new(seed, 1).coin();
        let forbidden = if kind == Kind::ForbiddenPaths { Draw::new(seed, 2).between(0.1, 0.3) } else { 0.0 };
        let refusal = if kind == Kind::Firewall { StatusCode::FORBIDDEN } else { StatusCode::TOO_MANY_REQUESTS };
        let limit = limit(kind, seed, requests as f64);
        Self { limit, hints, refusal, forbidden, variant, seed, answers: 0 }
    }

    /// One request per `window`, and no word about it.
    pub(crate) fn one_per(window: Duration, seed: Seed) -> Self {
        let limit = Box::new(OnePerWindow::new(Length::Constant(window), Refused::Nothing));
        Self { limit, ..Self::draw(Kind::Unlimited, Hints::None, seed, 1) }
    }

    pub(crate) fn ask(&mut self, now: Duration, path: u64, in_flight: usize) -> Answer {
        let latency = Duration::from_millis((50.0 * 6_f64.powf(noise(self.seed, 3, self.answers))).round() as u64);
        self.answers += 1;
        if noise(self.seed, 4, path) < self.forbidden {
            let (status, headers) = (StatusCode::FORBIDDEN, HeaderMap::new());
            return Answer { status, forbidden: true, headers, asked: None, latency };
        }
        let open = self.limit.ask(now, in_flight);
        let status = if open { StatusCode::OK } else { self.refusal };
        let (headers, asked) = self.hint(now, open);
        Answer { status, forbidden: false, headers, asked, latency }
    }

    fn hint(&mut self, now: Duration, open: bool) -> (HeaderMap, Option<Duration>) {
        let wait = self.limit.earliest(now).saturating_sub(now);
        let mut headers = HeaderMap::new();
        let asked = match self.hints {
            Hints::RateLimit => {
                let remaining = self.limit.remaining(now).unwrap_or_default();
                let reset = rounded_up(wait).as_secs();
                if self.variant {
                    headers
                        .insert(HeaderName::from_static("ratelimit"), value(format!("\"p\";r={remaining};t={reset}")));
                } else {
                    headers.insert(HeaderName::from_static("x-ratelimit-remaining"), value(remaining.to_string()));
                    headers.insert(HeaderName::from_static("x-ratelimit-reset"), value(reset.to_string()));
                }
                return (headers, (remaining == 0).then(|| Duration::from_secs(reset)));
            }
            _ if open => return (headers, None),
            Hints::None => return (headers, None),
            Hints::Exact if self.variant => wait,
            Hints::Exact => rounded_up(wait),
            Hints::RoundedDown => Duration::from_secs(wait.as_secs()),
            Hints::TooShort => rounded_up(wait / 2),
            Hints::TooLong => rounded_up(wait * 2),
        };
        let (secs, millis) = (asked.as_secs(), asked.as_nanos().div_ceil(1_000_000) % 1000);
        let text = if millis == 0 { rounded_up(asked).as_secs().to_string() } else { format!("{secs}.{millis:03}") };
        headers.insert(RETRY_AFTER, value(text));
        (headers, (!asked.is_zero()).then_some(asked))
    }

    pub(crate) fn earliest(&mut self, now: Duration) -> Duration {
        self.limit.earliest(now)
    }

    pub(crate) fn concurrency(&self) -> usize {
        self.limit.concurrency()
    }
}

fn rounded_up(wait: Duration) -> Duration {
    Duration::from_secs(wait.as_nanos().div_ceil(1_000_000_000) as u64)
}

fn value(text: String) -> HeaderValue {
    HeaderValue::try_from(text).expect("digits and punctuation make a header value")
}

fn limit(kind: Kind, seed: Seed, requests: f64) -> Box<dyn Limit> {
    let mut draw = Draw::new(seed, 0);
    let one_per = |length, refused| Box::new(OnePerWindow::new(length, refused));
    match kind {
        Kind::OnePerWindow => one_per(Length::Constant(draw.seconds(8.0, 60.0)), Refused::Nothing),
        Kind::ViolationExtends => one_per(Length::Constant(draw.seconds(8.0, 60.0)), Refused::Restart),
        Kind::DoublingBan => {
            let window = draw.seconds(8.0, 60.0);
            one_per(Length::Constant(window), Refused::Double { ban: window })
        }
        Kind::NoisyWindow => one_per(Length::Noisy { mean: draw.seconds(8.0, 60.0), seed }, Refused::Nothing),
        Kind::DriftingWindow => {
            let mean = draw.seconds(8.0, 60.0);
            let period = mean.mul_f64(requests.max(10.0) * draw.between(1.0, 2.0));
            one_per(Length::Drifting { mean, period, phase: draw.unit() }, Refused::Nothing)
        }
        Kind::LimitTightens | Kind::LimitLoosens => {
            let before = draw.seconds(6.0, 30.0);
            let after = if kind == Kind::LimitTightens { before * 3 } else { before / 3 };
            let at = before.mul_f64(requests * draw.between(0.4, 0.6));
            one_per(Length::Changing { before, after, at }, Refused::Nothing)
        }
        Kind::TokenBucket => Box::new(TokenBucket::new(draw.count(2, 10), draw.seconds(2.0, 20.0))),
        Kind::FixedWindow => Box::new(FixedWindow::new(draw.count(3, 30), draw.seconds(10.0, 120.0), draw.unit())),
        Kind::SharedAddress => {
            let window = FixedWindow::new(draw.count(3, 30), draw.seconds(10.0, 120.0), draw.unit());
            Box::new(window.shared(seed))
        }
        Kind::SlidingWindow => Box::new(SlidingWindow::new(draw.count(3, 30), draw.seconds(10.0, 120.0))),
        Kind::Firewall | Kind::FirewallRestarts => {
            let burst = SlidingWindow::new(draw.count(5, 15), draw.seconds(10.0, 60.0));
            Box::new(Firewall::new(burst, draw.seconds(60.0, 300.0), kind == Kind::FirewallRestarts))
        }
        Kind::RandomRefusals => Box::new(RandomRefusals::new(seed, draw.scale(0.03, 0.08))),
        Kind::ConcurrencyLimit => Box::new(Concurrency(draw.count(1, 3))),
        Kind::ForbiddenPaths | Kind::Unlimited => Box::new(Unlimited),
    }
}
