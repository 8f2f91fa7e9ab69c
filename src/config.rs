//! Every tunable, its default and where the default comes from.

use std::any::Any;
use std::collections::HashMap;
use std::env::VarError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{Extensions, Uri};

use crate::host::{By, HostKey, Keying};
use crate::observe::Observer;
use crate::pace::{Bounds, DelayFrom, Pacing, Rules};
#[cfg(feature = "redis")]
use crate::shared::{Redis, Share};
use crate::verdict::{RetryAfterUnit, Verdict};

/// The settings of one gate. Changed by making a new gate, never in place.
#[derive(Clone)]
pub(crate) struct Config {
    /// Requests in flight to one host. ADR-0016 `HOST_MAX_CONCURRENCY`.
    pub(crate) concurrency: usize,
    /// `max_cooldown` is the pacing's own unless the user sets it, see [`max_cooldown_set`](Self::max_cooldown_set).
    pub(crate) rules: Rules,
    pub(crate) max_cooldown_set: bool,
    /// Proactive limits, none by default.
    pub(crate) bounds: Bounds,
    /// `None` is what the pacing does on its own.
    pub(crate) rate_limit_headers: Option<bool>,
    /// One budget for queue and pacing. ADR-0016 `MAX_GATE_WAIT`.
    pub(crate) max_wait: Duration,
    /// Waiters per host; zero is no bound.
    pub(crate) max_queue: usize,
    /// Hosts remembered for nothing but what was learnt of them.
    pub(crate) max_hosts: usize,
    pub(crate) pacing: Pacing,
    pub(crate) permit_until: PermitUntil,
    pub(crate) on_shed: OnShed,
    pub(crate) disabled: bool,
    pub(crate) keying: Arc<dyn Keying>,
    /// What `keying` is, if it is one of the ready-made ways itself: then it need not be asked.
    pub(crate) keying_is: Option<By>,
    /// `None` is [`Outcome::of`](crate::Outcome::of).
    pub(crate) verdict: Option<Arc<dyn Verdict>>,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) final_uri: Option<Arc<FinalUri>>,
    pub(crate) per_host: HashMap<HostKey, Arc<Limits>>,
    /// Where the hosts are shared with other processes.
    #[cfg(feature = "redis")]
    pub(crate) shared: Option<Redis>,
    /// Which part of the limits is this process's at present.
    #[cfg(feature = "redis")]
    pub(crate) share: Share,
    /// Without the fast path: to compare the one with the other.
    #[cfg(test)]
    pub(crate) slots_only: bool,
}

pub(crate) type FinalUri = dyn Fn(&Extensions) -> Option<Uri> + Send + Sync;

impl Default for Config {
    fn default() -> Self {
        Self {
            concurrency: 1,
            rules: Rules {
                base_cooldown: Duration::from_secs(2),
                max_cooldown: Pacing::default().max_cooldown(),
                spacing: Duration::from_secs(1),
                warm_for: Duration::from_secs(120),
            },
            max_cooldown_set: false,
            bounds: Bounds::default(),
            rate_limit_headers: None,
            max_wait: Duration::from_secs(60),
            max_queue: 10_000,
            max_hosts: 10_000,
            pacing: Pacing::default(),
            permit_until: PermitUntil::default(),
            on_shed: OnShed::default(),
            disabled: false,
            keying: Arc::new(By::Authority),
            keying_is: Some(By::Authority),
            verdict: None,
            observer: None,
            final_uri: None,
            per_host: HashMap::new(),
            #[cfg(feature = "redis")]
            shared: None,
            #[cfg(feature = "redis")]
            share: Share::default(),
            #[cfg(test)]
            slots_only: false,
        }
    }
}

impl Config {
    pub(crate) fn set_max_cooldown(&mut self, cooldown: Duration) {
        self.rules.max_cooldown = cooldown;
        self.max_cooldown_set = true;
    }

    pub(crate) fn set_pacing(&mut self, pacing: Pacing) {
        self.pacing = pacing;
        if !self.max_cooldown_set {
            self.rules.max_cooldown = pacing.max_cooldown();
        }
    }

