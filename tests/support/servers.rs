//! nginx and HAProxy on loopback, each a child process of the test with a folder of its own.
//!
//! Both run as ONE process and one thread, in the foreground. So killing the child kills all of it, and "before" has a
//! meaning: what the server did for a request whose answer the client has in full, it did before it looks at the next
//! one. The bounds that the tests assert rest on this.
//!
//! A missing server is a failed test, never a skipped one. `scripts/test` installs both.

use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// How long a server may take to start, to stop, or to write a line of its log. No test gets faster or slower by it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where the harness asks a server who it is. No limit applies there, and it never counts.
const WHO: &str = "/__who";

/// One request, as the server's own log has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    pub status: u16,
    /// When the server was done with it, on its own clock, since the epoch.
    pub at: Duration,
    pub uri: String,
}

/// How many of these lines have this status.
pub fn count(log: &[LogLine], status: u16) -> usize {
    log.iter().filter(|line| line.status == status).count()
}

/// The time from the first of these lines to the last one.
pub fn span(log: &[LogLine]) -> Duration {
    let times = || log.iter().map(|line| line.at);
    times().max().unwrap_or_default().saturating_sub(times().min().unwrap_or_default())
}

// ---------------------------------------------------------------------------------------------------------------------
// nginx
// ---------------------------------------------------------------------------------------------------------------------

/// A running nginx. Every path serves the same file, and refusals are 429.
///
/// ```ignore
/// let nginx = Nginx::config().limit_req("2r/s").burst(1).retry_after(1).start().await;
/// ```
#[derive(Debug)]
pub struct Nginx {
    daemon: Daemon,
    /// How often the log was read: tells the harness's own requests apart.
    reads: AtomicU32,
}

/// How an [`Nginx`] is to be set up.
#[derive(Debug, Clone, Default)]
pub struct NginxConfig {
    rate: Option<String>,
    burst: Option<u32>,
    connections: Option<u32>,
    retry_after: Option<u32>,
    file_size: u64,
}

impl Nginx {
    /// Without any limit, and with an empty file.
    pub fn config() -> NginxConfig {
        NginxConfig::default()
    }

    /// The address of this path (which begins with a slash) on this server.
    pub fn url(&self, path: &str) -> String {
        self.daemon.url(path)
    }

