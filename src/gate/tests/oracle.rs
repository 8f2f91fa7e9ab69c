//! The oracle: the simple design that the cells were put in front of is still there, and a gate without cells does what
//! it did before there were any. Whatever is done to one, a gate with cells does the same at the same time: admits, sheds,
//! wakes, tells its observer, shows.
//!
//! There is one difference on purpose, and it does not show here: two hosts whose hashes a cell cannot tell apart share
//! their permits. No two hosts of a test case do.

mod world;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use http::header::HOST;
use http::{Method, Request, Uri};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngAlgorithm, TestCaseResult};

use self::world::{Answer, Frames, World, elsewhere};
use crate::config::{Config, Limits, PermitUntil};
use crate::extensions::{Again, MaxWait};
use crate::host::{By, HostKey};
use crate::observe::Label;
use crate::pace::{DelayFrom, Pacing};
use crate::verdict::Outcome;

const HOSTS: usize = 7;
/// The one that the configuration may have limits for.
const LIMITED: &str = "limited.example";

#[derive(Clone, Debug)]
enum Op {
    Call { ask: Ask, inner_is_ready: bool },
    Poll { nth: usize, inner_is_ready: bool },
    PollAllWoken,
    Answer { nth: usize, answer: Reply },
    Read { nth: usize },
    Drop { nth: usize },
    TryAcquire { host: usize, spelling: Spelling },
    Settle { nth: usize, outcome: Option<Outcome> },
    Penalize { host: usize, millis: u64 },
    Clear { host: usize },
    SetLimits { host: usize, by_name: bool, limits: Limits },
    Advance { millis: u64 },
    Export,
    Import { age: u64 },
    Look,
    Close,
}

#[derive(Clone, Debug)]
struct Ask {
    host: usize,
    spelling: Spelling,
    extra: Extra,
}

#[derive(Clone, Copy, Debug)]
enum Spelling {
    Https,
    Http,
    UpperCase,
    Port,
    OtherPort,
    Dot,
    UserInfo,
    HostHeader,
    Nowhere,
}

#[derive(Clone, Copy, Debug)]
enum Extra {
    Nothing,
    Head,
    Label,
    MaxWait(u64),
    UntilHead,
    Again { softly_refused: bool },
}

#[derive(Clone, Debug)]
struct Reply {
    head: Option<(u16, Vec<(&'static str, &'static str)>)>,
    elsewhere: Option<usize>,
    body: Frames,
}

/// Host names for the two gates: the same ones, in cells that the first of them knows.
struct Names(Vec<String>);

#[derive(Clone, Debug)]
struct Setup {
    concurrency: usize,
    pacing: Pacing,
    until: PermitUntil,
    max_wait: u64,
    max_queue: usize,
    by: By,
    follows_redirects: bool,
    reads_quota: Option<bool>,
    limits: Option<Limits>,
    /// So many requests to the first host to begin with.
    burst: usize,
    /// Look at all hosts after every single step, which puts the gate in order too.
    looks_all_the_time: bool,
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 600,
        max_shrink_iters: 20_000,
        failure_persistence: None,
        rng_algorithm: RngAlgorithm::XorShift,
        ..ProptestConfig::default()
    })]

    #[test]
    fn with_cells_a_gate_does_what_it_does_without(setup in setup(), ops in ops(1..80)) {
        compare(&setup, ops)?;
    }

    /// With the last handle nobody new can come, and the permits and waiters that there are go on to their ends.
    #[test]
    fn a_gate_that_was_closed_goes_on_as_one_without_cells(
        setup in setup(),
        ops in ops(0..8),
        last_calls in vec(call(0.5), 1..6),
        rest in vec(ending(8), 1..30),
    ) {
        compare(&setup, [ops, last_calls, vec![Op::Close], rest].concat())?;
    }
}

fn compare(setup: &Setup, mut ops: Vec<Op>) -> TestCaseResult {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let plain = Ask { host: 0, spelling: Spelling::Https, extra: Extra::Nothing };
    ops.splice(..0, std::iter::repeat_n(Op::Call { ask: plain, inner_is_ready: true }, setup.burst));
    // Timers are polled far more often than tokio would let one task do.
    runtime.block_on(tokio::task::unconstrained(run(setup, &ops)))
}

