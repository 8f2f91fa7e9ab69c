//! What the sections print, and the goals that close the report.

use std::fmt::Display;

/// Collects the goals while the sections print their tables.
#[derive(Debug)]
pub(crate) struct Report {
    /// Smaller sizes and fewer samples: to see that everything runs, not to quote.
    pub(crate) quick: bool,
    goals: Vec<Goal>,
}

#[derive(Debug)]
struct Goal {
    name: String,
    measured: String,
    target: String,
    met: bool,
}

impl Report {
    pub(crate) fn new(quick: bool) -> Self {
        Self { quick, goals: Vec::new() }
    }

    pub(crate) fn section(&self, heading: &str) {
        println!("\n=== {heading}\n");
    }

    /// `target` says the bound in words (`<=110`), `met` whether `measured` keeps it.
    pub(crate) fn goal(
        &mut self,
        name: impl Into<String>,
        measured: impl Display,
        target: impl Into<String>,
        met: bool,
    ) {
        let (name, target) = (name.into(), target.into());
        self.goals.push(Goal { name, measured: measured.to_string(), target, met });
    }

    /// One line per goal.
    pub(crate) fn close(&self) {
        println!();
        for Goal { name, measured, target, met } in &self.goals {
            let verdict = if *met { "met" } else { "missed" };
            println!("goal: {name} measured {measured} target {target} {verdict}");
        }
    }
}
