//! [`HostGateLayer`]: configuration in, service out.

use std::env;
use std::sync::Arc;
use std::time::Duration;

use http::{Extensions, Uri};
use tower_layer::Layer;

use crate::config::{Config, ConfigError, Limits, OnShed, PermitUntil};
use crate::gate::Handle;
use crate::host::Keying;
use crate::hosts::{Hosts, named_for_limits};
use crate::observe::Observer;
use crate::pace::{DelayFrom, Pacing};
use crate::service::HostGate;
use crate::verdict::Verdict;

/// Puts a gate in front of an HTTP client service.
///
/// **Build it once per program.** A layer, its clones and every service made from them share one set of hosts; two calls
/// of `new` are two gates that know nothing of each other. Every setter makes a separate gate with the changed setting,
/// so set everything before you clone or use the layer, or ask it for [`hosts`](Self::hosts) or a retry policy.
///
/// ```
/// use std::time::Duration;
/// use tower::ServiceBuilder;
/// use tower_host_gate::HostGateLayer;
/// # use std::convert::Infallible;
/// # async fn fetch(_: http::Request<String>) -> Result<http::Response<String>, Infallible> { Ok(http::Response::default()) }
///
/// let client = ServiceBuilder::new()
///     .layer(HostGateLayer::new().max_wait(Duration::from_secs(30)))
///     .service_fn(fetch); // any Service<http::Request<B>> + Clone
/// ```
///
/// | setting | default | from |
/// |---|---|---|
/// | [`concurrency`](Self::concurrency) | 1 | ADR-0016 |
/// | [`base_cooldown`](Self::base_cooldown) | 2 s | ADR-0016 |
/// | [`max_cooldown`](Self::max_cooldown) | 15 min; 60 s with [`Pacing::Reactive`] | a ban that is longer and begins anew with every refusal; ADR-0016 |
/// | [`spacing`](Self::spacing) | 1 s | ADR-0016 |
/// | [`warm_for`](Self::warm_for) | 120 s | ADR-0016 |
/// | [`max_wait`](Self::max_wait) | 60 s | ADR-0016 |
/// | [`max_queue`](Self::max_queue) | 10,000 waiters per host | |
/// | [`max_hosts`](Self::max_hosts) | 10,000 remembered hosts | |
/// | [`min_delay`](Self::min_delay), [`quota`](Self::quota), [`jitter`](Self::jitter) | off | |
/// | [`pacing`](Self::pacing) | [`Pacing::Learned`] | |
/// | [`permit_until`](Self::permit_until) | the end of the body | servers count a request until then |
///
/// Waiting needs a `tokio` runtime with its timer enabled; a request that need not wait does not.
#[derive(Clone, Debug)]
#[must_use]
pub struct HostGateLayer {
    gate: Handle,
}

impl Default for HostGateLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl HostGateLayer {
    /// A gate with the defaults above and no host in it.
    pub fn new() -> Self {
        Self::with(Config::default())
    }

