//! One call of a script per operation: arguments in, answer out.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::Value;

use super::error::{BackendError, BackendErrorKind};
use super::keys::Space;
use super::link::{Connection, Hooks, Link, Script, State};
use super::{Queue, Redis, scripts};
use crate::error::Reason;
use crate::host::HostKey;
use crate::pace::{Bounds, DelayFrom, Memory, Pacing, Quota, Rules, wire};
use crate::verdict::Outcome;

/// How long the process that a permit is handed to has time to take it up.
const CLAIM: Duration = Duration::from_millis(800);
/// A permit that can be used within so much time is handed out at once, with the instant.
const HORIZON: Duration = Duration::from_millis(100);

/// The store, as one gate uses it.
pub(crate) struct Store {
    link: Arc<Link>,
    space: Space,
    /// This process's name among the others: never given twice.
    process: String,
    next_token: AtomicU64,
    pub(crate) settings: Redis,
}

/// What a replica brings to every call: its own limits and rules for the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostTerms {
    pub(crate) concurrency: usize,
    pub(crate) bounds: Bounds,
    pub(crate) pacing: Pacing,
    pub(crate) rules: Rules,
}

/// What a request asks for.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) terms: HostTerms,
    pub(crate) token: Box<str>,
    pub(crate) waited: Duration,
    pub(crate) budget: Duration,
    /// Permits that were handed to this process and are in use.
    pub(crate) confirm: Vec<Box<str>>,
}

/// A permit in the store.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    pub(crate) token: Box<str>,
    /// When it was to be used, in milliseconds of the server's clock.
    pub(crate) at: u64,
    /// The learned gap was what kept it.
    pub(crate) binding: bool,
}

/// What a request has come to, to be told when its lease goes back.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Report {
    pub(crate) outcome: Heard,
    /// When it was sent, in milliseconds of the server's clock; zero is before anything was recorded.
    pub(crate) sent_at: u64,
    pub(crate) binding: bool,
    pub(crate) again: bool,
    pub(crate) quota: Option<Quota>,
}

impl Report {
    /// The others should hear of this, even of a request that they know nothing of.
    pub(crate) fn is_news(&self) -> bool {
        matches!(self.outcome, Heard::Throttled { .. }) || self.quota.is_some()
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Heard {
    #[default]
    Nothing,
    Success,
    Throttled {
        hint: Option<Duration>,
        soft: bool,
    },
}

impl From<Outcome> for Heard {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Throttled { hint, soft } => Self::Throttled { hint, soft },
            Outcome::Success => Self::Success,
            Outcome::Neutral => Self::Nothing,
        }
    }
}

/// What every script says: the host as all processes know it.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The server's clock, in milliseconds.
    pub(crate) now: u64,
    /// The same in microseconds, which no two answers of a host share.
    pub(crate) micros: u64,
    pub(crate) in_flight: usize,
    /// How often the host was cleared.
    pub(crate) clears: u64,
    pub(crate) pace: Option<Memory>,
    rest: Vec<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Admitted {
        at: u64,
        binding: bool,
    },
    Wait {
        at: u64,
        reason: Reason,
    },
    /// All permits are taken, and so many other processes look for one.
    Full {
        others: u64,
    },
    /// A permit is on its way to this process.
    Claim,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Released {
    /// The lease had not ended before.
    pub(crate) held: bool,
    /// So many other processes look for a permit.
    pub(crate) others: u64,
}

/// Something done to a host from outside the way of a request.
#[derive(Debug)]
pub(crate) enum Steer {
    Penalize(Duration),
    Clear,
    /// What was learnt while the store was out of reach.
    Merge(Box<Memory>),
    /// A retry below the gate sends once more after this.
    #[cfg(feature = "retry")]
    Resend(Duration),
    /// A permit that was handed over is in use.
    Confirm(Box<str>),
    /// Nobody here waits any more.
    Leave,
    Look,
}

