//! `reqwest-ratelimit` in a chain of `reqwest-middleware`. The last link answers, so no request leaves the chain.
//!
//! Its limiter is not told the request, so it can only be one for all hosts.

use std::future::{Future, ready};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_util::future::BoxFuture;
use governor::DefaultDirectRateLimiter;
use http::{Extensions, Method, Uri};
use reqwest::{Body, Client, Request, Response};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Next, Result};
use reqwest_ratelimit::RateLimiter;

use super::governed::quota;
use super::server::Answered;
use super::{Answer, Lane, more};

/// The name of the peer that is the last link alone.
pub(crate) const BARE: &str = "bare reqwest";

pub(crate) fn bare(answer: Answer) -> Box<dyn Lane> {
    Box::new(Queue::new(answer, Last::new(answer)))
}

pub(crate) fn limited(answer: Answer) -> Box<dyn Lane> {
    let limiter = Limiter(DefaultDirectRateLimiter::direct(quota()));
    let client = ClientBuilder::new(Client::new()).with(reqwest_ratelimit::all(limiter)).with(Last::new(answer).link());
    let client = client.build();
    Box::new(Queue::new(answer, client))
}

struct Limiter(DefaultDirectRateLimiter);

impl RateLimiter for Limiter {
    async fn acquire_permit(&self) {
        self.0.until_ready().await;
    }
}

trait Chain: Clone + Send + 'static {
    fn execute(&self, request: Request) -> impl Future<Output = Result<Response>>;
}

impl Chain for ClientWithMiddleware {
    fn execute(&self, request: Request) -> impl Future<Output = Result<Response>> {
        Self::execute(self, request)
    }
}

#[derive(Clone)]
struct Last(Arc<Answered>);

impl Last {
    fn new(answer: Answer) -> Self {
        Self(Arc::new(Answered::new(answer)))
    }

    fn answer(&self) -> Response {
        self.0.copy().map(Body::wrap).into()
    }

    fn link(self) -> impl for<'a> Fn(Request, &'a mut Extensions, Next<'a>) -> BoxFuture<'a, Result<Response>> {
        move |_, _, _| Box::pin(ready(Ok(self.answer())))
    }
}

impl Chain for Last {
    fn execute(&self, request: Request) -> impl Future<Output = Result<Response>> {
        drop(request);
        ready(Ok(self.answer()))
    }
}

struct Queue<C> {
    chain: C,
    requests: Vec<Request>,
    reads: bool,
}

impl<C> Queue<C> {
    fn new(answer: Answer, chain: C) -> Self {
        Self { chain, requests: Vec::new(), reads: answer == Answer::Body }
    }
}

impl<C: Chain> Lane for Queue<C> {
    fn load(&mut self, uris: &[Uri]) {
        let urls = uris.iter().map(|uri| uri.to_string().parse().expect("a URL"));
        self.requests.extend(urls.map(|url| Request::new(Method::GET, url)));
    }

    fn send(&mut self) {
        let cx = &mut Context::from_waker(Waker::noop());
        for request in self.requests.drain(..) {
            let Poll::Ready(Ok(response)) = pin!(self.chain.execute(request)).poll(cx) else {
                panic!("no response at once");
            };
            if self.reads {
                let mut body = Body::from(response);
                while more(&mut body, cx) {}
            }
        }
    }

    fn split(&self) -> Option<Box<dyn Lane>> {
        Some(Box::new(Self { chain: self.chain.clone(), requests: Vec::new(), ..*self }))
    }
}
