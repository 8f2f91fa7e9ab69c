//! The course of a drill under load: all is well, something breaks, it is mended, all is well again.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tower_host_gate::shared::BackendErrorKind;
use tower_host_gate::{Queue, Redis};

use super::fleet::{CAP, CAPPED, FREE, Fleet, QUOTA, REPLICAS, SENDS, Told, WINDOW};
use super::row::{Peaks, Row, publish};

/// How long all is well, before and after.
const WELL: Duration = Duration::from_millis(700);

/// The gate has 250 ms to answer when the store does not; the rest is for a machine that has other things to do.
pub const ANSWER: Duration = Duration::from_millis(250 + 1_000);

/// The same for a host that always has somebody waiting: what is sent there is never long in coming.
const PAUSE: Duration = Duration::from_secs(5);

/// How long replicas may take to find a store that is back.
pub const RECOVERY: Duration = Duration::from_secs(10);

/// A machine that holds us up for so long makes operations time out that a well store has answered, and so replicas take
/// it for lost more often than it is, and longer.
const BUSY: Duration = Duration::from_millis(50);
const RECOVERY_WHEN_BUSY: Duration = Duration::from_secs(30);

/// What may happen, at worst.
#[derive(Clone)]
pub struct Promise {
    /// So many times does a replica lose the store.
    pub outages: RangeInclusive<usize>,
    /// So many times the limits are reached from the break on, until all is well again.
    pub times_the_limit: usize,
}

impl Promise {
    /// Everybody notices, once, and paces by itself meanwhile.
    pub const OUTAGE: Self = Self { outages: 1..=1, times_the_limit: REPLICAS };
    /// Nobody notices.
    pub const NOTHING: Self = Self { outages: 0..=0, times_the_limit: 1 };
}

/// A fleet of each mode at one store, under load.
pub struct Drill {
    name: &'static str,
    promise: Promise,
    fleets: Vec<Fleet>,
    began: Instant,
    broke: Option<Instant>,
    mended: Option<Instant>,
    pulse: Pulse,
}

impl Drill {
    /// Starts the load, and waits while all is well.
    pub async fn start(name: &'static str, promise: Promise, redis: Redis) -> Self {
        let mut fleets = Vec::new();
        for queue in [Queue::Delegate, Queue::Fifo] {
            fleets.push(Fleet::new(REPLICAS, redis.clone(), queue).await);
        }
        fleets.iter_mut().for_each(Fleet::load);
        let pulse = Pulse::start();
        let drill = Self { name, promise, fleets, began: Instant::now(), broke: None, mended: None, pulse };
        sleep(WELL).await;
        drill
    }

    /// From now on something is wrong.
    pub fn breaks(&mut self) {
        self.broke = Some(Instant::now());
    }

    /// From now on nothing is wrong any more.
    pub fn mended(&mut self) {
        self.mended = Some(Instant::now());
    }

    pub fn has_failed_with(&self, kind: BackendErrorKind) -> bool {
        let mut replicas = self.fleets.iter().flat_map(|fleet| &fleet.replicas);
        replicas.any(|replica| replica.events.count(|told| matches!(told, Told::Failed(_, with) if with == kind)) > 0)
    }

    /// Waits until everybody has noticed that all is well, and for a while longer; then looks at what came of it.
    pub async fn end(mut self) {
        self.until_recovered().await;
        sleep(WINDOW + WELL).await;
        let ended = Instant::now();

        let mut rows = Vec::new();
        for fleet in &mut self.fleets {
            let tally = fleet.unload().await;
            let mut row = Row::new(self.name, fleet, &tally);
            row.leases_left(fleet.leases_left().await);
            rows.push(row);
        }
        for (fleet, row) in self.fleets.iter().zip(&mut rows) {
            self.judge(fleet, row, ended);
        }
        publish(&rows);
    }

