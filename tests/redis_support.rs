//! The servers that the tests of the shared gate stand on: they start, break and end as the tests count on.

#![allow(clippy::unwrap_used, reason = "a test that finds nothing has failed")]

mod support;

use std::io::ErrorKind;
use std::time::{Duration, SystemTime};

use support::redis::{Build, Cluster, Fault, Proxy, Sentinel, Server, Standalone, Tls, Traffic};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";
const PONG: &[u8] = b"+PONG\r\n";

/// How long nothing must come, to believe that nothing comes.
const A_WHILE: Duration = Duration::from_millis(200);

/// How long an answer may take on a machine that has other things to do.
const LONG: Duration = Duration::from_secs(30);

async fn connect(port: u16) -> std::io::Result<TcpStream> {
    TcpStream::connect(("127.0.0.1", port)).await
}

async fn is_gone(port: u16) -> bool {
    connect(port).await.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

async fn answers(server: &Server) -> bool {
    server.cli(&["PING"]).await == "PONG"
}

/// Waits until the PONG is here.
async fn pong(stream: &mut TcpStream) {
    let mut answer = [0; PONG.len()];
    timeout(LONG, stream.read_exact(&mut answer)).await.expect("an answer").unwrap();
    assert_eq!(answer, PONG);
}

/// Nothing comes, and the connection is not closed.
async fn silence(stream: &mut TcpStream) {
    assert!(timeout(A_WHILE, stream.read(&mut [0; 64])).await.is_err());
}

async fn closed(stream: &mut TcpStream) {
    let read = timeout(LONG, stream.read(&mut [0; 64])).await.expect("the end of the connection");
    assert!(!matches!(read, Ok(1..)), "{read:?}");
}

/// How many PINGs the server has run.
async fn pings(server: &Server) -> u64 {
    let stats = server.cli(&["INFO", "COMMANDSTATS"]).await;
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_ping:calls="));
    calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
}

// ---------------------------------------------------------------------------------------------------------------------
// Servers
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_server_answers_and_is_gone_when_dropped() {
    let server = Standalone::start().await;
    assert!(answers(&server).await);
    assert!(server.cli(&["INFO", "SERVER"]).await.contains("redis_version:"));

    let port = server.port();
    drop(server);
    assert!(is_gone(port).await);
}

#[tokio::test]
async fn a_server_is_gone_after_a_panic() {
    let server = Standalone::start().await;
    let port = server.port();
    let test = tokio::spawn(async move {
        let _server = server;
        panic!("as a failed assertion does");
    });
    assert!(test.await.unwrap_err().is_panic());
    assert!(is_gone(port).await);
}

#[tokio::test]
async fn a_stopped_server_is_gone_when_dropped() {
    let server = Standalone::start().await;
    server.stop();
    let port = server.port();
    drop(server);
    assert!(is_gone(port).await);
}

#[tokio::test]
async fn servers_started_at_once_do_not_share_anything() {
    let (one, two) = tokio::join!(Standalone::start(), Standalone::start());
    one.cli(&["SET", "key", "one"]).await;
    assert_eq!(two.cli(&["EXISTS", "key"]).await, "0");
}

#[tokio::test]
async fn an_error_reply_is_told_apart() {
    let server = Standalone::start_with(&["--maxmemory", "1", "--maxmemory-policy", "noeviction"]).await;
    let error = server.try_cli(&["SET", "key", "value"]).await.unwrap_err();
    assert!(error.starts_with("OOM"), "{error}");
}

#[tokio::test]
async fn a_restarted_server_has_its_port_and_no_data() {
    let mut server = Standalone::start().await;
    server.cli(&["SET", "key", "value"]).await;
    server.kill();
    assert!(!server.is_running());
    assert!(is_gone(server.port()).await);

    let url = server.url();
    server.restart().await;
    assert_eq!(server.url(), url);
    assert_eq!(server.cli(&["EXISTS", "key"]).await, "0");
}

#[tokio::test]
async fn a_server_that_writes_a_log_has_its_data_after_a_kill() {
    let mut server = Standalone::start_with(&["--appendonly", "yes"]).await;
    server.cli(&["SET", "key", "value"]).await;
    server.kill();
    server.restart().await;
    assert_eq!(server.cli(&["GET", "key"]).await, "value");
}

#[tokio::test]
async fn a_stopped_server_answers_when_it_goes_on() {
    let server = Standalone::start().await;
    server.stop();
    // The system accepts for it.
    let mut stream = connect(server.port()).await.unwrap();
    stream.write_all(PING).await.unwrap();
    silence(&mut stream).await;

    server.cont();
    pong(&mut stream).await;
}

#[tokio::test]
async fn a_password_is_asked_for_and_is_in_the_url() {
    let server = Standalone::password("secret").await;
    assert!(answers(&server).await);
    assert_eq!(server.url(), format!("redis://:secret@127.0.0.1:{}/", server.port()));

    let mut stream = connect(server.port()).await.unwrap();
    stream.write_all(PING).await.unwrap();
    let mut answer = [0; 7];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"-NOAUTH");
}

