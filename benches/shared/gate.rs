//! The gates, and requests through them.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use http::{Request, Response, Uri};
use tokio::time::sleep;
use tower::{Layer, ServiceExt, service_fn};
use tower_host_gate::observe::{DegradedEvent, ErrorEvent};
use tower_host_gate::{HostGateLayer, Observer, Queue, Redis};

/// A gate as a process has it that shares its hosts with others. Nothing here may be sent away for want of patience.
pub(crate) fn shared(url: &str, queue: Queue, concurrency: usize) -> HostGateLayer {
    let redis = Redis::open(url).expect("the address of a server").queue(queue);
    HostGateLayer::new().concurrency(concurrency).max_wait(Duration::from_secs(600)).shared(redis)
}

pub(crate) fn uri(host: &str) -> Uri {
    format!("http://{host}/").parse().expect("a URI")
}

/// When a request was out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) sent: Instant,
    pub(crate) done: Instant,
}

/// One request, as the service inside of the gate sees it. When this returns its permit is on its way back.
pub(crate) async fn request(gate: &HostGateLayer, host: &str, hold: Duration) -> Held {
    let inside = service_fn(move |_: Request<()>| async move {
        let sent = Instant::now();
        if !hold.is_zero() {
            sleep(hold).await;
        }
        let mut response = Response::new(String::new());
        response.extensions_mut().insert(Held { sent, done: Instant::now() });
        Ok::<_, Infallible>(response)
    });
    let request = Request::get(uri(host)).body(()).expect("a request");
    let response = gate.layer(inside).oneshot(request).await.expect("nobody is sent away");
    *response.extensions().get().expect("the service has put it there")
}

/// Counts what may not happen while it is measured: a gate that is on its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failures(Arc<AtomicU32>);

impl Failures {
    pub(crate) fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Observer for Failures {
    fn degraded(&self, _: &DegradedEvent<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn error(&self, _: &ErrorEvent<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
