//! The ops a model is written in, and the life of a device: load, create, compile, submit, collect.
//!
//! Ops are fused at inference granularity: a decoder layer is five of them (`qkv`, `attention`, `linear`,
//! `gated_linear`, `linear`). They name buffers and weights by small handles, write only into buffers made before
//! *ready*, and take their row count from the current step.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    AttentionTuning, DeviceSpan, HostBlocks, KvSpec, Program, ProgramId, StepInput, StepOutput, Tensor,
};

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub struct $name(pub u32);
    };
}

handle! {
    /// A weight matrix, stored as the backend likes it.
    WeightId
}
handle! {
    /// A vector of f32: norm weights, biases, ALiBi slopes, attention sinks.
    VectorId
}
handle! {
    /// Activations, `[max rows, cols]`, in the backend's own precision.
    BufferId
}
handle! {
    /// A table of rotary frequencies.
    RopeId
}

#[derive(Debug, Error)]
pub enum BackendError {
    #[error(
        "{what} needs {needed_bytes} bytes, but the device has {free_bytes} free: use a smaller model, --max-model-len, --max-num-batched-tokens or --kv-cache-memory"
    )]
    OutOfMemory { what: String, needed_bytes: u64, free_bytes: u64 },
    #[error("this device cannot run {what}")]
    Unsupported { what: String },
    #[error("op {op} of the program ({name}) is not valid: {cause}")]
    InvalidOp { op: usize, name: &'static str, cause: String },
    #[error("the device failed: {cause}")]
    Device { cause: String },
}

/// How exactly a device computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Activations are rounded to what is fastest: to bf16 on a GPU, to 8 bits beside quantised weights on a CPU.
    #[default]
    Fast,
    /// Everything is f32, so that devices differ by the order of their sums alone.
    Full,
}

/// What the device is, for logs and the memory plan.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// As users name it in `--device`: `cpu`, `cuda:0`.
    pub name: String,
    /// For people: processor name, instruction set, threads.
    pub description: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// The block size its kernels like best.
    pub block_size: usize,
    /// Bytes of one element of a buffer.
    pub activation_bytes: usize,
    /// The most KV to take unasked, on a device whose memory other programs use as well.
    pub kv_cap_bytes: Option<u64>,
    /// How many steps may be submitted before the first is collected.
    pub max_steps_in_flight: usize,
    /// It works on many things at once and wants larger steps than a CPU.
    pub wants_large_steps: bool,
    /// How it likes attention to be cut into items. For [`crate::AttentionCut`] alone.
    pub attention: AttentionTuning,
    /// Penalised tokens and biases that the samples of a step may bring; 0: as many as there are.
    pub max_sample_entries: usize,
    /// Rough speeds, from which the scheduler weighs swapping against computing again.
    pub macs_per_second: f64,
    pub swap_bytes_per_second: f64,
}

/// What steps take of a device besides weights, buffers and the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepMemory {
    /// Scratch, kernels and what libraries keep: taken when it is told.
    pub workspace_bytes: u64,
    /// Recorded steps: still to be taken.
    pub graph_bytes: u64,
}

/// The largest step there will ever be. Buffers are sized by it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    pub max_tokens: usize,
    pub max_seqs: usize,
    pub max_logit_rows: usize,
    pub max_samples: usize,
    pub max_model_len: usize,
    pub vocab_size: usize,
}

/// How a weight will be used, so that the backend can pack it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WeightUse {
    /// Input of `linear`, `gated_linear`, `qkv`, `logits`.
    Linear,
    /// Rows are looked up by `embed`.
    Embedding,
    /// Both: a tied head.
    EmbeddingAndLinear,
    /// As many matrices of one shape, one below the other: input of `expert_gated` and `expert_linear`.
    Experts(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Rotates `(x[i], x[i + dim/2])`: Hugging Face checkpoints, and GGUF of qwen and gemma.
    Half,
    /// Rotates `(x[2i], x[2i + 1])`: GGUF of llama and mistral, whose q and k rows are permuted.
    Interleaved,
}

/// Rotary embedding: angle = position × `inv_freq[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// `[rotary_dim / 2]`, with linear, llama3, yarn or dynamic scaling already applied.
    pub inv_freq: Vec<f32>,
    /// Multiplies cos and sin (yarn's attention factor); 1 otherwise.
    pub scale: f32,
    pub style: RopeStyle,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum NormKind {
    Rms,
    /// With mean subtracted; `bias` is added.
    Layer {
        bias: Option<VectorId>,
    },
}

