//! An inner service that answers from a script.
//!
//! It works under the paused clock: whatever takes time is a `tokio` sleep, and every send is recorded with the time
//! since the script was made.
//!
//! ```ignore
//! let script = Script::list([
//!     Reply::status(429).header("retry-after", "5").after(Duration::from_millis(100)),
//!     Reply::ok().body("the feed"),
//! ]);
//! let gated = reactive().layer(script.clone());
//! // ...
//! assert_eq!(script.times(), [secs(0), secs(5)]);
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};
use tower::Service;

/// One call of the script, as it was sent.
#[derive(Debug, Clone)]
pub struct Sent {
    /// Which call this was: 0 is the first one.
    pub n: usize,
    /// When it was sent, counted from the making of the script.
    pub at: Duration,
    pub method: Method,
    pub uri: Uri,
    /// `host` or `host:port`: the URI's, else the `Host` header's, else empty.
    pub host: String,
    pub path: String,
    pub headers: HeaderMap,
}

impl Sent {
    fn new<B>(n: usize, at: Duration, request: &Request<B>) -> Self {
        let uri = request.uri();
        let host = match (uri.host(), uri.port()) {
            (Some(host), Some(port)) => format!("{host}:{port}"),
            (Some(host), None) => host.to_owned(),
            (None, _) => request
                .headers()
                .get(http::header::HOST)
                .map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned())
                .unwrap_or_default(),
        };
        Self {
            n,
            at,
            method: request.method().clone(),
            uri: uri.clone(),
            host,
            path: uri.path().to_owned(),
            headers: request.headers().clone(),
        }
    }
}

/// A `GET` without a body.
pub fn get(uri: &str) -> Request<()> {
    Request::get(uri).body(()).expect("a test names a valid URI")
}

// ---------------------------------------------------------------------------------------------------------------------
// The service
// ---------------------------------------------------------------------------------------------------------------------

/// The scripted service. Clones share the script, its records and its readiness.
///
/// It holds its caller to the contract of [`Service`]: calling a clone that was not polled ready panics.
pub struct Script {
    shared: Arc<Mutex<Shared>>,
    /// Whether this very clone was polled ready since its last call.
    ready: bool,
}

struct Shared {
    origin: Instant,
    answer: Box<dyn FnMut(&Sent) -> Reply + Send>,
    sent: Vec<Sent>,
    readiness: Readiness,
    waiting: Vec<Waker>,
    open: usize,
    peak: usize,
}

enum Readiness {
    Ready,
    Held,
    Failed(String),
}

impl Script {
    /// Answers each call with what `answer` makes of it. (`answer` must not use the script it belongs to.)
    pub fn new(answer: impl FnMut(&Sent) -> Reply + Send + 'static) -> Self {
        let shared = Shared {
            origin: Instant::now(),
            answer: Box::new(answer),
            sent: Vec::new(),
            readiness: Readiness::Ready,
            waiting: Vec::new(),
            open: 0,
            peak: 0,
        };
        Self { shared: Arc::new(Mutex::new(shared)), ready: false }
    }

    /// Answers with these replies in turn, and with an empty 200 when they are used up.
    pub fn list(replies: impl IntoIterator<Item = Reply>) -> Self {
        let mut replies = VecDeque::from_iter(replies);
        Self::new(move |_| replies.pop_front().unwrap_or_else(Reply::ok))
    }

    /// Answers every call with the same reply.
    pub fn always(reply: Reply) -> Self {
        Self::new(move |_| reply.clone())
    }

    /// Every call so far, in the order they were sent.
    pub fn sent(&self) -> Vec<Sent> {
        self.lock().sent.clone()
    }

    /// When each call was sent.
    pub fn times(&self) -> Vec<Duration> {
        self.lock().sent.iter().map(|sent| sent.at).collect()
    }

    /// When each call to this host (as in [`Sent::host`]) was sent.
    pub fn times_of(&self, host: &str) -> Vec<Duration> {
        self.lock().sent.iter().filter(|sent| sent.host == host).map(|sent| sent.at).collect()
    }

    /// How many calls are open: sent, and neither failed, given up, nor read to the end of the body.
    pub fn open(&self) -> usize {
        self.lock().open
    }

    /// The most calls that were ever open at one time.
    pub fn peak(&self) -> usize {
        self.lock().peak
    }

    /// From now on no clone gets ready, until [`release`](Self::release).
    pub fn hold(&self) {
        self.lock().readiness = Readiness::Held;
    }

