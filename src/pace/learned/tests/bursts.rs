//! Hosts that take several requests at once, and those that only seem to.

use super::*;

#[test]
fn a_burst_is_found_and_repeated() {
    let mut host = Host::new();
    let mut serves = limit(5, secs(60));
    let sends = host.play(6, &mut serves);
    assert_eq!(sends[5..].iter().map(|send| send.0).collect::<Vec<_>>(), [0, 2, 6, 14, 30, 62].map(secs));

    // It may have been an outage: the host is asked at the pace of a warm one until it refuses again.
    let sends = host.play(6, &mut serves);
    assert_eq!(sends.iter().map(|send| send.0).collect::<Vec<_>>(), [63, 64, 65, 66, 67, 124, 125].map(secs));
    assert_eq!(refusals(&sends), 1);
    assert_eq!((host.pace.burst, host.pace.gap()), (5, secs(62) / 5), "on average");
}

#[test]
fn an_outage_is_not_taken_for_a_limit() {
    for served in [1, 5] {
        let mut host = Host::new();
        host.play(served, |_| true);
        for _ in 0..7 {
            host.refused(HEADERLESS);
        }
        let begun = host.served();
        host.play(served + 10, |_| true);
        assert!(host.at() - begun <= secs(served as u64 + 10), "{served}: {:?}", host.at() - begun);
        assert_eq!(host.pace.gap(), secs(0));
    }
}

#[test]
fn the_gap_between_bursts_is_bisected_too() {
    let mut host = Host::new();
    host.play(100, limit(5, secs(60)));
    assert_eq!(host.pace.burst, 5);
    let gap = host.pace.bracket().1 * 5;
    assert!(gap >= secs(59) && gap <= secs(60) * 7 / 6, "{gap:?}");
}

#[test]
fn a_burst_that_begins_too_early_costs_no_more_than_waiting_for_the_good_gap() {
    let mut host = Host::with_burst(5);
    let begun = host.at();
    host.play(4, |_| true);
    let next = host.served();
    assert_eq!(next, begun + secs(62));
    host.play(4, |_| true);
    let tried = host.refused(HEADERLESS);
    assert!(tried < next + secs(62), "{tried:?}");
    assert_eq!(host.served(), next + secs(62));
    assert_eq!(host.pace.burst, 5);
}

#[test]
fn a_burst_that_is_refused_half_way_becomes_a_smaller_one() {
    let mut host = Host::with_burst(6);
    let begun = host.at();
    host.play(2, |_| true);
    host.refused(HEADERLESS);
    assert!(host.served() <= begun + secs(62));
    assert_eq!(host.pace.burst, 3);
}

#[test]
fn a_bucket_of_tokens_is_not_taken_for_a_window() {
    let mut host = Host::new();
    let mut serves = bucket(5, secs(10));
    host.play(7, &mut serves);
    // Tokens saved up hide that a gap is too short until as many are gone.
    assert_eq!((host.pace.burst, host.pace.evidence), (1, 5));

    let sends = host.play(200, &mut serves);
    let good = host.pace.bracket().1;
    assert_eq!(host.pace.burst, 1);
    assert!(good >= secs(8) && good <= secs(12), "{good:?}");
    assert!(refusals(&sends) <= 200 / 5, "{}", refusals(&sends));
}

/// A host of whose requests before its first refusal nobody has kept a record, served again a good minute later.
fn unseen() -> Host {
    let mut host = Host::new();
    host.pace.throttled(host.now, None, HEADERLESS, &RULES);
    for _ in 0..4 {
        host.refused(HEADERLESS);
    }
    assert_eq!((host.served(), host.pace.bracket().1), (secs(62), secs(62)));
    host
}

#[test]
fn what_nobody_has_recorded_may_have_been_a_burst() {
    let mut host = unseen();
    assert_eq!(host.served(), secs(63), "one send at the floor's pace will tell");
    assert_eq!((host.pace.gap(), host.pace.bracket()), (secs(0), (secs(0), secs(0))));
    // The next streak is seen from its beginning.
    host.play(3, |_| true);
    for _ in 0..6 {
        host.refused(HEADERLESS);
    }
    host.served();
    host.play(4, |_| true);
    host.refused(HEADERLESS);
    host.served();
    assert_eq!(host.pace.burst, 5);
}

#[test]
fn a_gap_of_which_nobody_has_seen_the_beginning_is_believed_when_the_next_send_is_refused() {
    let mut host = unseen();
    assert_eq!(host.refused(HEADERLESS), secs(63));
    assert_eq!(host.served(), secs(62 + 62));
    assert_eq!((host.pace.burst, host.pace.gap()), (1, secs(62)));
}
