//! This program as its own child: under callgrind, to count instructions; in a fresh process, to start from nothing; or as
//! the server at the other end.
//!
//! The case travels in an environment variable, so that it is nobody's argument.

use std::env;
use std::process::{Child, Command, Stdio};

const CASE: &str = "HOST_GATE_FAST_CASE";

/// True when this process is a child, and has done what it was started for. Each of the sections does its own cases, and
/// gives back whether a case is.
pub(crate) fn was_one(sections: &[fn(&[&str]) -> bool]) -> bool {
    let Ok(case) = env::var(CASE) else { return false };
    let words: Vec<&str> = case.split(' ').collect();
    assert!(sections.iter().any(|section| section(&words)), "no such case: {case}");
    true
}

pub(crate) fn number<N: TryFrom<usize>>(word: &str) -> N {
    let number = word.parse::<usize>().ok().and_then(|number| N::try_from(number).ok());
    number.unwrap_or_else(|| panic!("{word:?} is no number that fits"))
}

/// The instructions of a whole run of a case.
pub(crate) fn instructions(case: &str) -> u64 {
    let output = this_program(&["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"], case)
        .output()
        .unwrap_or_else(|error| panic!("cannot run valgrind: {error}; on Debian: apt-get install valgrind"));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case}: {}\n{log}", output.status);
    // ==123== Collected : 2401832
    let (_, collected) = log.rsplit_once("Collected :").unwrap_or_else(|| panic!("no count in valgrind's log:\n{log}"));
    let digits = collected.lines().next().unwrap_or_default().trim();
    digits.parse().unwrap_or_else(|error| panic!("{digits:?} is no count: {error}"))
}

/// The instructions of one step of a case, between two numbers of steps: what starting and warming up cost cancels out.
pub(crate) fn instructions_each(case: impl Fn(usize) -> String, few: usize, many: usize) -> f64 {
    let [few_cost, many_cost] = [few, many].map(|steps| instructions(&case(steps)) as f64);
    (many_cost - few_cost) / (many - few) as f64
}

/// What a case prints.
pub(crate) fn output(case: &str) -> String {
    let output = this_program(&[], case).stderr(Stdio::inherit()).output().expect("this program starts");
    assert!(output.status.success(), "{case}: {}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

/// A case that goes on until the guard is dropped.
pub(crate) fn start(case: &str) -> Running {
    Running(this_program(&[], case).stdout(Stdio::piped()).spawn().expect("this program starts"))
}

/// A child that ends with this.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It has nothing to say any more, whatever state it is in.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Behind a tool that runs it, or alone.
fn this_program(tool: &[&str], case: &str) -> Command {
    let path = env::current_exe().expect("this program has a path");
    let mut command = match tool {
        [] => Command::new(path),
        [tool, arguments @ ..] => {
            let mut command = Command::new(tool);
            command.args(arguments).arg(path);
            command
        }
    };
    command.env(CASE, case);
    command
}
