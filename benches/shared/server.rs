//! The server, and what it counts.

use std::time::{Duration, Instant};

use ::redis::aio::MultiplexedConnection;
use ::redis::{AsyncConnectionConfig, Client, Cmd, InfoDict, cmd};
use tokio::time::sleep;

use crate::statistics::median;
use crate::support::redis::Standalone;

pub(crate) struct Server {
    server: Standalone,
    /// Of the bench alone: the gates have their own.
    connection: MultiplexedConnection,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let server = Standalone::start().await;
        let connection = connect(&server.url()).await;
        Self { server, connection }
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.port()
    }

    /// Another connection.
    pub(crate) async fn connect(&self) -> MultiplexedConnection {
        connect(&self.url()).await
    }

    pub(crate) async fn ask<T: ::redis::FromRedisValue>(&self, command: &Cmd) -> T {
        command.query_async(&mut self.connection.clone()).await.expect("an answer of the server")
    }

    /// How long the shortest script takes when nothing else goes on: what this machine makes of any question (median).
    pub(crate) async fn round_trip(&self) -> Duration {
        let mut times = Vec::new();
        for _ in 0..50 {
            sleep(Duration::from_millis(5)).await;
            let start = Instant::now();
            self.ask::<u8>(cmd("EVAL").arg("return 1").arg(0)).await;
            times.push(start.elapsed().as_secs_f64());
        }
        Duration::from_secs_f64(median(&times))
    }

    /// What clients have asked for since the server was started: scripts are all that a gate asks for once it is
    /// connected. The commands within a script cost no round trip.
    async fn scripts_now(&self) -> Scripts {
        let info: InfoDict = self.ask(cmd("INFO").arg("commandstats")).await;
        let mut scripts = Scripts::default();
        for stat in ["cmdstat_evalsha", "cmdstat_eval"].iter().filter_map(|name| info.get::<String>(name)) {
            scripts.calls += number(&stat, "calls=");
            scripts.micros += number(&stat, "usec=");
        }
        scripts
    }

    /// The same once nobody asks any more: a permit goes back in its own time.
    pub(crate) async fn scripts(&self) -> Scripts {
        let mut before = self.scripts_now().await;
        loop {
            sleep(Duration::from_millis(25)).await;
            let now = self.scripts_now().await;
            if now.calls == before.calls {
                return now;
            }
            before = now;
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scripts {
    pub(crate) calls: u64,
    micros: u64,
}

impl Scripts {
    /// The time of the server for one call, in microseconds.
    pub(crate) fn micros_per_call_since(&self, before: &Self) -> f64 {
        (self.micros - before.micros) as f64 / (self.calls - before.calls) as f64
    }
}

async fn connect(url: &str) -> MultiplexedConnection {
    let client = Client::open(url).expect("the address of a server");
    // A machine that is busy with something else makes a measurement worse, and does not end it.
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await.expect("a connection to the server")
}

/// Of `calls=12,usec=34,..`
fn number(stat: &str, name: &str) -> u64 {
    let found = stat.split(',').find_map(|part| part.strip_prefix(name)?.parse().ok());
    found.unwrap_or_else(|| panic!("no {name} in {stat}"))
}
