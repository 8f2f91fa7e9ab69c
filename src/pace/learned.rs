//! Learned pacing: what a host tolerates, found once and remembered.
//!
//! So many sends, `burst`, at the beginning of every `gap`: a plain gap between two sends where `burst` is one. Found by
//! the escalation of reactive pacing, shortened by bisection inside a bracket of `lo`, the longest gap that was too
//! short, and `hi`, the shortest known good; then tried again ever more rarely. It survives success, and idleness.

use std::time::Duration;

use super::reactive::{SOFT_HOLD, escalate};
use super::{Burst, Refusal, Rules, Ticket, Time};

/// Added to what a server asks for once it has refused right after it: whole seconds are often rounded down.
const GUARD: Duration = Duration::from_secs(1);
/// A gap this small is none.
const SMALLEST: u32 = 20;
/// Idle for this much longer than the gap, a host begins a new busy period.
const BUSY: Duration = Duration::from_secs(60);
/// So many successes in a row make a lone refusal noise.
const QUIET: u16 = 8;
/// A gap longer than this, in milliseconds, is taken for an outage at first.
const OUTAGE: u32 = 130_000;
/// A streak of headerless 403s no longer than this may be a chance meeting of URLs that are forbidden.
const CHANCE: u8 = 2;
/// Successes at a tight gap before it is tried again; doubles with every probe that fails.
pub(super) const PATIENCE: u8 = 8;
pub(super) const MAX_PATIENCE: u8 = 128;
/// By which part of itself it is shortened then.
const REPROBE: u32 = 4;
/// The most successes that are asked for before a step.
pub(super) const MAX_EVIDENCE: u8 = 16;

/// What is known of a host: instants, milliseconds and counters. All zero is a host never seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Learned {
    /// No send before this: the cooldown. Only grows.
    pub(super) hold_until: Time,
    /// No send before this: the floor behind the last warm send. Only grows.
    pub(super) spaced_until: Time,
    pub(super) warm_until: Time,
    pub(super) last_ok: Time,
    pub(super) last_throttle: Time,
    /// The first send of the present burst.
    pub(super) burst_sent: Time,
    /// The first send of the run of successes that is being measured.
    pub(super) run_sent: Time,
    /// The present cooldown, to be doubled.
    pub(super) hold: u32,
    /// The learned gap; zero is none.
    pub(super) gap: u32,
    /// The shortest gap known good; zero is being measured.
    pub(super) hi: u32,
    /// The longest gap known to be too short.
    pub(super) lo: u32,
    /// From the beginning of the run to the last request refused.
    pub(super) tried: u32,
    /// Sends per gap.
    pub(super) burst: u16,
    /// Sends of the present burst.
    pub(super) out: u16,
    /// Successes of the run.
    pub(super) run: u16,
    /// Consecutive throttle events.
    pub(super) streak: u8,
    /// Successes that the present gap has had a part in.
    pub(super) since: u8,
    /// How many of them the next step takes.
    pub(super) need: u8,
    pub(super) patience: u8,
    /// How many successes make a gap known good: a bucket of tokens saved up hides for a while that it is too short.
    pub(super) evidence: u8,
    /// The streak consists of headerless 403s.
    pub(super) only_soft: bool,
    /// The host was warm when the streak began.
    pub(super) was_warm: bool,
    /// The streak's lesson for the gap has been drawn.
    pub(super) judged: bool,
    /// The hold was the shortest that may do: refusals had cost nothing so far.
    pub(super) early: bool,
    /// This host punishes refusals.
    pub(super) extends: bool,
    /// The hold is the server's own word.
    pub(super) hinted: bool,
    /// The server asks for less than it means.
    pub(super) short_hints: bool,
    /// Its last word on its quota was that something is left.
    pub(super) quota_left: bool,
    /// The server has refused while its headers said that something remained: they only ever hold.
    pub(super) quota_lies: bool,
}

impl Learned {
    /// Recording begins, with so many requests just sent.
    pub(crate) fn begin(now: Time, in_flight: u32) -> Self {
        let sent = u16::try_from(in_flight).unwrap_or(u16::MAX);
        Self { run_sent: now, burst_sent: now, run: sent, out: sent, ..Self::default() }
    }

    /// The earliest instant of the next send.
    pub(crate) fn ready(&self) -> Time {
        let full = self.keeps_gap() && self.gap > 0 && self.out >= self.burst;
        let next_burst = if full { self.burst_sent.after(span(self.gap)) } else { Time::default() };
        self.hold_until.max(self.spaced_until).max(next_burst)
    }

