//! Many threads, many hosts, requests that are given up anywhere, and somebody who steers meanwhile.

use std::array;
use std::cmp::min;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::{fmt, thread};

use fastrand::Rng;
use http_body::{Body, Frame};
use tokio::task::yield_now;
use tower_host_gate::{Hosts, RateLimited};

use super::*;

const THREADS: usize = 4;
const TASKS: usize = 32;
const HOSTS: usize = 64;
const REQUESTS: usize = 30_000;

#[test]
fn never_more_than_one_at_a_time() {
    crowd(1);
}

#[test]
fn never_more_than_two_at_a_time() {
    crowd(2);
}

#[test]
fn never_more_than_eight_at_a_time() {
    crowd(8);
}

fn crowd(concurrency: usize) {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let layer = support::reactive()
        .concurrency(concurrency)
        .base_cooldown(Duration::from_millis(1))
        .spacing(Duration::ZERO)
        .warm_for(Duration::from_millis(2))
        .max_wait(Duration::from_secs(20));
    let server =
        Arc::new(Server { concurrency, hosts: array::from_fn(|_| AtomicUsize::new(0)), peak: AtomicUsize::new(0) });
    let client = layer.layer(Client(Arc::clone(&server)));

    let over = AtomicBool::new(false);
    let ends = thread::scope(|scope| {
        scope.spawn(|| steer(&layer.hosts(), concurrency, &over, seed));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_time().build().unwrap();
        let ends = runtime.block_on(async {
            let tasks = (0..TASKS).map(|task| {
                let (client, rng) = (client.clone(), Rng::with_seed(seed.wrapping_add(task as u64)));
                tokio::spawn(requests(client, rng))
            });
            let mut ends = [0; 4];
            for task in tasks.collect::<Vec<_>>() {
                let of_task = task.await.unwrap();
                ends = array::from_fn(|end| ends[end] + of_task[end]);
            }
            ends
        });
        over.store(true, Ordering::Relaxed);
        ends
    });

    println!("given up before the head, at the body, refused, read: {ends:?}");
    assert!(ends.iter().all(|times| *times > 20), "hardly met: {ends:?}");
    assert!(server.peak.load(Ordering::SeqCst) >= concurrency.min(2));
    assert!(server.hosts.iter().all(|host| host.load(Ordering::SeqCst) == 0));
    // At rest: what was refused or penalized is forgotten after milliseconds.
    for _ in 0..1000 {
        if layer.hosts().snapshot().is_empty() {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(layer.hosts().snapshot(), []);
    for host in 0..HOSTS {
        let name = format!("h{host}.example:443");
        layer.hosts().set_limits(&name, Limits::default());
        let mut fresh = layer.layer(AtOnce);
        let held: Vec<_> = (0..concurrency).map(|_| send(&mut fresh, uri(host)).unwrap()).collect();
        assert_eq!(layer.hosts().get(&name).unwrap().in_flight, concurrency);
        assert!(layer.hosts().try_acquire(&uri(host).parse().unwrap()).is_err());
        drop(held);
    }
    assert_eq!(layer.hosts().snapshot(), []);
}

fn uri(host: usize) -> String {
    format!("https://h{host}.example/")
}

// --- the program ------------------------------------------------------------------------------------------------------

/// Says how often a request was given up before its head, at its body, was refused, and was read to its end.
async fn requests(mut client: HostGate<Client>, mut rng: Rng) -> [usize; 4] {
    let mut ends = [0; 4];
    for _ in 0..REQUESTS / TASKS {
        // Some hosts are asked by nearly everybody.
        let host = min(rng.usize(..HOSTS), min(rng.usize(..HOSTS), rng.usize(..HOSTS)));
        let fate = Fate { host, yields: rng.u8(..3), refused: rng.u16(..300) == 0 };
        let request = Request::get(uri(host)).body(fate).unwrap();
        let mut call = Box::pin(client.call(request));
        let given_up = rng.u8(..8) == 0;
        if given_up {
            for _ in 0..rng.u8(..4) {
                if futures_util::poll!(&mut call).is_ready() {
                    break;
                }
                yield_now().await;
            }
            ends[0] += 1;
            continue;
        }
        let response = match call.await {
            Ok(response) => response,
            // A budget of so many seconds runs out only where somebody is never woken.
            Err(error) => panic!("{:?}", RateLimited::find(&*error)),
        };
        let end = match (response.status().as_u16(), rng.u8(..4)) {
            (429, _) => 2,
            (_, 0) => 1,
            _ => {
                response.into_body().collect().await.unwrap();
                3
            }
        };
        ends[end] += 1;
    }
    ends
}

fn steer(hosts: &Hosts, concurrency: usize, over: &AtomicBool, seed: u64) {
    let mut rng = Rng::with_seed(!seed);
    while !over.load(Ordering::Relaxed) {
        let name = format!("h{}.example:443", rng.usize(..HOSTS));
        match rng.u8(..8) {
            0 => hosts.penalize(&name, Duration::from_millis(1)),
            1 => hosts.clear(&name),
            // The same number in other words, and fewer.
            2 => hosts.set_limits(&name, Limits::default()),
            3 => hosts.set_limits(&name, Limits::default().concurrency(concurrency)),
            4 => hosts.set_limits(&name, Limits::default().concurrency(1)),
            5 => {
                let all = hosts.snapshot();
                assert!(all.iter().all(|host| host.in_flight <= concurrency), "{all:?}");
                let mut names: Vec<_> = all.iter().map(|host| host.host.as_str()).collect();
                names.sort_unstable();
                names.dedup();
                assert_eq!(names.len(), all.len(), "a host twice: {all:?}");
            }
            _ => _ = hosts.get(&name),
        }
        thread::sleep(Duration::from_micros(100));
    }
}

// --- the servers ------------------------------------------------------------------------------------------------------

struct Server {
    concurrency: usize,
    /// Requests in flight.
    hosts: [AtomicUsize; HOSTS],
    peak: AtomicUsize,
}

#[derive(Clone)]
struct Client(Arc<Server>);

/// What becomes of a request.
#[derive(Clone, Copy)]
struct Fate {
    host: usize,
    yields: u8,
    refused: bool,
}

/// A request in flight, as its server sees it.
struct InFlight {
    server: Arc<Server>,
    host: usize,
}

impl InFlight {
    fn begin(server: &Arc<Server>, host: usize) -> Self {
        let now = server.hosts[host].fetch_add(1, Ordering::SeqCst) + 1;
        assert!(now <= server.concurrency, "{now} at a time to host {host}");
        server.peak.fetch_max(now, Ordering::SeqCst);
        Self { server: Arc::clone(server), host }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.server.hosts[self.host].fetch_sub(1, Ordering::SeqCst);
    }
}

impl Service<Request<Fate>> for Client {
    type Response = Response<OneFrame>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<OneFrame>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Fate>) -> Self::Future {
        let Fate { host, yields, refused } = request.into_body();
        let in_flight = InFlight::begin(&self.0, host);
        Box::pin(async move {
            for _ in 0..yields {
                yield_now().await;
            }
            if refused {
                // Over with the head.
                drop(in_flight);
                return Ok(Response::builder().status(429).body(OneFrame(None))?);
            }
            Ok(Response::new(OneFrame(Some(in_flight))))
        })
    }
}

/// In flight until its frame is out.
struct OneFrame(Option<InFlight>);

impl Body for OneFrame {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(self.0.take().map(|_| Ok(Frame::data(Bytes::from_static(b"the feed")))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

impl fmt::Debug for OneFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OneFrame")
    }
}
