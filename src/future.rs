//! [`ResponseFuture`]: one request's way through gate, inner service and verdict.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::{fmt, mem};

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::body::ResponseBody;
use crate::config::{OnShed, PermitUntil};
use crate::error::{RateLimited, Shed, Throttled};
use crate::extensions;
use crate::gate::{Gate, Permit, Terms, Told, Waiter};
use crate::verdict::Outcome;

/// The error type of a gated service: tower's own.
pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

pin_project! {
    /// The future of a [`HostGate`](crate::HostGate).
    ///
    /// Waits for a permit, readies the inner service, calls it, and reports what the response head means.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment it leaves nothing behind.
    ///
    /// ```
    /// use tower::{Layer, Service};
    /// use tower_host_gate::{HostGateLayer, ResponseFuture};
    /// # use std::convert::Infallible;
    /// # use http::{Request, Response};
    /// # async fn fetch(_: Request<String>) -> Result<Response<String>, Infallible> { Ok(Response::default()) }
    ///
    /// let layer = HostGateLayer::new();
    /// let mut client = layer.layer(tower::service_fn(fetch));
    /// let future: ResponseFuture<_, _> = client.call(Request::get("https://example.com/").body(String::new())?);
    /// assert_eq!(layer.hosts().get("example.com").unwrap().in_flight, 1);
    /// drop(future);
    /// assert!(layer.hosts().get("example.com").is_none());
    /// # Ok::<(), http::Error>(())
    /// ```
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        // For the response head.
        #[pin]
        calling: Option<S::Future>,
        // `None`: ungated.
        permit: Option<Permit>,
        // Apart, so that the future of a request that need not wait is small.
        before: Option<Box<Before<S, B>>>,
    }
}

/// What comes before the call.
enum Before<S, B> {
    /// For the permit. Nothing of the inner service is reserved.
    Waiting {
        waiter: Box<Waiter>,
        inner: S,
        request: Request<B>,
    },
    /// For the inner service, with the permit in hand.
    Readying {
        terms: Terms,
        inner: S,
        request: Request<B>,
    },
    Failed {
        error: BoxError,
    },
    Over,
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
{
    pub(crate) fn waiting(waiter: Box<Waiter>, inner: S, request: Request<B>) -> Self {
        Self::before(None, Before::Waiting { waiter, inner, request })
    }

    pub(crate) fn readying(permit: Option<Permit>, terms: Terms, inner: S, request: Request<B>) -> Self {
        Self::before(permit, Before::Readying { terms, inner, request })
    }

    pub(crate) fn failed(error: BoxError) -> Self {
        Self::before(None, Before::Failed { error })
    }

    fn before(permit: Option<Permit>, before: Before<S, B>) -> Self {
        Self { calling: None, permit, before: Some(Box::new(before)) }
    }

    #[inline]
    pub(crate) fn calling(future: S::Future, permit: Option<Permit>) -> Self {
        Self { calling: Some(future), permit, before: None }
    }
}

impl<S, B, ResB> Future for ResponseFuture<S, B>
where
    S: Service<Request<B>, Response = Response<ResB>> + Clone,
    S::Error: Into<BoxError>,
    ResB: Body,
{
    type Output = Result<Response<ResponseBody<ResB>>, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if this.calling.is_none() {
            let Some(before) = this.before else { unreachable!("a future is before its call or in it") };
            match ready!(before.poll(cx, this.permit)) {
                Ok(future) => {
                    *this.before = None;
                    this.calling.set(Some(future));
                }
                Err(end) => return Poll::Ready(end),
            }
        }
        let Some(future) = this.calling.as_pin_mut() else { unreachable!("it was called just now") };
        // The inner future goes with this one, not before the gate has heard of a refusal: what it frees may set off the
        // next send.
        match ready!(future.poll(cx)) {
            Ok(response) => Poll::Ready(Ok(pass(this.permit.take(), response))),
            Err(error) => {
                *this.permit = None;
                Poll::Ready(Err(error.into()))
            }
        }
    }
}

