//! What only the inside can see: what is kept for hosts that nobody asks for any more.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use super::*;
use crate::config::Config;
use crate::gate::Handle;
use crate::hosts::Hosts;
use crate::shared::support::redis::Standalone;
use crate::{Queue, Redis};

const AMPLE: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_host_that_nobody_waits_for_is_not_remembered_as_one_in_line() {
    let server = Standalone::start().await;
    let redis = Redis::open(&server.url()).unwrap().queue(Queue::Fifo).timeout(AMPLE);
    let gate = Handle::new(Config { shared: Some(redis), ..Config::default() });
    let hosts = Hosts::new(gate.clone());
    let in_line = || lock(&gate.shared.as_ref().unwrap().in_line).len();

    for host in 0..20 {
        let uri: http::Uri = format!("http://host-{host}.example/").parse().unwrap();
        let first = hosts.acquire(&uri, AMPLE).await.unwrap();
        if host % 2 == 0 {
            let (hosts, uri) = (hosts.clone(), uri.clone());
            let second = tokio::spawn(async move { hosts.acquire(&uri, AMPLE).await.map(drop) });
            tokio::task::yield_now().await;
            assert!(in_line() > 0);
            drop(first);
            second.await.unwrap().unwrap();
        }
    }
    tokio::time::timeout(AMPLE, async {
        while in_line() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
}
