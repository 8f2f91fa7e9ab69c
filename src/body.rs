//! The response body: the inner one, carrying the permit until it ends.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::gate::Permit;

pin_project! {
    /// The body of a gated response. Forwards frames, trailers, [`size_hint`](Body::size_hint) and
    /// [`is_end_stream`](Body::is_end_stream) of the inner body untouched.
    ///
    /// The request counts as in flight until this body has ended, failed or been dropped, so **read or drop a response
    /// before asking the same host again from the same task**: at a concurrency of one that task waits for itself. See
    /// [`PermitUntil`](crate::PermitUntil) for the way out.
    ///
    /// `Default` is an empty body that holds nothing, whatever `B` is.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment it gives the permit back.
    ///
    /// ```
    /// use http_body_util::BodyExt;
    /// use tower::{Layer, ServiceExt};
    /// use tower_host_gate::HostGateLayer;
    /// # use std::convert::Infallible;
    /// # use http::{Request, Response};
    /// # async fn fetch(_: Request<String>) -> Result<Response<String>, Infallible> { Ok(Response::new("feed".into())) }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower::BoxError> {
    ///
    /// let layer = HostGateLayer::new();
    /// let request = Request::get("https://example.com/").body(String::new())?;
    /// let response = layer.layer(tower::service_fn(fetch)).oneshot(request).await?;
    /// assert_eq!(layer.hosts().get("example.com").unwrap().in_flight, 1);
    /// assert_eq!(response.into_body().collect().await?.to_bytes(), "feed");
    /// assert!(layer.hosts().get("example.com").is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub struct ResponseBody<B> {
        #[pin]
        inner: Option<B>,
        permit: Option<Permit>,
    }
}

impl<B> ResponseBody<B> {
    #[inline]
    pub(crate) fn new(inner: B, permit: Option<Permit>) -> Self {
        Self { inner: Some(inner), permit }
    }
}

impl<B> Default for ResponseBody<B> {
    fn default() -> Self {
        Self { inner: None, permit: None }
    }
}

impl<B: Body> Body for ResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    #[inline]
    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let Some(mut inner) = this.inner.as_mut().as_pin_mut() else {
            return Poll::Ready(None);
        };
        let frame = inner.as_mut().poll_frame(cx);
        let ended = match frame {
            Poll::Pending => false,
            // A reader may stop after the frame that completes the body, without asking for the end.
            Poll::Ready(Some(Ok(_))) => inner.is_end_stream(),
            Poll::Ready(_) => true,
        };
        if ended {
            *this.permit = None;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").field("permit", &self.permit).finish_non_exhaustive()
    }
}
