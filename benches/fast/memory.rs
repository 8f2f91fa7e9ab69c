//! Heap bytes in use, as they were asked for: what the allocator adds for itself is not counted.
//!
//! Every row is a process of its own, as what one gate has left behind may serve the next one. All happens on one thread,
//! the only one whose allocations are counted.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use allocation_counter::measure;
use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::Empty;
use tokio::runtime::{Builder, Runtime};
use tokio::time;
use tower::{Layer, Service};
use tower_host_gate::{HostGate, HostGateLayer, Hosts, Outcome, Permit};

use crate::child;
use crate::contention::line::{PATIENCE, layer, request};
use crate::peers::{Answer, Server, uri};
use crate::report::Report;

/// What is measured: the bytes that `heap` counts for a number of hosts or waiters.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    counts: &'static str,
    heap: fn(usize, &Runtime) -> i64,
}

const BUILT: Kind = Kind { name: "built", counts: "a gate and its service before the first request", heap: built };
pub(crate) const FIXED: Kind = Kind { name: "fixed", counts: "what the first request adds for good", heap: first };
pub(crate) const IDLE: Kind =
    Kind { name: "idle", counts: "hosts asked once, healthy; every answer has been read", heap: idle };
pub(crate) const ACTIVE: Kind =
    Kind { name: "active", counts: "hosts with one request in flight; its permit not", heap: active };
pub(crate) const THROTTLED: Kind =
    Kind { name: "throttled", counts: "hosts in the cooldown of one 429", heap: throttled };
const LEARNED: Kind =
    Kind { name: "learned", counts: "these, when it is long over and they have answered", heap: learned };
pub(crate) const WAITING: Kind =
    Kind { name: "waiting", counts: "Hosts::acquire behind a request in flight; its future not", heap: waiting };
pub(crate) const CALLING: Kind =
    Kind { name: "calling", counts: "the service's call, the same; its future not", heap: calling };

const KINDS: [Kind; 8] = [BUILT, FIXED, IDLE, ACTIVE, THROTTLED, LEARNED, WAITING, CALLING];

pub(crate) fn run(report: &mut Report) {
    report.section("memory: heap bytes in use");
    println!(
        "All but the first two in addition to those. A waiter has no timer yet: only the first in line has one.\n"
    );
    println!("{:<11}{:>10}{:>12}{:>10}  of what", "", "how many", "bytes", "each");
    let many: &[usize] = if report.quick { &[1_000, 10_000] } else { &[1_000, 100_000] };
    let most = if report.quick { 100_000 } else { 1_000_000 };

    row(BUILT, 1);
    let fixed = row(FIXED, 1);
    report.goal("heap bytes, fixed", fixed, "<=520 KiB", fixed <= 520.0 * 1024.0);
    many.iter().for_each(|hosts| _ = row(IDLE, *hosts));
    let idle = row(IDLE, most);
    report.goal("heap bytes per idle healthy host", format!("{idle:.2}"), "0", idle < 0.005);
    rows(ACTIVE, many);
    let throttled = rows(THROTTLED, many);
    report.goal("heap bytes per throttled host", format!("{throttled:.0}"), "<=192", throttled <= 192.0);
    rows(LEARNED, many);
    for (kind, name) in [(WAITING, "Hosts::acquire"), (CALLING, "service")] {
        let each = rows(kind, many);
        report.goal(
            format!("heap bytes per waiter before its timer, {name}"),
            format!("{each:.0}"),
            "<=64",
            each <= 64.0,
        );
    }
    let [acquire, call] = sizes_of_futures();
    println!("\nThe futures themselves, wherever their caller keeps them: acquire {acquire} bytes, call {call} bytes.");
}

/// The most for each of them.
fn rows(kind: Kind, sizes: &[usize]) -> f64 {
    sizes.iter().map(|size| row(kind, *size)).fold(f64::MIN, f64::max)
}

/// For each of them.
fn row(kind: Kind, size: usize) -> f64 {
    let bytes = heap(kind, size);
    let each = bytes as f64 / size as f64;
    println!("{:<11}{size:>10}{bytes:>12}{each:>10.2}  {}", kind.name, kind.counts);
    each
}

/// In a process of its own.
pub(crate) fn heap(kind: Kind, size: usize) -> i64 {
    let printed = child::output(&format!("heap {} {size}", kind.name));
    printed.trim().parse().unwrap_or_else(|error| panic!("{printed:?} is no number: {error}"))
}

