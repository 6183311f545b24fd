//! The ops of a step. Each module is one op: checks of shapes first, then one fork and join of the pool.
//!
//! An op that finds something wrong ends the step: the ops after it do nothing and `submit` returns the error.

mod attention;
mod embed;
mod gated;
mod linear;
mod logits;
mod norm;
mod product;
mod qkv;
mod sample;

use baton_backend::{
    Attention, BackendError, BufferId, Embed, GatedLinear, Linear, Logits, Norm, NormKind, NormOp, Ops, Qkv,
    StepInput, StepOutput, VectorId, WeightId,
};

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
    error: Option<BackendError>,
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
        Self { backend, input, output, keeps_logit_rows: false, error: None }
    }

    /// The first error of the ops.
    pub fn finish(self) -> OpResult {
        self.error.map_or(Ok(()), Err)
    }

    fn guarded(&mut self, op: impl FnOnce(&mut Self) -> OpResult) {
        if self.error.is_none() {
            self.error = op(self).err();
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

impl Ops for Step<'_> {
    fn embed(&mut self, op: &Embed) {
        self.guarded(|step| step.run_embed(op));
    }

    fn norm(&mut self, op: &NormOp) {
        self.guarded(|step| step.run_norm(op));
    }

    fn linear(&mut self, op: &Linear) {
        self.guarded(|step| step.run_linear(op));
    }

    fn gated_linear(&mut self, op: &GatedLinear) {
        self.guarded(|step| step.run_gated(op));
    }

    fn qkv(&mut self, op: &Qkv) {
        self.guarded(|step| step.run_qkv(op));
    }

    fn attention(&mut self, op: &Attention) {
        self.guarded(|step| step.run_attention(op));
    }

    fn keep_logit_rows(&mut self, buffers: &[BufferId]) {
        self.guarded(|step| step.run_keep(buffers));
    }

    fn logits(&mut self, op: &Logits) {
        self.guarded(|step| step.run_logits(op));
    }

    fn sample(&mut self, logits: BufferId) {
        self.guarded(|step| step.run_sample(logits));
    }
}