#[tokio::test]
async fn valkey_answers() {
    if Build::Valkey.is_available() {
        let server = Standalone::build(Build::Valkey).await;
        assert!(answers(&server).await);
        assert!(server.cli(&["INFO", "SERVER"]).await.contains("server_name:valkey"));
    }
}

#[tokio::test]
async fn redis_6_2_answers() {
    if Build::Redis62.is_available() {
        let server = Standalone::build(Build::Redis62).await;
        assert!(answers(&server).await);
        assert!(server.cli(&["INFO", "SERVER"]).await.contains("redis_version:6.2."));
    }
}

#[tokio::test]
async fn tls_needs_the_authority_of_the_server() {
    let server = Tls::start().await;
    assert!(answers(&server).await);
    assert!(server.url().starts_with("rediss://"));

    let _ = rustls::crypto::ring::default_provider().install_default();
    assert_eq!(ping_over_tls(&server, server.root_pem()).await.unwrap(), "PONG");
    let another = Tls::start().await;
    ping_over_tls(&server, another.root_pem()).await.unwrap_err();

    let port = server.port();
    drop(server);
    assert!(is_gone(port).await);
}

async fn ping_over_tls(server: &Server, root_pem: &str) -> redis::RedisResult<String> {
    let root_cert = Some(root_pem.as_bytes().to_vec());
    let certificates = redis::TlsCertificates { client_tls: None, root_cert };
    let client = redis::Client::build_with_tls(server.url(), certificates)?;
    redis::cmd("PING").query_async(&mut client.get_multiplexed_async_connection().await?).await
}

// ---------------------------------------------------------------------------------------------------------------------
// The clock
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn the_clock_steps_forward_and_back() {
    let mut server = Standalone::with_clock().await;
    assert_ahead(&server, 0).await;

    server.step_clock(60);
    assert_ahead(&server, 60).await;
    // A script goes by the same clock, and so does what expires.
    assert_time(&server, &["EVAL", "return redis.call('TIME')", "0"], 60).await;
    server.cli(&["SET", "key", "value", "EX", "50"]).await;

    server.step_clock(60);
    assert_ahead(&server, 120).await;
    assert_eq!(server.cli(&["EXISTS", "key"]).await, "0");

    server.step_clock(-3_720);
    assert_ahead(&server, -3_600).await;

    // A step is not undone by a restart.
    server.restart().await;
    assert_ahead(&server, -3_600).await;
}

async fn assert_ahead(server: &Server, seconds: i64) {
    assert_time(server, &["TIME"], seconds).await;
}

async fn assert_time(server: &Server, command: &[&str], ahead: i64) {
    let before = now();
    let time = server.cli(command).await;
    let after = now();
    let real = time.lines().next().unwrap().parse::<i64>().unwrap() - ahead;
    assert!((before..=after).contains(&real), "{real} is not in {before}..={after}");
}

fn now() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    now.as_secs().try_into().unwrap()
}

// ---------------------------------------------------------------------------------------------------------------------
// Sentinel and Cluster
// ---------------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn sentinels_replace_a_master_that_was_killed() {
    let mut group = Sentinel::start().await;
    assert!(answers(group.master()).await);
    assert_eq!(group.sentinel_urls().len(), 3);
    group.master().cli(&["SET", "key", "value"]).await;
    group.master().cli(&["WAIT", "1", "0"]).await;
    let error = group.other().try_cli(&["SET", "key", "other"]).await.unwrap_err();
    assert!(error.starts_with("READONLY"), "{error}");

    group.kill_master();
    group.wait_for_new_master().await;
    assert_eq!(group.master().cli(&["GET", "key"]).await, "value");
    group.master().cli(&["SET", "key", "new"]).await;

    let ports = [group.master().port(), group.other().port()];
    drop(group);
    assert!(is_gone(ports[0]).await && is_gone(ports[1]).await);
}

