//! How long a request counts as in flight: the B cases (SPEC 3.6), and the warning about unread bodies.

#![allow(clippy::unwrap_used, reason = "a helper's unwrap is an assertion too")]

mod support;

use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Method, Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use support::log::Log;
use support::script::{Reply, Script, ScriptBody, get};
use tokio::time::{Instant, sleep};
use tower::{BoxError, Layer, ServiceExt};
use tower_host_gate::{HostGate, HostGateLayer, Limits, PermitUntil, RateLimited, Reason, ResponseBody};

const URI: &str = "http://example.com/";
const HOST: &str = "example.com:80";

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

async fn send(gated: &HostGate<Script>, request: Request<()>) -> Result<Response<ResponseBody<ScriptBody>>, BoxError> {
    gated.clone().oneshot(request).await
}

fn in_flight(layer: &HostGateLayer) -> usize {
    layer.hosts().get(HOST).map_or(0, |host| host.in_flight)
}

/// A gate whose host has answered this reply to this request, and the response.
async fn answered(reply: Reply, request: Request<()>) -> (HostGateLayer, Response<ResponseBody<ScriptBody>>) {
    let layer = HostGateLayer::new();
    let response = send(&layer.layer(Script::always(reply)), request).await.unwrap();
    (layer, response)
}

// --- when the permit comes back -----------------------------------------------------------------------------------

// SPEC 3.4: "the permit lasts to the body's end (nginx `limit_conn` counts that way)".
#[tokio::test(start_paused = true)]
async fn b01_by_default_the_permit_lasts_until_the_body_ends() {
    let script = Script::always(Reply::ok().body("feed").open_for(secs(10)));
    let gated = HostGateLayer::new().layer(script.clone());
    let first = send(&gated, get(URI)).await.unwrap();
    let reading = tokio::spawn(first.into_body().collect());
    send(&gated, get(URI)).await.unwrap();
    assert_eq!(script.times(), [secs(0), secs(10)]);
    assert_eq!(reading.await.unwrap().unwrap().to_bytes(), "feed");
}

