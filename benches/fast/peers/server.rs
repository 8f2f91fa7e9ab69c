//! The client at the end of every chain.

use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, header};
use http_body_util::{Empty, Full};
use tower::{BoxError, Service};

/// What every request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// No headers, no body.
    Empty,
    /// Ten headers none of which tells of a limit.
    TenHeaders,
    /// A body that is read.
    Body,
}

/// An answer made once, to be copied for every request.
pub(crate) struct Answered {
    headers: HeaderMap,
    body: Full<Bytes>,
}

impl Answered {
    pub(crate) fn new(answer: Answer) -> Self {
        let (mut headers, mut body) = (HeaderMap::new(), Full::default());
        match answer {
            Answer::Empty => {}
            Answer::TenHeaders => headers = ordinary_headers(),
            Answer::Body => body = Full::from("<rss version=\"2.0\"/>"),
        }
        Self { headers, body }
    }

    pub(crate) fn copy(&self) -> Response<Full<Bytes>> {
        let mut response = Response::new(self.body.clone());
        if !self.headers.is_empty() {
            *response.headers_mut() = self.headers.clone();
        }
        response
    }
}

/// Always ready, answers at once, always the same. A clone is one count more, as of any client.
#[derive(Clone)]
pub(crate) struct Server {
    response: Arc<Answered>,
}

impl Server {
    pub(crate) fn new(answer: Answer) -> Self {
        Self { response: Arc::new(Answered::new(answer)) }
    }
}

impl Service<Request<Empty<Bytes>>> for Server {
    type Response = Response<Full<Bytes>>;
    type Error = BoxError;
    type Future = Ready<Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Empty<Bytes>>) -> Self::Future {
        drop(request);
        ready(Ok(self.response.copy()))
    }
}

fn ordinary_headers() -> HeaderMap {
    const HEADERS: [(HeaderName, &str); 10] = [
        (header::SERVER, "nginx"),
        (header::DATE, "Tue, 15 Nov 1994 08:12:31 GMT"),
        (header::CONTENT_TYPE, "application/rss+xml; charset=utf-8"),
        (header::CONTENT_LENGTH, "20"),
        (header::LAST_MODIFIED, "Tue, 15 Nov 1994 08:00:00 GMT"),
        (header::ETAG, "\"5f3a-1c2d\""),
        (header::CACHE_CONTROL, "max-age=300, public"),
        (header::VARY, "accept-encoding"),
        (header::ACCEPT_RANGES, "bytes"),
        (header::STRICT_TRANSPORT_SECURITY, "max-age=31536000"),
    ];
    HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value))).into_iter().collect()
}
