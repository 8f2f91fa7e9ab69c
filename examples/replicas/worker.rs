//! One replica: it takes feeds off its standard input, fetches them, and tells what becomes of them.
//!
//! All there is to sharing is in [`gate`].

use std::env;
use std::time::Duration;

use bytes::Bytes;
use http::header::USER_AGENT;
use http::{HeaderValue, Request};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower::retry::RetryLayer;
use tower::{BoxError, ServiceBuilder, ServiceExt as _};
use tower_host_gate::observe::{DegradedEvent, RecoveredEvent};
use tower_host_gate::retry::GateRetry;
use tower_host_gate::{HostGateLayer, Hosts, Observer, Redis};

use crate::{AT_MOST, LIMIT, WORKERS};

#[derive(Debug, clap::Args)]
pub(crate) struct Job {
    /// Which worker this is
    name: usize,
    /// Where the provider is
    provider: String,
    /// Share the limit with all who have this scope, through the Redis at REDIS_URL
    #[arg(long)]
    scope: Option<String>,
    /// How long a permit is taken that nobody gives back
    #[arg(long)]
    lease_secs: Option<u64>,
}

/// The gate of one replica.
///
/// At full size this is all there is to it: `HostGateLayer::new().concurrency(4)`, and to share it
/// `.shared(Redis::open(url)?.scope("feeds").share_while_degraded(4))`.
fn gate(shared: Option<Redis>) -> HostGateLayer {
    let layer = HostGateLayer::new()
        .concurrency(LIMIT)
        // A feed takes 80 ms here: everything else is as much shorter than in the real world.
        .base_cooldown(Duration::from_millis(50))
        .max_cooldown(Duration::from_secs(1))
        .spacing(Duration::from_millis(10))
        .warm_for(Duration::from_millis(300))
        .max_wait(AT_MOST)
        .observer(Told);
    match shared {
        Some(redis) => layer.shared(redis),
        None => layer,
    }
}

pub(crate) fn redis(url: &str, scope: &str) -> Result<Redis, BoxError> {
    let redis = Redis::open(url)?
        .scope(scope)
        // While Redis is out of reach, each of the four keeps a quarter of the limit.
        .share_while_degraded(WORKERS as u32)
        // Nothing here is about a slow Redis, and a busy machine is slow. The default of 200 ms is for programs.
        .timeout(Duration::from_secs(5));
    Ok(redis)
}

/// Until Redis has answered for the first time: a gate needs no Redis to begin with, but this is about one that is there.
pub(crate) async fn connect(hosts: &Hosts, host: &str) {
    while hosts.get_shared(host).await.is_err() {
        sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn work(job: Job) -> Result<(), BoxError> {
    let shared = match &job.scope {
        Some(scope) => {
            let redis = redis(&env::var("REDIS_URL")?, scope)?;
            Some(match job.lease_secs {
                Some(seconds) => redis.lease_ttl(Duration::from_secs(seconds)),
                None => redis,
            })
        }
        None => None,
    };
    let is_shared = shared.is_some();
    let gate = gate(shared);
    if is_shared {
        connect(&gate.hosts(), &job.provider).await;
    }
    let client = ServiceBuilder::new()
        // As often as it takes: the budget of the gate bounds it.
        .layer(RetryLayer::new(GateRetry::new(100)))
        .layer(gate)
        .service(Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build_http::<Full<Bytes>>());

    println!("ready");
    let mut feeds = BufReader::new(stdin()).lines();
    let mut fetches = JoinSet::new();
    while let Some(feed) = feeds.next_line().await? {
        let client = client.clone();
        let request = Request::get(format!("http://{}/{feed}", job.provider))
            .header(USER_AGENT, HeaderValue::from(job.name))
            .body(Full::default())?;
        fetches.spawn(async move {
            let fetched = async {
                let response = client.oneshot(request).await?;
                let status = response.status();
                // To its end: until then the request counts as in flight.
                response.into_body().collect().await?;
                Ok::<_, BoxError>(status.is_success())
            };
            let said = if fetched.await.unwrap_or_default() { "has" } else { "lost" };
            println!("{said} {feed}");
        });
    }
    fetches.join_all().await;
    Ok(())
}

/// Tells of outages.
struct Told;

impl Observer for Told {
    fn degraded(&self, _: &DegradedEvent<'_>) {
        println!("degraded");
    }

    fn recovered(&self, _: &RecoveredEvent) {
        println!("recovered");
    }
}