/// By which way a call goes.
#[derive(Clone, Copy)]
pub(crate) enum Via<'a> {
    Link,
    /// A connection that is not let through to yet.
    Connection(&'a Connection),
}

/// A permit that another process has handed to this one.
#[derive(Debug)]
pub(crate) struct Handed {
    pub(crate) state: String,
    pub(crate) lease: Lease,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) enum Pushed {
    Handed(Box<Handed>),
    Cleared { state: String, clears: u64 },
}

impl Store {
    pub(crate) fn new(settings: Redis, hooks: Weak<dyn Hooks>) -> Self {
        let space = Space::new(&settings.prefix, &settings.scope);
        let process = format!("{:032x}", fastrand::u128(..));
        let channel = space.channel();
        let channels = vec![format!("{channel}{process}"), format!("{channel}all")];
        let link = Link::new(settings.target.clone(), settings.timeout, channels, hooks);
        Self { link, space, process, next_token: AtomicU64::new(0), settings }
    }

    /// Calls are let through, or may be soon.
    pub(crate) fn is_up(&self) -> bool {
        self.link.state() != State::Down
    }

    pub(crate) fn is_fair(&self) -> bool {
        self.settings.queue == Queue::Fifo && self.counts_leases()
    }

    pub(crate) fn counts_leases(&self) -> bool {
        !self.settings.spacing_only
    }

    /// The key of a host's state, by which messages name it.
    pub(crate) fn state_key(&self, host: &HostKey) -> String {
        self.space.state(host)
    }

    /// A name for one admission, never given twice. It says how long it may last at most.
    pub(crate) fn token(&self) -> Box<str> {
        let number = self.next_token.fetch_add(1, Ordering::Relaxed);
        format!("{}.{number}.{}", self.process, self.settings.lease_ttl.as_millis()).into()
    }

    /// The server's time so long ago, in milliseconds, as far as it is known.
    pub(crate) fn time_since(&self, ago: Duration) -> u64 {
        self.link.server_now_ms().saturating_sub(ceil_ms(ago))
    }

    // --- operations -----------------------------------------------------------------------------------------------

    pub(crate) async fn admit(&self, host: &HostKey, ask: &Ask) -> Result<(Answer, Verdict), BackendError> {
        // The server's clock may have been set since we read it: the first answer says so.
        for _ in 0..2 {
            let answer = self.admit_once(host, ask).await?;
            match answer.word(0)? {
                "late" => {}
                "admitted" => {
                    let verdict = Verdict::Admitted { at: answer.number(1)?, binding: answer.number(2)? == 1 };
                    return Ok((answer, verdict));
                }
                "wait" => {
                    let verdict = Verdict::Wait { at: answer.number(1)?, reason: reason(answer.word(2)?) };
                    return Ok((answer, verdict));
                }
                "claim" => return Ok((answer, Verdict::Claim)),
                "full" => {
                    let verdict = Verdict::Full { others: answer.number(1)? };
                    return Ok((answer, verdict));
                }
                _ => return Err(malformed()),
            }
        }
        Err(BackendError::new(BackendErrorKind::Timeout, "the server runs commands too late"))
    }

    async fn admit_once(&self, host: &HostKey, ask: &Ask) -> Result<Answer, BackendError> {
        let now = self.link.server_now_ms();
        let not_after = if now == 0 { 0 } else { now.saturating_add(ceil_ms(self.settings.timeout)) };
        let mut args = self.terms(&ask.terms);
        args.text(&ask.token);
        args.text(&self.process);
        args.number(not_after);
        args.number(floor_ms(ask.waited));
        args.number(floor_ms(ask.budget));
        for token in &ask.confirm {
            args.text(token);
        }
        self.call(Via::Link, &scripts::ADMIT, host, args).await
    }

