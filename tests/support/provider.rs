//! A hyper server on loopback whose handler is the test's own, and which keeps a record of what it was asked.

use std::convert::Infallible;
use std::future::ready;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Method, Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tower::BoxError;

/// How long connections may take to finish after the stop, before they are cut.
const GRACE: Duration = Duration::from_secs(1);

/// One request, as the server saw it.
#[derive(Debug, Clone)]
pub struct Hit {
    pub at: Instant,
    pub method: Method,
    pub path: String,
    pub version: Version,
    /// The status of the answer, once there is one.
    pub status: Option<StatusCode>,
}

/// The server. It speaks HTTP/1.1 and HTTP/2 on the same port, and stops when dropped.
#[derive(Debug)]
pub struct Provider {
    addr: SocketAddr,
    record: Arc<Mutex<Record>>,
    certificate: Option<CertificateDer<'static>>,
    stop: Option<oneshot::Sender<()>>,
    accepting: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Record {
    hits: Vec<Hit>,
    open: usize,
    peak: usize,
}

impl Provider {
    /// Answers the n-th request (0 is the first) with what `handler` makes of it.
    pub async fn start<H, B>(handler: H) -> Self
    where
        H: Fn(usize, Request<Incoming>) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self::serve(erased(move |n, request| ready(handler(n, request))), None).await
    }

    /// Like [`start`](Self::start), with a handler that takes its time.
    pub async fn start_async<H, F, B>(handler: H) -> Self
    where
        H: Fn(usize, Request<Incoming>) -> F + Send + Sync + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self::serve(erased(handler), None).await
    }

    /// Like [`start`](Self::start), over TLS with a certificate made for this server.
    pub async fn start_tls<H, B>(handler: H) -> Self
    where
        H: Fn(usize, Request<Incoming>) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self::serve(erased(move |n, request| ready(handler(n, request))), Some(Tls::self_signed())).await
    }

    async fn serve(handler: Arc<Handler>, tls: Option<Tls>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a loopback port");
        let addr = listener.local_addr().expect("a bound address");
        let record = Arc::default();
        let (stop, stopped) = oneshot::channel();
        let (certificate, acceptor) = tls.map(|tls| (tls.certificate, tls.acceptor)).unzip();
        let accepting = tokio::spawn(accept(listener, acceptor, Arc::clone(&record), handler, stopped));
        Self { addr, record, certificate, stop: Some(stop), accepting }
    }

    /// `127.0.0.1:port`.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The address of this path (which begins with a slash) on this server.
    pub fn url(&self, path: &str) -> String {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        format!("{scheme}://{}{path}", self.addr)
    }

    /// What a client must trust.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        self.certificate.as_ref().expect("only a server started with TLS has a certificate")
    }

    /// Every request so far, in the order they came.
    pub fn hits(&self) -> Vec<Hit> {
        lock(&self.record).hits.clone()
    }

    /// How many requests got this status so far.
    pub fn count(&self, status: u16) -> usize {
        lock(&self.record).hits.iter().filter(|hit| hit.status.is_some_and(|got| got == status)).count()
    }

    /// How many requests are open: come in, and not yet answered to the end of the body.
    pub fn open(&self) -> usize {
        lock(&self.record).open
    }

    /// The most requests that were ever open at one time.
    pub fn peak(&self) -> usize {
        lock(&self.record).peak
    }

    /// Stops, and waits until every connection is closed.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        (&mut self.accepting).await.expect("the accepting task runs to its end");
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        // The accepting task sees this, closes the listener at once, and gives open connections their grace.
        drop(self.stop.take());
    }
}

fn lock(record: &Mutex<Record>) -> MutexGuard<'_, Record> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The test's handler without its types, so that the server below is compiled only once.
type Handler = dyn Fn(usize, Request<Incoming>) -> BoxFuture<'static, Response<AnyBody>> + Send + Sync;
type AnyBody = UnsyncBoxBody<Bytes, BoxError>;

fn erased<H, F, B>(handler: H) -> Arc<Handler>
where
    H: Fn(usize, Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    Arc::new(move |n, request| {
        let answer = handler(n, request);
        Box::pin(async move { answer.await.map(|body| body.map_err(Into::into).boxed_unsync()) })
    })
}

async fn accept(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    record: Arc<Mutex<Record>>,
    handler: Arc<Handler>,
    mut stopped: oneshot::Receiver<()>,
) {
    let graceful = GracefulShutdown::new();
    // Aborts what is left when this function ends.
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted.expect("accepting on loopback").0,
            _ = &mut stopped => break,
        };
        // Else Nagle's algorithm and delayed acknowledgements hold the last packet of a response for 40 ms.
        stream.set_nodelay(true).expect("a TCP option");
        let (watcher, tls, record, handler) =
            (graceful.watcher(), tls.clone(), Arc::clone(&record), Arc::clone(&handler));
        connections.spawn(async move {
            match tls {
                None => serve(stream, watcher, record, handler).await,
                Some(tls) => {
                    // A client that does not like the certificate is that client's error.
                    if let Ok(stream) = tls.accept(stream).await {
                        serve(stream, watcher, record, handler).await;
                    }
                }
            }
        });
    }
    drop(listener);
    let _ = timeout(GRACE, graceful.shutdown()).await;
}

async fn serve<IO>(io: IO, watcher: Watcher, record: Arc<Mutex<Record>>, handler: Arc<Handler>)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let open = Open::new(&record, &request);
        let answer = handler(open.n, request);
        async move {
            let response = answer.await;
            open.answered(response.status());
            Ok::<_, Infallible>(response.map(|body| Counted::new(body, open)))
        }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let connection = server.serve_connection(TokioIo::new(io), service).into_owned();
    // A connection that the client cut short is no failure of the server.
    let _ = watcher.watch(connection).await;
}

/// Counts one request as open for as long as it lives: in the handler first, then in the body.
struct Open {
    n: usize,
    record: Arc<Mutex<Record>>,
}

impl Open {
    fn new(record: &Arc<Mutex<Record>>, request: &Request<Incoming>) -> Self {
        let mut locked = lock(record);
        let n = locked.hits.len();
        locked.hits.push(Hit {
            at: Instant::now(),
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            version: request.version(),
            status: None,
        });
        locked.open += 1;
        locked.peak = locked.peak.max(locked.open);
        drop(locked);
        Self { n, record: Arc::clone(record) }
    }

    fn answered(&self, status: StatusCode) {
        lock(&self.record).hits[self.n].status = Some(status);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        lock(&self.record).open -= 1;
    }
}

/// A body that counts as open until its last frame is handed to the connection, or until it is dropped.
struct Counted {
    body: AnyBody,
    open: Option<Open>,
}

impl Counted {
    fn new(body: AnyBody, open: Open) -> Self {
        let mut counted = Self { body, open: Some(open) };
        counted.close_at_end();
        counted
    }

    /// Closes before the last bytes reach the wire: a client that asks again at once must not be counted twice.
    fn close_at_end(&mut self) {
        if self.body.is_end_stream() {
            self.open = None;
        }
    }
}

impl Body for Counted {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) {
            self.open = None;
        }
        self.close_at_end();
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct Tls {
    certificate: CertificateDer<'static>,
    acceptor: TlsAcceptor,
}

impl Tls {
    fn self_signed() -> Self {
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let made = rcgen::generate_simple_self_signed(names).expect("a self-signed certificate");
        let certificate = made.cert.der().clone();
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let mut config = ServerConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .expect("ring supports the default protocol versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], key)
            .expect("the key belongs to the certificate");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Self { certificate, acceptor: TlsAcceptor::from(Arc::new(config)) }
    }
}
