//! The examples, run as a newcomer runs them: as programs.

mod demo;
mod fetch;
mod program;
#[cfg(feature = "redis")]
mod replicas;
#[path = "../support/mod.rs"]
mod support;
