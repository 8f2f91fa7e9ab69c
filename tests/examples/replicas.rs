//! `examples/replicas`: its claims, its timelines, its exit code.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::Instant;

use crate::program::{Done, build};
use crate::support::redis::Standalone;

#[path = "../../examples/replicas/claims.rs"]
#[allow(dead_code, reason = "the example reads all of it")]
mod claims;

/// With this environment and no other: a REDIS_URL of the machine's is none of our business.
async fn replicas(args: &[&str], environment: &[(&str, &str)]) -> Done {
    let output = Command::new(build("replicas").await)
        .args(args)
        .env_clear()
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("the example can be run");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Done { code: output.status.code().expect("an exit code"), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Where `redis-server` is.
fn path() -> String {
    std::env::var("PATH").expect("a PATH")
}

/// The lines of each part, from its first process on.
fn parts(out: &str) -> Vec<Vec<&str>> {
    let mut parts: Vec<Vec<&str>> = Vec::new();
    for line in out.lines().skip_while(|line| !line.starts_with("process 1")) {
        match parts.last_mut() {
            Some(part) if !line.starts_with("process 1") => part.push(line),
            _ => parts.push(vec![line]),
        }
    }
    parts
}

fn line<'a>(part: &[&'a str], name: &str) -> &'a str {
    part.iter().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {part:?}"))
}

#[tokio::test]
async fn the_replicas_show_one_limit_and_that_nothing_is_lost_within_30_seconds() {
    build("replicas").await;
    let start = Instant::now();
    let done = replicas(&[], &[("PATH", &path())]).await;
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert_eq!(done.code, 0, "{done:?}");

    let out = &done.stdout;
    assert_eq!(out.matches('✔').count(), 10, "{out}");
    assert!(!out.contains("NOT TRUE"), "{out}");
    assert_eq!(done.stderr, "", "{out}");

    let parts = parts(out);
    let [alone, shared, outage, death] = &parts[..] else { panic!("four parts: {out}") };
    let lanes = |part: &[&str]| part.iter().filter(|line| line.starts_with("process ")).copied().collect::<String>();
    // Refused, and each for itself; and the contrary.
    assert!(lanes(alone).contains('✕') && !lanes(alone).contains('─'), "{out}");
    assert!(!lanes(shared).contains(['✕', '┄', '†']), "{out}");
    assert!(!lanes(shared).is_empty() && !line(shared, "in flight").contains(['5', '6']), "{out}");
    // Redis goes and comes, and every process knows.
    assert!(line(outage, "Redis").contains('†') && line(outage, "Redis").ends_with('━'), "{out}");
    assert!(outage.iter().filter(|line| line.starts_with("process ")).all(|line| line.contains('┄')), "{out}");
    // One process goes, and only that one.
    assert_eq!(lanes(death).matches('†').count(), 1, "{out}");
    assert!(line(death, "process 3").ends_with('†') && line(death, "its permits").contains('▬'), "{out}");

    // For people: no escape codes in a pipe, and nothing wider than 100 columns.
    assert!(!out.contains('\x1b'), "{out}");
    for line in out.lines() {
        let columns = line.chars().count();
        assert!(columns <= 100, "{columns} columns: {line}");
    }
}

#[tokio::test]
async fn the_replicas_let_a_redis_live_that_is_not_theirs() {
    let server = Standalone::password("not to be seen").await;
    let done = replicas(&[], &[("REDIS_URL", &server.url().replace(' ', "%20"))]).await;
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stdout.contains("somebody else's, so it was not killed"), "{done:?}");
    assert_eq!(done.stdout.matches('✔').count(), 5, "{done:?}");
    assert_eq!(parts(&done.stdout).len(), 3, "{done:?}");
    assert!(!format!("{done:?}").contains("not to"), "{done:?}");
    assert!(server.cli(&["DBSIZE"]).await.parse::<u32>().expect("a number") > 0);
}

#[tokio::test]
async fn the_replicas_say_what_is_missing() {
    let nothing = tempfile::tempdir().expect("a folder");
    let done = replicas(&[], &[("PATH", nothing.path().to_str().expect("UTF-8"))]).await;
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("there is no redis-server here: install it"), "{done:?}");
    assert!(done.stderr.contains("--redis redis://HOST/"), "{done:?}");
    assert_eq!(done.stdout, "", "nothing is begun: {done:?}");
}

