//! What may happen to a host, in any order: as commands for the scripts, and as this process's pace answers them.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::provider::{Provider, any_provider};
use super::stored::{NOW, any_span, any_text, without_lesson};
use crate::pace::{Pace, Pacing, Refusal, Rules, Ticket, Time, wire};

#[derive(Clone, Debug)]
pub(super) struct History {
    pacing: Pacing,
    rules: [u64; 4],
    provider: Provider,
    start: Start,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
enum Start {
    /// Recording begins, with so many just sent.
    Begun(u32),
    /// This was stored.
    Stored(String),
}

#[derive(Clone, Debug)]
enum Step {
    Idle(u64),
    /// The clock is set back, or the rules are another replica's; either way the state comes from the server.
    Recalled {
        back: u64,
        rules: Option<[u64; 4]>,
    },
    Sent,
    Throttled(Option<Origin>, Answer),
    Succeeded(Option<Origin>),
    UsedUp(u64),
    PacedByServer,
    Penalized(u64),
    /// Requests one after the other, each sent as soon as it may and answered as the provider would.
    Asked {
        times: usize,
        idle: u64,
        latency: u64,
        again: bool,
        refusal: Answer,
    },
}

/// A ticket of this host, or a made-up one of a request that a redirect has led here.
#[derive(Clone, Debug)]
enum Origin {
    Sent { which: Index, again: bool },
    Newest { again: bool },
    Elsewhere { ago: u64, binding: bool, again: bool },
}

/// A refusal in whole milliseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Answer {
    hint: Option<u64>,
    soft: bool,
    again: bool,
    within_quota: bool,
    used_up: bool,
}

// --- any of them ------------------------------------------------------------------------------------------------------

pub(super) fn any_pacing() -> impl Strategy<Value = Pacing> {
    prop_oneof![3 => Just(Pacing::Learned), 1 => Just(Pacing::Reactive)]
}

/// Base, maximum, spacing and warmth.
pub(super) fn any_rules() -> impl Strategy<Value = [u64; 4]> {
    let usual = Just([2_000, 900_000, 1_000, 120_000]);
    let quick = Just([500, 900_000, 50, 60_000]);
    let number = || prop_oneof![Just(0), Just(1), 0..5_000_u64, 0..2_000_000_u64];
    // Beyond what 32 bits hold, and still so short that no history comes to the end of this process's time.
    let longest = prop_oneof![2 => number(), 1 => Just(1 << 34)];
    let any = (number(), longest, number(), number()).prop_map(|(base, max, spacing, warm)| [base, max, spacing, warm]);
    prop_oneof![2 => usual, 2 => quick, 1 => any]
}

fn any_wait() -> impl Strategy<Value = u64> {
    prop_oneof![4 => Just(0), 2 => 1..10_u64, 2 => 1..5_000_u64, 2 => 1..200_000_u64, 1 => 1..20_000_000_u64]
}

fn any_answer() -> impl Strategy<Value = Answer> {
    let hint = prop_oneof![
        2 => Just(None),
        1 => prop_oneof![Just(0), 1..2_000_u64, 1..100_000_u64, 1..10_000_000_u64, Just(1 << 45)].prop_map(Some),
    ];
    let plain = Just(Answer::default());
    let soft = any::<bool>().prop_map(|again| Answer { soft: true, again, ..Answer::default() });
    let any = (hint, any::<[bool; 4]>()).prop_map(|(hint, [soft, again, within_quota, used_up])| Answer {
        hint,
        soft,
        again,
        within_quota,
        used_up,
    });
    prop_oneof![3 => plain, 1 => soft, 2 => any]
}

fn any_origin() -> impl Strategy<Value = Option<Origin>> {
    let again = || prop::bool::weighted(0.2);
    let sent = (any::<Index>(), again()).prop_map(|(which, again)| Some(Origin::Sent { which, again }));
    let elsewhere = (any_wait(), any::<bool>(), again())
        .prop_map(|(ago, binding, again)| Some(Origin::Elsewhere { ago, binding, again }));
    prop_oneof![6 => sent, 1 => elsewhere, 1 => Just(None)]
}

