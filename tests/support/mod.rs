//! What the integration tests share: scripted services for the paused clock, and real clients and servers on loopback.
//!
//! | module | what | clock |
//! |---|---|---|
//! | [`script`] | an inner service that answers from a script and records every send | paused or real |
//! | [`provider`] | a hyper server with a handler of the test's own, over HTTP/1, HTTP/2 and TLS | real |
//! | [`log`] | what is logged on a thread | any |
//! | [`client`] | hyper clients for those servers | real |
//! | [`servers`] | nginx and HAProxy as child processes | real |
//! | `redis` | Redis, Valkey, Sentinel, Cluster as child processes, and a network that fails | real |

#![allow(dead_code, unused_imports, reason = "every test file uses another part of this module")]
#![allow(unreachable_pub, reason = "`pub` is this module's interface to the test file that includes it")]

pub mod client;
pub mod log;
pub mod provider;
#[cfg(feature = "redis")]
pub mod redis;
pub mod script;
pub mod servers;

use tower_host_gate::{HostGateLayer, Pacing};

/// A gate that paces by ADR-0016, for a test that counts on what a refusal or a penalty leads to: the default learns, and
/// so waits for as long as the host has taught it. A test that does not care has `HostGateLayer::new()`, and so tests
/// the default.
pub fn reactive() -> HostGateLayer {
    HostGateLayer::new().pacing(Pacing::Reactive)
}
