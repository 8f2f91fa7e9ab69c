//! tower-http's client layers around and below the gate: for each order that matters, what happens.

mod support;

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header::USER_AGENT};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use support::{
    client::get,
    reactive,
    script::{Reply, Script, Sent},
};
use tokio::{join, time::sleep};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, retry::RetryLayer};
use tower_host_gate::{HostGateLayer, HostSnapshot, MaxWait, RateLimited, Throttled, final_uri};
use tower_http::{
    add_extension::AddExtensionLayer,
    compression::CompressionLayer,
    decompression::DecompressionLayer,
    follow_redirect::FollowRedirectLayer,
    set_header::SetRequestHeaderLayer,
    timeout::{
        RequestBodyDeadlineLayer, RequestBodyTimeoutLayer, ResponseBodyDeadlineLayer, ResponseBodyTimeoutLayer,
        TimeoutError, TimeoutLayer,
    },
    trace::TraceLayer,
};

const A: &str = "http://a.example/feed";
const B: &str = "http://b.example/feed";

type Get = Request<Full<Bytes>>;

/// Sends on a clone, as another task of the program would.
async fn send<S, R>(service: &S, request: Get) -> Result<R, BoxError>
where
    S: Service<Get, Response = R, Error: Into<BoxError>> + Clone,
{
    service.clone().oneshot(request).await.map_err(Into::into)
}

async fn status<S, B>(service: &S, request: Get) -> u16
where
    S: Service<Get, Response = Response<B>, Error: Into<BoxError>> + Clone,
{
    send(service, request).await.expect("a response").status().as_u16()
}

fn host(layer: &HostGateLayer, host: &str) -> HostSnapshot {
    layer.hosts().get(host).expect("the gate has something to say of the host")
}

/// A gate that holds this host for a minute, and in which everybody has the patience for that.
fn holding_for_a_minute(host: &str) -> HostGateLayer {
    hold_for_a_minute(HostGateLayer::new(), host)
}

fn hold_for_a_minute(layer: HostGateLayer, host: &str) -> HostGateLayer {
    let layer = layer.max_wait(secs(120));
    layer.hosts().penalize(host, secs(60));
    layer
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

// ---------------------------------------------------------------------------------------------------------------------
// Timeout
// ---------------------------------------------------------------------------------------------------------------------

fn five_seconds() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, secs(5))
}

#[tokio::test(start_paused = true)]
async fn a_timeout_outside_counts_the_wait() {
    let layer = holding_for_a_minute("a.example");
    let script = Script::list([]);
    let client = ServiceBuilder::new().layer(five_seconds()).layer(layer.clone()).service(script.clone());
    assert_eq!(status(&client, get(A)).await, 408);
    assert!(script.sent().is_empty());
    let host = host(&layer, "a.example:80");
    assert_eq!((host.queued, host.in_flight, host.cooldown), (0, 0, secs(55)));
}

#[tokio::test(start_paused = true)]
async fn a_timeout_inside_counts_the_send_only() {
    let script = Script::list([Reply::ok().after(secs(4))]);
    let client =
        ServiceBuilder::new().layer(holding_for_a_minute("a.example")).layer(five_seconds()).service(script.clone());
    assert_eq!(status(&client, get(A)).await, 200);
    assert_eq!(script.times(), [secs(60)]);
}

// SPEC 3.2: "408: neutral (an inner timeout layer synthesises it)"
#[tokio::test(start_paused = true)]
async fn the_408_of_a_timeout_inside_is_neutral() {
    let layer = reactive();
    let script = Script::list([Reply::status(429), Reply::hang(), Reply::status(429)]);
    let client = ServiceBuilder::new().layer(layer.clone()).layer(five_seconds()).service(script.clone());
    assert_eq!(status(&client, get(A)).await, 429);

    let response = send(&client, get(A)).await.unwrap();
    assert_eq!(response.status(), 408);
    assert!(response.extensions().get::<Throttled>().is_none());
    assert_eq!((host(&layer, "a.example:80").streak, host(&layer, "a.example:80").in_flight), (1, 0));

    // Neither an end of the streak nor a step of it: the next refusal is the second one.
    assert_eq!(status(&client, get(A)).await, 429);
    assert_eq!((host(&layer, "a.example:80").streak, host(&layer, "a.example:80").cooldown), (2, secs(4)));
}

