//! The S cases as far as reactive pacing, queue and budget go: what the state of a host makes of refusals, answers and
//! settings. Concurrency 1, base 2 s, cap 60 s, spacing 1 s, warm 120 s, max wait 60 s unless a test says otherwise.

mod support;

use std::time::Duration;

use http::Response;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tower::{BoxError, Layer as _, ServiceExt as _};
use tower_host_gate::{HostGate, HostGateLayer, HostSnapshot, MaxWait, RateLimited, Reason, ResponseBody};

use support::reactive;
use support::script::{Reply, Script, ScriptBody, get};

const FEED: &str = "http://feeds.example/feed.xml";
const HOST: &str = "feeds.example:80";

type Answer = Result<Response<ResponseBody<ScriptBody>>, BoxError>;

async fn send(client: &HostGate<Script>) -> Answer {
    client.clone().oneshot(get(FEED)).await
}

/// A request that is sent at once or not at all.
async fn send_now(client: &HostGate<Script>) -> Answer {
    let mut request = get(FEED);
    request.extensions_mut().insert(MaxWait(Duration::ZERO));
    client.clone().oneshot(request).await
}

fn spawn(client: &HostGate<Script>, uri: &str) -> JoinHandle<Answer> {
    tokio::spawn(client.clone().oneshot(get(uri)))
}

/// Sends the same request from this many tasks at once, and waits for all answers.
async fn burst(client: &HostGate<Script>, tasks: usize) {
    let tasks: Vec<_> = (0..tasks).map(|_| spawn(client, FEED)).collect();
    for task in tasks {
        task.await.expect("no panic").expect("an answer");
    }
}

fn shed(answer: Answer) -> RateLimited {
    let error = answer.expect_err("the request is shed");
    RateLimited::find(&*error).expect("shed with RateLimited").clone()
}

fn state(layer: &HostGateLayer) -> HostSnapshot {
    layer.hosts().get(HOST).expect("the host is known")
}

fn refused() -> Reply {
    Reply::status(429)
}

fn refused_for(seconds: &str) -> Reply {
    refused().header("retry-after", seconds)
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

// --- events -----------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s01_a_burst_of_429s_is_one_event() {
    let script = Script::always(refused().after(millis(100)));
    // Without spacing, so that the second burst is one too.
    let layer = reactive().concurrency(8).spacing(secs(0));
    let client = layer.layer(script.clone());

    burst(&client, 8).await;
    assert_eq!((state(&layer).streak, state(&layer).cooldown), (1, secs(2)));

    burst(&client, 8).await;
    assert_eq!((state(&layer).streak, state(&layer).cooldown), (2, secs(4)));

    assert_eq!(script.times(), [[secs(0); 8], [millis(2_100); 8]].concat());
}

#[tokio::test(start_paused = true)]
async fn s01_spaced_sends_that_overlap_are_one_event_too() {
    let script = Script::list([
        refused(),
        // Sent at 2, 3 and 4 s, refused at 12, 13 and 14 s: the last two before the first of them was refused.
        refused().after(secs(10)),
        refused().after(secs(10)),
        refused().after(secs(10)),
    ]);
    let layer = reactive().concurrency(8);
    let client = layer.layer(script.clone());
    send(&client).await.unwrap();

    burst(&client, 3).await;

    assert_eq!((state(&layer).streak, state(&layer).cooldown), (2, secs(2)), "4 s from the first refusal, at 12 s");
    send(&client).await.unwrap();
    assert_eq!(script.times(), [0, 2, 3, 4, 16].map(secs));
}

#[tokio::test(start_paused = true)]
async fn s02_the_longest_hint_of_an_event_holds_and_none_escalates() {
    let at = |reply: Reply, after| reply.after(millis(after));
    let cases = [
        (at(refused(), 100), at(refused_for("30"), 200), millis(30_200)),
        (at(refused_for("30"), 100), at(refused(), 200), millis(30_100)),
        (at(refused_for("30"), 100), at(refused_for("1"), 200), millis(30_100)),
        (at(refused_for("1"), 100), at(refused_for("30"), 200), millis(30_200)),
    ];
    for (first, second, next) in cases {
        let script = Script::list([first, second]);
        let layer = reactive().concurrency(2);
        let client = layer.layer(script.clone());
        burst(&client, 2).await;
        assert_eq!(state(&layer).streak, 1);
        send(&client).await.unwrap();
        assert_eq!(script.times(), [secs(0), secs(0), next]);
    }
}

