//! Learned pacing through the real layer, under the paused clock: what a host taught the gate, and what callers see of it.
//! Concurrency 1, base 2 s, cap 15 min, spacing 1 s, warm 120 s, max wait 60 s unless a test says otherwise.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::collections::VecDeque;
use std::time::Duration;

use futures_util::future::join_all;
use http::{Request, Response};
use tokio::time::{Instant, sleep};
use tower::retry::{Retry, RetryLayer};
use tower::{BoxError, Layer as _, Service, ServiceExt as _};
use tower_host_gate::retry::GateRetry;
use tower_host_gate::{HostGate, HostGateLayer, HostSnapshot, MaxWait, RateLimited, Reason};

use support::reactive;
use support::script::{Reply, Script, get};

const FEED: &str = "http://feeds.example/feed.xml";
const HOST: &str = "feeds.example:80";

/// Refuses with a 429 that says nothing, whatever is more than so many in any interval of this width.
fn provider(size: usize, window: Duration) -> Script {
    let mut served = VecDeque::new();
    Script::new(move |sent| {
        while served.front().is_some_and(|first| *first + window <= sent.at) {
            served.pop_front();
        }
        let refused = served.len() == size;
        if !refused {
            served.push_back(sent.at);
        }
        Reply::status(if refused { 429 } else { 200 }).after(millis(50))
    })
}

/// A gate whose requests wait for as long as it takes.
fn patient() -> HostGateLayer {
    HostGateLayer::new().max_wait(secs(100_000))
}

/// Repeats what was refused until it is served.
fn insistent(layer: &HostGateLayer, script: &Script) -> Retry<GateRetry, HostGate<Script>> {
    RetryLayer::new(GateRetry::new(u32::MAX)).layer(layer.layer(script.clone()))
}

async fn ask<S, B>(client: &S, request: Request<()>) -> Result<u16, BoxError>
where
    S: Service<Request<()>, Response = Response<B>, Error = BoxError> + Clone,
{
    client.clone().oneshot(request).await.map(|response| response.status().as_u16())
}

async fn status<S, B>(client: &S) -> u16
where
    S: Service<Request<()>, Response = Response<B>, Error = BoxError> + Clone,
{
    ask(client, get(FEED)).await.expect("an answer")
}

/// So many requests at once, all of which are served.
async fn batch<S, B>(client: &S, requests: usize)
where
    S: Service<Request<()>, Response = Response<B>, Error = BoxError> + Clone,
{
    let answers = join_all((0..requests).map(|n| ask(client, get(&format!("{FEED}?{n}"))))).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(200))), "{answers:?}");
}

/// A request with this budget.
fn within(budget: Duration) -> Request<()> {
    let mut request = get(FEED);
    request.extensions_mut().insert(MaxWait(budget));
    request
}

fn shed(answer: Result<u16, BoxError>) -> RateLimited {
    let error = answer.expect_err("the request is shed");
    RateLimited::find(&*error).expect("shed with RateLimited").clone()
}

fn state(layer: &HostGateLayer) -> HostSnapshot {
    layer.hosts().get(HOST).expect("the host is known")
}

