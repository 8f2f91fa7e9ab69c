//! `examples/fetch` against providers that throttle, redirect, dawdle and lie.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::header::{LOCATION, RETRY_AFTER, USER_AGENT};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::Full;
use serde_json::Value;
use tokio::time::sleep;

use crate::program::{Done, build, run};
use crate::support::provider::Provider;

#[tokio::test]
async fn fetched_urls_are_lines_of_json_and_exit_code_0() {
    let provider = Provider::start(|_, request| ok(request.uri().path().to_owned())).await;
    let urls = [provider.url("/a"), provider.url("/bcd"), provider.url("/a")];
    let done = fetch(&urls).await;
    assert_eq!(done.code, 0, "{done:?}");
    let mut lines: Vec<_> = done.json().into_iter().map(|line| (line["url"].clone(), line["bytes"].clone())).collect();
    lines.sort_by_key(|(url, _)| url.to_string());
    // A URL that is given twice is fetched twice.
    assert_eq!(
        lines,
        [(urls[0].as_str().into(), 2.into()), (urls[0].as_str().into(), 2.into()), (urls[1].as_str().into(), 4.into())]
    );
    assert!(done.json().iter().all(|line| line["status"] == 200), "{done:?}");
    assert_eq!(provider.peak(), 1, "one at a time per host");
}

#[tokio::test]
async fn rate_limited_is_json_with_its_wait_and_exit_code_3() {
    let provider = Provider::start(|_, _| too_many(Some("100"))).await;
    let url = provider.url("/feed");
    let done = fetch(&["--max-wait", "5", &url]).await;
    assert_eq!(done.code, 3, "{done:?}");
    let line = done.line(&url);
    assert_eq!(line["error"]["code"], "RATE_LIMITED", "{line}");
    assert!(line["error"]["message"].as_str().unwrap().contains("retry in 100 s"), "{line}");
    let details = &line["error"]["details"];
    assert_eq!(details["host"], provider.addr().to_string(), "{line}");
    assert_eq!(details["retry_after"], 100, "{line}");
    assert_eq!(details["asked"], 100, "{line}");
    assert_eq!(details["raw_hint"], "100", "{line}");
    assert_eq!(details["reason"], "cooldown", "{line}");
    assert_eq!(details["status"], 429, "{line}");
    assert_eq!(details["streak"], 1, "{line}");
    assert_eq!(provider.count(429), 1, "a request that is shed is not sent");
    // Where stderr is no terminal, it says so in a line.
    assert!(done.stderr.contains("has refused a request with 429"), "{done:?}");
}

#[tokio::test]
async fn a_wait_without_end_is_a_number_too() {
    let provider = Provider::start(|_, _| too_many(Some("99999999999999999999999"))).await;
    let url = provider.url("/feed");
    let done = fetch(&["--max-wait", "5", &url]).await;
    assert_eq!(done.code, 3, "{done:?}");
    assert_eq!(done.line(&url)["error"]["details"]["asked"], u64::MAX, "{done:?}");
}

#[tokio::test]
async fn the_json_is_the_form_the_crate_writes_with_serde() {
    let provider = Provider::start(|_, _| too_many(Some("100"))).await;
    let url = provider.url("/feed");
    let done = fetch(&["--max-wait", "5", &url]).await;
    let line = done.line(&url);
    #[cfg(feature = "serde")]
    {
        let hosts = tower_host_gate::HostGateLayer::new().hosts();
        hosts.penalize("feeds.example:443", Duration::from_secs(9));
        let limited = hosts.try_acquire(&"https://feeds.example/".parse().unwrap()).unwrap_err();
        let mut expected = keys(&serde_json::to_value(&limited).unwrap());
        // Of use to a program that runs on, which this one does not.
        expected.retain(|key| key != "details.throttled_for");
        assert_eq!(keys(&line["error"]), expected);
    }
    assert_eq!(keys(&line["error"])[0], "code");
}

#[tokio::test]
async fn a_refusal_of_the_last_attempt_says_when_to_come_back() {
    let provider = Provider::start(|_, _| too_many(None)).await;
    let url = provider.url("/feed");
    let done = fetch(&["--attempts", "1", &url]).await;
    assert_eq!(done.code, 3, "{done:?}");
    let line = done.line(&url);
    assert_eq!(line["error"]["code"], "RATE_LIMITED", "{line}");
    assert_eq!(line["error"]["details"]["retry_after"], 2, "the gate's first cooldown: {line}");
    assert_eq!(line["error"]["details"]["status"], 429, "{line}");
    assert_eq!(line["error"]["details"]["host"], provider.addr().to_string(), "{line}");
    assert_eq!(provider.hits().len(), 1);
}

