//! The providers as a tower service under a paused clock, and the record of what they were sent.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tokio::time::{Instant, sleep};
use tower::Service;

use crate::provider::Provider;

/// The hosts of a run. Clones are the same hosts.
#[derive(Clone)]
pub(crate) struct Site {
    start: Instant,
    /// The client waits no longer than this, whatever it is told.
    longest_hold: Duration,
    hosts: Arc<Mutex<Vec<Host>>>,
}

struct Host {
    provider: Provider,
    in_flight: usize,
    /// No send before this: so the client was told, in answers it has received.
    told: Duration,
    early: usize,
    record: Vec<Event>,
}

/// Something that happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) at: Duration,
    /// When the request went out.
    pub(crate) sent: Duration,
    pub(crate) what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Sent,
    Served,
    Refused,
    Forbidden,
}

/// Marks the answer to a request that no pace makes acceptable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forbidden;

impl Site {
    /// Time counts from now.
    pub(crate) fn open(providers: impl IntoIterator<Item = Provider>, longest_hold: Duration) -> Self {
        let open = |provider| Host { provider, in_flight: 0, told: Duration::ZERO, early: 0, record: Vec::new() };
        Self {
            start: Instant::now(),
            longest_hold,
            hosts: Arc::new(Mutex::new(providers.into_iter().map(open).collect())),
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// What a host was sent, in the order in which things happened.
    pub(crate) fn record(&self, host: usize) -> Vec<Event> {
        self.lock()[host].record.clone()
    }

    /// How many requests were sent before a time that the host had named.
    pub(crate) fn early(&self) -> usize {
        self.lock().iter().map(|host| host.early).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Host>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The request for a path of a host.
pub(crate) fn request(host: usize, path: u64) -> Request<()> {
    Request::get(format!("http://{}/{path}", name(host))).body(()).expect("a valid URI")
}

pub(crate) fn name(host: usize) -> String {
    format!("h{host}.example:80")
}

fn asked<B>(request: &Request<B>) -> (usize, u64) {
    let uri = request.uri();
    let host = uri.host().and_then(|host| host.strip_prefix('h')?.strip_suffix(".example")?.parse().ok());
    let path = uri.path().strip_prefix('/').and_then(|path| path.parse().ok());
    host.zip(path).expect("a request made here")
}

impl Service<Request<()>> for Site {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let (n, path) = asked(&request);
        let site = self.clone();
        let sent = site.now();
        let answer = {
            let host = &mut site.lock()[n];
            host.early += usize::from(sent < host.told);
            host.record.push(Event { at: sent, sent, what: What::Sent });
            let answer = host.provider.ask(sent, path, host.in_flight);
            host.in_flight += 1;
            answer
        };
        Box::pin(async move {
            sleep(answer.latency).await;
            let at = site.now();
            let host = &mut site.lock()[n];
            host.in_flight -= 1;
            let what = match answer.status {
                _ if answer.forbidden => What::Forbidden,
                StatusCode::OK => What::Served,
                _ => What::Refused,
            };
            host.record.push(Event { at, sent, what });
            host.told = host.told.max(at + answer.asked.unwrap_or_default().min(site.longest_hold));
            let mut response = Response::new(Empty::new());
            *response.status_mut() = answer.status;
            *response.headers_mut() = answer.headers;
            if answer.forbidden {
                response.extensions_mut().insert(Forbidden);
            }
            Ok(response)
        })
    }
}