/// The time between each send and the one before it.
fn gaps(script: &Script) -> Vec<Duration> {
    script.times().windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// A client of a host that has refused the second of two requests at once and serves everything from then on, and that
/// has learnt a gap of 30 s, at 30 s.
async fn taught() -> (HostGateLayer, HostGate<Script>, Script) {
    let script = Script::list([Reply::ok().after(secs(1)), Reply::status(429).header("retry-after", "29")]);
    let layer = patient();
    let client = layer.layer(script.clone());
    join_all((0..3).map(|_| status(&client))).await;
    assert_eq!((state(&layer).gap, script.times()[2]), (secs(30), secs(30)));
    (layer, client, script)
}

/// The same of a host that served five at once, five more after a good minute, and another one after as long again.
async fn taught_bursts() -> (HostGateLayer, HostGate<Script>, Script) {
    let script =
        Script::new(|sent| Reply::status(if matches!(sent.n, 5..10 | 15) { 429 } else { 200 }).after(millis(50)));
    let layer = patient();
    let client = layer.layer(script.clone());
    join_all((0..17).map(|_| status(&client))).await;
    let (found, gap) = (script.times()[10], state(&layer).gap);
    assert!(found > secs(62) && found < secs(63), "found by the ladder: {found:?}");
    assert!(gap > secs(62) / 5 && gap < secs(63) / 5, "on average: {gap:?}");
    (layer, client, script)
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

// --- what it costs ----------------------------------------------------------------------------------------------------

/// Seven refusals: four on the ladder (at 0, 2, 6 and 14 s); one that tells the gap from a burst, since nobody has watched
/// what was served before; two while the gap is shortened; and none after that.
#[tokio::test(start_paused = true)]
async fn s09_one_request_per_25_s_is_found_out_with_a_handful_of_refusals() {
    let script = provider(1, secs(25));
    let layer = patient();
    let client = insistent(&layer, &script);

    for _ in 0..10 {
        assert_eq!(status(&client).await, 200);
    }

    let refusals = script.sent().len() - 10;
    assert!((4..=8).contains(&refusals), "{refusals}: {:?}", script.times());
    let gap = state(&layer).gap;
    assert!(gap >= secs(25) && gap <= secs(30), "{gap:?}");
    let last = gaps(&script).split_off(script.sent().len() - 3);
    assert!(last.iter().all(|apart| *apart == gap), "a stable pace: {last:?}");
}

#[tokio::test(start_paused = true)]
async fn s09_whoever_is_sent_away_is_told_when_to_come_back() {
    let script = provider(1, secs(25));
    let layer = HostGateLayer::new();
    let client = insistent(&layer, &script);

    let answers = join_all((0..10).map(|_| async {
        let mut sheds = 0;
        while let Err(error) = ask(&client, get(FEED)).await {
            sleep(RateLimited::find(&*error).expect("nothing else fails").retry_after()).await;
            sheds += 1;
        }
        sheds
    }))
    .await;

    assert!(answers.iter().sum::<u32>() > 0, "ten of them do not fit into a minute");
    assert!(answers.iter().all(|sheds| *sheds < 10), "{answers:?}");
    assert!(script.sent().len() - 10 <= 6, "{:?}", script.times());
    assert!(script.times()[script.sent().len() - 1] < secs(400), "{:?}", script.times());
}

#[tokio::test(start_paused = true)]
async fn a_memory_saves_most_of_the_refusals() {
    let mut refusals = Vec::new();
    for layer in [reactive(), HostGateLayer::new()] {
        let script = provider(1, secs(25));
        batch(&insistent(&layer.max_wait(secs(100_000)), &script), 20).await;
        refusals.push(script.sent().len() - 20);
    }
    // At 1, 2, 4, 8 and 16 s behind every one that is served.
    assert!(refusals[0] >= 4 * 19, "{refusals:?}");
    assert!(refusals[1] <= 7, "{refusals:?}");
}

#[tokio::test(start_paused = true)]
async fn s07_a_delay_and_the_cooldown_are_the_longer_of_the_two() {
    let script = Script::always(Reply::status(429));
    let client = patient().min_delay(secs(10)).layer(script.clone());
    for _ in 0..11 {
        assert_eq!(status(&client).await, 429);
    }
    assert_eq!(gaps(&script), [10, 10, 10, 16, 32, 64, 128, 256, 512, 900].map(secs));
}

#[tokio::test(start_paused = true)]
async fn s20_a_fast_error_never_speeds_anything_up() {
    let script = Script::always(Reply::status(429).after(millis(5)));
    let client = patient().layer(script.clone());
    for _ in 0..11 {
        assert_eq!(status(&client).await, 429);
    }
    let waits: Vec<_> = gaps(&script).iter().map(|gap| *gap - millis(5)).collect();
    assert_eq!(waits, [2, 4, 8, 16, 32, 64, 128, 256, 512, 900].map(secs));
}

// --- one at a time ----------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_warm_host_is_served_one_at_a_time_whatever_the_concurrency() {
    let script = Script::new(|sent| match sent.n {
        0 => Reply::status(429).header("retry-after", "2"),
        _ => Reply::ok().after(secs(10)),
    });
    let layer = patient().concurrency(8);
    let client = layer.layer(script.clone());
    assert_eq!(status(&client).await, 429);

    batch(&client, 8).await;
    assert_eq!(script.peak(), 1);

    sleep(secs(200)).await;
    assert_eq!(state(&layer).warm, Duration::ZERO);
    batch(&client, 8).await;
    let peak = script.peak();
    assert!(peak > 1 && peak <= 8, "at once again, as far as the gap lets them: {peak}");
}

#[tokio::test(start_paused = true)]
async fn s01_eight_in_flight_before_the_first_refusal_are_one_event() {
    let script = Script::new(|sent| match sent.n {
        0..8 => Reply::status(429).after(millis(100)),
        _ => Reply::ok(),
    });
    let layer = patient().concurrency(8);
    let client = layer.layer(script.clone());
    join_all((0..8).map(|_| status(&client))).await;
    assert_eq!((state(&layer).streak, state(&layer).cooldown), (1, secs(2)));

    assert_eq!(status(&client).await, 200);
    assert_eq!(state(&layer).streak, 0);
    let times = script.times();
    assert_eq!((times[7], times[8]), (secs(0), millis(2_100)));
}

#[tokio::test(start_paused = true)]
async fn answers_to_what_was_under_way_say_nothing_of_the_host_as_it_is_now() {
    // The first is refused while seven others are served, later.
    let script = Script::new(|sent| match sent.n {
        0 => Reply::status(429).after(millis(100)),
        _ => Reply::ok().after(secs(1)),
    });
    let layer = patient().concurrency(8);
    let client = layer.layer(script.clone());
    join_all((0..8).map(|_| status(&client))).await;
    assert_eq!(state(&layer).streak, 1);
    assert_eq!(status(&client).await, 200);
    assert_eq!(script.times()[8], millis(2_100));
}

// --- how long it lasts ------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_gap_survives_success_idleness_and_warmth() {
    let script = provider(1, secs(25));
    let layer = patient();
    let client = insistent(&layer, &script);
    batch(&client, 12).await;
    let (gap, sent) = (state(&layer).gap, script.sent().len());
    assert!(gap >= secs(25), "{gap:?}");

    sleep(secs(3600)).await;
    assert_eq!((state(&layer).gap, state(&layer).warm), (gap, Duration::ZERO));
    batch(&client, 2).await;

    let times = script.times();
    assert_eq!(times[sent + 1] - times[sent], gap, "the first one at once, the second a gap behind it");
    assert_eq!(times.len(), sent + 2, "without a refusal");
}

