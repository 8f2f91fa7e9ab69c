//! Who asks for what, and when.

use std::time::Duration;

use crate::draw::{Draw, Seed};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Load {
    /// So many requests, all at once.
    Batch(usize),
    /// A batch of twenty, four of which may be in flight as far as the gate is concerned, and one below it.
    Narrow,
    /// A hundred requests, each of them when the one before it has been served.
    Serial,
    /// Eight callers, each asking again as soon as it is answered; so many of them may be in flight.
    Callers { in_flight: usize },
    /// Requests come at random; so many percent of what the provider can serve.
    Poisson { percent: u32 },
    /// Batches to twenty hosts, one of which is the provider; the others accept everything.
    TwentyHosts,
    /// Five requests every hour for a day.
    Polls,
}

/// One who asks, again as soon as it is answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub(crate) from: Duration,
    /// 0 is the provider.
    pub(crate) host: usize,
    pub(crate) requests: usize,
}

impl Load {
    pub(crate) const ALL: [Self; 12] = [
        Self::Batch(20),
        Self::Batch(50),
        Self::Batch(200),
        Self::Narrow,
        Self::Serial,
        Self::Callers { in_flight: 1 },
        Self::Callers { in_flight: 8 },
        Self::Poisson { percent: 50 },
        Self::Poisson { percent: 90 },
        Self::Poisson { percent: 150 },
        Self::TwentyHosts,
        Self::Polls,
    ];

    pub(crate) fn name(self) -> String {
        match self {
            Self::Batch(requests) => format!("batch-{requests}"),
            Self::Callers { in_flight: 1 } => "8-callers".to_owned(),
            Self::Callers { in_flight } => format!("8-callers-{in_flight}-wide"),
            Self::Narrow => "narrow-20".to_owned(),
            Self::Serial => "serial-100".to_owned(),
            Self::Poisson { percent } => format!("poisson-{percent}%"),
            Self::TwentyHosts => "20-hosts".to_owned(),
            Self::Polls => "hourly-polls".to_owned(),
        }
    }

    pub(crate) fn hosts(self) -> usize {
        if self == Self::TwentyHosts { 20 } else { 1 }
    }

    /// Requests to the provider.
    pub(crate) fn requests(self) -> usize {
        match self {
            Self::Batch(requests) => requests,
            Self::Serial => 100,
            Self::Callers { .. } => 8 * 8,
            Self::Poisson { .. } => 60,
            Self::Narrow | Self::TwentyHosts => 20,
            Self::Polls => 24 * 5,
        }
    }

    /// How many the gate lets be in flight to one host.
    pub(crate) fn in_flight(self) -> usize {
        match self {
            Self::Narrow => 4,
            Self::Callers { in_flight } => in_flight,
            _ => 1,
        }
    }

    /// How many may be in flight in all, below a gate that lets this many go to one host. In half of the runs.
    pub(crate) fn inner_limit(self, in_flight: usize, seed: Seed) -> Option<usize> {
        match self {
            Self::Narrow => Some(1),
            _ if seed.number % 2 == 0 => None,
            Self::TwentyHosts => Some(self.hosts()),
            _ => Some(in_flight),
        }
    }

    /// The callers, where the provider can serve a request every `pace`.
    pub(crate) fn callers(self, seed: Seed, pace: Duration) -> Vec<Caller> {
        let at_once =
            |host, requests| std::iter::repeat_n(Caller { from: Duration::ZERO, host, requests: 1 }, requests);
        match self {
            Self::Batch(_) | Self::Narrow => at_once(0, self.requests()).collect(),
            Self::Serial => vec![Caller { from: Duration::ZERO, host: 0, requests: 100 }],
            Self::Callers { .. } => vec![Caller { from: Duration::ZERO, host: 0, requests: 8 }; 8],
            Self::Poisson { percent } => {
                let mut draw = Draw::new(seed, 0x9015504);
                let mut from = Duration::ZERO;
                let arrive = |_| {
                    let gap = pace.as_secs_f64() * -(1.0 - draw.unit()).ln() * 100.0 / f64::from(percent);
                    from += Duration::from_millis((gap * 1000.0) as u64);
                    Caller { from, host: 0, requests: 1 }
                };
                (0..self.requests()).map(arrive).collect()
            }
            Self::TwentyHosts => (0..self.hosts()).flat_map(|host| at_once(host, self.requests())).collect(),
            Self::Polls => {
                let hour = |n| Duration::from_secs(3600) * n;
                let poll = |n| std::iter::repeat_n(Caller { from: hour(n), host: 0, requests: 1 }, 5);
                (0..24).flat_map(poll).collect()
            }
        }
    }
}
