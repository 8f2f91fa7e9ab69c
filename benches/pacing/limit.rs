//! What a provider tolerates: pure state machines. Times count from the beginning of the run.

use std::collections::VecDeque;
use std::time::Duration;

use crate::draw::{Draw, Seed, noise};

pub(crate) trait Limit: Send {
    /// A request comes in while `in_flight` others are being answered: is it accepted?
    fn ask(&mut self, now: Duration, in_flight: usize) -> bool;

    /// The earliest instant, from `now` on, at which a request would be accepted if none came before it.
    fn earliest(&mut self, now: Duration) -> Duration;

    /// How many requests would be accepted at once now, where that is a number.
    fn remaining(&mut self, _now: Duration) -> Option<usize> {
        None
    }

    /// How many may be in flight.
    fn concurrency(&self) -> usize {
        usize::MAX
    }
}

/// A host that accepts everything.
pub(crate) struct Unlimited;

impl Limit for Unlimited {
    fn ask(&mut self, _: Duration, _: usize) -> bool {
        true
    }

    fn earliest(&mut self, now: Duration) -> Duration {
        now
    }
}

/// One request per window, counted from the last one that was accepted.
pub(crate) struct OnePerWindow {
    length: Length,
    refused: Refused,
    open_from: Duration,
    accepted: u64,
}

/// How long a window is.
pub(crate) enum Length {
    Constant(Duration),
    /// Each one is drawn anew.
    Noisy {
        mean: Duration,
        seed: Seed,
    },
    /// Slowly grows and shrinks.
    Drifting {
        mean: Duration,
        period: Duration,
        phase: f64,
    },
    /// Another one from some instant on.
    Changing {
        before: Duration,
        after: Duration,
        at: Duration,
    },
}

impl Length {
    fn get(&self, now: Duration, nth: u64) -> Duration {
        match *self {
            Self::Constant(length) => length,
            Self::Noisy { mean, seed } => mean.mul_f64(0.7 + 0.6 * noise(seed, 0x6015E, nth)),
            Self::Drifting { mean, period, phase } => {
                let turns = now.as_secs_f64() / period.as_secs_f64() + phase;
                mean.mul_f64(1.0 + 0.4 * (turns * std::f64::consts::TAU).sin())
            }
            Self::Changing { before, after, at } => {
                if now < at {
                    before
                } else {
                    after
                }
            }
        }
    }
}

/// What a refused request does to the window.
pub(crate) enum Refused {
    Nothing,
    /// It begins anew.
    Restart,
    /// It becomes a ban twice as long as the last one, at most sixteen windows.
    Double {
        ban: Duration,
    },
}

impl OnePerWindow {
    pub(crate) fn new(length: Length, refused: Refused) -> Self {
        Self { length, refused, open_from: Duration::ZERO, accepted: 0 }
    }
}

impl Limit for OnePerWindow {
    fn ask(&mut self, now: Duration, _: usize) -> bool {
        let window = self.length.get(now, self.accepted);
        let open = now >= self.open_from;
        if open {
            self.accepted += 1;
            self.open_from = now + window;
        }
        match (&mut self.refused, open) {
            (Refused::Double { ban }, true) => *ban = window,
            (Refused::Double { ban }, false) => {
                *ban = (*ban * 2).min(window * 16);
                self.open_from = now + *ban;
            }
            (Refused::Restart, false) => self.open_from = now + window,
            (Refused::Restart, true) | (Refused::Nothing, _) => {}
        }
        open
    }

    fn earliest(&mut self, now: Duration) -> Duration {
        now.max(self.open_from)
    }

    fn remaining(&mut self, now: Duration) -> Option<usize> {
        Some(usize::from(now >= self.open_from))
    }
}

/// So many requests in each window of a row; other clients behind the same address may use up a part of it.
pub(crate) struct FixedWindow {
    limit: usize,
    window: Duration,
    /// The first window began this long before the run.
    phase: Duration,
    current: u128,
    used: usize,
    others: Option<Others>,
}

struct Others {
    seed: Seed,
    /// When they ask in the current window, the next one last.
    asks: Vec<Duration>,
}

impl FixedWindow {
    pub(crate) fn new(limit: usize, window: Duration, phase: f64) -> Self {
        Self { limit, window, phase: window.mul_f64(phase), current: u128::MAX, used: 0, others: None }
    }

    pub(crate) fn shared(self, seed: Seed) -> Self {
        Self { others: Some(Others { seed, asks: Vec::new() }), ..self }
    }

    fn advance(&mut self, now: Duration) {
        let current = (now + self.phase).as_nanos() / self.window.as_nanos();
        if current != self.current {
            self.current = current;
            self.used = 0;
            let begins = self.window * u32::try_from(current).unwrap_or(u32::MAX);
            if let Some(others) = &mut self.others {
                let mut draw = Draw::new(others.seed, 0x07E25 ^ ((current as u64) << 20));
                let asks = (draw.unit() * self.limit as f64) as usize;
                others.asks =
                    (0..asks).map(|_| (begins + self.window.mul_f64(draw.unit())).saturating_sub(self.phase)).collect();
                others.asks.sort_by(|a, b| b.cmp(a));
            }
        }
        if let Some(others) = &mut self.others {
            while others.asks.last().is_some_and(|ask| *ask <= now) {
                others.asks.pop();
                self.used = self.limit.min(self.used + 1);
            }
        }
    }
}

