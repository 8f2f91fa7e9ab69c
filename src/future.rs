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
use crate::gate::{Gate, Permit, Terms, Waiter};
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
        #[pin]
        state: State<S, B, S::Future>,
    }
}

pin_project! {
    #[project = StateProj]
    #[project_replace = Taken]
    enum State<S, B, F> {
        /// For the permit. Nothing of the inner service is reserved.
        Waiting { waiter: Box<Waiter>, unsent: Box<Unsent<S, B>> },
        /// For the inner service, with the permit in hand (none: ungated).
        Readying { permit: Option<Permit>, terms: Terms, unsent: Box<Unsent<S, B>> },
        /// For the response head.
        Calling { #[pin] future: F, permit: Option<Permit> },
        Failed { error: BoxError },
        Done,
    }
}

/// What is not sent yet: apart, so that the future of a request that need not wait is small.
struct Unsent<S, B> {
    inner: S,
    request: Request<B>,
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
{
    pub(crate) fn waiting(waiter: Box<Waiter>, inner: S, request: Request<B>) -> Self {
        Self { state: State::Waiting { waiter, unsent: Box::new(Unsent { inner, request }) } }
    }

    pub(crate) fn readying(permit: Option<Permit>, terms: Terms, inner: S, request: Request<B>) -> Self {
        Self { state: State::Readying { permit, terms, unsent: Box::new(Unsent { inner, request }) } }
    }

    pub(crate) fn failed(error: BoxError) -> Self {
        Self { state: State::Failed { error } }
    }

    #[inline]
    pub(crate) fn calling(future: S::Future, permit: Option<Permit>) -> Self {
        Self { state: State::Calling { future, permit } }
    }
}

impl<S, B, ResB> Future for ResponseFuture<S, B>
where
    S: Service<Request<B>, Response = Response<ResB>> + Clone,
    S::Error: Into<BoxError>,
    ResB: Body,
{
    type Output = Result<Response<ResponseBody<ResB>>, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            match state.as_mut().project() {
                StateProj::Waiting { waiter, .. } => {
                    let admitted = ready!(waiter.poll_admit(cx));
                    let Taken::Waiting { waiter, unsent } = state.as_mut().project_replace(State::Done) else {
                        unreachable!("the state was just looked at");
                    };
                    match admitted {
                        Ok(permit) => {
                            let terms = *waiter.terms();
                            state.set(State::Readying { permit: Some(permit), terms, unsent });
                        }
                        Err(error) => return Poll::Ready(shed(waiter.gate(), error)),
                    }
                }
                StateProj::Readying { unsent, .. } => {
                    let readied = ready!(unsent.inner.poll_ready(cx));
                    let Taken::Readying { mut permit, terms, mut unsent } = state.as_mut().project_replace(State::Done)
                    else {
                        unreachable!("the state was just looked at");
                    };
                    readied.map_err(Into::into)?;
                    match permit.as_mut().map_or(Ok(()), |permit| permit.send(true, &terms)) {
                        Ok(()) => {
                            let Unsent { mut inner, mut request } = *unsent;
                            extensions::mark_sent(&mut request, permit.as_ref());
                            state.set(State::Calling { future: inner.call(request), permit });
                        }
                        Err(waiter) => {
                            // The readied instance goes, so that whatever it has reserved is free while we wait.
                            let fresh = unsent.inner.clone();
                            drop(mem::replace(&mut unsent.inner, fresh));
                            state.set(State::Waiting { waiter, unsent });
                        }
                    }
                }
                // The inner future goes with this one, not before the gate has heard of a refusal: what it frees may set
                // off the next send.
                StateProj::Calling { future, permit } => {
                    return match future.poll(cx) {
                        Poll::Pending => Poll::Pending,
                        Poll::Ready(Ok(response)) => Poll::Ready(Ok(pass(permit.take(), response))),
                        Poll::Ready(Err(error)) => {
                            *permit = None;
                            Poll::Ready(Err(error.into()))
                        }
                    };
                }
                StateProj::Failed { .. } => {
                    let Taken::Failed { error } = state.as_mut().project_replace(State::Done) else {
                        unreachable!("the state was just looked at");
                    };
                    return Poll::Ready(Err(error));
                }
                StateProj::Done => panic!("a response future was polled after it had completed"),
            }
        }
    }
}

/// What becomes of a response: its head is judged, its body carries the permit on.
#[inline]
fn pass<ResB: Body>(mut permit: Option<Permit>, mut response: Response<ResB>) -> Response<ResponseBody<ResB>> {
    if let Some(held) = &mut permit {
        let throttled = settle(held, &response);
        // A refusal gives its permit back at the head: whoever reads its body is not in anybody's way.
        let over = throttled.is_some()
            || held.until() == PermitUntil::Head
            || matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
            || response.body().is_end_stream();
        if let Some(throttled) = throttled {
            response.extensions_mut().insert(throttled);
        }
        if over {
            permit = None;
        } else {
            held.head_arrived();
        }
    }
    response.map(|body| ResponseBody::new(body, permit))
}

fn settle<ResB>(permit: &mut Permit, response: &Response<ResB>) -> Option<Throttled> {
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
        let (state, permit) = match &self.state {
            State::Waiting { .. } => ("waiting", None),
            State::Readying { permit, .. } => ("readying", permit.as_ref()),
            State::Calling { permit, .. } => ("calling", permit.as_ref()),
            State::Failed { .. } => ("failed", None),
            State::Done => ("done", None),
        };
        f.debug_struct("ResponseFuture").field("state", &state).field("permit", &permit).finish()
    }
}
