//! The ops a model is written in, and the life of a device: load, create, submit, collect.
//!
//! Ops are fused at inference granularity: a decoder layer is five of them (`qkv`, `attention`, `linear`,
//! `gated_linear`, `linear`). They name buffers and weights by small handles, write only into buffers made before
//! *ready*, and take their row count from the current step.

use thiserror::Error;

use crate::{DeviceSpan, KvSpec, StepInput, StepOutput, Tensor};

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(pub u32);
    };
}

handle! {
    /// A weight matrix, stored as the backend likes it.
    WeightId
}
handle! {
    /// A vector of f32: norm weights, biases, ALiBi slopes.
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
    /// Pairs of an attention item and a kv head that it works on at once: with fewer, contexts are split over several
    /// items. 0: they are never split.
    pub attention_units: usize,
    /// Query heads times queries of one kv head that it likes in an item; 0: it has no wish.
    pub attention_rows: usize,
    /// How it reads what several sequences have in common.
    pub sharing: Sharing,
    /// Memory for partial results of attention; 0: as much as a step needs.
    pub partial_bytes: usize,
    /// Penalised tokens and biases that the samples of a step may bring; 0: as many as there are.
    pub max_sample_entries: usize,
    /// Rough speeds, from which the scheduler weighs swapping against computing again.
    pub macs_per_second: f64,
    pub swap_bytes_per_second: f64,
}

/// When a device reads keys that several sequences have in common once for all of them, and what that costs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// Shared spans begin and end at multiples of so many keys. 0: each sequence reads its own.
    pub border: usize,
    /// Sizes of heads for which it has kernels that gain from it; empty: all.
    pub head_dims: &'static [usize],
    /// The fewest sequences that share a span.
    pub min_seqs: usize,
    /// Pairs of an item of a shared span and a kv head that it works on at once; 0: spans are never split.
    pub units: usize,
    /// Reading a key for a whole item takes as long as so many sequences reading it, each for itself.
    pub read_cost: usize,
    /// What a query costs that merges shared results with its own, and what sharing costs each layer of a step however little
    /// is shared: in bytes of keys and values that sequences read for themselves in that time. 0 bytes a query: a default.
    pub query_bytes: usize,
    pub step_bytes: usize,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightUse {
    /// Input of `linear`, `gated_linear`, `qkv`, `logits`.
    Linear,
    /// Rows are looked up by `embed`.
    Embedding,
    /// Both: a tied head.
    EmbeddingAndLinear,
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

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    Rms,
    /// With mean subtracted; `bias` is added.
    Layer {
        bias: Option<VectorId>,
    },
}

/// A normalisation over the last dimension: `x / rms(x) * weight`, in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    pub kind: NormKind,
    pub weight: VectorId,
    pub eps: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// Gemma's gelu with tanh.
    GeluTanh,
    /// The exact gelu, by erf.
    Gelu,
}

/// `output = embedding[token_ids] * scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Embed {
    pub weight: WeightId,
    pub scale: f32,
    pub output: BufferId, // [tokens, hidden]
}

/// `output = norm(input)`, or `output += norm(input)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormOp {
    pub input: BufferId, // [tokens, dim]
    pub norm: Norm,
    pub output: BufferId, // [tokens, dim]
    pub accumulate: bool,
}

/// `output = weight · norm(input) + bias`, or `output += …` (the residual).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linear {
    pub input: BufferId, // [tokens, in]
    pub norm: Option<Norm>,
    pub weight: WeightId,       // [out, in]
    pub bias: Option<VectorId>, // [out]
    pub output: BufferId,       // [tokens, out]
    pub accumulate: bool,
}

/// `output = activation(gate) * up`, where `[gate; up] = weight · norm(input) + bias`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedLinear {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub weight: WeightId,       // [2 * intermediate, hidden], gate rows first
    pub bias: Option<VectorId>, // [2 * intermediate]
    pub activation: Activation,
    pub output: BufferId, // [tokens, intermediate]
}

/// `[q; k; v] = weight · norm(input) + bias`; norm and rotate q and k; write k and v into the step's slots of
/// `layer`, q into `output`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Qkv {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub weight: WeightId, // [(heads + 2 * kv_heads) * head_dim, hidden]
    pub bias: Option<VectorId>,
    /// Over each head's `head_dim` (qwen3, gemma3).
    pub q_norm: Option<Norm>,
    pub k_norm: Option<Norm>,
    pub rope: Option<RopeId>,
    pub num_heads: usize,
    /// Which layer of the KV cache.
    pub layer: usize,
    pub output: BufferId, // [tokens, heads * head_dim]
}

