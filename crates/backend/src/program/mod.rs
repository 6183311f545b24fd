//! A model's forward pass as data: a list of ops over buffers and weights, the same in every step.
//!
//! `model` builds a [`Program`]; [`crate::Backend::compile`] sees it once and answers with a [`ProgramId`], by which steps run
//! it. A device may hold several: a target and its draft, an encoder, one stage of a pipeline. What is checked when one is
//! compiled, and what is known of its handles, is the same for all backends and written here; how an op is computed is theirs:
//! each has one `match` over [`Op`].

mod check;
mod check_experts;
mod check_latent;
mod handles;
mod print;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use check::{KvLayerNeeds, StepNeeds};
pub use handles::{BufferShape, Handles, WeightPart, WeightShape};
pub use print::OpRow;

use crate::{
    ActivatedLinear, AddPositions, Attention, BackendError, BufferId, Embed, EncoderAttention, ExpertGated,
    ExpertLinear, GatedLinear, HeadLinear, KeepLogitRows, KvSpec, LatentKv, Linear, Logits, NormOp, Qkv,
    Route, Sample, WeightId,
};

/// One fused step of a forward pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    Embed(Embed),
    AddPositions(AddPositions),
    Norm(NormOp),
    Linear(Linear),
    ActivatedLinear(ActivatedLinear),
    GatedLinear(GatedLinear),
    Route(Route),
    ExpertGated(ExpertGated),
    ExpertLinear(ExpertLinear),
    HeadLinear(HeadLinear),
    LatentKv(LatentKv),
    Qkv(Qkv),
    Attention(Attention),
    EncoderAttention(EncoderAttention),
    KeepLogitRows(KeepLogitRows),
    Logits(Logits),
    Sample(Sample),
}

impl Op {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embed(_) => "embed",
            Self::AddPositions(_) => "add_positions",
            Self::Norm(_) => "norm",
            Self::Linear(_) => "linear",
            Self::ActivatedLinear(_) => "activated_linear",
            Self::GatedLinear(_) => "gated_linear",
            Self::Route(_) => "route",
            Self::ExpertGated(_) => "expert_gated",
            Self::ExpertLinear(_) => "expert_linear",
            Self::HeadLinear(_) => "head_linear",
            Self::LatentKv(_) => "latent_kv",
            Self::Qkv(_) => "qkv",
            Self::Attention(_) => "attention",
            Self::EncoderAttention(_) => "encoder_attention",
            Self::KeepLogitRows(_) => "keep_logit_rows",
            Self::Logits(_) => "logits",
            Self::Sample(_) => "sample",
        }
    }

    /// The buffers it reads, apart from one that it adds to.
    pub fn reads(&self) -> Vec<BufferId> {
        match self {
            Self::Embed(_) | Self::AddPositions(_) => Vec::new(),
            Self::Norm(op) => vec![op.input],
            Self::Linear(op) => vec![op.input],
            Self::ActivatedLinear(op) => vec![op.input],
            Self::GatedLinear(op) => vec![op.input],
            Self::Route(op) => vec![op.input],
            Self::ExpertGated(op) => vec![op.input, op.routing],
            Self::ExpertLinear(op) => vec![op.input, op.routing],
            Self::HeadLinear(op) => vec![op.input],
            Self::LatentKv(op) => vec![op.latent, op.query],
            Self::Qkv(op) => vec![op.input],
            Self::Attention(op) => vec![op.query],
            Self::EncoderAttention(op) => vec![op.qkv],
            Self::KeepLogitRows(op) => op.buffers.clone(),
            Self::Logits(op) => vec![op.input],
            Self::Sample(op) => vec![op.logits],
        }
    }

    /// The buffer it writes or adds to.
    pub fn writes(&self) -> Option<BufferId> {
        match self {
            Self::Embed(op) => Some(op.output),
            Self::AddPositions(op) => Some(op.output),
            Self::Norm(op) => Some(op.output),
            Self::Linear(op) => Some(op.output),
            Self::ActivatedLinear(op) => Some(op.output),
            Self::GatedLinear(op) => Some(op.output),
            Self::Route(op) => Some(op.routing),
            Self::ExpertGated(op) => Some(op.output),
            Self::ExpertLinear(op) => Some(op.output),
            Self::HeadLinear(op) => Some(op.output),
            Self::LatentKv(op) => Some(op.output),
            Self::Qkv(op) => Some(op.output),
            Self::Attention(op) => Some(op.output),
            Self::EncoderAttention(op) => Some(op.output),
            Self::Logits(op) => Some(op.output),
            Self::KeepLogitRows(_) | Self::Sample(_) => None,
        }
    }

    /// The matrix it looks up in or multiplies with.
    pub fn weight(&self) -> Option<WeightId> {
        match self {
            Self::Embed(op) => Some(op.weight),
            Self::AddPositions(op) => Some(op.weight),
            Self::Linear(op) => Some(op.weight),
            Self::ActivatedLinear(op) => Some(op.weight),
            Self::GatedLinear(op) => Some(op.weight),
            Self::Route(op) => Some(op.weight),
            Self::ExpertGated(op) => Some(op.weight),
            Self::ExpertLinear(op) => Some(op.weight),
            Self::HeadLinear(op) => Some(op.weight),
            Self::Qkv(op) => Some(op.weight),
            Self::Logits(op) => Some(op.weight),
            Self::LatentKv(_)
            | Self::Norm(_)
            | Self::Attention(_)
            | Self::EncoderAttention(_)
            | Self::KeepLogitRows(_)
            | Self::Sample(_) => None,
        }
    }

    /// Whether it adds to what is in its output.
    pub fn accumulates(&self) -> bool {
        match self {
            Self::AddPositions(_) => true,
            Self::Norm(op) => op.accumulate,
            Self::Linear(op) => op.accumulate,
            Self::ExpertLinear(op) => op.accumulate,
            _ => false,
        }
    }
}

