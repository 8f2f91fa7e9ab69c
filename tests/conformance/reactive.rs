//! A refusal and what follows from it: cooldown, escalation, warmth and spacing.

use futures_util::future::join_all;
use tokio::join;
use tokio::time::sleep;
use tower::Layer as _;
use tower_host_gate::Throttled;

use super::backend::Backend;
use super::provider::Provider;
use super::support::script::Reply;
use super::{BASE, LONG, SPACING, in_steps, is_left, ms, not_before, reactive, secs, send, start, status};

fn refused(after: &str) -> Reply {
    Reply::status(429).header("retry-after", after)
}

pub async fn nothing_is_paced_before_the_first_refusal(backend: &Backend) {
    let provider = Provider::list([]);
    let clients: [_; 2] = backend.clients(&provider, reactive().concurrency(3).spacing(LONG).max_wait(secs(30))).await;
    let requests = clients.iter().cycle().take(12).map(|client| status(client, backend.get("/")));
    assert_eq!(join_all(requests).await, [200; 12]);
}

pub async fn a_refusal_holds_every_sibling(backend: &Backend) {
    let provider = Provider::list([Reply::status(429)]);
    let [one, other] = backend.clients(&provider, reactive()).await;
    assert_eq!(status(&one, backend.get("/")).await, 429);
    join!(status(&other, backend.get("/")), status(&one, backend.get("/")));
    let times = provider.times();
    in_steps(&times[1..], times[0] + BASE, SPACING);
}

pub async fn each_further_refusal_doubles_the_cooldown(backend: &Backend) {
    let provider = Provider::list([429, 429, 429].map(Reply::status));
    let [one, other] = backend.clients(&provider, reactive().base_cooldown(ms(100))).await;
    let mut streaks = Vec::new();
    for (client, cooldown) in [(&one, 100), (&other, 200), (&one, 400)] {
        let before = provider.now();
        let response = send(client, backend.get("/")).await.unwrap();
        let throttled = response.extensions().get::<Throttled>().unwrap();
        streaks.push(throttled.streak);
        is_left(throttled.retry_after, ms(cooldown), provider.now() - before);
    }
    assert_eq!(streaks, [1, 2, 3]);
    assert_eq!(status(&other, backend.get("/")).await, 200);
    let times = provider.times();
    not_before(times[1], times[0] + ms(100));
    not_before(times[2], times[1] + ms(200));
    not_before(times[3], times[2] + ms(400));
}

pub async fn a_cooldown_is_capped(backend: &Backend) {
    let provider = Provider::always(Reply::status(429));
    let layer = reactive().base_cooldown(ms(100)).max_cooldown(ms(150));
    let [one, other] = backend.clients(&provider, layer).await;
    for client in [&one, &other, &one, &other] {
        let response = send(client, backend.get("/")).await.unwrap();
        assert!(response.extensions().get::<Throttled>().unwrap().retry_after <= ms(150));
    }
    let times = provider.times();
    not_before(times[1], times[0] + ms(100));
    in_steps(&times[1..], times[1], ms(150));
}

pub async fn a_servers_own_wait_is_honoured(backend: &Backend) {
    let provider = Provider::list([refused("0.4")]);
    let [one, other] = backend.clients(&provider, reactive()).await;
    assert_eq!(status(&one, backend.get("/")).await, 429);
    assert_eq!(status(&other, backend.get("/")).await, 200);
    let times = provider.times();
    not_before(times[1], times[0] + ms(400));
}

pub async fn a_servers_own_wait_is_capped(backend: &Backend) {
    let provider = Provider::list([refused("3600")]);
    let [one, other] = backend.clients(&provider, reactive().max_cooldown(ms(300))).await;
    let response = send(&one, backend.get("/")).await.unwrap();
    assert!(response.extensions().get::<Throttled>().unwrap().retry_after <= ms(300));
    assert_eq!(status(&other, backend.get("/")).await, 200);
    let times = provider.times();
    not_before(times[1], times[0] + ms(300));
}

