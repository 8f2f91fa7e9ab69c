//! Headerless 403s: of a URL that is forbidden, of a host that means "slower", of a firewall.

use super::*;

/// The gap and its bracket.
fn knowledge(host: &Host) -> (Duration, (Duration, Duration)) {
    (host.pace.gap(), host.pace.bracket())
}

#[test]
fn a_lone_403_teaches_nothing() {
    let mut cold = Host::new();
    cold.served();
    cold.refused(FORBIDDEN);
    assert_eq!(cold.held(), secs(2));
    cold.served();
    cold.later(RULES.spacing);
    assert!(cold.pace.is_cold(cold.now), "and does not make a cold host warm");

    let mut content = Host::with_gap(30);
    let mut trying = Host::with_gap(30);
    trying.served();
    assert!(trying.pace.gap < trying.pace.hi);
    for host in [&mut content, &mut trying] {
        let before = knowledge(host);
        host.refused(FORBIDDEN);
        assert_eq!(knowledge(host), before);
    }
    let before = knowledge(&content);
    content.served();
    assert_eq!((knowledge(&content), content.pace.streak()), (before, 0));
}

#[test]
fn a_lone_403_does_not_suspend_the_gap() {
    let mut host = Host::with_gap(30);
    let last = host.at();
    let refused = host.refused(FORBIDDEN);
    assert_eq!(refused, last + secs(30));
    assert_eq!(host.served(), last + secs(60));
}

#[test]
fn any_number_of_them_may_be_forbidden_urls() {
    for count in 1..10 {
        let mut host = Host::new();
        host.play(20, limit(1, secs(25)));
        let before = knowledge(&host);
        assert_eq!(host.pace.gap, host.pace.hi, "nothing shorter is being tried");
        for _ in 0..count {
            host.refused(FORBIDDEN);
        }
        host.served();
        assert_eq!((knowledge(&host), host.pace.streak()), (before, 0), "{count}");
    }
}

#[test]
fn a_403_that_ends_when_the_same_request_is_repeated_ends_the_trial_of_a_shorter_gap() {
    let mut host = Host::with_gap(30);
    host.served();
    assert_eq!(host.pace.gap(), secs(20));
    host.refused(FORBIDDEN);
    host.served_again();
    assert_eq!(knowledge(&host), (secs(30), (secs(20), secs(30))));
}

#[test]
fn a_trial_that_a_403_has_ended_does_not_hide_the_next_refusal() {
    let mut host = Host::with_gap(30);
    host.served();
    host.refused(FORBIDDEN);
    host.served_again();
    host.refused(HEADERLESS);
    host.served();
    assert!(host.pace.gap() > secs(30), "{:?}", host.pace.gap());
}

#[test]
fn several_that_end_when_one_of_them_is_repeated_are_the_hosts_word() {
    let mut host = Host::new();
    host.served();
    for _ in 0..2 {
        host.refused(FORBIDDEN);
    }
    let served = host.served_again();
    assert_eq!(knowledge(&host), (served, (secs(0), served)));
}

#[test]
fn the_403s_of_one_request_are_its_own() {
    let mut host = Host::new();
    host.served();
    host.refused(FORBIDDEN);
    host.refused(Refusal { again: true, ..FORBIDDEN });
    assert_eq!((host.pace.streak(), host.held()), (1, secs(2)));
}

#[test]
fn they_never_hold_longer_than_a_minute() {
    let mut host = Host::with_gap(300);
    for _ in 0..12 {
        host.refused(FORBIDDEN);
        assert!(host.held() <= secs(60), "{:?}", host.held());
    }
    host.refused(HEADERLESS);
    assert!(host.held() > secs(60));
}

#[test]
fn two_in_a_row_behind_a_burst_may_be_chance() {
    let mut host = Host::new();
    host.play(10, |_| true);
    for _ in 0..2 {
        host.refused(FORBIDDEN);
    }
    assert_eq!(host.held(), secs(4));
    host.served();
    assert_eq!((host.pace.gap(), host.pace.streak()), (secs(0), 0));
}

#[test]
fn a_firewalls_ban_is_learnt_as_a_burst() {
    let mut host = Host::new();
    host.play(10, |_| true);
    for _ in 0..5 {
        host.refused(FORBIDDEN);
    }
    let again = host.served();
    assert_eq!((host.pace.burst, host.pace.gap()), (10, again / 10));
    // It outlasts what the firewall counts in by far, so that nothing shorter is known to be too short.
    assert_eq!(host.pace.bracket().0, secs(0));
}
