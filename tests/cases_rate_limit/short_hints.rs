//! What a host asks for, and what it means: taken to the letter until it has refused right behind an instant that it had
//! named itself.

use super::*;

/// What `Pacing::Learned` adds from then on: whole seconds are often rounded down.
const GUARD: Duration = Duration::from_secs(1);

fn refused(retry_after: &str) -> Reply {
    Reply::status(429).header("retry-after", retry_after)
}

/// How long after each reply the next request goes out, where one is always waiting.
async fn waits(layer: &HostGateLayer, replies: impl IntoIterator<Item = Reply>) -> Vec<Duration> {
    let replies = Vec::from_iter(replies);
    let count = replies.len();
    let script = Script::list(replies);
    let client = another(layer).layer(script.clone());
    for _ in 0..=count {
        send(&client, FEED).await.expect("no error surfaces to the caller");
    }
    script.times().windows(2).map(|pair| pair[1] - pair[0]).collect()
}

#[tokio::test(start_paused = true)]
async fn a_second_is_added_once_a_host_has_refused_right_behind_its_own_hint() {
    let layer = HostGateLayer::new();
    let waits = waits(&layer, [refused("10"), refused("10"), Reply::ok(), refused("10")]).await;
    assert_eq!(waits[..2], [secs(10), secs(10) + GUARD]);
    assert_eq!(waits[3], secs(10) + GUARD, "and from then on, a success or not");
}

#[tokio::test(start_paused = true)]
async fn a_second_is_added_to_resets_as_well_once_one_was_too_short() {
    for first in [left(200, "0", "30"), left(429, "0", "30"), refused("30")] {
        let layer = HostGateLayer::new().max_wait(secs(100));
        let client = layer.layer(Script::list([first, left(429, "0", "30"), left(200, "0", "30")]));
        let mut cooldowns = Vec::new();
        for _ in 0..3 {
            send(&client, FEED).await.unwrap();
            cooldowns.push(host(&layer).cooldown);
        }
        assert_eq!(cooldowns, [secs(30), secs(30) + GUARD, secs(30) + GUARD]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_without_a_hint_says_as_well_that_the_last_one_was_too_short() {
    let waits = waits(&HostGateLayer::new(), [refused("10"), Reply::status(429), refused("10")]).await;
    assert_eq!(waits, [secs(10), secs(4), secs(10) + GUARD], "the second wait is the escalation's");
}

#[tokio::test(start_paused = true)]
async fn the_second_that_is_added_is_within_the_longest_cooldown() {
    let layer = HostGateLayer::new().max_cooldown(secs(10));
    assert_eq!(waits(&layer, [refused("10"), refused("10")]).await, [secs(10); 2]);
}

#[tokio::test(start_paused = true)]
async fn reactive_pacing_takes_every_hint_to_the_letter() {
    let waits = waits(&heedful(), [refused("10"), refused("10"), left(429, "0", "10"), left(200, "0", "10")]).await;
    assert_eq!(waits, [secs(10); 4]);
}

// It may be about what was sent in the meantime.
#[tokio::test(start_paused = true)]
async fn a_refusal_some_time_after_the_hint_does_not_make_it_too_short() {
    let script = Script::list([refused("10"), refused("10")]);
    let client = HostGateLayer::new().layer(script.clone());
    send(&client, FEED).await.unwrap();
    sleep(secs(12)).await;
    for _ in 0..2 {
        send(&client, FEED).await.unwrap();
    }
    assert_eq!(script.times(), [0, 12, 22].map(secs));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_a_request_that_was_under_way_does_not_make_a_reset_too_short() {
    let script = Script::list([left(200, "0", "30").after(secs(1)), refused("29").after(secs(2))]);
    let client = HostGateLayer::new().concurrency(2).layer(script.clone());
    for sent in join_all((0..2).map(|_| send(&client, FEED))).await {
        sent.unwrap();
    }
    send(&client, FEED).await.unwrap();
    assert_eq!(script.times(), [0, 0, 31].map(secs));
}

#[tokio::test(start_paused = true)]
async fn a_hint_that_was_kept_does_not_make_the_next_refusal_its_fault() {
    let replies = [left(200, "0", "30"), Reply::ok(), refused("10")];
    assert_eq!(waits(&HostGateLayer::new(), replies).await, [secs(30), secs(0), secs(10)]);
}
