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

/// Room for one event with a token, so that it is not grown into from nothing.
const USUAL_FRAME_BYTES: usize = 512;
/// Stands for the text in an event from which a [`TextTemplate`] is made.
pub const TEXT_MARK: &str = "<the text of the next token>";

/// Events that wait to be sent.
#[derive(Debug, Default)]
pub struct Events {
    bytes: Vec<u8>,
}

/// An event of which only one text changes from token to token: all else is serialised once.
#[derive(Clone, Debug)]
pub struct TextTemplate {
    before: Vec<u8>,
    after: Vec<u8>,
}

impl TextTemplate {
    /// From an event that has [`TEXT_MARK`] where the text goes. `None` if it is not there exactly once, which only a
    /// strange name of a model can bring about.
    pub fn new(event: &impl Serialize) -> Option<Self> {
        let mut events = Events::default();
        events.push(event);
        let whole = String::from_utf8(events.bytes).ok()?;
        let (before, after) = whole.split_once(&format!("\"{TEXT_MARK}\""))?;
        let once = !after.contains(TEXT_MARK) && !before.contains(TEXT_MARK);
        once.then(|| Self { before: before.as_bytes().to_vec(), after: after.as_bytes().to_vec() })
    }
}

impl Events {
    pub fn push(&mut self, event: &impl Serialize) {
        self.bytes.extend_from_slice(b"data: ");
        self.push_json(event);
        self.bytes.extend_from_slice(b"\n\n");
    }

    /// A line of JSON, for the APIs that stream such.
    pub fn push_line(&mut self, value: &impl Serialize) {
        self.push_json(value);
        self.bytes.push(b'\n');
    }

    /// An event with a name, for the APIs that name theirs.
    pub fn push_named(&mut self, name: &str, event: &impl Serialize) {
        self.bytes.extend_from_slice(b"event: ");
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(b'\n');
        self.push(event);
    }

    /// The template's event with this text: the same bytes as [`Events::push`], at a fraction of the work.
    pub fn push_text(&mut self, template: &TextTemplate, text: &str) {
        if self.bytes.capacity() == 0 {
            self.bytes.reserve(USUAL_FRAME_BYTES);
        }
        self.bytes.extend_from_slice(&template.before);
        self.push_json(&text);
        self.bytes.extend_from_slice(&template.after);
    }

    fn push_json(&mut self, value: &impl Serialize) {
        serde_json::to_writer(&mut self.bytes, value)
            .expect("our types serialise, and memory takes all bytes");
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

/// The answer whose body are the source's lines of JSON.
pub fn lines(source: impl EventSource) -> Response {
    let mut response = response(source);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    response
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

    #[test]
    fn a_template_gives_the_same_bytes() {
        #[derive(Serialize)]
        struct Event<'a> {
            id: &'a str,
            choices: [Choice<'a>; 1],
            usage: Option<u32>,
        }
        #[derive(Serialize)]
        struct Choice<'a> {
            index: u32,
            text: &'a str,
        }
        let event = |id, text| Event { id, choices: [Choice { index: 1, text }], usage: None };
        let template = TextTemplate::new(&event("x", TEXT_MARK)).expect("the mark is there once");
        for text in ["", " a", "\"quoted\"\n\u{1}", "é🦙", TEXT_MARK] {
            let (mut plain, mut filled) = (Events::default(), Events::default());
            plain.push(&event("x", text));
            filled.push_text(&template, text);
            assert_eq!(plain.bytes, filled.bytes, "{text:?}");
        }
        assert!(TextTemplate::new(&event("x", "no mark")).is_none());
        assert!(TextTemplate::new(&event(TEXT_MARK, TEXT_MARK)).is_none());
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
