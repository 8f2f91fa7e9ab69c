//! [`Hosts`]: a handle on a gate's hosts, to look at them, to steer them, and to gate code that is no tower service.

use std::future::poll_fn;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use http::{Extensions, HeaderMap, StatusCode, Uri};

use crate::config::Limits;
use crate::error::{RateLimited, Reason};
use crate::gate::{self, Handle, Terms, Waiter};
use crate::host::{By, HostKey, Keying};
#[cfg(feature = "redis")]
use crate::shared::BackendError;
use crate::state::HostsState;
use crate::verdict::Outcome;

/// The hosts of a [`HostGateLayer`](crate::HostGateLayer). Cheap to clone.
///
/// Hosts are named by key (`host:port`) or by name; a name without a port means all its ports. No method holds a lock
/// across an await.
///
/// ```
/// use std::time::Duration;
/// use tower_host_gate::HostGateLayer;
///
/// let layer = HostGateLayer::new();
/// let hosts = layer.hosts();
/// hosts.penalize("api.example:443", Duration::from_secs(30));
/// let state = hosts.get("api.example:443").unwrap();
/// assert!(state.cooldown > Duration::from_secs(29));
/// hosts.clear("api.example:443");
/// assert!(hosts.get("api.example:443").is_none());
/// ```
#[derive(Clone, Debug)]
pub struct Hosts {
    gate: Handle,
}

/// What a gate knows of one host at one moment. Durations are what is left, zero when there is none.
///
/// ```
/// # let hosts = tower_host_gate::HostGateLayer::new().hosts();
/// for host in hosts.snapshot() {
///     println!("{}: {} in flight, {} waiting, next in {:?}", host.host, host.in_flight, host.queued, host.next_send);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HostSnapshot {
    /// The host key.
    #[cfg_attr(feature = "serde", serde(serialize_with = "as_text"))]
    pub host: HostKey,
    /// Requests in flight, response bodies still being read included.
    pub in_flight: usize,
    /// Requests waiting.
    pub queued: usize,
    /// No send before the end of this, because the host refused, said that nothing is left of its quota, or was penalized.
    pub cooldown: Duration,
    /// No send before the end of this: the longest of cooldown, spacing, learned gap, delay and quota, and jitter.
    pub next_send: Duration,
    /// What keeps a new request from going now; `None` when nothing does. [`Reason::InFlight`] for whatever is between it
    /// and a permit: requests in flight, about to be sent, or waiting already.
    pub reason: Option<Reason>,
    /// Sends are spaced until the end of this, at least; a learned spacing outlives it.
    pub warm: Duration,
    /// The learned spacing, on average; reactive pacing learns none.
    pub gap: Duration,
    /// The longest spacing found too short.
    pub too_short: Duration,
    /// The shortest spacing known to be good.
    pub known_good: Duration,
    /// Consecutive throttle events.
    pub streak: u32,
    /// What the host asked for in its last refusal.
    pub last_hint: Duration,
    /// The status of its last refusal.
    #[cfg_attr(feature = "serde", serde(serialize_with = "as_number"))]
    pub last_status: Option<StatusCode>,
}

#[cfg(feature = "serde")]
fn as_text<S: serde::Serializer>(key: &HostKey, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(key.as_str())
}

#[cfg(feature = "serde")]
fn as_number<S: serde::Serializer>(status: &Option<StatusCode>, serializer: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&status.map(|status| status.as_u16()), serializer)
}

impl Hosts {
    pub(crate) fn new(gate: Handle) -> Self {
        Self { gate }
    }

    /// Every host the gate has something to say of: with a request in flight or waiting, held, warm, or with a spacing
    /// learnt.
    pub fn snapshot(&self) -> Vec<HostSnapshot> {
        self.gate.snapshots(|_| true)
    }

    /// One host, `None` when there is nothing to say of it. Of several ports under one name, the one held longest.
    pub fn get(&self, host: &str) -> Option<HostSnapshot> {
        self.snapshots(host).into_iter().max_by_key(|snapshot| snapshot.next_send)
    }

