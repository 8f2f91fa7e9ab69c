//! A store that is far away.

use super::*;

/// Asks for so long.
async fn ask_for(linked: &Linked, time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        let _ = linked.echo("?").await;
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_round_trip_of_the_timeout_is_one_outage() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    proxy.set(Fault::round_trip(SHORT)).await;
    let linked = Linked::to(&proxy.url(), SHORT);

    ask_for(&linked, Duration::from_secs(3)).await;
    assert_eq!(linked.state(), State::Down);
    assert_eq!(linked.events(), [degraded(BackendErrorKind::Timeout)]);

    proxy.set(Fault::Pass).await;
    linked.until_recovered().await;
    assert_eq!(linked.outages(), [degraded(BackendErrorKind::Timeout), Event::Recovered]);
}

#[tokio::test]
async fn a_link_that_was_lost_is_back_only_when_it_is_well_below_the_timeout() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), SHORT);
    linked.until_ready().await;
    let before = linked.outages();

    proxy.set(Fault::round_trip(SHORT * 2)).await;
    linked.until(State::Up).await;
    assert_eq!(linked.fails().await, BackendErrorKind::Timeout);
    assert_eq!(linked.fails().await, BackendErrorKind::Timeout);
    assert_eq!(linked.state(), State::Down);

    // Calls would be answered in time, but only just.
    proxy.set(Fault::round_trip(SHORT * 3 / 4)).await;
    ask_for(&linked, Duration::from_secs(3)).await;
    assert_eq!(linked.state(), State::Down);

    proxy.set(Fault::Pass).await;
    linked.until_recovered().await;
    let outage = [degraded(BackendErrorKind::Timeout), Event::Recovered];
    assert_eq!(linked.outages(), [before.as_slice(), &outage].concat());
}

#[tokio::test]
async fn d15_a_connection_that_goes_silent_is_given_up_and_a_new_one_taken() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), SHORT);
    linked.until_ready().await;

    proxy.set(Fault::DropReplies).await;
    assert_eq!(linked.fails().await, BackendErrorKind::Timeout);
    assert_eq!(linked.fails().await, BackendErrorKind::Timeout);
    assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));

    // The old connection stays silent for good.
    proxy.set(Fault::Pass).await;
    linked.until_recovered().await;
    linked.until_ready().await;
}
