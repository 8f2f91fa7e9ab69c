//! D09: nothing stays in Redis for ever.

use std::time::Duration;

use tokio::task::yield_now;
use tower_host_gate::observe::Operation;
use tower_host_gate::{HostGateLayer, Outcome, Queue};

use super::eye::{Eye, key};
use super::support::reactive;
use super::support::redis::{Proxy, Standalone};
use super::{FEED, HOST, Replica, eventually, millis, redis, secs, throttled};

/// Everything a host can have is written.
fn everything() -> HostGateLayer {
    reactive().quota(1000, secs(600)).min_delay(millis(1)).spacing(millis(1)).max_wait(secs(1))
}

/// Two replicas get into each other's way, whatever becomes of their connections.
async fn work(replicas: &[Replica; 2]) {
    let one = async |replica: &Replica| {
        for round in 0..4 {
            if let Ok(permit) = replica.within(secs(5), FEED).await {
                // The other one gets in line meanwhile.
                yield_now().await;
                permit.settle(if round % 2 == 0 { throttled(millis(1)) } else { Outcome::Success });
            }
            replica.hosts.penalize(HOST, millis(1));
            let _ = replica.hosts.get_shared(HOST).await;
        }
        replica.hosts.clear(HOST);
    };
    tokio::join!(one(&replicas[0]), one(&replicas[1]));
}