    pub(crate) fn set_keying(&mut self, keying: impl Keying) {
        self.keying_is = (&keying as &dyn Any).downcast_ref().copied();
        self.keying = Arc::new(keying);
    }

    /// `RateLimit` headers are heeded.
    #[inline]
    pub(crate) fn reads_quota(&self) -> bool {
        self.rate_limit_headers.unwrap_or(self.pacing == Pacing::Learned)
    }

    /// The proactive limits of a host with these settings of its own.
    pub(crate) fn bounds(&self, limits: Option<&Limits>) -> Bounds {
        let own = |limits: &Limits| Bounds {
            min_delay: limits.min_delay.unwrap_or(self.bounds.min_delay),
            delay_from: limits.delay_from.unwrap_or(self.bounds.delay_from),
            quota: limits.quota.unwrap_or(self.bounds.quota),
            jitter: limits.jitter.unwrap_or(self.bounds.jitter),
        };
        let bounds = limits.map_or(self.bounds, own);
        #[cfg(feature = "redis")]
        let bounds = match &self.shared {
            // Measured from completion a delay would let one request of all processes go at a time.
            Some(redis) if !redis.spacing_only => Bounds { delay_from: DelayFrom::Send, ..bounds },
            _ => bounds,
        };
        bounds
    }

    /// Some proactive limit is in force for such a host.
    #[inline]
    pub(crate) fn is_bounded(&self, limits: Option<&Limits>) -> bool {
        !self.bounds(limits).is_off()
    }

    /// The defaults, overridden by what `look_up` finds under `<prefix>_<NAME>`.
    pub(crate) fn from_vars(
        prefix: &str,
        look_up: impl Fn(&str) -> Result<String, VarError>,
    ) -> Result<Self, ConfigError> {
        let number = |name: &str| {
            let variable = format!("{prefix}_{name}");
            match look_up(&variable) {
                Ok(value) => match value.trim().parse::<u64>() {
                    Ok(number) => Ok(Some(number)),
                    Err(_) => Err(ConfigError::new(variable, &value)),
                },
                Err(VarError::NotPresent) => Ok(None),
                Err(VarError::NotUnicode(value)) => Err(ConfigError::new(variable, &value.to_string_lossy())),
            }
        };
        let mut config = Self::default();
        if let Some(concurrency) = number("HOST_CONCURRENCY")? {
            config.concurrency = usize::try_from(concurrency).unwrap_or(usize::MAX).max(1);
        }
        if let Some(seconds) = number("MAX_COOLDOWN_SECS")? {
            config.set_max_cooldown(Duration::from_secs(seconds));
        }
        if let Some(seconds) = number("MAX_GATE_WAIT_SECS")? {
            config.max_wait = Duration::from_secs(seconds);
        }
        Ok(config)
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("concurrency", &self.concurrency)
            .field("rules", &self.rules)
            .field("bounds", &self.bounds)
            .field("max_wait", &self.max_wait)
            .field("max_queue", &self.max_queue)
            .field("pacing", &self.pacing)
            .field("permit_until", &self.permit_until)
            .field("on_shed", &self.on_shed)
            .field("disabled", &self.disabled)
            .field("per_host", &self.per_host)
            .finish_non_exhaustive()
    }
}

/// A setting read from the environment that is no whole number. Names the variable.
///
/// ```no_run
/// use tower_host_gate::HostGateLayer;
///
/// let layer = HostGateLayer::from_env().unwrap_or_else(|error| {
///     eprintln!("{error}; going on with the default instead of {}", error.variable());
///     HostGateLayer::new()
/// });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    variable: String,
    value: String,
}

impl ConfigError {
    fn new(variable: String, value: &str) -> Self {
        Self { variable, value: value.escape_debug().take(64).collect() }
    }

    /// The variable whose value could not be used.
    pub fn variable(&self) -> &str {
        &self.variable
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected a whole number, got \"{}\"", self.variable, self.value)
    }
}

impl std::error::Error for ConfigError {}

