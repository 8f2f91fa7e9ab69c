//! Fetches a list of URLs, politely:
//!
//! ```sh
//! cargo run --example fetch -- https://example.com/feed.xml https://example.org/feed.xml
//! ```
//!
//! One line of JSON per URL goes to stdout, in the order in which they are done; on a terminal, progress goes to stderr.
//!
//! | file | what |
//! |---|---|
//! | `client.rs` | the stack of layers around a hyper client, and why each one is where it is: **the part to copy from** |
//! | `outcome.rs` | what became of a URL, as JSON and as an exit code |
//! | `progress.rs` | bars for the hosts that are waited for |
//! | `state.rs` | what the hosts have taught, kept for the next run |

mod client;
mod outcome;
mod progress;
mod state;

use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use http::{HeaderValue, Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use tokio::fs::{self, File};
use tokio::io::AsyncWriteExt as _;
use tokio::select;
use tokio::signal::ctrl_c;
use tokio::task::JoinSet;
use tower::{BoxError, ServiceExt as _};
use tower_http::follow_redirect::RequestUri;

use crate::client::{Body, Client, Settings};
use crate::outcome::Outcome;
use crate::progress::Progress;

/// Fetches URLs: in parallel across hosts, one at a time per host, and slower where a host asks for it.
#[derive(Debug, Parser)]
#[command(name = "fetch", version, after_help = AFTER_HELP)]
struct Args {
    /// What to fetch; http or https
    #[arg(required = true, value_name = "URL")]
    urls: Vec<String>,

    /// Save bodies here, one file each; without it they are only counted
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,

    /// Remember in this file what the hosts have taught, so that the next run need not find out again
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,

    /// Requests in flight to one host
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    concurrency_per_host: u16,

    /// Requests in flight to all hosts together
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    global: u16,

    /// How long one URL may wait for its host, behind this list's others included
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    max_wait: Duration,

    /// How often at most a URL is asked for while its host refuses
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    attempts: u32,

    /// How long a server may take for a response head, and for each piece of the body
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    timeout: Duration,

    /// Who is asking, and how to reach you: hosts throttle nameless clients harder
    #[arg(long, value_name = "TEXT", default_value = USER_AGENT, value_parser = HeaderValue::from_str)]
    user_agent: HeaderValue,
}

const USER_AGENT: &str = concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION"), " (example fetch)");

const AFTER_HELP: &str = "\
Output: one JSON object per URL and line.
  fetched       {\"url\", \"status\", \"bytes\", \"from\" (after redirects), \"file\" (with --output)}
  rate limited  {\"url\", \"error\": {\"code\": \"RATE_LIMITED\", \"message\", \"details\": {\"host\", \"retry_after\", ..}}}
  failed        {\"url\", \"error\": {\"code\": \"BAD_URL\" | \"HTTP_STATUS\" | \"TIMEOUT\" | \"TRANSPORT\" | \"FILE\", \"message\"}}

Exit code:
  0  all fetched
  1  some failed
  2  wrong usage; nothing was sent
  3  none failed, but some were rate limited: come back after `retry_after` seconds
130  interrupted";

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[tokio::main]
async fn main() -> Result<ExitCode, BoxError> {
    let args = Args::parse();
    if let Some(dir) = &args.output {
        if let Err(error) = fs::create_dir_all(dir).await {
            eprintln!("error: cannot make the directory {}: {error}", dir.display());
            return Ok(ExitCode::from(2));
        }
    }

    let progress = Progress::new(args.urls.len());
    let (client, hosts) = client::new(Settings {
        user_agent: args.user_agent,
        attempts: args.attempts,
        max_wait: args.max_wait,
        timeout: args.timeout,
        concurrency_per_host: args.concurrency_per_host.into(),
        global: args.global.into(),
        observer: progress.clone(),
    });
    if let Some(file) = &args.state {
        state::load(file, &hosts);
    }

    // All of them at once. To start only so many at a time (`buffer_unordered(16)`) would be a limit *above* the gate:
    // sixteen URLs of one slow host, waiting, would keep all the others from being started.
    let mut fetches = JoinSet::new();
    for (n, url) in args.urls.into_iter().enumerate() {
        let (client, output) = (client.clone(), args.output.clone());
        fetches.spawn(async move {
            let outcome = fetch(client, &url, n + 1, output.as_deref()).await.unwrap_or_else(|outcome| outcome);
            (url, outcome)
        });
    }
    let bars = tokio::spawn(progress.clone().watch(hosts.clone()));
    let code = select! {
        outcomes = report(&mut fetches, &progress) => outcome::exit_code(&outcomes?),
        // What has been learnt until here is not lost.
        Ok(()) = ctrl_c() => ExitCode::from(130),
    };
    bars.abort();
    progress.finish();
    if let Some(file) = &args.state {
        state::save(file, &hosts);
    }
    Ok(code)
}

/// A line for each URL as soon as it is done.
async fn report(fetches: &mut JoinSet<(String, Outcome)>, progress: &Progress) -> Result<Vec<Outcome>, BoxError> {
    let mut outcomes = Vec::new();
    while let Some(fetched) = fetches.join_next().await {
        let (url, outcome) = fetched?;
        // The bars step aside for the line.
        progress.done(|| writeln!(stdout(), "{}", outcome.json(&url)))?;
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// `Err` is an outcome, too.
async fn fetch(client: Client, url: &str, number: usize, output: Option<&Path>) -> Result<Outcome, Outcome> {
    let uri = parse(url).map_err(Outcome::BadUrl)?;
    let file = output.map(|dir| dir.join(file_name(number, &uri)));
    let request = Request::get(uri.clone()).body(Full::<Bytes>::default()).map_err(|error| Outcome::failed(&error))?;
    let response = client.oneshot(request).await.map_err(|error| Outcome::failed(&*error))?;

    let from = response.extensions().get().map_or(&uri, |RequestUri(last)| last).clone();
    if !response.status().is_success() {
        // Dropping the response gives its permit back, as reading it would.
        return Err(Outcome::refused(&response, &from));
    }
    let status = response.status();
    let bytes = read(response, file.as_deref()).await?;
    Ok(Outcome::Fetched { status, bytes, from: (from != uri).then_some(from), file })
}

fn parse(url: &str) -> Result<Uri, String> {
    let uri = url.parse::<Uri>().map_err(|error| format!("{error}; anything but ASCII has to be percent-encoded"))?;
    match uri.scheme_str() {
        Some("http" | "https") => Ok(uri),
        Some(other) => Err(format!("cannot fetch `{other}:`, only http: and https:")),
        None => Err("no scheme: a URL begins with http:// or https://".to_owned()),
    }
}

/// Reads the body to its end: the request counts as in flight until then, and its siblings wait for it.
async fn read(response: Response<Body>, file: Option<&Path>) -> Result<u64, Outcome> {
    let mut download = match file {
        Some(file) => Some(Download::create(file).await?),
        None => None,
    };
    let mut bytes = 0;
    let mut body = pin!(response.into_body());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| Outcome::failed(&*error))?.into_data() else {
            continue; // trailers
        };
        bytes += data.len() as u64;
        if let Some(download) = &mut download {
            download.write(&data).await?;
        }
    }
    if let Some(download) = download {
        download.finish().await?;
    }
    Ok(bytes)
}

/// A file gets its name when it is whole, so that half a feed is never taken for one.
struct Download {
    name: PathBuf,
    part: PathBuf,
    file: File,
}

impl Download {
    async fn create(name: &Path) -> Result<Self, Outcome> {
        let mut part = name.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let file = File::create(&part).await.map_err(|error| Outcome::file(&part, &error))?;
        Ok(Self { name: name.to_owned(), part, file })
    }

    async fn write(&mut self, data: &[u8]) -> Result<(), Outcome> {
        self.file.write_all(data).await.map_err(|error| Outcome::file(&self.part, &error))
    }

    async fn finish(mut self) -> Result<(), Outcome> {
        self.file.flush().await.map_err(|error| Outcome::file(&self.part, &error))?;
        fs::rename(&self.part, &self.name).await.map_err(|error| Outcome::file(&self.name, &error))
    }
}

/// `003-example.com-feed.xml`: its number in the list keeps two files from having one name.
fn file_name(number: usize, uri: &Uri) -> String {
    let text = format!("{}{}", uri.host().unwrap_or_default(), uri.path());
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') { c } else { '-' };
    let name: String = text.trim_end_matches('/').chars().map(plain).take(120).collect();
    format!("{number:03}-{name}")
}
