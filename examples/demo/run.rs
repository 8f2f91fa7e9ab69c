//! The four clients, and one burst through one of them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::task::JoinSet;
use tower::retry::RetryLayer;
use tower::{BoxError, Service, ServiceBuilder, ServiceExt as _};
use tower_host_gate::observe::WaitEvent;
use tower_host_gate::retry::GateRetry;
use tower_host_gate::{HostGateLayer, Limits, Observer, Pacing, RateLimited};

use crate::claims::Figures;
use crate::provider::{Hit, Manners, Provider};
use crate::scaled;

/// Feeds fetched from each provider, all at once.
pub(crate) const FEEDS: usize = 12;

/// The windows of the two providers that throttle, in seconds of the real world.
pub(crate) const HEADERLESS_WINDOW: f64 = 25.0;
pub(crate) const RETRY_AFTER_WINDOW: f64 = 10.0;

/// The budget of a batch that has time, in seconds of the real world.
pub(crate) const PATIENCE: f64 = 600.0;

/// How the burst is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    NoGate,
    Reactive,
    Gate,
    Tuned,
}

impl Way {
    pub(crate) const ALL: [Self; 4] = [Self::NoGate, Self::Reactive, Self::Gate, Self::Tuned];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::NoGate => "no gate",
            Self::Reactive => "reactive",
            Self::Gate => "gate",
            Self::Tuned => "gate, tuned",
        }
    }

    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::NoGate => "every request for itself, with the one in-flight retry of ADR-0015",
            Self::Reactive => "the same gate, without a memory: Pacing::Reactive forgets a host at its next success",
            Self::Gate => "its defaults, ten minutes' patience with the headerless host, and GateRetry outside",
            Self::Tuned => "told what is known: the windows as min_delay, and a cap of 8 for the healthy host",
        }
    }
}

// --- the clients --------------------------------------------------------------------------------------------------

type HyperClient = Client<HttpConnector, Full<Bytes>>;

fn hyper_client() -> HyperClient {
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build_http()
}

/// Without the gate, but not without manners: each request repeats a refusal once, after what the server asked for (at
/// most 5 s) or half a second, as ADR-0015 has it.
///
/// The policy is the crate's own. It reports to the gate it was made from; no request goes through that one.
fn without_gate() -> impl Fetch {
    let unused = HostGateLayer::new();
    let once_more = unused.in_flight_retry().base_delay(scaled(0.5)).max_delay(scaled(5.0));
    ServiceBuilder::new().map_err(BoxError::from).layer(RetryLayer::new(once_more)).service(hyper_client())
}

/// With the gate. The retry is **outside**: a refused request goes back to the gate, whose pacing is the wait. The
/// attempts are many, because the gate's budget bounds them anyway.
fn with_gate(gate: HostGateLayer) -> impl Fetch {
    ServiceBuilder::new().layer(RetryLayer::new(GateRetry::new(10))).layer(gate).service(hyper_client())
}

/// The defaults, scaled, and patience with one host: whoever asks for all of a slow host's feeds has to give them the
/// time. At full size this is `HostGateLayer::new().per_host(headerless, Limits::default().max_wait(..))`.
fn gate(waits: Waits, headerless: &str) -> HostGateLayer {
    HostGateLayer::new()
        .base_cooldown(scaled(2.0))
        .max_cooldown(scaled(900.0))
        .spacing(scaled(1.0))
        .warm_for(scaled(120.0))
        .max_wait(scaled(60.0))
        .per_host(headerless, Limits::default().max_wait(scaled(PATIENCE)))
        .observer(waits)
}

/// The same gate with the pacing of ADR-0016. At full size `pacing` is all there is to it.
fn reactive(gate: HostGateLayer) -> HostGateLayer {
    gate.pacing(Pacing::Reactive).max_cooldown(scaled(60.0))
}

/// The same gate, told what its owner knows about three hosts. A delay counts from the end of one request to the sending
/// of the next, so that no clock at the other end of the line can find it too short.
fn tuned(gate: HostGateLayer, headerless: &str, retry_after: &str, healthy: &str) -> HostGateLayer {
    let one_per = |window| Limits::default().min_delay(scaled(window)).max_wait(scaled(PATIENCE));
    gate.per_host(headerless, one_per(HEADERLESS_WINDOW))
        .per_host(retry_after, one_per(RETRY_AFTER_WINDOW))
        .per_host(healthy, Limits::default().concurrency(8))
}

/// Anything that fetches, with or without a gate.
trait Fetch:
    Service<Request<Full<Bytes>>, Response = Response<Self::Body>, Error = BoxError, Future: Send> + Clone + Send + 'static
{
    type Body: http_body::Body<Data: Send, Error: Into<BoxError>> + Send;
}

impl<S, B> Fetch for S
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = BoxError, Future: Send> + Clone + Send + 'static,
    B: http_body::Body<Data: Send, Error: Into<BoxError>> + Send,
{
    type Body = B;
}

// --- what the gate tells ------------------------------------------------------------------------------------------

/// One wait in the gate.
#[derive(Clone, Debug)]
pub(crate) struct Wait {
    host: String,
    pub(crate) until: Instant,
    pub(crate) waited: Duration,
    pub(crate) pacing: Duration,
    pub(crate) queued: Duration,
}

/// An observer that keeps what it hears.
#[derive(Clone, Debug, Default)]
struct Waits(Arc<Mutex<Vec<Wait>>>);