    /// Every clone gets ready again, and those who wait for it are woken.
    pub fn release(&self) {
        self.set_readiness(Readiness::Ready);
    }

    /// From now on `poll_ready` fails.
    pub fn fail_ready(&self, message: &str) {
        self.set_readiness(Readiness::Failed(message.to_owned()));
    }

    fn set_readiness(&self, readiness: Readiness) {
        let waiting = {
            let mut shared = self.lock();
            shared.readiness = readiness;
            std::mem::take(&mut shared.waiting)
        };
        // Woken without the lock: a waker may poll at once.
        waiting.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }
}

/// A test's own panic must not hide behind a poisoned lock.
fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clone for Script {
    fn clone(&self) -> Self {
        // Readiness belongs to the instance that was polled, not to its clones.
        Self { shared: Arc::clone(&self.shared), ready: false }
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script").field("sent", &self.lock().sent).finish_non_exhaustive()
    }
}

impl<B> Service<Request<B>> for Script {
    type Response = Response<ScriptBody>;
    type Error = ScriptError;
    type Future = ScriptFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ScriptError>> {
        let mut shared = lock(&self.shared);
        match &shared.readiness {
            Readiness::Ready => {
                self.ready = true;
                Poll::Ready(Ok(()))
            }
            Readiness::Held => {
                shared.waiting.push(cx.waker().clone());
                Poll::Pending
            }
            Readiness::Failed(message) => Poll::Ready(Err(ScriptError(message.clone()))),
        }
    }

    fn call(&mut self, request: Request<B>) -> ScriptFuture {
        assert!(std::mem::take(&mut self.ready), "a service was called that was not polled ready");
        let open = Open::new(&self.shared);
        let mut shared = self.lock();
        let sent = Sent::new(shared.sent.len(), shared.origin.elapsed(), &request);
        let reply = (shared.answer)(&sent);
        shared.sent.push(sent);
        drop(shared);
        ScriptFuture(Box::pin(reply.play(open)))
    }
}

/// `Send` and `Sync`, so that a test can see whether the gate's own future is.
pub struct ScriptFuture(Pin<Box<dyn Future<Output = Result<Response<ScriptBody>, ScriptError>> + Send + Sync>>);