#[tokio::test(start_paused = true)]
async fn b01_until_the_head_as_setting_of_layer_host_and_request() {
    let plain = || get(URI);
    let marked = |until: PermitUntil| {
        let mut request = get(URI);
        request.extensions_mut().insert(until);
        request
    };
    let head = Limits::default().permit_until(PermitUntil::Head);
    let body_end = Limits::default().permit_until(PermitUntil::BodyEnd);
    let layer = HostGateLayer::new;
    for (case, layer, request, until_head) in [
        ("default", layer(), plain(), false),
        ("layer", layer().permit_until(PermitUntil::Head), plain(), true),
        ("host", layer().per_host(HOST, head.clone()), plain(), true),
        ("another host", layer().per_host("other.example", head.clone()), plain(), false),
        ("host over layer", layer().permit_until(PermitUntil::Head).per_host(HOST, body_end.clone()), plain(), false),
        ("request", layer(), marked(PermitUntil::Head), true),
        ("request over host", layer().per_host(HOST, head), marked(PermitUntil::BodyEnd), false),
        ("request over layer", layer().permit_until(PermitUntil::Head), marked(PermitUntil::BodyEnd), false),
    ] {
        let script = Script::always(Reply::ok().open_for_ever());
        let response = send(&layer.layer(script), request).await.unwrap();
        assert_eq!(in_flight(&layer), usize::from(!until_head), "{case}");
        drop(response);
        assert_eq!(in_flight(&layer), 0, "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn b01_until_the_head_also_for_a_request_that_had_to_wait() {
    let script = Script::always(Reply::ok().after(secs(1)).open_for_ever());
    let gated = HostGateLayer::new().permit_until(PermitUntil::Head).layer(script.clone());
    let (first, second) = tokio::join!(send(&gated, get(URI)), send(&gated, get(URI)));
    assert_eq!(script.times(), [secs(0), secs(1)]);
    drop((first.unwrap(), second.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn b01_a_throttled_response_gives_its_permit_back_at_the_head() {
    for reply in [Reply::status(429), Reply::status(403), Reply::status(503).header("retry-after", "5")] {
        let (layer, response) = answered(reply.open_for_ever(), get(URI)).await;
        assert_eq!(in_flight(&layer), 0);
        drop(response);
    }
    let (layer, response) = answered(Reply::status(500).open_for_ever(), get(URI)).await;
    assert_eq!(in_flight(&layer), 1, "a 500 is no refusal");
    drop(response);
}

#[tokio::test(start_paused = true)]
async fn b03_the_permit_comes_back_at_the_end_of_the_body() {
    let (layer, mut response) = answered(Reply::ok().open_for(secs(1)), get(URI)).await;
    assert_eq!(in_flight(&layer), 1);
    assert!(response.body_mut().frame().await.is_none());
    assert_eq!(in_flight(&layer), 0, "while the body is still there");
    drop(response);
}

#[tokio::test(start_paused = true)]
async fn b03_the_permit_comes_back_after_the_frame_that_completes_the_body() {
    let (layer, mut response) = answered(Reply::ok().body("one").body("two"), get(URI)).await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(in_flight(&layer), 1);
    response.body_mut().frame().await.unwrap().unwrap();
    assert!(response.body().is_end_stream());
    assert_eq!(in_flight(&layer), 0, "nobody need ask for the frame after the last");
}

#[tokio::test(start_paused = true)]
async fn b03_the_permit_comes_back_after_the_trailers() {
    let (layer, mut response) = answered(Reply::ok().body("one").trailer("x-sum", "1"), get(URI)).await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(in_flight(&layer), 1);
    let trailers = response.body_mut().frame().await.unwrap().unwrap().into_trailers().unwrap();
    assert_eq!(trailers["x-sum"], "1");
    assert_eq!(in_flight(&layer), 0);
}

#[tokio::test(start_paused = true)]
async fn b03_the_permit_comes_back_when_the_body_fails() {
    let (layer, mut response) = answered(Reply::ok().body("one").body_error("reset").body("never"), get(URI)).await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(response.body_mut().frame().await.unwrap().unwrap_err().to_string(), "reset");
    assert_eq!(in_flight(&layer), 0, "while the body is still there");
    drop(response);
}

#[tokio::test(start_paused = true)]
async fn b03_the_permit_comes_back_when_the_body_is_dropped_half_way() {
    let (layer, mut response) = answered(Reply::ok().body("one").open_for_ever(), get(URI)).await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(in_flight(&layer), 1);
    drop(response);
    assert_eq!(in_flight(&layer), 0);
}

#[tokio::test(start_paused = true)]
async fn b03_the_permit_comes_back_when_a_response_is_dropped_unread() {
    let (layer, response) = answered(Reply::ok().body("one"), get(URI)).await;
    assert_eq!(in_flight(&layer), 1);
    drop(response);
    assert_eq!(in_flight(&layer), 0);
}

#[tokio::test(start_paused = true)]
async fn b03_empty_responses_give_their_permit_back_at_once() {
    // A body that does not know that it is empty, as hyper's over HTTP/2.
    let head = Request::builder().method(Method::HEAD).uri(URI).body(()).unwrap();
    for (case, reply, request) in [
        ("HEAD", Reply::ok().open_for(secs(9)), head),
        ("204", Reply::status(204).open_for(secs(9)), get(URI)),
        ("304", Reply::status(304).open_for(secs(9)), get(URI)),
        ("ended", Reply::ok(), get(URI)),
    ] {
        let (layer, response) = answered(reply, request).await;
        assert_eq!(in_flight(&layer), 0, "{case}");
        drop(response);
    }
}

// --- what the reader sees -----------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn b03_frames_trailers_and_hints_pass_unchanged() {
    // Forwarding must be verbatim, so the inner body says things a wrapper could not make up.
    struct Odd(u8);
    impl Body for Odd {
        type Data = Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            self.0 += 1;
            Poll::Ready(match self.0 {
                1 => Some(Ok(Frame::data(Bytes::from_static(b"data")))),
                2 => Some(Ok(Frame::trailers(HeaderMap::from_iter([(http::header::AGE, "7".parse().unwrap())])))),
                _ => None,
            })
        }
        fn is_end_stream(&self) -> bool {
            self.0 >= 2
        }
        fn size_hint(&self) -> SizeHint {
            let mut hint = SizeHint::new();
            hint.set_lower(3);
            hint.set_upper(40 - u64::from(self.0));
            hint
        }
    }
    let gated = HostGateLayer::new()
        .layer(tower::service_fn(async |_: Request<()>| Ok::<_, std::convert::Infallible>(Response::new(Odd(0)))));
    let mut body = pin!(gated.oneshot(get(URI)).await.unwrap().into_body());
    let hint = |body: &Pin<&mut ResponseBody<Odd>>| (body.size_hint().lower(), body.size_hint().upper());

    assert_eq!((hint(&body), body.is_end_stream()), ((3, Some(40)), false));
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "data");
    assert_eq!((hint(&body), body.is_end_stream()), ((3, Some(39)), false));
    assert_eq!(body.frame().await.unwrap().unwrap().into_trailers().unwrap()["age"], "7");
    assert_eq!((hint(&body), body.is_end_stream()), ((3, Some(38)), true));
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn a_default_body_is_empty_whatever_is_inside() {
    struct NoDefault;
    impl Body for NoDefault {
        type Data = Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            unreachable!("nobody made one");
        }
    }
    let mut body = ResponseBody::<NoDefault>::default();
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(pin!(&mut body).frame().await.is_none());
}

// --- long streams -------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn b05_an_open_stream_starves_its_siblings_unless_it_says_otherwise() {
    let script = Script::new(|sent| match sent.path.as_str() {
        "/events" => Reply::ok().body("data: 1").open_for(secs(600)),
        _ => Reply::ok(),
    });
    let gated = HostGateLayer::new().layer(script.clone());
    let events = || get("http://example.com/events");

    let stream = send(&gated, events()).await.unwrap();
    let error = send(&gated, get(URI)).await.unwrap_err();
    assert_eq!(RateLimited::find(&*error).unwrap().reason(), Reason::InFlight);
    drop(stream);

    let mut request = events();
    request.extensions_mut().insert(PermitUntil::Head);
    let stream = send(&gated, request).await.unwrap();
    let before = Instant::now();
    send(&gated, get(URI)).await.unwrap();
    assert_eq!(before.elapsed(), secs(0));
    drop(stream);
}

// --- unread bodies ------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn a_task_that_waits_for_a_body_it_does_not_read_is_told_so() {
    let (log, _guard) = Log::capture();
    let gated = HostGateLayer::new().max_wait(secs(5)).layer(Script::always(Reply::ok().open_for_ever()));
    let _unread = send(&gated, get(URI)).await.unwrap();
    let error = send(&gated, get(URI)).await.unwrap_err();

    let limited = RateLimited::find(&*error).unwrap();
    assert_eq!((limited.reason(), limited.retry_after()), (Reason::InFlight, secs(1)));
    assert!(error.to_string().contains("bodies left unread"), "{error}");
    assert_eq!(log.warnings(), 1, "{}", log.text());
    assert!(log.text().contains("host=\"example.com:80\""), "{}", log.text());
}