/// Ops in the order they run. It takes no argument: all that varies is in the step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Program {
    pub ops: Vec<Op>,
}

impl Program {
    pub fn new(ops: Vec<Op>) -> Self {
        Self { ops }
    }
}

/// A program that a backend has compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProgramId(pub u32);

/// A program that was checked, and what a step of it needs.
#[derive(Debug)]
pub struct CompiledProgram {
    pub ops: Vec<Op>,
    pub needs: StepNeeds,
}

/// The programs of a backend.
#[derive(Debug, Default)]
pub struct Programs {
    list: Vec<Arc<CompiledProgram>>,
    /// Of the KV cache, once there is one.
    cache: Option<KvSpec>,
}

impl Programs {
    /// Checks a program and keeps it. An equal one has the same id, so that whatever a device keeps for a program (recorded
    /// steps, choices of kernels) is kept once.
    pub fn compile(&mut self, program: &Program, handles: &Handles) -> Result<ProgramId, BackendError> {
        let id = |index: usize| ProgramId(index as u32);
        if let Some(index) = self.list.iter().position(|compiled| compiled.ops == program.ops) {
            return Ok(id(index));
        }
        let needs = check::check(program, handles)?;
        if let Some(cache) = &self.cache {
            needs.check_cache(cache)?;
        }
        self.list.push(Arc::new(CompiledProgram { ops: program.ops.clone(), needs }));
        Ok(id(self.list.len() - 1))
    }

    /// Shared, because a step changes the backend that holds it.
    pub fn get(&self, id: ProgramId) -> Result<Arc<CompiledProgram>, BackendError> {
        let program = self.list.get(id.0 as usize).cloned();
        program.ok_or_else(|| BackendError::Device { cause: format!("no program {} was compiled", id.0) })
    }

    /// Checks that every program, and each that comes later, finds its layers in the cache.
    pub fn set_cache(&mut self, cache: &KvSpec) -> Result<(), BackendError> {
        self.list.iter().try_for_each(|program| program.needs.check_cache(cache))?;
        self.cache = Some(cache.clone());
        Ok(())
    }
}
