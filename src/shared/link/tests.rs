//! The link, against real servers and a network that fails.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod address;
mod boot;
mod calls;
mod lifecycle;
mod messages;
mod outage;
mod places;
mod slow;

#[path = "../../../tests/support"]
pub(crate) mod support {
    #![allow(dead_code, unused_imports, reason = "the integration tests use the rest")]
    #![allow(unreachable_pub, reason = "it is the interface to whoever includes it")]

    pub mod redis;
}

use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use futures_util::FutureExt;
use tokio::time::sleep;

use self::support::redis::{Build, Cluster, Fault, Proxy, Sentinel, Server, Standalone, Tls};
use super::*;

/// A call's timeout where a test is not about it: no busy machine takes so long.
const AMPLE: Duration = Duration::from_secs(10);
/// One that a test waits for.
const SHORT: Duration = Duration::from_millis(200);
/// One that a test waits for, and in which a call has to be answered.
const ENOUGH: Duration = Duration::from_secs(1);
/// How long anything may take that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);

static ECHO: LazyLock<Script> = LazyLock::new(|| Script::new("return ARGV[1]"));
static COUNT: LazyLock<Script> = LazyLock::new(|| Script::new("return redis.call('INCR', KEYS[1])"));

#[derive(Clone, Debug, PartialEq, Eq)]
enum Event {
    Degraded(BackendErrorKind),
    Recover,
    Recovered,
}

/// Hears what a link tells.
#[derive(Default)]
struct Witness {
    events: Mutex<Vec<Event>>,
    messages: Mutex<Vec<(String, Vec<u8>)>>,
    refuses: AtomicBool,
}

impl Hooks for Witness {
    fn degraded(&self, cause: &BackendError) {
        lock(&self.events).push(Event::Degraded(cause.kind()));
    }

    fn recover<'a>(
        &'a self,
        connection: &'a Connection,
    ) -> Pin<Box<dyn Future<Output = Result<(), BackendError>> + Send + 'a>> {
        Box::pin(async move {
            lock(&self.events).push(Event::Recover);
            if self.refuses.load(Ordering::Relaxed) {
                return Err(BackendError::new(BackendErrorKind::Reply, "the test says no"));
            }
            connection.run(&ECHO, &["host-gate:key"], &[b"recover".to_vec()]).await.map(drop)
        })
    }

    fn recovered(&self, _down_for: Duration) {
        lock(&self.events).push(Event::Recovered);
    }

    fn pushed(&self, channel: &str, payload: &[u8]) {
        lock(&self.messages).push((channel.to_owned(), payload.to_vec()));
    }
}

/// A link, and what it told.
struct Linked {
    link: Arc<Link>,
    witness: Arc<Witness>,
}

impl Linked {
    fn to(url: &str, timeout: Duration) -> Self {
        Self::with(Target::parse(url).unwrap(), timeout, &[])
    }

    fn with(target: Target, timeout: Duration, channels: &[&str]) -> Self {
        let witness = Arc::new(Witness::default());
        let hooks: Weak<Witness> = Arc::downgrade(&witness);
        let channels = channels.iter().map(|channel| (*channel).to_owned()).collect();
        Self { link: Link::new(target, timeout, channels, hooks), witness }
    }

    async fn echo(&self, text: &str) -> Result<String, BackendError> {
        let value = self.link.run(&ECHO, &["host-gate:key"], &[text.as_bytes().to_vec()]).await?;
        Ok(redis::from_redis_value(value).unwrap())
    }

    /// Counts in the store.
    async fn count(&self, key: &str) -> Result<u64, BackendError> {
        let value = self.link.run(&COUNT, &[key], &[]).await?;
        Ok(redis::from_redis_value(value).unwrap())
    }

    /// Until calls are answered in time, and all is told that was.
    async fn until_ready(&self) {
        until("a call is answered", async || self.echo("?").await.is_ok()).await;
        drop(lock(&self.link.telling));
    }

    async fn fails(&self) -> BackendErrorKind {
        self.echo("nothing").await.unwrap_err().kind()
    }

    /// The kind of error that is known without waiting.
    fn fails_at_once(&self) -> Option<BackendErrorKind> {
        self.echo("nothing").now_or_never().map(|answer| answer.unwrap_err().kind())
    }

    fn state(&self) -> State {
        self.link.state()
    }

    async fn until(&self, state: State) {
        until(&format!("the link is {state:?}"), async || self.state() == state).await;
    }

    fn events(&self) -> Vec<Event> {
        lock(&self.witness.events).clone()
    }

    /// Degraded and recovered.
    fn outages(&self) -> Vec<Event> {
        self.events().into_iter().filter(|event| *event != Event::Recover).collect()
    }

    async fn until_recovered(&self) {
        until("the link says that it has recovered", async || self.events().last() == Some(&Event::Recovered)).await;
    }

    fn messages(&self) -> Vec<(String, Vec<u8>)> {
        lock(&self.witness.messages).clone()
    }
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "{what}: still not after {PATIENCE:?}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// The error that a call has in an outage.
fn degraded(kind: BackendErrorKind) -> Event {
    Event::Degraded(kind)
}
