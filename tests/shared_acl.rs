//! The user that `docs/shared.md` sets up: its rights are those a shared gate needs, and no others.

mod support;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use support::redis::{Build, Cluster, Server, Standalone};
use tokio::time::sleep;
use tower::retry::RetryLayer;
use tower::{BoxError, ServiceBuilder, ServiceExt as _, service_fn};
use tower_host_gate::observe::{DegradedEvent, ErrorEvent};
use tower_host_gate::retry::GateRetry;
use tower_host_gate::{HostGateLayer, Observer, Queue, Redis};

const PAGE: &str = include_str!("../docs/shared.md");

/// What the page has one type: for any server, and for each node of a cluster besides.
fn setups() -> [Vec<&'static str>; 2] {
    let lines: Vec<_> = PAGE.lines().filter(|line| line.starts_with("ACL SETUSER ")).collect();
    let [server, cluster] = lines[..] else { panic!("two of them: {lines:?}") };
    [server, cluster].map(|line| line.split_whitespace().collect())
}

fn url(server: &Server) -> String {
    format!("redis://gate:secret@127.0.0.1:{}/", server.port())
}

// --- what the page says -----------------------------------------------------------------------------------------------

/// The commands in `redis.call('COMMAND', ..)` and `read(key, 'COMMAND', ..)`.
fn commands(script: &str) -> impl Iterator<Item = String> {
    let called = script.split("redis.call('").skip(1);
    let read = script.split("read(").skip(1).filter_map(|rest| {
        let (key, command) = rest.split_once(", '")?;
        key.bytes().all(|byte| byte.is_ascii_lowercase()).then_some(command)
    });
    called.chain(read).map(|rest| rest[..rest.find('\'').expect("the end of a word")].to_lowercase())
}

#[test]
fn the_documented_user_may_do_what_the_scripts_do_and_nothing_else() {
    let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/src/shared/scripts");
    let files = fs::read_dir(scripts).expect("the scripts").map(|entry| entry.expect("an entry").path());
    let mut needed: BTreeSet<String> = files
        .filter(|file| file.extension().is_some_and(|extension| extension == "lua"))
        .flat_map(|file| commands(&fs::read_to_string(file).expect("a script")).collect::<Vec<_>>())
        .collect();
    // The link's own; `HELLO` and `AUTH` are everybody's.
    needed.extend(["eval", "evalsha", "subscribe"].map(str::to_owned));
    let [server, _] = setups();
    let granted: BTreeSet<String> =
        server.iter().filter_map(|right| right.strip_prefix('+')).map(str::to_owned).collect();
    assert_eq!(granted, needed);
}

// --- what servers say -------------------------------------------------------------------------------------------------

/// What a gate has told of the store's failures.
#[derive(Clone, Default)]
struct Failures(Arc<Mutex<Vec<String>>>);

impl Failures {
    fn push(&self, failure: String) {
        self.0.lock().expect("nobody panics").push(failure);
    }
}

impl Observer for Failures {
    fn degraded(&self, event: &DegradedEvent<'_>) {
        self.push(format!("degraded: {}", event.cause));
    }

    fn error(&self, event: &ErrorEvent<'_>) {
        self.push(format!("{}: {}", event.operation.as_str(), event.error));
    }
}

