//! A cluster of three masters.

use std::ops::RangeInclusive;

use futures_util::future::join_all;

use super::server::{Launch, Server};
use super::{Build, until};

const MASTERS: usize = 3;

/// A cluster whose nodes need a second to notice that one of them is gone.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
}

impl Cluster {
    /// Three masters, and nobody to take their place.
    pub async fn start() -> Self {
        Self::of(MASTERS, "0").await
    }

    /// Three masters with a replica each.
    pub async fn start_with_replicas() -> Self {
        Self::of(2 * MASTERS, "1").await
    }

    async fn of(nodes: usize, replicas: &str) -> Self {
        let launch = Launch::new(Build::Redis)
            .args(&["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"])
            // A replica gets its first copy at once, and may stand for master however old it is.
            .args(&["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"]);
        let nodes = join_all((0..nodes).map(|_| Server::start(launch.clone()))).await;

        let addresses: Vec<_> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        let mut create = vec!["--cluster", "create"];
        create.extend(addresses.iter().map(String::as_str));
        create.extend(["--cluster-replicas", replicas, "--cluster-yes"]);
        nodes[0].cli(&create).await;

        let cluster = Self { nodes };
        cluster.wait_until_ok().await;
        cluster
    }

    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    pub fn nodes_mut(&mut self) -> &mut [Server] {
        &mut self.nodes
    }

    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// What each running node answers.
    pub async fn cli_all(&self, args: &[&str]) -> Vec<String> {
        join_all(self.running().map(|node| node.cli(args))).await
    }

    /// The place among the [`nodes`](Self::nodes) of the one that has this key.
    pub async fn master_of(&self, key: &str) -> usize {
        let port = self.member_of(key).await.port;
        self.nodes.iter().position(|node| node.port() == port).expect("a node of this cluster")
    }

    /// SIGKILL. A replica, if there is one, notices by itself. Returns the node's place.
    pub async fn kill_master_of(&mut self, key: &str) -> usize {
        let master = self.master_of(key).await;
        self.nodes[master].kill();
        master
    }

    /// Makes the replica of this key's master the master, both being well, and waits until all know.
    pub async fn failover(&self, key: &str) {
        let old = self.member_of(key).await;
        let replica = self.members().await.into_iter().find(|member| member.master == old.id).expect("a replica");
        let replica = self.nodes.iter().find(|node| node.port() == replica.port).expect("a node of this cluster");
        replica.cli(&["CLUSTER", "FAILOVER"]).await;
        // In between, a node may know that the old master has given up its slots before it hears who has them now.
        let has_taken_over = async || self.find_member_of(key).await.is_some_and(|owner| owner.port == replica.port());
        until("the replica takes over", has_taken_over).await;
        self.wait_until_ok().await;
    }

    /// Waits until all running nodes are content, see all slots with the same nodes, all of them running, and each
    /// replica follows its master: after the start, after a kill, after a restart.
    pub async fn wait_until_ok(&self) {
        until("the cluster is whole", async || self.is_ok().await).await;
    }

    async fn is_ok(&self) -> bool {
        let infos = self.cli_all(&["CLUSTER", "INFO"]).await;
        let nodes = format!("cluster_known_nodes:{}\r", self.nodes.len());
        let content = infos.iter().all(|info| info.contains("cluster_state:ok\r") && info.contains(&nodes));

        let replication = self.cli_all(&["INFO", "REPLICATION"]).await;
        let following = !replication.iter().any(|info| info.contains("master_link_status:down"));

        let mut views = self.cli_all(&["CLUSTER", "NODES"]).await.into_iter().map(|text| owners(&text));
        let first = views.next().expect("a running node");
        let alive = first.iter().all(|(_, port)| self.running().any(|node| node.port() == *port));
        content && following && alive && views.all(|view| view == first)
    }

    fn running(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.is_running())
    }

    async fn member_of(&self, key: &str) -> Member {
        self.find_member_of(key).await.expect("somebody has the slot")
    }

    async fn find_member_of(&self, key: &str) -> Option<Member> {
        let node = self.running().next().expect("a running node");
        let slot: u16 = node.cli(&["CLUSTER", "KEYSLOT", key]).await.parse().expect("a slot");
        let mut members = self.members().await.into_iter();
        members.find(|member| member.slots.iter().any(|slots| slots.contains(&slot)))
    }

    async fn members(&self) -> Vec<Member> {
        let node = self.running().next().expect("a running node");
        node.cli(&["CLUSTER", "NODES"]).await.lines().map(Member::parse).collect()
    }
}

/// Who has which slots, in order.
fn owners(nodes: &str) -> Vec<(u16, u16)> {
    let mut owners: Vec<_> = nodes
        .lines()
        .map(Member::parse)
        .flat_map(|member| member.slots.into_iter().map(move |slots| (*slots.start(), member.port)))
        .collect();
    owners.sort_unstable();
    owners
}

/// A line of `CLUSTER NODES`.
struct Member {
    id: String,
    port: u16,
    /// The id of its master, if it is a replica.
    master: String,
    slots: Vec<RangeInclusive<u16>>,
}

impl Member {
    /// `ID 127.0.0.1:PORT@BUS FLAGS MASTER PING PONG EPOCH LINK SLOTS..`, where slots are `N` or `N-M`.
    fn parse(line: &str) -> Self {
        let fields: Vec<_> = line.split_whitespace().collect();
        let number = |text: &str| text.parse::<u16>().unwrap_or_else(|_| panic!("a number in {line:?}"));
        let port = fields[1].split(['@', ',']).next().and_then(|address| address.rsplit(':').next());
        let range = |slots: &str| {
            let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
            number(first)..=number(last)
        };
        Self {
            id: fields[0].to_owned(),
            port: number(port.unwrap_or_default()),
            master: fields[3].to_owned(),
            slots: fields[8..].iter().map(|slots| range(slots)).collect(),
        }
    }
}