#[tokio::test]
async fn sentinels_change_the_master_when_asked() {
    let mut group = Sentinel::start().await;
    let before = group.master().port();
    group.failover().await;
    group.wait_for_new_master().await;
    assert_ne!(group.master().port(), before);
    assert!(answers(group.other()).await);
}

#[tokio::test]
async fn clusters_started_at_once_are_two() {
    let (one, two) = tokio::join!(Cluster::start(), Cluster::start());
    for cluster in [&one, &two] {
        assert_eq!(cluster.urls().len(), 3);
        assert_eq!(cluster.cli_all(&["PING"]).await, ["PONG"; 3]);
    }
    // Of the slots 0 to 16383, every node has a third: 12182 is the slot of "foo", 5061 of "bar", 8455 of "hello2".
    let owners = [one.master_of("foo").await, one.master_of("bar").await];
    assert_ne!(owners[0], owners[1]);
    one.nodes()[owners[0]].cli(&["SET", "foo", "1"]).await;
    let error = one.nodes()[owners[1]].try_cli(&["SET", "foo", "1"]).await.unwrap_err();
    assert!(error.starts_with("MOVED 12182"), "{error}");
    assert_eq!(two.nodes()[two.master_of("foo").await].cli(&["EXISTS", "foo"]).await, "0");

    let ports: Vec<_> = one.nodes().iter().map(|node| node.port()).collect();
    drop(one);
    for port in ports {
        assert!(is_gone(port).await);
    }
    assert_eq!(two.cli_all(&["PING"]).await, ["PONG"; 3]);
}

#[tokio::test]
async fn a_cluster_replaces_a_master_that_was_killed() {
    let mut cluster = Cluster::start_with_replicas().await;
    assert_eq!(cluster.urls().len(), 6);
    let killed = cluster.kill_master_of("foo").await;
    cluster.wait_until_ok().await;
    let master = cluster.master_of("foo").await;
    assert_ne!(master, killed);
    cluster.nodes()[master].cli(&["SET", "foo", "1"]).await;

    cluster.nodes_mut()[killed].restart().await;
    cluster.wait_until_ok().await;
    assert_eq!(cluster.master_of("foo").await, master);
    assert!(cluster.nodes()[killed].cli(&["ROLE"]).await.starts_with("slave"));
}

#[tokio::test]
async fn a_cluster_changes_a_master_when_asked() {
    let cluster = Cluster::start_with_replicas().await;
    let before = cluster.master_of("foo").await;
    cluster.failover("foo").await;
    assert_ne!(cluster.master_of("foo").await, before);
    assert!(answers(&cluster.nodes()[before]).await);
}

// ---------------------------------------------------------------------------------------------------------------------
// The network
// ---------------------------------------------------------------------------------------------------------------------

async fn behind_proxy() -> (Standalone, Proxy, TcpStream) {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    assert_eq!(proxy.url(), format!("redis://127.0.0.1:{}/", proxy.port()));
    let mut stream = connect(proxy.port()).await.unwrap();
    stream.write_all(PING).await.unwrap();
    pong(&mut stream).await;
    (server, proxy, stream)
}

#[tokio::test]
async fn a_proxy_passes_on_and_counts() {
    let (_server, proxy, mut stream) = behind_proxy().await;
    // Two commands, one of which looks like more, cut at an awkward place.
    let commands = b"*2\r\n$4\r\nECHO\r\n$8\r\n*1\r\n$4\r\n\r\n*1\r\n$4\r\nPING\r\n";
    stream.write_all(&commands[..17]).await.unwrap();
    sleep(Duration::from_millis(20)).await;
    stream.write_all(&commands[17..]).await.unwrap();
    let mut answer = [0; b"$8\r\n*1\r\n$4\r\n\r\n".len()];
    stream.read_exact(&mut answer).await.unwrap();
    pong(&mut stream).await;

    let sent = PING.len() + commands.len();
    let came = PONG.len() + answer.len() + PONG.len();
    let expected = Traffic { connections: 1, commands: 3, request_bytes: sent as u64, reply_bytes: came as u64 };
    assert_eq!(proxy.traffic(), expected);
}

#[tokio::test]
async fn a_proxy_delays_each_direction_without_narrowing_it() {
    let (server, proxy, mut stream) = behind_proxy().await;
    let (requests, replies) = (Duration::from_millis(300), Duration::from_millis(200));
    proxy.set(Fault::Delay { requests, replies }).await;

    let before = pings(&server).await;
    let start = Instant::now();
    for _ in 0..50 {
        stream.write_all(PING).await.unwrap();
    }
    for _ in 0..50 {
        pong(&mut stream).await;
    }
    assert!(start.elapsed() >= requests + replies);
    // One after the other they would take 25 s.
    assert!(start.elapsed() < Duration::from_secs(15));
    assert_eq!(pings(&server).await, before + 50);
}

