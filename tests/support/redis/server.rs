//! One server process: how it is started, asked, broken and ended.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use super::{Build, PATIENCE, random_port};

/// How often another port is tried.
const TRIES: usize = 20;

/// A server that listens on a loopback port, and the folder it works in. Dropped, both are gone.
///
/// It stays in the test's process group, so a test runner that kills a test which hangs kills it as well.
#[derive(Debug)]
pub struct Server {
    launch: Launch,
    home: TempDir,
    port: u16,
    child: Child,
    running: bool,
}

impl Server {
    pub(super) async fn start(launch: Launch) -> Self {
        for _ in 0..TRIES {
            let home = TempDir::with_prefix("host-gate-").expect("a temporary folder");
            for (name, text) in &launch.files {
                fs::write(home.path().join(name), text).expect("a file for the server");
            }
            let port = random_port();
            let child = launch.spawn(home.path(), port);
            let mut server = Self { launch: launch.clone(), home, port, child, running: true };
            if server.is_up().await {
                return server;
            }
        }
        panic!("no free loopback port in {TRIES} tries");
    }

    /// Waits for the server. `false` when another one has the port.
    async fn is_up(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Whoever else may listen there has another process id.
            let mine = format!("process_id:{}\r", self.child.id());
            if self.try_cli(&["INFO"]).await.is_ok_and(|info| info.contains(&mine) && !info.contains("loading:1")) {
                return true;
            }
            if let Some(status) = self.child.try_wait().expect("the state of a child") {
                self.running = false;
                let taken = self.log().contains("Address already in use");
                assert!(taken, "{:?}: {status}\n{}", self.launch, self.last_words());
                return false;
            }
            assert!(Instant::now() < deadline, "{:?} does not answer\n{}", self.launch, self.last_words());
            sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// `redis://..` or `rediss://..`, with the password.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// The address of a proxy before this server.
    pub(super) fn url_at(&self, port: u16) -> String {
        let scheme = if self.launch.tls { "rediss" } else { "redis" };
        let password = self.launch.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        format!("{scheme}://{password}127.0.0.1:{port}/")
    }

    /// What `redis-cli` prints for this command: an array has a line for each value. An error reply is a panic.
    pub async fn cli(&self, args: &[&str]) -> String {
        self.try_cli(args).await.unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// Like [`cli`](Self::cli), for a command that may fail, or a server that may not be there.
    pub async fn try_cli(&self, args: &[&str]) -> Result<String, String> {
        let mut command = tokio::process::Command::new("redis-cli");
        command.args(["-e", "-p", &self.port.to_string()]);
        if self.launch.tls {
            command.args(["--tls", "--cacert", Launch::ROOT]);
        }
        if let Some(password) = &self.launch.password {
            command.env("REDISCLI_AUTH", password);
        }
        command.args(args).current_dir(self.home.path()).stdin(Stdio::null()).kill_on_drop(true);

        let output = timeout(PATIENCE, command.output()).await.map_err(|_| "redis-cli does not come back")?;
        let output = output.unwrap_or_else(|error| panic!("redis-cli: {error}; scripts/test installs it"));
        let printed = String::from_utf8_lossy(&output.stdout);
        if output.status.success() {
            Ok(printed.trim_end_matches('\n').to_owned())
        } else {
            Err(format!("{printed}{}", String::from_utf8_lossy(&output.stderr)))
        }
    }

    /// Writes a file into the server's folder, all at once: the server never reads half of it.
    pub(super) fn put(&self, name: &str, text: &str) {
        let draft = self.home.path().join("draft");
        fs::write(&draft, text).expect("a file for the server");
        fs::rename(draft, self.home.path().join(name)).expect("a file for the server");
    }

    pub fn is_running(&self) -> bool {
        self.running
    }

    /// Ends it by SIGKILL. The port refuses connections when this returns.
    pub fn kill(&mut self) {
        // Both fail only for a child that has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.running = false;
        if self.launch.preload.is_some() {
            // A killed process leaves what libfaketime shares with its children; the next one of this id trips on it.
            for kind in ["faketime_shm", "sem.faketime_sem"] {
                let _ = fs::remove_file(format!("/dev/shm/{kind}_{}", self.child.id()));
            }
        }
    }

    /// Starts it anew on the same port, after a kill if it still runs. It has its configuration, and its data if it was
    /// started with `--appendonly yes`; else it is empty, and knows no script.
    pub async fn restart(&mut self) {
        self.kill();
        for _ in 0..TRIES {
            self.child = self.launch.spawn(self.home.path(), self.port);
            self.running = true;
            if self.is_up().await {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
        panic!("somebody else keeps the port {}", self.port);
    }

    /// SIGSTOP: it still has its connections, and the system even accepts new ones, but nothing is answered.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        // The signal takes effect in its own time; this returns when it has.
        waitpid(Some(self.pid()), WaitOptions::UNTRACED).expect("a child that stops");
    }

    /// SIGCONT: it runs what has come in meanwhile, and then goes on.
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        assert!(self.running, "no signal to a server that was killed");
        // A child that was not waited for yet: the id cannot be another's.
        kill_process(self.pid(), signal).expect("a running server");
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("log")).unwrap_or_default()
    }

    fn last_words(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("the last the server on port {} had to say:\n{}", self.port, self.last_words());
        }
    }
}

