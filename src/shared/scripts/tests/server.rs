//! A server of the test's own.

use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::{Client, Connection};
use tempfile::TempDir;

/// Reached through a socket in its own directory, so that no port is taken from anybody. Ends with the test.
pub(super) struct Server {
    child: Child,
    directory: TempDir,
}

impl Server {
    pub(super) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let child = Command::new("redis-server")
            .args(["--port", "0", "--unixsocket", "socket", "--save", "", "--appendonly", "no", "--dir"])
            .arg(directory.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        Self { child, directory }
    }

    pub(super) fn connect(&self) -> Connection {
        let client = Client::open(format!("redis+unix://{}", self.directory.path().join("socket").display())).unwrap();
        let patience = Instant::now() + Duration::from_secs(20);
        loop {
            match client.get_connection() {
                Ok(connection) => return connection,
                Err(error) if Instant::now() > patience => panic!("{error}"),
                Err(_) => sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only for a server that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The pace of one host as the scripts have it, after each of these commands.
pub(super) fn in_lua(connection: &mut Connection, commands: &[String]) -> Vec<String> {
    let script = concat!(include_str!("../pace.lua"), include_str!("driver.lua"));
    redis::cmd("EVAL").arg(script).arg(0).arg(commands).query(connection).unwrap()
}
