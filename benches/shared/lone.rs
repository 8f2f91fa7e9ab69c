//! Waiting without a queue: every request asks for itself, again and again.
//!
//! Leases and spacing by the server's clock, as the gate has them, but a request that is refused comes back after 20 to
//! 30 ms, whoever else may be waiting.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use ::redis::Script;
use ::redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use crate::gate::Held;

static ACQUIRE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("scripts/lone_acquire.lua")));
static RELEASE: LazyLock<Script> = LazyLock::new(|| Script::new("return redis.call('ZREM', KEYS[1], ARGV[1])"));

/// One process.
#[derive(Clone)]
pub(crate) struct Lone {
    connection: MultiplexedConnection,
    permits: usize,
    host: Arc<str>,
}

impl Lone {
    pub(crate) fn new(connection: MultiplexedConnection, permits: usize) -> Self {
        Self { connection, permits, host: "lone:{feeds.example}".into() }
    }

    pub(crate) async fn request(self, hold: Duration) -> Held {
        let Self { mut connection, permits, host } = self;
        let token = format!("{:032x}", fastrand::u128(..));
        loop {
            let mut acquire = ACQUIRE.key(&*host);
            let admitted: bool =
                acquire.arg(permits).arg(&token).invoke_async(&mut connection).await.expect("an answer");
            if admitted {
                break;
            }
            sleep(Duration::from_millis(25).mul_f64(0.8 + 0.4 * fastrand::f64())).await;
        }
        let sent = Instant::now();
        sleep(hold).await;
        let held = Held { sent, done: Instant::now() };
        let _: bool = RELEASE.key(&*host).arg(token).invoke_async(&mut connection).await.expect("an answer");
        held
    }
}