#[tokio::test]
async fn a_refused_url_is_asked_for_again_when_its_host_says_so() {
    let provider = Provider::start(|n, _| if n == 0 { too_many(Some("1")) } else { ok("feed") }).await;
    let url = provider.url("/feed");
    let done = fetch(&[&url]).await;
    assert_eq!(done.code, 0, "{done:?}");
    let hits = provider.hits();
    assert_eq!(hits.len(), 2);
    assert!(hits[1].at - hits[0].at >= Duration::from_secs(1), "{hits:?}");
}

#[tokio::test]
async fn a_404_is_a_failure_and_exit_code_1() {
    let provider = Provider::start(|_, _| status(StatusCode::NOT_FOUND)).await;
    let url = provider.url("/gone");
    let done = fetch(&[&url]).await;
    assert_eq!(done.code, 1, "{done:?}");
    assert_eq!(done.line(&url)["error"]["code"], "HTTP_STATUS");
    assert_eq!(done.line(&url)["error"]["message"], "404 Not Found");
    assert_eq!(provider.hits().len(), 1, "a 404 is an answer: nothing to repeat");
}

#[tokio::test]
async fn a_forbidden_url_is_no_rate_limit() {
    let provider = Provider::start(|_, _| status(StatusCode::FORBIDDEN)).await;
    let url = provider.url("/secret");
    let done = fetch(&["--attempts", "1", &url]).await;
    assert_eq!(done.code, 1, "{done:?}");
    assert_eq!(done.line(&url)["error"]["message"], "403 Forbidden");
}

#[tokio::test]
async fn a_failure_weighs_more_than_a_rate_limit() {
    let gone = Provider::start(|_, _| status(StatusCode::NOT_FOUND)).await;
    let throttling = Provider::start(|_, _| too_many(Some("100"))).await;
    let done = fetch(&["--max-wait", "5", &gone.url("/"), &throttling.url("/")]).await;
    assert_eq!(done.code, 1, "{done:?}");
    assert_eq!(done.line(&throttling.url("/"))["error"]["code"], "RATE_LIMITED");
}

#[tokio::test]
async fn a_bad_url_is_named_and_costs_no_other_url_anything() {
    let provider = Provider::start(|_, _| ok("feed")).await;
    let good = provider.url("/feed");
    let bad =
        ["nonsense", "ftp://127.0.0.1/feed", "http://a b/", "http://", "http:///feed", "", "http://[::1", "/feed"];
    let mut args = vec![good.as_str()];
    args.extend(bad);
    args.insert(1, "--");
    let done = fetch(&args).await;
    assert_eq!(done.code, 1, "{done:?}");
    assert_eq!(done.json().len(), 1 + bad.len(), "a line for every URL: {done:?}");
    assert_eq!(done.line(&good)["status"], 200);
    for url in bad {
        let error = &done.line(url)["error"];
        assert_eq!(error["code"], "BAD_URL", "{url:?}: {error}");
        assert!(!error["message"].as_str().unwrap().is_empty(), "{url:?}: {error}");
    }
}

#[tokio::test]
async fn a_redirect_is_followed_to_another_host_and_says_where_it_ended() {
    let b = Provider::start(|_, _| ok("feed")).await;
    let target = b.url("/moved");
    let a = Provider::start({
        let target = target.clone();
        move |_, _| redirect(&target)
    })
    .await;
    let url = a.url("/feed");
    let done = fetch(&[&url]).await;
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(done.line(&url)["from"], target);
    assert_eq!(done.line(&url)["bytes"], 4);
}

#[tokio::test]
async fn a_redirect_within_a_host_does_not_wait_for_itself() {
    let provider =
        Provider::start(|_, request| if request.uri().path() == "/feed" { redirect("/moved") } else { ok("feed") })
            .await;
    let url = provider.url("/feed");
    let done = fetch(&["--max-wait", "5", &url]).await;
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(done.line(&url)["from"], provider.url("/moved"));
}

