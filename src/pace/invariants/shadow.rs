//! The floor of learned pacing is reactive pacing: a [`Reactive`] that is told the same is its shadow, and must never have
//! to wait longer.

use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::providers::{Provider, any_provider};
use super::{any_beginning, any_duration, any_nanos, any_refusal, any_rules, has_sense};
use crate::pace::reactive::SOFT_HOLD;
use crate::pace::{Learned, Reactive, Refusal, Rules, Ticket, Time};

/// A learned pace, and the reactive one that is told the same.
#[derive(Clone, Debug)]
struct Shadowed {
    pace: Learned,
    shadow: Reactive,
    rules: Rules,
    /// The streak is a headerless 403 and nothing else.
    lone_soft: bool,
    /// A lone headerless 403 turned out to be about its URL, and the warmth that it had brought is gone. What the shadow
    /// has booked in its own warmth lasts to the next warm send.
    pardoned: bool,
}

impl Shadowed {
    fn begin(now: Time, just_sent: u32, rules: Rules) -> Self {
        let (pace, shadow) = (Learned::begin(now, just_sent), Reactive::default());
        Self { pace, shadow, rules, lone_soft: false, pardoned: false }
    }

    fn sent(&mut self, now: Time) -> Ticket {
        self.pardoned &= now >= self.pace.warm_until();
        self.shadow.sent(now, &self.rules);
        self.pace.sent(now, &self.rules)
    }

    fn throttled(&mut self, now: Time, ticket: Option<Ticket>, refusal: Refusal) {
        let new_event = self.pace.throttled(now, ticket, refusal, &self.rules);
        self.lone_soft = refusal.soft && (new_event && self.pace.streak() <= 1 || !new_event && self.lone_soft);
        if refusal.soft && refusal.again {
            // Not counted by learned pacing; the shadow is told of no more than the hold.
            self.shadow.penalize(now, self.rules.base_cooldown.min(SOFT_HOLD), &self.rules);
        } else {
            self.shadow.throttled(now, ticket.map(|ticket| ticket.at), refusal, &self.rules);
        }
    }

    fn succeeded(&mut self, ticket: Option<Ticket>) {
        let streak = self.pace.streak();
        self.pace.succeeded(ticket, &self.rules);
        self.shadow.succeeded(ticket.map(|ticket| ticket.at));
        self.pardoned |= streak == 1 && self.pace.streak() == 0 && self.lone_soft;
    }

    fn penalize(&mut self, now: Time, hold: Duration) {
        self.pace.penalize(now, hold, &self.rules);
        self.shadow.penalize(now, hold, &self.rules);
    }

    fn used_up(&mut self, now: Time, reset: Duration) {
        self.pace.used_up(now, reset, &self.rules);
        self.shadow.used_up(now, reset, &self.rules);
    }

    fn compare(&self, now: Time) -> Result<(), TestCaseError> {
        let floor = if self.pardoned { self.shadow.hold_until() } else { self.shadow.ready() };
        prop_assert!(self.pace.ready().max(now) >= floor, "{self:#?}");
        has_sense(&self.pace, &self.rules)
    }
}

/// One request of a client that has one in flight at a time.
#[derive(Clone, Debug)]
struct Visit {
    /// After the last one; whoever waits for the host waits at least this long.
    pause: u64,
    latency: u64,
    fate: Fate,
}

#[derive(Clone, Debug)]
enum Fate {
    Served,
    Refused(Refusal),
    /// Cancelled, or failed.
    Lost,
    /// Served, and told how much is left: something, or nothing for so long.
    Counted(Option<Duration>),
    /// The host has been penalized by the time the answer arrives.
    Penalized(Duration),
}

fn any_visit() -> impl Strategy<Value = Visit> {
    let fate = prop_oneof![
        6 => Just(Fate::Served),
        6 => any_refusal().prop_map(Fate::Refused),
        1 => Just(Fate::Lost),
        1 => option::of(any_duration()).prop_map(Fate::Counted),
        1 => any_duration().prop_map(Fate::Penalized),
    ];
    (any_nanos(), any_nanos(), fate).prop_map(|(pause, latency, fate)| Visit { pause, latency, fate })
}

proptest! {
    /// With one request in flight and any answers at all, in time or out of it.
    #[test]
    fn it_is_never_ready_before_reactive(
        rules in any_rules(),
        begin in any_beginning(),
        patient in any::<bool>(),
        visits in vec(any_visit(), 1..60),
    ) {
        let mut host = Shadowed::begin(begin, 0, rules);
        let mut now = begin;
        for Visit { pause, latency, fate } in visits {
            // Nothing is sent at the very instant of the answer before it.
            now = now.after(Duration::from_nanos(pause.max(1)));
            if patient {
                now = now.max(host.pace.ready());
            }
            let ticket = Some(host.sent(now));
            host.compare(now)?;
            now = now.after(Duration::from_nanos(latency));
            match fate {
                Fate::Served => host.succeeded(ticket),
                Fate::Refused(refusal) => host.throttled(now, ticket, refusal),
                Fate::Lost => {}
                Fate::Counted(reset) => {
                    host.succeeded(ticket);
                    match reset {
                        Some(reset) => host.used_up(now, reset),
                        None => host.pace.is_paced_by_the_server(),
                    }
                }
                Fate::Penalized(hold) => {
                    host.penalize(now, hold);
                    host.succeeded(ticket);
                }
            }
            host.compare(now)?;
        }
    }
}

