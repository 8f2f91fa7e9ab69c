//! A request may be dropped at any moment and leaves nothing behind (C04): at random by the thousand, and after each
//! single poll.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::array;
use std::collections::HashMap;
use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::{Request, Response};
use http_body::{Body, Frame};
use support::reactive;
use support::script::{Reply, Script, get};
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tower::limit::ConcurrencyLimit;
use tower::{BoxError, Layer, Service};
use tower_host_gate::{HostGateLayer, Limits};

// --- at random ----------------------------------------------------------------------------------------------------

const CANCELLATIONS: usize = 10_000;
const TASKS: usize = 8;
/// Host `n` admits this many at a time.
const CAPS: [usize; 3] = [1, 1, 2];
/// All hosts together, below the gate: fewer than the gate admits, so that readying takes time.
const BELOW: usize = 2;

#[test]
fn c04_ten_thousand_random_cancellations_leave_nothing_behind() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let layer = CAPS.iter().enumerate().fold(
        reactive()
            .spacing(Duration::from_millis(1))
            .warm_for(Duration::from_millis(5))
            .max_wait(Duration::from_millis(50)),
        |layer, (host, cap)| layer.per_host(&name(host), Limits::default().concurrency(*cap)),
    );
    let server = Arc::new(Server::default());
    let semaphore = Arc::new(Semaphore::new(BELOW));
    let below = ConcurrencyLimit::with_semaphore(Client(Arc::clone(&server)), Arc::clone(&semaphore));
    let gated = layer.layer(below);
    let stages = Arc::new(Mutex::new(HashMap::<String, usize>::new()));

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(TASKS).enable_time().build().unwrap();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let (mut gated, stages) = (gated.clone(), Arc::clone(&stages));
                let mut rng = Rng::with_seed(seed.wrapping_add(task as u64));
                tokio::spawn(async move {
                    let mut canceled = 0;
                    while canceled < CANCELLATIONS / TASKS {
                        let host = rng.usize(..CAPS.len());
                        let call = gated.call(Request::get(format!("http://{}/", name(host))).body(host).unwrap());
                        let stage = give_up_somewhere(call, &mut rng).await;
                        canceled += usize::from(!matches!(stage.as_str(), "shed" | "end"));
                        *stages.lock().unwrap().entry(stage).or_default() += 1;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let left = layer.hosts().snapshot();
        assert!(left.iter().all(|host| (host.in_flight, host.queued) == (0, 0)), "{left:?}");
        // The last refusal is forgotten after its cooldown and 5 ms.
        sleep(Duration::from_millis(100)).await;
    });

    let stages = stages.lock().unwrap();
    println!("given up while {stages:?}");
    for stage in ["unpolled", "waiting", "readying", "calling", "body"] {
        assert!(stages.get(stage).is_some_and(|times| *times > 20), "{stage} was hardly met: {stages:?}");
    }
    assert_eq!(layer.hosts().snapshot(), []);
    assert_eq!(semaphore.available_permits(), BELOW);
    for (host, cap) in CAPS.into_iter().enumerate() {
        assert_eq!(server.open[host].load(Ordering::SeqCst), 0);
        let peak = server.peak[host].load(Ordering::SeqCst);
        assert!(peak <= cap, "host {host}: {peak} at a time");

        // The next request is immediate: it reaches the server when it is called.
        let before = server.sent.load(Ordering::SeqCst);
        let next = gated.clone().call(Request::get(format!("http://{}/", name(host))).body(host).unwrap());
        assert_eq!(server.sent.load(Ordering::SeqCst), before + 1);
        drop(next);
    }
    assert_eq!(layer.hosts().snapshot(), []);
}

fn name(host: usize) -> String {
    format!("h{host}.example")
}

