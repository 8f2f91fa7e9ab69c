//! The retry below the gate, which holds its permit, and the one above, whose wait is the gate's.

use tokio::time::Instant;
use tower::retry::{Retry, RetryLayer};
use tower::{Layer as _, ServiceBuilder};
use tower_host_gate::retry::{GateRetry, InFlightRetry};
use tower_host_gate::{HostGate, HostGateLayer, Reason};

use super::backend::Backend;
use super::provider::Provider;
use super::support::script::Reply;
use super::{
    BASE, LONG, SPACING, TOLERANCE, eventually, in_steps, learned, ms, not_before, reactive, secs, shed, start, status,
    within,
};

fn refused(after: &str) -> Reply {
    Reply::status(429).header("retry-after", after)
}

// ---------------------------------------------------------------------------------------------------------------------
// Below
// ---------------------------------------------------------------------------------------------------------------------

/// Waits a tenth of a second where the server does not say, and never longer than three.
fn below(layer: &HostGateLayer, provider: &Provider) -> HostGate<Retry<InFlightRetry, Provider>> {
    let policy = layer.in_flight_retry().base_delay(ms(100)).max_delay(secs(3));
    ServiceBuilder::new().layer(layer.clone()).layer(RetryLayer::new(policy)).service(provider.clone())
}

pub async fn in_flight_both_attempts_hold_one_permit(backend: &Backend) {
    let provider = Provider::list([refused("0.5")]);
    let layers: [_; 2] = backend.replicas(reactive()).await;
    provider.withhold("/first");
    let first = start(&below(&layers[0], &provider), backend.get("/first"));
    provider.has_seen(1).await;
    let sibling = start(&layers[1].layer(provider.clone()), backend.get("/sibling"));
    eventually("the sibling waits", || backend.queued(&layers) == 1).await;
    let answered = provider.answer("/first");
    assert_eq!([first.await.unwrap(), sibling.await.unwrap()], [200, 200]);
    assert_eq!(provider.paths(), ["/first", "/first", "/sibling"]);
    not_before(provider.times()[1], answered + ms(500));
}

/// While the second attempt is still to come.
pub async fn in_flight_the_first_refusal_holds_siblings_at_once(backend: &Backend) {
    let provider = Provider::list([refused("100")]);
    let [one, other] = backend.replicas(reactive().concurrency(2)).await;
    let retrying = start(&below(&one, &provider), backend.get("/"));
    backend.until(&other, "the refusal is known", |host| host.is_some_and(|host| host.streak == 1)).await;
    assert_eq!(provider.times().len(), 1);
    let error = shed(&other.layer(provider.clone()), backend.get("/")).await;
    assert_eq!(error.reason(), Reason::Cooldown);
    retrying.abort();
}

pub async fn in_flight_both_refusals_are_one_event(backend: &Backend) {
    let provider = Provider::list([429, 429].map(Reply::status));
    let [one, other] = backend.replicas(reactive().base_cooldown(secs(30))).await;
    assert_eq!(status(&below(&one, &provider), backend.get("/")).await, 429);
    assert_eq!(provider.times().len(), 2, "two attempts, and no more");
    backend.settled(&one).await;
    let known = backend.known(&other).await.unwrap();
    assert!(known.streak == 1 && known.cooldown <= secs(30), "{known:?}");
    assert_eq!(backend.events.streaks(), [1]);
}

/// The host is held for minutes, the attempt waits for three seconds.
pub async fn in_flight_nobody_waits_for_its_own_cooldown(backend: &Backend) {
    let provider = Provider::list([refused("300")]);
    let [one, other] = backend.replicas(reactive()).await;
    assert_eq!(status(&below(&one, &provider), backend.get("/")).await, 200);
    let times = provider.times();
    not_before(times[1], times[0] + secs(3));
    backend.settled(&one).await;
    assert_eq!(shed(&other.layer(provider), backend.get("/")).await.reason(), Reason::Cooldown);
}

/// Where the quota has no room for it, there is none.
pub async fn in_flight_the_second_attempt_counts_towards_the_quota(backend: &Backend) {
    for (quota, attempts) in [(1, 1), (2, 2)] {
        let provider = Provider::list([Reply::status(429)]);
        let [one, other] = backend.replicas(reactive().quota(quota, LONG)).await;
        let expected = if attempts == 1 { 429 } else { 200 };
        assert_eq!(status(&below(&one, &provider), backend.get("/")).await, expected);
        assert_eq!(provider.times().len(), attempts);
        backend.settled(&one).await;
        assert_eq!(shed(&other.layer(provider), backend.get("/")).await.reason(), Reason::Quota);
    }
}