/// A hold can also be heard of from elsewhere.
#[tokio::test(start_paused = true)]
async fn s02_a_penalty_never_shortens_a_hold() {
    let script = Script::list([refused_for("30")]);
    let layer = reactive();
    let client = layer.layer(script.clone());
    send(&client).await.unwrap();

    sleep(secs(10)).await;
    layer.hosts().penalize(HOST, secs(1));
    assert_eq!(state(&layer).cooldown, secs(20));
    send(&client).await.unwrap();

    assert_eq!(script.times(), [secs(0), secs(30)]);
}

#[tokio::test(start_paused = true)]
async fn s04_any_answer_ends_the_streak_and_a_connection_error_does_not() {
    let cases = [
        (Reply::ok(), 0),
        (Reply::status(404), 0),
        (Reply::status(304), 0),
        (Reply::status(301), 0),
        (Reply::status(401), 0),
        (Reply::error("connection refused"), 2),
        (Reply::status(408), 2),
        (Reply::status(500), 2),
    ];
    for (answer, streak) in cases {
        let script = Script::list([refused(), refused(), answer.clone(), refused()]);
        let layer = reactive();
        let client = layer.layer(script.clone());
        for _ in 0..3 {
            let _ = send(&client).await;
        }
        assert_eq!(state(&layer).streak, streak, "{answer:?}");

        send(&client).await.unwrap();
        assert_eq!(state(&layer).cooldown, if streak == 0 { secs(2) } else { secs(8) }, "{answer:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn s05_a_cooldown_is_a_deadline_not_a_duration() {
    let script = Script::list([refused_for("10")]);
    let client = reactive().layer(script.clone());
    let began = Instant::now();
    send(&client).await.unwrap();

    for asked_at in [9_500, 30_000] {
        sleep_until(began + millis(asked_at)).await;
        send(&client).await.unwrap();
    }

    assert_eq!(script.times(), [0, 10, 30].map(secs));
}

// --- what is kept, and for how long -----------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s10_a_host_is_not_forgotten_while_it_is_held_warm_or_on_a_streak() {
    let script = Script::new(|sent| match (sent.host.as_str(), sent.n) {
        ("feeds.example", 0) => refused_for("60"),
        ("feeds.example", _) => refused(),
        _ => refused_for("1"),
    });
    let layer = reactive();
    let client = layer.layer(script.clone());
    send(&client).await.unwrap();

    // Nobody waits for the host meanwhile, and refusals of other hosts make the gate clear its table out.
    for round in 0..17 {
        for host in 0..32 {
            spawn(&client, &format!("http://other-{round}-{host}.example/")).await.unwrap().unwrap();
        }
        let seconds = 10 * round;
        assert_eq!(state(&layer).cooldown, secs(60_u64.saturating_sub(seconds)), "after {seconds} s");
        assert_eq!(state(&layer).warm, secs(180 - seconds));
        assert_eq!(state(&layer).streak, 1);
        sleep(secs(10)).await;
    }
    send(&client).await.unwrap();
    assert_eq!(state(&layer).streak, 2, "a refusal at 170 s still finds the streak");

    // And is forgotten after that.
    sleep(secs(4 + 120)).await;
    assert_eq!(layer.hosts().snapshot(), []);
}

#[tokio::test(start_paused = true)]
async fn s11_a_streak_ends_when_the_host_is_cold() {
    // Refused at 0, 2 and 6 s, the third time for 8 s: cold 120 s after that.
    let cold_at = 14_000 + 120_000;
    for (asked_at, streak, cooldown) in [(cold_at - 1, 4, 16), (cold_at, 1, 2), (cold_at + 1_000_000, 1, 2)] {
        let script = Script::always(refused());
        let layer = reactive();
        let client = layer.layer(script.clone());
        let began = Instant::now();
        for _ in 0..3 {
            send(&client).await.unwrap();
        }
        assert_eq!((state(&layer).streak, state(&layer).cooldown), (3, secs(8)));

        sleep_until(began + millis(asked_at)).await;
        send(&client).await.unwrap();

        assert_eq!((state(&layer).streak, state(&layer).cooldown), (streak, secs(cooldown)), "at {asked_at} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn s12_a_host_that_always_refuses_is_asked_a_bounded_number_of_times() {
    let script = Script::always(refused());
    let client = reactive().layer(script.clone());
    let began = Instant::now();

    // Twenty callers that retry for an hour: at once after a refusal, when told to after being shed.
    let callers: Vec<_> = (0..20)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                while began.elapsed() < secs(3600) {
                    if let Err(error) = send(&client).await {
                        sleep(RateLimited::find(&*error).expect("nothing else fails").retry_after()).await;
                    }
                }
            })
        })
        .collect();
    sleep(secs(3600)).await;
    callers.iter().for_each(|caller| caller.abort());

    // At 0, 2, 6, 14, 30 and 62 s, then once a minute.
    let in_the_hour = script.times().iter().filter(|at| **at < secs(3600)).count();
    assert_eq!(in_the_hour, 6 + (3600 - 62) / 60);

    let limited = shed(send_now(&client).await);
    assert!(limited.streak() as usize >= in_the_hour);
    assert_eq!(limited.throttled_since().unwrap(), began, "the error says for how long");
}

