//! The policies of others: when to send next, and what to make of an answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Request, Response};
use tokio::time::{Instant, sleep, timeout_at};
use tower::{BoxError, Service};

use crate::draw::Draw;
use crate::site::{Forbidden, Site};

/// A policy for one host. Times count from the beginning of the run.
pub(crate) trait Pacer: Send + 'static {
    /// When the next request may go, as things are.
    fn ready(&mut self, now: Duration) -> Duration {
        now
    }

    fn sent(&mut self, now: Duration) {
        let _ = now;
    }

    /// What becomes of a request that was refused.
    fn again(&mut self, refusal: Refusal) -> Again;

    fn answered(&mut self, now: Duration, answer: Seen) {
        let _ = (now, answer);
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Refusal {
    /// How often this request was refused, this time included.
    pub(crate) times: u32,
    pub(crate) retry_after: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) refused: bool,
    pub(crate) latency: Duration,
}

pub(crate) enum Again {
    /// After this, and when the policy lets it.
    In(Duration),
    GiveUp,
}

/// A client that sends when its policy says so, first come, first served.
pub(crate) struct Paced<P> {
    pacer: Arc<Mutex<P>>,
    /// Held by whoever is next to send.
    turn: Arc<tokio::sync::Mutex<()>>,
    budget: Duration,
    site: Site,
}

impl<P> Paced<P> {
    pub(crate) fn new(pacer: P, budget: Duration, site: Site) -> Self {
        Self { pacer: Arc::new(Mutex::new(pacer)), turn: Arc::default(), budget, site }
    }

    fn pacer(&self) -> MutexGuard<'_, P> {
        self.pacer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P> Clone for Paced<P> {
    fn clone(&self) -> Self {
        Self {
            pacer: Arc::clone(&self.pacer),
            turn: Arc::clone(&self.turn),
            budget: self.budget,
            site: self.site.clone(),
        }
    }
}

impl<P: Pacer> Service<Request<()>> for Paced<P> {
    type Response = Response<()>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<()>, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.site.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let client = self.clone();
        Box::pin(client.fetch(request))
    }
}

impl<P: Pacer> Paced<P> {
    async fn fetch(mut self, request: Request<()>) -> Result<Response<()>, BoxError> {
        let deadline = Instant::now() + self.budget;
        let mut times = 0;
        loop {
            // Only the waiting has to end in time; who has sent gets an answer.
            timeout_at(deadline, self.turn()).await?;
            let sent = self.site.now();
            let Ok(response) = self.site.call(request.clone()).await;
            let now = self.site.now();
            let refused = !response.status().is_success();
            self.pacer().answered(now, Seen { refused, latency: now - sent });
            if !refused || response.extensions().get::<Forbidden>().is_some() {
                return Ok(response.map(drop));
            }
            times += 1;
            let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            let again = self.pacer().again(Refusal { times, retry_after: retry_after.map(Duration::from_secs_f64) });
            match again {
                Again::In(wait) => timeout_at(deadline, sleep(wait)).await?,
                Again::GiveUp => return Ok(response.map(drop)),
            }
        }
    }

    /// Waits until it is our turn and the policy lets us send.
    async fn turn(&self) {
        let _turn = self.turn.lock().await;
        loop {
            let now = self.site.now();
            let ready = self.pacer().ready(now);
            if ready <= now {
                return self.pacer().sent(now);
            }
            sleep(ready - now).await;
        }
    }
}

/// Sends at once, five times over.
pub(crate) struct AtOnce;

impl Pacer for AtOnce {
    fn again(&mut self, refusal: Refusal) -> Again {
        if refusal.times < 5 { Again::In(Duration::ZERO) } else { Again::GiveUp }
    }
}

/// Two attempts: the second one after `Retry-After`, at most 5 s, or 500 ms.
pub(crate) struct InFlightRetry;

impl Pacer for InFlightRetry {
    fn again(&mut self, refusal: Refusal) -> Again {
        let wait = refusal.retry_after.unwrap_or(Duration::from_millis(500));
        if refusal.times < 2 { Again::In(wait.min(Duration::from_secs(5))) } else { Again::GiveUp }
    }
}

/// One request a second, refused ones in their turn.
#[derive(Default)]
pub(crate) struct FixedSpacing {
    next: Duration,
}

impl Pacer for FixedSpacing {
    fn ready(&mut self, _: Duration) -> Duration {
        self.next
    }

    fn sent(&mut self, now: Duration) {
        self.next = now + Duration::from_secs(1);
    }

    fn again(&mut self, refusal: Refusal) -> Again {
        Again::In(refusal.retry_after.unwrap_or_default())
    }
}

/// A random part of 1, 2, 4 .. 60 s, or what the server asks for if that is longer.
pub(crate) struct Backoff {
    draw: Draw,
}

impl Backoff {
    pub(crate) fn new(draw: Draw) -> Self {
        Self { draw }
    }
}

impl Pacer for Backoff {
    fn again(&mut self, refusal: Refusal) -> Again {
        let ceiling = 2_f64.powi(refusal.times.min(16) as i32 - 1).min(60.0);
        let wait = Duration::from_secs_f64(ceiling * self.draw.unit());
        Again::In(wait.max(refusal.retry_after.unwrap_or_default()))
    }
}

/// Starts at one request a second; 0.1 a second more after a success, half of it after a refusal.
pub(crate) struct Aimd {
    per_second: f64,
    last: Option<Duration>,
}