pub async fn a_retry_below_the_gate_counts_what_siblings_have_sent(backend: &Backend) {
    let provider = Provider::list([200, 429].map(Reply::status));
    let [one, other] = backend.replicas(reactive().quota(2, LONG)).await;
    assert_eq!(status(&other.layer(provider.clone()), backend.get("/")).await, 200);
    let retrying = status(&below(&one, &provider), backend.get("/")).await;
    let expected = if backend.differs() { (200, 3) } else { (429, 2) };
    assert_eq!((retrying, provider.times().len()), expected);
    // However many went, there is no room for another one.
    backend.settled(&one).await;
    assert_eq!(shed(&other.layer(provider), backend.get("/")).await.reason(), Reason::Quota);
}

// ---------------------------------------------------------------------------------------------------------------------
// Above
// ---------------------------------------------------------------------------------------------------------------------

fn above(attempts: u32, layer: &HostGateLayer, provider: &Provider) -> Retry<GateRetry, HostGate<Provider>> {
    ServiceBuilder::new()
        .layer(RetryLayer::new(GateRetry::new(attempts)))
        .layer(layer.clone())
        .service(provider.clone())
}

pub async fn the_pacing_is_the_wait_of_a_retry(backend: &Backend) {
    let provider = Provider::list([refused("0.4"), Reply::status(429)]);
    let [one, other] = backend.replicas(reactive()).await;
    let sibling = start(&other.layer(provider.clone()), backend.get("/"));
    assert_eq!(sibling.await.unwrap(), 429);
    assert_eq!(status(&above(3, &one, &provider), backend.get("/")).await, 200);
    let times = provider.times();
    assert_eq!(times.len(), 3);
    not_before(times[1], times[0] + ms(400));
    not_before(times[2], times[1] + 2 * BASE);
}

pub async fn all_attempts_share_one_budget(backend: &Backend) {
    let provider = Provider::always(refused("1"));
    let layer = backend.layer(reactive()).await;
    let asked = Instant::now();
    let error = shed(&above(9, &layer, &provider), within(ms(1700), backend.get("/"))).await;
    assert_eq!(error.reason(), Reason::Cooldown);
    assert!(error.retry_after() <= secs(1) + TOLERANCE);
    // A slow machine has used the budget up after the first.
    assert!(provider.times().len() <= 2, "{:?} in {:?}", provider.times(), asked.elapsed());
}

pub async fn a_retried_request_goes_before_those_behind_it(backend: &Backend) {
    let provider = Provider::list([refused("1.5")]);
    let layers = [backend.layer(reactive()).await];
    provider.withhold("/first");
    let first = start(&above(2, &layers[0], &provider), backend.get("/first"));
    provider.has_seen(1).await;
    let client = layers[0].layer(provider.clone());
    let second = start(&client, backend.get("/second"));
    eventually("one waits", || backend.queued(&layers) == 1).await;
    let third = start(&client, backend.get("/third"));
    eventually("two wait", || backend.queued(&layers) == 2).await;
    let answered = provider.answer("/first");
    for task in [first, second, third] {
        assert_eq!(task.await.unwrap(), 200);
    }
    assert_eq!(provider.paths(), ["/first", "/first", "/second", "/third"]);
    in_steps(&provider.times()[1..], answered + ms(1500), SPACING);
}

pub async fn what_was_shed_is_not_retried(backend: &Backend) {
    let provider = Provider::list([refused("100")]);
    let [one, other] = backend.replicas(learned()).await;
    assert_eq!(status(&one.layer(provider.clone()), backend.get("/")).await, 429);
    backend.settled(&one).await;
    shed(&above(5, &other, &provider), backend.get("/")).await;
    assert_eq!(provider.times().len(), 1);
    assert_eq!(backend.events.waits().len(), 1, "asked for once");
}

pub async fn a_headerless_403_is_retried_once(backend: &Backend) {
    let provider = Provider::always(Reply::status(403));
    let layer = backend.layer(reactive()).await;
    assert_eq!(status(&above(5, &layer, &provider), backend.get("/")).await, 403);
    let times = provider.times();
    assert_eq!(times.len(), 2);
    not_before(times[1], times[0] + BASE);
}
