//! Replicas of one program, each with a gate of its own, and what they ask for all the time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer as _, ServiceExt as _};
use tower_host_gate::observe::{DegradedEvent, ErrorEvent, Observer, Operation, RecoveredEvent};
use tower_host_gate::shared::BackendErrorKind;
use tower_host_gate::{HostGate, HostGateLayer, Limits, Queue, Redis};

use super::upstream::{Upstream, request, stays};

pub const REPLICAS: usize = 3;

/// Takes so many at once. All replicas together always have more.
pub const CAPPED: &str = "capped.example";
pub const CAP: usize = 4;

/// Takes so many in each window. All replicas together always have more.
pub const QUOTA: &str = "quota.example";
pub const SENDS: u32 = 20;
pub const WINDOW: Duration = Duration::from_millis(500);

/// Takes everything at once, so that whatever keeps a request of it is the gate.
pub const FREE: &str = "free.example";

/// Takes one at a time. No part of the load.
pub const SINGLE: &str = "single.example";

/// How long the last requests have to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// Separately built gates of one scope.
pub struct Fleet {
    pub queue: Queue,
    pub upstream: Upstream,
    pub replicas: Vec<Replica>,
    stop: Arc<AtomicBool>,
    workers: JoinSet<Tally>,
}

pub struct Replica {
    pub layer: HostGateLayer,
    pub client: HostGate<Upstream>,
    pub events: Events,
}

/// How requests ended.
#[derive(Default)]
pub struct Tally {
    pub answered: usize,
    /// What those had instead that got no response.
    pub lost: Vec<String>,
}

impl Fleet {
    /// So many replicas that know the store and have not asked for anything yet.
    pub async fn new(replicas: usize, redis: Redis, queue: Queue) -> Self {
        let upstream = Upstream::default();
        let mut fleet = Self { queue, upstream, replicas: Vec::new(), stop: Arc::default(), workers: JoinSet::new() };
        for _ in 0..replicas {
            fleet.add(redis.clone()).await;
        }
        fleet
    }

    /// One more, at a store that may be reached by another way.
    pub async fn add(&mut self, redis: Redis) {
        let replica = Replica::new(redis.scope(scope(self.queue)).queue(self.queue), &self.upstream);
        replica.connect().await;
        self.replicas.push(replica);
    }

    /// From now on every replica asks for more than there is.
    pub fn load(&mut self) {
        for replica in &self.replicas {
            // Each alone would use up the cap, and the quota, of all.
            let hosts = [(CAPPED, CAP, 40, 0), (QUOTA, 2, 5, 15), (FREE, 2, 2, 25)];
            for (host, workers, stay, pause) in hosts {
                for _ in 0..workers {
                    let (client, stop) = (replica.client.clone(), Arc::clone(&self.stop));
                    let (stay, pause) = (Duration::from_millis(stay), Duration::from_millis(pause));
                    self.workers.spawn(work(client, stop, host, stay, pause));
                }
            }
        }
    }

    /// No new requests, and what became of all.
    pub async fn unload(&mut self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Tally::default();
        let joined = timeout(PATIENCE, async {
            while let Some(worker) = self.workers.join_next().await {
                let tally = worker.unwrap_or_else(|panic| Tally { answered: 0, lost: vec![panic.to_string()] });
                all.answered += tally.answered;
                all.lost.extend(tally.lost);
            }
        });
        if joined.await.is_err() {
            all.lost.extend((0..self.workers.len()).map(|_| "no answer".to_owned()));
            self.workers.abort_all();
        }
        all
    }

    /// How many operations failed between these two.
    pub fn failures(&self, from: Instant, to: Instant) -> usize {
        let events = self.replicas.iter().flat_map(|replica| replica.events.all());
        events.filter(|(at, told)| matches!(told, Told::Failed(..)) && (from..to).contains(at)).count()
    }