impl<S, B> Before<S, B> {
    /// The call, or the end of the request without one.
    #[expect(clippy::type_complexity, reason = "the end is the future's own output")]
    fn poll<ResB>(
        &mut self,
        cx: &mut Context<'_>,
        permit: &mut Option<Permit>,
    ) -> Poll<Result<S::Future, Result<Response<ResponseBody<ResB>>, BoxError>>>
    where
        S: Service<Request<B>> + Clone,
        S::Error: Into<BoxError>,
    {
        loop {
            match self {
                Self::Waiting { waiter, .. } => {
                    let admitted = ready!(waiter.poll_admit(cx));
                    let Self::Waiting { waiter, inner, request } = mem::replace(self, Self::Over) else {
                        unreachable!("the state was just looked at");
                    };
                    match admitted {
                        Ok(admitted) => {
                            *permit = Some(admitted);
                            *self = Self::Readying { terms: *waiter.terms(), inner, request };
                        }
                        Err(error) => return Poll::Ready(Err(shed(waiter.gate(), error))),
                    }
                }
                Self::Readying { inner, .. } => {
                    let readied = ready!(inner.poll_ready(cx));
                    let Self::Readying { terms, mut inner, mut request } = mem::replace(self, Self::Over) else {
                        unreachable!("the state was just looked at");
                    };
                    if let Err(error) = readied {
                        *permit = None;
                        return Poll::Ready(Err(Err(error.into())));
                    }
                    match permit.as_mut().map_or(Ok(()), |permit| permit.send(|| terms)) {
                        Ok(()) => {
                            extensions::mark_sent(&mut request, permit.as_ref());
                            return Poll::Ready(Ok(inner.call(request)));
                        }
                        Err(waiter) => {
                            *permit = None;
                            // The readied instance goes, so that whatever it has reserved is free while we wait.
                            let fresh = inner.clone();
                            drop(inner);
                            *self = Self::Waiting { waiter, inner: fresh, request };
                        }
                    }
                }
                Self::Failed { .. } => {
                    let Self::Failed { error } = mem::replace(self, Self::Over) else {
                        unreachable!("the state was just looked at");
                    };
                    return Poll::Ready(Err(Err(error)));
                }
                Self::Over => panic!("a response future was polled after it had completed"),
            }
        }
    }
}

/// What becomes of a response: its head is judged, its body carries the permit on.
#[inline]
fn pass<ResB: Body>(permit: Option<Permit>, mut response: Response<ResB>) -> Response<ResponseBody<ResB>> {
    let kept = permit.and_then(|permit| keep(permit, &mut response));
    response.map(|body| ResponseBody::new(body, kept))
}

/// The permit, if the body is to carry it.
#[inline]
fn keep<ResB: Body>(permit: Permit, response: &mut Response<ResB>) -> Option<Permit> {
    match permit {
        // Nearly every response.
        Permit::Plain(mut permit) if permit.says_nothing(response.status(), response.headers()) => {
            if is_over(permit.until(), response) {
                return None;
            }
            permit.head_arrived();
            Some(Permit::Plain(permit))
        }
        permit => settle(permit, response),
    }
}

#[inline(never)]
fn settle<ResB: Body>(mut permit: Permit, response: &mut Response<ResB>) -> Option<Permit> {
    let throttled = permit.told().and_then(|permit| judge(permit, response));
    // A refusal gives its permit back at the head: whoever reads its body is not in anybody's way.
    let over = throttled.is_some() || is_over(permit.until(), response);
    if let Some(throttled) = throttled {
        response.extensions_mut().insert(throttled);
    }
    if over {
        return None;
    }
    permit.head_arrived();
    Some(permit)
}

/// Whether the permit goes back with the head.
#[inline]
fn is_over<ResB: Body>(until: PermitUntil, response: &Response<ResB>) -> bool {
    until == PermitUntil::Head
        || matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        || response.body().is_end_stream()
}

fn judge<ResB>(permit: &mut Told, response: &Response<ResB>) -> Option<Throttled> {
    let (status, headers, extensions) = (response.status(), response.headers(), response.extensions());
    let elsewhere = permit.gate().final_host(|| permit.key(), extensions);
    if elsewhere.is_some() {
        // The host that was asked has answered too: with a redirect, whose headers nobody has.
        permit.settle(None, Outcome::Success, status, &HeaderMap::new());
    }
    let outcome = permit.gate().judge(|| elsewhere.clone().or_else(|| permit.key()), status, headers, extensions);
    permit.settle(elsewhere.as_ref(), outcome, status, headers)
}

fn shed<ResB>(gate: &Gate, error: RateLimited) -> Result<Response<ResponseBody<ResB>>, BoxError> {
    if gate.config.on_shed == OnShed::Error {
        return Err(error.into());
    }
    let mut response = Response::new(ResponseBody::default());
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(error.retry_after_secs()));
    response.extensions_mut().insert(Shed(error));
    Ok(response)
}

impl<S, B> fmt::Debug for ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.before.as_deref() {
            None => "calling",
            Some(Before::Waiting { .. }) => "waiting",
            Some(Before::Readying { .. }) => "readying",
            Some(Before::Failed { .. }) => "failed",
            Some(Before::Over) => "done",
        };
        f.debug_struct("ResponseFuture").field("state", &state).field("permit", &self.permit).finish()
    }
}
