//! A client of `hyper` and a server of `hyper` over the loopback: without a layer, with `ConcurrencyLimit`, with the gate.
//!
//! The server is a process of its own. All arms share one client and its connections, and take turns in an order drawn anew
//! for each round, so what differs between two connections or two seconds of the machine is nobody's in particular.
//!
//! Whether there is a difference is tested by permutation over the rounds. That none is found does not say that there is
//! none: the interval says how large it could be.

mod client;
mod server;

use tokio::runtime::Runtime;

use self::client::{AT_A_TIME, Client, Figures, LAYERS};
use self::server::{Server, serve};
use crate::child;
use crate::contention::crowd::runtime;
use crate::report::Report;
use crate::statistics::{Comparison, median};

/// What chance brings about once in so many times is taken for a difference.
const LEVEL: f64 = 0.01;

pub(crate) fn run(report: &mut Report) {
    report.section("end to end: a client and a server of hyper over the loopback");
    let (rounds, requests) = if report.quick { (10, 400) } else { (30, 3_000) };
    println!(
        "{rounds} rounds of {requests} requests for each layer, {AT_A_TIME} at a time. diff: to no layer, in percent, and"
    );
    println!(
        "the interval that it is in with 95 %. p: of a permutation test over the rounds. instr: of the whole process"
    );
    println!("of the client, per request, one at a time.\n");
    println!("{:<18}{:>10}{DIFFERENCE}{:>12}{DIFFERENCE}{:>11}{:>8}", "", "per second", "p99", "instr", "diff");
    let (server, runtime) = (Server::start(), runtime(1));
    for protocol in ["HTTP/1", "HTTP/2"] {
        let arms = measure(&runtime, protocol, server.port, rounds, requests);
        let counted = LAYERS.map(|layer| instructions(protocol, layer, server.port, report.quick));
        println!("{protocol}");
        for ((layer, arm), instructions) in LAYERS.iter().zip(&arms).zip(counted) {
            row(layer, arm, &arms[0], instructions, counted[0]);
        }
        for (figure, of) in FIGURES {
            let (gate, bare) = (values(&arms[2], of), values(&arms[0], of));
            let p = Comparison::of(&gate, &bare).p;
            let name = format!("{protocol} {figure} with the gate, p of the difference to no layer");
            report.goal(name, format!("{p:.4}"), format!(">={LEVEL}"), p >= LEVEL);
        }
    }
}

type Figure = fn(&Figures) -> f64;

const FIGURES: [(&str, Figure); 2] = [("per second", |figures| figures.per_second), ("p99", |figures| figures.p99_us)];

/// The figures of each layer, round by round.
fn measure(runtime: &Runtime, protocol: &str, port: u16, rounds: usize, requests: usize) -> [Vec<Figures>; 3] {
    let client = runtime.block_on(async { Client::new(protocol, port) });
    let mut arms: [Vec<Figures>; 3] = Default::default();
    let mut order = [0, 1, 2];
    // Connects, and warms up.
    LAYERS.iter().for_each(|layer| _ = runtime.block_on(client.send(layer, requests, AT_A_TIME)));
    for _ in 0..rounds {
        fastrand::shuffle(&mut order);
        for arm in order {
            arms[arm].push(runtime.block_on(client.send(LAYERS[arm], requests, AT_A_TIME)));
        }
    }
    arms
}

fn instructions(protocol: &str, layer: &str, port: u16, quick: bool) -> f64 {
    let (few, many) = if quick { (50, 150) } else { (200, 1_000) };
    child::instructions_each(|requests| format!("client {protocol} {layer} {requests} {port}"), few, many)
}

pub(crate) fn child(case: &[&str]) -> bool {
    match *case {
        ["server"] => serve(),
        ["client", protocol, layer, requests, port] => runtime(1).block_on(async {
            let client = Client::new(protocol, child::number(port));
            // One after the other: what is under way at the same time depends on who is quicker.
            client.send(layer, child::number(requests), 1).await;
        }),
        _ => return false,
    }
    true
}

// --- the table ----------------------------------------------------------------------------------------------------

const DIFFERENCE: &str = "    diff (from .. to)         p";

fn row(layer: &str, arm: &[Figures], bare: &[Figures], instructions: f64, bare_instructions: f64) {
    let [rate, p99] = FIGURES.map(|(_, of)| {
        let (arm, bare) = (values(arm, of), values(bare, of));
        (median(&arm), difference(&arm, &bare))
    });
    let more = percent(instructions / bare_instructions);
    println!("  {layer:<16}{:>10.0}{}{:>9.0} us{}{instructions:>11.0}{more:>7.2}%", rate.0, rate.1, p99.0, p99.1);
}

fn difference(arm: &[f64], bare: &[f64]) -> String {
    if arm == bare {
        return " ".repeat(DIFFERENCE.len());
    }
    let Comparison { ratio, from, to, p } = Comparison::of(arm, bare);
    let [ratio, from, to] = [ratio, from, to].map(percent);
    format!("{ratio:>+8.1} ({from:>+5.1} .. {to:>+5.1}){p:>8.4}")
}

fn percent(ratio: f64) -> f64 {
    (ratio - 1.0) * 100.0
}

fn values(arm: &[Figures], of: Figure) -> Vec<f64> {
    arm.iter().map(of).collect()
}
