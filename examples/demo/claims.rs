//! What the figures have to show. Counts only, and one exact zero: nothing here depends on how fast the machine is.

use std::time::Duration;

/// What one burst at one provider came to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    pub(crate) provider: &'static str,
    pub(crate) throttles: bool,
    /// Callers may wait for all of its feeds.
    pub(crate) patient: bool,
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

/// Without a gate, with reactive pacing, with the gate as it comes, with one that is told what is known. Each slice holds
/// the same providers in the same order.
pub(crate) fn check([without, reactive, gate, tuned]: [&[Figures]; 4]) -> Vec<Claim> {
    let mut claims = Vec::new();
    for ((without, reactive), gate) in without.iter().zip(reactive).zip(gate).filter(|(_, gate)| gate.throttles) {
        let Figures { provider, feeds, refused, served, .. } = *gate;
        claims.push(Claim::new(
            refused < without.refused,
            format!("{provider}: fewer refusals with the gate ({refused}) than without ({})", without.refused),
        ));
        claims.push(Claim::new(
            served > without.served,
            format!("{provider}: more feeds served with the gate ({served}) than without ({})", without.served),
        ));
        if gate.patient {
            claims.push(Claim::new(
                served == feeds,
                format!("{provider}: who has the patience gets every feed from the gate ({served} of {feeds})"),
            ));
            claims.push(Claim::new(
                2 * refused < reactive.refused,
                format!("{provider}: for less than half the refusals of reactive pacing ({})", reactive.refused),
            ));
        }
    }
    for (way, figures) in [("reactive pacing", reactive), ("the gate", gate), ("the tuned gate", tuned)] {
        for Figures { provider, feeds, served, pacing, .. } in figures.iter().filter(|figures| !figures.throttles) {
            claims.push(Claim::new(
                pacing.is_zero() && served == feeds,
                format!("{provider}: {way} gets every feed ({served} of {feeds}) without any pacing ({pacing:?})"),
            ));
        }
    }
    let lost: usize = [reactive, gate, tuned].into_iter().flatten().map(|figures| figures.lost).sum();
    claims.push(Claim::new(lost == 0, format!("no caller behind a gate is left with a bare 429 ({lost} are)")));
    let sum = |of: fn(&Figures) -> usize| tuned.iter().map(of).sum::<usize>();
    let (feeds, served, refused) = (sum(|f| f.feeds), sum(|f| f.served), sum(|f| f.refused));
    claims.push(Claim::new(
        served == feeds && refused == 0,
        format!("the tuned gate gets every feed ({served} of {feeds}) and is never refused ({refused} times)"),
    ));
    claims
}
