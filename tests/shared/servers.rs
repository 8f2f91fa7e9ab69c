//! D01, D02, D03, D05: servers that have forgotten the scripts, that are several, and that do not run scripts like ours.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use http::{Extensions, HeaderMap, Uri};
use tower_host_gate::observe::Operation;
use tower_host_gate::shared::BackendErrorKind;
use tower_host_gate::{HostGateLayer, HostKey, Queue, Redis};

use super::events::Events;
use super::eye::{Eye, key};
use super::fake::Fake;
use super::support::redis::{Cluster, Standalone};
use super::{FEED, HOST, Replica, eventually, millis, redis, secs};

/// Lets many requests go, and counts them.
fn counting() -> HostGateLayer {
    HostGateLayer::new().concurrency(100).quota(100, secs(600))
}

// --- D01 --------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn d01_scripts_that_were_flushed_are_sent_again_and_admit_once() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let replica = Replica::connected(counting(), redis(&server.url())).await;

    let _first = replica.acquire(FEED).await;
    eye.ask::<()>(&["SCRIPT", "FLUSH"]).await;
    let second = replica.acquire(FEED).await;
    assert_eq!((eye.leases(HOST).await, eye.sends(HOST).await), (2, 2));

    eye.ask::<()>(&["SCRIPT", "FLUSH"]).await;
    drop(second);
    eventually("the second has given its permit back", async || eye.leases(HOST).await == 1).await;
    replica.events.assert_no_failure();
}

#[tokio::test]
async fn d01_a_server_that_was_killed_and_restarted_is_told_the_scripts_and_admits_once() {
    let mut server = Standalone::start_with(&["--appendonly", "yes"]).await;
    let replica = Replica::connected(counting(), redis(&server.url())).await;

    let _first = replica.acquire(FEED).await;
    server.restart().await;
    eventually("the replica is back", async || replica.events.recovered().len() == 1).await;
    let _second = replica.acquire(FEED).await;

    let eye = Eye::open(&server).await;
    assert_eq!((eye.leases(HOST).await, eye.sends(HOST).await), (2, 2));
    assert!(replica.events.errors().is_empty(), "{:?}", replica.events.errors());
}

#[tokio::test]
async fn d01_a_request_between_kill_and_restart_goes_too() {
    let mut server = Standalone::start().await;
    let replica = Replica::connected(counting(), redis(&server.url())).await;

    let _first = replica.acquire(FEED).await;
    server.kill();
    let _second = replica.acquire(FEED).await;
    server.restart().await;
    let _third = replica.acquire(FEED).await;
    eventually("the replica is back", async || replica.events.recovered().len() == 1).await;
    let _fourth = replica.acquire(FEED).await;
    assert_eq!(replica.events.degraded().len(), 1);
}

// --- D02 --------------------------------------------------------------------------------------------------------------

/// Hosts of which each master has some.
fn hosts() -> Vec<String> {
    (0..12).map(|n| format!("feed-{n}.example")).collect()
}

async fn leases_in(cluster: &Cluster, host: &str) -> usize {
    let key = key(&format!("{host}:80"), ":l");
    let master = cluster.master_of(&key).await;
    cluster.nodes()[master].cli(&["ZCARD", &key]).await.parse().unwrap()
}

#[tokio::test]
async fn d02_each_node_of_a_cluster_is_told_the_scripts_and_so_is_a_replica_that_becomes_master() {
    let cluster = Cluster::start_with_replicas().await;
    let store = Redis::cluster(cluster.urls()).unwrap().timeout(secs(10));
    let replica = Replica::connected(counting(), store).await;

    let mut held = Vec::new();
    for host in hosts() {
        held.push(replica.acquire(&format!("http://{host}/")).await);
    }
    let mut masters = BTreeSet::new();
    for host in hosts() {
        masters.insert(cluster.master_of(&key(&format!("{host}:80"), "")).await);
    }
    assert_eq!(masters.len(), 3, "the hosts are on all masters");

    cluster.failover(&key("feed-0.example:80", "")).await;
    for host in hosts() {
        held.push(replica.acquire(&format!("http://{host}/")).await);
    }
    // Whoever asks the old master first finds out that it is none any more.
    for host in hosts() {
        eventually("the new master answers", async || replica.hosts.get_shared(&format!("{host}:80")).await.is_ok())
            .await;
        let before = leases_in(&cluster, &host).await;
        held.push(replica.acquire(&format!("http://{host}/")).await);
        assert_eq!(leases_in(&cluster, &host).await, before + 1, "{host}: {:?}", replica.events.errors());
    }
    assert!(replica.events.degraded().len() <= 1, "{:?}", replica.events.degraded());
    let refusals: Vec<_> = replica.events.errors().into_iter().filter(|e| e.text.contains("NOSCRIPT")).collect();
    assert!(refusals.is_empty(), "{refusals:?}");
}

// --- D03 --------------------------------------------------------------------------------------------------------------

/// Keys of a caller's own that look like hash tags, or end one.
const TAGS: [&str; 10] = ["{", "}", "{}", "}{", "{}x", "a{b}c", "{{a}}", "a}b{c", "plain", ""];

/// The path of a request says which of [`TAGS`] is its key.
fn keyed_by_tags(layer: HostGateLayer) -> HostGateLayer {
    layer.keying(|uri: &Uri, _: &HeaderMap, _: &Extensions| {
        let nth: usize = uri.path()[1..].parse().unwrap();
        Some(HostKey::new(TAGS[nth]))
    })
}

