//! A `redis-server` of the example's own, to be killed.

use std::io::ErrorKind;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::sleep;
use tower::BoxError;

/// How many ports are tried.
const TRIES: usize = 20;

/// Ends when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    home: TempDir,
    port: u16,
    child: Child,
}

impl Server {
    pub(crate) async fn start() -> Result<Self, BoxError> {
        let home = TempDir::with_prefix("replicas-")?;
        for _ in 0..TRIES {
            // Not one of those that the system gives to outgoing connections: it has to be free at the restart, too.
            let port = fastrand::u16(10_240..32_768);
            let mut child = spawn(&home, port)?;
            if is_up(&mut child, port).await? {
                return Ok(Self { home, port, child });
            }
        }
        Err(format!("redis-server found no free port in {TRIES} tries").into())
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// SIGKILL: it saves nothing and says goodbye to nobody.
    pub(crate) async fn kill(&mut self) -> Result<(), BoxError> {
        Ok(self.child.kill().await?)
    }

    /// Starts it anew, on the same port and empty.
    pub(crate) async fn restart(&mut self) -> Result<(), BoxError> {
        for _ in 0..TRIES {
            self.child = spawn(&self.home, self.port)?;
            if is_up(&mut self.child, self.port).await? {
                return Ok(());
            }
            sleep(Duration::from_millis(50)).await;
        }
        Err(format!("redis-server does not start again on port {}", self.port).into())
    }
}

/// What the gate keeps is worth nothing after a restart of minutes: nothing is saved.
fn spawn(home: &TempDir, port: u16) -> Result<Child, BoxError> {
    let mut command = Command::new("redis-server");
    command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no", "--dir"]);
    command.arg(home.path()).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    command.spawn().map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            "there is no redis-server here: install it (Debian: apt-get install redis-server), or name \
                                one that runs with --redis redis://HOST/"
                .into()
        }
        _ => format!("redis-server cannot be started: {error}").into(),
    })
}

/// Waits until it can be connected to. False: it has ended, because the port is somebody else's.
async fn is_up(child: &mut Child, port: u16) -> Result<bool, BoxError> {
    loop {
        if child.try_wait()?.is_some() {
            return Ok(false);
        }
        if TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
            // Perhaps to that somebody; then the end of ours is a matter of moments.
            sleep(Duration::from_millis(50)).await;
            return Ok(child.try_wait()?.is_none());
        }
        sleep(Duration::from_millis(5)).await;
    }
}
