//! Ready-made hooks for [`HostGateLayer::final_uri`](crate::HostGateLayer::final_uri).

use http::{Extensions, Uri};
use tower_http::follow_redirect::RequestUri;

/// Where `tower-http` 0.7's `FollowRedirect` ended. Another version's `RequestUri` is another type: for that, write the
/// one-line closure that this is.
///
/// ```
/// use tower::ServiceBuilder;
/// use tower_host_gate::{HostGateLayer, final_uri};
/// use tower_http::follow_redirect::FollowRedirectLayer;
/// # use std::convert::Infallible;
/// # async fn fetch(_: http::Request<String>) -> Result<http::Response<String>, Infallible> { Ok(http::Response::default()) }
///
/// let client = ServiceBuilder::new()
///     .layer(HostGateLayer::new().final_uri(final_uri::tower_http))
///     .layer(FollowRedirectLayer::new())
///     .service_fn(fetch);
/// ```
pub fn tower_http(extensions: &Extensions) -> Option<Uri> {
    extensions.get().map(|RequestUri(uri)| uri.clone())
}
