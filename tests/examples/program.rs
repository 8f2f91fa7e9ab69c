//! Running an example.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use tokio::process::Command;

#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    pub(crate) fn json(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    /// What was said of this URL.
    pub(crate) fn line(&self, url: &str) -> Value {
        self.json().into_iter().find(|line| line["url"] == url).unwrap_or_else(|| panic!("no {url}: {self:?}"))
    }
}

pub(crate) async fn run(program: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Done {
    let output = Command::new(program)
        .args(args)
        // A proxy of the machine's, or a wish for colours, is none of our business.
        .env_clear()
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("the example can be run");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Done { code: output.status.code().expect("an exit code"), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// The program. `cargo test` builds the examples beside the tests, but not when a single test file is run, and then an old
/// program would be tested: cargo is asked to build what is missing or older than its sources.
pub(crate) async fn build(example: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test: target/debug/deps/examples-..");
    let directory = test.parent().and_then(Path::parent).expect("target/debug").join("examples");
    let program = directory.join(example).with_extension(std::env::consts::EXE_EXTENSION);
    if is_fresh(&program) {
        return program;
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--all-features", "--example", example]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    // What cargo has set for this test would make build scripts run again.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&*name);
        }
    }
    let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().await.expect("cargo can be run");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    program
}

/// Not older than any of the sources that cargo lists in the file beside it, `program: source source ..`.
fn is_fresh(program: &Path) -> bool {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|data| data.modified());
    let Ok(sources) = std::fs::read_to_string(program.with_extension("d")) else {
        return false;
    };
    let Ok(built) = changed(program) else {
        return false;
    };
    let mut sources = sources.split_whitespace().skip(1).map(Path::new);
    sources.all(|source| changed(source).is_ok_and(|changed| changed <= built))
}
