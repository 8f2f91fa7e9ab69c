//! What is measured in a run, and its mean over seeds.

use std::time::Duration;

use crate::run::{Outcome, Run};
use crate::site::What;

/// One run in numbers; times in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// How many runs this is the mean of.
    pub(crate) runs: usize,
    /// From the beginning to the last answer, over the same of the clairvoyant client.
    pub(crate) makespan: f64,
    /// Refusals per success.
    pub(crate) refusals: f64,
    /// The share of requests whose caller did not have to come back.
    pub(crate) in_one_go: f64,
    /// From the first refusal in a row to the next success.
    pub(crate) recovery: f64,
    /// For how long pacing has kept a request to the provider.
    pub(crate) pacing: f64,
    /// The same for the other hosts of the load, all in all.
    pub(crate) pacing_elsewhere: f64,
    /// Jain's index of the callers' mean waits: 1 when all wait alike.
    pub(crate) fairness: f64,
    pub(crate) wait_p50: f64,
    pub(crate) wait_p99: f64,
    /// How often a caller was sent away, per request.
    pub(crate) sheds: f64,
    /// The share of requests that were never served.
    pub(crate) locked_out: f64,
    /// Sends before a time that the host had named: a sum, no mean.
    pub(crate) early: usize,
}

impl Figures {
    pub(crate) fn of(run: &Run) -> Self {
        // A forbidden path is no request that any pace could serve.
        let requests: Vec<_> = run.requests.iter().filter(|request| request.outcome != Outcome::Forbidden).collect();
        let count = requests.len().max(1) as f64;
        let share =
            |holds: &dyn Fn(&&&crate::run::Request) -> bool| requests.iter().filter(holds).count() as f64 / count;
        let waits = sorted(requests.iter().map(|request| request.took.as_secs_f64()));
        let served = happened(run, What::Served).count();
        let locked_out = share(&|request| request.outcome == Outcome::LockedOut);
        let end = if locked_out > 0.0 { run.horizon } else { last_answer(run) };
        Self {
            runs: 1,
            makespan: end.as_secs_f64() / run.clairvoyant.makespan.as_secs_f64(),
            refusals: happened(run, What::Refused).count() as f64 / served.max(1) as f64,
            in_one_go: share(&|request| request.outcome == Outcome::Served && request.came_back == 0),
            recovery: recovery(run),
            pacing: run.pacing.as_secs_f64() / count,
            pacing_elsewhere: run.pacing_elsewhere.as_secs_f64(),
            fairness: fairness(run),
            wait_p50: quantile(&waits, 0.5),
            wait_p99: quantile(&waits, 0.99),
            sheds: f64::from(requests.iter().map(|request| request.sheds).sum::<u32>()) / count,
            locked_out,
            early: run.early,
        }
    }

    /// The mean of means: each part weighs alike. `None` of nothing.
    pub(crate) fn mean<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Option<Self> {
        let mut mean = Self::default();
        let mut count = 0.0;
        for part in parts {
            count += 1.0;
            mean.runs += part.runs;
            mean.early += part.early;
            for (sum, value) in mean.means().into_iter().zip(part.clone().means()) {
                *sum += *value;
            }
        }
        for sum in mean.means() {
            *sum /= count;
        }
        (count > 0.0).then_some(mean)
    }

    fn means(&mut self) -> [&mut f64; 11] {
        [
            &mut self.makespan,
            &mut self.refusals,
            &mut self.in_one_go,
            &mut self.recovery,
            &mut self.pacing,
            &mut self.pacing_elsewhere,
            &mut self.fairness,
            &mut self.wait_p50,
            &mut self.wait_p99,
            &mut self.sheds,
            &mut self.locked_out,
        ]
    }
}

fn happened(run: &Run, what: What) -> impl Iterator<Item = Duration> {
    run.record.iter().filter(move |event| event.what == what).map(|event| event.at)
}

fn last_answer(run: &Run) -> Duration {
    run.record.iter().filter(|event| event.what != What::Sent).map(|event| event.at).max().unwrap_or_default()
}

fn recovery(run: &Run) -> f64 {
    let mut refused = None;
    let mut times = Vec::new();
    for event in &run.record {
        match event.what {
            What::Refused => refused = refused.or(Some(event.at)),
            What::Served => times.extend(refused.take().map(|since| (event.at - since).as_secs_f64())),
            What::Sent | What::Forbidden => {}
        }
    }
    times.iter().sum::<f64>() / times.len().max(1) as f64
}

fn fairness(run: &Run) -> f64 {
    let callers = run.requests.iter().map(|request| request.caller + 1).max().unwrap_or_default();
    let mut waits = vec![0.0; callers];
    for request in &run.requests {
        waits[request.caller] += request.took.as_secs_f64();
    }
    let (sum, squares) = waits.iter().fold((0.0, 0.0), |(sum, squares), wait| (sum + wait, squares + wait * wait));
    if squares > 0.0 { sum * sum / (callers as f64 * squares) } else { 1.0 }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}
