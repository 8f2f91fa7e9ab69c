//! What is said of many measurements at once.

#[allow(dead_code, reason = "another bench uses the rest of it")]
#[path = "../shared/statistics.rs"]
mod shared;

pub(crate) use shared::{median, quantile};

pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// How a total grows with size: 1 is in proportion, 2 with the square. Of all sizes or of the three largest, whichever is
/// steeper: what is fixed hides what grows, for as long as that is small.
pub(crate) fn exponent(points: &[(f64, f64)]) -> f64 {
    slope(points).max(slope(&points[points.len().saturating_sub(3)..]))
}

/// Of a straight line through the points, by least squares, both coordinates in logarithms.
fn slope(points: &[(f64, f64)]) -> f64 {
    let (x, y): (Vec<f64>, Vec<f64>) = points.iter().map(|(size, total)| (size.ln(), total.ln())).unzip();
    let (mean_x, mean_y) = (mean(&x), mean(&y));
    let covariance: f64 = x.iter().zip(&y).map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let variance: f64 = x.iter().map(|x| (x - mean_x).powi(2)).sum();
    covariance / variance
}

/// How one thing compares with another that was measured beside it, round by round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    /// The geometric mean of the rounds' ratios, and where it lies with a probability of 95 %.
    pub(crate) ratio: f64,
    pub(crate) from: f64,
    pub(crate) to: f64,
    /// How likely a mean as far from 1 is when there is no difference.
    pub(crate) p: f64,
}

impl Comparison {
    /// By a permutation test: without a difference, either of a round's two could have been the one.
    pub(crate) fn of(ours: &[f64], theirs: &[f64]) -> Self {
        const PERMUTATIONS: usize = 20_000;
        let logarithms: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| (ours / theirs).ln()).collect();
        let observed = mean(&logarithms);
        let mut draw = fastrand::Rng::with_seed(1);
        let mut as_far = 1;
        for _ in 0..PERMUTATIONS {
            let sum: f64 = logarithms.iter().map(|log| if draw.bool() { *log } else { -log }).sum();
            as_far += usize::from(sum.abs() >= (observed * logarithms.len() as f64).abs());
        }
        let n = logarithms.len() as f64;
        let deviations = logarithms.iter().map(|log| (log - observed).powi(2)).sum::<f64>();
        let error = 1.96 * (deviations / (n - 1.0) / n).sqrt();
        let [ratio, from, to] = [observed, observed - error, observed + error].map(f64::exp);
        Self { ratio, from, to, p: as_far as f64 / (PERMUTATIONS + 1) as f64 }
    }
}
