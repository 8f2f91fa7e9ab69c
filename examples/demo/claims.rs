//! What the figures have to show. Counts only, and one exact zero: nothing here depends on how fast the machine is.

use std::time::Duration;

/// What one burst at one provider came to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    pub(crate) provider: &'static str,
    pub(crate) throttles: bool,
    /// Feeds asked for.
    pub(crate) feeds: usize,
    /// Requests the provider has seen.
    pub(crate) sent: usize,
    /// Of those, answered with 429.
    pub(crate) refused: usize,
    /// Feeds that arrived.
    pub(crate) served: usize,
    /// Feeds for which the caller got `RateLimited`, which says when to come back.
    pub(crate) shed: usize,
    /// Feeds for which the caller got the provider's 429.
    pub(crate) lost: usize,
    /// What all these requests together waited for the pace of the host.
    pub(crate) pacing: Duration,
    /// What they waited behind the cap on requests in flight.
    pub(crate) queued: Duration,
    /// When the last caller had its answer.
    pub(crate) took: Duration,
}

/// A sentence, and whether it is true.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) text: String,
    pub(crate) holds: bool,
}

impl Claim {
    fn new(holds: bool, text: impl Into<String>) -> Self {
        Self { text: text.into(), holds }
    }
}

/// The three slices hold the same providers in the same order.
pub(crate) fn check(without: &[Figures], gate: &[Figures], tuned: &[Figures]) -> Vec<Claim> {
    let mut claims = Vec::new();
    for (without, gate) in without.iter().zip(gate).filter(|(without, _)| without.throttles) {
        let provider = without.provider;
        claims.push(Claim::new(
            gate.refused < without.refused,
            format!("{provider}: fewer refusals with the gate ({}) than without ({})", gate.refused, without.refused),
        ));
        claims.push(Claim::new(
            gate.served > without.served,
            format!("{provider}: more feeds served with the gate ({}) than without ({})", gate.served, without.served),
        ));
    }
    for (way, figures) in [("the gate", gate), ("the tuned gate", tuned)] {
        for Figures { provider, feeds, served, pacing, .. } in figures.iter().filter(|figures| !figures.throttles) {
            claims.push(Claim::new(
                pacing.is_zero() && served == feeds,
                format!("{provider}: {way} gets every feed ({served} of {feeds}) without any pacing ({pacing:?})"),
            ));
        }
    }
    let lost: usize = gate.iter().chain(tuned).map(|figures| figures.lost).sum();
    claims.push(Claim::new(lost == 0, format!("no caller behind a gate is left with a bare 429 ({lost} are)")));
    let (served, feeds) = tuned.iter().fold((0, 0), |(s, f), figures| (s + figures.served, f + figures.feeds));
    claims.push(Claim::new(served == feeds, format!("the tuned gate gets every feed ({served} of {feeds})")));
    claims
}
