//! The rules of pacing exist twice. Here both are told the same, and must know the same after every step.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use self::history::{
    History, any_history, any_pacing, any_rules, any_sequel, bit, edges, recalled, rules, rules_command, seen,
};
use self::server::{Server, in_lua};
use self::stored::{NOW, any_text};
use crate::pace::{Pacing, wire};

mod history;
mod provider;
mod server;
mod stored;

const RULES: [u64; 4] = [2_000, 900_000, 1_000, 120_000];

const NAMES: &str = "hold_until spaced_until warm_until last_throttle streak last_ok burst_sent run_sent hold gap hi lo \
    tried burst out run since need patience evidence flags ready is_cold is_serial answer";
/// What both kinds of pacing have comes first.
const COMMON: usize = 5;
/// So many are stored.
const FIELDS: usize = 21;

/// The same cases every time; `PROPTEST_CASES` says how many, of the cheap ones some more.
fn check<S: Strategy>(times: u32, strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { failure_persistence: None, ..Config::default() };
    let config = Config { cases: config.cases * times, ..config };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    if let Err(failure) = TestRunner::new_with_rng(config, random).run(&strategy, test) {
        panic!("{failure}");
    }
}

fn named(seen: &str) -> Vec<(&str, &str)> {
    NAMES.split_whitespace().zip(seen.split(' ')).collect()
}

// --- the same after every step ----------------------------------------------------------------------------------------

fn agrees(server: &Server, history: &History) -> Result<(), TestCaseError> {
    let told = history.tell();
    let seen = in_lua(&mut server.connect(), &told.commands);
    prop_assert_eq!(seen.len(), told.expected.len());
    for (step, (seen, expected)) in seen.iter().zip(&told.expected).enumerate() {
        if let Some(expected) = expected {
            prop_assert_eq!(named(seen), named(expected), "after step {}, {}", step, told.commands[step]);
        }
    }
    Ok(())
}

#[test]
fn the_scripts_pace_a_host_as_this_process_does() {
    let server = Server::start();
    check(1, any_history(), |history| agrees(&server, &history));
}

#[test]
fn so_they_do_whatever_they_find_stored() {
    let server = Server::start();
    check(8, any_sequel(), |history| agrees(&server, &history));
}

#[test]
fn so_they_do_where_one_rule_ends_and_another_begins() {
    let server = Server::start();
    for history in edges() {
        agrees(&server, &history).unwrap();
    }
}

// --- what anybody may have written ------------------------------------------------------------------------------------

#[test]
fn what_is_stored_is_brought_into_its_range_as_when_it_is_recalled() {
    let server = Server::start();
    check(4, (any_text(), any_pacing(), any_rules()), |(text, pacing, numbers)| {
        let commands = [rules_command(pacing, numbers), format!("unpack {NOW} {text}"), format!("recall {NOW} {text}")];
        let [_, unpacked, clamped] = &in_lua(&mut server.connect(), &commands)[..] else { unreachable!() };
        prop_assert!(unpacked.starts_with(&format!("{text} ")), "{text} is packed as {unpacked}");
        let pace = seen(&recalled(&text, pacing, NOW, &rules(numbers)), NOW);
        // Reactive pacing leaves alone what only learned pacing has.
        let own = if pacing == Pacing::Learned { FIELDS } else { COMMON };
        let is_another = named(&text)[..own] != named(&pace)[..own];
        let expected = format!("{pace} {}", bit(is_another));
        let (mut clamped, mut expected) = (named(clamped), named(&expected));
        clamped.drain(own..FIELDS);
        expected.drain(own..FIELDS);
        prop_assert_eq!(clamped, expected);
        Ok(())
    });
}

#[test]
fn a_clock_that_is_set_back_makes_nobody_wait_longer_than_the_rules_allow() {
    let server = Server::start();
    check(1, (any_text(), any_pacing(), any_rules()), |(text, pacing, numbers)| {
        let commands = [rules_command(pacing, numbers), format!("recall {NOW} {text}")];
        let seen = in_lua(&mut server.connect(), &commands).remove(1);
        let ready: u64 = named(&seen)[FIELDS].1.parse().unwrap();
        let [_, longest, spacing, _] = numbers;
        // A gap is a millisecond at least.
        prop_assert!(ready <= NOW + longest.max(spacing).max(1), "{}", seen);
        Ok(())
    });
}

