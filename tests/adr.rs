//! ADR-0016, clause by clause. A test quotes the clause it holds the gate to (`>`), and says which change to `src` would
//! make it fail. The ADR's pacing is `Pacing::Reactive`.
//!
//! | module | what |
//! |---|---|
//! | [`decision`] | the Decision section: gate mechanism, cooldown value, the long throttle |
//! | [`retry`] | ADR-0015's in-flight retry under the gate, and the risks: caps conflated, double wait |
//! | [`constants`] | the table of constants, the environment variables, the error code |
//! | [`deviations`] | where the gate differs from the ADR's text on purpose |
//!
//! The risk of a lock across an await is in `decision`, beside the clause on distinct hosts.

mod support;

#[path = "adr/constants.rs"]
mod constants;
#[path = "adr/decision.rs"]
mod decision;
#[path = "adr/deviations.rs"]
mod deviations;
#[path = "adr/retry.rs"]
mod retry;

use std::sync::mpsc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tokio::task::JoinHandle;
use tower::{BoxError, Service, ServiceExt as _};
use tower_host_gate::{RateLimited, ResponseBody};

use support::script::{ScriptBody, get};

const FEED: &str = "http://feeds.example/feed.xml";

type Answer = Result<Response<ResponseBody<ScriptBody>>, BoxError>;

/// A client: the gate, or layers around it.
trait Client:
    Service<
        Request<()>,
        Response = Response<ResponseBody<ScriptBody>>,
        Error = BoxError,
        Future: Future<Output = Answer> + Send,
    > + Clone
    + Send
    + 'static
{
}

impl<S> Client for S where
    S: Service<
            Request<()>,
            Response = Response<ResponseBody<ScriptBody>>,
            Error = BoxError,
            Future: Future<Output = Answer> + Send,
        > + Clone
        + Send
        + 'static
{
}

async fn send(client: &impl Client, uri: &str) -> Answer {
    client.clone().oneshot(get(uri)).await
}

/// The status of the answer, whose body is dropped.
async fn status(client: &impl Client, uri: &str) -> StatusCode {
    send(client, uri).await.expect("an answer").status()
}

/// In a task of its own. Tasks of a current-thread runtime begin in the order they were spawned.
fn spawn(client: &impl Client, uri: &str) -> JoinHandle<Answer> {
    tokio::spawn(client.clone().oneshot(get(uri)))
}

/// Sends the same request from this many tasks, and waits for all.
async fn burst(client: &impl Client, tasks: usize) -> Vec<Answer> {
    let tasks: Vec<_> = (0..tasks).map(|_| spawn(client, FEED)).collect();
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await.expect("no panic"));
    }
    answers
}

/// What the gate said instead of sending.
fn shed(answer: Answer) -> RateLimited {
    let error = answer.expect_err("the request is shed");
    RateLimited::find(&*error).expect("shed with RateLimited").clone()
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Runs a test under the paused clock that a broken gate would never end, on a thread of its own, with a limit that only
/// a standstill exceeds.
fn must_not_stand_still(test: impl Future<Output = ()> + Send + 'static) {
    let (done, finished) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(test);
        done.send(()).expect("the test waits for this");
    });
    finished.recv_timeout(secs(50)).expect("the runtime's thread neither stands still nor panics");
}
