//! An answer as it comes: an iterator for ordinary code, a stream for async code.

use std::pin::Pin;
use std::task::{Context, Poll};

use baton_core::{FinishReason, RequestOutput};
use baton_engine::{EngineHandle, OutputReceiver};
use baton_text::OutputStream;

use crate::{Answer, Error};

/// A request that the engine has.
pub(crate) struct RunningRequest {
    pub engine: EngineHandle,
    pub receiver: OutputReceiver,
    pub num_prompt_tokens: usize,
}

/// The text of an answer, a piece at a time. With `n` above 1 only the first continuation is shown. Dropping it ends the
/// request.
///
/// Ordinary code iterates over it. Async code uses it as a [`futures_core::Stream`], on any executor.
pub struct Stream {
    request: RunningRequest,
    choices: Vec<Choice>,
    num_cached_tokens: usize,
    failed: bool,
}

struct Choice {
    stream: Option<OutputStream>,
    text: String,
    /// How much of the text was given out.
    shown: usize,
    num_tokens: usize,
    finished: Option<FinishReason>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("request", &self.request.receiver.request_id()).finish_non_exhaustive()
    }
}

impl Stream {
    pub(crate) fn new(request: RunningRequest, streams: Vec<Option<OutputStream>>) -> Self {
        let choice = |stream| Choice { stream, text: String::new(), shown: 0, num_tokens: 0, finished: None };
        Self {
            request,
            choices: streams.into_iter().map(choice).collect(),
            num_cached_tokens: 0,
            failed: false,
        }
    }

    /// Why the answer ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.choices[0].finished
    }

    /// Waits for the end, and gives all continuations whole.
    pub(crate) fn collect_all(mut self) -> Result<Vec<Answer>, Error> {
        while self.choices.iter().any(|choice| choice.finished.is_none()) {
            match self.request.receiver.recv() {
                Some(output) => self.absorb(output?)?,
                None => break,
            }
        }
        let (prompt_tokens, cached_tokens) = (self.request.num_prompt_tokens, self.num_cached_tokens);
        let answer = |choice: Choice| Answer {
            text: choice.text,
            finish_reason: choice.finished.unwrap_or(FinishReason::Abort),
            prompt_tokens,
            cached_tokens,
            completion_tokens: choice.num_tokens,
        };
        Ok(self.choices.drain(..).map(answer).collect())
    }

    fn absorb(&mut self, output: RequestOutput) -> Result<(), Error> {
        self.num_cached_tokens = self.num_cached_tokens.max(output.num_cached_tokens as usize);
        if let Some(reason) = output.shape_failure {
            let message = format!("the output cannot be given the wanted shape any further: {reason}");
            return Err(Error::usage(message, "make the shape simpler"));
        }
        for sequence in output.outputs {
            let index = sequence.index as usize;
            let Some(choice) = self.choices.get_mut(index).filter(|choice| choice.finished.is_none()) else {
                continue;
            };
            if sequence.finish_reason == Some(FinishReason::Error) {
                return Err(Error::usage("a step of the engine failed", "its stats name the last failure"));
            }
            // The token that ended the sequence belongs to the output, but not to the text.
            let shown = sequence.token_ids.len() - usize::from(sequence.stop_token_id.is_some());
            choice.num_tokens += sequence.token_ids.len();
            choice.finished = sequence.finish_reason;
            let Some(stream) = &mut choice.stream else { continue };
            let mut delta = stream.push(&sequence.token_ids[..shown])?;
            choice.text.push_str(&delta.text);
            if delta.stopped.is_none() && sequence.finish_reason.is_some() {
                delta = stream.finish()?;
                choice.text.push_str(&delta.text);
            }
            if delta.stopped.is_some() {
                choice.finished = Some(FinishReason::Stop);
                // The engine does not know stop strings.
                self.request.engine.abort_sequence(self.request.receiver.request_id(), sequence.index)?;
            }
        }
        Ok(())
    }

    /// What of the first continuation was not given out.
    fn piece(&mut self) -> Option<String> {
        let choice = &mut self.choices[0];
        let piece = choice.text[choice.shown..].to_owned();
        choice.shown = choice.text.len();
        (!piece.is_empty()).then_some(piece)
    }

    fn fail(&mut self, error: Error) -> Result<String, Error> {
        self.failed = true;
        Err(error)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.choices.iter().any(|choice| choice.finished.is_none()) {
            // An engine that has ended has nothing to abort.
            let _ = self.request.engine.abort(self.request.receiver.request_id());
        }
    }
}

impl Iterator for Stream {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(piece) = self.piece() {
                return Some(Ok(piece));
            }
            if self.failed || self.choices[0].finished.is_some() {
                return None;
            }
            match self.request.receiver.recv()? {
                Ok(output) => {
                    if let Err(error) = self.absorb(output) {
                        return Some(self.fail(error));
                    }
                }
                Err(error) => return Some(self.fail(error.into())),
            }
        }
    }
}

impl futures_core::Stream for Stream {
    type Item = Result<String, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(piece) = self.piece() {
                return Poll::Ready(Some(Ok(piece)));
            }
            if self.failed || self.choices[0].finished.is_some() {
                return Poll::Ready(None);
            }
            match self.request.receiver.poll_recv(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(Ok(output))) => {
                    if let Err(error) = self.absorb(output) {
                        return Poll::Ready(Some(self.fail(error)));
                    }
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(self.fail(error.into()))),
            }
        }
    }
}