impl Future for ScriptFuture {
    type Output = Result<Response<ScriptBody>, ScriptError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

/// A transport error from the script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScriptError(pub String);

impl fmt::Display for ScriptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ScriptError {}

/// Counts one call as open for as long as it lives: in the future first, then in the body.
struct Open(Arc<Mutex<Shared>>);

impl Open {
    fn new(shared: &Arc<Mutex<Shared>>) -> Self {
        {
            let mut shared = lock(shared);
            shared.open += 1;
            shared.peak = shared.peak.max(shared.open);
        }
        Self(Arc::clone(shared))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        lock(&self.0).open -= 1;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The reply
// ---------------------------------------------------------------------------------------------------------------------

/// What the script answers to one call.
#[derive(Debug, Clone)]
pub struct Reply {
    latency: Duration,
    outcome: ReplyOutcome,
    status: StatusCode,
    headers: HeaderMap,
    extensions: Extensions,
    body: VecDeque<Step>,
}

#[derive(Debug, Clone)]
enum ReplyOutcome {
    Response,
    Error(String),
    Hang,
    Panic,
}

impl Reply {
    /// An empty 200, at once.
    pub fn ok() -> Self {
        Self::status(200)
    }

    /// An empty response with this status, at once.
    pub fn status(status: u16) -> Self {
        Self {
            latency: Duration::ZERO,
            outcome: ReplyOutcome::Response,
            status: StatusCode::from_u16(status).expect("a script names a valid status"),
            headers: HeaderMap::new(),
            extensions: Extensions::new(),
            body: VecDeque::new(),
        }
    }

    /// A transport error in place of a response.
    pub fn error(message: &str) -> Self {
        Self { outcome: ReplyOutcome::Error(message.to_owned()), ..Self::ok() }
    }

    /// No answer, ever.
    pub fn hang() -> Self {
        Self { outcome: ReplyOutcome::Hang, ..Self::ok() }
    }

    /// The inner future panics.
    pub fn panic() -> Self {
        Self { outcome: ReplyOutcome::Panic, ..Self::ok() }
    }

    /// The head (or the error) comes this long after the send.
    pub fn after(mut self, latency: Duration) -> Self {
        self.latency = latency;
        self
    }

    /// Adds a header; a second one of the same name is added beside the first.
    pub fn header(self, name: &str, value: &str) -> Self {
        self.header_bytes(name, value.as_bytes())
    }

    /// Adds a header whose value need not be text.
    pub fn header_bytes(mut self, name: &str, value: &[u8]) -> Self {
        let name: HeaderName = name.parse().expect("a script names a valid header");
        self.headers.append(name, HeaderValue::from_bytes(value).expect("a script names a valid header value"));
        self
    }

    /// Puts an extension into the response.
    pub fn extension<T: Clone + Send + Sync + 'static>(mut self, value: T) -> Self {
        self.extensions.insert(value);
        self
    }

    /// Adds a frame of data to the body.
    pub fn body(self, data: impl Into<Bytes>) -> Self {
        self.step(Step::Data(data.into()))
    }

    /// The body stays open this long before it goes on with what is added next, or ends.
    pub fn open_for(self, pause: Duration) -> Self {
        self.step(Step::Pause(pause))
    }

    /// The body never ends.
    pub fn open_for_ever(self) -> Self {
        self.step(Step::Hang)
    }

    /// Adds a trailer frame to the body.
    pub fn trailer(self, name: &'static str, value: &'static str) -> Self {
        let trailers = [(HeaderName::from_static(name), HeaderValue::from_static(value))];
        self.step(Step::Trailers(trailers.into_iter().collect()))
    }

    /// The body fails here.
    pub fn body_error(self, message: &str) -> Self {
        self.step(Step::Error(message.to_owned()))
    }

    fn step(mut self, step: Step) -> Self {
        self.body.push_back(step);
        self
    }

    async fn play(self, open: Open) -> Result<Response<ScriptBody>, ScriptError> {
        if !self.latency.is_zero() {
            sleep(self.latency).await;
        }
        match self.outcome {
            ReplyOutcome::Response => {}
            ReplyOutcome::Error(message) => return Err(ScriptError(message)),
            ReplyOutcome::Hang => std::future::pending().await,
            ReplyOutcome::Panic => panic!("the script says: panic"),
        }
        let mut body = ScriptBody { steps: self.body, pause: None, open: Some(open) };
        body.close_at_end();
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        *response.extensions_mut() = self.extensions;
        Ok(response)
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The body
// ---------------------------------------------------------------------------------------------------------------------

/// The body of a scripted response. The call counts as open until the last frame is out, an error, or the drop: as at a
/// real server, which is done when everything is sent, whether or not the client has looked for more.
#[derive(Default)]
pub struct ScriptBody {
    steps: VecDeque<Step>,
    pause: Option<Pin<Box<Sleep>>>,
    open: Option<Open>,
}

#[derive(Debug, Clone)]
enum Step {
    Data(Bytes),
    Trailers(HeaderMap),
    Pause(Duration),
    Error(String),
    Hang,
}

impl ScriptBody {
    fn close_at_end(&mut self) {
        if self.is_end_stream() {
            self.open = None;
        }
    }
}

impl fmt::Debug for ScriptBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptBody").field("steps", &self.steps).finish_non_exhaustive()
    }
}

impl Body for ScriptBody {
    type Data = Bytes;
    type Error = ScriptError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ScriptError>>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            let frame = match self.steps.pop_front() {
                Some(Step::Pause(pause)) => {
                    self.pause = Some(Box::pin(sleep(pause)));
                    continue;
                }
                Some(Step::Hang) => {
                    self.steps.push_front(Step::Hang);
                    return Poll::Pending;
                }
                Some(Step::Data(data)) => Some(Ok(Frame::data(data))),
                Some(Step::Trailers(trailers)) => Some(Ok(Frame::trailers(trailers))),
                Some(Step::Error(message)) => Some(Err(ScriptError(message))),
                None => None,
            };
            if !matches!(frame, Some(Ok(_))) {
                self.steps.clear();
            }
            self.close_at_end();
            return Poll::Ready(frame);
        }
    }

    fn is_end_stream(&self) -> bool {
        self.steps.is_empty() && self.pause.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let known = self.steps.iter().map(|step| if let Step::Data(data) = step { data.len() as u64 } else { 0 }).sum();
        if self.steps.iter().any(|step| matches!(step, Step::Error(_) | Step::Hang)) {
            // What an unfinished body promised is not ours to say.
            SizeHint::new()
        } else {
            SizeHint::with_exact(known)
        }
    }
}
