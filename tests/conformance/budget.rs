//! One budget for queue and pacing: who is refused, when, and with what error.

use std::slice;
use std::time::Instant;

use tokio::join;
use tokio::time::sleep;
use tower::Layer as _;
use tower_host_gate::{Limits, OnShed, Reason, Shed};

use super::backend::Backend;
use super::provider::Provider;
use super::support::script::Reply;
use super::{
    BASE, LONG, TOLERANCE, eventually, is_left, learned, ms, not_before, reactive, secs, send, shed, start, status,
    within,
};

fn refused(after: &str) -> Reply {
    Reply::status(429).header("retry-after", after)
}

pub async fn past_its_budget_a_request_is_refused_at_once(backend: &Backend) {
    let provider = Provider::list([refused("60")]);
    let [one, other] = backend.replicas(reactive()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    backend.settled(&one).await;
    for client in &clients {
        let asked = Instant::now();
        let error = shed(client, within(secs(30), backend.get("/"))).await;
        assert!(asked.elapsed() < secs(20), "long before the budget ends");
        assert_eq!(error.reason(), Reason::Cooldown);
        is_left(error.retry_after(), secs(60), provider.now() - provider.times()[0]);
    }
}

/// Neither a permit, nor a place, nor a part of the quota.
pub async fn what_is_refused_has_booked_nothing(backend: &Backend) {
    let provider = Provider::list([refused("60")]);
    let [one, other] = backend.replicas(reactive().quota(2, LONG)).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    backend.settled(&one).await;
    for client in clients.iter().cycle().take(4) {
        shed(client, within(secs(5), backend.get("/"))).await;
    }
    backend.settled(&one).await;
    assert_eq!(backend.queued(&[one.clone(), other.clone()]), 0);
    backend.clear(&[one, other]).await;
    assert_eq!(status(&clients[1], backend.get("/")).await, 200);
}

/// Where nothing is in the way there is nothing to wait for.
pub async fn zero_never_waits(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.replicas(learned()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    provider.withhold("/slow");
    let slow = start(&clients[0], backend.get("/slow"));
    provider.has_seen(1).await;
    for client in &clients {
        let error = shed(client, within(ms(0), backend.get("/"))).await;
        assert_eq!(error.reason(), Reason::InFlight);
        assert!(error.retry_after() >= secs(1), "a guess");
    }
    provider.answer("/slow");
    assert_eq!(slow.await.unwrap(), 200);
    backend.settled(&one).await;
    assert_eq!(status(&clients[1], within(ms(0), backend.get("/"))).await, 200);
}

pub async fn a_request_brings_a_budget_of_its_own(backend: &Backend) {
    let longer = (reactive().max_wait(ms(0)), "0.3", secs(30), true);
    let shorter = (reactive(), "30", secs(1), false);
    for (layer, hint, own, is_sent) in [longer, shorter] {
        let provider = Provider::list([refused(hint)]);
        let [one, other] = backend.replicas(layer).await;
        let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
        assert_eq!(status(&clients[0], backend.get("/")).await, 429);
        backend.settled(&one).await;
        let request = within(own, backend.get("/"));
        if is_sent {
            assert_eq!(status(&clients[1], request).await, 200);
        } else {
            shed(&clients[0], request).await;
        }
    }
}

pub async fn a_budget_can_be_set_per_host(backend: &Backend) {
    let provider = Provider::list([refused("60")]);
    let layer = reactive().max_wait(LONG).per_host(&backend.host(), Limits::default().max_wait(secs(5)));
    let [one, other] = backend.replicas(layer).await;
    assert_eq!(status(&one.layer(provider.clone()), backend.get("/")).await, 429);
    backend.settled(&one).await;
    shed(&other.layer(provider), backend.get("/")).await;
}

pub async fn at_the_latest_the_budget_ends_the_wait(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.clients(&provider, learned()).await;
    provider.withhold("/slow");
    let slow = start(&one, backend.get("/slow"));
    provider.has_seen(1).await;
    let asked = provider.now();
    let wait = || within(ms(300), backend.get("/"));
    let (mine, siblings) = join!(shed(&one, wait()), shed(&other, wait()));
    not_before(provider.now(), asked + ms(300));
    for error in [mine, siblings] {
        assert_eq!(error.reason(), Reason::InFlight);
        assert!(error.retry_after() >= secs(1) && error.to_string().contains("bodies"), "{error}");
    }
    provider.answer("/slow");
    assert_eq!(slow.await.unwrap(), 200);
    assert_eq!(provider.paths(), ["/slow"]);
}

/// Of a second, most has gone in the queue when the cooldown begins.
pub async fn one_budget_covers_queue_and_pacing(backend: &Backend) {
    let provider = Provider::list([refused("0.7")]);
    let layer = backend.layer(reactive()).await;
    let client = layer.layer(provider.clone());
    provider.withhold("/first");
    let first = start(&client, backend.get("/first"));
    provider.has_seen(1).await;
    let second = within(secs(1), backend.get("/second"));
    let waiting = async {
        eventually("the second waits", || backend.queued(slice::from_ref(&layer)) == 1).await;
        sleep(ms(500)).await;
        provider.answer("/first");
    };
    let (error, ()) = join!(shed(&client, second), waiting);
    assert_eq!(first.await.unwrap(), 429);
    assert_eq!(error.reason(), Reason::Cooldown);
    assert!(error.retry_after() <= ms(700) + TOLERANCE);
    assert_eq!(provider.paths(), ["/first"]);
}

pub async fn a_refusal_turns_away_those_it_puts_past_their_budget(backend: &Backend) {
    let provider = Provider::list([refused("120")]);
    let layers: [_; 2] = backend.replicas(reactive()).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    provider.withhold("/first");
    let first = start(&clients[0], backend.get("/first"));
    provider.has_seen(1).await;
    let waiting = async {
        eventually("both wait", || backend.queued(&layers) == 2).await;
        provider.answer("/first");
        Instant::now()
    };
    let wait = || within(secs(40), backend.get("/"));
    let (mine, siblings, answered) = join!(shed(&clients[0], wait()), shed(&clients[1], wait()), waiting);
    assert!(answered.elapsed() < secs(20), "long before the budgets end");
    assert_eq!([mine.reason(), siblings.reason()], [Reason::Cooldown; 2]);
    assert_eq!(first.await.unwrap(), 429);
}

pub async fn every_field_of_an_error_after_a_refusal(backend: &Backend) {
    let provider = Provider::list([Reply::status(503).header("retry-after", "7200")]);
    let layer = backend.layer(reactive()).await;
    let client = layer.layer(provider.clone());
    assert_eq!(status(&client, backend.get("/")).await, 503);
    let error = shed(&client, backend.get("/")).await;
    assert_eq!((error.code(), error.host(), error.reason()), ("RATE_LIMITED", &*backend.host(), Reason::Cooldown));
    assert_eq!((error.asked(), error.raw_hint()), (Some(secs(7200)), Some("7200")));
    assert_eq!((error.status().unwrap().as_u16(), error.streak()), (503, 1));
    assert!(error.throttled_since().unwrap() <= tokio::time::Instant::now());
    is_left(error.retry_after(), secs(600), provider.now() - provider.times()[0]);
    let text = error.to_string();
    assert!(["cooldown", "503", &backend.host()].iter().all(|part| text.contains(part)), "{text}");
}

pub async fn a_sibling_is_told_when_to_come_back(backend: &Backend) {
    let provider = Provider::list([refused("90")]);
    let [one, other] = backend.replicas(reactive()).await;
    assert_eq!(status(&one.layer(provider.clone()), backend.get("/")).await, 429);
    backend.settled(&one).await;
    let error = shed(&other.layer(provider.clone()), backend.get("/")).await;
    assert_eq!((error.host(), error.reason(), error.streak()), (&*backend.host(), Reason::Cooldown, 1));
    is_left(error.retry_after(), secs(90), provider.now() - provider.times()[0]);
}

pub async fn an_error_for_want_of_distance(backend: &Backend) {
    let provider = Provider::list([Reply::status(429)]);
    let [one, other] = backend.clients(&provider, reactive().spacing(LONG)).await;
    assert_eq!(status(&one, backend.get("/")).await, 429);
    assert_eq!(status(&one, backend.get("/")).await, 200);
    for client in [&one, &other] {
        let error = shed(client, backend.get("/")).await;
        assert_eq!(error.reason(), Reason::Spacing);
        is_left(error.retry_after(), LONG, provider.now() - provider.times()[0]);
    }
}

pub async fn an_error_for_want_of_quota(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.clients(&provider, learned().quota(2, LONG)).await;
    let began = provider.now();
    for client in [&one, &other] {
        assert_eq!(status(client, backend.get("/")).await, 200);
    }
    for client in [&one, &other] {
        let error = shed(client, backend.get("/")).await;
        assert_eq!((error.reason(), error.status(), error.streak()), (Reason::Quota, None, 0));
        is_left(error.retry_after(), LONG, provider.now() - began);
    }
}

/// Behind two that wait for ten seconds each, a third waits for thirty.
pub async fn the_estimate_counts_those_ahead_of_the_caller(backend: &Backend) {
    let provider = Provider::list([Reply::status(429)]);
    let layer = backend.layer(reactive().spacing(secs(10))).await;
    let client = layer.layer(provider.clone());
    for expected in [429, 200] {
        assert_eq!(status(&client, backend.get("/")).await, expected);
    }
    let waiting = [(); 2].map(|()| start(&client, backend.get("/")));
    eventually("two wait", || backend.queued(slice::from_ref(&layer)) == 2).await;
    let error = shed(&client, within(secs(5), backend.get("/"))).await;
    is_left(error.retry_after(), secs(30), provider.now() - provider.times()[0] - BASE);
    for task in waiting {
        task.abort();
    }
}

pub async fn the_estimate_counts_those_ahead_of_the_caller_everywhere(backend: &Backend) {
    let provider = Provider::list([Reply::status(429)]);
    let [one, other] = backend.replicas(reactive().spacing(secs(10))).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    for expected in [429, 200] {
        assert_eq!(status(&clients[0], backend.get("/")).await, expected);
    }
    let waiting = start(&clients[0], backend.get("/"));
    eventually("one waits", || backend.queued(slice::from_ref(&one)) == 1).await;
    let error = shed(&clients[1], within(secs(5), backend.get("/"))).await;
    let left = if backend.differs() { secs(10) } else { secs(20) };
    is_left(error.retry_after(), left, provider.now() - provider.times()[0] - BASE);
    waiting.abort();
}

pub async fn a_refusal_can_be_a_response(backend: &Backend) {
    let provider = Provider::list([refused("90")]);
    let [one, other] = backend.replicas(reactive().on_shed(OnShed::Response)).await;
    assert_eq!(status(&one.layer(provider.clone()), backend.get("/")).await, 429);
    backend.settled(&one).await;
    let response = send(&other.layer(provider.clone()), backend.get("/")).await.unwrap();
    assert_eq!(response.status(), 429);
    let seconds: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    let error = response.extensions().get::<Shed>().unwrap().error();
    assert!(secs(seconds) >= error.retry_after() && secs(seconds) <= secs(91), "{seconds}");
    assert_eq!(provider.times().len(), 1);
}
