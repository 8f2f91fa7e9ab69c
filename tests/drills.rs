//! Real servers are broken under load, and a gate whose store they are must lose nothing by it.
//!
//! | module | what |
//! |---|---|
//! | [`outages`] | the store is away: killed, stopped, paused, replaced, cut off, too slow |
//! | [`server`] | the store is there, and loses scripts, memory, keys, time |
//! | [`processes`] | a process is killed with leases, or first in line |
//! | [`permits`] | late and double release, requests dropped at every point |
//! | [`drill`] | the course of a drill under load, and what must hold in each |
//! | [`fleet`], [`upstream`] | the replicas and their load, and what they send it to |
//! | [`row`] | what was measured |
//!
//! `scripts/drills shared` runs them in their long form, and prints a table.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]
#![allow(unreachable_pub, reason = "`pub` is what a module has for the others")]

mod support;

#[path = "drills/drill.rs"]
mod drill;
#[path = "drills/fleet.rs"]
mod fleet;
#[path = "drills/outages.rs"]
mod outages;
#[path = "drills/permits.rs"]
mod permits;
#[path = "drills/processes.rs"]
mod processes;
#[path = "drills/row.rs"]
mod row;
#[path = "drills/server.rs"]
mod server;
#[path = "drills/upstream.rs"]
mod upstream;