fn any_step() -> impl Strategy<Value = Step> {
    let asked = |refusal: BoxedStrategy<Answer>| {
        let times = prop_oneof![3 => Just(1), 2 => 2..8_usize, 1 => 8..40_usize];
        let idle = prop_oneof![8 => Just(0), 1 => any_wait()];
        let latency = prop_oneof![2 => Just(0), 1 => 1..2_000_u64];
        (times, idle, latency, prop::bool::weighted(0.1), refusal)
            .prop_map(|(times, idle, latency, again, refusal)| Step::Asked { times, idle, latency, again, refusal })
    };
    let recalled =
        (any_wait(), prop::option::weighted(0.3, any_rules())).prop_map(|(back, rules)| Step::Recalled { back, rules });
    prop_oneof![
        12 => asked(Just(Answer::default()).boxed()),
        4 => asked(any_answer().boxed()),
        4 => any_wait().prop_map(Step::Idle),
        4 => Just(Step::Sent),
        3 => (any_origin(), any_answer()).prop_map(|(origin, answer)| Step::Throttled(origin, answer)),
        3 => any_origin().prop_map(Step::Succeeded),
        1 => any_wait().prop_map(Step::UsedUp),
        1 => Just(Step::PacedByServer),
        1 => any_wait().prop_map(Step::Penalized),
        1 => recalled,
    ]
}

pub(super) fn any_history() -> impl Strategy<Value = History> {
    let just_sent = prop_oneof![4 => Just(0), 2 => 0..20_u32, 1 => 0..300_u32, 1 => 65_000..70_000_u32];
    let start = just_sent.prop_map(Start::Begun);
    (any_pacing(), any_rules(), any_provider(), start, vec(any_step(), 1..60))
        .prop_map(|(pacing, rules, provider, start, steps)| History { pacing, rules, provider, start, steps })
}

/// How it goes on from what is stored, in steps that are on the same grid.
pub(super) fn any_sequel() -> impl Strategy<Value = History> {
    let longest = prop_oneof![4 => Just(900_000), 1 => any_span()];
    let on_grid =
        (any_span(), longest, any_span(), any_span()).prop_map(|(base, max, spacing, warm)| [base, max, spacing, warm]);
    let rules = prop_oneof![3 => on_grid, 1 => any_rules()];
    let newest = || prop::bool::weighted(0.2).prop_map(|again| Some(Origin::Newest { again }));
    let made_up = || {
        (any_span(), any::<bool>(), any::<bool>())
            .prop_map(|(ago, binding, again)| Some(Origin::Elsewhere { ago, binding, again }))
    };
    let origin = || prop_oneof![4 => newest(), 2 => made_up(), 1 => Just(None)];
    let step = prop_oneof![
        4 => Just(Step::Sent),
        4 => any_span().prop_map(Step::Idle),
        3 => (origin(), any_answer()).prop_map(|(origin, answer)| Step::Throttled(origin, answer)),
        4 => origin().prop_map(Step::Succeeded),
        1 => any_span().prop_map(Step::UsedUp),
        1 => any_span().prop_map(Step::Penalized),
        1 => Just(Step::PacedByServer),
    ];
    let stored = (any_pacing(), any_text()).prop_map(|(pacing, text)| match pacing {
        Pacing::Learned => (pacing, Start::Stored(text)),
        Pacing::Reactive => (pacing, Start::Stored(without_lesson(&text))),
    });
    (stored, rules, any_provider(), vec(step, 1..8)).prop_map(|((pacing, start), rules, provider, steps)| History {
        pacing,
        rules,
        provider,
        start,
        steps,
    })
}

// --- where one rule ends and another one begins ------------------------------------------------------------------------

