//! A feed provider on loopback: a hyper server that throttles in one of three ways, and remembers what it saw.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tower::BoxError;

use crate::scaled;

/// Making a feed takes half a second of the real world; a refusal is made at once.
const SECONDS_PER_FEED: f64 = 0.5;

/// How a provider treats its clients.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Manners {
    /// The provider of ADR-0016: one feed per window and client, and to whoever asks sooner a 429 that does not say when
    /// to come back.
    Headerless { window: Duration },
    /// The same, with a `Retry-After`.
    RetryAfter { window: Duration },
    /// Serves everybody.
    Healthy,
}

/// A request, as the provider saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hit {
    pub(crate) at: Instant,
    pub(crate) feed: usize,
    pub(crate) refused: bool,
}

/// Stops when dropped.
#[derive(Debug)]
pub(crate) struct Provider {
    addr: SocketAddr,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct State {
    manners: Manners,
    log: Mutex<Log>,
}

#[derive(Debug, Default)]
struct Log {
    hits: Vec<Hit>,
    /// When the window ends that the last feed has opened. One is enough: there is one client here.
    closed_until: Option<Instant>,
}

impl Provider {
    pub(crate) async fn start(manners: Manners) -> Result<Self, BoxError> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let addr = listener.local_addr()?;
        let state = Arc::new(State { manners, log: Mutex::default() });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&state)));
        Ok(Self { addr, state, accepting })
    }

    /// The key of this provider's gate, too: `127.0.0.1:port`.
    pub(crate) fn host(&self) -> String {
        self.addr.to_string()
    }

    pub(crate) fn url(&self, feed: usize) -> String {
        format!("http://{}/{feed}", self.addr)
    }

    pub(crate) fn hits(&self) -> Vec<Hit> {
        self.state.log.lock().unwrap_or_else(PoisonError::into_inner).hits.clone()
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
        // Else the last packet of an answer waits for an acknowledgement: 40 ms, a whole second at this scale.
        let _ = stream.set_nodelay(true);
        let state = Arc::clone(&state);
        let service = service_fn(move |request| answer(Arc::clone(&state), request));
        connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let feed = request.uri().path().trim_start_matches('/').parse().unwrap_or_default();
    let mut response = Response::new(Full::default());
    match state.come_in(feed) {
        Ok(()) => {
            sleep(scaled(SECONDS_PER_FEED)).await;
            *response.body_mut() = Full::from("<rss version=\"2.0\"/>");
        }
        Err(closed_for) => {
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            if let Manners::RetryAfter { .. } = state.manners {
                // HTTP has whole seconds here; the shortest of them would be 25 at this scale. Since there are servers
                // that send decimals, the gate reads them.
                let milliseconds = closed_for.as_millis() + 1;
                if let Ok(value) = format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000).try_into() {
                    response.headers_mut().insert(RETRY_AFTER, value);
                }
            }
        }
    }
    Ok(response)
}

impl State {
    /// Counts the request, and says for how long the window is still closed to it.
    fn come_in(&self, feed: usize) -> Result<(), Duration> {
        let at = Instant::now();
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let closed_for = log.closed_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(at));
        let refused = !closed_for.is_zero();
        log.hits.push(Hit { at, feed, refused });
        if refused {
            return Err(closed_for);
        }
        if let Manners::Headerless { window } | Manners::RetryAfter { window } = self.manners {
            log.closed_until = Some(at + window);
        }
        Ok(())
    }
}
