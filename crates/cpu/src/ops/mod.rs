//! The ops of a step. Each module is one op: checks of shapes first, then one fork and join of the pool.
//!
//! An op that finds something wrong ends the step, and `submit` returns the error.

mod attention;
mod embed;
mod encoder;
mod experts;
mod gated;
mod latent;
mod linear;
mod logits;
mod norm;
mod positions;
mod product;
mod qkv;
mod route;
mod sample;

use baton_backend::{BackendError, BufferId, Norm, NormKind, Op, StepInput, StepOutput, VectorId, WeightId};

use crate::backend::CpuBackend;
use crate::buffers::Matrix;
use crate::kernels::rows::NormArgs;
use crate::weights::{PackedMatrix, Weight};

/// One step while it runs.
pub(crate) struct Step<'a> {
    backend: &'a mut CpuBackend,
    input: &'a StepInput,
    output: &'a mut StepOutput,
    /// The rows without logits were dropped.
    keeps_logit_rows: bool,
}

type OpResult = Result<(), BackendError>;

fn wrong(cause: &str) -> BackendError {
    BackendError::Device { cause: format!("an op of the program is not valid: {cause}") }
}

fn require(ok: bool, cause: &str) -> OpResult {
    if ok { Ok(()) } else { Err(wrong(cause)) }
}

impl<'a> Step<'a> {
    pub fn new(backend: &'a mut CpuBackend, input: &'a StepInput, output: &'a mut StepOutput) -> Self {
        Self { backend, input, output, keeps_logit_rows: false }
    }

    pub fn run(&mut self, op: &Op) -> OpResult {
        match op {
            Op::Embed(op) => self.run_embed(op),
            Op::AddPositions(op) => self.run_add_positions(*op),
            Op::Norm(op) => self.run_norm(op),
            Op::Linear(op) => self.run_linear(op),
            Op::ActivatedLinear(op) => self.run_activated(op),
            Op::GatedLinear(op) => self.run_gated(op),
            Op::Route(op) => self.run_route(op),
            Op::ExpertGated(op) => self.run_expert_gated(op),
            Op::ExpertLinear(op) => self.run_expert_linear(op),
            Op::HeadLinear(op) => self.run_head_linear(op),
            Op::LatentKv(op) => self.run_latent_kv(op),
            Op::Qkv(op) => self.run_qkv(op),
            Op::Attention(op) => self.run_attention(op),
            Op::EncoderAttention(op) => self.run_encoder_attention(op),
            Op::KeepLogitRows(op) => self.run_keep(&op.buffers),
            Op::Logits(op) => self.run_logits(op),
            Op::Sample(op) => self.run_sample(op.logits),
        }
    }

    /// Rows that ops have at this point of the program.
    fn num_rows(&self) -> usize {
        if self.keeps_logit_rows { self.input.logit_rows.len() } else { self.input.num_tokens() }
    }

    /// Each row goes to the place of one before it that nobody needs any more, or that was moved already.
    fn run_keep(&mut self, buffers: &[BufferId]) -> OpResult {
        if self.keeps_logit_rows || !self.input.can_keep_logit_rows() {
            return Ok(());
        }
        for &id in buffers {
            let buffer = self.buffer(id, self.input.num_tokens())?;
            for (to, &from) in self.input.logit_rows.iter().enumerate() {
                if from as usize > to {
                    // SAFETY: both rows lie in the buffer (rows of logits were checked against the step's) and differ.
                    unsafe {
                        let source = buffer.row(from as usize).cast_const();
                        std::ptr::copy_nonoverlapping(source, buffer.row(to), buffer.cols);
                    }
                }
            }
        }
        self.keeps_logit_rows = true;
        Ok(())
    }

    /// A buffer that has at least `rows` rows.
    fn buffer(&self, id: BufferId, rows: usize) -> Result<Matrix, BackendError> {
        let buffer = self.backend.buffers.get(id.0 as usize).ok_or_else(|| wrong("no such buffer"))?;
        let matrix = buffer.matrix();
        require(matrix.rows >= rows, "a buffer has fewer rows than the step")?;
        Ok(matrix)
    }

    fn weight(&self, id: WeightId) -> Result<&Weight, BackendError> {
        self.backend.weights.get(id.0 as usize).ok_or_else(|| wrong("no such weight"))
    }

    fn packed(&self, id: WeightId) -> Result<(&Weight, &PackedMatrix), BackendError> {
        let weight = self.weight(id)?;
        let packed = weight.packed.as_ref().ok_or_else(|| wrong("a weight was loaded for lookups only"))?;
        Ok((weight, packed))
    }

    /// The values of a vector of exactly `len`.
    fn vector(&self, id: VectorId, len: usize) -> Result<*const f32, BackendError> {
        let (buffer, have) =
            self.backend.vectors.get(id.0 as usize).ok_or_else(|| wrong("no such vector"))?;
        require(*have == len, "a vector has the wrong length")?;
        Ok(buffer.matrix().row(0).cast_const())
    }

    /// The values of an optional vector, or null.
    fn optional_vector(&self, id: Option<VectorId>, len: usize) -> Result<*const f32, BackendError> {
        id.map_or(Ok(std::ptr::null()), |id| self.vector(id, len))
    }

    fn norm_args(&self, norm: &Norm, len: usize) -> Result<NormArgs, BackendError> {
        let (bias, centred) = match norm.kind {
            NormKind::Rms => (None, false),
            NormKind::Layer { bias } => (bias, true),
        };
        let weight = self.vector(norm.weight, len)?;
        Ok(NormArgs { weight, bias: self.optional_vector(bias, len)?, centred, eps: norm.eps })
    }
}
