//! What the figures have to show. Counts, and one lower bound: nothing here depends on how fast the machine is.

use std::time::Duration;

/// What a batch of feeds came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// Feeds that the workers were given.
    pub(crate) feeds: usize,
    /// Of those, the ones they got.
    pub(crate) arrived: usize,
    /// Requests the provider has refused.
    pub(crate) refused: usize,
    /// The most it ever had to do with at a time, whom it refused included.
    pub(crate) peak: usize,
}

/// Redis is killed, stays away, and comes back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outage {
    /// The batch under way when it was killed.
    pub(crate) killed: Figures,
    /// One that was given out and done without it.
    pub(crate) without: Figures,
    /// The one under way when it came back.
    pub(crate) restarted: Figures,
    /// One that was given out when all workers had found it again.
    pub(crate) after: Figures,
    /// How often each worker has told that it is gone, and that it is back.
    pub(crate) told: Vec<(usize, usize)>,
}

/// A worker is killed while it holds a permit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Death {
    pub(crate) figures: Figures,
    /// Feeds that it had been given and not yet got.
    pub(crate) unfinished: usize,
    pub(crate) lease: Duration,
    /// From before it had the permit until nobody did.
    pub(crate) held_for: Duration,
}

/// A sentence, and whether it is true.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) text: String,
    pub(crate) holds: bool,
}

impl Figures {
    fn all_arrived(&self) -> bool {
        self.arrived == self.feeds
    }

    fn keeps(&self, limit: usize) -> bool {
        self.refused == 0 && self.peak <= limit
    }
}

/// Of a provider that takes `limit` requests at a time. There may be no outage: not every Redis is ours to kill.
pub(crate) fn check(
    limit: usize,
    alone: &Figures,
    shared: &Figures,
    outage: Option<&Outage>,
    death: &Death,
) -> Vec<Claim> {
    let mut claims = Vec::new();
    let mut claim = |holds, text| claims.push(Claim { text, holds });

    claim(
        alone.refused > 0 && alone.peak > limit,
        format!("each with a limit of its own, four processes are too fast: {} refusals", alone.refused),
    );
    claim(
        shared.keeps(limit) && shared.peak == limit,
        format!(
            "with one limit they use all of it and no more: {} at a time, {} refusals",
            shared.peak, shared.refused
        ),
    );
    claim(shared.all_arrived(), format!("every feed arrives ({})", of(shared)));
    if let Some(Outage { killed, without, restarted, after, told }) = outage {
        claim(
            killed.all_arrived(),
            format!("Redis is killed: every feed asked for arrives all the same ({})", of(killed)),
        );
        claim(
            without.all_arrived() && without.keeps(limit),
            format!(
                "without Redis each keeps a quarter of the limit: {} feeds, at most {} at a time, {} refusals",
                of(without),
                without.peak,
                without.refused
            ),
        );
        claim(restarted.all_arrived(), format!("Redis comes back empty: every feed arrives ({})", of(restarted)));
        claim(
            !told.is_empty() && told.iter().all(|&times| times == (1, 1)),
            "each process has told once that Redis is gone, and once that it is back".to_owned(),
        );
        claim(
            after.all_arrived() && after.keeps(limit),
            format!(
                "from then on there is one limit again: {} feeds, at most {} at a time, {} refusals",
                of(after),
                after.peak,
                after.refused
            ),
        );
    }
    let Death { figures, unfinished, lease, held_for } = death;
    claim(
        figures.all_arrived() && *unfinished > 0,
        format!(
            "a process is killed with permits: others get the {unfinished} feeds it owed, so all arrive ({})",
            of(figures)
        ),
    );
    claim(
        // Redis counts by a clock of its own.
        *held_for + Duration::from_millis(100) >= *lease,
        format!(
            "its permits come back when their lease of {} s is over: after {:.1} s",
            lease.as_secs(),
            held_for.as_secs_f64()
        ),
    );
    claims
}

fn of(figures: &Figures) -> String {
    format!("{} of {}", figures.arrived, figures.feeds)
}
