//! A pace beyond the life of its process: what is kept of it, and how it comes back.
//!
//! All of it is kept, so that a host goes on exactly where it was. Instants are milliseconds from the moment of taking,
//! negative for what was before it: what has passed since is one subtraction, and a hold that is over still says how
//! long it has been. What comes back may have been written by anybody, so every number is brought into its range.

use std::time::Duration;

use super::learned::{MAX_EVIDENCE, MAX_PATIENCE, PATIENCE, ms};
use super::{Learned, Pace, Pacing, Reactive, Rules, Time};

/// What is kept of the pace of one host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub(crate) struct Memory {
    pub(super) hold_until_ms: Moment,
    pub(super) spaced_until_ms: Moment,
    pub(super) warm_until_ms: Moment,
    pub(super) last_throttle_ms: Moment,
    pub(super) streak: u64,
    /// What learned pacing knows beyond that.
    pub(super) learned: Option<Lesson>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub(super) struct Lesson {
    pub(super) burst_sent_ms: Moment,
    pub(super) last_ok_ms: Moment,
    pub(super) run_sent_ms: Moment,
    pub(super) hold_ms: u64,
    pub(super) gap_ms: u64,
    pub(super) hi_ms: u64,
    pub(super) lo_ms: u64,
    pub(super) tried_ms: u64,
    pub(super) run: u64,
    pub(super) since: u64,
    pub(super) need: u64,
    pub(super) patience: u64,
    pub(super) evidence: u64,
    pub(super) burst: u64,
    pub(super) out: u64,
    pub(super) only_soft: bool,
    pub(super) was_warm: bool,
    pub(super) judged: bool,
    pub(super) early: bool,
    pub(super) extends: bool,
    pub(super) hinted: bool,
    pub(super) short_hints: bool,
    pub(super) quota_left: bool,
    pub(super) quota_lies: bool,
}

/// Milliseconds from the moment of taking; `None` is never.
pub(super) type Moment = Option<i64>;

impl Pace {
    /// The last send that was recorded, as far as the pace remembers it.
    pub(crate) fn last_send(&self) -> Time {
        match self {
            Self::Learned(pace) => pace.burst_sent,
            Self::Reactive(_) => Time::default(),
        }
    }

    pub(crate) fn remember(&self, now: Time) -> Memory {
        match self {
            Self::Learned(pace) => learned_memory(pace, now),
            Self::Reactive(pace) => reactive_memory(pace, now),
        }
    }

    /// The pace as it is when so much time has `passed` since the memory was taken.
    pub(crate) fn recall(memory: &Memory, passed: Duration, pacing: Pacing, now: Time, rules: &Rules) -> Self {
        let then = Then { now, passed: i64::try_from(passed.as_millis()).unwrap_or(i64::MAX) };
        match pacing {
            Pacing::Learned => Self::Learned(learned(memory, then, rules)),
            Pacing::Reactive => Self::Reactive(reactive(memory, then, rules)),
        }
    }
}

impl Memory {
    /// When anything last happened, for putting the hosts used last first.
    pub(crate) fn last_use(&self) -> impl Ord + use<> {
        self.learned.as_ref().and_then(|lesson| lesson.burst_sent_ms).max(self.last_throttle_ms)
    }
}

// --- to a memory ------------------------------------------------------------------------------------------------------

fn reactive_memory(pace: &Reactive, now: Time) -> Memory {
    Memory {
        hold_until_ms: moment(pace.hold_until, now),
        spaced_until_ms: moment(pace.spaced_until, now),
        warm_until_ms: moment(pace.warm_until, now),
        last_throttle_ms: pace.last_throttle.and_then(|at| moment(at, now)),
        streak: pace.streak.into(),
        learned: None,
    }
}

fn learned_memory(pace: &Learned, now: Time) -> Memory {
    let lesson = Lesson {
        burst_sent_ms: moment(pace.burst_sent, now),
        last_ok_ms: moment(pace.last_ok, now),
        run_sent_ms: moment(pace.run_sent, now),
        hold_ms: pace.hold.into(),
        gap_ms: pace.gap.into(),
        hi_ms: pace.hi.into(),
        lo_ms: pace.lo.into(),
        tried_ms: pace.tried.into(),
        run: pace.run.into(),
        since: pace.since.into(),
        need: pace.need.into(),
        patience: pace.patience.into(),
        evidence: pace.evidence.into(),
        burst: pace.burst.into(),
        out: pace.out.into(),
        only_soft: pace.only_soft,
        was_warm: pace.was_warm,
        judged: pace.judged,
        early: pace.early,
        extends: pace.extends,
        hinted: pace.hinted,
        short_hints: pace.short_hints,
        quota_left: pace.quota_left,
        quota_lies: pace.quota_lies,
    };
    Memory {
        hold_until_ms: moment(pace.hold_until, now),
        spaced_until_ms: moment(pace.spaced_until, now),
        warm_until_ms: moment(pace.warm_until, now),
        last_throttle_ms: moment(pace.last_throttle, now),
        streak: pace.streak.into(),
        learned: Some(lesson),
    }
}

