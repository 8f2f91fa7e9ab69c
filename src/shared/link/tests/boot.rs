//! From the first call to the first connection, or to none.

use futures_util::future::join_all;
use tokio::runtime::Runtime;

use super::*;

#[test]
fn a_link_needs_no_runtime_and_connects_with_its_first_call() {
    let runtime = Runtime::new().unwrap();
    let server = runtime.block_on(Standalone::start());

    let linked = Linked::to(&server.url(), AMPLE);
    assert_eq!(linked.state(), State::Idle);
    assert_eq!(linked.link.server_now_ms(), 0, "nobody has told");

    assert_eq!(runtime.block_on(linked.echo("first")).unwrap(), "first");
    assert_eq!(linked.state(), State::Up);
    assert_eq!(linked.events(), [Event::Recover], "there was no outage");
}

#[tokio::test]
async fn the_first_calls_share_one_connection() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), AMPLE);

    let texts: Vec<_> = (0..50).map(|nth| nth.to_string()).collect();
    let answers = join_all(texts.iter().map(|text| linked.echo(text))).await;
    assert_eq!(answers.into_iter().map(Result::unwrap).collect::<Vec<_>>(), texts);
    assert_eq!(proxy.traffic().connections, 1);
}

#[tokio::test]
async fn d15_without_a_server_the_first_call_says_why_and_the_next_ones_do_not_wait() {
    let mut server = Standalone::start().await;
    server.kill();
    let linked = Linked::to(&server.url(), AMPLE);

    assert_eq!(linked.fails().await, BackendErrorKind::Unreachable);
    assert_eq!(linked.state(), State::Down);
    assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));
    assert_eq!(linked.events(), [degraded(BackendErrorKind::Unreachable)]);
}

#[tokio::test]
async fn d15_a_server_that_comes_later_is_found() {
    let mut server = Standalone::start().await;
    server.kill();
    let linked = Linked::to(&server.url(), AMPLE);
    linked.fails().await;

    server.restart().await;
    linked.until_recovered().await;
    assert_eq!(linked.echo("now").await.unwrap(), "now");
    assert_eq!(linked.events(), [degraded(BackendErrorKind::Unreachable), Event::Recover, Event::Recovered]);
}

#[tokio::test]
async fn d15_a_server_that_accepts_and_never_answers_is_waited_for_once() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    proxy.set(Fault::Blackhole).await;
    let linked = Linked::to(&proxy.url(), SHORT);

    let asked = Instant::now();
    let both = join_all([linked.fails(), linked.fails()]).await;
    assert_eq!(both, [BackendErrorKind::Timeout; 2]);
    assert!(asked.elapsed() >= SHORT);
    assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));
    assert_eq!(linked.events(), [degraded(BackendErrorKind::Timeout)]);

    proxy.set(Fault::Pass).await;
    linked.until_recovered().await;
    assert_eq!(linked.outages(), [degraded(BackendErrorKind::Timeout), Event::Recovered]);
}

#[tokio::test]
async fn what_has_to_be_told_first_is_told_before_any_call() {
    let server = Standalone::start().await;
    let linked = Linked::to(&server.url(), AMPLE);
    linked.witness.refuses.store(true, Ordering::Relaxed);

    assert_eq!(linked.fails().await, BackendErrorKind::Reply, "the connection is not let through to");
    assert_eq!(linked.events(), [Event::Recover, degraded(BackendErrorKind::Reply)]);

    linked.witness.refuses.store(false, Ordering::Relaxed);
    linked.until_recovered().await;
    assert_eq!(linked.echo("now").await.unwrap(), "now");
}

#[tokio::test]
async fn the_first_connection_brings_the_server_clock() {
    let server = Standalone::start().await;
    let linked = Linked::to(&server.url(), AMPLE);
    linked.echo("first").await.unwrap();

    let asked = server.cli(&["TIME"]).await;
    let seconds: u64 = asked.lines().next().unwrap().parse().unwrap();
    let estimate = linked.link.server_now_ms();
    assert!(estimate.abs_diff(seconds * 1000) < 60_000, "{estimate} ms, and {seconds} s");

    linked.link.note_server_time(5_000_000);
    let (first, then) = (linked.link.server_now_ms(), Instant::now());
    assert!(first >= 5_000_000, "as it was set");
    sleep(Duration::from_millis(20)).await;
    let passed = u64::try_from(then.elapsed().as_millis()).unwrap();
    assert!(linked.link.server_now_ms() >= first + passed.min(20) - 1, "and on");
}
