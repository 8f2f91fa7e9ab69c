//! The gate shared through Redis: what broke limits that are kept in Redis elsewhere, and what happens here.
//!
//! | module | cases |
//! |---|---|
//! | [`servers`] | D01 D02 D03 D05: scripts a server does not know, or does not run; clusters |
//! | [`clocks`] | D06 D07 D24: whose time counts |
//! | [`expiry`] | D09: every key ends some day |
//! | [`leases`] | D11 D12 D13: whoever cannot give a permit back |
//! | [`outages`] | D15 D16 O01: Redis is slow or gone |
//! | [`lost`] | D18 D19: Redis is full, and what it stores gets lost or broken |
//! | [`queues`] | D20 M05: what many waiters and many hosts cost |
//! | [`replicas`] | D21 D22: what one replica tells the others |
//! | [`keys`] | D23: names |
//!
//! A replica is a layer of its own, or where it is killed a process of its own. All servers are real unless a case is
//! about an answer that these do not give, and all time is real: no upper bound is about speed, only about what hangs.

#![allow(clippy::unwrap_used, reason = "a test that finds nothing has failed")]
#![allow(unreachable_pub, reason = "`pub` is a module's interface to the others")]

mod support;

#[path = "shared/clocks.rs"]
mod clocks;
#[path = "shared/events.rs"]
mod events;
#[path = "shared/expiry.rs"]
mod expiry;
#[path = "shared/eye.rs"]
mod eye;
#[path = "shared/fake.rs"]
mod fake;
#[path = "shared/keys.rs"]
mod keys;
#[path = "shared/leases.rs"]
mod leases;
#[path = "shared/lost.rs"]
mod lost;
#[path = "shared/outages.rs"]
mod outages;
#[path = "shared/queues.rs"]
mod queues;
#[path = "shared/replicas.rs"]
mod replicas;
#[path = "shared/servers.rs"]
mod servers;

use std::process::Command;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tower_host_gate::{HostGateLayer, Hosts, Outcome, Permit, RateLimited, Redis};

use events::Events;

const FEED: &str = "http://feed.example/";
/// The key of that host.
const HOST: &str = "feed.example:80";

/// How long something may take that is not about to fail.
const LONG: Duration = secs(60);

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn millis(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn throttled(hint: Duration) -> Outcome {
    Outcome::Throttled { hint: Some(hint), soft: false }
}

/// The store at this address. No case is about a slow one unless it says so, and a busy machine is slow.
fn redis(url: &str) -> Redis {
    Redis::open(url).unwrap().timeout(secs(10))
}

/// One of several programs, which have nothing in common but the store.
struct Replica {
    layer: HostGateLayer,
    hosts: Hosts,
    events: Events,
}

impl Replica {
    /// Nothing is connected before the first request.
    fn new(layer: HostGateLayer, redis: Redis) -> Self {
        let events = Events::default();
        let layer = layer.observer(events.clone()).shared(redis);
        Self { hosts: layer.hosts(), layer, events }
    }

    async fn connected(layer: HostGateLayer, redis: Redis) -> Self {
        let replica = Self::new(layer, redis);
        let connect = async {
            while replica.hosts.get_shared("nobody.example:80").await.is_err() {
                sleep(millis(5)).await;
            }
        };
        timeout(LONG, connect).await.expect("the store is there");
        replica
    }

    async fn acquire(&self, uri: &str) -> Permit {
        self.within(LONG, uri).await.expect("a permit in time")
    }

    /// Asks, and does not wait for more than the answer.
    async fn at_once(&self, uri: &str) -> Result<Permit, RateLimited> {
        self.within(Duration::ZERO, uri).await
    }

    async fn within(&self, budget: Duration, uri: &str) -> Result<Permit, RateLimited> {
        self.hosts.acquire(&uri.parse().unwrap(), budget).await
    }

    /// How many of so many requests may go now. Their permits come back at once.
    async fn admitted(&self, requests: usize, uri: &str) -> usize {
        let mut admitted = 0;
        for _ in 0..requests {
            admitted += usize::from(self.at_once(uri).await.is_ok());
        }
        admitted
    }

    /// For how long all processes hold this host.
    async fn cooldown(&self, host: &str) -> Duration {
        let seen = self.hosts.get_shared(host).await.expect("the store answers");
        seen.map_or(Duration::ZERO, |seen| seen.cooldown)
    }
}

async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so().await {
        assert!(Instant::now() < deadline, "never: {what}");
        sleep(millis(5)).await;
    }
}

const CHILD: &str = "SHARED_TEST_RUNS_AS_A_CHILD";

/// A process that runs this test and no other, and finds in [`told`] what it is told.
fn child(test: &str, what: &str) -> Command {
    let mut child = Command::new(std::env::current_exe().expect("the test knows its own binary"));
    child.args(["--exact", test]).env(CHILD, what);
    child
}

/// What this process was told if it is a [`child`].
fn told() -> Option<String> {
    std::env::var(CHILD).ok()
}
