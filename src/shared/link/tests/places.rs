//! Sentinels, clusters, TLS, passwords and rights.

use futures_util::future::join_all;

use super::*;

/// Calls until one is answered.
async fn until_counted(linked: &Linked, key: &str) {
    until("a call is answered", async || linked.count(key).await.is_ok()).await;
}

#[tokio::test]
async fn after_a_failover_the_new_master_is_found() {
    let mut sentinel = Sentinel::start().await;
    let target = Target::sentinel(sentinel.sentinel_urls(), sentinel.service().to_owned()).unwrap();
    let linked = Linked::with(target, AMPLE, &["news"]);
    assert_eq!(linked.count("n").await.unwrap(), 1);
    assert_eq!(sentinel.master().cli(&["GET", "n"]).await, "1");

    sentinel.kill_master();
    linked.until(State::Down).await;
    assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));
    sentinel.wait_for_new_master().await;
    linked.until_recovered().await;
    until_counted(&linked, "m").await;
    assert_ne!(sentinel.master().cli(&["GET", "m"]).await, "");
    assert_eq!(sentinel.master().cli(&["PUBLISH", "news", "x"]).await, "1");
    assert_eq!(linked.outages(), [degraded(BackendErrorKind::Unreachable), Event::Recovered]);
}

#[tokio::test]
async fn a_master_that_is_made_a_replica_is_left_for_the_new_one() {
    let mut sentinel = Sentinel::start().await;
    let target = Target::sentinel(sentinel.sentinel_urls(), sentinel.service().to_owned()).unwrap();
    let linked = Linked::with(target, AMPLE, &[]);
    linked.count("n").await.unwrap();

    sentinel.failover().await;
    sentinel.wait_for_new_master().await;
    until_counted(&linked, "m").await;
    until("the link is on the new master", async || {
        let counted = linked.count("m").await;
        counted.is_ok() && linked.state() == State::Up && sentinel.master().cli(&["EXISTS", "m"]).await == "1"
    })
    .await;
    let outages = linked.outages();
    assert_eq!(outages.len() % 2, 0, "{outages:?}");
}

#[tokio::test]
async fn a_sentinel_that_does_not_answer_is_passed_over() {
    let mut sentinel = Sentinel::start().await;
    sentinel.sentinels_mut()[0].kill();
    sentinel.sentinels_mut()[1].stop();
    let urls = sentinel.sentinel_urls();
    let hosts: Vec<_> = urls.iter().map(|url| url.trim_start_matches("redis://").trim_end_matches('/')).collect();
    let url = format!("redis+sentinel://somebody:else@{}/{}", hosts.join(","), sentinel.service());
    // The servers know no `somebody`; the sentinels neither, and are asked all the same.
    for server in [sentinel.master(), sentinel.other()] {
        server.cli(&["ACL", "SETUSER", "somebody", "on", ">else", "~*", "&*", "+@all"]).await;
    }

    let linked = Linked::to(&url, AMPLE);
    assert_eq!(linked.count("n").await.unwrap(), 1);
}

#[tokio::test]
async fn a_service_that_no_sentinel_knows_is_an_error() {
    let sentinel = Sentinel::start().await;
    let target = Target::sentinel(sentinel.sentinel_urls(), "nobody".to_owned()).unwrap();
    let linked = Linked::with(target, AMPLE, &[]);
    assert_eq!(linked.fails().await, BackendErrorKind::MasterDown);
}

#[tokio::test]
async fn d02_a_cluster_runs_each_call_where_its_keys_are() {
    let cluster = Cluster::start().await;
    let linked =
        Linked::with(Target::cluster(cluster.urls()[..1].to_vec()).unwrap(), AMPLE, &["gate:mine", "gate:all"]);
    for nth in 0..30 {
        assert_eq!(linked.count(&format!("{{{nth}}}")).await.unwrap(), 1);
    }
    cluster.cli_all(&["SCRIPT", "FLUSH"]).await;
    for nth in 0..30 {
        assert_eq!(linked.count(&format!("{{{nth}}}")).await.unwrap(), 2);
    }

    for channel in ["gate:mine", "gate:all"] {
        cluster.nodes()[2].cli(&["PUBLISH", channel, "text"]).await;
    }
    until("both messages arrive", async || linked.messages().len() == 2).await;
    assert_eq!(linked.events(), [Event::Recover]);
}

#[tokio::test]
async fn a_cluster_is_back_when_all_its_masters_are() {
    let mut cluster = Cluster::start_with_replicas().await;
    let linked = Linked::with(Target::cluster(cluster.urls()).unwrap(), ENOUGH, &["news"]);
    until_counted(&linked, "n").await;
    let before = linked.outages();

    cluster.kill_master_of("n").await;
    // Meanwhile calls for other hosts are answered, or not; it is one outage.
    until("the outage is noticed", async || {
        let _ = linked.count("n").await;
        linked.state() == State::Down
    })
    .await;
    linked.until_recovered().await;
    until_counted(&linked, "n").await;

    let outages = linked.outages();
    assert_eq!(outages.len(), before.len() + 2, "{outages:?}");
    cluster.nodes().iter().find(|node| node.is_running()).unwrap().cli(&["PUBLISH", "news", "x"]).await;
    until("the message arrives", async || linked.messages().len() == 1).await;
}