    pub(crate) fn hold_until(&self) -> Time {
        self.hold_until
    }

    pub(crate) fn warm_until(&self) -> Time {
        self.warm_until
    }

    pub(crate) fn streak(&self) -> u32 {
        self.streak.into()
    }

    /// The learned spacing, on average.
    pub(crate) fn gap(&self) -> Duration {
        span(self.gap) / u32::from(self.burst.max(1))
    }

    /// The longest spacing found too short and the shortest known to be good, on average.
    pub(crate) fn bracket(&self) -> (Duration, Duration) {
        let burst = u32::from(self.burst.max(1));
        (span(self.lo) / burst, span(self.hi) / burst)
    }

    /// Says nothing any more: indistinguishable from a host that never refused.
    pub(crate) fn is_cold(&self, now: Time) -> bool {
        self.gap == 0 && now >= self.warm_until && now >= self.ready()
    }

    /// A warm host is served one request at a time.
    pub(crate) fn is_serial(&self, now: Time) -> bool {
        now < self.warm_until || self.streak > 0
    }

    /// The time between two sends, for estimating how long a queue takes.
    pub(crate) fn spacing(&self, now: Time, rules: &Rules) -> Duration {
        if self.burst > 1 {
            return rules.spacing;
        }
        let floor = if self.is_serial(now) { rules.spacing } else { Duration::ZERO };
        span(self.gap).max(floor)
    }

    /// A lone 403 is about its URL: the gap goes on.
    fn keeps_gap(&self) -> bool {
        self.streak == 0 || (self.streak == 1 && self.only_soft)
    }

    /// The burst that is under way, where more than one request may go per gap.
    pub(crate) fn burst(&self) -> Option<Burst> {
        let size = self.burst.into();
        // The first success after a streak begins a new one.
        let out = if self.keeps_gap() { self.out.into() } else { size };
        (size > 1).then(|| Burst { sent: self.burst_sent, out, size, gap: span(self.gap) })
    }

    /// A request goes out now.
    pub(crate) fn sent(&mut self, now: Time, rules: &Rules) -> Ticket {
        self.forget_if_cold(now);
        let (gap, idle) = (span(self.gap), now.since(self.burst_sent));
        if self.streak == 0 && (self.run == 0 || idle > gap.saturating_add(BUSY)) {
            self.run_sent = now;
            self.run = 0;
        }
        let full = self.out >= self.burst;
        let kept_by_gap = full && self.burst_sent.after(gap) >= self.spaced_until;
        let binding = kept_by_gap && idle <= gap.saturating_mul(5) / 4;
        if self.gap == 0 || idle >= gap || !self.keeps_gap() {
            self.burst_sent = self.burst_sent.max(now);
            self.out = 0;
        }
        self.out = self.out.saturating_add(1);
        // A burst was learnt at the floor's pace.
        if now < self.warm_until || self.burst > 1 {
            self.spaced_until = self.spaced_until.max(now.after(rules.spacing));
        }
        Ticket { at: now, binding, again: false }
    }

    // --- refusals -------------------------------------------------------------------------------------------------

    /// A request was refused. True when this is a new event.
    pub(crate) fn throttled(&mut self, now: Time, ticket: Option<Ticket>, refusal: Refusal, rules: &Rules) -> bool {
        self.forget_if_cold(now);
        let asked = refusal.hint.filter(|hint| !hint.is_zero());
        let soft = refusal.soft && asked.is_none();
        let cap = if soft { rules.max_cooldown.min(SOFT_HOLD) } else { rules.max_cooldown };
        let seen_before = self.last_throttle > Time::default();
        if seen_before && ticket.is_none_or(|ticket| ticket.at <= self.last_throttle) {
            self.only_soft &= soft;
            if let Some(asked) = asked {
                self.hold_for(now, self.guarded(asked).min(cap), rules);
            }
            return false;
        }
        let sent = ticket.map_or(now, |ticket| ticket.at);
        let right_after = sent >= self.hold_until && sent.since(self.hold_until) < GUARD;
        self.short_hints |= self.hinted && right_after;
        self.quota_lies |= refusal.within_quota || (self.quota_left && !soft && !refusal.used_up);
        self.last_throttle = now;
        if soft && refusal.again {
            // Once more the URL's, not ours; unless others fare no better.
            let hold = if self.streak > 1 { span(self.hold).saturating_mul(2) } else { Duration::ZERO };
            let hold = hold.max(rules.base_cooldown).min(cap);
            self.hold = ms(hold);
            self.hold_for(now, hold, rules);
            return true;
        }
        if self.streak == 0 {
            self.was_warm = now < self.warm_until;
        }
        self.streak = self.streak.saturating_add(1);
        self.only_soft = soft && (self.streak == 1 || self.only_soft);
        self.tried = ms(sent.since(self.anchor()));
        let promised = asked.map(|asked| now.after(asked));
        let hopeful = if self.judged || self.only_soft { now } else { self.judge(promised, rules) };
        let hold = self.next_hold(asked, soft, hopeful.since(now), rules).min(cap);
        self.hold = ms(hold);
        self.hinted = asked.is_some();
        self.hold_for(now, hold, rules);
        true
    }

