//! Benches that are programs of their own.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::report::Report;

/// Runs another bench, passes on what it prints, and takes over its goals.
pub(crate) fn run(report: &mut Report, bench: &str, args: &[&str]) {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(cargo);
    command.args(["bench", "--bench", bench, "--"]).args(args).args(report.quick.then_some("--quick"));
    // What cargo told this program of its package is not for another cargo: it would run build scripts anew that look there.
    for (name, _) in env::vars_os() {
        let told = name.as_encoded_bytes();
        if told.starts_with(b"CARGO_PKG_") || told.starts_with(b"CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    let mut child = command.stdout(Stdio::piped()).spawn().expect("cargo runs");
    let printed = child.stdout.take().expect("it is piped");
    for line in BufReader::new(printed).lines() {
        let line = line.expect("text");
        match goal(&line) {
            Some((name, measured, target, verdict)) => report.goal(name, measured, target, verdict == "met"),
            None => println!("{line}"),
        }
    }
    let status = child.wait().expect("it is this program's child");
    if !status.success() {
        println!("{bench}: {status}");
    }
}

/// The parts of a line that [`Report::close`] has printed.
fn goal(line: &str) -> Option<(&str, &str, &str, &str)> {
    let (name, rest) = line.strip_prefix("goal: ")?.split_once(" measured ")?;
    let (measured, rest) = rest.split_once(" target ")?;
    let (target, verdict) = rest.rsplit_once(' ')?;
    Some((name, measured, target, verdict))
}
