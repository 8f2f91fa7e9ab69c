//! The server itself, looked at past the gate.

use redis::aio::MultiplexedConnection;
use redis::{Client, FromRedisValue, cmd};

use super::support::redis::Server;

/// A connection to one server that no replica shares.
pub struct Eye(MultiplexedConnection);

/// The key of a host's state, or with a suffix (`:l` leases, `:q` sends, `:t` tickets, `:w` who looks for a permit) of what else is kept of it.
pub fn key(host: &str, suffix: &str) -> String {
    key_in("default", host, suffix)
}

pub fn key_in(scope: &str, host: &str, suffix: &str) -> String {
    format!("host-gate:1:{scope}:{{{host}}}{suffix}")
}

impl Eye {
    pub async fn open(server: &Server) -> Self {
        let client = Client::open(server.url()).unwrap();
        Self(client.get_multiplexed_async_connection().await.unwrap())
    }

    pub async fn ask<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = cmd(words[0]);
        command.arg(&words[1..]);
        command.query_async(&mut self.0.clone()).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub async fn keys(&self) -> Vec<String> {
        let mut keys = Vec::new();
        let mut cursor = "0".to_owned();
        loop {
            let (next, some): (String, Vec<String>) = self.ask(&["SCAN", &cursor, "COUNT", "1000"]).await;
            keys.extend(some);
            cursor = next;
            if cursor == "0" {
                keys.sort();
                keys.dedup();
                return keys;
            }
        }
    }

    /// The keys that nobody will ever delete.
    pub async fn immortal_keys(&self) -> Vec<String> {
        let mut immortal = Vec::new();
        for key in self.keys().await {
            let ttl: i64 = self.ask(&["PTTL", &key]).await;
            if ttl == -1 {
                immortal.push(key);
            }
        }
        immortal
    }

    pub async fn leases(&self, host: &str) -> usize {
        self.ask(&["ZCARD", &key(host, ":l")]).await
    }

    /// The sends that count towards a quota.
    pub async fn sends(&self, host: &str) -> usize {
        self.ask(&["LLEN", &key(host, ":q")]).await
    }

    pub async fn tickets(&self, host: &str) -> usize {
        self.ask(&["ZCARD", &key(host, ":t")]).await
    }

    /// How often replicas have asked: each operation is one call of a script by its hash.
    pub async fn script_calls(&self) -> u64 {
        self.info("COMMANDSTATS", "cmdstat_evalsha:calls=").await
    }

    /// The number behind these words.
    pub async fn info(&self, section: &str, words: &str) -> u64 {
        let info: String = self.ask(&["INFO", section]).await;
        let found = info.lines().find_map(|line| line.strip_prefix(words));
        found.map_or(0, |number| number.split(',').next().unwrap().parse().unwrap())
    }
}
