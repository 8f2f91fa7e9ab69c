//! What a model checker is to try in every order: `scripts/loom`.
//!
//! Each model is one run of the gate's own code, by two or three threads, with one cell and one shard. At its end the gate
//! is at rest: the cell is fast, without a slot or a permit.
#![allow(missing_docs, reason = "their names say it")]

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use http::{HeaderMap, Request, StatusCode};
use loom::future::block_on;
use loom::thread::{self, JoinHandle};

use super::fast::FastPath;
use super::sync::{AtomicBool, AtomicU32, Ordering};
use super::waiter::Step;
use super::{Gate, Handle, Permit, Terms, Waiter};
use crate::config::{Config, Limits};
use crate::error::RateLimited;
use crate::host::HostKey;
use crate::pace::Pacing;
use crate::verdict::Outcome;

/// Two hosts of the one cell.
const A: &str = "a.example";
const B: &str = "b.example";
/// Longer than any run.
const BUDGET: Duration = Duration::from_secs(30);
/// Longer than that.
const LONG: Duration = Duration::from_secs(3600);

// --- permits ------------------------------------------------------------------------------------------------------

/// One of two is turned away at most, and what one has done is seen by the next.
pub fn one_request_of_a_host_at_a_time() {
    let gate = gate(1);
    let site = Arc::new(Site::default());
    let other = spawn(&gate, {
        let site = Arc::clone(&site);
        move |gate| site.serve(ask(gate, A).ok())
    });
    let served = site.serve(ask(&gate, A).ok()) + join(other);
    assert!(served >= 1, "nobody was served");
    assert_eq!(site.served(), served, "two were served at a time");
    assert_at_rest(&gate);
}

pub fn two_requests_of_a_host_at_a_concurrency_of_two() {
    let gate = gate(2);
    let other = spawn(&gate, |gate| assert_eq!(expect(ask(gate, A)).key(), Some(key(A))));
    assert_eq!(expect(ask(&gate, A)).key(), Some(key(A)));
    join(other);
    assert_at_rest(&gate);
}

pub fn hosts_that_share_a_cell_do_not_wait_for_each_other() {
    let gate = gate(1);
    let other = spawn(&gate, |gate| {
        for _ in 0..2 {
            assert_eq!(expect(ask(gate, B)).key(), Some(key(B)));
        }
    });
    for _ in 0..2 {
        assert_eq!(expect(ask(&gate, A)).key(), Some(key(A)));
    }
    join(other);
    assert_at_rest(&gate);
}

/// The cell goes from one host to another and back while somebody looks at it.
pub fn the_rights_of_a_host_that_shares_its_cell_are_its_own() {
    let mut config = config(1);
    config.per_host.insert(HostKey::new(B), Arc::new(Limits::default().concurrency(2)));
    let gate = lent(config);
    let site = Arc::new(Site::default());
    let first = expect(ask(&gate, A));
    let other = spawn(&gate, {
        let site = Arc::clone(&site);
        move |gate| site.serve(ask(gate, A).ok())
    });
    drop(first);
    drop(expect(ask(&gate, B)));
    let served = site.serve(ask(&gate, A).ok()) + join(other);
    assert_eq!(site.served(), served, "two were served at a time");
    assert_at_rest(&gate);
}

/// It never has a permit of its cell, which is claimed all the same.
pub fn a_host_limited_beforehand_goes_through_its_slot() {
    let mut config = config(1);
    config.per_host.insert(HostKey::new(A), Arc::new(Limits::default().quota(9, LONG)));
    let gate = lent(config);
    let site = Arc::new(Site::default());
    let other = spawn(&gate, {
        let site = Arc::clone(&site);
        move |gate| site.serve(Some(get(gate, A)))
    });
    let permit = get(&gate, A);
    assert!(matches!(permit, Permit::Told(_)), "the slot was not asked");
    let served = site.serve(Some(permit)) + join(other);
    assert_eq!((served, site.served()), (2, 2), "two were served at a time");
    gate.clear(&key(A));
    assert_at_rest(&gate);
}

// --- waiting ------------------------------------------------------------------------------------------------------

