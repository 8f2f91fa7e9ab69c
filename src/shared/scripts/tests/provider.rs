//! Servers with a limit, so that histories lead to where learned pacing has something to learn.

use std::collections::VecDeque;

use proptest::prelude::*;

#[derive(Clone, Debug, Default)]
pub(super) struct Provider {
    limit: Limit,
    /// When it accepted something, oldest first.
    accepted: VecDeque<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Limit {
    #[default]
    None,
    /// So many in any interval of this width.
    Window { most: usize, width: u64 },
    /// So many per interval, which begins at multiples of its width.
    Fixed { most: usize, width: u64 },
    /// Nothing until then, counted from the first request.
    Outage { until: u64 },
}

pub(super) fn any_provider() -> impl Strategy<Value = Provider> {
    let width = || prop_oneof![20..2_000_u64, 1_000..300_000_u64];
    let most = || prop_oneof![3 => Just(1_usize), 2 => 2..12_usize, 1 => 12..300_usize];
    let limit = prop_oneof![
        1 => Just(Limit::None),
        4 => (most(), width()).prop_map(|(most, width)| Limit::Window { most, width }),
        2 => (most(), width()).prop_map(|(most, width)| Limit::Fixed { most, width }),
        1 => (0..1_000_000_u64).prop_map(|until| Limit::Outage { until }),
    ];
    limit.prop_map(|limit| Provider { limit, accepted: VecDeque::new() })
}

impl Provider {
    pub(super) fn accepts(&mut self, now: u64) -> bool {
        let free = match self.limit {
            Limit::None => true,
            Limit::Window { most, width } => self.since(now.saturating_sub(width)) < most,
            Limit::Fixed { most, width } => self.since(now - now % width) < most,
            Limit::Outage { until } => {
                let first = *self.accepted.front().unwrap_or(&now);
                if self.accepted.is_empty() {
                    self.accepted.push_back(now);
                }
                now >= first + until
            }
        };
        if free {
            self.accepted.push_back(now);
        }
        free
    }

    fn since(&self, instant: u64) -> usize {
        self.accepted.iter().filter(|at| **at >= instant).count()
    }
}