async fn whatever_is_cut(queue: Queue) {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let eye = Eye::open(&server).await;
    let store = || redis(&proxy.url()).queue(queue).timeout(millis(500));
    for commands in 1..=30 {
        eye.ask::<()>(&["FLUSHALL"]).await;
        let replicas =
            [Replica::connected(everything(), store()).await, Replica::connected(everything(), store()).await];
        let begun = proxy.traffic().commands;
        let cut = async {
            while proxy.traffic().commands < begun + commands {
                yield_now().await;
            }
            proxy.cut().await;
            assert_eq!(eye.immortal_keys().await, [""; 0], "cut after {commands} commands");
        };
        tokio::join!(work(&replicas), cut);
        assert_eq!(eye.immortal_keys().await, [""; 0], "some time after a cut after {commands} commands");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d09_a_connection_that_is_cut_between_any_two_commands_leaves_no_key_for_ever() {
    whatever_is_cut(Queue::Delegate).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d09_a_connection_that_is_cut_between_any_two_commands_leaves_no_key_for_ever_fifo() {
    whatever_is_cut(Queue::Fifo).await;
}

// --- a time to live that was lost -------------------------------------------------------------------------------------

/// Somebody has taken it away from all keys.
async fn persist_all(eye: &Eye, how_many: usize) {
    let keys = eye.keys().await;
    assert_eq!(keys.len(), how_many, "{keys:?}");
    for key in &keys {
        assert_eq!(eye.ask::<u8>(&["PERSIST", key]).await, 1, "{key} had a time to live");
    }
    assert_eq!(eye.immortal_keys().await, keys);
}

#[tokio::test]
async fn d09_state_leases_and_sends_get_their_time_to_live_back_from_the_next_admission() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let replica = Replica::connected(everything().concurrency(100), redis(&server.url())).await;
    let _first = replica.acquire(FEED).await;
    persist_all(&eye, 3).await;
    let _second = replica.acquire(FEED).await;
    assert_eq!(eye.immortal_keys().await, [""; 0]);
}

/// Somebody holds the only permit and somebody waits, which is written under this key; so does a third one then.
async fn is_repaired_by_the_next_who_waits(queue: Queue, suffix: &str) {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let store = || redis(&server.url()).queue(queue);
    let [holder, second, third] = [
        Replica::connected(everything(), store()).await,
        Replica::connected(everything(), store()).await,
        Replica::connected(everything(), store()).await,
    ];
    let _held = holder.acquire(FEED).await;
    let key = key(HOST, suffix);
    let repaired = async {
        eventually("the second waits", async || eye.ask::<u8>(&["EXISTS", &key]).await == 1).await;
        eventually("it was mortal", async || eye.ask::<u8>(&["PERSIST", &key]).await == 1).await;
        let repaired = eventually("it is so again", async || eye.immortal_keys().await.is_empty());
        tokio::select! {
            _ = third.within(secs(50), FEED) => panic!("the permit is taken"),
            () = repaired => {}
        }
    };
    tokio::select! {
        _ = second.within(secs(50), FEED) => panic!("the permit is taken"),
        () = repaired => {}
    }
}

#[tokio::test]
async fn d09_tickets_get_their_time_to_live_back_from_the_next_who_draws_one() {
    is_repaired_by_the_next_who_waits(Queue::Fifo, ":t").await;
}

#[tokio::test]
async fn d09_those_who_look_for_a_permit_give_their_key_its_time_to_live_back() {
    is_repaired_by_the_next_who_waits(Queue::Delegate, ":w").await;
}

#[tokio::test]
async fn d09_a_state_without_a_time_to_live_gets_one_from_whatever_writes_it() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let replica = Replica::connected(reactive(), redis(&server.url())).await;
    let writes: [(&str, &dyn Fn()); 2] =
        [("penalize", &|| replica.hosts.penalize(HOST, secs(30))), ("clear", &|| replica.hosts.clear(HOST))];
    for (name, write) in writes {
        write();
        eventually("it is written", async || !eye.keys().await.is_empty()).await;
        persist_all(&eye, 1).await;
        write();
        eventually(name, async || eye.immortal_keys().await.is_empty()).await;
    }
}

// --- long enough ------------------------------------------------------------------------------------------------------

/// How long a key still has to live.
async fn lives(eye: &Eye, suffix: &str) -> Duration {
    millis(eye.ask(&["PTTL", &key(HOST, suffix)]).await)
}

#[tokio::test]
async fn d09_every_key_lives_at_least_as_long_as_what_it_stores() {
    const HOUR: u64 = 3600;
    const A_MINUTE: Duration = secs(60);
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let layer = reactive().concurrency(100).quota(1000, secs(HOUR)).max_cooldown(secs(10 * HOUR));
    let replica = Replica::connected(layer, redis(&server.url()).lease_ttl(secs(2 * HOUR))).await;

    let _held = replica.acquire(FEED).await;
    assert!(lives(&eye, ":l").await > secs(2 * HOUR) - A_MINUTE);
    assert!(lives(&eye, ":q").await > secs(HOUR) - A_MINUTE);

    replica.acquire(FEED).await.settle(throttled(secs(3 * HOUR)));
    eventually("the store knows", async || replica.cooldown(HOST).await > secs(0)).await;
    assert!(lives(&eye, "").await > secs(3 * HOUR) - A_MINUTE);

    replica.hosts.penalize(HOST, secs(9 * HOUR));
    eventually("the store knows", async || replica.cooldown(HOST).await > secs(4 * HOUR)).await;
    assert!(lives(&eye, "").await > secs(9 * HOUR) - A_MINUTE);

    // Whoever remembers a cooldown from before has to hear of the clearing as long as that could last.
    replica.hosts.clear(HOST);
    eventually("the store knows", async || replica.cooldown(HOST).await == secs(0)).await;
    assert!(lives(&eye, "").await > secs(9 * HOUR) - A_MINUTE);
    assert!(replica.events.errors_of(Operation::Acquire).is_empty());
}

#[tokio::test]
async fn d09_a_shorter_setting_of_another_replica_shortens_no_life() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let long = reactive().concurrency(100).quota(1000, secs(3600)).min_delay(millis(1));
    let short = reactive().concurrency(100).quota(1000, secs(1)).min_delay(millis(1));
    let long = Replica::connected(long, redis(&server.url()).lease_ttl(secs(3600))).await;
    let short = Replica::connected(short, redis(&server.url()).lease_ttl(secs(1))).await;
    let _first = long.acquire(FEED).await;
    let _second = short.acquire(FEED).await;
    for suffix in [":l", ":q", ""] {
        assert!(lives(&eye, suffix).await > secs(3500), "{suffix}");
    }
}