pub fn a_waiter_gets_the_permit_that_comes_back() {
    let gate = gate(1);
    let first = expect(ask(&gate, A));
    let site = Arc::new(Site::default());
    let waiter = spawn(&gate, {
        let site = Arc::clone(&site);
        move |gate| site.serve(Some(get(gate, A)))
    });
    site.serve(Some(first));
    join(waiter);
    assert_eq!(site.served(), 2, "two were served at a time");
    assert_at_rest(&gate);
}

pub fn two_waiters_get_the_permit_one_after_the_other() {
    let gate = gate(1);
    let first = expect(ask(&gate, A));
    let site = Arc::new(Site::default());
    let waiters = [(); 2].map(|()| {
        let site = Arc::clone(&site);
        spawn(&gate, move |gate| site.serve(Some(get(gate, A))))
    });
    drop(first);
    waiters.into_iter().for_each(|waiter| _ = join(waiter));
    assert_eq!(site.served(), 2, "two were served at a time");
    assert_at_rest(&gate);
}

/// Whether it is waiting, woken or admitted by then.
pub fn a_waiter_that_goes_away_leaves_its_turn_to_the_next() {
    let gate = gate(1);
    let first = expect(ask(&gate, A));
    let fickle = spawn(&gate, |gate| {
        if let Err(mut waiter) = ask(gate, A) {
            drop(block_on(poll_fn(|cx| Poll::Ready(waiter.step(cx.waker())))));
        }
    });
    let waiter = spawn(&gate, |gate| drop(get(gate, A)));
    drop(first);
    join(fickle);
    join(waiter);
    assert_at_rest(&gate);
}

/// It looks once, at the worst moment.
pub fn a_request_that_may_not_wait_leaves_nothing() {
    let gate = gate(1);
    let first = expect(ask(&gate, A));
    let other = spawn(&gate, |gate| {
        let terms = Terms { budget: Some(Duration::ZERO), ..Terms::default() };
        drop(outcome(Waiter::new(Arc::clone(gate), key(A), terms)));
    });
    drop(first);
    join(other);
    assert_at_rest(&gate);
}

/// A waits in its slot for a permit of the slot, while those of the cell are the other host's.
pub fn a_slow_host_is_not_disturbed_by_the_one_it_shares_its_cell_with() {
    let gate = gate(1);
    let of_the_cell = expect(ask(&gate, B));
    let of_the_slot = expect(ask(&gate, A));
    let waiter = spawn(&gate, |gate| drop(get(gate, A)));
    let other = thread::spawn(move || drop(of_the_cell));
    drop(of_the_slot);
    join(waiter);
    join(other);
    assert_at_rest(&gate);
}

// --- refusals -----------------------------------------------------------------------------------------------------

pub fn nothing_is_sent_once_a_refusal_is_known() {
    nothing_is_sent_after(|_, permit| refuse(permit));
}

pub fn nothing_is_sent_once_a_penalty_is_known() {
    nothing_is_sent_after(|gate, _| gate.penalize(&key(A), LONG));
}

fn nothing_is_sent_after(hold: impl FnOnce(&Handle, &mut Permit)) {
    let gate = gate(2);
    let known = Arc::new(AtomicBool::new(false));
    let mut refused = expect(ask(&gate, A));
    assert!(refused.send(Terms::default).is_ok());
    let other = spawn(&gate, {
        let known = Arc::clone(&known);
        move |gate| {
            if let Ok(mut permit) = ask(gate, A) {
                let is_known = known.load(Ordering::Acquire);
                let is_sent = permit.send(Terms::default).is_ok();
                assert!(!(is_known && is_sent), "a request went out after the host was known to refuse");
            }
        }
    });
    hold(&gate, &mut refused);
    known.store(true, Ordering::Release);
    assert!(ask(&gate, A).is_err(), "a request was let through");
    drop(refused);
    join(other);
    assert!(ask(&gate, A).is_err(), "the refusal was forgotten");
    gate.clear(&key(A));
    assert_at_rest(&gate);
}

/// Admitted before, or told that the hold is beyond its budget.
pub fn a_waiter_that_a_penalty_leaves_no_prospect_hears_of_it() {
    let gate = gate(1);
    let first = expect(ask(&gate, A));
    let waiter = spawn(&gate, |gate| drop(ask(gate, A).or_else(|waiter| outcome(*waiter))));
    let other = thread::spawn(move || drop(first));
    gate.penalize(&key(A), LONG);
    join(waiter);
    join(other);
    gate.clear(&key(A));
    assert_at_rest(&gate);
}