    /// How many leases the store counts that nobody uses, when there was time to give them back.
    pub async fn leases_left(&self) -> usize {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let mut left = 0;
            for host in [CAPPED, QUOTA, FREE, SINGLE] {
                let known = self.replicas[0].layer.hosts().get_shared(host).await;
                // A store that does not answer is seen elsewhere.
                left += known.ok().flatten().map_or(0, |known| known.in_flight);
            }
            if left == 0 || Instant::now() > deadline {
                return left;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// What separates the modes where they share a server.
pub fn scope(queue: Queue) -> &'static str {
    if queue == Queue::Fifo { "fifo" } else { "delegate" }
}

impl Replica {
    /// One that has not talked to the store yet.
    pub fn new(redis: Redis, upstream: &Upstream) -> Self {
        let events = Events::default();
        let layer = HostGateLayer::new()
            .concurrency(64)
            .per_host(CAPPED, Limits::default().concurrency(CAP))
            .per_host(SINGLE, Limits::default().concurrency(1))
            .per_host(QUOTA, Limits::default().quota(SENDS, WINDOW))
            .observer(events.clone())
            .shared(redis);
        Self { client: layer.layer(upstream.clone()), layer, events }
    }

    /// A gate is usable without its store; a drill begins with one that has it.
    pub async fn connect(&self) {
        while self.layer.hosts().get_shared(FREE).await.is_err() {
            sleep(Duration::from_millis(10)).await;
        }
        self.events.clear();
    }
}

async fn work(
    client: HostGate<Upstream>,
    stop: Arc<AtomicBool>,
    host: &'static str,
    stay: Duration,
    pause: Duration,
) -> Tally {
    let mut tally = Tally::default();
    while !stop.load(Ordering::Relaxed) {
        match client.clone().oneshot(stays(stay, request(host))).await {
            Ok(_) => tally.answered += 1,
            Err(error) => tally.lost.push(format!("{host}: {error}")),
        }
        sleep(pause).await;
    }
    tally
}

// ---------------------------------------------------------------------------------------------------------------------
// What they tell
// ---------------------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Degraded(BackendErrorKind),
    Recovered,
    Failed(Operation, BackendErrorKind),
}

/// What one replica has told, and when.
#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Vec<(Instant, Told)>>>);

impl Events {
    pub fn all(&self) -> Vec<(Instant, Told)> {
        self.0.lock().expect("nobody panics with the lock held").clone()
    }

    pub fn count(&self, which: impl Fn(Told) -> bool) -> usize {
        self.all().into_iter().filter(|(_, told)| which(*told)).count()
    }

    pub fn degraded(&self) -> usize {
        self.count(|told| matches!(told, Told::Degraded(_)))
    }

    /// When it recovered, in their order.
    pub fn recoveries(&self) -> Vec<Instant> {
        self.all().into_iter().filter(|(_, told)| *told == Told::Recovered).map(|(at, _)| at).collect()
    }

    /// For a test that failed: when it lost the store and found it again, counted from `began`.
    pub fn outages_since(&self, began: Instant) -> Vec<(Duration, Told)> {
        let outages = self.all().into_iter().filter(|(_, told)| !matches!(told, Told::Failed(..)));
        outages.map(|(at, told)| (at - began, told)).collect()
    }

    pub fn failures(&self) -> usize {
        self.count(|told| matches!(told, Told::Failed(..)))
    }

    fn clear(&self) {
        self.0.lock().expect("nobody panics with the lock held").clear();
    }

    fn push(&self, told: Told) {
        self.0.lock().expect("nobody panics with the lock held").push((Instant::now(), told));
    }
}

impl Observer for Events {
    fn degraded(&self, event: &DegradedEvent<'_>) {
        self.push(Told::Degraded(event.cause.kind()));
    }

    fn recovered(&self, _: &RecoveredEvent) {
        self.push(Told::Recovered);
    }

    fn error(&self, event: &ErrorEvent<'_>) {
        self.push(Told::Failed(event.operation, event.error.kind()));
    }
}
