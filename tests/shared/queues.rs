//! D20, M05: what many waiters and many hosts cost.

use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream;
use http::Request;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tower::{Layer as _, ServiceExt as _};
use tower_host_gate::{HostGateLayer, Queue, Redis};

use super::eye::Eye;
use super::support::client::drain;
use super::support::reactive;
use super::support::redis::{Server, Standalone};
use super::support::script::{Reply, Script};
use super::{FEED, HOST, Replica, eventually, millis, redis, secs, throttled};

// --- D20 --------------------------------------------------------------------------------------------------------------

const CAP: usize = 8;
const WAITERS: usize = 100;
const REPLICAS: usize = 4;
const CALL: Duration = millis(50);

async fn replicas(store: impl Fn() -> Redis) -> Vec<Replica> {
    let layer = || reactive().concurrency(CAP).spacing(Duration::ZERO).max_wait(secs(600));
    join_all((0..REPLICAS).map(|_| Replica::connected(layer(), store()))).await
}

/// All of them ask at once, in turn at each replica; the path says who is which.
fn ask_all(replicas: &[Replica], service: &Script) -> JoinSet<()> {
    (0..WAITERS)
        .map(|nth| {
            let client = replicas[nth % REPLICAS].layer.layer(service.clone());
            let request = Request::get(format!("{FEED}{nth}")).body(()).unwrap();
            async move {
                let response = client.oneshot(request).await.expect("a response");
                drain(response).await.unwrap();
            }
        })
        .collect()
}

/// Whom the service has seen, in the order of the sends.
fn order(service: &Script) -> Vec<usize> {
    service.sent().iter().map(|sent| sent.path[1..].parse().unwrap()).collect()
}

/// Of those at one replica nobody goes before one who came first.
fn assert_fifo_inside_replicas(service: &Script) {
    let order = order(service);
    assert_eq!(order.len(), WAITERS);
    for replica in 0..REPLICAS {
        let here: Vec<_> = order.iter().filter(|nth| *nth % REPLICAS == replica).collect();
        assert!(here.is_sorted(), "replica {replica}: {here:?}");
    }
}

#[tokio::test]
async fn d20_while_all_permits_are_taken_one_per_replica_asks_and_not_more_often_than_it_may() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let replicas = replicas(|| redis(&server.url())).await;
    let service = Script::always(Reply::ok().after(CALL));

    let before = eye.script_calls().await;
    let began = Instant::now();
    ask_all(&replicas, &service).join_all().await;
    let calls = eye.script_calls().await - before;

    assert_fifo_inside_replicas(&service);
    assert!(service.peak() <= CAP, "{}", service.peak());
    // Each is admitted, gives its permit back, and may be the cause of one more question; besides, each replica asks again
    // no sooner than after the shortest interval.
    let again = REPLICAS as u128 * (1 + began.elapsed().as_millis() / 20);
    assert!(u128::from(calls) <= 3 * WAITERS as u128 + again, "{calls} calls in {:?}", began.elapsed());
    replicas.iter().for_each(|replica| replica.events.assert_no_failure());
}

#[tokio::test]
async fn d20_with_the_fair_queue_nobody_asks_again_and_again() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let replicas = replicas(|| redis(&server.url()).queue(Queue::Fifo)).await;
    let service = Script::always(Reply::ok().after(CALL));

    let before = eye.script_calls().await;
    let began = Instant::now();
    ask_all(&replicas, &service).join_all().await;
    let calls = eye.script_calls().await - before;

    assert_fifo_inside_replicas(&service);
    assert!(service.peak() <= CAP, "{}", service.peak());
    // A ticket, the confirmation and the release; and to be safe each replica looks whether it was forgotten.
    let again = REPLICAS as u128 * (1 + began.elapsed().as_millis() / 280);
    assert!(u128::from(calls) <= 3 * WAITERS as u128 + again, "{calls} calls in {:?}", began.elapsed());
    replicas.iter().for_each(|replica| replica.events.assert_no_failure());
}

