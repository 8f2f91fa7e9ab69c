//! The limits that are set beforehand, through the layer: a delay between requests, a quota in a rolling window, jitter.
//!
//! | module | what |
//! |---|---|
//! | [`delay`] | `min_delay`: from when, and what ends a request |
//! | [`quota`] | the rolling window, against a model of it |
//! | [`jitter`] | only adds, once per send |
//! | [`maximum`] | several things in the way at one time |
//! | [`budget`] | refused at once or served; when to come back, and why |
//! | [`seen`] | observer, snapshot, permits for code that is no tower service |
//! | [`run_time`] | per host, and changed while somebody waits |
//! | [`memory`] | what is remembered, and what is forgotten |
//! | [`retries`] | attempts count as sends |

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

#[path = "proactive/budget.rs"]
mod budget;
#[path = "proactive/delay.rs"]
mod delay;
#[path = "proactive/jitter.rs"]
mod jitter;
#[path = "proactive/maximum.rs"]
mod maximum;
#[path = "proactive/memory.rs"]
mod memory;
#[path = "proactive/quota.rs"]
mod quota;
#[cfg(feature = "retry")]
#[path = "proactive/retries.rs"]
mod retries;
#[path = "proactive/run_time.rs"]
mod run_time;
#[path = "proactive/seen.rs"]
mod seen;

use std::time::Duration;

use http::{Request, StatusCode};
use tokio::task::JoinHandle;
use tower::{Layer as _, Service, ServiceExt as _};
use tower_host_gate::{HostGate, HostGateLayer, HostSnapshot, MaxWait, Pacing, RateLimited};

use support::script::{Script, ScriptError, get};

const URI: &str = "http://feeds.example/feed.xml";
const HOST: &str = "feeds.example:80";

/// The limits hold whatever a host's refusals lead to.
const PACINGS: [Pacing; 2] = [Pacing::Learned, Pacing::Reactive];

type Client = HostGate<Script>;
/// The status, or what the gate said instead of sending.
type Answer = Result<StatusCode, RateLimited>;

/// A gate on which nobody loses patience.
fn patient() -> HostGateLayer {
    HostGateLayer::new().max_wait(Duration::MAX)
}

/// The answer's body is dropped.
async fn send<S, B>(client: &S, request: Request<()>) -> Answer
where
    S: Service<Request<()>, Response = http::Response<B>, Error = tower::BoxError> + Clone,
{
    match client.clone().oneshot(request).await {
        Ok(response) => Ok(response.status()),
        // A transport error is an answer too, as far as a limit goes.
        Err(error) if error.is::<ScriptError>() => Ok(StatusCode::BAD_GATEWAY),
        Err(error) => Err(RateLimited::find(&*error).expect("the gate's own error").clone()),
    }
}

async fn fetch(client: &Client) -> Answer {
    send(client, get(URI)).await
}

async fn fetch_within(client: &Client, budget: Duration) -> Answer {
    send(client, within(budget)).await
}

/// Sent at once or not at all.
async fn poke(client: &Client) -> Answer {
    fetch_within(client, Duration::ZERO).await
}

fn within(budget: Duration) -> Request<()> {
    let mut request = get(URI);
    request.extensions_mut().insert(MaxWait(budget));
    request
}

/// In a task of its own, begun at once.
fn spawn(client: &Client) -> JoinHandle<Answer> {
    spawn_within(client, Duration::MAX)
}

fn spawn_within(client: &Client, budget: Duration) -> JoinHandle<Answer> {
    let client = client.clone();
    tokio::spawn(async move { fetch_within(&client, budget).await })
}

/// This many requests at one time, from as many clones; all have to be answered.
async fn burst(client: &Client, requests: usize) {
    let tasks: Vec<_> = (0..requests).map(|_| spawn(client)).collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

/// Lets the tasks that were spawned run until each of them waits.
async fn settle() {
    for _ in 0..64 {
        tokio::task::yield_now().await;
    }
}

fn state(layer: &HostGateLayer) -> Option<HostSnapshot> {
    layer.hosts().get(HOST)
}

/// Runs under the paused clock what needs no test of its own: one case of many.
fn run<T>(case: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(case)
}

fn client(layer: &HostGateLayer, script: &Script) -> Client {
    layer.layer(script.clone())
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}
