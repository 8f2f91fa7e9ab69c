//! tower's buffer, load shedding, rate limit and boxes around and below the gate.

mod support;

use std::{
    error::Error,
    fmt,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::join_all;
use http::{Request, Response};
use support::reactive;
use support::script::{Reply, Script, ScriptBody, ScriptError, ScriptFuture, get};
use tokio::{
    join,
    task::coop,
    time::{sleep, timeout},
};
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt,
    buffer::error::ServiceError,
    limit::{RateLimit, rate::Rate},
    load_shed::error::Overloaded,
    util::{BoxCloneService, BoxCloneSyncService, BoxService},
};
use tower_host_gate::{HostGateLayer, HostSnapshot, MaxWait, RateLimited, Reason, ResponseBody};

const A: &str = "http://a.example/";
const B: &str = "http://b.example/";

/// Sends on a clone, as another task of the program would.
async fn send<S, R>(service: &S, request: Request<()>) -> Result<R, BoxError>
where
    S: Service<Request<()>, Response = R, Error: Into<BoxError>> + Clone,
{
    service.clone().oneshot(request).await.map_err(Into::into)
}

fn host_a(layer: &HostGateLayer) -> HostSnapshot {
    layer.hosts().get("a.example:80").expect("the gate has something to say of the host")
}

fn to_host(n: usize) -> Request<()> {
    get(&format!("http://{n}.example/"))
}

/// A request that will not wait for anything.
fn impatient(uri: &str) -> Request<()> {
    let mut request = get(uri);
    request.extensions_mut().insert(MaxWait(secs(0)));
    request
}

/// A gate that holds host A for a minute, and in which everybody has the patience for that.
fn holding_a_for_a_minute() -> HostGateLayer {
    let layer = HostGateLayer::new().max_wait(secs(120));
    layer.hosts().penalize("a.example", secs(60));
    layer
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

// ---------------------------------------------------------------------------------------------------------------------
// Buffer
// ---------------------------------------------------------------------------------------------------------------------

// CASES C01: "inner = `Buffer` under the gate, 50 calls on clones. Right: no panic; the readied instance is the one called."
#[tokio::test(start_paused = true)]
async fn c01_a_buffer_inside_whose_queue_is_full_serves_everybody() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let client =
        ServiceBuilder::new().layer(HostGateLayer::new()).buffer(1).concurrency_limit(1).service(script.clone());
    let requests = (0..50).map(|n| send(&client, to_host(n)));
    assert!(join_all(requests).await.iter().all(Result::is_ok));
    assert_eq!((script.sent().len(), script.peak()), (50, 1));
    assert_eq!(script.times().last(), Some(&secs(49)));
}

#[tokio::test(start_paused = true)]
async fn c01_a_full_buffer_inside_serves_one_service_value_that_many_calls_go_through() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let mut client =
        ServiceBuilder::new().layer(HostGateLayer::new()).buffer(1).concurrency_limit(1).service(script.clone());
    let requests: Vec<_> = (0..50).map(|n| client.call(to_host(n))).collect();
    assert!(join_all(requests).await.iter().all(Result::is_ok));
    assert_eq!(script.sent().len(), 50);
}