async fn run(setup: &Setup, ops: &[Op]) -> TestCaseResult {
    let mut cells = World::new(setup.config(false));
    let mut slots = World::new(setup.config(true));
    let names = Names::new(&cells);
    let (gate, oracle) = (cells.gate().unwrap(), slots.gate().unwrap());
    for (nth, op) in ops.iter().enumerate() {
        if let Op::Advance { millis } = op {
            tokio::time::advance(Duration::from_millis(*millis)).await;
        }
        names.carry_out(op, &mut cells);
        names.carry_out(op, &mut slots);
        let (mut news, mut expected) = (cells.news(), slots.news());
        if matches!(op, Op::Clear { .. } | Op::SetLimits { .. }) {
            // Several hosts at once, in the order of their hashes.
            news.sort();
            expected.sort();
        }
        prop_assert_eq!(news, expected, "{:?}", op);
        if (setup.looks_all_the_time && nth >= setup.burst) || matches!(op, Op::Look) {
            prop_assert_eq!(cells.sight(&names.0), slots.sight(&names.0), "{:?}", op);
        }
    }

    // All requests are dropped, and then nobody comes for a day.
    cells.drop_all_requests();
    slots.drop_all_requests();
    prop_assert_eq!(cells.news(), slots.news());
    prop_assert_eq!(cells.sight(&names.0), slots.sight(&names.0));
    for name in &names.0 {
        // What was learnt stays for longer.
        cells.clear(name);
        slots.clear(name);
    }
    tokio::time::advance(Duration::from_secs(86_400)).await;
    for mut world in [cells, slots] {
        prop_assert!(world.sight(&names.0).is_none_or(|sight| sight.is_empty()), "{:?}", world.sight(&names.0));
        prop_assert_eq!(world.leftovers(), Vec::<String>::new());
        world.close();
    }
    prop_assert!(gate.upgrade().is_none() && oracle.upgrade().is_none(), "a gate outlives its handles and permits");
    Ok(())
}

impl Names {
    /// Three hosts that want one cell and two that want another, one that wants either, and one whose name does not fit
    /// into any.
    fn new(world: &World) -> Self {
        let in_cell = |place: usize| {
            let names = (0..).map(|n| format!("h{n}.example"));
            names.filter(move |name| world.place(&uri(name, Spelling::Https)) == Some(place))
        };
        let long = format!("{}.example", "long".repeat(15));
        Self(in_cell(0).take(3).chain(in_cell(1).take(2)).chain([LIMITED.to_owned(), long]).collect())
    }

    fn carry_out(&self, op: &Op, world: &mut World) {
        match op {
            Op::Call { ask, inner_is_ready } => world.call(self.request(ask), *inner_is_ready),
            Op::Poll { nth, inner_is_ready } => world.poll(*nth, *inner_is_ready),
            Op::PollAllWoken => world.poll_all_woken(),
            Op::Answer { nth, answer } => {
                let Reply { head, elsewhere, body } = answer.clone();
                let elsewhere = elsewhere.map(|host| uri(&self.0[host], Spelling::Https));
                world.answer(*nth, Answer { head, elsewhere, body });
            }
            Op::Read { nth } => world.read(*nth),
            Op::Drop { nth } => world.drop_exchange(*nth),
            Op::TryAcquire { host, spelling } => world.try_acquire(&uri(&self.0[*host], *spelling)),
            Op::Settle { nth, outcome } => world.settle(*nth, *outcome),
            Op::Penalize { host, millis } => world.penalize(&self.0[*host], Duration::from_millis(*millis)),
            Op::Clear { host } => world.clear(&self.0[*host]),
            Op::SetLimits { host, by_name, limits } => {
                let port = if *by_name { "" } else { ":443" };
                world.set_limits(&format!("{}{port}", self.0[*host]), limits);
            }
            Op::Advance { .. } | Op::Look => {}
            Op::Export => world.export(),
            Op::Import { age } => world.import(Duration::from_secs(*age)),
            Op::Close => world.close(),
        }
    }

    fn request(&self, ask: &Ask) -> Request<usize> {
        let name = &self.0[ask.host];
        let mut request = Request::new(0);
        *request.uri_mut() = uri(name, ask.spelling);
        if matches!(ask.spelling, Spelling::HostHeader) {
            request.headers_mut().insert(HOST, name.parse().unwrap());
        }
        match ask.extra {
            Extra::Nothing => {}
            Extra::Head => *request.method_mut() = Method::HEAD,
            Extra::Label => _ = request.extensions_mut().insert(Label("label")),
            Extra::MaxWait(seconds) => _ = request.extensions_mut().insert(MaxWait(Duration::from_secs(seconds))),
            Extra::UntilHead => _ = request.extensions_mut().insert(PermitUntil::Head),
            Extra::Again { softly_refused } => {
                let again = Again { waited: Duration::from_secs(1), softly_refused };
                request.extensions_mut().insert(again);
            }
        }
        request
    }
}

