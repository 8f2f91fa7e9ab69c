//! One run: a load, a client and a provider, in a runtime of their own whose clock is paused.

use std::time::Duration;

use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tower::{BoxError, ServiceExt as _};
use tower_host_gate::{RateLimited, Throttled};

use crate::clairvoyant::{Schedule, path, schedule};
use crate::client::{Client, Lesson, Policy, Terms};
use crate::draw::Seed;
use crate::load::{Caller, Load};
use crate::provider::{Hints, Kind, Provider};
use crate::site::{self, Event, Forbidden, Site};

/// What is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cell {
    pub(crate) kind: Kind,
    pub(crate) hints: Hints,
    pub(crate) load: Load,
    pub(crate) policy: Policy,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) clairvoyant: Schedule,
    /// When everybody stops asking.
    pub(crate) horizon: Duration,
    /// What was asked of the provider; the other hosts of the load are left out.
    pub(crate) requests: Vec<Request>,
    /// What the provider was sent.
    pub(crate) record: Vec<Event>,
    /// What the gate has learned, answer by answer.
    pub(crate) lessons: Vec<Lesson>,
    /// Sends to any host before a time that it had named.
    pub(crate) early: usize,
    /// For how long pacing has kept requests to the provider, and to the other hosts.
    pub(crate) pacing: Duration,
    pub(crate) pacing_elsewhere: Duration,
}

/// What became of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) caller: usize,
    pub(crate) outcome: Outcome,
    /// From the asking to the last answer.
    pub(crate) took: Duration,
    /// How often the caller had to come back.
    pub(crate) came_back: u32,
    /// How often it was shed.
    pub(crate) sheds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Served,
    Forbidden,
    /// Not before the horizon.
    LockedOut,
}

/// How long a caller stays away where nobody tells it.
const COME_BACK: Duration = Duration::from_secs(60);

pub(crate) fn run(cell: Cell, seed: Seed, trace: bool) -> Run {
    let Cell { kind, hints, load, policy } = cell;
    let in_flight = if kind == Kind::ConcurrencyLimit { 4 } else { load.in_flight() };
    let draw = || Provider::draw(kind, hints, seed, load.requests());
    simulate(draw, Setting { load, policy, in_flight, seed, trace })
}

/// Where a client meets a provider.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) load: Load,
    pub(crate) policy: Policy,
    /// What the gate lets be in flight to one host.
    pub(crate) in_flight: usize,
    pub(crate) seed: Seed,
    /// Keep what the gate learns.
    pub(crate) trace: bool,
}

/// `provider` makes the same one every time.
pub(crate) fn simulate(provider: impl Fn() -> Provider, setting: Setting) -> Run {
    let Setting { load, policy, in_flight, seed, trace } = setting;
    let pace = schedule(&mut provider(), &Load::Batch(200).callers(seed, Duration::ZERO), 1).makespan / 200;
    let callers = load.callers(seed, pace);
    let inner_limit = load.inner_limit(in_flight, seed);
    let places = inner_limit.map_or(in_flight, |limit| limit.min(in_flight));
    let to_provider: Vec<_> = callers.iter().filter(|caller| caller.host == 0).copied().collect();
    let clairvoyant = schedule(&mut provider(), &to_provider, places);

    // Of a batch the longest wait is the makespan; of requests that come one after the other it is what a budget is for.
    let budget = clairvoyant.longest_wait * 3 + Duration::from_secs(120);
    let horizon = clairvoyant.makespan + clairvoyant.longest_wait * 20 + Duration::from_secs(2 * 3600);
    let terms = Terms { policy, budget, in_flight, inner_limit, seed, trace };
    let others = (1..load.hosts()).map(|_| Provider::draw(Kind::Unlimited, Hints::None, seed, 1));
    let providers: Vec<_> = std::iter::once(provider()).chain(others).collect();

    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(async {
        let site = Site::open(providers, policy.longest_hold());
        let client = Client::new(terms, site.clone());
        let requests = play(&client, &callers, horizon).await;
        let (pacing, pacing_elsewhere) = client.pacing.get();
        let (record, early, lessons) = (site.record(0), site.early(), client.lessons());
        Run { clairvoyant, horizon, requests, record, lessons, early, pacing, pacing_elsewhere }
    })
}

async fn play(client: &Client, callers: &[Caller], horizon: Duration) -> Vec<Request> {
    let end = Instant::now() + horizon;
    let mut asking = JoinSet::new();
    for (n, caller) in callers.iter().enumerate() {
        asking.spawn(ask(client.clone(), n, *caller, end));
    }
    let answered = asking.join_all().await;
    answered.into_iter().filter(|(caller, _)| caller.host == 0).flat_map(|(_, requests)| requests).collect()
}

/// One caller, from its first request to its last.
async fn ask(client: Client, n: usize, caller: Caller, end: Instant) -> (Caller, Vec<Request>) {
    sleep_until(Instant::now() + caller.from).await;
    let mut requests = Vec::with_capacity(caller.requests);
    for left in (1..=caller.requests).rev() {
        let asked = Instant::now();
        let mut request =
            Request { caller: n, outcome: Outcome::LockedOut, took: Duration::ZERO, came_back: 0, sheds: 0 };
        let answer = tokio::time::timeout_at(end, request.ask(&client, caller.host, path(n, left)));
        if let Ok(outcome) = answer.await {
            request.outcome = outcome;
        }
        request.took = asked.elapsed();
        requests.push(request);
    }
    (caller, requests)
}

impl Request {
    /// Asks until there is an answer, coming back when told to.
    async fn ask(&mut self, client: &Client, host: usize, path: u64) -> Outcome {
        loop {
            let answer = client.service.clone().oneshot(site::request(host, path)).await;
            let come_back = match answer {
                Ok(response) if response.status().is_success() => return Outcome::Served,
                Ok(response) if response.extensions().get::<Forbidden>().is_some() => return Outcome::Forbidden,
                Ok(response) => {
                    response.extensions().get().map_or(COME_BACK, |throttled: &Throttled| throttled.retry_after)
                }
                Err(error) => {
                    self.sheds += 1;
                    come_back_after(&error)
                }
            };
            self.came_back += 1;
            // A wait of nothing would stop the clock.
            sleep(come_back.max(Duration::from_millis(1))).await;
        }
    }
}

fn come_back_after(error: &BoxError) -> Duration {
    RateLimited::find(&**error).map_or(COME_BACK, RateLimited::retry_after)
}
