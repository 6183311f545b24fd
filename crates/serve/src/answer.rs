//! What the answers of all generating routes have in common: a head, and the way of updates into events.

use std::task::{Context, Poll, ready};

use crate::error::ApiError;
use crate::generation::{Generation, Update};
use crate::ids;
use crate::logprobs::TokenNames;
use crate::params::Show;
use crate::sse::{EventSource, Events};
use crate::types::common::Usage;

/// What chat and completions say in every answer and every chunk.
#[derive(Debug)]
pub struct ResponseHeader {
    pub id: String,
    pub created: u64,
    pub show: Show,
}

impl ResponseHeader {
    pub fn new(prefix: &str, show: Show) -> Self {
        Self { id: format!("{prefix}-{}", ids::unique()), created: ids::unix_seconds(), show }
    }

    pub fn names<'a>(&self, generation: &'a Generation) -> TokenNames<'a> {
        TokenNames { model: &generation.app().model, as_ids: self.show.tokens_as_ids }
    }

    /// The `usage` of a chunk: absent unless asked for, and `null` in all but the last one unless wanted in each.
    #[allow(clippy::option_option, reason = "absent and null are two things on the wire")]
    pub fn chunk_usage(&self, generation: &Generation, is_last: bool) -> Option<Option<Usage>> {
        let is_due = is_last || self.show.continuous_usage;
        self.show.include_usage.then(|| is_due.then(|| generation.usage()))
    }
}

/// Writes an answer as events, in the words of one API.
pub trait Writer: Send + Unpin + 'static {
    fn begin(&mut self, generation: &Generation, out: &mut Events);
    fn update(&mut self, generation: &Generation, update: Update, out: &mut Events);
    fn end(&mut self, generation: &Generation, out: &mut Events);

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        out.push(&error.body());
    }

    fn ends_with_done(&self) -> bool {
        true
    }
}

/// An answer under way, and who writes it.
#[derive(Debug)]
pub struct Streamed<W> {
    generation: Generation,
    writer: W,
    updates: Vec<Update>,
    begun: bool,
}

impl<W: Writer> Streamed<W> {
    pub fn new(generation: Generation, writer: W) -> Self {
        Self { generation, writer, updates: Vec::new(), begun: false }
    }
}

impl<W: Writer> EventSource for Streamed<W> {
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Events) -> Poll<Result<bool, ApiError>> {
        if !std::mem::replace(&mut self.begun, true) {
            self.writer.begin(&self.generation, out);
            return Poll::Ready(Ok(true));
        }
        let more = ready!(self.generation.poll_updates(cx, &mut self.updates))?;
        for update in self.updates.drain(..) {
            self.writer.update(&self.generation, update, out);
        }
        if !more {
            self.writer.end(&self.generation, out);
        }
        Poll::Ready(Ok(more))
    }

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        self.writer.fail(error, out);
    }

    fn ends_with_done(&self) -> bool {
        self.writer.ends_with_done()
    }
}
