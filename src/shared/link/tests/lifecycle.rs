//! Runtimes that end, and links that nobody has any more.

use tokio::runtime::{Builder, Runtime};

use super::*;

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn a_connection_that_has_lost_its_runtime_is_replaced_on_another() {
    let home = runtime();
    let server = home.block_on(Standalone::start());
    let linked = Linked::to(&server.url(), AMPLE);

    let first = runtime();
    assert_eq!(first.block_on(linked.echo("first")).unwrap(), "first");
    drop(first);

    let second = runtime();
    assert_eq!(second.block_on(linked.fails()), BackendErrorKind::Unreachable);
    second.block_on(linked.until_recovered());
    assert_eq!(second.block_on(linked.echo("second")).unwrap(), "second");
    assert_eq!(linked.outages(), [degraded(BackendErrorKind::Unreachable), Event::Recovered]);
}

#[test]
fn a_dialler_that_ends_with_its_runtime_is_replaced_by_the_next_call() {
    let home = runtime();
    let mut server = home.block_on(Standalone::start());
    server.kill();
    let linked = Linked::to(&server.url(), AMPLE);

    let first = runtime();
    assert_eq!(first.block_on(linked.fails()), BackendErrorKind::Unreachable);
    drop(first);
    home.block_on(server.restart());

    let second = runtime();
    assert_eq!(second.block_on(linked.fails()), BackendErrorKind::Down, "it does not wait");
    second.block_on(linked.until_recovered());
    assert_eq!(second.block_on(linked.echo("second")).unwrap(), "second");
}

#[test]
fn a_first_attempt_that_ends_with_its_runtime_is_made_anew() {
    let home = runtime();
    let server = home.block_on(Standalone::start());
    let proxy = home.block_on(Proxy::start(&server));
    home.block_on(proxy.set(Fault::Blackhole));
    let linked = Linked::to(&proxy.url(), AMPLE);

    let first = runtime();
    let link = Arc::clone(&linked.link);
    first.spawn(async move { link.run(&ECHO, &["key"], &[b"first".to_vec()]).await });
    home.block_on(linked.until(State::Connecting));
    drop(first);
    assert_eq!(linked.state(), State::Idle);

    home.block_on(proxy.set(Fault::Pass));
    assert_eq!(home.block_on(linked.echo("second")).unwrap(), "second");
    assert_eq!(linked.events(), [Event::Recover]);
}

#[test]
fn a_call_without_a_runtime_is_told_what_is_known() {
    let home = runtime();
    let mut server = home.block_on(Standalone::start());
    server.kill();
    let linked = Linked::to(&server.url(), AMPLE);
    home.block_on(linked.fails());
    drop(home);

    assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));
}

#[tokio::test]
async fn the_connection_ends_with_the_link() {
    let server = Standalone::start().await;
    let linked = Linked::with(Target::parse(&server.url()).unwrap(), AMPLE, &["news"]);
    linked.echo("up").await.unwrap();
    assert_eq!(server.cli(&["PUBSUB", "NUMSUB", "news"]).await, "news\n1");

    drop(linked);
    until("nobody is connected", async || server.cli(&["PUBSUB", "NUMSUB", "news"]).await == "news\n0").await;
    until("no task is left", async || tasks() == 0).await;
}

#[tokio::test]
async fn the_dialler_ends_with_the_link() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    proxy.set(Fault::Blackhole).await;
    let others = tasks();
    let linked = Linked::to(&proxy.url(), SHORT);
    linked.fails().await;
    assert!(tasks() > others);

    drop(linked);
    until("no task is left but the proxy's", async || {
        // The proxy has one for each connection, until it is closed.
        proxy.cut().await;
        tasks() == others
    })
    .await;
}

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

#[tokio::test]
async fn the_hooks_may_end_before_the_link() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let Linked { link, witness } = Linked::to(&proxy.url(), AMPLE);
    drop(witness);
    let error = link.run(&ECHO, &["key"], &[b"?".to_vec()]).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Down);
}
