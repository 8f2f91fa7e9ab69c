//! The numbers to reach.

use std::fmt;

#[derive(Debug)]
pub(crate) struct Goal {
    name: &'static str,
    measured: f64,
    target: f64,
    met: bool,
}

impl Goal {
    pub(crate) fn at_most(name: &'static str, measured: f64, target: f64) -> Self {
        Self { name, measured, target, met: measured <= target }
    }

    pub(crate) fn at_least(name: &'static str, measured: f64, target: f64) -> Self {
        Self { name, measured, target, met: measured >= target }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, measured, target, met } = self;
        let verdict = if *met { "met" } else { "missed" };
        write!(f, "goal: {name} measured {measured:.3} target {target:.3} {verdict}")
    }
}
