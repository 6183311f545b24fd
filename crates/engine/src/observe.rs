//! What the loop tells of itself while it runs: its heartbeat, the spans of a step, and what went out to clients.
//!
//! The [`Heartbeat`] is shared memory that any thread may read without waiting for a step: metrics read its figures, a
//! watchdog reads when the loop last moved and what it was doing. An [`Observer`] is called on the loop thread itself,
//! so it must be quick; it gets numbers only and can change nothing.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_backend::DeviceSpan;
use baton_core::RequestId;
use baton_sched::{KvEvent, QueueRoom};

use crate::relay::StepRelay;
use crate::{BlockStore, EngineStats};

/// What the loop is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Nothing to do: asleep until a command comes.
    Idle = 0,
    /// Taking in requests and aborts.
    Commands = 1,
    /// Deciding what the next step computes.
    Schedule = 2,
    /// Filling the step's arrays and handing them to the device.
    Launch = 3,
    /// Waiting for the device, which also samples.
    Wait = 4,
    /// Moving the requests on.
    Apply = 5,
    /// Handing outputs to their clients.
    Deliver = 6,
}

impl Phase {
    const ALL: [Self; 7] =
        [Self::Idle, Self::Commands, Self::Schedule, Self::Launch, Self::Wait, Self::Apply, Self::Deliver];

    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Commands => "commands",
            Self::Schedule => "schedule",
            Self::Launch => "launch",
            Self::Wait => "wait",
            Self::Apply => "apply",
            Self::Deliver => "deliver",
        }
    }
}

/// When the loop last moved, and its figures as of then.
#[derive(Debug)]
pub struct Heartbeat {
    origin: Instant,
    phase: AtomicU8,
    entered_us: AtomicU64,
    step: AtomicU64,
    num_tokens: AtomicU64,
    num_seqs: AtomicU64,
    ended: AtomicBool,
    stats: Mutex<EngineStats>,
    queue_room: Mutex<QueueRoom>,
    /// Others may ask these while no step runs, so their figures are read when they are wanted.
    stores: OnceLock<Vec<Arc<dyn BlockStore>>>,
}

/// A reading of the [`Heartbeat`].
#[derive(Clone, Copy, Debug)]
pub struct HeartbeatSnapshot {
    pub phase: Phase,
    /// How long the loop has been in this phase.
    pub for_time: Duration,
    /// The step that is computed or was computed last, and its size.
    pub step: u64,
    pub num_tokens: u64,
    pub num_seqs: u64,
    /// The loop thread has ended.
    pub ended: bool,
}

impl Heartbeat {
    pub(crate) fn new(stats: EngineStats) -> Self {
        Self {
            origin: Instant::now(),
            phase: AtomicU8::new(Phase::Idle as u8),
            entered_us: AtomicU64::new(0),
            step: AtomicU64::new(0),
            num_tokens: AtomicU64::new(0),
            num_seqs: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            stats: Mutex::new(stats),
            queue_room: Mutex::default(),
            stores: OnceLock::new(),
        }
    }

    fn enter(&self, phase: Phase, now: Instant) {
        self.entered_us.store((now - self.origin).as_micros() as u64, Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Release);
    }

    pub(crate) fn publish(&self, stats: EngineStats, queue_room: QueueRoom) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
        *self.queue_room.lock().unwrap_or_else(PoisonError::into_inner) = queue_room;
    }

    /// How many more requests of a tenant may wait, as of the last step: whoever asks for more need not be read.
    pub fn queue_room(&self, tenant: u32) -> usize {
        self.queue_room.lock().unwrap_or_else(PoisonError::into_inner).of(tenant)
    }

    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(crate) fn set_stores(&self, stores: Vec<Arc<dyn BlockStore>>) {
        let _ = self.stores.set(stores);
    }

    /// The figures after the last step, those of KV stores as of now.
    pub fn stats(&self) -> EngineStats {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(stores) = self.stores.get() {
            stats.tiers.stores = stores.iter().map(|store| store.stats()).collect();
        }
        stats
    }

    pub fn snapshot(&self) -> HeartbeatSnapshot {
        let phase = Phase::ALL[usize::from(self.phase.load(Ordering::Acquire)) % Phase::ALL.len()];
        let entered = Duration::from_micros(self.entered_us.load(Ordering::Relaxed));
        HeartbeatSnapshot {
            phase,
            for_time: self.origin.elapsed().saturating_sub(entered),
            step: self.step.load(Ordering::Relaxed),
            num_tokens: self.num_tokens.load(Ordering::Relaxed),
            num_seqs: self.num_seqs.load(Ordering::Relaxed),
            ended: self.ended.load(Ordering::Acquire),
        }
    }
}

/// A span of time that the loop spent in one phase.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub phase: Phase,
    pub start: Instant,
    pub end: Instant,
}

/// A step that was handed to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepReport {
    pub step: u64,
    pub num_tokens: usize,
    /// Tokens drawn after prompts that end in this step. Those of decodes are as many as they read.
    pub num_first_tokens: usize,
    pub num_seqs: usize,
}