impl Limit for FixedWindow {
    fn ask(&mut self, now: Duration, _: usize) -> bool {
        self.advance(now);
        let open = self.used < self.limit;
        self.used += usize::from(open);
        open
    }

    fn earliest(&mut self, now: Duration) -> Duration {
        self.advance(now);
        if self.used < self.limit {
            return now;
        }
        let next = u32::try_from(self.current + 1).unwrap_or(u32::MAX);
        self.window * next - self.phase
    }

    fn remaining(&mut self, now: Duration) -> Option<usize> {
        self.advance(now);
        Some(self.limit - self.used)
    }
}

/// So many requests in any interval as long as the window.
pub(crate) struct SlidingWindow {
    limit: usize,
    window: Duration,
    accepted: VecDeque<Duration>,
}

impl SlidingWindow {
    pub(crate) fn new(limit: usize, window: Duration) -> Self {
        Self { limit, window, accepted: VecDeque::new() }
    }

    fn advance(&mut self, now: Duration) {
        while self.accepted.front().is_some_and(|first| *first + self.window <= now) {
            self.accepted.pop_front();
        }
    }
}

impl Limit for SlidingWindow {
    fn ask(&mut self, now: Duration, _: usize) -> bool {
        self.advance(now);
        let open = self.accepted.len() < self.limit;
        if open {
            self.accepted.push_back(now);
        }
        open
    }

    fn earliest(&mut self, now: Duration) -> Duration {
        self.advance(now);
        match self.accepted.front() {
            Some(first) if self.accepted.len() >= self.limit => *first + self.window,
            _ => now,
        }
    }

    fn remaining(&mut self, now: Duration) -> Option<usize> {
        self.advance(now);
        Some(self.limit - self.accepted.len())
    }
}

/// A bucket of so many tokens, refilled one by one.
pub(crate) struct TokenBucket {
    burst: u32,
    refill: Duration,
    /// When the bucket is full again.
    full_at: Duration,
}

impl TokenBucket {
    pub(crate) fn new(burst: usize, refill: Duration) -> Self {
        Self { burst: burst as u32, refill, full_at: Duration::ZERO }
    }

    /// When there is a token.
    fn open_from(&self) -> Duration {
        self.full_at.saturating_sub(self.refill * (self.burst - 1))
    }
}

impl Limit for TokenBucket {
    fn ask(&mut self, now: Duration, _: usize) -> bool {
        let open = now >= self.open_from();
        if open {
            self.full_at = self.full_at.max(now) + self.refill;
        }
        open
    }

    fn earliest(&mut self, now: Duration) -> Duration {
        now.max(self.open_from())
    }

    fn remaining(&mut self, now: Duration) -> Option<usize> {
        let missing = self.full_at.saturating_sub(now).as_nanos().div_ceil(self.refill.as_nanos());
        Some(self.burst as usize - missing as usize)
    }
}

/// A firewall: a burst brings a ban, and with some of them whoever asks during the ban starts it anew.
pub(crate) struct Firewall {
    burst: SlidingWindow,
    ban: Duration,
    restarts: bool,
    banned_until: Duration,
}

impl Firewall {
    pub(crate) fn new(burst: SlidingWindow, ban: Duration, restarts: bool) -> Self {
        Self { burst, ban, restarts, banned_until: Duration::ZERO }
    }
}

impl Limit for Firewall {
    fn ask(&mut self, now: Duration, in_flight: usize) -> bool {
        let banned = now < self.banned_until;
        let open = !banned && self.burst.ask(now, in_flight);
        if !open && (!banned || self.restarts) {
            self.banned_until = now + self.ban;
        }
        open
    }

    fn earliest(&mut self, now: Duration) -> Duration {
        self.burst.earliest(now.max(self.banned_until))
    }
}

/// A fast host that refuses a small part of all requests, whoever asks and however fast.
pub(crate) struct RandomRefusals {
    seed: Seed,
    share: f64,
}

impl RandomRefusals {
    /// What is drawn is when it refuses, so that there is a right time to ask.
    const SLOT: Duration = Duration::from_millis(10);

    pub(crate) fn new(seed: Seed, share: f64) -> Self {
        Self { seed, share }
    }

    fn open(&self, now: Duration) -> bool {
        let slot = now.as_nanos() / Self::SLOT.as_nanos();
        noise(self.seed, 0x2A4D0, slot as u64) >= self.share
    }
}

impl Limit for RandomRefusals {
    fn ask(&mut self, now: Duration, _: usize) -> bool {
        self.open(now)
    }

    fn earliest(&mut self, mut now: Duration) -> Duration {
        while !self.open(now) {
            now += Self::SLOT;
        }
        now
    }
}

/// So many requests in flight at a time.
pub(crate) struct Concurrency(pub(crate) usize);

impl Limit for Concurrency {
    fn ask(&mut self, _: Duration, in_flight: usize) -> bool {
        in_flight < self.0
    }

    fn earliest(&mut self, now: Duration) -> Duration {
        now
    }

    fn concurrency(&self) -> usize {
        self.0
    }
}