#[tokio::test]
async fn d03_all_keys_of_a_host_lie_in_one_slot_whatever_braces_are_in_host_and_prefix() {
    let cluster = Cluster::start().await;
    let eyes = join_all(cluster.nodes().iter().map(Eye::open)).await;
    let prefixes = ["gate", "{gate}", "{}", "a{b", "}{"];
    for (prefix, queue) in prefixes.iter().flat_map(|prefix| [(prefix, Queue::Delegate), (prefix, Queue::Fifo)]) {
        cluster.cli_all(&["FLUSHALL"]).await;
        let store = || {
            let store = Redis::cluster(cluster.urls()).unwrap().timeout(secs(10));
            store.prefix(prefix).queue(queue)
        };
        let layer = || keyed_by_tags(HostGateLayer::new().quota(100, secs(600)).min_delay(millis(1)));
        let one = Replica::connected(layer(), store()).await;
        let other = Replica::connected(layer(), store()).await;

        // One in flight and one waiting: state, leases, sends and tickets are there, or without tickets who is looking.
        let uris: Vec<_> = (0..TAGS.len()).map(|nth| format!("http://any.example/{nth}")).collect();
        let in_flight = join_all(uris.iter().map(|uri| one.acquire(uri))).await;
        let waiting = join_all(uris.iter().map(|uri| other.acquire(uri)));
        let looked_at = async {
            eventually("there are four keys for each", async || all_keys(&eyes).await.len() == 4 * TAGS.len()).await;
            assert_one_slot_each(&eyes).await;
            drop(in_flight);
        };
        tokio::join!(waiting, looked_at);

        for tag in TAGS {
            one.hosts.penalize(tag, millis(1));
            one.hosts.clear(tag);
            one.hosts.get_shared(tag).await.expect("the store answers");
        }
        one.events.assert_no_failure();
        other.events.assert_no_failure();
    }
}

async fn all_keys(eyes: &[Eye]) -> Vec<String> {
    join_all(eyes.iter().map(Eye::keys)).await.concat()
}

async fn assert_one_slot_each(eyes: &[Eye]) {
    // By what they begin with: keys of one host differ in nothing but their end.
    let mut slots: BTreeMap<String, BTreeSet<u16>> = BTreeMap::new();
    for key in all_keys(eyes).await {
        let host = [":l", ":q", ":t", ":w"].iter().find_map(|suffix| key.strip_suffix(suffix)).unwrap_or(&key);
        let slot = eyes[0].ask(&["CLUSTER", "KEYSLOT", &key]).await;
        slots.entry(host.to_owned()).or_default().insert(slot);
    }
    assert_eq!(slots.len(), TAGS.len(), "{slots:?}");
    assert!(slots.values().all(|slots| slots.len() == 1), "{slots:?}");
    // Nothing in a prefix is a hash tag: that would put all hosts on one node.
    let different: BTreeSet<_> = slots.values().flatten().collect();
    assert!(different.len() > 1, "{slots:?}");
}

// --- D05 --------------------------------------------------------------------------------------------------------------

/// Requests go, and the observer hears why they are not counted elsewhere.
async fn goes_by_itself(url: &str) -> Events {
    let replica = Replica::new(counting(), redis(url).timeout(secs(2)));
    for _ in 0..3 {
        let _permit = replica.acquire(FEED).await;
    }
    replica.events
}

#[tokio::test]
async fn d05_a_server_that_lacks_time_is_reported_once_as_unsupported() {
    let server = Standalone::start_with(&["--rename-command", "TIME", ""]).await;
    let events = goes_by_itself(&server.url()).await;
    assert_eq!(events.degraded(), [BackendErrorKind::Unsupported]);
}

#[tokio::test]
async fn d05_a_server_from_before_the_protocol_is_reported_once_as_unsupported() {
    let server =
        Fake::start(|command| format!("-ERR unknown command `{}`, with args beginning with: \r\n", command[0])).await;
    let events = goes_by_itself(&server.url()).await;
    assert_eq!(events.degraded(), [BackendErrorKind::Unsupported]);
}

#[tokio::test]
async fn d05_write_commands_not_allowed_after_non_deterministic_commands() {
    each_script_fails(|command| {
        refuse_scripts(
            command,
            "Write commands not allowed after non deterministic commands. Call redis.replicate_commands() at the start \
             of your script in order to switch to single commands replication mode.",
        )
    })
    .await;
}

#[tokio::test]
async fn d05_command_is_not_allowed_from_script() {
    each_script_fails(|command| refuse_scripts(command, "This Redis command is not allowed from script")).await;
}

/// Connected, and no operation works: each is reported with its cause, and every request goes.
async fn each_script_fails(answer: fn(&[String]) -> String) {
    let server = Fake::start(answer).await;
    let events = goes_by_itself(&server.url()).await;
    let asked = events.errors_of(Operation::Acquire);
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert!(
        events.errors().iter().all(|failure| failure.kind == BackendErrorKind::Unsupported),
        "{:?}",
        events.errors()
    );
    assert!(events.errors().iter().all(|failure| failure.host == HOST), "{:?}", events.errors());
}

/// What a server says that connects like any other, and takes no script that writes.
fn refuse_scripts(command: &[String], error: &str) -> String {
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["HELLO", ..] => "%1\r\n$4\r\nrole\r\n$6\r\nmaster\r\n".to_owned(),
        ["SUBSCRIBE", channel] => format!(">3\r\n$9\r\nsubscribe\r\n${}\r\n{channel}\r\n:1\r\n", channel.len()),
        ["EVALSHA", ..] => "-NOSCRIPT No matching script. Please use EVAL.\r\n".to_owned(),
        ["EVAL", "return redis.call('TIME')", ..] => "*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n".to_owned(),
        ["EVAL", ..] => format!("-ERR Error running script (call to f_0): @user_script:7: {error}\r\n"),
        _ => "+OK\r\n".to_owned(),
    }
}
