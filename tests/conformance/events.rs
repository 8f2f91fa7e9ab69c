//! What the gates of one rule tell their observer.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tower_host_gate::observe::{DegradedEvent, ErrorEvent, ShedEvent, ThrottleEvent, WaitEvent, WaitOutcome};
use tower_host_gate::{Observer, Reason};

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Waited {
        outcome: WaitOutcome,
        waited: Duration,
        label: Option<&'static str>,
    },
    Throttled {
        streak: u32,
        new_event: bool,
    },
    Shed(Reason),
    /// The store failed: no rule was held against it.
    Failed(String),
}

#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Vec<Event>>>);

impl Events {
    pub fn all(&self) -> Vec<Event> {
        self.0.lock().unwrap().clone()
    }

    /// The waits: how each ended.
    pub fn waits(&self) -> Vec<WaitOutcome> {
        let outcome = |event| if let Event::Waited { outcome, .. } = event { Some(outcome) } else { None };
        self.all().into_iter().filter_map(outcome).collect()
    }

    /// The refusals that were taken for an event of their own: the streak of each.
    pub fn streaks(&self) -> Vec<u32> {
        let streak = |event| if let Event::Throttled { streak, new_event: true } = event { Some(streak) } else { None };
        self.all().into_iter().filter_map(streak).collect()
    }

    pub fn failures(&self) -> Vec<String> {
        let failure = |event| if let Event::Failed(what) = event { Some(what) } else { None };
        self.all().into_iter().filter_map(failure).collect()
    }

    /// Begins anew, with nothing but what had failed by then.
    pub fn forget_but_failures(&self, failures: Vec<String>) {
        *self.0.lock().unwrap() = failures.into_iter().map(Event::Failed).collect();
    }

    fn push(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Observer for Events {
    fn waited(&self, event: &WaitEvent<'_>) {
        let &WaitEvent { outcome, waited, label, .. } = event;
        self.push(Event::Waited { outcome, waited, label });
    }

    fn throttled(&self, event: &ThrottleEvent<'_>) {
        self.push(Event::Throttled { streak: event.streak, new_event: event.new_event });
    }

    fn shed(&self, event: &ShedEvent<'_>) {
        self.push(Event::Shed(event.error.reason()));
    }

    fn degraded(&self, event: &DegradedEvent<'_>) {
        self.push(Event::Failed(format!("degraded: {}", event.cause)));
    }

    fn error(&self, event: &ErrorEvent<'_>) {
        self.push(Event::Failed(format!("{:?}: {}", event.operation, event.error)));
    }
}
