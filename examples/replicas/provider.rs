//! A feed provider on loopback that takes so many requests at a time and refuses the others, as nginx's `limit_conn` does.

use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::USER_AGENT;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tower::BoxError;

use crate::LIMIT;

/// Making a feed takes so long; a refusal is made at once.
const PER_FEED: Duration = Duration::from_millis(80);

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Manners {
    /// The first feeds are not made before so many requests have come, so that what is shown does not hang on how fast a
    /// machine starts four processes.
    pub(crate) opens_at: usize,
    /// Whoever asks for this one first never gets an answer.
    pub(crate) held: Option<usize>,
}

/// A request, as the provider saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hit {
    pub(crate) worker: usize,
    pub(crate) feed: usize,
    pub(crate) at: Instant,
    /// When it was over; refused requests are at once.
    pub(crate) until: Option<Instant>,
    pub(crate) refused: bool,
    /// Requests in flight then, this one included.
    pub(crate) in_flight: usize,
}

/// Stops when dropped.
#[derive(Debug)]
pub(crate) struct Provider {
    host: String,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct State {
    manners: Manners,
    log: Mutex<Log>,
    seen: watch::Sender<usize>,
    held: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Log {
    hits: Vec<Hit>,
    in_flight: usize,
    has_held: bool,
}

impl Provider {
    pub(crate) async fn start(manners: Manners) -> Result<Self, BoxError> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let host = listener.local_addr()?.to_string();
        let (seen, held) = (watch::Sender::new(0), watch::Sender::new(false));
        let state = Arc::new(State { manners, log: Mutex::default(), seen, held });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&state)));
        Ok(Self { host, state, accepting })
    }

    /// The key of this provider's gate, too: `127.0.0.1:port`.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn hits(&self) -> Vec<Hit> {
        self.state.log().hits.clone()
    }

    /// Until somebody waits for the answer that never comes, or no longer does.
    pub(crate) async fn until_held(&self, held: bool) -> Result<(), BoxError> {
        self.state.held.subscribe().wait_for(|is| *is == held).await?;
        Ok(())
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    // Owned by this task, so that the connections end when it does.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let state = Arc::clone(&state);
        let service = service_fn(move |request| answer(Arc::clone(&state), request));
        connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let number = |text: &str| text.parse().unwrap_or_default();
    let worker = request.headers().get(USER_AGENT).and_then(|name| name.to_str().ok()).map_or(0, number);
    let feed = number(request.uri().path().trim_start_matches('/'));
    let mut response = Response::new(Full::default());
    match state.come_in(worker, feed) {
        Some(visit) => {
            visit.wait().await;
            *response.body_mut() = Full::from("<rss version=\"2.0\"/>");
        }
        None => *response.status_mut() = StatusCode::TOO_MANY_REQUESTS,
    }
    Ok(response)
}

impl State {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the request, and lets it in if there is room.
    fn come_in(self: &Arc<Self>, worker: usize, feed: usize) -> Option<Visit> {
        let at = Instant::now();
        let mut log = self.log();
        let refused = log.in_flight >= LIMIT;
        let in_flight = log.in_flight + 1;
        let hit = log.hits.len();
        log.hits.push(Hit { worker, feed, at, until: refused.then_some(at), refused, in_flight });
        self.seen.send_modify(|seen| *seen += 1);
        if refused {
            return None;
        }
        log.in_flight = in_flight;
        let held = self.manners.held == Some(feed) && !log.has_held;
        log.has_held |= held;
        Some(Visit { state: Arc::clone(self), hit, held })
    }
}

/// A request in flight: until it is answered, or its connection is closed.
struct Visit {
    state: Arc<State>,
    hit: usize,
    held: bool,
}

impl Visit {
    async fn wait(&self) {
        if self.held {
            self.state.held.send_replace(true);
            return pending().await;
        }
        let open = self.state.manners.opens_at;
        // The sender is in the state, which is alive.
        let _ = self.state.seen.subscribe().wait_for(|seen| *seen >= open).await;
        sleep(PER_FEED).await;
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut log = self.state.log();
        log.in_flight -= 1;
        log.hits[self.hit].until = Some(Instant::now());
        drop(log);
        if self.held {
            self.state.held.send_replace(false);
        }
    }
}
