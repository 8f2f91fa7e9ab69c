//! What counts as a refusal, and what a response says about when to come back.

use std::time::SystemTime;

use tower::Layer as _;
use tower_host_gate::Throttled;

use super::backend::Backend;
use super::provider::Provider;
use super::support::script::Reply;
use super::{BASE, is_left, learned, ms, not_before, reactive, secs, send, shed, start, status, within};

const ZERO: std::time::Duration = ms(0);

pub async fn a_404_and_a_304_end_a_streak_like_any_success(backend: &Backend) {
    let provider = Provider::list([429, 404, 429, 304, 429].map(Reply::status));
    let [one, other] = backend.clients(&provider, reactive()).await;
    for (client, expected) in [(&one, 429), (&other, 404), (&one, 429), (&other, 304), (&one, 429)] {
        assert_eq!(status(client, backend.get("/")).await, expected);
    }
    assert_eq!(backend.events.streaks(), [1, 1, 1]);
}

pub async fn an_error_a_500_and_a_408_change_nothing(backend: &Backend) {
    let neutral = [Reply::error("connection reset"), Reply::status(500), Reply::status(408), Reply::status(503)];
    let provider = Provider::list([Reply::status(429)].into_iter().chain(neutral));
    let [one, other] = backend.replicas(reactive()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    for client in clients.iter().cycle().take(4) {
        let _ = send(client, backend.get("/")).await;
    }
    assert_eq!(provider.times().len(), 5);
    backend.settled(&one).await;
    let known = backend.known(&other).await.unwrap();
    assert_eq!((known.streak, known.cooldown), (1, ZERO));
}

pub async fn a_5xx_that_says_when_is_a_refusal(backend: &Backend) {
    let refused = |status| Reply::status(status).header("retry-after", "0.3");
    let provider = Provider::list([refused(503), refused(529)]);
    let [one, other] = backend.clients(&provider, reactive()).await;
    for (client, expected) in [(&one, 503), (&other, 529), (&one, 200)] {
        assert_eq!(status(client, backend.get("/")).await, expected);
    }
    let times = provider.times();
    not_before(times[1], times[0] + ms(300));
    not_before(times[2], times[1] + ms(300));
    assert_eq!(backend.events.streaks(), [1, 2]);
}

pub async fn a_headerless_403_between_successes_never_escalates(backend: &Backend) {
    // Without spacing a learning gate has forgotten the host by the next request.
    for layer in [reactive(), learned(), learned().spacing(ZERO)] {
        let provider = Provider::list([200, 403, 200, 403, 200, 403].map(Reply::status));
        let [one, other] = backend.clients(&provider, layer).await;
        for client in [&one, &other, &one, &other, &one, &other] {
            if let Some(throttled) = send(client, backend.get("/")).await.unwrap().extensions().get::<Throttled>() {
                assert!(throttled.soft && throttled.streak == 1 && throttled.retry_after <= BASE, "{throttled:?}");
            }
        }
        assert_eq!(backend.events.streaks(), [1, 1, 1]);
    }
}

pub async fn a_headerless_403_never_holds_longer_than_a_minute(backend: &Backend) {
    let provider = Provider::list([Reply::status(403)]);
    let [one, other] = backend.replicas(reactive().base_cooldown(secs(300)).max_cooldown(secs(3600))).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 403);
    backend.settled(&one).await;
    for client in &clients {
        assert!(shed(client, backend.get("/")).await.retry_after() <= secs(60));
    }
}

