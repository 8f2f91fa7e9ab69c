//! Four worker processes: what they are given to do, what they tell, and the permits they have.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tower::BoxError;
use tower_host_gate::{HostGateLayer, Hosts};

use crate::{WORKERS, worker};

/// Which limit a team shares, and how.
#[derive(Clone, Debug)]
pub(crate) struct Sharing {
    pub(crate) url: String,
    pub(crate) scope: String,
    pub(crate) lease: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) worker: usize,
    pub(crate) at: Instant,
    pub(crate) said: Said,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Ready,
    Has(usize),
    Lost(usize),
    Degraded,
    Recovered,
    /// Nothing, ever again.
    Gone,
}

/// The processes end when it is dropped.
#[derive(Debug)]
pub(crate) struct Team {
    workers: Vec<Worker>,
    news: mpsc::UnboundedReceiver<Event>,
    /// All that was ever said.
    pub(crate) events: Vec<Event>,
    host: String,
    /// A look at the same limit.
    hosts: Option<Hosts>,
}

#[derive(Debug)]
struct Worker {
    process: Child,
    feeds: ChildStdin,
    given: Vec<usize>,
    killed: bool,
}

impl Team {
    /// Returns when all of them are ready.
    pub(crate) async fn start(host: &str, sharing: Option<&Sharing>) -> Result<Self, BoxError> {
        let (tell, news) = mpsc::unbounded_channel();
        let mut workers = Vec::new();
        for name in 0..WORKERS {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["worker", &name.to_string(), host]);
            if let Some(Sharing { url, scope, lease }) = sharing {
                // Not an argument: everybody on the machine may read those, and a URL can have a password.
                command.env("REDIS_URL", url).args(["--scope", scope]);
                if let Some(lease) = lease {
                    command.args(["--lease-secs", &lease.as_secs().to_string()]);
                }
            }
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
            let mut process = command.spawn()?;
            let (Some(feeds), Some(words)) = (process.stdin.take(), process.stdout.take()) else {
                return Err("a process without pipes".into());
            };
            tokio::spawn(listen(name, words, tell.clone()));
            workers.push(Worker { process, feeds, given: Vec::new(), killed: false });
        }
        let hosts = match sharing {
            Some(Sharing { url, scope, .. }) => Some(HostGateLayer::new().shared(worker::redis(url, scope)?).hosts()),
            None => None,
        };
        let mut team = Self { workers, news, events: Vec::new(), host: host.to_owned(), hosts };
        team.until_each(Said::Ready).await?;
        Ok(team)
    }

    /// Gives each worker its share of these, but those that were killed.
    pub(crate) async fn deal(&mut self, feeds: impl IntoIterator<Item = usize>) -> Result<(), BoxError> {
        let alive: Vec<_> = (0..WORKERS).filter(|&worker| !self.workers[worker].killed).collect();
        for (n, feed) in feeds.into_iter().enumerate() {
            self.give(alive[n % alive.len()], feed).await?;
        }
        Ok(())
    }

    pub(crate) async fn give(&mut self, worker: usize, feed: usize) -> Result<(), BoxError> {
        let worker = &mut self.workers[worker];
        worker.given.push(feed);
        Ok(worker.feeds.write_all(format!("{feed}\n").as_bytes()).await?)
    }

    // --- what they say --------------------------------------------------------------------------------------------

    /// Listens until this is so.
    pub(crate) async fn until(&mut self, is_so: impl Fn(&[Event]) -> bool) -> Result<(), BoxError> {
        while !is_so(&self.events) {
            let event = self.news.recv().await.ok_or("all workers have ended")?;
            if event.said == Said::Gone && !self.workers[event.worker].killed {
                return Err(format!("worker {} has ended", event.worker + 1).into());
            }
            self.events.push(event);
        }
        Ok(())
    }

    /// Until every worker has said so.
    pub(crate) async fn until_each(&mut self, said: Said) -> Result<(), BoxError> {
        self.until(|events| {
            (0..WORKERS).all(|worker| events.iter().any(|event| (event.worker, event.said) == (worker, said)))
        })
        .await
    }

    /// Until so many of these feeds are here.
    pub(crate) async fn until_arrived(&mut self, feeds: &[usize], count: usize) -> Result<(), BoxError> {
        self.until(|events| arrived(events, feeds) >= count).await
    }

    /// Until it is known of each of these feeds what has become of it.
    pub(crate) async fn until_done(&mut self, feeds: &[usize]) -> Result<(), BoxError> {
        let told = |events: &[Event], feed: usize| {
            events.iter().any(|event| event.said == Said::Has(feed) || event.said == Said::Lost(feed))
        };
        self.until(|events| feeds.iter().all(|&feed| told(events, feed))).await
    }

    // --- how they end ---------------------------------------------------------------------------------------------

    /// SIGKILL: it cannot give back what it has. Gives back what it was to do and has not told to be done.
    pub(crate) async fn kill(&mut self, worker: usize) -> Result<Vec<usize>, BoxError> {
        self.workers[worker].killed = true;
        self.workers[worker].process.kill().await?;
        // What it has said before is heard.
        self.until(|events| events.iter().any(|event| (event.worker, event.said) == (worker, Said::Gone))).await?;
        let has = |feed: &usize| self.events.iter().any(|event| event.said == Said::Has(*feed));
        Ok(self.workers[worker].given.iter().copied().filter(|feed| !has(feed)).collect())
    }

    /// Until no permit is taken any more, as Redis knows it.
    pub(crate) async fn until_idle(&self) -> Result<(), BoxError> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        worker::connect(hosts, &self.host).await;
        while hosts.get_shared(&self.host).await?.is_some_and(|host| host.in_flight > 0) {
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Lets them end. By then every permit is back: what a process has not sent when it ends stays with it.
    pub(crate) async fn dismiss(self) -> Result<Vec<Event>, BoxError> {
        self.until_idle().await?;
        for Worker { process, feeds, killed, .. } in self.workers {
            // The end of its input.
            drop(feeds);
            let mut process = process;
            let status = process.wait().await?;
            if !killed && !status.success() {
                return Err(format!("a worker has failed: {status}").into());
            }
        }
        Ok(self.events)
    }
}

/// How many of these feeds are here.
pub(crate) fn arrived(events: &[Event], feeds: &[usize]) -> usize {
    feeds.iter().filter(|&&feed| events.iter().any(|event| event.said == Said::Has(feed))).count()
}

async fn listen(worker: usize, words: ChildStdout, tell: mpsc::UnboundedSender<Event>) {
    let mut lines = BufReader::new(words).lines();
    let mut hear = |said| tell.send(Event { worker, at: Instant::now(), said }).is_ok();
    while let Ok(Some(line)) = lines.next_line().await {
        if !understand(&line).is_none_or(&mut hear) {
            return;
        }
    }
    hear(Said::Gone);
}

fn understand(line: &str) -> Option<Said> {
    match line.split_once(' ') {
        Some(("has", feed)) => Some(Said::Has(feed.parse().ok()?)),
        Some(("lost", feed)) => Some(Said::Lost(feed.parse().ok()?)),
        _ => match line {
            "ready" => Some(Said::Ready),
            "degraded" => Some(Said::Degraded),
            "recovered" => Some(Said::Recovered),
            _ => None,
        },
    }
}