/// Two processes do whatever a gate does, with this queue. Gives back what has failed.
async fn everything(open: impl Fn() -> Redis, queue: Queue) -> Vec<String> {
    let failures = Failures::default();
    let layer = HostGateLayer::new()
        .base_cooldown(Duration::from_millis(20))
        .spacing(Duration::from_millis(1))
        .warm_for(Duration::from_millis(50))
        .min_delay(Duration::from_millis(1))
        .quota(100, Duration::from_secs(1))
        .observer(failures.clone());
    let scope = format!("{queue:?}");
    // No busy machine is to be taken for a missing right.
    let replicas =
        [(); 2].map(|()| layer.clone().shared(open().scope(&scope).queue(queue).timeout(Duration::from_secs(10))));
    for replica in &replicas {
        replica.hosts().get_shared("acl.example:80").await.expect("a connection");
    }

    // Requests that wait for each other in both processes, one of which is refused.
    let requests = Arc::new(AtomicUsize::new(0));
    let fetches = replicas.iter().flat_map(|replica| {
        let requests = Arc::clone(&requests);
        let client = ServiceBuilder::new().layer(RetryLayer::new(GateRetry::new(9))).layer(replica.clone()).service(
            service_fn(move |_: Request<String>| {
                let first = requests.fetch_add(1, Ordering::Relaxed) == 0;
                async move {
                    sleep(Duration::from_millis(5)).await;
                    let response = Response::builder().status(if first { 429 } else { 200 });
                    Ok::<_, Infallible>(response.body(String::new()).expect("a response"))
                }
            }),
        );
        (0..10).map(move |_| {
            let request = Request::get("http://acl.example/").body(String::new()).expect("a request");
            let fetch = client.clone().oneshot(request);
            async move { Ok::<_, BoxError>(fetch.await?.status()) }
        })
    });
    let statuses = join_all(fetches).await;
    let all_served = statuses.iter().all(|status| status.as_ref().is_ok_and(StatusCode::is_success));
    // A permit that cannot be given back shows as requests that wait in vain.
    assert!(all_served, "{:?}: {statuses:?}", failures.0);

    let [here, there] = replicas.map(|replica| replica.hosts());
    here.penalize("acl.example:80", Duration::from_millis(1));
    here.import(there.export());
    here.clear("acl.example:80");
    while there.get_shared("acl.example:80").await.expect("an answer").is_some_and(|host| host.in_flight > 0) {
        sleep(Duration::from_millis(5)).await;
    }
    // What nobody waits for has been answered too: answers come in order, and this was asked last.
    here.get_shared("acl.example:80").await.expect("an answer");
    failures.0.lock().expect("nobody panics").clone()
}

/// What the server has denied the user.
async fn denied(server: &Server) -> Vec<String> {
    let log = server.cli(&["ACL", "LOG"]).await;
    let lines: Vec<_> = log.lines().collect();
    lines.windows(2).filter(|pair| pair[0] == "object").map(|pair| pair[1].to_owned()).collect()
}

async fn works_with_the_documented_user(build: Build) {
    if !build.is_available() {
        return;
    }
    let server = Standalone::build(build).await;
    let [setup, _] = setups();
    server.cli(&setup).await;
    for queue in [Queue::Delegate, Queue::Fifo] {
        // Somebody else's text where the state of a host should be: it is dropped.
        server.cli(&["SET", &format!("host-gate:1:{queue:?}:{{acl.example:80}}"), "junk"]).await;
        let failures = everything(|| Redis::open(&url(&server)).expect("a URL"), queue).await;
        assert!(failures.is_empty(), "{build:?}, {queue:?}: {failures:?}");
    }
    // Each connection tells the name of its library, and does not mind when it may not. Redis 6.2 knows no subcommands.
    let is_named = |what: &String| ["client|setinfo", "client"].contains(&what.as_str());
    let denied: Vec<_> = denied(&server).await.into_iter().filter(|what| !is_named(what)).collect();
    assert!(denied.is_empty(), "{build:?}: {denied:?}");
}

#[tokio::test]
async fn a_gate_works_with_the_documented_user_on_redis_7() {
    works_with_the_documented_user(Build::Redis).await;
}

#[tokio::test]
async fn a_gate_works_with_the_documented_user_on_redis_6_2() {
    works_with_the_documented_user(Build::Redis62).await;
}

#[tokio::test]
async fn a_gate_works_with_the_documented_user_on_valkey() {
    works_with_the_documented_user(Build::Valkey).await;
}

#[tokio::test]
async fn a_gate_works_with_the_documented_user_on_a_cluster() {
    let cluster = Cluster::start().await;
    for setup in setups() {
        cluster.cli_all(&setup).await;
    }
    for queue in [Queue::Delegate, Queue::Fifo] {
        let failures = everything(|| Redis::cluster(cluster.nodes().iter().map(url)).expect("nodes"), queue).await;
        assert!(failures.is_empty(), "{queue:?}: {failures:?}");
    }
    for node in cluster.nodes() {
        assert_eq!(denied(node).await, [""; 0]);
    }
}

#[tokio::test]
async fn the_documented_user_is_kept_from_everything_else() {
    let server = Standalone::start().await;
    let [setup, _] = setups();
    server.cli(&setup).await;
    for command in [
        // Another key, another channel, another command.
        ["HGET", "sessions", "x"],
        ["PUBLISH", "news", "x"],
        ["SET", "host-gate:1:default:{a.example:80}", "x"],
    ] {
        let as_user: Vec<_> = ["--user", "gate", "--pass", "secret"].into_iter().chain(command).collect();
        let error = server.try_cli(&as_user).await.expect_err("no right to do this");
        assert!(error.contains("NOPERM"), "{command:?}: {error}");
    }
}