fn uri(name: &str, spelling: Spelling) -> Uri {
    let text = match spelling {
        Spelling::Https => format!("https://{name}/feed"),
        Spelling::Http => format!("http://{name}/"),
        Spelling::UpperCase => format!("https://{}/", name.to_uppercase()),
        Spelling::Port => format!("https://{name}:443/"),
        Spelling::OtherPort => format!("https://{name}:8080/"),
        Spelling::Dot => format!("https://{name}./"),
        Spelling::UserInfo => format!("https://user:secret@{name}/"),
        Spelling::HostHeader | Spelling::Nowhere => "/feed".to_owned(),
    };
    text.parse().unwrap()
}

impl Setup {
    fn config(&self, slots_only: bool) -> Config {
        let mut config = Config {
            concurrency: self.concurrency,
            permit_until: self.until,
            max_wait: Duration::from_secs(self.max_wait),
            max_queue: self.max_queue,
            rate_limit_headers: self.reads_quota,
            slots_only,
            ..Config::default()
        };
        config.set_keying(self.by);
        config.set_pacing(self.pacing);
        if let Some(limits) = &self.limits {
            config.per_host.insert(HostKey::new(LIMITED), Arc::new(limits.clone()));
        }
        if self.follows_redirects {
            config.final_uri = Some(Arc::new(elsewhere));
        }
        config
    }
}

// --- what may happen --------------------------------------------------------------------------------------------------

fn setup() -> impl Strategy<Value = Setup> {
    let concurrency = prop_oneof![
        20 => select(vec![1, 2, 3, 6]).prop_map(|concurrency| (concurrency, 0)),
        1 => (Just(300), 253..304usize),
    ];
    let until = prop_oneof![4 => Just(PermitUntil::BodyEnd), 1 => Just(PermitUntil::Head)];
    let by = prop_oneof![4 => Just(By::Authority), 1 => Just(By::Host)];
    let max_queue = select(vec![10_000, 10_000, 1, 0]);
    (
        (concurrency, select(vec![Pacing::Learned, Pacing::Learned, Pacing::Reactive]), until),
        (select(vec![0, 3, 60, 60, 600]), max_queue, by),
        (prop::bool::weighted(0.1), select(vec![None, None, Some(false), Some(true)])),
        prop::option::weighted(0.1, limits()),
        any::<bool>(),
    )
        .prop_map(
            |(
                ((concurrency, burst), pacing, until),
                (max_wait, max_queue, by),
                (follows_redirects, reads_quota),
                limits,
                looks_all_the_time,
            )| Setup {
                concurrency,
                pacing,
                until,
                max_wait,
                max_queue,
                by,
                follows_redirects,
                reads_quota,
                limits,
                burst,
                looks_all_the_time,
            },
        )
}

/// Calm weeks, in which hosts are mostly healthy, and others.
fn ops(length: Range<usize>) -> impl Strategy<Value = Vec<Op>> {
    prop_oneof![vec(op(1), length.clone()), vec(op(8), length)]
}

fn op(trouble: u32) -> impl Strategy<Value = Op> {
    let nth = || 0..1000usize;
    prop_oneof![
        50 => call(0.85),
        100 => ending(trouble),
        6 => (host(), spelling()).prop_map(|(host, spelling)| Op::TryAcquire { host, spelling }),
        6 => (nth(), outcome()).prop_map(|(nth, outcome)| Op::Settle { nth, outcome }),
        trouble => (host(), 0..20_000u64).prop_map(|(host, millis)| Op::Penalize { host, millis }),
        trouble => host().prop_map(|host| Op::Clear { host }),
        trouble => (host(), any::<bool>(), limits())
            .prop_map(|(host, by_name, limits)| Op::SetLimits { host, by_name, limits }),
        1 => Just(Op::Export),
        1 => select(vec![0, 10, 300]).prop_map(|age| Op::Import { age }),
        10 => Just(Op::Look),
    ]
}

fn call(inner_is_ready: f64) -> impl Strategy<Value = Op> {
    (ask(), prop::bool::weighted(inner_is_ready)).prop_map(|(ask, inner_is_ready)| Op::Call { ask, inner_is_ready })
}