// ---------------------------------------------------------------------------------------------------------------------
// FollowRedirect
// ---------------------------------------------------------------------------------------------------------------------

/// Redirects host A to B, with a body that nobody will read. B answers with this.
fn a_to_b(answer: Reply) -> Script {
    Script::new(move |sent| if sent.host == "a.example" { moved(B) } else { answer.clone() })
}

fn moved(location: &str) -> Reply {
    Reply::status(302).header("location", location).body("moved")
}

#[tokio::test(start_paused = true)]
async fn with_redirects_outside_each_hop_is_gated_on_its_own_host() {
    for (held, expected) in [("a.example", [60, 60]), ("b.example", [0, 60]), ("c.example", [0, 0])] {
        let layer = holding_for_a_minute(held);
        let script = a_to_b(Reply::ok());
        let client =
            ServiceBuilder::new().layer(FollowRedirectLayer::new()).layer(layer.clone()).service(script.clone());
        let looking = async {
            sleep(secs(30)).await;
            let in_flight: usize = layer.hosts().snapshot().iter().map(|host| host.in_flight).sum();
            assert_eq!(in_flight, 0, "a hop that waits holds no permit of the hop before");
        };
        let (status, ()) = join!(status(&client, get(A)), looking);
        assert_eq!(status, 200);
        assert_eq!(script.times(), expected.map(secs), "{held} is held");
    }
}

