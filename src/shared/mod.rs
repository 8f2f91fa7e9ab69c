//! One limit across processes (feature `redis`): the state of each host in Redis or Valkey.
//!
//! The gate of this process stays the gate. At the head of a host's queue it asks the store instead of deciding alone, and
//! each answer brings what all processes know of the host. Whenever the store does not answer, the gate goes on by itself.
//!
//! request → head of its host's queue in this process → `admit.lua` in the store → lease → send → `release.lua` with what
//! the response meant → lease back.
//!
//! `docs/shared.md` says which mode to choose, what each setting means across processes, and what the server needs.

mod error;
mod keys;
mod link;
mod scripts;
mod share;
mod store;

use std::time::Duration;

pub use self::error::{BackendError, BackendErrorKind, InvalidRedis};
use self::link::Target;
#[cfg(test)]
pub(crate) use self::link::tests::support;
pub(crate) use self::link::{Connection, Hooks};
pub(crate) use self::share::Share;
pub(crate) use self::store::{
    Answer, Ask, Handed, Heard, HostTerms, Lease, Pushed, Released, Report, Steer, Store, Verdict, Via,
};

/// Where the state of the hosts is shared, and how.
///
/// Made by [`open`](Self::open), [`sentinel`](Self::sentinel) or [`cluster`](Self::cluster), given to
/// [`HostGateLayer::shared`](crate::HostGateLayer::shared). Nothing is connected before the first request, and nothing
/// has to be there: a program boots without its store and paces in process until the store answers.
///
/// ```
/// use std::time::Duration;
/// use tower_host_gate::{HostGateLayer, Queue, Redis};
///
/// let redis = Redis::open("redis://10.0.0.5/")?.scope("feeds").queue(Queue::Fifo);
/// let layer = HostGateLayer::new().concurrency(4).shared(redis);
/// # Ok::<(), tower_host_gate::shared::InvalidRedis>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Redis {
    pub(crate) target: Target,
    pub(crate) prefix: String,
    pub(crate) scope: String,
    pub(crate) queue: Queue,
    pub(crate) lease_ttl: Duration,
    pub(crate) retry_interval: Duration,
    pub(crate) timeout: Duration,
    pub(crate) share: u32,
    pub(crate) spacing_only: bool,
}

/// Who of several processes goes next when a host has a free permit.
///
/// ```
/// use tower_host_gate::{Queue, Redis};
///
/// let redis = Redis::open("redis://10.0.0.5/")?.queue(Queue::Fifo);
/// # Ok::<(), tower_host_gate::shared::InvalidRedis>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Queue {
    /// Whoever asks first. Requests of one process go in their order; the head of its queue asks again every
    /// [`retry_interval`](Redis::retry_interval) while all permits are taken.
    #[default]
    Delegate,
    /// First come, first served across processes: the head of each process's queue draws a ticket, a permit that comes
    /// back goes to whoever has waited longest, and its process is told.
    Fifo,
}

impl Redis {
    /// One server, or whatever the scheme says: `redis://`, `rediss://` (TLS), `redis+sentinel://host:26379,host2/service`,
    /// `redis+cluster://host,host2`, the latter two with `rediss` too.
    ///
    /// # Errors
    ///
    /// When the URL is none of these. The error does not repeat a password.
    pub fn open(url: &str) -> Result<Self, InvalidRedis> {
        Target::parse(url).map(Self::new)
    }

    /// The master of this name, as the sentinels at these URLs know it; asked anew at every connection.
    ///
    /// # Errors
    ///
    /// When there is no node, or a URL is not understood.
    pub fn sentinel<I>(nodes: I, service: &str) -> Result<Self, InvalidRedis>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        Target::sentinel(nodes.into_iter().map(Into::into).collect(), service.to_owned()).map(Self::new)
    }

    /// The cluster that these nodes are of; the others are found.
    ///
    /// # Errors
    ///
    /// When there is no node, or a URL is not understood.
    pub fn cluster<I>(nodes: I) -> Result<Self, InvalidRedis>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        Target::cluster(nodes.into_iter().map(Into::into).collect()).map(Self::new)
    }

    fn new(target: Target) -> Self {
        Self {
            target,
            prefix: "host-gate".to_owned(),
            scope: "default".to_owned(),
            queue: Queue::default(),
            lease_ttl: Duration::from_secs(120),
            retry_interval: Duration::from_millis(25),
            timeout: Duration::from_millis(200),
            share: 1,
            spacing_only: false,
        }
    }

    /// Separates limits that have nothing to do with each other: programs of one scope share each host. Default
    /// `"default"`.
    pub fn scope(mut self, scope: &str) -> Self {
        scope.clone_into(&mut self.scope);
        self
    }

    /// What all keys begin with. Default `"host-gate"`.
    pub fn prefix(mut self, prefix: &str) -> Self {
        prefix.clone_into(&mut self.prefix);
        self
    }

    /// Who goes next. Default [`Queue::Delegate`].
    pub fn queue(mut self, queue: Queue) -> Self {
        self.queue = queue;
        self
    }

    /// How long a permit counts as taken when nobody gives it back: that of a process that was killed is free again after
    /// this. Make it longer than your longest request with its body; one that takes longer is reported, and no longer
    /// counted. Default 120 s; at least 1 s.
    pub fn lease_ttl(mut self, ttl: Duration) -> Self {
        self.lease_ttl = ttl.max(Duration::from_secs(1));
        self
    }

    /// How long the head of a queue waits before it asks again, while all permits are taken, without
    /// [`Queue::Fifo`]; each wait is drawn from 20 % around it, and is the longer the more processes ask. Default 25 ms; at
    /// least 1 ms.
    pub fn retry_interval(mut self, interval: Duration) -> Self {
        self.retry_interval = interval.max(Duration::from_millis(1));
        self
    }

    /// How long the store may take for one operation; past it the request is decided in process. Default 200 ms; at
    /// least 1 ms.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.max(Duration::from_millis(1));
        self
    }

    /// The number of processes among which the limits are divided while the store is out of reach: each keeps one part in
    /// so many of concurrency and quota, at least one, and so many times the delays. Default 1: each process keeps all of
    /// them, so together they may reach as many times the limit as there are processes.
    pub fn share_while_degraded(mut self, processes: u32) -> Self {
        self.share = processes.max(1);
        self
    }

    /// Spaces sends, and counts nobody in flight: `concurrency` is each process's own. With a
    /// [`min_delay`](crate::HostGateLayer::min_delay) from completion the next request of all processes goes that long
    /// after the last one has ended, or while one is under way, that long after it was sent. A process that is killed
    /// leaves nothing behind but the right distance. Default false.
    pub fn spacing_only(mut self, spacing_only: bool) -> Self {
        self.spacing_only = spacing_only;
        self
    }

    /// Trusts this certificate authority (PEM) in TLS connections, instead of those everybody trusts.
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.target = self.target.with_root_certificate(pem.into());
        self
    }
}
