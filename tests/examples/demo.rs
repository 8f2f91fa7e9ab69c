//! `examples/demo`: its figures, its pictures, its exit code.

use std::time::Duration;

use tokio::time::Instant;

use crate::program::{build, run};

#[path = "../../examples/demo/claims.rs"]
#[allow(dead_code, reason = "the demo reads all of it")]
mod claims;

#[tokio::test]
async fn the_demo_shows_what_the_gate_is_for_within_30_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let picture = dir.path().join("gate.svg");
    let demo = build("demo").await;
    let start = Instant::now();
    let done = run(&demo, ["--svg".as_ref(), picture.as_os_str()]).await;
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert_eq!(done.code, 0, "{done:?}");

    let out = &done.stdout;
    // Scaled down, and said so.
    assert!(out.contains("Scaled down 1:25"), "{out}");
    // Fewer refusals and more feeds with the gate than without.
    for throttling in ["headerless", "Retry-After"] {
        let [without, _, gate, tuned] = rows(out, throttling);
        assert!(number(&gate[REFUSED]) < number(&without[REFUSED]), "{out}");
        assert!(number(&gate[SERVED]) > number(&without[SERVED]), "{out}");
        // Told what is known it is never refused.
        assert_eq!(tuned[..PACING], ["12", "0", "12/12", "0", "0"], "{out}");
    }
    // With patience it gets everything without being told, and its memory saves refusals.
    let [_, reactive, gate, _] = rows(out, "headerless");
    assert_eq!(gate[SERVED], "12/12", "{out}");
    assert!(2 * number(&gate[REFUSED]) < number(&reactive[REFUSED]), "{out}");
    // No pacing for the healthy.
    for row in &rows(out, "healthy")[1..] {
        assert_eq!(row[..=PACING], ["12", "0", "12/12", "0", "0", "0"], "{out}");
    }
    assert_eq!(out.matches('✔').count(), 11, "{out}");
    assert!(!out.contains('✘'), "{out}");
    assert!(out.contains("learnt by the gate, scaled back: headerless "), "{out}");
    // A timeline: a line per provider and client, the healthy one without a refusal and without pacing.
    let lanes = |provider| out.lines().filter(move |line| line.starts_with(&format!("{provider:13} ")));
    assert_eq!(lanes("headerless").count(), 4, "{out}");
    let throttled: String = lanes("Retry-After").collect();
    for mark in ['●', '✕', '▲', '─'] {
        assert!(throttled.contains(mark), "no {mark} in:\n{out}");
    }
    let healthy: String = lanes("healthy").collect();
    assert!(healthy.contains('●') && !healthy.contains(['✕', '▲', '─']), "{out}");
    // For people: no escape codes in a pipe, and nothing wider than 100 columns.
    assert!(!out.contains('\x1b'), "{out}");
    for line in out.lines().filter(|line| !line.contains("gate.svg")) {
        assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
    }

    let svg = std::fs::read_to_string(&picture).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg:.200}");
    for text in ["headerless", "Retry-After", "healthy", "no gate", "reactive", "gate, tuned", "scaled 1:25"] {
        assert!(svg.contains(text), "no {text:?} in the picture");
    }
}

// Columns of the table, behind the names.
const REFUSED: usize = 1;
const SERVED: usize = 2;
const PACING: usize = 5;

/// The four rows of a provider.
fn rows(out: &str, provider: &str) -> [Vec<String>; 4] {
    let first = format!("{provider:13}no gate ");
    let mut rows = out.lines().skip_while(|line| !line.starts_with(&first));
    ["no gate", "reactive", "gate", "gate, tuned"].map(|client| {
        let row = rows.next().expect("four rows per provider");
        assert_eq!(row[13..26].trim_end(), client, "{out}");
        row[26..].split_whitespace().map(str::to_owned).collect()
    })
}

/// `8`, and of `2/12` the 2.
fn number(cell: &str) -> usize {
    cell.split('/').next().and_then(|number| number.parse().ok()).expect("a number")
}

#[tokio::test]
async fn the_demo_says_which_option_it_does_not_know() {
    let done = run(&build("demo").await, ["--speed"]).await;
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("--speed"), "{done:?}");
}

#[tokio::test]
async fn the_demo_says_at_once_which_picture_it_cannot_write() {
    let done = run(&build("demo").await, ["--svg", "/no/such/directory/gate.svg"]).await;
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("cannot write /no/such/directory/gate.svg"), "{done:?}");
    assert!(done.stdout.is_empty(), "{done:?}");
}

/// Each of the demo's claims fails when it is not true.
#[test]
fn the_demos_claims_can_fail() {
    use claims::Figures;

    let throttling = |refused, served, shed| Figures {
        provider: "headerless",
        throttles: true,
        patient: true,
        feeds: 12,
        sent: refused + served,
        refused,
        served,
        shed,
        lost: 12 - served - shed,
        ..Figures::default()
    };
    let healthy = |pacing, served| Figures {
        provider: "healthy",
        feeds: 12,
        sent: 12,
        served,
        lost: 12 - served,
        pacing: Duration::from_nanos(pacing),
        // Time behind the cap and time on the wire are nobody's fault.
        queued: Duration::from_secs(9),
        took: Duration::from_secs(9),
        ..Figures::default()
    };
    let fine = [
        [throttling(22, 1, 0), healthy(0, 12)],
        [throttling(44, 12, 0), healthy(0, 12)],
        [throttling(6, 12, 0), healthy(0, 12)],
        [throttling(0, 12, 0), healthy(0, 12)],
    ];
    let broken = |figures: &[[Figures; 2]; 4]| -> Vec<String> {
        let claims = claims::check(figures.each_ref().map(|way| &way[..]));
        claims.into_iter().filter(|claim| !claim.holds).map(|claim| claim.text).collect()
    };
    assert_eq!(broken(&fine), [""; 0]);

    const WITHOUT: usize = 0;
    const REACTIVE: usize = 1;
    const GATE: usize = 2;
    const TUNED: usize = 3;
    const THROTTLING: usize = 0;
    const HEALTHY: usize = 1;
    for (way, provider, figures, claim) in [
        // As many refusals are not fewer, as many feeds are not more.
        (WITHOUT, THROTTLING, throttling(6, 1, 0), "headerless: fewer refusals"),
        (REACTIVE, THROTTLING, throttling(12, 12, 0), "headerless: for less than half the refusals"),
        (WITHOUT, THROTTLING, throttling(22, 12, 0), "headerless: more feeds"),
        (GATE, THROTTLING, throttling(6, 11, 1), "headerless: who has the patience"),
        // One nanosecond of pacing is not zero.
        (REACTIVE, HEALTHY, healthy(1, 12), "healthy: reactive pacing gets every feed"),
        (GATE, HEALTHY, healthy(1, 12), "healthy: the gate gets every feed"),
        (TUNED, HEALTHY, healthy(1, 12), "healthy: the tuned gate gets every feed"),
        (REACTIVE, THROTTLING, throttling(44, 11, 0), "no caller behind a gate"),
        (TUNED, THROTTLING, throttling(1, 12, 0), "the tuned gate gets every feed"),
        (TUNED, THROTTLING, throttling(0, 11, 1), "the tuned gate gets every feed"),
    ] {
        let mut figures_now = fine.clone();
        figures_now[way][provider] = figures;
        let broken = broken(&figures_now);
        assert!(broken.len() == 1 && broken[0].starts_with(claim), "{claim}: {broken:?}");
    }
}