    /// Reads `HOST_GATE_HOST_CONCURRENCY`, `HOST_GATE_MAX_COOLDOWN_SECS` and `HOST_GATE_MAX_GATE_WAIT_SECS`.
    ///
    /// # Errors
    ///
    /// When one of them is set to anything but a whole number; the error names it.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_env_prefix("HOST_GATE")
    }

    /// Like [`from_env`](Self::from_env) under another prefix; `"RSS"` gives the variables of ADR-0016.
    ///
    /// # Errors
    ///
    /// When one of the variables is set to anything but a whole number; the error names it.
    pub fn from_env_prefix(prefix: &str) -> Result<Self, ConfigError> {
        Config::from_vars(prefix, |name| env::var(name)).map(Self::with)
    }

    fn with(config: Config) -> Self {
        Self { gate: Handle::new(config) }
    }

    /// Settings never change under a gate in use: a changed layer is a gate of its own.
    fn set(self, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = self.gate.config.clone();
        change(&mut config);
        Self::with(config)
    }

    /// Requests in flight to one host at a time. Default 1; zero is 1.
    pub fn concurrency(self, requests: usize) -> Self {
        self.set(|config| config.concurrency = requests.max(1))
    }

    /// The cooldown after the first refusal that does not say when to come back; doubles with each consecutive one.
    /// Default 2 s.
    pub fn base_cooldown(self, cooldown: Duration) -> Self {
        self.set(|config| config.rules.base_cooldown = cooldown)
    }

    /// The longest any single refusal holds a host, whatever the server asked for, and the longest spacing that is
    /// learnt. Default 15 minutes with [`Pacing::Learned`], 60 s with [`Pacing::Reactive`].
    pub fn max_cooldown(self, cooldown: Duration) -> Self {
        self.set(|config| config.set_max_cooldown(cooldown))
    }

    /// The least time between two sends to a host that is warm. Default 1 s; zero is off.
    pub fn spacing(self, spacing: Duration) -> Self {
        self.set(|config| config.rules.spacing = spacing)
    }

    /// How long a host stays warm after its cooldown has ended; a streak of refusals is forgotten after that too.
    /// Default 120 s.
    pub fn warm_for(self, warm_for: Duration) -> Self {
        self.set(|config| config.rules.warm_for = warm_for)
    }

    /// The budget of one request for queue and pacing together. A request that cannot be admitted within it is shed, at
    /// once where it is certain when it comes or when the host refuses another one. Default 60 s; zero never waits. [`MaxWait`](crate::MaxWait) overrides it per request.
    pub fn max_wait(self, budget: Duration) -> Self {
        self.set(|config| config.max_wait = budget)
    }

    /// Waiters per host; a request beyond that is shed. Default 10,000; zero is no bound.
    pub fn max_queue(self, waiters: usize) -> Self {
        self.set(|config| config.max_queue = waiters)
    }

    /// Hosts that are remembered for nothing but the spacing learnt of them; beyond that, those not asked for longest are
    /// forgotten. Default 10,000; zero remembers none.
    pub fn max_hosts(self, hosts: usize) -> Self {
        self.set(|config| config.max_hosts = hosts)
    }

    /// The least time between two requests to one host, always, whether it has refused or not: from the completion of
    /// the last one unless [`delay_from`](Self::delay_from) says otherwise. Default zero, which is off.
    ///
    /// Where several things keep a request waiting, the longest counts; they are never added up.
    pub fn min_delay(self, delay: Duration) -> Self {
        self.set(|config| config.bounds.min_delay = delay)
    }

    /// From where [`min_delay`](Self::min_delay) is measured. Default [`DelayFrom::Completion`].
    pub fn delay_from(self, from: DelayFrom) -> Self {
        self.set(|config| config.bounds.delay_from = from)
    }

    /// At most `sends` to one host in any interval of this width: a true rolling window, so no burst at the seam of two
    /// windows. Default off; zero of either is off. Costs 8 bytes for each send in the window.
    ///
    /// Whether a request is shed at once is decided by the worst case, which may be several times too long for a
    /// `min_delay` from completion at a concurrency above one, and for jitter.
    pub fn quota(self, sends: u32, window: Duration) -> Self {
        self.set(|config| config.bounds.quota = (sends, window))
    }

    /// The most that is added to a wait, at random and anew for each send; it never shortens one. Default zero: within
    /// one process there is nobody to collide with.
    pub fn jitter(self, jitter: Duration) -> Self {
        self.set(|config| config.bounds.jitter = jitter)
    }

    /// Heeds `RateLimit`, `RateLimit-*` and `X-RateLimit-*` headers: when they say that nothing is left, the host is
    /// held until their reset. Default: with [`Pacing::Learned`] yes, with [`Pacing::Reactive`] no.
    #[cfg(feature = "ratelimit-headers")]
    pub fn rate_limit_headers(self, heeded: bool) -> Self {
        self.set(|config| config.rate_limit_headers = Some(heeded))
    }

    /// How a host is paced once it has refused a request. Default [`Pacing::Learned`].
    pub fn pacing(self, pacing: Pacing) -> Self {
        self.set(|config| config.set_pacing(pacing))
    }

    /// When a request gives its permit back. Default [`PermitUntil::BodyEnd`].
    pub fn permit_until(self, until: PermitUntil) -> Self {
        self.set(|config| config.permit_until = until)
    }

    /// Which requests share a gate. Default [`By::Authority`](crate::By::Authority).
    pub fn keying(self, keying: impl Keying) -> Self {
        self.set(|config| config.set_keying(keying))
    }

    /// What a response means. Default [`Outcome::of`](crate::Outcome::of).
    pub fn verdict(self, verdict: impl Verdict) -> Self {
        self.set(|config| config.verdict = Some(Arc::new(verdict)))
    }

    /// Who is told of waits, refusals and sheds. Default: nobody, apart from `tracing`.
    pub fn observer(self, observer: impl Observer) -> Self {
        self.set(|config| config.observer = Some(Arc::new(observer)))
    }

    /// How a request that is shed comes back. Default [`OnShed::Error`].
    pub fn on_shed(self, on_shed: OnShed) -> Self {
        self.set(|config| config.on_shed = on_shed)
    }

    /// Where a redirect layer *inside* the gate says that a response came from, so that the verdict is charged to that
    /// host. `final_uri::tower_http` (feature `tower-http`) is the ready hook for `tower-http`. With a redirect layer
    /// outside, where each hop is gated on its own host, there is nothing to find.
    pub fn final_uri(self, hook: impl Fn(&Extensions) -> Option<Uri> + Send + Sync + 'static) -> Self {
        self.set(|config| config.final_uri = Some(Arc::new(hook)))
    }

    /// Settings for one host. A name without a port means all its ports; `host:port` is exact and wins over it. A key of
    /// your own [`Keying`] is named by its text. Can be changed later with [`Hosts::set_limits`].
    pub fn per_host(self, host: &str, limits: Limits) -> Self {
        let limits = Arc::new(limits);
        self.set(|config| {
            let keys = named_for_limits(host, &*config.keying);
            config.per_host.extend(keys.into_iter().map(|key| (key, Arc::clone(&limits))));
        })
    }

    /// Passes everything through: no permit, no wait, nothing learnt. Like every setter it makes a gate of its own; what
    /// the layer it was called on knows, that one keeps. Default false.
    pub fn disabled(self, disabled: bool) -> Self {
        self.set(|config| config.disabled = disabled)
    }

    /// Shares the hosts with other processes: every one that is built with the same store, prefix and scope counts against
    /// the same limits. `concurrency` is the cap over all of them then, and `min_delay` is measured from the send unless
    /// [`spacing_only`](crate::Redis::spacing_only). Nothing is connected before the first request; while the store is
    /// out of reach this process paces by itself. See [`shared`](crate::shared).
    #[cfg(feature = "redis")]
    pub fn shared(self, redis: crate::Redis) -> Self {
        self.set(|config| config.shared = Some(redis))
    }

    /// The hosts of this gate, to look at and to steer.
    pub fn hosts(&self) -> Hosts {
        Hosts::new(self.gate.clone())
    }

    /// A retry policy for a [`tower::retry::RetryLayer`] *inside* this gate. See [`retry::InFlightRetry`].
    ///
    /// [`retry::InFlightRetry`]: crate::retry::InFlightRetry
    #[cfg(feature = "retry")]
    pub fn in_flight_retry(&self) -> crate::retry::InFlightRetry {
        crate::retry::InFlightRetry::new(self.gate.clone())
    }
}

impl<S> Layer<S> for HostGateLayer {
    type Service = HostGate<S>;

    fn layer(&self, inner: S) -> HostGate<S> {
        HostGate::new(inner, self.gate.clone())
    }
}