    /// One host as all processes know it: asks the store, in which [`shared`](crate::HostGateLayer::shared) keeps it.
    /// `in_flight` counts the requests of all processes; `queued` and the last refusal are this process's. `None` when
    /// there is nothing to say, or nothing is shared. A name without a port means the default ports.
    ///
    /// # Errors
    ///
    /// When the store does not answer.
    ///
    /// # Cancel safety
    ///
    /// Changes nothing.
    #[cfg(feature = "redis")]
    pub async fn get_shared(&self, host: &str) -> Result<Option<HostSnapshot>, BackendError> {
        let mut found: Option<HostSnapshot> = None;
        for key in self.keys(host) {
            let Some(mut seen) = self.gate.look(&key).await? else { continue };
            if let Some(here) = self.gate.snapshots(|known| *known == key).pop() {
                (seen.queued, seen.last_hint, seen.last_status) = (here.queued, here.last_hint, here.last_status);
            }
            found = found.into_iter().chain([seen]).max_by_key(|snapshot| snapshot.next_send);
        }
        Ok(found)
    }

    /// Holds a host back for this long, as a refusal that asked for it would: only ever extends a hold, is capped at
    /// `max_cooldown`, and leaves the host warm. Zero does nothing. A name without a port means the ports known and the
    /// default ports 80 and 443.
    pub fn penalize(&self, host: &str, duration: Duration) {
        for key in self.keys(host) {
            self.gate.penalize(&key, duration);
        }
    }

    /// The keys that a text may mean, known or not.
    fn keys(&self, host: &str) -> Vec<HostKey> {
        let mut keys = self.known(host);
        for key in named(host, self.keying()) {
            if key.name() == key.as_str() && self.keying().by() == Some(By::Authority) {
                keys.extend(["80", "443"].map(|port| HostKey::new(format!("{key}:{port}"))));
            }
            keys.push(key);
        }
        keys.sort();
        keys.dedup();
        keys
    }

    /// Forgets cooldown, warmth and streak of a host, and what was learnt of it. Requests in flight and waiting stay, and
    /// the next may go at once, as far as limits of your own allow: what counts towards those is kept.
    pub fn clear(&self, host: &str) {
        #[cfg(feature = "redis")]
        let keys = if self.gate.is_shared() { self.keys(host) } else { self.known(host) };
        #[cfg(not(feature = "redis"))]
        let keys = self.known(host);
        for key in keys {
            self.gate.clear(&key);
        }
    }

    /// Changes the settings of one host at once: concurrency for those who wait too, spacing from the next send on, the
    /// budget for requests to come. A delay and a quota count what goes from now on, unless one was in force before. Replaces what was set for the same text
    /// before; [`Limits::default`] goes back to the layer's. `host:port` wins over the name. A cap lowered below what is
    /// in flight takes nothing away; it holds from the next admission on.
    pub fn set_limits(&self, host: &str, limits: Limits) {
        for key in named_for_limits(host, self.keying()) {
            self.gate.set_limits(key, limits.clone());
        }
    }

    /// What is known of the hosts, for a later run of the program. Of those that are remembered for nothing but what was
    /// learnt, no more than [`max_hosts`](crate::HostGateLayer::max_hosts).
    pub fn export(&self) -> HostsState {
        self.export_at(SystemTime::now())
    }

    fn export_at(&self, wall: SystemTime) -> HostsState {
        HostsState::new(wall, self.gate.export())
    }

