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
    // Fewer refusals and more feeds with the gate (second row) than without (first row), and no pacing for the healthy.
    for throttling in ["headerless", "Retry-After"] {
        let [without, gate, _] = rows(out, throttling);
        assert!(number(&gate[REFUSED]) < number(&without[REFUSED]), "{out}");
        assert!(number(&gate[SERVED]) > number(&without[SERVED]), "{out}");
    }
    let [_, gate, tuned] = rows(out, "healthy");
    for row in [gate, tuned] {
        assert_eq!(row[..=PACING], ["12", "0", "12/12", "0", "0", "0"], "{out}");
    }
    assert_eq!(out.matches('✔').count(), 8, "{out}");
    assert!(!out.contains('✘'), "{out}");
    // A timeline: a line per provider and client, the healthy one without a refusal and without pacing.
    let lanes = |provider| out.lines().filter(move |line| line.starts_with(&format!("{provider:13} ")));
    assert_eq!(lanes("Retry-After").count(), 3, "{out}");
    let throttled: String = lanes("headerless").collect();
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
    for text in ["headerless", "Retry-After", "healthy", "no gate", "gate, tuned", "scaled 1:25"] {
        assert!(svg.contains(text), "no {text:?} in the picture");
    }
}

// Columns of the table, behind the names.
const REFUSED: usize = 1;
const SERVED: usize = 2;
const PACING: usize = 5;

/// The three rows of a provider: no gate, gate, tuned gate.
fn rows(out: &str, provider: &str) -> [Vec<String>; 3] {
    let first = format!("{provider:13}no gate ");
    let mut rows = out.lines().skip_while(|line| !line.starts_with(&first));
    ["no gate", "gate", "gate, tuned"].map(|client| {
        let row = rows.next().expect("three rows per provider");
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
    let broken = |without: &[Figures], gate: &[Figures], tuned: &[Figures]| {
        let claims = claims::check(without, gate, tuned);
        let broken: Vec<_> = claims.into_iter().filter(|claim| !claim.holds).map(|claim| claim.text).collect();
        broken.join("\n")
    };
    let without = [throttling(22, 1, 0), healthy(0, 12)];
    let gate = [throttling(8, 2, 10), healthy(0, 12)];
    let tuned = [throttling(2, 12, 0), healthy(0, 12)];

    assert_eq!(broken(&without, &gate, &tuned), "");
    // As many refusals are not fewer, as many feeds are not more.
    let refused = broken(&without, &[throttling(22, 2, 10), healthy(0, 12)], &tuned);
    assert!(refused.starts_with("headerless: fewer refusals") && refused.lines().count() == 1, "{refused}");
    let served = broken(&without, &[throttling(8, 1, 11), healthy(0, 12)], &tuned);
    assert!(served.starts_with("headerless: more feeds") && served.lines().count() == 1, "{served}");
    // One nanosecond of pacing is not zero.
    let paced = broken(&without, &[throttling(8, 2, 10), healthy(1, 12)], &tuned);
    assert!(paced.starts_with("healthy: the gate gets every feed") && paced.lines().count() == 1, "{paced}");
    let paced = broken(&without, &gate, &[throttling(2, 12, 0), healthy(1, 12)]);
    assert!(paced.starts_with("healthy: the tuned gate gets every feed") && paced.lines().count() == 1, "{paced}");
    let lost = broken(&without, &[throttling(8, 2, 9), healthy(0, 12)], &tuned);
    assert!(lost.starts_with("no caller behind a gate") && lost.lines().count() == 1, "{lost}");
    let shed = broken(&without, &gate, &[throttling(2, 11, 1), healthy(0, 12)]);
    assert!(shed.starts_with("the tuned gate gets every feed") && shed.lines().count() == 1, "{shed}");
}