/// A normalisation over the last dimension: `x / rms(x) * weight`, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Norm {
    pub kind: NormKind,
    pub weight: VectorId,
    pub eps: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activation {
    Silu,
    /// Gemma's gelu with tanh.
    GeluTanh,
    /// The exact gelu, by erf.
    Gelu,
    /// OPT.
    Relu,
    /// Nemotron.
    ReluSquared,
    /// gpt-oss, of a gate and what it lets through only: `gate · sigmoid(1.702 · gate) · (up + 1)`, where gate is at most 7 and up is
    /// within 7 of 0.
    ClampedSwiglu,
}

impl Activation {
    /// Of [`Activation::ClampedSwiglu`].
    pub const SWIGLU_ALPHA: f32 = 1.702;
    pub const SWIGLU_LIMIT: f32 = 7.0;

    /// It is a function of a gate and of what the gate lets through, and of nothing less.
    pub fn needs_gate(self) -> bool {
        self == Self::ClampedSwiglu
    }
}

/// What the norms of q and k are taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormSpan {
    /// Each head, with one weight of `head_dim` for all of them (qwen3, gemma3).
    #[default]
    Head,
    /// Each head, with a weight of its own: `[heads * head_dim]` (cohere, stablelm).
    EachHead,
    /// All heads together, with a weight of `[heads * head_dim]` (olmo2).
    Row,
}

impl NormSpan {
    /// How long the weight is for `num_heads` heads.
    pub fn weight_len(self, num_heads: usize, head_dim: usize) -> usize {
        match self {
            Self::Head => head_dim,
            Self::EachHead | Self::Row => num_heads * head_dim,
        }
    }
}

/// `output = embedding[token_ids] * scale`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embed {
    pub weight: WeightId,
    pub scale: f32,
    pub output: BufferId, // [tokens, hidden]
}

/// `output += table[positions]`: learned position embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddPositions {
    pub weight: WeightId, // [positions, hidden]
    pub output: BufferId, // [tokens, hidden]
}

/// `output = norm(input)`, or `output += norm(input)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormOp {
    pub input: BufferId, // [tokens, dim]
    pub norm: Norm,
    pub output: BufferId, // [tokens, dim]
    pub accumulate: bool,
}

/// `output = weight · norm(input) + bias`, or `output += …` (the residual).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Linear {
    pub input: BufferId, // [tokens, in]
    pub norm: Option<Norm>,
    pub weight: WeightId,       // [out, in]
    pub bias: Option<VectorId>, // [out]
    pub output: BufferId,       // [tokens, out]
    pub accumulate: bool,
}

/// `output = activation(gate) * up`, where `[gate; up] = weight · norm(input) + bias`; see [`Activation::ClampedSwiglu`] for the one that
/// is a function of both.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GatedLinear {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub weight: WeightId,       // [2 * intermediate, hidden], gate rows first
    pub bias: Option<VectorId>, // [2 * intermediate]
    pub activation: Activation,
    pub output: BufferId, // [tokens, intermediate]
}

/// `output = activation(weight · norm(input) + bias)`: an MLP without a gate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActivatedLinear {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub weight: WeightId,       // [intermediate, hidden]
    pub bias: Option<VectorId>, // [intermediate]
    pub activation: Activation,
    pub output: BufferId, // [tokens, intermediate]
}

/// `[q; k; v] = weight · norm(input) + bias`; norm and rotate q and k; write k and v into the step's slots of
/// `layer`, q into `output`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Qkv {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub weight: WeightId, // [(heads + 2 * kv_heads) * head_dim, hidden]
    pub bias: Option<VectorId>,
    pub q_norm: Option<Norm>,
    pub k_norm: Option<Norm>,
    pub norm_span: NormSpan,
    pub rope: Option<RopeId>,
    pub num_heads: usize,
    /// Which layer of the KV cache.
    pub layer: usize,
    pub output: BufferId, // [tokens, heads * head_dim]
}

/// `output = softmax(mask(softcap(scale · q · kᵀ))) · v` by the work items of `plan`, over the paged KV of `layer`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    pub layer: usize,
    /// Index into `StepInput::attention`.
    pub plan: usize,
    /// Keys further back than this are not seen.
    pub window: Option<u32>,
    pub num_heads: usize,
    pub scale: f32,
    /// `softcap * tanh(score / softcap)` where set.
    pub softcap: Option<f32>,
    /// One slope per head: adds `slope · (k − q)` to the scores.
    pub alibi: Option<VectorId>,
    /// One score per head of a key that every query sees and whose value is nothing: it takes its part of the softmax.
    pub sinks: Option<VectorId>,
    pub query: BufferId,  // [tokens, heads * head_dim]
    pub output: BufferId, // [tokens, heads * head_dim]
}

