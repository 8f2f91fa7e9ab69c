//! Which requests share a gate: the A cases, and what a key must never say.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::header::{AUTHORIZATION, HOST};
use http::{Extensions, HeaderMap, Method, Request, Uri};
use support::log::Log;
use support::reactive;
use support::script::{Reply, Script, get};
use tokio::time::sleep;
use tower::buffer::Buffer;
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_host_gate::observe::{Observer, ShedEvent, ThrottleEvent, WaitEvent};
use tower_host_gate::{By, HostGateLayer, HostKey, Keying, Limits, MaxWait, RateLimited};

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn key_by(by: By, uri: &str) -> Option<String> {
    let uri: Uri = uri.parse().unwrap();
    by.key(&uri, &HeaderMap::new(), &Extensions::new()).map(|key| key.to_string())
}

fn key(uri: &str) -> Option<String> {
    key_by(By::Authority, uri)
}

fn named(text: &str) -> Option<String> {
    text.parse::<HostKey>().ok().map(|key| key.to_string())
}

/// How many of five requests sent at once are in flight together: the concurrency the layer gives to this URI.
async fn concurrency_of(layer: &HostGateLayer, uri: &str) -> usize {
    let script = Script::always(Reply::hang());
    let gated = layer.layer(script.clone());
    let tasks: Vec<_> = (0..5).map(|_| tokio::spawn(gated.clone().oneshot(get(uri)))).collect();
    sleep(Duration::from_millis(1)).await;
    let open = script.open();
    for task in tasks {
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    open
}

// --- the authority ------------------------------------------------------------------------------------------------

#[test]
fn a01_upper_and_lower_case_are_one_key() {
    for uri in ["http://Example.COM/", "http://example.com/", "HTTP://EXAMPLE.com/", "http://example.com./"] {
        assert_eq!(key(uri).as_deref(), Some("example.com:80"), "{uri}");
    }
}

#[test]
fn a02_the_default_port_is_filled_in() {
    for uri in ["http://e.com/", "http://e.com:80/", "http://e.com:/", "http://e.com:080/", "ws://e.com/"] {
        assert_eq!(key(uri).as_deref(), Some("e.com:80"), "{uri}");
    }
    for uri in ["https://e.com/", "https://e.com:443/", "http://e.com:443/", "wss://e.com/"] {
        assert_eq!(key(uri).as_deref(), Some("e.com:443"), "{uri}");
    }
}

#[test]
fn a02_a_port_that_is_no_16_bit_number_never_becomes_the_default_port() {
    // `http::Uri` reads 99999 as "no port"; the key must not.
    assert_eq!(key("http://e.com:99999/").as_deref(), Some("e.com:99999"));
    assert_eq!(key("http://e.com:0/").as_deref(), Some("e.com:0"));
    assert_eq!(key("http://e.com:65616/").as_deref(), Some("e.com:65616"), "80 modulo 65536");
}

#[tokio::test(start_paused = true)]
async fn a02_http_and_https_of_one_host_are_two_gates_by_authority_and_one_by_host() {
    for (by, second) in [(By::Authority, secs(0)), (By::Host, secs(30))] {
        let script = Script::list([Reply::status(429).header("retry-after", "30")]);
        let gated = reactive().keying(by).layer(script.clone());
        gated.clone().oneshot(get("http://example.com/")).await.unwrap();
        gated.clone().oneshot(get("https://example.com/")).await.unwrap();
        assert_eq!(script.times(), [secs(0), second], "{by:?}");
    }
}

#[test]
fn by_host_the_key_has_no_port() {
    for uri in
        ["http://Example.com/", "https://example.com./", "http://u:p@example.com:8080/", "http://example.com:99999/"]
    {
        assert_eq!(key_by(By::Host, uri).as_deref(), Some("example.com"), "{uri}");
    }
    assert_eq!(key_by(By::Host, "http://[::1]:8080/").as_deref(), Some("[::1]"));
}

#[test]
fn a04_user_info_is_never_part_of_a_key() {
    assert_eq!(key("http://user:p@example.com:8080/").as_deref(), Some("example.com:8080"));
    assert_eq!(key("https://p%40ss@example.com/").as_deref(), Some("example.com:443"));
    assert_eq!(named("http://a@b@c/").as_deref(), Some("c:80"), "the host is behind the last @");
    assert_eq!(named("user:secret@example.com:8080").as_deref(), Some("example.com:8080"));
    assert_eq!(named("user:secret@").as_deref(), None);
}

#[test]
fn a04_user_info_in_the_text_of_a_setting_is_never_printed() {
    let (log, _guard) = Log::capture();
    for url in [
        "https://user:canary@example.com/feed?key=canary",
        "user:canary@example.com",
        "https://user:canary@exa mple.com/",
    ] {
        let layer = HostGateLayer::new().per_host(url, Limits::default().concurrency(2));
        layer.hosts().set_limits(url, Limits::default().concurrency(2));
        layer.hosts().penalize(url, secs(5));
        let said = format!("{layer:?}{:?}{:?}{:?}", layer.hosts(), layer.hosts().snapshot(), url.parse::<HostKey>());
        assert!(!said.contains("canary"), "{said}");
    }
    assert!(!log.text().contains("canary"), "{}", log.text());
}

#[test]
fn a06_odd_forms_of_an_ipv4_address_keep_their_text() {
    for host in ["127.1", "0x7f.0.0.1", "2130706433", "127.0.0.1"] {
        assert_eq!(key(&format!("http://{host}/")), Some(format!("{host}:80")));
    }
}

#[test]
fn an_ipv6_address_is_canonical() {
    for uri in ["http://[2001:db8::1]/", "http://[2001:DB8:0:0:0:0:0:1]:80/", "http://[2001:0db8::0001]:080/"] {
        assert_eq!(key(uri).as_deref(), Some("[2001:db8::1]:80"), "{uri}");
    }
}

// --- no authority in the URI --------------------------------------------------------------------------------------

#[test]
fn a08_a_request_in_origin_form_is_keyed_on_its_host_header() {
    let keyed = |host: &str| {
        let headers = HeaderMap::from_iter([(HOST, host.parse().unwrap())]);
        By::Authority.key(&"/path".parse().unwrap(), &headers, &Extensions::new()).map(|key| key.to_string())
    };
    assert_eq!(keyed("Example.com").as_deref(), Some("example.com"));
    assert_eq!(keyed("example.com:8080").as_deref(), Some("example.com:8080"));
    assert_eq!(keyed(""), None);
    assert_eq!(keyed(":80"), None);
}

#[test]
fn a08_a_connect_request_is_keyed_on_its_target() {
    assert_eq!(key("example.com:443").as_deref(), Some("example.com:443"));
}

#[tokio::test(start_paused = true)]
async fn a08_without_a_host_a_request_passes_ungated_and_shares_no_key() {
    let script = Script::always(Reply::status(429).header("retry-after", "30"));
    let layer = HostGateLayer::new();
    let gated = layer.layer(script.clone());
    for (method, uri) in [(Method::GET, "/a"), (Method::GET, "/b"), (Method::OPTIONS, "*")] {
        let request = Request::builder().method(method).uri(uri).body(()).unwrap();
        assert_eq!(gated.clone().oneshot(request).await.unwrap().status(), 429);
    }
    assert_eq!(script.times(), [secs(0); 3], "no 429 held the next one");
    assert!(layer.hosts().snapshot().is_empty());
}

// --- keying of one's own ------------------------------------------------------------------------------------------

fn by_host_and_first_segment(uri: &Uri, _: &HeaderMap, _: &Extensions) -> Option<HostKey> {
    let segment = uri.path().split('/').nth(1).unwrap_or_default();
    Some(HostKey::new(format!("{}/{segment}", uri.authority()?)))
}

#[tokio::test(start_paused = true)]
async fn a09_two_services_on_one_address_are_told_apart_by_port() {
    let script = Script::list([Reply::status(503).header("retry-after", "1500")]);
    let layer = reactive().max_cooldown(secs(3600)).max_wait(secs(3600));
    let gated = layer.layer(script.clone());
    gated.clone().oneshot(get("http://172.17.0.1:21200/a")).await.unwrap();
    gated.clone().oneshot(get("http://172.17.0.1:2888/")).await.unwrap();
    gated.clone().oneshot(get("http://172.17.0.1:21200/b")).await.unwrap();
    assert_eq!(script.times(), [secs(0), secs(0), secs(1500)]);
}

#[tokio::test(start_paused = true)]
async fn a09_two_services_under_one_authority_are_told_apart_by_a_path_prefix() {
    let script = Script::list([Reply::status(503).header("retry-after", "30")]);
    let layer = reactive().keying(by_host_and_first_segment);
    let gated = layer.layer(script.clone());
    for path in ["a", "b", "a/again"] {
        gated.clone().oneshot(get(&format!("http://172.17.0.1:21200/{path}"))).await.unwrap();
    }
    assert_eq!(script.times(), [secs(0), secs(0), secs(30)]);
}

#[tokio::test(start_paused = true)]
async fn a09_a_key_of_ones_own_can_be_looked_up_and_steered_by_its_text() {
    let script = Script::always(Reply::status(503).header("retry-after", "30"));
    let layer = reactive().keying(by_host_and_first_segment);
    layer.layer(script).oneshot(get("http://e.com/a")).await.unwrap();

    let hosts = layer.hosts();
    assert_eq!(hosts.snapshot()[0].host, "e.com/a");
    assert_eq!(hosts.get("e.com/a").map(|state| state.cooldown), Some(secs(30)));
    hosts.penalize("e.com/a", secs(50));
    assert_eq!(hosts.get("e.com/a").map(|state| state.cooldown), Some(secs(50)));
    hosts.clear("e.com/a");
    assert_eq!(hosts.get("e.com/a"), None);
}

#[tokio::test(start_paused = true)]
async fn a10_many_names_of_one_provider_share_a_gate() {
    let script = Script::list([Reply::status(429).header("retry-after", "30")]);
    let layer = reactive().keying(|uri: &Uri, headers: &HeaderMap, extensions: &Extensions| {
        match uri.host()?.ends_with(".feeds.example") {
            true => Some(HostKey::new("*.feeds.example")),
            false => By::Authority.key(uri, headers, extensions),
        }
    });
    let gated = layer.layer(script.clone());
    for host in ["one.feeds.example", "other.example", "two.feeds.example"] {
        gated.clone().oneshot(get(&format!("http://{host}/"))).await.unwrap();
    }
    assert_eq!(script.times(), [secs(0), secs(0), secs(30)]);
}

#[tokio::test(start_paused = true)]
async fn a11_a_token_in_the_key_separates_its_owners_and_is_never_printed() {
    let (log, _guard) = Log::capture();
    let script = Script::list([Reply::status(429).header("retry-after", "30")]);
    let layer = reactive().keying(|uri: &Uri, headers: &HeaderMap, _: &Extensions| {
        let mut hasher = DefaultHasher::new();
        headers.get(AUTHORIZATION).map(|token| token.as_bytes()).hash(&mut hasher);
        Some(HostKey::new(format!("{}#{:016x}", uri.host()?, hasher.finish())))
    });
    let gated = layer.layer(script.clone());
    for token in ["canary-a", "canary-b", "canary-a"] {
        let request = Request::get("http://api.example/").header(AUTHORIZATION, token).body(()).unwrap();
        gated.clone().oneshot(request).await.unwrap();
    }
    assert_eq!(script.times(), [secs(0), secs(0), secs(30)]);
    let said = format!("{}{:?}{layer:?}", log.text(), layer.hosts().snapshot());
    assert!(said.contains("api.example#"), "{said}");
    assert!(!said.contains("canary"), "{said}");
}

// --- per-host settings --------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_limit_by_name_means_all_ports_and_host_port_is_exact_and_wins() {
    let layer = HostGateLayer::new()
        .per_host("example.com", Limits::default().concurrency(2))
        .per_host("example.com:8080", Limits::default().concurrency(3));
    assert_eq!(concurrency_of(&layer, "http://example.com/").await, 2);
    assert_eq!(concurrency_of(&layer, "https://Example.COM/").await, 2);
    assert_eq!(concurrency_of(&layer, "http://example.com:8080/").await, 3);
    assert_eq!(concurrency_of(&layer, "http://www.example.com/").await, 1);
}