impl Default for Aimd {
    fn default() -> Self {
        Self { per_second: 1.0, last: None }
    }
}

impl Pacer for Aimd {
    fn ready(&mut self, now: Duration) -> Duration {
        self.last.map_or(now, |last| last + Duration::from_secs_f64(1.0 / self.per_second))
    }

    fn sent(&mut self, now: Duration) {
        self.last = Some(now);
    }

    fn again(&mut self, refusal: Refusal) -> Again {
        Again::In(refusal.retry_after.unwrap_or_default())
    }

    fn answered(&mut self, _: Duration, answer: Seen) {
        let rate = if answer.refused { self.per_second / 2.0 } else { self.per_second + 0.1 };
        // Somewhere a rate that is halved has to stop, or it would never send again.
        self.per_second = rate.clamp(1.0 / 600.0, 100.0);
    }
}

/// The delay goes half of the way to the latency, but an error never lowers it: 5 s at first, 60 s at most. Refused
/// requests are repeated twice, in their turn.
pub(crate) struct AutoThrottle {
    delay: Duration,
    last: Option<Duration>,
}

impl Default for AutoThrottle {
    fn default() -> Self {
        Self { delay: Duration::from_secs(5), last: None }
    }
}

impl Pacer for AutoThrottle {
    fn ready(&mut self, now: Duration) -> Duration {
        self.last.map_or(now, |last| last + self.delay)
    }

    fn sent(&mut self, now: Duration) {
        self.last = Some(now);
    }

    fn again(&mut self, refusal: Refusal) -> Again {
        if refusal.times < 3 { Again::In(Duration::ZERO) } else { Again::GiveUp }
    }

    fn answered(&mut self, _: Duration, answer: Seen) {
        // The target concurrency is 1, its default.
        let target = answer.latency;
        let delay = ((self.delay + target) / 2).max(target).min(Duration::from_secs(60));
        if !answer.refused || delay > self.delay {
            self.delay = delay;
        }
    }
}

/// A token bucket whose rate follows a cubic function of the time since the last refusal; three attempts, with a random
/// part of 1, 2 s between them.
pub(crate) struct Adaptive {
    draw: Draw,
    on: bool,
    fill_rate: f64,
    capacity: f64,
    tokens: f64,
    filled_at: f64,
    last_max_rate: f64,
    last_throttle: f64,
    measured_rate: f64,
    measured_at: f64,
    count: f64,
}

impl Adaptive {
    const MIN_FILL_RATE: f64 = 0.5;
    const MIN_CAPACITY: f64 = 1.0;
    const SMOOTH: f64 = 0.8;
    const BETA: f64 = 0.7;
    const SCALE: f64 = 0.4;

    pub(crate) fn new(draw: Draw) -> Self {
        Self {
            draw,
            on: false,
            fill_rate: 0.0,
            capacity: 0.0,
            tokens: 0.0,
            filled_at: 0.0,
            last_max_rate: 0.0,
            last_throttle: 0.0,
            measured_rate: 0.0,
            measured_at: 0.0,
            count: 0.0,
        }
    }

    fn fill(&mut self, now: f64) {
        self.tokens = (self.tokens + (now - self.filled_at).max(0.0) * self.fill_rate).min(self.capacity);
        self.filled_at = self.filled_at.max(now);
    }

    fn measure(&mut self, now: f64) {
        self.count += 1.0;
        let half_second = (now * 2.0).floor() / 2.0;
        if half_second > self.measured_at {
            let rate = self.count / (half_second - self.measured_at);
            self.measured_rate = rate * Self::SMOOTH + self.measured_rate * (1.0 - Self::SMOOTH);
            self.count = 0.0;
            self.measured_at = half_second;
        }
    }
}

impl Pacer for Adaptive {
    fn ready(&mut self, now: Duration) -> Duration {
        if !self.on {
            return now;
        }
        self.fill(now.as_secs_f64());
        let missing = (1.0 - self.tokens).max(0.0);
        // Rounded up to what the clock can tell.
        now + Duration::from_millis((missing / self.fill_rate * 1000.0).ceil() as u64)
    }

    fn sent(&mut self, _: Duration) {
        self.tokens -= 1.0;
    }

    fn again(&mut self, refusal: Refusal) -> Again {
        if refusal.times >= 3 {
            return Again::GiveUp;
        }
        Again::In(Duration::from_secs_f64(f64::from(refusal.times) * self.draw.unit()))
    }

    fn answered(&mut self, now: Duration, answer: Seen) {
        let now = now.as_secs_f64();
        self.measure(now);
        let calculated = if answer.refused {
            let rate = if self.on { self.measured_rate.min(self.fill_rate) } else { self.measured_rate };
            self.last_max_rate = rate;
            self.last_throttle = now;
            self.on = true;
            rate * Self::BETA
        } else {
            let window = (self.last_max_rate * (1.0 - Self::BETA) / Self::SCALE).cbrt();
            Self::SCALE * (now - self.last_throttle - window).powi(3) + self.last_max_rate
        };
        let rate = calculated.min(2.0 * self.measured_rate);
        self.fill(now);
        self.fill_rate = rate.max(Self::MIN_FILL_RATE);
        self.capacity = rate.max(Self::MIN_CAPACITY);
        self.tokens = self.tokens.min(self.capacity);
    }
}