#[tokio::test]
async fn the_host_a_redirect_leads_to_is_the_one_that_is_rate_limited() {
    let b = Provider::start(|_, _| too_many(Some("100"))).await;
    let target = b.url("/moved");
    let a = Provider::start(move |_, _| redirect(&target)).await;
    let url = a.url("/feed");
    let done = fetch(&["--max-wait", "5", &url]).await;
    assert_eq!(done.code, 3, "{done:?}");
    assert_eq!(done.line(&url)["error"]["details"]["host"], b.addr().to_string());
    assert_eq!((a.hits().len(), b.hits().len()), (1, 1), "a refusal repeats its own hop, if any");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_a_timeout() {
    let provider = Provider::start_async(|_, _| async {
        sleep(Duration::from_secs(3600)).await;
        ok("too late")
    })
    .await;
    let url = provider.url("/slow");
    let done = fetch(&["--timeout", "0.2", &url]).await;
    assert_eq!(done.code, 1, "{done:?}");
    assert_eq!(done.line(&url)["error"]["code"], "TIMEOUT");
}

#[tokio::test]
async fn a_body_that_stops_is_a_timeout_and_leaves_no_file() {
    use futures_util::{StreamExt as _, stream};
    use http_body::Frame;
    use http_body_util::StreamBody;

    let provider = Provider::start(|_, _| {
        let begun = Ok::<_, std::convert::Infallible>(Frame::data(Bytes::from_static(b"<rss")));
        Response::new(StreamBody::new(stream::iter([begun]).chain(stream::pending())))
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let url = provider.url("/stops");
    let done = fetch(&["--timeout", "0.5", "--output", dir.path().to_str().unwrap(), &url]).await;
    assert_eq!(done.code, 1, "{done:?}");
    assert_eq!(done.line(&url)["error"]["code"], "TIMEOUT");
    assert!(!dir.path().join("001-127.0.0.1-stops").exists(), "half a body is no file");
}

/// The timeout is inside the gate: a wait that is longer is no timeout.
#[tokio::test]
async fn waiting_for_the_host_does_not_count_as_the_servers_time() {
    let provider = Provider::start(|n, _| if n == 0 { too_many(Some("2")) } else { ok("feed") }).await;
    let url = provider.url("/feed");
    let done = fetch(&["--timeout", "1.5", &url]).await;
    assert_eq!(done.code, 0, "{done:?}");
}

/// The global limit is below the gate: while A is waited for, its one slot is free for B.
#[tokio::test]
async fn a_host_that_is_waited_for_holds_no_global_slot() {
    let a = Provider::start(|n, _| if n == 0 { too_many(Some("1")) } else { ok("feed") }).await;
    let b = Provider::start(|_, _| ok("feed")).await;
    let urls: Vec<_> = ["/1", "/2", "/3"].iter().flat_map(|path| [a.url(path), b.url(path)]).collect();
    let mut args = vec!["--global", "1"];
    args.extend(urls.iter().map(String::as_str));
    let done = fetch(&args).await;
    assert_eq!(done.code, 0, "{done:?}");
    let of_b = |line: &Value| line["url"].as_str().is_some_and(|url| url.starts_with(&b.url("/")));
    let order: Vec<_> = done.json().iter().map(of_b).collect();
    assert_eq!(order, [true, true, true, false, false, false], "B did not wait for A: {done:?}");
}

#[tokio::test]
async fn a_certificate_that_nobody_vouches_for_is_refused_with_a_clear_error() {
    let provider = Provider::start_tls(|_, _| ok("feed")).await;
    let url = provider.url("/feed");
    let done = fetch(&[&url]).await;
    assert_eq!(done.code, 1, "{done:?}");
    let error = &done.line(&url)["error"];
    assert_eq!(error["code"], "TRANSPORT", "{error}");
    assert!(error["message"].as_str().unwrap().contains("invalid peer certificate: UnknownIssuer"), "{error}");
    assert!(provider.hits().is_empty());
}

#[tokio::test]
async fn every_hop_and_attempt_says_who_is_asking() {
    let seen: Arc<Mutex<Vec<HeaderValue>>> = Arc::default();
    let provider = Provider::start({
        let seen = Arc::clone(&seen);
        move |n, request| {
            seen.lock().unwrap().push(request.headers()[USER_AGENT].clone());
            match n {
                0 => redirect("/moved"),
                1 => too_many(Some("1")),
                _ => ok("feed"),
            }
        }
    })
    .await;
    let done = fetch(&["--user-agent", "feeds/1.0 (+mailto:me@example.com)", &provider.url("/feed")]).await;
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(*seen.lock().unwrap(), ["feeds/1.0 (+mailto:me@example.com)"; 3]);

    seen.lock().unwrap().clear();
    let provider = Provider::start({
        let seen = Arc::clone(&seen);
        move |_, request| {
            seen.lock().unwrap().push(request.headers()[USER_AGENT].clone());
            ok("feed")
        }
    })
    .await;
    fetch(&[&provider.url("/")]).await;
    let default = seen.lock().unwrap()[0].clone();
    assert!(default.to_str().unwrap().starts_with("tower-host-gate/"), "{default:?}");
}

#[tokio::test]
async fn bodies_are_saved_under_names_of_their_own() {
    let provider = Provider::start(|_, request| ok(format!("body of {}", request.uri()))).await;
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("new").join("feeds");
    let urls = [provider.url("/feed.xml"), provider.url("/feed.xml?page=2"), provider.url("/../../etc/passwd")];
    let mut args = vec!["--output", output.to_str().unwrap()];
    args.extend(urls.iter().map(String::as_str));
    let done = fetch(&args).await;
    assert_eq!(done.code, 0, "{done:?}");
    let saved: HashMap<_, _> = std::fs::read_dir(&output)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read_to_string(entry.path()).unwrap()))
        .collect();
    let expected = [
        ("001-127.0.0.1-feed.xml", "body of /feed.xml"),
        ("002-127.0.0.1-feed.xml", "body of /feed.xml?page=2"),
        ("003-127.0.0.1-..-..-etc-passwd", "body of /../../etc/passwd"),
    ];
    assert_eq!(saved, expected.map(|(name, body)| (name.to_owned(), body.to_owned())).into());
    assert_eq!(done.line(&urls[0])["file"], output.join("001-127.0.0.1-feed.xml").to_str().unwrap());
}

#[tokio::test]
async fn wrong_usage_is_exit_code_2_and_sends_nothing() {
    let provider = Provider::start(|_, _| ok("feed")).await;
    let url = provider.url("/feed");
    for args in [
        &[][..],
        &["--attempts", "0", &url],
        &["--global", "0", &url],
        &["--max-wait", "soon", &url],
        &["--max-wait=-1", &url],
        &["--timeout", "NaN", &url],
        &["--user-agent", "two\nlines", &url],
        &["--output", "/dev/null/feeds", &url],
        &["--fast", &url],
    ] {
        let done = fetch(args).await;
        assert_eq!(done.code, 2, "{args:?}: {done:?}");
        assert!(done.stdout.is_empty() && done.stderr.contains("error"), "{args:?}: {done:?}");
    }
    assert!(provider.hits().is_empty());
}

#[tokio::test]
async fn the_help_explains_the_exit_codes() {
    let done = fetch(&["--help"]).await;
    assert_eq!(done.code, 0, "{done:?}");
    for text in ["Exit code", "0  all fetched", "1  some failed", "2  wrong usage", "3  none failed", "RATE_LIMITED"] {
        assert!(done.stdout.contains(text), "no {text:?} in:\n{}", done.stdout);
    }
}

// --- what one run leaves to the next ------------------------------------------------------------------------------

#[tokio::test]
async fn the_next_run_knows_that_a_host_is_held() {
    let provider = Provider::start(|_, _| too_many(Some("3600"))).await;
    let url = provider.url("/feed");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.json");
    let args = ["--max-wait", "5", "--state", file.to_str().unwrap(), &url];
    for _ in 0..2 {
        let done = fetch(&args).await;
        assert_eq!(done.code, 3, "{done:?}");
        assert_eq!(done.line(&url)["error"]["details"]["reason"], "cooldown", "{done:?}");
        assert!(!done.stderr.contains("warning"), "neither with no file nor with a good one: {done:?}");
    }
    assert_eq!(provider.hits().len(), 1, "the second run has not asked");
    assert_eq!(read(&file)["hosts"][0]["host"], provider.addr().to_string());
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "and nothing else is left in its directory");
}

