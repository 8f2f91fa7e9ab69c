//! A keyed limiter of `governor` as a layer: what one writes who wants a rate per host.

use std::future::{Ready, ready};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::Either;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use http::Request;
use http::uri::Authority;
use http_body_util::Empty;
use tower::{BoxError, Service};

use super::PER_SECOND;

#[derive(Clone)]
pub(crate) struct Governed<S> {
    inner: S,
    limiter: Arc<DefaultKeyedRateLimiter<String>>,
}

impl<S> Governed<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self { inner, limiter: Arc::new(RateLimiter::keyed(quota())) }
    }
}

pub(crate) fn quota() -> Quota {
    Quota::per_second(NonZeroU32::new(PER_SECOND).expect("more than none"))
}

impl<S> Service<Request<Empty<Bytes>>> for Governed<S>
where
    S: Service<Request<Empty<Bytes>>, Error = BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Either<S::Future, Ready<Result<S::Response, BoxError>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Empty<Bytes>>) -> Self::Future {
        // The cheapest key there is: neither the port nor upper case is taken care of.
        let host = request.uri().authority().map_or("", Authority::as_str).to_owned();
        match self.limiter.check_key(&host) {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(not_until) => Either::Right(ready(Err(not_until.to_string().into()))),
        }
    }
}