    /// How long the host is left alone after a refusal. `hopeful` is the shortest that may do, going by a known gap.
    fn next_hold(&mut self, asked: Option<Duration>, soft: bool, hopeful: Duration, rules: &Rules) -> Duration {
        let base = rules.base_cooldown;
        let ladder = escalate(base, self.streak.into());
        let doubled = span(self.hold).saturating_mul(2).max(ladder);
        let whole_gap = span(self.gap.max(self.hi));
        match (asked.map(|asked| self.guarded(asked)), self.streak) {
            (Some(asked), 1) => asked,
            // The last hint was too short: by a little, or for good?
            (asked, 2) if self.hinted => asked.unwrap_or_default().max(ladder),
            (Some(asked), _) => asked.max(doubled),
            (None, 1) if self.gap == 0 || soft => base,
            (None, 1) if self.extends => whole_gap.max(base),
            (None, 1) => {
                self.early = true;
                hopeful.max(base)
            }
            (None, 2) if self.early => {
                self.extends = true;
                doubled.max(whole_gap)
            }
            (None, _) => doubled,
        }
    }

    /// A burst at the floor's pace is over before the gap is, so that the gap is what keeps the next one waiting.
    fn outlasts_the_floor(&self, rules: &Rules) -> bool {
        span(self.gap) >= rules.spacing.saturating_mul(self.burst.into())
    }

    /// A refusal now is about the size of the burst rather than about the gap in front of it.
    fn is_in_burst(&self, rules: &Rules) -> bool {
        self.burst > 1 && (self.burst_sent <= self.run_sent || !self.outlasts_the_floor(rules))
    }

    /// From where the gap is measured.
    fn anchor(&self) -> Time {
        if self.burst > 1 || self.gap == 0 { self.run_sent } else { self.last_ok.max(self.run_sent) }
    }

    /// What a streak says about the gap. Gives back when the next success may be hoped for.
    fn judge(&mut self, promised: Option<Time>, rules: &Rules) -> Time {
        self.judged = true;
        if self.is_on_trial() {
            return self.judge_trial();
        }
        let anchor = self.anchor();
        let in_burst = self.is_in_burst(rules);
        if 0 < self.gap && self.gap < self.hi && !in_burst {
            let known = promised.map_or(0, |promised| ms(promised.since(anchor)));
            self.lo = self.lo.max(self.gap).max(known).min(self.hi);
            self.gap = self.hi;
            self.patience = self.patience.saturating_mul(2).clamp(PATIENCE, MAX_PATIENCE);
            self.need = self.evidence;
            self.since = 0;
            return anchor.after(span(self.hi));
        }
        self.hi = 0;
        anchor.after(if in_burst { span(self.gap) } else { span(self.gap.saturating_add(self.gap / 8)) })
    }

    /// A first lesson is on trial while the host is asked at the floor's pace all the same: what looked like a limit may have
    /// been an outage, and what was served before the first refusal may not have been recorded.
    fn is_on_trial(&self) -> bool {
        self.gap > 0 && self.evidence == 0
    }

    /// Refused again: it is a limit. Gives back when the next success may be hoped for.
    fn judge_trial(&mut self) -> Time {
        let expected = u16::from(self.need);
        self.since = 0;
        self.need = 1;
        self.evidence = 1;
        if expected == 1 {
            self.gap = self.hi;
            self.last_ok.max(self.run_sent).after(span(self.hi))
        } else if self.run >= expected {
            self.gap = self.hi;
            self.burst = self.run;
            self.run_sent.after(span(self.hi))
        } else {
            // Served fewer than before: no window, but tokens that had been saved up.
            let hopeful = self.run_sent.after(span(self.hi));
            (self.burst, self.hi) = (expected, 0);
            hopeful
        }
    }