/// What is started. Relative paths are in the server's folder.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    build: Build,
    args: Vec<String>,
    files: Vec<(&'static str, String)>,
    preload: Option<String>,
    password: Option<String>,
    tls: bool,
}

impl Launch {
    /// The certificate of a TLS server's authority.
    pub(super) const ROOT: &str = "root.pem";
    /// What libfaketime adds to the server's clock.
    pub(super) const CLOCK: &str = "clock";

    /// Everything in memory, unless later arguments say otherwise.
    pub(super) fn new(build: Build) -> Self {
        Self::bare(build).args(&["--save", "", "--appendonly", "no", "--dir", "."])
    }

    /// A sentinel with this configuration, which it rewrites as it learns.
    pub(super) fn sentinel(config: String) -> Self {
        Self::bare(Build::Redis).file("sentinel.conf", config).args(&["sentinel.conf", "--sentinel"])
    }

    fn bare(build: Build) -> Self {
        Self { build, args: Vec::new(), files: Vec::new(), preload: None, password: None, tls: false }
    }

    pub(super) fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    pub(super) fn file(mut self, name: &'static str, text: String) -> Self {
        self.files.push((name, text));
        self
    }

    pub(super) fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self.args(&["--requirepass", password])
    }

    pub(super) fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Libraries to load first, as `LD_PRELOAD` has them: libfaketime, which reads [`CLOCK`](Self::CLOCK).
    pub(super) fn preload(mut self, libraries: String) -> Self {
        self.preload = Some(libraries);
        self
    }

    fn spawn(&self, home: &Path, port: u16) -> Child {
        let log = File::options().create(true).append(true).open(home.join("log")).expect("a log file");
        let mut command = Command::new(self.build.program());
        command.args(&self.args).args(["--bind", "127.0.0.1"]);
        command.args(if self.tls { ["--port", "0", "--tls-port"].as_slice() } else { &["--port"] });
        command.arg(port.to_string());
        if let Some(libraries) = &self.preload {
            command
                .env("LD_PRELOAD", libraries)
                .env("FAKETIME_TIMESTAMP_FILE", Self::CLOCK)
                .env("FAKETIME_NO_CACHE", "1")
                // Setting a machine's clock does not move the monotonic one either, which the event loop goes by.
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        }
        command
            .current_dir(home)
            .stdin(Stdio::null())
            .stderr(log.try_clone().expect("a log file"))
            .stdout(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} does not start ({error}); scripts/test installs it"))
    }
}
