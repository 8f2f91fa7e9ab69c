//! Real hyper clients, and the few lines every test needs around them.

use std::fmt::Debug;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tower::{Service, ServiceExt};

/// hyper-util's client without TLS.
pub type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// hyper-util's client with TLS (and without, for `http:`).
pub type HttpsClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// A client that speaks HTTP/1.1.
pub fn http1() -> HttpClient {
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build_http()
}

/// A client that speaks HTTP/2 from the first byte on ("prior knowledge").
pub fn http2() -> HttpClient {
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).http2_only(true).build_http()
}

/// A client that trusts this one certificate and offers HTTP/2 and HTTP/1.1.
pub fn https(certificate: &CertificateDer<'static>) -> HttpsClient {
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).expect("the provider's certificate is well formed");
    // The provider is named: the workspace may have more than one, and rustls then refuses to choose.
    let tls = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("ring supports the default protocol versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector =
        HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().enable_http2().build();
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector)
}

/// A `GET` without a body.
pub fn get(uri: impl AsRef<str>) -> Request<Full<Bytes>> {
    Request::get(uri.as_ref()).body(Full::default()).expect("a test names a valid URI")
}

/// Reads the body to its end.
pub async fn drain<B>(response: Response<B>) -> Result<Bytes, B::Error>
where
    B: Body,
{
    response.into_body().collect().await.map(|body| body.to_bytes())
}

/// What a program without any manners does: asks for all of these at once, each one time, and reads every body to its
/// end. Gives back the statuses.
pub async fn burst<S, B>(service: S, urls: impl IntoIterator<Item = String>) -> Vec<StatusCode>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: Debug> + Clone,
    B: Body<Error: Debug>,
{
    join_all(urls.into_iter().map(|url| fetch(service.clone(), url))).await
}

/// What a feed reader does: asks for all of these at once, and again for each that was refused with 429, until it has
/// them all. Gives back how many refusals it met.
pub async fn fetch_all<S, B>(service: S, urls: impl IntoIterator<Item = String>) -> usize
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: Debug> + Clone,
    B: Body<Error: Debug>,
{
    let refusals = urls.into_iter().map(async |url| {
        for refusals in 0..200 {
            match fetch(service.clone(), url.clone()).await {
                StatusCode::TOO_MANY_REQUESTS => {}
                StatusCode::OK => return refusals,
                other => panic!("{url} was answered with {other}"),
            }
        }
        panic!("{url} was refused two hundred times");
    });
    join_all(refusals).await.into_iter().sum()
}

async fn fetch<S, B>(service: S, url: String) -> StatusCode
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: Debug>,
    B: Body<Error: Debug>,
{
    let response = service.oneshot(get(url)).await.expect("a response");
    let status = response.status();
    drain(response).await.expect("a whole body");
    status
}