#[tokio::test]
async fn the_replicas_say_what_is_wrong_with_an_address() {
    for (url, said) in [("http://10.0.0.1/", "redis://"), ("redis://127.0.0.1:1/", "Redis cannot be used: unreachable")]
    {
        let done = replicas(&["--redis", url], &[]).await;
        assert_eq!(done.code, 2, "{done:?}");
        assert!(done.stderr.contains(said), "{done:?}");
    }
}

/// Each of the claims fails when it is not true.
#[test]
fn the_replicas_claims_can_fail() {
    use claims::{Death, Figures, Outage};

    let fine = || Figures { feeds: 40, arrived: 40, refused: 0, peak: 4 };
    let some_lost = || Figures { arrived: 39, ..fine() };
    let one_refused = || Figures { refused: 1, ..fine() };
    let too_many = || Figures { peak: 5, ..fine() };
    let alone = || Figures { refused: 12, peak: 8, ..fine() };
    let outage = || Outage { killed: fine(), without: fine(), restarted: fine(), after: fine(), told: vec![(1, 1); 4] };
    let lease = Duration::from_secs(3);
    let death = || Death { figures: fine(), unfinished: 1, lease, held_for: lease };

    let broken = |alone: Figures, shared: Figures, outage: Option<Outage>, death: Death| -> Vec<String> {
        let claims = claims::check(4, &alone, &shared, outage.as_ref(), &death);
        claims.into_iter().filter(|claim| !claim.holds).map(|claim| claim.text).collect()
    };
    assert_eq!(broken(alone(), fine(), Some(outage()), death()), [""; 0]);
    assert_eq!(broken(alone(), fine(), None, death()), [""; 0]);

    let with_alone = |figures| broken(figures, fine(), Some(outage()), death());
    let with_shared = |figures| broken(alone(), figures, Some(outage()), death());
    let with_outage = |outage| broken(alone(), fine(), Some(outage), death());
    let with_death = |death| broken(alone(), fine(), Some(outage()), death);
    for (claim, broken) in [
        ("each with a limit of its own", with_alone(Figures { refused: 0, ..alone() })),
        ("with one limit", with_shared(one_refused())),
        ("with one limit", with_shared(too_many())),
        // A limit that is not used up shows nothing.
        ("with one limit", with_shared(Figures { peak: 3, ..fine() })),
        ("every feed arrives", with_shared(some_lost())),
        ("Redis is killed", with_outage(Outage { killed: some_lost(), ..outage() })),
        ("without Redis", with_outage(Outage { without: some_lost(), ..outage() })),
        ("without Redis", with_outage(Outage { without: one_refused(), ..outage() })),
        ("without Redis", with_outage(Outage { without: too_many(), ..outage() })),
        ("Redis comes back", with_outage(Outage { restarted: some_lost(), ..outage() })),
        ("each process has told", with_outage(Outage { told: vec![(1, 1), (1, 1), (1, 1), (2, 2)], ..outage() })),
        ("each process has told", with_outage(Outage { told: vec![(1, 1), (1, 0), (1, 1), (1, 1)], ..outage() })),
        ("from then on", with_outage(Outage { after: one_refused(), ..outage() })),
        ("from then on", with_outage(Outage { after: too_many(), ..outage() })),
        ("from then on", with_outage(Outage { after: some_lost(), ..outage() })),
        ("a process is killed", with_death(Death { figures: some_lost(), ..death() })),
        ("a process is killed", with_death(Death { unfinished: 0, ..death() })),
        ("its permits come back", with_death(Death { held_for: Duration::from_secs(1), ..death() })),
    ] {
        assert!(broken.len() == 1 && broken[0].starts_with(claim), "{claim}: {broken:?}");
    }
    // With the overshoot at its ends nobody is refused for good, and nothing more is claimed.
    assert_eq!(with_outage(Outage { killed: too_many(), restarted: one_refused(), ..outage() }), [""; 0]);
}
