//! A server on its own.

use std::ops::{Deref, DerefMut};
use std::process::Command;

use super::Build;
use super::server::{Launch, Server};

/// One server, by default the system's Redis.
#[derive(Debug)]
pub struct Standalone {
    server: Server,
    /// What was added to its clock, in seconds.
    ahead: i64,
}

impl Standalone {
    pub async fn start() -> Self {
        Self::launch(Launch::new(Build::Redis)).await
    }

    /// With more arguments, such as `["--maxmemory", "3mb"]`.
    pub async fn start_with(args: &[&str]) -> Self {
        Self::launch(Launch::new(Build::Redis).args(args)).await
    }

    /// Of a build that [is available](Build::is_available).
    pub async fn build(build: Build) -> Self {
        Self::launch(Launch::new(build)).await
    }

    /// Its [`url`](Server::url) has this password.
    pub async fn password(password: &str) -> Self {
        Self::launch(Launch::new(Build::Redis).password(password)).await
    }

    /// With a clock of its own, see [`step_clock`](Self::step_clock).
    pub async fn with_clock() -> Self {
        Self::launch(Launch::new(Build::Redis).file(Launch::CLOCK, "+0".to_owned()).preload(faketime())).await
    }

    async fn launch(launch: Launch) -> Self {
        Self { server: Server::start(launch).await, ahead: 0 }
    }

    /// Sets the wall clock of a server [`with_clock`](Self::with_clock) forward, or back.
    pub fn step_clock(&mut self, seconds: i64) {
        self.ahead += seconds;
        self.server.put(Launch::CLOCK, &format!("{:+}", self.ahead));
    }
}

/// Which libraries give a process another clock.
///
/// `faketime` itself would be the parent of the server, and outlive it; so it is only asked what it preloads. The C
/// library comes second, to be found before the jemalloc Debian's Redis is linked to: that one reads the clock while
/// libfaketime is not ready yet, and the process ends.
fn faketime() -> String {
    let asked = Command::new("faketime").args(["-f", "+0", "printenv", "LD_PRELOAD"]).output();
    let library = asked.unwrap_or_else(|error| panic!("faketime: {error}; scripts/test installs it")).stdout;
    let library = String::from_utf8(library).expect("the path of a library");
    format!("{}:libc.so.6", library.trim())
}

impl Deref for Standalone {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl DerefMut for Standalone {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}