pub fn who_is_turned_back_at_the_send_goes_once_the_host_is_cleared() {
    let gate = gate(1);
    let other = spawn(&gate, |gate| {
        let mut permit = get(gate, A);
        while let Err(waiter) = permit.send(Terms::default) {
            permit = wait(*waiter);
        }
    });
    gate.penalize(&key(A), BUDGET / 2);
    gate.clear(&key(A));
    join(other);
    assert_at_rest(&gate);
}

pub fn who_waits_hears_of_a_permit_that_is_turned_back_at_the_send() {
    let gate = gate(1);
    let mut first = expect(ask(&gate, A));
    let waiter = spawn(&gate, |gate| {
        let mut waiter = ask(gate, A).expect_err("the permit is out, or the host is held");
        block_on(poll_fn(|cx| match waiter.step(cx.waker()) {
            // Until it knows of the hold.
            Step::Sleep { now, until, .. } if until.since(now) < BUDGET / 4 => Poll::Pending,
            _ => Poll::Ready(()),
        }));
    });
    gate.penalize(&key(A), BUDGET / 2);
    assert!(first.send(Terms::default).is_err(), "a request went out after the host was known to refuse");
    join(waiter);
    gate.clear(&key(A));
    assert_at_rest(&gate);
}

pub fn a_host_that_is_cleared_is_fast_again() {
    let gate = gate(2);
    let other = spawn(&gate, |gate| {
        if let Ok(mut permit) = ask(gate, A) {
            _ = permit.send(Terms::default);
        }
    });
    gate.penalize(&key(A), LONG);
    gate.clear(&key(A));
    drop(expect(ask(&gate, A)));
    join(other);
    assert_at_rest(&gate);
}

// --- steering -----------------------------------------------------------------------------------------------------

pub fn a_lowered_concurrency_holds_for_a_host_in_flight() {
    let gate = gate(2);
    let first = expect(ask(&gate, A));
    lower_while_somebody_asks(&gate, || drop(first));
}

/// Nothing of it is in flight.
pub fn a_lowered_concurrency_holds_for_a_host_that_its_cell_remembers() {
    let gate = gate(2);
    drop(expect(ask(&gate, A)));
    lower_while_somebody_asks(&gate, || {});
}

fn lower_while_somebody_asks(gate: &Handle, then: impl FnOnce()) {
    let taken = Arc::new(AtomicBool::new(false));
    let other = spawn(gate, {
        let taken = Arc::clone(&taken);
        move |gate| {
            if let Ok(_permit) = ask(gate, A) {
                assert!(!taken.load(Ordering::Relaxed), "a second permit was given");
            }
        }
    });
    gate.set_limits(key(A), Limits::default().concurrency(1));
    then();
    if let Ok(_permit) = ask(gate, A) {
        taken.store(true, Ordering::Relaxed);
        taken.store(false, Ordering::Relaxed);
    }
    join(other);
    assert_at_rest(gate);
}

pub fn a_lowered_concurrency_holds_for_a_host_that_is_just_coming() {
    let gate = gate(2);
    let other = spawn(&gate, |gate| drop(expect(ask(gate, A))));
    gate.set_limits(key(A), Limits::default().concurrency(1));
    join(other);
    let only = expect(ask(&gate, A));
    assert!(ask(&gate, A).is_err(), "a second permit was given");
    drop(only);
    assert_at_rest(&gate);
}

pub fn a_raised_concurrency_reaches_who_waits() {
    let gate = gate(1);
    let first = expect(ask(&gate, A));
    let waiter = spawn(&gate, |gate| drop(get(gate, A)));
    gate.set_limits(key(A), Limits::default().concurrency(2));
    join(waiter);
    drop(first);
    assert_at_rest(&gate);
}

