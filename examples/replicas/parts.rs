//! The four parts of the show. Each has a provider, a scope and four processes of its own.

use std::ops::Range;
use std::time::{Duration, Instant};

use tokio::time::timeout;
use tower::BoxError;
use tower_host_gate::HostGateLayer;

use crate::claims::{Death, Figures, Outage};
use crate::provider::{Hit, Manners, Provider};
use crate::server::Server;
use crate::team::{Event, Said, Sharing, Team, arrived};
use crate::{LEASE, LIMIT, WORKERS, worker};

/// How long a Redis that is said to run may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// What happens in a part comes when so many feeds of a batch have arrived, so in the middle of it.
const MIDDLE: usize = 8;

/// Where all of it takes place.
#[derive(Debug)]
pub(crate) struct Stage {
    url: String,
    /// `None`: Redis is somebody else's.
    server: Option<Server>,
    scope: String,
}

/// One part: what there is to see, and what it comes to.
#[derive(Debug)]
pub(crate) struct Part<F> {
    pub(crate) title: &'static str,
    pub(crate) start: Instant,
    pub(crate) hits: Vec<Hit>,
    pub(crate) events: Vec<Event>,
    pub(crate) redis: Redis,
    /// Permits are taken by nobody who lives, from here to there.
    pub(crate) orphan: Option<[Instant; 2]>,
    pub(crate) figures: F,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Redis {
    Unused,
    Up,
    Down([Instant; 2]),
}

impl Stage {
    pub(crate) async fn set(given: Option<String>) -> Result<Self, BoxError> {
        // Nobody else's hosts, even in a Redis that has others.
        let scope = format!("replicas-{:08x}", fastrand::u32(..));
        if let Some(url) = given {
            let hosts = HostGateLayer::new().shared(worker::redis(&url, &scope)?).hosts();
            let answer = timeout(PATIENCE, hosts.get_shared("nobody.example")).await;
            answer.map_err(|_| "Redis does not answer")?.map_err(|error| format!("Redis cannot be used: {error}"))?;
            return Ok(Self { url, server: None, scope });
        }
        let server = Server::start().await?;
        Ok(Self { url: server.url(), server: Some(server), scope })
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.server.is_some()
    }

    fn sharing(&self, part: &str) -> Sharing {
        Sharing { url: self.url.clone(), scope: format!("{}-{part}", self.scope), lease: None }
    }

    /// Four gates that know nothing of each other.
    pub(crate) async fn alone(&self) -> Result<Part<Figures>, BoxError> {
        // Until one request too many has come no feed is made; so it does come.
        let provider = Provider::start(Manners { opens_at: LIMIT + 1, ..Manners::default() }).await?;
        let team = Team::start(provider.host(), None).await?;
        one_batch("each for itself: four gates of four permits", provider, team, Redis::Unused).await
    }

    /// One limit.
    pub(crate) async fn shared(&self) -> Result<Part<Figures>, BoxError> {
        // The first four wait for each other, so it shows that there are four permits.
        let provider = Provider::start(Manners { opens_at: LIMIT, ..Manners::default() }).await?;
        let team = Team::start(provider.host(), Some(&self.sharing("shared"))).await?;
        one_batch("shared through Redis: one gate of four permits", provider, team, Redis::Up).await
    }

    /// Redis is killed with requests under way, stays away for a batch, and comes back with requests under way.
    pub(crate) async fn outage(&mut self) -> Result<Option<Part<Outage>>, BoxError> {
        let sharing = self.sharing("outage");
        let Some(server) = &mut self.server else { return Ok(None) };
        let provider = Provider::start(Manners::default()).await?;
        let mut team = Team::start(provider.host(), Some(&sharing)).await?;
        let [killed, without, restarted, after] = [0..40, 40..64, 64..96, 96..120].map(Range::collect::<Vec<_>>);
        let start = Instant::now();

        team.deal(killed.clone()).await?;
        team.until_arrived(&killed, MIDDLE).await?;
        server.kill().await?;
        let down = Instant::now();
        team.until_each(Said::Degraded).await?;
        team.until_done(&killed).await?;

        team.deal(without.clone()).await?;
        team.until_done(&without).await?;

        team.deal(restarted.clone()).await?;
        team.until_arrived(&restarted, MIDDLE).await?;
        let up = Instant::now();
        server.restart().await?;
        team.until_each(Said::Recovered).await?;
        team.until_done(&restarted).await?;

        team.deal(after.clone()).await?;
        team.until_done(&after).await?;

        let events = team.dismiss().await?;
        let hits = provider.hits();
        let told = |worker, said| events.iter().filter(|event| (event.worker, event.said) == (worker, said)).count();
        let figures = Outage {
            killed: figures(&killed, &events, &hits),
            without: figures(&without, &events, &hits),
            restarted: figures(&restarted, &events, &hits),
            after: figures(&after, &events, &hits),
            told: (0..WORKERS).map(|worker| (told(worker, Said::Degraded), told(worker, Said::Recovered))).collect(),
        };
        let title = "Redis is killed, and comes back empty";
        Ok(Some(Part { title, start, hits, events, redis: Redis::Down([down, up]), orphan: None, figures }))
    }

    /// A worker is killed while its request is under way.
    pub(crate) async fn death(&self) -> Result<Part<Death>, BoxError> {
        const DOOMED: usize = 2;
        let feeds: Vec<usize> = (0..40).collect();
        let held = feeds[0];
        let provider = Provider::start(Manners { held: Some(held), ..Manners::default() }).await?;
        let sharing = Sharing { lease: Some(LEASE), ..self.sharing("death") };
        let mut team = Team::start(provider.host(), Some(&sharing)).await?;
        let start = Instant::now();

        team.give(DOOMED, held).await?;
        team.deal(feeds[1..].iter().copied()).await?;
        // Its request is under way and gets no answer: it has a permit and keeps it.
        provider.until_held(true).await?;
        team.until_arrived(&feeds, MIDDLE).await?;
        let unfinished = team.kill(DOOMED).await?;
        let dead = Instant::now();
        provider.until_held(false).await?;
        // As any queue of jobs does it.
        team.deal(unfinished.clone()).await?;
        team.until_done(&feeds).await?;
        team.until_idle().await?;
        let free = Instant::now();

        let events = team.dismiss().await?;
        let hits = provider.hits();
        let figures = Death {
            figures: figures(&feeds, &events, &hits),
            unfinished: unfinished.len(),
            lease: LEASE,
            held_for: free - start,
        };
        let title = "a process is killed while it holds permits";
        Ok(Part { title, start, hits, events, redis: Redis::Up, orphan: Some([dead, free]), figures })
    }
}

async fn one_batch(
    title: &'static str,
    provider: Provider,
    mut team: Team,
    redis: Redis,
) -> Result<Part<Figures>, BoxError> {
    let feeds: Vec<usize> = (0..48).collect();
    let start = Instant::now();
    team.deal(feeds.clone()).await?;
    team.until_done(&feeds).await?;
    let events = team.dismiss().await?;
    let hits = provider.hits();
    let figures = figures(&feeds, &events, &hits);
    Ok(Part { title, start, hits, events, redis, orphan: None, figures })
}

fn figures(feeds: &[usize], events: &[Event], hits: &[Hit]) -> Figures {
    let hits = || hits.iter().filter(|hit| feeds.contains(&hit.feed));
    Figures {
        feeds: feeds.len(),
        arrived: arrived(events, feeds),
        refused: hits().filter(|hit| hit.refused).count(),
        peak: hits().map(|hit| hit.in_flight).max().unwrap_or_default(),
    }
}
