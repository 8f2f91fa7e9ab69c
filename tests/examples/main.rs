//! The two examples, run as a newcomer runs them: as programs.

mod demo;
mod fetch;
mod program;
#[path = "../support/mod.rs"]
mod support;