pub async fn a_403_that_says_when_is_a_refusal_like_any_other(backend: &Backend) {
    let provider = Provider::list([Reply::status(403).header("retry-after", "90"), Reply::ok()]);
    let [one, other] = backend.replicas(reactive()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    let response = send(&clients[0], backend.get("/")).await.unwrap();
    assert!(!response.extensions().get::<Throttled>().unwrap().soft);
    backend.settled(&one).await;
    let refused = shed(&clients[1], backend.get("/")).await;
    is_left(refused.retry_after(), secs(90), provider.now() - provider.times()[0]);
}

pub async fn retry_after_zero_is_no_hint(backend: &Backend) {
    escalates(backend, "0").await;
}

pub async fn a_past_date_is_no_hint(backend: &Backend) {
    escalates(backend, "Fri, 06 Nov 2015 08:49:37 GMT").await;
}

/// Refusals that say this are refusals which do not say when.
async fn escalates(backend: &Backend, retry_after: &str) {
    let refused = || Reply::status(429).header("retry-after", retry_after);
    let provider = Provider::list([refused(), refused()]);
    let [one, other] = backend.clients(&provider, reactive()).await;
    for (client, expected) in [(&one, 429), (&other, 429), (&one, 200)] {
        assert_eq!(status(client, backend.get("/")).await, expected);
    }
    let times = provider.times();
    not_before(times[1], times[0] + BASE);
    not_before(times[2], times[1] + 2 * BASE);
}

pub async fn milliseconds_win_over_retry_after(backend: &Backend) {
    let refused = Reply::status(429).header("retry-after", "3600").header("retry-after-ms", "350");
    holds_for(backend, refused, ms(350)).await;
}

pub async fn the_longest_of_several_values_counts(backend: &Backend) {
    let refused =
        Reply::status(429).header("retry-after", "0.1").header("retry-after", "0.5").header("retry-after", "x");
    holds_for(backend, refused, ms(500)).await;
}

/// A server whose clock is a day behind means what it says, by its own clock.
pub async fn a_date_counts_from_the_responses_own(backend: &Backend) {
    let date = |at: u64| httpdate_of(SystemTime::UNIX_EPOCH + secs(1_700_000_000 + at));
    let refused = Reply::status(429).header("date", &date(0)).header("retry-after", &date(1));
    holds_for(backend, refused, secs(1)).await;
}

fn httpdate_of(at: SystemTime) -> String {
    httpdate::fmt_http_date(at)
}

/// The next request, a sibling's, goes after that long and no later than it takes.
async fn holds_for(backend: &Backend, refused: Reply, hold: std::time::Duration) {
    let provider = Provider::list([refused]);
    let [one, other] = backend.clients(&provider, reactive()).await;
    let response = send(&one, backend.get("/")).await.unwrap();
    assert!(response.extensions().get::<Throttled>().unwrap().retry_after <= hold);
    drop(response);
    assert_eq!(status(&other, backend.get("/")).await, 200);
    let times = provider.times();
    not_before(times[1], times[0] + hold);
}

pub async fn nothing_left_of_the_servers_quota_holds_every_sibling(backend: &Backend) {
    let used_up = Reply::ok().header("ratelimit-remaining", "0").header("ratelimit-reset", "1");
    let provider = Provider::list([used_up]);
    let [one, other] = backend.clients(&provider, learned()).await;
    assert_eq!(status(&one, backend.get("/")).await, 200);
    assert_eq!(status(&other, backend.get("/")).await, 200);
    let times = provider.times();
    not_before(times[1], times[0] + secs(1));
}

pub async fn something_left_of_the_servers_quota_holds_nobody(backend: &Backend) {
    let left = Reply::ok().header("ratelimit-remaining", "5").header("ratelimit-reset", "100");
    let provider = Provider::always(left);
    let [one, other] = backend.replicas(learned()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    for client in clients.iter().cycle().take(4) {
        assert_eq!(status(client, within(ZERO, backend.get("/"))).await, 200);
        backend.settled(&one).await;
    }
}

pub async fn what_siblings_have_in_flight_counts_against_what_is_left(backend: &Backend) {
    let provider = Provider::new(|sent| match sent.path.as_str() {
        "/counted" => Reply::ok().header("ratelimit-remaining", "1").header("ratelimit-reset", "60"),
        _ => Reply::ok(),
    });
    let [one, other] = backend.replicas(learned().concurrency(3)).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    provider.withhold("/slow");
    let slow = start(&clients[1], backend.get("/slow"));
    provider.has_seen(1).await;
    // The one that is left is under way already.
    assert_eq!(status(&clients[0], backend.get("/counted")).await, 200);
    backend.until(&other, "the host is held", |host| host.is_some_and(|host| host.cooldown > secs(30))).await;
    shed(&clients[1], within(secs(20), backend.get("/"))).await;
    provider.answer("/slow");
    assert_eq!(slow.await.unwrap(), 200);
}

pub async fn reactive_pacing_minds_no_quota_headers(backend: &Backend) {
    let used_up = Reply::ok().header("ratelimit-remaining", "0").header("ratelimit-reset", "100");
    let provider = Provider::always(used_up);
    let [one, other] = backend.replicas(reactive()).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    for client in clients.iter().cycle().take(3) {
        assert_eq!(status(client, within(ZERO, backend.get("/"))).await, 200);
        backend.settled(&one).await;
    }
}
