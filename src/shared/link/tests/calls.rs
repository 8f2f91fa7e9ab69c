//! Calls on a connection that is there.

use std::pin::pin;

use futures_util::future::join_all;
use futures_util::poll;

use super::*;

fn script(source: &'static str) -> Script {
    Script::new(source)
}

#[tokio::test]
async fn keys_and_arguments_arrive_as_they_are() {
    let server = Standalone::start().await;
    let linked = Linked::to(&server.url(), AMPLE);
    let all = script("return {KEYS[1], KEYS[2], ARGV[1], ARGV[2], #KEYS, #ARGV}");

    let args = [b"\0\r\n$5\xff".to_vec(), Vec::new()];
    let value = linked.link.run(&all, &["{a}", "{a}:b c"], &args).await.unwrap();
    let bulk = |bytes: &[u8]| Value::BulkString(bytes.to_vec());
    let expected = [bulk(b"{a}"), bulk(b"{a}:b c"), bulk(&args[0]), bulk(b""), Value::Int(2), Value::Int(2)];
    assert_eq!(value, Value::Array(expected.to_vec()));
}

#[tokio::test]
async fn d01_a_script_that_the_server_has_forgotten_runs_once() {
    let mut server = Standalone::start().await;
    let linked = Linked::to(&server.url(), AMPLE);
    assert_eq!(linked.count("n").await.unwrap(), 1);
    server.cli(&["SCRIPT", "FLUSH"]).await;
    assert_eq!(linked.count("n").await.unwrap(), 2);
    assert_eq!(linked.count("n").await.unwrap(), 3);

    server.restart().await;
    linked.until_recovered().await;
    assert_eq!(linked.count("n").await.unwrap(), 1, "it came back empty");
}

#[tokio::test]
async fn a_call_costs_one_command() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::to(&proxy.url(), AMPLE);
    linked.count("n").await.unwrap();

    let before = proxy.traffic();
    for _ in 0..10 {
        linked.count("n").await.unwrap();
    }
    assert_eq!(proxy.traffic().commands - before.commands, 10);
    assert_eq!(proxy.traffic().connections, 1);
}

#[tokio::test]
async fn an_error_of_one_call_leaves_the_link_alone() {
    let server = Standalone::start().await;
    let linked = Linked::to(&server.url(), AMPLE);
    linked.echo("up").await.unwrap();
    server.cli(&["SET", "text", "abc"]).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]).await;

    for (source, kind) in [
        ("return redis.call('LPUSH', KEYS[1], 'x')", BackendErrorKind::OutOfMemory),
        ("return redis.call('LLEN', KEYS[1])", BackendErrorKind::Reply),
        ("return redis.call('NOSUCH', KEYS[1])", BackendErrorKind::Unsupported),
        ("return redis.call('GET')", BackendErrorKind::Reply),
        ("return redis.call('SUBSCRIBE', KEYS[1])", BackendErrorKind::Unsupported),
        ("return redis.error_reply('WRONG of its own')", BackendErrorKind::Reply),
        ("error('oh')", BackendErrorKind::Reply),
        ("no Lua", BackendErrorKind::Reply),
    ] {
        let error = linked.link.run(&script(source), &["text"], &[]).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{source}: {error}");
        assert_eq!(linked.state(), State::Up, "{source}");
    }
    assert_eq!(linked.echo("still").await.unwrap(), "still");
    assert_eq!(linked.events(), [Event::Recover]);
}

/// The client gives a dropped call's answer to nobody, and every other call its own.
#[tokio::test]
async fn a_call_that_is_dropped_at_any_point_harms_no_other() {
    let server = Standalone::start().await;
    let linked = Linked::to(&server.url(), AMPLE);
    linked.echo("up").await.unwrap();

    for round in 0..100 {
        let calls = (0..20).map(|nth| {
            let linked = &linked;
            async move {
                let text = format!("{round} {nth}");
                let mut call = pin!(linked.echo(&text));
                if nth % 3 == 0 {
                    // Dropped before it is queued, before it is written, and while its answer is on its way.
                    for _ in 0..round % 4 {
                        let _ = poll!(call.as_mut());
                        tokio::task::yield_now().await;
                    }
                } else {
                    assert_eq!(call.await.unwrap(), text);
                }
            }
        });
        join_all(calls).await;
    }
    assert_eq!(linked.events(), [Event::Recover]);
}

#[tokio::test]
async fn an_answer_that_comes_after_its_timeout_is_nobody_elses() {
    let server = Standalone::start().await;
    let linked = Linked::to(&server.url(), ENOUGH);
    linked.until_ready().await;
    let events = linked.events();

    server.stop();
    assert_eq!(linked.echo("late").await.map_err(|error| error.kind()), Err(BackendErrorKind::Timeout));
    assert_eq!(linked.state(), State::Up, "one is none");
    server.cont();
    assert_eq!(linked.echo("next").await.unwrap(), "next");
    assert_eq!(linked.events(), events);
}
