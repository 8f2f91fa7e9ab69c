//! What one can wait in line for: a permit of the gate or of `tokio`'s semaphore, each by itself and in front of a client.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{Empty, Full};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::{Layer, Service};
use tower_host_gate::{HostGate, HostGateLayer, Hosts, Permit, ResponseBody};

use crate::peers::{self, Answer, Server};

/// Nobody is to be shed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(365 * 86_400);

/// A line for a few permits. Clones stand in the same one.
pub(crate) trait Line: Clone + Send + 'static {
    type Permit: Send;

    fn new(permits: usize) -> Self;

    fn take(&mut self) -> impl Future<Output = Self::Permit> + Send;
}

pub(crate) fn layer(permits: usize) -> HostGateLayer {
    HostGateLayer::new().concurrency(permits).max_queue(0).max_wait(PATIENCE)
}

#[derive(Clone)]
pub(crate) struct Gate {
    hosts: Hosts,
    uri: Uri,
}

impl Line for Gate {
    type Permit = Permit;

    fn new(permits: usize) -> Self {
        Self { hosts: layer(permits).hosts(), uri: peers::uri(0) }
    }

    async fn take(&mut self) -> Permit {
        self.hosts.acquire(&self.uri, PATIENCE).await.expect("nobody is shed")
    }
}

#[derive(Clone)]
pub(crate) struct Tokio(Arc<Semaphore>);

impl Line for Tokio {
    type Permit = OwnedSemaphorePermit;

    fn new(permits: usize) -> Self {
        Self(Arc::new(Semaphore::new(permits)))
    }

    async fn take(&mut self) -> OwnedSemaphorePermit {
        Arc::clone(&self.0).acquire_owned().await.expect("nobody closes it")
    }
}

/// The gate in front of a client. The body carries the permit.
#[derive(Clone)]
pub(crate) struct GatedClient {
    client: HostGate<Server>,
    uri: Uri,
}

impl Line for GatedClient {
    type Permit = Response<ResponseBody<Full<Bytes>>>;

    fn new(permits: usize) -> Self {
        Self { client: layer(permits).layer(client()), uri: peers::uri(0) }
    }

    async fn take(&mut self) -> Self::Permit {
        self.client.call(request(&self.uri)).await.expect("nobody is shed")
    }
}

/// The semaphore in front of the same client. The response is kept together with the permit.
#[derive(Clone)]
pub(crate) struct LimitedClient {
    line: Tokio,
    client: Server,
    uri: Uri,
}

impl Line for LimitedClient {
    type Permit = (Response<Full<Bytes>>, OwnedSemaphorePermit);

    fn new(permits: usize) -> Self {
        Self { line: Tokio::new(permits), client: client(), uri: peers::uri(0) }
    }

    async fn take(&mut self) -> Self::Permit {
        let request = request(&self.uri);
        let permit = self.line.take().await;
        (self.client.call(request).await.expect("it always answers"), permit)
    }
}

/// With a body: a response without one gives its permit back at once.
fn client() -> Server {
    Server::new(Answer::Body)
}

pub(crate) fn request(uri: &Uri) -> Request<Empty<Bytes>> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = uri.clone();
    request
}
