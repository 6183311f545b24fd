//! The way from the engine to one client: a box that holds at most one pending output.
//!
//! The engine never waits for a client. What a slow client has not taken yet is merged into the one pending output,
//! so a box holds at most the tokens of its own request, whoever reads it and however slowly. A client that drops its
//! receiver closes the box, which the engine sees at its next step as an abort.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use baton_core::{RequestId, RequestOutput};

use crate::EngineError;
use crate::observe::{Observer, OutputReport};

/// When what happened to a request, as the engine saw it: a slow client changes nothing here.
#[derive(Clone, Copy, Debug)]
pub struct RequestTimes {
    pub submitted: Instant,
    /// Taken into the queue.
    pub accepted: Option<Instant>,
    /// First part of a step.
    pub started: Option<Instant>,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
}

/// The times of a request that somebody else reads. It keeps no request alive.
#[derive(Clone, Debug)]
pub struct RequestClock(Arc<Shared>);

#[derive(Debug)]
struct State {
    times: RequestTimes,
    pending: Option<Result<RequestOutput, EngineError>>,
    /// No output follows the pending one.
    ended: bool,
    waker: Option<Waker>,
    /// A thread sleeps in `recv`. To wake one that does not costs a system call a token.
    sleeps: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// The receiver is gone. Looked at in every step for every request, hence outside the lock.
    closed: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is plain data that is never left half-changed, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine's side.
#[derive(Debug)]
pub(crate) struct Outbox {
    shared: Arc<Shared>,
    num_prompt_tokens: usize,
    started: bool,
}

/// The client's side. Dropping it aborts the request.
#[derive(Debug)]
pub struct OutputReceiver {
    request_id: RequestId,
    shared: Arc<Shared>,
}

pub(crate) fn outbox(request_id: RequestId, num_prompt_tokens: usize) -> (Outbox, OutputReceiver) {
    let times = RequestTimes {
        submitted: Instant::now(),
        accepted: None,
        started: None,
        first_token: None,
        last_token: None,
    };
    let state = State { times, pending: None, ended: false, waker: None, sleeps: false };
    let (state, changed) = (Mutex::new(state), Condvar::new());
    let shared = Arc::new(Shared { state, changed, closed: AtomicBool::new(false) });
    let outbox = Outbox { shared: Arc::clone(&shared), num_prompt_tokens, started: false };
    (outbox, OutputReceiver { request_id, shared })
}

impl Outbox {
    /// The engine has taken the request into its queue.
    pub(crate) fn accept(&mut self) {
        let mut state = self.shared.lock();
        state.times.accepted = Some(Instant::now());
        if let Some(waker) = state.waker.take() {
            drop(state);
            waker.wake();
        }
    }

    /// The request was part of a step that was planned at this time. True for the first such step.
    pub(crate) fn start(&mut self, at: Instant) -> bool {
        let is_first = !std::mem::replace(&mut self.started, true);
        if is_first {
            self.shared.lock().times.started = Some(at);
        }
        is_first
    }

    pub(crate) fn is_started(&self) -> bool {
        self.started
    }

    /// Hands over what a step brought, after the observer has been told of it. False if the client is gone.
    pub(crate) fn deliver(&self, output: RequestOutput, now: Instant, observer: &mut dyn Observer) -> bool {
        let mut state = self.shared.lock();
        if let Some(report) = self.report(&mut state.times, &output, now) {
            observer.output(&report);
        }
        self.put(state, Ok(output))
    }

    /// Notes the time of new tokens and says how they came; `None` where there are none.
    fn report(&self, times: &mut RequestTimes, output: &RequestOutput, now: Instant) -> Option<OutputReport> {
        let sizes = output.outputs.iter().map(|output| output.token_ids.len()).filter(|&size| size > 0);
        let (num_sequences, num_tokens) = sizes.fold((0, 0), |(count, sum), size| (count + 1, sum + size));
        if num_tokens == 0 {
            return None;
        }
        let since_last = times.last_token.map(|last| now - last);
        times.first_token.get_or_insert(now);
        times.last_token = Some(now);
        Some(OutputReport {
            num_sequences,
            num_tokens,
            num_prompt_tokens: self.num_prompt_tokens,
            since_last,
            since_submitted: now - times.submitted,
        })
    }

    /// Hands over an output or the reason why there is none. False if the client is gone.
    pub(crate) fn push(&self, output: Result<RequestOutput, EngineError>) -> bool {
        self.put(self.shared.lock(), output)
    }