    // --- successes ------------------------------------------------------------------------------------------------

    /// A request succeeded.
    pub(crate) fn succeeded(&mut self, ticket: Option<Ticket>, rules: &Rules) {
        let Some(Ticket { at, binding, again }) = ticket.filter(|ticket| ticket.at > self.last_throttle) else {
            return;
        };
        let last_ok = self.last_ok;
        self.last_ok = self.last_ok.max(at);
        match self.streak {
            0 => {
                self.hinted = false;
                if self.burst > 1 && self.run_sent < self.burst_sent && self.outlasts_the_floor(rules) {
                    self.run_sent = self.burst_sent;
                    self.run = 0;
                }
                self.run = self.run.saturating_add(1);
                self.since = self.since.saturating_add(u8::from(binding));
                if self.gap > 0 && self.since >= self.need {
                    self.step();
                }
            }
            1 if self.only_soft => self.pardon(at, again, rules),
            _ => self.recover(at, last_ok, again, rules),
        }
    }

    /// The first success after a lone headerless 403: that one was about its URL, unless the same URL has been served now.
    fn pardon(&mut self, at: Time, again: bool, rules: &Rules) {
        if again && self.gap < self.hi && !self.is_in_burst(rules) {
            self.judge(None, rules);
            self.judged = false;
        }
        if self.hi == 0 {
            // The trial has ended with that, and nothing else measures it.
            self.hi = self.gap;
        }
        self.lo = self.lo.min(self.hi);
        self.streak = 0;
        if !self.was_warm {
            self.warm_until = at;
        }
    }

    /// The first success after a streak of refusals.
    fn recover(&mut self, at: Time, last_ok: Time, again: bool, rules: &Rules) {
        // When it was let go; what came after that was nobody asking.
        let cycle = at.min(self.hold_until).since(self.run_sent);
        // All of it was sent in the first half of the time.
        let was_burst = self.run > 1 && self.burst != 1 && last_ok.since(self.run_sent).saturating_mul(2) < cycle;
        let is_ours = again || self.run <= 1 || (was_burst && self.streak > CHANCE);
        if self.only_soft && is_ours {
            // Not the URLs: one that was refused has been served, or hardly any is, or a firewall has minded a burst.
            self.judge(None, rules);
        }
        if self.hi == 0 && self.judged {
            let waited = at.min(self.hold_until).since(last_ok.max(self.run_sent));
            self.learn(cycle, waited, was_burst, rules);
        }
        self.end_streak();
        self.gap = if self.hi > 0 && self.evidence == 0 { self.hi.min(ms(rules.spacing).max(1)) } else { self.hi };
        self.run_sent = at;
        self.burst_sent = at;
        self.run = 1;
        self.out = 1;
    }

    /// The gap anew, from what was served between two streaks and how long that took.
    fn learn(&mut self, cycle: Duration, waited: Duration, was_burst: bool, rules: &Rules) {
        let cap = ms(rules.max_cooldown).max(1);
        let run = self.run.max(1);
        let is_told = self.streak >= 2 || self.hinted;
        if was_burst && (is_told || self.burst > 1) {
            // A firewall's ban outlasts its window by far, so that nothing shorter is known to be too short.
            let lo = if self.only_soft { 0 } else { self.tried };
            let hi = ms(cycle).clamp(1, cap);
            if self.gap > 0 || self.only_soft {
                self.relearn(run, 1, lo, hi);
            } else {
                self.relearn(1, 0, lo, hi);
                self.need = u8::try_from(run).unwrap_or(u8::MAX);
            }
        } else if self.burst > 1 {
            // No burst after all, but tokens saved up.
            self.relearn(1, self.burst, 0, ms((cycle / u32::from(run)).min(waited)).clamp(1, cap));
        } else if self.gap == 0 {
            let lo = if run == 1 && !self.only_soft { self.tried } else { 0 };
            let hi = ms((cycle / u32::from(run)).min(waited)).clamp(1, cap);
            let evidence = if self.run == 1 && hi > OUTAGE { 0 } else { self.run };
            self.relearn(1, evidence, lo, hi);
        } else if self.streak >= 2 {
            // Two in a row may be chance where little is kept apart; the third is not.
            let most = self.gap.max(ms(rules.spacing)).saturating_mul(4);
            let waited = if self.streak == 2 { ms(waited).min(most) } else { ms(waited) };
            let lo = match run {
                _ if self.only_soft => 0,
                1 => self.tried,
                _ => self.gap,
            };
            self.relearn(1, u16::from(self.evidence / 4).max(1), lo, waited.max(self.gap).clamp(1, cap));
        } else if run >= QUIET {
            self.hi = self.gap;
        } else {
            self.lo = self.gap;
            self.hi = ms(waited).min(self.gap.saturating_add(self.gap / 8)).min(cap).max(self.gap);
            self.need = self.evidence;
            self.since = 0;
        }
    }