/// When a request gives its permit back. Also a request extension, which overrides the setting for that request.
///
/// ```
/// use tower_host_gate::PermitUntil;
///
/// // An event stream that stays open for hours must not keep its siblings waiting.
/// let mut request = http::Request::get("https://example.com/events").body(())?;
/// request.extensions_mut().insert(PermitUntil::Head);
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PermitUntil {
    /// When the response body has ended, failed or been dropped; servers count a request until then.
    #[default]
    BodyEnd,
    /// When the response head has arrived.
    Head,
}

/// How a request that is shed comes back.
///
/// ```
/// use std::time::Duration;
/// use tower::{Layer, ServiceExt};
/// use tower_host_gate::{HostGateLayer, OnShed, Shed};
/// # use std::convert::Infallible;
/// # use http::{Request, Response};
/// # async fn fetch(_: Request<String>) -> Result<Response<String>, Infallible> { Ok(Response::default()) }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower::BoxError> {
///
/// let layer = HostGateLayer::new().on_shed(OnShed::Response).max_wait(Duration::ZERO);
/// layer.hosts().penalize("example.com:443", Duration::from_secs(9));
///
/// let request = Request::get("https://example.com/").body(String::new())?;
/// let response = layer.layer(tower::service_fn(fetch)).oneshot(request).await?;
/// assert_eq!(response.status(), 429);
/// assert_eq!(response.headers()["retry-after"], "9");
/// assert!(response.extensions().get::<Shed>().is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnShed {
    /// As an error, [`RateLimited`](crate::RateLimited).
    #[default]
    Error,
    /// As an empty 429 response with `Retry-After` and the [`Shed`](crate::Shed) extension, for stacks in which layers
    /// outside the gate turn errors into text.
    Response,
}

/// Settings for one host; whatever is not set is the layer's. See [`HostGateLayer::per_host`] and [`Hosts::set_limits`].
///
/// ```
/// use std::time::Duration;
/// use tower_host_gate::{HostGateLayer, Limits};
///
/// let layer = HostGateLayer::new()
///     .per_host("api.example", Limits::default().concurrency(4))
///     .per_host("slow.example:8080", Limits::default().spacing(Duration::from_secs(5)));
/// ```
///
/// [`HostGateLayer::per_host`]: crate::HostGateLayer::per_host
/// [`Hosts::set_limits`]: crate::Hosts::set_limits
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub(crate) concurrency: Option<usize>,
    pub(crate) max_wait: Option<Duration>,
    pub(crate) spacing: Option<Duration>,
    pub(crate) min_delay: Option<Duration>,
    pub(crate) delay_from: Option<DelayFrom>,
    pub(crate) quota: Option<(u32, Duration)>,
    pub(crate) jitter: Option<Duration>,
    pub(crate) permit_until: Option<PermitUntil>,
    pub(crate) retry_after_unit: Option<RetryAfterUnit>,
}

impl Limits {
    /// Requests in flight; zero is 1.
    pub fn concurrency(mut self, requests: usize) -> Self {
        self.concurrency = Some(requests.max(1));
        self
    }

    /// The budget of one request for queue and pacing; zero never waits.
    pub fn max_wait(mut self, budget: Duration) -> Self {
        self.max_wait = Some(budget);
        self
    }

    /// The least time between two sends while the host is warm.
    pub fn spacing(mut self, spacing: Duration) -> Self {
        self.spacing = Some(spacing);
        self
    }

    /// The least time between two requests, always; zero is off. See [`HostGateLayer::min_delay`].
    ///
    /// [`HostGateLayer::min_delay`]: crate::HostGateLayer::min_delay
    pub fn min_delay(mut self, delay: Duration) -> Self {
        self.min_delay = Some(delay);
        self
    }

    /// From where `min_delay` is measured.
    pub fn delay_from(mut self, from: DelayFrom) -> Self {
        self.delay_from = Some(from);
        self
    }

    /// At most so many sends in any interval of this width; zero of either is off. See [`HostGateLayer::quota`].
    ///
    /// [`HostGateLayer::quota`]: crate::HostGateLayer::quota
    pub fn quota(mut self, sends: u32, window: Duration) -> Self {
        self.quota = Some((sends, window));
        self
    }

