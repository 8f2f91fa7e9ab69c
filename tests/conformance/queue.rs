//! Who goes next, and what becomes of those who give up.

use tokio::join;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tower::Layer as _;
use tower_host_gate::observe::WaitOutcome;
use tower_host_gate::{HostGate, HostGateLayer, Label, Reason};

use super::backend::Backend;
use super::events::Event;
use super::provider::Provider;
use super::support::script::Reply;
use super::{LONG, eventually, in_steps, learned, ms, reactive, secs, send, shed, start, status, within};

/// One request in flight, which stays there until the provider answers it.
async fn in_flight(backend: &Backend, provider: &Provider, client: &HostGate<Provider>) -> JoinHandle<u16> {
    provider.withhold("/first");
    let first = start(client, backend.get("/first"));
    provider.has_seen(1).await;
    first
}

/// Puts one more request into the queue of this process, behind `ahead` others of all processes.
async fn join_queue(
    backend: &Backend,
    layers: &[HostGateLayer],
    client: &HostGate<Provider>,
    path: &str,
    ahead: usize,
) -> JoinHandle<u16> {
    let task = start(client, backend.get(path));
    eventually("it waits", || backend.queued(layers) == ahead + 1).await;
    task
}

pub async fn first_come_first_served(backend: &Backend) {
    let provider = Provider::list([]);
    let layers = [backend.layer(learned()).await];
    let client = layers[0].layer(provider.clone());
    let first = in_flight(backend, &provider, &client).await;
    let paths = ["/a", "/b", "/c", "/d", "/e", "/f"];
    let mut tasks = vec![first];
    for (ahead, path) in paths.into_iter().enumerate() {
        tasks.push(join_queue(backend, &layers, &client, path, ahead).await);
    }
    provider.answer("/first");
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
    assert_eq!(provider.paths()[1..], paths, "at {:?}", provider.times());
}

pub async fn first_come_first_served_across_siblings(backend: &Backend) {
    let provider = Provider::list([]);
    let layers: [_; 3] = backend.replicas(learned()).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    let first = in_flight(backend, &provider, &clients[0]).await;
    let paths = ["/a", "/b", "/c", "/d", "/e", "/f"];
    let mut tasks = vec![first];
    for (ahead, (path, client)) in paths.into_iter().zip(clients.iter().cycle()).enumerate() {
        tasks.push(join_queue(backend, &layers, client, path, ahead).await);
        // Arrivals are told apart as well as a question of each process takes equally long.
        sleep(ms(300)).await;
        backend.known(&layers[ahead % 3]).await;
    }
    provider.answer("/first");
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
    assert_eq!(provider.paths()[1..], paths, "at {:?}", provider.times());
}

/// A process that always wants more does not keep the other one out.
pub async fn nobody_starves(backend: &Backend) {
    let provider = Provider::always(Reply::ok().after(ms(5)));
    let layers: [_; 2] = backend.replicas(learned()).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    let greedy = async {
        loop {
            join!(status(&clients[0], backend.get("/greedy")), status(&clients[0], backend.get("/greedy")));
        }
    };
    let modest = async {
        for _ in 0..5 {
            assert_eq!(status(&clients[1], backend.get("/modest")).await, 200);
        }
    };
    tokio::select! {
        () = modest => {}
        () = greedy => {}
    }
    assert_eq!(provider.peak(), 1);
}

pub async fn who_gives_up_is_not_in_the_way_of_the_next(backend: &Backend) {
    let provider = Provider::list([]);
    let layers: [_; 2] = backend.replicas(learned()).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    let first = in_flight(backend, &provider, &clients[0]).await;
    let gives_up = join_queue(backend, &layers, &clients[1], "/gives-up", 0).await;
    let next = join_queue(backend, &layers, &clients[1], "/next", 1).await;
    let last = join_queue(backend, &layers, &clients[0], "/last", 2).await;
    gives_up.abort();
    eventually("two wait", || backend.queued(&layers) == 2).await;
    provider.answer("/first");
    for task in [first, next, last] {
        assert_eq!(task.await.unwrap(), 200);
    }
    backend.settled(&layers[0]).await;
    assert_eq!(backend.queued(&layers), 0);
    let mut paths = provider.paths();
    paths.sort();
    assert_eq!(paths, ["/first", "/last", "/next"]);
}