#[tokio::test(start_paused = true)]
async fn the_warning_comes_after_one_second_of_waiting_for_bodies_alone() {
    let (log, _guard) = Log::capture();
    // The head comes at 10 s: until then the wait is an ordinary one.
    let gated = HostGateLayer::new().layer(Script::always(Reply::ok().after(secs(10)).open_for_ever()));
    let mut first = Box::pin(send(&gated, get(URI)));
    assert!((&mut first).now_or_never().is_none());
    let second = tokio::spawn(gated.clone().oneshot(get(URI)));
    let unread = first.await.unwrap();

    sleep(Duration::from_millis(990)).await;
    assert_eq!(log.warnings(), 0, "{}", log.text());
    sleep(Duration::from_millis(20)).await;
    assert_eq!(log.warnings(), 1, "{}", log.text());
    drop(unread);
    second.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn there_is_one_warning_per_host_however_many_wait_and_however_often() {
    let (log, _guard) = Log::capture();
    let layer = HostGateLayer::new().max_wait(secs(5));
    let gated = layer.layer(Script::always(Reply::ok().open_for_ever()));
    for uri in [URI, "http://other.example/"] {
        for _ in 0..3 {
            let unread = send(&gated, get(uri)).await.unwrap();
            let (one, two) = tokio::join!(send(&gated, get(uri)), send(&gated, get(uri)));
            assert!(one.is_err() && two.is_err());
            drop(unread);
            // Nothing is known of the host any more, but who was told was told.
            assert!(layer.hosts().snapshot().is_empty());
        }
    }
    assert_eq!(log.warnings(), 2, "{}", log.text());
}

#[tokio::test(start_paused = true)]
async fn there_is_no_warning_while_waiting_for_a_head() {
    let (log, _guard) = Log::capture();
    let slow = Script::new(|sent| match sent.n {
        0 => Reply::ok().open_for_ever(),
        _ => Reply::hang(),
    });
    let gated = HostGateLayer::new().concurrency(2).layer(slow);
    let unread = send(&gated, get(URI)).await.unwrap();
    let head = tokio::spawn(gated.clone().oneshot(get(URI)));
    sleep(Duration::from_millis(1)).await;
    let error = send(&gated, get(URI)).await.unwrap_err();
    assert_eq!(RateLimited::find(&*error).unwrap().reason(), Reason::InFlight);
    assert_eq!(log.warnings(), 0, "{}", log.text());
    head.abort();
    drop(unread);
}

#[tokio::test(start_paused = true)]
async fn there_is_no_warning_while_bodies_end_in_time() {
    let (log, _guard) = Log::capture();
    let script = Script::always(Reply::ok().body("x").open_for(Duration::from_millis(900)));
    let gated = HostGateLayer::new().layer(script.clone());
    let fetch = || async { send(&gated, get(URI)).await.unwrap().into_body().collect().await.unwrap() };
    tokio::join!(fetch(), fetch(), fetch(), fetch());
    assert_eq!(script.times().last(), Some(&Duration::from_millis(2700)));
    assert_eq!(log.warnings(), 0, "{}", log.text());
}

#[tokio::test(start_paused = true)]
async fn there_is_no_warning_while_pacing_is_the_reason() {
    let (log, _guard) = Log::capture();
    let gated = HostGateLayer::new().layer(Script::list([Reply::status(429).header("retry-after", "30")]));
    let unread = send(&gated, get(URI)).await.unwrap();
    send(&gated, get(URI)).await.unwrap();
    drop(unread);
    assert_eq!(log.warnings(), 0, "{}", log.text());
}