/// The longer one first, and last.
pub async fn a_cooldown_never_gets_shorter(backend: &Backend) {
    let provider = Provider::new(|sent| match sent.path.as_str() {
        "/long" => refused("0.6"),
        "/short" => refused("0.2"),
        _ => Reply::ok(),
    });
    let [one, other] = backend.replicas(reactive().concurrency(2)).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    for paths in [["/long", "/short"], ["/short", "/long"]] {
        let seen = provider.times().len();
        for path in paths {
            provider.withhold(path);
        }
        let tasks = [start(&clients[0], backend.get(paths[0])), start(&clients[1], backend.get(paths[1]))];
        provider.has_seen(seen + 2).await;
        let mut answered_long = ms(0);
        for (path, task) in paths.into_iter().zip(tasks) {
            let answered = provider.answer(path);
            assert_eq!(task.await.unwrap(), 429);
            if path == "/long" {
                answered_long = answered;
            }
        }
        backend.settled(&one).await;
        assert_eq!(status(&clients[1], backend.get("/")).await, 200);
        not_before(*provider.times().last().unwrap(), answered_long + ms(600));
        backend.settled(&one).await;
        backend.clear(&[one.clone(), other.clone()]).await;
    }
}

pub async fn a_burst_of_refusals_is_one_event(backend: &Backend) {
    let provider = Provider::always(Reply::status(429));
    let layers: [_; 2] = backend.replicas(reactive().concurrency(4).base_cooldown(secs(1))).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    for event in 1..=2 {
        provider.withhold("/");
        let burst: Vec<_> = clients.iter().cycle().take(4).map(|client| start(client, backend.get("/"))).collect();
        // A warm host is sent to one by one, so the second burst takes its time, and is one all the same.
        provider.has_seen(4 * event).await;
        provider.answer("/");
        for task in burst {
            assert_eq!(task.await.unwrap(), 429);
        }
        backend.settled(&layers[0]).await;
        let known = backend.known(&layers[1]).await.unwrap();
        assert_eq!(known.streak as usize, event);
        assert!(known.cooldown <= secs(2));
    }
    // Each process hears of an event by its own refusal.
    let processes = if backend.differs() { 2 } else { 1 };
    assert_eq!(backend.events.streaks().len(), 2 * processes);
}

pub async fn a_late_refusal_lengthens_the_cooldown_and_counts_nothing(backend: &Backend) {
    let provider = Provider::new(|sent| match sent.path.as_str() {
        "/early" => Reply::status(429),
        "/late" => refused("0.6"),
        _ => Reply::ok(),
    });
    let [one, other] = backend.replicas(reactive().concurrency(2)).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    provider.withhold("/late");
    let late = start(&clients[1], backend.get("/late"));
    provider.has_seen(1).await;
    assert_eq!(status(&clients[0], backend.get("/early")).await, 429);
    backend.until(&other, "the refusal is known", |host| host.is_some_and(|host| host.streak == 1)).await;
    let answered = provider.answer("/late");
    assert_eq!(late.await.unwrap(), 429);
    backend.settled(&one).await;
    assert_eq!(backend.known(&one).await.unwrap().streak, 1);
    assert_eq!(status(&clients[0], backend.get("/")).await, 200);
    not_before(provider.times()[2], answered + ms(600));
}

pub async fn a_refusal_of_something_sent_before_the_last_one_does_not_escalate(backend: &Backend) {
    let provider = Provider::always(Reply::status(429));
    let [one, other] = backend.replicas(reactive().concurrency(2)).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    provider.withhold("/old");
    let old = start(&clients[1], backend.get("/old"));
    provider.has_seen(1).await;
    for _ in 0..2 {
        assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    }
    backend.until(&other, "both refusals are known", |host| host.is_some_and(|host| host.streak == 2)).await;
    provider.answer("/old");
    assert_eq!(old.await.unwrap(), 429);
    backend.settled(&one).await;
    assert_eq!(backend.known(&other).await.unwrap().streak, 2);
}

