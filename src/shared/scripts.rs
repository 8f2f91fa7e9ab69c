//! The rules of one host as the store runs them: one script to ask, one to give back and report, one for the rest.

use std::sync::LazyLock;

use super::link::Script;

macro_rules! script {
    ($($part:literal),*) => {
        LazyLock::new(|| Script::new(concat!($(include_str!(concat!("scripts/", $part))),*)))
    };
}

pub(super) static ADMIT: LazyLock<Script> = script!("admit_free.lua", "pace.lua", "host.lua", "admit.lua");
pub(super) static RELEASE: LazyLock<Script> = script!("release_free.lua", "pace.lua", "host.lua", "release.lua");
pub(super) static STEER: LazyLock<Script> = script!("pace.lua", "host.lua", "steer.lua");

#[cfg(test)]
mod tests;