impl StepReport {
    fn new(plan: &baton_sched::Plan) -> Self {
        let samples = plan.seqs.iter().flat_map(|seq| &seq.samples);
        Self {
            step: plan.step,
            num_tokens: plan.num_tokens(),
            num_first_tokens: samples.filter(|sample| sample.num_output_tokens == 0).count(),
            num_seqs: plan.seqs.len(),
        }
    }
}

/// A step that the device has computed.
#[derive(Clone, Copy, Debug)]
pub struct DeviceReport {
    pub step: StepReport,
    /// Every sequence of it had one token.
    pub is_decode: bool,
    pub span: DeviceSpan,
}

/// Sequences of a step that read together, when it was handed to the device.
#[derive(Clone, Debug)]
pub struct RelayReport {
    pub step: u64,
    pub at: Instant,
    pub relay: StepRelay,
}

/// One turn of the loop: it may hand over a step while it waits for an earlier one.
#[derive(Clone, Copy, Debug)]
pub struct TurnReport<'a> {
    /// Steps whose results have come so far.
    pub num_steps: u64,
    pub num_tokens: usize,
    pub spans: &'a [Span],
    /// What was shared in the steps that were handed over.
    pub relay: &'a [RelayReport],
    /// Steps whose results came in this turn, where the device tells when it worked on them.
    pub device: &'a [DeviceReport],
}

/// New tokens of one request.
#[derive(Clone, Copy, Debug)]
pub struct OutputReport {
    /// Continuations that got tokens, and how many tokens in all.
    pub num_sequences: usize,
    pub num_tokens: usize,
    pub num_prompt_tokens: usize,
    /// Since the request's last tokens; `None` for its first.
    pub since_last: Option<Duration>,
    pub since_submitted: Duration,
}

/// Called on the loop thread.
pub trait Observer: Send {
    /// Before any of the step's outputs reach a client.
    fn step(&mut self, report: &StepReport);
    fn turn(&mut self, report: &TurnReport<'_>);
    fn output(&mut self, report: &OutputReport);
    /// What came and went in the prefix cache, where that is asked for.
    fn kv_events(&mut self, _events: &[KvEvent]) {}
}

/// Observes nothing.
impl Observer for () {
    fn step(&mut self, _: &StepReport) {}
    fn turn(&mut self, _: &TurnReport<'_>) {}
    fn output(&mut self, _: &OutputReport) {}
}

/// The engine's own notes of one turn of the loop.
#[derive(Debug)]
pub(crate) struct StepNotes {
    pub(crate) heartbeat: Arc<Heartbeat>,
    spans: Vec<Span>,
    /// Requests in the plans of this turn, and when they were planned.
    pub(crate) scheduled: Vec<(RequestId, Instant)>,
    pub(crate) steps: Vec<StepReport>,
    relay: Vec<RelayReport>,
    device: Vec<DeviceReport>,
}

impl StepNotes {
    pub(crate) fn new(stats: EngineStats) -> Self {
        Self {
            heartbeat: Arc::new(Heartbeat::new(stats)),
            spans: Vec::new(),
            scheduled: Vec::new(),
            steps: Vec::new(),
            relay: Vec::new(),
            device: Vec::new(),
        }
    }

    /// Closes the span of the last phase and opens the next.
    pub(crate) fn enter(&mut self, phase: Phase) {
        let now = Instant::now();
        if let Some(last) = self.spans.last_mut() {
            last.end = now;
        }
        self.spans.push(Span { phase, start: now, end: now });
        self.heartbeat.enter(phase, now);
    }

    pub(crate) fn planned(&mut self, plan: &baton_sched::Plan) {
        let now = Instant::now();
        self.scheduled.extend(plan.seqs.iter().map(|seq| (seq.request_id, now)));
        let report = StepReport::new(plan);
        self.steps.push(report);
        self.heartbeat.step.store(plan.step, Ordering::Relaxed);
        self.heartbeat.num_tokens.store(report.num_tokens as u64, Ordering::Relaxed);
        self.heartbeat.num_seqs.store(report.num_seqs as u64, Ordering::Relaxed);
    }

    /// Nothing is noted of a step in which nothing is shared.
    pub(crate) fn shared(&mut self, step: u64, relay: &StepRelay) {
        if !relay.groups.is_empty() {
            self.relay.push(RelayReport { step, at: Instant::now(), relay: relay.clone() });
        }
    }

    pub(crate) fn computed(&mut self, plan: &baton_sched::Plan, span: DeviceSpan) {
        let step = StepReport::new(plan);
        self.device.push(DeviceReport { step, is_decode: step.num_tokens == step.num_seqs, span });
    }

    /// Ends the turn: hands it to the observer and starts the next.
    pub(crate) fn finish(&mut self, num_steps: u64, observer: &mut dyn Observer) {
        if let Some(last) = self.spans.last_mut() {
            last.end = Instant::now();
        }
        let num_tokens = self.steps.iter().map(|step| step.num_tokens).sum();
        observer.turn(&TurnReport {
            num_steps,
            num_tokens,
            spans: &self.spans,
            relay: &self.relay,
            device: &self.device,
        });
        self.clear();
    }

    /// Forgets the turn, where nobody asked.
    pub(crate) fn clear(&mut self) {
        self.spans.clear();
        self.scheduled.clear();
        self.steps.clear();
        self.relay.clear();
        self.device.clear();
    }
}