async fn a_cooldown_that_ends_for_all(queue: Queue) {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let replicas = replicas(|| redis(&server.url()).queue(queue)).await;
    let service = Script::always(Reply::ok().after(millis(10)));
    replicas[0].hosts.penalize(HOST, secs(50));
    eventually("the store knows", async || replicas[0].cooldown(HOST).await > secs(0)).await;

    let before = eye.script_calls().await;
    let waiting = ask_all(&replicas, &service);
    let queued = |replica: &Replica| replica.hosts.get(HOST).map_or(0, |seen| seen.queued);
    eventually("all wait", async || replicas.iter().map(queued).sum::<usize>() == WAITERS).await;
    // For much longer than it would take to ask again.
    sleep(secs(1)).await;
    let calls = eye.script_calls().await - before;
    assert!(calls <= 4 * REPLICAS as u64, "{calls} calls while nobody could go");
    assert_eq!(service.times().len(), 0);

    replicas[0].hosts.clear(HOST);
    waiting.join_all().await;
    assert_fifo_inside_replicas(&service);
    assert!(service.peak() <= CAP, "{}", service.peak());
}

#[tokio::test]
async fn d20_while_a_host_is_held_nobody_asks_and_when_it_no_longer_is_all_go_in_turn() {
    a_cooldown_that_ends_for_all(Queue::Delegate).await;
}

#[tokio::test]
async fn d20_while_a_host_is_held_nobody_asks_and_when_it_no_longer_is_all_go_in_turn_fifo() {
    a_cooldown_that_ends_for_all(Queue::Fifo).await;
}

/// When the server ran each script, by its own clock.
struct Monitor(Lines<BufReader<TcpStream>>);

impl Monitor {
    async fn start(server: &Server) -> Self {
        let mut server = BufReader::new(TcpStream::connect(("127.0.0.1", server.port())).await.unwrap());
        server.write_all(b"MONITOR\r\n").await.unwrap();
        Self(server.lines())
    }

    /// A line is `+1700000000.123456 [0 127.0.0.1:40000] "EVALSHA" ..`.
    async fn next_script(&mut self) -> Duration {
        loop {
            let line = self.0.next_line().await.unwrap().expect("the server goes on");
            if line.contains("\"EVALSHA\"") {
                let seconds = line.trim_start_matches('+').split(' ').next().unwrap();
                return Duration::from_secs_f64(seconds.parse().unwrap());
            }
        }
    }
}

#[tokio::test]
async fn d20_the_intervals_between_questions_are_drawn_and_never_much_shorter_than_set() {
    let server = Standalone::start().await;
    let store = || redis(&server.url()).retry_interval(millis(100));
    let holder = Replica::connected(reactive(), store()).await;
    let waiter = Replica::connected(reactive(), store()).await;
    let _held = holder.acquire(FEED).await;

    let mut monitor = Monitor::start(&server).await;
    let watching = async {
        let mut last = monitor.next_script().await;
        let (mut shorter, mut longer) = (0, 0);
        // Others slow a question down, and nothing speeds it up; so one of many is as short as it was drawn.
        for _ in 0..200 {
            let next = monitor.next_script().await;
            assert!(next - last > millis(75), "{:?}", next - last);
            shorter += u32::from(next - last < millis(100));
            longer += u32::from(next - last > millis(100));
            last = next;
            if shorter > 0 && longer > 0 {
                return;
            }
        }
        panic!("{shorter} were shorter than set, and {longer} longer");
    };
    tokio::select! {
        _ = waiter.acquire(FEED) => panic!("the permit is taken"),
        () = watching => {}
    }
}

// --- M05 --------------------------------------------------------------------------------------------------------------

const HOSTS: usize = 10_000;

#[tokio::test(flavor = "multi_thread")]
async fn m05_ten_thousand_hosts_need_one_connection_and_no_task_each() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let layer = HostGateLayer::new().max_hosts(HOSTS);
    let replica = Replica::connected(layer, redis(&server.url())).await;
    let tasks = || Handle::current().metrics().num_alive_tasks();
    // Of each connection, ours and the one that looks, there is one.
    eventually("the dialler is gone", async || tasks() == 2).await;

    stream::iter(0..HOSTS)
        .for_each_concurrent(100, async |nth| {
            replica.acquire(&format!("http://feed-{nth}.example/")).await.settle(throttled(secs(50)));
        })
        .await;

    eventually("every task has ended", async || tasks() == 2).await;
    assert_eq!(replica.hosts.snapshot().len(), HOSTS, "all of them are held");
    let clients: String = eye.ask(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    let subscribed: String = eye.ask(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
    // One of them looks.
    assert_eq!(clients.lines().chain(subscribed.lines()).count(), 1 + 1, "{clients}{subscribed}");
    replica.events.assert_no_failure();
}
