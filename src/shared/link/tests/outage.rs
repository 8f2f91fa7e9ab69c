//! What drops the connection, and what brings a link back.

use futures_util::future::join_all;

use super::*;

#[tokio::test]
async fn d15_a_killed_server_is_noticed_without_a_call() {
    let mut server = Standalone::start().await;
    let linked = Linked::to(&server.url(), AMPLE);
    linked.echo("up").await.unwrap();

    server.kill();
    linked.until(State::Down).await;
    assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));

    server.restart().await;
    linked.until_recovered().await;
    assert_eq!(linked.echo("again").await.unwrap(), "again");
    assert_eq!(
        linked.events(),
        [Event::Recover, degraded(BackendErrorKind::Unreachable), Event::Recover, Event::Recovered]
    );
}

#[tokio::test]
async fn d15_a_server_that_hangs_costs_two_timeouts() {
    let server = Standalone::start().await;
    let linked = Linked::to(&server.url(), SHORT);
    linked.until_ready().await;
    let before = linked.outages();

    server.stop();
    for expected in [State::Up, State::Down] {
        let asked = Instant::now();
        assert_eq!(linked.fails().await, BackendErrorKind::Timeout);
        assert!(asked.elapsed() >= SHORT);
        assert_eq!(linked.state(), expected);
    }
    assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));

    server.cont();
    linked.until_recovered().await;
    let outage = [degraded(BackendErrorKind::Timeout), Event::Recovered];
    assert_eq!(linked.outages(), [before.as_slice(), &outage].concat());
}

#[tokio::test]
async fn a_success_between_two_timeouts_keeps_the_connection() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), ENOUGH);
    linked.until_ready().await;
    let (events, connections) = (linked.events(), proxy.traffic().connections);

    for _ in 0..3 {
        server.stop();
        assert_eq!(linked.fails().await, BackendErrorKind::Timeout);
        server.cont();
        assert_eq!(linked.echo("well").await.unwrap(), "well");
    }
    assert_eq!(linked.events(), events);
    assert_eq!(proxy.traffic().connections, connections);
}

#[tokio::test]
async fn many_calls_that_fail_together_are_one_outage() {
    let server = Standalone::start().await;
    let linked = Linked::to(&server.url(), SHORT);
    linked.until_ready().await;
    let before = linked.outages();

    server.stop();
    join_all((0..50).map(|_| linked.fails())).await;
    server.cont();
    linked.until_recovered().await;
    let outage = [degraded(BackendErrorKind::Timeout), Event::Recovered];
    assert_eq!(linked.outages(), [before.as_slice(), &outage].concat());
}

#[tokio::test]
async fn a_server_that_has_become_a_replica_is_dropped_and_not_taken_back() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), AMPLE);
    linked.count("n").await.unwrap();

    server.cli(&["REPLICAOF", "127.0.0.1", "1"]).await;
    assert_eq!(linked.count("n").await.unwrap_err().kind(), BackendErrorKind::ReadOnly);
    assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));
    let connections = proxy.traffic().connections;
    until("it was tried again", async || proxy.traffic().connections >= connections + 3).await;
    assert_eq!(linked.state(), State::Down);

    server.cli(&["REPLICAOF", "NO", "ONE"]).await;
    linked.until_recovered().await;
    linked.count("n").await.unwrap();
    assert_eq!(linked.outages(), [degraded(BackendErrorKind::ReadOnly), Event::Recovered]);
}

#[tokio::test]
async fn a_replica_is_no_first_connection_either() {
    let server = Standalone::start_with(&["--replicaof", "127.0.0.1", "1"]).await;
    let linked = Linked::to(&server.url(), AMPLE);
    assert_eq!(linked.fails().await, BackendErrorKind::ReadOnly);
    assert_eq!(linked.state(), State::Down);
}

#[tokio::test]
async fn a_server_without_its_master_is_dropped() {
    let server = Standalone::start_with(&["--replica-serve-stale-data", "no"]).await;
    let linked = Linked::to(&server.url(), AMPLE);
    linked.count("n").await.unwrap();

    server.cli(&["REPLICAOF", "127.0.0.1", "1"]).await;
    assert_eq!(linked.count("n").await.unwrap_err().kind(), BackendErrorKind::MasterDown);
    assert_eq!(linked.state(), State::Down);

    server.cli(&["REPLICAOF", "NO", "ONE"]).await;
    linked.until_recovered().await;
    assert_eq!(linked.outages(), [degraded(BackendErrorKind::MasterDown), Event::Recovered]);
}

#[tokio::test]
async fn a_server_that_loads_its_data_is_dropped_until_it_has() {
    // It hears clients while it loads only so often.
    let server = Standalone::start_with(&[
        "--enable-debug-command",
        "yes",
        "--loading-process-events-interval-bytes",
        "1024",
        "--appendonly",
        "no",
    ])
    .await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), AMPLE);
    linked.echo("up").await.unwrap();
    server.cli(&["DEBUG", "POPULATE", "1000", "filler", "200"]).await;
    server.cli(&["CONFIG", "SET", "key-load-delay", "3000"]).await;

    let loading = async {
        server.cli(&["DEBUG", "RELOAD"]).await;
    };
    let calling = async {
        until("a call is refused", async || linked.echo("?").await.is_err()).await;
        assert_eq!(linked.outages(), [degraded(BackendErrorKind::Loading)]);
        let connections = proxy.traffic().connections;
        until("it was tried again", async || proxy.traffic().connections > connections + 1).await;
        assert_eq!(linked.state(), State::Down);
    };
    futures_util::join!(loading, calling);
    linked.until_recovered().await;
    let outage = [degraded(BackendErrorKind::Loading), Event::Recover, Event::Recovered];
    assert_eq!(
        linked.events(),
        [[Event::Recover].as_slice(), &outage].concat(),
        "nothing is told to a server that loads"
    );
}

#[tokio::test]
async fn what_an_old_connection_has_to_say_does_not_concern_the_new_one() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), AMPLE);
    linked.echo("up").await.unwrap();
    let old = linked.link.lock().connection.clone().unwrap();

    proxy.cut().await;
    linked.until_recovered().await;
    let events = linked.events();

    let error = old.run(&ECHO, &["key"], &[b"old".to_vec()]).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unreachable);
    linked.link.lost(old.epoch, &error);
    assert_eq!(linked.state(), State::Up);
    assert_eq!(linked.echo("new").await.unwrap(), "new");
    assert_eq!(linked.events(), events);
}

/// However many calls there are meanwhile.
#[tokio::test]
async fn one_dialler_pauses_longer_and_longer() {
    let mut server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), AMPLE);
    linked.echo("up").await.unwrap();
    let connections = proxy.traffic().connections;

    let killed = Instant::now();
    server.kill();
    linked.until(State::Down).await;
    let attempts = async || proxy.traffic().connections - connections;
    until("there were some attempts", async || {
        assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));
        attempts().await >= 6
    })
    .await;

    // The first at once, and each pause at least three quarters of 50, 100, 200, 400, 800 ms.
    let least: u32 = (0..attempts().await - 1).map(|nth| ((50 * 3 / 4) << nth).min(750)).sum();
    let passed = killed.elapsed();
    assert!(passed >= Duration::from_millis(least.into()), "{least} ms at least, not {passed:?}");
    assert_eq!(linked.outages(), [degraded(BackendErrorKind::Unreachable)]);
}