#[tokio::test(start_paused = true)]
async fn requests_given_up_before_a_full_buffer_leave_their_permits_and_its_places() {
    let layer = HostGateLayer::new();
    let script = Script::always(Reply::ok().after(secs(10)));
    let client = ServiceBuilder::new().layer(layer.clone()).buffer(1).concurrency_limit(1).service(script.clone());
    let requests = (0..20).map(|n| timeout(secs(1), send(&client, to_host(n))));
    assert!(join_all(requests).await.iter().all(Result::is_err));
    assert!(layer.hosts().snapshot().is_empty());
    assert!(send(&client, get(A)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_buffer_inside_that_has_died_is_an_error_and_no_hang() {
    let layer = HostGateLayer::new();
    let script = Script::list([]);
    script.fail_ready("closed");
    let client = ServiceBuilder::new().layer(layer.clone()).buffer(4).service(script.clone());
    for _ in 0..2 {
        let error = send(&client, get(A)).await.unwrap_err();
        assert!(error.is::<ServiceError>(), "{error:?}");
        let source = error.source().expect("what the worker died of");
        assert_eq!(source.downcast_ref(), Some(&ScriptError("closed".into())));
    }
    assert!(layer.hosts().snapshot().is_empty(), "the permit is back");
}

#[tokio::test(start_paused = true)]
async fn a_buffer_outside_is_one_gate_and_a_host_that_waits_is_in_nobodys_way() {
    let script = Script::list([]);
    let client = ServiceBuilder::new().buffer(1).layer(holding_a_for_a_minute()).service(script.clone());
    let (a, b) = join!(send(&client, get(A)), send(&client, get(B)));
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(script.times_of("b.example"), [secs(0)]);
    assert_eq!(script.times_of("a.example"), [secs(60)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// LoadShed
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn load_shed_outside_sheds_nothing_since_the_gate_is_always_ready() {
    let script = Script::always(Reply::ok().after(secs(1)));
    let client =
        ServiceBuilder::new().load_shed().layer(holding_a_for_a_minute()).concurrency_limit(1).service(script.clone());
    // Ten to each host: in the gate's queue, in its cooldown, and at the limit below.
    let requests = (0..20).map(|n| send(&client, get([A, B][n % 2])));
    assert!(join_all(requests).await.iter().all(Result::is_ok));
    assert_eq!(script.sent().len(), 20);
}

/// Uses up what tokio grants a task per poll: from here to the next poll its own primitives say "pending".
async fn use_up_the_tasks_budget() {
    while coop::has_budget_remaining() {
        coop::consume_budget().await;
    }
}

#[tokio::test(start_paused = true)]
async fn load_shed_outside_is_not_deceived_by_a_task_that_has_used_up_its_budget() {
    let script = Script::list([]);
    let bare = ServiceBuilder::new().load_shed().buffer(8).service(script.clone());
    let gated = ServiceBuilder::new().load_shed().layer(HostGateLayer::new()).buffer(8).service(script.clone());

    use_up_the_tasks_budget().await;
    let error = send(&bare, get(A)).await.unwrap_err();
    assert!(error.is::<Overloaded>(), "without the gate the buffer passes for full");
    assert!(!coop::has_budget_remaining());
    assert_eq!(send(&gated, get(A)).await.unwrap().status(), 200);
    assert_eq!(script.sent().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn load_shed_inside_sheds_what_the_limit_below_cannot_take_and_teaches_the_gate_nothing() {
    let layer = HostGateLayer::new();
    let script = Script::always(Reply::ok().after(secs(10)));
    let client = ServiceBuilder::new().layer(layer.clone()).load_shed().concurrency_limit(1).service(script.clone());
    let overloaded = async {
        sleep(secs(1)).await;
        let error = send(&client, get(A)).await.unwrap_err();
        assert!(error.is::<Overloaded>() && RateLimited::find(&*error).is_none(), "{error:?}");
        assert!(layer.hosts().get("a.example:80").is_none(), "no cooldown, and the permit is back");
    };
    let (b, ()) = join!(send(&client, get(B)), overloaded);
    assert!(b.is_ok());
}

// ---------------------------------------------------------------------------------------------------------------------
// RateLimit
// ---------------------------------------------------------------------------------------------------------------------

// tower's `RateLimit` is not `Clone`, so below a gate it stands behind a buffer.
#[tokio::test(start_paused = true)]
async fn c01_a_rate_limit_inside_spaces_the_sends_to_all_hosts() {
    let script = Script::list([]);
    let client =
        ServiceBuilder::new().layer(holding_a_for_a_minute()).buffer(16).rate_limit(1, secs(1)).service(script.clone());
    let held = send(&client, get(A));
    let others = join_all((0..5).map(|n| send(&client, to_host(n))));
    let (held, others) = join!(held, others);
    assert!(held.is_ok() && others.iter().all(Result::is_ok));
    assert_eq!(script.times(), [0, 1, 2, 3, 4, 60].map(secs), "the host that waits has taken nobody's turn");
}

/// A `RateLimit` of which every clone counts for itself. It panics ("service not ready") when it is called unready.
struct OwnRate(RateLimit<Script>);

impl OwnRate {
    fn new(script: &Script) -> Self {
        Self(RateLimit::new(script.clone(), Rate::new(1, secs(10))))
    }
}

impl Clone for OwnRate {
    fn clone(&self) -> Self {
        Self::new(self.0.get_ref())
    }
}

impl Service<Request<()>> for OwnRate {
    type Response = Response<ScriptBody>;
    type Error = ScriptError;
    type Future = ScriptFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ScriptError>> {
        Service::<Request<()>>::poll_ready(&mut self.0, cx)
    }

    fn call(&mut self, request: Request<()>) -> ScriptFuture {
        self.0.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn c01_the_instance_that_got_ready_is_the_one_that_is_called() {
    let script = Script::list([]);
    let mut client = HostGateLayer::new().layer(OwnRate::new(&script));
    let calls: Vec<_> = (0..6).map(|n| client.call(to_host(n))).collect();
    assert!(join_all(calls).await.iter().all(Result::is_ok));
    // Every second call meets an instance that has just been used: it goes with that one, ten seconds later.
    assert_eq!(script.times(), [0, 0, 0, 10, 10, 10].map(secs));
}

// ---------------------------------------------------------------------------------------------------------------------
// Boxes and errors
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_gate_fits_into_every_box_of_tower() {
    type Answer = Response<ResponseBody<ScriptBody>>;
    let script = Script::list([]);
    let gate = HostGateLayer::new().layer(script.clone());

    let sync: BoxCloneSyncService<Request<()>, Answer, BoxError> = BoxCloneSyncService::new(gate.clone());
    let clone: BoxCloneService<Request<()>, Answer, BoxError> = gate.clone().boxed_clone();
    let plain: BoxService<Request<()>, Answer, BoxError> = gate.boxed();
    assert!(send(&sync, get(A)).await.is_ok());
    assert!(send(&clone, get(A)).await.is_ok());
    assert!(plain.oneshot(get(A)).await.is_ok());

    // The builder's box asks for a `Sync` future as well.
    let built = ServiceBuilder::new().layer(HostGateLayer::new()).boxed_clone_sync().service(script.clone());
    assert!(send(&built, get(A)).await.is_ok());
    assert_eq!(script.sent().len(), 4);
}

// One gate, whatever it is boxed in.
#[tokio::test(start_paused = true)]
async fn boxed_clones_share_the_gate() {
    let script = Script::list([Reply::status(429)]);
    let client = BoxCloneSyncService::new(reactive().layer(script.clone()));
    assert_eq!(send(&client, get(A)).await.unwrap().status(), 429);
    assert_eq!(send(&client.clone(), get(A)).await.unwrap().status(), 200);
    assert_eq!(script.times(), [0, 2].map(secs));
}

/// How some layers pass an inner error on.
#[derive(Debug)]
struct Wrapped(BoxError);

impl fmt::Display for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request failed")
    }
}

impl Error for Wrapped {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.0)
    }
}

#[tokio::test(start_paused = true)]
async fn the_gates_error_is_found_through_buffers_boxes_and_wrappers() {
    let layer = holding_a_for_a_minute();
    let boxed = ServiceBuilder::new()
        .map_err(|error: BoxError| Wrapped(Wrapped(error).into()))
        .concurrency_limit(8)
        .layer(layer.clone())
        .service(Script::list([]));
    let boxed = BoxCloneService::new(boxed);
    let client = ServiceBuilder::new().load_shed().timeout(secs(5)).buffer(4).service(boxed);
    let error = send(&client, impatient(A)).await.unwrap_err();
    assert!(error.downcast_ref::<RateLimited>().is_none(), "it is deeper down");
    let limited = RateLimited::find(&*error).expect("found by way of `source`");
    assert_eq!((limited.host(), limited.reason(), limited.retry_after()), ("a.example:80", Reason::Cooldown, secs(60)));
    assert_eq!(host_a(&layer).queued, 0);
}

#[tokio::test(start_paused = true)]
async fn through_tower_alone_the_gates_error_stays_what_it_is() {
    let client = ServiceBuilder::new()
        .load_shed()
        .timeout(secs(5))
        .buffer(4)
        .layer(holding_a_for_a_minute())
        .boxed_clone_sync()
        .service(Script::list([]));
    let error = send(&client, impatient(A)).await.unwrap_err();
    assert!(error.is::<RateLimited>(), "{error:?}");
}