pub async fn who_gives_up_in_a_cooldown_has_booked_nothing(backend: &Backend) {
    let provider = Provider::list([Reply::status(429).header("retry-after", "3")]);
    let layers: [_; 2] = backend.replicas(reactive().quota(2, LONG).spacing(secs(20))).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    for client in &clients {
        timeout(ms(100), send(client, backend.get("/gives-up"))).await.unwrap_err();
    }
    eventually("nobody waits", || backend.queued(&layers) == 0).await;
    assert_eq!(status(&clients[1], within(secs(15), backend.get("/next"))).await, 200);
    let times = provider.times();
    in_steps(&times, times[0], secs(3));
}

/// The first in the queue is who looks at the clock.
pub async fn the_next_waits_on_when_the_first_gives_up(backend: &Backend) {
    let provider = Provider::list([Reply::status(429).header("retry-after", "2")]);
    let layers: [_; 2] = backend.replicas(reactive().max_wait(LONG)).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    assert_eq!(status(&clients[0], backend.get("/")).await, 429);
    backend.settled(&layers[0]).await;
    let gives_up = join_queue(backend, &layers, &clients[1], "/gives-up", 0).await;
    let next = join_queue(backend, &layers, &clients[1], "/next", 1).await;
    gives_up.abort();
    assert_eq!(next.await.unwrap(), 200);
    in_steps(&provider.times(), provider.times()[0], secs(2));
}

pub async fn a_full_queue_turns_newcomers_away(backend: &Backend) {
    let provider = Provider::list([]);
    let layers = [backend.layer(learned().max_queue(2)).await];
    let client = layers[0].layer(provider.clone());
    let first = in_flight(backend, &provider, &client).await;
    let second = join_queue(backend, &layers, &client, "/", 0).await;
    let third = join_queue(backend, &layers, &client, "/", 1).await;
    let error = shed(&client, backend.get("/")).await;
    assert_eq!(error.reason(), Reason::QueueFull);
    assert!(error.retry_after() >= secs(1), "a guess");
    provider.answer("/first");
    for task in [first, second, third] {
        assert_eq!(task.await.unwrap(), 200);
    }
}

pub async fn every_wait_is_reported_once(backend: &Backend) {
    let provider = Provider::list([]);
    let layers: [_; 2] = backend.replicas(learned()).await;
    let clients = layers.each_ref().map(|layer| layer.layer(provider.clone()));
    let first = in_flight(backend, &provider, &clients[0]).await;
    let gives_up = join_queue(backend, &layers, &clients[1], "/", 0).await;
    let mut labelled = within(secs(30), backend.get("/"));
    labelled.extensions_mut().insert(Label("feeds"));
    let served = start(&clients[1], labelled);
    eventually("two wait", || backend.queued(&layers) == 2).await;
    shed(&clients[0], within(ms(200), backend.get("/"))).await;
    gives_up.abort();
    eventually("one waits", || backend.queued(&layers) == 1).await;
    provider.answer("/first");
    assert_eq!([first.await.unwrap(), served.await.unwrap()], [200, 200]);

    assert_eq!(backend.events.waits(), [WaitOutcome::Shed, WaitOutcome::Canceled, WaitOutcome::Acquired]);
    let events = backend.events.all();
    assert!(events.contains(&Event::Shed(Reason::InFlight)));
    let long_enough = |event: &Event| match event {
        Event::Waited { outcome: WaitOutcome::Acquired, waited, label } => {
            *waited >= ms(200) && *label == Some("feeds")
        }
        _ => false,
    };
    assert!(events.iter().any(long_enough), "{events:?}");
}
