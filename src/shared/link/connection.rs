//! One connection to the store, and what is sent on it.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use futures_util::future::{try_join, try_join_all};
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo};
use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value, cmd, from_redis_value};
use tokio::time::timeout;

use crate::shared::error::{BackendError, BackendErrorKind};

/// A Lua script.
pub(crate) struct Script {
    source: &'static str,
    sha1: String,
}

impl Script {
    pub(crate) fn new(source: &'static str) -> Self {
        Self { source, sha1: redis::Script::new(source).get_hash().to_owned() }
    }
}

/// A connection that exists, or did.
///
/// Calls share it. One whose future is dropped harms no other: redis-rs leaves its place among the answers that are to
/// come, and passes its answer to nobody. If it was not yet written, it never is. A timeout of ours is just that, which
/// is why the connection has none itself.
pub(crate) struct Connection {
    pub(super) wire: Wire,
    pub(super) timeout: Duration,
    /// No other connection of the link has the same.
    pub(super) epoch: u64,
    /// How many calls in a row timed out.
    pub(super) timeouts: AtomicU8,
}

pub(super) enum Wire {
    Server(MultiplexedConnection),
    Cluster {
        calls: ClusterConnection,
        /// To one of the nodes. Not `calls` itself: when it finds a node anew it subscribes to all channels in one
        /// command, and takes the second confirmation for the answer to whatever comes next.
        messages: MultiplexedConnection,
    },
}

impl Connection {
    /// Runs a script, which the server knows by its hash, or is told.
    pub(crate) async fn run<K: AsRef<[u8]>>(
        &self,
        script: &Script,
        keys: &[K],
        args: &[Vec<u8>],
    ) -> Result<Value, BackendError> {
        within(self.timeout, async {
            match self.send(call("EVALSHA", &script.sha1, keys, args)).await {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    self.send(call("EVAL", script.source, keys, args)).await
                }
                answer => answer,
            }
        })
        .await
    }

    /// To the server, or that of a cluster which has the keys.
    async fn send(&self, command: Cmd) -> RedisResult<Value> {
        let answer = match &self.wire {
            Wire::Server(server) => server.clone().send_packed_command(&command).await?,
            Wire::Cluster { calls, .. } => calls.clone().req_packed_command(&command).await?,
        };
        answer.extract_error()
    }

    // --- whether it is any good -----------------------------------------------------------------------------------

    /// Whether scripts run, on every master: the server's clock, in milliseconds. `TIME` alone would be answered by a
    /// server that still loads its data.
    pub(super) async fn probe(&self) -> RedisResult<u64> {
        let mut time = cmd("EVAL");
        time.arg("return redis.call('TIME')").arg(0);
        let Wire::Cluster { calls, .. } = &self.wire else {
            return clock(self.send(time).await?);
        };
        let to_all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let mut calls = calls.clone();
        let (answers, masters) = try_join(calls.route_command(time, to_all), self.masters()).await?;
        let clocks: Vec<(String, Value)> = from_redis_value(answers.extract_error()?)?;
        // A master that could not be connected is not asked. The nodes themselves know how many there are.
        if clocks.len() < masters {
            return Err((ErrorKind::ClusterConnectionNotFound, "a master of the cluster is missing").into());
        }
        let clocks = clocks.into_iter().map(|(_, time)| clock(time)).collect::<RedisResult<Vec<_>>>()?;
        Ok(clocks.into_iter().max().unwrap_or_default())
    }

    /// How many masters the cluster has, as one of its nodes knows it.
    async fn masters(&self) -> RedisResult<usize> {
        let mut slots = cmd("CLUSTER");
        slots.arg("SLOTS");
        // Each is the first slot, the last one, the master, the replicas.
        let ranges: Vec<Vec<Value>> = from_redis_value(self.send(slots).await?)?;
        let mut masters: Vec<&Value> = Vec::new();
        for master in ranges.iter().filter_map(|range| range.get(2)) {
            if !masters.contains(&master) {
                masters.push(master);
            }
        }
        Ok(masters.len())
    }

    /// Whether the server takes writes. A cluster's calls find the masters by themselves.
    ///
    /// `HELLO` says so, and needs no right, unlike `ROLE` and `INFO`.
    pub(super) async fn check_master(&self) -> RedisResult<()> {
        let Wire::Server(_) = &self.wire else { return Ok(()) };
        let mut hello = cmd("HELLO");
        hello.arg(3);
        let answer: HashMap<String, Value> = from_redis_value(self.send(hello).await?)?;
        match answer.get("role") {
            Some(Value::BulkString(role)) if role != b"master" => {
                Err((ServerErrorKind::ReadOnly.into(), "role", "the server is a replica".to_owned()).into())
            }
            _ => Ok(()),
        }
    }

    /// Each channel by itself: redis-rs counts on one confirmation per command.
    pub(super) async fn subscribe(&self, channels: &[String]) -> RedisResult<()> {
        let (Wire::Server(messages) | Wire::Cluster { messages, .. }) = &self.wire;
        let subscribe = async |channel| messages.clone().subscribe(channel).await;
        try_join_all(channels.iter().map(subscribe)).await.map(drop)
    }

    // --- how its calls end ----------------------------------------------------------------------------------------

    /// Whether the connection has to go, now that a call has ended like this.
    pub(super) fn is_lost_by(&self, error: Option<&BackendError>) -> bool {
        match error.map(BackendError::kind) {
            Some(BackendErrorKind::Timeout) => self.timeouts.fetch_add(1, Ordering::Relaxed) > 0,
            Some(
                BackendErrorKind::Unreachable
                | BackendErrorKind::ReadOnly
                | BackendErrorKind::MasterDown
                | BackendErrorKind::Loading,
            ) => true,
            // An answer, whatever it says.
            _ => {
                if self.timeouts.load(Ordering::Relaxed) > 0 {
                    self.timeouts.store(0, Ordering::Relaxed);
                }
                false
            }
        }
    }
}

fn call<K: AsRef<[u8]>>(how: &str, script: &str, keys: &[K], args: &[Vec<u8>]) -> Cmd {
    let size = |parts: usize, part: usize| parts + part;
    let bytes =
        keys.iter().map(|key| key.as_ref().len()).chain(args.iter().map(Vec::len)).fold(script.len() + 16, size);
    let mut command = Cmd::with_capacity(3 + keys.len() + args.len(), bytes);
    command.arg(how).arg(script).arg(keys.len());
    for key in keys {
        command.arg(key.as_ref());
    }
    for arg in args {
        command.arg(arg.as_slice());
    }
    command
}

/// What `TIME` says, in milliseconds.
fn clock(time: Value) -> RedisResult<u64> {
    let (seconds, micros): (u64, u64) = from_redis_value(time)?;
    Ok(seconds.saturating_mul(1000).saturating_add(micros / 1000))
}

/// The end of it, or of our patience.
pub(super) async fn within<T, E>(
    patience: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, BackendError>
where
    BackendError: From<E>,
{
    match timeout(patience, work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(BackendError::new(BackendErrorKind::Timeout, "no answer in time")),
    }
}