/// `output = softmax(mask(softcap(scale · q · kᵀ))) · v` by the work items of `plan`, over the paged KV of `layer`.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// One slope a head: adds `slope · (k − q)` to the scores.
    pub alibi: Option<VectorId>,
    pub query: BufferId,  // [tokens, heads * head_dim]
    pub output: BufferId, // [tokens, heads * head_dim]
}

/// `output = softcap(weight · norm(input[logit_rows]))`, in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logits {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub weight: WeightId, // [vocab, hidden]
    pub softcap: Option<f32>,
    pub output: BufferId, // [logit rows, vocab]
}

/// What a program may do. Ops report nothing: a failure is returned by the `submit` or `collect` around them.
pub trait Ops {
    fn embed(&mut self, op: &Embed);
    fn norm(&mut self, op: &NormOp);
    fn linear(&mut self, op: &Linear);
    fn gated_linear(&mut self, op: &GatedLinear);
    fn qkv(&mut self, op: &Qkv);
    fn attention(&mut self, op: &Attention);
    /// From here on only the rows count whose logits are wanted: nothing mixes rows any more. They are moved to the front of
    /// these buffers, in their order, and all later ops have so many rows. A backend may pass over it: the logits are the
    /// same.
    fn keep_logit_rows(&mut self, _buffers: &[BufferId]) {}
    fn logits(&mut self, op: &Logits);
    /// Draws the step's samples from a buffer of logits.
    fn sample(&mut self, logits: BufferId);
}

/// A model's forward pass: the same ops over the same buffers in every step.
pub trait Program: Send {
    fn run(&self, ops: &mut dyn Ops);
}

/// A device with its weights, buffers and KV cache.
///
/// Before *ready*: `load_*`, `create_*`, each at most a few hundred times; these may allocate and may fail.
/// After: only `submit` and `collect`, which allocate nothing on the device.
pub trait Backend: Send {
    fn device(&self) -> DeviceInfo;

    /// The parts stand one below the other as one matrix; each may have its own format.
    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError>;
    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError>;
    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError>;
    /// Sizes the step's own arrays and scratch. Called once, before any buffer.
    fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError>;
    /// `[rows, cols]`, with unspecified contents.
    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError>;
    /// `[rows, vocab]` of f32: what `logits` writes and `sample` reads. The same as a buffer where those are f32 as well.
    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError> {
        self.create_buffer(rows, vocab_size)
    }
    /// Says before anything is loaded whether the device can keep such a cache.
    fn check_kv_spec(&self, _spec: &KvSpec) -> Result<(), BackendError> {
        Ok(())
    }
    /// Rehearses the largest steps of a program before there is a cache, so that what they take besides is known when the rest
    /// goes to the cache, and chooses what is chosen by time. Called at most once, when weights and buffers are there.
    fn rehearse(&mut self, _program: &dyn Program, _cache: &KvSpec) -> Result<StepMemory, BackendError> {
        Ok(StepMemory::default())
    }
    /// Called once. Host blocks are the swap tier.
    fn create_kv_cache(
        &mut self,
        spec: &KvSpec,
        num_device_blocks: usize,
        num_host_blocks: usize,
    ) -> Result<(), BackendError>;

    /// Records the decode steps of a program that was rehearsed. Called at most once, when all else is made.
    fn warm_up(&mut self, _program: &dyn Program) -> Result<(), BackendError> {
        Ok(())
    }

    /// Starts a step: uploads the input, moves blocks, runs the program. At most two steps are in flight.
    fn submit(&mut self, input: &StepInput, program: &dyn Program) -> Result<(), BackendError>;
    /// Waits for the oldest step in flight and takes its result.
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), BackendError>;

    /// From when to when the device worked on the step that was collected last, if it can tell. Asking waits for nothing.
    fn last_step_span(&self) -> Option<DeviceSpan> {
        None
    }

    /// The first `rows` rows of a buffer after the last collected step, as f32: for tests and embeddings.
    fn read_buffer(&mut self, buffer: BufferId, rows: usize) -> Result<Vec<f32>, BackendError>;
    /// Bytes of weights held by the device so far.
    fn weight_bytes(&self) -> u64;
}
