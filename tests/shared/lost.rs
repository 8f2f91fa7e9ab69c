//! D18, D19: Redis is full, has lost what it was told, or has something else under its name.

use tokio::time::timeout;
use tower_host_gate::observe::Operation;
use tower_host_gate::shared::BackendErrorKind;
use tower_host_gate::{HostGateLayer, Outcome, Queue, Reason};

use super::eye::{Eye, key};
use super::support::reactive;
use super::support::redis::Standalone;
use super::{FEED, HOST, LONG, Replica, eventually, millis, redis, secs, throttled};

// --- D18 --------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn d18_while_redis_is_out_of_memory_each_request_is_decided_in_process() {
    let server = Standalone::start_with(&["--maxmemory-policy", "noeviction"]).await;
    let eye = Eye::open(&server).await;
    let replica = Replica::connected(HostGateLayer::new().concurrency(2), redis(&server.url())).await;
    drop(replica.acquire(FEED).await);

    eye.ask::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let held = [replica.acquire(FEED).await, replica.acquire(FEED).await];
    assert!(replica.at_once(FEED).await.is_err(), "the cap of this process holds");
    let errors = replica.events.errors_of(Operation::Acquire);
    assert!(!errors.is_empty());
    assert!(errors.iter().all(|failure| failure.kind == BackendErrorKind::OutOfMemory), "{errors:?}");
    drop(held);

    eye.ask::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    eventually("permits are leases again", async || {
        let _permit = replica.acquire(FEED).await;
        eye.leases(HOST).await == 1
    })
    .await;
    assert!(replica.events.degraded().is_empty(), "there is a connection all the while");
}

#[tokio::test]
async fn d18_a_penalty_that_redis_had_no_memory_for_holds_here_and_is_told_when_it_has() {
    let server = Standalone::start_with(&["--maxmemory-policy", "noeviction"]).await;
    let eye = Eye::open(&server).await;
    // Without leases: a script that has taken one away may go on writing, memory or not.
    let replica = Replica::connected(reactive(), redis(&server.url()).spacing_only(true)).await;
    eye.ask::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    replica.hosts.penalize(HOST, secs(50));
    eventually("it is told of", async || !replica.events.errors_of(Operation::Penalize).is_empty()).await;
    assert_eq!(replica.at_once(FEED).await.unwrap_err().reason(), Reason::Cooldown);

    eye.ask::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    eventually("others are held", async || {
        drop(replica.acquire("http://other.example/").await);
        replica.cooldown(HOST).await > secs(0)
    })
    .await;
}

#[tokio::test]
async fn d18_a_cooldown_that_was_evicted_still_holds_whoever_knew_of_it() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let [refused, knowing] = [
        Replica::connected(reactive(), redis(&server.url())).await,
        Replica::connected(reactive(), redis(&server.url())).await,
    ];
    refused.acquire(FEED).await.settle(throttled(secs(50)));
    eventually("the store knows", async || knowing.cooldown(HOST).await > secs(0)).await;
    assert_eq!(knowing.at_once(FEED).await.unwrap_err().reason(), Reason::Cooldown);

    assert_eq!(eye.ask::<u8>(&["DEL", &key(HOST, "")]).await, 1);
    for replica in [&refused, &knowing] {
        let shed = replica.at_once(FEED).await.unwrap_err();
        assert_eq!(shed.reason(), Reason::Cooldown);
        assert!(shed.retry_after() > secs(20), "{shed}");
    }
    // An answer that knows nothing of it does not end it either.
    refused.hosts.penalize(HOST, millis(1));
    eventually("the store has heard", async || eye.ask::<u8>(&["EXISTS", &key(HOST, "")]).await == 1).await;
    assert!(refused.cooldown(HOST).await < secs(1));
    assert_eq!(refused.at_once(FEED).await.unwrap_err().reason(), Reason::Cooldown);
}

// --- D19 --------------------------------------------------------------------------------------------------------------

const WORDS: [&str; 10] = ["", "abc", "-5", "1.5", "99999999999999999999", "1e300", "nan", "-nan", "inf", "{}"];

/// One of the host's keys is gone, of another type, or full of what nobody has written.
async fn break_something(eye: &Eye, random: &mut fastrand::Rng) {
    let word = *random.choice(&WORDS).unwrap();
    let key = key(HOST, random.choice(["", ":l", ":q", ":t", ":w"]).unwrap());
    let field = *random.choice(&["p", "s", "c", "w", "x", "a", "n", "other"]).unwrap();
    let set = match random.u8(0..6) {
        0 => vec![],
        1 => vec!["SET", &key, word],
        2 => vec!["RPUSH", &key, word],
        3 => vec!["ZADD", &key, "inf", word],
        4 => vec!["SADD", &key, word],
        _ => vec!["HSET", &key, field, word],
    };
    // Half of the time into what is there, if it is of that type.
    if set.is_empty() || random.bool() {
        eye.ask::<()>(&["DEL", &key]).await;
    }
    if let Some(command) = set.first() {
        let right = eye.ask::<String>(&["TYPE", &key]).await;
        let wanted = match *command {
            "RPUSH" => "list",
            "ZADD" => "zset",
            "SADD" => "set",
            "HSET" => "hash",
            _ => "string",
        };
        if right == "none" || right == wanted {
            eye.ask::<()>(&set).await;
        }
    }
}