    /// Gives a lease back, if there is one, and reports.
    pub(crate) async fn release(
        &self,
        via: Via<'_>,
        host: &HostKey,
        terms: &HostTerms,
        token: &str,
        sent: bool,
        report: &Report,
    ) -> Result<(Answer, Released), BackendError> {
        let mut args = self.terms(terms);
        args.text(token);
        args.flag(sent);
        let (word, hint, soft) = match report.outcome {
            Heard::Nothing => ("", None, false),
            Heard::Success => ("success", None, false),
            Heard::Throttled { hint, soft } => ("throttled", hint, soft),
        };
        args.text(word);
        args.number(report.sent_at);
        args.flag(report.binding);
        args.flag(report.again);
        args.maybe(hint.map(ceil_ms));
        args.flag(soft);
        args.maybe(report.quota.map(|quota| quota.remaining.min(MOST)));
        args.maybe(report.quota.map(|quota| ceil_ms(quota.reset)));
        let answer = self.call(via, &scripts::RELEASE, host, args).await?;
        let released = Released { held: answer.number(0)? == 1, others: answer.number(1)? };
        Ok((answer, released))
    }

    pub(crate) async fn steer(
        &self,
        via: Via<'_>,
        host: &HostKey,
        terms: &HostTerms,
        steer: &Steer,
    ) -> Result<Answer, BackendError> {
        let mut args = self.terms(terms);
        match steer {
            Steer::Penalize(hold) => {
                args.text("penalize");
                args.number(ceil_ms(*hold));
            }
            Steer::Clear => args.text("clear"),
            Steer::Merge(memory) => {
                let now = self.link.server_now_ms();
                args.text("merge");
                args.text(&wire::write(memory, now));
                args.number(now);
            }
            #[cfg(feature = "retry")]
            Steer::Resend(delay) => {
                args.text("resend");
                args.number(ceil_ms(*delay));
            }
            Steer::Confirm(token) => {
                args.text("confirm");
                args.text(token);
            }
            Steer::Leave => {
                args.text("leave");
                args.text(&self.process);
            }
            Steer::Look => args.text("look"),
        }
        self.call(via, &scripts::STEER, host, args).await
    }

    async fn call(
        &self,
        via: Via<'_>,
        script: &'static Script,
        host: &HostKey,
        args: Args,
    ) -> Result<Answer, BackendError> {
        let keys = self.space.keys(host);
        let value = match via {
            Via::Link => self.link.run(script, &keys, &args.0).await?,
            Via::Connection(connection) => connection.run(script, &keys, &args.0).await?,
        };
        let answer = Answer::read(value)?;
        self.link.note_server_time(answer.now);
        Ok(answer)
    }

    /// What every script is told first.
    fn terms(&self, terms: &HostTerms) -> Args {
        let HostTerms { concurrency, bounds, pacing, rules } = terms;
        let mut args = Args(Vec::with_capacity(26));
        args.number(if self.counts_leases() { (*concurrency as u64).min(MOST) } else { 0 });
        args.number(ceil_ms(self.settings.lease_ttl));
        args.number(ceil_ms(bounds.min_delay));
        args.flag(bounds.delay_from == DelayFrom::Completion);
        let (sends, width) = bounds.width().map_or((0, 0), |(sends, width)| (sends as u64, ceil_ms(width)));
        args.number(sends);
        args.number(width);
        args.flag(*pacing == Pacing::Learned);
        for duration in [rules.base_cooldown, rules.max_cooldown, rules.spacing, rules.warm_for] {
            args.number(ceil_ms(duration));
        }
        args.number(if self.is_fair() { ceil_ms(CLAIM) } else { 0 });
        args.number(ceil_ms(HORIZON));
        args.text(&self.space.channel());
        args
    }

    // --- messages -------------------------------------------------------------------------------------------------