/// Drives a request up to a random point and drops it there. Says where that was.
async fn give_up_somewhere<F, B>(call: F, rng: &mut Rng) -> String
where
    F: Future<Output = Result<Response<B>, BoxError>> + Debug,
    B: Body,
{
    let patience = match rng.u8(..4) {
        // After so many polls; the last wake-up, a hand-over for example, finds nobody at home.
        0 | 1 => Patience::Polls(rng.usize(..5)),
        2 => Patience::Time(Duration::from_millis(rng.u64(..4))),
        _ => Patience::Endless,
    };
    let mut call = pin!(call);
    let Some(result) = patience.with(call.as_mut()).await else {
        let printed = format!("{call:?}");
        let stage = printed.split('"').nth(1).unwrap_or("unprintable");
        return if matches!(patience, Patience::Polls(0)) { "unpolled".to_owned() } else { stage.to_owned() };
    };
    let Ok(response) = result else {
        return "shed".to_owned();
    };
    let mut body = pin!(response.into_body());
    for _ in 0..rng.u8(..4) {
        let Some(Ok(_)) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await else {
            return "end".to_owned();
        };
    }
    if body.is_end_stream() { "end" } else { "body" }.to_owned()
}

#[derive(Clone, Copy)]
enum Patience {
    /// Ends at the wake-up after this many polls, without a look.
    Polls(usize),
    Time(Duration),
    Endless,
}

impl Patience {
    async fn with<F: Future>(self, mut future: Pin<&mut F>) -> Option<F::Output> {
        match self {
            Self::Polls(mut left) => {
                poll_fn(|cx| {
                    if left == 0 {
                        return Poll::Ready(None);
                    }
                    left -= 1;
                    future.as_mut().poll(cx).map(Some)
                })
                .await
            }
            Self::Time(time) => tokio::time::timeout(time, future).await.ok(),
            Self::Endless => Some(future.await),
        }
    }
}

/// What all clients see of the other side.
#[derive(Default)]
struct Server {
    sent: AtomicUsize,
    open: [AtomicUsize; CAPS.len()],
    peak: [AtomicUsize; CAPS.len()],
}

/// Counts one request as open while it lives.
struct Open(Arc<Server>, usize);

impl Open {
    fn new(server: &Arc<Server>, host: usize) -> Self {
        server.sent.fetch_add(1, Ordering::SeqCst);
        let open = server.open[host].fetch_add(1, Ordering::SeqCst) + 1;
        server.peak[host].fetch_max(open, Ordering::SeqCst);
        Self(Arc::clone(server), host)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open[self.1].fetch_sub(1, Ordering::SeqCst);
    }
}

/// Answers after some yields: with a body of a few frames, now and then with an error or a 429 for one millisecond.
/// The request body is the number of the host.
#[derive(Clone)]
struct Client(Arc<Server>);

impl Service<Request<usize>> for Client {
    type Response = Response<Frames>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Frames>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<usize>) -> Self::Future {
        let open = Open::new(&self.0, request.into_body());
        Box::pin(async move {
            for _ in 0..fastrand::usize(..4) {
                tokio::task::yield_now().await;
            }
            if fastrand::u8(..) < 8 {
                return Err("the connection broke".into());
            }
            let frames = Frames { left: fastrand::usize(..4), yielded: false, open: Some(open) };
            let mut response = Response::new(frames);
            if fastrand::u8(..) < 16 {
                // A refusal does not count as in flight any more once its head is there.
                response.body_mut().open = None;
                *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
                response.headers_mut().insert("retry-after-ms", http::HeaderValue::from_static("1"));
            }
            Ok(response)
        })
    }
}

struct Frames {
    left: usize,
    yielded: bool,
    /// Until the end of the body, as at a real server.
    open: Option<Open>,
}

impl Body for Frames {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.yielded = !self.yielded;
        if self.yielded {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.left == 0 {
            self.open = None;
            return Poll::Ready(None);
        }
        self.left -= 1;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"frame")))))
    }
}

// --- after each poll ----------------------------------------------------------------------------------------------