#[tokio::test(start_paused = true)]
async fn a_burst_survives_idleness_too() {
    let (layer, client, script) = taught_bursts().await;
    sleep(secs(3600)).await;
    let gap = state(&layer).gap * 5;
    batch(&client, 6).await;
    let apart: Vec<_> = script.times()[17..].iter().map(|at| *at - script.times()[17]).collect();
    assert_eq!(apart[..5], [0, 1, 2, 3, 4].map(secs), "at the pace at which it was learnt");
    assert_eq!(apart[5], gap, "and the next one");
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_says_what_was_learnt() {
    let script = provider(1, secs(25));
    let layer = patient();
    let client = insistent(&layer, &script);
    batch(&client, 2).await;
    let found = state(&layer);
    assert_eq!(found.gap, found.known_good);
    assert!(found.too_short < secs(25) && secs(25) <= found.known_good, "{found:?}");
    assert_eq!(found.next_send, found.gap - millis(50), "so long behind the last send");

    batch(&client, 20).await;
    let tight = state(&layer);
    assert!(tight.too_short > found.too_short && tight.known_good < found.known_good, "{tight:?}");
}

#[tokio::test(start_paused = true)]
async fn a_host_that_is_cleared_is_as_new() {
    let (layer, client, script) = taught().await;
    layer.hosts().clear(HOST);
    assert_eq!(layer.hosts().get(HOST), None);
    batch(&client, 5).await;
    assert_eq!(script.times()[3..], [secs(30); 5]);
}

#[tokio::test(start_paused = true)]
async fn clearing_a_host_lets_those_who_wait_for_its_gap_go() {
    let (layer, client, script) = taught().await;
    let waiting: Vec<_> = (0..3).map(|_| tokio::spawn(client.clone().oneshot(get(FEED)))).collect();
    sleep(secs(5)).await;
    layer.hosts().clear(HOST);
    for waiter in waiting {
        waiter.await.unwrap().unwrap();
    }
    assert_eq!(script.times()[3..], [secs(35); 3]);
}

// --- when to come back ------------------------------------------------------------------------------------------------

/// Sends that do not wait: whoever is sent away comes back exactly when told to, and is let through then.
async fn punctual(script: Script, served: usize) {
    let client = HostGateLayer::new().layer(script);
    let mut count = 0;
    let mut returning = false;
    while count < served {
        match ask(&client, within(Duration::ZERO)).await {
            Ok(status) => {
                count += usize::from(status == 200);
                returning = false;
            }
            Err(error) => {
                let limited = RateLimited::find(&*error).expect("nothing else fails");
                assert!(!returning, "back in time and sent away again: {limited}");
                assert!(matches!(limited.reason(), Reason::Cooldown | Reason::Spacing), "{limited}");
                sleep(limited.retry_after()).await;
                returning = true;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_comes_back_when_told_to_is_let_through_under_a_gap() {
    punctual(provider(1, secs(25)), 40).await;
    punctual(provider(1, millis(1_234)), 40).await;
}

#[tokio::test(start_paused = true)]
async fn whoever_comes_back_when_told_to_is_let_through_under_a_burst() {
    punctual(provider(5, secs(60)), 60).await;
    punctual(provider(3, millis(7_777)), 60).await;
}

/// The one who is sent away is behind so many others, who are served.
async fn behind(client: &HostGate<Script>, ahead: usize) {
    let waiting: Vec<_> = (0..ahead).map(|_| tokio::spawn(client.clone().oneshot(get(FEED)))).collect();
    tokio::task::yield_now().await;
    let limited = shed(ask(client, within(secs(0))).await);
    sleep(limited.retry_after()).await;
    assert_eq!(ask(client, within(secs(0))).await.unwrap(), 200, "behind {ahead}: {limited}");
    for waiter in waiting {
        assert!(waiter.is_finished(), "those ahead have gone first");
    }
}

#[tokio::test(start_paused = true)]
async fn so_is_whoever_was_behind_others_under_a_gap() {
    for ahead in 1..10 {
        let (_, client, _) = taught().await;
        behind(&client, ahead).await;
    }
}

#[tokio::test(start_paused = true)]
async fn so_is_whoever_was_behind_others_under_a_burst() {
    for ahead in 0..20 {
        let (_, client, _) = taught_bursts().await;
        behind(&client, ahead).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_budget_ends_before_its_turn_is_sent_away_at_once() {
    let (_, client, _) = taught().await;
    let waiting = tokio::spawn(client.clone().oneshot(get(FEED)));
    tokio::task::yield_now().await;
    let begun = Instant::now();
    let limited = shed(ask(&client, within(secs(49))).await);
    assert_eq!((limited.reason(), begun.elapsed()), (Reason::Spacing, secs(0)));
    assert!(limited.retry_after() >= secs(50) && limited.retry_after() <= secs(60), "{limited}");
    waiting.await.unwrap().unwrap();
}

// --- retries ----------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_refused_request_goes_again_before_those_behind_it() {
    let script = provider(1, secs(25));
    batch(&insistent(&patient(), &script), 10).await;
    let mut paths: Vec<_> = script.sent().iter().map(|sent| sent.uri.query().unwrap().to_owned()).collect();
    paths.dedup();
    assert_eq!(paths, (0..10).map(|n| n.to_string()).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_costs_its_host_nothing_extra() {
    // Who is refused gives up and another takes its place: as many sends, at the same instants.
    let repeated = provider(1, secs(25));
    batch(&insistent(&patient(), &repeated), 10).await;

    let given_up = provider(1, secs(25));
    let client = patient().layer(given_up.clone());
    let sends = repeated.sent().len();
    join_all((0..sends).map(|_| status(&client))).await;

    assert_eq!(repeated.times(), given_up.times());
}