    /// The most that is added to a wait at random; zero is off.
    pub fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = Some(jitter);
        self
    }

    /// When a permit comes back.
    pub fn permit_until(mut self, until: PermitUntil) -> Self {
        self.permit_until = Some(until);
        self
    }

    /// For a host whose `Retry-After` is in milliseconds. Only the standard verdict heeds it.
    pub fn retry_after_unit(mut self, unit: RetryAfterUnit) -> Self {
        self.retry_after_unit = Some(unit);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let map: HashMap<String, String> = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        Config::from_vars("RSS", |name| map.get(name).cloned().ok_or(VarError::NotPresent))
    }

    #[test]
    fn the_adrs_three_variables() {
        let config =
            vars(&[("RSS_HOST_CONCURRENCY", "4"), ("RSS_MAX_COOLDOWN_SECS", " 90 "), ("RSS_MAX_GATE_WAIT_SECS", "15")])
                .unwrap();
        assert_eq!(config.concurrency, 4);
        assert_eq!(config.rules.max_cooldown, Duration::from_secs(90));
        assert_eq!(config.max_wait, Duration::from_secs(15));
    }

    #[test]
    fn defaults() {
        let config = vars(&[]).unwrap();
        assert_eq!(config.concurrency, 1);
        assert_eq!(config.rules.base_cooldown, Duration::from_secs(2));
        assert_eq!(config.rules.max_cooldown, Duration::from_secs(15 * 60));
        assert_eq!(config.rules.spacing, Duration::from_secs(1));
        assert_eq!(config.rules.warm_for, Duration::from_secs(120));
        assert_eq!(config.max_wait, Duration::from_secs(60));
    }

    #[test]
    fn the_longest_cooldown_is_the_pacings_unless_set() {
        let mut config = vars(&[]).unwrap();
        config.set_pacing(Pacing::Reactive);
        assert_eq!(config.rules.max_cooldown, Duration::from_secs(60));
        let mut config = vars(&[("RSS_MAX_COOLDOWN_SECS", "90")]).unwrap();
        config.set_pacing(Pacing::Reactive);
        assert_eq!(config.rules.max_cooldown, Duration::from_secs(90));
    }

    #[test]
    fn zero_and_absurd_numbers_have_a_meaning() {
        let config = vars(&[
            ("RSS_HOST_CONCURRENCY", "0"),
            ("RSS_MAX_COOLDOWN_SECS", "18446744073709551615"),
            ("RSS_MAX_GATE_WAIT_SECS", "0"),
        ])
        .unwrap();
        assert_eq!(config.concurrency, 1);
        assert_eq!(config.rules.max_cooldown, Duration::from_secs(u64::MAX));
        assert_eq!(config.max_wait, Duration::ZERO);
    }

    #[test]
    fn a_bad_value_is_an_error_naming_its_variable() {
        for bad in ["", "soon", "-1", "1.5", "60s", "18446744073709551616", "1\n2", "١٢"] {
            let error = vars(&[("RSS_MAX_GATE_WAIT_SECS", bad)]).unwrap_err();
            assert_eq!(error.variable(), "RSS_MAX_GATE_WAIT_SECS");
            let text = error.to_string();
            assert!(text.starts_with("RSS_MAX_GATE_WAIT_SECS: ") && !text.contains('\n'), "{text}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_not_unicode_is_an_error_too() {
        use std::os::unix::ffi::OsStringExt as _;
        let value = std::ffi::OsString::from_vec(vec![b'6', 0xff]);
        let error = Config::from_vars("X", |_| Err(VarError::NotUnicode(value.clone()))).unwrap_err();
        assert_eq!(error.variable(), "X_HOST_CONCURRENCY");
    }

    #[test]
    fn a_bad_value_is_cut() {
        let error = vars(&[("RSS_HOST_CONCURRENCY", &"x".repeat(100_000))]).unwrap_err();
        assert!(error.to_string().len() < 200);
    }
}
