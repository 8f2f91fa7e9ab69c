//! What a person sees meanwhile, on stderr: how many are done, and a bar for each host that is waited for.

use std::collections::HashMap;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::time::sleep;
use tower_host_gate::observe::ThrottleEvent;
use tower_host_gate::{HostKey, HostSnapshot, Hosts, Observer};

const FRAME: Duration = Duration::from_millis(100);

/// The screen. Clones share it. Where stderr is no terminal there are no bars, only lines.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    screen: MultiProgress,
    done: ProgressBar,
}

impl Progress {
    pub(crate) fn new(urls: usize) -> Self {
        let screen = MultiProgress::new();
        let done = ProgressBar::new(urls as u64).with_style(style("{bar:24} {pos} of {len} done, {elapsed} so far"));
        Self { done: screen.add(done), screen }
    }

    /// One more is done; `report` writes its line while the bars are out of the way.
    pub(crate) fn done<T>(&self, report: impl FnOnce() -> T) -> T {
        self.done.inc(1);
        self.screen.suspend(report)
    }

    pub(crate) fn finish(&self) {
        self.done.finish_and_clear();
        // Nothing is left to be done when the screen cannot be cleared.
        let _ = self.screen.clear();
    }

    /// Draws until it is dropped. Asks the gate rather than being told: a host's wait changes while nothing happens.
    pub(crate) async fn watch(self, hosts: Hosts) {
        let mut bars: HashMap<HostKey, HostBar> = HashMap::new();
        loop {
            let mut waiting: HashMap<_, _> = hosts
                .snapshot()
                .into_iter()
                .filter(|host| host.queued > 0 && !host.next_send.is_zero())
                .map(|host| (host.host.clone(), host))
                .collect();
            bars.retain(|key, bar| {
                let host = waiting.remove(key);
                match &host {
                    Some(host) => bar.show(host),
                    None => bar.bar.finish_and_clear(),
                }
                host.is_some()
            });
            for (key, host) in waiting {
                let mut bar = HostBar::new(self.screen.insert_before(&self.done, ProgressBar::new(0)));
                bar.show(&host);
                bars.insert(key, bar);
            }
            sleep(FRAME).await;
        }
    }

    fn say(&self, line: &str) {
        if self.screen.is_hidden() {
            eprintln!("{line}");
        } else {
            // As above.
            let _ = self.screen.println(line);
        }
    }
}

/// Says why it takes so long.
impl Observer for Progress {
    fn throttled(&self, event: &ThrottleEvent<'_>) {
        if event.new_event {
            let (host, status, hold) = (event.host, event.status.as_u16(), event.hold.as_secs_f64());
            self.say(&format!("{host} has refused a request with {status}: nothing more goes there for {hold:.1} s"));
        }
    }
}

/// The countdown of one host.
struct HostBar {
    bar: ProgressBar,
    /// What was left when this countdown began, and when it was last looked at.
    from: Duration,
    last: Duration,
}

impl HostBar {
    fn new(bar: ProgressBar) -> Self {
        Self { bar: bar.with_style(style("{bar:24} {msg}")), from: Duration::ZERO, last: Duration::ZERO }
    }

    fn show(&mut self, host: &HostSnapshot) {
        let left = host.next_send;
        if left > self.last {
            // The next wait has begun.
            self.from = left;
        }
        self.last = left;
        self.bar.set_length(millis(self.from));
        self.bar.set_position(millis(self.from - left));
        let why = if host.cooldown.is_zero() { "spacing" } else { "cooldown" };
        let HostSnapshot { host, queued, .. } = host;
        self.bar.set_message(format!("{host}: {queued} waiting, next in {:.1} s ({why})", left.as_secs_f64()));
    }
}

fn style(template: &str) -> ProgressStyle {
    // A bar without its style is still a bar.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸─")
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