/// Too narrow to be met by chance.
pub(super) fn edges() -> [History; 6] {
    let ok = Step::Succeeded(Some(Origin::Newest { again: false }));
    let refused = |hint| Step::Throttled(Some(Origin::Newest { again: false }), Answer { hint, ..Answer::default() });
    let now = NOW;
    let ago = |ms: u64| NOW - ms;
    // The common ones; last_ok, burst_sent, run_sent; hold, gap, hi, lo, tried; burst, out, run; since, need, patience,
    // evidence; flags.
    let only_soft = 1;
    let smallest = format!("0 0 0 0 0 {} {} {} 0 30 30 0 0 1 1 9 9 1 8 1 0", ago(30), ago(30), ago(900));
    let floor = format!("0 0 0 0 0 {} {} {} 0 2000 2000 0 0 2 1 9 0 9 8 1 0", ago(9_000), ago(30), ago(9_000));
    let chance = format!(
        "{now} 0 {} {} 2 {} {} {} 2000 0 0 0 0 0 1 5 0 1 8 0 {only_soft}",
        now + 60_000,
        ago(2_000),
        ago(9_000),
        ago(10_000),
        ago(10_000),
    );
    let lone = |lesson: &str| {
        format!("0 0 {} {} 1 0 {} {} 2000 {lesson} {only_soft}", now + 60_000, ago(9_000), ago(30), ago(30))
    };
    let pardon = lone("1000 2000 0 0 1 1 1 0 1 8 1");
    let pardon_on_trial = lone("1000 5000 4000 0 1 1 2 0 5 8 0");
    let served = Step::Succeeded(Some(Origin::Newest { again: true }));
    let outage = [Step::Sent, ok.clone(), Step::Idle(1_000), Step::Sent, refused(Some(129_000)), Step::Idle(129_000)];
    [
        (Start::Begun(0), [&outage[..], &[Step::Sent, ok.clone()]].concat()),
        (Start::Stored(smallest), vec![Step::Sent, ok.clone()]),
        (Start::Stored(floor), vec![Step::Sent, ok.clone(), refused(None)]),
        (Start::Stored(chance), vec![Step::Sent, ok]),
        (Start::Stored(pardon), vec![Step::Sent, served.clone()]),
        (Start::Stored(pardon_on_trial), vec![Step::Sent, served]),
    ]
    .map(|(start, steps)| {
        let rules = [2_000, 900_000, 1_000, 120_000];
        History { pacing: Pacing::Learned, rules, provider: Provider::default(), start, steps }
    })
}

// --- told -------------------------------------------------------------------------------------------------------------

/// The commands for the scripts, and what is known of the host after each.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) commands: Vec<String>,
    /// Nothing is expected where nothing is known yet.
    pub(super) expected: Vec<Option<String>>,
}

impl History {
    pub(super) fn tell(&self) -> Told {
        let mut host = Host {
            pacing: self.pacing,
            rules: rules(self.rules),
            pace: Pace::begin(self.pacing, time(NOW), 0),
            now: NOW,
            tickets: Vec::new(),
            told: Told::default(),
        };
        host.told.commands.push(rules_command(self.pacing, self.rules));
        host.told.expected.push(None);
        match &self.start {
            Start::Begun(just_sent) => {
                host.pace = Pace::begin(self.pacing, time(NOW), *just_sent);
                host.saw(format!("begin {NOW} {just_sent}"), false);
            }
            Start::Stored(text) => host.recall(text),
        }
        let mut provider = self.provider.clone();
        for step in &self.steps {
            host.take(step, &mut provider);
        }
        host.told
    }
}

struct Host {
    pacing: Pacing,
    rules: Rules,
    pace: Pace,
    now: u64,
    tickets: Vec<Ticket>,
    told: Told,
}

impl Host {
    fn take(&mut self, step: &Step, provider: &mut Provider) {
        match step {
            Step::Idle(wait) => {
                self.now += wait;
                self.saw(format!("look {}", self.now), false);
            }
            Step::Recalled { back, rules } => {
                let text = self.text();
                self.now -= back.min(&(self.now - NOW));
                if let Some(numbers) = rules {
                    self.change_rules(*numbers);
                }
                self.recall(&text);
            }
            Step::Sent => {
                self.send();
            }
            Step::Throttled(origin, answer) => {
                let ticket = self.ticket(origin.as_ref());
                self.throttled(ticket, *answer);
            }
            Step::Succeeded(origin) => {
                let ticket = self.ticket(origin.as_ref());
                self.succeeded(ticket);
            }
            Step::UsedUp(reset) => {
                self.pace.used_up(time(self.now), Duration::from_millis(*reset), &self.rules);
                self.saw(format!("used_up {} {reset}", self.now), false);
            }
            Step::PacedByServer => {
                self.pace.is_paced_by_the_server();
                self.saw(format!("paced_by_server {}", self.now), false);
            }
            Step::Penalized(hold) => {
                self.pace.penalize(time(self.now), Duration::from_millis(*hold), &self.rules);
                self.saw(format!("penalize {} {hold}", self.now), false);
            }
            Step::Asked { times, idle, latency, again, refusal } => {
                for _ in 0..*times {
                    self.now = (self.now + idle).max(millis(self.pace.ready()));
                    let ticket = Ticket { again: *again, ..self.send() };
                    let accepted = provider.accepts(self.now);
                    self.now += latency;
                    if accepted {
                        self.succeeded(Some(ticket));
                    } else {
                        self.throttled(Some(ticket), *refusal);
                    }
                }
            }
        }
    }