impl Observer for Waits {
    fn waited(&self, event: &WaitEvent<'_>) {
        let WaitEvent { waited, pacing, queued, .. } = *event;
        let wait = Wait { host: event.host.to_string(), until: Instant::now(), waited, pacing, queued };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(wait);
    }
}

impl Waits {
    fn of(&self, host: &str) -> Vec<Wait> {
        let waits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waits.iter().filter(|wait| wait.host == host).cloned().collect()
    }
}

// --- the burst ----------------------------------------------------------------------------------------------------

/// One burst, and all that is known about it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) way: Way,
    pub(crate) start: Instant,
    pub(crate) hosts: Vec<HostRun>,
}

/// The part of one provider.
#[derive(Debug)]
pub(crate) struct HostRun {
    pub(crate) provider: &'static str,
    throttles: bool,
    /// Callers may wait for all of its feeds.
    patient: bool,
    /// What the gate has learnt to leave between two requests, if anything.
    pub(crate) gap: Duration,
    /// What the provider saw.
    pub(crate) hits: Vec<Hit>,
    /// What the gate told.
    pub(crate) waits: Vec<Wait>,
    /// What the callers got.
    pub(crate) ends: Vec<End>,
}

/// How one fetch ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) feed: usize,
    pub(crate) at: Instant,
    pub(crate) answer: Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The feed.
    Served,
    /// The provider's 429.
    Lost,
    /// The gate's `RateLimited`.
    Shed,
}

impl Run {
    /// Fresh providers, a fresh client, one burst.
    pub(crate) async fn new(way: Way) -> Result<Self, BoxError> {
        let headerless = Provider::start(Manners::Headerless { window: scaled(HEADERLESS_WINDOW) }).await?;
        let retry_after = Provider::start(Manners::RetryAfter { window: scaled(RETRY_AFTER_WINDOW) }).await?;
        let healthy = Provider::start(Manners::Healthy).await?;
        let named = [("headerless", &headerless), ("Retry-After", &retry_after), ("healthy", &healthy)];
        let providers = named.map(|(_, provider)| provider);

        let waits = Waits::default();
        let gate = gate(waits.clone(), &headerless.host());
        let gate = match way {
            Way::NoGate | Way::Gate => gate,
            Way::Reactive => reactive(gate),
            Way::Tuned => tuned(gate, &headerless.host(), &retry_after.host(), &healthy.host()),
        };
        let known = gate.hosts();
        let start = Instant::now();
        let ends = match way {
            Way::NoGate => burst(without_gate(), providers).await?,
            _ => burst(with_gate(gate), providers).await?,
        };
        let hosts = named.into_iter().zip(ends).map(|((name, provider), ends)| HostRun {
            provider: name,
            throttles: name != "healthy",
            patient: name == "headerless",
            gap: known.get(&provider.host()).map(|host| host.gap).unwrap_or_default(),
            hits: provider.hits(),
            waits: waits.of(&provider.host()),
            ends,
        });
        Ok(Self { way, start, hosts: hosts.collect() })
    }

    pub(crate) fn figures(&self) -> Vec<Figures> {
        self.hosts.iter().map(|host| host.figures(self.start)).collect()
    }

    /// Until the last caller has its answer.
    pub(crate) fn took(&self) -> Duration {
        self.hosts.iter().map(|host| host.took(self.start)).max().unwrap_or_default()
    }
}

impl HostRun {
    fn took(&self, start: Instant) -> Duration {
        self.ends.iter().map(|end| end.at - start).max().unwrap_or_default()
    }

    fn figures(&self, start: Instant) -> Figures {
        let ended = |answer| self.ends.iter().filter(|end| end.answer == answer).count();
        Figures {
            provider: self.provider,
            throttles: self.throttles,
            patient: self.patient,
            feeds: self.ends.len(),
            sent: self.hits.len(),
            refused: self.hits.iter().filter(|hit| hit.refused).count(),
            served: ended(Answer::Served),
            shed: ended(Answer::Shed),
            lost: ended(Answer::Lost),
            pacing: self.waits.iter().map(|wait| wait.pacing).sum(),
            queued: self.waits.iter().map(|wait| wait.queued).sum(),
            took: self.took(start),
        }
    }
}

/// Every feed of every provider at once, each fetch a task of its own with its own clone of the client. How they ended,
/// by provider.
async fn burst(client: impl Fetch, providers: [&Provider; 3]) -> Result<[Vec<End>; 3], BoxError> {
    let mut fetches = JoinSet::new();
    for feed in 0..FEEDS {
        for (n, provider) in providers.iter().enumerate() {
            let request = Request::get(provider.url(feed)).body(Full::default())?;
            let client = client.clone();
            fetches.spawn(async move {
                let answer = fetch(client, request).await?;
                Ok::<_, BoxError>((n, End { feed, at: Instant::now(), answer }))
            });
        }
    }
    let mut ends = [const { Vec::new() }; 3];
    while let Some(fetched) = fetches.join_next().await {
        let (n, end) = fetched??;
        ends[n].push(end);
    }
    Ok(ends)
}

async fn fetch(client: impl Fetch, request: Request<Full<Bytes>>) -> Result<Answer, BoxError> {
    match client.oneshot(request).await {
        Ok(response) => {
            let answer = if response.status().is_success() { Answer::Served } else { Answer::Lost };
            // To its end: until then the request counts as in flight.
            response.into_body().collect().await.map_err(Into::into)?;
            Ok(answer)
        }
        Err(error) if RateLimited::find(&*error).is_some() => Ok(Answer::Shed),
        Err(error) => Err(error),
    }
}
