//! A program that is run again and again, each time from nothing but its file.

use std::sync::{Arc, Mutex};

use tower::ServiceBuilder;
use tower::retry::RetryLayer;
use tower_host_gate::RateLimited;
use tower_host_gate::retry::GateRetry;

use super::*;

const HOUR: Duration = secs(3600);

/// A host that allows one request per window, and refuses the others without a word on when to come back.
#[derive(Clone)]
struct Provider {
    script: Script,
    /// When each request came, and whether it was answered.
    log: Arc<Mutex<Vec<(Instant, bool)>>>,
}

impl Provider {
    fn one_per(window: Duration) -> Self {
        let log = Arc::new(Mutex::new(Vec::<(Instant, bool)>::new()));
        let seen = Arc::clone(&log);
        let script = Script::new(move |_| {
            let now = Instant::now();
            let mut seen = seen.lock().unwrap();
            let free = seen.iter().rev().find(|(_, answered)| *answered).is_none_or(|(at, _)| now - *at >= window);
            seen.push((now, free));
            if free { Reply::ok() } else { Reply::status(429) }
        });
        Self { script, log }
    }

    /// What came since the last call: when, and whether it was answered.
    fn take_log(&self) -> Vec<(Instant, bool)> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

/// One run of the program: a batch of requests, all at once. Gives back the file it leaves behind, and how many of the
/// batch were served.
async fn run(file: Option<&str>, layer: HostGateLayer, provider: &Provider, batch: usize) -> (String, usize) {
    if let Some(file) = file {
        layer.hosts().import(serde_json::from_str(file).unwrap());
    }
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new(GateRetry::new(20)))
        .layer(layer.clone())
        .service(provider.script.clone());
    let requests: Vec<_> =
        (0..batch).map(|_| tokio::spawn(client.clone().oneshot(get("http://feeds.example/")))).collect();
    let mut served = 0;
    for request in requests {
        match request.await.unwrap() {
            Ok(response) => served += usize::from(response.status().is_success()),
            Err(error) => assert!(RateLimited::find(&*error).is_some(), "{error}"),
        }
    }
    (serde_json::to_string(&layer.hosts().export()).unwrap(), served)
}

/// Some time until the next run, by both clocks.
async fn pass(file: &str, time: Duration) -> String {
    sleep(time).await;
    serde_json::to_string(&later(&serde_json::from_str(file).unwrap(), time)).unwrap()
}

fn patient() -> HostGateLayer {
    HostGateLayer::new().max_wait(HOUR)
}

fn refusals(log: &[(Instant, bool)]) -> usize {
    log.iter().filter(|(_, answered)| !answered).count()
}

#[tokio::test(start_paused = true)]
async fn the_second_run_of_a_batch_is_hardly_ever_refused() {
    for window in [secs(8), secs(13), secs(25), secs(42), secs(60)] {
        let provider = Provider::one_per(window);
        let (file, served) = run(None, patient(), &provider, 20).await;
        assert_eq!(served, 20);
        let first = provider.take_log();

        let file = pass(&file, HOUR).await;
        let begun = Instant::now();
        let (_, served) = run(Some(&file), patient(), &provider, 20).await;
        let second = provider.take_log();

        println!("{window:?}: {} refusals in the first run, {} in the second", refusals(&first), refusals(&second));
        assert_eq!(served, 20);
        assert!(refusals(&first) >= 3, "{window:?}: the first run had to find out: {}", refusals(&first));
        assert!(refusals(&second) * 20 <= served, "{window:?}: at most 0.05 per success: {}", refusals(&second));
        assert_eq!(second[0].0, begun, "{window:?}: an hour later the first request need not wait");
        let distance = second[1].0 - begun;
        assert!(distance >= window, "{window:?}: the second one keeps its distance: {distance:?}");
        assert!(begun.elapsed() <= window * 20 * 5 / 4, "{window:?}: no more than it has to: {:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn without_the_file_every_run_finds_out_anew() {
    let provider = Provider::one_per(secs(25));
    for _ in 0..2 {
        run(None, patient(), &provider, 20).await;
        assert!(refusals(&provider.take_log()) >= 4);
        sleep(HOUR).await;
    }
}

/// The program ends in the middle of finding out, wherever that is: with every run the host is better known.
#[tokio::test(start_paused = true)]
async fn short_runs_learn_together_what_one_long_run_does() {
    for batch in 1..=6 {
        let provider = Provider::one_per(secs(25));
        let mut file = None;
        for _ in 0..40 {
            let (left, served) = run(file.as_deref(), patient(), &provider, batch).await;
            assert_eq!(served, batch);
            file = Some(pass(&left, HOUR).await);
        }
        provider.take_log();
        let mut served = 0;
        for _ in 0..40 {
            let (left, answered) = run(file.as_deref(), patient(), &provider, batch).await;
            served += answered;
            file = Some(pass(&left, HOUR).await);
        }
        let refused = refusals(&provider.take_log());
        println!("batches of {batch}: {refused} refusals in {served}");
        assert!(refused * 20 <= served, "batches of {batch}: {refused} refusals in {served}");
    }
}

/// With the default budget most of a batch is put off, and the program ends while its host is still held.
#[tokio::test(start_paused = true)]
async fn a_run_that_gives_up_leaves_a_file_as_good_as_any() {
    let provider = Provider::one_per(secs(25));
    let mut file = None;
    for _ in 0..10 {
        let (left, _) = run(file.as_deref(), HostGateLayer::new(), &provider, 20).await;
        file = Some(pass(&left, HOUR).await);
    }
    provider.take_log();
    let mut served = 0;
    for _ in 0..10 {
        let (left, answered) = run(file.as_deref(), HostGateLayer::new(), &provider, 20).await;
        served += answered;
        file = Some(pass(&left, HOUR).await);
    }
    let refused = refusals(&provider.take_log());
    println!("{refused} refusals in {served}");
    assert!(served >= 20, "two in a minute, each time: {served}");
    assert!(refused * 20 <= served, "{refused} refusals in {served}");
}

#[tokio::test(start_paused = true)]
async fn a_run_that_follows_at_once_waits_out_the_last_spacing() {
    let provider = Provider::one_per(secs(25));
    let (file, _) = run(None, patient(), &provider, 20).await;
    provider.take_log();
    let file = pass(&file, secs(5)).await;
    let begun = Instant::now();
    run(Some(&file), patient(), &provider, 1).await;
    let log = provider.take_log();
    assert_eq!(refusals(&log), 0, "{log:?}");
    let waited = log[0].0 - begun;
    assert!(waited > secs(10) && waited <= secs(25), "{waited:?}");
}