#[test]
fn no_text_that_is_not_a_pace_is_taken_for_one() {
    let good = format!("{NOW} 0 0 0 1{}", " 0".repeat(16));
    let with = |place: usize, word: &str| {
        let mut words: Vec<_> = good.split(' ').collect();
        words[place] = word;
        words.join(" ")
    };
    let (instant, word, short, byte) = ("9007199254740992", "4294967296", "65536", "256");
    let too_large =
        [vec![instant; 4], vec![word], vec![instant; 3], vec![word; 5], vec![short; 3], vec![byte; 4], vec!["512"]];
    let too_large = too_large.concat().into_iter().enumerate();
    let mut hostile: Vec<(String, String)> =
        too_large.map(|(place, number)| (format!("too large in place {place}"), with(place, number))).collect();
    let others = [
        ("nothing", String::new()),
        ("a word", "pace".to_owned()),
        ("one field too few", good.rsplit_once(' ').unwrap().0.to_owned()),
        ("one field too many", format!("{good} 0")),
        ("a space in front", format!(" {good}")),
        ("a space behind", format!("{good} ")),
        ("two spaces", good.replacen(' ', "  ", 1)),
        ("a tab", good.replacen(' ', "\t", 1)),
        ("a line break behind", format!("{good}\n")),
        ("a zero byte", good.replacen(' ', " \0", 1)),
        ("a zero byte behind", format!("{good}\0")),
        ("an empty field", with(3, "")),
        ("a negative number", with(4, "-1")),
        ("a sign", with(4, "+1")),
        ("a fraction", with(4, "1.5")),
        ("an exponent", with(0, "1e3")),
        ("a hexadecimal number", with(4, "0x10")),
        ("not a number", with(4, "nan")),
        ("infinity", with(0, "inf")),
        ("a number beyond all bounds", with(0, &"9".repeat(400))),
        ("digits of another script", with(4, "١")),
        ("JSON", "{\"hold_until\":1}".to_owned()),
        ("Lua", "} error('no') --".to_owned()),
        ("a pattern", "%d+ (%d+".to_owned()),
        ("a megabyte of digits", "1".repeat(1 << 20)),
        ("a megabyte of fields", "1 ".repeat(1 << 19)),
    ];
    hostile.extend(others.map(|(name, text)| (name.to_owned(), text)));

    let mut commands = vec![rules_command(Pacing::Learned, RULES)];
    commands.extend(hostile.iter().map(|(_, text)| format!("unpack {NOW} {text}")));
    commands.extend([format!("unpack_missing {NOW}"), format!("unpack {NOW} {good}")]);
    let seen = in_lua(&mut Server::start().connect(), &commands);
    let taken: Vec<_> = hostile.iter().zip(&seen[1..]).filter(|(_, seen)| !seen.is_empty()).collect();
    assert!(taken.is_empty(), "{taken:?}");
    let read: Vec<_> = hostile.iter().filter(|(_, text)| wire::read(text, NOW).is_some()).collect();
    assert!(read.is_empty(), "{read:?}");
    let [missing, good] = &seen[commands.len() - 2..] else { unreachable!() };
    assert_eq!(missing, "", "a field that is not there");
    assert!(!good.is_empty() && wire::read(with(0, "1"), NOW).is_some(), "and what is one is");
}

// --- what another process has learnt ----------------------------------------------------------------------------------

/// A pace of which these are the first fields, and this the gap.
fn text(common: [u64; COMMON], gap: u64) -> String {
    let [hold_until, spaced_until, warm_until, last_throttle, streak] = common;
    format!(
        "{hold_until} {spaced_until} {warm_until} {last_throttle} {streak} 0 {NOW} {NOW} 0 {gap} {gap} 0 0 1 1 1 0 1 8 1 0"
    )
}

fn merged(pacing: Pacing, before: Option<&str>, other: &str) -> String {
    let mut commands = vec![rules_command(pacing, RULES)];
    commands.extend(before.map(|before| format!("unpack {NOW} {before}")));
    commands.push(format!("merge {NOW} {other}"));
    let seen = in_lua(&mut Server::start().connect(), &commands).pop().unwrap();
    seen.split(' ').take(FIELDS).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_another_process_has_learnt_only_extends_what_is_known() {
    let before = text([NOW + 5_000, NOW + 10, NOW + 90_000, NOW - 7, 1], 3_000);
    let other = text([NOW + 2_000, NOW + 900, NOW + 80_000, NOW - 1, 4], 9_000);
    let both = text([NOW + 5_000, NOW + 900, NOW + 90_000, NOW - 7, 4], 3_000);
    assert_eq!(merged(Pacing::Learned, Some(&before), &other), both);
    assert_eq!(merged(Pacing::Reactive, Some(&before), &other), both);
    let both = text([NOW + 5_000, NOW + 900, NOW + 90_000, NOW - 1, 4], 9_000);
    assert_eq!(merged(Pacing::Learned, Some(&other), &before), both);
}

#[test]
fn where_nothing_is_known_it_is_taken_as_it_is() {
    let other = text([NOW + 2_000, NOW + 900, NOW + 80_000, NOW - 1, 4], 9_000);
    assert_eq!(merged(Pacing::Learned, None, &other), other);
    let cold = text([NOW - 9_000, NOW - 9_000, NOW, NOW - 9_000, 2], 0);
    assert_eq!(merged(Pacing::Learned, Some(&cold), &other), other);
    assert_eq!(merged(Pacing::Reactive, Some(&cold), &other), other);
    let gap_alone = text([NOW - 9_000, NOW - 9_000, NOW, NOW - 9_000, 0], 3_000);
    assert_ne!(merged(Pacing::Learned, Some(&gap_alone), &other), other, "a learned gap is something known");
}
