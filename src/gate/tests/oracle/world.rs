//! One of the two gates: its requests by hand, and a log of whatever anybody can notice.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use http::{Extensions, HeaderMap, Request, Response, Uri};
use http_body::{Body, Frame};
use tower::{BoxError, Service};

use crate::body::ResponseBody;
use crate::config::{Config, Limits};
use crate::future::ResponseFuture;
use crate::gate::{Gate, Handle};
use crate::host::HostKey;
use crate::hosts::{HostSnapshot, Hosts, Permit};
use crate::observe::{Observer, ShedEvent, ThrottleEvent, WaitEvent};
use crate::pace::Memory;
use crate::service::HostGate;
use crate::verdict::Outcome;
use crate::{RateLimited, Throttled};

/// What happens, line by line.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }
}

impl Observer for Log {
    fn waited(&self, event: &WaitEvent<'_>) {
        self.note(format!("{event:?}"));
    }

    fn throttled(&self, event: &ThrottleEvent<'_>) {
        self.note(format!("{event:?}"));
    }

    fn shed(&self, event: &ShedEvent<'_>) {
        self.note(format!("{event:?}"));
    }
}

// --- the service inside -----------------------------------------------------------------------------------------------

/// An answer that is still to come.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) head: Option<(u16, Vec<(&'static str, &'static str)>)>,
    /// A redirect inside has ended there.
    pub(super) elsewhere: Option<Uri>,
    pub(super) body: Frames,
}

/// A body of so many frames, which says at the last one that it was the last, or does not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frames {
    pub(super) left: u8,
    pub(super) knows_its_end: bool,
}

impl Body for Frames {
    type Data = &'static [u8];
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, BoxError>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        Poll::Ready(Some(Ok(Frame::data(b"frame"))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0 && self.knows_its_end
    }
}

#[derive(Clone, Default)]
struct Origin {
    log: Log,
    is_ready: Arc<AtomicBool>,
    sent: Arc<Mutex<HashSet<usize>>>,
    answers: Arc<Mutex<HashMap<usize, Answer>>>,
}

impl Service<Request<usize>> for Origin {
    type Response = Response<Frames>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Frames>, BoxError>>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if self.is_ready.load(Ordering::Relaxed) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn call(&mut self, request: Request<usize>) -> Self::Future {
        let id = *request.body();
        self.log.note(format!("sent {id}"));
        self.sent.lock().unwrap().insert(id);
        let answers = Arc::clone(&self.answers);
        Box::pin(poll_fn(move |_| {
            answers.lock().unwrap().remove(&id).map_or(Poll::Pending, |answer| Poll::Ready(answer.into_response()))
        }))
    }
}

impl Answer {
    fn into_response(self) -> Result<Response<Frames>, BoxError> {
        let (status, headers) = self.head.ok_or("the connection broke")?;
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(name, value);
        }
        let mut response = response.body(self.body)?;
        if let Some(uri) = self.elsewhere {
            response.extensions_mut().insert(uri);
        }
        Ok(response)
    }
}

/// For `final_uri`.
pub(super) fn elsewhere(extensions: &Extensions) -> Option<Uri> {
    extensions.get().cloned()
}

// --- one request ------------------------------------------------------------------------------------------------------

struct Exchange {
    wakes: Arc<Wakes>,
    state: State,
}

enum State {
    Future(Pin<Box<ResponseFuture<Origin, usize>>>),
    Body(ResponseBody<Frames>),
    Over,
}

struct Wakes {
    id: usize,
    is_due: AtomicBool,
    log: Log,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.log.note(format!("woken {}", self.id));
        self.is_due.store(true, Ordering::Relaxed);
    }
}

// --- the world --------------------------------------------------------------------------------------------------------

pub(super) struct World {
    /// All handles on the gate, until it is closed.
    open: Option<(Handle, HostGate<Origin>, Hosts)>,
    origin: Origin,
    exchanges: Vec<Exchange>,
    permits: Vec<Permit>,
    kept: Vec<(HostKey, Memory)>,
}