#[tokio::test]
async fn the_next_run_keeps_the_spacing_that_was_learnt() {
    let provider = Provider::start(|n, _| if n == 0 { too_many(None) } else { ok("feed") }).await;
    let urls = [provider.url("/1"), provider.url("/2")];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.json");
    let args = ["--state", file.to_str().unwrap(), &urls[0], &urls[1]];
    let done = fetch(&args).await;
    assert_eq!(done.code, 0, "{done:?}");
    let hits = provider.hits().len();
    let done = fetch(&args).await;
    assert_eq!(done.code, 0, "{done:?}");
    let hits = provider.hits().split_off(hits);
    // A host that nothing is known of gets both at once.
    assert!(hits[1].at - hits[0].at >= Duration::from_millis(500), "{hits:?}");
}

#[tokio::test]
async fn a_file_that_is_no_state_is_a_warning_and_is_replaced() {
    let provider = Provider::start(|_, _| status(StatusCode::NOT_FOUND)).await;
    let url = provider.url("/gone");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.json");
    let later = br#"{"version":2,"taken_at_ms":0,"hosts":{}}"#;
    for (content, why) in [(&b""[..], "EOF"), (b"{\"version\":1", "EOF"), (b"\xff\0", "expected"), (later, "version 2")]
    {
        std::fs::write(&file, content).unwrap();
        let done = fetch(&["--state", file.to_str().unwrap(), &url]).await;
        assert_eq!(done.code, 1, "of the 404 alone: {done:?}");
        assert!(done.stderr.contains("warning: beginning without") && done.stderr.contains(why), "{done:?}");
        assert_eq!(read(&file)["version"], 1, "written though nothing was fetched");
    }
}