/// Rounded towards the future, so no wait gets shorter.
fn moment(at: Time, now: Time) -> Moment {
    if at == Time::default() {
        return None;
    }
    let ahead = i64::try_from(at.since(now).as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX);
    let ago = i64::try_from(now.since(at).as_millis()).unwrap_or(i64::MAX);
    Some(ahead - ago)
}

// --- and back ---------------------------------------------------------------------------------------------------------

/// Where the moments of a memory lie on this process's clock.
#[derive(Clone, Copy)]
struct Then {
    now: Time,
    /// Milliseconds since the memory was taken.
    passed: i64,
}

impl Then {
    fn instant(self, moment: Moment) -> Time {
        let Some(moment) = moment else {
            return Time::default();
        };
        let moment = moment.saturating_sub(self.passed);
        let distance = Duration::from_millis(moment.unsigned_abs());
        // What is beyond the beginning of this clock is still not "never".
        if moment < 0 { self.now.before(distance).max(Time(1)) } else { self.now.after(distance) }
    }

    fn past(self, moment: Moment) -> Time {
        self.instant(moment).min(self.now)
    }
}

impl Time {
    /// Zero when there is nothing before it.
    fn before(self, wait: Duration) -> Self {
        Self(self.0.saturating_sub(Self::at(wait).0))
    }
}

/// What both kinds of pacing have.
struct Common {
    hold_until: Time,
    spaced_until: Time,
    warm_until: Time,
    streak: u32,
}

fn common(memory: &Memory, then: Then, rules: &Rules) -> Common {
    let hold_until = then.instant(memory.hold_until_ms).min(then.now.after(rules.max_cooldown));
    Common {
        hold_until,
        spaced_until: then.instant(memory.spaced_until_ms).min(then.now.after(rules.spacing)),
        warm_until: then.instant(memory.warm_until_ms).min(hold_until.max(then.now).after(rules.warm_for)),
        streak: u32::try_from(memory.streak).unwrap_or(u32::MAX),
    }
}

fn reactive(memory: &Memory, then: Then, rules: &Rules) -> Reactive {
    let Common { hold_until, spaced_until, warm_until, streak } = common(memory, then, rules);
    let last_throttle = memory.last_throttle_ms.map(|moment| then.past(Some(moment)));
    Reactive { hold_until, spaced_until, warm_until, last_throttle, streak }
}

fn learned(memory: &Memory, then: Then, rules: &Rules) -> Learned {
    let Common { hold_until, spaced_until, warm_until, streak } = common(memory, then, rules);
    let wide = |n: u64| u16::try_from(n).unwrap_or(u16::MAX);
    let streak = u8::try_from(streak).unwrap_or(u8::MAX);
    let last_throttle = then.past(memory.last_throttle_ms);
    let Some(lesson) = &memory.learned else {
        return Learned { hold_until, spaced_until, warm_until, last_throttle, streak, ..Learned::begin(then.now, 0) };
    };
    let cap = ms(rules.max_cooldown).max(1);
    let capped = |ms: u64| u32::try_from(ms).unwrap_or(u32::MAX).min(cap);
    let counted = |n: u64, least: u64, most: u64| u8::try_from(n.clamp(least, most)).unwrap_or(u8::MAX);
    let gap = capped(lesson.gap_ms);
    // A lone 403 is pardoned, and changes nothing.
    let is_pardonable = streak == 1 && lesson.only_soft;
    let hi = match capped(lesson.hi_ms) {
        _ if gap == 0 => 0,
        // Only a streak that leads to measuring it anew may be without.
        0 if streak > 0 && !is_pardonable => 0,
        hi => hi.max(gap),
    };
    Learned {
        hold_until,
        spaced_until,
        warm_until,
        last_throttle,
        streak,
        burst_sent: then.past(lesson.burst_sent_ms),
        last_ok: then.past(lesson.last_ok_ms),
        run_sent: lesson.run_sent_ms.map_or(then.now, |moment| then.past(Some(moment))),
        hold: capped(lesson.hold_ms),
        gap,
        hi,
        // While what was too short is tried again it is longer than the gap.
        lo: capped(lesson.lo_ms).min(hi.max(gap)),
        tried: capped(lesson.tried_ms),
        run: wide(lesson.run),
        since: counted(lesson.since, 0, u8::MAX.into()),
        // With zero it would begin with a probe.
        need: counted(lesson.need, 1, u8::MAX.into()),
        patience: counted(lesson.patience, PATIENCE.into(), MAX_PATIENCE.into()),
        evidence: counted(lesson.evidence, 0, MAX_EVIDENCE.into()),
        // A gap without a burst is a burst of one, and a burst without a gap is none.
        burst: if gap > 0 { wide(lesson.burst).max(1) } else { 0 },
        out: wide(lesson.out),
        only_soft: lesson.only_soft,
        was_warm: lesson.was_warm,
        judged: lesson.judged,
        early: lesson.early,
        extends: lesson.extends,
        hinted: lesson.hinted,
        short_hints: lesson.short_hints,
        quota_left: lesson.quota_left,
        quota_lies: lesson.quota_lies,
    }
}

#[cfg(test)]
mod tests;