/// Whatever else is going on.
pub fn a_snapshot_tells_who_is_in_flight_and_changes_nothing() {
    let gate = gate(2);
    let held = expect(ask(&gate, A));
    let again = spawn(&gate, |gate| drop(expect(ask(gate, A))));
    let other = spawn(&gate, |gate| drop(expect(ask(gate, B))));
    let snapshots = gate.snapshots(|_| true);
    let in_flight = |host| {
        let of_host = snapshots.iter().filter(|snapshot| snapshot.host == key(host));
        of_host.map(|snapshot| snapshot.in_flight).collect::<Vec<_>>()
    };
    assert!(matches!(in_flight(A)[..], [1 | 2]), "{snapshots:?}");
    assert!(matches!(in_flight(B)[..], [] | [1]), "{snapshots:?}");
    assert_eq!(snapshots.len(), in_flight(A).len() + in_flight(B).len(), "{snapshots:?}");
    join(again);
    join(other);
    drop(held);
    assert_at_rest(&gate);
}

/// The only host may come and go: a name that is being written down is nobody's.
pub fn a_snapshot_never_names_a_host_that_nobody_asks() {
    let gate = gate(1);
    let other = spawn(&gate, |gate| {
        drop(expect(ask(gate, A)));
        drop(expect(ask(gate, B)));
    });
    for snapshot in gate.snapshots(|_| true) {
        assert!(snapshot.host == key(A) || snapshot.host == key(B), "{snapshot:?}");
        assert_eq!(snapshot.in_flight, 1, "{snapshot:?}");
    }
    join(other);
    assert_at_rest(&gate);
}

pub fn heads_and_bodies_are_counted_whatever_the_cell_turns_to() {
    let gate = gate(2);
    let other = spawn(&gate, |gate| {
        let mut permit = expect(ask(gate, A));
        permit.head_arrived();
    });
    let mut permit = expect(ask(&gate, A));
    gate.clear(&key(A));
    permit.head_arrived();
    drop(permit);
    join(other);
    assert_at_rest(&gate);
}

// --- the end ------------------------------------------------------------------------------------------------------

pub fn a_closed_gate_goes_with_its_last_permit() {
    let gate = gate(2);
    let (fast, weak) = (gate.table.fast_in_use().expect("a request has come"), Arc::downgrade(&gate));
    let [one, two] = [(); 2].map(|()| expect(ask(&gate, A)));
    let others = [one, two].map(|permit| thread::spawn(move || drop(permit)));
    drop(gate);
    others.into_iter().for_each(join);
    assert_gone(fast, &weak);
}

pub fn a_closed_gate_still_serves_who_waits() {
    let gate = gate(1);
    let (fast, weak) = (gate.table.fast_in_use().expect("a request has come"), Arc::downgrade(&gate));
    let permit = expect(ask(&gate, A));
    let waiter = ask(&gate, A).expect_err("it has to wait");
    let waiting = thread::spawn(move || drop(wait(*waiter)));
    let closing = thread::spawn(move || drop(gate));
    drop(permit);
    join(waiting);
    join(closing);
    assert_gone(fast, &weak);
}

/// Nobody else comes, but one is about to go out.
pub fn a_closed_gate_still_heeds_a_refusal() {
    let gate = gate(2);
    let [mut refused, mut ready] = [(); 2].map(|()| expect(ask(&gate, A)));
    assert!(refused.send(Terms::default).is_ok());
    let (fast, weak) = (gate.table.fast_in_use().expect("a request has come"), Arc::downgrade(&gate));
    let closing = thread::spawn(move || drop(gate));
    refuse(&mut refused);
    drop(refused);
    assert!(ready.send(Terms::default).is_err(), "a request went out after the host was known to refuse");
    drop(ready);
    join(closing);
    assert_gone(fast, &weak);
}

/// Whoever still has to do with the one gate does not disturb the other.
pub fn cells_go_from_a_gate_that_is_over_to_the_next() {
    let first = gate(1);
    let fast = first.table.fast_in_use().expect("a request has come");
    let permit = expect(ask(&first, A));
    let waiter = ask(&first, A).expect_err("it has to wait");
    let ending = thread::spawn(move || drop(permit));
    let waiting = thread::spawn(move || drop(wait(*waiter)));
    drop(first);
    let second = gate(1);
    let held = expect(ask(&second, B));
    join(ending);
    join(waiting);
    assert_eq!(held.key(), Some(key(B)));
    assert!(ask(&second, B).is_err(), "a permit has gone back that was not given");
    drop(held);
    assert_at_rest(&second);
    drop(second);
    assert!(fast.gate().is_none(), "the cells still belong to a gate");
}