#[tokio::test]
async fn a_state_that_cannot_be_read_or_written_costs_no_more_than_a_warning() {
    let provider = Provider::start(|_, _| ok("feed")).await;
    let url = provider.url("/feed");
    let dir = tempfile::tempdir().unwrap();
    let nowhere = dir.path().join("no-such-directory").join("state.json");
    let done = fetch(&["--state", nowhere.to_str().unwrap(), &url]).await;
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stderr.contains("warning: cannot write"), "{done:?}");
    // A directory can be neither.
    let done = fetch(&["--state", dir.path().to_str().unwrap(), &url]).await;
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stderr.contains("warning: beginning without"), "{done:?}");
    assert!(done.stderr.contains("warning: cannot write"), "{done:?}");
}

#[cfg(unix)]
#[tokio::test]
async fn an_interrupted_run_leaves_what_it_has_learnt() {
    use std::process::Stdio;
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    use tokio::process::Command;

    let provider = Provider::start(|_, _| too_many(Some("100"))).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.json");
    let mut running = Command::new(build("fetch").await)
        .args(["--max-wait", "200", "--state", file.to_str().unwrap(), &provider.url("/feed")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut said = BufReader::new(running.stderr.take().unwrap()).lines();
    while !said.next_line().await.unwrap().expect("it says that it is refused").contains("has refused") {}

    let interrupt = format!("kill -INT {}", running.id().unwrap());
    assert!(Command::new("sh").args(["-c", &interrupt]).status().await.unwrap().success());

    assert_eq!(running.wait().await.unwrap().code(), Some(130));
    assert_eq!(read(&file)["hosts"][0]["host"], provider.addr().to_string());
}

// --- what these tests are made of ---------------------------------------------------------------------------------

async fn fetch(args: &[impl AsRef<OsStr>]) -> Done {
    run(&build("fetch").await, args).await
}

fn read(file: &Path) -> Value {
    let bytes = std::fs::read(file).expect("a file");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// Names of an object's fields, those of objects within with their path.
fn keys(value: &Value) -> Vec<String> {
    let object = value.as_object().expect("an object");
    object
        .iter()
        .flat_map(|(key, value)| match value {
            Value::Object(_) => keys(value).into_iter().map(|inner| format!("{key}.{inner}")).collect(),
            _ => vec![key.clone()],
        })
        .collect()
}

fn ok(body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    Response::new(Full::new(body.into()))
}

fn status(status: StatusCode) -> Response<Full<Bytes>> {
    let mut response = Response::default();
    *response.status_mut() = status;
    response
}

fn too_many(retry_after: Option<&str>) -> Response<Full<Bytes>> {
    let mut response = status(StatusCode::TOO_MANY_REQUESTS);
    if let Some(text) = retry_after {
        response.headers_mut().insert(RETRY_AFTER, text.parse().expect("a header value"));
    }
    response
}

fn redirect(to: &str) -> Response<Full<Bytes>> {
    let mut response = status(StatusCode::FOUND);
    response.headers_mut().insert(LOCATION, to.parse().expect("a header value"));
    response
}