/// A request that meets everything: it waits for a permit, then sleeps a cooldown, finds the inner service not ready,
/// is sent, and has a body with a pause in it. Dropped after `polls` polls. True when it had already ended.
async fn dropped_after(polls: usize) -> bool {
    const URI: &str = "http://a.example/";
    let script = Script::new(|sent| match sent.n {
        0 => Reply::status(429).header("retry-after", "5").after(Duration::from_secs(1)),
        _ => Reply::ok().after(Duration::from_secs(1)).body("one").open_for(Duration::from_secs(1)).body("two"),
    });
    let semaphore = Arc::new(Semaphore::new(1));
    let limited = ConcurrencyLimit::with_semaphore(script.clone(), Arc::clone(&semaphore));
    let layer = reactive();
    let mut gated = layer.layer(limited);

    let first = tokio::spawn(gated.call(get(URI)));
    let call = gated.call(get(URI));
    let whole = async {
        let mut body = pin!(call.await.unwrap().into_body());
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            frame.unwrap();
        }
    };
    // The inner permit is somebody else's for a while, just when the cooldown ends.
    let elsewhere = tokio::spawn({
        let semaphore = Arc::clone(&semaphore);
        async move {
            sleep(Duration::from_secs(5)).await;
            let _permit = semaphore.acquire().await.unwrap();
            sleep(Duration::from_secs(3)).await;
        }
    });
    let mut left = polls;
    let ended = {
        let mut whole = Box::pin(whole);
        poll_fn(|cx| {
            if left == 0 {
                return Poll::Ready(false);
            }
            left -= 1;
            ready!(whole.as_mut().poll(cx));
            Poll::Ready(true)
        })
        .await
    };
    drop(first.await.unwrap().unwrap());
    elsewhere.await.unwrap();

    layer.hosts().clear("a.example");
    assert_eq!(layer.hosts().snapshot(), [], "after {polls} polls");
    assert_eq!(semaphore.available_permits(), 1, "after {polls} polls");
    assert_eq!(script.peak(), 1);
    let before = script.sent().len();
    let mut next = Box::pin(gated.call(get(URI)));
    assert!(next.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(script.sent().len(), before + 1, "after {polls} polls: the next one is immediate");
    ended
}

#[tokio::test(start_paused = true)]
async fn c04_dropped_after_each_single_poll() {
    let mut polls = 0;
    while !dropped_after(polls).await {
        polls += 1;
        assert!(polls < 100, "it never ends");
    }
    assert!(polls >= 6, "only {polls} polls: the request did not meet everything it should");
}

/// A queue of five, of which any may go at any of its polls; those behind it must get their turn.
#[tokio::test(start_paused = true)]
async fn c04_a_waiter_dropped_after_any_poll_passes_its_turn_on() {
    for dropped in 0..5 {
        for polls in 0..6 {
            let script = Script::always(Reply::ok().after(Duration::from_secs(1)));
            let layer = HostGateLayer::new();
            layer.hosts().penalize("a.example:80", Duration::from_secs(2));
            let gated = layer.layer(script.clone());
            let tasks: [_; 5] = array::from_fn(|n| {
                let mut call = Box::pin(gated.clone().call(get(&format!("http://a.example/{n}"))));
                let mut left = if n == dropped { polls } else { usize::MAX };
                tokio::spawn(poll_fn(move |cx| {
                    if left == 0 {
                        return Poll::Ready(());
                    }
                    left -= 1;
                    call.as_mut().poll(cx).map(|result| drop(result.unwrap()))
                }))
            });
            for task in tasks {
                task.await.unwrap();
            }
            let case = format!("waiter {dropped} dropped after {polls} polls");
            let order: Vec<_> = script.sent().iter().map(|sent| sent.path.clone()).collect();
            assert!(order.is_sorted(), "{case}: {order:?}");
            assert!(order.len() >= 4, "{case}: {order:?}");
            assert_eq!((script.open(), script.peak()), (0, 1), "{case}");
            layer.hosts().clear("a.example");
            assert_eq!(layer.hosts().snapshot(), [], "{case}");
            // Nobody waited for a turn that was never passed on: one second each, from the end of the hold.
            let last = Duration::from_secs(2) + Duration::from_secs(1) * (order.len() as u32 - 1);
            assert!(script.times().last().unwrap() <= &last, "{case}: {:?}", script.times());
        }
    }
}