/// What a look at all hosts shows.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sight {
    all: Vec<HostSnapshot>,
    each: Vec<Option<HostSnapshot>>,
}

impl Sight {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.each.iter().all(Option::is_none)
    }
}

impl World {
    pub(super) fn new(mut config: Config) -> Self {
        let origin = Origin::default();
        config.observer = Some(Arc::new(origin.log.clone()));
        let handle = Handle::new(config);
        let (service, hosts) = (HostGate::new(origin.clone(), handle.clone()), Hosts::new(handle.clone()));
        Self {
            open: Some((handle, service, hosts)),
            origin,
            exchanges: Vec::new(),
            permits: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// The cell that this URI's host belongs to.
    pub(super) fn place(&self, uri: &Uri) -> Option<usize> {
        let (gate, ..) = self.open.as_ref()?;
        let key = gate.config.keying.key(uri, &HeaderMap::new(), &Extensions::new())?;
        Some(gate.table.spot(&key).place())
    }

    /// What has happened since this was asked last.
    pub(super) fn news(&self) -> Vec<String> {
        std::mem::take(&mut *self.origin.log.0.lock().unwrap())
    }

    pub(super) fn sight(&self, names: &[String]) -> Option<Sight> {
        let (_, _, hosts) = self.open.as_ref()?;
        let mut all = hosts.snapshot();
        all.sort_by(|a, b| a.host.cmp(&b.host));
        Some(Sight { all, each: names.iter().map(|name| hosts.get(&format!("{name}:443"))).collect() })
    }

    // --- requests ---

    pub(super) fn call(&mut self, mut request: Request<usize>, inner_is_ready: bool) {
        let Some((_, service, _)) = &mut self.open else { return };
        let id = self.exchanges.len();
        *request.body_mut() = id;
        self.origin.is_ready.store(inner_is_ready, Ordering::Relaxed);
        let future = Box::pin(service.call(request));
        let wakes = Arc::new(Wakes { id, is_due: AtomicBool::new(true), log: self.origin.log.clone() });
        self.exchanges.push(Exchange { wakes, state: State::Future(future) });
    }

    pub(super) fn poll(&mut self, nth: usize, inner_is_ready: bool) {
        if let Some(id) = self.pick(nth, |exchange| matches!(exchange.state, State::Future(_))) {
            self.poll_exchange(id, inner_is_ready);
        }
    }

    /// As an executor would.
    pub(super) fn poll_all_woken(&mut self) {
        for id in 0..self.exchanges.len() {
            if self.exchanges[id].wakes.is_due.load(Ordering::Relaxed) {
                self.poll_exchange(id, true);
            }
        }
    }

    pub(super) fn answer(&mut self, nth: usize, answer: Answer) {
        let sent = self.origin.sent.lock().unwrap().clone();
        let waits =
            |exchange: &Exchange| matches!(exchange.state, State::Future(_)) && sent.contains(&exchange.wakes.id);
        if let Some(id) = self.pick(nth, waits) {
            self.origin.answers.lock().unwrap().insert(id, answer);
            self.poll_exchange(id, true);
        }
    }

    pub(super) fn read(&mut self, nth: usize) {
        let Some(id) = self.pick(nth, |exchange| matches!(exchange.state, State::Body(_))) else { return };
        let Exchange { wakes, state } = &mut self.exchanges[id];
        let State::Body(body) = state else { return };
        let waker = Waker::from(Arc::clone(wakes));
        let frame = Pin::new(body).poll_frame(&mut Context::from_waker(&waker));
        self.origin.log.note(format!("read {id}: {}", matches!(frame, Poll::Ready(Some(_)))));
    }

    pub(super) fn drop_exchange(&mut self, nth: usize) {
        if let Some(id) = self.pick(nth, |exchange| !matches!(exchange.state, State::Over)) {
            self.exchanges[id].state = State::Over;
        }
    }

    fn pick(&self, nth: usize, wanted: impl Fn(&Exchange) -> bool) -> Option<usize> {
        let found: Vec<_> = self.exchanges.iter().filter(|exchange| wanted(exchange)).map(|it| it.wakes.id).collect();
        found.get(nth % found.len().max(1)).copied()
    }

    fn poll_exchange(&mut self, id: usize, inner_is_ready: bool) {
        self.origin.is_ready.store(inner_is_ready, Ordering::Relaxed);
        let Exchange { wakes, state } = &mut self.exchanges[id];
        let State::Future(future) = state else { return };
        wakes.is_due.store(false, Ordering::Relaxed);
        let waker = Waker::from(Arc::clone(wakes));
        let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(&waker)) else { return };
        *state = match result {
            Ok(response) => {
                let throttled = response.extensions().get::<Throttled>();
                self.origin.log.note(format!("head {id}: {} {throttled:?}", response.status()));
                State::Body(response.into_body())
            }
            Err(error) => {
                let limited = RateLimited::find(&*error).map_or_else(|| error.to_string(), |it| format!("{it:?}"));
                self.origin.log.note(format!("failed {id}: {limited}"));
                State::Over
            }
        };
    }

    // --- steering ---

    pub(super) fn try_acquire(&mut self, uri: &Uri) {
        let Some((_, _, hosts)) = &self.open else { return };
        let result = hosts.try_acquire(uri);
        self.origin.log.note(format!("acquired: {:?}", result.as_ref().map(Permit::host)));
        self.permits.extend(result);
    }

    pub(super) fn settle(&mut self, nth: usize, outcome: Option<Outcome>) {
        if self.permits.is_empty() {
            return;
        }
        let permit = self.permits.remove(nth % self.permits.len());
        if let Some(outcome) = outcome {
            permit.settle(outcome);
        }
    }

    pub(super) fn penalize(&self, host: &str, duration: Duration) {
        self.open.iter().for_each(|(_, _, hosts)| hosts.penalize(host, duration));
    }

    pub(super) fn clear(&self, host: &str) {
        self.open.iter().for_each(|(_, _, hosts)| hosts.clear(host));
    }

    pub(super) fn set_limits(&self, host: &str, limits: &Limits) {
        self.open.iter().for_each(|(_, _, hosts)| hosts.set_limits(host, limits.clone()));
    }

    pub(super) fn export(&mut self) {
        let Some((gate, ..)) = &self.open else { return };
        self.kept = gate.export();
        self.kept.sort_by(|(a, _), (b, _)| a.cmp(b));
        self.origin.log.note(format!("exported {:?}", self.kept));
    }

    pub(super) fn import(&mut self, age: Duration) {
        let Some((gate, ..)) = &self.open else { return };
        gate.import(self.kept.iter().map(|(key, memory)| (key.clone(), memory)), age);
    }

    // --- the end ---

    /// Drops all handles on the gate.
    pub(super) fn close(&mut self) {
        self.open = None;
    }

    pub(super) fn drop_all_requests(&mut self) {
        self.exchanges.iter_mut().for_each(|exchange| exchange.state = State::Over);
        self.permits.clear();
    }

    pub(super) fn gate(&self) -> Option<Weak<Gate>> {
        self.open.as_ref().map(|(gate, ..)| Arc::downgrade(gate))
    }

    /// What is left behind in the table and the cells, for a gate that is to be at rest.
    pub(super) fn leftovers(&self) -> Vec<String> {
        let Some((gate, ..)) = &self.open else { return Vec::new() };
        let mut left: Vec<_> = gate.table.shards().flat_map(|mut shard| as_text(shard.iter_mut())).collect();
        if let Some(fast) = gate.table.fast_in_use() {
            let busy = |place: &usize| fast.cells.is_slow(*place) || fast.cells.is_taken(*place);
            left.extend(as_text(fast.cells.places().filter(busy)));
        }
        left
    }
}

fn as_text(all: impl Iterator<Item = impl Debug>) -> Vec<String> {
    all.map(|it| format!("{it:?}")).collect()
}