    /// Takes up what an earlier run knew of its hosts, as it has become since then: of a cooldown of 40 s there are 30 s
    /// left after 10 s, by the wall clock. A state from the future, which a wall clock that was set back makes of any, is
    /// ignored.
    ///
    /// * A host that is known already keeps what is known; only its cooldown may be lengthened.
    /// * No cooldown and no learnt spacing gets longer than [`max_cooldown`](crate::HostGateLayer::max_cooldown), no
    ///   warmth longer than [`warm_for`](crate::HostGateLayer::warm_for) behind its cooldown.
    /// * At most [`max_hosts`](crate::HostGateLayer::max_hosts) are taken, the first in the state's order, in which
    ///   [`export`](Self::export) puts those used last first. A text that is no key of this
    ///   gate's [`Keying`] is passed over; so is a key of your own with characters that had to be escaped.
    /// * [`Pacing::Reactive`](crate::Pacing::Reactive) takes cooldowns, warmth and streaks alone.
    /// * A [disabled](crate::HostGateLayer::disabled) gate takes it and heeds it as little as anything, so that the next
    ///   `export` hands it on.
    ///
    /// A request that is waiting is refused at once where a cooldown puts it past its budget.
    pub fn import(&self, state: HostsState) {
        self.import_at(&state, SystemTime::now());
    }

    fn import_at(&self, state: &HostsState, wall: SystemTime) {
        let Some(age) = state.age(wall) else {
            return;
        };
        let key = |text: &str| named(text, self.keying()).into_iter().find(|key| key == text);
        let hosts = state.hosts().filter_map(|(text, memory)| Some((key(text)?, memory)));
        self.gate.import(hosts, age);
    }

    /// A permit for code that is no tower service. Waits for at most `budget`; the request counts as sent when this
    /// returns.
    ///
    /// A URI without a host, or a gate that is disabled, gives a permit that guards nothing.
    ///
    /// ```
    /// # async fn example(hosts: tower_host_gate::Hosts) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use std::time::Duration;
    /// use tower_host_gate::Outcome;
    ///
    /// let uri = "https://example.com/big.iso".parse()?;
    /// let permit = hosts.acquire(&uri, Duration::from_secs(20)).await?;
    /// // ... ask the server, by whichever means ...
    /// permit.settle(Outcome::Success);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RateLimited`] when the host cannot admit the request within the budget.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue and books nothing.
    pub async fn acquire(&self, uri: &Uri, budget: Duration) -> Result<Permit, RateLimited> {
        match self.enter(uri, Terms { budget: Some(budget), ..Terms::default() }) {
            Ok(permit) => Ok(Permit(permit)),
            Err(mut waiter) => poll_fn(|cx| poll_sent(&mut waiter, cx)).await,
        }
    }

    /// A permit, if one can be had at once.
    ///
    /// The way out of the head-of-line trap: a worker that finds a host held can put the job back and take one for
    /// another host, instead of waiting in its place.
    ///
    /// With a [shared](crate::HostGateLayer::shared) gate it cannot ask the store, and refuses while that is there: use
    /// [`acquire`](Self::acquire) with no budget, which asks and does not wait.
    ///
    /// # Errors
    ///
    /// [`RateLimited`] when the host cannot admit the request now.
    pub fn try_acquire(&self, uri: &Uri) -> Result<Permit, RateLimited> {
        let now = Terms {
            budget: Some(Duration::ZERO),
            #[cfg(feature = "redis")]
            only_here: true,
            ..Terms::default()
        };
        let mut waiter = match self.enter(uri, now) {
            Ok(permit) => return Ok(Permit(permit)),
            Err(waiter) => waiter,
        };
        // Invariant: with no budget a waiter is admitted or shed when it is first polled.
        loop {
            if let Poll::Ready(result) = poll_sent(&mut waiter, &mut Context::from_waker(Waker::noop())) {
                return result;
            }
        }
    }

    /// A permit that is sent with, none for a request that passes ungated, or a place to wait.
    fn enter(&self, uri: &Uri, terms: Terms) -> Result<Option<gate::Permit>, Box<Waiter>> {
        let mut permit = self.gate.enter_by(uri, &HeaderMap::new(), &Extensions::new(), || terms)?;
        if let Some(permit) = &mut permit {
            permit.send(|| terms)?;
        }
        Ok(permit)
    }

    fn keying(&self) -> &dyn Keying {
        &*self.gate.config.keying
    }

