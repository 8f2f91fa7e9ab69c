//! The dialler: the one task that brings the connection about.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::try_join3;
use redis::{AsyncConnectionConfig, PushInfo, PushKind, Value};
use tokio::time::sleep;

use super::connection::{Connection, within};
use super::{Link, Plan};
use crate::shared::error::{BackendError, BackendErrorKind};

/// The first pause between two attempts. Each is twice the one before, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a node may take to be connected, unless a probe may take longer.
const NODE_LIMIT: Duration = Duration::from_secs(1);
/// So often one after the other, at most: a cluster is a node that knows it, then all of it, then one that sends
/// messages.
const NODES: u32 = 3;
/// How many probes have to be answered in a row, each in half the time a call has: what is only just fast enough would
/// be lost again at once.
const PROBES: usize = 3;
/// Calls that may wait to be written.
const BACKLOG: usize = 1024;

/// The right to dial. Whatever ends it, the end of its runtime too, gives it back.
pub(super) struct Dialler {
    pub(super) link: Weak<Link>,
    pub(super) plan: Arc<Plan>,
    pub(super) turn: u64,
}

impl Drop for Dialler {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            link.dialler_ended(self.turn);
        }
    }
}

impl Dialler {
    /// Attempts until there is a connection, or no link any more.
    pub(super) async fn dial(self) {
        let mut pause = FIRST_PAUSE;
        loop {
            let attempt = self.attempt().await;
            let Some(link) = self.link.upgrade() else { return };
            match attempt {
                Ok(connection) => return link.connected(self.turn, connection),
                Err(error) => link.not_connected(error),
            }
            drop(link);
            sleep(pause.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn attempt(&self) -> Result<Connection, BackendError> {
        let Plan { target, timeout, channels, hooks, clock, epochs } = &*self.plan;
        let epoch = epochs.fetch_add(1, Ordering::Relaxed);
        let patience = *timeout / 2;
        let limit = NODE_LIMIT.max(patience);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(limit))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(BACKLOG)
            .set_push_sender(self.receiver(epoch));
        let wire = within(limit * NODES, target.connect(&config, limit)).await?;
        let connection = Connection { wire, timeout: *timeout, epoch, timeouts: AtomicU8::new(0) };

        // In one round trip.
        let first = try_join3(connection.check_master(), connection.subscribe(channels), connection.probe());
        let ((), (), mut now) = within(patience, first).await?;
        for _ in 1..PROBES {
            now = within(patience, connection.probe()).await?;
        }
        clock.set(now);

        let gone = || BackendError::new(BackendErrorKind::Down, "there is nobody left to connect for");
        hooks.upgrade().ok_or_else(gone)?.recover(&connection).await?;
        Ok(connection)
    }

    /// Hears what comes without having been asked for.
    fn receiver(&self, epoch: u64) -> impl Fn(PushInfo) -> Result<(), ()> + Send + Sync + use<> {
        let (link, plan) = (self.link.clone(), Arc::clone(&self.plan));
        move |PushInfo { kind, data }: PushInfo| {
            match (kind, data.as_slice()) {
                (PushKind::Message, [Value::BulkString(channel), Value::BulkString(payload)]) => {
                    if let (Some(hooks), Ok(channel)) = (plan.hooks.upgrade(), std::str::from_utf8(channel)) {
                        hooks.pushed(channel, payload);
                    }
                }
                (PushKind::Disconnection, _) => {
                    if let Some(link) = link.upgrade() {
                        link.lost(epoch, &BackendError::new(BackendErrorKind::Unreachable, "the connection broke"));
                    }
                }
                _ => {}
            }
            Ok(())
        }
    }
}
