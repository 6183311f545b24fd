//! Server-sent events: a body that is written as the answer comes.
//!
//! The body asks its source only when the connection can take more, and hands over all that is ready in one frame.
//! A slow reader therefore costs the tokens of its own answer and nothing else; when the connection goes away the
//! body is dropped, and with it the request.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Frame;
use serde::Serialize;

use crate::error::ApiError;

/// Writes the events of an answer.
pub trait EventSource: Send + Unpin + 'static {
    /// Appends events that are ready. False when there will be no more.
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Events) -> Poll<Result<bool, ApiError>>;

    /// Writes the event that tells of an error.
    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        out.push(&error.body());
    }

    /// Chat and completions say `[DONE]`; the other APIs have an event that says it.
    fn ends_with_done(&self) -> bool {
        true
    }
}

/// Events that wait to be sent.
#[derive(Debug, Default)]
pub struct Events {
    bytes: Vec<u8>,
}

impl Events {
    pub fn push(&mut self, event: &impl Serialize) {
        self.bytes.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut self.bytes, event)
            .expect("our types serialise, and memory takes all bytes");
        self.bytes.extend_from_slice(b"\n\n");
    }

    /// An event with a name, for the APIs that name theirs.
    pub fn push_named(&mut self, name: &str, event: &impl Serialize) {
        self.bytes.extend_from_slice(b"event: ");
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(b'\n');
        self.push(event);
    }

    fn push_done(&mut self) {
        self.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }
}

struct EventBody<S> {
    /// `None` after the last event.
    source: Option<S>,
}

impl<S: EventSource> http_body::Body for EventBody<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut events = Events::default();
        while let Some(source) = &mut self.source {
            let more = match source.poll_events(cx, &mut events) {
                Poll::Pending if events.bytes.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Ok(more)) => more,
                Poll::Ready(Err(error)) => {
                    source.fail(&error, &mut events);
                    false
                }
            };
            if !more {
                if source.ends_with_done() {
                    events.push_done();
                }
                self.source = None;
            }
        }
        if events.bytes.is_empty() {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(Frame::data(events.bytes.into()))))
    }
}

/// The answer whose body are the source's events.
pub fn response(source: impl EventSource) -> Response {
    let mut response = Body::new(EventBody { source: Some(source) }).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that buffer would hold the stream back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    /// Gives numbers, two at a time, and fails at the end if asked to.
    struct Numbers {
        next: u32,
        last: u32,
        fails: bool,
    }

    impl EventSource for Numbers {
        fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Events) -> Poll<Result<bool, ApiError>> {
            if self.next > self.last {
                let end = if self.fails { Err(ApiError::unavailable("gone")) } else { Ok(false) };
                return Poll::Ready(end);
            }
            out.push(&self.next);
            self.next += 1;
            Poll::Ready(Ok(true))
        }
    }

    async fn text(source: Numbers) -> String {
        let body = response(source).into_body().collect().await.expect("no error").to_bytes();
        String::from_utf8(body.to_vec()).expect("UTF-8")
    }

    #[tokio::test]
    async fn events_end_with_done() {
        let got = text(Numbers { next: 1, last: 2, fails: false }).await;
        assert_eq!(got, "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n");
    }

    #[tokio::test]
    async fn an_error_in_a_stream_is_an_event() {
        let got = text(Numbers { next: 1, last: 1, fails: true }).await;
        assert!(got.starts_with("data: 1\n\ndata: {\"error\":{\"message\":\"gone\""), "{got}");
        assert!(got.ends_with("data: [DONE]\n\n"));
    }
}