// --- clients of a provider ----------------------------------------------------------------------------------------

/// A client as the gate makes it of its callers: it sends as soon as the pace allows, and answers come in any order.
struct Client {
    rules: Rules,
    concurrency: usize,
    now: Time,
    /// `None`: nothing is to be remembered.
    host: Option<Shadowed>,
    in_flight: Vec<Flight>,
}

struct Flight {
    due: Time,
    ticket: Option<Ticket>,
    /// `None` when the caller has gone before it arrived.
    answer: Option<Result<(), Refusal>>,
}

/// What a caller does.
#[derive(Clone, Debug)]
struct Call {
    idle: Duration,
    latency: Duration,
    canceled: bool,
    /// Others wait as well, so what is sent is recorded.
    contended: bool,
    /// One of a hundred.
    roll: u8,
}

impl Client {
    fn new(rules: Rules, concurrency: usize, now: Time) -> Self {
        Self { rules, concurrency, now, host: None, in_flight: Vec::new() }
    }

    fn call(&mut self, provider: &mut Provider, call: &Call) -> Result<(), TestCaseError> {
        self.now = loop {
            let first = self.in_flight.iter().map(|flight| flight.due).min();
            match (first, self.may_send(self.now.after(call.idle))) {
                (None, Some(at)) => break at,
                (Some(due), Some(at)) if at <= due => break at,
                (Some(due), _) => self.answered(due)?,
                (None, None) => unreachable!("with nothing in flight there is room"),
            }
        };
        let now = self.now;
        if call.contended {
            let in_flight = self.in_flight.len() as u32;
            self.host.get_or_insert_with(|| Shadowed::begin(now, in_flight, self.rules));
        } else if self.host.as_ref().is_some_and(|host| host.pace.is_cold(now)) {
            self.host = None;
        }
        let ticket = self.host.as_mut().map(|host| host.sent(now));
        let answer = provider.answer(now, call.roll);
        self.in_flight.push(Flight {
            due: now.after(call.latency),
            ticket,
            answer: (!call.canceled).then_some(answer),
        });
        self.compare()
    }

    /// When a request that is wanted at `wish` may go; `None` while there is no room for it.
    fn may_send(&self, wish: Time) -> Option<Time> {
        let Some(Shadowed { pace, .. }) = &self.host else {
            return (self.in_flight.len() < self.concurrency).then_some(wish);
        };
        let start = wish.max(pace.ready());
        let room = if pace.is_serial(start) { 1 } else { self.concurrency };
        (self.in_flight.len() < room).then_some(start)
    }

    /// The first answer arrives.
    fn answered(&mut self, due: Time) -> Result<(), TestCaseError> {
        self.now = self.now.max(due);
        let first = self.in_flight.iter().position(|flight| flight.due == due).expect("it is in flight");
        let Flight { ticket, answer, .. } = self.in_flight.swap_remove(first);
        match answer {
            Some(Ok(())) => {
                if let Some(host) = &mut self.host {
                    host.succeeded(ticket);
                }
            }
            Some(Err(refusal)) => {
                let (now, rules) = (self.now, self.rules);
                self.host.get_or_insert_with(|| Shadowed::begin(now, 0, rules)).throttled(now, ticket, refusal);
            }
            None => {}
        }
        self.compare()
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        self.host.as_ref().map_or(Ok(()), |host| host.compare(self.now))
    }
}

fn plausible_rules() -> impl Strategy<Value = Rules> {
    (100..10_000_u64, 1..500_u32, 0..5_000_u64, 10..300_u64).prop_map(|(base, factor, spacing, warm)| Rules {
        base_cooldown: Duration::from_millis(base),
        max_cooldown: Duration::from_millis(base) * factor,
        spacing: Duration::from_millis(spacing),
        warm_for: Duration::from_secs(warm),
    })
}

fn any_call() -> impl Strategy<Value = Call> {
    let idle = prop_oneof![8 => Just(0), 2 => 0..2_000_u64, 1 => 0..600_000_u64].prop_map(Duration::from_millis);
    // No answer takes longer than a host stays warm: after that the shadow would take a late refusal for a new event.
    let latency = prop_oneof![4 => 0..300_u64, 1 => 0..9_000_u64].prop_map(Duration::from_millis);
    (idle, latency, 0..100_u8, any::<bool>(), 0..100_u8).prop_map(|(idle, latency, canceled, contended, roll)| Call {
        idle,
        latency,
        canceled: canceled < 5,
        contended,
        roll,
    })
}

proptest! {
    /// Against servers that mean it, with many in flight, answers out of order, callers that go away, and idle times.
    #[test]
    fn no_provider_makes_it_ready_before_reactive(
        rules in plausible_rules(),
        mut provider in any_provider(),
        concurrency in 1..=16_usize,
        begin in any_beginning(),
        calls in vec(any_call(), 1..150),
    ) {
        let mut client = Client::new(rules, concurrency, begin);
        for call in &calls {
            client.call(&mut provider, call)?;
        }
        while let Some(due) = client.in_flight.iter().map(|flight| flight.due).min() {
            client.answered(due)?;
        }
    }
}