// --- after the cooldown -----------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s13_no_herd_after_the_cooldown() {
    let script = Script::new(|sent| match sent.n {
        0 => refused_for("30"),
        _ => Reply::ok().after(millis(100)),
    });
    let client = reactive().concurrency(5).max_wait(secs(600)).layer(script.clone());
    send(&client).await.unwrap();

    let waiters: Vec<_> = (0..50).map(|n| spawn(&client, &format!("http://feeds.example/{n}"))).collect();
    for waiter in waiters {
        waiter.await.unwrap().unwrap();
    }

    let after_the_cooldown: Vec<_> = script.sent().split_off(1).into_iter().map(|sent| (sent.at, sent.path)).collect();
    let one_by_one: Vec<_> = (0..50).map(|n| (secs(30 + n), format!("/{n}"))).collect();
    assert_eq!(after_the_cooldown, one_by_one, "one at a time, a spacing apart, first come first served");
}

#[tokio::test(start_paused = true)]
async fn s13_a_probe_that_is_refused_holds_all_who_wait_behind_it() {
    let script = Script::list([refused_for("30"), refused()]);
    let client = reactive().concurrency(5).max_wait(secs(600)).layer(script.clone());
    send(&client).await.unwrap();

    burst(&client, 4).await;

    assert_eq!(script.times(), [0, 30, 34, 35, 36].map(secs), "the refusal at 30 s is the second in a row: 4 s");
}

// --- who does not go leaves nothing behind ----------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s17_a_request_without_a_budget_left_is_an_error_and_books_nothing() {
    let script = Script::list([refused()]);
    let layer = reactive();
    let client = layer.layer(script.clone());
    let began = Instant::now();
    send(&client).await.unwrap();

    let limited = shed(send_now(&client).await);
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::Cooldown, secs(2)));
    send(&client).await.unwrap();
    sleep_until(began + millis(2_500)).await;
    for _ in 0..10 {
        let limited = shed(send_now(&client).await);
        assert_eq!((limited.reason(), limited.retry_after()), (Reason::Spacing, millis(500)));
    }
    assert_eq!(began.elapsed(), millis(2_500), "none of them waited");
    assert_eq!((state(&layer).in_flight, state(&layer).queued), (0, 0));
    send(&client).await.unwrap();

    assert_eq!(script.times(), [0, 2, 3].map(secs), "nor cost the next request anything");
}

#[tokio::test(start_paused = true)]
async fn s17_a_request_without_a_budget_is_sent_where_it_need_not_wait() {
    let script = Script::list([Reply::ok().after(secs(5))]);
    let client = HostGateLayer::new().layer(script.clone());
    let in_flight = spawn(&client, FEED);
    tokio::task::yield_now().await;

    assert_eq!(shed(send_now(&client).await).reason(), Reason::InFlight);
    in_flight.await.unwrap().unwrap();
    send_now(&client).await.unwrap();

    assert_eq!(script.times(), [secs(0), secs(5)]);
}

