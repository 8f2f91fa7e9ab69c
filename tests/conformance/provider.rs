//! The server behind the gate: answers from a script, remembers what was sent when, and withholds an answer for as long
//! as a rule wants to look at what is in flight.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{Request, Response};
use tokio::sync::watch;
use tower::Service;

use super::eventually;
use super::support::script::{Reply, Script, ScriptBody, ScriptError, Sent};

#[derive(Clone)]
pub struct Provider {
    began: Instant,
    times: Arc<Mutex<Vec<Duration>>>,
    script: Script,
    withheld: watch::Sender<BTreeSet<String>>,
}

impl Provider {
    /// Answers each request with what `answer` makes of it.
    pub fn new(answer: impl FnMut(&Sent) -> Reply + Send + 'static) -> Self {
        let (script, withheld) = (Script::new(answer), watch::Sender::default());
        Self { began: Instant::now(), times: Arc::default(), script, withheld }
    }

    /// Answers with these replies in turn, and with an empty 200 when they are used up.
    pub fn list(replies: impl IntoIterator<Item = Reply, IntoIter: Send + 'static>) -> Self {
        let mut replies = replies.into_iter();
        Self::new(move |_| replies.next().unwrap_or_else(Reply::ok))
    }

    pub fn always(reply: Reply) -> Self {
        Self::new(move |_| reply.clone())
    }

    /// From now on nobody gets an answer for this path, until [`answer`](Self::answer).
    pub fn withhold(&self, path: &str) {
        self.withheld.send_modify(|withheld| _ = withheld.insert(path.to_owned()));
    }

    /// Lets the answers for this path go, and says when.
    pub fn answer(&self, path: &str) -> Duration {
        let now = self.now();
        self.withheld.send_modify(|withheld| _ = withheld.remove(path));
        now
    }

    /// The time by which sends are recorded.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// When each request was sent.
    pub fn times(&self) -> Vec<Duration> {
        self.times.lock().unwrap().clone()
    }

    /// What was asked for, in the order of the sends.
    pub fn paths(&self) -> Vec<String> {
        self.script.sent().into_iter().map(|sent| sent.path).collect()
    }

    /// Waits until so many requests were sent.
    pub async fn has_seen(&self, requests: usize) {
        eventually(&format!("{requests} requests are sent"), || self.times().len() >= requests).await;
    }

    /// The most requests that were ever open at one time, their bodies included.
    pub fn peak(&self) -> usize {
        self.script.peak()
    }

    /// No clone of this service gets ready, until [`get_ready`](Self::get_ready).
    pub fn is_not_ready(&self) {
        self.script.hold();
    }

    pub fn get_ready(&self) {
        self.script.release();
    }
}

type Answer = Pin<Box<dyn Future<Output = Result<Response<ScriptBody>, ScriptError>> + Send + Sync>>;

impl Service<Request<()>> for Provider {
    type Response = Response<ScriptBody>;
    type Error = ScriptError;
    type Future = Answer;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ScriptError>> {
        Service::<Request<()>>::poll_ready(&mut self.script, cx)
    }

    fn call(&mut self, request: Request<()>) -> Answer {
        // By the clock of `now`: that of the script began at another time.
        let now = self.now();
        self.times.lock().unwrap().push(now);
        let path = request.uri().path().to_owned();
        let mut withheld = self.withheld.subscribe();
        let answer = self.script.call(request);
        Box::pin(async move {
            withheld.wait_for(|withheld| !withheld.contains(&path)).await.expect("the provider outlives its requests");
            answer.await
        })
    }
}