    /// What a message says; nothing if it is not one of ours.
    pub(crate) fn read_message(&self, payload: &[u8]) -> Option<Pushed> {
        let text = std::str::from_utf8(payload).ok()?;
        if let Some(cleared) = text.strip_prefix("clear ") {
            let (clears, state) = cleared.split_once(' ')?;
            return Some(Pushed::Cleared { state: state.to_owned(), clears: clears.parse().ok()? });
        }
        let mut fields = text.strip_prefix("grant ")?.splitn(7, ' ');
        let mut next = || fields.next();
        let (micros, at): (u64, u64) = (next()?.parse().ok()?, next()?.parse().ok()?);
        let now = micros / 1000;
        let binding = next()? == "1";
        let clears = next()?.parse().ok()?;
        let state = next()?.to_owned();
        let lease = Lease { token: next()?.into(), at, binding };
        let pace = wire::read(next()?, now);
        let answer = Answer { now, micros, in_flight: 0, clears, pace, rest: Vec::new() };
        Some(Pushed::Handed(Box::new(Handed { state, lease, answer })))
    }

    /// Handed over too long ago to be still sure of it: the message may have come late.
    pub(crate) fn is_stale(&self, handed: &Handed) -> bool {
        self.link.server_now_ms() > handed.answer.now.saturating_add(ceil_ms(CLAIM) / 2)
    }
}

impl Answer {
    fn read(value: Value) -> Result<Self, BackendError> {
        let Value::Array(values) = value else {
            return Err(malformed());
        };
        let mut values = values.into_iter();
        let mut next = || values.next().ok_or_else(malformed);
        let (micros, in_flight, clears) = (number(&next()?)?, number(&next()?)?, number(&next()?)?);
        let now = micros / 1000;
        let pace = wire::read(text(&next()?)?, now);
        let in_flight = usize::try_from(in_flight).map_err(|_| malformed())?;
        Ok(Self { now, micros, in_flight, clears, pace, rest: values.collect() })
    }

    fn word(&self, nth: usize) -> Result<&str, BackendError> {
        text(self.rest.get(nth).ok_or_else(malformed)?)
    }

    fn number(&self, nth: usize) -> Result<u64, BackendError> {
        number(self.rest.get(nth).ok_or_else(malformed)?)
    }

    /// What is left until an instant of the server's clock.
    pub(crate) fn until(&self, at: u64) -> Duration {
        Duration::from_millis(at.saturating_sub(self.now))
    }

    /// When the next one goes, in the answer to [`Steer`].
    pub(crate) fn next_send(&self) -> Duration {
        self.number(0).map(|at| self.until(at)).unwrap_or_default()
    }

    /// What is in its way.
    pub(crate) fn reason(&self) -> Reason {
        reason(self.word(1).unwrap_or_default())
    }
}

fn reason(word: &str) -> Reason {
    match word {
        "cooldown" => Reason::Cooldown,
        "quota" => Reason::Quota,
        _ => Reason::Spacing,
    }
}

fn text(value: &Value) -> Result<&str, BackendError> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).map_err(|_| malformed()),
        Value::SimpleString(text) => Ok(text),
        _ => Err(malformed()),
    }
}

fn number(value: &Value) -> Result<u64, BackendError> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|_| malformed()),
        other => text(other)?.parse().map_err(|_| malformed()),
    }
}

fn malformed() -> BackendError {
    BackendError::new(BackendErrorKind::Reply, "an answer of another form than the script's")
}

/// The largest number that a script can count with exactly.
const MOST: u64 = 1 << 52;

fn ceil_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).min(MOST / 4)
}

fn floor_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).min(MOST / 4)
}

/// The arguments of a script.
struct Args(Vec<Vec<u8>>);

impl Args {
    fn text(&mut self, text: &str) {
        self.0.push(text.as_bytes().to_vec());
    }

    fn number(&mut self, number: u64) {
        let mut text = String::new();
        let _ = write!(text, "{number}");
        self.0.push(text.into_bytes());
    }

    fn flag(&mut self, flag: bool) {
        self.0.push(vec![b'0' + u8::from(flag)]);
    }

    fn maybe(&mut self, number: Option<u64>) {
        match number {
            Some(number) => self.number(number),
            None => self.text("-1"),
        }
    }
}
