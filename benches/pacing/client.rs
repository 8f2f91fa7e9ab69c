//! The clients that are compared: every policy as a stack of layers around the same service.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{Request, Response};
use tower::limit::ConcurrencyLimitLayer;
use tower::retry::RetryLayer;
use tower::util::{BoxCloneSyncService, option_layer};
use tower::{BoxError, ServiceBuilder};
use tower_host_gate::observe::{Observer, WaitEvent};
use tower_host_gate::retry::GateRetry;
use tower_host_gate::{HostGateLayer, Pacing};

use crate::draw::{Draw, Seed};
use crate::pacer::{Adaptive, Aimd, AtOnce, AutoThrottle, Backoff, FixedSpacing, InFlightRetry, Paced, Pacer};
use crate::site::{Site, name};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Policy {
    /// Everything at once, and again at once.
    None,
    /// One quick second attempt.
    InFlightRetry,
    /// One request a second.
    FixedSpacing,
    /// Each request by itself backs off exponentially, with full jitter.
    Backoff,
    /// A rate that grows by addition and is halved by a refusal.
    Aimd,
    /// The rule of Scrapy's AutoThrottle.
    AutoThrottle,
    /// The client rate limiter of the AWS SDKs' retry mode "adaptive".
    Adaptive,
    /// This crate as ADR-0016 has it: three attempts, and no longer than a minute in all.
    Adr,
    /// This crate with `Pacing::Reactive` and the caller's budget.
    Reactive,
    /// This crate as it comes, with the caller's budget.
    Learned,
}

impl Policy {
    pub(crate) const ALL: [Self; 10] = [
        Self::None,
        Self::InFlightRetry,
        Self::FixedSpacing,
        Self::Backoff,
        Self::Aimd,
        Self::AutoThrottle,
        Self::Adaptive,
        Self::Adr,
        Self::Reactive,
        Self::Learned,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::InFlightRetry => "in-flight-retry",
            Self::FixedSpacing => "fixed-1s",
            Self::Backoff => "backoff",
            Self::Aimd => "aimd",
            Self::AutoThrottle => "autothrottle",
            Self::Adaptive => "aws-adaptive",
            Self::Adr => "adr-0016",
            Self::Reactive => "reactive",
            Self::Learned => "learned",
        }
    }

    /// The longest this client waits because a server says so.
    pub(crate) fn longest_hold(self) -> Duration {
        match self {
            Self::Adr | Self::Reactive => Duration::from_secs(60),
            Self::Learned => Duration::from_secs(15 * 60),
            _ => Duration::MAX,
        }
    }
}

/// What the policy of a run is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) policy: Policy,
    /// What one request may wait.
    pub(crate) budget: Duration,
    /// To one host.
    pub(crate) in_flight: usize,
    /// To all hosts together, below the gate.
    pub(crate) inner_limit: Option<usize>,
    pub(crate) seed: Seed,
    /// Keep what the gate knows after every answer.
    pub(crate) trace: bool,
}

/// What the gate knows of the provider from one instant on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lesson {
    pub(crate) at: Duration,
    pub(crate) gap: Duration,
    pub(crate) too_short: Duration,
    pub(crate) known_good: Duration,
}

#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) service: BoxCloneSyncService<Request<()>, Response<()>, BoxError>,
    pub(crate) pacing: PacingDelay,
    lessons: Lessons,
}

type Lessons = Arc<Mutex<Vec<Lesson>>>;

impl Client {
    pub(crate) fn new(terms: Terms, site: Site) -> Self {
        let draw = Draw::new(terms.seed, 0xC11E7);
        match terms.policy {
            Policy::None => Self::paced(AtOnce, terms, site),
            Policy::InFlightRetry => Self::paced(InFlightRetry, terms, site),
            Policy::FixedSpacing => Self::paced(FixedSpacing::default(), terms, site),
            Policy::Backoff => Self::paced(Backoff::new(draw), terms, site),
            Policy::Aimd => Self::paced(Aimd::default(), terms, site),
            Policy::AutoThrottle => Self::paced(AutoThrottle::default(), terms, site),
            Policy::Adaptive => Self::paced(Adaptive::new(draw), terms, site),
            Policy::Adr => Self::gated(Pacing::Reactive, 3, Terms { budget: Duration::from_secs(60), ..terms }, site),
            Policy::Reactive => Self::gated(Pacing::Reactive, u32::MAX, terms, site),
            Policy::Learned => Self::gated(Pacing::Learned, u32::MAX, terms, site),
        }
    }

    /// What the gate has learned, answer by answer.
    pub(crate) fn lessons(&self) -> Vec<Lesson> {
        lock(&self.lessons).clone()
    }

    fn gated(pacing: Pacing, attempts: u32, terms: Terms, site: Site) -> Self {
        let delay = PacingDelay::default();
        let gate = HostGateLayer::new()
            .pacing(pacing)
            .concurrency(terms.in_flight)
            .max_wait(terms.budget)
            .observer(delay.clone());
        let lessons = Lessons::default();
        let traced = terms.trace.then(|| (gate.hosts(), site.clone(), Arc::clone(&lessons)));
        // Above the gate, which has learned from the answer by then.
        let note_lesson = move |response| {
            if let Some((hosts, site, lessons)) = &traced {
                let known = hosts.get(&name(0)).map(|host| (host.gap, host.too_short, host.known_good));
                let (gap, too_short, known_good) = known.unwrap_or_default();
                lock(lessons).push(Lesson { at: site.now(), gap, too_short, known_good });
            }
            response
        };
        let service = ServiceBuilder::new()
            .map_response(|response: Response<_>| response.map(drop))
            .layer(RetryLayer::new(GateRetry::new(attempts)))
            .map_response(note_lesson)
            .layer(gate)
            .layer(option_layer(terms.inner_limit.map(ConcurrencyLimitLayer::new)))
            .service(site);
        Self { service: BoxCloneSyncService::new(service), pacing: delay, lessons }
    }

    fn paced(pacer: impl Pacer, terms: Terms, site: Site) -> Self {
        let service = BoxCloneSyncService::new(Paced::new(pacer, terms.budget, site));
        Self { service, pacing: PacingDelay::default(), lessons: Lessons::default() }
    }
}

/// How long cooldown, spacing or quota have kept requests to the provider, and to other hosts.
#[derive(Clone, Debug, Default)]
pub(crate) struct PacingDelay(Arc<Mutex<(Duration, Duration)>>);

impl PacingDelay {
    pub(crate) fn get(&self) -> (Duration, Duration) {
        *lock(&self.0)
    }
}

impl Observer for PacingDelay {
    fn waited(&self, event: &WaitEvent<'_>) {
        let (provider, elsewhere) = &mut *lock(&self.0);
        let kept = if event.host.as_str() == name(0) { provider } else { elsewhere };
        *kept += event.pacing;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