pub async fn only_a_success_sent_after_the_last_refusal_ends_the_streak(backend: &Backend) {
    let provider = Provider::new(|sent| Reply::status(if sent.path == "/refused" { 429 } else { 200 }));
    let [one, other] = backend.replicas(reactive().concurrency(2)).await;
    let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/refused")).await, 429);
    backend.settled(&one).await;
    provider.withhold("/old");
    let old = start(&clients[1], backend.get("/old"));
    provider.has_seen(2).await;
    assert_eq!(status(&clients[0], backend.get("/refused")).await, 429);
    backend.until(&other, "both refusals are known", |host| host.is_some_and(|host| host.streak == 2)).await;
    provider.answer("/old");
    assert_eq!(old.await.unwrap(), 200);
    backend.settled(&one).await;
    assert_eq!(backend.known(&other).await.unwrap().streak, 2);
    assert_eq!(status(&clients[1], backend.get("/new")).await, 200);
    backend.until(&one, "the streak is over", |host| host.is_some_and(|host| host.streak == 0)).await;
}

/// Booked before anybody sleeps: however many wait, and wherever, they do not all go at the end of the same wait.
pub async fn a_warm_host_is_sent_to_at_a_distance(backend: &Backend) {
    let provider = Provider::list([Reply::status(429)]);
    let layers: [_; 3] = backend.replicas(reactive().concurrency(6)).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    backend.settled(&layers[0]).await;
    let requests = clients.iter().cycle().take(9).map(|client| status(client, backend.get("/")));
    assert_eq!(join_all(requests).await, [200; 9]);
    let times = provider.times();
    in_steps(&times[1..], times[0] + BASE, SPACING);
}

/// However long the cooldown: whoever waits for its end books its own send, and nothing besides.
pub async fn who_waits_for_a_cooldown_books_one_send(backend: &Backend) {
    for cooldown in [ms(30), ms(80), ms(300)] {
        let provider = Provider::list([Reply::status(429)]);
        let layer = reactive().base_cooldown(cooldown).spacing(LONG).quota(2, LONG);
        let [one, other] = backend.replicas(layer).await;
        let clients = [&one, &other].map(|layer| layer.layer(provider.clone()));
        assert_eq!(status(&clients[0], backend.get("/")).await, 429);
        backend.settled(&one).await;
        assert_eq!(status(&clients[1], backend.get("/")).await, 200);
        let times = provider.times();
        not_before(times[1], times[0] + cooldown);
    }
}

pub async fn warmth_counts_from_the_end_of_the_cooldown(backend: &Backend) {
    let provider = Provider::list([refused("60")]);
    let [one, other] = backend.replicas(reactive().warm_for(secs(10))).await;
    assert_eq!(status(&one.layer(provider), backend.get("/")).await, 429);
    backend.settled(&one).await;
    for layer in [&one, &other] {
        let host = backend.known(layer).await.unwrap();
        let warm_after = host.warm - host.cooldown;
        assert!(warm_after.abs_diff(secs(10)) < ms(2), "{warm_after:?} behind the cooldown");
    }
}

pub async fn a_streak_ends_when_the_host_is_cold(backend: &Backend) {
    let provider = Provider::always(Reply::status(429));
    let [one, other] = backend.replicas(reactive().base_cooldown(ms(100)).warm_for(ms(100)).spacing(ms(0))).await;
    assert_eq!(status(&one.layer(provider.clone()), backend.get("/")).await, 429);
    backend.settled(&one).await;
    sleep(ms(250)).await;
    assert_eq!(status(&other.layer(provider), backend.get("/")).await, 429);
    assert_eq!(backend.events.streaks(), [1, 1]);
}

pub async fn a_cold_host_is_not_paced(backend: &Backend) {
    let provider = Provider::list([Reply::status(429)]);
    let layer = reactive().concurrency(4).warm_for(ms(50)).spacing(LONG).max_wait(secs(30));
    let layers: [_; 2] = backend.replicas(layer).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    backend.settled(&layers[0]).await;
    sleep(BASE + secs(1)).await;
    let requests = clients.iter().cycle().take(4).map(|client| status(client, backend.get("/")));
    assert_eq!(join_all(requests).await, [200; 4]);
}

pub async fn who_waits_looks_again_before_it_sends(backend: &Backend) {
    let provider = Provider::list([refused("2")]);
    let [one, other] = backend.replicas(reactive()).await;
    let client = one.layer(provider.clone());
    assert_eq!(status(&client, backend.get("/")).await, 429);
    let waiting = start(&client, backend.get("/"));
    let penalized = provider.now();
    other.hosts().penalize(&backend.host(), ms(2600));
    assert_eq!(waiting.await.unwrap(), 200);
    not_before(provider.times()[1], penalized + ms(2600));
}