async fn broken_at_random(queue: Queue, seed: u64) {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let mut random = fastrand::Rng::with_seed(seed);
    let layer = || reactive().quota(10_000, secs(600)).min_delay(millis(1)).base_cooldown(millis(1)).spacing(millis(1));
    let store = || redis(&server.url()).queue(queue).lease_ttl(secs(1));
    let replicas = [Replica::connected(layer(), store()).await, Replica::connected(layer(), store()).await];
    for round in 0..200 {
        break_something(&eye, &mut random).await;
        let replica = random.choice(&replicas).unwrap();
        let one = async {
            // A refusal is an answer as well: leases that nobody holds take up the cap.
            if let Ok(permit) = replica.within(millis(random.u64(0..50)), FEED).await {
                break_something(&eye, &mut random).await;
                permit.settle(if random.bool() { Outcome::Success } else { throttled(millis(1)) });
            }
        };
        timeout(LONG, one).await.unwrap_or_else(|_| panic!("{queue:?}, seed {seed}: round {round} hangs"));
        replica.hosts.penalize(HOST, millis(1));
        let _ = replica.hosts.get_shared(HOST).await;
    }
    for replica in &replicas {
        assert!(replica.events.degraded().is_empty(), "{:?}", replica.events.degraded());
        let odd = |kind| !matches!(kind, BackendErrorKind::Reply | BackendErrorKind::LeaseExpired);
        let odd: Vec<_> = replica.events.errors().into_iter().filter(|failure| odd(failure.kind)).collect();
        assert!(odd.is_empty(), "{odd:?}");
    }
    // Nothing of it stays.
    eye.ask::<()>(&["FLUSHALL"]).await;
    for replica in &replicas {
        eventually("permits are leases again", async || {
            let Ok(_permit) = replica.within(secs(5), FEED).await else { return false };
            eye.leases(HOST).await == 1
        })
        .await;
    }
}

#[tokio::test]
async fn d19_keys_that_are_deleted_and_corrupted_at_random_hang_nothing() {
    broken_at_random(Queue::Delegate, 19).await;
}

#[tokio::test]
async fn d19_keys_that_are_deleted_and_corrupted_at_random_hang_nothing_fifo() {
    broken_at_random(Queue::Fifo, 20).await;
}

/// One after the other, each key is of a type that it cannot be.
#[tokio::test]
async fn d19_a_key_of_another_type_counts_as_empty() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let layer = HostGateLayer::new().concurrency(100).quota(1000, secs(600)).min_delay(millis(1));
    for queue in [Queue::Delegate, Queue::Fifo] {
        eye.ask::<()>(&["FLUSHALL"]).await;
        let replica = Replica::connected(layer.clone(), redis(&server.url()).queue(queue)).await;
        for suffix in ["", ":l", ":q", ":t", ":w"] {
            eye.ask::<()>(&["SET", &key(HOST, suffix), "not ours"]).await;
            drop(replica.acquire(FEED).await);
            eventually("the permit is given back", async || eye.leases(HOST).await == 0).await;
        }
        replica.events.assert_no_failure();
    }
}

/// A field that nobody can have written is as good as none, or as the present where it says a time to come; and the next
/// send writes over it.
#[tokio::test]
async fn d19_a_field_that_says_nothing_is_replaced_by_the_next_send() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let layer = HostGateLayer::new().concurrency(100).quota(1000, secs(600)).min_delay(secs(600));
    let [one, other] = [
        Replica::connected(layer.clone(), redis(&server.url())).await,
        Replica::connected(layer, redis(&server.url())).await,
    ];
    for field in ["p", "s", "w", "x", "a"] {
        for (nth, word) in WORDS.iter().enumerate() {
            let host = format!("{field}-{nth}.example");
            eye.ask::<()>(&["HSET", &key(&format!("{host}:80"), ""), field, word]).await;
            let uri = format!("http://{host}/");
            if let Err(shed) = one.at_once(&uri).await {
                assert_eq!(shed.reason(), Reason::Spacing, "{field} {word:?}");
            }
            let shed = other.at_once(&uri).await.expect_err(&format!("{field} {word:?}: two go at once"));
            assert_eq!(shed.reason(), Reason::Spacing, "{field} {word:?}");
            for replica in [&one, &other] {
                let errors = replica.events.errors();
                assert!(errors.is_empty(), "{field} {word:?}: {errors:?}");
            }
        }
    }
}
