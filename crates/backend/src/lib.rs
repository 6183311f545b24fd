//! What a device must do for a model: the [`Backend`] trait, the inputs of a step, and the oracle.
//!
//! Data flows one way: `engine::runner` fills a [`StepInput`] from a Plan, [`Backend::submit`] uploads it once and
//! runs the model's [`Program`] (a fixed list of fused ops over fixed buffers), [`Backend::collect`] hands back the
//! sampled tokens in a [`StepOutput`].
//!
//! A program takes no per-step argument: everything that varies (token ids, positions, slots, pages, attention work
//! items, sampling parameters, and how many rows there are) is in the uploaded step. That is what lets a device record
//! the program once, as a CUDA graph, and replay it for every batch.
//!
//! Not here: any real kernel (`cpu`, `cuda`), any model (`model`), any decision about which requests run (`sched`).
#![forbid(unsafe_code)]

mod attention_plan;
mod float8;
mod format;
mod kv_spec;
mod mock;
mod ops;
pub mod quant;
mod random_fill;
mod reference;
pub mod sampling;
mod step;
mod tensor;
pub mod testing;

pub use attention_plan::{
    AttentionCut, AttentionHeads, CutOptions, MAX_SPLIT_QUERIES, PlannerOptions, SequenceQueries,
    ShareOptions, SharedPrefixes, choose_split, first_key, plan_attention, plan_relay,
};
pub use float8::{e4m3_from_f32, e4m3_to_f32};
pub use format::WeightFormat;
pub use kv_spec::{KvDtype, KvLayerSpec, KvSpec};
pub use mock::{MockBackend, MockOptions};
pub use ops::{
    Activation, Attention, Backend, BackendError, BufferId, DeviceInfo, Embed, GatedLinear, Linear, Logits,
    Norm, NormKind, NormOp, Ops, Precision, Program, Qkv, RopeId, RopeSpec, RopeStyle, Sharing, StepLimits,
    StepMemory, VectorId, WeightId, WeightUse,
};
pub use random_fill::RandomFill;
pub use reference::ReferenceBackend;
pub use step::{
    AttentionItem, AttentionMerge, AttentionPlan, BlockCopy, DeviceSpan, NO_PARTIAL, RowLists, SampleRow,
    Sampled, StepInput, StepKind, StepOutput, TokenCount,
};
pub use tensor::{SharedBytes, Tensor, TensorError};
