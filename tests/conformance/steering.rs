//! Looking at hosts, and changing them from outside.

use http::Uri;
use tokio::time::sleep;
use tower::Layer as _;
use tower_host_gate::{DelayFrom, Limits, Outcome, Reason};

use super::backend::Backend;
use super::provider::Provider;
use super::support::script::Reply;
use super::{LONG, eventually, is_left, learned, ms, not_before, reactive, secs, shed, start, status, within};

pub async fn a_penalty_holds_every_sibling(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.replicas(reactive()).await;
    let began = provider.now();
    one.hosts().penalize(&backend.host(), secs(2));
    backend.until(&other, "the host is held", |host| host.is_some_and(|host| host.cooldown > ms(0))).await;
    assert_eq!(backend.known(&other).await.unwrap().streak, 0, "it counts nothing");
    assert_eq!(status(&other.layer(provider.clone()), backend.get("/")).await, 200);
    not_before(provider.times()[0], began + secs(2));
}

pub async fn a_penalty_only_extends(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.replicas(reactive()).await;
    other.hosts().penalize(&backend.host(), ms(0));
    sleep(ms(50)).await;
    assert!(backend.known(&one).await.is_none(), "zero does nothing");

    let began = provider.now();
    for (layer, hold) in [(&one, 60), (&other, 5), (&one, 1), (&other, 0)] {
        layer.hosts().penalize(&backend.host(), secs(hold));
        backend.until(&other, "the host is held", |host| host.is_some_and(|host| host.cooldown > ms(0))).await;
    }
    sleep(ms(50)).await;
    for layer in [&one, &other] {
        is_left(backend.known(layer).await.unwrap().cooldown, secs(60), provider.now() - began);
        assert_eq!(shed(&layer.layer(provider.clone()), backend.get("/")).await.reason(), Reason::Cooldown);
    }
}

pub async fn a_penalty_is_capped(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.replicas(reactive().max_cooldown(secs(30)).max_wait(secs(10))).await;
    let began = provider.now();
    one.hosts().penalize(&backend.host(), secs(86_400));
    backend.until(&other, "the host is held", |host| host.is_some_and(|host| host.cooldown > ms(0))).await;
    let error = shed(&other.layer(provider.clone()), backend.get("/")).await;
    is_left(error.retry_after(), secs(30), provider.now() - began);
}