#[tokio::test(start_paused = true)]
async fn s20_a_fast_error_never_speeds_anything_up() {
    let script = Script::always(refused().after(millis(5)));
    let client = reactive().layer(script.clone());
    for _ in 0..11 {
        send(&client).await.unwrap();
    }
    let gaps: Vec<_> = script.times().windows(2).map(|pair| (pair[1] - pair[0]).as_millis()).collect();
    assert_eq!(gaps, [2_005, 4_005, 8_005, 16_005, 32_005, 60_005, 60_005, 60_005, 60_005, 60_005]);
}

// --- zero and absurd settings -----------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn s21_zero_concurrency_is_one() {
    let script = Script::always(Reply::ok().after(secs(1)));
    burst(&HostGateLayer::new().concurrency(0).layer(script.clone()), 3).await;
    assert_eq!(script.times(), [0, 1, 2].map(secs));

    let script = Script::always(Reply::ok().after(secs(1)));
    burst(&HostGateLayer::new().concurrency(usize::MAX).layer(script.clone()), 3).await;
    assert_eq!(script.times(), [secs(0); 3]);
}

#[tokio::test(start_paused = true)]
async fn s21_a_base_past_the_cap_is_the_cap() {
    let script = Script::always(refused());
    let client = reactive().base_cooldown(secs(90)).max_cooldown(secs(20)).layer(script.clone());
    for _ in 0..3 {
        send(&client).await.unwrap();
    }
    assert_eq!(script.times(), [0, 20, 40].map(secs));
}

/// Without a cooldown a refused host is still warm: the spacing is what is left.
#[tokio::test(start_paused = true)]
async fn s21_no_cooldown_leaves_the_spacing() {
    for layer in [reactive().base_cooldown(secs(0)), reactive().max_cooldown(secs(0))] {
        let script = Script::always(refused());
        let client = layer.layer(script.clone());
        burst(&client, 4).await;
        assert_eq!(script.times(), [0, 0, 1, 2].map(secs));
    }
}

#[tokio::test(start_paused = true)]
async fn s21_zero_spacing_and_zero_warmth_are_off() {
    let script = Script::list([refused()]);
    burst(&reactive().spacing(secs(0)).layer(script.clone()), 4).await;
    assert_eq!(script.times(), [0, 2, 2, 2].map(secs));

    // Without warmth a host is cold when its cooldown ends: no spacing, and no streak that goes on.
    let script = Script::list([refused(), Reply::ok(), Reply::ok(), refused()]);
    let layer = reactive().warm_for(secs(0));
    let client = layer.layer(script.clone());
    burst(&client, 4).await;
    assert_eq!(script.times(), [0, 2, 2, 2].map(secs));
    assert_eq!((state(&layer).streak, state(&layer).cooldown), (1, secs(2)));
}

#[tokio::test(start_paused = true)]
async fn s21_zero_max_wait_fails_fast() {
    let script = Script::list([refused()]);
    let client = reactive().max_wait(secs(0)).layer(script.clone());
    let began = Instant::now();
    send(&client).await.unwrap();

    assert_eq!(shed(send(&client).await).reason(), Reason::Cooldown);
    assert_eq!(began.elapsed(), secs(0));

    sleep(secs(2)).await;
    send(&client).await.unwrap();
    assert_eq!(shed(send(&client).await).reason(), Reason::Spacing);
    assert_eq!(script.times(), [0, 2].map(secs));
}

#[tokio::test(start_paused = true)]
async fn s21_a_queue_bound_of_zero_is_off() {
    let script = Script::always(Reply::ok().after(millis(1)));
    burst(&HostGateLayer::new().max_queue(0).layer(script.clone()), 20_000).await;
    assert_eq!(script.sent().len(), 20_000);

    // And a bound that is set refuses the first one beyond it.
    let script = Script::always(Reply::ok().after(secs(1)));
    let client = HostGateLayer::new().max_queue(2).layer(script.clone());
    let waiting: Vec<_> = (0..3).map(|_| spawn(&client, FEED)).collect();
    tokio::task::yield_now().await;
    assert_eq!(shed(send(&client).await).reason(), Reason::QueueFull);
    for task in waiting {
        task.await.unwrap().unwrap();
    }
}
