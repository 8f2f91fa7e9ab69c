//! Where the requests go: it answers each after a while, and remembers when it came and how long it stayed.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use tokio::time::{Instant, sleep};
use tower::Service;

use super::support::script::get;

/// How long a request stays, unless it brings a [`Stay`].
const STAY: Duration = Duration::from_millis(40);

/// Request extension: when the gate was asked.
#[derive(Clone, Copy)]
struct Asked(Instant);

/// Request extension: how long the upstream takes for it.
#[derive(Clone, Copy)]
struct Stay(Duration);

/// A request to this host, beginning now.
pub fn request(host: &str) -> Request<()> {
    let mut request = get(&format!("http://{host}/"));
    request.extensions_mut().insert(Asked(Instant::now()));
    request
}

/// The same, of which the upstream takes so long.
pub fn stays(time: Duration, mut request: Request<()>) -> Request<()> {
    request.extensions_mut().insert(Stay(time));
    request
}

/// A request as the upstream saw it.
#[derive(Clone, Debug)]
pub struct Visit {
    host: String,
    asked: Instant,
    pub sent: Instant,
    /// Nothing: it is still there.
    pub ended: Option<Instant>,
}

/// An API that counts. Clones are the same one.
#[derive(Clone, Default)]
pub struct Upstream(Arc<Mutex<Vec<Visit>>>);

impl Upstream {
    /// The visits to this host, in their order.
    pub fn visits(&self, host: &str) -> Visits {
        Visits(self.lock(|visits| visits.iter().filter(|visit| visit.host == host).cloned().collect()))
    }

    fn lock<T>(&self, with: impl FnOnce(&mut Vec<Visit>) -> T) -> T {
        with(&mut self.0.lock().expect("nobody panics with the lock held"))
    }
}

impl Service<Request<()>> for Upstream {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let sent = Instant::now();
        let host = request.uri().host().unwrap_or_default().to_owned();
        let asked = request.extensions().get().map_or(sent, |Asked(at)| *at);
        let stay = request.extensions().get().map_or(STAY, |Stay(time)| *time);
        let nth = self.lock(|visits| {
            visits.push(Visit { host, asked, sent, ended: None });
            visits.len() - 1
        });
        let inside = Inside { upstream: self.clone(), nth };
        Box::pin(async move {
            sleep(stay).await;
            drop(inside);
            Ok(Response::new(Empty::new()))
        })
    }
}

/// A request that is there. However it ends, dropped by its caller too, the upstream hears of it.
struct Inside {
    upstream: Upstream,
    nth: usize,
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.upstream.lock(|visits| visits[self.nth].ended = Some(Instant::now()));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What it saw
// ---------------------------------------------------------------------------------------------------------------------

/// The visits to one host.
pub struct Visits(Vec<Visit>);

impl Visits {
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The longest a request was kept before it was sent.
    pub fn longest_wait(&self) -> Duration {
        self.0.iter().map(|visit| visit.sent - visit.asked).max().unwrap_or_default()
    }

    /// The longest time in which nothing was sent.
    pub fn longest_pause(&self) -> Duration {
        self.0.windows(2).map(|two| two[1].sent - two[0].sent).max().unwrap_or_default()
    }

    /// The first that was sent from this instant on.
    pub fn first_since(&self, from: Instant) -> Option<Instant> {
        self.0.iter().map(|visit| visit.sent).find(|sent| *sent >= from)
    }

    /// When the last of those had ended that were sent by this instant.
    pub fn ended_that_were_sent_by(&self, at: Instant) -> Instant {
        let ends = self.0.iter().filter(|visit| visit.sent <= at).filter_map(|visit| visit.ended);
        ends.max().unwrap_or(at).max(at)
    }

    /// How many were there at once, at any time between these two.
    pub fn most_in_flight(&self, from: Instant, to: Instant) -> usize {
        let there = self.0.iter().filter(|visit| visit.sent < to && visit.ended.is_none_or(|ended| ended > from));
        let mut changes: Vec<(Instant, i64)> =
            there.flat_map(|visit| [(visit.sent.max(from), 1), (visit.ended.unwrap_or(to).min(to), -1)]).collect();
        // At one instant those that go before those that come.
        changes.sort_unstable();
        let counts = changes.into_iter().scan(0, |count, (_, change)| {
            *count += change;
            Some(*count)
        });
        usize::try_from(counts.max().unwrap_or_default()).expect("none ends before it was sent")
    }

    /// How many were sent within any time of this length, between these two.
    pub fn most_per(&self, window: Duration, from: Instant, to: Instant) -> usize {
        let sent: Vec<_> = self.0.iter().map(|visit| visit.sent).filter(|sent| (from..to).contains(sent)).collect();
        let ends = (0..sent.len()).map(|first| sent.partition_point(|at| *at < sent[first] + window) - first);
        ends.max().unwrap_or_default()
    }
}
