//! Limits that are set beforehand: delay, quota, jitter; and which of all the limits counts.

use futures_util::future::join_all;
use tokio::time::sleep;
use tower::Layer as _;
use tower_host_gate::{DelayFrom, HostGate, HostGateLayer, Limits, Reason};

use super::backend::Backend;
use super::provider::Provider;
use super::support::script::Reply;
use super::{BASE, LONG, in_steps, is_left, learned, ms, not_before, reactive, secs, send, shed, status, within};

fn every(delay: std::time::Duration) -> HostGateLayer {
    learned().min_delay(delay).delay_from(DelayFrom::Send)
}

/// So many requests at once, on these clients in turn. All are served.
async fn all_at_once<const N: usize>(backend: &Backend, clients: &[HostGate<Provider>; N], requests: usize) {
    let requests = clients.iter().cycle().take(requests).map(|client| status(client, backend.get("/")));
    assert!(join_all(requests).await.into_iter().all(|status| status == 200));
}

pub async fn a_delay_from_the_send_keeps_sends_apart(backend: &Backend) {
    let provider = Provider::always(Reply::ok().after(ms(300)));
    let clients: [_; 3] = backend.clients(&provider, every(ms(80)).concurrency(9)).await;
    let began = provider.now();
    all_at_once(backend, &clients, 9).await;
    in_steps(&provider.times(), began, ms(80));
}

pub async fn a_delay_from_completion_counts_from_there(backend: &Backend) {
    let provider = Provider::always(Reply::ok().after(ms(200)));
    let layer = learned().min_delay(ms(800));
    let clients: [_; 2] = backend.clients(&provider, layer.clone()).await;
    let began = provider.now();
    all_at_once(backend, &clients, 3).await;
    in_steps(&provider.times(), began, if backend.differs() { ms(800) } else { ms(1000) });

    if backend.differs() {
        let provider = Provider::always(Reply::ok().after(ms(200)));
        let layers: [_; 2] = backend.replicas_with(layer, |redis| redis.spacing_only(true)).await;
        let clients = layers.map(|layer| layer.layer(provider.clone()));
        let began = provider.now();
        all_at_once(backend, &clients, 3).await;
        in_steps(&provider.times(), began, ms(1000));
    }
}

pub async fn a_quota_lets_so_many_go_in_each_window(backend: &Backend) {
    let provider = Provider::list([]);
    let clients: [_; 3] = backend.clients(&provider, learned().quota(5, ms(400)).concurrency(15)).await;
    let began = provider.now();
    all_at_once(backend, &clients, 15).await;
    let times = provider.times();
    for (window, sends) in (0..).zip(times.chunks(5)) {
        not_before(sends[0], began + ms(400) * window);
    }
}

/// No burst at the seam of two windows.
pub async fn a_quota_is_a_window_that_rolls(backend: &Backend) {
    let provider = Provider::list([]);
    let clients: [_; 2] = backend.clients(&provider, learned().quota(3, ms(900)).concurrency(8)).await;
    let began = provider.now();
    assert_eq!(status(&clients[0], backend.get("/")).await, 200);
    sleep(ms(600)).await;
    let later = provider.now();
    all_at_once(backend, &clients, 5).await;
    let times = provider.times();
    not_before(times[3], began + ms(900));
    not_before(times[4], later + ms(900));
}

pub async fn a_quota_counts_requests_that_fail(backend: &Backend) {
    let provider = Provider::list([Reply::error("connection reset"), Reply::status(500)]);
    let [one, other] = backend.clients(&provider, learned().quota(2, LONG)).await;
    for client in [&one, &other] {
        let _ = send(client, backend.get("/")).await;
    }
    assert_eq!(shed(&other, backend.get("/")).await.reason(), Reason::Quota);
    assert_eq!(provider.times().len(), 2);
}

pub async fn jitter_only_adds(backend: &Backend) {
    let provider = Provider::list([]);
    let clients: [_; 2] = backend.clients(&provider, every(ms(60)).jitter(ms(60)).concurrency(8)).await;
    let began = provider.now();
    all_at_once(backend, &clients, 8).await;
    in_steps(&provider.times(), began, ms(60));
}

/// A delay, a quota and a cooldown, of ten seconds each.
pub async fn the_longest_wait_counts_and_not_the_sum(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.replicas(every(secs(10)).quota(1, secs(10))).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 200);
    let began = provider.now();
    one.hosts().penalize(&backend.host(), secs(10));
    backend.until(&other, "the host is held", |host| host.is_some_and(|host| host.cooldown > ms(0))).await;
    for client in &clients {
        let refused = shed(client, within(ms(1), backend.get("/"))).await;
        is_left(refused.retry_after(), secs(10), provider.now() - began);
    }
}

pub async fn a_cooldown_and_a_delay_overlap(backend: &Backend) {
    let provider = Provider::list([Reply::status(429)]);
    let [one, other] = backend.clients(&provider, reactive().min_delay(3 * BASE).delay_from(DelayFrom::Send)).await;
    let began = provider.now();
    assert_eq!(status(&one, backend.get("/")).await, 429);
    assert_eq!(status(&other, backend.get("/")).await, 200);
    assert_eq!(status(&one, backend.get("/")).await, 200);
    in_steps(&provider.times(), began, 3 * BASE);
}

pub async fn a_limit_for_one_host_counts_for_every_sibling(backend: &Backend) {
    let provider = Provider::list([]);
    let own = Limits::default().quota(2, ms(500)).concurrency(6);
    let clients: [_; 2] = backend.clients(&provider, learned().per_host(&backend.host(), own)).await;
    let began = provider.now();
    all_at_once(backend, &clients, 6).await;
    for (window, sends) in (0..).zip(provider.times().chunks(2)) {
        not_before(sends[0], began + ms(500) * window);
    }
}