/// `output = softmax(scale · q · kᵀ) · v` over all rows of a token's sequence, those after it as well, and without a cache: q and k
/// are rotated first, where a table is given. `StepInput::slots` has the row at which each token's sequence begins.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EncoderAttention {
    pub qkv: BufferId, // [tokens, 3 * heads * head_dim]; q and k are changed by a rotation
    pub rope: Option<RopeId>,
    pub num_heads: usize,
    pub scale: f32,
    pub output: BufferId, // [tokens, heads * head_dim]
}

/// `output = softcap(weight · norm(input[logit_rows]) + bias)`, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logits {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub weight: WeightId,       // [vocab, hidden]
    pub bias: Option<VectorId>, // [vocab]
    pub softcap: Option<f32>,
    pub output: BufferId, // [logit rows, vocab]
}

/// From here on only the rows count whose logits are wanted: nothing mixes rows any more. They are moved to the front of these
/// buffers, in their order, and all later ops have so many rows. A backend may pass over it: the logits are the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepLogitRows {
    pub buffers: Vec<BufferId>,
}

/// Draws the step's samples from a buffer of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    pub logits: BufferId, // [logit rows, vocab]
}

/// A device that is ready: from now on it runs steps, and allocates nothing for them.
pub trait StepExecutor: Send {
    /// Starts a step: uploads the input, moves blocks, runs the program. At most two steps are in flight.
    fn submit(&mut self, input: &StepInput, program: ProgramId) -> Result<(), BackendError>;
    /// Waits for the oldest step in flight and takes its result.
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), BackendError>;

    /// From when to when the device worked on the step that was collected last, if it can tell. Asking waits for nothing.
    fn last_step_span(&self) -> Option<DeviceSpan> {
        None
    }

    /// The first `rows` rows of a buffer after the last collected step, as f32: for tests and embeddings.
    fn read_buffer(&mut self, buffer: BufferId, rows: usize) -> Result<Vec<f32>, BackendError>;

    /// The blocks of the host tier, for others than steps. `None` where the device does not show them.
    fn host_blocks(&mut self) -> Option<Arc<dyn HostBlocks>> {
        None
    }
}

/// A device that is being set up with weights, buffers, programs and a KV cache, each at most a few hundred times. All of this
/// may allocate and may fail. Then whoever runs steps needs no more of it than a [`StepExecutor`].
pub trait Backend: StepExecutor {
    fn device(&self) -> DeviceInfo;

    /// The parts stand one below the other as one matrix; each may have its own format.
    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError>;
    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError>;
    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError>;
    /// Sizes the step's own arrays and scratch. Called once, before any buffer.
    fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError>;
    /// `[rows, cols]`, with unspecified contents.
    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError>;
    /// `[rows, vocab]` of f32: what `logits` writes and `sample` reads, or `route` writes and experts read.
    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError>;
    /// Says before anything is loaded whether the device can keep such a cache.
    fn check_kv_spec(&self, _spec: &KvSpec) -> Result<(), BackendError> {
        Ok(())
    }
    /// Checks a program against all that was loaded and created, and keeps it. Several may be compiled; an equal one has the
    /// same id. The layers of the cache that it names are checked when the cache is there.
    fn compile(&mut self, program: &Program) -> Result<ProgramId, BackendError>;
    /// Runs the largest steps of a program before there is a cache, so that what they take besides is known when the rest
    /// goes to the cache, and chooses what is chosen by time.
    fn profile_run(&mut self, _program: ProgramId, _cache: &KvSpec) -> Result<StepMemory, BackendError> {
        Ok(StepMemory::default())
    }
    /// Called once. Host blocks are the swap tier.
    fn create_kv_cache(
        &mut self,
        spec: &KvSpec,
        num_device_blocks: usize,
        num_host_blocks: usize,
    ) -> Result<(), BackendError>;

    /// Records the decode steps of a program that had its profile run. Called at most once for each, when all else is made.
    fn warm_up(&mut self, _program: ProgramId) -> Result<(), BackendError> {
        Ok(())
    }

    /// Bytes of weights held by the device so far.
    fn weight_bytes(&self) -> u64;
}
