//! [`HostGate`]: the service around a client.

use std::task::{Context, Poll, Waker};
use std::{fmt, mem};

use http::{Request, Response};
use tower_service::Service;

use crate::body::ResponseBody;
use crate::extensions;
use crate::future::{BoxError, ResponseFuture};
use crate::gate::{Handle, Permit};

/// A client service behind a gate. Made by [`HostGateLayer`](crate::HostGateLayer).
///
/// `poll_ready` is always ready: a request acquires its host's permit first, in its own future, and only then readies its
/// own clone of the inner service. So a host that is held back never keeps another one waiting, and nothing of the inner
/// service is reserved while a request waits. A limit over all hosts therefore belongs *below* the gate.
///
/// # Errors
///
/// [`RateLimited`](crate::RateLimited) when the request is shed, else the inner service's own errors, untouched; both
/// in a box that downcasts.
///
/// # Cancel safety
///
/// Dropping the future or the response body at any moment leaves nothing behind: no permit, no booking, no place in the
/// queue. A request that was handed to the inner service counts as sent, even if its future is never polled. A future that is never polled holds no place in the queue, but it may hold a permit until it is dropped: at a
/// concurrency of one, and at any on a host that has refused lately, that keeps the host waiting.
///
/// # Examples
///
/// ```
/// use tower::{Layer, ServiceExt};
/// use tower_host_gate::{HostGate, HostGateLayer};
/// # use std::convert::Infallible;
/// # use http::{Request, Response};
/// # async fn fetch(_: Request<String>) -> Result<Response<String>, Infallible> { Ok(Response::default()) }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower::BoxError> {
///
/// let client: HostGate<_> = HostGateLayer::new().layer(tower::service_fn(fetch));
/// let request = Request::get("https://example.com/").body(String::new())?;
/// assert_eq!(client.clone().oneshot(request).await?.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct HostGate<S> {
    inner: S,
    gate: Handle,
}

impl<S> HostGate<S> {
    pub(crate) fn new(inner: S, gate: Handle) -> Self {
        Self { inner, gate }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Takes the gate off.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, B, ResB> Service<Request<B>> for HostGate<S>
where
    S: Service<Request<B>, Response = Response<ResB>> + Clone,
    S::Error: Into<BoxError>,
    ResB: http_body::Body,
{
    type Response = Response<ResponseBody<ResB>>;
    type Error = BoxError;
    type Future = ResponseFuture<S, B>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    // The way of nearly every request. What is rarer goes by functions of its own, so that a request and a future are not
    // copied about on this one.
    #[inline]
    fn call(&mut self, request: Request<B>) -> Self::Future {
        let Some(mut permit) = self.gate.enter_plainly(&request) else {
            return self.call_anyhow(request);
        };
        let ready = self.inner.poll_ready(&mut Context::from_waker(Waker::noop()));
        if !matches!(ready, Poll::Ready(Ok(()))) || !permit.send_plainly() {
            return self.call_with(Some(Permit::Plain(permit)), ready, request);
        }
        ResponseFuture::calling(self.inner.call(request), Some(Permit::Plain(permit)))
    }
}

impl<S> HostGate<S> {
    #[inline(never)]
    fn call_anyhow<B>(&mut self, request: Request<B>) -> ResponseFuture<S, B>
    where
        S: Service<Request<B>> + Clone,
        S::Error: Into<BoxError>,
    {
        match self.gate.enter(&request) {
            Ok(permit) => {
                let ready = self.inner.poll_ready(&mut Context::from_waker(Waker::noop()));
                self.call_with(permit, ready, request)
            }
            Err(waiter) => ResponseFuture::waiting(waiter, self.inner.clone(), request),
        }
    }

    #[inline(never)]
    fn call_with<B>(
        &mut self,
        mut permit: Option<Permit>,
        ready: Poll<Result<(), S::Error>>,
        mut request: Request<B>,
    ) -> ResponseFuture<S, B>
    where
        S: Service<Request<B>> + Clone,
        S::Error: Into<BoxError>,
    {
        match ready {
            Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(error)) => return ResponseFuture::failed(error.into()),
            // The future owns the polled instance: left in place it would keep whatever it has reserved for ever.
            Poll::Pending => {
                let terms = extensions::terms(&request);
                return ResponseFuture::readying(permit, terms, self.take_inner(), request);
            }
        }
        if let Some(permit) = &mut permit {
            if let Err(waiter) = permit.send(|| extensions::terms(&request)) {
                // Its host was held in between, on another thread: the readied instance goes.
                drop(self.take_inner());
                return ResponseFuture::waiting(waiter, self.inner.clone(), request);
            }
        }
        extensions::mark_sent(&mut request, permit.as_ref());
        ResponseFuture::calling(self.inner.call(request), permit)
    }

    fn take_inner(&mut self) -> S
    where
        S: Clone,
    {
        let fresh = self.inner.clone();
        mem::replace(&mut self.inner, fresh)
    }
}

impl<S: fmt::Debug> fmt::Debug for HostGate<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostGate").field("inner", &self.inner).finish_non_exhaustive()
    }
}