    /// Merges an output with one the client has not taken yet, and wakes the client.
    fn put(&self, mut state: MutexGuard<'_, State>, output: Result<RequestOutput, EngineError>) -> bool {
        if self.is_closed() {
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
        let (waker, sleeps) = (state.waker.take(), std::mem::take(&mut state.sleeps));
        drop(state);
        if sleeps {
            self.shared.changed.notify_one();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }
}

impl Drop for Outbox {
    /// An engine that goes away leaves no client waiting.
    fn drop(&mut self) {
        let ended = self.shared.lock().ended;
        if !ended {
            self.push(Err(EngineError::Stopped));
        }
    }
}

impl OutputReceiver {
    pub fn request_id(&self) -> RequestId {
        self.request_id
    }

    pub fn times(&self) -> RequestTimes {
        self.shared.lock().times
    }

    /// For whoever wants to know how far the request is while another one reads it.
    pub fn clock(&self) -> RequestClock {
        RequestClock(Arc::clone(&self.shared))
    }

    /// Ready when the engine has taken the request into its queue, or has refused it.
    pub fn poll_accepted(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), EngineError>> {
        let mut state = self.shared.lock();
        if state.times.accepted.is_some() {
            return Poll::Ready(Ok(()));
        }
        match state.pending.take() {
            Some(Err(error)) => return Poll::Ready(Err(error)),
            other => state.pending = other,
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
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
            state.sleeps = true;
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

impl RequestClock {
    pub fn times(&self) -> RequestTimes {
        self.0.lock().times
    }
}

impl Drop for OutputReceiver {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
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
            pooled: Vec::new(),
            drafts: baton_core::DraftCounts::default(),
            finished,
            shape_failure: None,
        }
    }

    #[test]
    fn a_slow_client_gets_everything_in_one_piece() {
        let (outbox, mut receiver) = outbox(RequestId(1), 3);
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
        let (outbox, receiver) = outbox(RequestId(1), 3);
        drop(receiver);
        assert!(outbox.is_closed());
        assert!(!outbox.push(Ok(output(0, 5, false))));
    }

    #[test]
    fn a_gone_engine_is_an_error_not_a_hang() {
        let (outbox, mut receiver) = outbox(RequestId(1), 3);
        drop(outbox);
        assert!(matches!(receiver.recv(), Some(Err(EngineError::Stopped))));
        assert!(receiver.recv().is_none());
    }

    #[test]
    fn a_refusal_is_known_before_any_output() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut accepting, mut receiver) = outbox(RequestId(1), 3);
        assert!(receiver.poll_accepted(&mut cx).is_pending());
        accepting.accept();
        assert!(matches!(receiver.poll_accepted(&mut cx), Poll::Ready(Ok(()))));
        let (refusing, mut receiver) = outbox(RequestId(2), 3);
        refusing.push(Err(EngineError::Busy { limit: 1 }));
        assert!(matches!(receiver.poll_accepted(&mut cx), Poll::Ready(Err(EngineError::Busy { .. }))));
    }

    #[test]
    fn times_are_the_engines() {
        struct Reports(Vec<OutputReport>);
        impl Observer for Reports {
            fn step(&mut self, _: &crate::StepReport) {}
            fn turn(&mut self, _: &crate::TurnReport<'_>) {}
            fn output(&mut self, report: &OutputReport) {
                self.0.push(*report);
            }
        }
        let (mut outbox, receiver) = outbox(RequestId(1), 3);
        assert!(outbox.start(Instant::now()) && !outbox.start(Instant::now()) && outbox.is_started());
        let mut reports = Reports(Vec::new());
        let without_tokens = RequestOutput { outputs: Vec::new(), ..output(0, 5, false) };
        for output in [without_tokens, output(0, 5, false), output(0, 6, false)] {
            assert!(outbox.deliver(output, Instant::now(), &mut reports));
        }
        let [first, second] = reports.0[..] else { panic!("{:?}", reports.0) };
        assert_eq!((first.num_prompt_tokens, first.num_tokens, first.since_last), (3, 1, None));
        assert!(second.since_last.is_some());
        let times = receiver.times();
        assert!(times.submitted <= times.first_token.unwrap() && times.first_token <= times.last_token);
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
        let (outbox, mut receiver) = outbox(RequestId(1), 3);
        assert!(receiver.poll_recv(&mut Context::from_waker(&waker)).is_pending());
        outbox.push(Ok(output(0, 5, true)));
        assert_eq!(count.0.load(std::sync::atomic::Ordering::SeqCst), 1);
        assert!(matches!(receiver.poll_recv(&mut Context::from_waker(&waker)), Poll::Ready(Some(Ok(_)))));
        assert!(matches!(receiver.poll_recv(&mut Context::from_waker(&waker)), Poll::Ready(None)));
    }
}
