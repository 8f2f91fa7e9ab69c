//! A pace as one line of text: how the scripts on a shared server keep it.
//!
//! Integers with one space between them. Instants are milliseconds of the server's clock, and zero is never.
//! `src/shared/scripts/pace.lua` reads and writes the same.

use super::memory::{Lesson, Memory, Moment};

/// The largest integer that the scripts can count to: theirs is the arithmetic of floating-point numbers.
const INSTANT: u64 = (1 << 53) - 1;
const BYTE: u64 = u8::MAX as u64;
const SHORT: u64 = u16::MAX as u64;
const WORD: u64 = u32::MAX as u64;
const FLAGS: u64 = (1 << 9) - 1;

/// The most that there may be in each place.
const MOST: [u64; 21] = [
    INSTANT, INSTANT, INSTANT, INSTANT, WORD, INSTANT, INSTANT, INSTANT, WORD, WORD, WORD, WORD, WORD, SHORT, SHORT,
    SHORT, BYTE, BYTE, BYTE, BYTE, FLAGS,
];

/// Nothing unless [`write`] may have written it: what is on the server may be anybody's.
pub(crate) fn read(text: impl AsRef<[u8]>, server_now_ms: u64) -> Option<Memory> {
    let mut parts = std::str::from_utf8(text.as_ref()).ok()?.split(' ');
    let mut numbers = [0; MOST.len()];
    for (number, most) in numbers.iter_mut().zip(MOST) {
        *number = parts.next().and_then(integer).filter(|number| *number <= most)?;
    }
    if parts.next().is_some() {
        return None;
    }
    let [hold_until, spaced_until, warm_until, last_throttle, streak, last_ok, burst_sent, run_sent, rest @ ..] =
        numbers;
    let [hold_ms, gap_ms, hi_ms, lo_ms, tried_ms, burst, out, run, since, need, patience, evidence, flags] = rest;
    let moment = |at| moment(at, server_now_ms);
    let flag = |place: u32| flags & (1 << place) != 0;
    let lesson = Lesson {
        burst_sent_ms: moment(burst_sent),
        last_ok_ms: moment(last_ok),
        run_sent_ms: moment(run_sent),
        hold_ms,
        gap_ms,
        hi_ms,
        lo_ms,
        tried_ms,
        run,
        since,
        need,
        patience,
        evidence,
        burst,
        out,
        only_soft: flag(0),
        was_warm: flag(1),
        judged: flag(2),
        early: flag(3),
        extends: flag(4),
        hinted: flag(5),
        short_hints: flag(6),
        quota_left: flag(7),
        quota_lies: flag(8),
    };
    Some(Memory {
        hold_until_ms: moment(hold_until),
        spaced_until_ms: moment(spaced_until),
        warm_until_ms: moment(warm_until),
        last_throttle_ms: moment(last_throttle),
        streak,
        learned: Some(lesson),
    })
}

/// Where reactive pacing has nothing to say there are zeros, which learned pacing takes for a beginning.
pub(crate) fn write(memory: &Memory, server_now_ms: u64) -> String {
    let nothing = Lesson::default();
    let lesson = memory.learned.as_ref().unwrap_or(&nothing);
    let instant = |moment| instant(moment, server_now_ms);
    let flags = [
        lesson.only_soft,
        lesson.was_warm,
        lesson.judged,
        lesson.early,
        lesson.extends,
        lesson.hinted,
        lesson.short_hints,
        lesson.quota_left,
        lesson.quota_lies,
    ];
    let numbers = [
        instant(memory.hold_until_ms),
        instant(memory.spaced_until_ms),
        instant(memory.warm_until_ms),
        instant(memory.last_throttle_ms),
        memory.streak,
        instant(lesson.last_ok_ms),
        instant(lesson.burst_sent_ms),
        instant(lesson.run_sent_ms),
        lesson.hold_ms,
        lesson.gap_ms,
        lesson.hi_ms,
        lesson.lo_ms,
        lesson.tried_ms,
        lesson.burst,
        lesson.out,
        lesson.run,
        lesson.since,
        lesson.need,
        lesson.patience,
        lesson.evidence,
        flags.iter().rev().fold(0, |bits, flag| bits << 1 | u64::from(*flag)),
    ];
    let parts: Vec<_> = numbers.iter().zip(MOST).map(|(number, most)| number.min(&most).to_string()).collect();
    parts.join(" ")
}

/// Digits and nothing else: no sign, which `parse` would take.
fn integer(part: &str) -> Option<u64> {
    part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok())?
}

fn moment(at: u64, now: u64) -> Moment {
    let signed = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
    (at > 0).then(|| signed(at) - signed(now))
}

fn instant(moment: Moment, now: u64) -> u64 {
    // What is beyond the beginning of the server's clock is still not "never".
    moment.map_or(0, |moment| now.saturating_add_signed(moment).max(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: u64 = 1_700_000_000_000;

    fn any_numbers() -> impl Strategy<Value = Vec<u64>> {
        let number = |most| prop_oneof![Just(0), Just(most), 0..=most, 0..=most.min(300)];
        MOST.map(number).to_vec()
    }

    fn text(numbers: &[u64]) -> String {
        numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_as_it_was(numbers in any_numbers(), now in prop_oneof![Just(0), Just(NOW), 0..=INSTANT]) {
            let text = text(&numbers);
            let memory = read(&text, now);
            prop_assert!(memory.is_some(), "{text}");
            prop_assert_eq!(memory.map(|memory| write(&memory, now)), Some(text));
        }

        #[test]
        fn a_number_beyond_its_place_is_none(numbers in any_numbers(), place in 0..MOST.len(), beyond in 1..=u64::from(u32::MAX)) {
            let mut numbers = numbers;
            numbers[place] = MOST[place] + beyond;
            prop_assert_eq!(read(text(&numbers), NOW), None);
        }

        #[test]
        fn no_text_does_any_harm(text in any::<Vec<u8>>(), digits in "[0-9 ]{0,200}", now in any::<u64>()) {
            read(text, now);
            read(digits, now);
        }
    }

    #[test]
    fn moments_are_counted_from_the_servers_now() {
        let memory = read(format!("{} {NOW} 0{}", NOW + 5, " 0".repeat(18)), NOW).unwrap();
        assert_eq!((memory.hold_until_ms, memory.spaced_until_ms, memory.warm_until_ms), (Some(5), Some(0), None));
    }

    #[test]
    fn what_the_server_cannot_count_to_is_written_as_the_most_it_can() {
        let memory = Memory {
            hold_until_ms: Some(i64::MAX),
            warm_until_ms: Some(i64::MIN),
            streak: u64::MAX,
            ..Memory::default()
        };
        assert_eq!(write(&memory, NOW), format!("{INSTANT} 0 1 0 {WORD}{}", " 0".repeat(16)));
    }
}
