//! D23: whatever prefix, scope and host are called, they are kept apart, and none is taken for a command.

use std::collections::BTreeSet;

use http::{Extensions, HeaderMap, Uri};
use tower_host_gate::{HostGateLayer, HostKey};

use super::eye::Eye;
use super::support::redis::Standalone;
use super::{Replica, eventually, redis, secs};

/// Prefixes and scopes that become one text when they are joined, in pairs.
const SPACES: [(&str, &str); 10] = [
    ("gate", "a"),
    ("gate:1", "a"),
    ("gate", "1:a"),
    ("gate:1:a", "b"),
    ("gate", "a:1:b"),
    ("gate:1:a:{x}", "b"),
    ("ga te\n", "%0A"),
    ("{gate}", ""),
    ("", "{gate}"),
    ("", ""),
];

/// Hosts of a caller's own making that could be taken for one another, for another's key, or for more than a name.
fn hosts() -> Vec<String> {
    let fixed = [
        "x",
        "X",
        "x:l",
        "x:q",
        "x:t",
        "x}:l",
        "{x}",
        "%7Bx%7D",
        "{x",
        "x}",
        "}{",
        "",
        " ",
        "  ",
        "x y",
        "x%20y",
        "x+y",
        "x\ny",
        "x\\ny",
        "x\r\ny",
        "x\0y",
        "x\ty",
        "~",
        "~x",
        "%",
        "%%",
        "%25",
        "ü",
        "u\u{308}",
        "x\u{feff}",
        "x\r\n*1\r\n$8\r\nFLUSHALL\r\n",
        "'); redis.call('FLUSHALL') --",
        "]] redis.call('FLUSHALL') --[[",
    ];
    let long = ["", "1", "2"].map(|end| "h".repeat(300) + end);
    let escaped_long = ["", "1", "2"].map(|end| "\n".repeat(300) + end);
    let at_the_bound = (195..=260).map(|length| "g".repeat(length));
    let braces_at_the_bound = (60..=90).map(|length| "{".repeat(length));
    let mut hosts: Vec<_> = fixed.map(str::to_owned).into_iter().chain(long).chain(escaped_long).collect();
    hosts.extend(at_the_bound.chain(braces_at_the_bound));
    hosts
}

/// The path of a request says which of [`hosts`] is its key.
fn keyed() -> HostGateLayer {
    let hosts = hosts();
    HostGateLayer::new().quota(2, secs(600)).keying(move |uri: &Uri, _: &HeaderMap, _: &Extensions| {
        let nth: usize = uri.path()[1..].parse().unwrap();
        Some(HostKey::new(&hosts[nth]))
    })
}

#[tokio::test]
async fn d23_no_two_hosts_scopes_or_prefixes_share_a_key() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let hosts = hosts();
    let distinct: BTreeSet<_> = hosts.iter().map(|host| HostKey::new(host).as_str().to_owned()).collect();
    assert_eq!(distinct.len(), hosts.len(), "the keys of the gate are different already");

    eye.ask::<()>(&["SET", "marker", "1"]).await;
    let mut held = Vec::new();
    for (prefix, scope) in SPACES {
        let store = redis(&server.url()).prefix(prefix).scope(scope);
        let replica = Replica::connected(keyed(), store).await;
        for (nth, host) in hosts.iter().enumerate() {
            // One at a time and host: if two were one, the second would wait.
            let permit = replica.at_once(&format!("http://any.example/{nth}")).await;
            held.push(permit.unwrap_or_else(|shed| panic!("{prefix:?} {scope:?} {host:?}: {shed}")));
        }
        replica.events.assert_no_failure();
    }

    let keys = eye.keys().await;
    let expected = SPACES.len() * hosts.len();
    for suffix in [":l", ":q"] {
        let of_hosts: Vec<_> = keys.iter().filter(|key| key.ends_with(&format!("}}{suffix}"))).collect();
        assert_eq!(of_hosts.len(), expected, "{suffix}");
    }
    assert_eq!(eye.ask::<u8>(&["EXISTS", "marker"]).await, 1, "nothing of a name was run");
    for key in &keys {
        assert!(key.len() < 300, "{key}");
        assert!(key.bytes().all(|byte| byte.is_ascii_graphic()), "{key:?}");
    }
    // All that differs is in the arguments: ours, and the one that a new connection is tried with.
    assert!(eye.info("MEMORY", "number_of_cached_scripts:").await <= 4);
    let space = |key: &str| key.split_once('{').map(|(space, _)| space.to_owned());
    let spaces: BTreeSet<_> = keys.iter().filter_map(|key| space(key)).collect();
    assert_eq!(spaces.len(), SPACES.len(), "{spaces:?}");
    drop(held);
}

#[tokio::test]
async fn d23_what_is_done_to_a_host_by_its_name_is_done_to_no_other() {
    let server = Standalone::start().await;
    let replica = Replica::connected(keyed(), redis(&server.url())).await;
    for host in ["x\ny", "x:l", "{x}", "x y"] {
        replica.hosts.penalize(host, secs(50));
        eventually("the store knows", async || replica.cooldown(host).await > secs(0)).await;
        for other in ["x\\ny", "x", "%7Bx%7D", "x%20y"] {
            assert_eq!(replica.cooldown(other).await, secs(0), "{host:?} {other:?}");
        }
    }
}
