//! Holds all rules against one backend at once, and says which are broken.

use std::any::Any;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::Semaphore;
use tokio::task::JoinError;
use tokio::time::{Instant, timeout_at};

use super::RULES;
use super::backend::{Backend, Store};
use super::differences::Instead;

/// How many rules are under way at one time: more would only wait for the processor.
const AT_ONCE: usize = 24;
/// All rules take a few seconds where nothing is in their way. This is for one that never ends.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Rule {
    pub name: &'static str,
    pub hold: fn(Backend) -> BoxFuture<'static, ()>,
}

/// Holds every rule against a gate whose state is kept there.
pub async fn hold_all(name: &str, store: Store) {
    let room = Arc::new(Semaphore::new(AT_ONCE));
    let deadline = Instant::now() + PATIENCE;
    let tasks: Vec<_> = chosen()
        .map(|rule| {
            let (room, backend) = (Arc::clone(&room), Backend::new(store.clone(), rule.name));
            let events = backend.events.clone();
            (rule.name, events, tokio::spawn(async move { hold(rule, backend, &room, deadline).await }))
        })
        .collect();

    assert!(!tasks.is_empty(), "no rule is named so");
    let mut report = String::new();
    for (rule, events, task) in tasks {
        let mut outcome = task.await.unwrap_or_else(|panic| Outcome::Broken(message(panic)));
        // A gate that lost its store goes on alone, and so may well have kept the rule.
        let failures = events.failures();
        if !failures.is_empty() {
            let how = if let Outcome::Broken(how) = outcome { how } else { String::new() };
            outcome = Outcome::Broken(format!("{how} (the store failed: {failures:?})"));
        }
        match outcome {
            Outcome::Holds => {}
            Outcome::LeftOut(reason) => {
                // Not by a macro: the test runner would keep the output of a test that passes to itself.
                let _ = writeln!(std::io::stderr(), "{name}: {rule} is left out: {reason}");
            }
            Outcome::Broken(how) => _ = write!(report, "\n- {rule}: {how}"),
        }
    }
    assert!(report.is_empty(), "{name} breaks these rules:{report}");
}

/// All rules, or those that `CONFORMANCE` names a part of.
fn chosen() -> impl Iterator<Item = &'static Rule> {
    let part = std::env::var("CONFORMANCE").unwrap_or_default();
    RULES.iter().filter(move |rule| rule.name.contains(&part))
}

enum Outcome {
    Holds,
    LeftOut(&'static str),
    Broken(String),
}

async fn hold(rule: &Rule, backend: Backend, room: &Semaphore, deadline: Instant) -> Outcome {
    if let Some(difference) = backend.difference().filter(|difference| difference.instead == Instead::LeftOut) {
        return Outcome::LeftOut(difference.reason);
    }
    let Ok(Ok(_place)) = timeout_at(deadline, room.acquire()).await else {
        return Outcome::Broken("others have taken all the time there was".to_owned());
    };
    match timeout_at(deadline, (rule.hold)(backend)).await {
        Ok(()) => Outcome::Holds,
        Err(_) => Outcome::Broken(format!("not over {PATIENCE:?} after the beginning of all")),
    }
}

fn message(error: JoinError) -> String {
    let panic: Box<dyn Any + Send> = error.into_panic();
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic").to_owned()
}