    fn relearn(&mut self, burst: u16, evidence: u16, lo: u32, hi: u32) {
        self.burst = burst;
        self.evidence = u8::try_from(evidence).unwrap_or(u8::MAX).min(MAX_EVIDENCE);
        self.lo = lo.min(hi);
        self.hi = hi;
        self.since = 0;
        self.need = self.evidence.max(1);
        self.patience = PATIENCE;
    }

    /// Enough successes at this gap: try a smaller one, or be content.
    fn step(&mut self) {
        self.since = 0;
        if self.is_on_trial() {
            // More than the limit would have let through: there is none, or another one, which the next streak will show.
            self.forget_gap();
            return;
        }
        if self.gap < self.hi {
            if self.gap < self.lo {
                // What was too short is no longer.
                self.lo = 0;
            }
            self.hi = self.gap;
            self.patience = PATIENCE;
            self.need = self.evidence;
        }
        if self.hi - self.lo > self.hi / 7 {
            let middle = self.lo + (self.hi - self.lo) / 2;
            self.gap = middle.max(self.hi - self.hi / 3);
        } else if self.need > self.evidence {
            self.gap = self.hi - self.hi / REPROBE;
            self.need = self.evidence;
        } else {
            self.need = self.patience.max(self.evidence + 1);
        }
        if self.gap < SMALLEST {
            self.forget_gap();
        }
    }

    // --- other news -----------------------------------------------------------------------------------------------

    /// Nothing is left of the server's quota until its reset: holds the host, and counts nothing.
    pub(crate) fn used_up(&mut self, now: Time, reset: Duration, rules: &Rules) {
        self.quota_left = false;
        let until = now.after(self.guarded(reset).min(rules.max_cooldown));
        if until > self.hold_until {
            self.hold_until = until;
            self.hinted = true;
        }
    }

    /// A success said that something is left of the server's quota: it says by itself when to stop, unless it has
    /// refused while something was left.
    pub(crate) fn is_paced_by_the_server(&mut self) {
        self.quota_left = true;
        if !self.quota_lies {
            self.forget_gap();
        }
    }

    /// Holds the host back as a refusal would, but counts nothing.
    pub(crate) fn penalize(&mut self, now: Time, hold: Duration, rules: &Rules) {
        self.forget_if_cold(now);
        self.only_soft = false;
        self.hold_for(now, hold.min(rules.max_cooldown), rules);
    }

    fn forget_gap(&mut self) {
        (self.gap, self.hi, self.lo, self.burst) = (0, 0, 0, 0);
    }

    /// A streak lives as long as the host is warm; a gap outlives it.
    fn forget_if_cold(&mut self, now: Time) {
        if self.streak > 0 && self.is_cold(now) {
            let Self { short_hints, quota_lies, .. } = *self;
            *self = Self { short_hints, quota_lies, ..Self::begin(now, 0) };
        } else if self.streak > 0 && self.gap > 0 && now >= self.warm_until.max(self.hold_until).max(self.spaced_until)
        {
            self.end_streak();
            (self.hold, self.run) = (0, 0);
        }
    }

    fn end_streak(&mut self) {
        if self.hi == 0 {
            self.hi = self.gap;
        }
        self.lo = self.lo.min(self.hi);
        self.streak = 0;
        self.judged = false;
        self.early = false;
        self.hinted = false;
    }

    fn hold_for(&mut self, now: Time, hold: Duration, rules: &Rules) {
        self.hold_until = self.hold_until.max(now.after(hold));
        self.warm_until = self.warm_until.max(self.hold_until.after(rules.warm_for));
    }

    /// What a server asks for, and what it is known to mean.
    fn guarded(&self, asked: Duration) -> Duration {
        if self.short_hints { asked.saturating_add(GUARD) } else { asked }
    }
}

/// Milliseconds, rounded up.
pub(super) fn ms(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

fn span(ms: u32) -> Duration {
    Duration::from_millis(ms.into())
}

#[cfg(test)]
mod tests;
