//! What comes without having been asked for.

use futures_util::future::join_all;

use super::*;

const CHANNELS: [&str; 2] = ["gate:mine", "gate:all"];

async fn publish_to_all(server: &Server, text: &str) {
    for channel in CHANNELS {
        assert_eq!(server.cli(&["PUBLISH", channel, text]).await, "1", "{channel} is heard once");
    }
}

fn of_both(text: &str) -> [(String, Vec<u8>); 2] {
    CHANNELS.map(|channel| (channel.to_owned(), text.as_bytes().to_vec()))
}

#[tokio::test]
async fn messages_arrive_on_every_channel_and_again_on_each_new_connection() {
    let server = Standalone::start().await;
    let proxy = Proxy::start(&server).await;
    let linked = Linked::with(Target::parse(&proxy.url()).unwrap(), AMPLE, &CHANNELS);
    linked.echo("up").await.unwrap();

    publish_to_all(&server, "one").await;
    until("both arrive", async || linked.messages().len() == 2).await;
    assert_eq!(linked.messages(), of_both("one"));
    assert_eq!(proxy.traffic().connections, 1, "calls and messages share it");

    proxy.cut().await;
    linked.until_recovered().await;
    publish_to_all(&server, "two").await;
    until("both arrive", async || linked.messages().len() == 4).await;
    assert_eq!(linked.messages(), [of_both("one"), of_both("two")].concat());
}

#[tokio::test]
async fn messages_between_answers_are_not_taken_for_answers() {
    static SAY: LazyLock<Script> =
        LazyLock::new(|| Script::new("redis.call('PUBLISH', 'gate:mine', ARGV[1]) return ARGV[1]"));
    let server = Standalone::start().await;
    let linked = Linked::with(Target::parse(&server.url()).unwrap(), AMPLE, &CHANNELS);
    linked.echo("up").await.unwrap();

    let calls = (0..500).map(|nth: u32| {
        let linked = &linked;
        async move {
            let text = nth.to_string().into_bytes();
            let value = linked.link.run(&SAY, &["key"], std::slice::from_ref(&text)).await.unwrap();
            assert_eq!(value, Value::BulkString(text));
        }
    });
    join_all(calls).await;
    until("all arrive", async || linked.messages().len() == 500).await;
}