pub(crate) fn child(case: &[&str]) -> bool {
    let ["heap", name, size] = case else { return false };
    let kind = KINDS.iter().find(|kind| kind.name == *name).unwrap_or_else(|| panic!("no such kind: {name}"));
    // For the timers. Its clock goes where it is put.
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let _entered = runtime.enter();
    println!("{}", (kind.heap)(child::number(size), &runtime));
    true
}

// --- what is counted ----------------------------------------------------------------------------------------------

type Client = HostGate<Server>;

fn built(_: usize, _: &Runtime) -> i64 {
    let mut built = None;
    measure(|| built = Some(client())).bytes_current
}

fn first(_: usize, _: &Runtime) -> i64 {
    let (_, mut client) = client();
    measure(|| ask(&mut client, 0)).bytes_current
}

fn idle(hosts: usize, _: &Runtime) -> i64 {
    let (_, mut client) = used();
    measure(|| (1..=hosts).for_each(|host| ask(&mut client, host))).bytes_current
}

fn active(hosts: usize, _: &Runtime) -> i64 {
    let (layer, _client) = used();
    let hosts_of_gate = layer.hosts();
    let mut permits = Vec::with_capacity(hosts);
    let admit = |host| hosts_of_gate.try_acquire(&uri(host)).expect("the host is idle");
    measure(|| permits.extend((1..=hosts).map(admit))).bytes_current
}

fn throttled(hosts: usize, _: &Runtime) -> i64 {
    let (layer, _client) = used();
    measure(|| throttle(&layer, hosts)).bytes_current
}

fn learned(hosts: usize, runtime: &Runtime) -> i64 {
    let (layer, mut client) = used();
    measure(|| {
        throttle(&layer, hosts);
        runtime.block_on(time::advance(Duration::from_secs(86_400)));
        (1..=hosts).for_each(|host| ask(&mut client, host));
    })
    .bytes_current
}

fn waiting(waiters: usize, _: &Runtime) -> i64 {
    let (layer, _client) = used();
    let _in_flight = layer.hosts().try_acquire(&uri(1)).expect("the host is idle");
    queue((0..waiters).map(|_| acquire(layer.hosts(), uri(1))).collect())
}

fn calling(waiters: usize, _: &Runtime) -> i64 {
    let (layer, client) = used();
    let _in_flight = layer.hosts().try_acquire(&uri(1)).expect("the host is idle");
    queue((0..waiters).map(|_| call(client.clone(), uri(1))).collect())
}

/// What it adds that these begin to wait.
fn queue<F: Future>(waiters: Vec<F>) -> i64 {
    let mut waiters: Vec<_> = waiters.into_iter().map(Box::pin).collect();
    let cx = &mut Context::from_waker(Waker::noop());
    measure(|| waiters.iter_mut().for_each(|waiter| assert!(waiter.as_mut().poll(cx).is_pending()))).bytes_current
}

// --- gates, and requests through them -----------------------------------------------------------------------------

fn client() -> (HostGateLayer, Client) {
    // What was learnt of all hosts is kept.
    let layer = layer(1).max_hosts(usize::MAX);
    let client = layer.layer(Server::new(Answer::Body));
    (layer, client)
}

/// Has had its first request.
fn used() -> (HostGateLayer, Client) {
    let (layer, mut client) = client();
    ask(&mut client, 0);
    (layer, client)
}

/// One request, whose response is dropped.
fn ask(client: &mut Client, host: usize) {
    let response = pin!(client.call(request(&uri(host)))).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(response, Poll::Ready(Ok(_))), "{response:?}");
}

fn throttle(layer: &HostGateLayer, hosts: usize) {
    let gate = layer.hosts();
    for host in 1..=hosts {
        let permit = gate.try_acquire(&uri(host)).expect("the host is idle");
        permit.settle(Outcome::Throttled { hint: None, soft: false });
    }
}

async fn acquire(hosts: Hosts, uri: Uri) -> Permit {
    hosts.acquire(&uri, PATIENCE).await.expect("nobody is shed")
}

async fn call(mut client: Client, uri: Uri) -> <Client as Service<Request<Empty<Bytes>>>>::Response {
    let request = request(&uri);
    client.call(request).await.expect("nobody is shed")
}

fn sizes_of_futures() -> [usize; 2] {
    let (layer, mut client) = client();
    let (hosts, uri) = (layer.hosts(), uri(0));
    [size_of_val(&hosts.acquire(&uri, PATIENCE)), size_of_val(&client.call(request(&uri)))]
}