    async fn until_recovered(&self) {
        let deadline = Instant::now() + RECOVERY_WHEN_BUSY;
        while !self.fleets.iter().all(|fleet| self.has_recovered(fleet)) && Instant::now() < deadline {
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn has_recovered(&self, fleet: &Fleet) -> bool {
        fleet.replicas.iter().all(|replica| {
            let outages = replica.events.degraded().max(*self.promise.outages.start());
            replica.events.recoveries().len() >= outages
        })
    }

    fn judge(&self, fleet: &Fleet, row: &mut Row, ended: Instant) {
        row.answer(fleet.upstream.visits(FREE).longest_wait(), ANSWER + self.late());
        let pause = fleet.upstream.visits(CAPPED).longest_pause();
        row.pause = Some(pause);
        row.check(pause < PAUSE, format!("nothing was sent for {pause:?}"));
        row.held_up = Some(self.pulse.longest());
        self.judge_limits(fleet, row, ended);
        self.judge_events(fleet, row);
    }

    /// How much later something may be seen than it was decided, having gone by way of several tasks.
    fn late(&self) -> Duration {
        Duration::from_millis(20) + 3 * self.pulse.longest()
    }

    fn judge_limits(&self, fleet: &Fleet, row: &mut Row, ended: Instant) {
        let (capped, quota) = (fleet.upstream.visits(CAPPED), fleet.upstream.visits(QUOTA));
        let late = self.late();
        // Whatever was sent without a permit from the store is over then, and counts nowhere any more.
        let recovered = fleet.replicas.iter().filter_map(|replica| replica.events.recoveries().pop());
        let recovered = recovered.chain(self.mended).max().unwrap_or(self.began);
        let settled = (capped.ended_that_were_sent_by(recovered + late) + WINDOW).min(ended);
        let broke = self.broke.expect("something broke");
        let peaks = |limit, most: &dyn Fn(Instant, Instant) -> usize| Peaks {
            limit,
            well: most(self.began, broke).max(most(settled, ended)),
            broken: Some(most(broke, settled)),
        };
        let in_flight = peaks(CAP, &|from, to| capped.most_in_flight(from, to));
        // In so many windows, less that time, there is never one too many.
        let windows = if late < WINDOW / 2 { 1 } else { 1 + late.as_millis().div_ceil(WINDOW.as_millis()) as u32 };
        let per_window =
            peaks((SENDS * windows) as usize, &|from, to| quota.most_per(WINDOW * windows - late, from, to));
        (row.in_flight, row.per_window) = (Some(in_flight), Some(per_window));

        // Each request that the store does not answer is the replica's own to decide; a busy machine can do that.
        let failed = fleet.failures(self.began, broke) + fleet.failures(settled, ended);
        for (what, peaks) in [("in flight", in_flight), ("per window", per_window)] {
            let overshoot = peaks.limit * self.promise.times_the_limit;
            let well = if failed == 0 { peaks.limit } else { overshoot };
            row.check(peaks.well <= well, format!("{} {what} while all was well", peaks.well));
            let broken = peaks.broken.unwrap_or_default();
            row.check(broken <= overshoot, format!("{broken} {what}, of at most {overshoot}"));
        }
    }

    fn judge_events(&self, fleet: &Fleet, row: &mut Row) {
        let (least, most) = self.promise.outages.clone().into_inner();
        let is_busy = self.pulse.longest() > BUSY;
        for replica in &fleet.replicas {
            let events = &replica.events;
            let (degraded, recovered) = (events.degraded(), events.recoveries().len());
            let exactly = (least..=most).contains(&degraded) && degraded == recovered;
            let too_often = degraded > most && degraded <= recovered + 1;
            let told = || events.outages_since(self.began);
            row.check(exactly || (is_busy && most > 0 && too_often), format!("what one replica told: {:?}", told()));
        }
        let recovered = fleet.replicas.iter().filter_map(|replica| replica.events.recoveries().first().copied());
        let recovery = recovered.max().zip(self.mended).map(|(at, mended)| at.saturating_duration_since(mended));
        let limit = if is_busy { RECOVERY_WHEN_BUSY } else { RECOVERY };
        row.check(recovery.is_none_or(|time| time < limit), format!("recovered after {recovery:?}"));
        row.recovery = recovery;
    }
}

/// Notices when the machine has other things to do than this test.
struct Pulse {
    longest: Arc<Mutex<Duration>>,
    beating: AbortHandle,
}

impl Pulse {
    fn start() -> Self {
        let longest = Arc::<Mutex<Duration>>::default();
        let noted = Arc::clone(&longest);
        let beating = tokio::spawn(async move {
            loop {
                let due = Instant::now() + Duration::from_millis(5);
                sleep_until(due).await;
                let mut longest = noted.lock().expect("nobody panics with the lock held");
                *longest = due.elapsed().max(*longest);
            }
        });
        Self { longest, beating: beating.abort_handle() }
    }

    /// By how much a task of this test was late, at worst.
    fn longest(&self) -> Duration {
        *self.longest.lock().expect("nobody panics with the lock held")
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.beating.abort();
    }
}

/// Asks again and again, until the answer is yes.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds().await {
        assert!(Instant::now() < deadline, "still not: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}