#[tokio::test]
async fn a_cluster_whose_replica_takes_over_keeps_its_link() {
    let cluster = Cluster::start_with_replicas().await;
    let linked = Linked::with(Target::cluster(cluster.urls()).unwrap(), AMPLE, &["gate:mine", "gate:all"]);
    for nth in 0..10 {
        linked.count(&format!("{{{nth}}}")).await.unwrap();
    }

    cluster.failover("{0}").await;
    // Every answer is still that of its own call.
    for _ in 0..20 {
        let calls = (0..20).map(|nth| {
            let linked = &linked;
            async move {
                let (key, text) = (format!("{{{nth}}}"), nth.to_string().into_bytes());
                let value = linked.link.run(&ECHO, &[key], std::slice::from_ref(&text)).await.unwrap();
                assert_eq!(value, Value::BulkString(text));
            }
        });
        join_all(calls).await;
    }
    assert_eq!(linked.events(), [Event::Recover]);
}

#[tokio::test]
async fn a_cluster_opened_as_one_server_says_so() {
    let cluster = Cluster::start().await;
    let elsewhere = (cluster.master_of("n").await + 1) % 3;
    let linked = Linked::to(&cluster.urls()[elsewhere], AMPLE);
    let error = linked.count("n").await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("MOVED"), "{error}");
}

#[tokio::test]
async fn tls_trusts_the_authority_it_is_given_and_no_other() {
    let server = Tls::start().await;
    let target = Target::parse(&server.url()).unwrap();
    let trusting = target.clone().with_root_certificate(server.root_pem().as_bytes().to_vec());
    let linked = Linked::with(trusting, AMPLE, &["news"]);
    assert_eq!(linked.echo("secret").await.unwrap(), "secret");

    let wary = Linked::with(target.clone(), AMPLE, &[]);
    assert_eq!(wary.fails().await, BackendErrorKind::Unreachable);

    let other = Tls::start().await;
    let misled = target.with_root_certificate(other.root_pem().as_bytes().to_vec());
    assert_eq!(Linked::with(misled, AMPLE, &[]).fails().await, BackendErrorKind::Unreachable);
    let confused =
        Target::parse(&server.url()).unwrap().with_root_certificate(b"-----BEGIN CERTIFICATE-----\n".to_vec());
    assert_eq!(Linked::with(confused, AMPLE, &[]).fails().await, BackendErrorKind::Unreachable);
}

#[tokio::test]
async fn a_password_is_used_and_not_repeated() {
    let server = Standalone::password("open-sesame").await;
    assert_eq!(Linked::to(&server.url(), AMPLE).echo("in").await.unwrap(), "in");

    let url = server.url().replace("open-sesame", "close-sesame");
    let linked = Linked::to(&url, AMPLE);
    let error = linked.echo("in").await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Reply);
    assert!(!format!("{error} {error:?} {:?}", linked.link.plan.target).contains("sesame"), "{error}");
}

#[tokio::test]
async fn these_rights_are_enough() {
    let server = Standalone::start().await;
    let rights = "on >pw resetkeys ~host-gate:* resetchannels &host-gate:* +eval +evalsha +time +subscribe +incr";
    let mut user = vec!["ACL", "SETUSER", "gate"];
    user.extend(rights.split(' '));
    server.cli(&user).await;

    let url = format!("redis://gate:pw@127.0.0.1:{}/", server.port());
    let linked = Linked::with(Target::parse(&url).unwrap(), AMPLE, &["host-gate:news"]);
    assert_eq!(linked.count("host-gate:n").await.unwrap(), 1);
    assert_eq!(linked.count("other").await.unwrap_err().kind(), BackendErrorKind::Reply);
    assert_eq!(linked.events(), [Event::Recover]);
}

/// Redis 6.2 answers `ERR` when a command of a script fails, and hides the command's own reply in the text.
#[tokio::test]
async fn older_and_other_servers_are_understood() {
    for build in [Build::Redis62, Build::Valkey] {
        if !build.is_available() {
            continue;
        }
        let server = Standalone::build(build).await;
        let linked = Linked::with(Target::parse(&server.url()).unwrap(), AMPLE, &["news"]);
        linked.count("n").await.unwrap();
        server.cli(&["SCRIPT", "FLUSH"]).await;
        linked.count("n").await.unwrap();
        server.cli(&["PUBLISH", "news", "text"]).await;
        until("the message arrives", async || linked.messages().len() == 1).await;

        server.cli(&["CONFIG", "SET", "maxmemory", "1"]).await;
        assert_eq!(linked.count("n").await.unwrap_err().kind(), BackendErrorKind::OutOfMemory, "{build:?}");
        let unknown = Script::new("return redis.call('NOSUCH')");
        let error = linked.link.run(&unknown, &["n"], &[]).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unsupported, "{build:?}: {error}");
        assert_eq!(linked.state(), State::Up, "{build:?}");

        server.cli(&["CONFIG", "SET", "maxmemory", "0"]).await;
        server.cli(&["REPLICAOF", "127.0.0.1", "1"]).await;
        let error = linked.count("n").await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::ReadOnly, "{build:?}: {error}");
        assert_eq!(linked.fails_at_once(), Some(BackendErrorKind::Down));
        server.cli(&["REPLICAOF", "NO", "ONE"]).await;
        linked.until_recovered().await;
    }
}
