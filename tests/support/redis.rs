//! Real servers for the shared gate, each a child process of the test, and a proxy that breaks the network before them.
//!
//! | what | kinds |
//! |---|---|
//! | [`Standalone`] | plain, with arguments, with a password, of another [`Build`], with a clock that can be set |
//! | [`Tls`] | a certificate of its own authority |
//! | [`Sentinel`] | a master, a replica, three sentinels |
//! | [`Cluster`] | three masters, with or without replicas |
//! | [`Proxy`] | delays, swallows, refuses, cuts, loses replies; and counts |
//!
//! All of them are [`Server`]s underneath: one can be asked ([`cli`](Server::cli)), killed, restarted on the same port,
//! stopped and continued. Whatever a test starts is killed when it is dropped, on a panic too.
//!
//! They need the real clock. A missing server is a failed test; only the builds that no system package brings may be
//! declared missing, see [`Build::is_available`].

#![allow(unused_imports, reason = "every test file uses another part of this module")]

mod cluster;
mod proxy;
mod sentinel;
mod server;
mod standalone;
mod tls;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use cluster::Cluster;
pub use proxy::{Fault, Proxy, Traffic};
pub use sentinel::Sentinel;
pub use server::Server;
pub use standalone::Standalone;
pub use tls::Tls;
use tokio::time::{Instant, sleep};

/// How long a server may take for anything. No test gets faster or slower by it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Which program is started. All speak the same protocol, and scripts run on all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// The system's `redis-server`.
    Redis,
    Valkey,
    /// The oldest Redis that is supported.
    Redis62,
}

impl Build {
    /// Whether a test against this build can run here; the test returns at once when not.
    ///
    /// `scripts/redis-variants` fetches what the system does not have. Where that is impossible, `scripts/test` says so
    /// and sets `HOST_GATE_WITHOUT_VARIANTS`; without that variable a missing build is a failure.
    pub fn is_available(self) -> bool {
        let program = self.program();
        if self == Self::Redis || program.is_file() {
            return true;
        }
        let declared = std::env::var_os("HOST_GATE_WITHOUT_VARIANTS").is_some();
        assert!(declared, "there is no {}; scripts/redis-variants fetches it", program.display());
        // Not by a macro: the test runner would keep the output of a test that passes to itself.
        let _ = writeln!(io::stderr(), "NOT RUN, for want of {self:?}: {:?}", std::thread::current().name());
        false
    }

    fn program(self) -> PathBuf {
        let variants = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/redis-variants");
        match self {
            Self::Redis => PathBuf::from("redis-server"),
            Self::Valkey => variants.join("valkey-server"),
            Self::Redis62 => variants.join("redis-server-6.2"),
        }
    }
}

/// A port for a server to try. It is not among those the system gives to outgoing connections, nor is the one 10,000
/// above it, which a cluster's nodes need too: so it is still free when a server comes back to it.
fn random_port() -> u16 {
    fastrand::u16(10_240..22_768)
}

/// Asks again and again, until the answer is yes.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "{what}: still not after {PATIENCE:?}");
        sleep(Duration::from_millis(20)).await;
    }
}