#[tokio::test]
async fn a_delayed_request_arrives_although_the_client_has_left() {
    let (server, proxy, mut stream) = behind_proxy().await;
    proxy.set(Fault::round_trip(Duration::from_millis(400))).await;
    let before = pings(&server).await;
    let start = Instant::now();
    stream.write_all(PING).await.unwrap();
    drop(stream);
    while pings(&server).await == before {
        assert!(start.elapsed() < LONG);
        sleep(Duration::from_millis(10)).await;
    }
    assert!(start.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn a_black_hole_swallows_and_keeps_connections_open() {
    let (mut server, proxy, mut stream) = behind_proxy().await;
    let mut idle = connect(proxy.port()).await.unwrap();
    idle.write_all(PING).await.unwrap();
    pong(&mut idle).await;

    proxy.set(Fault::Blackhole).await;
    let before = pings(&server).await;
    let mut new = connect(proxy.port()).await.unwrap();
    for stream in [&mut stream, &mut new] {
        stream.write_all(PING).await.unwrap();
        silence(stream).await;
    }
    assert_eq!(pings(&server).await, before);

    // What was lost stays lost; a connection that lost nothing is as it was.
    proxy.set(Fault::Pass).await;
    for stream in [&mut stream, &mut new] {
        stream.write_all(PING).await.unwrap();
        silence(stream).await;
    }
    idle.write_all(PING).await.unwrap();
    pong(&mut idle).await;
    assert_eq!(pings(&server).await, before + 1);

    // And nobody hears through a black hole that the server is gone.
    proxy.set(Fault::Blackhole).await;
    let mut late = connect(proxy.port()).await.unwrap();
    server.kill();
    silence(&mut late).await;
}

#[tokio::test]
async fn replies_alone_can_be_lost() {
    let (mut server, proxy, mut stream) = behind_proxy().await;
    proxy.set(Fault::DropReplies).await;
    let before = pings(&server).await;
    stream.write_all(PING).await.unwrap();
    silence(&mut stream).await;
    assert_eq!(pings(&server).await, before + 1);

    server.kill();
    silence(&mut stream).await;
}

#[tokio::test]
async fn new_connections_are_refused_for_as_long_as_is_said() {
    let (_server, proxy, mut stream) = behind_proxy().await;
    proxy.set(Fault::Refuse).await;
    assert!(is_gone(proxy.port()).await);
    stream.write_all(PING).await.unwrap();
    pong(&mut stream).await;

    proxy.set(Fault::Pass).await;
    let mut stream = connect(proxy.port()).await.unwrap();
    stream.write_all(PING).await.unwrap();
    pong(&mut stream).await;
}

#[tokio::test]
async fn connections_are_cut_on_both_sides() {
    let (server, proxy, mut stream) = behind_proxy().await;
    proxy.cut().await;
    closed(&mut stream).await;
    // Only the one who asks is left.
    let start = Instant::now();
    while server.cli(&["CLIENT", "LIST"]).await.lines().count() > 1 {
        assert!(start.elapsed() < LONG);
        sleep(Duration::from_millis(10)).await;
    }

    let mut stream = connect(proxy.port()).await.unwrap();
    stream.write_all(PING).await.unwrap();
    pong(&mut stream).await;
}

#[tokio::test]
async fn a_proxy_shows_that_the_server_is_killed_and_finds_it_again() {
    let (mut server, proxy, mut stream) = behind_proxy().await;
    server.kill();
    closed(&mut stream).await;
    closed(&mut connect(proxy.port()).await.unwrap()).await;

    server.restart().await;
    let mut stream = connect(proxy.port()).await.unwrap();
    stream.write_all(PING).await.unwrap();
    pong(&mut stream).await;
}

#[tokio::test]
async fn a_proxy_is_gone_when_dropped() {
    let (_server, proxy, mut stream) = behind_proxy().await;
    let port = proxy.port();
    drop(proxy);
    closed(&mut stream).await;
    // A process that another test starts at this moment has a copy of the listener.
    let start = Instant::now();
    while !is_gone(port).await {
        assert!(start.elapsed() < LONG);
        sleep(Duration::from_millis(10)).await;
    }
}