pub async fn clearing_forgets_the_host_for_every_sibling(backend: &Backend) {
    let provider = Provider::list([Reply::status(429).header("retry-after", "100")]);
    let [one, other] = backend.replicas(reactive()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    backend.settled(&one).await;
    shed(&clients[1], backend.get("/")).await;
    // By the one that was not refused itself.
    backend.clear(&[other, one]).await;
    for client in &clients {
        assert_eq!(status(client, backend.get("/")).await, 200);
    }
}

pub async fn clearing_lets_every_waiter_go(backend: &Backend) {
    let provider = Provider::list([Reply::status(429).header("retry-after", "300")]);
    let layers: [_; 2] = backend.replicas(reactive().max_wait(secs(500)).spacing(ms(0))).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    let waiting = clients.each_ref().map(|client| start(client, backend.get("/")));
    eventually("both wait", || backend.queued(&layers) == 2).await;
    backend.settled(&layers[0]).await;
    layers[0].hosts().clear(&backend.host());
    for task in waiting {
        assert_eq!(task.await.unwrap(), 200);
    }
}

pub async fn clearing_keeps_what_counts_towards_own_limits(backend: &Backend) {
    let provider = Provider::list([Reply::status(429).header("retry-after", "300")]);
    let [one, other] = backend.replicas(reactive().quota(1, LONG)).await;
    assert_eq!(status(&one.layer(provider.clone()), backend.get("/")).await, 429);
    backend.settled(&one).await;
    backend.clear(&[one, other.clone()]).await;
    assert_eq!(shed(&other.layer(provider), backend.get("/")).await.reason(), Reason::Quota);
}

pub async fn raising_the_cap_lets_waiters_go(backend: &Backend) {
    let provider = Provider::list([]);
    let layers: [_; 2] = backend.replicas(learned()).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    provider.withhold("/");
    let mut tasks = vec![start(&clients[0], backend.get("/"))];
    provider.has_seen(1).await;
    tasks.extend(clients.each_ref().map(|client| start(client, backend.get("/"))));
    eventually("both wait", || backend.queued(&layers) == 2).await;
    for layer in &layers {
        layer.hosts().set_limits(&backend.host(), Limits::default().concurrency(3));
    }
    provider.has_seen(3).await;
    provider.answer("/");
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
}

pub async fn lowering_the_cap_takes_nothing_away(backend: &Backend) {
    let provider = Provider::list([]);
    let layers: [_; 2] = backend.replicas(learned().concurrency(3)).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    for path in ["/a", "/b", "/c"] {
        provider.withhold(path);
    }
    let [a, b, c] = [("/a", 0), ("/b", 1), ("/c", 0)].map(|(path, client)| start(&clients[client], backend.get(path)));
    provider.has_seen(3).await;
    for layer in &layers {
        layer.hosts().set_limits(&backend.host(), Limits::default().concurrency(1));
    }
    // One of the three ends, then another one: there is no room before the last one has.
    for (path, task) in [("/a", a), ("/b", b)] {
        provider.answer(path);
        assert_eq!(task.await.unwrap(), 200);
        let error = shed(&clients[1], within(ms(200), backend.get("/next"))).await;
        assert_eq!(error.reason(), Reason::InFlight);
    }
    provider.answer("/c");
    assert_eq!(c.await.unwrap(), 200);
    assert_eq!(status(&clients[1], backend.get("/next")).await, 200);
}

pub async fn a_shorter_delay_lets_waiters_go(backend: &Backend) {
    let provider = Provider::list([]);
    let delay = |delay| Limits::default().min_delay(delay).delay_from(DelayFrom::Send);
    let layers = [backend.layer(learned().max_wait(secs(300)).per_host(&backend.host(), delay(secs(200)))).await];
    let client = layers[0].layer(provider.clone());
    let began = provider.now();
    assert_eq!(status(&client, backend.get("/")).await, 200);
    let waiting = start(&client, backend.get("/"));
    eventually("it waits", || backend.queued(&layers) == 1).await;
    layers[0].hosts().set_limits(&backend.host(), delay(ms(400)));
    assert_eq!(waiting.await.unwrap(), 200);
    not_before(provider.times()[1], began + ms(400));
}

fn uri(backend: &Backend) -> Uri {
    backend.get("/").uri().clone()
}

pub async fn acquire_holds_a_permit_against_every_sibling(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.replicas(learned()).await;
    let client = other.layer(provider.clone());
    let permit = one.hosts().acquire(&uri(backend), secs(30)).await.unwrap();
    assert_eq!(permit.host().unwrap().as_str(), backend.host());
    let error = shed(&client, within(ms(200), backend.get("/"))).await;
    assert_eq!(error.reason(), Reason::InFlight);
    drop(permit);
    assert_eq!(status(&client, backend.get("/")).await, 200);
}

pub async fn what_a_permit_is_settled_with_holds_every_sibling(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.replicas(reactive()).await;
    let permit = one.hosts().acquire(&uri(backend), secs(30)).await.unwrap();
    let settled = provider.now();
    permit.settle(Outcome::Throttled { hint: Some(ms(700)), soft: false });
    assert_eq!(status(&other.layer(provider.clone()), backend.get("/")).await, 200);
    not_before(provider.times()[0], settled + ms(700));
    assert_eq!(backend.events.streaks(), [1]);
}

pub async fn acquire_is_refused_past_its_budget(backend: &Backend) {
    let provider = Provider::list([Reply::status(429).header("retry-after", "100")]);
    let [one, other] = backend.replicas(reactive()).await;
    assert_eq!(status(&one.layer(provider.clone()), backend.get("/")).await, 429);
    backend.settled(&one).await;
    for layer in [&one, &other] {
        let error = layer.hosts().acquire(&uri(backend), secs(20)).await.unwrap_err();
        assert_eq!(error.reason(), Reason::Cooldown);
        is_left(error.retry_after(), secs(100), provider.now() - provider.times()[0]);
    }
}

pub async fn try_acquire_admits_at_a_free_host(backend: &Backend) {
    let layer = backend.layer(learned()).await;
    let permit = layer.hosts().try_acquire(&uri(backend));
    assert_eq!(permit.is_ok(), !backend.differs());
    drop(permit);
    backend.settled(&layer).await;

    let held = layer.hosts().acquire(&uri(backend), secs(30)).await.unwrap();
    assert!(layer.hosts().try_acquire(&uri(backend)).is_err(), "the host is taken");
    drop(held);
}

pub async fn a_snapshot_tells_who_waits_and_why(backend: &Backend) {
    let provider = Provider::list([]);
    let layers: [_; 1] = backend.replicas(learned().concurrency(2)).await;
    let client = layers[0].layer(provider.clone());
    assert!(layers[0].hosts().get(&backend.host()).is_none() && backend.known(&layers[0]).await.is_none());
    provider.withhold("/");
    let tasks = [(); 3].map(|()| start(&client, backend.get("/")));
    provider.has_seen(2).await;
    eventually("one waits", || backend.queued(&layers) == 1).await;
    let host = layers[0].hosts().get(&backend.host()).unwrap();
    assert_eq!((host.in_flight, host.queued, host.reason), (2, 1, Some(Reason::InFlight)));
    assert_eq!(backend.known(&layers[0]).await.unwrap().in_flight, 2);
    assert_eq!(layers[0].hosts().snapshot(), [host]);
    provider.answer("/");
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
}

pub async fn a_snapshot_tells_of_the_last_refusal(backend: &Backend) {
    let provider = Provider::list([Reply::status(503).header("retry-after", "90")]);
    let layer = backend.layer(reactive()).await;
    assert_eq!(status(&layer.layer(provider.clone()), backend.get("/")).await, 503);
    let own = layer.hosts().get(&backend.host()).unwrap();
    assert_eq!((own.last_hint, own.last_status.unwrap().as_u16()), (secs(90), 503));
    backend.settled(&layer).await;
    for host in [own, backend.known(&layer).await.unwrap()] {
        let since = provider.now() - provider.times()[0];
        is_left(host.cooldown, secs(90), since);
        is_left(host.next_send, secs(90), since);
        is_left(host.warm, secs(90) + LONG, since);
        assert_eq!((host.streak, host.gap, host.reason), (1, ms(0), Some(Reason::Cooldown)));
    }
}