/// What does not need a handle on the gate.
fn ending(trouble: u32) -> impl Strategy<Value = Op> {
    let nth = || 0..1000usize;
    prop_oneof![
        6 => (nth(), any::<bool>()).prop_map(|(nth, inner_is_ready)| Op::Poll { nth, inner_is_ready }),
        8 => Just(Op::PollAllWoken),
        24 => (nth(), reply(trouble)).prop_map(|(nth, answer)| Op::Answer { nth, answer }),
        8 => nth().prop_map(|nth| Op::Read { nth }),
        10 => nth().prop_map(|nth| Op::Drop { nth }),
        8 => select(vec![1, 10, 500, 1000, 3000, 30_000, 200_000]).prop_map(|millis| Op::Advance { millis }),
    ]
}

fn host() -> impl Strategy<Value = usize> {
    // Few enough that they meet, and mostly those that share a cell.
    prop_oneof![8 => Just(0usize), 2 => Just(1), 1 => Just(2), 2 => 3..HOSTS]
}

fn ask() -> impl Strategy<Value = Ask> {
    (host(), spelling(), extra()).prop_map(|(host, spelling, extra)| Ask { host, spelling, extra })
}

fn spelling() -> impl Strategy<Value = Spelling> {
    use Spelling::*;
    prop_oneof![
        12 => Just(Https),
        4 => select(vec![UpperCase, Port, Dot, UserInfo]),
        2 => select(vec![Http, OtherPort, HostHeader, Nowhere]),
    ]
}

fn extra() -> impl Strategy<Value = Extra> {
    prop_oneof![
        12 => Just(Extra::Nothing),
        4 => select(vec![Extra::Head, Extra::Label, Extra::UntilHead, Extra::MaxWait(0), Extra::MaxWait(5)]),
        2 => any::<bool>().prop_map(|softly_refused| Extra::Again { softly_refused }),
    ]
}

fn reply(trouble: u32) -> impl Strategy<Value = Reply> {
    let body = (0..3u8, any::<bool>()).prop_map(|(left, knows_its_end)| Frames { left, knows_its_end });
    (head(trouble), prop::option::weighted(0.2, host()), body).prop_map(|(head, elsewhere, body)| Reply {
        head,
        elsewhere,
        body,
    })
}

fn head(trouble: u32) -> impl Strategy<Value = Option<(u16, Vec<(&'static str, &'static str)>)>> {
    let used_up = vec![("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "7")];
    let one_left = vec![("x-ratelimit-remaining", "1"), ("x-ratelimit-reset", "7")];
    let many_left = vec![("content-type", "text/xml"), ("ratelimit-remaining", "100"), ("ratelimit-reset", "60")];
    let hint = vec![("retry-after", "3")];
    prop_oneof![
        12 => Just(Some((200, Vec::new()))),
        4 => select(vec![200, 204, 304, 404, 408, 500, 503]).prop_map(|status| Some((status, Vec::new()))),
        8 => select(vec![used_up.clone(), one_left.clone(), one_left, many_left]).prop_map(|headers| Some((200, headers))),
        trouble => select(vec![
            (429, Vec::new()),
            (429, hint.clone()),
            (429, vec![("retry-after", "0")]),
            (429, vec![("retry-after", "3000")]),
            (429, used_up),
            (403, Vec::new()),
            (403, hint.clone()),
            (503, hint),
        ]).prop_map(Some),
        1 => Just(None),
    ]
}

fn outcome() -> impl Strategy<Value = Option<Outcome>> {
    select(vec![
        None,
        Some(Outcome::Success),
        Some(Outcome::Neutral),
        Some(Outcome::Throttled { hint: None, soft: false }),
        Some(Outcome::Throttled { hint: Some(Duration::from_secs(2)), soft: false }),
        Some(Outcome::Throttled { hint: None, soft: true }),
    ])
}

fn limits() -> impl Strategy<Value = Limits> {
    let default = Limits::default;
    prop_oneof![
        3 => Just(default()),
        3 => select(vec![1usize, 2, 3, 5, 300]).prop_map(move |requests| default().concurrency(requests)),
        2 => select(vec![PermitUntil::Head, PermitUntil::BodyEnd]).prop_map(move |until| default().permit_until(until)),
        2 => (select(vec![DelayFrom::Send, DelayFrom::Completion]), 1..5u64)
            .prop_map(move |(from, secs)| default().min_delay(Duration::from_secs(secs)).delay_from(from).concurrency(2)),
        1 => (1..4u32).prop_map(move |sends| default().quota(sends, Duration::from_secs(10))),
        1 => (0..5u64).prop_map(move |secs| default().max_wait(Duration::from_secs(secs))),
        1 => (0..5u64).prop_map(move |secs| default().spacing(Duration::from_secs(secs))),
    ]
}
