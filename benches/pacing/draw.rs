//! Where every random number comes from: the seed of a run, and nothing else.

use std::time::Duration;

/// One of the two disjoint rows of seeds, and the number in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seed {
    pub(crate) held_out: bool,
    pub(crate) number: u64,
}

impl Seed {
    fn mixed(self, salt: u64) -> u64 {
        // Neighbouring seeds must not give neighbouring numbers.
        const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
        // Odd, so that the two rows never meet. To be changed whenever somebody has looked at a run of those held out.
        const HELD_OUT: u64 = 1_000_001;
        let seed = self.number.wrapping_mul(2) + if self.held_out { HELD_OUT } else { 0 } + 1;
        seed.wrapping_mul(ODD) ^ salt.wrapping_add(1).wrapping_mul(ODD.rotate_left(32))
    }
}

/// Draws the parameters of a provider or a load.
#[derive(Clone, Debug)]
pub(crate) struct Draw {
    rng: fastrand::Rng,
    /// How much further than asked the ranges go, as a factor at both ends: nobody tunes on what is out there.
    wider: f64,
}

impl Draw {
    /// Each `salt` is an independent sequence.
    pub(crate) fn new(seed: Seed, salt: u64) -> Self {
        Self { rng: fastrand::Rng::with_seed(seed.mixed(salt)), wider: if seed.held_out { 1.2 } else { 1.0 } }
    }

    /// Uniform in `0.0..1.0`.
    pub(crate) fn unit(&mut self) -> f64 {
        self.rng.f64()
    }

    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.rng.bool()
    }

    /// Any value of the scale is as likely as any other: uniform in the logarithm.
    pub(crate) fn scale(&mut self, low: f64, high: f64) -> f64 {
        let (low, high) = ((low / self.wider).ln(), (high * self.wider).ln());
        self.between(low, high).exp()
    }

    pub(crate) fn count(&mut self, low: usize, high: usize) -> usize {
        // Half a step at both ends, so that these are as likely as the rest.
        let drawn = self.scale(low as f64 - 0.49, high as f64 + 0.49);
        (drawn.round() as usize).max(1)
    }

    /// A time on a scale, in whole milliseconds: the clock of a run has no finer ones.
    pub(crate) fn seconds(&mut self, low: f64, high: f64) -> Duration {
        Duration::from_millis((self.scale(low, high) * 1000.0).round() as u64)
    }
}

/// A number in `0.0..1.0` that belongs to `n`: drawn before anybody asks, and the same however often and in whatever
/// order it is asked for.
pub(crate) fn noise(seed: Seed, salt: u64, n: u64) -> f64 {
    fastrand::Rng::with_seed(seed.mixed(salt) ^ n.wrapping_mul(0xD1B5_4A32_D192_ED03)).f64()
}