    fn send(&mut self) -> Ticket {
        let ticket = self.pace.sent(time(self.now), &self.rules);
        self.tickets.push(ticket);
        self.saw(format!("sent {}", self.now), ticket.binding);
        ticket
    }

    fn throttled(&mut self, ticket: Option<Ticket>, answer: Answer) {
        let Answer { hint, soft, again, within_quota, used_up } = answer;
        let refusal = Refusal { hint: hint.map(Duration::from_millis), soft, again, within_quota, used_up };
        let new_event = self.pace.throttled(time(self.now), ticket, refusal, &self.rules);
        let hint = hint.map_or("-1".to_owned(), |hint| hint.to_string());
        let flags = [soft, again, within_quota, used_up].map(bit).join(" ");
        self.saw(format!("throttled {} {} {hint} {flags}", self.now, words(ticket)), new_event);
    }

    fn succeeded(&mut self, ticket: Option<Ticket>) {
        self.pace.succeeded(ticket, &self.rules);
        self.saw(format!("succeeded {} {}", self.now, words(ticket)), false);
    }

    fn change_rules(&mut self, numbers: [u64; 4]) {
        self.rules = rules(numbers);
        self.told.commands.push(rules_command(self.pacing, numbers));
        self.told.expected.push(None);
    }

    fn recall(&mut self, text: &str) {
        self.pace = recalled(text, self.pacing, self.now, &self.rules);
        let is_another = self.text() != text;
        self.saw(format!("recall {} {text}", self.now), is_another);
    }

    fn ticket(&self, origin: Option<&Origin>) -> Option<Ticket> {
        match origin? {
            Origin::Sent { .. } if self.tickets.is_empty() => None,
            Origin::Sent { which, again } => Some(Ticket { again: *again, ..*which.get(&self.tickets) }),
            Origin::Newest { again } => self.tickets.last().map(|ticket| Ticket { again: *again, ..*ticket }),
            Origin::Elsewhere { ago, binding, again } => {
                Some(Ticket { at: time(self.now - ago), binding: *binding, again: *again })
            }
        }
    }

    fn text(&self) -> String {
        wire::write(&self.pace.remember(time(self.now)), self.now)
    }

    fn saw(&mut self, command: String, answer: bool) {
        self.told.commands.push(command);
        self.told.expected.push(Some(format!("{} {}", seen(&self.pace, self.now), bit(answer))));
    }
}

/// What a script is to know of the host.
pub(super) fn seen(pace: &Pace, now: u64) -> String {
    let text = wire::write(&pace.remember(time(now)), now);
    let [cold, serial] = [pace.is_cold(time(now)), pace.is_serial(time(now))].map(bit);
    format!("{text} {} {cold} {serial}", millis(pace.ready()))
}

/// As memory.rs brings a state into its range.
pub(super) fn recalled(text: &str, pacing: Pacing, now: u64, rules: &Rules) -> Pace {
    let memory = wire::read(text, now).expect("a pace");
    Pace::recall(&memory, Duration::ZERO, pacing, time(now), rules)
}

pub(super) fn rules(numbers: [u64; 4]) -> Rules {
    let [base_cooldown, max_cooldown, spacing, warm_for] = numbers.map(Duration::from_millis);
    Rules { base_cooldown, max_cooldown, spacing, warm_for }
}

pub(super) fn rules_command(pacing: Pacing, numbers: [u64; 4]) -> String {
    format!("rules 0 {} {}", bit(pacing == Pacing::Learned), numbers.map(|number| number.to_string()).join(" "))
}

fn words(ticket: Option<Ticket>) -> String {
    ticket.map_or("-1 0 0".to_owned(), |ticket| {
        format!("{} {} {}", millis(ticket.at), bit(ticket.binding), bit(ticket.again))
    })
}

pub(super) fn bit(bool: bool) -> &'static str {
    if bool { "1" } else { "0" }
}

fn time(ms: u64) -> Time {
    Time::at(Duration::from_millis(ms))
}

/// Where all that goes in is whole milliseconds, so is all that comes out.
fn millis(time: Time) -> u64 {
    let since = time.since(Time::default());
    assert_eq!(since.subsec_nanos() % 1_000_000, 0, "{since:?}");
    u64::try_from(since.as_millis()).unwrap()
}
