//! Checks of the simulator itself, made before every report: a provider that contradicts itself would make it worthless.

use std::time::Duration;

use crate::client::Policy;
use crate::draw::Seed;
use crate::load::Load;
use crate::provider::{Hints, Kind, Provider};
use crate::run::{Cell, run};

const MILLISECOND: Duration = Duration::from_millis(1);
const REQUESTS: usize = 20;

/// Panics on the first contradiction. (That a clairvoyant schedule is accepted in full, every run checks for its own.)
pub(crate) fn all(kinds: &[Kind], seeds: &[Seed]) {
    for &kind in kinds {
        for &seed in seeds {
            nothing_is_accepted_sooner(kind, seed);
            for &hints in kind.hints().iter().filter(|hints| matches!(hints, Hints::Exact | Hints::TooLong)) {
                who_waits_as_told_is_accepted(kind, hints, seed);
            }
        }
        the_same_seed_is_the_same_run(kind, seeds[0]);
    }
}

/// The clairvoyant client is no slower than it has to be.
fn nothing_is_accepted_sooner(kind: Kind, seed: Seed) {
    let draw = || Provider::draw(kind, Hints::None, seed, REQUESTS);
    let mut provider = draw();
    let mut sends: Vec<Duration> = Vec::new();
    for path in 0..REQUESTS as u64 {
        let asked = sends.last().map_or(Duration::ZERO, |last| *last + MILLISECOND);
        let send = provider.earliest(asked);
        provider.ask(send, path, 0);
        if send > asked {
            let mut twin = draw();
            for (path, send) in (0..).zip(&sends) {
                twin.ask(*send, path, 0);
            }
            let sooner = twin.ask(send - MILLISECOND, path, 0);
            assert!(!sooner.status.is_success(), "{kind:?} {seed:?} accepts request {path} before {send:?}");
        }
        sends.push(send);
    }
}

fn who_waits_as_told_is_accepted(kind: Kind, hints: Hints, seed: Seed) {
    let mut provider = Provider::draw(kind, hints, seed, REQUESTS);
    let mut now = Duration::ZERO;
    let mut told = false;
    for path in 0..10 * REQUESTS as u64 {
        let answer = provider.ask(now, path, 0);
        // Others behind the same address may be quicker than whoever waits for longer than asked.
        let rivals = kind == Kind::SharedAddress && hints == Hints::TooLong;
        let kept = answer.status.is_success() || !told || rivals;
        assert!(kept, "{kind:?} {hints:?} {seed:?} does not keep its word at {now:?}");
        told = answer.asked.is_some();
        now += answer.asked.unwrap_or(MILLISECOND);
    }
}

fn the_same_seed_is_the_same_run(kind: Kind, seed: Seed) {
    let cell = Cell { kind, hints: Hints::None, load: Load::Batch(REQUESTS), policy: Policy::Learned };
    let record = || run(cell, seed, false).record;
    assert_eq!(record(), record(), "{kind:?} {seed:?}");
}
