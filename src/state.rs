//! [`HostsState`]: what a gate has learnt, to outlive its process.

use std::time::{Duration, SystemTime};

use crate::host::HostKey;
use crate::pace::Memory;

/// What a gate knows of its hosts at one moment, for a program that ends before its hosts have forgotten it: a cron job,
/// a command line tool. Taken by [`Hosts::export`](crate::Hosts::export), given to the gate of the next run by
/// [`Hosts::import`](crate::Hosts::import).
///
/// For every host that has refused and is not forgotten: its cooldown, its warmth, its streak, and what [learned
/// pacing](crate::Pacing::Learned) has found out. Nothing of settings, queues and requests in flight.
///
/// ```
/// use std::time::Duration;
/// use tower_host_gate::HostGateLayer;
///
/// let hosts = HostGateLayer::new().hosts();
/// hosts.penalize("api.example:443", Duration::from_secs(300));
/// let state = hosts.export();
/// # #[cfg(feature = "serde")]
/// # let state = {
///
/// // With the feature `serde`, between two runs of the program:
/// let json = serde_json::to_string(&state)?;
/// let state: tower_host_gate::HostsState = serde_json::from_str(&json)?;
/// # state
/// # };
///
/// let hosts = HostGateLayer::new().hosts();
/// hosts.import(state);
/// assert!(hosts.get("api.example:443").unwrap().cooldown > Duration::from_secs(200));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Format
///
/// With the feature `serde` it is an object with a `version`, which is 1, the moment of taking in milliseconds of Unix
/// time, `taken_at_ms`, and the list of `hosts`, those used last first: to each its key, `host`, and what is known,
/// `pace`. Durations are whole milliseconds, and so are instants, counted from the moment of taking. A number that is
/// missing in there is zero, an instant never; what a later version 1 adds is skipped.
///
/// Deserializing fails, and says why, when the version is another one or the content malformed: then there is nothing to
/// import, and the program begins as it did the first time. What does deserialize is still taken for no more than a
/// hint, see [`import`](crate::Hosts::import).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct HostsState {
    #[cfg(feature = "serde")]
    #[serde(deserialize_with = "known_version")]
    version: u64,
    /// Unix time by the wall clock: the monotonic one means nothing to another process.
    taken_at_ms: u64,
    hosts: Vec<HostState>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct HostState {
    /// The key. A text, because it may have been written by anybody.
    host: String,
    pace: Memory,
}

impl HostsState {
    /// What is known at the time `wall`, the hosts used last first.
    pub(crate) fn new(wall: SystemTime, mut hosts: Vec<(HostKey, Memory)>) -> Self {
        hosts.sort_by(|(a, x), (b, y)| y.last_use().cmp(&x.last_use()).then_with(|| a.cmp(b)));
        let hosts = hosts.into_iter().map(|(key, pace)| HostState { host: key.as_str().to_owned(), pace });
        Self {
            #[cfg(feature = "serde")]
            version: VERSION,
            taken_at_ms: unix_ms(wall),
            hosts: hosts.collect(),
        }
    }

    /// The time from the taking to `wall`; `None` when that is in the future.
    pub(crate) fn age(&self, wall: SystemTime) -> Option<Duration> {
        unix_ms(wall).checked_sub(self.taken_at_ms).map(Duration::from_millis)
    }

    /// The texts of the keys, and what is known under them.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = (&str, &Memory)> {
        self.hosts.iter().map(|HostState { host, pace }| (host.as_str(), pace))
    }
}

/// Zero before 1970.
fn unix_ms(wall: SystemTime) -> u64 {
    let since = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(feature = "serde")]
const VERSION: u64 = 1;

#[cfg(feature = "serde")]
fn known_version<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match serde::Deserialize::deserialize(deserializer)? {
        VERSION => Ok(VERSION),
        other => Err(serde::de::Error::custom(format_args!("version {other} is not known, only {VERSION}"))),
    }
}
