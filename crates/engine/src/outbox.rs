//! The way from the engine to one client: a box that holds at most one pending output.
//!
//! The engine never waits for a client. What a slow client has not taken yet is merged into the one pending output,
//! so a box holds at most the tokens of its own request, whoever reads it and however slowly. A client that drops its
//! receiver closes the box, which the engine sees at its next step as an abort.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use baton_core::{RequestId, RequestOutput};

use crate::EngineError;

#[derive(Debug, Default)]
struct State {
    pending: Option<Result<RequestOutput, EngineError>>,
    /// No output follows the pending one.
    ended: bool,
    /// The receiver is gone.
    closed: bool,
    waker: Option<Waker>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is plain data that is never left half-changed, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine's side.
#[derive(Debug)]
pub(crate) struct Outbox(Arc<Shared>);

/// The client's side. Dropping it aborts the request.
#[derive(Debug)]
pub struct OutputReceiver {
    request_id: RequestId,
    shared: Arc<Shared>,
}

pub(crate) fn outbox(request_id: RequestId) -> (Outbox, OutputReceiver) {
    let shared = Arc::new(Shared::default());
    (Outbox(Arc::clone(&shared)), OutputReceiver { request_id, shared })
}

impl Outbox {
    /// Hands over an output, merging it with one the client has not taken yet. False if the client is gone.
    pub(crate) fn push(&self, output: Result<RequestOutput, EngineError>) -> bool {
        let mut state = self.0.lock();
        if state.closed {
            return false;
        }
        state.ended |= output.as_ref().map_or(true, |output| output.finished);
        state.pending = Some(match (state.pending.take(), output) {
            (Some(Ok(mut pending)), Ok(output)) => {
                pending.extend(output);
                Ok(pending)
            }
            (_, output) => output,
        });
        let waker = state.waker.take();
        drop(state);
        self.0.changed.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.lock().closed
    }
}

impl Drop for Outbox {
    /// An engine that goes away leaves no client waiting.
    fn drop(&mut self) {
        let ended = self.0.lock().ended;
        if !ended {
            self.push(Err(EngineError::Stopped));
        }
    }
}

impl OutputReceiver {
    pub fn request_id(&self) -> RequestId {
        self.request_id
    }

    /// Waits for the next output; `None` after the last one.
    pub fn recv(&mut self) -> Option<Result<RequestOutput, EngineError>> {
        let mut state = self.shared.lock();
        loop {
            if let Some(output) = state.pending.take() {
                return Some(output);
            }
            if state.ended {
                return None;
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The same for an async client.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<RequestOutput, EngineError>>> {
        let mut state = self.shared.lock();
        if let Some(output) = state.pending.take() {
            return Poll::Ready(Some(output));
        }
        if state.ended {
            return Poll::Ready(None);
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for OutputReceiver {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
    }
}

#[cfg(test)]
mod tests {
    use baton_core::{FinishReason, SequenceOutput};

    use super::*;

    fn output(index: u32, token_id: u32, finished: bool) -> RequestOutput {
        RequestOutput {
            request_id: RequestId(1),
            outputs: vec![SequenceOutput {
                index,
                token_ids: vec![token_id],
                logprobs: Vec::new(),
                cumulative_logprob: 0.0,
                finish_reason: finished.then_some(FinishReason::Stop),
                stop_token_id: None,
            }],
            prompt_logprobs: Vec::new(),
            num_cached_tokens: 0,
            finished,
        }
    }

    #[test]
    fn a_slow_client_gets_everything_in_one_piece() {
        let (outbox, mut receiver) = outbox(RequestId(1));
        assert!(outbox.push(Ok(output(0, 5, false))));
        assert!(outbox.push(Ok(output(1, 6, false))));
        assert!(outbox.push(Ok(output(0, 7, true))));
        let got = receiver.recv().unwrap().unwrap();
        assert_eq!(got.outputs[0].token_ids, [5, 7]);
        assert_eq!(got.outputs[1].token_ids, [6]);
        assert!(got.finished);
        assert!(receiver.recv().is_none());
    }

    #[test]
    fn a_gone_client_is_seen() {
        let (outbox, receiver) = outbox(RequestId(1));
        drop(receiver);
        assert!(outbox.is_closed());
        assert!(!outbox.push(Ok(output(0, 5, false))));
    }

    #[test]
    fn a_gone_engine_is_an_error_not_a_hang() {
        let (outbox, mut receiver) = outbox(RequestId(1));
        drop(outbox);
        assert!(matches!(receiver.recv(), Some(Err(EngineError::Stopped))));
        assert!(receiver.recv().is_none());
    }

    #[test]
    fn wakes_an_async_client() {
        struct Count(std::sync::atomic::AtomicUsize);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
        }
        let count = Arc::new(Count(0.into()));
        let waker = Waker::from(Arc::clone(&count));
        let (outbox, mut receiver) = outbox(RequestId(1));
        assert!(receiver.poll_recv(&mut Context::from_waker(&waker)).is_pending());
        outbox.push(Ok(output(0, 5, true)));
        assert_eq!(count.0.load(std::sync::atomic::Ordering::SeqCst), 1);
        assert!(matches!(receiver.poll_recv(&mut Context::from_waker(&waker)), Poll::Ready(Some(Ok(_)))));
        assert!(matches!(receiver.poll_recv(&mut Context::from_waker(&waker)), Poll::Ready(None)));
    }
}
