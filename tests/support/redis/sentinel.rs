//! A master and its replica, watched by sentinels.

use futures_util::future::join_all;

use super::server::{Launch, Server};
use super::{Build, until};

const SERVICE: &str = "mymaster";
const SENTINELS: usize = 3;

/// Two servers and three sentinels, two of which must agree that the master is down. That takes them half a second, and
/// a failover not much more.
#[derive(Debug)]
pub struct Sentinel {
    servers: [Server; 2],
    /// Which of the two is the master, as far as was noticed here.
    master: usize,
    sentinels: Vec<Server>,
}

impl Sentinel {
    pub async fn start() -> Self {
        // A replica gets its first copy at once, not in 5 s.
        let launch = Launch::new(Build::Redis).args(&["--repl-diskless-sync-delay", "0"]);
        let master = Server::start(launch.clone()).await;
        let port = master.port().to_string();
        let replica = Server::start(launch.args(&["--replicaof", "127.0.0.1", &port])).await;

        let config = format!(
            "sentinel monitor {SERVICE} 127.0.0.1 {port} 2\n\
            sentinel down-after-milliseconds {SERVICE} 500\n\
            sentinel failover-timeout {SERVICE} 3000\n"
        );
        let sentinels = join_all((0..SENTINELS).map(|_| Server::start(Launch::sentinel(config.clone())))).await;

        for sentinel in &sentinels {
            until("the sentinels know each other, and the replica", async || {
                let master = sentinel.cli(&["SENTINEL", "MASTER", SERVICE]).await;
                let replicas = sentinel.cli(&["SENTINEL", "REPLICAS", SERVICE]).await;
                master.contains("num-other-sentinels\n2\n") && replicas.contains("master-link-status\nok\n")
            })
            .await;
        }
        Self { servers: [master, replica], master: 0, sentinels }
    }

    /// The name of what the sentinels watch.
    pub fn service(&self) -> &'static str {
        SERVICE
    }

    pub fn sentinel_urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Server::url).collect()
    }

    pub fn sentinels_mut(&mut self) -> &mut [Server] {
        &mut self.sentinels
    }

    pub fn master(&self) -> &Server {
        &self.servers[self.master]
    }

    /// The one that is not the master: its replica, or the master that was. The sentinels make the latter a replica
    /// some ten seconds after it comes back.
    pub fn other(&self) -> &Server {
        &self.servers[1 - self.master]
    }

    pub fn other_mut(&mut self) -> &mut Server {
        &mut self.servers[1 - self.master]
    }

    /// SIGKILL. The sentinels notice by themselves.
    pub fn kill_master(&mut self) {
        self.servers[self.master].kill();
    }

    /// Asks a sentinel for a new master although the old one is well.
    pub async fn failover(&self) {
        self.sentinels[0].cli(&["SENTINEL", "FAILOVER", SERVICE]).await;
    }

    /// Waits until all sentinels name the other server, and it knows that it is the master.
    pub async fn wait_for_new_master(&mut self) {
        let new = self.other();
        let address = format!("127.0.0.1\n{}", new.port());
        for sentinel in &self.sentinels {
            until("the sentinels name the new master", async || {
                sentinel.cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE]).await == address
            })
            .await;
        }
        until("the new master knows", async || new.cli(&["ROLE"]).await.starts_with("master")).await;
        self.master = 1 - self.master;
    }
}