    /// What is known of the hosts that a text means.
    fn snapshots(&self, text: &str) -> Vec<HostSnapshot> {
        let names = named(text, self.keying());
        self.gate.snapshots(|known| names.iter().any(|name| known == name || known.name() == name.as_str()))
    }

    fn known(&self, text: &str) -> Vec<HostKey> {
        self.snapshots(text).into_iter().map(|snapshot| snapshot.host).collect()
    }
}

/// The keys that a text may stand for: the host in it, or the text itself where keying is the caller's.
fn named(text: &str, keying: &dyn Keying) -> Vec<HostKey> {
    let host = text.parse::<HostKey>();
    match (keying.by(), host) {
        (Some(By::Host), Ok(key)) => vec![HostKey::new(key.name())],
        (Some(_), Ok(key)) => vec![key],
        (Some(_), Err(_)) => Vec::new(),
        // A URL is nobody's key, and may hold a password.
        (None, host) if text.contains("://") || text.contains('@') => host.into_iter().collect(),
        (None, host) => {
            let mut keys = vec![HostKey::new(text)];
            keys.extend(host);
            keys.dedup();
            keys
        }
    }
}

/// [`named`], for settings: one that no request can ever match is worth a word.
pub(crate) fn named_for_limits(text: &str, keying: &dyn Keying) -> Vec<HostKey> {
    let keys = named(text, keying);
    if keys.is_empty() {
        let host = HostKey::new(text.rsplit('@').next().unwrap_or_default());
        tracing::warn!(%host, "limits for a host that no request will ever have");
    }
    keys
}

fn poll_sent(waiter: &mut Waiter, cx: &mut Context<'_>) -> Poll<Result<Permit, RateLimited>> {
    loop {
        let mut permit = std::task::ready!(waiter.poll_admit(cx))?;
        let terms = *waiter.terms();
        match permit.send(|| terms) {
            Ok(()) => return Poll::Ready(Ok(Permit(Some(permit)))),
            Err(again) => *waiter = *again,
        }
    }
}

/// The right to have one request in flight. See [`Hosts::acquire`].
///
/// Given back when dropped; dropped without [`settle`](Self::settle) nothing is learnt from it.
///
/// ```
/// use std::time::Duration;
/// use tower_host_gate::{HostGateLayer, Outcome};
///
/// let hosts = HostGateLayer::new().hosts();
/// let uri = http::Uri::from_static("https://example.com/");
/// let permit = hosts.try_acquire(&uri).unwrap();
/// assert!(hosts.try_acquire(&uri).is_err());
/// permit.settle(Outcome::Throttled { hint: Some(Duration::from_secs(5)), soft: false });
/// assert!(hosts.try_acquire(&uri).unwrap_err().retry_after() > Duration::from_secs(4));
/// ```
#[derive(Debug)]
#[must_use = "the permit is given back when dropped"]
pub struct Permit(Option<gate::Permit>);

impl Permit {
    /// Reports what the response meant, and gives the permit back.
    ///
    /// For an HTTP response [`Outcome::of`] says what it means. `Outcome::Throttled` is reported as status 429.
    pub fn settle(mut self, outcome: Outcome) {
        if let Some(permit) = self.0.as_mut().and_then(gate::Permit::told) {
            permit.settle(None, outcome, StatusCode::TOO_MANY_REQUESTS, &HeaderMap::new());
        }
    }

    /// Judges a response head as the layer would, reports it and gives the permit back.
    pub fn settle_response(mut self, status: StatusCode, headers: &HeaderMap) {
        if let Some(permit) = self.0.as_mut().and_then(gate::Permit::told) {
            let outcome = permit.gate().judge(|| permit.key(), status, headers, &Extensions::new());
            permit.settle(None, outcome, status, headers);
        }
    }

    /// The host it is for; `None` when it guards nothing.
    pub fn host(&self) -> Option<HostKey> {
        self.0.as_ref()?.key()
    }
}
