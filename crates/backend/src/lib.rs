//! What a device must do for a model: the [`Backend`] trait, the inputs of a step, and the oracle.
//!
//! Data flows one way: `engine::runner` fills a [`StepInput`] from a Plan, [`Backend::submit`] uploads it once and
//! runs the model's [`Program`] (a list of fused ops over fixed buffers, compiled before), [`Backend::collect`] hands back the
//! sampled tokens in a [`StepOutput`].
//!
//! A program takes no per-step argument: everything that varies (token ids, positions, slots, pages, attention work
//! items, sampling parameters, and how many rows there are) is in the uploaded step. That is what lets a device record
//! the program once, as a CUDA graph, and replay it for every batch.
//!
//! Not here: any real kernel (`cpu`, `cuda`), any model (`model`), any decision about which requests run (`sched`).
#![forbid(unsafe_code)]

mod attention_plan;
pub mod conformance;
mod expert_ops;
mod float8;
mod format;
pub mod graph;
mod host_blocks;
mod kv_spec;
mod latent_ops;
mod mock;
mod ops;
mod program;
pub mod quant;
mod random_fill;
mod reference;
pub mod sampling;
mod step;
mod step_check;
mod tensor;
pub mod testing;

pub use attention_plan::{
    AttentionCut, AttentionHeads, AttentionTuning, BranchQueries, CutOptions, MAX_SPLIT_QUERIES,
    PlannerOptions, SequenceQueries, ShareOptions, SharedPrefixes, Sharing, choose_split, first_key,
    plan_attention, plan_relay,
};
pub use baton_core::TokenCount;
pub use expert_ops::{ExpertGated, ExpertLinear, GroupScore, Route, RouteGroups, RouteScores};
pub use float8::{e4m3_from_f32, e4m3_to_f32};
pub use format::WeightFormat;
pub use host_blocks::HostBlocks;
pub use kv_spec::{KvDtype, KvGroupSpec, KvLayerSpec, KvSpec};
pub use latent_ops::{HeadLinear, LatentKv};
pub use mock::{MockBackend, MockOptions};
pub use ops::{
    ActivatedLinear, Activation, AddPositions, Attention, Backend, BackendError, BufferId, DeviceInfo, Embed,
    EncoderAttention, GatedLinear, KeepLogitRows, Linear, Logits, Norm, NormKind, NormOp, NormSpan,
    Precision, Qkv, RopeId, RopeSpec, RopeStyle, Sample, StepExecutor, StepLimits, StepMemory, VectorId,
    WeightId, WeightUse,
};
pub use program::{
    BufferShape, CompiledProgram, Handles, KvLayerNeeds, Op, OpRow, Program, ProgramId, Programs, StepNeeds,
    WeightPart, WeightShape,
};
pub use random_fill::{RandomFill, RawFill};
pub use reference::ReferenceBackend;
pub use step::{
    AttentionItem, AttentionMerge, AttentionPlan, BlockCopy, DeviceSpan, Fetch, NO_PARTIAL, RowLists,
    SampleRow, Sampled, StepInput, StepKind, StepOutput,
};
pub use step_check::CacheShape;
pub use tensor::{Scales, SharedBytes, Tensor, TensorError};