// --- what they are made of ----------------------------------------------------------------------------------------

/// A host, which sees to it that nobody asks it while it serves another one.
#[derive(Default)]
struct Site(AtomicU32);

impl Site {
    /// How many were served: one, if that one may ask.
    fn serve(&self, permit: Option<Permit>) -> u32 {
        let Some(_permit) = permit else { return 0 };
        // Nothing but the permits keeps this in order.
        let before = self.0.load(Ordering::Relaxed);
        self.0.store(before + 1, Ordering::Relaxed);
        1
    }

    fn served(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

fn config(concurrency: usize) -> Config {
    // With it a slot says nothing any more as soon as it is out of use.
    let mut config = Config { concurrency, max_wait: BUDGET, ..Config::default() };
    config.set_pacing(Pacing::Reactive);
    config
}

fn gate(concurrency: usize) -> Handle {
    lent(config(concurrency))
}

/// A gate with its cells, which come with the first request, under a lock that the checker knows nothing of.
fn lent(config: Config) -> Handle {
    let gate = Handle::new(config);
    drop(expect(ask(&gate, "first.example")));
    gate
}

fn key(host: &str) -> HostKey {
    HostKey::new(format!("{host}:80"))
}

fn ask(gate: &Handle, host: &str) -> Result<Permit, Box<Waiter>> {
    let request = Request::get(format!("http://{host}/")).body(()).expect("a request");
    match gate.enter_plainly(&request) {
        Some(plain) => Ok(Permit::Plain(plain)),
        None => gate.enter(&request).map(|permit| permit.expect("no request passes ungated")),
    }
}

fn get(gate: &Handle, host: &str) -> Permit {
    ask(gate, host).unwrap_or_else(|waiter| wait(*waiter))
}

fn wait(waiter: Waiter) -> Permit {
    outcome(waiter).unwrap_or_else(|error| panic!("{error}"))
}

/// Without a timer: a waiter that nobody wakes is found.
fn outcome(mut waiter: Waiter) -> Result<Permit, RateLimited> {
    block_on(poll_fn(|cx| match waiter.step(cx.waker()) {
        Step::Admitted(permit) => Poll::Ready(Ok(permit)),
        Step::Shed(error) => Poll::Ready(Err(error)),
        Step::Sleep { .. } => Poll::Pending,
    }))
}

fn expect(permit: Result<Permit, Box<Waiter>>) -> Permit {
    permit.unwrap_or_else(|waiter| panic!("{waiter:?} has to wait"))
}

/// The request of this permit is answered with a refusal.
fn refuse(permit: &mut Permit) {
    let refusal = Outcome::Throttled { hint: Some(LONG), soft: false };
    let told = permit.told().expect("a permit has a gate");
    told.settle(None, refusal, StatusCode::TOO_MANY_REQUESTS, &HeaderMap::new());
}

fn spawn<T: 'static>(gate: &Handle, run: impl FnOnce(&Handle) -> T + 'static) -> JoinHandle<T> {
    let gate = gate.clone();
    thread::spawn(move || run(&gate))
}

fn join<T>(thread: JoinHandle<T>) -> T {
    thread.join().expect("a thread has panicked")
}

fn assert_at_rest(gate: &Handle) {
    let fast = gate.table.fast_in_use().expect("a request has come");
    assert_eq!(gate.table.shards().map(|mut shard| shard.iter_mut().count()).sum::<usize>(), 0, "a slot is left");
    assert!(!fast.cells.is_slow(0), "the cell is still slow");
    assert!(!fast.cells.is_taken(0), "a permit is left");
    assert!(matches!(expect(ask(gate, "last.example")), Permit::Plain(_)), "the cell was not taken");
}

fn assert_gone(fast: &FastPath, gate: &Weak<Gate>) {
    assert!(fast.gate().is_none(), "the cells still belong to the gate");
    assert!(gate.upgrade().is_none(), "the gate is still there");
    assert!(!fast.cells.is_slow(0) && !fast.cells.is_taken(0), "the cells are not as new");
}
