//! How many requests are in flight, and what ends one.

use futures_util::future::join_all;
use http::{Method, Response};
use tower::Layer as _;
use tower_host_gate::{HostGate, Limits, PermitUntil, Reason, ResponseBody};

use super::backend::Backend;
use super::provider::Provider;
use super::support::client::drain;
use super::support::script::{Reply, ScriptBody, ScriptError};
use super::{BASE, learned, ms, not_before, reactive, send, shed, start, status, within};

/// A body that begins, and goes on for as long as somebody holds it.
fn endless() -> Reply {
    Reply::ok().body("the beginning").open_for_ever()
}

/// The next one is sent, a sibling of the last.
async fn is_free(backend: &Backend, client: &HostGate<Provider>) {
    assert_eq!(status(client, backend.get("/next")).await, 200);
}

/// The next one is not.
async fn is_taken(backend: &Backend, client: &HostGate<Provider>) {
    let error = shed(client, within(ms(250), backend.get("/too-early"))).await;
    assert_eq!(error.reason(), Reason::InFlight);
}

pub async fn no_more_are_in_flight_than_the_cap(backend: &Backend) {
    let provider = Provider::always(Reply::ok().after(ms(10)).body("a").open_for(ms(10)).body("b"));
    let clients: [_; 3] = backend.clients(&provider, learned().concurrency(4)).await;
    let requests = (0..60).map(|n| start(&clients[n % 3], backend.get("/")));
    for request in join_all(requests).await {
        assert_eq!(request.unwrap(), 200);
    }
    assert!(provider.peak() <= 4, "{} at one time", provider.peak());
    assert_eq!(provider.times().len(), 60);
}

pub async fn a_permit_lasts_until_the_body_ends(backend: &Backend) {
    let provider = Provider::list([Reply::ok().body("a").body("b")]);
    let [one, other] = backend.clients(&provider, learned()).await;
    let response = send(&one, backend.get("/")).await.unwrap();
    is_taken(backend, &other).await;
    assert_eq!(drain(response).await.unwrap(), "ab");
    is_free(backend, &other).await;
}

pub async fn a_body_that_is_dropped_or_fails_gives_its_permit_back(backend: &Backend) {
    let provider = Provider::list([endless(), Reply::ok().body("a").body_error("cut off")]);
    let [one, other] = backend.clients(&provider, learned()).await;
    let response = send(&one, backend.get("/")).await.unwrap();
    is_taken(backend, &other).await;
    drop(response);
    let response = send(&other, backend.get("/")).await.unwrap();
    is_taken(backend, &one).await;
    assert_eq!(drain(response).await.unwrap_err(), ScriptError("cut off".into()));
    is_free(backend, &one).await;
}

/// By a setting, by one for the host, and by the request's own word.
pub async fn a_permit_can_end_at_the_head(backend: &Backend) {
    let own = Limits::default().permit_until(PermitUntil::Head);
    let layers = [learned().permit_until(PermitUntil::Head), learned().per_host(&backend.host(), own), learned()];
    for (place, layer) in layers.into_iter().enumerate() {
        let provider = Provider::list([endless()]);
        let [one, other] = backend.clients(&provider, layer).await;
        let mut request = backend.get("/");
        if place == 2 {
            request.extensions_mut().insert(PermitUntil::Head);
        }
        let _unread = send(&one, request).await.unwrap();
        is_free(backend, &other).await;
    }
}

pub async fn what_has_no_body_gives_its_permit_back_at_the_head(backend: &Backend) {
    let provider = Provider::list([Reply::ok(), Reply::status(204), Reply::status(304), endless()]);
    let [one, other] = backend.clients(&provider, learned()).await;
    let mut unread: Vec<Response<ResponseBody<ScriptBody>>> = Vec::new();
    for (client, method) in [(&one, Method::GET), (&other, Method::GET), (&one, Method::GET), (&other, Method::HEAD)] {
        let mut request = backend.get("/");
        *request.method_mut() = method;
        unread.push(send(client, request).await.unwrap());
    }
    is_free(backend, &one).await;
}

pub async fn a_refusal_gives_its_permit_back_at_the_head(backend: &Backend) {
    let provider = Provider::list([Reply::status(429).body("slow down").open_for_ever()]);
    let [one, other] = backend.clients(&provider, reactive()).await;
    let unread = send(&one, backend.get("/")).await.unwrap();
    assert_eq!(unread.status(), 429);
    is_free(backend, &other).await;
    let times = provider.times();
    not_before(times[1], times[0] + BASE);
}

pub async fn an_error_passes_and_gives_its_permit_back(backend: &Backend) {
    let provider = Provider::list([Reply::error("connection reset")]);
    let [one, other] = backend.clients(&provider, learned()).await;
    let error = send(&one, backend.get("/")).await.unwrap_err();
    assert_eq!(error.downcast_ref(), Some(&ScriptError("connection reset".into())));
    is_free(backend, &other).await;
}

/// In the call, and in the future it gives.
pub async fn a_panic_gives_its_permit_back(backend: &Backend) {
    let provider = Provider::new(|sent| match sent.path.as_str() {
        "/in-the-call" => panic!("the script says: panic at once"),
        "/later" => Reply::panic(),
        _ => Reply::ok(),
    });
    let [one, other] = backend.clients(&provider, learned()).await;
    for path in ["/in-the-call", "/later"] {
        assert!(start(&one, backend.get(path)).await.unwrap_err().is_panic());
        is_free(backend, &other).await;
    }
}

pub async fn a_request_dropped_in_flight_gives_its_permit_back(backend: &Backend) {
    let provider = Provider::list([Reply::hang()]);
    let [one, other] = backend.clients(&provider, learned()).await;
    let hangs = start(&one, backend.get("/"));
    provider.has_seen(1).await;
    is_taken(backend, &other).await;
    hangs.abort();
    is_free(backend, &other).await;
}

/// Refused while the inner service was getting ready, the host is waited for again.
pub async fn nothing_is_sent_after_a_hold_it_has_not_waited_for(backend: &Backend) {
    let provider = Provider::new(|sent| match sent.path.as_str() {
        "/refused" => Reply::status(429).header("retry-after", "0.6"),
        _ => Reply::ok(),
    });
    let layer = backend.layer(reactive().concurrency(2)).await;
    let client = layer.layer(provider.clone());
    provider.withhold("/refused");
    let refused = start(&client, backend.get("/refused"));
    provider.has_seen(1).await;
    provider.is_not_ready();
    let admitted = start(&client, backend.get("/"));
    backend.until(&layer, "both have a permit", |host| host.is_some_and(|host| host.in_flight == 2)).await;
    let answered = provider.answer("/refused");
    assert_eq!(refused.await.unwrap(), 429);
    provider.get_ready();
    assert_eq!(admitted.await.unwrap(), 200);
    not_before(provider.times()[1], answered + ms(600));
}

/// Dropped while it got ready, a request has had a permit and sent nothing.
pub async fn an_inner_service_that_is_not_ready_fails_nobody_else(backend: &Backend) {
    let provider = Provider::list([]);
    let [one, other] = backend.replicas(learned()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    provider.is_not_ready();
    let unready = start(&clients[0], backend.get("/unready"));
    backend.until(&other, "it has a permit", |host| host.is_some_and(|host| host.in_flight == 1)).await;
    unready.abort();
    provider.get_ready();
    is_free(backend, &clients[1]).await;
    assert_eq!(provider.paths(), ["/next"]);
}
