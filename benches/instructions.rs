//! What the gate costs per request, in instructions: `cargo bench --bench instructions` (needs `valgrind`).
//!
//! Instructions are counted by callgrind, so a busy machine changes nothing; two runs agree to an instruction or two
//! (the gate's hash has a random seed). The program runs itself under callgrind twice for each row, once with more
//! requests than the other time; the difference, divided by the number of extra requests, is one request, and what
//! starting and warming up cost has cancelled out.
//!
//! Everything is polled by hand, with a waker that does nothing and an inner service that is always ready: what is
//! counted is the layer, not a runtime. Every row builds the same requests and reads every response to its end.

use std::convert::Infallible;
use std::env;
use std::future::{Future, Ready, ready};
use std::hint::black_box;
use std::pin::{Pin, pin};
use std::process::{Command, ExitCode};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use http_body::Body;
use http_body_util::{Empty, Full};
use tower::Service;
use tower::limit::ConcurrencyLimit;
use tower_host_gate::HostGateLayer;
use tower_layer::Layer;

/// What the gate may add to any of the [`ANSWERS`].
const TARGET: u64 = 1_000;

/// Both are multiples of the number of [`HOSTS`]. The smaller one is enough for every table and pool to have grown.
const FEW: u64 = 400;
const MANY: u64 = 1_400;

const SERVICES: [&str; 3] = ["bare", "ConcurrencyLimit", "gate"];
const ANSWERS: [&str; 3] = ["empty", "ten headers", "body to read"];

const HOSTS: [&str; 4] = [
    "https://example.com/feed.xml",
    "https://feeds.example.org/all/rss",
    "https://www.newspaper.example/atom.xml",
    "http://localhost:8080/feed",
];

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // The program under callgrind, see `collect`.
        [service, answer, requests] if SERVICES.contains(&service) => {
            run(service, answer, requests.parse().expect("a number of requests"));
            ExitCode::SUCCESS
        }
        // The program as `cargo bench` starts it.
        _ => report(),
    }
}

// --- the report ---------------------------------------------------------------------------------------------------

fn report() -> ExitCode {
    println!("Instructions per request; \"+\" is what the layer adds.\n");
    println!("{:<14}{:>9}{:>20}{:>9}{:>8}{:>9}", "response", "bare", "ConcurrencyLimit", "+", "gate", "+");
    let mut worst = 0;
    for answer in ANSWERS {
        let [bare, limit, gate] = SERVICES.map(|service| per_request(service, answer));
        let (limit_added, added) = (limit.saturating_sub(bare), gate.saturating_sub(bare));
        println!("{answer:<14}{bare:>9}{limit:>20}{limit_added:>+9}{gate:>8}{added:>+9}");
        worst = worst.max(added);
    }
    let met = worst <= TARGET;
    let verdict = if met { "met" } else { "missed" };
    println!("\ngoal: added-instructions-per-request measured {worst} target <={TARGET} {verdict}");
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Rounded up.
fn per_request(service: &str, answer: &str) -> u64 {
    let (few, many) = (collect(service, answer, FEW), collect(service, answer, MANY));
    (many - few).div_ceil(MANY - FEW)
}

/// The instructions of a whole run of this program.
fn collect(service: &str, answer: &str, requests: u64) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe().expect("this program has a path"))
        .args([service, answer, &requests.to_string()])
        .output()
        .unwrap_or_else(|error| panic!("cannot run valgrind: {error}; on Debian: apt-get install valgrind"));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{service}, {answer}: {}\n{log}", output.status);
    // ==123== Collected : 2401832
    let (_, collected) = log.rsplit_once("Collected :").unwrap_or_else(|| panic!("no count in valgrind's log:\n{log}"));
    let digits = collected.lines().next().unwrap_or_default().trim();
    digits.parse().unwrap_or_else(|error| panic!("{digits:?} is no count: {error}"))
}

// --- what is counted ----------------------------------------------------------------------------------------------

fn run(service: &str, answer: &str, requests: u64) {
    let bare = Server::new(answer);
    match service {
        "bare" => send_all(bare, requests),
        "ConcurrencyLimit" => send_all(ConcurrencyLimit::new(bare, 1), requests),
        "gate" => send_all(HostGateLayer::new().layer(bare), requests),
        other => panic!("no such service: {other}"),
    }
}

/// One request after the other, each response read to its end.
fn send_all<S, B>(mut service: S, requests: u64)
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>>,
    B: Body<Data = Bytes, Error = Infallible> + Unpin,
{
    let cx = &mut Context::from_waker(Waker::noop());
    let uris = HOSTS.map(Uri::from_static);
    for uri in uris.iter().cycle().take(requests as usize) {
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = uri.clone();

        assert!(service.poll_ready(cx).is_ready());
        // Taken apart in place: moves in here are not the layer's.
        let Poll::Ready(Ok(mut response)) = pin!(service.call(black_box(request))).poll(cx) else {
            panic!("no response at once");
        };
        // A refusal must not pass for a cheap success.
        assert!(response.status().is_success());
        loop {
            match Pin::new(response.body_mut()).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => black_box(frame),
                Poll::Ready(None) => break,
                Poll::Ready(Some(Err(error))) => match error {},
                Poll::Pending => panic!("no frame at once"),
            };
        }
    }
}

/// Always ready, answers at once, always the same.
#[derive(Clone)]
struct Server {
    headers: HeaderMap,
    body: Bytes,
}

impl Server {
    fn new(answer: &str) -> Self {
        match answer {
            "empty" => Self { headers: HeaderMap::new(), body: Bytes::new() },
            "ten headers" => Self { headers: ordinary_headers(), body: Bytes::new() },
            "body to read" => Self { headers: HeaderMap::new(), body: Bytes::from_static(b"<rss version=\"2.0\"/>") },
            other => panic!("no such answer: {other}"),
        }
    }
}

impl Service<Request<Empty<Bytes>>> for Server {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Empty<Bytes>>) -> Self::Future {
        black_box(request);
        let mut response = Response::new(Full::new(self.body.clone()));
        response.headers_mut().clone_from(&self.headers);
        ready(Ok(response))
    }
}

fn ordinary_headers() -> HeaderMap {
    const HEADERS: [(HeaderName, &str); 10] = [
        (header::SERVER, "nginx"),
        (header::DATE, "Tue, 15 Nov 1994 08:12:31 GMT"),
        (header::CONTENT_TYPE, "application/rss+xml; charset=utf-8"),
        (header::CONTENT_LENGTH, "20"),
        (header::LAST_MODIFIED, "Tue, 15 Nov 1994 08:00:00 GMT"),
        (header::ETAG, "\"5f3a-1c2d\""),
        (header::CACHE_CONTROL, "max-age=300, public"),
        (header::VARY, "accept-encoding"),
        (header::ACCEPT_RANGES, "bytes"),
        (header::STRICT_TRANSPORT_SECURITY, "max-age=31536000"),
    ];
    HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value))).into_iter().collect()
}