#[tokio::test(start_paused = true)]
async fn with_redirects_outside_a_refusal_is_charged_to_the_hop_that_got_it() {
    let layer = HostGateLayer::new();
    let client = ServiceBuilder::new()
        .layer(FollowRedirectLayer::new())
        .layer(layer.clone())
        .service(a_to_b(Reply::status(429)));
    assert_eq!(status(&client, get(A)).await, 429);
    assert_eq!(host(&layer, "b.example").streak, 1);
    assert!(layer.hosts().get("a.example").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_redirect_to_the_same_host_does_not_wait_for_itself() {
    let replies = || Script::list([moved("/moved"), moved("/moved/again")]);
    let script = replies();
    let outside = ServiceBuilder::new()
        .layer(FollowRedirectLayer::new())
        .layer(HostGateLayer::new().concurrency(1))
        .service(script.clone());
    assert_eq!(status(&outside, get(A)).await, 200);
    assert_eq!(script.times(), [secs(0); 3]);

    let script = replies();
    let inside = ServiceBuilder::new()
        .layer(HostGateLayer::new().concurrency(1))
        .layer(FollowRedirectLayer::new())
        .service(script.clone());
    assert_eq!(status(&inside, get(A)).await, 200);
    assert_eq!(script.times(), [secs(0); 3]);
}

// Documented: a request is admitted once, by the host it names, whatever comes of it inside.
#[tokio::test(start_paused = true)]
async fn with_redirects_inside_only_the_first_host_is_waited_for() {
    for (held, expected) in [("a.example", [60, 60]), ("b.example", [0, 0])] {
        let script = a_to_b(Reply::ok());
        let client = ServiceBuilder::new()
            .layer(hold_for_a_minute(HostGateLayer::new().final_uri(final_uri::tower_http), held))
            .layer(FollowRedirectLayer::new())
            .service(script.clone());
        assert_eq!(status(&client, get(A)).await, 200);
        assert_eq!(script.times(), expected.map(secs), "{held} is held");
    }
}

// SPEC 3.2: "with one inside, the verdict is charged to the final URI when the layer's `final_uri` hook finds one, else to
// the request's host"
#[tokio::test(start_paused = true)]
async fn with_redirects_inside_the_verdict_is_charged_to_the_final_host_by_the_hook() {
    let layer = reactive().final_uri(final_uri::tower_http);
    let client = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(FollowRedirectLayer::new())
        .service(a_to_b(Reply::status(429).header("retry-after", "30")));
    let response = send(&client, get(A)).await.unwrap();
    let throttled = response.extensions().get::<Throttled>().expect("the mark of a refusal");
    assert_eq!((throttled.streak, throttled.retry_after), (1, secs(30)));
    assert_eq!((host(&layer, "b.example").streak, host(&layer, "b.example").cooldown), (1, secs(30)));
    assert!(layer.hosts().get("a.example").is_none(), "it has answered, and its permit is back");
}

#[tokio::test(start_paused = true)]
async fn with_redirects_inside_and_no_hook_the_verdict_is_charged_to_the_requests_host() {
    let layer = HostGateLayer::new();
    let client = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(FollowRedirectLayer::new())
        .service(a_to_b(Reply::status(429)));
    assert_eq!(status(&client, get(A)).await, 429);
    assert_eq!(host(&layer, "a.example").streak, 1);
    assert!(layer.hosts().get("b.example").is_none());
}

#[tokio::test(start_paused = true)]
async fn the_hook_changes_nothing_for_a_response_without_a_redirect() {
    let layer = reactive().final_uri(final_uri::tower_http);
    let script = Script::list([Reply::status(429), Reply::ok()]);
    let client = ServiceBuilder::new().layer(layer.clone()).layer(FollowRedirectLayer::new()).service(script.clone());
    assert_eq!(status(&client, get(A)).await, 429);
    assert_eq!(host(&layer, "a.example").streak, 1);
    assert_eq!(status(&client, get(A)).await, 200);
    assert_eq!(host(&layer, "a.example").streak, 0);
    assert_eq!(script.times(), [secs(0), secs(2)]);
}

#[tokio::test(start_paused = true)]
async fn with_the_hook_a_success_ends_the_streak_of_both_hosts() {
    let layer = reactive().final_uri(final_uri::tower_http);
    let mut refusals = 2;
    let script = Script::new(move |sent: &Sent| {
        if refusals > 0 {
            refusals -= 1;
            return Reply::status(429);
        }
        if sent.host == "a.example" { moved(B) } else { Reply::ok() }
    });
    let client = ServiceBuilder::new().layer(layer.clone()).layer(FollowRedirectLayer::new()).service(script);
    assert_eq!((status(&client, get(A)).await, status(&client, get(B)).await), (429, 429));
    assert_eq!((host(&layer, "a.example").streak, host(&layer, "b.example").streak), (1, 1));
    assert_eq!(status(&client, get(A)).await, 200);
    assert_eq!((host(&layer, "a.example").streak, host(&layer, "b.example").streak), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn an_in_flight_retry_charges_the_first_refusal_to_the_final_host() {
    let layer = reactive().final_uri(final_uri::tower_http);
    let script = a_to_b(Reply::status(429));
    let client = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(RetryLayer::new(layer.in_flight_retry()))
        .layer(FollowRedirectLayer::new())
        .service(script.clone());
    let looking = async {
        sleep(ms(100)).await;
        assert_eq!(host(&layer, "a.example").cooldown, secs(0));
        assert_eq!((host(&layer, "b.example").streak, host(&layer, "b.example").cooldown), (1, ms(1900)));
    };
    let (status, ()) = join!(status(&client, get(A)), looking);
    assert_eq!((status, script.times()), (429, [0, 0, 500, 500].map(ms).to_vec()));
    assert_eq!(host(&layer, "b.example").streak, 1, "both refusals are one event");
    assert!(layer.hosts().get("a.example").is_none());
}

// tower-http's standard policy drops a request's extensions when a redirect leads to another origin, and so its budget.
#[tokio::test(start_paused = true)]
async fn a_redirect_outside_keeps_the_requests_budget_on_the_same_host_and_loses_it_on_another() {
    let impatient = || {
        let mut request = get(A);
        request.extensions_mut().insert(MaxWait(secs(0)));
        request
    };
    let client = |script| {
        ServiceBuilder::new().layer(FollowRedirectLayer::new()).layer(holding_for_a_minute("b.example")).service(script)
    };
    assert_eq!(status(&client(a_to_b(Reply::ok())), impatient()).await, 200);

    // The second hop meets a host whose only permit is taken by the first request's unread body.
    let script = Script::new(|sent| match sent.path.as_str() {
        "/feed" => moved("/moved").after(secs(1)),
        "/open" => Reply::ok().body("text").open_for_ever(),
        _ => Reply::ok(),
    });
    let client = client(script);
    let open = async {
        sleep(ms(500)).await;
        let response = send(&client, get("http://a.example/open")).await;
        sleep(secs(10)).await;
        response
    };
    let (hops, _open) = join!(send(&client, impatient()), open);
    let error = hops.expect_err("the queue is taken, and zero never waits");
    assert!(RateLimited::find(&*error).is_some(), "{error:?}");
}

// ---------------------------------------------------------------------------------------------------------------------
// Decompression, Trace, headers, extensions
// ---------------------------------------------------------------------------------------------------------------------

/// Reads a body to its end, and then looks at the gate while the body is still there.
async fn read_and_look<B>(response: Response<B>, layer: &HostGateLayer) -> Vec<u8>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    assert_eq!(host(layer, "a.example").in_flight, 1, "the body is not read yet");
    let mut body = pin!(response.into_body());
    let mut text = Vec::new();
    while let Some(frame) = body.as_mut().frame().await {
        if let Ok(data) = frame.map_err(Into::into).expect("a whole body").into_data() {
            text.extend_from_slice(&data);
        }
    }
    assert!(layer.hosts().snapshot().is_empty(), "the permit is back as soon as the body has ended");
    text
}

/// A server that compresses.
fn gzip(
    text: &str,
) -> impl Service<Get, Response = Response<impl Body<Data = Bytes, Error: Into<BoxError>>>, Error: Into<BoxError>> + Clone
{
    let script = Script::always(Reply::ok().body(text.to_owned()));
    ServiceBuilder::new().layer(CompressionLayer::new()).service(script)
}

#[tokio::test(start_paused = true)]
async fn a_compressed_body_is_whole_and_gives_its_permit_back_with_decompression_on_either_side() {
    let text = "all the news of the day, ".repeat(1000);

    let layer = HostGateLayer::new();
    let outside = ServiceBuilder::new().layer(DecompressionLayer::new()).layer(layer.clone()).service(gzip(&text));
    let response = send(&outside, get(A)).await.unwrap();
    assert_eq!(read_and_look(response, &layer).await, text.as_bytes());

    let layer = HostGateLayer::new();
    let inside = ServiceBuilder::new().layer(layer.clone()).layer(DecompressionLayer::new()).service(gzip(&text));
    let response = send(&inside, get(A)).await.unwrap();
    assert_eq!(read_and_look(response, &layer).await, text.as_bytes());
}

#[tokio::test(start_paused = true)]
async fn trace_works_on_either_side() {
    let layer = HostGateLayer::new();
    let script = Script::list([Reply::ok().body("text"), Reply::status(429)]);
    let client = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(layer.clone())
        .layer(TraceLayer::new_for_http())
        .service(script.clone());
    let response = send(&client, get(A)).await.unwrap();
    assert_eq!(read_and_look(response, &layer).await, b"text");

    assert_eq!(status(&client, get(A)).await, 429);
    let mut impatient = get(A);
    impatient.extensions_mut().insert(MaxWait(secs(1)));
    let error = send(&client, impatient).await.map(drop).expect_err("two seconds are more than one");
    assert!(error.is::<RateLimited>(), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_user_agent_is_set_on_either_side_and_on_every_redirect_below() {
    let agent = || SetRequestHeaderLayer::if_not_present(USER_AGENT, HeaderValue::from_static("reader/1.0"));
    let script = a_to_b(Reply::ok());
    let outside = ServiceBuilder::new()
        .layer(agent())
        .layer(FollowRedirectLayer::new())
        .layer(HostGateLayer::new())
        .service(script.clone());
    assert_eq!(status(&outside, get(A)).await, 200);
    let inside = ServiceBuilder::new()
        .layer(FollowRedirectLayer::new())
        .layer(HostGateLayer::new())
        .layer(agent())
        .service(script.clone());
    assert_eq!(status(&inside, get(A)).await, 200);
    let sent = script.sent();
    assert_eq!(sent.len(), 4);
    assert!(sent.iter().all(|sent| sent.headers[USER_AGENT] == "reader/1.0"));
}

#[tokio::test(start_paused = true)]
async fn an_extension_layer_outside_gives_every_request_its_budget() {
    let client = ServiceBuilder::new()
        .layer(AddExtensionLayer::new(MaxWait(secs(0))))
        .layer(holding_for_a_minute("a.example"))
        .service(Script::list([]));
    assert!(send(&client, get(A)).await.unwrap_err().is::<RateLimited>());
    assert_eq!(status(&client, get(B)).await, 200);
}

// ---------------------------------------------------------------------------------------------------------------------
// Timeouts of bodies
// ---------------------------------------------------------------------------------------------------------------------

/// A body that stalls.
fn stalling() -> Script {
    Script::list([Reply::ok().body("half").open_for_ever(), Reply::ok()])
}

#[tokio::test(start_paused = true)]
async fn a_response_body_that_times_out_inside_gives_its_permit_back_with_the_error() {
    let layer = HostGateLayer::new();
    let idle =
        ServiceBuilder::new().layer(layer.clone()).layer(ResponseBodyTimeoutLayer::new(secs(5))).service(stalling());
    let mut body = pin!(send(&idle, get(A)).await.unwrap().into_body());
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "half");
    assert!(body.frame().await.unwrap().unwrap_err().is::<TimeoutError>());
    assert!(layer.hosts().snapshot().is_empty(), "though the body is still there");

    let layer = HostGateLayer::new();
    let deadline =
        ServiceBuilder::new().layer(layer.clone()).layer(ResponseBodyDeadlineLayer::new(secs(5))).service(stalling());
    let mut body = pin!(send(&deadline, get(A)).await.unwrap().into_body());
    assert!(body.frame().await.unwrap().is_ok());
    assert!(body.frame().await.unwrap().unwrap_err().is::<TimeoutError>());
    assert!(layer.hosts().snapshot().is_empty());
}

// The gate's own body below knows nothing of the timeout: the permit comes back when the reader drops what has failed.
#[tokio::test(start_paused = true)]
async fn a_response_body_that_times_out_outside_gives_its_permit_back_when_it_is_dropped() {
    let layer = HostGateLayer::new();
    let client =
        ServiceBuilder::new().layer(ResponseBodyTimeoutLayer::new(secs(5))).layer(layer.clone()).service(stalling());
    let mut body = Box::pin(send(&client, get(A)).await.unwrap().into_body());
    assert!(body.frame().await.unwrap().is_ok());
    assert!(body.frame().await.unwrap().unwrap_err().is::<TimeoutError>());
    assert_eq!(host(&layer, "a.example").in_flight, 1);
    drop(body);
    assert!(layer.hosts().snapshot().is_empty());
}

/// A server that reads the request to its end.
async fn reads<B>(request: Request<B>) -> Result<Response<Full<Bytes>>, B::Error>
where
    B: Body<Data = Bytes>,
{
    request.into_body().collect().await.map(|body| Response::new(Full::from(body.to_bytes())))
}

fn post() -> Get {
    Request::post(A).body(Full::from("a question")).expect("a request")
}

// It counts from the first look at the body, and nobody looks before the request is sent.
#[tokio::test(start_paused = true)]
async fn an_idle_timeout_of_request_bodies_does_not_count_the_wait_on_either_side() {
    let idle = RequestBodyTimeoutLayer::new(secs(5));
    let gate = || holding_for_a_minute("a.example");
    let outside = ServiceBuilder::new().layer(idle.clone()).layer(gate()).service_fn(reads);
    let inside = ServiceBuilder::new().layer(gate()).layer(idle).service_fn(reads);
    let (outside, inside) = join!(send(&outside, post()), send(&inside, post()));
    for response in [outside.unwrap(), inside.unwrap()] {
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "a question");
    }
}

// It counts from the making of the body.
#[tokio::test(start_paused = true)]
async fn a_deadline_of_request_bodies_counts_the_wait_outside_and_the_send_only_inside() {
    let deadline = RequestBodyDeadlineLayer::new(secs(5));
    let gate = || holding_for_a_minute("a.example");
    let outside = ServiceBuilder::new().layer(deadline.clone()).layer(gate()).service_fn(reads);
    let inside = ServiceBuilder::new().layer(gate()).layer(deadline).service_fn(reads);
    let (outside, inside) = join!(send(&outside, post()), send(&inside, post()));
    assert!(outside.unwrap_err().is::<TimeoutError>());
    assert_eq!(inside.unwrap().into_body().collect().await.unwrap().to_bytes(), "a question");
}
