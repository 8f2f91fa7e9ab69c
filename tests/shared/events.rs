//! What a replica tells its observer.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tower_host_gate::Observer;
use tower_host_gate::observe::{
    DegradedEvent, ErrorEvent, Operation, RecoveredEvent, ShedEvent, WaitEvent, WaitOutcome,
};
use tower_host_gate::shared::BackendErrorKind;

#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    degraded: Vec<BackendErrorKind>,
    recovered: Vec<Duration>,
    errors: Vec<Failure>,
    waits: Vec<(WaitOutcome, Duration)>,
    sheds: usize,
}

#[derive(Clone, Debug)]
pub struct Failure {
    pub operation: Operation,
    pub kind: BackendErrorKind,
    pub host: String,
    pub label: Option<&'static str>,
    pub text: String,
}

impl Events {
    /// Why the store was out of reach, for each outage.
    pub fn degraded(&self) -> Vec<BackendErrorKind> {
        self.told().degraded.clone()
    }

    /// For how long it was, for each outage that is over.
    pub fn recovered(&self) -> Vec<Duration> {
        self.told().recovered.clone()
    }

    pub fn errors(&self) -> Vec<Failure> {
        self.told().errors.clone()
    }

    pub fn errors_of(&self, operation: Operation) -> Vec<Failure> {
        self.errors().into_iter().filter(|failure| failure.operation == operation).collect()
    }

    pub fn waits(&self) -> Vec<(WaitOutcome, Duration)> {
        self.told().waits.clone()
    }

    pub fn sheds(&self) -> usize {
        self.told().sheds
    }

    /// The store has never failed.
    #[track_caller]
    pub fn assert_no_failure(&self) {
        let told = self.told();
        assert!(told.degraded.is_empty() && told.errors.is_empty(), "{:?} {:?}", told.degraded, told.errors);
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap()
    }
}

impl Observer for Events {
    fn waited(&self, event: &WaitEvent<'_>) {
        self.told().waits.push((event.outcome, event.waited));
    }

    fn shed(&self, _: &ShedEvent<'_>) {
        self.told().sheds += 1;
    }

    fn degraded(&self, event: &DegradedEvent<'_>) {
        self.told().degraded.push(event.cause.kind());
    }

    fn recovered(&self, event: &RecoveredEvent) {
        self.told().recovered.push(event.down_for);
    }

    fn error(&self, event: &ErrorEvent<'_>) {
        self.told().errors.push(Failure {
            operation: event.operation,
            kind: event.error.kind(),
            host: event.host.to_string(),
            label: event.label,
            text: event.error.to_string(),
        });
    }
}
