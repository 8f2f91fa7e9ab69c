//! D06, D07, D24: time is the server's.

use std::process::Command;

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_host_gate::{HostGateLayer, Reason};

use super::eye::{Eye, key_in};
use super::support::reactive;
use super::support::redis::Standalone;
use super::{FEED, HOST, Replica, child, eventually, millis, redis, secs, throttled, told};

fn four_in_ten_minutes() -> HostGateLayer {
    HostGateLayer::new().concurrency(100).quota(4, secs(600))
}

// --- D06 --------------------------------------------------------------------------------------------------------------

/// The clocks differ by more than the window of the quota: one that counted would see all sends in another window.
#[tokio::test]
async fn d06_processes_whose_clocks_are_hours_apart_share_one_quota() {
    const TEST: &str = "clocks::d06_processes_whose_clocks_are_hours_apart_share_one_quota";
    if let Some(told) = told() {
        let (url, scope) = told.split_once(' ').unwrap();
        let child = Replica::connected(four_in_ten_minutes(), redis(url).scope(scope)).await;
        child.admitted(10, FEED).await;
        return;
    }
    let mut server = Standalone::with_clock().await;
    server.step_clock(86_400);
    let eye = Eye::open(&server).await;
    for clock in ["+1h", "-1h"] {
        let replica = Replica::connected(four_in_ten_minutes(), redis(&server.url()).scope(clock)).await;
        assert_eq!(replica.admitted(2, FEED).await, 2);

        let mut child = with_clock(child(TEST, &format!("{} {clock}", server.url())), clock);
        let output = tokio::task::spawn_blocking(move || child.output()).await.unwrap().expect("the child runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{clock}: {text}");

        let sends: usize = eye.ask(&["LLEN", &key_in(clock, HOST, ":q")]).await;
        assert_eq!(sends, 4, "{clock}");
        assert_eq!(replica.admitted(10, FEED).await, 0, "{clock}");
    }
}

/// The same command with another wall clock.
fn with_clock(command: Command, clock: &str) -> Command {
    let mut faked = Command::new("faketime");
    faked.args(["-f", clock]).arg(command.get_program()).args(command.get_args());
    faked.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    // Setting a machine's clock does not move the monotonic one either.
    faked.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    faked
}

// --- D07 --------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn d07_of_twenty_requests_in_one_millisecond_a_quota_of_five_lets_five_go() {
    let server = Standalone::start().await;
    let eye = Eye::open(&server).await;
    let layer = || HostGateLayer::new().concurrency(100).quota(5, secs(600));
    let replicas = join_all((0..20).map(|_| Replica::connected(layer(), redis(&server.url())))).await;

    // All of them are there when the server looks.
    server.stop();
    let asking = join_all(replicas.iter().map(|replica| replica.at_once(FEED)));
    let (answers, ()) = tokio::join!(asking, async {
        sleep(millis(200)).await;
        server.cont();
    });

    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 5);
    for refused in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert_eq!(refused.reason(), Reason::Quota);
    }
    assert_eq!((eye.leases(HOST).await, eye.sends(HOST).await), (5, 5));
    assert_eq!(eye.immortal_keys().await, [""; 0]);
    for replica in &replicas {
        replica.events.assert_no_failure();
    }
}

// --- D24 --------------------------------------------------------------------------------------------------------------

/// The clock that other cases step.
#[tokio::test]
async fn d24_a_stepped_clock_moves_time_and_expiry_together() {
    let mut server = Standalone::with_clock().await;
    let eye = Eye::open(&server).await;
    let now = async || eye.ask::<(u64, u64)>(&["TIME"]).await.0;
    eye.ask::<()>(&["SET", "short", "1", "EX", "300"]).await;
    eye.ask::<()>(&["SET", "long", "1", "EX", "900"]).await;

    let before = now().await;
    server.step_clock(600);
    assert!(now().await >= before + 600);
    assert_eq!(eye.ask::<Vec<Option<u8>>>(&["MGET", "short", "long"]).await, [None, Some(1)]);
    assert!(eye.ask::<u64>(&["TTL", "long"]).await <= 300);
}

#[tokio::test]
async fn d24_a_cooldown_a_quota_and_their_keys_end_by_the_same_clock() {
    let mut server = Standalone::with_clock().await;
    let eye = Eye::open(&server).await;
    let layer = reactive().concurrency(100).quota(1, secs(60)).max_cooldown(secs(600)).warm_for(secs(1));
    let replica = Replica::connected(layer.clone(), redis(&server.url())).await;
    replica.acquire(FEED).await.settle(throttled(secs(300)));
    eventually("the store knows", async || replica.cooldown(HOST).await > secs(200)).await;

    // Another one each time: what a process knows ends by its own clock.
    let later = Replica::connected(layer.clone(), redis(&server.url())).await;
    server.step_clock(200);
    assert_eq!(later.at_once(FEED).await.unwrap_err().reason(), Reason::Cooldown);
    assert_eq!(eye.keys().await.len(), 1, "of the state alone something is left");

    let still_later = Replica::connected(layer, redis(&server.url())).await;
    server.step_clock(400);
    assert_eq!(eye.keys().await, [""; 0]);
    let _permit = still_later.at_once(FEED).await.expect("nothing is left to wait for");
}
