//! A [tower] layer that keeps an HTTP client polite.
//!
//! One shared gate per host, for every clone of the client: a permit, a cooldown that all siblings respect when a
//! response says 403, 429 or 503, spaced sends while the host is touchy, one bounded wait, and past it a structured
//! error that says when to come back. A host that never throttles pays nothing.
//!
//! ```
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_host_gate::{HostGateLayer, RateLimited};
//! # use std::convert::Infallible;
//! # use http::{Request, Response};
//! # async fn fetch(_: Request<String>) -> Result<Response<String>, Infallible> { Ok(Response::default()) }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!
//! // Once per program; clones of `client` share the gate.
//! let mut client = ServiceBuilder::new()
//!     .layer(HostGateLayer::new())
//!     .service_fn(fetch); // any Service<http::Request<B>> + Clone
//!
//! let request = Request::get("https://example.com/feed.xml").body(String::new())?;
//! match client.ready().await?.call(request).await {
//!     Ok(response) => println!("{}", response.status()),
//!     Err(error) => match RateLimited::find(&*error) {
//!         Some(limited) => println!("{} again in {:?}", limited.host(), limited.retry_after()),
//!         None => return Err(error),
//!     },
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # The way of a request
//!
//! request → [host key](Keying) → queue, permit, pacing, or [shed](RateLimited) → ready the inner service → send →
//! [verdict](Verdict) on the response head → the gate learns → the [body](ResponseBody) carries the permit → its end
//! gives the permit back and wakes the next waiter.
//!
//! # Where to put what
//!
//! Outermost first: cache, redirect, [`GateRetry`](retry::GateRetry), the gate,
//! [`InFlightRetry`](retry::InFlightRetry), a timeout for the send alone, a limit over all hosts, the client. A timeout
//! outside the gate counts the wait, one inside counts the send only.
//!
//! # Across processes
//!
//! Replicas with a gate each are as many times too fast as there are replicas. With the feature `redis`,
//! `HostGateLayer::shared` keeps the state of every host in Redis or Valkey; see the module `shared`.
//!
//! [tower]: https://docs.rs/tower

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod body;
mod config;
mod error;
mod extensions;
#[cfg(feature = "tower-http")]
pub mod final_uri;
mod future;
mod gate;
mod host;
mod hosts;
mod layer;
pub mod observe;
mod pace;
#[cfg(feature = "retry")]
pub mod retry;
mod service;
#[cfg(feature = "redis")]
pub mod shared;
mod state;
mod verdict;

pub use body::ResponseBody;
pub use config::{ConfigError, Limits, OnShed, PermitUntil};
pub use error::{RateLimited, Reason, Shed, Throttled};
pub use extensions::MaxWait;
pub use future::ResponseFuture;
#[cfg(host_gate_loom)]
#[doc(hidden)]
pub use gate::model;
pub use host::{By, HostKey, InvalidHost, Keying};
pub use hosts::{HostSnapshot, Hosts, Permit};
pub use layer::HostGateLayer;
pub use observe::{Label, Observer};
pub use pace::{DelayFrom, Pacing};
pub use service::HostGate;
#[cfg(feature = "redis")]
pub use shared::{Queue, Redis};
pub use state::HostsState;
pub use verdict::{Outcome, RetryAfterUnit, Verdict};

/// The README's code, compiled.
#[cfg(all(doctest, feature = "tower-http"))]
#[doc = include_str!("../README.md")]
struct Readme;
