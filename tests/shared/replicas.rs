//! D21, D22: what one replica has met the others heed, and each keeps to its own settings.

use http::Request;
use tower::{Layer as _, ServiceExt as _};
use tower_host_gate::{Permit, RateLimited, Reason};

use super::eye::Eye;
use super::support::client::drain;
use super::support::reactive;
use super::support::redis::Standalone;
use super::support::script::{Reply, Script};
use super::{FEED, HOST, Replica, eventually, redis, secs};

fn reason(answer: Result<Permit, RateLimited>) -> Option<Reason> {
    answer.err().map(|shed| shed.reason())
}

// --- D21 --------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn d21_a_refusal_that_one_replica_gets_holds_the_others_and_a_shorter_one_changes_nothing() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let layer = || reactive().concurrency(4);
    let [one, two, three] = [
        Replica::connected(layer(), redis(&server.url())).await,
        Replica::connected(layer(), redis(&server.url())).await,
        Replica::connected(layer(), redis(&server.url())).await,
    ];
    // The second one knows the host, and that it was free.
    drop(two.acquire(FEED).await);

    let client = one.layer.layer(Script::always(Reply::status(429).header("retry-after", "50")));
    let refusal = client.oneshot(Request::get(FEED).body(()).unwrap()).await.unwrap();
    assert_eq!(refusal.status(), 429);
    drain(refusal).await.unwrap();
    eventually("the store knows", async || three.cooldown(HOST).await > secs(0)).await;

    let shed = two.at_once(FEED).await.unwrap_err();
    assert_eq!(shed.reason(), Reason::Cooldown);
    assert!(shed.retry_after() > secs(20) && shed.retry_after() <= secs(50), "{shed}");

    let calls = eye.script_calls().await;
    two.hosts.penalize(HOST, secs(5));
    eventually("the store has heard", async || eye.script_calls().await > calls).await;
    for replica in [&one, &two, &three] {
        assert!(replica.cooldown(HOST).await > secs(10));
        assert_eq!(reason(replica.at_once(FEED).await), Some(Reason::Cooldown));
    }
    let late = Replica::connected(layer(), redis(&server.url())).await;
    assert_eq!(reason(late.at_once(FEED).await), Some(Reason::Cooldown));
}

/// Nothing is cached: who was let go a moment ago asks again for the next one.
#[tokio::test]
async fn d21_a_replica_that_waits_for_a_permit_hears_of_the_refusal_before_it_sends() {
    let server = Standalone::start().await;
    let [one, two] = [
        Replica::connected(reactive(), redis(&server.url())).await,
        Replica::connected(reactive(), redis(&server.url())).await,
    ];
    let permit = one.acquire(FEED).await;
    let refused = async {
        eventually("the other one waits", async || two.hosts.get(HOST).is_some_and(|seen| seen.queued == 1)).await;
        permit.settle(super::throttled(secs(50)));
    };
    let (waited, ()) = tokio::join!(two.within(secs(30), FEED), refused);
    assert_eq!(reason(waited), Some(Reason::Cooldown));
}

// --- D22 --------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn d22_each_replica_keeps_to_its_own_quota_and_counts_what_all_send() {
    let server = Standalone::start().await;
    let layer = |sends| reactive().concurrency(100).quota(sends, secs(600));
    let ten = Replica::connected(layer(10), redis(&server.url())).await;
    let five = Replica::connected(layer(5), redis(&server.url())).await;

    assert_eq!(five.admitted(3, FEED).await, 3);
    assert_eq!(ten.admitted(4, FEED).await, 4);
    assert_eq!(reason(five.at_once(FEED).await), Some(Reason::Quota));
    assert_eq!(ten.admitted(10, FEED).await, 3);
    assert_eq!(reason(ten.at_once(FEED).await), Some(Reason::Quota));

    // The other way round.
    let other = "http://other.example/";
    assert_eq!(ten.admitted(5, other).await, 5);
    assert_eq!(five.admitted(10, other).await, 0);
}

#[tokio::test]
async fn d22_a_shorter_window_forgets_nothing_of_a_longer_one() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let layer = |window| reactive().concurrency(100).quota(3, window);
    let long = Replica::connected(layer(secs(600)), redis(&server.url())).await;
    let short = Replica::connected(layer(secs(1)), redis(&server.url())).await;
    assert_eq!(long.admitted(2, FEED).await, 2);
    // By then these two are of no interest to the second replica.
    tokio::time::sleep(secs(1)).await;
    assert_eq!(short.admitted(1, FEED).await, 1);
    assert_eq!(eye.sends(HOST).await, 3);
    assert_eq!(reason(long.at_once(FEED).await), Some(Reason::Quota));
    drop(short.acquire(FEED).await);
}

#[tokio::test]
async fn d22_each_replica_keeps_to_its_own_cap() {
    let server = Standalone::start().await;
    let four = Replica::connected(reactive().concurrency(4), redis(&server.url())).await;
    let two = Replica::connected(reactive().concurrency(2), redis(&server.url())).await;
    let _held = [four.acquire(FEED).await, four.acquire(FEED).await];
    assert_eq!(reason(two.at_once(FEED).await), Some(Reason::InFlight));
    let _more = [four.acquire(FEED).await, four.acquire(FEED).await];
    assert_eq!(reason(four.at_once(FEED).await), Some(Reason::InFlight));
}

/// An upgrade cannot misread what an older version has stored.
#[tokio::test]
async fn d22_every_key_names_the_version_of_what_it_stores() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let store = redis(&server.url()).prefix("limits").scope("feeds");
    let replica = Replica::connected(reactive().quota(3, secs(600)).min_delay(secs(1)), store).await;
    let _held = replica.acquire(FEED).await;
    let keys = eye.keys().await;
    assert_eq!(keys.len(), 3, "{keys:?}");
    assert!(keys.iter().all(|key| key.starts_with("limits:1:feeds:{feed.example:80}")), "{keys:?}");
}
