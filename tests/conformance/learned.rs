//! Learned pacing: what is remembered of a host, for every sibling.

use futures_util::future::join_all;
use tower::retry::RetryLayer;
use tower::{Layer as _, ServiceBuilder};
use tower_host_gate::retry::GateRetry;

use super::backend::Backend;
use super::provider::Provider;
use super::support::script::Reply;
use super::{BASE, SPACING, in_steps, learned, ms, not_before, reactive, start, status};

pub async fn a_warm_host_is_served_one_request_at_a_time(backend: &Backend) {
    let provider = Provider::new(|sent| if sent.n == 0 { Reply::status(429) } else { Reply::ok().after(ms(90)) });
    let layers: [_; 2] = backend.replicas(learned().concurrency(4)).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    backend.settled(&layers[0]).await;
    let requests = clients.iter().cycle().take(6).map(|client| status(client, backend.get("/")));
    assert_eq!(join_all(requests).await, [200; 6]);
    assert_eq!(provider.peak(), 1);
    let times = provider.times();
    in_steps(&times[1..], times[0] + BASE, ms(90));
}

/// Refused once, believed on trial; refused again, it is a limit of one request per [`BASE`].
fn a_lesson() -> Provider {
    Provider::list([429, 200, 429, 200].map(Reply::status))
}

pub async fn a_learned_gap_survives_success(backend: &Backend) {
    let provider = a_lesson();
    let [one, other] = backend.replicas(learned()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    for (client, expected) in clients.iter().cycle().zip([429, 200, 429, 200, 200, 200]) {
        assert_eq!(status(client, backend.get("/")).await, expected);
        backend.settled(&one).await;
    }
    for layer in [&one, &other] {
        let known = backend.known(layer).await.unwrap();
        assert!(known.streak == 0 && known.gap > ms(0), "{known:?}");
    }
}

pub async fn a_learned_gap_keeps_every_sibling(backend: &Backend) {
    let provider = a_lesson();
    let [one, other] = backend.clients(&provider, learned()).await;
    for (client, expected) in [(&one, 429), (&one, 200), (&one, 429), (&one, 200)] {
        assert_eq!(status(client, backend.get("/")).await, expected);
    }
    assert_eq!(status(&other, backend.get("/")).await, 200);
    let times = provider.times();
    // The fourth went a gap after the refusal at the earliest.
    not_before(times[4], times[2] + 2 * BASE);
}

pub async fn refused_alike_it_is_never_earlier_than_reactive(backend: &Backend) {
    for layer in [reactive(), learned()] {
        let provider = Provider::list([429, 429, 200, 429].map(Reply::status));
        let [one, other] = backend.replicas(layer).await;
        let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
        for (client, expected) in clients.iter().cycle().zip([429, 429, 200, 429]) {
            assert_eq!(status(client, backend.get("/")).await, expected);
            backend.settled(&one).await;
        }
        let rest: Vec<_> = clients.iter().map(|client| start(client, backend.get("/"))).collect();
        for request in rest {
            assert_eq!(request.await.unwrap(), 200);
        }
        let times = provider.times();
        not_before(times[1], times[0] + BASE);
        not_before(times[2], times[1] + 2 * BASE);
        not_before(times[3], times[1] + 2 * BASE + SPACING);
        in_steps(&times[4..], times[3] + BASE, SPACING);
    }
}

/// It may well be the URL's, not ours.
pub async fn a_second_headerless_403_of_one_request_does_not_escalate(backend: &Backend) {
    let provider = Provider::list([403, 403].map(Reply::status));
    let [one, other] = backend.replicas(learned()).await;
    let retrying = ServiceBuilder::new().layer(RetryLayer::new(GateRetry::new(3))).layer(one).service(provider.clone());
    assert_eq!(status(&retrying, backend.get("/")).await, 403);
    backend.settled(&other).await;
    assert_eq!(backend.known(&other).await.unwrap().streak, 1);
    assert_eq!(status(&other.layer(provider.clone()), backend.get("/")).await, 200);
    let times = provider.times();
    in_steps(&times, times[0], BASE);
}
