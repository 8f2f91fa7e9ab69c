//! A gate per host written without a thought for what it costs: a map behind one lock, a key formatted for every
//! request, and a permit that owns its semaphore.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::uri::Scheme;
use http::{Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Empty;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::{BoxError, Service};

#[derive(Clone)]
pub(crate) struct Naive<S> {
    inner: S,
    hosts: Arc<Mutex<HashMap<String, Arc<Semaphore>>>>,
}

impl<S> Naive<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self { inner, hosts: Arc::default() }
    }

    fn semaphore(&self, uri: &Uri) -> Arc<Semaphore> {
        let host = uri.host().unwrap_or_default().to_ascii_lowercase();
        let default = if uri.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
        let key = format!("{host}:{}", uri.port_u16().unwrap_or(default));
        let mut hosts = self.hosts.lock().expect("nothing panics under the lock");
        hosts.entry(key).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
    }
}

impl<S, B> Service<Request<Empty<Bytes>>> for Naive<S>
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error = BoxError> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Held<B>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Empty<Bytes>>) -> Self::Future {
        let semaphore = self.semaphore(request.uri());
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(async move {
            let permit = semaphore.acquire_owned().await?;
            let response = inner.call(request).await?;
            Ok(response.map(|body| Held { body, _permit: permit }))
        })
    }
}

/// A response body and the permit of its request.
pub(crate) struct Held<B> {
    body: B,
    _permit: OwnedSemaphorePermit,
}

impl<B: Body + Unpin> Body for Held<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