    /// What the access log says of every request so far whose answer the caller has in full.
    ///
    /// nginx writes a request's line before it turns to the next event, so once the line of a request that we send now
    /// is there, all earlier ones are.
    pub async fn log(&self) -> Vec<LogLine> {
        let mark = format!("{WHO}?{}", self.reads.fetch_add(1, Ordering::Relaxed));
        ask(self.daemon.addr, &mark).await.expect("nginx answers");
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut lines = read_log(&self.daemon.log);
            if lines.iter().any(|line| line.uri == mark) {
                lines.retain(|line| !line.uri.starts_with(WHO));
                return lines;
            }
            assert!(Instant::now() < deadline, "nginx does not write its log");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

impl NginxConfig {
    /// `limit_req` with this rate (nginx's own notation: `2r/s`, `30r/m`), for all requests together.
    pub fn limit_req(mut self, rate: &str) -> Self {
        self.rate = Some(rate.to_owned());
        self
    }

    /// `limit_req` lets this many requests through at once before it refuses (`burst=.. nodelay`).
    pub fn burst(mut self, burst: u32) -> Self {
        self.burst = Some(burst);
        self
    }

    /// `limit_conn`: this many requests at one time. nginx counts a request until it has sent all of the body.
    pub fn limit_conn(mut self, connections: u32) -> Self {
        self.connections = Some(connections);
        self
    }

    /// Refusals of `limit_req` carry this `Retry-After`. nginx itself never sends one.
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// How big the served file is. It is all zeros.
    pub fn file_size(mut self, bytes: u64) -> Self {
        self.file_size = bytes;
        self
    }

    pub async fn start(self) -> Nginx {
        let daemon = Daemon::start(|home, addr, name| {
            let file = File::create(home.join("feed")).expect("a file to serve");
            file.set_len(self.file_size).expect("room for the file to serve");
            for folder in ["body", "proxy", "fastcgi", "uwsgi", "scgi"] {
                fs::create_dir_all(home.join(folder)).expect("a folder for nginx");
            }
            let config = home.join("nginx.conf");
            fs::write(&config, self.text(addr, name)).expect("nginx's configuration");

            let mut command = Command::new(program("nginx"));
            command.arg("-p").arg(home).arg("-c").arg(config).arg("-e").arg("stderr");
            command
        })
        .await;
        Nginx { daemon, reads: AtomicU32::new(0) }
    }

    fn text(&self, addr: SocketAddr, name: &str) -> String {
        let mut zones = String::new();
        let mut limits = String::new();
        if let Some(rate) = &self.rate {
            zones += &format!("limit_req_zone $server_name zone=req:64k rate={rate};\n");
            limits += &match self.burst {
                Some(burst) => format!("limit_req zone=req burst={burst} nodelay;\n"),
                None => "limit_req zone=req;\n".to_owned(),
            };
            limits += "limit_req_status 429;\n";
        }
        if let Some(connections) = self.connections {
            zones += "limit_conn_zone $server_name zone=conn:64k;\n";
            limits += &format!("limit_conn conn {connections};\nlimit_conn_status 429;\n");
        }
        if let Some(seconds) = self.retry_after {
            // nginx leaves a header with an empty value out.
            zones += &format!("map $limit_req_status $retry_after {{ default ''; REJECTED '{seconds}'; }}\n");
            limits += "add_header Retry-After $retry_after always;\n";
        }
        // The file is served with `try_files`, since a `return` would answer before the limits are looked at.
        // `sndbuf`: what the kernel buffers of an unread body is small beside a file of some MiB.
        format!(
            "daemon off;
            master_process off;
            pid nginx.pid;
            error_log stderr error;
            events {{ worker_connections 512; }}
            http {{
                client_body_temp_path body;
                proxy_temp_path proxy;
                fastcgi_temp_path fastcgi;
                uwsgi_temp_path uwsgi;
                scgi_temp_path scgi;
                log_format harness '$status $msec $request_uri';
                access_log log harness;
                keepalive_requests 100000;
                {zones}
                server {{
                    listen {addr} sndbuf=64k;
                    server_name harness;
                    root .;
                    location = {WHO} {{ return 200 {name}; }}
                    location / {{
                        {limits}
                        try_files /feed =404;
                    }}
                }}
            }}\n"
        )
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// HAProxy
// ---------------------------------------------------------------------------------------------------------------------

/// A running HAProxy that refuses by its stick table, in front of another server.
///
/// It counts refused requests as well: a client that keeps asking keeps being refused.
#[derive(Debug)]
pub struct Haproxy {
    daemon: Daemon,
}

/// How a [`Haproxy`] is to be set up.
#[derive(Debug, Clone)]
pub struct HaproxyConfig {
    backend: SocketAddr,
    requests: u32,
    period: Duration,
    retry_after: Option<u32>,
}

impl Haproxy {
    /// More than `requests` in `period` (`http_req_rate`) are answered with 429, the others by `backend`.
    pub fn config(backend: SocketAddr, requests: u32, period: Duration) -> HaproxyConfig {
        HaproxyConfig { backend, requests, period, retry_after: None }
    }

    /// The address of this path (which begins with a slash) on this server.
    pub fn url(&self, path: &str) -> String {
        self.daemon.url(path)
    }

    /// Stops HAProxy and returns its whole log.
    ///
    /// HAProxy writes a line when it is done with a request, which may be a little after the client has the answer; on
    /// a soft stop it ends what it is at first, so the log is complete once the process is gone.
    pub async fn finish(mut self) -> Vec<LogLine> {
        self.daemon.signal("USR1");
        self.daemon.ended().await;
        let mut lines = read_log(&self.daemon.log);
        lines.retain(|line| !line.uri.starts_with(WHO));
        lines
    }
}

impl HaproxyConfig {
    /// Refusals carry this `Retry-After`.
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    pub async fn start(self) -> Haproxy {
        let daemon = Daemon::start(|home, addr, name| {
            let config = home.join("haproxy.cfg");
            fs::write(&config, self.text(addr, name)).expect("HAProxy's configuration");

            let mut command = Command::new(program("haproxy"));
            command.arg("-db").arg("-f").arg(config);
            command
        })
        .await;
        Haproxy { daemon }
    }

    fn text(&self, addr: SocketAddr, name: &str) -> String {
        let Self { backend, requests, .. } = self;
        let period = self.period.as_millis();
        let hint = self.retry_after.map(|seconds| format!("hdr Retry-After {seconds} ")).unwrap_or_default();
        // `noreuseport`: else two HAProxys may listen on one port, and each gets some of the other's requests.
        // The refusals come before the backend is asked, and after the counting.
        format!(
            "global
                noreuseport
                nbthread 1
                hard-stop-after 5s
            defaults
                mode http
                timeout connect 30s
                timeout client 30s
                timeout server 30s
            frontend harness
                bind {addr}
                log stdout format raw local0
                log-format '%ST %Ts.%ms %HU'
                http-request return status 200 content-type text/plain string {name} if {{ path {WHO} }}
                stick-table type ip size 1k expire 1m store http_req_rate({period}ms)
                http-request track-sc0 src
                http-request return status 429 {hint}if {{ sc_http_req_rate(0) gt {requests} }}
                default_backend harness
            backend harness
                server harness {backend}\n"
        )
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Any server
// ---------------------------------------------------------------------------------------------------------------------

/// A child process that listens on a loopback port, and the folder it works in. Dropped, both are gone.
///
/// The child stays in the test's process group, so a test runner that kills a test which hangs kills it as well.
#[derive(Debug)]
struct Daemon {
    child: Child,
    addr: SocketAddr,
    log: PathBuf,
    home: TempDir,
}

impl Daemon {
    /// Starts what `prepare` makes of a folder, an address, and the name to give at [`WHO`].
    async fn start(prepare: impl Fn(&Path, SocketAddr, &str) -> Command) -> Self {
        for _ in 0..10 {
            if let Some(daemon) = Self::try_start(&prepare).await {
                return daemon;
            }
        }
        panic!("no free loopback port in ten tries");
    }

    /// `None` when somebody else took the port in the meantime.
    async fn try_start(prepare: &impl Fn(&Path, SocketAddr, &str) -> Command) -> Option<Self> {
        let home = TempDir::with_prefix("host-gate-").expect("a temporary folder");
        let addr = free_addr();
        let name = home.path().file_name().expect("a temporary folder has a name").to_string_lossy().into_owned();
        let log = home.path().join("log");
        let errors = home.path().join("errors");

        let mut command = prepare(home.path(), addr, &name);
        let child = command
            .current_dir(home.path())
            .stdin(Stdio::null())
            // HAProxy logs here; nginx opens the same file by itself, and prints nothing.
            .stdout(File::create(&log).expect("a log file"))
            .stderr(File::create(&errors).expect("a file for errors"))
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} does not start ({error}); scripts/test installs it"));
        let mut daemon = Self { child, addr, log, home };

        let deadline = Instant::now() + PATIENCE;
        loop {
            // Only our own child knows the name: whoever else may listen there is not taken for it.
            if ask(addr, WHO).await.is_ok_and(|answer| answer.trim() == name) {
                return Some(daemon);
            }
            if let Some(status) = daemon.child.try_wait().expect("the state of a child") {
                let errors = fs::read_to_string(&errors).unwrap_or_default();
                let taken = ["Address already in use", "Address in use", "cannot bind"];
                assert!(taken.iter().any(|text| errors.contains(text)), "{command:?}: {status}\n{errors}");
                return None;
            }
            assert!(Instant::now() < deadline, "{command:?} does not answer");
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    fn signal(&self, name: &str) {
        // Our own child, not yet waited for: the id cannot be another's. The standard library only sends SIGKILL.
        let sent = Command::new("sh").arg("-c").arg(format!("kill -{name} {}", self.child.id())).status();
        assert!(sent.is_ok_and(|status| status.success()), "the signal {name} is sent");
    }

    async fn ended(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().expect("the state of a child").is_none() {
            assert!(Instant::now() < deadline, "the server does not stop");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail only for a child that has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let errors = fs::read_to_string(self.home.path().join("errors")).unwrap_or_default();
            eprintln!("what the server printed: {errors}");
        }
    }
}

/// The program's path: Debian puts servers where an ordinary user's `PATH` does not look.
fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("{name} is not installed; scripts/test installs it"))
}

/// A port that was free a moment ago.
fn free_addr() -> SocketAddr {
    TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr()).expect("a loopback port")
}

/// Gets this path on a connection of its own, and returns the body.
async fn ask(addr: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(addr).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (_, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
    Ok(body.to_owned())
}

/// Reads a log of lines `status seconds.millis uri`. A last line that is not whole yet is left out, and so is what
/// HAProxy says of itself ("Proxy harness stopped ..").
fn read_log(path: &Path) -> Vec<LogLine> {
    let text = fs::read_to_string(path).expect("the server's log");
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .filter(|line| line.starts_with(|first: char| first.is_ascii_digit()))
        .map(|line| parse(line).unwrap_or_else(|| panic!("a line of the access log: {line:?}")))
        .collect()
}

fn parse(line: &str) -> Option<LogLine> {
    let (status, rest) = line.split_once(' ')?;
    let (at, uri) = rest.split_once(' ')?;
    let (seconds, millis) = at.split_once('.')?;
    Some(LogLine {
        status: status.parse().ok()?,
        at: Duration::from_secs(seconds.parse().ok()?) + Duration::from_millis(millis.parse().ok()?),
        uri: uri.to_owned(),
    })
}