#[tokio::test(start_paused = true)]
async fn what_a_per_host_limit_leaves_unset_is_the_layers() {
    let layer = HostGateLayer::new()
        .concurrency(4)
        .per_host("example.com", Limits::default().concurrency(2))
        .per_host("example.com:8080", Limits::default().spacing(secs(5)));
    assert_eq!(concurrency_of(&layer, "http://example.com:8080/").await, 4);
}

#[tokio::test(start_paused = true)]
async fn a_limit_by_url_is_the_limit_of_its_host_and_port() {
    let layer = HostGateLayer::new().per_host("https://user@Example.com/feed?x=1", Limits::default().concurrency(2));
    assert_eq!(concurrency_of(&layer, "https://example.com/").await, 2);
    assert_eq!(concurrency_of(&layer, "http://example.com/").await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_limit_by_ipv6_address_means_all_its_ports() {
    let layer = HostGateLayer::new().per_host("[2001:DB8::0:1]", Limits::default().concurrency(2));
    assert_eq!(concurrency_of(&layer, "http://[2001:db8::1]:8080/").await, 2);
}

#[cfg(feature = "idna")]
#[tokio::test(start_paused = true)]
async fn a_limit_given_in_unicode_matches_the_a_label() {
    for name in ["bücher.example", "BÜCHER.Example.", "b\u{fc}cher.example", "bu\u{308}cher.example"] {
        let layer = HostGateLayer::new().per_host(name, Limits::default().concurrency(2));
        assert_eq!(concurrency_of(&layer, "http://xn--bcher-kva.example:8080/").await, 2, "{name}");
    }
    let hosts = HostGateLayer::new().hosts();
    hosts.penalize("bücher.example:80", secs(9));
    assert_eq!(hosts.get("xn--bcher-kva.example:80").unwrap().cooldown, secs(9));
}

#[tokio::test(start_paused = true)]
async fn a12_per_host_limits_hold_behind_boxes_buffers_and_a_rewritten_uri() {
    let script = Script::always(Reply::hang());
    let layer = HostGateLayer::new().per_host("real.example", Limits::default().concurrency(2));
    let gated = ServiceBuilder::new()
        .layer_fn(BoxCloneSyncService::new)
        .layer_fn(|service| Buffer::new(service, 16))
        .map_request(|mut request: Request<()>| {
            *request.uri_mut() = "http://real.example/".parse().unwrap();
            request
        })
        .layer(layer.clone())
        .service(script.clone());
    for _ in 0..5 {
        tokio::spawn(gated.clone().oneshot(get("http://alias.example/")));
    }
    sleep(secs(1)).await;
    assert_eq!(script.open(), 2);
    let snapshot = layer.hosts().get("real.example:80").unwrap();
    assert_eq!((snapshot.in_flight, snapshot.queued), (2, 3));
    assert_eq!(layer.hosts().get("alias.example"), None);
}

#[test]
fn a12_a_limit_for_what_names_no_host_is_not_ignored_silently() {
    for text in ["", "two words", "http://", ":80", "user@", "a\nb"] {
        let (log, _guard) = Log::capture();
        let layer = HostGateLayer::new().per_host(text, Limits::default().concurrency(2));
        layer.hosts().set_limits(text, Limits::default().concurrency(2));
        let text = log.text();
        assert_eq!(text.matches("WARN").count(), 2, "{text}");
        assert_eq!(text.lines().count(), 2, "a warning is one line: {text}");
    }
}

// --- a key as text ------------------------------------------------------------------------------------------------

#[test]
fn a_host_key_is_read_from_a_name_an_authority_or_a_url() {
    for (text, expected) in [
        ("example.com", Some("example.com")),
        (" Example.COM. ", Some("example.com")),
        ("example.com:8080", Some("example.com:8080")),
        ("example.com:080", Some("example.com:80")),
        ("example.com:99999", Some("example.com:99999")),
        ("http://example.com", Some("example.com:80")),
        ("HTTPS://User:secret@Example.COM./feed", Some("example.com:443")),
        ("https://example.com?x=/", Some("example.com:443")),
        ("wss://example.com#x", Some("example.com:443")),
        ("gopher://example.com", Some("example.com")),
        ("gopher://example.com:70/", Some("example.com:70")),
        ("127.0.0.1:80", Some("127.0.0.1:80")),
        ("[::1]", Some("[::1]")),
        ("[0:0:0:0:0:0:0:1]:8080", Some("[::1]:8080")),
        ("", None),
        ("   ", None),
        (".", None),
        (":80", None),
        ("http:///path", None),
        ("[::1", None),
        ("exa mple.com", None),
        ("example.com\n", Some("example.com")),
        ("exam\u{0}ple.com", None),
    ] {
        assert_eq!(named(text).as_deref(), expected, "{text:?}");
    }
}

// Taken literally, a limit for a bare IPv6 address would match no request, silently.
#[test]
fn a_text_with_more_than_one_colon_and_no_bracket_is_not_taken_for_host_and_port() {
    for text in ["fe80::1", "2001:db8::1"] {
        let key = named(text);
        assert!(key.is_none() || key == Some(format!("[{text}]")), "{text} became {key:?}");
    }
}

#[cfg(feature = "idna")]
#[test]
fn a_host_key_given_in_unicode_becomes_its_a_label() {
    for (text, expected) in [
        ("bücher.example", Some("xn--bcher-kva.example")),
        ("https://u:p@BÜCHER.example./a/ü", Some("xn--bcher-kva.example:443")),
        ("bücher.example:8080", Some("xn--bcher-kva.example:8080")),
        ("例え。テスト", Some("xn--r8jz45g.xn--zckzah")),
        ("a\u{2028}b.example", None),
    ] {
        assert_eq!(named(text).as_deref(), expected, "{text:?}");
    }
}

#[test]
fn a_keys_own_text_reads_back_as_the_same_key() {
    for uri in ["http://example.com/", "https://[2001:db8::1]/", "http://e.com:99999/", "http://127.1:0/"] {
        let text = key(uri).unwrap();
        assert_eq!(named(&text), Some(text));
    }
}

#[test]
fn a_key_is_printable_bounded_and_still_its_own() {
    let keys = ["two\nlines", "two\\nlines", "\u{1b}[31mred", "\u{202e}", "", &"x".repeat(100_000), &"ü".repeat(300)]
        .map(|text| HostKey::new(text).to_string());
    for key in &keys {
        assert!(key.len() <= 256 && !key.contains(|c: char| c.is_control()), "{key:?}");
    }
    let distinct = std::collections::HashSet::from(keys.clone());
    assert_eq!(distinct.len(), keys.len(), "{keys:?}");

    let long = |end: &str| HostKey::new("x".repeat(1000) + end);
    assert_ne!(long("a"), long("b"), "a cut key keeps a hash of the whole");
    assert_eq!(long("a"), long("a"));

    let stranger = format!("http://{}.example:8080/", "a".repeat(60_000));
    assert!(key(&stranger).unwrap().len() <= 256);
}

// --- what must never be said --------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a04_no_key_error_event_or_debug_output_says_a_secret() {
    const CANARY: &str = "canary";
    let (log, _guard) = Log::capture();
    let told = Told::default();
    let layer = HostGateLayer::new().observer(told.clone());
    let inner = tower::service_fn(async |request: Request<String>| match request.uri().path() {
        "/canary/throttled" => Ok::<_, std::io::Error>(
            http::Response::builder().status(429).header("retry-after", "30").body(String::new()).unwrap(),
        ),
        _ => Ok(http::Response::new("hello".to_owned())),
    });
    let mut gated = layer.layer(inner);
    let request = |path: &str| {
        let uri = format!("http://canary:canary@example.com/canary/{path}?key=canary");
        let request = Request::get(uri).header(AUTHORIZATION, CANARY).header("cookie", CANARY);
        request.extension(MaxWait(secs(40))).body(CANARY.to_owned()).unwrap()
    };

    // Every kind of event: acquired, throttled, canceled, shed; and whatever can be printed on the way.
    let served = gated.call(request("ok")).await.unwrap();
    let waiting = gated.call(request("throttled"));
    let mut said = format!("{waiting:?} {:?}", served.body());
    drop(served);
    let throttled = waiting.await.unwrap();
    let mut canceled = Box::pin(gated.call(request("ok")));
    assert!(futures_util::poll!(&mut canceled).is_pending());
    said += &format!("{canceled:?} {:?}", layer.hosts().get("canary:canary@example.com:80").unwrap());
    drop(canceled);
    let mut hasty = request("ok");
    hasty.extensions_mut().insert(MaxWait(secs(1)));
    let error = gated.call(hasty).await.unwrap_err();
    let limited = RateLimited::find(&*error).unwrap();
    said += &format!("{error} {error:?} {limited:?} {:?} {layer:?}", throttled.extensions());
    gated.call(request("ok")).await.unwrap();
    said += &serde_json::to_string(limited).unwrap();
    said += &serde_json::to_string(&layer.hosts().snapshot()).unwrap();
    said += &told.0.lock().unwrap();
    said += &log.text();

    for word in ["acquired", "canceled", "shed", "throttled", "example.com:80"] {
        assert!(said.contains(word), "the search is worth nothing unless {word} was said: {said}");
    }
    assert!(!said.contains(CANARY), "{said}");
}

/// Writes down every event as it would be printed.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<String>>);

impl Observer for Told {
    fn waited(&self, event: &WaitEvent<'_>) {
        *self.0.lock().unwrap() += &format!("{event:?}");
    }
    fn throttled(&self, event: &ThrottleEvent<'_>) {
        *self.0.lock().unwrap() += &format!("{event:?}");
    }
    fn shed(&self, event: &ShedEvent<'_>) {
        *self.0.lock().unwrap() += &format!("{event:?}");
    }
}
